"""Sequence helpers read the CP rank from the mesh, whatever else the job is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_mesh.mesh import init_device_mesh, split_cp_mesh
from hp_mesh.sequence import position_ids, shard_sequence
from hp_mesh.testing import assert_close, count_collectives, randn, ranks


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary positions, ``[B, S, D]`` and ``[S]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def test_rotary_positions_are_global_and_come_from_the_cp_rank() -> None:
    """B09: CP of 2 inside DP of 2; local positions would be wrong, and are."""
    x = randn(2, 32, 8)
    rotated = rotate(x, torch.arange(32))

    def look(rank: int) -> tuple[int, Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        with count_collectives() as counted:
            local = shard_sequence(x, mesh["cp"])
            right = rotate(local, position_ids(mesh["cp"], local_length=16))
        assert counted.count() == 0
        return mesh.get_local_rank("cp"), right, rotate(local, torch.arange(16))

    for cp_rank, right, wrong in ranks(4).run(look):
        expected = rotated[:, 16 * cp_rank : 16 * cp_rank + 16]
        assert_close(right, expected)
        assert (cp_rank == 0) == torch.allclose(wrong, expected)


def test_packed_positions_restart_where_the_documents_do() -> None:
    """B09: documents of 12 and 20 tokens on four ranks."""
    x = randn(1, 32, 8)
    packed = torch.cat([torch.arange(12), torch.arange(20)])

    def look(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        ids = position_ids(mesh, global_length=32, cu_seqlens=[0, 12, 32])
        return rotate(shard_sequence(x, mesh), ids)

    assert_close(torch.cat(ranks(4).run(look), dim=1), rotate(x, packed))


def test_a_split_mesh_gives_the_same_shards_as_the_mesh_it_was_split_from() -> None:
    x = randn(2, 24, 3)

    def look(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "cp"))["cp"]
        split = split_cp_mesh(mesh, 2)
        assert torch.equal(shard_sequence(x, split), shard_sequence(x, mesh))
        assert torch.equal(
            shard_sequence(x, split, order="head_tail"), shard_sequence(x, mesh, order="head_tail")
        )
        assert position_ids(split, local_length=6)[0] == 6 * (rank % 4)

    ranks(8).run(look)


def test_meshes_without_this_rank_or_with_too_many_axes_are_refused() -> None:
    x = randn(2, 8)

    def look(rank: int) -> None:
        pair = DeviceMesh("cpu", [0, 1])
        if rank > 1:
            with pytest.raises(ValueError, match=rf"this rank \({rank}\) must be in the CP mesh"):
                shard_sequence(x, pair)
        else:
            assert shard_sequence(x, pair).shape == (2, 4)
        cube = init_device_mesh("cpu", (1, 2, 2))
        with pytest.raises(ValueError, match=r"shape \(1, 2, 2\)\) must have 1 or 2 axes"):
            position_ids(cube, local_length=2)

    ranks(4).run(look)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("dp_shard", "cp"), r"those along 'dp_shard' hold others; .* mesh\['cp'\]"),
        (("context", "tp"), r"those along 'tp' hold others; .* mesh\['context'\]"),
        (("replica", "cp"), r"those along 'replica' hold others; .* mesh\['cp'\]"),
    ],
    ids=str,
)
def test_a_mesh_with_replicas_in_it_is_not_cut_over(names: tuple[str, str], words: str) -> None:
    """The whole mesh in place of its CP slice would cut one sequence over replicas, too."""

    def look(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(ValueError, match=f"shard_sequence: the CP mesh .*{words}"):
            shard_sequence(randn(2, 8), mesh)
        with pytest.raises(ValueError, match=f"position_ids: the CP mesh .*{words}"):
            position_ids(mesh, local_length=2)

    ranks(4).run(look)
