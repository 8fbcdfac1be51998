"""The path of accelerators, whose tensors nobody waits for, taken on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_dsa import DSASparseAttentionContextParallel, ops
from hp_dsa.indices import drop_unseen
from hp_dsa.late_errors import LateErrors
from hp_mesh.documents import KeyWindow
from hp_mesh.testing import assert_close, randn, ranks

from ._layer import Case

CASE = Case(P=2, layout="TND", ends=(5, 12))
LENGTHS = CASE.lengths("actual_seq_lengths_query", "actual_seq_lengths_kv")
RIGHT = torch.tensor([[0, 4]] * 5 + [[0, 6]] * 7, dtype=torch.int32).view(12, 1, 2)
OF_THE_STREAM = torch.arange(12, dtype=torch.int32).view(12, 1, 1).expand(12, 1, 2)


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("boundary", "indices"):
        monkeypatch.setattr(f"hp_dsa.{module}.waits", lambda x: True)


class Attend(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor) -> Any:
        layouts = {"layout_query": "TND", "layout_kv": "TND"}
        return ops.sparse_flash_attention(
            query, key, value, topk_indices, 0.4, **layouts, **LENGTHS
        )[0]


def _calls(rank: int, given: list[Tensor]) -> list[Any]:
    """Return what each of several calls of one module gives: an output, or the error's text."""
    module = DSASparseAttentionContextParallel(layout="TND").apply(Attend(), CASE.mesh())
    q, k = (CASE.local(randn(12, n, 5, seed=n), rank) for n in (3, 1))
    found: list[Any] = []
    for topk in given:
        try:
            found.append(module(q, k, k, CASE.local(topk, rank)))
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_call_after_the_first_that_is_wrong_is_told_by_the_next() -> None:
    """Indices of the whole stream, which a window would drop as not seen: once."""
    for found in ranks(2).run(_calls, [RIGHT, OF_THE_STREAM, RIGHT, RIGHT]):
        assert isinstance(found[1], Tensor)
        assert (
            "sparse_flash_attention (an earlier call): sparse_indices must be -1 or below"
            in (found[2])
        )
        assert_close(found[3], found[0])


def test_the_first_call_tells_itself() -> None:
    """It waits, so that a wrong program fails where it is wrong."""
    for found in ranks(2).run(_calls, [OF_THE_STREAM, RIGHT]):
        assert "sparse_indices (11) must be -1 or below 7, the keys of document 1" in found[0]
        assert isinstance(found[1], Tensor)


def test_every_call_tells_itself_on_all_ranks_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """HP_PREFLIGHT=always waits in each call, and ranks compare before anything moves."""
    monkeypatch.setenv("HP_PREFLIGHT", "always")
    first, second = ranks(2).run(_calls, [RIGHT, OF_THE_STREAM, RIGHT])
    assert "sparse_indices (11) must be -1 or below 7, the keys of document 1" in first[1]
    assert first[1] == second[1]
    assert_close(first[2], first[0])


def test_nothing_that_is_right_is_told() -> None:
    """The last key of a row's document is its own."""
    q, k = (randn(12, n, 5, seed=n) for n in (3, 1))
    whole = Attend()(q, k, k, RIGHT)
    for rank, found in enumerate(ranks(2).run(_calls, [RIGHT] * 3)):
        for out in found:
            assert_close(out, CASE.local(whole, rank))


@pytest.mark.parametrize("forced", [True, False], ids=["device", "cpu"])
def test_what_a_window_does_not_show_is_dropped_and_the_rest_keeps_its_order(
    forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row what a list would do, without a sort and without looking."""
    monkeypatch.setattr("hp_dsa.indices.waits", lambda x: forced)
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(-1, 12, (2, 5, 1, 7), dtype=torch.int32, generator=generator)
    window = KeyWindow((3, 8), (0, 8), None, (8, 5))
    found = drop_unseen(indices, window, "BSND", 1)
    for b, limit in enumerate((8, 5)):
        for row, given in zip(found[b, :, 0].tolist(), indices[b, :, 0].tolist(), strict=True):
            kept = [i for i in given if i < limit]
            assert row == kept + [-1] * (7 - len(kept))
    assert found.dtype == torch.int32 and found.is_contiguous()


def test_a_flag_that_is_not_here_yet_is_asked_again() -> None:
    """The earliest wrong call is told, and then forgotten with the others."""
    late = LateErrors()
    late.watch(torch.tensor(False), "a", "never", "")
    late.watch(torch.tensor(True), "b", "x must be y", "do z")
    late.watch(torch.tensor(True), "c", "too", "")
    with pytest.raises(ValueError, match=r"^b \(an earlier call\): x must be y; do z$"):
        late.check()
    late.check()
