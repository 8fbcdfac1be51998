"""unshard_sequence and global_loss: results that do not depend on how the sequence was cut."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hp_comm import count_tokens, gather_seq, global_loss, traffic, unshard_sequence
from hp_mesh.testing import assert_close, count_collectives, randn, ranks
from hp_mesh.window import head_tail_rows

IGNORE = -100


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
@pytest.mark.parametrize("P", [2, 3, 4])
def test_the_sequence_comes_back_in_order_and_without_padding(P: int, order: Any) -> None:
    """Shards in either order, on any dim; token ids as well as logits."""
    S = 4 * P
    whole = torch.arange(2 * S * 3).view(2, S, 3)

    def on(rank: int) -> None:
        rows = [(rank * 4, rank * 4 + 4)] if order == "contiguous" else head_tail_rows(rank, P, S)
        x = torch.cat([whole[:, a:b] for a, b in rows], 1)
        kw = {"order": order}
        assert torch.equal(unshard_sequence(x, dist.group.WORLD, seq_dim=1, **kw), whole)
        cut = unshard_sequence(x, dist.group.WORLD, seq_dim=-2, length=S - 3, **kw)
        assert torch.equal(cut, whole[:, : S - 3])

    ranks(P).run(on)


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
def test_both_kinds_of_loss_give_the_unsharded_gradient(order: Any) -> None:
    """Each rank's share of a loss: gradients are summed. The same loss on all: sliced, unsent."""
    P, S = 3, 12
    whole, up = randn(2, S, 5), randn(2, S, 5, seed=1)

    def on(rank: int) -> None:
        rows = [(rank * 4, rank * 4 + 4)] if order == "contiguous" else head_tail_rows(rank, P, S)

        def mine(x: Tensor) -> Tensor:
            return torch.cat([x[:, a:b] for a, b in rows], 1)

        for sums in (True, False):
            x = mine(whole).clone().requires_grad_()
            y = unshard_sequence(x, dist.group.WORLD, seq_dim=1, order=order, sum_gradients=sums)
            loss = (y * up).sum()
            with count_collectives() as counted:
                (loss / P if sums else loss).backward()
            assert counted.count() == (1 if sums else 0)
            assert_close(x.grad, mine(up), kind="grad")

    ranks(P).run(on)


@pytest.mark.parametrize("sums", [True, False])
def test_shards_of_unequal_length_are_put_together(sums: bool) -> None:
    """Forward and backward, one rank without any token."""
    lengths = [4, 0, 3]
    whole, starts = randn(2, 7, 3), [0, 4, 4]

    def on(rank: int) -> None:
        x = whole.narrow(1, starts[rank], lengths[rank]).clone().requires_grad_()
        y = unshard_sequence(
            x, dist.group.WORLD, seq_dim=1, lengths=lengths, length=6, sum_gradients=sums
        )
        assert torch.equal(y, whole[:, :6])
        y.sum().backward()
        expected = torch.full_like(whole, 3.0 if sums else 1.0)
        expected[:, 6:] = 0
        assert torch.equal(x.grad, expected.narrow(1, starts[rank], lengths[rank]))

    ranks(3).run(on)


def test_bad_arguments_of_unshard_are_refused() -> None:
    """Order, length and odd halves, before anything is sent."""

    def on(rank: int) -> None:
        x = randn(2, 3, 2)
        for kw, words in (
            ({"order": "zigzag"}, r"order \('zigzag'\) must be 'contiguous' or 'head_tail'"),
            ({"order": "head_tail"}, r"local length \(dim 1 of x\) \(3\) must be divisible by 2"),
            ({"length": 7}, r"length \(7\) must be in 0..6"),
            ({"order": "head_tail", "lengths": [3, 3]}, r"lengths \(\[3, 3\]\) must be None"),
        ):
            with count_collectives() as counted, pytest.raises(ValueError, match=words):
                unshard_sequence(x, dist.group.WORLD, seq_dim=1, **kw)
            assert counted.records == []

    ranks(2).run(on)


