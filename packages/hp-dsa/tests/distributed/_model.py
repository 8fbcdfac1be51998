"""A model around the layer, whose keys come from modules, and the comparison over steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_dsa.async_boundary import AsyncDSABoundary
from hp_dsa.async_style import (
    AsyncDSAIndexerContextParallel,
    AsyncDSAIndexerLossContextParallel,
    AsyncDSASparseAttentionContextParallel,
)
from hp_dsa.gather_cache import DSAGatherCache
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, count_collectives, randn

from ._layer import DI, DR, N1, NI, Case, D, Layer, upstreams

WIDTH = 7
PARTS = {
    "query": (N1, D),
    "latent": (1, D),
    "query_rope": (N1, DR),
    "key_rope": (1, DR),
    "query_index": (NI, DI),
    "key_index": (1, DI),
}


class Model(nn.Module):
    """Projections and a layer; ``between`` may change what reaches the layer.

    The layer's result is attention's output and the loss.
    """

    def __init__(self, case: Case, between: Callable[[str, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.between = between
        for seed, (name, (heads, size)) in enumerate(PARTS.items()):
            self.add_module(name, _linear(heads * size, seed))
        self.weights = _linear(NI, 30)
        self.layer = Layer(case)

    def parts(self, x: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, sizes in PARTS.items():
            y = self.get_submodule(name)(x).unflatten(-1, sizes)
            found[name] = y if self.between is None else self.between(name, y)
        return {**found, "weights": self.weights(x)}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layer(*self.parts(x).values())
        return outputs["out"], outputs["loss"]


def _linear(size: int, seed: int) -> nn.Linear:
    layer = nn.Linear(WIDTH, size, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(randn(size, WIDTH, seed=100 + seed) / WIDTH**0.5)
        layer.bias.copy_(randn(size, seed=200 + seed))
    return layer


def apply(model: Any, case: Case, **options: Any) -> Any:
    """Put the asynchronous styles on a model, with all handoffs."""
    mesh, layer = case.mesh(), model.layer
    given = {"layout": case.layout, "load_balance": case.load_balance, **options}
    AsyncDSAIndexerContextParallel(**given).apply(layer.indexer, mesh, key_handoff=model.key_index)
    AsyncDSASparseAttentionContextParallel(**given).apply(
        layer.attention,
        mesh,
        key_handoff=model.latent,
        value_handoff=model.latent,
        key_rope_handoff=model.key_rope,
    )
    loss = AsyncDSAIndexerLossContextParallel(**given)
    if case.cached:
        DSAGatherCache().apply(layer)
        loss.apply(layer.loss, mesh)
    else:
        loss.apply(
            layer.loss,
            mesh,
            key_handoff=model.latent,
            key_index_handoff=model.key_index,
            key_rope_handoff=model.key_rope,
        )
    return model


def boundaries(model: Any) -> list[AsyncDSABoundary]:
    found = [boundary_of(m) for m in (model.layer.indexer, model.layer.attention, model.layer.loss)]
    assert all(isinstance(one, AsyncDSABoundary) for one in found)
    return [one for one in found if isinstance(one, AsyncDSABoundary)]


def assert_idle(model: Any) -> None:
    """Assert that nothing is under way."""
    for boundary in boundaries(model):
        for name, handoff in boundary.handoffs.items():
            assert not [lane for lane in handoff.lanes.values() if lane.items], name


def assert_overlaps(model: Any) -> None:
    """Assert that every handoff works and none holds anything."""
    for boundary in boundaries(model):
        for name, handoff in boundary.handoffs.items():
            assert handoff.learned is not None and not handoff.disarmed, (boundary.where, name)
    assert_idle(model)


Run = Callable[[Any, Sequence[Tensor], Sequence[Tensor]], list[tuple[Tensor, Tensor]]]


def plainly(model: Any, xs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[Any]:
    """Forward and backward of each micro-batch in turn."""
    outs = []
    for x, up in zip(xs, ups, strict=True):
        out, loss = model(x)
        ((out * up).sum() + loss.sum()).backward()
        outs.append((out, loss))
    return outs


def compare_steps(
    rank: int,
    case: Case,
    run: Run = plainly,
    *,
    place: Callable[[Any], Any] | None = None,
    between: Callable[[str, Tensor], Tensor] | None = None,
    micro: int = 1,
    steps: int = 3,
) -> tuple[Any, list[count_collectives]]:
    """Assert outputs and every gradient of some steps of ``run``; return the model and traffic."""
    reference, model = Model(case, between), Model(case, between)
    model = apply(model, case) if place is None else place(model)
    sent = []
    for step in range(steps):
        whole = [randn(*case.shape(WIDTH), seed=1000 * step + m) for m in range(micro)]
        ups = [upstreams(case)["out"] * (1 + m) for m in range(micro)]
        for one in (reference, model):
            one.zero_grad()
        full = [x.clone().requires_grad_() for x in whole]
        expected = run(reference, full, ups)
        local = [case.local(x, rank).clone().requires_grad_() for x in whole]
        with count_collectives() as counted:
            outs = run(model, local, [case.local(up, rank) for up in ups])
        sent.append(counted)
        for m, ((out, loss), (whole_out, whole_loss)) in enumerate(
            zip(outs, expected, strict=True)
        ):
            at = f"step {step}, micro-batch {m}"
            assert_close(out, case.local(whole_out, rank), name=f"{at}: out")
            assert_close(loss, whole_loss, kind="loss", name=f"{at}: loss")
        for m, (x, whole_x) in enumerate(zip(local, full, strict=True)):
            assert whole_x.grad is not None
            wanted = case.local(whole_x.grad, rank)
            assert_close(x.grad, wanted, kind="grad", name=f"step {step}: dx {m}")
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            share = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(share)
            assert q.grad is not None, name
            assert_close(share, q.grad, kind="grad", name=f"step {step}: d{name}")
    return model, sent
