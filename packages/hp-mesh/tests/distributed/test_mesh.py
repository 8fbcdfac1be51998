"""Meshes: checks, slices that flatten, and the split of the CP mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.fsdp import fully_shard

from hp_mesh.mesh import Mesh, flatten_mesh, init_device_mesh, split_cp_mesh
from hp_mesh.testing import assert_close, randn, ranks


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def refused_everywhere(n: int, call: Callable[[], object], *parts: str) -> None:
    """Every rank raises the same ValueError, with each of ``parts``, and makes no group."""

    def attempt(rank: int) -> str:
        before = num_groups()
        with pytest.raises(ValueError, match=r"must|can't") as caught:
            call()
        assert num_groups() == before
        return str(caught.value)

    messages = ranks(n).run(attempt)
    assert len(set(messages)) == 1
    for part in parts:
        assert part in messages[0]


def three_axes() -> Mesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_shard", "cp", "tp"))


def test_slices_are_meshes_of_ours_with_the_right_ranks() -> None:
    def look(rank: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        mesh = three_axes()
        pair = mesh[("dp_shard", "cp")]
        assert isinstance(mesh["cp"], Mesh) and isinstance(pair["cp"], Mesh)
        assert pair.root_mesh is mesh and mesh[("dp_shard", "cp", "tp")] is mesh
        return mesh.get_local_rank("cp"), mesh["cp"].size(), mesh["cp"].rank_list, pair.rank_list

    for rank, (local, size, cp, pair) in enumerate(ranks(8).run(look)):
        first = rank - 2 * ((rank // 2) % 2)
        assert (local, size) == ((rank // 2) % 2, 2)
        assert cp == (first, first + 2)
        assert pair == tuple(range(rank % 2, 8, 2))


def test_flatten_by_name_is_kept_and_makes_its_groups_once() -> None:
    def look(rank: int) -> tuple[int, ...]:
        mesh = three_axes()
        before = num_groups()
        flat = mesh[("dp_shard", "cp")].flatten(mesh_dim_name="fsdp")
        after = num_groups()
        for _ in range(3):
            assert mesh[("dp_shard", "cp")].flatten(mesh_dim_name="fsdp") is flat
            assert flatten_mesh(mesh[("dp_shard", "cp")], "fsdp") is flat
            assert mesh["fsdp"] is flat, "and without torch's warning"
        assert num_groups() == after == before + 1
        assert isinstance(flat, Mesh) and flat.mesh_dim_names == ("fsdp",)
        assert dist.get_process_group_ranks(flat.get_group()) == list(flat.rank_list)
        return flat.rank_list

    assert ranks(8).run(look) == [tuple(range(rank % 2, 8, 2)) for rank in range(8)]


def test_fsdp_on_the_flattened_mesh_shards_over_dp_and_cp() -> None:
    """B12: shards of 1/(dp*cp) and the mean gradient of all four ranks."""
    weight = randn(8, 8)

    def train(rank: int) -> tuple[tuple[int, ...], torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
        layer = torch.nn.Linear(8, 8, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(weight)
        fully_shard(layer, mesh=mesh[("dp_shard", "cp")].flatten(mesh_dim_name="fsdp"))
        layer(torch.full((1, 8), rank + 1.0, dtype=torch.float64)).sum().backward()
        grad = layer.weight.grad
        return tuple(layer.weight.to_local().shape), grad.full_tensor()  # type: ignore[union-attr]

    for shape, grad in ranks(4).run(train):
        assert shape == (2, 8)
        assert_close(grad, torch.full((8, 8), 2.5, dtype=torch.float64), kind="grad")


def test_flatten_takes_torch_meshes_with_and_without_names() -> None:
    def look(rank: int) -> None:
        plain = DeviceMesh("cpu", [[0, 1], [2, 3]])
        flat = flatten_mesh(plain)
        assert flat.mesh_dim_names == ("flat",) and flat.mesh.tolist() == [0, 1, 2, 3]
        assert flatten_mesh(plain) is flat and type(flat) is DeviceMesh
        named = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert flatten_mesh(named).mesh_dim_names == ("a_b",)
        assert flatten_mesh(named["a"]).mesh_dim_names == ("a",)
        assert flatten_mesh(named["a"], "other").mesh_dim_names == ("other",)
        one_axis = DeviceMesh("cpu", [0, 1, 2, 3])
        assert flatten_mesh(one_axis) is one_axis

    ranks(4).run(look)


def test_a_flattened_name_that_is_taken_is_refused() -> None:
    def attempt(rank: int) -> str:
        mesh = three_axes()
        mesh[("dp_shard", "cp")].flatten(mesh_dim_name="fsdp")
        with pytest.raises(ValueError, match=r"'fsdp'.*must not be the name of another axis"):
            mesh[("cp", "tp")].flatten(mesh_dim_name="fsdp")
        with pytest.raises(ValueError, match="choose another name") as caught:
            mesh[("dp_shard", "cp")].flatten(mesh_dim_name="tp")
        return str(caught.value)

    assert len(set(ranks(8).run(attempt))) == 1


def test_ranks_that_do_not_ascend_are_refused_on_every_replica() -> None:
    """Groups number their ranks in ascending order: the mesh and its group would disagree."""

    def attempt(rank: int) -> None:
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
        with pytest.raises(ValueError, match=r"flatten_mesh: .*\[0, 2, 1, 3\].* must ascend"):
            flatten_mesh(mesh)
        with pytest.raises(ValueError, match=r"split_cp_mesh: .* must ascend"):
            split_cp_mesh(DeviceMesh("cpu", [3, 2, 1, 0]), 2)

    ranks(4).run(attempt)


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (("tp", "cp"), "use ('cp', 'tp')"),
        (("cp", "cp"), "named once"),
        ("cpp", "did you mean 'cp'?"),
        (("cp", "nothing_like_it"), "must be one of ['dp_shard', 'cp', 'tp']"),
    ],
)
def test_slices_out_of_order_or_unknown_are_refused(
    names: str | tuple[str, ...], part: str
) -> None:
    def attempt(rank: int) -> str:
        mesh = three_axes()
        with pytest.raises(ValueError, match="must") as caught:
            mesh[names]
        return str(caught.value)

    messages = ranks(8).run(attempt)
    assert len(set(messages)) == 1 and part in messages[0]


def test_an_unnamed_mesh_cannot_be_sliced() -> None:
    refused_everywhere(2, lambda: init_device_mesh("cpu", (2,))["cp"], "without mesh_dim_names")


@pytest.mark.parametrize(
    ("args", "names", "part"),
    [
        (("tpu", (2,)), None, "device_type ('tpu') must be one of cpu, cuda, npu"),
        (("cuda:0", (2,)), None, "chosen by set_device"),
        (("cpu", (2,)), ("a", "b"), "one name per axis of mesh_shape (2,)"),
        (("cpu", (1, 2)), ("a", "a"), "must differ"),
        (("cpu", (2,)), "cp", "use ('cp',)"),
        (("cpu", ()), None, "at least one axis"),
        (("cpu", 2), None, "mesh_shape (2) must be a tuple of sizes; use (2,)"),
        (("cpu", (2, 0)), None, "mesh_shape[1] (0) must be at least 1"),
        (("cpu", (True, 2)), None, "mesh_shape[0] (True) must be an integer"),
    ],
)
def test_wrong_arguments_are_refused_before_any_group_is_made(
    args: tuple[str, tuple[int, ...]], names: tuple[str, ...] | None, part: str
) -> None:
    refused_everywhere(2, lambda: init_device_mesh(*args, mesh_dim_names=names), part)


def test_npu_without_torch_npu_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)

    def attempt(rank: int) -> None:
        with pytest.raises(ImportError, match=r"extra npu of hp-cp"):
            init_device_mesh("npu", (2,), mesh_dim_names=("cp",))

    ranks(2).run(attempt)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_cuda_without_a_gpu_is_told_before_any_group_is_made() -> None:
    def attempt(rank: int) -> None:
        with pytest.raises(RuntimeError, match="needs a CUDA build of torch and a GPU"):
            init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))

    ranks(2).run(attempt)


def axes_of(split: DeviceMesh) -> tuple[list[int], list[int]]:
    co, ds = (dist.get_process_group_ranks(split.get_group(axis)) for axis in (0, 1))
    return co, ds


def test_ulysses_ranks_are_adjacent() -> None:
    def look(rank: int) -> tuple[list[int], list[int]]:
        split = split_cp_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), 2)
        assert split.mesh_dim_names == ("co", "ds") and isinstance(split, Mesh)
        assert split.mesh.tolist() == [[0, 1], [2, 3]]
        return axes_of(split)

    assert ranks(4).run(look) == [
        ([0, 2], [0, 1]),
        ([1, 3], [0, 1]),
        ([0, 2], [2, 3]),
        ([1, 3], [2, 3]),
    ]


@pytest.mark.parametrize("names", [None, ("cp",)])
def test_ranks_that_do_not_start_at_zero(names: tuple[str, ...] | None) -> None:
    def look(rank: int) -> object:
        split = split_cp_mesh(DeviceMesh("cpu", [10, 11, 12, 13], mesh_dim_names=names), 2)
        assert split.mesh.tolist() == [[10, 11], [12, 13]]
        return axes_of(split) if 10 <= rank < 14 else split.get_coordinate()

    results = ranks(16).run(look)
    assert results[10:14] == [
        ([10, 12], [10, 11]),
        ([11, 13], [10, 11]),
        ([10, 12], [12, 13]),
        ([11, 13], [12, 13]),
    ]
    assert results[:10] == [None] * 10


def test_every_replica_gets_its_own_groups_and_they_work() -> None:
    """B16: dp2 x cp4; the second replica has other data, and its own sums."""

    def look(rank: int) -> tuple[tuple[list[int], list[int]], float, float]:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))
        split = split_cp_mesh(mesh["cp"], 2)
        sums = []
        for axis in (0, 1):
            x = torch.tensor(float(10**rank))
            dist.all_reduce(x, group=split.get_group(axis))
            sums.append(x.item())
        return axes_of(split), sums[0], sums[1]

    for rank, (axes, co, ds) in enumerate(ranks(8).run(look)):
        base, c, d = 4 * (rank // 4), (rank // 2) % 2, rank % 2
        assert axes == ([base + d, base + d + 2], [base + 2 * c, base + 2 * c + 1])
        assert co == 10 ** (base + d) + 10 ** (base + d + 2)
        assert ds == 10 ** (base + 2 * c) + 10 ** (base + 2 * c + 1)


def test_strided_cp_ranks_under_an_inner_tp_axis() -> None:
    """B16: CP ranks {0, 2} and {1, 3} of a cp2 x tp2 mesh; and cp4 x tp2 split in two."""

    def small(rank: int) -> list[list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        assert split_cp_mesh(mesh["cp"], 1).shape == (2, 1)
        split = split_cp_mesh(mesh["cp"], 2)
        assert axes_of(split)[1] == list(mesh["cp"].rank_list)
        ranks_of: list[list[int]] = split.mesh.tolist()
        return ranks_of

    assert ranks(4).run(small) == [[[0, 2]], [[1, 3]], [[0, 2]], [[1, 3]]]

    def large(rank: int) -> tuple[list[int], list[int]]:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("cp", "tp"))
        return axes_of(split_cp_mesh(mesh["cp"], 2))

    assert ranks(8).run(large)[5] == ([1, 5], [5, 7])


def test_applying_to_a_hundred_layers_makes_no_new_groups() -> None:
    def look(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))
        split = split_cp_mesh(mesh["cp"], 2)
        other = split_cp_mesh(mesh["cp"], 4)
        before = num_groups()
        for _ in range(100):
            assert split_cp_mesh(mesh["cp"], 2) is split
        assert split_cp_mesh(mesh["cp"], 4) is other is not split
        assert num_groups() == before

    ranks(8).run(look)


def test_a_two_dimensional_mesh_is_used_as_it_is() -> None:
    def look(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "co", "ds"))
        before = num_groups()
        pair = mesh[("co", "ds")]
        assert split_cp_mesh(pair, 2) is pair
        assert num_groups() == before
        own = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
        assert split_cp_mesh(own, 4) is own

    ranks(8).run(look)


@pytest.mark.parametrize(
    ("n", "shape", "names", "degree", "part"),
    [
        (4, (4,), ("cp",), 3, "cp_size (4) must be divisible by ulysses_degree (3)"),
        (4, (4,), ("cp",), 0, "ulysses_degree (0) must be at least 1"),
        (4, (4,), ("cp",), True, "ulysses_degree (True) must be an integer"),
        (4, (2, 2), None, 2, "must have mesh_dim_names"),
        (4, (2, 2), ("ds", "co"), 2, "must be in the order ('co', 'ds')"),
        (8, (2, 4), ("co", "ds"), 2, "or a mesh of shape (4, 2)"),
        (8, (2, 4), ("co", "ds"), 3, "must be ulysses_degree (3); use ulysses_degree=4"),
        (8, (2, 2, 2), ("a", "co", "ds"), 2, "pass the CP slice of the mesh"),
    ],
)
def test_meshes_that_do_not_fit_the_degree_are_refused(
    n: int, shape: tuple[int, ...], names: tuple[str, ...] | None, degree: int, part: str
) -> None:
    def attempt(rank: int) -> str:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        before = num_groups()
        with pytest.raises(ValueError, match="split_cp_mesh") as caught:
            split_cp_mesh(mesh, degree)
        assert num_groups() == before
        return str(caught.value)

    messages = ranks(n).run(attempt)
    assert len(set(messages)) == 1 and part in messages[0]
