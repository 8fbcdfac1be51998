"""Hold a module under ContextParallel to the same module on one device: numbers and traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hp_comm import traffic
from hp_cp import AsyncContextParallel, ContextParallel, init_device_mesh, make_plan
from hp_mesh.testing import assert_close, count_collectives, randn

from ._cores import DIMS


@dataclass(frozen=True)
class Case:
    """One configuration and its sizes; ``P`` ranks, no size a power of two where it may be free."""

    P: int = 2
    degree: int | None = None
    load_balance: bool = False
    layout: str = "BSHD"
    B: int = 2
    S: int = 24
    H: int = 12
    HK: int = 4
    D: int = 6
    DV: int = 6
    dtype: torch.dtype = torch.float64
    head_groups: int = 1
    balance_hybrid: bool = False

    def __str__(self) -> str:
        degree = self.P if self.degree is None else self.degree
        mode = make_plan(self.P, self.degree).mode if not self.load_balance else "balanced"
        mode = f"balanced-{mode}" if self.balance_hybrid else mode
        heads = "" if (self.H, self.HK) == (12, 4) else f"-H{self.H}:{self.HK}"
        parts = f"u{degree}" * mode.endswith("hybrid")
        return f"{mode}-P{self.P}{parts}-{self.layout}{heads}"

    def but(self, **changes: Any) -> Case:
        """Return the case with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def seq_dim(self) -> int:
        return DIMS[self.layout][0]

    @property
    def head_dim(self) -> int:
        return DIMS[self.layout][1]

    def shape(self, heads: int, size: int) -> tuple[int, ...]:
        return {
            "BSHD": (self.B, self.S, heads, size),
            "BNSD": (self.B, heads, self.S, size),
            "SBHD": (self.S, self.B, heads, size),
            "TND": (self.S, heads, size),
            "BSH": (self.B, self.S, heads * size),
            "SBH": (self.S, self.B, heads * size),
        }[self.layout]

    def qkv(self) -> list[Tensor]:
        """Return q, k and v of the whole sequence, the same on every rank."""
        sizes = ((self.H, self.D), (self.HK, self.D), (self.HK, self.DV))
        return [randn(*self.shape(h, d), seed=i).to(self.dtype) for i, (h, d) in enumerate(sizes)]

    def upstream(self) -> Tensor:
        """Return the gradient of the whole output."""
        return randn(*self.shape(self.H, self.DV), seed=9).to(self.dtype)

    def local(self, x: Tensor, rank: int) -> Tensor:
        """Return the rank's rows of a whole tensor."""
        return x.chunk(self.P, self.seq_dim)[rank]

    def style(self, **options: Any) -> ContextParallel:
        kind = ContextParallel if self.head_groups == 1 else AsyncContextParallel
        return kind(
            **{
                "seq_dim": self.seq_dim,
                "head_dim": self.head_dim,
                "ulysses_degree": self.degree,
                "load_balance": self.load_balance,
                **({"head_groups": self.head_groups} if self.head_groups > 1 else {}),
                "balance_hybrid": self.balance_hybrid,
                **options,
            }
        )

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.P,), mesh_dim_names=("cp",))

    def predicted(self, rank: int, **options: Any) -> dict[str, tuple[int, int]]:
        """Return ``{kind: (calls, bytes)}`` of a forward and backward, as the plan says."""
        plan = make_plan(self.P, self.degree, self.load_balance, balance_hybrid=self.balance_hybrid)
        return plan.describe(
            num_heads=self.H,
            num_kv_heads=self.HK,
            seq_len=self.S,
            head_size=self.D,
            v_head_size=self.DV,
            batch=1 if self.layout == "TND" else self.B,
            element_size=self.dtype.itemsize,
            rank=rank,
            head_groups=self.head_groups,
            **options,
        ).totals()


ULYSSES = [Case(P=2), Case(P=3), Case(P=4)]
COLOSSAL = [Case(P=P, degree=1) for P in (2, 3, 4)]
HYBRID = [Case(P=4, degree=2)]
BALANCED = [Case(P=P, degree=1, load_balance=True) for P in (1, 2, 3, 4)]
MODES = [*ULYSSES, *COLOSSAL, *HYBRID, *BALANCED]
"""Every mode on every number of ranks."""
EACH = [Case(P=2), Case(P=2, degree=1), Case(P=4, degree=2), Case(P=2, degree=1, load_balance=True)]
"""Every mode once."""


