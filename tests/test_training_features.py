"""What a training loop does around context parallelism, in every mode: same numbers as without.

A matrix: activation checkpointing of the three kinds, autocast, gradient accumulation (with FSDP
holding its reductions back, too), evaluation in between, a deep copy.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hp_comm import count_tokens
from hp_cp import AsyncContextParallel, ContextParallel, init_device_mesh
from hp_mesh import next_token_labels
from hp_mesh.testing import assert_close, ranks

from ._llama import (
    BALANCED,
    COLOSSAL,
    HYBRID,
    ULYSSES,
    S,
    alone,
    assert_whole,
    batch,
    llama,
    mean_loss,
    rows_of,
    sharded_loss,
)

MODES = [
    pytest.param(kind, mode, 4 if mode is HYBRID else 2, id=f"{prefix}{name}")
    for prefix, kind in (("", ContextParallel), ("async-", AsyncContextParallel))
    for name, mode in (
        ("ulysses", ULYSSES),
        ("colossal", COLOSSAL),
        ("hybrid", HYBRID),
        ("balanced", BALANCED),
    )
    if (kind, name) != (AsyncContextParallel, "balanced")  # which is synchronous
]
modes = pytest.mark.parametrize(("kind", "mode", "size"), MODES)


def styled(kind: type[ContextParallel], mode: dict[str, Any], mesh: Any, model: Any = None) -> Any:
    """Return the Llama with a style on each attention core."""
    model = llama() if model is None else model
    for layer in model.layers.values():
        a, style = layer.attention, kind(**mode)
        if isinstance(style, AsyncContextParallel):
            style.apply(a.sdpa_core, mesh["cp"], a.q_ready, a.k_ready, a.wv)
        else:
            style.apply(a.sdpa_core, mesh["cp"])
    return model


def grads_of(model: nn.Module, mesh: Any) -> dict[str, Tensor]:
    """Return the mean over the ranks, as FSDP would leave it; and clear the gradients."""
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        dist.all_reduce(parameter.grad, group=mesh["cp"].get_group())
        grads[name] = parameter.grad / mesh["cp"].size()
        parameter.grad = None
    return grads


def plain_step(model: Any, mesh: Any) -> Tensor:
    """Run forward and backward of the whole batch."""
    loss = sharded_loss(model, batch(0), mesh)
    loss.backward()
    return loss.detach()


def checkpointed(**options: Any) -> Callable[..., Tensor]:
    """Recompute each layer in backward."""

    def step(model: Any, mesh: Any) -> Tensor:
        for layer in model.layers.values():
            if "forward" not in layer.__dict__:
                layer.forward = functools.partial(checkpoint, layer.forward, **options)
        return plain_step(model, mesh)

    return step


def keep(*names: str) -> Callable[[], Any]:
    """Save what ops of these names give; recompute the rest."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = any(name in str(op) for name in names)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def accumulated(model: Any, mesh: Any) -> Tensor:
    """Run the batch as two micro-batches, both under way before the first backward."""
    total = count_tokens(next_token_labels(batch(0), mesh["cp"]) != -100, mesh["cp"].get_group())
    losses = [sharded_loss(model, part, mesh, total) for part in batch(0).chunk(2)]
    for loss in losses:
        loss.backward()
    return sum(losses).detach()


def evaluated(model: Any, mesh: Any) -> Tensor:
    """Evaluate before, between forward and backward, and after."""

    def evaluate() -> Tensor:
        with torch.no_grad():
            return sharded_loss(model.eval(), batch(1), mesh)

    before = evaluate()
    loss = sharded_loss(model.train(), batch(0), mesh)
    between = evaluate()
    loss.backward()
    assert torch.equal(before, between) and torch.equal(before, evaluate())
    return loss.detach()


STEPS = {
    "plain": plain_step,
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant": checkpointed(use_reentrant=True),
    "selective": checkpointed(
        use_reentrant=False, context_fn=keep("aten.mm", "aten.addmm", "attention")
    ),
    # what a policy says of collectives, of buffers or of copies does not reach the exchanges
    "saving": checkpointed(
        use_reentrant=False, context_fn=keep("c10d", "aten.mm", "aten.empty", "aten.clone")
    ),
    "accumulation": accumulated,
    "evaluation": evaluated,
}


