"""Rewrite the arguments of ``npu_fusion_attention`` for one rank's query rows; call no kernel.

The kernel's sparse modes place their diagonal at a corner of the matrix that it is handed, and a
rank's rows have other corners than the whole sequence. Keys that no local row sees are cut off, so
that the bottom-right corner lies on the causal diagonal and mode 3 is right on every rank::

    whole sequence, mode 2          rank 1 of 3: rows 2-3, keys cut to [0, 4), mode 3
    x . . . . .
    x x . . . .
    x x x . . .                     x x x .
    x x x x . .                     x x x x
    x x x x x .
    x x x x x x

Three spellings of the kernel exist; versions 1 and 3 say ``pre_tockens``, version 2 ``pre_tokens``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from hp_cp.attention._npu import COMPRESSED, compressed_causal_mask
from hp_cp.attention.documents import cut_documents
from hp_cp.attention.masks import cut_heads, cut_mask, cut_rows
from hp_mesh.checks import fail, require
from hp_mesh.window import AttentionWindow, Range

__all__ = ["Version", "rewrite_fusion_attention"]

Version = Literal[1, 2, 3]

_SEQ_AND_HEAD_DIM: dict[str, tuple[int, int | None]] = {
    "BSH": (1, None),
    "SBH": (0, None),
    "BSND": (1, 2),
    "BNSD": (2, 1),
    "TND": (0, 1),
}
_NO_LIMIT = 2**31 - 1
_CAUSAL_MODES = (2, 3, 4)
_BIAS_ROWS = 1024
_EXPLICIT = "pass an explicit atten_mask for the whole sequence with sparse_mode=0"


def rewrite_fusion_attention(
    version: Version,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_num: int,
    input_layout: str,
    window: AttentionWindow,
    kwargs: Mapping[str, Any],
    *,
    heads: Range | None = None,
    num_heads: int | None = None,
    held: Range | None = None,
    where: str = "npu_fusion_attention",
) -> tuple[Tensor, Tensor, Tensor, int, dict[str, Any]]:
    """Return the arguments with which the kernel computes the window's rows of the global result.

    Whether a call is refused depends on what all ranks see alike (modes, lengths, global shapes),
    never on the rank's own rows, so that all ranks refuse together.

    Args:
        version: 1, 2 or 3: ``npu_fusion_attention``, ``_v2`` or ``_v3``.
        q: This rank's rows and heads, in ``input_layout``.
        k: All keys, this rank's heads.
        v: Likewise.
        head_num: As the user gave it.
        input_layout: ``"BSH"``, ``"SBH"``, ``"BSND"``, ``"BNSD"`` or ``"TND"``.
        window: The rows and keys of this call.
        kwargs: The other arguments, by the name that ``version`` gives them.
        heads: This rank's query heads among ``num_heads``, to cut per-head arguments.
        num_heads: Number of query heads of the whole tensor.
        held: The keys that ``k`` and ``v`` hold if not all: those that a band shows to these rows.
        where: Name of the op, for errors.

    Returns:
        ``(q, k, v, head_num, kwargs)``; ``k`` and ``v`` are views cut to the keys that are seen.
    """
    if input_layout not in _SEQ_AND_HEAD_DIM:
        known = ", ".join(_SEQ_AND_HEAD_DIM)
        raise fail(where, f"input_layout ({input_layout!r}) must be one of {known}")
    seq_dim, head_dim = _SEQ_AND_HEAD_DIM[input_layout]
    args = dict(kwargs)
    _check_rows(
        {"query": q, "query_rope": args.get("query_rope")}, window.query_length, seq_dim, where
    )
    low, high = (0, window.key_length) if held is None else held
    _check_rows(
        {"key": k, "value": v, "key_rope": args.get("key_rope")}, high - low, seq_dim, where
    )
    if head_dim is not None:
        head_num = q.shape[head_dim]
    elif heads is not None and head_num == num_heads:
        head_num = heads[1] - heads[0]
    _cut_per_head(args, heads, num_heads, where)
    mode, mask = int(args.get("sparse_mode", 0)), args.get("atten_mask")
    if mask is None and mode != 0:
        _warn_mode_ignored(mode)
    if window.query_length == window.global_length:
        return q, k, v, head_num, args

    _refuse_what_cannot_be_cut(args, mode, mask, where)
    names = ("pre_tokens", "next_tokens") if version == 2 else ("pre_tockens", "next_tockens")
    if input_layout == "TND":
        band_ends_at_diagonal = mode != 4 or int(args.get(names[1], _NO_LIMIT)) <= 0
        first, last = cut_documents(args, window, mode, band_ends_at_diagonal, where, low)
        if mask is not None:
            args["sparse_mode"] = 4 if mode == 4 else 3
    else:
        first, last = _cut_dense(args, names, window, mode, where, low)
    if mask is not None and mode in _CAUSAL_MODES:
        args["atten_mask"] = _compressed(mask, q)
    k, v = (x.narrow(seq_dim, first - low, last - first) for x in (k, v))
    if args.get("key_rope") is not None:
        args["key_rope"] = args["key_rope"].narrow(seq_dim, first, last - first)
    return q, k, v, head_num, args


def _cut_dense(
    args: dict[str, Any],
    names: tuple[str, str],
    window: AttentionWindow,
    mode: int,
    where: str,
    first_held: int,
) -> Range:
    """Rewrite mask, mode and tokens of a batched layout; return the range of keys that is kept."""
    pre, after = (int(args.get(name, _NO_LIMIT)) for name in names)
    first, last = 0, window.key_length
    if args.get("atten_mask") is not None:
        if mode in _CAUSAL_MODES:
            _check_causal_mask(args["atten_mask"], window, where)
            band = _Band.of_mode(mode, window, pre, after)
            _refuse_hidden_ranks(band, window, mode, where)
            last = band.last_key(window)
            pre, after = band.tokens(window, last)
            args["sparse_mode"] = 3 if (pre, after) == (_NO_LIMIT, 0) else 4
            if args["sparse_mode"] == 4:
                args.update(zip(names, (pre, after), strict=True))
        else:
            mask = cut_mask(args["atten_mask"], window, name="atten_mask", where=where)
            if mode == 0:
                first, last = _seen_by_tokens(window, pre, after)
                # tokens count from the top-left corner, which moved down and to the right
                down = window.query_start - first
                moved = (_moved(pre, -down), _moved(after, down))
                args.update({n: t for n, t in zip(names, moved, strict=True) if n in args})
            args["atten_mask"] = mask if mask.shape[-1] == 1 else mask[..., first:last]
    first = max(first, first_held)  # a band is told from the corner at its end
    if args.get("pse") is not None:
        _refuse_compressed_bias(args["pse"], window, where)
        args["pse"] = cut_rows(args["pse"], window, "pse", where)[..., first:last]
    return first, last


def _seen_by_tokens(window: AttentionWindow, pre: int, after: int) -> Range:
    """Return the keys that the tokens of mode 0 show to a row of the window.

    The others have to go: the kernel's documentation wants tokens below zero to be smaller than the
    number of rows (``pre``) or keys (``after``) that are left.
    """
    first, last = 0, window.key_length
    if pre < _NO_LIMIT:
        first = max(0, min(window.query_start - pre, last - 1))
    if after < _NO_LIMIT:
        hidden = max(0, first - window.query_start - after)
        last = max(first + hidden + 1, min(last, window.query_end + after))
    return first, min(last, window.key_length)


@dataclass(frozen=True, slots=True)
class _Band:
    """Row ``i`` of the sequence sees keys ``[i + low, i + high]``; None has no limit."""

    low: int | None
    high: int | None

    @staticmethod
    def of_mode(mode: int, window: AttentionWindow, pre: int, after: int) -> _Band:
        corner = window.key_length - window.global_length  # bottom-right: last row, last key
        if mode == 2:
            return _Band(None, 0)
        if mode == 3:
            return _Band(None, corner)
        return _Band(
            None if pre >= _NO_LIMIT else corner - pre,
            None if after >= _NO_LIMIT else corner + after,
        )

    def last_key(self, window: AttentionWindow) -> int:
        """Return one past the last key that a local row sees."""
        if self.high is None:
            return window.key_length
        return min(window.key_length, window.query_end + self.high)

    def tokens(self, window: AttentionWindow, last: int) -> tuple[int, int]:
        """Return the tokens that describe the band from the cut matrix's bottom-right corner."""
        shift = window.query_start - (last - window.query_length)
        return (
            _NO_LIMIT if self.low is None else -(self.low + shift),
            _NO_LIMIT if self.high is None else self.high + shift,
        )


