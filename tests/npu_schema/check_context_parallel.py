"""`ContextParallel` around a module that calls the fused operator, on each of four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

import hp_mesh._torch.gradients
from hp_comm import traffic
from hp_cp import AsyncContextParallel, ContextParallel, init_device_mesh, make_plan
from hp_cp.async_boundary import AsyncBoundary
from hp_cp.attention.rng import mix
from hp_mesh.boundary import boundary_of

from .fakes import DEVICE, compressed, mend_backward_of_v2, npu, tensor, torch_npu, world
from .limits import check_fusion_attention
from .recording import Recording, recorded

P, B, S, H, HKV, D = 4, 2, 24, 12, 4, 64
LAYOUTS = {"BSND": (1, 2), "BNSD": (2, 1), "TND": (0, 1), "BSH": (1, 2), "SBH": (0, 2)}
MODES = {
    "ulysses": {"ulysses_degree": 4},
    "colossal": {"ulysses_degree": 1},
    "hybrid": {"ulysses_degree": 2},
    "balanced": {"ulysses_degree": 1, "load_balance": True},
}
# heads that are merged with the head size are not cut, mirror halves of a packed sequence no rows
PAIRS = [
    (mode, layout)
    for mode in MODES
    for layout in LAYOUTS
    if not (layout in ("BSH", "SBH") and mode in ("ulysses", "hybrid"))
    and not (layout == "TND" and mode == "balanced")
]


def shape(layout: str, rows: int, heads: int) -> tuple[int, ...]:
    return {
        "BSH": (B, rows, heads * D),
        "SBH": (rows, B, heads * D),
        "BSND": (B, rows, heads, D),
        "BNSD": (B, heads, rows, D),
        "TND": (rows, heads, D),
    }[layout]


class Fused(nn.Module):
    """Calls the operator as a model does on one device."""

    def __init__(self, layout: str, suffix: str, given: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.layout, self.suffix, self.given = layout, suffix, given

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        merged = self.layout in ("BSH", "SBH")
        heads = q.shape[2] // D if merged else q.shape[LAYOUTS[self.layout][1]]
        operator = getattr(torch_npu, f"npu_fusion_attention{self.suffix}")
        out, softmax_max, softmax_sum, *_ = operator(
            q, k, v, heads, self.layout, scale=0.125, **self.given()
        )
        assert softmax_max.shape == softmax_sum.shape
        return out  # type: ignore[no-any-return]


def run(
    core: nn.Module,
    mode: str,
    layout: str,
    rank: int,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = HKV,
    hidden_collectives: int = 0,
    **options: Any,
) -> Recording:
    """Run one rank forward and backward; hold what comes out, goes back and is sent to the plan."""
    seq_dim, head_dim = LAYOUTS[layout]
    style = ContextParallel(seq_dim=seq_dim, head_dim=head_dim, **MODES[mode], **options)  # type: ignore[arg-type]
    style.apply(core, mesh)
    rows = S // P
    with npu():
        q = tensor(*shape(layout, rows, H), dtype=dtype)
        k, v = (tensor(*shape(layout, rows, kv_heads), dtype=dtype) for _ in range(2))
        with recorded(f"hp_cp, {mode}") as seen, traffic() as sent:
            out = core(q, k, v)
            out.sum().backward()
    assert type(out) is type(q), "plain tensor in, plain tensor out"
    assert out.shape == q.shape and out.dtype == dtype and out.device == torch.device(DEVICE)
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == dtype, name
    plan = make_plan(P, **MODES[mode])  # type: ignore[arg-type]
    described = plan.describe(
        num_heads=H,
        num_kv_heads=kv_heads,
        seq_len=S,
        head_size=D,
        batch=1 if layout == "TND" else B,
        element_size=dtype.itemsize,
        rank=rank,
    )
    assert sent.summary() == described.totals(), f"{mode} on rank {rank}"
    hidden = [c.operator for c in seen.dispatched if c.operator.startswith("_c10d_functional")]
    assert len(hidden) == 2 * hidden_collectives, hidden
    for call in seen.calls:
        if call.operator.startswith("npu_fusion_attention"):
            check_fusion_attention(call.given)
    return seen


def seen_keys(mode: str, rank: int) -> list[int]:
    """Return how many keys each call of a causal core is to be handed."""
    part = S // P
    return {
        "ulysses": [S],
        "colossal": [(rank + 1) * part],
        "hybrid": [(rank // 2 + 1) * 2 * part],
        "balanced": sorted([(2 * rank + 1) * part // 2, (2 * (P - 1 - rank) + 2) * part // 2]),
    }[mode]


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors hold no numbers: those that are read are given here."""
    mend_backward_of_v2()
    monkeypatch.setattr("torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT", 64)
    monkeypatch.setattr("hp_cp.unwrap.dropout_seed", lambda block: mix(7, *block))
    monkeypatch.setattr("hp_mesh.handoff.Launched.is_unchanged", lambda self, x: True)
    offset = hp_mesh._torch.gradients.shard_offset

    def real(*args: Any) -> Any:
        with unset_fake_temporarily():
            return offset(*args)

    monkeypatch.setattr("hp_mesh._torch.gradients.shard_offset", real)


