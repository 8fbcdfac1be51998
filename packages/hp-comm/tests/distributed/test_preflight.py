"""preflight: one error on all ranks instead of a hang, decided by the call's index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_comm import preflight, traffic
from hp_comm.agreement import HEADER_BYTES
from hp_comm.fingerprint import LocalRows, RowsWatch, _warned
from hp_mesh.testing import count_collectives, randn, ranks


def _texts(errors: list[BaseException | None]) -> set[str]:
    assert all(type(error) is ValueError for error in errors), errors
    return {str(error) for error in errors}


def test_ranks_that_agree_go_on_after_one_small_collective() -> None:
    """One all-gather of fixed size; traffic() and the dispatch counter see the same."""

    def on(rank: int) -> None:
        signature = {"q.shape": torch.Size([2, 6, 4, 3]), "q.dtype": torch.float32}
        with count_collectives() as counted, traffic() as sent:
            preflight(dist.group.WORLD, "here", signature, call_index=5)
        assert counted.count("preflight") == sent.count("preflight") == 1
        assert counted.bytes("preflight") == sent.bytes("preflight") == 2 * HEADER_BYTES

    ranks(3).run(on)


def test_another_shape_on_one_rank_is_the_same_error_on_all() -> None:
    """The message names the field, the values, and who has which."""

    def on(rank: int) -> None:
        shape = (1, 3 if rank == 1 else 4, 2, 4)
        preflight(dist.group.WORLD, "CP", {"q.shape": shape, "degree": 2}, call_index=0)

    (text,) = _texts(ranks(4).errors(on))
    assert text == (
        "CP: q.shape must be the same on all ranks of the group, "
        "not (1, 4, 2, 4) on ranks 0, 2, 3 and (1, 3, 2, 4) on rank 1"
    )


def test_the_caller_may_end_the_message_with_a_way_out() -> None:
    """It is given what differs, rank by rank, and not what agrees."""

    def way_out(differing: Mapping[str, Sequence[str]]) -> str:
        assert list(differing) == ["length"]
        return f"pad to {sum(map(int, differing['length'])) + 1}"

    def on(rank: int) -> None:
        signature = {"length": 4 - rank, "degree": 2}
        preflight(dist.group.WORLD, "CP", signature, call_index=0, way_out=way_out)

    (text,) = _texts(ranks(2).errors(on))
    assert text == (
        "CP: length must be the same on all ranks of the group, not 4 on rank 0 and 3 on rank 1; "
        "pad to 8"
    )


def test_a_field_that_one_rank_lacks_is_named() -> None:
    """An argument passed on some ranks only."""

    def on(rank: int) -> None:
        signature = {"q": 1, "mask": (4, 4)} if rank == 0 else {"q": 1}
        preflight(dist.group.WORLD, "CP", signature, call_index=0)

    (text,) = _texts(ranks(2).errors(on))
    assert "mask must be the same on all ranks" in text
    assert "(4, 4) on rank 0 and absent on rank 1" in text


def test_ranks_in_different_calls_are_told_so() -> None:
    """Two boundaries that meet in one collective are a mistake of the caller's order."""

    def on(rank: int) -> None:
        preflight(dist.group.WORLD, f"layer {rank}", {"q": 1}, call_index=0)

    errors = ranks(2).errors(on)
    assert all("call must be the same" in str(error) for error in errors)


def test_an_error_of_one_rank_reaches_all_ranks() -> None:
    """With the rank's number, and chained to the original where it happened."""
    problem = TypeError("CP: value (None) must be a tensor")

    def on(rank: int) -> None:
        error = problem if rank == 2 else None
        preflight(dist.group.WORLD, "CP", {"q": rank}, error=error, call_index=0)

    errors = ranks(3).errors(on)
    (text,) = _texts(errors)
    assert text == "CP: value (None) must be a tensor (on rank 2 of 3)"
    assert errors[2] is not None and errors[2].__cause__ is problem


def test_an_error_that_all_ranks_have_reads_as_on_a_single_device() -> None:
    """No list of ranks where it says nothing; different errors are shown each with its ranks."""

    def on(rank: int, same: bool) -> None:
        text = "CP: H (6) must be divisible by 4" if same or rank else "CP: another"
        preflight(dist.group.WORLD, "CP", {}, error=ValueError(text), call_index=0)

    assert _texts(ranks(3).errors(on, True)) == {"CP: H (6) must be divisible by 4"}
    (text,) = _texts(ranks(3).errors(on, False))
    assert text == "on rank 0: CP: another; on ranks 1, 2: CP: H (6) must be divisible by 4"


