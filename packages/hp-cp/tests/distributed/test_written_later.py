"""Writes in place around the boundary: the gradients of one device, or torch's error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_mesh.testing import assert_close, ranks

from ._compare import Case, reference
from ._cores import Eager, Sdpa

COLOSSAL = Case(P=2, degree=1)
MODES: dict[str, tuple[Case, dict[str, Any]]] = {
    "ulysses": (Case(P=2), {}),
    "colossal": (COLOSSAL, {}),
    "keep_kv": (COLOSSAL, {"keep_kv": False}),
    "kv_chunks": (COLOSSAL, {"kv_chunks": 2}),
    "balanced": (COLOSSAL.but(load_balance=True), {}),
    "head_groups": (COLOSSAL.but(head_groups=2), {}),
}
COPIES = {"ulysses": "qkv", "colossal": "kv", "balanced": "kv", "head_groups": "kv"}
"""What is sent, and so attended to in a copy. The others need k and v in backward."""


class Gate(nn.Module):
    """Ops of DTensors save q, k and v as they are handed over, and the output as it is returned."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        return (q * q.sigmoid() * (k * v).sum(1, keepdim=True)).tanh()


def _attend(
    rank: int, case: Case, core: nn.Module, **options: Any
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the leaves, what the module was given, and its output."""
    module = case.style(**options).apply(core, case.mesh())
    leaves = [case.local(x, rank).clone().requires_grad_() for x in case.qkv()]
    given = [x * 1 for x in leaves]
    return leaves, given, module(*given)


def _assert_grads(rank: int, case: Case, core: nn.Module, leaves: list[Tensor]) -> None:
    _, grads = reference(core, case.qkv(), case.upstream())
    for name, x, full in zip("qkv", leaves, grads, strict=True):
        assert full is not None and x.grad is not None
        assert_close(x.grad, case.local(full, rank), kind="grad", name=f"d{name}")


@pytest.mark.parametrize(
    ("core", "mode"),
    [*((Sdpa, mode) for mode in MODES), *((Gate, mode) for mode in COPIES if mode != "balanced")],
)
def test_writing_to_an_input_before_backward_is_an_error_or_changes_nothing(
    core: type[nn.Module], mode: str
) -> None:
    """What was sent is a copy; what was not, as q in Colossal, may have been saved as it was."""
    case, options = MODES[mode]

    def run(rank: int) -> None:
        for which, name in enumerate("qkv"):
            leaves, given, out = _attend(rank, case, core(), **options)
            with torch.no_grad():
                given[which].zero_()
            if name in COPIES.get(mode, ""):
                out.backward(case.local(case.upstream(), rank))
                _assert_grads(rank, case, core(), leaves)
            else:
                with pytest.raises(RuntimeError, match=r"inplace operation|in place"):
                    out.backward(case.local(case.upstream(), rank))

    ranks(2).run(run)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "kv_chunks"])
def test_the_output_may_be_written_to(mode: str) -> None:
    """``out *= 2`` and ``out += 1`` are what they are on one device, whatever was sent back."""
    case, options = MODES[mode]

    def run(rank: int) -> None:
        leaves, _, out = _attend(rank, case, Eager(), **options)
        out *= 2
        out += 1
        expected, _ = reference(Eager(), case.qkv(), case.upstream())
        assert_close(out, case.local(2 * expected + 1, rank))
        out.backward(case.local(case.upstream(), rank) / 2)
        _assert_grads(rank, case, Eager(), leaves)

    ranks(2).run(run)


@pytest.mark.parametrize("core", [Sdpa, Gate])
def test_writing_to_an_output_that_was_saved_is_an_error(core: type[nn.Module]) -> None:
    """Colossal hands out what the module returned; its last op may need it in backward."""

    def run(rank: int) -> None:
        _, _, out = _attend(rank, COLOSSAL, core())
        out *= 2
        with pytest.raises(RuntimeError, match="inplace operation"):
            out.backward(COLOSSAL.local(COLOSSAL.upstream(), rank))

    ranks(2).run(run)
