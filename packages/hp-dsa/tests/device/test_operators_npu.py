"""torch_npu's sparse attention operators, by way of `hp_dsa.ops`, against float64 on CPU."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_mesh.testing import assert_close, tolerance

from ..unit._inputs import Case, Inputs  # noqa: TID252 - there is no package of tests

pytestmark = [pytest.mark.npu, pytest.mark.device]

DEVICE = "npu"
SIZES: dict[str, Any] = {"heads": 64, "index_heads": 32, "D": 512, "Dr": 64, "DI": 128, "K": 1024}
CASES = [
    Case(S=37, S2=1300, B=2, strided=True, **SIZES),
    Case(S=37, S2=1300, B=1, mode=0, **SIZES),
    Case(S=37, S2=1300, query_lengths=[37, 11], key_lengths=[1300, 1100], **SIZES),
    Case(
        S=53, S2=2700, layout="TND", query_lengths=[20, 20, 53], key_lengths=[1100, 1200, 2700],
        **SIZES,
    ),
]  # fmt: skip
TENSORS = ("q", "k", "qr", "kr", "qi", "ki", "w", "do")
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    importlib.import_module("torch_npu")


def made(case: Case, dtype: torch.dtype) -> tuple[Inputs, Inputs]:
    """Return the same numbers twice: in float64 on CPU, and in ``dtype`` on the device."""
    x = replace(case.inputs(), scale=(case.D + case.Dr) ** -0.5)
    x.w = x.w / (case.index_heads * case.DI) ** 0.5  # as models fold it in
    for name in TENSORS:
        setattr(x, name, getattr(x, name).to(dtype).double())
    there = Inputs(**{field.name: getattr(x, field.name) for field in fields(x)})
    for name in TENSORS:
        setattr(there, name, getattr(x, name).to(DEVICE, dtype))
    return x, there


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_DSA", "reference")


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HP_DSA", raising=False)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, name: str, kind: Any) -> None:
    """Hold what the device computed to float64, by the table's tolerance for ``dtype``."""
    assert_close(actual.to(dtype).cpu(), expected.to(dtype), kind=kind, name=name)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_indexer_finds_the_largest_scores(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that round alike may change places, so values are compared, and how many there are."""
    x, there = made(case, dtype)
    on_cpu(monkeypatch)
    expected, scores = x.indexer(case.K, return_value=True)
    on_device(monkeypatch)
    indices, values = there.indexer(case.K, return_value=True)
    indices, values = indices.cpu(), values.double().cpu()
    assert indices.dtype == torch.int32
    assert torch.equal(indices >= 0, expected >= 0), "as many as are visible, then -1"
    visible = expected >= 0
    sets = zip(indices.flatten(0, -2), visible.flatten(0, -2), strict=True)
    assert all(len(set(row[seen].tolist())) == int(seen.sum()) for row, seen in sets), "once each"
    best, found = (t.where(visible, 0.0).sort(-1, descending=True).values for t in (scores, values))
    close(found, best, dtype, "scores, largest first", "forward")
    # the weakest that was taken is as good as the weakest of float64
    assert (found - best).abs().max() <= tolerance(dtype) * (1 + best.abs().max())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_values_carry_a_gradient_to_the_indexer(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every key selected, no choice can differ: the sum of all scores, three gradients."""
    x, there = made(case, dtype)
    grads = []
    for inputs, use in ((x, on_cpu), (there, on_device)):
        use(monkeypatch)
        leaves = inputs.leaves("qi", "ki", "w")
        indices, values = inputs.indexer(8192, return_value=True)
        values.where(indices >= 0, 0.0).sum().backward()
        grads.append([leaf.grad for leaf in leaves.values()])
    for name, mine, full in zip(("d_query", "d_key", "d_weights"), *grads[::-1], strict=True):
        assert mine is not None and full is not None
        close(mine, full, dtype, name, "grad")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_sparse_attention_equals_float64_on_the_same_keys(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, softmax statistics and the gradients of the latent and both rotary parts."""
    x, there = made(case, dtype)
    on_cpu(monkeypatch)
    indices = x.indexer(case.K)[0]
    results = []
    for inputs, use in ((x, on_cpu), (there, on_device)):
        use(monkeypatch)
        leaves = inputs.leaves("q", "k", "qr", "kr")
        out, maximum, total = inputs.attention(indices.to(inputs.q.device))
        out.backward(inputs.do)
        results.append(([out, maximum, total], [leaf.grad for leaf in leaves.values()]))
    (expected, gradients), (actual, mine) = results
    for name, a, e in zip(("output", "softmax_max", "softmax_sum"), actual, expected, strict=True):
        close(a, e, dtype, name, "forward")
    for name, a, e in zip(("dq", "d_latent", "dq_rope", "dk_rope"), mine, gradients, strict=True):
        assert a is not None and e is not None
        close(a, e, dtype, name, "grad")


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_losses_and_the_indexers_gradients_equal_float64(
    case: Case, dtype: torch.dtype, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over rows; attention's statistics are the reference's for both."""
    x, there = made(case, dtype)
    on_cpu(monkeypatch)
    indices = x.indexer(case.S2 if dense else case.K)[0]
    statistics = x.attention(indices)[1:]
    results = []
    for inputs, use in ((x, on_cpu), (there, on_device)):
        use(monkeypatch)
        leaves = inputs.leaves("qi", "ki", "w")
        wide = torch.float64 if inputs is x else torch.float32
        given = [t.detach().to(inputs.q.device, wide) for t in statistics]
        loss = inputs.dense(*given) if dense else inputs.sparse(indices.to(inputs.q.device), *given)
        loss.sum().backward()
        results.append((loss, [leaf.grad for leaf in leaves.values()]))
    (expected, gradients), (actual, mine) = results
    # a sum over rows: held as a mean, whose size does not grow with their number
    close(actual / case.S, expected / case.S, dtype, "loss per row", "loss")
    for name, a, e in zip(("d_query", "d_key", "d_weights"), mine, gradients, strict=True):
        assert a is not None and e is not None
        close(a, e, dtype, name, "grad")
