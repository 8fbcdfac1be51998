"""Part of the space, as it is typed: ``u=1,2,4 lb=on overlap=off``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hp_mesh.checks import divisors, nearest
from hp_tune.errors import UsageError
from hp_tune.workload import Config

__all__ = ["HEAD_GROUPS", "KV_CHUNKS", "Restriction", "read_restriction"]

HEAD_GROUPS = (2, 4)
"""Candidates: more groups are smaller messages and emptier devices."""

KV_CHUNKS = (4, 8)
"""Candidates: half and a quarter of the gathered K and V in memory."""

FIELDS = {
    "u": "ulysses_degree",
    "lb": "load_balance",
    "overlap": "overlap",
    "head_groups": "head_groups",
    "keep_kv": "keep_kv",
    "kv_chunks": "kv_chunks",
    "balance_hybrid": "balance_hybrid",
    "halo": "halo",
}
SPELLINGS = {"ulysses_degree": "u", "load_balance": "lb", "async": "overlap"}
SWITCH = {"on": True, "off": False}
NUMBERS: dict[str, tuple[int, ...]] = {
    "u": (),  # the divisors of the number of ranks
    "head_groups": HEAD_GROUPS,
    "kv_chunks": KV_CHUNKS,
    "halo": (),  # the divisors, and 0
}
"""Keys whose values are numbers, and which they may be beside 1."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """Values that are searched, by the field of `Config`; a field that is not there is free."""

    values: Mapping[str, tuple[int | bool, ...]] = field(default_factory=dict)

    def allows(self, config: Config) -> bool:
        """Return whether a configuration is in this part of the space."""
        return all(getattr(config, name) in values for name, values in self.values.items())

    def wants(self, name: str) -> bool:
        """Return whether a field is named, so that its values are searched without being asked."""
        return name in self.values

    def text(self) -> str:
        """Return it as it is typed, in a fixed order."""
        names = {name: key for key, name in FIELDS.items()}
        return " ".join(
            f"{names[name]}={','.join(_spelled(value) for value in values)}"
            for name, values in sorted(self.values.items())
        )


def read_restriction(words: str, cp_size: int) -> Restriction:
    """Return the part of the space that ``words`` name.

    Args:
        words: Such as ``u=1,2 lb=on,off``: keys ``u``, ``lb``, ``overlap``, ``head_groups``,
            ``keep_kv``, ``kv_chunks``, ``balance_hybrid`` and ``halo``, each with a list of values.
        cp_size: Number of CP ranks; every ``u`` and ``halo`` must divide it.
    """
    found: dict[str, tuple[int | bool, ...]] = {}
    for word in words.split():
        key, equals, listed = word.partition("=")
        key = SPELLINGS.get(key, key)
        if key not in FIELDS:
            close = nearest(key, FIELDS)
            raise UsageError(
                f"--space: unknown key {key!r}",
                f"did you mean {close!r}?" if close else f"known keys: {', '.join(FIELDS)}",
            )
        if not equals or not listed:
            raise UsageError(f"--space: {key} must have values", f"such as {key}={_example(key)}")
        name = FIELDS[key]
        if name in found:
            raise UsageError(f"--space: {key} must be given once", "list its values: u=1,2,4")
        values = [_value(key, value, cp_size) for value in listed.split(",")]
        found[name] = tuple(sorted(set(values)))
    return Restriction(found)


def _value(key: str, text: str, cp_size: int) -> int | bool:
    if key in NUMBERS:
        degrees = {"u": divisors(cp_size), "halo": [0, *divisors(cp_size)]}
        allowed = degrees.get(key, [1, *NUMBERS[key]])
        value = int(text) if text.isdecimal() else -1
        if value not in allowed:
            why = f", the divisors of --cp ({cp_size})" if key in degrees else ""
            raise UsageError(
                f"--space: {key} ({text}) must be among {', '.join(map(str, allowed))}{why}"
            )
        return value
    if text not in SWITCH:
        raise UsageError(f"--space: {key} ({text}) must be on or off")
    return SWITCH[text]


def _example(key: str) -> str:
    return "1,2" if key in NUMBERS else "on,off"


def _spelled(value: int | bool) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
