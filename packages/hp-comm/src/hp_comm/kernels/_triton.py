"""The Triton kernels, one source for CUDA and Ascend; `hp_comm.kernels.launch` calls them.

The only file that imports triton. A program reads from a table where a piece of a tensor lies (see
`hp_comm.kernels.segments`) and walks over its rows: no index is divided, offsets are int64, what is
vectorised are two dims with fixed strides. The grid is ``(pieces, rows)``; a smaller one makes the
programs loop, which is how a device with few, long-lived cores is filled.

Nothing here checks anything: shapes, dtypes and tables come from the planner.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _first(shift):
    """The first piece of this program: the pieces of all tensors are dealt out as one row."""
    first = tl.program_id(0) + shift
    return tl.where(first >= tl.num_programs(0), first - tl.num_programs(0), first)


@triton.jit
def _pack_tensor(
    x, buffer, table, count, shift, rows, inner, x_row, b_row,
    X_IN: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_INNER)[None, :]
    for piece in range(_first(shift), count, tl.num_programs(0)):
        # the compiler cannot know how offsets are aligned, and would move elements one by one
        source = x + tl.multiple_of(tl.load(table + 2 * piece), ALIGN)
        target = buffer + tl.multiple_of(tl.load(table + 2 * piece + 1), ALIGN)
        for r in range(tl.program_id(1) * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
            # the start of a block may lie beyond 2^31 elements, the extent of a block may not
            start = tl.cast(r, tl.int64)
            for c in range(0, inner, BLOCK_INNER):
                here = (row + r < rows) & (column + c < inner)
                values = tl.load(
                    source + start * x_row + tl.cast(c, tl.int64) * X_IN
                    + row * x_row + column * X_IN,
                    mask=here,
                )  # fmt: skip
                tl.store(target + start * b_row + c + row * b_row + column, values, mask=here)


@triton.jit
def pack(
    x0, x1, x2, buffer, table, n0, n1, n2, shift1, shift2, rows0, rows1, rows2,
    inner0, inner1, inner2, x_row0, x_row1, x_row2, b_row0, b_row1, b_row2,
    X_IN0: tl.constexpr, X_IN1: tl.constexpr, X_IN2: tl.constexpr,
    BLOCK_ROWS0: tl.constexpr, BLOCK_ROWS1: tl.constexpr, BLOCK_ROWS2: tl.constexpr,
    BLOCK_INNER0: tl.constexpr, BLOCK_INNER1: tl.constexpr, BLOCK_INNER2: tl.constexpr,
    TENSORS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Copy pieces of up to three tensors into one buffer."""
    _pack_tensor(
        x0, buffer, table, n0, 0, rows0, inner0, x_row0, b_row0,
        X_IN0, ALIGN, BLOCK_ROWS0, BLOCK_INNER0,
    )  # fmt: skip
    if TENSORS > 1:
        _pack_tensor(
            x1, buffer, table + 2 * n0, n1, shift1, rows1, inner1, x_row1, b_row1,
            X_IN1, ALIGN, BLOCK_ROWS1, BLOCK_INNER1,
        )  # fmt: skip
    if TENSORS > 2:
        _pack_tensor(
            x2, buffer, table + 2 * (n0 + n1), n2, shift2, rows2, inner2, x_row2, b_row2,
            X_IN2, ALIGN, BLOCK_ROWS2, BLOCK_INNER2,
        )  # fmt: skip