def reference(
    core: nn.Module,
    tensors: Sequence[Tensor],
    upstream: Tensor,
    call: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return output and gradients of the unsharded module; ``call(core, *leaves)`` runs it."""
    leaves = [_leaf(x) for x in tensors]
    out = core(*leaves) if call is None else call(core, *leaves)
    out.backward(upstream)
    return out.detach(), [x.grad for x in leaves]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


@dataclass
class Sent:
    """What one rank sent; both counters, so that a test may look closer."""

    counted: count_collectives
    by_kind: Mapping[str, tuple[int, int]]


def compare(
    rank: int,
    case: Case,
    core: Callable[[], nn.Module],
    *,
    extra: Sequence[Tensor] = (),
    call: Callable[..., Tensor] | None = None,
    feed: Callable[[Tensor], Tensor] | None = None,
    grad: Callable[[Tensor], Tensor] | None = None,
    upstream: Tensor | None = None,
    mesh: DeviceMesh | None = None,
    applied: nn.Module | None = None,
    check_traffic: bool = True,
    **options: Any,
) -> Sent:
    """Assert output, every gradient and the traffic of ``core()`` under ``case``.

    The gradients of parameters must sum over the ranks to the unsharded one.

    Args:
        rank: CP rank.
        case: Degrees, layout and sizes.
        core: Makes the attention module.
        extra: More tensors of the call, whole on every rank (masks); the gradients of floating ones
            must sum over the ranks to the unsharded one.
        call: ``call(module, q, k, v, *extra)``, if not just that.
        feed: What becomes of a local leaf before it enters (strides).
        grad: What becomes of the local upstream gradient (strides).
        upstream: Gradient of the whole output, if not random.
        mesh: CP mesh, if not a 1-D one.
        applied: A module that the style is on already.
        check_traffic: Whether the traffic must be what the plan says.
        options: More arguments of the style.
    """
    whole = case.qkv()
    up = case.upstream() if upstream is None else upstream
    plain = core()
    expected, grads = reference(plain, [*whole, *extra], up, call)
    module = applied
    if module is None:
        module = core()
        case.style(**options).apply(module, case.mesh() if mesh is None else mesh)
    local = [_leaf(case.local(x, rank)) for x in whole]
    beside = [_leaf(x) for x in extra]
    fed = [x if feed is None else feed(x) for x in local]
    with count_collectives() as counted, traffic() as sent:
        out = module(*fed, *beside) if call is None else call(module, *fed, *beside)
        local_up = case.local(up, rank)
        out.backward(local_up if grad is None else grad(local_up))
    assert type(out) is Tensor, "plain tensors in, plain tensor out"
    assert_close(out, case.local(expected, rank), name="output")
    for name, x, full in zip("qkv", local, grads[:3], strict=True):
        assert full is not None, f"d{name} of the reference"
        assert_close(x.grad, case.local(full, rank), kind="grad", name=f"d{name}")
    shares = {
        f"extra {i}": (x, full) for i, (x, full) in enumerate(zip(beside, grads[3:], strict=True))
    }
    shares |= {
        name: (x, full.grad)
        for (name, x), full in zip(module.named_parameters(), plain.parameters(), strict=True)
    }
    for name, (x, full) in shares.items():
        if full is not None:
            share = torch.zeros_like(x) if x.grad is None else x.grad.clone()
            torch.distributed.all_reduce(share)
            assert_close(share, full, kind="grad", name=f"gradient of {name}")
    by_kind = {k: n for k, n in sent.summary().items() if k != "preflight"}
    if check_traffic:
        seen = {k: (counted.count(k), counted.bytes(k)) for k in counted.summary()}
        sending = ("keep_kv", "kv_chunks", "sliding_window", "sink_tokens")
        predicted = case.predicted(rank, **{n: options[n] for n in sending if n in options})
        assert seen == by_kind == predicted, f"{seen} counted, {by_kind} sent, {predicted} planned"
    return Sent(counted, by_kind)


def compare_under_tensor_parallel(
    rank: int,
    case: Case,
    core: Callable[[], nn.Module],
    tp_size: int,
    *,
    whole: Sequence[Tensor] | None = None,
    on_tp_rank: Callable[[int], nn.Module] | None = None,
    order: tuple[str, str] = ("tp", "cp"),
    **options: Any,
) -> count_collectives:
    """Assert output and gradients where q, k and v are DTensors, their heads cut over another axis.

    Args:
        rank: Rank of ``tp_size * case.P``.
        case: Degrees and sizes of CP.
        core: Makes the attention module.
        tp_size: Over how many ranks heads are cut before they come.
        whole: q, k and v, if they are not those of the case.
        on_tp_rank: Makes the module of a TP rank, where it is not that of all heads.
        order: Axes of the mesh.
        options: More arguments of the style.

    Returns:
        What was sent, forward and backward.
    """
    sizes, head_dim = {"tp": tp_size, "cp": case.P}, case.head_dim
    root = init_device_mesh("cpu", tuple(sizes[name] for name in order), mesh_dim_names=order)
    tp, cp = root.get_local_rank("tp"), root.get_local_rank("cp")

    def cut(x: Tensor) -> Tensor:
        return case.local(x.chunk(tp_size, head_dim)[tp], cp)

    whole = case.qkv() if whole is None else whole
    expected, grads = reference(core(), whole, case.upstream())
    local = [_leaf(cut(x)) for x in whole]
    module = core() if on_tp_rank is None else on_tp_rank(tp)
    case.style(**options).apply(module, root["cp"])
    with count_collectives() as counted:
        fed = (DTensor.from_local(x, root["tp"], [Shard(head_dim)], run_check=False) for x in local)
        out = module(*fed).to_local()
        out.backward(cut(case.upstream()))
    assert_close(out, cut(expected), name="output")
    for name, x, full in zip("qkv", local, grads, strict=True):
        assert full is not None, f"d{name} of the reference"
        assert_close(x.grad, cut(full), kind="grad", name=f"d{name}")
    return counted
