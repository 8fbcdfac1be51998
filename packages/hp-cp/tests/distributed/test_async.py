"""AsyncContextParallel in every mode: numbers, traffic, and what runs behind what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hp_cp import AsyncContextParallel, ContextParallel, init_device_mesh
from hp_mesh.boundary import boundary_of
from hp_mesh.handoffs import _warned
from hp_mesh.testing import assert_close, count_collectives, ranks
from hp_mesh.testing._watch import Watch

from ._compare import COLOSSAL, HYBRID, ULYSSES, Case
from ._cores import Eager, Sdpa
from ._handoffs import (
    DIM,
    Attention,
    apply,
    assert_overlaps,
    compare_steps,
    cp_mesh,
    in_flight,
    linear,
)

MODES = [*ULYSSES, *COLOSSAL, *HYBRID]
EACH = [Case(P=2), Case(P=2, degree=1), Case(P=4, degree=2)]
SYNC = {
    "ulysses": {"all_to_all": 4},
    "colossal": {"all_gather": 2, "reduce_scatter": 2},
    "hybrid": {"all_to_all": 4, "all_gather": 2, "reduce_scatter": 2},
}
AHEAD = {
    "ulysses": {"all_to_all": 8},
    "colossal": {"all_gather": 2, "reduce_scatter": 2},
    "hybrid": {"all_to_all": 8, "all_gather": 2, "reduce_scatter": 2},
}


@pytest.fixture(autouse=True)
def _said_anew() -> Iterator[None]:
    _warned.clear()
    yield
    _warned.clear()


def _mode(case: Case) -> str:
    return str(case).partition("-")[0]


@pytest.mark.parametrize("case", [*MODES, *(case.but(layout="BNSD") for case in EACH)], ids=str)
def test_every_mode_equals_one_device_and_sends_as_many_bytes_as_without_handoffs(
    case: Case,
) -> None:
    """Behaviour 27: call 1 learns synchronously; then three exchanges in, one out, and back."""

    def on(rank: int) -> None:
        seen = compare_steps(rank, case)
        assert_overlaps(seen.boundary)
        mode = _mode(case)
        assert seen.traffic == [SYNC[mode], AHEAD[mode], AHEAD[mode]]
        assert len(set(seen.bytes)) == 1

    ranks(case.P).run(on)


@pytest.mark.parametrize("heads", [(12, 12), (12, 6), (12, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("case", [Case(P=4), Case(P=4, degree=1), Case(P=4, degree=2)], ids=str)
def test_few_kv_heads_are_sent_ahead_to_those_that_need_them(
    case: Case, heads: tuple[int, int]
) -> None:
    """Fewer KV heads than ranks, and 12:6 on 4 ranks where query heads share them unevenly."""
    case = case.but(H=heads[0], HK=heads[1])

    def on(rank: int) -> None:
        seen = compare_steps(rank, case)
        assert_overlaps(seen.boundary)
        assert seen.traffic[1:] == [AHEAD[_mode(case)]] * 2

    ranks(4).run(on)


@pytest.mark.parametrize("layout", ["BSHD", "BNSD"])
@pytest.mark.parametrize("case", EACH[:2], ids=str)
def test_a_projection_may_split_heads_itself(case: Case, layout: str) -> None:
    """4-D outputs, handed on as they are or transposed."""
    case = case.but(layout=layout)

    def on(rank: int) -> None:
        build = lambda: Attention(case, whole_heads=True)  # noqa: E731
        assert_overlaps(compare_steps(rank, case, build=build).boundary)

    ranks(case.P).run(on)


class _Tokens(nn.Module):
    """TND: batch and sequence of the projections' output are one dim of the core's."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        inner = Attention(case)
        self.q_proj, self.k_proj, self.v_proj = inner.q_proj, inner.k_proj, inner.v_proj
        self.core = inner.core

    def forward(self, x: Tensor) -> Tensor:
        return self.core(
            *(p(x).view(-1, h, self.case.D) for p, h in self._heads())  # [S, H, D]
        )

    def _heads(self) -> list[tuple[nn.Module, int]]:
        case = self.case
        return [(self.q_proj, case.H), (self.k_proj, case.HK), (self.v_proj, case.HK)]


