"""The lightning indexer on inputs whose result is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hp_dsa.ops import lightning_indexer
from hp_mesh.testing import assert_close

from ._inputs import Inputs, base

pytestmark = pytest.mark.usefixtures("operators")


def one_row(q: list[list[float]], k: list[list[float]], w: list[float]) -> dict[str, Tensor]:
    return {
        "query": torch.tensor([[q]], dtype=torch.float64),
        "key": torch.tensor([k], dtype=torch.float64)[:, :, None],
        "weights": torch.tensor([[w]], dtype=torch.float64),
    }


def columns(indices: Tensor) -> list[list[int]]:
    return indices.reshape(-1, indices.shape[-1]).tolist()


@pytest.mark.parametrize(
    ("w", "scores", "best"),
    [([1.0, 2.0], [4.0, 6.0, 0.5], [1, 0]), ([1.0, -1.0], [1.0, -3.0, 0.5], [0, 2])],
    ids=["case 1", "case 2"],
)
def test_scores_are_weighted_sums_of_relus(
    w: list[float], scores: list[float], best: list[int]
) -> None:
    """Cases 1 and 2: a negative weight is allowed; without relu key 2 would win case 2."""
    call = one_row([[1.0, 0.0], [0.0, 1.0]], [[2.0, 1.0], [-1.0, 3.0], [0.5, -4.0]], w)

    indices, values = lightning_indexer(**call, sparse_count=2, return_value=True)

    assert columns(indices) == [best]
    assert indices.dtype is torch.int32
    assert values.flatten().tolist() == [scores[i] for i in best]


def test_rows_with_few_visible_keys_end_in_minus_one() -> None:
    """Case 3."""
    indices, values = base(4).indexer(3, return_value=True)

    assert columns(indices) == [[0, -1, -1], [0, 1, -1], [2, 1, 0], [3, 2, 1]]
    expected = [[0.5232], [-0.2199, -0.2588], [-0.0714, -0.0807, -0.09], [0.5195, 0.4731, 0.4267]]
    for row, known in zip(values[0, :, 0].tolist(), expected, strict=True):
        assert row[: len(known)] == pytest.approx(known, abs=5e-5)
        assert row[len(known) :] == [-math.inf] * (3 - len(known))


@pytest.mark.parametrize(
    ("mode", "Lq", "Lk", "visible"),
    [(3, 2, 5, [4, 5]), (3, 5, 2, [0, 0, 0, 1, 2]), (0, 2, 5, [5, 5])],
)
def test_the_last_query_sees_the_last_key(mode: int, Lq: int, Lk: int, visible: list[int]) -> None:
    """Case 4."""
    indices, _ = base(Lq, Lk, mode=mode).indexer(7)

    assert (indices >= 0).sum(-1).flatten().tolist() == visible


def test_without_causality_every_row_chooses_among_all_keys() -> None:
    """Case 6."""
    assert columns(base(4, mode=0).indexer(2)[0]) == [[0, 1], [0, 1], [3, 2], [3, 2]]
    assert columns(base(4).indexer(2)[0]) == [[0, -1], [0, 1], [2, 1], [3, 2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_scores_go_to_the_lowest_positions(dtype: torch.dtype) -> None:
    """Case 7: dots that are all negative leave a plateau of exact zeros."""
    q, k, w = -torch.ones(1, 6, 1, 4), torch.ones(1, 6, 1, 4), torch.ones(1, 6, 1)

    indices, values = lightning_indexer(
        q.to(dtype), k.to(dtype), w.to(dtype), sparse_count=3, return_value=True
    )

    assert columns(indices) == [[0, -1, -1], [0, 1, -1], *[[0, 1, 2]] * 4]
    assert values[indices >= 0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_negative_scores_beat_padding_and_minus_zero_is_zero(dtype: torch.dtype) -> None:
    """Case 8."""
    q = torch.ones(1, 3, 1, 1, dtype=dtype)
    k = torch.tensor([2.0, -1.0, 1.0], dtype=dtype).view(1, 3, 1, 1)

    indices, values = lightning_indexer(
        q, k, -torch.ones(1, 3, 1, dtype=dtype), sparse_count=4, return_value=True
    )

    assert columns(indices) == [[0, -1, -1, -1], [1, 0, -1, -1], [1, 2, 0, -1]]
    assert values[0, 2, 0].tolist() == [0.0, -1.0, -2.0, -math.inf]
    assert not values[values == 0].signbit().any()


def test_minus_zero_ties_with_zero() -> None:
    """A weight of 0 times a positive dot is 0.0, a negative weight times nothing is -0.0."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([-1.0, 0.0, -2.0, -0.0]).view(1, 4, 1, 1)

    for weight in (-1.0, 1.0):
        indices, _ = lightning_indexer(q, k, torch.full((1, 1, 1), weight), sparse_count=3)
        assert columns(indices) == [[0, 1, 2]]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_documents_of_a_packed_stream_count_from_their_own_start(as_tensor: bool) -> None:
    """Case 9: lengths as a list or as an int32 tensor."""
    ends = torch.tensor([3, 8], dtype=torch.int32) if as_tensor else [3, 8]
    x = base(8, layout="TND", query_lengths=ends, key_lengths=ends)

    indices, _ = x.indexer(2)

    assert indices.shape == (8, 1, 2)
    assert columns(indices) == [
        [0, -1], [0, 1], [2, 1], [0, -1], [0, 1], [0, 1], [3, 2], [2, 1],
    ]  # fmt: skip


