"""Cut an attention mask written for the whole sequence to one rank's rows and heads."""

from __future__ import annotations

from torch import Tensor

from hp_mesh.checks import fail
from hp_mesh.window import AttentionWindow, Range

__all__ = ["cut_heads", "cut_mask", "cut_rows", "refuse_flag_beside_mask"]


def refuse_flag_beside_mask(mask: Tensor | None, is_causal: bool) -> None:
    """Refuse both at once: torch's documentation rules it out, and so do most of its back ends.

    Raises:
        RuntimeError: In torch's own words.
    """
    if is_causal and mask is not None:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when "
            "is_causal=True"
        )


def cut_mask(
    mask: Tensor,
    window: AttentionWindow,
    *,
    heads: Range | None = None,
    num_heads: int | None = None,
    name: str = "attn_mask",
    where: str = "scaled_dot_product_attention",
) -> Tensor:
    """Return the part of ``mask`` that belongs to this rank's query rows and heads, as a view.

    Args:
        mask: Bool or float, ``[S, S]``, ``[H, S, S]``, ``[1, 1, S, S]``, ``[B, 1, S, S]``,
            ``[B, H, S, S]``, or with 1 in place of any dim (``[B, 1, 1, S]`` masks keys).
            Rows may be global (they are cut) or already this rank's; keys must be all keys.
        window: The rows and keys of this call.
        heads: This rank's query heads among ``num_heads``; None leaves the head dim alone.
        num_heads: Number of query heads of the whole tensor.
        name: What the op calls its mask, for errors.
        where: Name of the op, for errors.

    Returns:
        A mask that broadcasts to ``[B, H, query_length, key_length]``.
    """
    if mask.ndim < 2:
        raise fail(
            where,
            f"{name} (shape {list(mask.shape)}) must have at least 2 dims, rows and keys",
            f"reshape it to [1, {window.key_length}] if it masks keys",
        )
    _check_keys(mask, window, name, where)
    rows = cut_rows(mask, window, name, where)
    if mask.ndim == 2:
        return rows
    # heads are cut from the mask as it came, so that an error shows the shape that was given
    return cut_rows(cut_heads(mask, heads, num_heads, name, where), window, name, where)


def _check_keys(mask: Tensor, window: AttentionWindow, name: str, where: str) -> None:
    if mask.shape[-1] not in (1, window.key_length):
        raise fail(
            where,
            f"{name} (shape {list(mask.shape)}) must have {window.key_length} keys in its last "
            f"dim, not {mask.shape[-1]}",
            f"build it for the whole sequence, [..., {window.global_length}, {window.key_length}]",
        )


def cut_rows(mask: Tensor, window: AttentionWindow, name: str, where: str) -> Tensor:
    """Narrow dim -2 of ``mask`` to the window; 1 row and rows that are already cut stay.

    Row ``i`` of a mask with as many rows as tokens (or as keys, when there are at least as many
    keys as tokens) is the token at global position ``i``.
    """
    rows = mask.shape[-2]
    global_rows = rows == window.global_length
    if not global_rows and rows in (1, window.query_length):
        return mask
    if not global_rows and rows == window.key_length > window.global_length:
        global_rows = True
    if not global_rows:
        raise fail(
            where,
            f"{name} (shape {list(mask.shape)}) must have {window.global_length} rows (the whole "
            f"sequence), {window.query_length} (this rank's rows) or 1, not {rows}",
            f"build it for the whole sequence, [..., {window.global_length}, {window.key_length}]",
        )
    return mask.narrow(-2, window.query_start, window.query_length)


def cut_heads(
    mask: Tensor, heads: Range | None, num_heads: int | None, name: str, where: str
) -> Tensor:
    """Narrow dim -3 of ``mask`` to this rank's heads; 1 head and heads already cut stay."""
    if heads is None:
        return mask
    start, stop = heads
    held = mask.shape[-3]
    if held == num_heads:
        return mask.narrow(-3, start, stop - start)
    if held in (1, stop - start):
        return mask
    whole = f"{num_heads} heads (all), " if num_heads is not None else ""
    raise fail(
        where,
        f"{name} (shape {list(mask.shape)}) must have {whole}{stop - start} (this rank's) or 1 in "
        f"its head dim, not {held}",
        "give one head for a mask that all heads share",
    )
