"""balance_hybrid: heads are traded in a Ulysses group, tails of its rows with the mirror group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_cp import AsyncContextParallel, ContextParallel, attention_window, init_device_mesh
from hp_mesh.testing import randn, ranks

from ._compare import Case, compare, compare_under_tensor_parallel
from ._cores import Eager, Sdpa

FOUR = Case(P=4, degree=2, balance_hybrid=True)
CASES = [
    FOUR,
    FOUR.but(S=12, layout="BNSD"),  # 3 rows a rank: 6 of a group are halved all the same
    FOUR.but(HK=3),  # one KV head per query head
    FOUR.but(HK=1, DV=4),
    Case(P=6, degree=2, balance_hybrid=True, layout="SBHD"),  # the middle group is its own mirror
    Case(P=6, degree=3, balance_hybrid=True, HK=6),
]


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c}-S{c.S}")
def test_numbers_are_those_of_one_device_and_traffic_is_the_plan_s(
    case: Case, core: type[Any]
) -> None:
    """Output, every gradient, and the bytes of each kind, by a fused and an eager core."""
    ranks(case.P).run(compare, case, lambda: core(case.layout))


@pytest.mark.parametrize("kind", ["bool", "float", "none"])
def test_masks_and_no_mask_at_all(kind: str) -> None:
    """A mask has a row for each row of the sequence; one per head; or there is none."""
    mask = randn(12, 24, 24, seed=5)
    extra = {"bool": [mask > 0], "float": [mask], "none": []}[kind]

    def core() -> nn.Module:
        return Sdpa(causal=False)

    ranks(4).run(compare, FOUR, core, extra=extra)
    if kind != "none":
        ranks(4).run(compare, FOUR, lambda: Eager(causal=False), extra=extra)


@pytest.mark.parametrize("P", [4, 6])
def test_each_rank_has_as_many_causal_pairs(P: int) -> None:
    """Max/mean of what the ranks compute is 1.0; without balance it is far from it."""

    def run(rank: int, balance: bool) -> int:
        pairs = 0

        class Counts(Sdpa):
            def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
                nonlocal pairs
                window = attention_window()
                assert window is not None
                pairs += sum(range(window.query_start + 1, window.query_end + 1))
                return super().forward(q, k, v)

        case = Case(P=P, degree=2, balance_hybrid=balance)
        case.style().apply(Counts(), case.mesh())(*(case.local(x, rank) for x in case.qkv()))
        return pairs

    balanced, plain = (ranks(P).run(run, balance) for balance in (True, False))
    assert max(balanced) * P == sum(balanced) == sum(plain)
    assert max(plain) * P > 1.3 * sum(plain)


class Biased(nn.Module):
    """A bias per head and a table with all rows: rows and heads are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(randn(12, seed=4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = k.shape[1]
        table = torch.linspace(0.5, 1.5, S, dtype=q.dtype)[None, :, None, None]
        q = q * table + self.bias[:, None]
        q, k, v = (x.transpose(1, 2) for x in (q, k * table, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.bias[:, None, None]
        hidden = ~torch.tril(torch.ones(S, S, dtype=torch.bool))
        scores = scores.masked_fill(hidden, float("-inf"))
        out = scores.softmax(-1) @ v
        return (out / (1 + self.bias.square()[:, None, None])).transpose(1, 2)


def test_plain_tensors_are_cut_by_rows_and_by_heads() -> None:
    """A table by the window of the half, a bias by this rank's heads; its shares add up."""
    ranks(4).run(compare, FOUR, Biased)


@pytest.mark.parametrize(
    "options",
    [{"keep_kv": False}, {"use_local_input": True}, {"keep_kv": False, "use_local_input": True}],
    ids=str,
)
def test_with_the_other_options(options: dict[str, Any]) -> None:
    """K and V gathered again, plain local tensors inside."""
    ranks(4).run(compare, FOUR, Sdpa, **options)


def test_strides_checkpointing_and_a_2_d_mesh() -> None:
    """Shards that lie apart; recomputed under both kinds of checkpoint; ("co", "ds") given."""

    def strided(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("co", "ds"))
        compare(rank, FOUR, Sdpa, feed=strided, grad=strided, mesh=mesh)
        for reentrant in (True, False):

            def call(module: nn.Module, *qkv: Tensor, reentrant: bool = reentrant) -> Any:
                return checkpoint(module, *qkv, use_reentrant=reentrant)

            compare(rank, FOUR, Sdpa, call=call, check_traffic=False)

    ranks(4).run(run)


def test_the_async_style_says_that_it_exchanges_synchronously() -> None:
    """As with load_balance: right, with one warning that names the option."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.p = Sdpa(), nn.ModuleList(nn.Identity() for _ in range(3))

        def forward(self, *qkv: Tensor) -> Any:
            return self.core(*(p(x) for p, x in zip(self.p, qkv, strict=True)))

    def run(rank: int) -> None:
        model = Model()
        style = AsyncContextParallel(ulysses_degree=2, balance_hybrid=True)
        names = dict(zip(("q_proj", "k_proj", "v_proj"), model.p, strict=True))
        style.apply(model.core, FOUR.mesh(), **names)  # type: ignore[arg-type]
        compare(rank, FOUR, Model, applied=model)

    with pytest.warns(RuntimeWarning, match="balance_hybrid=True swaps q at the boundary"):
        ranks(4).run(run)


def test_tensor_parallel_heads_come_in_and_go_out() -> None:
    """DTensors cut over heads on another axis: TP's heads, then the Ulysses group's of them."""
    case = FOUR.but(H=8, HK=4)
    ranks(8).run(compare_under_tensor_parallel, case, Eager, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ulysses_degree": None}, r"requires a degree between 1 and cp_size, not.*\(None\)"),
        ({"ulysses_degree": 1}, r"use load_balance=True with ulysses_degree=1"),
        ({"ulysses_degree": 2, "load_balance": True}, r"load_balance \(True\) requires"),
        ({"ulysses_degree": 1, "load_balance": True}, "must not come with load_balance"),
        ({"ulysses_degree": 2, "balance_hybrid": 1}, r"balance_hybrid \(1\) must be True or False"),
    ],
)
def test_what_it_is_not_for_is_refused_by_the_constructor(
    options: dict[str, Any], message: str
) -> None:
    """The guide's load_balance keeps its limit: degree 1, and no other."""
    with pytest.raises(ValueError, match=message):
        ContextParallel(**{"balance_hybrid": True, **options})


def test_what_only_the_mesh_or_the_module_shows_is_refused_there() -> None:
    """A degree of all ranks, an odd group with odd rows, kv_chunks, head groups, hooks inside."""
    with pytest.raises(ValueError, match=r"must be 1 with.*as balance_hybrid=True does"):
        AsyncContextParallel(ulysses_degree=2, balance_hybrid=True, head_groups=2)

    def run(rank: int) -> list[str]:
        texts = []

        def refused(message: str, case: Case, core: nn.Module, **options: Any) -> None:
            def use() -> None:
                module = case.style(**options).apply(core, case.mesh())
                module(*(case.local(x, rank) for x in case.qkv()))

            with pytest.raises(ValueError, match=message) as caught:
                use()
            texts.append(str(caught.value))

        case = Case(P=6, degree=3, balance_hybrid=True)
        refused(r"requires ulysses_degree \(6\) below", case, Sdpa(), ulysses_degree=6)
        refused(r"must be 1 with balance_hybrid=True", case, Sdpa(), kv_chunks=2)
        refused("even under balance_hybrid=True.*to 24 with", case.but(S=18), Sdpa())
        refused("take its length from k", case, Eager(mask_from="q"))
        hooked = Sdpa()
        module = case.style().apply(hooked, case.mesh())
        module.register_forward_pre_hook(lambda module, args: None)
        with pytest.raises(
            ValueError, match="with balance_hybrid Sdpa is called several"
        ) as caught:
            module(*(case.local(x, rank) for x in case.qkv()))
        return [*texts, str(caught.value)]

    texts = ranks(6).run(run)
    assert texts == texts[:1] * 6
