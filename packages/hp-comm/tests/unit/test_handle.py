from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext

import pytest
import torch

from hp_comm import Handle
from hp_comm.moves import Pending, Transfer


class _Work:
    """A collective that ends when it is waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.waits = 0
        self.error = error

    def wait(self) -> None:
        self.waits += 1
        if self.error:
            raise self.error

    def is_completed(self) -> bool:
        return self.waits > 0


def _handle(work: _Work) -> Handle[torch.Tensor]:
    value = torch.ones(3)
    pending = Pending([((0,), Transfer(nullcontext(), [work], torch.zeros(3), lambda: [value]))])
    return Handle("seq_to_head", pending, lambda: pending.finish()[0])


def test_a_second_wait_returns_the_same_tensor_and_waits_for_nothing() -> None:
    """wait() is idempotent."""
    work = _Work()
    handle = _handle(work)
    assert not handle.done()
    first = handle.wait()

    assert handle.wait() is first
    assert work.waits == 1
    assert handle.done()


def test_a_dropped_handle_is_completed_and_reported() -> None:
    """The peers take part in it whether or not anybody looks, and a lost result is a mistake."""
    work = _Work()
    handle = _handle(work)
    with pytest.warns(RuntimeWarning, match=r"seq_to_head: a handle was dropped before wait\(\)"):
        del handle
    assert work.waits == 1


def test_a_handle_that_was_waited_for_is_dropped_in_silence() -> None:
    """The normal life of a handle warns of nothing."""
    handle = _handle(_Work())
    handle.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle
        gc.collect()


def test_a_failed_wait_fails_alike_the_next_time() -> None:
    """It does not hand out None or an empty buffer."""
    handle = _handle(_Work(RuntimeError("the peer has gone")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the peer has gone"):
            handle.wait()


def test_a_ready_handle_has_its_value() -> None:
    """Nothing sent, nothing to wait for, nothing to report."""
    value = torch.ones(2)
    handle = Handle.ready("gather_seq", value)
    assert handle.done()
    assert handle.wait() is value


def test_a_transfer_lets_go_of_its_send_buffer_before_the_layout_work() -> None:
    """Otherwise three copies of the exchanged tensors would be alive at once."""
    seen: list[object] = []
    transfer = Transfer(
        nullcontext(), [_Work()], torch.zeros(3), lambda: seen.append(transfer.send) or []
    )
    Pending([((), transfer)]).finish()
    assert seen == [None]
