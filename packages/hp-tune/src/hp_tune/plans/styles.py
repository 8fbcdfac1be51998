"""The styles that an entry of a plan stands for, by name and arguments; torch waits for `build`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_mesh.layout import LAYOUTS

if TYPE_CHECKING:
    from hp_tune.plans.plan import Entry

__all__ = ["StyleSpec", "style_specs"]


@dataclass(frozen=True, slots=True)
class StyleSpec:
    """A style that is not built yet.

    Attributes:
        package: ``hp_cp`` or ``hp_dsa``.
        name: The class.
        arguments: Keyword arguments of its constructor.
    """

    package: str
    name: str
    arguments: Mapping[str, Any]

    def build(self, **overrides: Any) -> Any:
        """Return the style object, ``overrides`` in place of its own arguments; imports torch."""
        kind = getattr(importlib.import_module(self.package), self.name)
        return kind(**{**self.arguments, **overrides})


def style_specs(entry: Entry) -> dict[str, StyleSpec]:
    """Return the styles of an entry by the boundary that they go on.

    One for ``attention``; for sparse attention those of ``indexer``, ``attention`` and
    ``indexer_loss``. There, load balance is that of the indexer: its queries travel to the mirror
    rank and back, data stays in natural order, and the sparse core is even by itself.

    Under ``halo`` sliding layers have a style of their own, ``sliding_attention``, for each window
    if there are several: ``sliding_attention_128``. Then ``attention`` is that of all others, and
    is not there if there are none.
    """
    config = entry.best.config
    others = _style_specs(entry) if None in entry.windows or not config.halo else {}
    return others | (_window_specs(entry) if config.halo else {})


def _window_specs(entry: Entry) -> dict[str, StyleSpec]:
    """Return the style of each kind of sliding layer."""
    config, dims = entry.best.config, LAYOUTS[entry.layout]
    windows = [window for window in entry.windows if window is not None]
    found: dict[str, StyleSpec] = {}
    for window, sinks in windows:
        name = "sliding_attention" if len(windows) == 1 else f"sliding_attention_{window}"
        arguments: dict[str, Any] = {
            "seq_dim": dims.seq_dim,
            "head_dim": dims.head_dim,
            "ulysses_degree": config.halo,
            "sliding_window": window,
        }
        arguments |= {"sink_tokens": sinks} if sinks else {}
        found[name] = StyleSpec("hp_cp", "ContextParallel", arguments)
    return found


def _style_specs(entry: Entry) -> dict[str, StyleSpec]:
    """Return the styles of all layers, or under ``halo`` of those that do not slide."""
    config, dims = entry.best.config, LAYOUTS[entry.layout]
    ahead = "Async" if config.overlap else ""
    if entry.styles == "hp_dsa":
        shared: dict[str, Any] = {"layout": "TND" if entry.layout == "TND" else "BSND"}
        shared |= {} if config.keep_kv else {"keep_keys": False}
        balance = {"load_balance": True, "order": "contiguous"} if config.load_balance else {}
        return {
            "indexer": StyleSpec("hp_dsa", f"{ahead}DSAIndexerContextParallel", shared | balance),
            "attention": StyleSpec("hp_dsa", f"{ahead}DSASparseAttentionContextParallel", shared),
            "indexer_loss": StyleSpec("hp_dsa", f"{ahead}DSAIndexerLossContextParallel", shared),
        }
    arguments: dict[str, Any] = {
        "seq_dim": dims.seq_dim,
        "head_dim": dims.head_dim,
        "ulysses_degree": config.ulysses_degree,
        "load_balance": config.load_balance,
    }
    arguments |= {} if config.keep_kv else {"keep_kv": False}
    arguments |= {} if config.kv_chunks == 1 else {"kv_chunks": config.kv_chunks}
    arguments |= {"balance_hybrid": True} if config.balance_hybrid else {}
    arguments |= {} if config.head_groups == 1 else {"head_groups": config.head_groups}
    return {"attention": StyleSpec("hp_cp", f"{ahead}ContextParallel", arguments)}