@pytest.mark.parametrize("case", EACH, ids=str)
def test_a_view_that_joins_dims_is_replayed(case: Case) -> None:
    """[1, S, H * D] becomes [S, H, D]: one dim goes, one is split."""
    case = case.but(layout="TND", B=1)

    def on(rank: int) -> None:
        assert_overlaps(compare_steps(rank, case, build=lambda: _Tokens(case)).boundary)

    ranks(case.P).run(on)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_the_exchange_is_under_way_before_attention(case: Case) -> None:
    """Behaviour 28: q, k, v after the projections (Colossal: k, v); nothing is left after."""

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        boundary = boundary_of(model.core)
        x = torch.ones(2, 8, DIM, dtype=torch.float64)
        names = "kv" if case.degree == 1 else "qkv"
        for call in range(3):
            with count_collectives() as ahead:
                outputs = model.project(x)
            assert in_flight(boundary) == (names if call else "")
            assert sum(ahead.summary().values()) == (len(names) if call else 0)
            with count_collectives() as late:
                model.attend(outputs)
            assert in_flight(boundary) == ""
            # the output's exchange and Hybrid's gather; the first call packs q, k and v as well
            inside = {"ulysses": (2, 1), "colossal": (2, 0), "hybrid": (4, 3)}[_mode(case)]
            assert sum(late.summary().values()) == inside[min(call, 1)]

    ranks(case.P).run(on)


