"""Ulysses: all-to-all of q, k and v, whole sequences of some heads inside, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import ContextParallel, init_device_mesh
from hp_mesh.testing import assert_close, count_collectives, ranks

from ._compare import EACH, MODES, ULYSSES, Case, compare
from ._cores import Eager, Sdpa

LAYOUTS = ("BSHD", "BNSD", "SBHD", "TND")


@pytest.mark.parametrize(
    ("core", "layout"),
    [*((Sdpa, layout) for layout in LAYOUTS), *((Eager, layout) for layout in LAYOUTS[:2])],
)
@pytest.mark.parametrize("case", MODES, ids=str)
def test_causal_attention_equals_the_unsharded_module(
    case: Case, layout: str, core: type[nn.Module]
) -> None:
    """In every mode, on every number of ranks, in every layout; what is sent is what was said."""
    case = case.but(layout=layout)
    ranks(case.P).run(compare, case, lambda: core(layout))


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_attention_without_a_mask_equals_the_unsharded_module(
    case: Case, core: type[nn.Module]
) -> None:
    """Each row sees keys of all ranks."""
    ranks(case.P).run(compare, case, lambda: core(causal=False))


@pytest.mark.parametrize("heads", [(12, 12), (12, 6), (12, 2), (12, 1), (8, 2), (20, 8)], ids=str)
@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize(
    "case", [Case(P=4), Case(P=4, degree=2), Case(P=3, degree=1, S=18)], ids=str
)
def test_any_number_of_kv_heads_is_shared_as_on_one_device(
    case: Case, core: type[nn.Module], heads: tuple[int, int]
) -> None:
    """Query head h meets KV head h*Hkv//H (B03); dk, dv are sums over copies with Hkv heads."""
    H, HK = heads
    if H % HK:  # one device can't group these either: give it one head per query head
        core = RepeatedByFormula
    case = case.but(H=H, HK=HK)
    ranks(case.P).run(compare, case, lambda: core("BSHD"))


class RepeatedByFormula(Sdpa):
    """Grouped attention by ``h * Hkv // H``, for head counts where neither divides the other."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Tensor:
        H, HK = query.shape[2], key.shape[2]
        if H != HK:
            index = torch.arange(H) * HK // H
            key, value = key.index_select(2, index), value.index_select(2, index)
        return super().forward(query, key, value)


@pytest.mark.parametrize("B", [1, 2, 3])
@pytest.mark.parametrize("layout", ["BSHD", "BNSD"])
@pytest.mark.parametrize("P", [2, 4])
def test_every_element_lands_where_its_index_says(P: int, layout: str, B: int) -> None:
    """B01: q holds b*1000 + s*10 + h; the rank's heads of all tokens arrive, in order."""

    def on(rank: int) -> None:
        case = Case(P=P, layout=layout, B=B, S=16, H=4, D=8)
        b, s, h = torch.meshgrid(torch.arange(B), torch.arange(16), torch.arange(4), indexing="ij")
        whole = (b * 1000 + s * 10 + h)[..., None].expand(-1, -1, -1, 8).double()  # [B, S, H, D]
        mine = whole.chunk(P, 2)[rank]
        if layout == "BNSD":
            whole, mine = whole.transpose(1, 2), mine.transpose(1, 2)
        seen: list[Tensor] = []

        class Probe(nn.Module):
            def forward(self, q: Any, k: Any, v: Any) -> Any:
                assert q.shape == whole.shape
                seen.extend(x.to_local() for x in (q, k, v))
                return q * 1

        module = case.style().apply(Probe(), case.mesh())
        local = case.local(whole, rank)
        assert torch.equal(module(local, local, local), local)
        assert all(torch.equal(x, mine) for x in seen)

    ranks(P).run(on)


