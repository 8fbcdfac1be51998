r"""Exact attention in plain torch that never holds a score matrix larger than one tile.

For what fused kernels leave to torch's math path (dropout, a V head size other than K's, masks that
need a gradient, unusual dtypes): same numbers, on any device, in memory independent of ``Lq * K``.
The forward keeps ``out`` and, of each row, the largest score and the sum of exponentials beside it;
backward recomputes tile by tile. A log-sum-exp would not do: next to a score of -1e9, as padding
masks write it, the logarithm of the sum is lost in rounding::

    keys    0     t     2t    3t            # tiles above the causal diagonal are skipped
    rows 0  [ s ] [ \ ]
         t  [ s ] [ s ] [ \ ]
        2t  [ s ] [ s ] [ s ] [ \ ]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_cp.attention.rng import mix

__all__ = ["TileJob", "attend_tiles", "tile_gradients", "tiled_attention", "without_autocast"]

_LARGEST_TILE = 512
_SMALLEST_TILE = 16
_ELEMENTS_PER_TILE = 1 << 22


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal_offset: int | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    scale: float | None = None,
    tile: int | None = None,
) -> Tensor:
    """Compute ``dropout(softmax(q k^T * scale + mask)) v`` one tile of the scores at a time.

    Rows without any visible key give 0, as in ``F.scaled_dot_product_attention``.

    Args:
        q: ``[B, H, Lq, D]``.
        k: ``[B, Hkv, K, D]``; ``Hkv`` divides ``H``, query head ``h`` uses ``h * Hkv // H``.
        v: ``[B, Hkv, K, Dv]``.
        mask: Bool (True = visible) or float (added), 4-D, broadcastable to ``[B, H, Lq, K]``.
        causal_offset: Row ``i`` sees keys ``<= i + causal_offset``; None sees all.
        dropout_p: Probability of dropping a weight.
        seed: Seed of the dropout pattern; each tile derives its own from it.
        scale: Factor on the scores, ``1 / sqrt(D)`` by default.
        tile: Rows and keys of a tile; chosen from the shapes by default.

    Returns:
        ``[B, H, Lq, Dv]`` in ``q``'s dtype. Sums run in float64 for float64, else in float32.
    """
    job = TileJob.of(q, k, causal_offset, scale, dropout_p=dropout_p, seed=seed, tile=tile)
    with without_autocast(q.device.type):
        out = _TiledAttention.apply(q, k, v, mask, job)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Keep autocast from casting the float32 sums of a tile down again."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def _tile_size(batch_heads: int, rows: int, keys: int) -> int:
    """Return the largest power of two that keeps all heads of a tile far below ``rows * keys``."""
    budget = min(_ELEMENTS_PER_TILE, rows * keys // 16)
    side = math.isqrt(max(budget // max(batch_heads, 1), 1))
    return min(max(1 << (side.bit_length() - 1), _SMALLEST_TILE), _LARGEST_TILE)


@dataclass(frozen=True, slots=True)
class TileJob:
    """What `attend_tiles` and `tile_gradients` are to do, beside their tensors."""

    causal_offset: int | None
    dropout_p: float
    seed: int
    scale: float
    tile: int

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        causal_offset: int | None,
        scale: float | None,
        *,
        dropout_p: float = 0.0,
        seed: int = 0,
        tile: int | None = None,
    ) -> TileJob:
        """Return the job of one call; arguments as in `tiled_attention`."""
        B, H, Lq, D = q.shape
        return TileJob(
            causal_offset=causal_offset,
            dropout_p=dropout_p,
            seed=seed,
            scale=1.0 / math.sqrt(D) if scale is None else scale,
            tile=tile or _tile_size(B * H, Lq, k.shape[-2]),
        )

    def row_tiles(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the tiles of ``rows`` rows (or keys)."""
        for start in range(0, rows, self.tile):
            yield start, min(start + self.tile, rows)

    def key_tiles(self, last_row: int, keys: int) -> Iterator[tuple[int, int]]:
        """Yield the key tiles that hold a key visible from row ``last_row`` or an earlier one."""
        if self.causal_offset is not None:
            keys = min(keys, last_row + self.causal_offset + 1)
        return self.row_tiles(max(keys, 0))

    def scores(
        self,
        qt: Tensor,
        kt: Tensor,
        mask: Tensor | None,
        rows: tuple[int, int],
        cols: tuple[int, int],
    ) -> Tensor:
        """Return the masked scores ``[B, Hkv, G, t, c]`` of ``qt`` ``[B, Hkv, G*t, D]``."""
        s = torch.unflatten(qt @ kt.mT, 2, (-1, rows[1] - rows[0]))
        if mask is not None:
            block = _mask_block(mask, rows, cols)
            if block.dtype == torch.bool:
                s.masked_fill_(block.logical_not(), -math.inf)
            else:
                s.add_(block)
        if self.causal_offset is not None and cols[1] - 1 > rows[0] + self.causal_offset:
            last_seen = torch.arange(*rows, device=s.device) + self.causal_offset
            s.masked_fill_(torch.arange(*cols, device=s.device) > last_seen[:, None], -math.inf)
        return s

    def keep(self, like: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor | None:
        """Return the factor on a tile's weights, 0 or ``1 / (1 - p)``; None without dropout."""
        if self.dropout_p == 0.0:
            return None
        generator = torch.Generator(device=like.device)
        generator.manual_seed(mix(self.seed, rows[0] // self.tile, cols[0] // self.tile))
        drawn = torch.rand(like.shape, generator=generator, device=like.device)
        factor = 0.0 if self.dropout_p == 1.0 else 1.0 / (1.0 - self.dropout_p)
        kept: Tensor = drawn >= self.dropout_p
        return kept.to(like.dtype).mul_(factor)


def _mask_block(mask: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
    """View a tile of a mask (or its gradient) ``[B, Hkv, G, Lq, K]``, any dim 1 for broadcast."""
    if mask.shape[-2] > 1:
        mask = mask[..., slice(*rows), :]
    if mask.shape[-1] > 1:
        mask = mask[..., slice(*cols)]
    return mask


def _grouped(mask: Tensor, kv_heads: int) -> Tensor:
    """View ``[B, H, Lq, K]`` as ``[B, Hkv, G, Lq, K]``; a broadcast head dim stays broadcast."""
    return mask.unsqueeze(1) if mask.shape[1] == 1 else torch.unflatten(mask, 1, (kv_heads, -1))


def _row_block(x: Tensor, rows: tuple[int, int], kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Cut ``[B, H, Lq, D]`` to a tile's rows: ``[B, Hkv, G*t, D]``, heads of a group stacked."""
    return torch.unflatten(x[:, :, slice(*rows)].to(dtype), 1, (kv_heads, -1)).flatten(2, 3)


def _ungroup(x: Tensor, rows: int) -> Tensor:
    """Turn ``[B, Hkv, G*t, D]`` back into ``[B, H, t, D]``."""
    return torch.unflatten(x, 2, (-1, rows)).flatten(1, 2)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, job: TileJob
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output ``[B, H, Lq, Dv]``, base and norm ``[B, H, Lq, 1]``, outside autograd.

    A weight is ``exp(score - base) / norm``, base the largest score of the row. Their logarithmic
    sum would lose the norm beside scores of -1e9. A row without keys has base 0 and norm 0.
    """
    B, H, Lq, _ = q.shape
    kv_heads, K, Dv = v.shape[1:]
    dtype = _accumulation_dtype(q.dtype)
    out = q.new_empty(B, H, Lq, Dv)
    bases, norms = (q.new_empty(B, H, Lq, 1, dtype=dtype) for _ in range(2))
    grouped = None if mask is None else _grouped(mask, kv_heads)
    for rows in job.row_tiles(Lq):
        t = rows[1] - rows[0]
        qt = _row_block(q, rows, kv_heads, dtype).mul(job.scale)  # [B, Hkv, G*t, D]
        total = qt.new_zeros(*qt.shape[:-1], Dv)
        norm = qt.new_zeros(*qt.shape[:-1], 1)
        peak = torch.full_like(norm, -math.inf)
        for cols in job.key_tiles(rows[1] - 1, K):
            kt, vt = k[:, :, slice(*cols)].to(dtype), v[:, :, slice(*cols)].to(dtype)
            s = job.scores(qt, kt, grouped, rows, cols)  # [B, Hkv, G, t, c]
            keep = job.keep(s, rows, cols)
            s = s.flatten(2, 3)
            new_peak = torch.maximum(peak, s.amax(-1, keepdim=True))
            # a row that saw no key yet has peak -inf; 0 in its place keeps exp(-inf) = 0
            base = new_peak.masked_fill(new_peak == -math.inf, 0.0)
            p = s.sub_(base).exp_()
            decay = (peak - base).exp_()
            norm = norm * decay + p.sum(-1, keepdim=True)
            if keep is not None:
                p.mul_(keep.flatten(2, 3))
            total = total.mul_(decay).add_(p @ vt)
            peak = new_peak
        empty = norm == 0
        total.div_(norm.masked_fill(empty, 1.0))
        out[:, :, slice(*rows)] = _ungroup(total, t)
        bases[:, :, slice(*rows)] = _ungroup(peak.masked_fill_(empty, 0.0), t)
        norms[:, :, slice(*rows)] = _ungroup(norm, t)
    return out, bases, norms


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, job: TileJob
    ) -> Tensor:
        out, base, norms = attend_tiles(q, k, v, mask, job)
        # rows without keys: their weights exp(s - 0) / 1 are 0 in backward, never nan
        norms.masked_fill_(norms == 0, 1.0)
        ctx.save_for_backward(q, k, v, mask, out, base, norms)
        ctx.job = job
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(grad.device.type):
            wants_mask = ctx.needs_input_grad[3]
            q, k, v, mask, out, base, norms = ctx.saved_tensors
            grads = tile_gradients(grad, q, k, v, mask, out, base, norms, ctx.job, wants_mask)
            return (*grads, None)


def tile_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    base: Tensor,
    norms: Tensor,
    job: TileJob,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and mask, outside autograd.

    ``out``, ``base`` and ``norms`` (none is 0) may be those of attention over more keys than ``k``
    holds: then each is this part's share of the gradient.
    """
    kv_heads, K = k.shape[1:3]
    dtype = norms.dtype
    grad_q = torch.empty_like(q)
    grad_k, grad_v = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    grad_mask = mask.new_zeros(mask.shape, dtype=dtype) if mask is not None and wants_mask else None
    grouped = None if mask is None else _grouped(mask, kv_heads)
    grouped_grad = None if grad_mask is None else _grouped(grad_mask, kv_heads)
    for rows in job.row_tiles(q.shape[2]):
        t = rows[1] - rows[0]
        qt = _row_block(q, rows, kv_heads, dtype).mul(job.scale)
        do = _row_block(grad, rows, kv_heads, dtype)
        row_base, row_norm = (_row_block(x, rows, kv_heads, dtype) for x in (base, norms))
        # sum over keys of weight * its gradient, dropped weights included, is grad . out
        delta = (do * _row_block(out, rows, kv_heads, dtype)).sum(-1, keepdim=True)
        dq = torch.zeros_like(qt)
        for cols in job.key_tiles(rows[1] - 1, K):
            kt, vt = k[:, :, slice(*cols)].to(dtype), v[:, :, slice(*cols)].to(dtype)
            s = job.scores(qt, kt, grouped, rows, cols)
            keep = job.keep(s, rows, cols)
            p = s.flatten(2, 3).sub_(row_base).exp_().div_(row_norm)  # [B, Hkv, G*t, c]
            dp = do @ vt.mT
            if keep is None:
                grad_v[:, :, slice(*cols)] += p.mT @ do
            else:
                keep = keep.flatten(2, 3)
                grad_v[:, :, slice(*cols)] += (p * keep).mT @ do
                dp.mul_(keep)
            ds = dp.sub_(delta).mul_(p)
            dq.add_(ds @ kt)
            grad_k[:, :, slice(*cols)] += ds.mT @ qt
            if grouped_grad is not None:
                block = _mask_block(grouped_grad, rows, cols)
                block += torch.unflatten(ds, 2, (-1, t)).sum_to_size(block.shape)
        grad_q[:, :, slice(*rows)] = _ungroup(dq.mul_(job.scale), t)
    if grad_mask is not None and mask is not None:
        grad_mask = grad_mask.to(mask.dtype)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_mask
