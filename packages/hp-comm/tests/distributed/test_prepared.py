"""seq_to_head with QK-norm and rotary inside the pack: the numbers of doing them before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_comm import HeadWork, seq_to_head, traffic
from hp_mesh.testing import assert_close, randn, ranks

CASES = {
    # ranks, layout, heads of q and of k and v, rotated numbers, interleaved
    "BSHD": (2, "BSHD", 6, 2, 8, False),
    "BNSD-partial": (2, "BNSD", 4, 4, 6, False),
    "TND-interleaved": (3, "TND", 6, 3, 6, True),
    "KV-heads-repeated": (4, "BSHD", 8, 2, 8, False),
    "norm-only": (2, "BSHD", 4, 2, 0, False),
}


def _lay(x: Tensor, layout: str) -> Tensor:
    return {"BSHD": x, "BNSD": x.transpose(1, 2), "TND": x[0]}[layout]


def _dims(layout: str) -> tuple[int, int]:
    return {"BSHD": (1, 2), "BNSD": (2, 1), "TND": (0, 1)}[layout]


def _before(x: Tensor, work: HeadWork) -> Tensor:
    """Norm and rotary written out, on the whole sequence."""
    if work.weight is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + work.eps) * work.weight
    if work.cos is None or work.sin is None:
        return x
    R = work.rotary
    a, b = (x[..., :R:2], x[..., 1:R:2]) if work.interleaved else x[..., :R].chunk(2, -1)
    turned = [a * work.cos - b * work.sin, b * work.cos + a * work.sin]
    joined = torch.stack(turned, -1).flatten(-2) if work.interleaved else torch.cat(turned, -1)
    return torch.cat([joined, x[..., R:]], -1)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CASES)
def test_prepared_heads_arrive_as_if_prepared_before(name: str, async_op: bool) -> None:
    """Outputs, the gradients of q, k, v, both weights; one all-to-all each way, no byte more."""
    P, layout, H, Hkv, R, interleaved = CASES[name]
    S, D = 5 * P, 8
    s, h = _dims(layout)
    whole = [_lay(randn(2, S, n, D, seed=i), layout) for i, n in enumerate((H, Hkv, Hkv))]
    angle = _lay(randn(1, S, 1, R // 2, seed=7), layout) if R else None
    weights = [randn(D, seed=8), randn(D, seed=9)]

    def work(weight: Tensor, rows: Tensor | None) -> HeadWork:
        cos, sin = (None, None) if rows is None else (rows.cos(), rows.sin())
        return HeadWork(weight, 1e-5, cos, sin, interleaved)

    per = H // P
    kv = [sorted({n * Hkv // H for n in range(p * per, (p + 1) * per)}) for p in range(P)]
    heads = [[list(range(p * per, (p + 1) * per)) for p in range(P)], kv, kv]
    leaves = [x.clone().requires_grad_() for x in (*whole, *weights)]
    expected = [
        _before(leaves[0], work(leaves[3], angle)),
        _before(leaves[1], work(leaves[4], angle)),
        leaves[2],
    ]

    def on(rank: int) -> list[Tensor]:
        mine = [x.chunk(P, s)[rank].clone().requires_grad_() for x in whole]
        scale = [w.clone().requires_grad_() for w in weights]
        rows = None if angle is None else angle.chunk(P, s)[rank]
        works = [work(scale[0], rows), work(scale[1], rows), None]
        with traffic() as sent:
            got = seq_to_head(
                mine, dist.group.WORLD, seq_dim=s, head_dim=h, heads=heads, work=works,
                async_op=async_op,
            )  # fmt: skip
            got = got.wait() if async_op else got
            for one, whole_one, table in zip(got, expected, heads, strict=True):
                assert_close(one, whole_one.index_select(h, torch.tensor(table[rank])))
            sum((one * (one.detach() + 1)).sum() for one in got).backward()
        assert sent.count("all_to_all") == 2
        elements = sum(x[0:].numel() for x in got) - sum(x.numel() for x in got) // P
        assert sent.bytes("all_to_all") == 2 * 8 * elements
        return [x.grad for x in (*mine, *scale)]

    loss = torch.zeros((), dtype=torch.float64)
    for one, table in zip(expected, heads, strict=True):
        for of_rank in table:
            part = one.index_select(h, torch.tensor(of_rank))
            loss = loss + (part * (part.detach() + 1)).sum()
    wanted = torch.autograd.grad(loss, leaves)

    found = ranks(P).run(on)
    for i in range(3):
        assert_close(torch.cat([of_rank[i] for of_rank in found], s), wanted[i], kind="grad")
    for i in (3, 4):
        assert_close(sum(of_rank[i] for of_rank in found), wanted[i], kind="grad")


def test_a_weight_alone_may_want_a_gradient() -> None:
    """A frozen projection in front of a trained norm, and the other way round."""
    x, w = randn(1, 8, 4, 6), randn(6, seed=1)

    def on(rank: int) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        grads: list[Tensor | None] = []
        for trains_x in (False, True):
            mine = x.chunk(2, 1)[rank].clone().requires_grad_(trains_x)
            weight = w.clone().requires_grad_(not trains_x)
            y = seq_to_head(mine, dist.group.WORLD, seq_dim=1, head_dim=2, work=HeadWork(weight))
            y.square().sum().backward()
            grads += [mine.grad, weight.grad]
        return tuple(grads)

    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    _before(leaf, HeadWork(weight)).square().sum().backward()
    found = ranks(2).run(on)
    assert all(one[0] is None and one[3] is None for one in found)
    assert_close(sum(one[1] for one in found), weight.grad, kind="grad")
    assert_close(torch.cat([one[2] for one in found], 1), leaf.grad, kind="grad")


def test_two_are_in_flight_and_recomputed_under_checkpointing() -> None:
    """What a norm keeps goes through saved tensors, so a checkpoint frees and recomputes it."""
    x, w = randn(1, 8, 4, 6), randn(6, seed=1)

    def on(rank: int) -> tuple[Tensor, Tensor]:
        mine = x.chunk(2, 1)[rank].clone().requires_grad_()
        weight = w.clone().requires_grad_()

        def block(t: Tensor) -> Tensor:
            handles = [
                seq_to_head(
                    t * n, dist.group.WORLD, seq_dim=1, head_dim=2, work=HeadWork(weight),
                    async_op=True,
                )
                for n in (1, 2)
            ]  # fmt: skip
            return sum(handle.wait().square() for handle in handles)

        torch.utils.checkpoint.checkpoint(block, mine, use_reentrant=False).sum().backward()
        return mine.grad, weight.grad

    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    sum(_before(leaf * n, HeadWork(weight)).square() for n in (1, 2)).sum().backward()
    found = ranks(2).run(on)
    assert_close(torch.cat([one[0] for one in found], 1), leaf.grad, kind="grad")
    assert_close(sum(one[1] for one in found), weight.grad, kind="grad")


def test_a_single_rank_prepares_and_sends_nothing() -> None:
    """A group of one computes what several would."""
    x, w = randn(1, 8, 4, 6), randn(6, seed=1)

    def on(rank: int) -> None:
        with traffic() as sent:
            y = seq_to_head(x, dist.group.WORLD, seq_dim=1, head_dim=2, work=HeadWork(w))
        assert not sent.records
        assert_close(y, _before(x, HeadWork(w)))

    ranks(1).run(on)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ([HeadWork(torch.ones(6))], r"work \(1 entries\) must have one entry, or None, per tensor"),
        (
            [HeadWork(torch.ones(5)), None],
            r"work\[0\]: weight \(5,\) must be of the size of a head",
        ),
        ([torch.ones(6), None], r"work\[0\] \(Tensor\) must be a HeadWork or None"),
    ],
)
def test_work_that_does_not_fit_is_refused_before_anything_is_sent(
    work: list[object], words: str
) -> None:
    """The same error on every rank, and no collective."""
    x = randn(1, 4, 4, 6)

    def on(rank: int) -> None:
        with traffic() as sent, pytest.raises((ValueError, TypeError), match=words):
            seq_to_head([x, x], dist.group.WORLD, seq_dim=1, head_dim=2, work=work)  # type: ignore[call-overload]
        assert not sent.records

    ranks(2).run(on)


def test_tensors_of_two_dtypes_cannot_be_prepared_together() -> None:
    """One buffer holds one dtype; the way out is named."""
    x = randn(1, 4, 4, 6)

    def on(rank: int) -> None:
        with pytest.raises(ValueError, match="of one dtype where heads are prepared; cast, or do"):
            seq_to_head(
                [x, x.float()], dist.group.WORLD, seq_dim=1, head_dim=2,
                work=[HeadWork(torch.ones(6)), None],
            )  # fmt: skip

    ranks(2).run(on)


def test_angles_written_in_place_before_backward_are_an_error() -> None:
    """A table that is refilled for the next micro-batch would turn gradients by other angles."""
    x, angle = randn(1, 4, 4, 6), randn(1, 4, 1, 3, seed=1)

    def on(rank: int) -> None:
        leaf, cos, sin = x.clone().requires_grad_(), angle.cos(), angle.sin()
        work = HeadWork(None, 1e-6, cos, sin)
        y = seq_to_head(leaf, dist.group.WORLD, seq_dim=1, head_dim=2, work=work)
        sin.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    ranks(2).run(on)