def _strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "last-dim-stride-2": _strided,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded-heads": lambda x: x[:, :, :1].expand(-1, -1, 4, -1),
}


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("case", EACH, ids=str)
def test_strided_inputs_and_gradients_are_sent_right(case: Case, stride: str) -> None:
    """B02: any strides in, and strided gradients from behind; expanded ones have stride 0."""

    def on(rank: int) -> None:
        if stride != "expanded-heads":
            compare(rank, case, Sdpa, feed=STRIDES[stride], grad=_strided)
            return
        # stride 0 on the heads of k, v: the unsharded module is fed alike
        expanded = case.but(H=4, HK=4)

        def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return module(q, STRIDES[stride](k), STRIDES[stride](v))

        compare(
            rank,
            expanded,
            Sdpa,
            call=call,
            grad=lambda g: g[:1, :, :, :1].expand_as(g),
            upstream=expanded.upstream()[:1, :, :, :1].expand(2, -1, -1, 6).contiguous(),
        )

    ranks(case.P).run(on)


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_v_may_have_its_own_head_size(case: Case, core: type[nn.Module]) -> None:
    """As in multi-head latent attention: v and the output are wider than q and k."""
    case = case.but(DV=10)
    ranks(case.P).run(compare, case, core)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float64, torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float16),
    ],
    ids=lambda dtypes: "-".join(str(d).removeprefix("torch.") for d in dtypes),
)
@pytest.mark.parametrize("case", EACH, ids=str)
def test_each_tensor_travels_in_its_own_dtype(case: Case, dtypes: tuple[torch.dtype, ...]) -> None:
    """B18: no silent cast; the module sees the inputs' dtypes, gradients come back in them."""
    seen = {}

    class Casts(Sdpa):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
            seen[torch.distributed.is_initialized()] = (q.dtype, k.dtype, v.dtype)
            return super().forward(q.double(), k.double(), v.double()).to(v.dtype)

    def on(rank: int) -> None:
        whole = [x.to(d) for x, d in zip(case.qkv(), dtypes, strict=True)]
        up = case.upstream().to(dtypes[2])
        full = [x.clone().requires_grad_() for x in whole]
        expected = Casts()(*full)
        expected.backward(up)
        module = case.style().apply(Casts(), case.mesh())
        local = [case.local(x, rank).clone().requires_grad_() for x in whole]
        out = module(*local)
        out.backward(case.local(up, rank))
        assert seen[True] == dtypes
        assert_close(out, case.local(expected, rank))
        for x, y in zip(local, full, strict=True):
            assert x.grad is not None and y.grad is not None
            assert x.grad.dtype == x.dtype
            assert_close(x.grad, case.local(y.grad, rank), kind="grad")

    ranks(case.P).run(on)


@pytest.mark.parametrize("needs", ["q", "kv", ""])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_inputs_without_gradient_get_none_and_cost_none(case: Case, needs: str) -> None:
    """A frozen k or v has no gradient; with none at all the output has no graph."""

    def on(rank: int) -> None:
        whole = [x.requires_grad_(n in needs) for x, n in zip(case.qkv(), "qkv", strict=True)]
        expected = Sdpa()(*whole)
        local = [
            case.local(x.detach(), rank).clone().requires_grad_(x.requires_grad) for x in whole
        ]
        out = case.style().apply(Sdpa(), case.mesh())(*local)
        assert_close(out, case.local(expected, rank))
        assert out.requires_grad == bool(needs)
        if not needs:
            return
        expected.backward(case.upstream())
        with count_collectives() as counted:
            out.backward(case.local(case.upstream(), rank))
        for x, y in zip(local, whole, strict=True):
            full = y.grad
            assert_close(x.grad, None if full is None else case.local(full, rank), kind="grad")
        gathered = "k" in needs or "v" in needs
        assert bool(counted.count("reduce_scatter")) == (gathered and case.degree is not None)

    ranks(case.P).run(on)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_dims_may_be_counted_from_the_end(case: Case) -> None:
    """BSHD said as -3, -2, and as 1, -2."""

    def on(rank: int) -> None:
        for seq_dim in (-3, 1):
            compare(rank, case, Sdpa, seq_dim=seq_dim, head_dim=-2)

    ranks(case.P).run(on)


