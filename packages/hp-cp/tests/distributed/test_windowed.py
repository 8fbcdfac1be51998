"""``sliding_window=w, sink_tokens=n``: keys of a window are fetched, and nothing is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hp_comm import traffic
from hp_cp import ContextParallel, init_device_mesh, make_plan, sliding_window_attention
from hp_cp.attention.band import band_mask
from hp_mesh.testing import assert_close, ranks

from ._compare import Case, compare, reference
from ._cores import Eager, Sdpa, heads_back
from .test_packed import Packed
from .test_sliding import Sliding

CASES = [
    Case(P=2, degree=1),
    Case(P=3, degree=1, layout="BNSD", H=6, HK=1),
    Case(P=4, degree=1, layout="SBHD"),
    Case(P=4, degree=2),
    Case(P=4, degree=2, H=12, HK=6),
]
WINDOWS = [(1, 0), (4, 0), (9, 0), (5, 2), (9, 8), (3, 13), (40, 3)]
"""Shards have 6, 8 or 12 rows: within the neighbour's, and several ranks back."""


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows_equal_one_device_and_send_their_keys_only(
    case: Case, window: int, sinks: int
) -> None:
    """Output, every gradient (of fetched keys they are added at the owner), the plan's bytes.

    `compare` holds collectives and bytes, counted twice, to `Plan.describe`.
    """
    options = {"sliding_window": window, "sink_tokens": sinks}
    core = lambda: Sliding(window, sinks, case.layout)  # noqa: E731 - a factory
    sent = ranks(case.P).run(compare, case, core, **options)
    assert all("all_gather" not in one.by_kind for one in sent)
    assert all("reduce_scatter" not in one.by_kind for one in sent)


def test_heads_that_are_shared_unevenly_are_fetched_as_attention_sees_them() -> None:
    """Three query heads a rank, two to a KV head: each comes with one of its own."""
    case, options = Case(P=8, degree=4, H=12, HK=6), {"sliding_window": 7, "sink_tokens": 2}
    assert make_plan(8, 4).heads(12, 6).kv_expand is not None
    ranks(8).run(compare, case, lambda: Sliding(7, 2), **options)


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_a_smaller_window_than_the_styles_is_right(case: Case) -> None:
    """The style says what may be seen; a call that sees less computes its own window."""
    core = lambda: Sliding(3, 1, case.layout)  # noqa: E731 - a factory
    ranks(case.P).run(compare, case, core, sliding_window=7, sink_tokens=4)


MASKS: dict[str, Any] = {
    "bool": lambda mask: mask,
    "per-head": lambda mask: mask[None, None].repeat(1, 12, 1, 1),
    "float": lambda mask: torch.zeros(24, 24, dtype=torch.float64).masked_fill(~mask, -torch.inf),
    "bias": lambda mask: (
        torch.linspace(-1, 1, 576, dtype=torch.float64)
        .view(1, 1, 24, 24)
        .masked_fill(~mask, -torch.inf)
    ),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("case", [CASES[0], CASES[3], Case(P=3, degree=1)], ids=str)
def test_a_mask_says_the_window_of_sdpa(case: Case, kind: str) -> None:
    """Its columns are those of the keys that are here; a bias keeps its gradient."""
    i = torch.arange(case.S)
    mask = MASKS[kind](band_mask(i, i, 5, 2))

    def call(module: nn.Module, *args: Tensor) -> Any:
        return module(*args[:3], attn_mask=args[3])

    options = {"sliding_window": 5, "sink_tokens": 2}
    ranks(case.P).run(compare, case, Sdpa, extra=[mask], call=call, **options)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], Case(P=3, degree=1)], ids=str)
def test_packed_documents_with_a_window_fetch_it_alone(case: Case) -> None:
    """A window in documents, and documents no longer than the window without one."""
    tnd, bounds = case.but(layout="TND"), [0, 5, 5, 11, 24]
    for options in ({"sliding_window": 4}, {"sliding_window": 13}):
        core = lambda o=options: Packed(bounds, **o)  # noqa: E731 - a factory
        ranks(case.P).run(compare, tnd, core, sliding_window=options["sliding_window"])
    short = [0, 5, 11, 18, 24]
    ranks(case.P).run(compare, tnd, lambda: Packed(short), sliding_window=7, sink_tokens=3)


def test_what_is_done_to_k_on_its_way_is_done_to_the_shard() -> None:
    """A norm and a rotary embedding in the core, with tables of the whole sequence."""

    class Rotated(Sliding):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            angle = torch.linspace(0, 3, key.shape[1], dtype=torch.float64).view(1, -1, 1, 1)
            q, k = (F.rms_norm(x, (6,)) * angle.cos() for x in (query, key))
            return super().forward(q, k, value * 0.5)

    for case in (CASES[0], CASES[3]):
        ranks(case.P).run(compare, case, lambda: Rotated(4, 1), sliding_window=4, sink_tokens=1)


