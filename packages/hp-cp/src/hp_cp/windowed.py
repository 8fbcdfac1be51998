"""``sliding_window=w``: attention ops that fetch the keys of a window, in place of a gather.

Inside the boundary k and v are the whole sequence, but stay sharded (`hp_mesh.streamed`); when an
attention op with a window comes, the keys that it needs are fetched. Nothing is inferred: the op
says its own window, and one that is wider than the style's is refused, as is a causal flag without
a window. What is computed never depends on the option, only what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from hp_comm import fetch_rows
from hp_cp.attention.band import KeySpans, band_mask
from hp_cp.halo import halo_rows
from hp_cp.unwrap import keys_beside, on_mesh
from hp_mesh.checks import fail, read_integers, require
from hp_mesh.streamed import Streamed
from hp_mesh.view import View
from hp_mesh.window import Range

__all__ = [
    "Halo",
    "check_band",
    "check_documents",
    "check_mask",
    "drop_front",
    "fetch_band",
    "fetch_keys",
    "halo_of",
    "rows_of_mask",
]

_ROWS = 1024
"""Rows of a mask that are checked at a time."""


@dataclass(frozen=True, eq=False)
class Halo(Streamed):
    """k and v of one call, of which the keys of a window are fetched when attention asks.

    Attributes:
        window: How many keys a query may see, its own included.
        sinks: How many first keys every query may see.
    """

    window: int
    sinks: int

    def refusal(self, name: str) -> ValueError:
        """Return the error for an op that would read keys that are not here."""
        return fail(
            self.where,
            f"{name} inside the boundary needs the whole of k or v, of which {self.option} keeps "
            "this rank's shard, and fetches the keys of a window for an attention op that has one",
            f"call {_OPS}, or leave {self.option} out",
        )

    def check_window(self, where: str, what: str, window: int | None, sinks: int = 0) -> None:
        """Refuse an op that sees more than is fetched; all ranks see the same numbers.

        Args:
            where: Name of the op.
            what: What it was told, as the user typed it.
            window: How many keys its queries see; None for all.
            sinks: How many first keys they see.
        """
        require(
            window is not None and window <= self.window and sinks <= self.sinks,
            where,
            f"{what} must see at most the keys that {self.option} fetches: the last {self.window} "
            f"and the first {self.sinks}",
            f"give the style the window of the call, or leave {self.option} out",
        )


_OPS = (
    "hp_cp.sliding_window_attention, hp_cp.packed_attention, npu_fusion_attention with "
    "sparse_mode=4, varlen_attn, or scaled_dot_product_attention with a mask of the window"
)


def halo_of(view: View, key: object, value: object, where: str) -> Halo | None:
    """Return how the keys of an op are to be fetched; None if they are all here.

    Raises:
        ValueError: If only one of the two is streamed, or it is streamed in another way.
    """
    streamed = view.streamed
    if streamed is None or not (streamed.holds(key) or streamed.holds(value)):
        return None
    if not isinstance(streamed, Halo):
        raise streamed.refusal(where.rpartition(" ")[2])
    require(
        streamed.holds(key) and streamed.holds(value),
        where,
        f"under {streamed.option} key and value must both be made of the module's k and v",
        f"leave {streamed.option} out",
    )
    return streamed


def fetch_keys(
    view: View, halo: Halo, q: DTensor, key: Tensor, value: Tensor, seq_dim: int, where: str
) -> tuple[Tensor, Tensor, KeySpans]:
    """Return the local keys and values that the rows of ``q`` on this rank see, and their places.

    Args:
        view: The active view.
        halo: From `halo_of`.
        q: The queries.
        key: The keys, with the dims of ``q``.
        value: The values.
        seq_dim: Dim of the sequence in all three.
        where: Name of the op, for errors.
    """
    k, v = on_mesh(view, key), on_mesh(view, value)
    placed = [x.placements[halo.axis] for x in (q, k, v)]
    require(
        all(p.is_shard(seq_dim) for p in placed) and k.size(seq_dim) == q.size(seq_dim),
        where,
        f"query, key and value ({placed} over the ranks that share the sequence) must have one "
        f"sequence, in dim {seq_dim}",
        f"check the layout, or leave {halo.option} out",
    )
    local = [keys_beside(view, x, q, seq_dim, where, streamed_axis=halo.axis) for x in (k, v)]
    size = view.mesh.size(halo.axis)
    rows = halo_rows(size, local[0].size(seq_dim), halo.window, halo.sinks)
    k_local, v_local = fetch_rows(local, halo.group, seq_dim=seq_dim, rows=rows)
    *first, band = rows[view.mesh.get_local_rank(halo.axis)]
    return k_local, v_local, KeySpans(first[0][1] if first else 0, band)


def fetch_band(
    view: View, halo: Halo, q: DTensor, key: Tensor, value: Tensor, seq_dim: int, where: str
) -> tuple[Tensor, Tensor, Range]:
    """Do as `fetch_keys` for an op that knows no sinks; return the positions of the keys."""
    k, v, spans = fetch_keys(view, halo, q, key, value, seq_dim, where)
    length = spans.length - spans.sinks
    k, v = (x.narrow(seq_dim, spans.sinks, length) for x in (k, v))
    return k, v, spans.band


def check_documents(
    halo: Halo,
    ends: Sequence[Sequence[int]],
    window: int | None,
    causal: bool,
    where: str,
) -> None:
    """Refuse documents of which a query sees more than is fetched.

    Args:
        halo: The window that is fetched.
        ends: Cumulative ends of the documents' queries and of their keys; with other lengths a
            query's own key is elsewhere.
        window: How many keys the op shows to a query; None for all up to its own.
        causal: Whether it shows no later key.
        where: Name of the op, for errors.
    """
    query_ends, key_ends = ends
    require(
        causal and list(query_ends) == list(key_ends),
        where,
        f"documents must be causal, with keys of the same lengths as their queries, under "
        f"{halo.option}",
        f"leave {halo.option} out",
    )
    longest = max((b - a for a, b in pairwise([0, *key_ends])), default=0)
    seen = longest if window is None else min(window, longest)
    what = f"documents of up to {longest} tokens"
    halo.check_window(where, what if window is None else f"a window of {window} in {what}", seen)


def check_band(halo: Halo, given: Mapping[str, Any], version: int, layout: str, where: str) -> None:
    """Refuse a call of ``npu_fusion_attention`` that sees more than is fetched.

    Args:
        halo: The window that is fetched.
        given: The kernel's other arguments.
        version: 1, 2 or 3: how it spells its tokens.
        layout: ``input_layout``.
        where: Name of the op, for errors.
    """
    word = "tokens" if version == 2 else "tockens"
    mode = int(given.get("sparse_mode") or 0)
    pre, after = (given.get(f"{name}_{word}") for name in ("pre", "next"))
    require(
        mode == 4 and given.get("atten_mask") is not None and after is not None and after <= 0,
        where,
        f"sparse_mode ({mode}) must be 4 with atten_mask and next_{word}=0 under {halo.option}, so "
        "that the call says its window",
        f"set pre_{word}={halo.window - 1}, or leave {halo.option} out",
    )
    require(
        given.get("key_rope") is None,
        where,
        f"key_rope must be None under {halo.option}, which fetches key and value",
        f"leave {halo.option} out",
    )
    halo.check_window(where, f"pre_{word} ({pre})", None if pre is None else int(pre) + 1)
    if layout == "TND":
        names = ("actual_seq_qlen", "actual_seq_kvlen")
        ends = [read_integers(where, name, given.get(name)) for name in names]
        check_documents(halo, ends, int(pre or 0) + 1, True, where)


_checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def rows_of_mask(mask: Tensor, start: int, rows: int, spans: KeySpans) -> Tensor:
    """Return ``rows`` rows of a mask ``[..., S, S]`` from ``start`` on, over the keys of ``spans``.

    ``[..., rows, keys]``.
    """
    mine = mask.narrow(-2, start, rows)
    low, high = spans.band
    columns = mine.narrow(-1, low, high - low)
    return torch.cat([mine.narrow(-1, 0, spans.sinks), columns], -1) if spans.sinks else columns


def check_mask(halo: Halo, mask: Tensor, length: int, where: str) -> None:
    """Refuse a mask that shows a key outside the window, to any row; looked at once for each mask.

    Args:
        halo: The window.
        mask: Bool or float, ``[..., S, S]``, plain: whole on every rank, so that all refuse it.
        length: ``S``.
        where: Name of the op, for errors.
    """
    require(
        not isinstance(mask, DTensor) and mask.ndim > 1 and mask.shape[-2:] == (length, length),
        where,
        f"attn_mask (shape {list(mask.shape)}) must be a plain tensor with all {length} rows and "
        f"keys under {halo.option}, so that every rank can see that it stays within the window",
        f"build it for the whole sequence, or call {_OPS.partition(',')[0]}",
    )
    facts = (mask._version if not mask.is_inference() else 0, halo.window, halo.sinks)
    if mask in _checked and _checked[mask] == facts:
        return
    keys = torch.arange(length, device=mask.device)
    for low in range(0, length, _ROWS):
        high = min(low + _ROWS, length)
        part = mask.detach()[..., low:high, :]
        visible = part if part.dtype == torch.bool else part > -torch.inf
        outside = ~band_mask(keys[low:high], keys, halo.window, halo.sinks)
        seen = (visible & outside).flatten(0, -3).any(0) if mask.ndim > 2 else visible & outside
        if bool(seen.any()):
            row, key = (int(i) for i in seen.nonzero()[0])
            raise fail(
                where,
                f"attn_mask (shape {list(mask.shape)}) shows key {key} to row {row + low}, which "
                f"{halo.option} does not fetch: the last {halo.window} keys and the first "
                f"{halo.sinks}",
                "hide it with False or -inf, give the style the window of the mask, or leave "
                f"{halo.option} out",
            )
    _checked[mask] = facts


def drop_front(ends: Sequence[int], missing: int) -> list[int]:
    """Return the ends of documents of which the first ``missing`` keys are not here."""
    return [max(end - missing, 0) for end in ends]
