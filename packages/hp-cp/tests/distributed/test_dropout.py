"""Dropout inside attention: one seed, other masks on every block, the same again in recompute.

On processes: threads share torch's default generator, and so would not be seeded alike.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_cp import ContextParallel, init_device_mesh
from hp_mesh.testing import assert_close, randn, ranks

B, S, H, D, P = 1, 32, 4, 32, 4
MODES: dict[str, dict[str, Any]] = {
    "ulysses": {},
    "colossal": {"ulysses_degree": 1},
    "hybrid": {"ulysses_degree": 2},
    "balanced": {"ulysses_degree": 1, "load_balance": True},
}


class Dropping(nn.Module):
    """SDPA, or the eager form that models write, with dropout on the weights."""

    def __init__(self, kind: str, p: float) -> None:
        super().__init__()
        self.kind, self.p = kind, p

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p).transpose(1, 2)
        weights = (q @ k.mT * D**-0.5).softmax(-1)
        return (F.dropout(weights, self.p, training=True) @ v).transpose(1, 2)


def dropped_weights(rank: int, style: dict[str, Any], kind: str, seed: int) -> list[Tensor]:
    """Return the [B, S/P, H, S] weights that this rank kept, of two calls: v is the identity."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
    core = ContextParallel(**style).apply(Dropping(kind, 0.5), mesh)
    q = torch.zeros(B, S, H, D, dtype=torch.float64)
    v = torch.eye(S, D, dtype=torch.float64)[None, :, None].expand(B, S, H, D)
    torch.manual_seed(seed)
    local = [x.chunk(P, 1)[rank] for x in (q, q, v)]
    return [core(*local) for _ in range(2)]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_masks_follow_from_one_seed_and_differ_between_blocks(mode: str, kind: str) -> None:
    """Behaviour 45: ranks seeded alike drop other weights; half are dropped; a rerun is equal."""
    pool = ranks(P, backend="processes")
    first = pool.run(dropped_weights, MODES[mode], kind, 3)
    again = pool.run(dropped_weights, MODES[mode], kind, 3)
    other = pool.run(dropped_weights, MODES[mode], kind, 4)
    whole, repeated, reseeded = (
        [torch.cat([r[i] for r in result], dim=1) for i in range(2)]  # [B, S, H, S]
        for result in (first, again, other)
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, repeated, strict=True))
    assert not torch.equal(whole[0], whole[1]) and not torch.equal(whole[0], reseeded[0])
    kept = whole[0] != 0
    assert 0.45 < kept.double().mean() < 0.55
    assert torch.allclose(whole[0][kept], torch.tensor(2 / S, dtype=torch.float64))
    rows = kept[0].transpose(0, 1).reshape(H * S, S)  # one row per head and token
    assert len(rows.unique(dim=0)) == H * S


def gradients(rank: int, style: dict[str, Any], kind: str, recompute: bool) -> list[Tensor]:
    """Return output and gradients of one seeded step, with or without activation checkpointing."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
    core = ContextParallel(**style).apply(Dropping(kind, 0.3), mesh)
    whole = [randn(B, S, H, D, seed=i) for i in range(4)]
    q, k, v, up = (x.chunk(P, 1)[rank].clone() for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(7)
    out = checkpoint(core, *leaves, use_reentrant=False) if recompute else core(*leaves)
    torch.rand(3)  # what the rest of a model draws before backward
    out.backward(up)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_recompute_drops_the_same_weights(mode: str, kind: str) -> None:
    """Checkpointed gradients equal those of the plain step, bit for bit."""
    pool = ranks(P, backend="processes")
    plain = pool.run(gradients, MODES[mode], kind, False)
    again = pool.run(gradients, MODES[mode], kind, True)
    for one, two in zip(plain, again, strict=True):
        assert len(one) == len(two) == 4
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def without_dropout(rank: int, style: dict[str, Any], kind: str) -> None:
    """Compare p=0 with one device; the generator is not touched."""
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
    whole = [randn(B, S, H, D, seed=i) for i in range(3)]
    expected = Dropping(kind, 0.0)(*whole)
    core = ContextParallel(**style).apply(Dropping(kind, 0.0), mesh)
    before = torch.get_rng_state()
    out = core(*(x.chunk(P, 1)[rank] for x in whole))
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(out, expected.chunk(P, 1)[rank])


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_no_dropout_is_exact_and_draws_nothing(mode: str, kind: str) -> None:
    """Behaviour 45: p=0 equals the unsharded module."""
    ranks(P, backend="processes").run(without_dropout, MODES[mode], kind)
