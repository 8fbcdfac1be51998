"""One table of tolerances, and the comparison that reads it.

The table is the house's promise about numbers; loosening an entry is a change of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hp_mesh.checks import fail

__all__ = ["TOLERANCES", "Kind", "assert_close", "tolerance"]

Kind = Literal["forward", "grad", "loss"]

TOLERANCES: Mapping[torch.dtype, Mapping[Kind, float]] = {
    torch.float64: {"forward": 1e-9, "grad": 1e-8, "loss": 1e-9},
    torch.float32: {"forward": 1e-5, "grad": 1e-4, "loss": 1e-5},
    torch.float16: {"forward": 2e-3, "grad": 5e-3, "loss": 1e-3},
    torch.bfloat16: {"forward": 1.6e-2, "grad": 4e-2, "loss": 1e-2},
}
"""Largest ``|actual - expected| - tol * |expected|``, by dtype and what is compared."""


def tolerance(dtype: torch.dtype, kind: Kind = "forward") -> float:
    """Return the tolerance of ``dtype``; 0.0 for integers and booleans, which must be equal."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    if dtype not in TOLERANCES or kind not in TOLERANCES[dtype]:
        raise fail("assert_close", f"({dtype}, {kind!r}) must have an entry in TOLERANCES")
    return TOLERANCES[dtype][kind]


def assert_close(actual: Any, expected: Any, *, kind: Kind = "forward", name: str = "") -> None:
    """Assert that tensors agree within the table; lists, tuples and dicts entry by entry.

    Shapes, dtypes and the places of NaN must be the same. The tolerance comes from the dtype, both
    relative and absolute. None equals only None, so that a missing gradient is seen.

    Args:
        actual: What the code under test gave.
        expected: The reference, of the same structure.
        kind: ``"forward"``, ``"grad"`` or ``"loss"``: the column of the table.
        name: Put in front of the message.
    """
    at = f"{name}: " if name else ""
    if isinstance(expected, Mapping):
        assert set(actual) == set(expected), f"{at}keys {sorted(actual)} != {sorted(expected)}"
        for key in expected:
            assert_close(actual[key], expected[key], kind=kind, name=f"{name}[{key!r}]")
        return
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(actual) == len(expected), f"{at}{len(actual)} entries, not {len(expected)}"
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, kind=kind, name=f"{name}[{index}]")
        return
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        assert type(actual) is type(expected) and actual == expected, f"{at}{actual} != {expected}"
        return
    tol = tolerance(expected.dtype, kind)
    torch.testing.assert_close(
        actual.detach(),
        expected.detach(),
        rtol=tol,
        atol=tol,
        equal_nan=True,
        msg=lambda text: f"{at}{text} ({kind}, tolerance {tol:g} for {expected.dtype})",
    )
