"""Ranks that share cores: when the last of them is done."""

from __future__ import annotations

import pytest

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.cost.cores import finish, stretch, waits_for
from hp_tune.workload import Workload


@pytest.mark.parametrize(
    ("work", "cores", "expected"),
    [
        ((1, 3, 5, 7), 2, 9),
        ((1, 3, 5, 7), 1, 16),
        ((1, 3, 5, 7), 4, 7),
        ((4, 4, 4, 4), 2, 8),
        ((5,), 8, 5),
    ],
)
def test_cores_are_shared_evenly_until_the_last_is_done(
    work: tuple[int, ...], cores: int, expected: float
) -> None:
    """Between the whole work over the cores and the largest work alone; worked out by hand."""
    assert finish(work, cores) == expected


def test_finish_equals_a_simulation_in_small_steps() -> None:
    """The same as giving every unfinished rank its share of each moment."""
    work, cores, step = [0.7, 2.9, 1.1, 4.2, 0.2], 3, 1e-4
    left, time = list(work), 0.0
    while any(rest > 0 for rest in left):
        speed = min(1.0, cores / sum(rest > 0 for rest in left))
        left = [rest - speed * step for rest in left]
        time += step

    assert finish(work, cores) == pytest.approx(time, abs=1e-2)


def test_hosts_share_each_their_own_cores() -> None:
    """Only neighbours share; every CP group has the same work; without sharing the largest."""
    cluster = read_cluster("cpu-gloo").model_copy(update={"shared_cores": 1, "shared_by": 2})
    w = Workload(seq_len=64, cp_size=4, world_size=8)

    assert stretch(cluster, 8) == 2
    assert waits_for(cluster, [1, 3, 5, 7], w) == 12
    assert waits_for(cluster, [1, 3], w) == 6, "blocks of two neighbours"
    whole = cluster.model_copy(update={"shared_by": None})
    assert (stretch(whole, 8), waits_for(whole, [1, 3, 5, 7], w)) == (8, 32)
    none = cluster.model_copy(update={"shared_cores": None, "shared_by": None})
    assert (stretch(none, 8), waits_for(none, [1, 3, 5, 7], w)) == (1, 7)
