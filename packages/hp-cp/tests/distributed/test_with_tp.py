"""Tensor parallel and context parallel together: head shards come in and go out as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hp_cp import init_device_mesh
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from ._compare import Case, reference
from ._cores import Eager, Sdpa

TP = 2
MODES = [
    Case(P=2, H=8, HK=4),
    Case(P=2, degree=1, H=8, HK=4),
    Case(P=2, degree=1, load_balance=True, H=8, HK=4),
    Case(P=4, degree=2, H=8, HK=4),
]


def _root(case: Case, order: tuple[str, str]) -> DeviceMesh:
    sizes = {"cp": case.P, "tp": TP}
    return init_device_mesh("cpu", tuple(sizes[n] for n in order), mesh_dim_names=order)


def _compare(
    rank: int,
    case: Case,
    core: type[nn.Module],
    order: tuple[str, str],
    on: str = "tp",
    keep: bool = True,
    **options: Any,
) -> None:
    """Feed DTensors that lie on ``on`` (``"tp"`` or ``"both"``); compare, and check the output."""
    root = _root(case, order)
    cp, tp = root.get_local_rank("cp"), root.get_local_rank("tp")
    heads = case.head_dim
    mesh = root["tp"] if on == "tp" else root
    placements: list[Any] = [
        Shard(case.seq_dim if name == "cp" else heads) for name in mesh.mesh_dim_names or ()
    ]

    def cut(x: Tensor) -> Tensor:
        return case.local(x.chunk(TP, heads)[tp], cp)

    whole = case.qkv()
    expected, grads = reference(core(case.layout), whole, case.upstream())
    local = [cut(x).clone().requires_grad_() for x in whole]
    module = case.style(use_local_output=not keep, **options).apply(core(case.layout), root["cp"])
    with count_collectives() as counted:
        fed = [DTensor.from_local(x, mesh, placements, run_check=False) for x in local]
        out = module(*fed)
        assert isinstance(out, DTensor) == keep
        if keep:
            assert out.device_mesh == mesh
            assert out.placements == tuple(placements)
            assert out.shape == (case.local(expected, cp) if on == "tp" else expected).shape
            out = out.to_local()
        out.backward(cut(case.upstream()))
    assert_close(out, cut(expected))
    for name, x, full in zip("qkv", local, grads, strict=True):
        assert full is not None
        assert_close(x.grad, cut(full), kind="grad", name=f"d{name}")
    planned = case.but(H=case.H // TP, HK=case.HK // TP).predicted(cp)
    seen = {k: (counted.count(k), counted.bytes(k)) for k in counted.summary()}
    assert seen == planned


@pytest.mark.parametrize(
    ("core", "keep"),
    [(Sdpa, True), (Sdpa, False), (Eager, True)],
    ids=["Sdpa-keep", "Sdpa-local", "Eager-keep"],
)
@pytest.mark.parametrize("order", [("cp", "tp"), ("tp", "cp")], ids="-".join)
@pytest.mark.parametrize("case", MODES, ids=str)
def test_tp_shards_of_heads_compose_with_every_mode(
    case: Case, core: type[nn.Module], order: tuple[str, str], keep: bool
) -> None:
    """Behaviour 24: TP left or right of CP, Hybrid on 8 ranks; the CP axis is dropped on exit."""
    ranks(case.P * TP).run(_compare, case, core, order, keep=keep)


@pytest.mark.parametrize("core", [Sdpa, Eager])
@pytest.mark.parametrize("case", [MODES[0].but(layout="BNSD"), MODES[1].but(layout="TND")], ids=str)
def test_other_layouts_compose_too(case: Case, core: type[nn.Module]) -> None:
    """BNSD and TND, whose head dim is 1."""
    ranks(case.P * TP).run(_compare, case, core, ("cp", "tp"))


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "local"])
@pytest.mark.parametrize("order", [("cp", "tp"), ("tp", "cp")], ids="-".join)
@pytest.mark.parametrize("case", MODES[:3], ids=str)
def test_a_tensor_on_both_axes_keeps_both(case: Case, order: tuple[str, str], keep: bool) -> None:
    """(Shard(seq), Shard(head)) on ("cp", "tp") in and out; the global shape is the whole one."""
    ranks(case.P * TP).run(_compare, case, Sdpa, order, on="both", keep=keep)


@pytest.mark.parametrize("heads", [(8, 2), (12, 6)], ids=str)
def test_few_kv_heads_are_shared_after_tp(heads: tuple[int, int]) -> None:
    """Each TP rank has 1 or 3 KV heads for 2 CP ranks."""
    case = Case(P=2, H=heads[0], HK=heads[1])
    ranks(4).run(_compare, case, Eager, ("cp", "tp"))
    ranks(4).run(_compare, case, Sdpa, ("tp", "cp"))


@pytest.mark.parametrize("case", MODES, ids=str)
def test_local_input_is_the_local_shard_of_both(case: Case) -> None:
    """``use_local_input``: plain tensors inside, TP DTensors outside."""
    ranks(case.P * TP).run(_compare, case, Sdpa, ("cp", "tp"), use_local_input=True)


@pytest.mark.parametrize(
    "case", [Case(P=2, degree=1, layout="BSH"), Case(P=2, degree=1, layout="SBH")], ids=str
)
def test_merged_heads_are_cut_by_tp_under_colossal(case: Case) -> None:
    """[B, S, H*D] with Shard(2) on the TP axis, unflattened and flattened inside."""
    ranks(4).run(_compare, case.but(H=8, HK=4), Sdpa, ("cp", "tp"))


@pytest.mark.parametrize("case", MODES, ids=str)
def test_a_plain_output_of_other_dims_is_a_tp_shard_of_its_heads(case: Case) -> None:
    """BNSD in, BSHD out as a plain tensor: ``Shard(1)`` on the TP axis leaves as ``Shard(2)``."""
    case = case.but(layout="BNSD")
    expected, _ = reference(Sdpa("BNSD"), case.qkv(), case.upstream())

    class Swapped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = Sdpa("BNSD")(q, k, v).transpose(1, 2)
            assert type(out) is Tensor
            return out

    def run(rank: int) -> None:
        root = _root(case, ("cp", "tp"))
        cp, tp = root.get_local_rank("cp"), root.get_local_rank("tp")
        style = case.style(use_local_input=True, output_seq_dim=1, output_head_dim=2)
        fed = [
            DTensor.from_local(case.local(x.chunk(TP, 1)[tp], cp), root["tp"], [Shard(1)])
            for x in case.qkv()
        ]
        out = style.apply(Swapped(), root["cp"])(*fed)
        assert out.placements == (Shard(2),) and out.device_mesh == root["tp"]
        assert_close(out.full_tensor(), case.local(expected, cp).transpose(1, 2))

    ranks(case.P * TP).run(run)


def test_the_view_inside_puts_tp_left_of_cp() -> None:
    """Behaviour 24: TP rank t and CP rank c hold head 2t + c of 4, without a strided shard."""

    def on(rank: int) -> None:
        case = Case(P=2, H=4, HK=4, D=2, DV=2)
        root = _root(case, ("cp", "tp"))
        cp, tp = root.get_local_rank("cp"), root.get_local_rank("tp")
        numbers = torch.arange(4.0).view(1, 1, 4, 1).expand(2, case.S, 4, 2)

        class Probe(nn.Module):
            def forward(self, q: Any, k: Any, v: Any) -> Any:
                assert q.shape == numbers.shape
                assert q.device_mesh.mesh_dim_names == ("tp", "cp")
                assert q.placements == (Shard(2), Shard(2))
                assert torch.equal(q.to_local(), numbers[:, :, 2 * tp + cp, None])
                return q

        local = case.local(numbers.chunk(TP, 2)[tp], cp).contiguous()
        fed = DTensor.from_local(local, root["tp"], [Shard(2)], run_check=False)
        case.style().apply(Probe(), root["cp"])(fed, fed, fed)

    ranks(4).run(on)


REFUSED = [
    pytest.param([Shard(1)], r"not CP; it must be Replicate\(\) or a shard", id="tp-on-sequence"),
    pytest.param([Partial()], r"not CP; it must be Replicate\(\) or a shard", id="partial"),
]


@pytest.mark.parametrize(("placements", "message"), REFUSED)
def test_layouts_that_cannot_compose_are_refused(placements: list[Any], message: str) -> None:
    """On every rank, before data moves, and the next call works."""

    def on(rank: int) -> None:
        case = MODES[0]
        root = _root(case, ("cp", "tp"))
        module = case.style().apply(Sdpa(), root["cp"])
        local = [case.local(x, root.get_local_rank("cp")) for x in case.qkv()]
        fed = [DTensor.from_local(x, root["tp"], placements, run_check=False) for x in local]
        with pytest.raises(ValueError, match=message):
            module(*fed)
        replicated = [DTensor.from_local(x, root["tp"], [Replicate()]) for x in local]
        assert module(*replicated).placements == (Replicate(),)

    ranks(4).run(on)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", [Case(P=2), Case(P=2, degree=1, head_groups=2)], ids=str)
def test_kv_heads_that_tp_leaves_whole_are_refused_where_heads_are_traded(
    case: Case, kv_heads: int
) -> None:
    """A TP rank has 4 of 8 query heads, and KV heads for all of them: whose are whose?"""

    def on(rank: int) -> None:
        small = case.but(H=8, HK=kv_heads)
        root = _root(small, ("cp", "tp"))
        q, k, v = (small.local(x, root.get_local_rank("cp")) for x in small.qkv())
        q = q.chunk(TP, 2)[root.get_local_rank("tp")]
        placed = [(q, Shard(2)), (k, Replicate()), (v, Replicate())]
        fed = [DTensor.from_local(x, root["tp"], [p], run_check=False) for x, p in placed]
        module = small.style().apply(Sdpa(), root["cp"])
        with pytest.raises(ValueError, match=r"k with \(Replicate\(\),\) must have its heads"):
            module(*fed)

    ranks(4).run(on)


def test_heads_that_tp_leaves_too_few_are_refused_with_both_sizes() -> None:
    """4 heads on 2 TP ranks are 2 on each, which 4 CP ranks cannot share."""

    def on(rank: int) -> None:
        case = Case(P=4, H=4, HK=4)
        root = _root(case, ("cp", "tp"))
        local = case.local(case.qkv()[0].chunk(TP, 2)[0], root.get_local_rank("cp"))
        fed = DTensor.from_local(local, root["tp"], [Shard(2)], run_check=False)
        with pytest.raises(ValueError, match=r"num_heads \(2\) .* 2 TP ranks"):
            case.style().apply(Sdpa(), root["cp"])(fed, fed, fed)

    ranks(8).run(on)


class _Slopes(nn.Module):
    """ALiBi as a plain parameter with an entry for each head, added to the scores or as a mask."""

    def __init__(self, heads: int, *, as_mask: bool) -> None:
        super().__init__()
        self.slopes = nn.Parameter(randn(heads, 1, 1, seed=7))
        self.as_mask = as_mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        bias = self.slopes * torch.arange(k.shape[2], dtype=q.dtype)
        if self.as_mask:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            out = (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v
        return out.transpose(1, 2)


@pytest.mark.parametrize("case", MODES, ids=str)
@pytest.mark.parametrize("order", [("cp", "tp"), ("tp", "cp")], ids="-".join)
def test_a_plain_parameter_has_its_whole_gradient_on_every_tp_rank(
    case: Case, order: tuple[str, str]
) -> None:
    """Over CP a share, which the FSDP mesh sums; over TP the whole, so that replicas stay alike."""
    case = case.but(HK=case.H)

    def run(rank: int) -> None:
        root = _root(case, order)
        cp, tp = root.get_local_rank("cp"), root.get_local_rank("tp")
        whole = case.qkv()
        core = _Slopes(case.H, as_mask=False)
        core(*whole).backward(case.upstream())
        module = case.style().apply(_Slopes(case.H, as_mask=False), root["cp"])
        fed = [
            DTensor.from_local(
                case.local(x.chunk(TP, 2)[tp], cp), root["tp"], [Shard(2)], run_check=False
            )
            for x in whole
        ]
        module(*fed).to_local().backward(case.local(case.upstream().chunk(TP, 2)[tp], cp))
        share = module.slopes.grad.clone()
        dist.all_reduce(share, group=root["cp"].get_group())
        assert_close(share, core.slopes.grad, kind="grad")

    ranks(case.P * TP).run(run)


def test_a_plain_mask_that_is_trained_is_refused_under_tp() -> None:
    """Its gradient would be a part on each TP rank, and the replicas would drift apart."""

    def run(rank: int) -> None:
        case = MODES[0]
        root = _root(case, ("cp", "tp"))
        module = case.style().apply(_Slopes(case.H, as_mask=True), root["cp"])
        fed = [
            DTensor.from_local(x[:, : case.S // 2, :4], root["tp"], [Shard(2)], run_check=False)
            for x in case.but(HK=case.H).qkv()
        ]
        with pytest.raises(ValueError, match="that requires grad must not meet q that is cut"):
            module(*fed)

    ranks(4).run(run)
