"""Under autocast an operator is the same call on inputs of autocast's dtype, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ._inputs import Case, Inputs, attention_statistics

pytestmark = pytest.mark.usefixtures("operators")

CAST = ("q", "k", "qr", "kr", "qi", "ki")
LEAVES = (*CAST, "w")
COUNT = 4


def rounded(dtype: torch.dtype) -> Inputs:
    """Return inputs in ``dtype`` whose numbers bfloat16 holds; the weights stay float32."""
    x = Case(S=9, S2=9, dtype=torch.float32).inputs()
    for name in CAST:
        setattr(x, name, getattr(x, name).bfloat16().to(dtype))
    x.leaves(*LEAVES)
    return x


def results(x: Inputs, kind: str, statistics: tuple[Tensor, ...]) -> list[Tensor]:
    indices, *of_attention = statistics
    if kind == "indexer":
        return list(x.indexer(COUNT, return_value=True))
    if kind == "attention":
        return list(x.attention(indices))
    if kind == "statistics":
        return list(x.index_lse())
    return [x.sparse(indices, *of_attention) if kind == "sparse" else x.dense(*of_attention)]


def backward(x: Inputs, found: list[Tensor]) -> dict[str, Tensor]:
    total = sum(
        torch.where(y.isfinite(), y.float(), 0.0).square().sum() for y in found if y.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()
    return {n: g for n in LEAVES if (g := getattr(x, n).grad) is not None}


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("kind", ["indexer", "attention", "sparse", "dense", "statistics"])
def test_autocast_is_a_cast_of_the_inputs(kind: str, inside: bool) -> None:
    """Forward, and every gradient, which comes in the dtype of what the caller gave."""
    wide, narrow = rounded(torch.float32), rounded(torch.bfloat16)
    indices = narrow.indexer(COUNT)[0]
    statistics = (
        indices,
        *(attention_statistics(narrow) if kind == "dense" else narrow.attention(indices)[1:]),
    )
    expected = results(narrow, kind, statistics)
    gradients = backward(narrow, expected)

    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with autocast:
        found = results(wide, kind, statistics)
    later: Any = torch.autocast("cpu", dtype=torch.bfloat16) if inside else nullcontext()
    with later:
        of_found = backward(wide, found)

    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert of_found.keys() == gradients.keys()
    assert bool(gradients) == (kind != "statistics")
    for name, grad in of_found.items():
        assert grad.dtype is torch.float32
        assert torch.equal(grad, gradients[name].float()), name


def test_backward_under_autocast_alone_rounds_nothing() -> None:
    """Autocast around backward but not around the call leaves float32 what it is."""
    found = []
    for enabled in (False, True):
        x = rounded(torch.float32)
        indices, values = x.indexer(COUNT, return_value=True)
        out = x.attention(indices)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(backward(x, [values, out]))

    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


def test_a_value_that_is_the_key_stays_the_key_and_float64_stays() -> None:
    """The latent form has one tensor, and one gradient, under autocast too."""
    x = Case(S=5, S2=5).inputs()
    indices = x.indexer(COUNT)[0]
    out, m, z = x.attention(indices)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = x.attention(indices)

    assert all(torch.equal(a, b) for a, b in zip(same, (out, m, z), strict=True))