@pytest.mark.parametrize("degree", [None, 1])
@pytest.mark.parametrize("core", [Sdpa, Eager])
def test_one_rank_is_bit_equal_to_the_bare_module(
    degree: int | None, core: type[nn.Module]
) -> None:
    """Behaviour 6: a CP mesh of size 1 changes nothing and sends nothing."""

    def on(rank: int) -> None:
        case = Case(P=1, degree=degree)
        q, k, v = case.qkv()
        with count_collectives() as counted:
            out = case.style().apply(core(), case.mesh())(q, k, v)
        assert torch.equal(out, core()(q, k, v))
        assert not counted.records

    ranks(1).run(on)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_lengths_may_change_from_call_to_call(case: Case) -> None:
    """B15: 16, 8, 24 tokens through one applied module; no size is kept."""

    def on(rank: int) -> None:
        module = case.style().apply(Sdpa(), case.mesh())
        for S in (16, 8, 24):
            compare(rank, case.but(S=S), Sdpa, applied=module)

    ranks(case.P).run(on)


def test_ulysses_is_the_default_and_hooks_are_two() -> None:
    """Behaviour 1: `ContextParallel()` on 4 ranks; the same module comes back."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        core = Sdpa()
        assert ContextParallel().apply(core, mesh) is core
        assert (len(core._forward_pre_hooks), len(core._forward_hooks)) == (1, 1)

    ranks(4).run(on)


@pytest.mark.parametrize("case", ULYSSES[:1], ids=str)
def test_is_causal_needs_no_offset_under_ulysses(case: Case) -> None:
    """Behaviour 9: the module sees all rows, so torch's own flag is right as it is."""

    class Local(Sdpa):
        def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
            assert q.to_local().shape[1] == case.S
            return super().forward(q, k, v)

    def on(rank: int) -> None:
        q, k, v = case.qkv()
        expected = Sdpa()(q, k, v)
        local = [case.local(x, rank) for x in (q, k, v)]
        out = case.style().apply(Local(), case.mesh())(*local)
        assert_close(out, case.local(expected, rank))

    ranks(case.P).run(on)


def _in_place(w: Tensor, S: int) -> Tensor:
    w.mul_(0.4)
    w += torch.full((S, S), -1e9, dtype=w.dtype).triu(1)
    w.masked_fill_(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    return w


class InPlace(nn.Module):
    """Scales, biases and masks the scores in place."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return (_in_place(q @ k.mT, k.shape[2]).softmax(-1) @ v).transpose(1, 2)


class Grouped(nn.Module):
    """Gives q a dim of groups instead of repeating k and v."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        B, S, H, D = q.shape
        groups = H // k.shape[2]
        q = q.view(B, S, H // groups, groups, D).permute(0, 2, 3, 1, 4)
        scores = q @ k.permute(0, 2, 3, 1)[:, :, None] * 0.4
        hidden = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).triu(1)
        out = scores.masked_fill(hidden, -1e30).softmax(-1) @ v.transpose(1, 2)[:, :, None]
        return out.permute(0, 3, 1, 2, 4).reshape(B, S, H, D)


class OnePartUsed(nn.Module):
    """Splits q and k and forgets a part of each."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        q, _ = q.split([4, 2], dim=-1)
        k = torch.chunk(k, 3, -1)[1]
        return Eager()(q, torch.cat([k, k], -1), v)


class SequenceBySequence(nn.Module):
    """Attends in a loop over the batch, with k and v in one tensor."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        k, v = torch.stack([k, v])
        return torch.cat([Sdpa()(q[i, None], k[i, None], v[i, None]) for i in range(len(q))])


@pytest.mark.parametrize("core", [InPlace, Grouped, OnePartUsed, SequenceBySequence])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_attention_may_be_written_in_other_ways(case: Case, core: type[nn.Module]) -> None:
    """No form of the same arithmetic costs another collective or loses a gradient."""
    ranks(case.P).run(compare, case, core)
