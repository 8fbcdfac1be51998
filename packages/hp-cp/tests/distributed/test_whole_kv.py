"""k and v that every rank has, as DTensors with ``Replicate()``: only q is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hp_cp import (
    AsyncContextParallel,
    HeadWork,
    PreparedAttention,
    init_device_mesh,
    make_plan,
)
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from ._compare import Case, reference
from ._cores import Eager, Sdpa

KEYS = 35  # which the CP size need not divide
CASES = [
    Case(P=2, degree=1, H=8, HK=4, DV=4),
    Case(P=2, H=8, HK=4, DV=4, layout="BNSD"),
    Case(P=4, degree=2, H=8, HK=4, DV=4),
]
FEW = [
    Case(P=3, HK=1, layout="SBHD"),  # one head, on all ranks
    Case(P=4, H=12, HK=6, DV=4),  # three query heads with two KV heads: one for each
    Case(P=4, degree=2, H=6, HK=3),
    Case(P=4, degree=2, HK=1, layout="BNSD"),
]
CALLS: dict[str, tuple[Callable[[str], nn.Module], int, bool]] = {
    "sdpa": (lambda layout: Sdpa(layout, causal=False), KEYS, False),
    "causal": (Sdpa, 24, False),
    "a mask": (Eager, KEYS, True),
}
"""How attention is written, the number of keys, and whether it is handed a mask ``[Sq, Sk]``."""

Names = tuple[str, ...]


def _whole(case: Case, keys: int) -> list[Tensor]:
    return [case.qkv()[0], *case.but(S=keys).qkv()[1:]]


def _mask(case: Case) -> Tensor:
    mask = randn(case.S, KEYS, seed=5) > -0.5
    mask[:, 0] = True
    return mask


def _sent(case: Case, tp: int = 1) -> dict[str, tuple[int, int]]:
    """Count forward and backward: q and the output leave for the other heads, and come back."""
    u = case.P if case.degree is None else case.degree
    if u == 1:
        return {}
    numbers = case.B * case.S // case.P * case.H // tp * (case.D + case.DV)
    return {"all_to_all": (4, 2 * 8 * numbers * (u - 1) // u)}


class Feed:
    """Meshes of one rank, and q, k and v on them: rows of q, all of k and v, heads cut by TP."""

    def __init__(self, case: Case, names: Names, rank: int) -> None:
        u = case.P if case.degree is None else case.degree
        sizes = {"cp": case.P, "tp": 2, "co": case.P // u, "ds": u}
        shape = tuple(sizes[name] for name in names)
        self.case, self.names = case, names
        self.root = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.cp_mesh = self.root["cp"] if "cp" in names else self.root
        self.cp = self.root.get_local_rank("cp") if "cp" in names else rank
        self.tp = self.root.get_local_rank("tp") if "tp" in names else None

    def heads(self, x: Tensor) -> Tensor:
        """Return the heads of this rank of TP."""
        return x if self.tp is None else x.chunk(2, self.case.head_dim)[self.tp]

    def place(self, x: Tensor, rows: Placement) -> Any:
        """Return a leaf with the local tensor ``x``."""
        heads = Shard(self.case.head_dim)
        placements = [heads if name == "tp" else rows for name in self.names]
        placed = DTensor.from_local(x.clone(), self.root, placements, run_check=False)
        return placed.requires_grad_()

    def qkv(self, whole: list[Tensor]) -> list[Any]:
        """Return shards of q, and k and v as they are."""
        q, k, v = map(self.heads, whole)
        rows = Shard(self.case.seq_dim)
        return [
            self.place(self.case.local(q, self.cp), rows),
            *(self.place(x, Replicate()) for x in (k, v)),
        ]


def _compare(rank: int, case: Case, names: Names, call: str, **options: Any) -> None:
    build, keys, masked = CALLS[call]
    whole, extra = _whole(case, keys), [_mask(case)] if masked else []
    expected, grads = reference(build(case.layout), [*whole, *extra], case.upstream())
    feed = Feed(case, names, rank)
    fed = feed.qkv(whole)
    style = case.style(cross_attention=True, **options)
    module = style.apply(build(case.layout), feed.cp_mesh)
    with count_collectives() as counted:
        out = module(*fed, *extra)
        local = out if options.get("use_local_output") else out.to_local()
        local.backward(case.local(feed.heads(case.upstream()), feed.cp))
    assert (type(out) is Tensor) == bool(options.get("use_local_output"))
    assert_close(local, case.local(feed.heads(expected), feed.cp), name=call)
    for name, x, full in zip("qkv", fed, grads, strict=False):
        assert full is not None
        assert_close(x.grad.full_tensor(), full, kind="grad", name=f"{call}: d{name}")
    assert all(
        x.grad.placements[axis].is_partial()
        for x in fed[1:]
        for axis, name in enumerate(names)
        if name != "tp"
    )
    seen = {kind: (counted.count(kind), counted.bytes(kind)) for kind in counted.summary()}
    assert seen == _sent(case, 1 if feed.tp is None else 2)


@pytest.mark.parametrize(
    "names", [("cp",), ("cp", "tp"), ("tp", "cp")], ids=["cp", "cp-tp", "tp-cp"]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_q_is_sent(case: Case, names: Names) -> None:
    """Output and every gradient; those of k and v are sums that are pending on the CP axis."""

    def on(rank: int) -> None:
        _compare(rank, case, names, "sdpa")
        _compare(rank, case, names, "causal", use_local_output=True)
        _compare(rank, case, names, "a mask")

    ranks(case.P * (2 if "tp" in names else 1)).run(on)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_ranks_that_share_a_head_add_its_gradients(case: Case) -> None:
    """Fewer KV heads than ranks, and such as no rank's query heads share evenly."""

    def on(rank: int) -> None:
        for call in CALLS:
            _compare(rank, case, ("cp",), call)

    ranks(case.P).run(on)


