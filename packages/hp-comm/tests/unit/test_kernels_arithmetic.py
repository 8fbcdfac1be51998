from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hp_comm.kernels import HeadWork, arithmetic, merge, pack, pack_heads, unpack_heads
from hp_comm.kernels.ops_heads import check_work
from hp_mesh.testing import assert_close, randn

CUT = ([2, 2], [2, 1, 1, 1], [0, 1, 2, 0, 0])  # 3 query heads on 2 ranks; one KV head on both


def _work(size: int, rotary: int, *, interleaved: bool = False, norm: bool = True) -> HeadWork:
    angle = randn(2, 5, 1, rotary // 2, seed=8) if rotary else None
    return HeadWork(
        randn(size, seed=9) if norm else None,
        1e-5,
        None if angle is None else angle.cos(),
        None if angle is None else angle.sin(),
        interleaved,
    )


def test_prepare_is_the_models_norm_and_rotary() -> None:
    """As transformers' Qwen3 does it: RMS norm of each head, then rotate_half."""
    x, work = randn(2, 5, 3, 8), _work(8, 8)
    assert work.weight is not None and work.cos is not None and work.sin is not None
    y = work.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    half = torch.cat([-y[..., 4:], y[..., :4]], -1)
    expected = y * torch.cat([work.cos] * 2, -1) + half * torch.cat([work.sin] * 2, -1)

    assert_close(arithmetic.prepare(x, work), expected)


def test_interleaved_pairs_are_neighbours_and_the_rest_is_not_rotated() -> None:
    """A complex number per pair, multiplied with exp(i angle); what is beyond R stays."""
    x, work = randn(2, 5, 3, 10), _work(10, 6, interleaved=True, norm=False)
    assert work.cos is not None and work.sin is not None
    turned = torch.view_as_complex(x[..., :6].reshape(2, 5, 3, 3, 2)) * torch.complex(
        work.cos, work.sin
    )
    expected = torch.cat([torch.view_as_real(turned).flatten(-2), x[..., 6:]], -1)

    assert_close(arithmetic.prepare(x, work), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary", "norm"), [(8, True), (6, True), (6, False), (0, True)])
def test_the_gradient_of_packed_heads_is_exact(rotary: int, norm: bool, interleaved: bool) -> None:
    """Of every tensor and of the weight, by autograd through the operator: torch's gradcheck."""
    q, k = randn(2, 5, 3, 8), randn(2, 5, 1, 8, seed=1)
    work = _work(8, rotary, interleaved=interleaved, norm=norm)
    given = [q.requires_grad_(), k.requires_grad_()]
    if work.weight is not None:
        given.append(work.weight.requires_grad_())

    def packed(q: Tensor, k: Tensor, weight: Tensor | None = None) -> Tensor:
        own = HeadWork(weight, 1e-5, work.cos, work.sin, interleaved)
        return pack_heads([q, k], [own, own], *CUT, (), 1)

    assert torch.autograd.gradcheck(packed, given)


def test_a_tensor_without_work_is_moved_bit_for_bit() -> None:
    """V is packed beside a prepared K, and its gradient is unpacked beside K's."""
    k, v = randn(2, 5, 2, 8), randn(2, 5, 2, 6, seed=1)
    works = [_work(8, 8), None]
    cut = ([2, 2], [1, 1, 1, 1], [], (), 1)

    buffer = pack_heads([k, v], works, *cut)
    parts = buffer.view(2, -1)

    assert torch.equal(parts[:, 2 * 5 * 8 :].view(2, 2, 5, 6), v.permute(2, 0, 1, 3))
    shapes = [list(k.shape), list(v.shape)]
    grads, weights = unpack_heads(buffer, [k, None], works, shapes, *cut)
    assert torch.equal(grads[1], v)
    assert weights[1] is None and weights[0] is not None and weights[0].shape == (8,)


def test_merged_partials_are_the_whole_attention_and_differentiate_exactly() -> None:
    """Over keys in two parts, log-sum-exps included; a row without keys stays zero."""
    scores, values = randn(2, 3, 5, 9), randn(2, 3, 9, 4, seed=1)

    def part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return scores.softmax(-1) @ values, scores.logsumexp(-1)

    parts = [*part(scores[..., :4], values[..., :4, :]), *part(scores[..., 4:], values[..., 4:, :])]
    for actual, expected in zip(merge(*parts), part(scores, values), strict=True):
        assert_close(actual, expected)
    assert torch.autograd.gradcheck(merge, [p.requires_grad_() for p in parts])

    zero, nothing = torch.zeros(1, 2), torch.full((1,), -torch.inf)
    out, lse = merge(zero, nothing, zero, nothing)
    assert not out.any() and lse.item() == -torch.inf
    one = torch.ones(1, 2)
    out, lse = merge(one, torch.zeros(1), zero, nothing)
    assert torch.equal(out, one) and lse.item() == 0


def test_the_operators_hold_what_torch_asks_of_them() -> None:
    """Schema, fake implementation and autograd registration, by torch.library.opcheck."""
    q, work = randn(2, 5, 3, 8).requires_grad_(), _work(8, 6)
    none = torch.empty(0, dtype=torch.float64)
    assert work.weight is not None and work.cos is not None and work.sin is not None
    args = ([q], [work.weight], [1e-5], [1], [work.cos], [work.sin], [2], [2, 1], [], [], 1)
    torch.library.opcheck(torch.ops.hp_comm.pack_heads.default, args)
    torch.library.opcheck(
        torch.ops.hp_comm.pack_heads.default,
        ([q], [none], [1e-5], [0], [none], [none], [2], [2, 1], [], [1, 2], 1),
    )
    parts = (randn(2, 3, 4), randn(2, 3, seed=1), randn(2, 3, 4, seed=2), randn(2, 3, seed=3))
    given = tuple(p.requires_grad_() for p in parts)
    torch.library.opcheck(torch.ops.hp_comm.merge.default, given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.ones(7)}, r"weight \(7,\) must be of the size of a head \(8,\)"),
        (
            {"weight": torch.ones(8, device="meta")},
            r"weight \(on meta\) must be on the device of x",
        ),
        ({"cos": torch.ones(5, 4), "sin": torch.ones(5, 4)}, r"for example cos.unsqueeze\(2\)"),
        ({"cos": torch.ones(1, 6, 1, 4), "sin": torch.ones(1, 6, 1, 4)}, "must have the dims of x"),
        (
            {"cos": torch.ones(1, 5, 1, 8), "sin": torch.ones(1, 5, 1, 8)},
            r"8 pairs\) must rotate at most a head .* half of a table that repeats them",
        ),
        ({"cos": torch.ones(1, 5, 1, 4).requires_grad_()}, "must need no gradient; detach"),
    ],
)
def test_work_that_does_not_fit_is_refused(change: dict[str, Tensor | None], words: str) -> None:
    """Before anything is packed, with what was given and what is wanted."""
    fields = {"weight": None, "cos": torch.ones(1, 5, 1, 4), "sin": torch.ones(1, 5, 1, 4)}
    with pytest.raises(ValueError, match=f"^here: .*{words}"):
        check_work("here", torch.ones(2, 5, 3, 8), HeadWork(**{**fields, **change}), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cos": torch.ones(1, 5, 1, 4)}, "cos and sin must come together"),
        ({"cos": torch.ones(4), "sin": torch.ones(3)}, r"cos \(4,\) must be of the shape of sin"),
        ({"weight": torch.ones(3, 8)}, r"weight \(3, 8\) must be \[D\]"),
        ({"weight": "a"}, r"weight \(str\) must be a tensor or None"),
        ({"eps": -1.0}, r"eps \(-1.0\) must be a number of at least 0"),
        ({"eps": None}, r"eps \(None\) must be a number"),
        (
            {"cos": torch.ones(4, dtype=torch.complex64), "sin": torch.ones(4)},
            "real floating dtype; of complex angles",
        ),
    ],
)
def test_work_that_cannot_be_meant_is_refused_where_it_is_made(
    fields: dict[str, object], words: str
) -> None:
    """On one device as under a style: a model is not wrong until it is sharded."""
    with pytest.raises((ValueError, TypeError), match=f"^HeadWork: .*{words}"):
        HeadWork(**fields)  # type: ignore[arg-type]


def test_merge_of_transposed_tensors_is_what_its_fake_says() -> None:
    """A view from another layout under torch.compile: strides as promised."""
    parts = (randn(2, 4, 3, 5), randn(2, 4, 3, seed=1), randn(2, 4, 3, 5, seed=2), randn(2, 4, 3))
    given = tuple(x.transpose(1, 2).requires_grad_() for x in parts)
    torch.library.opcheck(torch.ops.hp_comm.merge.default, given)


def test_calls_that_do_not_fit_are_refused_by_name() -> None:
    x, lse = torch.ones(2, 6, 4, 8), torch.ones(2, 6, 4)
    cut: tuple[Any, ...] = ([2], [2, 2], [], (), 1)
    with pytest.raises(ValueError, match=r"works \(1\) must be one, or None, per tensor"):
        pack_heads([x, x], [None], *cut)
    with pytest.raises(ValueError, match=r"pack_heads: xs \(empty\) must hold a tensor"):
        pack_heads([], [], *cut)
    with pytest.raises(ValueError, match=r"pack: xs \(empty\) must hold a tensor"):
        pack([], [], [], [])
    with pytest.raises(ValueError, match=r"out2 \(torch.int32\) must be of a floating dtype"):
        merge(x, lse, x.int(), lse)
