"""A key is gathered once within a `DSAGatherCache`, and never taken for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_dsa import DSAGatherCache, DSASparseAttentionContextParallel
from hp_dsa.gather_cache import _scopes, open_gathers
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from ._layer import Attention, Case, Layer, check, reference, scalar, styles, upstreams

CASE = Case(P=2, cached=True)


def _leaves(case: Case, rank: int) -> dict[str, Tensor]:
    return {n: case.local(x, rank).clone().requires_grad_() for n, x in case.inputs().items()}


def _gathers(rank: int) -> None:
    """Behaviour 39: the latent with its rotary part, and the index key."""
    layer = Layer(CASE)
    styles(CASE)(layer, CASE.mesh())
    with count_collectives() as sent:
        layer(*_leaves(CASE, rank).values())
    assert sent.count("all_gather") == 2
    assert open_gathers() is None and not _scopes.open


def test_a_layer_gathers_each_key_once_and_forgets_it() -> None:
    ranks(2).run(_gathers)


def _inference(rank: int) -> None:
    layer = Layer(CASE)
    styles(CASE)(layer, CASE.mesh())
    expected, _ = reference(CASE)
    with torch.inference_mode(), count_collectives() as sent:
        xs = {n: CASE.local(x, rank) * 1 for n, x in CASE.inputs().items()}
        outputs = layer(*xs.values())
    assert_close(outputs["out"], CASE.local(expected["out"], rank))
    assert_close(outputs["loss"], expected["loss"], kind="loss")
    assert sent.count("all_gather") == 3  # within the loss alone all keys fit in one


def test_inference_mode_shares_nothing_because_changes_are_not_counted() -> None:
    ranks(2).run(_inference)


class Layers(nn.Module):
    """Variations of what a layer passes to its boundaries."""

    def __init__(self, case: Case, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = Layer(case), kind

    def forward(self, *args: Tensor) -> dict[str, Tensor]:
        query, latent, qr, kr, qi, ki, w = args
        layer = self.layer
        with torch.set_grad_enabled(self.kind != "no-grad-indexer"):
            indices, values = layer.indexer(qi, ki, w)
        key, value, later = latent, latent, latent.detach()
        if self.kind == "views":
            key, value = latent.squeeze(-2).unsqueeze(-2), latent.view_as(latent)
        elif self.kind == "other-value":
            value = latent * 2
        elif self.kind == "detached-value":
            value = latent.detach()
        elif self.kind == "detached-key":
            key = latent.detach()
        elif self.kind == "changed-copy":
            later = latent.detach() * 1.01
        out, top, total = layer.attention(query, key, value, indices, qr, kr)
        rest = (qi, ki, w, indices, top, total)
        loss = layer.loss(query.detach(), later, *rest, query_rope=qr, key_rope=kr)
        return {
            "indices": indices,
            "values": values.detach() if self.kind == "no-grad-indexer" else values,
            "out": out,
            "softmax_max": top,
            "softmax_sum": total,
            "loss": loss,
        }


# all-gathers and reduce-scatters: a latent's data travels once, whoever needs its gradient
KINDS = {
    "views": (2, 2),
    "other-value": (2, 2),
    "detached-value": (2, 2),
    "detached-key": (2, 2),
    "changed-copy": (3, 2),
    "no-grad-indexer": (2, 2),
}


def _kind(rank: int, case: Case, kind: str) -> tuple[int, int]:
    whole = {n: x.requires_grad_() for n, x in case.inputs().items()}
    expected = Layers(case, kind)(*whole.values())
    scalar(expected, upstreams(case)).backward()

    model = Layers(case, kind)
    styles(case)(model.layer, case.mesh())
    DSAGatherCache().remove(model.layer)
    DSAGatherCache().apply(model)
    leaves = _leaves(case, rank)
    with count_collectives() as sent:
        outputs = model(*leaves.values())
        scalar(outputs, {n: case.local(x, rank) for n, x in upstreams(case).items()}).backward()
    grads = {n: x.grad for n, x in whole.items()}
    check(case, rank, outputs, {n: x.detach() for n, x in expected.items()}, leaves, grads)
    return sent.count("all_gather"), sent.count("reduce_scatter")


@pytest.mark.parametrize("case", [CASE, CASE.but(load_balance=True)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_data_is_gathered_once_and_gradients_go_where_they_belong(
    kind: str, case: Case
) -> None:
    """Fault U13: key and value of one shape are told apart by their data."""
    assert ranks(2).run(_kind, case, kind) == [KINDS[kind]] * 2


class Twice(nn.Module):
    """Attends twice; something may happen to the key in between."""

    def __init__(self, case: Case, change: str) -> None:
        super().__init__()
        self.core, self.change = Attention(case), change

    def forward(self, q: Tensor, k: Tensor, topk: Tensor) -> Tensor:
        first = self.core(q, k, k, topk)[0]
        if self.change == "in-place":
            k.mul_(2)
        elif self.change == "replaced":
            k = k * 2
        elif self.change == "raise":
            raise RuntimeError("between")
        elif self.change == "interrupt":
            raise KeyboardInterrupt
        return first + self.core(q, k, k, topk)[0]


def _twice(rank: int, change: str, gathers: int) -> None:
    case = Case(P=2)
    q, k = randn(2, 6, 3, 5, seed=rank), randn(2, 6, 1, 5, seed=10 + rank)
    topk = torch.zeros(2, 6, 1, 3, dtype=torch.int32)
    module: Any = DSAGatherCache().apply(Twice(case, change))
    alone = Twice(case, change)
    for one in (module, alone):
        DSASparseAttentionContextParallel().apply(one.core, case.mesh())
    if change in ("raise", "interrupt"):
        with pytest.raises(KeyboardInterrupt if change == "interrupt" else RuntimeError):
            module(q, k, topk)
        assert open_gathers() is None and not _scopes.open
        module.change = "none"
    with count_collectives() as sent:
        out = module(q, k.clone(), topk)
    assert sent.count("all_gather") == gathers
    alone.change = module.change
    assert_close(out, alone(q, k.clone(), topk))


@pytest.mark.parametrize(
    ("change", "gathers"),
    [("none", 1), ("in-place", 2), ("replaced", 2), ("raise", 1), ("interrupt", 1)],
)
def test_a_changed_key_is_gathered_again_and_every_exit_clears(change: str, gathers: int) -> None:
    """Fault C4: nothing stale is left, whatever ended the layer."""
    ranks(2).run(_twice, change, gathers)


def _checkpointed(rank: int, reentrant: bool) -> None:
    expected, grads = reference(CASE)
    layer = Layer(CASE)
    styles(CASE)(layer, CASE.mesh())
    ups = {n: CASE.local(x, rank) for n, x in upstreams(CASE).items()}
    leaves = _leaves(CASE, rank)
    if reentrant:
        names = list(expected)

        def run(*args: Tensor) -> tuple[Tensor, ...]:
            outputs = layer(*args)
            return tuple(outputs[name] for name in names)

        found = checkpoint(run, *leaves.values(), use_reentrant=True)
        outputs = dict(zip(names, found, strict=True))
    else:
        outputs = checkpoint(layer, *leaves.values(), use_reentrant=False)
    scalar(outputs, ups).backward()
    check(CASE, rank, outputs, expected, leaves, grads)
    assert open_gathers() is None and not _scopes.open


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_shares_again(reentrant: bool) -> None:
    ranks(2).run(_checkpointed, reentrant)


def test_a_cache_is_applied_once_and_can_be_taken_off() -> None:
    module = nn.Linear(2, 2)
    cache = DSAGatherCache()
    assert cache.apply(module) is module
    with pytest.raises(ValueError, match="already has a gather cache"):
        cache.apply(module)
    assert cache.remove(module) is module
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert not module._forward_hooks_always_called
