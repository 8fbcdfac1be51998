"""What a log of a collective benchmark says, whichever tool wrote it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hp_tune.clusters.collective_times import Kind
from hp_tune.errors import UsageError

__all__ = ["Log", "Row", "find_kind", "number", "wrong"]

KINDS: dict[str, Kind] = {
    "alltoall": "all_to_all",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "sendrecv": "p2p",
}
OTHERS = ("allreduce", "broadcast", "brocast", "gather", "scatter", "reduce", "hypercube")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        line: Where it stands, from 1.
        size: Bytes of the whole buffer: what a rank sends and keeps, or what it has gathered; of a
            swap what it sends.
        us: Microseconds of one call.
    """

    line: int
    size: int
    us: float


@dataclass(frozen=True, slots=True)
class Log:
    """A table of one kind of collective.

    Attributes:
        path: The file.
        tool: ``nccl-tests`` or ``hccl_test``.
        kind, num_ranks, num_nodes: None where the log does not say.
        device: Name of the devices, or empty.
        rows: In the order of the file.
    """

    path: Path
    tool: str
    kind: Kind | None
    num_ranks: int | None
    num_nodes: int | None
    device: str
    rows: tuple[Row, ...]

    def completed(self, kind: Kind | None, num_ranks: int | None, num_nodes: int | None) -> Log:
        """Return the log with what its file leaves open, or raise `UsageError`."""
        log = replace(
            self,
            kind=self.kind or kind,
            num_ranks=self.num_ranks or num_ranks,
            num_nodes=self.num_nodes or num_nodes or 1,
        )
        if log.kind is None:
            raise wrong(
                self.path, 1, "the log does not say which collective it is of", "give --kind"
            )
        if log.num_ranks is None:
            raise wrong(
                self.path, 1, "the log does not say how many ranks took part", "give --ranks"
            )
        assert log.num_nodes is not None, "one by default"
        if log.num_ranks < 2 or log.num_ranks % log.num_nodes:
            raise wrong(
                self.path,
                1,
                f"ranks ({log.num_ranks}) must be at least 2 and divisible by nodes "
                f"({log.num_nodes})",
                "give --ranks and --nodes as they were",
            )
        return log


def wrong(path: Path, line: int, message: str, hint: str = "") -> UsageError:
    """Return the error for a line of a log."""
    return UsageError(f"{path}:{line}: {message}", hint)


def find_kind(path: Path, lines: Sequence[str], suffix: str) -> Kind | None:
    """Return the collective that a log is of: the program's name in the log, or the file's name.

    Args:
        path: Its name may be that of the program.
        lines: Of the log.
        suffix: Of the program's name, ``perf`` or ``test``.
    """
    pattern = re.compile(rf"\b([a-z_]+?)_{suffix}\b")
    for number, line in enumerate(lines, start=1):
        for word in pattern.findall(line.lower()):
            name = word.replace("_", "")
            if name in KINDS:
                return KINDS[name]
            if name.removesuffix("v") in KINDS or name in OTHERS:
                raise wrong(
                    path, number, f"{word} is no collective that context parallelism runs",
                    "import logs of all-to-all, all-gather, reduce-scatter and send-receive",
                )  # fmt: skip
    stem = re.sub(r"[^a-z]", "", path.stem.lower())
    return next((kind for name, kind in KINDS.items() if name in stem), None)


def number(path: Path, line: int, text: str, what: str) -> float:
    """Return a number of a table, which must be one and not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise wrong(path, line, f"{what} ({text}) must be a number of at least 0")
    return value
