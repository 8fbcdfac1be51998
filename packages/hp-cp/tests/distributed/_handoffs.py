"""Hold a model with projections under AsyncContextParallel to the same model on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_cp import AsyncContextParallel, init_device_mesh
from hp_cp.async_boundary import AsyncBoundary
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import assert_close, count_collectives, randn

from ._compare import Case
from ._cores import Sdpa

DIM = 10
Between = Callable[[str, Tensor], Tensor]


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    """Return a float64 layer whose weights depend on ``seed`` alone."""
    layer = nn.Linear(inputs, outputs, bias=True, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(randn(outputs, inputs, seed=seed) / inputs**0.5)
        layer.bias.copy_(randn(outputs, seed=seed + 1))
    return layer


class Heads(nn.Module):
    """A projection that returns ``[B, S, H, D]``."""

    def __init__(self, layer: nn.Linear, head_size: int) -> None:
        super().__init__()
        self.layer, self.head_size = layer, head_size

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(-1, (-1, self.head_size))


class Attention(nn.Module):
    """Projections, head split, what may come between, and a core.

    Args:
        case: Sizes and the layout of the core.
        between: Changes q, k or v between head split and core.
        whole_heads: Whether the projections split heads themselves.
    """

    def __init__(
        self, case: Case, between: Between | None = None, *, whole_heads: bool = False
    ) -> None:
        super().__init__()
        self.case, self.between = case, between
        for seed, (name, heads) in enumerate((("q", case.H), ("k", case.HK), ("v", case.HK))):
            layer: nn.Module = linear(DIM, heads * case.D, 10 * seed)
            self.add_module(f"{name}_proj", Heads(layer, case.D) if whole_heads else layer)
        self.core = Sdpa(case.layout, head_size=case.D)

    def project(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of the projections."""
        return [projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)]

    def attend(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the core's output."""
        views = []
        for name, y in zip("qkv", outputs, strict=True):
            x = y if y.ndim == 4 else y.view(*y.shape[:2], -1, self.case.D)
            if self.case.layout == "BNSD":
                x = x.transpose(1, 2)
            views.append(x if self.between is None else self.between(name, x))
        return self.core(*views)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.project(x))


@dataclass
class Batch:
    """Micro-batches of one rank (or of the one device): leaves and gradients of the outputs."""

    xs: list[Tensor]
    ups: list[Tensor]


Run = Callable[[Any, Batch], Sequence[Tensor]]


def plainly(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Forward and backward of each micro-batch in turn."""
    outs = []
    for x, up in zip(batch.xs, batch.ups, strict=True):
        out = model(x)
        out.backward(up)
        outs.append(out)
    return outs


@dataclass
class Seen:
    """What a comparison leaves to look at.

    Attributes:
        model: The model under `AsyncContextParallel`.
        traffic: ``{kind: calls}`` of each step.
        bytes: Bytes sent in each step.
    """

    model: Any
    traffic: list[dict[str, int]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    @property
    def boundary(self) -> AsyncBoundary:
        """The boundary around the model's core."""
        boundary = boundary_of(self.model.core)
        assert isinstance(boundary, AsyncBoundary)
        return boundary


def apply(model: Any, case: Case, mesh: Any = None, **options: Any) -> Any:
    """Put the style on a model with ``q_proj``, ``k_proj``, ``v_proj`` and ``core``."""
    AsyncContextParallel(case.seq_dim, case.head_dim, case.degree, **options).apply(
        model.core,
        case.mesh() if mesh is None else mesh,
        q_proj=model.q_proj,
        k_proj=model.k_proj,
        v_proj=model.v_proj,
    )
    return model


def compare_steps(
    rank: int,
    case: Case,
    run: Run = plainly,
    *,
    build: Callable[[], Any] | None = None,
    applied: Any = None,
    place: Callable[[Any], Any] | None = None,
    shapes: Sequence[Sequence[tuple[int, int]]] | None = None,
    micro: int = 1,
    group: Any = None,
) -> Seen:
    """Assert outputs and every gradient of several steps of ``run``.

    Args:
        rank: CP rank.
        case: Degrees, layout and sizes.
        run: One step: forward and backward passes of all micro-batches; returns outputs.
        build: Makes the model.
        applied: A model that the style is on already.
        place: Puts the style on the model. Default: `apply`.
        shapes: For each step, ``(B, S)`` of its micro-batches. Default: three steps alike.
        micro: Number of micro-batches of a step by default.
        group: Ranks over which the gradients of parameters are added up. Default: all.
    """
    build = build or (lambda: Attention(case))
    reference, model = build(), applied
    if model is None:
        model = build()
        model = apply(model, case) if place is None else place(model)
    seen = Seen(model)
    for step, sizes in enumerate(shapes or [[(case.B, case.S)] * micro] * 3):
        whole = _batch(case, sizes, step)
        for one in (reference, model):
            one.zero_grad()
        expected = run(reference, whole)
        local = Batch(
            [x.detach().chunk(case.P, 1)[rank].clone().requires_grad_() for x in whole.xs],
            [case.local(up, rank) for up in whole.ups],
        )
        with count_collectives() as counted:
            outs = run(model, local)
        seen.traffic.append(counted.summary())
        seen.bytes.append(sum(counted.bytes(kind) for kind in counted.summary()))
        at = f"step {step}"
        for i, (out, full) in enumerate(zip(outs, expected, strict=True)):
            assert_close(out, case.local(full, rank), name=f"{at}: output {i}")
        for i, (x, full) in enumerate(zip(local.xs, whole.xs, strict=True)):
            grad = None if full.grad is None else full.grad.chunk(case.P, 1)[rank]
            assert_close(x.grad, grad, kind="grad", name=f"{at}: dx {i}")
        for (name, p), full in zip(model.named_parameters(), reference.parameters(), strict=True):
            share = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(share, group=group)
            wanted = torch.zeros_like(p) if full.grad is None else full.grad
            assert_close(share, wanted, kind="grad", name=f"{at}: d{name}")
    return seen


def _batch(case: Case, sizes: Sequence[tuple[int, int]], step: int) -> Batch:
    xs, ups = [], []
    for i, (B, S) in enumerate(sizes):
        seed = 100 * step + 2 * i
        xs.append(randn(B, S, DIM, seed=seed, requires_grad=True))
        ups.append(randn(*case.but(B=B, S=S).shape(case.H, case.D), seed=seed + 1))
    return Batch(xs, ups)


def assert_overlaps(boundary: AsyncBoundary) -> None:
    """Assert that every handoff works and none holds anything."""
    assert boundary.handoffs
    for name, handoff in boundary.handoffs.items():
        assert handoff.learned is not None and not handoff.disarmed, name
    assert_idle(boundary)


def assert_idle(boundary: AsyncBoundary) -> None:
    """Assert that nothing is under way."""
    for name, handoff in boundary.handoffs.items():
        assert not [lane for lane in handoff.lanes.values() if lane.items], name


def disarmed(boundary: AsyncBoundary) -> str:
    """Return the names of the handoffs that were given up."""
    return "".join(name for name, handoff in boundary.handoffs.items() if handoff.disarmed)


def in_flight(boundary: AsyncBoundary) -> str:
    """Return the names of the handoffs with an exchange under way in this thread."""
    return "".join(
        name
        for name, handoff in boundary.handoffs.items()
        if any(item.handle is not None for item in handoff.lane.items)
    )


def cp_mesh(size: int) -> Any:
    """Return a 1-D mesh named ``cp``."""
    return init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
