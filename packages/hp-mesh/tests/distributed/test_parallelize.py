"""`parallelize_module`: which modules a key reaches, and what a plan that does not fit says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from hp_mesh.mesh import init_device_mesh
from hp_mesh.parallelize import matching_modules, parallelize_module
from hp_mesh.testing import assert_close, randn, ranks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sdpa_core = nn.Identity()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.inner = nn.ModuleDict({"attention": Attention()})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.mtp = Layer()


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()


class Note(ParallelStyle):
    """Leaves a note on what it was applied to."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.noted = (device_mesh, self.src_data_rank)
        return module


class NoteOn2d(Note):
    accepts_2d_mesh = True


def noted(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if hasattr(module, "noted")]


CORES = [f"layers.{i}.attention.sdpa_core" for i in range(3)]


def test_a_key_reaches_the_layers_and_nothing_else() -> None:
    """Behaviour 42: neither the core of mtp nor the one a level deeper."""

    def attempt(rank: int) -> tuple[list[str], list[str]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model, wrapped = Model(), Wrapped()
        plan = {"layers.*.attention.sdpa_core": Note()}
        assert parallelize_module(model, mesh["cp"], plan, src_data_rank=None) is model
        assert model.layers[0].attention.sdpa_core.noted == (mesh, None)  # type: ignore[union-attr]
        parallelize_module(wrapped, mesh, {"model.layers.*.attention.sdpa_core": Note()})
        return noted(model), noted(wrapped)

    for plain, nested in ranks(2).run(attempt):
        assert plain == CORES
        assert nested == [f"model.{path}" for path in CORES]


@pytest.mark.parametrize(
    ("key", "paths"),
    [
        ("", [""]),
        ("mtp", ["mtp"]),
        ("layers.1.attention", ["layers.1.attention"]),
        ("layers.[02].attention", ["layers.0.attention", "layers.2.attention"]),
        ("*.attention", ["mtp.attention"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        ("layers.*.sdpa_core", []),
        ("*", ["layers", "mtp"]),
        ("layers.3", []),
    ],
)
def test_each_token_matches_one_name(key: str, paths: list[str]) -> None:
    assert list(matching_modules(Model(), key)) == paths


def test_a_shared_module_is_matched_once() -> None:
    model = Model()
    model.layers[2].attention = model.layers[0].attention

    assert list(matching_modules(model, "layers.*.attention")) == [
        "layers.0.attention",
        "layers.1.attention",
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("layers.*.attn.sdpa_core", "did you mean 'layers.*.attention.sdpa_core'?"),
        ("layers.0.attention.spda_core", "did you mean 'layers.0.attention.sdpa_core'?"),
        ("zzz", "list them with model.named_modules()"),
    ],
)
def test_a_key_without_a_match_is_refused_and_nothing_is_applied(key: str, hint: str) -> None:
    def attempt(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = Model()
        with pytest.raises(ValueError, match="parallelize_module: plan key") as caught:
            parallelize_module(model, mesh, {"mtp": Note(), key: Note()})
        assert noted(model) == []
        return str(caught.value)

    messages = ranks(2).run(attempt)
    assert len(set(messages)) == 1
    assert repr(key) in messages[0] and hint in messages[0]


def test_a_two_dimensional_mesh_needs_a_style_that_says_so() -> None:
    def attempt(rank: int) -> tuple[str, str, str, str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("co", "ds"))
        model = Model()
        assert parallelize_module(model, mesh, {"mtp": NoteOn2d()}) is model
        assert parallelize_module(model, mesh, NoteOn2d()) is model
        assert noted(model) == ["", "mtp"]
        cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
        unnamed = init_device_mesh("cpu", (2, 2))
        messages = []
        for plan, where in (
            ({"mtp": RowwiseParallel()}, mesh),
            (RowwiseParallel(), mesh),
            ({"mtp": NoteOn2d()}, cube),
            ({"mtp": Note()}, unnamed),
        ):
            with pytest.raises(ValueError, match="must be 1-D") as caught:
                parallelize_module(model, where, plan)
            messages.append(str(caught.value))
        first, second, third, fourth = messages
        return first, second, third, fourth

    results = ranks(4).run(attempt)
    assert len(set(results)) == 1
    first, second, third, fourth = results[0]
    assert "('co', 'ds') must be 1-D for RowwiseParallel" in first and "mesh['ds']" in first
    assert second == first
    assert "('a', 'b', 'c') must be 1-D, or 2-D for NoteOn2d" in third
    assert "(2, 2) must be 1-D" in fourth and "name the axes" in fourth


def test_torch_styles_work_as_they_do_in_torch() -> None:
    x, w1, w2 = randn(3, 6), randn(10, 6, seed=1), randn(5, 10, seed=2)

    def forward(rank: int) -> tuple[torch.Tensor, bool]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = nn.Sequential(
            nn.Linear(6, 10, bias=False, dtype=torch.float64),
            nn.Linear(10, 5, bias=False, dtype=torch.float64),
        )
        with torch.no_grad():
            model[0].weight.copy_(w1)
            model[1].weight.copy_(w2)
        with mesh:
            parallelize_module(model, None, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return model(x).detach(), isinstance(model[0].weight, DTensor)

    for out, sharded in ranks(2).run(forward):
        assert sharded
        assert_close(out, x @ w1.T @ w2.T)


def test_wrong_plans_and_missing_meshes_are_refused() -> None:
    def attempt(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = Model()
        with pytest.raises(TypeError, match=r"\(list\) must be a ParallelStyle or a dict"):
            parallelize_module(model, mesh, [Note()])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"\['mtp'\] \(class Note\) .*; use Note\("):
            parallelize_module(model, mesh, {"mtp": Note})  # type: ignore[dict-item]
        with pytest.raises(RuntimeError, match="No device mesh is currently active"):
            parallelize_module(model, None, {"mtp": Note()})
        assert noted(model) == []

    ranks(2).run(attempt)


def test_no_plan_warns_as_in_torch() -> None:
    def attempt(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        parallelize_module(Model(), mesh)

    with pytest.warns(UserWarning, match="No parallelize_plan is provided"):
        ranks(2).run(attempt)
