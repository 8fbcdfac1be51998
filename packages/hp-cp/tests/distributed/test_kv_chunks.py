"""kv_chunks: K and V gathered part by part while attention runs; numbers, traffic and memory."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_cp import (
    AsyncContextParallel,
    ContextParallel,
    sliding_window_attention,
)
from hp_cp.attention import parts, streamed
from hp_mesh.testing import assert_close, count_collectives, everywhere, peak_memory, randn, ranks

from ._compare import Case, compare, compare_under_tensor_parallel, reference
from ._cores import Eager, Sdpa

TWO = Case(P=2, degree=1, S=20)  # 10 rows a rank
HYBRID = Case(P=4, degree=2)
CASES = [
    (TWO, 2),
    (TWO, 4),  # parts of 3, 3, 2, 2
    (TWO, 10),  # a row each; backward has no more
    (Case(P=3, degree=1, HK=2, layout="BNSD"), 3),
    (Case(P=4, degree=1, H=7, HK=7, layout="SBHD"), 2),
    (Case(P=3, degree=1, DV=4), 3),  # no fused kernel: V's heads have another size
    (HYBRID, 4),
    (Case(P=4, degree=2, HK=3), 5),  # one KV head per query head
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("case", "n"), CASES, ids=str)
def test_numbers_are_those_of_one_device_and_traffic_is_the_plan_s(
    case: Case, n: int, causal: bool
) -> None:
    """Output and gradients; n gathers forward, up to 2n and as many reduce-scatters backward."""
    ranks(case.P).run(compare, case, lambda: Sdpa(case.layout, causal=causal), kv_chunks=n)


def test_the_parts_are_counted_as_promised() -> None:
    """Three parts of k and of v forward; six again backward, and six sums."""

    def run(rank: int) -> dict[str, int]:
        sent = compare(rank, Case(P=2, degree=1), Sdpa, kv_chunks=3)
        return {kind: calls for kind, (calls, _) in sent.by_kind.items()}

    assert ranks(2).run(run) == [{"all_gather": 2 * (3 + 6), "reduce_scatter": 2 * 6}] * 2


@pytest.mark.parametrize(
    "shape",
    [(20, 20), (1, 1, 1, 20), (2, 1, 20, 20), (12, 20, 20), (10, 20)],
    ids=lambda shape: "x".join(map(str, shape)),
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_are_cut_to_the_rows_and_parts(kind: str, shape: tuple[int, ...]) -> None:
    """Rows that see no key of a part, and none at all (0, as in torch), are right, too."""
    drawn = randn(*shape, seed=5)
    mask = drawn > 0.2 if kind == "bool" else drawn.masked_fill(drawn < -0.3, float("-inf"))
    if shape[-2] == 20:
        mask[..., 3, :] = False if kind == "bool" else float("-inf")
        mask[..., 11, 4:] = False if kind == "bool" else float("-inf")

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = mask if shape[-2] != 10 else torch.cat([mask, mask])[-q.shape[1] :]
        out: Tensor = module(q, k, v, rows)
        return out

    ranks(2).run(compare, TWO, Sdpa, call=call, kv_chunks=3)


@pytest.mark.parametrize(("case", "n"), [(TWO, 3), (HYBRID, 2)], ids=str)
def test_any_strides(case: Case, n: int) -> None:
    """Shards and the output's gradient with the last two dims swapped in memory."""

    def strided(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    ranks(case.P).run(compare, case, Sdpa, feed=strided, grad=strided, kv_chunks=n)


class Llama(nn.Module):
    """Normalises and rotates k inside, with whole tables, and repeats its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(6, seed=7))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, S, H, D = q.shape
        k = F.rms_norm(k, (D,), self.weight)
        angle = torch.arange(S)[:, None, None] * torch.linspace(1, 0.1, D // 2, dtype=q.dtype)
        cos, sin = (torch.cat([x, x], -1) for x in (angle.cos(), angle.sin()))

        def rotate(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        q, k = rotate(q), rotate(k)
        groups = H // k.shape[2]
        k, v = (
            x[:, :, :, None].expand(B, S, x.shape[2], groups, D).reshape(B, S, H, D) for x in (k, v)
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


@pytest.mark.parametrize("case", [Case(P=2, degree=1), HYBRID], ids=str)
def test_what_stands_before_attention_works_on_the_shard(case: Case) -> None:
    """Norm, rotary tables, repeated heads: as written for one device; a weight's shares add up."""
    # what is gathered are the repeated heads, which the plan does not know
    ranks(case.P).run(compare, case, Llama, kv_chunks=3, check_traffic=False)


@pytest.mark.parametrize("wants", ["q", "k", "v"])
def test_only_one_of_the_three_needs_a_gradient(wants: str) -> None:
    """The sums of k and v are left out where nobody wants them."""

    def run(rank: int) -> int:
        whole = TWO.qkv()
        _, grads = reference(Sdpa(), whole, TWO.upstream())
        module = TWO.style(kv_chunks=4).apply(Sdpa(), TWO.mesh())
        local = [
            TWO.local(x, rank).clone().requires_grad_(name == wants)
            for name, x in zip("qkv", whole, strict=True)
        ]
        with count_collectives() as counted:
            module(*local).backward(TWO.local(TWO.upstream(), rank))
        for name, x, full in zip("qkv", local, grads, strict=True):
            assert full is not None
            if name == wants:
                assert_close(x.grad, TWO.local(full, rank), kind="grad")
            else:
                assert x.grad is None
        return counted.count("reduce_scatter")

    assert ranks(2).run(run) == [0 if wants == "q" else 16] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gathers_once_more(reentrant: bool) -> None:
    """Around the module: forward, recomputed forward, backward."""

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(module, q, k, v, use_reentrant=reentrant)

    def run(rank: int) -> int:
        sent = compare(rank, TWO, Sdpa, call=call, kv_chunks=2, check_traffic=False)
        return sent.counted.count("all_gather")

    plain = reentrant  # reentrant checkpointing calls the reference's module alike
    assert ranks(2).run(run) == [2 * (2 + 2 + 4)] * 2, plain


def test_without_a_graph_nothing_is_kept_and_the_next_step_is_right() -> None:
    """Evaluation between steps; keep_kv changes nothing; lengths may change from call to call."""

    def run(rank: int) -> None:
        module = TWO.style(kv_chunks=4, keep_kv=False).apply(Sdpa(), TWO.mesh())
        for S in (20, 8, 24):
            case = TWO.but(S=S)
            with torch.no_grad():
                out = module(*(case.local(x, rank) for x in case.qkv()))
            assert_close(out, case.local(Sdpa()(*case.qkv()), rank))
            compare(rank, case, Sdpa, applied=module, kv_chunks=4)

    ranks(2).run(run)


def test_sums_over_parts_run_in_single_precision() -> None:
    """The error of five parts in bfloat16 is that of one: nothing is rounded in between."""

    def run(rank: int) -> None:
        case = TWO.but(dtype=torch.bfloat16)
        exact = Sdpa()(*(x.double() for x in case.qkv()))
        errors = []
        for n in (1, 5):
            module = case.style(kv_chunks=n).apply(Sdpa(), case.mesh())
            out = module(*(case.local(x, rank) for x in case.qkv()))
            assert out.dtype == torch.bfloat16
            errors.append((out.double() - case.local(exact, rank)).abs().max().item())
        assert errors[1] <= 1.5 * errors[0]

    ranks(2).run(run)


def test_tensor_parallel_heads_come_in_and_go_out() -> None:
    """DTensors cut over heads on another axis: the parts are gathered over CP alone."""
    case = Case(P=2, degree=1, H=8, HK=4)
    ranks(4).run(compare_under_tensor_parallel, case, Sdpa, 2, kv_chunks=3)


def test_the_next_part_is_on_its_way_before_a_part_is_attended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward: start 0, start 1, attend 0, start 2, attend 1, ..."""
    order: list[str] = []
    gather, attend = parts.gather_seq, streamed._Stream.blocks

    def starts(*args: Any, **kwargs: Any) -> Any:
        order.append("start")
        return gather(*args, **kwargs)

    def attends(*args: Any) -> Any:
        order.append("attend")
        return attend(*args)

    monkeypatch.setattr(parts, "gather_seq", starts)
    monkeypatch.setattr(streamed._Stream, "blocks", attends)

    def run(rank: int) -> None:
        # one rank at a time writes down its order: the other sends to itself
        group = dist.new_subgroups(group_size=1)[0]
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in TWO.qkv())
        window = streamed.AttentionWindow(0, 20, 20, 20)
        out = streamed.streamed_attention(
            q, k, v, window, group, 3, is_causal=True, enable_gqa=True
        )
        forward, order[:] = list(order), []
        out.sum().backward()
        assert forward == ["start", *["start", "attend"] * 2, "attend"]
        assert order == ["start", *["start", "attend"] * 5, "attend"]

    ranks(1).run(run)


Bad = Callable[[Tensor, Tensor, Tensor], Any]


def _reads(*names: str) -> dict[str, Bad]:
    every: dict[str, Bad] = {
        "matmul": lambda q, k, v: q @ k.transpose(-1, -2),
        "einsum": lambda q, k, v: torch.einsum("bhqd,bhkd->bhqk", q, k),
        "mean": lambda q, k, v: k.mean(2),
        "__getitem__": lambda q, k, v: v[:, :, :3],
        "cat": lambda q, k, v: torch.cat([k, k[:, :, :1]], 2),
        "to_local": lambda q, k, v: k.to_local(),  # type: ignore[attr-defined]
        "full_tensor": lambda q, k, v: (k * 2).full_tensor(),
        "sliding_window_attention": lambda q, k, v: sliding_window_attention(q, k, v, 4),
        "item": lambda q, k, v: (v[:, :, :, 0] > 0).all().item(),
    }
    return every


@pytest.mark.parametrize("name", _reads())
def test_an_op_that_needs_all_keys_is_refused_by_name(name: str) -> None:
    """It would gather the whole; the message says which op may read k and v, on every rank."""

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return _reads()[name](q, k, v)

    def run(rank: int) -> str:
        case = Case(P=2, degree=1, layout="BNSD", HK=12)
        module = case.style(kv_chunks=3).apply(Core(), case.mesh())
        with pytest.raises(ValueError, match="kv_chunks=3 keeps") as caught:
            module(*(case.local(x, rank) for x in case.qkv()))
        compare(rank, case, lambda: Sdpa("BNSD"), kv_chunks=3)
        return str(caught.value)

    texts = ranks(2).run(run)
    assert len(set(texts)) == 1 and "F.scaled_dot_product_attention" in texts[0]


def test_an_eager_core_is_refused_and_an_output_of_k_as_well() -> None:
    """q @ k.T is no attention op; k itself is not whole anywhere."""

    class Both(Sdpa):
        def forward(self, query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
            return super().forward(query, key, value), key

    def run(rank: int) -> None:
        local = [TWO.local(x, rank) for x in TWO.qkv()]
        with pytest.raises(ValueError, match="inside the boundary needs the whole of k or v"):
            TWO.style(kv_chunks=2).apply(Eager(), TWO.mesh())(*local)
        with pytest.raises(ValueError, match="an output inside the boundary needs the whole"):
            TWO.style(kv_chunks=2).apply(Both(), TWO.mesh())(*local)

    ranks(2).run(run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p \(0.1\) must be 0 under kv_chunks=2"),
        ({"attn_mask": torch.zeros(20, 20).requires_grad_()}, "attn_mask must not require grad"),
        ({"attn_mask": torch.zeros(20, 7)}, "must have 20 keys in its last dim"),
    ],
    ids=["dropout", "mask-gradient", "mask-shape"],
)
def test_what_attention_cannot_do_in_parts_is_refused(options: Any, message: str) -> None:
    """Before any part is gathered, on every rank."""

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, **options)

    def run(rank: int) -> None:
        case = TWO.but(layout="BNSD", HK=12, dtype=torch.float32)
        module = case.style(kv_chunks=2).apply(Core(), case.mesh())
        with count_collectives() as counted, pytest.raises(ValueError, match=message):
            module(*(case.local(x, rank) for x in case.qkv()))
        assert counted.count("all_gather") == 0

    ranks(2).run(run)


def test_what_does_not_go_together_is_refused_where_it_is_said() -> None:
    """Constructor, apply, and the first call, each with the way out; one rank gathers nothing."""
    with pytest.raises(ValueError, match=r"kv_chunks \(0\) must be at least 1"):
        ContextParallel(kv_chunks=0)
    with pytest.raises(ValueError, match="must be 1 with use_local_input=True"):
        ContextParallel(ulysses_degree=1, kv_chunks=2, use_local_input=True)
    with pytest.raises(ValueError, match=r"must be 1 in AsyncContextParallel.*use ContextParallel"):
        AsyncContextParallel(ulysses_degree=1, kv_chunks=2)

    def run(rank: int) -> list[str]:
        texts = []
        for options in ({}, {"ulysses_degree": 1, "load_balance": True}):
            with pytest.raises(ValueError, match=r"kv_chunks \(4\) must") as caught:
                ContextParallel(kv_chunks=4, **options).apply(Sdpa(), TWO.mesh())  # type: ignore[arg-type]
            texts.append(str(caught.value))
        module = TWO.style(kv_chunks=11).apply(Sdpa(), TWO.mesh())
        with pytest.raises(ValueError, match="use kv_chunks=10 or less") as caught:
            module(*(TWO.local(x, rank) for x in TWO.qkv()))
        texts.append(str(caught.value))
        module = TWO.style(kv_chunks=2 + rank).apply(Sdpa(), TWO.mesh())
        with pytest.raises(ValueError, match="kv_chunks=3") as caught:
            module(*(TWO.local(x, rank) for x in TWO.qkv()))
        return [*texts, str(caught.value)]

    first, second = ranks(2).run(run)
    assert first == second
    ranks(1).run(compare, Case(P=1, degree=1), Sdpa, kv_chunks=50, check_traffic=False)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_peak_of_keys_and_values_is_two_parts(causal: bool) -> None:
    """At most (2/n + 0.1) of the full gather, n = 4 and 8, forward and backward.

    Of what operators allocate, the output and one block's of it are taken off (in backward: the
    gradients that are returned, and one block's of q); what is left are K and V, in backward with
    their gradients, and what is on the wire. The full gather is counted alike.
    """
    case = Case(P=8, degree=1, B=2, S=384, H=4, HK=4, D=32, DV=32)
    whole = 2 * case.B * case.S * case.HK * case.D * 8  # K and V of the sequence, bytes
    rows = whole // 2 // case.P  # q, the output, or a shard of k

    def run(rank: int, n: int, limit: float) -> list[float]:
        module = case.style(kv_chunks=n).apply(Sdpa(causal=causal), case.mesh())
        peaks: list[tuple[int, int]] = []
        least = [0.0, 0.0]
        for _ in range(60):
            local = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
            upstream = case.local(case.upstream(), rank)
            if rank < case.P - 1:  # the last one sees most
                module(*local).backward(upstream)
            else:
                with peak_memory() as forward:
                    out = module(*local)
                with peak_memory() as backward:
                    out.backward(upstream)
                peaks.append((forward.peak - 2 * rows, backward.peak - 4 * rows))
                least = [min(both) / whole for both in zip(*peaks, strict=True)]
            if everywhere(max(least) <= limit):
                break  # else gloo's threads held a buffer a moment longer
        return least

    full = ranks(case.P).run(run, 1, inf)[-1]
    assert min(full) > 0.9, full
    for n in (4, 8):
        streamed_peak = ranks(case.P).run(run, n, 2 / n + 0.1)[-1]
        assert max(streamed_peak) <= 2 / n + 0.1, (n, streamed_peak)
        assert max(streamed_peak) > 1 / n, "K and V of a part at least"
