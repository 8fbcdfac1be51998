"""Sequence lengths: histograms, bins, and one plan with a bucket per winner."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import PlanMismatchError, UsageError
from hp_tune.models.hf_config import read_model
from hp_tune.searching.buckets import search_lengths
from hp_tune.searching.budget import Budget
from hp_tune.searching.lengths import MOST_LENGTHS, binned, read_histogram
from hp_tune.workload import Workload

from ._fake_measurer import FakeMeasurer

QWEN, ATLAS = "Qwen2.5-7B", "atlas-800t-a2"


def test_a_histogram_is_text_json_or_yaml(tmp_path: Path) -> None:
    """Counts become shares; comments, commas and missing counts are read."""
    expected = [(4096, 0.25), (8192, 0.75)]
    for name, text in {
        "h.txt": "# length count\n8192 6\n4096, 2  # short\n\n",
        "h.json": '{"8192": 3, "4096": 1}',
        "h.yaml": "8192: 0.3\n4096: 0.1\n",
        "h.csv": "8192\n8192\n8192\n4096\n",
    }.items():
        path = tmp_path / name
        path.write_text(text)
        found = read_histogram(path)
        assert [length for length, _ in found] == [length for length, _ in expected], name
        assert [share for _, share in found] == pytest.approx([share for _, share in expected])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must have a length at least"),
        ("8192 many", r"h.txt:1: a length and a count \('8192': 'many'\)"),
        ("0 3", "must be a whole number of at least 1"),
        ("8192 -3", "a positive number"),
        ("8192 nan", "a positive number"),
        ("9" * 5000, "must be a whole number of at least 1"),
        ("8192 1e308\n4096 1e308", "must be of sizes that can be added up"),
        ("8192 1e-320\n4096 1e300", "must be of sizes that can be added up"),
        ("8K 3", "must be a whole number"),
        ("1 2 3", "h.txt:1: a line must have a length and a count, not more"),
    ],
)
def test_what_is_no_histogram_is_said_with_its_line(
    tmp_path: Path, text: str, problem: str
) -> None:
    """And a file that is not there."""
    path = tmp_path / "h.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_histogram(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_histogram(tmp_path / "none.txt")


def test_few_lengths_stay_and_many_are_put_into_bins() -> None:
    """All can be split over the ranks; shares add up; a bin stands for its mean."""
    assert binned([(1000, 0.5), (4096, 0.5)], 16) == [(1008, 0.5), (4096, 0.5)]
    many = [(length, 1 / 3000) for length in range(100, 3100)]
    found = binned(many, 16)

    assert len(many) > MOST_LENGTHS >= len(found)
    assert all(length % 16 == 0 for length, _ in found)
    assert sum(share for _, share in found) == pytest.approx(1)
    assert [length for length, _ in found] == [128, 208, 400, 784, 1552, 2576]
    assert binned([(3, 1.0)], 16) == [(16, 1.0)]


def search_of(*lengths: int) -> list[tuple[int, float]]:
    """Equal shares."""
    return [(length, 1 / len(lengths)) for length in lengths]


def test_neighbours_with_one_winner_are_one_bucket_and_select_picks_by_bucket() -> None:
    """Buckets meet at the geometric mean, and serve from half to twice what was searched."""
    found = search_lengths(
        read_model(QWEN), read_cluster(ATLAS), Workload(seq_len=1, cp_size=8, handoffs=True),
        [(8192, 0.5), (49152, 0.2), (65536, 0.3)], overlap=True,
    )  # fmt: skip
    assert found.error is None
    assert found.plan is not None
    short, long = found.plan.entries

    assert (short.when.lengths, long.when.lengths) == ((8192,), (49152, 65536))
    assert (short.when.seq, long.when.seq) == ((4096, 20066), (20067, 131072))
    assert (short.when.weight, long.when.weight) == (0.5, 0.5)
    assert long.when.seq_len == 65536  # the larger share
    assert short.best.config != long.best.config
    assert not short.recompute
    for length, entry in ((4096, short), (16384, short), (20064, short), (20080, long),
                          (131072, long)):  # fmt: skip
        assert found.plan.select(seq_len=length, world_size=8) == entry
    for outside, entry in ((2048, short), (262144, long)):
        with pytest.raises(PlanMismatchError, match="nearest lengths of the plan"):
            found.plan.select(seq_len=outside, world_size=8)
        assert found.plan.select(seq_len=outside, world_size=8, extrapolate=True) == entry


def test_a_length_without_an_answer_is_an_error_and_the_others_are_a_plan(tmp_path: Path) -> None:
    """Exit code 3 says which; every length has a study of its own."""
    found = search_lengths(
        read_model(QWEN), read_cluster(ATLAS), Workload(seq_len=1, cp_size=8),
        search_of(65536, 65537), study=lambda w: tmp_path / f"{w.seq_len}.journal", overlap=False,
    )  # fmt: skip

    assert found.error is not None
    assert found.error.exit_code == 3
    assert found.error.message.startswith("sequence 65537: all 8 configurations are rejected")
    assert found.plan is not None
    assert [entry.when.lengths for entry in found.plan.entries] == [(65536,)]
    assert len(list(tmp_path.glob("*.journal"))) == 2


def test_one_budget_is_for_all_lengths() -> None:
    """The second length is left for the next run."""
    made: list[FakeMeasurer] = []

    def measurer(_: Workload) -> FakeMeasurer:
        made.append(FakeMeasurer())
        return made[-1]

    found = search_lengths(
        read_model(QWEN), read_cluster(ATLAS), Workload(seq_len=1, cp_size=8),
        search_of(32768, 65536), mode="measured", measurer=measurer, budget=Budget(trials=5),
        overlap=False,
    )  # fmt: skip

    assert [len(fake.ran) for fake in made] == [4, 1]
    assert found.error is not None
    assert found.error.exit_code == 4
    assert [bool(result.ended) for result in found.results] == [False, True]