@pytest.fixture(params=range(P), ids=lambda rank: f"rank{rank}")
def rank(request: pytest.FixtureRequest) -> Any:
    """Be each rank in turn; tests that vary other things take an inner and the last one."""
    with world(request.param, P):
        yield request.param


TWO = pytest.mark.parametrize("rank", [1, P - 1], indirect=True, ids=lambda rank: f"rank{rank}")


@pytest.fixture
def mesh(rank: int) -> DeviceMesh:
    return init_device_mesh("npu", (P,), mesh_dim_names=("cp",))


def lengths(*ends: int) -> dict[str, Any]:
    return {"actual_seq_qlen": [*ends], "actual_seq_kvlen": [*ends]}


@pytest.mark.parametrize(("mode", "layout"), PAIRS)
def test_a_causal_core_is_called_with_what_the_rank_sees(
    mode: str, layout: str, rank: int, mesh: DeviceMesh
) -> None:
    """Mode 2 or 3 of the model; keys, heads and lengths of the rank; traffic as the plan says."""
    for model_mode in (2, 3):
        given: dict[str, Any] = {"sparse_mode": model_mode}
        if layout == "TND":
            given |= lengths(5, 17, S)
        core = Fused(layout, "", lambda given=given: {"atten_mask": compressed(), **given})
        seen = run(core, mode, layout, rank, mesh)
        heads = H // MODES[mode]["ulysses_degree"]
        assert [call.given["head_num"] for call in seen.calls] == [heads] * len(seen.calls)
        is_cut = mode != "ulysses"
        assert all(c.given["sparse_mode"] == (3 if is_cut else model_mode) for c in seen.calls)
        if layout != "TND":
            keys = sorted(call.given["key"].shape[LAYOUTS[layout][0]] for call in seen.calls)
            assert keys == seen_keys(mode, rank)


@TWO
@pytest.mark.parametrize("suffix", ["", "_v2", "_v3"], ids=["v1", "v2", "v3"])
@pytest.mark.parametrize("mode", MODES)
def test_windows_masks_biases_and_sinks_in_each_version(
    mode: str, suffix: str, rank: int, mesh: DeviceMesh
) -> None:
    """Each version's spelling of the tokens; masks, biases and sinks cut to rows and heads."""
    names = ("pre_tokens", "next_tokens") if suffix == "_v2" else ("pre_tockens", "next_tockens")
    cases: list[Callable[[], dict[str, Any]]] = [
        lambda: {"atten_mask": compressed(), "sparse_mode": 4, names[0]: 5, names[1]: 0},
        lambda: {"atten_mask": tensor(B, H, S, S, dtype=torch.bool, grad=False), "sparse_mode": 1},
        lambda: {
            "atten_mask": compressed(),
            "sparse_mode": 2,
            "pse": tensor(1, H, S, S, grad=False),
            "sink": tensor(H, dtype=torch.float32, grad=False),
        },
        lambda: {"keep_prob": 0.9},
    ]
    for case in cases:
        run(Fused("BSND", suffix, case), mode, "BSND", rank, mesh)


