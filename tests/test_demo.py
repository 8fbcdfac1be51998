"""The demo ends with an error when a mode trains or sends otherwise than it should."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parent.parent / "benchmarks" / "demo.py"


@pytest.fixture(scope="module")
def differences() -> Callable[..., list[str]]:
    function: Callable[..., list[str]] = runpy.run_path(str(DEMO))["differences"]
    return function


def result(**changes: Any) -> dict[str, Any]:
    right = {
        "losses": [5.5, 5.25],
        "reference_losses": [5.5, 5.25],
        "gradient_difference": 2e-5,
        "measured": {"all_to_all": [16, 4096], "p2p": [0, 0]},
        "predicted": {"all_to_all": [16, 4096], "p2p": [0, 0]},
    }
    return {**right, **changes}


def test_ranks_that_agree_with_the_single_process_are_fine(
    differences: Callable[..., list[str]],
) -> None:
    assert differences("ulysses", [{"ulysses": result()}] * 4) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"losses": [5.5, 5.251]}, "ulysses, rank 1: loss 5.251 in step 2, not 5.25"),
        ({"losses": [math.nan, 5.25]}, "ulysses, rank 1: loss nan in step 1, not 5.5"),
        ({"gradient_difference": 2e-4}, "ulysses, rank 1: gradients differ by 2.0e-04"),
        ({"gradient_difference": math.nan}, "ulysses, rank 1: gradients differ by nan"),
        (
            {"measured": {"all_to_all": [20, 4096], "p2p": [0, 0]}},
            r"ulysses, rank 1: all_to_all sent [20, 4096] (calls, bytes), and the plan says",
        ),
    ],
    ids=["loss", "nan-loss", "gradient", "nan-gradient", "calls"],
)
def test_a_difference_on_any_rank_is_named(
    differences: Callable[..., list[str]], changes: dict[str, Any], reason: str
) -> None:
    ranks = [{"ulysses": result()}, {"ulysses": result(**changes)}]

    (problem,) = differences("ulysses", ranks)

    assert problem.startswith(reason)
