"""Triton kernels for CUDA; `hp_dsa.ops.launch` calls them, `hp_dsa.ops.tiled` says what they give.

The only file of the package that imports triton. Tensors are dense, batch and sequence one dim; a
head size is padded to ``BLOCK_D``, a power of two. Sums run in float32; products take the inputs'
dtype, float32 without rounding to TF32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def index_scores(
    q, k, w, out, rows, keys, D, q_row, q_head, k_row, w_row, w_head, out_row,
    HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write ``sum_n w[r, n] relu(q[r, n] . k[c])`` for a block of rows and keys."""
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c = tl.program_id(1) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    d = tl.arange(0, BLOCK_D)
    wide_r = r.to(tl.int64)
    keys_at = k + c.to(tl.int64)[:, None] * k_row + d[None, :]
    k_tile = tl.load(keys_at, mask=(c < keys)[:, None] & (d < D)[None, :], other=0.0)
    total = tl.zeros((BLOCK_ROWS, BLOCK_KEYS), tl.float32)
    for head in range(HEADS):
        at = q + wide_r[:, None] * q_row + head * q_head + d[None, :]
        q_tile = tl.load(at, mask=(r < rows)[:, None] & (d < D)[None, :], other=0.0)
        dots = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        weight = tl.load(w + wide_r * w_row + head * w_head, mask=r < rows, other=0.0)
        # not a maximum: that would hide a NaN
        total += tl.where(dots < 0, 0.0, dots) * weight.to(tl.float32)[:, None]
    tl.store(
        out + wide_r[:, None] * out_row + c[None, :], total,
        mask=(r < rows)[:, None] & (c < keys)[None, :],
    )  # fmt: skip


