"""Whatever the sizes, layouts, degrees, strides and dtypes: the unsharded module's numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hp_mesh.checks import divisors
from hp_mesh.testing import ranks

from ._compare import Case, compare
from ._cores import Eager, Sdpa

CALM = settings(
    max_examples=60,
    deadline=None,  # ranks share the cores with whatever else runs
    derandomize=True,  # the same examples on every machine and every day
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any configuration that the plan accepts, on one to four ranks."""
    P = draw(st.integers(1, 4))
    degree = draw(st.sampled_from(divisors(P)))
    load_balance = degree == 1 and draw(st.booleans())
    rows = draw(st.integers(1, 9)) * (2 if load_balance else 1)
    kv_heads = draw(st.integers(1, 4))
    wanted = kv_heads * draw(st.integers(1, 4))
    heads = wanted * degree if wanted % degree else wanted
    layout = draw(st.sampled_from(("BSHD", "BNSD", "SBHD", "TND")))
    return Case(
        P=P,
        degree=degree,
        load_balance=load_balance,
        layout=layout,
        B=1 if layout == "TND" else draw(st.integers(1, 3)),
        S=rows * P,
        H=heads,
        HK=kv_heads,
        D=draw(st.sampled_from((1, 3, 8, 10))),
        DV=draw(st.sampled_from((1, 5, 8))),
        dtype=draw(st.sampled_from(DTYPES)),
    )


def _dense(x: Tensor) -> Tensor:
    return x


def _every_second(x: Tensor) -> Tensor:
    """The same values, with a hole behind each element of the last dim."""
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]


def _turned(x: Tensor) -> Tensor:
    """The same values with the first and last dim swapped in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _repeated(x: Tensor) -> Tensor:
    """Rows that an `expand` repeats keep their zero stride; other tensors stay as they are."""
    return x[:1].expand_as(x) if x.shape[0] == 1 else x


FEEDS: tuple[Callable[[Tensor], Tensor], ...] = (_dense, _every_second, _turned, _repeated)


@CALM
@given(cases(), st.sampled_from((Sdpa, Eager)), st.booleans(), st.sampled_from(FEEDS))
def test_any_configuration_equals_the_unsharded_module(
    case: Case, core: type[nn.Module], causal: bool, feed: Callable[[Tensor], Tensor]
) -> None:
    """Output, gradients of q, k and v, and what the plan says is sent."""

    def build() -> nn.Module:
        return core(case.layout, causal=causal, head_size=case.D)

    ranks(case.P).run(compare, case, build, feed=feed)


@CALM
@given(cases(), st.data())
def test_any_mask_equals_the_unsharded_module(case: Case, data: st.DataObject) -> None:
    """A mask of random pairs in which each row sees a key, of any shape that broadcasts."""
    B = 1 if case.layout == "TND" else case.B
    heads = data.draw(st.sampled_from((1, case.H)))
    batch = data.draw(st.sampled_from((1, B)))
    seed = data.draw(st.integers(0, 99))
    drawn = torch.rand(batch, heads, case.S, case.S, generator=torch.Generator().manual_seed(seed))
    mask = (drawn < 0.6) | torch.eye(case.S, dtype=torch.bool)
    core = data.draw(st.sampled_from((Sdpa, Eager)))

    def build() -> nn.Module:
        return core(case.layout, head_size=case.D)

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module(q, k, v, mask)
        return out

    ranks(case.P).run(compare, case, build, call=call)


@CALM
@given(cases(), st.sampled_from((2, 3, 4)), st.booleans())
def test_any_groups_of_heads_equal_the_unsharded_module(
    case: Case, groups: int, causal: bool
) -> None:
    """Groups that divide the KV heads of a rank, or an error that says so on every rank alike."""
    if case.load_balance:
        case = case.but(load_balance=False)
    degree = case.degree or case.P
    case = case.but(head_groups=groups, H=case.H * groups * degree, HK=case.HK * groups * degree)

    def build() -> nn.Module:
        return Sdpa(case.layout, causal=causal, head_size=case.D)

    ranks(case.P).run(compare, case, build)