def _shifted(tokens: Tensor, masked: set[int]) -> Tensor:
    """Next-token labels of the whole sequence, shifted before any cut; masked ones are ignored."""
    labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)], 1)
    for position in masked:
        labels[:, position] = IGNORE
    return labels


@pytest.mark.parametrize("P", [1, 2, 4])
def test_per_token_losses_and_the_global_loss_equal_the_single_process(P: int) -> None:
    """B10: the last token of a slice has its neighbour's target; a slice may be fully ignored."""
    S, V = 16, 11
    tokens = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(3))
    labels = _shifted(tokens, masked=set(range(8, 12)))
    logits = randn(2, S, V)
    leaf = logits.clone().requires_grad_()
    per_token = F.cross_entropy(leaf.flatten(0, 1), labels.flatten(), reduction="none").view(2, S)
    expected = per_token.sum() / (labels != IGNORE).sum()
    expected.backward()

    def on(rank: int) -> None:
        x = logits.chunk(P, 1)[rank].clone().requires_grad_()
        y = labels.chunk(P, 1)[rank]
        losses = F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
        assert_close(losses, per_token.chunk(P, 1)[rank])
        loss = global_loss(losses, dist.group.WORLD, weights=y != IGNORE, gradient_divisor=1)
        assert_close(loss, expected, kind="loss")
        loss.backward()
        assert_close(x.grad, leaf.grad.chunk(P, 1)[rank], kind="grad")

    ranks(P).run(on)


