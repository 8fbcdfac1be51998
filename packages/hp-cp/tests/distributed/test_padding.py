"""Padded batches: masks over keys and over queries and keys, and rows that see no key at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_mesh.testing import randn, ranks

from ._compare import EACH, Case, compare, reference
from ._cores import Sdpa

S, LENGTHS = 24, (24, 9)
FIRST = torch.tensor([True, False]).view(2, 1, 1, 1)
CASES = [
    *EACH,
    Case(P=3, degree=1, load_balance=True),
    Case(P=4, degree=2, balance_hybrid=True),
]


def _real(side: str) -> Tensor:
    """Return ``[B, S]``, True for what is a token; the second sequence is mostly padding."""
    keys = torch.arange(S)
    rows = [keys < n if side == "right" else keys >= S - n for n in LENGTHS]
    return torch.stack(rows)


def _causal(real: Tensor) -> Tensor:
    return real[:, None, None, :] & torch.ones(S, S, dtype=torch.bool).tril()


def _bias(visible: Tensor, least: float) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return torch.where(visible, zero, torch.full_like(zero, least))


MASKS: dict[str, Callable[[], Tensor]] = {
    "keys-right": lambda: _real("right")[:, None, None, :],
    "keys-left": lambda: _real("left")[:, None, None, :],
    "causal-right": lambda: _causal(_real("right")),
    "causal-left": lambda: _causal(_real("left")),  # rows before the first token see nothing
    "queries-too": lambda: _causal(_real("right")) & _real("right")[:, None, :, None],
    "a-sequence-of-padding": lambda: _real("right")[:, None, None, :] & FIRST,
    "queries-alone": lambda: _real("left")[:, None, :, None],
    "float-infinite": lambda: _bias(_causal(_real("left")), -torch.inf),
    "float-smallest": lambda: _bias(_causal(_real("left")), torch.finfo(torch.float64).min),
    "per-head": lambda: _causal(_real("left")) & (randn(2, 12, 1, S, seed=3) > -1.0),
}  # fmt: skip
EMPTY = {"causal-left", "queries-too", "a-sequence-of-padding", "queries-alone", "float-infinite"}


def _masked(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    return module(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_masks_give_what_one_device_gives(case: Case, mask: str) -> None:
    """Output and every gradient, that of a floating mask too; never a NaN."""
    extra = [MASKS[mask]()]
    out, grads = reference(Sdpa(), [*case.qkv(), *extra], case.upstream(), _masked)
    assert all(x is None or bool(x.isfinite().all()) for x in [out, *grads])
    if mask in EMPTY:
        assert bool((out[1].flatten(1) == 0).all(-1).any()), "a row of zeros to compare with"
    ranks(case.P).run(compare, case, Sdpa, extra=extra, call=_masked)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_padding_mask_of_two_dims_is_widened_in_the_core(case: Case) -> None:
    """``[B, S]`` as a tokenizer gives it: the core adds the dims of heads and rows itself."""

    class Padded(Sdpa):
        def forward(self, query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
            visible = attn_mask.bool()[:, None, None, :]
            return super().forward(query, key, value, visible)

    extra = [_real("left").long()]
    ranks(case.P).run(compare, case, Padded, extra=extra, call=_masked)