CASE_10 = [
    [0, -1, -1], [0, 1, -1], [2, 1, 0], [3, 2, 1], [0, 1, 2], [0, 1, 2], [6, 5, 0], [5, 4, 3],
]  # fmt: skip


def half(x: Inputs, rank: int, keys: slice) -> Inputs:
    own = slice(4 * rank, 4 * rank + 4)
    return Inputs(
        *(t[:, own] if n[0] in "qwd" else t[:, keys] for n, t in list(vars(x).items())[:8])
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_with_the_causal_prefix_of_keys_selects_as_the_whole(rank: int) -> None:
    """Case 10."""
    x = base(8)
    assert columns(x.indexer(3)[0]) == CASE_10

    indices, _ = half(x, rank, slice(0, 4 * rank + 4)).indexer(3)

    assert columns(indices) == CASE_10[4 * rank : 4 * rank + 4]


def test_keys_that_are_not_cut_are_the_callers_mistake() -> None:
    """Case 10b: what comes out of wrong windows, so that a style's test can tell it apart."""
    x = base(8)

    uncut, _ = half(x, 0, slice(0, 8)).indexer(3)
    local_only, _ = half(x, 1, slice(4, 8)).indexer(3)

    assert columns(uncut) == [[0, 1, 2], [0, 1, 2], [6, 5, 4], [4, 3, 2]]
    assert columns(local_only) == [[0, -1, -1], [0, 1, -1], [2, 1, 0], [1, 0, 2]]


def test_valid_lengths_of_a_batch_hide_the_padding() -> None:
    x = base(5)
    x = Inputs(*(torch.cat([t, t.flip(1)]) for t in list(vars(x).values())[:8]))
    x.query_lengths, x.key_lengths = [3, 5], torch.tensor([4, 2])
    x.ki[0, 4:] = math.nan
    x.qi[0, 3:] = math.nan

    indices, _ = x.indexer(6)

    assert (indices >= 0).sum(-1)[..., 0].tolist() == [[2, 3, 4, 0, 0], [0, 0, 0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_scores_count_as_the_largest(dtype: torch.dtype, sign: float) -> None:
    """A NaN is selected, and seen in the values, rather than hidden behind the others."""
    q = torch.ones(1, 1, 1, 1, dtype=dtype)
    k = torch.tensor([5.0, 1.0, math.inf, 0.0], dtype=dtype).view(1, 4, 1, 1)
    k[0, 1] = math.copysign(math.nan, sign)

    indices, values = lightning_indexer(
        q, k, torch.ones(1, 1, 1, dtype=dtype), sparse_count=3, sparse_mode=0, return_value=True
    )

    assert columns(indices) == [[1, 2, 0]]
    assert values.flatten()[0].isnan() and values.flatten()[1:].tolist() == [math.inf, 5.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_visible_keys_of_score_minus_infinity_are_selected(dtype: torch.dtype) -> None:
    """Validity is a count of visible keys, never a look at the value."""
    q, w = torch.ones(1, 2, 1, 1, dtype=dtype), -torch.ones(1, 2, 1, dtype=dtype)
    k = torch.tensor([math.inf, 1.0], dtype=dtype).view(1, 2, 1, 1)

    indices, _ = lightning_indexer(q, k, w, sparse_count=3)

    assert columns(indices) == [[0, -1, -1], [1, 0, -1]]


def test_values_come_only_when_asked_for_and_carry_the_only_gradient() -> None:
    x = base(4)
    x.leaves("qi", "ki", "w")

    indices, nothing = x.indexer(2)
    _, values = x.indexer(2, return_value=True)

    assert nothing.shape == (0,) and not nothing.requires_grad
    assert values.requires_grad and not indices.requires_grad
    values.where(indices >= 0, 0.0).sum().backward()
    assert_close(x.w.grad is not None, True)


def test_low_precision_is_scored_in_float32() -> None:
    """Selection follows float32 sums, the values come back in the query's dtype."""
    x = base(8)
    half_inputs = [t.to(torch.bfloat16) for t in (x.qi, x.ki, x.w)]

    indices, values = lightning_indexer(*half_inputs, sparse_count=3, return_value=True)
    precise = lightning_indexer(*(t.float() for t in half_inputs), sparse_count=3)[0]

    assert torch.equal(indices, precise) and values.dtype is torch.bfloat16