def _refuse_hidden_ranks(band: _Band, window: AttentionWindow, mode: int, where: str) -> None:
    """Refuse a band that hides every key from all rows of a rank: no mode of the kernel says that.

    The first rows are hidden by ``high``, the last by ``low``; all ranks have as many rows.
    """
    rows, keys = window.query_length, window.key_length
    first_see = band.high is None or rows + band.high >= 1
    last_see = band.low is None or window.global_length - rows + band.low < keys
    require(
        first_see and last_see,
        where,
        f"sparse_mode ({mode}) must show a key to one of any rank's {rows} rows, not hide all "
        f"{keys} keys from the {'last' if first_see else 'first'} of them",
        _EXPLICIT,
    )


def _moved(tokens: int, by: int) -> int:
    return tokens if tokens >= _NO_LIMIT else min(tokens + by, _NO_LIMIT)


def _check_rows(tensors: Mapping[str, Tensor | None], rows: int, seq_dim: int, where: str) -> None:
    for name, x in tensors.items():
        require(
            x is None or x.shape[seq_dim] == rows,
            where,
            f"{name} (shape {None if x is None else list(x.shape)}) must have {rows} rows in dim "
            f"{seq_dim}",
            "check input_layout against the tensors and the style's seq_dim",
        )


def _cut_per_head(
    args: dict[str, Any], heads: Range | None, num_heads: int | None, where: str
) -> None:
    for name in ("atten_mask", "pse"):
        if args.get(name) is not None and args[name].ndim > 2:
            args[name] = cut_heads(args[name], heads, num_heads, name, where)
    sink = args.get("sink")
    if sink is not None and heads is not None and sink.shape[0] == num_heads:
        args["sink"] = sink[heads[0] : heads[1]]