def test_a_difference_behind_the_end_of_the_header_is_still_found() -> None:
    """The digest covers the whole signature, however long; non-ASCII text is cut safely."""

    def on(rank: int) -> None:
        long = {f"é{i}": "長" * 9 for i in range(60)} | {"last": rank}
        preflight(dist.group.WORLD, "CP", long, call_index=0)

    (text,) = _texts(ranks(2).errors(on))
    assert "signatures must be the same on all ranks" in text


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("always", [1, 1, 1]), ("first", [1, 0, 0]), ("off", [0, 0, 0]), (None, [1, 1, 1])],
)
def test_the_mode_and_the_index_alone_say_when_ranks_compare(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, expected: list[int]
) -> None:
    """On gloo the default is always."""
    if mode is None:
        monkeypatch.delenv("HP_PREFLIGHT", raising=False)
    else:
        monkeypatch.setenv("HP_PREFLIGHT", mode)

    def on(rank: int) -> list[int]:
        counts = []
        for index in range(3):
            with count_collectives() as counted:
                preflight(dist.group.WORLD, "CP", {"q": 1}, call_index=index)
            counts.append(counted.count("preflight"))
        return counts

    assert ranks(2).run(on) == [expected, expected]


@pytest.mark.parametrize("mode", ["always", "first", "off"])
def test_a_signature_known_to_one_rank_and_new_to_the_other_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Steps 2 and 3: rank 0 has seen the shape, rank 1 has not; both compare equally often."""
    monkeypatch.setenv("HP_PREFLIGHT", mode)
    shapes = {0: [(4,), (4,), (4,)], 1: [(4,), (8,), (6,)]}

    def on(rank: int) -> int:
        with count_collectives() as counted:
            for index, shape in enumerate(shapes[rank]):
                try:
                    preflight(dist.group.WORLD, "CP", {"q": shape}, call_index=index)
                except ValueError:
                    assert mode == "always" and index > 0
                else:
                    assert mode != "always" or index == 0
        return counted.count("preflight")

    assert ranks(2).run(on) == [{"always": 3, "first": 1, "off": 0}[mode]] * 2


def test_without_a_comparison_an_error_is_raised_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HP_PREFLIGHT=off: the rank's own exception, unchanged."""
    monkeypatch.setenv("HP_PREFLIGHT", "off")

    def on(rank: int) -> None:
        error = TypeError("mine") if rank == 1 else None
        preflight(dist.group.WORLD, "CP", {}, error=error, call_index=0)

    first, second = ranks(2).errors(on)
    assert first is None
    assert type(second) is TypeError and str(second) == "mine"


