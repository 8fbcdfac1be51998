"""torch.func and forward-mode AD: refused by every rank, never half computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from hp_comm import gather_seq
from hp_cp import init_device_mesh
from hp_mesh.testing import ranks

from ._compare import Case
from ._cores import Eager

Call = Callable[..., Tensor]
CASES = [
    Case(P=2),
    Case(P=2, degree=1),
    Case(P=2, degree=1, load_balance=True),
    Case(head_groups=2),
]


def _dual(call: Call, tensors: Sequence[Tensor]) -> Any:
    """Within a dual level, of which there is one for all threads."""
    return call(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors))


TRANSFORMS: dict[str, Callable[[Call, Sequence[Tensor]], Any]] = {
    "grad": lambda call, xs: torch.func.grad(lambda *x: call(*x).sum())(*xs),
    "vmap": lambda call, xs: torch.vmap(lambda *x: call(*(y[None] for y in x))[0])(*xs),
}
WORDS = "must not be under a transform of torch.func"


first_use = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
"""Torch says so of its own code when forward-mode AD is first used."""


def _module(case: Case, core: nn.Module) -> nn.Module:
    return case.style().apply(core, case.mesh())


@first_use
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_transform_is_refused_by_name(case: Case) -> None:
    """A tangent would end at the exchange: the output would come without one, and no error."""

    def run(rank: int) -> None:
        module = _module(case, Eager())
        tensors = [case.local(x, rank) for x in case.qkv()]
        for transform in transforms:
            with pytest.raises(ValueError, match=WORDS):
                transform(module, tensors)
        module(*tensors)  # and goes on

    with forward_ad.dual_level():  # loads what forward AD needs, once and not on two threads
        forward_ad.make_dual(torch.ones(1), torch.ones(1))
    transforms = list(TRANSFORMS.values())
    ranks(2).run(run)
    transforms = [_dual]
    with forward_ad.dual_level():
        ranks(2).run(run)


def test_a_primitive_refuses_them_too() -> None:
    """As ``gather_seq``, sync and async."""

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        for overlap in (False, True):
            call = functools.partial(
                gather_seq, group=mesh.get_group(), seq_dim=0, async_op=overlap
            )
            with pytest.raises(ValueError, match=WORDS):
                torch.vmap(call)(torch.ones(2, 3, 2))

    ranks(2).run(run)