@triton.jit
def _unpack_tensor(
    buffer, x, table, count, shift, rows, inner, x_row, b_row,
    X_IN: tl.constexpr, ALIGN: tl.constexpr, SUMMANDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_INNER)[None, :]
    width: tl.constexpr = 2 if SUMMANDS == 1 else 1 + 2 * SUMMANDS
    for piece in range(_first(shift), count, tl.num_programs(0)):
        line = table + width * piece
        target = x + tl.multiple_of(tl.load(line), ALIGN)
        for r in range(tl.program_id(1) * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
            start = tl.cast(r, tl.int64)
            for c in range(0, inner, BLOCK_INNER):
                here = (row + r < rows) & (column + c < inner)
                if SUMMANDS == 1:
                    source = buffer + tl.multiple_of(tl.load(line + 1), ALIGN)
                    values = tl.load(
                        source + start * b_row + c + row * b_row + column, mask=here
                    )  # fmt: skip
                else:
                    values = _sum_of_summands(
                        buffer, line + 1, start, row, c + column, rows - r, column + c < inner,
                        SUMMANDS, ALIGN, BLOCK_ROWS, BLOCK_INNER,
                    )  # fmt: skip
                tl.store(
                    target + start * x_row + tl.cast(c, tl.int64) * X_IN
                    + row * x_row + column * X_IN,
                    values, mask=here,
                )  # fmt: skip


@triton.jit
def _sum_of_summands(
    buffer, line, start, row, column, left, known,
    SUMMANDS: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    wide: tl.constexpr = tl.float64 if buffer.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK_ROWS, BLOCK_INNER), wide)
    for k in tl.static_range(SUMMANDS):
        offset = tl.load(line + 2 * k)
        stride = tl.multiple_of(tl.load(line + 2 * k + 1), ALIGN)
        # a mask of a row part and a column part: of another one Ascend loads single elements
        there = left
        if SUMMANDS > 1:
            there = tl.where(offset >= 0, left, 0)
        total += tl.load(
            buffer + tl.multiple_of(offset, ALIGN) + start * stride + row * stride + column,
            mask=(row < there) & known, other=0.0,
        ).to(wide)  # fmt: skip
    return total


