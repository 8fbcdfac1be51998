"""Colossal: q stays, k and v are gathered; masks are this rank's rows of the global ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_cp import ContextParallel, attention_window, init_device_mesh
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from ._compare import COLOSSAL, EACH, HYBRID, ULYSSES, Case, compare, reference
from ._cores import Eager, Sdpa, heads_back, heads_first

UNBALANCED = EACH[:3]


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("layout", ["BSH", "SBH"])
@pytest.mark.parametrize("case", [*COLOSSAL[:2], EACH[3]], ids=str)
def test_heads_may_be_merged_with_the_head_size(
    case: Case, layout: str, core: type[nn.Module]
) -> None:
    """Colossal does not cut heads: [B, S, H*D] and [S, B, H*D], any head count."""
    case = case.but(layout=layout, H=15, HK=5)
    ranks(case.P).run(compare, case, lambda: core(layout))


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", COLOSSAL, ids=str)
def test_heads_need_not_divide(case: Case, core: type[nn.Module]) -> None:
    """Behaviour 12: 7 heads on 2, 3 and 4 ranks."""
    ranks(case.P).run(compare, case.but(H=7, HK=7), core)


def test_q_reads_global_and_is_local_while_keys_are_whole() -> None:
    """Behaviours 12, 13: `q.shape` is global, its local part 4 rows; k and v are replicated."""

    def on(rank: int) -> None:
        case = Case(P=2, degree=1, S=8)

        class Probe(nn.Module):
            def forward(self, q: Any, k: Any, v: Any) -> Any:
                assert q.shape[1] == k.shape[1] == 8
                assert q.placements == (Shard(1),)
                assert k.placements == v.placements == (Replicate(),)
                assert (q.to_local().shape[1], k.to_local().shape[1]) == (4, 8)
                window = attention_window()
                assert window is not None
                assert (window.query_start, window.query_length) == (4 * rank, 4)
                assert (window.key_length, window.global_length) == (8, 8)
                return q

        q, k, v = (case.local(x, rank) for x in case.qkv())
        case.style().apply(Probe(), case.mesh())(q, k, v)
        assert attention_window() is None

    ranks(2).run(on)


@pytest.mark.parametrize("mask_from", ["q", "k"])
@pytest.mark.parametrize("case", [*COLOSSAL[::2], *HYBRID, *ULYSSES[:1]], ids=str)
def test_an_eager_mask_may_be_sized_from_q_or_k(case: Case, mask_from: str) -> None:
    """B05: inside, both are the whole sequence, so a tril mask has all rows and is cut."""
    ranks(case.P).run(compare, case, lambda: Eager(mask_from=mask_from))


def test_a_mask_that_shows_every_row_its_own_keys_only() -> None:
    """Behaviour 13: row i of rank r sees r*L+i+1 keys; counted by attention over ones."""

    def on(rank: int) -> None:
        case = Case(P=2, degree=1, B=1, S=8, H=1, HK=1, D=8, DV=8)
        q = torch.zeros(case.shape(1, 8), dtype=torch.float64)
        v = torch.eye(8, dtype=torch.float64).view(1, 8, 1, 8)  # weights become visible
        local = [case.local(x, rank) for x in (q, q, v)]
        weights = case.style().apply(Sdpa(), case.mesh())(*local)[0, :, 0]
        expected = [4 * rank + i + 1 for i in range(4)]
        assert (weights > 0).sum(1).tolist() == expected

    ranks(2).run(on)


@pytest.mark.parametrize(
    ("causal", "upstream_rank"), [(False, 0), (True, -1)], ids=["full-first", "causal-last"]
)
@pytest.mark.parametrize(
    "case", [*COLOSSAL[::2], *HYBRID, *ULYSSES[::2], EACH[3], Case(P=8, degree=1)], ids=str
)
def test_key_gradients_are_sums_over_ranks(case: Case, causal: bool, upstream_rank: int) -> None:
    """B13: the loss is on one rank's rows only; the other ranks' keys get their gradient whole."""
    upstream = case.upstream()
    rows = upstream.chunk(case.P, 1)
    for i, part in enumerate(rows):
        if i != upstream_rank % case.P:
            part.zero_()
    if not causal:
        _, (_, dk, _) = reference(Sdpa(causal=False), case.qkv(), upstream)
        assert dk is not None
        assert all(part.abs().max() > 1e-3 for part in dk.chunk(case.P, 1))
    ranks(case.P).run(compare, case, lambda: Sdpa(causal=causal), upstream=upstream)


def _band(S: int) -> Tensor:
    i = torch.arange(S)
    return ((i[:, None] >= i) & (i[:, None] - i < 4))[None, None]


def _padding(S: int) -> Tensor:
    keys = torch.ones(S, dtype=torch.bool)
    keys[6:8] = False
    return keys[None, None, None].repeat(2, 1, 1, 1)  # [B, 1, 1, S]


MASKS: dict[str, Callable[[int], Tensor]] = {
    "bool-2d": lambda S: torch.tril(torch.ones(S, S, dtype=torch.bool)),
    "window-band": _band,
    "key-padding": _padding,
    "float-bias": lambda S: randn(1, 1, S, S, seed=5),
    "per-head-bias": lambda S: randn(1, 12, S, S, seed=6),
    "per-sequence-bias": lambda S: randn(2, 1, S, S, seed=7),
    "key-bias": lambda S: randn(2, 12, 1, S, seed=8),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", [*EACH, Case(P=3, degree=1, load_balance=True)], ids=str)
def test_masks_are_cut_to_the_rank_and_get_their_gradient(
    case: Case, core: type[nn.Module], mask: str
) -> None:
    """B07: written for the whole sequence, passed by keyword, never dropped; with gradients."""

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Any:
        return module(q, k, v, attn_mask=m)

    extra = [MASKS[mask](case.S)]
    ranks(case.P).run(compare, case, core, extra=extra, call=call)


@pytest.mark.parametrize("case", UNBALANCED[1:], ids=str)
def test_a_mask_may_be_built_from_the_attention_window(case: Case) -> None:
    """B05: the documented offset; each rank builds its own rows only."""

    class OwnRows(Sdpa):
        def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
            window = attention_window()
            start, stop = (
                (0, q.shape[1]) if window is None else (window.query_start, window.query_end)
            )
            keys = k.shape[1] if window is None else window.key_length
            rows = torch.arange(start, stop)
            return super().forward(q, k, v, rows[:, None] >= torch.arange(keys))

    ranks(case.P).run(compare, case, OwnRows)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_scale_reaches_the_kernel(case: Case) -> None:
    """``scale=`` of SDPA, away from its default."""
    ranks(case.P).run(compare, case, lambda: Sdpa(scale=0.3))


class Rotary(nn.Module):
    """A plain table, a plain index and a plain boolean mask meet q and k (B14)."""

    def forward(self, q: Any, k: Any, v: Any, table: Any = None) -> Any:
        S = k.shape[1]
        angles = table if table is not None else torch.arange(S, dtype=torch.float64)[:, None, None]
        q = q * torch.cos(angles)
        k = k * torch.cos(angles)
        k = k.index_select(3, torch.arange(k.shape[3]).flip(0))
        scores = torch.einsum("bshd,bthd->bhst", q, k) * 0.4
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        scores = torch.where(hidden, torch.tensor(-1e30, dtype=torch.float64), scores)
        return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


@pytest.mark.parametrize("case", UNBALANCED, ids=str)
def test_plain_tables_indices_and_masks_meet_dtensors(case: Case) -> None:
    """B14: tables get the sum of their gradients over ranks; torch.where and index_select work."""
    case = case.but(H=4, HK=4)
    table = randn(case.S, 1, 6, seed=4)
    ranks(case.P).run(compare, case, Rotary, extra=[table])


@pytest.mark.parametrize("case", UNBALANCED, ids=str)
def test_a_parameter_inside_the_core_gets_this_ranks_share(case: Case) -> None:
    """A learnt sink and a gain per head: shares sum to the whole gradient, nothing more is sent."""

    class Sink(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sink = nn.Parameter(randn(12, seed=1))
            self.gain = nn.Parameter(randn(12, 1, seed=2))

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            q = q * self.gain
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = (q @ k.mT).exp() * 0.1
            total = scores.sum(-1, keepdim=True) + self.sink[:, None, None].exp()
            return ((scores / total) @ v).transpose(1, 2)

    def on(rank: int) -> None:
        whole = Sink()
        reference(whole, case.qkv(), case.upstream())
        applied = Sink()
        case.style().apply(applied, case.mesh())
        sent = compare(rank, case, Sink, applied=applied)
        assert sent.counted.count("all_reduce") == 0
        for share, full in zip(applied.parameters(), whole.parameters(), strict=True):
            assert share.grad is not None and full.grad is not None
            total = share.grad.clone()
            torch.distributed.all_reduce(total)
            assert_close(total, full.grad, kind="grad")

    ranks(case.P).run(on)


class Unwraps(nn.Module):
    """Calls ``to_local()`` or ``full_tensor()`` on k and v, as users do, and computes locally."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        if isinstance(q, DTensor):
            q = q.to_local()
            k, v = ((x.to_local() if self.how == "to_local" else x.full_tensor()) for x in (k, v))
        q, k, v = (heads_first(x, "BSHD", 6) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return heads_back(out, "BSHD")


@pytest.mark.parametrize(
    ("case", "how"),
    [(c, "to_local") for c in UNBALANCED] + [(c, "full_tensor") for c in COLOSSAL[:1]],
    ids=str,
)
def test_a_core_that_takes_its_tensors_apart_loses_no_gradient(case: Case, how: str) -> None:
    """The trap of design 3.1: torch's defaults would drop the sum over ranks without a word."""
    ranks(case.P).run(compare, case, lambda: Unwraps(how))


@pytest.mark.parametrize("case", EACH, ids=str)
def test_local_input_hands_over_plain_tensors_and_the_window(case: Case) -> None:
    """``use_local_input=True``: no DTensor inside; SDPA's causal flag is still the global one."""

    class Plain(Sdpa):
        def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
            window = attention_window()
            assert not any(isinstance(x, DTensor) for x in (q, k, v))
            if window is not None:
                assert (q.shape[1], k.shape[1]) == (window.query_length, window.key_length)
            return super().forward(q, k, v)

    ranks(case.P).run(compare, case, Plain, use_local_input=True)


@pytest.mark.parametrize("case", EACH[1:], ids=str)
def test_an_eager_core_on_local_tensors_uses_the_window(case: Case) -> None:
    """Plain matmuls with a mask from `attention_window`, in all modes, balanced as well."""

    class Plain(nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            window = attention_window()
            start = 0 if window is None else window.query_start
            rows = torch.arange(start, start + q.shape[1])
            mask = rows[:, None] >= torch.arange(k.shape[1])
            return Eager()(q, k, v, attn_mask=mask)

    ranks(case.P).run(compare, case, Plain, use_local_input=True)


def test_local_causal_attention_of_rows_with_no_known_place_is_refused() -> None:
    """SDPA with ``is_causal`` on a slice of the local rows: which keys they may see is unknown."""

    class Slice(nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q[:, :, :3], k, v, is_causal=True)

    def on(rank: int) -> None:
        case = Case(P=2, degree=1, H=4, HK=4)
        local = [case.local(x, rank) for x in case.qkv()]
        with pytest.raises(ValueError, match=r"must be the rows \(12\) and keys \(24\)"):
            case.style(use_local_input=True).apply(Slice(), case.mesh())(*local)

    ranks(2).run(on)


def test_forward_without_gradients_sends_no_more_than_the_gather() -> None:
    """``no_grad`` evaluation: two all-gathers, nothing else."""

    def on(rank: int) -> None:
        case = Case(P=2, degree=1)
        module = ContextParallel(ulysses_degree=1).apply(
            Sdpa(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        )
        with torch.no_grad(), count_collectives() as counted:
            module(*(case.local(x, rank) for x in case.qkv()))
        assert counted.summary() == {"all_gather": 2}

    ranks(2).run(on)
