"""B12: the meshes of FSDP that train without an error and are wrong, and those that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hp_mesh.boundary import Boundary, BoundaryStyle, Entry
from hp_mesh.fsdp import check_fsdp_mesh
from hp_mesh.mesh import Mesh, init_device_mesh
from hp_mesh.parallelize import parallelize_module
from hp_mesh.testing import count_collectives, ranks


class _Model(nn.Module):
    """Two layers, a core without parameters, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.core, self.tied = nn.Identity(), nn.Linear(8, 12, bias=False)
        self.tied.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.core(self.down(self.up(x) + self.tied(x)))


class _Style(BoundaryStyle):
    """A boundary that never runs: only its mesh is looked at."""

    def make_boundary(self, module: nn.Module, device_mesh: Any) -> Boundary[Entry]:
        class Around(Boundary[Entry]):
            def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Entry:
                raise AssertionError("not called")

            def leave(self, module: nn.Module, entry: Entry, output: Any) -> Any:
                raise AssertionError("not called")

        return Around("Style", device_mesh)


def _mesh(*names: str) -> Mesh:
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def _refused(size: int, attempt: Callable[[int], Any]) -> str:
    """Return the one message of all ranks; nothing was sent."""

    def run(rank: int) -> str:
        check = attempt(rank)
        with count_collectives() as sent, pytest.raises(ValueError, match="check_fsdp") as caught:
            check()
        assert not sent.records
        return str(caught.value)

    messages = ranks(size).run(run)
    assert len(set(messages)) == 1
    return messages[0]


STEPS = pytest.mark.parametrize("steps", [0, 1, 2], ids=["before", "after", "between"])


def _train(model: nn.Module, steps: int) -> None:
    """Train for no step, for one, or until after forward: the parameters are whole then."""
    if steps == 0:
        return
    loss = model(torch.ones(1, 8)).sum()
    if steps == 1:
        loss.backward()


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh)  # the root is not resharded between forward and backward


@STEPS
@pytest.mark.parametrize("tp", [False, True], ids=["", "tp"])
def test_the_flattened_mesh_is_right(tp: bool, steps: int) -> None:
    """With TP inside, too, whose shards are DTensors on two axes."""

    def run(rank: int) -> None:
        mesh = _mesh("dp_shard", "cp", *(["tp"] if tp else []))
        model = _Model()
        if tp:
            del model.tied
            model.tied = nn.Identity()
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            model.forward = lambda x: x + model.down(model.up(x))  # type: ignore[method-assign]
            parallelize_module(model, mesh["tp"], plan)
        _shard(model, mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp"))
        _train(model, steps)
        with count_collectives() as sent:
            check_fsdp_mesh(model, mesh)
            check_fsdp_mesh(model, mesh["dp_shard", "cp"])
        assert not sent.records

    ranks(8 if tp else 4).run(run)


@STEPS
def test_a_mesh_without_cp_is_named(steps: int) -> None:
    """CP ranks would have different gradients, and their parameters drift apart."""

    def attempt(rank: int) -> Callable[[], None]:
        mesh = _mesh("dp_shard", "cp")
        model = _shard(_Model(), mesh["dp_shard"])
        _train(model, steps)
        return lambda: check_fsdp_mesh(model, mesh)

    assert _refused(4, attempt) == (
        "check_fsdp_mesh: fully_shard's mesh ('dp_shard',) must contain 'cp': the gradient of "
        "up.weight (and 3 more) is reduced over 2 of 4 ranks, and the copies drift apart; "
        "fully_shard(model, mesh=mesh['dp_shard', 'cp'].flatten(mesh_dim_name='fsdp'))"
    )


@STEPS
def test_a_mesh_of_two_axes_is_named(steps: int) -> None:
    """FSDP replicates over the first: gradients are right, memory is not."""

    def attempt(rank: int) -> Callable[[], None]:
        mesh = _mesh("dp_shard", "cp")
        model = _shard(_Model(), mesh["dp_shard", "cp"])
        _train(model, steps)
        return lambda: check_fsdp_mesh(model, mesh)

    message = _refused(4, attempt)
    assert "mesh ('dp_shard', 'cp') must shard over 'dp_shard', and replicates there" in message
    assert "a rank holds 1/2 of up.weight (and 3 more), not 1/4; flatten the axes" in message


def test_one_wrong_group_among_right_ones_is_found() -> None:
    """fully_shard is called for each layer: one call may have another mesh."""

    def attempt(rank: int) -> Callable[[], None]:
        mesh = _mesh("dp_shard", "cp")
        model = _Model()
        fully_shard(model.down, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp"))
        return lambda: check_fsdp_mesh(model, mesh)

    assert "gradient of down.weight (and 1 more) is reduced over 2 of 4" in _refused(4, attempt)


def test_a_parameter_that_fsdp_does_not_manage_is_named() -> None:
    """Unless it needs no gradient, or is left out on purpose."""

    def attempt(rank: int) -> Callable[[], None]:
        mesh = _mesh("dp_shard", "cp")
        model = _Model()
        flat = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp")
        left_out = {model.down.bias}
        fully_shard(model, mesh=flat, ignored_params=left_out)
        check_fsdp_mesh(model, mesh, ignored_params=left_out)
        model.down.bias.requires_grad_(False)
        check_fsdp_mesh(model, mesh)
        model.down.bias.requires_grad_(True)
        return lambda: check_fsdp_mesh(model, mesh)

    assert "down.bias must be managed by FSDP: a rank has the gradient" in _refused(4, attempt)


def test_a_model_without_fsdp_is_refused() -> None:
    assert "up.weight (and 3 more) must be managed by FSDP" in _refused(
        4, lambda rank: lambda: check_fsdp_mesh(_Model(), _mesh("dp_shard", "cp"))
    )


def test_replicas_of_sharded_groups_are_right() -> None:
    """HSDP: the flattened axis is the second of FSDP's mesh; or, without data ranks, cp alone."""

    def run(rank: int) -> None:
        mesh = _mesh("dp_replicate", "dp_shard", "cp")
        mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp")
        torch_mesh = dist.device_mesh.DeviceMesh._concatenate([mesh["dp_replicate"], mesh["fsdp"]])
        check_fsdp_mesh(_shard(_Model(), torch_mesh), mesh)
        without_shards = _shard(_Model(), mesh["dp_shard", "cp"])
        check_fsdp_mesh(without_shards, mesh, axes=("cp",))
        with pytest.raises(ValueError, match="must shard over 'dp_shard'"):
            check_fsdp_mesh(without_shards, mesh)

    ranks(8).run(run)


def test_axes_that_are_not_those_of_the_style_are_refused() -> None:
    """The style knows which ranks share a sequence."""

    def attempt(rank: int) -> Callable[[], None]:
        mesh = _mesh("dp", "context")
        model = _Model()
        _Style().apply(model.core, mesh["context"])
        flat = mesh["dp", "context"].flatten(mesh_dim_name="fsdp")
        fully_shard(model, mesh=flat)
        check_fsdp_mesh(model, mesh, axes=("dp", "context"))
        with pytest.raises(ValueError, match=r"'dp_shard' must be one of .*axes=\(\.\.\.\)"):
            check_fsdp_mesh(model, mesh)
        return lambda: check_fsdp_mesh(model, mesh, axes=("dp",))

    message = _refused(4, attempt)
    assert "axes ('dp',) must contain those of Style on core ('context',)" in message
    assert "axes=('dp', 'context')" in message