def test_bytes_follow_the_window_and_not_the_length() -> None:
    """The formula: ``w - 1`` rows of k and v to the next rank, whatever the length is."""
    sizes = {"num_heads": 8, "num_kv_heads": 4, "head_size": 16, "element_size": 2}
    row = 4 * 16 * 2 * 2  # heads, size, bytes, k and v
    plan = make_plan(8, 1)
    for length in (512, 4096):
        for rank in range(8):
            told = plan.describe(seq_len=length, rank=rank, sliding_window=33, **sizes)
            out, back = 32 * row * (rank < 7), 32 * row * (rank > 0)
            assert told.bytes("p2p", "forward") == out and told.bytes("p2p", "backward") == back
            assert told.totals().keys() <= {"p2p"}
            assert told.resident_kv_bytes == (length // 8 + 32 * (rank > 0)) * row
    # sinks: rank 0 sends its first rows to each rank whose window does not reach them
    told = plan.describe(seq_len=512, rank=0, sliding_window=33, sink_tokens=4, **sizes)
    assert told.bytes("p2p", "forward") == (32 + 7 * 4) * row and told.count("p2p") == 7
    # a window of three shards and a half
    told = plan.describe(seq_len=512, rank=7, sliding_window=64 * 3 + 33, **sizes)
    assert told.bytes("p2p", "backward") == (64 * 3 + 32) * row and told.count("p2p") == 4


class Reads(nn.Module):
    """A core that reads k in a way of its own, on the way to attention."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read = read

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return heads_back(self.read(q, k, v), "BSHD")


BAND = band_mask(torch.arange(24), torch.arange(24), 5)
REFUSED: dict[str, tuple[Any, str]] = {
    "causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        r"is_causal \(True\) without attn_mask sees all earlier keys.*sliding_window_attention",
    ),
    "full": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        r"is_causal \(False\) without attn_mask sees all keys",
    ),
    "wide-mask": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=(BAND | BAND.roll(-1, 1)).tril(), enable_gqa=True
        ),
        r"attn_mask \(shape \[24, 24\]\) shows key 0 to row 5, which sliding_window=5 does not",
    ),
    "mask-of-keys": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=BAND[:1], enable_gqa=True
        ),
        "must be a plain tensor with all 24 rows",
    ),
    "wide-window": (
        lambda q, k, v: sliding_window_attention(q, k, v, 6),
        r"sliding_window \(6\) and sink_tokens \(0\) must see at most the keys that "
        r"sliding_window=5 fetches: the last 5 and the first 0",
    ),
    "sinks": (
        lambda q, k, v: sliding_window_attention(q, k, v, 5, sink_tokens=1),
        r"sink_tokens \(1\) must see at most",
    ),
    "eager": (
        lambda q, k, v: (q @ k.repeat_interleave(3, 1).mT).softmax(-1) @ v.repeat_interleave(3, 1),
        "inside the boundary needs the whole of k or v, of which sliding_window=5 keeps",
    ),
    "einsum": (
        lambda q, k, v: torch.einsum("bhid,bhjd->bhij", q[:, :4], k),
        "inside the boundary needs the whole of k or v",
    ),
    "mean": (
        lambda q, k, v: sliding_window_attention(q, k - k.mean(2, keepdim=True), v, 5),
        "mean inside the boundary needs the whole of k or v",
    ),
    "local": (
        lambda q, k, v: q.to_local() + k.to_local().sum(),
        "to_local inside the boundary needs the whole",
    ),
    "other-keys": (
        lambda q, k, v: sliding_window_attention(q, torch.ones(2, 4, 24, 6).double(), v, 5),
        "key and value must both be made of the module's k and v",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_see_more_than_is_fetched_is_refused_on_every_rank(name: str) -> None:
    """Never a number from keys that are not there; the next call of a right core is right."""
    read, message = REFUSED[name]
    case = Case(P=3, degree=1)
    reads = [Reads(read)] * 3

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        style = ContextParallel(1, 2, ulysses_degree=1, sliding_window=5)
        module = style.apply(Reads(reads[rank].read), mesh)
        qkv = [case.local(x, rank) for x in case.qkv()]
        with traffic() as sent, pytest.raises(ValueError, match=message):
            module(*qkv)
        assert sent.count("p2p") == 0, "refused before anything is sent"
        module.read = lambda q, k, v: sliding_window_attention(q, k, v, 5)
        expected = case.local(Sliding(5)(*case.qkv()), rank)
        assert_close(module(*qkv), expected)

    ranks(3).run(on)


@pytest.mark.parametrize("core", [Eager(), Sdpa()], ids=["eager", "causal"])
def test_on_one_rank_every_module_is_the_bare_one(core: nn.Module) -> None:
    """Nothing is fetched, so nothing is refused."""
    case = Case(P=1, degree=1)
    ranks(1).run(compare, case, lambda: core, sliding_window=4)


STYLES: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"sliding_window": 0}, r"sliding_window \(0\) must be at least 1"),
    "bool": ({"sliding_window": True}, r"sliding_window \(True\) must be an integer"),
    "sinks": ({"sink_tokens": 4}, r"sink_tokens \(4\) must come with sliding_window"),
    "negative": ({"sliding_window": 4, "sink_tokens": -1}, r"sink_tokens \(-1\) must be"),
    "balanced": ({"sliding_window": 4, "load_balance": True}, "load_balance=True"),
    "keep_kv": ({"sliding_window": 4, "keep_kv": False}, "keep_kv=False"),
    "local-input": ({"sliding_window": 4, "use_local_input": True}, "use_local_input=True"),
}


@pytest.mark.parametrize("name", STYLES)
def test_options_that_do_not_go_together_are_refused_by_the_constructor(name: str) -> None:
    """With the option and the way out."""
    options, message = STYLES[name]
    with pytest.raises(ValueError, match=f"^ContextParallel: .*{message}"):
        ContextParallel(ulysses_degree=1, **options)


def test_async_and_ulysses_refuse_a_window() -> None:
    """One sends k and v before attention asks; the other gathers nothing."""
    from hp_cp import AsyncContextParallel

    with pytest.raises(ValueError, match=r"^AsyncContextParallel: sliding_window \(4\) must be N"):
        AsyncContextParallel(ulysses_degree=1, sliding_window=4)

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with pytest.raises(ValueError, match=r"sliding_window \(4\) must come with a gather"):
            ContextParallel(sliding_window=4).apply(Sliding(4), mesh)

    ranks(2).run(on)
    with pytest.raises(ValueError, match=r"must be None with balance_hybrid=True"):
        ContextParallel(ulysses_degree=2, balance_hybrid=True, sliding_window=4)
    with pytest.raises(ValueError, match=r"Plan\.describe: sliding_window"):
        make_plan(2).describe(
            num_heads=4, num_kv_heads=4, seq_len=24, head_size=6, sliding_window=4
        )


def test_ranks_with_other_windows_are_told_before_anything_is_sent() -> None:
    """The window is part of what the ranks compare."""
    case = Case(P=2, degree=1)

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        style = ContextParallel(1, 2, ulysses_degree=1, sliding_window=4 + rank)
        module = style.apply(Sliding(4), mesh)
        with pytest.raises(ValueError, match=r"sliding_window=4.*sliding_window=5"):
            module(*(case.local(x, rank) for x in case.qkv()))

    ranks(2).run(on)


def test_checkpointed_layers_and_second_backwards_fetch_again() -> None:
    """Recomputation asks again; the gradients stay those of one device."""
    from torch.utils.checkpoint import checkpoint

    case = Case(P=3, degree=1)
    expected, grads = reference(Sliding(5, 2), case.qkv(), case.upstream())

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        style = ContextParallel(1, 2, ulysses_degree=1, sliding_window=5, sink_tokens=2)
        module = style.apply(Sliding(5, 2), mesh)
        local = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
        out = checkpoint(module, *local, use_reentrant=False)
        out.backward(case.local(case.upstream(), rank))
        assert_close(out, case.local(expected, rank))
        for x, grad in zip(local, grads, strict=True):
            assert grad is not None
            assert_close(x.grad, case.local(grad, rank), kind="grad")

    ranks(3).run(on)


@pytest.mark.parametrize("degree", [1, 2])
def test_heads_of_tensor_parallel_ranks_fetch_their_own(degree: int) -> None:
    """q, k and v as TP leaves them: DTensors cut over heads, on a mesh of their own."""
    case = Case(P=2 if degree == 1 else 4, degree=degree, H=8, HK=4)

    def on(rank: int) -> None:
        root = init_device_mesh("cpu", (case.P, 2), mesh_dim_names=("cp", "tp"))
        cp, tp = root.get_local_rank("cp"), root.get_local_rank("tp")
        expected, grads = reference(Sliding(9, 2), case.qkv(), case.upstream())

        def cut(x: Tensor) -> Tensor:
            return case.local(x.chunk(2, 2)[tp], cp)

        local = [cut(x).clone().requires_grad_() for x in case.qkv()]
        fed = [DTensor.from_local(x, root["tp"], [Shard(2)], run_check=False) for x in local]
        style = case.style(sliding_window=9, sink_tokens=2)
        module = style.apply(Sliding(9, 2), root["cp"])
        with traffic() as sent:
            out = module(*fed)
            out.to_local().backward(cut(case.upstream()))
        assert_close(out.to_local(), cut(expected))
        for x, grad in zip(local, grads, strict=True):
            assert grad is not None
            assert_close(x.grad, cut(grad), kind="grad")
        assert sent.count("p2p") > 0 and sent.count("all_gather") == 0

    ranks(2 * case.P).run(on)


def test_what_streams_k_and_v_otherwise_refuses_a_window_operator() -> None:
    """``kv_chunks`` takes plain attention part by part; this operator reads its window."""
    case = Case(P=2, degree=1)

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        module = case.style(kv_chunks=2).apply(Sliding(4), mesh)
        with pytest.raises(ValueError, match="needs the whole of k or v, of which kv_chunks=2"):
            module(*(case.local(x, rank) for x in case.qkv()))
        with pytest.raises(ValueError, match=r"must be None with kv_chunks \(2\)"):
            case.style(kv_chunks=2, sliding_window=4)

    ranks(2).run(on)
