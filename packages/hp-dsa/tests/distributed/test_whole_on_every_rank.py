"""The whole sequence handed to every rank instead of its shard: a warning, on all of them alike."""

from __future__ import annotations

import pytest
from torch import Tensor

from hp_comm.fingerprint import _warned
from hp_dsa import DSAIndexerContextParallel, DSASparseAttentionContextParallel
from hp_mesh.testing import ranks

from ._layer import Attention, Case, Indexer


@pytest.fixture(autouse=True)
def _nobody_was_warned() -> None:
    _warned.clear()  # the groups of the pools live as long as the session


@pytest.mark.parametrize("load_balance", [False, True], ids=["contiguous", "balanced"])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_the_indexer_warns_even_if_positions_are_right(layout: str, load_balance: bool) -> None:
    """Rotated queries and keys differ; the weights of the heads have no positions."""
    ends = (12,) if layout == "TND" else None
    case = Case(layout=layout, load_balance=load_balance, ends=ends)
    whole = case.but(S=6).inputs()

    def on(rank: int) -> None:
        style = DSAIndexerContextParallel(layout=layout, load_balance=load_balance)
        module = style.apply(Indexer(case), case.mesh())
        for _ in range(2):
            turned = (whole[name] * (1.0 + rank) for name in ("query_index", "key_index"))
            module(*turned, whole["weights"])

    said = r"ContextParallel: weights \(shape .*\) must be another part of the sequence on each of"
    with pytest.warns(UserWarning, match=said) as record:
        ranks(2).run(on)
    assert len(record) == 2 and len({str(one.message) for one in record}) == 1


def test_attention_warns_of_its_latent_keys() -> None:
    """They are gathered, and would be there twice."""
    case = Case()
    xs = case.but(S=6).inputs()

    def on(rank: int, own: list[dict[str, Tensor]]) -> None:
        mine = own[rank]
        style = DSASparseAttentionContextParallel()
        module = style.apply(Attention(case), case.mesh())
        indices = mine["query"].new_zeros(2, 6, 1, 1).int()
        for _ in range(2):
            module(mine["query"], mine["latent"], mine["latent"], indices)

    shards = [{name: case.local(x, rank) for name, x in case.inputs().items()} for rank in (0, 1)]
    ranks(2).run(on, shards)
    with pytest.warns(UserWarning, match=r"ContextParallel: key \(shape \[2, 6, 1, 5\]\) must be"):
        ranks(2).run(on, [xs, xs])