class _Model(nn.Module):
    """Mixes the sequence through a gather, so that gradients cross the CP ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8, dtype=torch.float64)
        self.outer = nn.Linear(8, 11, dtype=torch.float64)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(randn(*p.shape, seed=20 + i))

    def forward(self, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        h = self.inner(x).tanh()
        whole = h if group is None else gather_seq(h, group, seq_dim=1)
        weights = torch.softmax(h @ whole.transpose(1, 2), -1)
        return self.outer(weights @ whole).tanh()


# valid tokens per step: 4 on CP rank 0 and 1 on CP rank 1, then 3, all on CP rank 1
STEPS = ({0, 1, 2, 3, 5}, {4, 6, 7})


def _data(step: int) -> tuple[Tensor, Tensor]:
    x = randn(2, 8, 6, seed=step)
    labels = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(step))
    for position in set(range(8)) - STEPS[step]:
        labels[:, position] = IGNORE
    labels[1, 3] = IGNORE  # the two sequences differ, so data parallel ranks do too
    return x, labels


def _losses(model: nn.Module, x: Tensor, labels: Tensor, group: Any) -> Tensor:
    logits = model(x, group)
    flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return flat.view_as(labels)


def _single_process() -> tuple[Tensor, list[Tensor]]:
    model = _Model()
    total = sum(int((_data(i)[1] != IGNORE).sum()) for i in range(2))
    loss = torch.stack([_losses(model, *_data(i), None).sum() for i in range(2)]).sum() / total
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2), (2, 1), (1, 4)], ids=str)
def test_loss_and_gradients_under_fsdp_do_not_depend_on_the_ranks(dp: int, cp: int) -> None:
    """B11: FSDP2 over dp x cp, two accumulation steps with 5 and 3 valid tokens a sequence."""
    expected, grads = _single_process()

    def on(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
        flat = mesh._flatten("fsdp")
        d, c = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
        model = _Model()
        fully_shard(model, mesh=flat)
        batches = [
            tuple(t.chunk(dp, 0)[d].chunk(cp, 1)[c] for t in _data(i)) for i in range(len(STEPS))
        ]
        group = flat.get_group()
        total = count_tokens([labels != IGNORE for _, labels in batches], group)
        assert total.dtype == torch.int64
        loss = torch.zeros((), dtype=torch.float64)
        for i, (x, labels) in enumerate(batches):
            model.set_requires_gradient_sync(i == len(batches) - 1)
            losses = _losses(model, x, labels, mesh.get_group("cp"))
            part = global_loss(losses, group, weights=labels != IGNORE, total=total)
            part.backward()
            loss += part.detach()
        assert_close(loss, expected, kind="loss")
        for p, grad in zip(model.parameters(), grads, strict=True):
            assert_close(p.grad.full_tensor(), grad, kind="grad")

    ranks(dp * cp).run(on)


def test_the_mean_of_means_would_be_another_number() -> None:
    """The wrong formula differs here, so the test above can fail."""
    expected, _ = _single_process()
    means = []
    for c in range(2):
        for i in range(2):
            x, labels = _data(i)
            kept = (labels != IGNORE).chunk(2, 1)[c]
            losses = _losses(_Model(), x, labels, None).chunk(2, 1)[c]
            means.append(losses[kept].sum() / max(int(kept.sum()), 1))
    assert abs(float(torch.stack(means).detach().mean() - expected)) > 0.05


def test_cuts_into_micro_batches_do_not_change_the_loss() -> None:
    """The same tokens as one batch of two and as two of one, with weights that are not 0 or 1."""
    losses, weights = randn(2, 12).abs(), randn(2, 12, seed=1).abs()
    lengths = [5, 3, 4]
    starts = [0, *accumulate(lengths)]
    expected = (losses * weights).sum() / weights.sum()

    def on(rank: int) -> None:
        mine = slice(starts[rank], starts[rank + 1])
        whole = global_loss(losses[:, mine], dist.group.WORLD, weights=weights[:, mine])
        total = count_tokens([weights[:1, mine], weights[1:, mine]], dist.group.WORLD)
        parts = [
            global_loss(
                losses[i : i + 1, mine],
                dist.group.WORLD,
                weights=weights[i : i + 1, mine],
                total=total,
            )
            for i in range(2)
        ]
        assert_close(whole, expected, kind="loss")
        assert_close(parts[0] + parts[1], expected, kind="loss")

    ranks(3).run(on)


def test_a_step_without_tokens_is_zero_and_an_ignored_nan_stays_out() -> None:
    """No 0/0, and no NaN * 0, in the loss or in its gradient."""

    def on(rank: int) -> None:
        x = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
        nothing = global_loss(x, dist.group.WORLD, weights=torch.zeros(3, dtype=torch.bool))
        assert nothing.item() == 0
        nothing.backward()
        assert torch.equal(x.grad, torch.zeros(3))
        x.grad = None
        some = global_loss(x, dist.group.WORLD, weights=torch.tensor([1, 0, 0]))
        some.backward()
        assert some.item() == 1.0
        # two ranks, one token each: 1/2 each, times the 2 that FSDP divides by
        assert torch.equal(x.grad, torch.tensor([1.0, 0.0, 0.0]))

    ranks(2).run(on)


def test_half_precision_losses_are_summed_in_float32() -> None:
    """Documented widening: thousands of bf16 losses would not add up."""

    def on(rank: int) -> None:
        losses = torch.ones(3000, dtype=torch.bfloat16, requires_grad=True)
        loss = global_loss(losses, dist.group.WORLD)
        assert loss.dtype == torch.float32 and loss.item() == 1.0
        loss.backward()
        assert losses.grad.dtype == torch.bfloat16

    ranks(2).run(on)


def test_the_loss_costs_two_scalars_and_one_with_a_total() -> None:
    """And nothing in backward."""

    def on(rank: int) -> None:
        x = randn(4, seed=rank, requires_grad=True)
        with traffic() as sent, count_collectives() as counted:
            total = count_tokens(torch.ones(4, dtype=torch.bool), dist.group.WORLD)
            global_loss(x, dist.group.WORLD, total=total).backward()
        assert sent.summary() == {"all_reduce": (2, 16)}
        assert counted.count("all_reduce") == 2 and counted.bytes("all_reduce") == 16

    ranks(2).run(on)


def test_bad_arguments_of_the_loss_are_refused() -> None:
    """A mask of another shape would broadcast in silence."""

    def on(rank: int) -> None:
        with pytest.raises(ValueError, match=r"weights \(\(4, 1\)\) must have the shape of losses"):
            global_loss(randn(4), dist.group.WORLD, weights=torch.ones(4, 1))
        with pytest.raises(ValueError, match=r"gradient_divisor \(0\) must be at least 1"):
            global_loss(randn(4), dist.group.WORLD, gradient_divisor=0)

    ranks(2).run(on)
