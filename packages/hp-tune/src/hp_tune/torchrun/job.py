"""What a job left in its folder.

=================  ==================================================================
``request.json``   what it was asked
``answer.json``    what rank 0 answered
``progress.json``  how far rank 0 says that it is, where it does
``rank3.json``     how far rank 3 came: running, done, or failed with its traceback
``rank3.out/err``  what rank 3 wrote
``node0.json``     exit codes of the ranks of node 0 that did not end well
``node0.out/err``  what torchrun itself wrote there
=================  ==================================================================
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FailedRank", "Job", "local_ranks", "read_job", "tail"]

TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A rank that did not end well.

    Attributes:
        rank: Its global rank; -1 for torchrun itself.
        host: Where it ran; empty where it did not get far enough to say.
        exit_code: Of its process, negative for a signal; None where nobody saw it.
        error: Name of the exception's class; empty for a death without one.
        message: The exception's message, or the name of the signal.
        traceback: The exception's traceback.
        at: Seconds since the epoch; of several failures the first is the cause.
    """

    rank: int
    host: str = ""
    exit_code: int | None = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    at: float = float("inf")

    def __str__(self) -> str:
        where = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        if self.error:
            return f"{where} raised {self.error}: {self.message}"
        return f"{where} ended with {self.message or f'exit code {self.exit_code}'}"


@dataclass(frozen=True, slots=True)
class Job:
    """How a job ended.

    Attributes:
        exit_code: The first one that is not 0 over all nodes.
        timed_out: Whether it was ended because its time was up.
        answer: What rank 0 answered, also if it failed afterwards.
        stderr_tail: The end of what the first failed rank, or else a node, wrote to stderr; after
            a timeout where a rank stood.
        failed_ranks: The first to fail first, without those that were ended because of it.
        folder: Where all of this lies.
    """

    exit_code: int
    timed_out: bool
    answer: dict[str, Any] | None
    stderr_tail: str
    failed_ranks: tuple[FailedRank, ...]
    folder: Path

    @property
    def ok(self) -> bool:
        """Whether every rank ended well and rank 0 answered."""
        return self.exit_code == 0 and not self.timed_out and self.answer is not None


def read_job(folder: Path, exit_code: int, *, timed_out: bool) -> Job:
    """Return what the job in ``folder`` left."""
    # whoever waits for a rank that died raises later or is ended by SIGTERM; a rank that a signal
    # ended could not say when
    failed = sorted(_failed(folder), key=lambda rank: (bool(rank.error), rank.at, rank.rank))
    causes = [rank for rank in failed if rank.exit_code != -signal.SIGTERM] or failed
    first = [folder / f"rank{rank.rank}.err" for rank in causes[:1]]
    nodes, ranks = (sorted(folder.glob(f"{kind}*.err")) for kind in ("node", "rank"))
    logs = [*first, *(ranks if timed_out else []), *nodes, *ranks]
    return Job(
        exit_code=exit_code,
        timed_out=timed_out,
        answer=_object(folder / "answer.json"),
        stderr_tail=next((text for text in map(tail, logs) if text), ""),
        failed_ranks=tuple(causes),
        folder=folder,
    )


def local_ranks(folder: Path) -> list[int]:
    """Return the process ids of the ranks that started on this machine."""
    found = [_object(path) or {} for path in folder.glob("rank*.json")]
    return [status["pid"] for status in found if status.get("host") == socket.gethostname()]


def tail(path: Path) -> str:
    """Return the end of a text file, whole lines; empty if it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return (text.partition("\n")[2] if size > TAIL_BYTES else text).strip()


def _failed(folder: Path) -> Iterator[FailedRank]:
    codes: dict[int, int] = {}
    for path in folder.glob("node*.json"):
        found = _object(path) or {}
        codes |= {int(rank): int(code) for rank, code in found.get("exit_codes", {}).items()}
    told = {int(path.stem.removeprefix("rank")): path for path in folder.glob("rank*.json")}
    for rank in sorted({*codes, *told}):
        status = (_object(told[rank]) if rank in told else None) or {}
        code = codes.get(rank)
        if status.get("state") == "failed":
            yield FailedRank(
                rank,
                str(status.get("host", "")),
                code,
                str(status.get("error", "")),
                str(status.get("message", "")),
                str(status.get("traceback", "")),
                float(status.get("at", float("inf"))),
            )
        elif code is not None:
            yield FailedRank(rank, str(status.get("host", "")), code, message=_ending(code))


def _ending(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        return f"signal {-code}"


def _object(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
