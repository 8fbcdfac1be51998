"""Packed documents (layout TND): which of them a rank's rows belong to, and which keys they see.

Lengths are inclusive prefix sums over all documents. A document that straddles two ranks is cut in
two: the earlier rank keeps the keys up to its last row, the later rank keeps all of them, so the
bottom-right corner of each part stays on the document's own diagonal::

    documents      |  a  |     b     | c |        actual_seq_qlen = [3, 9, 11]
    rank 0 of 2    rows 0-5: a, b[0:3]            qlen [3, 6], keys 0-5,  kvlen [3, 6]
    rank 1 of 2    rows 6-10: b[3:6], c           qlen [3, 5], keys 3-10, kvlen [6, 8]
"""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hp_mesh.checks import fail, read_integers, require
from hp_mesh.documents import packed_window
from hp_mesh.window import AttentionWindow, Range

__all__ = ["cut_documents"]


def cut_documents(
    args: MutableMapping[str, Any],
    window: AttentionWindow,
    mode: int,
    band_ends_at_diagonal: bool,
    where: str,
    first_held: int = 0,
) -> Range:
    """Rewrite ``actual_seq_qlen`` and ``actual_seq_kvlen`` in place for the window's rows.

    Args:
        args: The kernel's keyword arguments; lengths may be ints or, in version 3, a tensor.
        window: The rows of the packed sequence that are here.
        mode: Sparse mode of the call; without ``atten_mask`` it has no effect.
        band_ends_at_diagonal: Whether a band (mode 4) shows no key past the diagonal.
        where: Name of the op, for errors.
        first_held: First key that is here; a band shows none before it.

    Returns:
        The range of keys that the local documents see, from ``first_held`` on.
    """
    causal = args.get("atten_mask") is not None
    queries = _ranges(args, "actual_seq_qlen", window.global_length, where)
    keys = _ranges(args, "actual_seq_kvlen", window.key_length, where)
    _check(args, queries, keys, mode, causal, band_ends_at_diagonal, where)

    found = packed_window(
        (window.query_start, window.query_end),
        [end for _, end in queries],
        [end for _, end in keys],
        causal=causal,
    )
    assert found.query_lengths is not None and found.key_lengths is not None, "packed"
    args["actual_seq_qlen"] = _like(args["actual_seq_qlen"], list(found.query_lengths))
    first, last = found.keys
    start = max(first, first_held)
    kept = [max(end - (start - first), 0) for end in found.key_lengths]
    args["actual_seq_kvlen"] = _like(args["actual_seq_kvlen"], kept)
    return start, last


def _ranges(args: MutableMapping[str, Any], name: str, total: int, where: str) -> list[Range]:
    """Return ``[start, stop)`` of every document, checked against the whole packed length."""
    value = args.get(name)
    if value is None:
        raise fail(where, f"{name} (None) must be given with input_layout 'TND'")
    ends = read_integers(where, name, value)
    ranges = list(itertools.pairwise([0, *ends]))
    require(
        bool(ends) and ends[-1] == total and all(start <= stop for start, stop in ranges),
        where,
        f"{name} ({ends}) must be ascending prefix sums that end at {total}, the whole packed "
        "length",
        "pass those of the whole sequence on every rank; a padded tail is a document of its own",
    )
    return ranges


def _check(
    args: MutableMapping[str, Any],
    queries: Sequence[Range],
    keys: Sequence[Range],
    mode: int,
    causal: bool,
    band_ends_at_diagonal: bool,
    where: str,
) -> None:
    """Refuse what no cut of the keys can express, whichever rank meets it."""
    require(
        len(queries) == len(keys),
        where,
        f"actual_seq_qlen ({len(queries)} documents) must have as many entries as "
        f"actual_seq_kvlen ({len(keys)})",
    )
    if args.get("pse") is not None:
        raise fail(where, "pse must be None with input_layout 'TND' under context parallel")
    if not causal:
        return
    if mode in (0, 1):
        raise fail(
            where,
            f"sparse_mode ({mode}) must be 2, 3 or 4 when atten_mask comes with input_layout 'TND'",
            "use sparse_mode=3 with the compressed mask for document-local causal attention",
        )
    for (a, b), (c, e) in zip(queries, keys, strict=True):
        if mode == 2 and b - a != e - c:
            raise fail(
                where,
                f"sparse_mode (2) must meet documents with as many keys ({e - c}) as queries "
                f"({b - a})",
                "use sparse_mode=3 if the last query sees the last key",
            )
        if e - c < b - a:
            raise fail(
                where,
                f"sparse_mode ({mode}) must meet documents with at least as many keys ({e - c}) "
                f"as queries ({b - a})",
            )
    if not band_ends_at_diagonal:
        raise fail(
            where,
            "the band's next tokens must be at most 0 with input_layout 'TND' under context "
            "parallel",
            "set them to 0 for a causal sliding window",
        )


def _like(given: Any, ends: list[int]) -> Any:
    """Return ``ends`` in the form in which the lengths were given."""
    if isinstance(given, Tensor):
        return torch.tensor(ends, dtype=given.dtype, device=given.device)
    return type(given)(ends) if isinstance(given, tuple) else ends