@triton.jit
def index_scores_backward_rows(
    d_scores, q, k, w, d_q, d_w, rows, keys, D, s_row, q_row, q_head, k_row, w_row, w_head,
    dq_row, dq_head, dw_row, dw_head,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a block of rows of one head, over all keys of the tile."""
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    wide_r = r.to(tl.int64)
    mine = (r < rows)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + wide_r[:, None] * q_row + head * q_head + d[None, :], mask=mine, other=0.0)
    weight = tl.load(w + wide_r * w_row + head * w_head, mask=r < rows, other=0.0).to(tl.float32)
    of_q = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    of_w = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, keys, BLOCK_KEYS):
        c = start + tl.arange(0, BLOCK_KEYS)
        there = (c < keys)[:, None] & (d < D)[None, :]
        keys_at = k + c.to(tl.int64)[:, None] * k_row + d[None, :]
        k_tile = tl.load(keys_at, mask=there, other=0.0)
        upstream = tl.load(
            d_scores + wide_r[:, None] * s_row + c[None, :],
            mask=(r < rows)[:, None] & (c < keys)[None, :], other=0.0,
        )  # fmt: skip
        dots = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        of_w += tl.sum(tl.where(dots > 0, dots * upstream, 0.0), 1)
        d_dots = tl.where(dots > 0, upstream * weight[:, None], 0.0)
        of_q += tl.dot(d_dots.to(k_tile.dtype), k_tile, input_precision="ieee")
    at = d_q + wide_r[:, None] * dq_row + head * dq_head + d[None, :]
    tl.store(at, tl.load(at, mask=mine, other=0.0) + of_q, mask=mine)
    at_w = d_w + wide_r * dw_row + head * dw_head
    tl.store(at_w, tl.load(at_w, mask=r < rows, other=0.0) + of_w, mask=r < rows)


@triton.jit
def index_scores_backward_keys(
    d_scores, q, k, w, d_k, rows, keys, D, s_row, q_row, q_head, k_row, w_row, w_head, dk_row,
    HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a block of keys over all rows and heads: one writer, a fixed order."""
    c = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    d = tl.arange(0, BLOCK_D)
    mine = (c < keys)[:, None] & (d < D)[None, :]
    wide_c = c.to(tl.int64)
    k_tile = tl.load(k + wide_c[:, None] * k_row + d[None, :], mask=mine, other=0.0)
    of_k = tl.zeros((BLOCK_KEYS, BLOCK_D), tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        r = start + tl.arange(0, BLOCK_ROWS)
        wide_r = r.to(tl.int64)
        there = (r < rows)[:, None] & (d < D)[None, :]
        upstream = tl.load(
            d_scores + wide_r[:, None] * s_row + c[None, :],
            mask=(r < rows)[:, None] & (c < keys)[None, :], other=0.0,
        )  # fmt: skip
        for head in range(HEADS):
            at = q + wide_r[:, None] * q_row + head * q_head + d[None, :]
            q_tile = tl.load(at, mask=there, other=0.0)
            weight = tl.load(w + wide_r * w_row + head * w_head, mask=r < rows, other=0.0)
            dots = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            d_dots = tl.where(dots > 0, upstream * weight.to(tl.float32)[:, None], 0.0)
            of_k += tl.dot(tl.trans(d_dots.to(q_tile.dtype)), q_tile, input_precision="ieee")
    at_k = d_k + wide_c[:, None] * dk_row + d[None, :]
    tl.store(at_k, tl.load(at_k, mask=mine, other=0.0) + of_k, mask=mine)


@triton.jit
def _places(indices, row, position, end, start, visible, K, BLOCK: tl.constexpr):
    """Return where the keys of some positions of a row lie, and which of them count."""
    entry = tl.load(indices + row * K + position // BLOCK, mask=position < K * BLOCK, other=-1)
    token = entry * BLOCK + position % BLOCK
    valid = (position < end) & (entry >= 0) & (token < visible)
    return tl.where(valid, start + token, 0).to(tl.int64), valid


@triton.jit
def _gathered(x, place, valid, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(
        x + place[:, None] * D + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0
    )


@triton.jit
def _of_heads(x, row, heads, N, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(
        x + row * N * D + heads[:, None] * D + d[None, :],
        mask=(heads < N)[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def _add_heads(x, row, heads, values, N, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(
        x + row * N * D + heads[:, None] * D + d[None, :], values,
        mask=(heads < N)[:, None] & (d < D)[None, :],
    )  # fmt: skip


@triton.jit
def sparse_attention(
    q, k, v, q_rope, k_rope, indices, starts, counts, out, maximum, total, ends, scale, N, K, D,
    DV, DR,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_DR: tl.constexpr,
):  # fmt: skip
    """Attend some heads of one row to its selected keys; also write where the row ends."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    start, visible = tl.load(starts + row), tl.load(counts + row)
    q_tile = _of_heads(q, row, heads, N, D, BLOCK_D)
    if ROPE:
        q_rope_tile = _of_heads(q_rope, row, heads, N, DR, BLOCK_DR)
    m = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    z = tl.zeros((BLOCK_HEADS,), tl.float32)
    result = tl.zeros((BLOCK_HEADS, BLOCK_DV), tl.float32)
    end = K * BLOCK
    for first in range(0, K * BLOCK, BLOCK_TOKENS):
        position = first + tl.arange(0, BLOCK_TOKENS)
        entry = tl.load(indices + row * K + position // BLOCK, mask=position < K * BLOCK, other=0)
        end = tl.minimum(end, tl.min(tl.where(entry < 0, position, K * BLOCK), 0))
        place, valid = _places(indices, row, position, end, start, visible, K, BLOCK)
        if tl.max(valid.to(tl.int32), 0) > 0:
            k_tile = _gathered(k, place, valid, D, BLOCK_D)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if ROPE:
                k_rope_tile = _gathered(k_rope, place, valid, DR, BLOCK_DR)
                scores += tl.dot(q_rope_tile, tl.trans(k_rope_tile), input_precision="ieee")
            scores = tl.where(valid[None, :], scores * scale, float("-inf"))
            new = tl.maximum(m, tl.max(scores, 1))  # finite: a valid token is here
            p = tl.exp(scores - new[:, None])
            shrink = tl.exp(m - new)
            z = z * shrink + tl.sum(p, 1)
            v_tile = k_tile if LATENT else _gathered(v, place, valid, DV, BLOCK_DV)
            result = result * shrink[:, None]
            result += tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
            m = new
    has_key = z != 0  # also a NaN, which has to be seen
    result = result / tl.where(has_key, z, 1.0)[:, None]
    _add_heads(out, row, heads, result.to(out.dtype.element_ty), N, DV, BLOCK_DV)
    tl.store(maximum + row * N + heads, tl.where(has_key, m, 0.0), mask=heads < N)
    tl.store(total + row * N + heads, z, mask=heads < N)
    if tl.program_id(1) == 0:
        tl.store(ends + row, end)


@triton.jit
def _probabilities(scores, valid, m, z):
    shifted = tl.where(valid[None, :], scores - m[:, None], float("-inf"))
    return tl.exp(shifted) / tl.where(z != 0, z, 1.0)[:, None]


@triton.jit
def sparse_attention_backward_rows(
    q, k, v, q_rope, k_rope, indices, starts, counts, ends, out, maximum, total, d_out, delta,
    d_q, d_q_rope, scale, N, K, D, DV, DR,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_DR: tl.constexpr,
):  # fmt: skip
    """Write the gradient of some heads of one row, and ``sum d_out out`` for the keys' kernel."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    start, visible, end = tl.load(starts + row), tl.load(counts + row), tl.load(ends + row)
    q_tile = _of_heads(q, row, heads, N, D, BLOCK_D)
    d_o = _of_heads(d_out, row, heads, N, DV, BLOCK_DV)
    o = _of_heads(out, row, heads, N, DV, BLOCK_DV)
    dot_o = tl.sum(d_o.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + row * N + heads, dot_o, mask=heads < N)
    m = tl.load(maximum + row * N + heads, mask=heads < N, other=0.0)
    z = tl.load(total + row * N + heads, mask=heads < N, other=0.0)
    of_q = tl.zeros((BLOCK_HEADS, BLOCK_D), tl.float32)
    of_rope = tl.zeros((BLOCK_HEADS, BLOCK_DR), tl.float32)
    if ROPE:
        q_rope_tile = _of_heads(q_rope, row, heads, N, DR, BLOCK_DR)
    for first in range(0, end, BLOCK_TOKENS):
        position = first + tl.arange(0, BLOCK_TOKENS)
        place, valid = _places(indices, row, position, end, start, visible, K, BLOCK)
        k_tile = _gathered(k, place, valid, D, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if ROPE:
            k_rope_tile = _gathered(k_rope, place, valid, DR, BLOCK_DR)
            scores += tl.dot(q_rope_tile, tl.trans(k_rope_tile), input_precision="ieee")
        p = _probabilities(scores * scale, valid, m, z)
        v_tile = k_tile if LATENT else _gathered(v, place, valid, DV, BLOCK_DV)
        d_p = tl.dot(d_o, tl.trans(v_tile), input_precision="ieee")
        d_scores = tl.where(valid[None, :], p * (d_p - dot_o[:, None]) * scale, 0.0)
        of_q += tl.dot(d_scores.to(k_tile.dtype), k_tile, input_precision="ieee")
        if ROPE:
            d_low = d_scores.to(k_rope_tile.dtype)
            of_rope += tl.dot(d_low, k_rope_tile, input_precision="ieee")
    _add_heads(d_q, row, heads, of_q.to(d_q.dtype.element_ty), N, D, BLOCK_D)
    if ROPE:
        low = of_rope.to(d_q_rope.dtype.element_ty)
        _add_heads(d_q_rope, row, heads, low, N, DR, BLOCK_DR)


@triton.jit
def _add_to_keys(x, place, valid, values, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.atomic_add(
        x + place[:, None] * D + d[None, :], values, mask=valid[:, None] & (d < D)[None, :]
    )


@triton.jit
def sparse_attention_backward_keys(
    q, k, v, q_rope, k_rope, indices, starts, counts, ends, maximum, total, d_out, delta,
    d_k, d_v, d_k_rope, scale, K, D, DV, DR,
    N: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_DR: tl.constexpr,
):  # fmt: skip
    """Add the gradient of some selected keys of one row: summed over heads first, then once."""
    row = tl.program_id(0).to(tl.int64)
    start, visible, end = tl.load(starts + row), tl.load(counts + row), tl.load(ends + row)
    first = tl.program_id(1) * BLOCK_TOKENS
    if first < end:
        position = first + tl.arange(0, BLOCK_TOKENS)
        place, valid = _places(indices, row, position, end, start, visible, K, BLOCK)
        k_tile = _gathered(k, place, valid, D, BLOCK_D)
        of_k = tl.zeros((BLOCK_TOKENS, BLOCK_D), tl.float32)
        if LATENT:
            v_tile = k_tile
        else:
            v_tile = _gathered(v, place, valid, DV, BLOCK_DV)
            of_v = tl.zeros((BLOCK_TOKENS, BLOCK_DV), tl.float32)
        if ROPE:
            k_rope_tile = _gathered(k_rope, place, valid, DR, BLOCK_DR)
            of_rope = tl.zeros((BLOCK_TOKENS, BLOCK_DR), tl.float32)
        for head in range(0, N, BLOCK_HEADS):
            heads = head + tl.arange(0, BLOCK_HEADS)
            q_tile = _of_heads(q, row, heads, N, D, BLOCK_D)
            d_o = _of_heads(d_out, row, heads, N, DV, BLOCK_DV)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if ROPE:
                q_rope_tile = _of_heads(q_rope, row, heads, N, DR, BLOCK_DR)
                scores += tl.dot(q_rope_tile, tl.trans(k_rope_tile), input_precision="ieee")
            m = tl.load(maximum + row * N + heads, mask=heads < N, other=0.0)
            z = tl.load(total + row * N + heads, mask=heads < N, other=0.0)
            dot_o = tl.load(delta + row * N + heads, mask=heads < N, other=0.0)
            p = _probabilities(scores * scale, valid, m, z)
            d_p = tl.dot(d_o, tl.trans(v_tile), input_precision="ieee")
            d_scores = tl.where(valid[None, :], p * (d_p - dot_o[:, None]) * scale, 0.0)
            d_low = tl.trans(d_scores.to(q_tile.dtype))
            of_k += tl.dot(d_low, q_tile, input_precision="ieee")
            of_value = tl.dot(tl.trans(p.to(d_o.dtype)), d_o, input_precision="ieee")
            if LATENT:
                of_k += of_value
            else:
                of_v += of_value
            if ROPE:
                of_rope += tl.dot(d_low, q_rope_tile, input_precision="ieee")
        _add_to_keys(d_k, place, valid, of_k, D, BLOCK_D)
        if not LATENT:
            _add_to_keys(d_v, place, valid, of_v, DV, BLOCK_DV)
        if ROPE:
            _add_to_keys(d_k_rope, place, valid, of_rope, DR, BLOCK_DR)
