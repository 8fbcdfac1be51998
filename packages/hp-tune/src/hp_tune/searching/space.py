"""Which configurations exist: every point once, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hp_mesh.checks import divisors
from hp_tune.searching.restriction import HEAD_GROUPS, KV_CHUNKS, Restriction
from hp_tune.workload import Config

__all__ = ["Duplicate", "Sliding", "async_available", "enumerate_space"]

Sliding = Literal["none", "some", "all"]
"""How many of a model's layers see a window only."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A spelling that runs exactly as another point does."""

    config: Config
    same_as: Config
    reason: str


def async_available() -> bool:
    """Return whether this hp-cp has `AsyncContextParallel`, without importing anything of it."""
    spec = find_spec("hp_cp")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "async_style.py").is_file() for folder in folders or ())


def enumerate_space(
    cp_size: int,
    *,
    overlap: bool | None = None,
    variants: bool = False,
    only: Restriction | None = None,
    sliding: Sliding = "none",
    chunks: bool = False,
) -> tuple[list[Config], list[Duplicate]]:
    """Return every distinct configuration on ``cp_size`` ranks in a fixed order, and duplicates.

    Args:
        cp_size: Number of CP ranks.
        overlap: Whether asynchronous exchanges exist; None asks the installed hp-cp.
        variants: Also K and V that are gathered again (``keep_kv=False``), load balance and windows
            that are fetched in Hybrid and, where asynchronous exchanges exist, groups of heads.
        only: The part that is searched; what it names is searched without ``variants``, too.
        sliding: Where there are such layers, every point also with ``halo``, in Colossal.
        chunks: Also K and V that are gathered in parts. It saves memory; its time on an accelerator
            is not well known, for want of a fused kernel for streams.
    """
    overlap = async_available() if overlap is None else overlap
    only = only or Restriction()
    groups = HEAD_GROUPS if variants or only.wants("head_groups") else ()
    keeps = (True, False) if variants or only.wants("keep_kv") else (True,)
    parts = KV_CHUNKS if chunks or only.wants("kv_chunks") else ()
    hybrids = variants or only.wants("balance_hybrid")
    points: list[Config] = []
    duplicates: list[Duplicate] = []
    for u in divisors(cp_size):
        found = [
            config
            for balance in (False, True)
            for config in _choices(u, balance, overlap, groups, keeps)
        ]
        if u < cp_size:
            found += [Config(ulysses_degree=u, kv_chunks=number) for number in parts]
        if 1 < u < cp_size and hybrids:
            found += [Config(ulysses_degree=u, balance_hybrid=True, keep_kv=keep) for keep in keeps]
        halos = [
            config.model_copy(update={"halo": degree}) if degree else config
            for config in found
            for degree in _halos(config, cp_size, sliding, variants, only)
        ]
        for config in halos:
            if not only.allows(config):
                continue
            same_as, reason = _canonical(config, cp_size, sliding)
            if same_as == config:
                points.append(config)
            else:
                duplicates.append(Duplicate(config, same_as, reason))
    return points, duplicates


def _choices(
    u: int, balance: bool, overlap: bool, groups: Sequence[int], keeps: Sequence[bool]
) -> list[Config]:
    modes = [(False, 1)] + [(True, 1)] * overlap
    modes += [(True, number) for number in groups if overlap and not balance]
    return [
        Config(
            ulysses_degree=u, load_balance=balance, overlap=ahead, head_groups=number, keep_kv=keep
        )
        for ahead, number in modes
        for keep in keeps
    ]


def _halos(
    config: Config, cp_size: int, sliding: Sliding, variants: bool, only: Restriction
) -> list[int]:
    """Return the degrees of sliding layers to be tried beside a configuration of the others."""
    if only.wants("halo"):
        return [int(degree) for degree in only.values["halo"]]
    u = config.ulysses_degree
    if sliding == "none" or cp_size == 1:
        return [0]
    if sliding == "all":  # there are no others
        return (
            [0, u] if config == Config(ulysses_degree=u) and _fetches(u, cp_size, variants) else [0]
        )
    return [0, 1, *([u] if u > 1 and _fetches(u, cp_size, variants) else [])]


def _fetches(u: int, cp_size: int, variants: bool) -> bool:
    """Return whether to try windows under a degree: Hybrid sends more, but for very long ones."""
    return u == 1 or (variants and u < cp_size)


def _canonical(config: Config, cp_size: int, sliding: Sliding) -> tuple[Config, str]:
    if cp_size == 1:
        return Config(ulysses_degree=1), "one rank exchanges nothing"
    if sliding == "all" and config != config.of_layers(slide=True):
        return config.of_layers(slide=True), "all layers slide"
    if config.load_balance and config.overlap and config.ulysses_degree == 1:
        same = config.model_copy(update={"overlap": False})
        return same, "load_balance runs synchronously"
    if not config.keep_kv and config.ulysses_degree == cp_size:
        return config.model_copy(update={"keep_kv": True}), "Ulysses gathers no K and V"
    return config, ""