@TWO
@pytest.mark.parametrize("mode", ["ulysses", "colossal", "hybrid"])
def test_packed_documents_reach_each_version(mode: str, rank: int, mesh: DeviceMesh) -> None:
    """Lists for versions 1 and 2, a tensor for 3."""
    for suffix in ("", "_v2", "_v3"):
        ends: Any = [5, 17, S] if suffix != "_v3" else torch.tensor([5, 17, S])
        given = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "sparse_mode": 3}
        core = Fused("TND", suffix, lambda g=given: {"atten_mask": compressed(), **g})
        run(core, mode, "TND", rank, mesh)


@TWO
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_heads", [HKV, 2, H], ids=["gqa", "fewer-than-ranks", "mha"])
def test_sdpa_and_local_tensors_take_the_same_way(
    mode: str, kv_heads: int, rank: int, mesh: DeviceMesh
) -> None:
    """A core that calls torch's attention, and one that is handed plain tensors."""

    class Sdpa(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for dtype in (torch.bfloat16, torch.float16):
        seen = run(Sdpa(), mode, "BNSD", rank, mesh, dtype=dtype, kv_heads=kv_heads)
        assert [call.given["sparse_mode"] for call in seen.calls] == [3] * len(seen.calls) != []
    core = Fused("BNSD", "", lambda: {"atten_mask": compressed(), "sparse_mode": 3})
    run(core, mode, "BNSD", rank, mesh, kv_heads=kv_heads, use_local_input=True)


@TWO
@pytest.mark.parametrize("mode", ["ulysses", "colossal", "hybrid"])
def test_projections_hand_over_asynchronously(mode: str, rank: int, mesh: DeviceMesh) -> None:
    """`AsyncContextParallel`: the same calls of the operator, gradients for the projections.

    The first step learns how q, k and v come from them, the second sends ahead.
    """

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, heads in (("q", H), ("k", HKV), ("v", HKV)):
                layer = nn.Linear(80, heads * D, dtype=torch.bfloat16, device=DEVICE)
                self.add_module(f"{name}_proj", layer)
            self.core = Fused("BSND", "", lambda: {"atten_mask": compressed(), "sparse_mode": 2})

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (-1, D)) for p in self.projections())
            return self.core(q, k, v)  # type: ignore[no-any-return]

        def projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
            return self.q_proj, self.k_proj, self.v_proj

    with npu():
        model = Attention()
    style = AsyncContextParallel(seq_dim=1, head_dim=2, **MODES[mode])
    style.apply(model.core, mesh, *model.projections())
    with npu():
        for step in range(2):
            x = tensor(B, S // P, 80)
            with recorded(f"hp_cp, {mode}, async") as seen:
                out = model(x)
                boundary = boundary_of(model.core)
                assert isinstance(boundary, AsyncBoundary)
                assert all(h.learned is not None for h in boundary.handoffs.values()), step
                out.sum().backward()
            assert out.shape == (B, S // P, H, D) and x.grad is not None
            (call,) = seen.calls
            check_fusion_attention(call.given)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@TWO
def test_rotary_embedding_inside_the_core_sees_the_whole_sequence(
    rank: int, mesh: DeviceMesh
) -> None:
    """torch_npu's operator on q and k, with tables of all positions.

    Its own DTensor rule for the backward sums the gradient of k, which is partial where k was
    gathered: one reduce-scatter more than the plan has.
    """

    class Rotated(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tables = [tensor(1, S, 1, D, grad=False) for _ in range(2)]
            q, k = (torch_npu.npu_rotary_mul(x, *tables) for x in (q, k))
            out = torch_npu.npu_fusion_attention(
                q, k, v, q.shape[2], "BSND", atten_mask=compressed(), sparse_mode=2
            )
            return out[0]  # type: ignore[no-any-return]

    for mode, hidden in (("ulysses", 0), ("colossal", 1), ("hybrid", 1)):
        run(Rotated(), mode, "BSND", rank, mesh, hidden_collectives=hidden)
