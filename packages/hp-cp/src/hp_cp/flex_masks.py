"""``score_mod``, ``mask_mod`` and ``BlockMask`` of the whole sequence, for a part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hp_mesh.checks import require
from hp_mesh.window import AttentionWindow, Range

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["Part", "blocks_of", "shifted_score_mod"]

Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class Part:
    """What a rank computes of the whole.

    Attributes:
        batch: Half-open range of the batch.
        heads: Half-open range of the query heads.
        window: Its rows; of the keys it has all.
        of: Size of the whole batch, and number of all query heads.
    """

    batch: Range
    heads: Range
    window: AttentionWindow
    of: tuple[int, int]


def shifted_score_mod(mod: Mod, part: Part) -> Mod:
    """Return ``mod`` for indices that count from 0 in the part."""
    first = part.batch[0], part.heads[0], part.window.query_start
    if first == (0, 0, 0):
        return mod
    b0, h0, i0 = first

    def shifted(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mod(score, b + b0, h + h0, i + i0, j)

    return shifted


def _shifted_mask_mod(mod: Mod, part: Part) -> Mod:
    b0, h0, i0 = part.batch[0], part.heads[0], part.window.query_start

    def shifted(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mod(b + b0, h + h0, i + i0, j)

    return shifted


def blocks_of(part: Part, whole: BlockMask, device: torch.device, where: str) -> BlockMask:
    """Return the rows and heads of ``whole`` that a part has.

    Args:
        part: The part.
        whole: Of all rows and keys, with 1 or all of the batch and of the heads.
        device: Of q.
        where: Name of the op, for errors.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    window = part.window
    lengths = (window.global_length, window.key_length)
    require(
        tuple(whole.shape[-2:]) == lengths,
        where,
        f"block_mask {tuple(whole.shape)} must be of all rows and keys {lengths}",
        "create_block_mask(mask_mod, B, H, k.shape[2], k.shape[2])",
    )
    for name, count, all_of in zip(
        ("batch", "heads"), whole.kv_num_blocks.shape, part.of, strict=False
    ):
        require(
            count in (1, all_of),
            where,
            f"block_mask {tuple(whole.shape)} must be for 1 or all ({all_of}) of the {name}, not "
            f"{count}",
            "inside head groups, take the number of heads from the config and not from q.shape",
        )
    start, rows = window.query_start, window.query_length
    size = whole.BLOCK_SIZE[0]
    has_all = rows == window.global_length
    per_batch, per_head = (n > 1 for n in whole.kv_num_blocks.shape[:2])
    mask_mod = _shifted_mask_mod(whole.mask_mod, part)
    if has_all or start % size == rows % size == 0:
        cut = (
            slice(*part.batch) if per_batch else slice(None),
            slice(*part.heads) if per_head else slice(None),
            slice(None) if has_all else slice(start // size, (start + rows) // size),
        )
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        blocks: dict[str, Any] = {}
        for name in names:
            x = getattr(whole, name)
            blocks[name] = None if x is None else x[cut]
        return BlockMask.from_kv_blocks(
            **blocks,
            BLOCK_SIZE=whole.BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=(rows, window.key_length),
        )
    return create_block_mask(
        mask_mod,
        part.batch[1] - part.batch[0] if per_batch else None,
        part.heads[1] - part.heads[0] if per_head else None,
        rows,
        window.key_length,
        device=device,
        BLOCK_SIZE=whole.BLOCK_SIZE,
    )
