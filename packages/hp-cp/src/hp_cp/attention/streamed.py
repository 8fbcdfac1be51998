"""Attention over keys and values that are gathered part by part, the next while one is attended.

Part ``i`` of ``n`` is slice ``i`` of every rank's shard: one all-gather each of k and v, the same
on every rank. What a rank's rows do not see of it is left out of the arithmetic, not of the wire.
Backward takes twice as many parts, half as large (see below)::

    forward    wire      gather 0 | gather 1 | gather 2 | ...
               compute            | part 0   | part 1   | ...     merged by log-sum-exp
    backward   wire      gather 0 | gather 1 | gather 2, scatter 0 | ...
               compute            | part 0   | part 1   | ...     from the merged output and lse

Two parts of K and V are in memory at a time, in backward also the gradients of two: as much, since
they are half as large. For it, q, the shards of k and v, the output and what its weights are
measured by (base and norm) are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hp_cp.attention import _flash_cpu
from hp_cp.attention.blocks import Block, by_runs, causal_blocks, key_runs, slices_of
from hp_cp.attention.inputs import prepare
from hp_cp.attention.masks import cut_mask
from hp_cp.attention.parts import Prefetch, ShardSums, rows_of
from hp_cp.attention.tiled import TileJob, attend_tiles, tile_gradients, without_autocast
from hp_cp.gathers import backward_parts
from hp_mesh.checks import require
from hp_mesh.window import AttentionWindow, Range

__all__ = ["streamed_attention"]


def streamed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: AttentionWindow,
    group: ProcessGroup,
    parts: int,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    heads: Range | None = None,
    num_heads: int | None = None,
    where: str = "scaled_dot_product_attention",
) -> Tensor:
    """Compute the window's rows of the global attention; all ranks of ``group`` call it together.

    Args:
        q: ``[..., H, Lq, D]``, the rows of the window.
        k: ``[..., Hkv, S/P, D]``, this rank's shard of the keys.
        v: ``[..., Hkv, S/P, Dv]``.
        window: Where the rows lie.
        group: The ``P`` ranks that hold the keys, in order.
        parts: In how many parts the keys are gathered forward; at most ``S/P``.
        attn_mask: Bool (True = visible) or float, without gradient, keys of the whole sequence.
        is_causal: Row at global position ``i`` sees keys ``<= i``.
        scale: Factor on the scores, ``1 / sqrt(D)`` by default.
        enable_gqa: Allows ``Hkv < H``, as in torch.
        heads: This rank's query heads among ``num_heads``, to cut a mask with all heads.
        num_heads: Number of query heads of the whole tensor.
        where: Name of the op, for errors.

    Returns:
        ``[..., H, Lq, Dv]`` in ``q``'s dtype; sums over parts run in float32 (float64 for float64).
    """
    size, shard = torch.distributed.get_world_size(group), k.shape[-2]
    require(
        shard * size == window.key_length,
        where,
        f"key (shape {list(k.shape)}) must be one of {size} shards of {window.key_length} keys",
    )
    require(
        1 <= parts <= shard,
        where,
        f"kv_chunks ({parts}) must be at most the keys of a rank ({shard})",
        f"use kv_chunks={shard} or less",
    )
    if attn_mask is not None:
        attn_mask = cut_mask(attn_mask, window, heads=heads, num_heads=num_heads, where=where)
    own = AttentionWindow(window.query_start, window.query_length, shard, window.global_length)
    q, k, v, mask, shape = prepare(q, k, v, attn_mask, own, enable_gqa, where)
    stream = _Stream(
        where=where,
        group=group,
        rows=(window.query_start, window.query_end),
        shard=shard,
        ranks=size,
        parts=parts,
        causal=is_causal,
        scale=scale,
        fused=mask is None and _flash_cpu.takes(q, k, v),
    )
    with without_autocast(q.device.type):
        out = _StreamedAttention.apply(q, k, v, mask, stream)  # type: ignore[no-untyped-call]
    return cast(Tensor, out).reshape(shape)


class _StreamedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, stream: _Stream
    ) -> Tensor:
        out, base, norm = stream.attend(q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, out, base, norm)
        ctx.stream = stream
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, base, norm = ctx.saved_tensors
        with without_autocast(grad.device.type):
            needed = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
            grads = ctx.stream.gradients(grad, q, k, v, mask, out, base, norm, needed)
        return (*grads, None, None)


@dataclass(frozen=True)
class _Stream:
    """One call: whose keys come in which parts, and which of them its rows see.

    Attributes:
        where: Name of the op, for errors.
        group: The ranks that hold the keys.
        rows: Rows of the sequence that this rank computes.
        shard: Keys of a rank.
        ranks: Number of ranks.
        parts: Number of parts, forward.
        causal: Whether a row sees no later key.
        scale: Factor on the scores.
        fused: Whether torch's CPU kernel computes the blocks.
    """

    where: str
    group: ProcessGroup
    rows: Range
    shard: int
    ranks: int
    parts: int
    causal: bool
    scale: float | None
    fused: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return output ``[B, H, Lq, Dv]``, base and norm ``[B, H, Lq, 1]``, as `attend_tiles`."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        total = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide)
        base, norm = (q.new_zeros(*q.shape[:-1], 1, dtype=wide) for _ in range(2))
        keys = Prefetch(self.group, slices_of(self.shard, self.parts), k, v)
        try:
            for rows in keys.slices:
                part, seen = keys.take(), self.mask_of(mask, rows)
                for block in self.blocks(rows):
                    found = self._attend(rows_of(q, block.rows), *part, seen, block)
                    _merge([rows_of(x, block.rows) for x in (total, base, norm)], found)
                    del found
                del part  # before the next but one is asked for
        finally:
            keys.drop()
        # rows without keys: their weights exp(s - 0) / 1 are 0 in backward, never nan
        return total.to(q.dtype), base, norm.masked_fill_(norm == 0, 1.0)

    def gradients(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        out: Tensor,
        base: Tensor,
        norm: Tensor,
        needed: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of q and, if ``needed``, of the shards of k and v."""
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=norm.dtype)
        dk, dv = (torch.empty_like(x) if needed else None for x in (k, v))
        count = backward_parts(self.parts, self.shard)
        keys = Prefetch(self.group, slices_of(self.shard, count), k, v)
        sums = ShardSums(self.group, [x for x in (dk, dv) if x is not None])
        try:
            for rows in keys.slices:
                part, seen = keys.take(), self.mask_of(mask, rows)
                share = sums.begin(part)
                # run by run: what a kernel returns is no larger than a rank's share of the part
                for block in by_runs(self.blocks(rows), rows[1] - rows[0]):
                    mine = [rows_of(x, block.rows) for x in (grad, q, out, base, norm)]
                    found = self._gradients(mine, *part, seen, block)
                    rows_of(dq, block.rows).add_(found[0])
                    for index, whole in enumerate(share):
                        rows_of(whole, block.keys).add_(found[1 + index])
                    del found
                del part
                sums.end(rows, share)
                del share
        finally:
            keys.drop()
            sums.drop()
        return dq.to(q.dtype), dk, dv

    def blocks(self, part: Range) -> list[Block]:
        """Return what this rank's rows see of slice ``part`` of each shard."""
        runs = key_runs(part, self.shard, self.ranks)
        if self.causal:
            return causal_blocks(self.rows, runs)
        rows = self.rows[1] - self.rows[0]
        return [Block((0, rows), (0, sum(stop - start for start, stop in runs)), False)]

    def mask_of(self, mask: Tensor | None, part: Range) -> Tensor | None:
        """Return the columns of a mask for all keys that belong to those of a part."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        by_rank = torch.unflatten(mask, -1, (self.ranks, self.shard))
        return by_rank[..., slice(*part)].flatten(-2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = rows_of(k, block.keys), rows_of(v, block.keys)
        if self.fused:
            out, lse = _flash_cpu.attend(q, k, v, causal=block.causal, scale=self.scale)
            lse = lse.unsqueeze(-1)
            return out, lse, torch.ones_like(lse)
        return attend_tiles(q, k, v, _columns(mask, block.keys), self._job(q, k, block))

    def _gradients(
        self, mine: Sequence[Tensor], k: Tensor, v: Tensor, mask: Tensor | None, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, out, base, norm = mine
        k, v = rows_of(k, block.keys), rows_of(v, block.keys)
        if self.fused:
            lse = (base + norm.log()).squeeze(-1)
            return _flash_cpu.attend_backward(
                grad, q, k, v, out, lse, causal=block.causal, scale=self.scale
            )
        mask, job = _columns(mask, block.keys), self._job(q, k, block)
        dq, dk, dv, _ = tile_gradients(grad, q, k, v, mask, out, base, norm, job, wants_mask=False)
        return dq, dk, dv

    def _job(self, q: Tensor, k: Tensor, block: Block) -> TileJob:
        return TileJob.of(q, k, 0 if block.causal else None, self.scale)


def _columns(mask: Tensor | None, keys: Range) -> Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., slice(*keys)]


def _merge(into: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    """Add the attention to ``more`` keys, in place; both are output, base and norm.

    As `hp_comm.kernels.arithmetic.merge`, of outputs whose weights have a base and a norm; a norm
    of 0 says that a row has no key.
    """
    (total, base, norm), (out, base2, norm2) = into, more
    none, none2 = norm == 0, norm2 == 0
    largest = torch.maximum(
        base.masked_fill(none, -math.inf), base2.masked_fill(none2, -math.inf)
    ).masked_fill_(none & none2, 0.0)
    # a row without keys has base 0, which may overflow beside a low one
    share = (norm * (base - largest).exp()).masked_fill_(none, 0.0)
    share2 = (norm2 * (base2 - largest).exp()).masked_fill_(none2, 0.0)
    joint = share + share2
    whole = joint.masked_fill(joint == 0, 1.0)
    total.mul_(share / whole).addcmul_(out, share2 / whole)
    base.copy_(largest)
    norm.copy_(joint)