class _Order(Watch):  # type: ignore[misc]
    """The order of collectives and matrix products in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        name = func._schema.name
        if (name.startswith("c10d::") and "allgather_" not in name) or (
            name == "c10d::_allgather_base_" and args[1].dtype != torch.uint8
        ):
            self.events.append("send")
        elif name in ("aten::mm", "aten::addmm"):
            self.events.append("gemm")


@pytest.mark.parametrize("case", EACH, ids=str)
def test_backward_launches_every_mirrored_exchange_before_the_first_projection_needs_one(
    case: Case,
) -> None:
    """The GEMMs of v's projection run while the gradients of k and q are on the wire."""

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        x = torch.ones(2, 8, DIM, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            out = model(x)
            with _Order() as order:
                out.sum().backward()
        sends = {"ulysses": 4, "colossal": 2, "hybrid": 6}[_mode(case)]
        assert order.events.count("send") == sends
        assert order.events[:sends] == ["send"] * sends, order.events
        assert order.events.count("gemm") >= 6

    ranks(case.P).run(on)


def test_backward_waits_in_the_order_in_which_the_projections_run_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """v, then k, then q: each wait stands right before the GEMMs that use its result."""
    from hp_comm import moves

    events: list[str] = []
    wait = moves.Transfer.wait

    def noted(self: Any) -> None:
        if self.works:
            events.append("wait")
        wait(self)

    def on(rank: int) -> None:
        case = Case(P=2)
        model = apply(Attention(case), case)
        for name in "qkv":
            weight = getattr(model, f"{name}_proj").weight
            if rank == 0:
                weight.register_hook(lambda grad, name=name: events.append(name))
        x = torch.ones(2, 8, DIM, dtype=torch.float64, requires_grad=True)
        for step in range(2):
            out = model(x)
            torch.distributed.barrier()
            if rank == 0:
                events.clear()
            if rank == 0 and step:
                monkeypatch.setattr(moves.Transfer, "wait", noted)
            torch.distributed.barrier()
            out.sum().backward()
            torch.distributed.barrier()

    ranks(2).run(on)
    # both ranks' waits are in the list, so look at the parameters only for the order
    assert [event for event in events if event != "wait"] == ["v", "k", "q"]
    assert events.count("wait") == 6


class _Fused(nn.Module):
    """One projection for q, k and v; ``cut`` says how the model takes it apart."""

    def __init__(self, case: Case, cut: str = "split") -> None:
        super().__init__()
        self.case, self.cut = case, cut
        self.sizes = [case.H * case.D, case.HK * case.D, case.HK * case.D]
        self.qkv = linear(DIM, sum(self.sizes), 5)
        self.core = Sdpa(case.layout, head_size=case.D)

    def forward(self, x: Tensor) -> Tensor:
        y, D = self.qkv(x), self.case.D
        if self.cut == "split":
            parts: Any = y.split(self.sizes, dim=-1)
        elif self.cut == "slices":
            a, b = self.sizes[0], self.sizes[0] + self.sizes[1]
            parts = (y[..., :a], y[..., a:b], y[..., b:])
        elif self.cut == "chunk":
            parts = y.chunk(3, dim=-1)
        else:
            parts = y.view(*y.shape[:2], 3, -1, D).unbind(2)
        heads = [part.reshape(*y.shape[:2], -1, D) for part in parts]
        if self.case.layout == "BNSD":
            heads = [part.transpose(1, 2) for part in heads]
        return self.core(*heads)


@pytest.mark.parametrize(
    ("case", "cut"),
    [*((EACH[0], cut) for cut in ("split", "slices", "chunk", "unbind")), (EACH[1], "split")],
    ids=str,
)
def test_a_fused_projection_is_handed_off_in_parts(case: Case, cut: str) -> None:
    """Behaviour 30: ``qkv_split`` names the parts; the model may cut them as it likes."""
    case = case.but(layout="BNSD", HK=case.H if cut in ("chunk", "unbind") else case.HK)

    def on(rank: int) -> None:
        def place(model: _Fused) -> _Fused:
            AsyncContextParallel(
                case.seq_dim, case.head_dim, case.degree, qkv_split=model.sizes
            ).apply(model.core, case.mesh(), q_proj=model.qkv, k_proj=model.qkv, v_proj=model.qkv)
            return model

        seen = compare_steps(rank, case, build=lambda: _Fused(case, cut), place=place)
        assert_overlaps(seen.boundary)
        assert seen.traffic[1:] == [AHEAD[_mode(case)]] * 2

    ranks(case.P).run(on)


TENSOR_PARALLEL = [
    pytest.param(EACH[0], ("cp", "tp"), False, id="ulysses-cp-tp-dtensor"),
    pytest.param(EACH[0], ("tp", "cp"), True, id="ulysses-tp-cp-local"),
    pytest.param(EACH[1], ("tp", "cp"), False, id="colossal-tp-cp-dtensor"),
    pytest.param(EACH[2], ("cp", "tp"), False, id="hybrid-cp-tp-dtensor"),
]


@pytest.mark.parametrize(("case", "order", "keep"), TENSOR_PARALLEL)
def test_tensor_parallel_projections_are_handed_off(
    case: Case, order: tuple[str, str], keep: bool
) -> None:
    """ColwiseParallel with ``use_local_output=False`` (DTensors reach the core) and True."""
    case = case.but(H=8, HK=4)
    TP = 2

    def on(rank: int) -> None:
        sizes = {"cp": case.P, "tp": TP}
        root = init_device_mesh("cpu", tuple(sizes[n] for n in order), mesh_dim_names=order)
        cp, tp = root.get_local_rank("cp"), root.get_local_rank("tp")
        model = Attention(case)
        plan = {f"{n}_proj": ColwiseParallel(use_local_output=keep) for n in "qkv"}
        parallelize_module(model, root["tp"], plan)
        apply(model, case, root["cp"])
        reference = Attention(case)
        for step in range(3):
            model.zero_grad()
            reference.zero_grad()
            x = torch.full((2, case.S, DIM), 0.1, dtype=torch.float64)
            x += torch.arange(case.S, dtype=x.dtype)[:, None] / 7 * (step + 1)
            x = x.cos().requires_grad_()
            reference(x).pow(2).sum().backward()
            mine = x.detach().chunk(case.P, 1)[cp].clone().requires_grad_()
            with count_collectives() as counted:
                out = model(mine)
                local = out.to_local() if isinstance(out, DTensor) else out
                local.pow(2).sum().backward()
            sent = counted.summary()
            sent.pop("all_reduce", None)  # dx over the TP ranks
            assert sent == (AHEAD if step else SYNC)[_mode(case)]
            expected = case.local(reference(x.detach()).chunk(TP, 2)[tp], cp)
            assert_close(local, expected)
            assert isinstance(out, DTensor) is not keep
            assert x.grad is not None and mine.grad is not None
            assert_close(mine.grad, x.grad.chunk(case.P, 1)[cp], kind="grad")
            for (name, p), full in zip(
                model.named_parameters(), reference.parameters(), strict=True
            ):
                assert isinstance(p.grad, DTensor) and full.grad is not None
                share = p.grad.redistribute(placements=[Replicate()]).to_local().clone()
                torch.distributed.all_reduce(share, group=root["cp"].get_group())
                assert_close(share, full.grad, kind="grad", name=name)
        boundary = boundary_of(model.core)
        assert_overlaps(boundary)
        assert isinstance(model.q_proj.weight, DTensor)
        assert model.q_proj.weight.placements == (Shard(0),)

    ranks(case.P * TP).run(on)


@pytest.mark.parametrize("core", [Sdpa, Eager])
def test_async_and_sync_are_bit_equal(core: type[nn.Module]) -> None:
    """B17: three steps of [2, 16, 4, 8] on two ranks."""
    case = Case(P=2, S=16, H=4, HK=4, D=8)

    def on(rank: int) -> None:
        results = []
        for style in (AsyncContextParallel, ContextParallel):
            model = Attention(case)
            model.core = core()
            given = {f"{n}_proj": getattr(model, f"{n}_proj") for n in "qkv"}
            style().apply(model.core, cp_mesh(2), **(given if style is not ContextParallel else {}))
            steps = []
            for step in range(3):
                model.zero_grad()
                x = torch.linspace(-1, 1 + step, 2 * 8 * DIM, dtype=torch.float64)
                x = (x * (rank + 1)).view(2, 8, DIM).requires_grad_()
                out = model(x)
                out.pow(2).sum().backward()
                steps.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
            results.append(steps)
        for ours, theirs in zip(*results, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    ranks(2).run(on)


def test_q_k_float32_and_v_bfloat16_keep_their_dtypes() -> None:
    """B18: each tensor is exchanged in its own dtype, ahead as at the boundary."""

    def on(rank: int) -> None:
        case = Case(P=2, H=4, HK=4)
        seen: list[list[torch.dtype]] = []

        class Mixed(nn.Module):
            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                seen.append([q.dtype, k.dtype, v.dtype])
                return q * k * v.float()

        model = Attention(case)
        model.core = Mixed()
        model.q_proj.float(), model.k_proj.float(), model.v_proj.bfloat16()
        apply(model, case)

        for _ in range(3):
            model.zero_grad()
            x = torch.ones(2, 4, DIM)
            heads = (2, 4, 4, case.D)
            y = [model.q_proj(x), model.k_proj(x), model.v_proj(x.bfloat16())]
            model.core(*(t.view(heads) for t in y)).sum().backward()
            assert model.v_proj.weight.grad.dtype == torch.bfloat16
        assert seen == [[torch.float32, torch.float32, torch.bfloat16]] * 3
        assert_overlaps(boundary_of(model.core))

    ranks(2).run(on)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_lengths_and_batch_sizes_may_change_between_steps(case: Case) -> None:
    """B15: 16, 8, 24 and B 1, 2: nothing of an earlier step's size is kept."""

    def on(rank: int) -> None:
        steps = [[(1, 16)], [(2, 8)], [(1, 24)], [(2, 24)], [(3, 16)], [(1, 8)]]
        seen = compare_steps(rank, case.but(layout="BNSD"), shapes=steps)
        assert_overlaps(seen.boundary)
        assert seen.traffic[1:] == [AHEAD[_mode(case)]] * 5

    ranks(case.P).run(on)


@pytest.mark.parametrize("HK", [1, 2])
def test_dims_of_size_one_are_told_apart_or_learned_anew(HK: int) -> None:
    """One KV head and a batch of one look alike in the first call; later calls are right."""
    case = Case(P=2, degree=1, H=2, HK=HK)

    def on(rank: int) -> None:
        steps = [[(1, 2)], [(1, 8)], [(2, 8)], [(2, 2)], [(1, 16)], [(3, 8)], [(2, 8)]]
        for layout in ("BSHD", "BNSD"):
            seen = compare_steps(rank, case.but(layout=layout), shapes=steps)
            assert_overlaps(seen.boundary)

    ranks(2).run(on)
