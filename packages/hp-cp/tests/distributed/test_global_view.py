"""Attention cores as people write them, unmodified, in every mode, against the unsharded module."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_cp import ContextParallel
from hp_mesh.mesh import init_device_mesh
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

B, S, H, KV, D = 2, 24, 12, 4, 10

MODES = {
    "ulysses": (None, False, {"all_to_all": 2}, {"all_to_all": 2}),
    "colossal": (1, False, {"all_gather": 2}, {"reduce_scatter": 2}),
    "hybrid": (
        2,
        False,
        {"all_gather": 2, "all_to_all": 2},
        {"all_to_all": 2, "reduce_scatter": 2},
    ),
    "balanced": (1, True, {"all_gather": 2, "p2p": 2}, {"p2p": 2, "reduce_scatter": 2}),
}
every_mode = pytest.mark.parametrize("mode", MODES)
unbalanced = pytest.mark.parametrize("mode", [m for m in MODES if m != "balanced"])


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    batch, heads, length, size = x.shape
    if groups == 1:
        return x
    x = x[:, :, None, :, :].expand(batch, heads, groups, length, size)
    return x.reshape(batch, heads * groups, length, size)


def causal(scores: Tensor, length: int) -> Tensor:
    """Mask scores with a mask sized from k."""
    mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
    return scores.masked_fill(~mask, float("-inf"))


class GPT2(nn.Module):
    """Scores by matmul, a [1, 1, S, S] buffer sliced, torch.where with a scalar tensor."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        bias = torch.tril(torch.ones(64, 64, dtype=torch.bool)).view(1, 1, 64, 64)
        self.register_buffer("bias", bias, persistent=False)
        self.dropout = nn.Dropout(0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        weights = torch.matmul(q, k.transpose(-1, -2))
        weights = weights / torch.full([], v.size(-1) ** 0.5, dtype=weights.dtype)
        length = k.size(-2)
        mask = self.bias[:, :, :length, :length]
        lowest = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype)
        weights = torch.where(mask, weights.to(v.dtype), lowest)
        weights = self.dropout(nn.functional.softmax(weights, dim=-1).type(v.dtype))
        return torch.matmul(weights, v)


class Llama(nn.Module):
    """repeat_kv by expand and reshape, an additive mask, softmax in fp32 and back."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        length = k.shape[-2]
        mask = torch.full((length, length), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
        weights = weights + mask[None, None]
        weights = F.softmax(weights, dim=-1, dtype=torch.float64).to(q.dtype)
        weights = F.dropout(weights, p=0.0, training=self.training)
        return torch.matmul(weights, v).contiguous()


class Einsum(nn.Module):
    """Grouped heads by unflatten and einsum, no repeated keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        weights = torch.softmax(causal(scores, k.shape[2]), -1)
        return torch.einsum("...ij,...jd->...id", weights, v)


class SoftCap(nn.Module):
    """Gemma's tanh cap of the logits, bmm on flattened batch and heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        scores = q @ k.mT * 0.3
        scores = torch.tanh(scores / 5.0) * 5.0
        return causal(scores, k.shape[2]).softmax(-1) @ v


class Band(nn.Module):
    """A sliding window from positions of q and k."""

    def __init__(self, from_k: bool = False) -> None:
        super().__init__()
        self.from_k = from_k

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        rows = torch.arange((k if self.from_k else q).shape[2])[:, None]
        columns = torch.arange(k.shape[2])[None, :]
        mask = (rows >= columns) & (rows - columns < 5)
        scores = (q @ k.transpose(-1, -2)).masked_fill(mask.logical_not(), -torch.inf)
        return scores.softmax(-1) @ v


class BandFromK(Band):
    def __init__(self) -> None:
        super().__init__(from_k=True)


class RelativeBias(nn.Module):
    """T5's bias per head by embedding lookup, [1, H, S, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * S, H, dtype=torch.float64)
        with torch.no_grad():
            self.table.weight.copy_(randn(2 * S, H, seed=5))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        at = torch.arange(k.shape[2])
        bias = self.table(at[None, :] - at[:, None] + S).permute(2, 0, 1).unsqueeze(0)
        return causal(q @ k.mT + bias, k.shape[2]).softmax(-1) @ v


class Alibi(nn.Module):
    """Slopes per head times a distance, added to the scores."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        slopes = 2.0 ** -torch.arange(1.0, H + 1, dtype=torch.float64)
        self.register_buffer("slopes", slopes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        distance = torch.arange(k.shape[2], dtype=torch.float64)
        bias = self.slopes[:, None, None] * (distance[None, :] - distance[:, None])
        return causal(q @ k.mT + bias, k.shape[2]).softmax(-1) @ v


class HeadBias(nn.Module):
    """A learned gain per head, [H, 1, 1], and a learned scalar temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(randn(H, 1, 1, seed=6))
        self.temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        scores = self.temperature * (q @ k.mT) * self.gain
        return causal(scores, k.shape[2]).softmax(-1) @ v * self.gain.sigmoid()


class Sinks(nn.Module):
    """gpt-oss: a learned sink logit per head, cut off again after softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(randn(H, seed=7))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        scores = causal(q @ k.mT, k.shape[2])
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        logits = torch.cat([scores, sinks], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        return F.softmax(logits, dim=-1)[..., :-1] @ v


class SinksFromK(Sinks):
    """The same with the sink's rows sized from k, as load balance asks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        scores = causal(q @ k.mT, k.shape[2])
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, k.shape[-2], -1)
        return F.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1] @ v