def test_a_mode_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo would otherwise switch the check off in silence."""
    monkeypatch.setenv("HP_PREFLIGHT", "alway")

    def on(rank: int) -> None:
        preflight(dist.group.WORLD, "CP", {}, call_index=0)

    (text,) = _texts(ranks(2).errors(on))
    assert text == "CP: HP_PREFLIGHT ('alway') must be one of always, first, off"


def test_after_an_error_the_next_good_call_works() -> None:
    """All ranks have left the collective; nothing of it is left."""

    def on(rank: int) -> None:
        with pytest.raises(ValueError, match="must be the same"):
            preflight(dist.group.WORLD, "CP", {"q": rank}, call_index=0)
        preflight(dist.group.WORLD, "CP", {"q": 1}, call_index=1)

    ranks(2).run(on)


def _calls(*tensors: Tensor) -> None:
    """Compare one call a tensor, as a boundary does."""
    watch = RowsWatch()
    for index, x in enumerate(tensors):
        local = LocalRows("v", x, 1)
        preflight(dist.group.WORLD, "CP", {}, call_index=index, watch=watch, local=local)


def test_the_same_rows_on_all_ranks_are_one_warning_on_each() -> None:
    """The rows of one sequence differ from rank to rank; said once, in the same words."""
    x = randn(2, 6, 3)
    _warned.clear()

    def on(rank: int) -> None:
        for _ in range(2):  # boundaries
            _calls(x, x, x)

    with pytest.warns(UserWarning, match="must be another part") as record:
        ranks(3).run(on)
    assert len(record) == 3
    assert {str(one.message) for one in record} == {
        "CP: v (shape [2, 6, 3]) must be another part of the sequence on each of the 3 ranks, and "
        "has the same rows on all of them; cut the whole sequence with hp_mesh.shard_sequence, or "
        "seed the random data of a trial by rank"
    }


@pytest.mark.parametrize("first", ["zeros", "alike"])
def test_a_first_call_of_placeholders_decides_nothing(first: str) -> None:
    """Pipelines learn shapes from uninitialised memory, which may be alike; data comes later."""
    _warned.clear()
    placeholder = randn(2, 6, 3) * (first == "alike")
    whole = randn(2, 6, 3, seed=9)

    ranks(2).run(lambda rank: _calls(placeholder, randn(2, 6, 3, seed=rank)))
    with pytest.warns(UserWarning, match="must be another part"):
        ranks(2).run(lambda rank: _calls(placeholder, whole))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_of_placeholders_decides_nothing(reentrant: bool) -> None:
    """A stage with activation checkpointing: the placeholders come again, and then the data."""
    _warned.clear()
    placeholder, whole = randn(2, 6, 3), randn(2, 6, 3, seed=9)

    def on(rank: int, real: list[Tensor]) -> None:
        watch, index = RowsWatch(), iter(range(9))

        def stage(x: Tensor) -> Tensor:
            rows = LocalRows("v", x, 1)
            preflight(dist.group.WORLD, "CP", {}, call_index=next(index), watch=watch, local=rows)
            return x.square()

        for x in (placeholder, real[rank]):
            leaf = x.clone().requires_grad_()
            checkpoint(stage, leaf, use_reentrant=reentrant).sum().backward()
        assert next(index) == 4, "both were computed again"

    ranks(2).run(on, [randn(2, 6, 3, seed=rank) for rank in range(2)])
    with pytest.warns(UserWarning, match="must be another part"):
        ranks(2).run(on, [whole, whole])


@pytest.mark.parametrize(
    ("mode", "what", "looks"),
    [
        ("always", "one rank differs", 1),
        ("first", "one rank differs", 1),
        ("always", "rows alike", 2),
        ("first", "rows alike", 2),
        ("off", "all alike", 0),
    ],
)
def test_rows_that_may_be_shards_are_not_warned_about(
    monkeypatch: pytest.MonkeyPatch, mode: str, what: str, looks: int
) -> None:
    """Nothing is read behind the first call, or the second at last: it would wait for a device."""
    _warned.clear()
    looked: list[int] = []
    read = LocalRows.fingerprint
    monkeypatch.setattr(LocalRows, "fingerprint", lambda rows: looked.append(1) or read(rows))
    monkeypatch.setenv("HP_PREFLIGHT", mode)

    def on(rank: int) -> int:
        x = randn(2, 6, 3, seed=int(what == "one rank differs" and rank == 2))
        if what == "rows alike":
            x = x[:, :1].expand(2, 6, 3)
        with count_collectives() as counted:
            _calls(x, x, x, x)
        return counted.count("preflight")

    compared = {"always": 4, "first": looks, "off": 0}[mode]
    assert ranks(3).run(on) == [compared] * 3
    assert len(looked) == 3 * looks


def test_an_error_of_one_rank_in_a_call_that_is_looked_at_reaches_all() -> None:
    """That rank has no rows to show; what is wrong is said, and the next call goes on."""
    _warned.clear()
    x = randn(2, 6, 3)

    def on(rank: int) -> None:
        watch, rows = RowsWatch(), LocalRows("v", x, 1)
        for index in range(3):
            bad = index == 1 and rank == 0
            said = pytest.raises(ValueError, match=r"^CP: bad \(on rank 0 of 2\)$")
            with said if index == 1 else nullcontext():
                preflight(
                    dist.group.WORLD,
                    "CP",
                    {},
                    error=ValueError("CP: bad") if bad else None,
                    call_index=index,
                    watch=watch,
                    local=None if bad else rows,
                )

    ranks(2).run(on)


class _Unreadable(LocalRows):
    def fingerprint(self) -> bytes:
        raise RuntimeError("CP: v cannot be read")


@pytest.mark.parametrize("what", ["signature", "rows"])
def test_what_fails_while_one_rank_speaks_reaches_all(what: str) -> None:
    """Whatever it is: the other ranks are waiting for this one."""

    def on(rank: int) -> None:
        fails = rank == 1

        def signature() -> Mapping[str, object]:
            if fails and what == "signature":
                raise RuntimeError("CP: v cannot be read")
            return {"q": 1}

        kind = _Unreadable if fails and what == "rows" else LocalRows
        local = kind("v", randn(2, 6, 3, seed=rank), 1)
        with pytest.raises(ValueError, match=r"^CP: v cannot be read \(on rank 1 of 2\)$"):
            preflight(
                dist.group.WORLD, "CP", signature, call_index=0, watch=RowsWatch(), local=local
            )
        preflight(dist.group.WORLD, "CP", {"q": 1}, call_index=1)

    ranks(2).run(on)
