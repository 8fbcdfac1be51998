"""One writer at a time on a study file, and its repair after a crash.

The lock is the kernel's (``flock``): it ends with its process, however that ends, so no stale lock
is left to wait for. Optuna's own link lock is taken too, for writers that know only that one.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.errors import StudyError
from hp_tune.study.shield import Shield

if TYPE_CHECKING:
    from optuna.storages import BaseStorage, JournalStorage
    from optuna.storages.journal import JournalFileBackend

__all__ = ["in_one_write", "locked", "open_storage", "repair_tail"]

FIRST_BYTES = b'{"op_code"'
LINK_GRACE_SECONDS = 3
"""Optuna's link lock of a killed writer is broken after this; an append takes milliseconds."""


@contextmanager
def locked(
    path: Path,
    *,
    timeout: float = 60.0,
    tell: Callable[[str], None] = lambda _: None,
    doing: str = "",
    shielded: bool = False,
) -> Iterator[None]:
    """Hold the only right to write ``path``; raise `StudyError` after ``timeout`` seconds.

    Args:
        path: What is written.
        timeout: Seconds to wait for another process.
        tell: Receives one sentence when there is something to wait for.
        doing: What the holder does, for who waits; by default it writes ``path``.
        shielded: Whether signals wait until the lock is given back: for what takes milliseconds.
    """
    lock_path = path.with_name(path.name + ".flock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StudyError(
            f"study {path} cannot be written: {error.strerror}", "name another place with --study"
        ) from None
    shield = Shield() if shielded else None
    try:
        _wait(descriptor, path, timeout, tell, doing or f"writes {path}", shield)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
        if shield is not None:
            shield.down()


def _wait(
    descriptor: int,
    path: Path,
    timeout: float,
    tell: Callable[[str], None],
    doing: str,
    shield: Shield | None,
) -> None:
    """Take the lock; signals come through while it is waited for, not once it is held."""
    start, told = time.monotonic(), False
    while True:
        if shield is not None:
            shield.up()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if shield is not None:
                shield.down()
            waited = time.monotonic() - start
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            if waited > timeout:
                raise StudyError(
                    f"study {path} has been locked by process {owner} for {waited:.0f} s",
                    "wait for that search to end, or use another --study",
                ) from None
            if waited > 2 and not told:
                tell(f"waiting for process {owner}, which {doing}")
                told = True
            time.sleep(0.02)
        else:
            return


def repair_tail(path: Path, start: int = 0) -> int:
    """Cut off a last line that was not written to its end; return the bytes that were dropped.

    Call it with the lock held. A file that is broken anywhere else, or that never was a journal,
    is left as it is and refused. The first ``start`` bytes are known to be whole.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StudyError(f"study {path} cannot be read: {error.strerror}") from None
    good = 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if _is_record(line):
            good += len(line)
            continue
        if number < len(lines):
            raise StudyError(
                f"study {path} is broken in line {number} of {len(lines)}, not only at its end",
                "start a new one with --study, or restore the file",
            )
        begins = line.startswith(FIRST_BYTES) or FIRST_BYTES.startswith(line)
        if number == 1 and not start and not begins:
            raise StudyError(f"{path} is not an Optuna journal", "name another file with --study")
    dropped = len(content) - good
    if not dropped and (not content or content.endswith(b"\n")):
        return 0
    try:
        with path.open("r+b") as file:
            file.truncate(start + good)
            if good and not content[:good].endswith(b"\n"):
                file.seek(start + good)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StudyError(f"study {path} cannot be written: {error.strerror}") from None
    return dropped


def _is_record(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and "op_code" in record


def open_storage(path: Path) -> JournalStorage:
    """Return Optuna's storage on ``path``; readers need no lock, the file only grows."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    lock = JournalFileSymlinkLock(str(path), grace_period=LINK_GRACE_SECONDS)
    try:
        backend: Any = _Batched(JournalFileBackend(str(path), lock_obj=lock))  # by its methods
        return JournalStorage(backend)
    except (ValueError, KeyError) as error:
        raise StudyError(f"study {path} is not an Optuna journal: {error}") from None
    except OSError as error:
        raise StudyError(f"study {path} cannot be opened: {error.strerror}") from None


@contextmanager
def in_one_write(storage: BaseStorage) -> Iterator[None]:
    """Keep what is recorded in the meantime, and write it at once at the end.

    Hold the lock, and have read the file to its end: nobody else's records may come in between.
    """
    backend = getattr(storage, "_backend", None)
    if not isinstance(backend, _Batched):
        yield
        return
    backend.begin()
    yield  # after an error nothing is written
    backend.flush()


class _Batched:
    """A backend of Optuna's Journal that can keep records back and write many at once."""

    def __init__(self, inner: JournalFileBackend) -> None:
        self._inner = inner
        self._kept: list[dict[str, Any]] | None = None
        self._first = -1

    def begin(self) -> None:
        """Keep records from now on."""
        self._kept, self._first = [], -1

    def flush(self) -> None:
        """Write the records that were kept."""
        kept, self._kept = self._kept, None
        if kept:
            self._inner.append_logs(kept)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the records from a number on; what was kept follows what is in the file."""
        if self._kept is None:
            yield from self._inner.read_logs(log_number_from)
            return
        if self._first < 0:
            self._first = log_number_from
        yield from self._kept[log_number_from - self._first :]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write records, or keep them."""
        if self._kept is None:
            self._inner.append_logs(logs)
        else:
            self._kept += logs
