"""Where a study lives, and how one worker at a time changes it.

A Journal file is changed under the kernel's lock on a file beside it. A database that several
machines share has no such lock; there, a study with a name of its own is one: names are unique, so
only one worker can create it, and whoever finds it there waits. It is deleted when the change is
made, and broken when its owner is gone.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hp_tune.errors import StudyError, UsageError
from hp_tune.study.journal import locked, open_storage, repair_tail
from hp_tune.study.owner import describe, is_gone, this_process
from hp_tune.study.shield import Shield

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

__all__ = ["DatabasePlace", "JournalPlace", "MemoryPlace", "Place", "turn"]

Tell = Callable[[str], None]
LOCK_LEASE_SECONDS = 60.0
"""A change takes milliseconds; a lock from another machine that is older belongs to nobody."""
WAIT_SECONDS = 120.0


class Place(Protocol):
    """A storage of Optuna that is changed by one worker at a time.

    Attributes:
        address: The same for all who mean the same storage.
        is_shared: Whether studies of other searches may be in it.
        dropped: Bytes of a torn tail that were cut off.
    """

    address: str
    is_shared: bool
    dropped: int

    def __str__(self) -> str:
        """Return it as the user named it."""
        ...

    def exclusive(self) -> Any:
        """Return a context manager in which nobody else changes the storage that it gives."""
        ...


class MemoryPlace:
    """A study that ends with the process."""

    is_shared = True
    dropped = 0

    def __init__(self) -> None:
        from optuna.storages import InMemoryStorage

        self._storage = InMemoryStorage()
        self.address = "memory"

    def __str__(self) -> str:
        """Return what people are told."""
        return "this search"

    @contextmanager
    def exclusive(self) -> Iterator[BaseStorage]:
        """Give the storage."""
        yield self._storage


class JournalPlace:
    """A Journal file; `flock` also holds over NFS, where the kernel makes it a lock of the server.

    Args:
        path: Created when it is not there.
        tell: Receives one sentence when there is something to wait for or to repair.
    """

    is_shared = False

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path, self._tell = path, tell
        self.address = str(path.absolute())
        self.dropped = 0
        self._storage: BaseStorage | None = None
        self._whole = 0

    def __str__(self) -> str:
        """Return the path."""
        return str(self.path)

    def create(self, lines: Iterable[str]) -> bool:
        """Make the file in one step, if it is not there yet; return whether that was so.

        Where a file system has no second names for a file (hard links), it is left to Optuna.
        """
        with locked(self.path, tell=self._tell, shielded=True):
            if self.path.exists():
                return False
            temporary = self.path.with_name(f".{self.path.name}.new")  # its own, with the lock held
            try:
                # of a killed search; perhaps another name of a study that was moved: not to be cut
                temporary.unlink(missing_ok=True)
                with temporary.open("x", encoding="utf-8") as file:
                    file.writelines(lines)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, self.path)
            except OSError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
        return True

    @contextmanager
    def exclusive(self) -> Iterator[BaseStorage]:
        """Hold the lock, repair what a killed writer left, give the storage."""
        path = self.path
        with locked(path, tell=self._tell, shielded=True):
            if self._whole and not path.is_file():
                raise StudyError(f"study {path} was deleted while it was searched")
            dropped = repair_tail(path, self._whole)
            if dropped:
                self.dropped += dropped
                self._tell(
                    f"{path} ended in the middle of a record: dropped {dropped} bytes and went on"
                )
                self._storage = None
            try:
                self._storage = self._storage or open_storage(path)
                yield self._storage
                self._whole = path.stat().st_size
            except OSError as error:
                raise StudyError(
                    f"study {path} cannot be written: {error.strerror}", "use another --study"
                ) from None


class DatabasePlace:
    """A database that Optuna knows, for workers on several machines.

    Args:
        url: As SQLAlchemy spells it, such as ``postgresql://host/name`` or ``sqlite:///file``.
        tell: Receives one sentence when there is something to wait for.
    """

    is_shared = True
    dropped = 0

    def __init__(self, url: str, tell: Tell) -> None:
        self.url, self._tell = url, tell
        self.address = url
        self._storage: BaseStorage | None = None

    def __str__(self) -> str:
        """Return the address without a password."""
        head, at, tail = self.url.rpartition("@")
        return f"{head.rpartition(':')[0]}:***@{tail}" if at and head.count(":") > 1 else self.url

    @contextmanager
    def exclusive(self) -> Iterator[BaseStorage]:
        """Create the study that is the lock, give the storage, delete it."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        self._storage = self._storage or self._opened()
        shield = Shield()
        try:
            lock = self._lock(self._storage, shield)
            try:
                yield self._storage
            finally:
                self._storage.delete_study(lock)
        except (StorageInternalError, SQLAlchemyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise StudyError(f"--storage {self} cannot be used: {reason}") from None
        finally:
            shield.down()

    def _opened(self) -> BaseStorage:
        """Open it; another worker may be creating its tables just now."""
        import optuna
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        options = {"connect_args": {"timeout": WAIT_SECONDS}} if "sqlite" in self.url[:6] else None
        for attempt in range(8):
            try:
                return optuna.storages.RDBStorage(self.url, engine_kwargs=options)
            except (ArgumentError, NoSuchModuleError):
                raise UsageError(
                    f"--storage ({self}) must be an address of a database",
                    "such as sqlite:///study.db, postgresql://user@host/name or mysql://...",
                ) from None
            except ImportError as error:
                raise UsageError(f"--storage ({self}) needs a driver: {error}") from None
            except (StorageInternalError, SQLAlchemyError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                time.sleep(0.05 * 2**attempt)
        raise StudyError(f"--storage {self} cannot be used: {reason}")

    def _lock(self, storage: BaseStorage, shield: Shield) -> int:
        """Create the study that is the lock; return its number, with signals held back."""
        from optuna.exceptions import DuplicatedStudyError
        from optuna.study import StudyDirection

        start, told = time.monotonic(), False
        while True:
            owner = {**this_process(), "until": time.time() + LOCK_LEASE_SECONDS}
            shield.up()
            try:
                made = storage.create_new_study([StudyDirection.MINIMIZE], _LOCK_NAME)
            except DuplicatedStudyError:
                shield.down()
                waited = time.monotonic() - start
                holder = self._break(storage, waited)
                if waited > WAIT_SECONDS:
                    raise StudyError(
                        f"--storage {self} has been locked by {holder} for {waited:.0f} s",
                        f"if no search runs, delete the study {_LOCK_NAME!r} in it",
                    ) from None
                if waited > 2 and not told:
                    self._tell(f"waiting for {holder}, which writes {self}")
                    told = True
                time.sleep(0.05)
            else:
                storage.set_study_user_attr(made, "owner", owner)
                return made

    def _break(self, storage: BaseStorage, waited: float) -> str:
        """Delete the lock if its owner is gone; by its number, so never the one of a successor."""
        try:
            found = storage.get_study_id_from_name(_LOCK_NAME)
            owner = storage.get_study_user_attrs(found).get("owner")
            if is_gone(owner) if owner else waited > LOCK_LEASE_SECONDS:
                storage.delete_study(found)
        except KeyError:  # released, or broken by another worker, in between
            return "another worker"
        return describe(owner or {})


_LOCK_NAME = "hp-tune: one worker changes this storage"


@contextmanager
def turn(place: Place, tell: Tell) -> Iterator[None]:
    """Hold the right to measure on this machine: two at a time would time each other."""
    if isinstance(place, MemoryPlace):  # nobody else knows of it
        yield
        return
    key = sha256(place.address.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"hp-tune-{os.getuid()}-{key}"
    with locked(path, timeout=float("inf"), tell=tell, doing=f"measures for {place}"):
        yield
