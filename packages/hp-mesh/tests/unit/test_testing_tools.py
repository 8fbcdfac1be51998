"""Tolerances, seeded data, poisoned buffers and the peak-memory tool."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hp_mesh.testing as tools
from hp_mesh.testing import (
    TOLERANCES,
    assert_close,
    largest_allocation,
    peak_memory,
    poison_empty,
    randn,
    tolerance,
)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_the_tolerance_is_that_of_the_dtype_and_kind(dtype: torch.dtype) -> None:
    one = torch.ones(3, dtype=torch.float64)
    for kind in ("forward", "grad", "loss"):
        tol = tolerance(dtype, kind)
        near, far = one * (1 + tol), one * (1 + 3 * tol + 2 * torch.finfo(dtype).eps)
        assert_close(near.to(dtype), one.to(dtype), kind=kind)
        with pytest.raises(AssertionError, match=f"{kind}, tolerance"):
            assert_close(far.to(dtype), one.to(dtype), kind=kind)


def test_the_promise_in_double_precision() -> None:
    assert tolerance(torch.float64, "forward") == 1e-9
    assert tolerance(torch.float64, "grad") == 1e-8
    assert tolerance(torch.int64) == 0.0


def test_structures_are_compared_entry_by_entry_with_their_names() -> None:
    x = randn(2, 3)
    assert_close({"a": (x, [x])}, {"a": (x, [x])})
    with pytest.raises(AssertionError, match=r"grads\['a'\]\[1\]: "):
        assert_close({"a": (x, x + 1)}, {"a": (x, x)}, name="grads")
    with pytest.raises(AssertionError, match="keys"):
        assert_close({"a": x}, {"b": x})
    with pytest.raises(AssertionError, match="1 entries, not 2"):
        assert_close([x], [x, x])


def test_a_missing_gradient_another_shape_or_dtype_or_a_nan_is_seen() -> None:
    x = randn(2, 3)
    assert_close(None, None)
    nan = x.clone()
    nan[0, 0] = float("nan")
    assert_close(nan, nan)
    for wrong in (None, x[:1], x.float(), nan):
        with pytest.raises(AssertionError):
            assert_close(wrong, x)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1]), torch.tensor([2]))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="must have an entry in TOLERANCES"):
        assert_close(randn(2), randn(2), kind="loose")  # type: ignore[arg-type]


def test_data_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = randn(2, 3, seed=5)
    torch.manual_seed(2)

    assert torch.equal(first, randn(2, 3, seed=5))
    assert not torch.equal(first, randn(2, 3, seed=6))
    assert randn(2, dtype=torch.bfloat16, requires_grad=True).requires_grad
    assert torch.equal(randn(4, seed=1, dtype=torch.float32), randn(4, seed=1).float())


def test_uninitialised_memory_is_nan_inside_and_untouched_outside() -> None:
    like = torch.zeros(3)
    empty, empty_like = torch.empty, torch.empty_like
    with poison_empty(), poison_empty():
        made = [
            torch.empty(3),
            torch.empty(2, 3, dtype=torch.bfloat16),
            torch.empty_like(like),
            torch.empty_strided((2, 3), (3, 1)),
            like.new_empty(3),
            like.new_empty_strided((3,), (1,)),
        ]
        assert all(bool(x.isnan().all()) for x in made)
        assert bool((torch.empty(3, dtype=torch.int64) == torch.iinfo(torch.int64).max).all())
        assert torch.empty(3, dtype=torch.bool).shape == (3,)
    assert torch.empty is empty and torch.empty_like is empty_like
    assert "new_empty" not in torch.Tensor.__dict__


def test_poison_reaches_custom_operators_and_other_threads() -> None:
    @torch.library.custom_op("hp_mesh_test::forgetful", mutates_args=())
    def forgetful(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    seen: list[bool] = []
    with poison_empty():
        assert bool(forgetful(torch.zeros(3)).isnan().all())
        thread = threading.Thread(target=lambda: seen.append(bool(torch.empty(3).isnan().all())))
        thread.start()
        thread.join()
    assert seen == [True]


def test_the_peak_is_what_lived_at_one_time() -> None:
    x = torch.zeros(1000, dtype=torch.float64)
    with peak_memory() as memory:
        a = x + 1
        del a
        b = x + 2
        view = b[10:].view(-1)
        x.add_(1)
    assert memory.peak == memory.live == memory.largest == 8000
    assert "add" in memory.largest_op
    del b, view
    assert memory.live == 0


def test_a_view_of_what_was_there_before_costs_nothing() -> None:
    x = torch.zeros(1000)
    with peak_memory() as memory:
        y = x[3:].view(-1).expand(5, -1)
    assert memory.peak == 0 and y.shape == (5, 997)


def test_backward_and_recomputation_are_measured_too() -> None:
    x = randn(300, requires_grad=True)

    def square(y: torch.Tensor) -> torch.Tensor:
        return torch.outer(y, y).sum()

    with largest_allocation() as memory:
        checkpoint(square, x, use_reentrant=False).backward()  # type: ignore[no-untyped-call]
    assert memory.largest == 300 * 300 * 8


def test_buffers_inside_a_custom_operator_are_seen() -> None:
    @torch.library.custom_op("hp_mesh_test::wasteful", mutates_args=())
    def wasteful(x: torch.Tensor) -> torch.Tensor:
        return torch.outer(x, x).sum(0)

    with peak_memory() as memory:
        out = wasteful(randn(50))
    assert memory.largest == 50 * 50 * 8
    assert memory.live == out.untyped_storage().nbytes() == 50 * 8


def test_it_tells_attention_that_makes_the_scores_from_one_that_does_not() -> None:
    S = 256
    q, k, v = (randn(1, 1, S, 8, seed=s, dtype=torch.float32) for s in range(3))
    with largest_allocation() as eager:
        (q @ k.transpose(2, 3)).softmax(-1) @ v
    with largest_allocation() as fused:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert eager.largest == S * S * 4
    assert fused.largest < S * S * 4 // 4


def test_public_names_resolve_and_others_do_not() -> None:
    for name in tools.__all__:
        assert getattr(tools, name) is not None
    assert dir(tools) == sorted(tools.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tools.nothing  # noqa: B018 - the access is the test
