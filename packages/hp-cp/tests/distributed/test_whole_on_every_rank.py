"""The whole sequence handed to every rank instead of its shard: a warning, on all of them alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_comm.fingerprint import LocalRows, _warned
from hp_mesh.testing import assert_close, randn, ranks

from ._compare import EACH, Case
from ._cores import Sdpa
from ._handoffs import DIM, Attention, apply

SAID = (
    r"ContextParallel: v \(shape \[2, .*\]\) must be another part of the sequence on each of the "
    r"\d ranks, and has the same rows on all of them; cut the whole sequence with hp_mesh\.shard_"
)


@pytest.fixture(autouse=True)
def _nobody_was_warned() -> None:
    _warned.clear()  # the groups of the pools live as long as the session


@pytest.mark.parametrize("case", EACH, ids=str)
def test_every_rank_is_warned_once_and_goes_on(case: Case) -> None:
    """Two layers, several calls: one warning a rank, and attention to the sequence that came."""
    whole = case.qkv()
    expected = Sdpa()(*(torch.cat([x] * case.P, 1) for x in whole))

    def on(rank: int) -> Tensor:
        mesh = case.mesh()
        first, second = (case.style().apply(Sdpa(), mesh) for _ in range(2))
        return sum(core(*whole) for core in (first, second) * 2)

    with pytest.warns(UserWarning, match=SAID) as record:
        outputs = ranks(case.P).run(on)
    assert len(record) == case.P and len({str(one.message) for one in record}) == 1
    for rank, out in enumerate(outputs):
        assert_close(out, 4 * expected.chunk(case.P, 1)[rank])


@pytest.mark.parametrize("degree", [None, 1], ids=["ulysses", "colossal"])
def test_tensors_that_are_sent_ahead_are_looked_at(degree: int | None) -> None:
    """`AsyncContextParallel`: the same call, the same warning."""
    case = Case(P=2, degree=degree)
    x = randn(2, 24, DIM)

    def on(rank: int) -> None:
        model = apply(Attention(case), case)
        for _ in range(3):
            model(x)

    with pytest.warns(UserWarning, match="Async" + SAID) as record:
        ranks(2).run(on)
    assert len(record) == 2


def test_positions_that_are_right_do_not_hide_it() -> None:
    """q and k rotated by the rank's own positions differ; v is what the tokens are."""
    case = Case(P=2)
    q, k, v = case.qkv()

    def on(rank: int) -> None:
        core, turn = case.style().apply(Sdpa(), case.mesh()), 1.0 + rank
        for _ in range(2):
            core(q * turn, k * turn, v)

    with pytest.warns(UserWarning, match=SAID):
        ranks(2).run(on)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_shards_are_looked_at_in_the_first_call_only(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is said about them, nor about calls of padding."""
    looked = []
    read = LocalRows.fingerprint
    monkeypatch.setattr(LocalRows, "fingerprint", lambda rows: looked.append(1) or read(rows))

    def on(rank: int) -> None:
        core = case.style().apply(Sdpa(), case.mesh())
        for _ in range(3):
            core(*(case.local(x, rank) for x in case.qkv()))
        padding = case.style().apply(Sdpa(), case.mesh())
        for _ in range(3):
            padding(*(torch.zeros_like(case.local(x, rank)) for x in case.qkv()))

    ranks(case.P).run(on)
    assert len(looked) == 3 * case.P, "padding tells nothing: the second call is looked at, too"


def test_keys_that_are_whole_on_purpose_are_not_warned_about() -> None:
    """Cross attention: ``Replicate()`` k and v, beside shards of q; whole queries are a mistake."""
    case = Case(P=2, degree=1)
    q, k, v = case.qkv()

    def on(rank: int, queries: list[Tensor]) -> None:
        mesh = case.mesh()
        core = case.style(cross_attention=True).apply(Sdpa(causal=False), mesh)
        fed = [
            DTensor.from_local(x, mesh, [place], run_check=False)
            for x, place in ((queries[rank], Shard(1)), (k, Replicate()), (v, Replicate()))
        ]
        for _ in range(2):
            core(*fed)

    ranks(2).run(on, [case.local(q, rank) for rank in range(2)])
    with pytest.warns(UserWarning, match="ContextParallel: q "):
        ranks(2).run(on, [q, q])
