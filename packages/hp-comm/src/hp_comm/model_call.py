"""A call of a transformers model by the names of its arguments: hp-cp and hp-dsa read it alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hp_mesh.checks import fail, read_integers, require, require_type
from hp_mesh.cu_seqlens import read_cu_seqlens

__all__ = [
    "arguments_by_name",
    "asks_for_attentions",
    "check_logits_to_keep",
    "read_cu_seq_lens",
    "tokens_of",
]


def arguments_by_name(
    model: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``model.forward``, the positional ones by their names too."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]  # type: ignore[attr-defined]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def tokens_of(named: Mapping[str, Any], where: str) -> Tensor:
    """Return what the sequence is made of: ``input_ids`` ``[B, S/P]``, or ``inputs_embeds``.

    Raises:
        ValueError: Neither is given, or a row without its batch.
        TypeError: It is no tensor.
    """
    for name in ("input_ids", "inputs_embeds"):
        tokens = named.get(name)
        if tokens is not None:
            require_type(where, name, tokens, Tensor, "a tensor")
            found: Tensor = tokens
            require(
                found.ndim > 1,
                where,
                f"{name} (shape {tuple(found.shape)}) must have a batch dim before the sequence",
                "a packed row is a batch of one, x[None]",
            )
            return found
    raise fail(where, "input_ids or inputs_embeds must be given by keyword or first argument")


def read_cu_seq_lens(
    named: Mapping[str, Any], batch: int, whole: int, where: str
) -> tuple[int, ...] | None:
    """Return the boundaries that a collator for flash attention adds, ``(0, ..., S)``.

    Args:
        named: The arguments of the call; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are those of the
            whole sequence on every rank.
        batch: Rows of the batch: one, since the documents lie in one sequence.
        whole: ``S``.
        where: Name of the model, for errors.
    """
    names = ("cu_seq_lens_q", "cu_seq_lens_k")
    given = {name: named[name] for name in names if named.get(name) is not None}
    if not given:
        return None
    found = {name: read_integers(where, name, one) for name, one in given.items()}
    q, k = (found.get(name) for name in names)
    require(
        q is not None and (k is None or k == q),
        where,
        f"cu_seq_lens_q ({q}) and cu_seq_lens_k ({k}) must be the same boundaries",
        "give cu_seq_lens_q, or both",
    )
    assert q is not None, "just required"
    require(
        batch == 1,
        where,
        f"the batch ({batch}) must be 1 with cu_seq_lens_q: all documents are in one row",
        "concatenate the rows, and say where they end with cu_seq_lens_q",
    )
    return tuple(read_cu_seqlens(where, q, whole, name="cu_seq_lens_q", whole=True))


def asks_for_attentions(config: object, named: Mapping[str, Any]) -> bool:
    """Return whether a call, or else the model's config, asks for the weights of attention."""
    asked = named.get("output_attentions")
    return bool(getattr(config, "output_attentions", False) if asked is None else asked)


def check_logits_to_keep(named: Mapping[str, Any], where: str) -> None:
    """Refuse to cut logits at the end of a shard."""
    keep = named.get("logits_to_keep", 0)
    require(
        isinstance(keep, int) and keep == 0,
        where,
        f"logits_to_keep ({keep!r}) must be 0 under context parallelism: it would count from the "
        "end of every rank's shard",
        "cut the logits afterwards",
    )