@pytest.mark.parametrize("feature", STEPS)
@modes
def test_a_step_is_that_of_one_process(
    kind: type[ContextParallel], mode: dict[str, Any], size: int, feature: str
) -> None:
    """Three times: a first call under async learns, and nothing may be left of a step."""
    expected = alone()

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp_shard", "cp"))
        model = styled(kind, mode, mesh)
        for step in range(3):
            loss = STEPS[feature](model, mesh)
            assert_close(loss, expected.losses[0], kind="loss", name=f"step {step}")
            assert_close(grads_of(model, mesh), expected.first, kind="grad", name=f"step {step}")

    ranks(size).run(run)


@modes
def test_a_deep_copy_trains_beside_its_original(
    kind: type[ContextParallel], mode: dict[str, Any], size: int
) -> None:
    """Copied after a step; both give the gradients of one process, and share no parameter."""
    expected = alone()

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp_shard", "cp"))
        model = styled(kind, mode, mesh)
        plain_step(model, mesh)
        grads_of(model, mesh)
        twin = copy.deepcopy(model)
        losses = [sharded_loss(one, batch(0), mesh) for one in (model, twin)]
        for loss in losses:
            loss.backward()
        for one in (twin, model):
            assert_close(grads_of(one, mesh), expected.first, kind="grad")

    ranks(size).run(run)


@modes
def test_fsdp_may_hold_its_reductions_back(
    kind: type[ContextParallel], mode: dict[str, Any], size: int
) -> None:
    """Two micro-batches; gradients are reduced with the last; they are those of one process."""
    expected = alone()

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4 // size, size), mesh_dim_names=("dp_shard", "cp"))
        model = styled(kind, mode, mesh)
        flat = mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp")
        for layer in model.layers.values():
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
        rows = rows_of(batch(0), mesh)
        total = count_tokens(next_token_labels(rows, mesh["cp"]) != -100, flat.get_group())
        for _ in range(2):
            for last, part in enumerate(rows.chunk(2)):
                model.set_requires_gradient_sync(bool(last))
                sharded_loss(model, part, mesh, total).backward()
            assert_whole({n: p.grad for n, p in model.named_parameters()}, expected.first)
            model.zero_grad()

    ranks(4).run(run)


@modes
def test_autocast_differs_from_one_process_by_rounding(
    kind: type[ContextParallel], mode: dict[str, Any], size: int
) -> None:
    """bfloat16 products, float32 weights: in norm, gradients differ by a few steps of the dtype."""
    reference = llama().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = mean_loss(reference(batch(0), torch.arange(S)).float(), batch(0))
    expected.backward()

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp_shard", "cp"))
        model = styled(kind, mode, mesh, llama().float())
        seen = []
        core = model.layers["0"].attention.sdpa_core
        core.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = sharded_loss(model, batch(0), mesh)
            loss.backward()
            assert abs(loss - expected) < 2**-8 * expected
            for name, grad in grads_of(model, mesh).items():
                full = reference.get_parameter(name).grad
                assert grad.dtype == torch.float32
                assert (grad - full).norm() < 2**-6 * full.norm(), name
        assert seen == [torch.bfloat16] * 2

    ranks(size).run(run)


def _compiled(rank: int, expected: dict[str, Tensor]) -> list[dict[str, int]]:
    """Compile each layer around its boundary; return how often which of our hooks broke a graph."""
    from torch._dynamo.utils import counters

    found = []
    for kind, mode in (
        (ContextParallel, ULYSSES),
        (ContextParallel, BALANCED),
        (AsyncContextParallel, ULYSSES),
    ):
        torch._dynamo.reset()
        counters.clear()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
        model = styled(kind, mode, mesh)
        for layer in model.layers.values():
            layer.compile(backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # dynamo tells what it does not trace
            for step in range(2):
                plain_step(model, mesh)
                name = f"{kind.__name__} {mode}, step {step}"
                assert_close(grads_of(model, mesh), expected, kind="grad", name=name)
        reasons = [reason for reason in counters["graph_break"] if "." in reason]
        found.append(
            {
                "graphs": counters["stats"]["unique_graphs"],
                "at attention": sum("_PreHook._open" in reason for reason in reasons),
                "at a handoff": sum("_Hook.__call__" in reason for reason in reasons),
                "elsewhere": sum("Hook." not in reason for reason in reasons),
            }
        )
    return found


def test_a_compiled_block_breaks_at_its_boundary_only() -> None:
    """torch.compile of each layer, sync and async: same gradients, graphs around the exchange."""
    found = ranks(2, backend="processes").run(_compiled, alone().first, timeout=900.0)[0]
    for breaks in found[:2]:
        assert (breaks["at attention"], breaks["at a handoff"], breaks["elsewhere"]) == (1, 0, 0)
    assert found[2]["at a handoff"] > 0, found