@triton.jit
def unpack(
    buffer, x0, x1, x2, table, n0, n1, n2, shift1, shift2, rows0, rows1, rows2,
    inner0, inner1, inner2, x_row0, x_row1, x_row2, b_row0, b_row1, b_row2, table1, table2,
    X_IN0: tl.constexpr, X_IN1: tl.constexpr, X_IN2: tl.constexpr,
    SUMMANDS0: tl.constexpr, SUMMANDS1: tl.constexpr, SUMMANDS2: tl.constexpr,
    BLOCK_ROWS0: tl.constexpr, BLOCK_ROWS1: tl.constexpr, BLOCK_ROWS2: tl.constexpr,
    BLOCK_INNER0: tl.constexpr, BLOCK_INNER1: tl.constexpr, BLOCK_INNER2: tl.constexpr,
    TENSORS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Copy pieces of one buffer into up to three tensors; places of one position are summed."""
    _unpack_tensor(
        buffer, x0, table, n0, 0, rows0, inner0, x_row0, b_row0,
        X_IN0, ALIGN, SUMMANDS0, BLOCK_ROWS0, BLOCK_INNER0,
    )  # fmt: skip
    if TENSORS > 1:
        _unpack_tensor(
            buffer, x1, table + table1, n1, shift1, rows1, inner1, x_row1, b_row1,
            X_IN1, ALIGN, SUMMANDS1, BLOCK_ROWS1, BLOCK_INNER1,
        )  # fmt: skip
    if TENSORS > 2:
        _unpack_tensor(
            buffer, x2, table + table2, n2, shift2, rows2, inner2, x_row2, b_row2,
            X_IN2, ALIGN, SUMMANDS2, BLOCK_ROWS2, BLOCK_INNER2,
        )  # fmt: skip


@triton.jit
def _pair(j, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where both numbers of pair ``j`` lie in a head."""
    if INTERLEAVED:
        return 2 * j, 2 * j + 1
    else:
        return j, j + ROTARY // 2


@triton.jit
def pack_rotary(
    x, weight, cos, sin, buffer, table, count, rows, x_row, c_row, b_row, eps,
    SIZE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    X_IN: tl.constexpr, C_IN: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Copy heads into a buffer, normalised by their root mean square and rotated by position."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    rest = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
    first, second = _pair(pair, ROTARY, INTERLEAVED)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        line = table + 3 * piece
        for r in range(tl.program_id(1) * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
            start = tl.cast(r, tl.int64)
            inside = row + r < rows
            in_pair = inside & (pair < ROTARY // 2)
            in_rest = inside & (rest < SIZE)
            source = x + tl.multiple_of(tl.load(line), ALIGN) + start * x_row + row * x_row
            target = buffer + tl.multiple_of(tl.load(line + 2), ALIGN) + start * b_row + row * b_row
            scale = 1.0
            if NORM:
                square = tl.zeros((BLOCK_ROWS,), wide)
            if ROTARY > 0:
                a = tl.load(source + first * X_IN, mask=in_pair, other=0.0).to(wide)
                b = tl.load(source + second * X_IN, mask=in_pair, other=0.0).to(wide)
                if NORM:
                    square += tl.sum(a * a, 1) + tl.sum(b * b, 1)
            if ROTARY < SIZE:
                e = tl.load(source + rest * X_IN, mask=in_rest, other=0.0).to(wide)
                if NORM:
                    square += tl.sum(e * e, 1)
            if NORM:
                scale = (1.0 / tl.sqrt(square / SIZE + eps))[:, None]
            if ROTARY > 0:
                if NORM:
                    known = pair < ROTARY // 2
                    a *= scale * tl.load(weight + first, mask=known, other=0.0).to(wide)
                    b *= scale * tl.load(weight + second, mask=known, other=0.0).to(wide)
                angle = tl.load(line + 1) + start * c_row + row * c_row + pair * C_IN
                u = tl.load(cos + angle, mask=in_pair, other=0.0).to(wide)
                v = tl.load(sin + angle, mask=in_pair, other=0.0).to(wide)
                tl.store(target + first, a * u - b * v, mask=in_pair)
                tl.store(target + second, b * u + a * v, mask=in_pair)
            if ROTARY < SIZE:
                if NORM:
                    e *= scale * tl.load(weight + rest, mask=rest < SIZE, other=0.0).to(wide)
                tl.store(target + rest, e, mask=in_rest)


@triton.jit
def unpack_rotary(
    buffer, x, weight, cos, sin, grad, grad_weight, table, count, rows, x_row, g_row, c_row, eps,
    SIZE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    X_IN: tl.constexpr, C_IN: tl.constexpr, ALIGN: tl.constexpr, SUMMANDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The gradient of `pack_rotary`: sum what came back, rotate back, differentiate the norm.

    Each program writes its own row of ``grad_weight``; who called it sums them.
    """
    wide: tl.constexpr = tl.float64 if buffer.dtype.element_ty == tl.float64 else tl.float32
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    rest = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
    first, second = _pair(pair, ROTARY, INTERLEAVED)
    known = pair < ROTARY // 2
    if NORM:
        weight_a = tl.zeros((BLOCK_PAIRS,), wide)
        weight_b = tl.zeros((BLOCK_PAIRS,), wide)
        weight_e = tl.zeros((BLOCK_REST,), wide)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        line = table + (3 + 2 * SUMMANDS) * piece
        for r in range(tl.program_id(1) * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
            start = tl.cast(r, tl.int64)
            inside = row + r < rows
            in_pair = inside & known
            in_rest = inside & (rest < SIZE)
            target = grad + tl.multiple_of(tl.load(line + 1), ALIGN) + start * g_row + row * g_row
            if ROTARY > 0:
                ra = _sum_of_summands(
                    buffer, line + 3, start, row, first, rows - r, known,
                    SUMMANDS, ALIGN, BLOCK_ROWS, BLOCK_PAIRS,
                )  # fmt: skip
                rb = _sum_of_summands(
                    buffer, line + 3, start, row, second, rows - r, known,
                    SUMMANDS, ALIGN, BLOCK_ROWS, BLOCK_PAIRS,
                )  # fmt: skip
                angle = tl.load(line + 2) + start * c_row + row * c_row + pair * C_IN
                u = tl.load(cos + angle, mask=in_pair, other=0.0).to(wide)
                v = tl.load(sin + angle, mask=in_pair, other=0.0).to(wide)
                ga = ra * u + rb * v
                gb = rb * u - ra * v
            if ROTARY < SIZE:
                ge = _sum_of_summands(
                    buffer, line + 3, start, row, rest, rows - r, rest < SIZE,
                    SUMMANDS, ALIGN, BLOCK_ROWS, BLOCK_REST,
                )  # fmt: skip
            if NORM:
                source = x + tl.multiple_of(tl.load(line), ALIGN) + start * x_row + row * x_row
                square = tl.zeros((BLOCK_ROWS,), wide)
                inner = tl.zeros((BLOCK_ROWS,), wide)
                if ROTARY > 0:
                    a = tl.load(source + first * X_IN, mask=in_pair, other=0.0).to(wide)
                    b = tl.load(source + second * X_IN, mask=in_pair, other=0.0).to(wide)
                    wa = ga * tl.load(weight + first, mask=known, other=0.0).to(wide)
                    wb = gb * tl.load(weight + second, mask=known, other=0.0).to(wide)
                    square += tl.sum(a * a, 1) + tl.sum(b * b, 1)
                    inner += tl.sum(a * wa, 1) + tl.sum(b * wb, 1)
                if ROTARY < SIZE:
                    e = tl.load(source + rest * X_IN, mask=in_rest, other=0.0).to(wide)
                    we = ge * tl.load(weight + rest, mask=rest < SIZE, other=0.0).to(wide)
                    square += tl.sum(e * e, 1)
                    inner += tl.sum(e * we, 1)
                scale = 1.0 / tl.sqrt(square / SIZE + eps)
                # d(x * scale): the part along x is what the norm takes out
                along = (inner * scale * scale * scale / SIZE)[:, None]
                scale = scale[:, None]
                if ROTARY > 0:
                    weight_a += tl.sum(ga * a * scale, 0)
                    weight_b += tl.sum(gb * b * scale, 0)
                    ga = wa * scale - a * along
                    gb = wb * scale - b * along
                if ROTARY < SIZE:
                    weight_e += tl.sum(ge * e * scale, 0)
                    ge = we * scale - e * along
            if ROTARY > 0:
                tl.store(target + first, ga, mask=in_pair)
                tl.store(target + second, gb, mask=in_pair)
            if ROTARY < SIZE:
                tl.store(target + rest, ge, mask=in_rest)
    if NORM:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        own = grad_weight + tl.cast(program, tl.int64) * SIZE
        if ROTARY > 0:
            tl.store(own + first, weight_a[None, :], mask=known)
            tl.store(own + second, weight_b[None, :], mask=known)
        if ROTARY < SIZE:
            tl.store(own + rest, weight_e[None, :], mask=rest < SIZE)


@triton.jit
def _weights(one, two):
    """Return both partials' shares and the joint log-sum-exp; -inf marks a row without keys."""
    most = tl.maximum(one, two)
    none = most == float("-inf")
    most = tl.where(none, 0.0, most)
    share = tl.exp(one - most)
    other = tl.exp(two - most)
    total = share + other
    total = tl.where(none, 1.0, total)
    return share / total, other / total, tl.where(none, float("-inf"), most + tl.log(total))


@triton.jit
def merge(
    out1, lse1, out2, lse2, out, lse, rows,
    SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """Join two partial attentions over different keys, rows ``[rows, SIZE]``, all dense."""
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_INNER)[None, :]
    for r in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        inside = row + r < rows
        at = tl.cast(r, tl.int64)
        one = tl.load(lse1 + at + row, mask=inside, other=0.0).to(wide)
        two = tl.load(lse2 + at + row, mask=inside, other=0.0).to(wide)
        share, other, joint = _weights(one, two)
        here = inside[:, None] & (column < SIZE)
        place = at * SIZE + row[:, None] * SIZE + column
        a = tl.load(out1 + place, mask=here, other=0.0).to(wide)
        b = tl.load(out2 + place, mask=here, other=0.0).to(wide)
        tl.store(out + place, a * share[:, None] + b * other[:, None], mask=here)
        tl.store(lse + at + row, joint, mask=inside)


@triton.jit
def merge_backward(
    out1, lse1, out2, lse2, grad, grad_lse, grad1, grad_lse1, grad2, grad_lse2, rows,
    SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """The gradients of both partials, outputs and log-sum-exps."""
    wide: tl.constexpr = tl.float64 if out1.dtype.element_ty == tl.float64 else tl.float32
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_INNER)[None, :]
    for r in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        inside = row + r < rows
        at = tl.cast(r, tl.int64)
        one = tl.load(lse1 + at + row, mask=inside, other=0.0).to(wide)
        two = tl.load(lse2 + at + row, mask=inside, other=0.0).to(wide)
        share, other, _ = _weights(one, two)
        here = inside[:, None] & (column < SIZE)
        place = at * SIZE + row[:, None] * SIZE + column
        a = tl.load(out1 + place, mask=here, other=0.0).to(wide)
        b = tl.load(out2 + place, mask=here, other=0.0).to(wide)
        g = tl.load(grad + place, mask=here, other=0.0).to(wide)
        tl.store(grad1 + place, g * share[:, None], mask=here)
        tl.store(grad2 + place, g * other[:, None], mask=here)
        # d out / d lse1 = share * other * (out1 - out2), and the opposite for lse2
        moved = share * other * tl.sum(g * (a - b), 1)
        g_lse = tl.load(grad_lse + at + row, mask=inside, other=0.0).to(wide)
        tl.store(grad_lse1 + at + row, share * g_lse + moved, mask=inside)
        tl.store(grad_lse2 + at + row, other * g_lse - moved, mask=inside)