class RMSNorm(nn.Module):
    """Llama's own norm, in elementary ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * randn(D, seed=8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x


class QKNorm(nn.Module):
    """Norms of q and k inside the core, with parameters."""

    def __init__(self, kind: Callable[[], nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.q_norm, self.k_norm = kind(), kind()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.q_norm(q), self.k_norm(k)
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        return causal(q @ k.mT, k.shape[2]).softmax(-1) @ v


def torch_norm(kind: type[nn.Module]) -> nn.Module:
    norm = kind(D, dtype=torch.float64)
    with torch.no_grad():
        for i, parameter in enumerate(norm.parameters()):
            parameter.copy_(1 + 0.3 * randn(D, seed=20 + i))
    return norm


class TorchRMS(QKNorm):
    def __init__(self) -> None:
        super().__init__(lambda: torch_norm(nn.RMSNorm))


class TorchLayerNorm(QKNorm):
    def __init__(self) -> None:
        super().__init__(lambda: torch_norm(nn.LayerNorm))


class Rotary(nn.Module):
    """Rotary tables computed inside from the length of q, applied to q and k."""

    def __init__(self, from_k: bool = False) -> None:
        super().__init__()
        self.from_k = from_k

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = (k if self.from_k else q).shape[2]
        angle = torch.arange(length, dtype=q.dtype)[:, None] * 10.0 ** -torch.linspace(
            0, 1, D // 2, dtype=q.dtype
        )
        cos, sin = (torch.cat([f(angle)] * 2, -1)[None, None] for f in (torch.cos, torch.sin))

        def rotate(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            return torch.cat([-x[..., half:], x[..., :half]], dim=-1)

        q, k = q * cos + rotate(q) * sin, (k * cos) + (rotate(k) * sin)
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        return causal(q @ k.mT, k.shape[2]).softmax(-1) @ v


class RotaryFromK(Rotary):
    def __init__(self) -> None:
        super().__init__(from_k=True)


class Projected(nn.Module):
    """A Linear per head inside the core, and baddbmm for the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(D, D, dtype=torch.float64)
        with torch.no_grad():
            self.mix.weight.copy_(randn(D, D, seed=9))
            self.mix.bias.copy_(randn(D, seed=10))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = self.mix(k)
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        return self.mix(causal(q @ k.mT, k.shape[2]).softmax(-1) @ v)


class ToLocal(nn.Module):
    """Calls to_local itself after a transpose, mixes it with DTensor ops, returns a plain one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, q.shape[1] // k.shape[1]) for x in (k, v))
        scores = q @ k.mT + (k * k).sum(-1)[:, :, None, :]
        if isinstance(q, DTensor):
            return scores.to_local().softmax(-1) @ v.transpose(1, 2).to_local().transpose(1, 2)
        return scores.softmax(-1) @ v


def one(rank: int, core: nn.Module, mode: str, layout: str, full: Any, size: int) -> Any:
    degree, balance, *_ = MODES[mode]
    q, k, v, grad, _ = full
    seq, head = (2, 1) if layout == "BNSD" else (1, 2)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    core = copy.deepcopy(core)
    ContextParallel(seq_dim=seq, head_dim=head, ulysses_degree=degree, load_balance=balance).apply(
        core, mesh
    )
    cut = [x.detach().chunk(size, seq)[rank].clone().requires_grad_() for x in (q, k, v)]
    with count_collectives() as forward:
        out = core(*cut)
    assert not isinstance(out, DTensor)
    with count_collectives() as backward:
        out.backward(grad.chunk(size, seq)[rank])
    grads = {name: p.grad for name, p in core.named_parameters()}
    return out, [x.grad for x in cut], grads, forward.summary(), backward.summary()


def check(
    core: nn.Module,
    mode: str,
    *,
    layout: str = "BNSD",
    kv: int = KV,
    exact: bool = True,
    size: int = 4,
    length: int = S,
) -> None:
    """Compare output, input gradients, and parameter gradients summed over ranks; and traffic."""
    seq = 2 if layout == "BNSD" else 1

    def shape(heads: int) -> tuple[int, ...]:
        return (B, heads, length, D) if seq == 2 else (B, length, heads, D)

    q, k, v = (randn(*shape(h), seed=i, requires_grad=True) for i, h in enumerate((H, kv, kv)))
    grad = randn(*shape(H), seed=3)
    expected = core(q, k, v)
    expected.backward(grad)
    wanted = {name: p.grad for name, p in core.named_parameters()}
    for p in core.parameters():
        p.grad = None
    results = ranks(size).run(one, core, mode, layout, (q, k, v, grad, expected), size)
    for rank, (out, grads, _, forward, backward) in enumerate(results):
        assert_close(out, expected.chunk(size, seq)[rank], name=f"out of rank {rank}")
        for name, mine, whole in zip("qkv", grads, (q, k, v), strict=True):
            assert_close(mine, whole.grad.chunk(size, seq)[rank], kind="grad", name=f"d{name}")
        if exact:
            assert (forward, backward) == MODES[mode][2:], "no collective but those of the mode"
    for name, whole in wanted.items():
        total = sum(result[2][name] for result in results)
        assert_close(total, whole, kind="grad", name=name)


CORES = [GPT2, Llama, Einsum, SoftCap, BandFromK, RelativeBias, Alibi, HeadBias, SinksFromK]
CORES += [QKNorm, TorchRMS, TorchLayerNorm, RotaryFromK, Projected]


@every_mode
@pytest.mark.parametrize("core", CORES)
def test_eager_core_computes_what_it_does_unsharded(core: type[nn.Module], mode: str) -> None:
    check(core(), mode)


@unbalanced
@pytest.mark.parametrize("core", [Band, Sinks, Rotary, ToLocal])
def test_eager_core_that_sizes_from_q_is_right_too(core: type[nn.Module], mode: str) -> None:
    check(core(), mode)
