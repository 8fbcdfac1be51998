"""Look up the fields of a ``config.json``, whose names differ from family to family.

Each field has its aliases in the order in which they are tried. Keys are never searched
recursively: a vision tower has heads too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_tune.errors import UsageError

__all__ = [
    "ACTIVE_EXPERTS",
    "EXPERTS",
    "HEADS",
    "HEAD_SIZE",
    "HIDDEN",
    "KV_HEADS",
    "LAYERS",
    "LONGEST",
    "MLP",
    "MOST",
    "PREDICTION",
    "Fields",
    "text_config",
]

NESTED = (
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    ("thinker_config", "text_config"),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_SIZE = ("head_dim", "kv_channels", "attention_head_dim", "d_kv")
MLP = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
LONGEST = ("max_position_embeddings", "seq_length", "n_positions", "max_seq_len")


MOST = 10**15
"""Above all that a configuration counts."""


def _short(value: object) -> str:
    """Return a value as text of one line, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Fields:
    """Look up a field by its aliases; remember what was missing and what was assumed."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name
        self.missing: list[str] = []
        self.notes: list[str] = []

    def optional(self, aliases: tuple[str, ...]) -> int | None:
        """Return the first alias that is set, as an integer (``28.0`` is 28), or None."""
        for alias in aliases:
            value = self.config.get(alias)
            if value is not None:
                return self.whole(alias, value)
        return None

    def whole(self, key: str, value: object, least: int = 0) -> int:
        """Return the value of ``key`` as an integer (``28.0`` is 28) of at least ``least``."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MOST or value != int(value):  # type: ignore[operator, call-overload]
            raise UsageError(f"{self.name}: {key} ({_short(value)}) must be a whole number")
        if value < least:  # type: ignore[operator]
            raise UsageError(f"{self.name}: {key} ({value}) must be at least {least}")
        return int(value)  # type: ignore[call-overload, no-any-return]

    def size(self, aliases: tuple[str, ...]) -> int | None:
        """Return `optional`, and refuse 0: a size that is not there is null, or left out."""
        found = self.optional(aliases)
        if found == 0:
            alias = next(one for one in aliases if self.config.get(one) is not None)
            raise UsageError(f"{self.name}: {alias} (0) must be at least 1")
        return found

    def listed(self, key: str, kinds: tuple[type, ...] = (list,)) -> Any:
        """Return the list that ``key`` holds, or None where it is not set."""
        return self._of_type(key, kinds, "a list")

    def group(self, key: str) -> Any:
        """Return the JSON object that ``key`` holds, or None where it is not set."""
        return self._of_type(key, (dict,), "an object")

    def _of_type(self, key: str, kinds: tuple[type, ...], words: str) -> Any:
        value = self.config.get(key)
        if value is not None and not isinstance(value, kinds):
            raise UsageError(f"{self.name}: {key} ({_short(value)}) must be {words}")
        return value

    def required(self, what: str, aliases: tuple[str, ...], default: int | None = None) -> int:
        """Return the first alias that is set; remember what is missing and return 1."""
        value = self.optional(aliases)
        value = default if value is None else value
        if value is None:
            self.missing.append(f"{what} (tried {', '.join(aliases)})")
            return 1
        if value == 0:
            raise UsageError(f"{self.name}: {what} (0) must be at least 1")
        return value

    def stop_if_missing(self, family: str) -> None:
        """Raise one error that lists every missing field with the aliases tried."""
        if self.missing:
            raise UsageError(
                f"{self.name}: model_type {family!r} lacks {'; '.join(self.missing)}",
                "add the field to the config.json, or use one of a known family",
            )


def text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the text model's part of a configuration, and its path (``""`` for the root)."""
    if not any(config.get(alias) is not None for alias in HEADS):
        for path in NESTED:
            inner: Any = config
            for key in path:
                inner = inner.get(key) if isinstance(inner, Mapping) else None
            if isinstance(inner, Mapping):
                return inner, ".".join(path)
    return config, ""
