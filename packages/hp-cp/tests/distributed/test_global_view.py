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


class RotaryOfPairs(nn.Module):
    """Rotation of neighbours as complex numbers."""

    def rotate(self, x: Tensor, phases: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * phases).flatten(-2).type_as(x)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angle = torch.arange(k.shape[1])[:, None, None] / torch.arange(1, D // 2 + 1)
        phases = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
        q, k = self.rotate(q, phases), self.rotate(k, phases)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


CORES = [GPT2, Llama, Einsum, SoftCap, BandFromK, RelativeBias, Alibi, HeadBias, Sinks, SinksFromK]
CORES += [QKNorm, TorchRMS, TorchLayerNorm, RotaryFromK, Projected]


@pytest.mark.parametrize("mode", MODES)
def test_rotation_as_complex_numbers(mode: str) -> None:
    """Gradients lie differently on the ranks (a causal mask cuts keys); none may stop to copy."""
    check(RotaryOfPairs(), mode, layout="BSHD")


@every_mode
@pytest.mark.parametrize("core", CORES)
def test_eager_core_computes_what_it_does_unsharded(core: type[nn.Module], mode: str) -> None:
    check(core(), mode)


@unbalanced
@pytest.mark.parametrize("core", [Band, Rotary, ToLocal])
def test_eager_core_that_sizes_from_q_is_right_too(core: type[nn.Module], mode: str) -> None:
    check(core(), mode)


class Fn(nn.Module):
    """A core given as a function."""

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.fn(q, k, v)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.3


def bare(change: Callable[[Tensor], Tensor]) -> Fn:
    """Return attention whose scores are changed by ``change``, one KV head for each query head."""
    return Fn(lambda q, k, v: change(scores_of(q, k)).softmax(-1) @ v)


def plain(*shape: int) -> Tensor:
    return randn(*shape, seed=33)


RIGHT: dict[str, Fn] = {
    "plain left of minus": bare(lambda s: plain(S, S) - s),
    "plain chosen by where": bare(lambda s: torch.where(plain(S, S) > 0, plain(S, S), s)),
    "in place": bare(lambda s: s.clone().masked_fill_(plain(S, S) > 0, -9.0).add_(plain(S, S))),
    "columns by a mask": bare(lambda s: s.index_fill(-1, torch.arange(0, S, 3), 0.0)),
    "the maximum as a number": bare(lambda s: s * s.detach().max().item()),
    "a decision of Python": bare(lambda s: s * (2.0 if s.detach().sum() > 0 else 3.0)),
    "a maximum over all rows": bare(lambda s: s - s.max()),
    "tril of scores": bare(lambda s: s.tril()),
    "diagonal": bare(lambda s: s + s.diagonal(dim1=-2, dim2=-1)[..., None]),
    "repeated label": bare(lambda s: s + torch.einsum("bhii->bh", s)[..., None, None]),
    "gelu of k": Fn(lambda q, k, v: scores_of(q, F.gelu(k)).softmax(-1) @ v),
    "normalize": Fn(
        lambda q, k, v: scores_of(F.normalize(q, dim=-1), F.normalize(k, dim=-1)).softmax(-1) @ v
    ),
    "linear attention": Fn(lambda q, k, v: F.elu(q) @ (F.elu(k).mT @ v)),
    "plain times result": Fn(lambda q, k, v: plain(S, S) @ (scores_of(q, k).softmax(-1) @ v)),
    "mask from k": Fn(
        lambda q, k, v: (
            scores_of(q, k)
            .masked_fill(k.new_ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
            .softmax(-1)
            @ v
        )
    ),
    "chunks of q": Fn(
        lambda q, k, v: torch.cat([scores_of(x, k).softmax(-1) @ v for x in q.split(S // 4, 2)], 2)
    ),
    "shifted q": Fn(lambda q, k, v: scores_of(q.roll(1, 2), k).softmax(-1) @ v),
    "shifted k": Fn(
        lambda q, k, v: scores_of(q, torch.cat([k[:, :, :1], k[:, :, :-1]], 2)).softmax(-1) @ v
    ),
}
"""Right without load balance; DTensor may communicate for them."""


@pytest.mark.parametrize("mode", ["ulysses", "colossal"])
@pytest.mark.parametrize("core", RIGHT)
def test_what_else_is_written_in_a_core_is_right(core: str, mode: str) -> None:
    check(RIGHT[core], mode, kv=H, exact=False, size=2)


ORDER = "load_balance q holds half of the sequence in head-tail order"
MIXES_ROWS = [
    *("the maximum as a number", "a maximum over all rows", "tril of scores", "diagonal"),
    *("plain times result", "chunks of q", "shifted q"),
]


def refused(core: Fn, mode: str, text: str, size: int = 2) -> None:
    """Every rank raises an error with ``text``, and the next good call is right."""

    def run(rank: int) -> str:
        degree, balance, *_ = MODES[mode]
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        module = copy.deepcopy(core)
        ContextParallel(2, 1, degree, load_balance=balance).apply(module, mesh)
        q, k, v = (randn(B, H, S, D, seed=i).chunk(size, 2)[rank] for i in range(3))
        with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
            module(q, k, v)
        module.fn = lambda q, k, v: scores_of(q, k).softmax(-1) @ v
        module(q, k, v)
        return str(caught.value)

    for message in ranks(size).run(run):
        assert text in message and "ContextParallel: " in message


@pytest.mark.parametrize("core", MIXES_ROWS)
def test_what_mixes_rows_is_refused_under_load_balance(core: str) -> None:
    refused(RIGHT[core], "balanced", ORDER)


@pytest.mark.parametrize(
    "core",
    [
        Band(),
        Rotary(),
        Fn(lambda q, k, v: causal(scores_of(q, k), q.shape[2])),
        Fn(lambda q, k, v: scores_of(q, k) + k.new_ones(q.shape[2], S).triu(1)),
        Fn(lambda q, k, v: torch.einsum("bhid,id->bhid", q, plain(q.shape[2], D))),
    ],
    ids=["positions of q", "rotary of q", "tril of q", "mask on k's device", "einsum"],
)
def test_tables_sized_from_q_are_refused_under_load_balance_with_the_reason(
    core: nn.Module,
) -> None:
    text = "sized from q has the wrong rows; take its length from k"
    refused(Fn(core.forward), "balanced", text)


def written(write: Callable[[Tensor], Any]) -> Fn:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k).clone()
        write(scores)
        return scores.softmax(-1) @ v

    return Fn(fn)


@pytest.mark.parametrize(
    ("core", "text"),
    [
        (written(lambda s: s.narrow(2, 3, 4).fill_(0.0)), "the write would be lost"),
        (written(lambda s: s.transpose(1, 2)[:, 3].mul_(2.0)), "the write would be lost"),
        (written(lambda s: s.__setitem__((slice(None), slice(None), 3), s[:, :, 4])), "lost"),
        (written(lambda s: torch.zeros(B, H, S, S).add_(s)), "into a plain tensor (2, 12, 24, 24)"),
        (written(lambda s: torch.zeros(B, H, S, S).__setitem__(..., s)), "into a plain tensor"),
        (written(lambda s: torch.cdist(s, s)), "use_local_input=True"),
        (
            Fn(lambda q, k, v: F.conv1d(q.flatten(0, 1).mT, plain(D, D, 3), padding=1)),
            "conv1d inside the boundary must not run over a dim that is cut",
        ),
    ],
    ids=["narrow", "index", "setitem", "add_ to plain", "setitem of plain", "no rule", "conv"],
)
def test_what_would_be_silently_wrong_is_refused(core: Fn, text: str) -> None:
    refused(core, "colossal", text)


def test_multi_head_attention_forward_reaches_the_handler_inside() -> None:
    weight, bias = randn(3 * H * D, H * D, seed=1) * 0.1, randn(3 * H * D, seed=2)
    out_weight, out_bias = randn(H * D, H * D, seed=3) * 0.1, randn(H * D, seed=4)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(2, 0, 1, 3).flatten(2) for x in (q, k, v))
        out, _ = F.multi_head_attention_forward(
            *(q, k, v, H * D, H, weight, bias, None, None, False, 0.0, out_weight, out_bias),
            need_weights=False,
        )
        return out.unflatten(2, (H, D)).permute(1, 2, 0, 3)

    check(Fn(fn), "colossal", kv=H, size=2)
    check(Fn(fn), "ulysses", kv=H, size=2, exact=False)
