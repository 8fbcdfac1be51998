"""What is asked again until chance has had its turn: all ranks ask equally often."""

from __future__ import annotations

import threading

import pytest
import torch

from hp_mesh.testing import eventually, everywhere, least_peak, ranks


def test_what_another_thread_does_is_waited_for() -> None:
    done = threading.Event()
    thread = threading.Timer(0.05, done.set)
    thread.start()

    assert eventually(done.is_set)
    thread.join()
    assert not eventually(lambda: False, seconds=0.01)


def test_something_holds_everywhere_if_it_does_on_each_rank() -> None:
    assert ranks(3).run(lambda rank: everywhere(rank < 3)) == [True] * 3
    assert ranks(3).run(lambda rank: everywhere(rank != 1)) == [False] * 3


@pytest.mark.parametrize(
    ("tries", "expected"), [(60, [(800, 3), (800, 3)]), (2, [(800, 2), (2400, 2)])]
)
def test_calls_end_when_every_rank_has_seen_a_small_peak_or_after_some(
    tries: int, expected: list[tuple[int, int]]
) -> None:
    """Rank 1 has one in its third call; until then rank 0 goes on with it."""

    def run(rank: int) -> tuple[int, int]:
        calls = 0

        def call() -> torch.Tensor:
            nonlocal calls
            calls += 1
            return torch.zeros(300 if rank == 1 and calls < 3 else 100, dtype=torch.float64)

        return least_peak(call, 800, tries=tries), calls

    assert ranks(2).run(run) == expected