def test_a_mesh_of_both_groups_says_it_on_both_axes() -> None:
    """Hybrid on its 2-D mesh, plain tensors inside as well."""

    def on(rank: int) -> None:
        _compare(rank, CASES[2], ("co", "ds"), "a mask")
        _compare(rank, CASES[2], ("co", "ds"), "sdpa", use_local_input=True)

    ranks(4).run(on)


@pytest.mark.parametrize("case", [*CASES, *FEW], ids=str)
def test_the_plan_knows_what_is_sent(case: Case) -> None:
    """Bytes by kind on every rank, and the heads of K and V that a rank holds, of all rows."""
    plan, u = make_plan(case.P, case.degree), case.P if case.degree is None else case.degree
    sizes = {"num_heads": case.H, "num_kv_heads": case.HK, "seq_len": case.S, "batch": case.B}
    sizes |= {"head_size": case.D, "v_head_size": case.DV, "element_size": 8}
    for rank in range(case.P):
        found = plan.describe(**sizes, kv_seq_len=KEYS, kv_is_whole=True, rank=rank)
        assert found.totals() == _sent(case)
        heads = len(plan.heads(case.H, case.HK).kv_sent[rank % u])
        assert found.resident_kv_bytes == 8 * case.B * KEYS * heads * (case.D + case.DV)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_frozen_memory_gets_no_gradient(case: Case) -> None:
    """q's is right, and the same is sent."""
    whole = _whole(case, KEYS)
    leaf = whole[0].clone().requires_grad_()
    Sdpa(case.layout, causal=False)(leaf, *whole[1:]).backward(case.upstream())

    def on(rank: int) -> None:
        feed = Feed(case, ("cp",), rank)
        q, k, v = feed.qkv(whole)
        module = case.style(cross_attention=True).apply(
            Sdpa(case.layout, causal=False), feed.cp_mesh
        )
        with count_collectives() as counted:
            out = module(q, k.detach(), v.detach())
            out.to_local().backward(case.local(case.upstream(), rank))
        seen = {kind: (counted.count(kind), counted.bytes(kind)) for kind in counted.summary()}
        assert seen == _sent(case)
        assert leaf.grad is not None
        assert_close(q.grad.to_local(), case.local(leaf.grad, rank), kind="grad")

    ranks(case.P).run(on)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_norm_and_rotary_of_whole_keys_have_all_rows(case: Case) -> None:
    """`PreparedAttention`: angles of all keys beside this rank's of q; the norms' gradients add."""
    whole, scales = _whole(case, KEYS), [1 + randn(case.D, seed=50 + i) / 5 for i in range(2)]

    def works(weights: list[Tensor], rows: slice) -> dict[str, HeadWork]:
        found = {}
        for name, weight, length, own in zip("qk", weights, (case.S, KEYS), (rows, slice(None)),
                                             strict=True):  # fmt: skip
            angle = randn(1, length, 1, case.D // 2, seed=40 + length)[:, own]
            angle = angle.transpose(1, 2) if case.layout == "BNSD" else angle
            found[f"{name}_work"] = HeadWork(weight, 1e-5, angle.cos(), angle.sin())
        return found

    def core() -> nn.Module:
        return PreparedAttention(Sdpa(case.layout, causal=False))

    def alone(module: nn.Module, *xs: Tensor) -> Any:
        return module(*xs[:3], **works(list(xs[3:]), slice(None)))

    expected, grads = reference(core(), [*whole, *scales], case.upstream(), alone)

    def on(rank: int) -> None:
        feed = Feed(case, ("cp",), rank)
        fed, weights = feed.qkv(whole), [x.clone().requires_grad_() for x in scales]
        module = case.style(cross_attention=True).apply(core(), feed.cp_mesh)
        length = case.S // case.P
        out = module(*fed, **works(weights, slice(rank * length, (rank + 1) * length)))
        out.to_local().backward(case.local(case.upstream(), rank))
        assert_close(out.to_local(), case.local(expected, rank))
        for x, full in zip(fed, grads, strict=False):
            assert_close(x.grad.full_tensor(), full, kind="grad")
        for weight, full in zip(weights, grads[3:], strict=True):
            assert weight.grad is not None
            torch.distributed.all_reduce(weight.grad)
            assert_close(weight.grad, full, kind="grad", name="weight")

    ranks(case.P).run(on)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_does_not_fit_is_one_error_before_anything_is_sent(case: Case) -> None:
    """One of two whole, whole on some ranks only, not asked for, and the style that sends ahead."""
    whole = _whole(case, case.S)

    def on(rank: int) -> list[str]:
        feed = Feed(case, ("cp",), rank)
        q, k, v = feed.qkv(whole)
        cut = feed.place(case.local(whole[2], rank), Shard(case.seq_dim))
        asked, silent = (
            case.style(cross_attention=yes).apply(Sdpa(case.layout), feed.cp_mesh)
            for yes in (True, False)
        )
        ahead = AsyncContextParallel(
            case.seq_dim, case.head_dim, case.degree, cross_attention=True
        ).apply(Sdpa(case.layout), feed.cp_mesh, *(nn.Identity() for _ in "qkv"))
        said = []
        with count_collectives() as counted:
            for module, kv in (
                (asked, (k, cut)),
                (asked, (k, v) if rank else (cut, cut)),
                (silent, (k, v)),
                (ahead, (k, v)),
            ):
                with pytest.raises(ValueError) as caught:
                    module(q, *kv)
                said.append(str(caught.value))
        assert set(counted.summary()) <= {"preflight"}
        return said

    first, *others = ranks(case.P).run(on)
    assert all(one == first for one in others)
    half, some, unasked, ahead = first
    assert "k and v must both be whole (Replicate()) on the CP axis, or both be shards" in half
    assert "placements of k must be the same on all ranks" in some
    assert f"must be Shard({case.seq_dim}) on the CP axis, the sequence dim" in unasked
    assert "k and v in AsyncContextParallel must be shards" in ahead


def test_a_plan_of_it_refuses_what_counts_on_one_sequence() -> None:
    """As the style does; and shards must divide."""
    sizes = {"num_heads": 12, "num_kv_heads": 4, "seq_len": 24, "head_size": 6}
    plan = make_plan(2, 1)
    with pytest.raises(ValueError, match="must not come with kv_chunks"):
        plan.describe(**sizes, kv_is_whole=True, kv_chunks=2)
    with pytest.raises(ValueError, match="must not come with load_balance"):
        make_plan(2, 1, load_balance=True).describe(**sizes, kv_seq_len=12)
    with pytest.raises(ValueError, match="k and v in AsyncContextParallel must be shards"):
        plan.describe(**sizes, kv_is_whole=True, overlap=True)
    with pytest.raises(ValueError, match=r"sequence length \(35\) must be divisible by cp_size"):
        plan.describe(**sizes, kv_seq_len=KEYS)
    with pytest.raises(ValueError, match=r"kv_seq_len \(0\) must be at least 1"):
        plan.describe(**sizes, kv_seq_len=0, kv_is_whole=True)
