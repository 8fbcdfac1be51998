"""Hybrid: heads over the inner axis, rows over the outer one; groups come from the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from hp_cp import ContextParallel, attention_window, init_device_mesh
from hp_mesh.testing import ranks

from ._compare import Case, compare
from ._cores import Eager, Sdpa

HYBRID = Case(P=4, degree=2)
ON_2D = [
    pytest.param(HYBRID, (2, 2), id="hybrid-2x2"),
    pytest.param(Case(P=6, degree=3), (2, 3), id="hybrid-2x3"),
    pytest.param(Case(P=6, degree=2), (3, 2), id="hybrid-3x2"),
    pytest.param(Case(P=4), (2, 2), id="ulysses-2x2"),
    pytest.param(Case(P=4, degree=1), (2, 2), id="colossal-2x2"),
    pytest.param(Case(P=4, degree=1, load_balance=True), (2, 2), id="balanced-2x2"),
]


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize(("case", "shape"), ON_2D)
def test_a_mesh_of_two_axes_gives_the_same_numbers(
    case: Case, shape: tuple[int, int], core: type[nn.Module]
) -> None:
    """Behaviour 17: ("co", "ds") in every mode; Ulysses and Colossal flatten it."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("co", "ds"))
        compare(rank, case, core, mesh=mesh)

    ranks(case.P).run(on)


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("degree", [2, 3])
def test_six_ranks_split_both_ways(degree: int, core: type[nn.Module]) -> None:
    """1-D mesh of 6 ranks as 3 x 2 and 2 x 3; KV heads shared within and across groups."""
    for heads in ((12, 4), (12, 2), (6, 1)):
        case = Case(P=6, degree=degree, H=heads[0], HK=heads[1])
        ranks(6).run(compare, case, core)


def test_inside_rows_and_heads_are_both_cut() -> None:
    """Behaviours 15, 16, 18: placements, local sizes, and query start c * (ds * L)."""

    def on(rank: int) -> None:
        case = HYBRID.but(S=16, H=4, HK=4)

        class Probe(nn.Module):
            def forward(self, q: Any, k: Any, v: Any) -> Any:
                assert q.placements == (Shard(1), Shard(2))
                assert k.placements == v.placements == (Replicate(), Shard(2))
                assert q.to_local().shape[1:3] == (8, 2)
                assert k.to_local().shape[1:3] == (16, 2)
                window = attention_window()
                assert window is not None and window.query_start == rank // 2 * 8
                co, ds = q.device_mesh.get_group(0), q.device_mesh.get_group(1)
                assert dist.get_process_group_ranks(ds) == [rank // 2 * 2, rank // 2 * 2 + 1]
                assert dist.get_process_group_ranks(co) == [rank % 2, rank % 2 + 2]
                return q

        case.style().apply(Probe(), case.mesh())(*(case.local(x, rank) for x in case.qkv()))

    ranks(4).run(on)


def _groups() -> int:
    return len(distributed_c10d._world.pg_map)


MESHES = [
    pytest.param((2, 4), ("dp", "cp"), "cp", id="dp2-cp4"),
    pytest.param((4, 2), ("cp", "tp"), "cp", id="cp4-strided"),
    pytest.param((2, 2, 2), ("dp", "co", "ds"), ("co", "ds"), id="dp2-co2-ds2"),
    pytest.param((2, 4), ("tp", "cp"), "cp", id="tp2-cp4"),
]


@pytest.mark.parametrize(("shape", "names", "axes"), MESHES)
@pytest.mark.parametrize("mode", ["ulysses", "colossal", "hybrid", "balanced"])
def test_cp_ranks_may_start_anywhere_and_be_strided(
    mode: str, shape: tuple[int, ...], names: tuple[str, ...], axes: Any
) -> None:
    """B16: each replica has data of its own; four modules share groups that are made once."""
    degree = {"ulysses": None, "hybrid": 2}.get(mode, 1)
    case = Case(P=4, degree=degree, load_balance=mode == "balanced")

    def on(rank: int) -> None:
        root = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mesh: DeviceMesh = root[axes]
        modules = [Sdpa() for _ in range(4)]
        style = case.style()
        style.apply(modules[0], mesh)
        before = _groups()
        for module in modules[1:]:
            style.apply(module, root[axes])
        assert _groups() == before
        coordinate = root.get_coordinate()
        assert coordinate is not None
        cp = [i for i, name in enumerate(names) if name in axes]
        cp_rank = 0
        for axis in cp:
            cp_rank = cp_rank * shape[axis] + coordinate[axis]
        replica = next(c for i, c in enumerate(coordinate) if i not in cp)
        own = case.but(S=24 if replica == 0 else 16)  # replicas need not agree on anything
        for module in modules:
            compare(cp_rank, own, Sdpa, applied=module)

    ranks(8).run(on)


def test_an_unnamed_one_dimensional_mesh_is_enough() -> None:
    """Axis names are only needed to tell two axes apart."""

    def on(rank: int) -> None:
        compare(rank, HYBRID, Sdpa, mesh=init_device_mesh("cpu", (4,)))

    ranks(4).run(on)


BAD_MESHES = [
    pytest.param((2, 2), None, 2, "must have mesh_dim_names", id="unnamed"),
    pytest.param((2, 2), ("ds", "co"), 2, "must be in the order", id="reversed"),
    pytest.param((4, 2), ("co", "ds"), 4, r"must be ulysses_degree \(4\)", id="other-degree"),
    pytest.param((2, 2, 2), ("a", "b", "c"), 2, "must have 1 axis, or 2 axes", id="three-axes"),
]


@pytest.mark.parametrize(("shape", "names", "degree", "message"), BAD_MESHES)
def test_a_mesh_that_does_not_fit_the_degree_is_refused(
    shape: tuple[int, ...], names: tuple[str, ...] | None, degree: int, message: str
) -> None:
    """Behaviour 17, U8: at apply, on every rank, before any group is made."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        before = _groups()
        with pytest.raises(ValueError, match=message):
            ContextParallel(ulysses_degree=degree).apply(Sdpa(), mesh)
        assert _groups() <= before + 1  # the flattened axis of the preflight

    size = int(torch.tensor(shape).prod())
    ranks(size).run(on)