def _refuse_what_cannot_be_cut(
    args: Mapping[str, Any], mode: int, mask: Tensor | None, where: str
) -> None:
    if mask is not None and mode not in (0, 1, *_CAUSAL_MODES):
        raise fail(where, f"sparse_mode ({mode}) must be 0 to 4 under context parallel", _EXPLICIT)
    if args.get("dropout_mask") is not None:
        raise fail(where, "dropout_mask must be None: its bits are packed", "use keep_prob")
    pse_type = int(args.get("pse_type", 1))
    if args.get("pse") is not None and pse_type not in (0, 1):
        raise fail(where, f"pse_type ({pse_type}) must be 0 or 1", "pass pse with all its rows")


def _refuse_compressed_bias(pse: Tensor, window: AttentionWindow, where: str) -> None:
    """Refuse the last rows of an ALiBi bias, which could as well be the rows of this rank."""
    rows = pse.shape[-2]
    if rows == _BIAS_ROWS < window.global_length:
        raise fail(
            where,
            f"pse (shape {list(pse.shape)}) must not be compressed to its last {rows} rows, which "
            "the kernel allows for a whole square matrix only",
            f"pass pse with all {window.global_length} rows",
        )


def _is_compressed(mask: Tensor) -> bool:
    return mask.shape[-2:] == (COMPRESSED, COMPRESSED)


def _check_causal_mask(mask: Tensor, window: AttentionWindow, where: str) -> None:
    """Accept the compressed mask, and the full causal one that many models build instead."""
    if not _is_compressed(mask):
        cut_mask(mask, window, name="atten_mask", where=where)


def _compressed(mask: Tensor, q: Tensor) -> Tensor:
    """Modes 2, 3 and 4 define the mask; the tensor is only the pattern that the kernel wants."""
    return mask if _is_compressed(mask) else compressed_causal_mask(q.device)


@functools.cache
def _warn_mode_ignored(mode: int) -> None:
    """Say once per mode what the kernel does in silence."""
    warnings.warn(
        f"npu_fusion_attention: sparse_mode ({mode}) has no effect without atten_mask, so every "
        "row sees every key; pass the compressed 2048 x 2048 mask if it should be causal",
        stacklevel=4,
    )
