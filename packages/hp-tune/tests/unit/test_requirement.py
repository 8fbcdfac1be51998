"""What ``--require`` reads, and what it says when it does not."""

from __future__ import annotations

import pytest

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import UsageError
from hp_tune.models.hf_config import read_model
from hp_tune.searching.engine import search
from hp_tune.searching.ranking import Ranked
from hp_tune.searching.requirement import NAMES, read_requirement
from hp_tune.workload import Workload


@pytest.fixture(scope="module")
def best() -> Ranked:
    """A priced configuration."""
    workload = Workload(seq_len=65536, cp_size=8)
    found = search(read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2"), workload, overlap=False)
    return found.ranking[0]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("memory_gib <= 52", True),
        ("memory_gib<=52 and imbalance == 1", True),
        ("u != 1 or imbalance <= 1.0", True),
        ("u != 1 or imbalance <= 1.0 and memory_gib < 1", False),  # and binds closer
        ("(u != 1 or imbalance <= 1.0) and memory_gib < 1e3", True),
        ("52 >= memory_gib", True),
        ("forward_ms < backward_ms", True),
        ("((u == 1))", True),
        ("collectives > 0 and sent_gib > 0 and exposed_ms >= 0 and time_ms > 1", True),
        ("time_ms < 1", False),
    ],
)
def test_conditions_are_those_of_arithmetic(best: Ranked, text: str, holds: bool) -> None:
    """Comparisons of names and numbers, and, or, parentheses."""
    found = read_requirement(text).check(best)

    assert (found is None) == holds
    if found is not None:
        assert found.rule == "R01"
        assert found.numbers["require"] == text
        assert found.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("memory_gb <= 52", r"column 1: unknown name 'memory_gb'; did you mean 'memory_gib'\?"),
        ("memory_gib = 52", r"column 12: '=' cannot be read"),
        ("memory_gib", r"column 11: a comparison \(.*\) is missing"),
        ("memory_gib <=", r"column 14: a name or a number is missing"),
        ("memory_gib <= 52 u == 1", r"column 18: 'u' is not expected"),
        ("(memory_gib <= 52", r"a closing parenthesis is missing"),
        ("memory_gib <= 52 and", r"a name or a number is missing"),
        ("__import__('os').system('x')", r"unknown name '__import__'|cannot be read"),
        ("1 < 2 < 3", r"column 7: '<' is not expected"),
        ("", r"a name or a number is missing"),
    ],
)
def test_what_does_not_read_is_said_with_its_column(text: str, problem: str) -> None:
    """Nothing is evaluated, everything else is an error with a place."""
    with pytest.raises(UsageError, match=problem):
        read_requirement(text)


def test_every_name_is_a_number_of_a_configuration(best: Ranked) -> None:
    """None is a promise without a value."""
    for name, value in NAMES.items():
        assert isinstance(value(best), float), name
