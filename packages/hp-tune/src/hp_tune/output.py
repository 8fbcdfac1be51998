"""Files that results are written to: asked for before the work, and written in one step."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hp_tune.errors import UsageError

__all__ = ["draft_of", "require_place", "unwritable_is_said", "write_text"]


@contextmanager
def unwritable_is_said(path: Path, option: str = "--out") -> Iterator[None]:
    """Raise what the system has against writing ``path`` as an error of the option that named it.

    Raises:
        UsageError: In place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be written: {error.strerror}",
            f"name another place with {option}",
        ) from None


def require_place(path: Path, option: str = "--out") -> None:
    """Refuse a file that cannot be written, before the work for it is done."""
    draft = draft_of(path, option)
    with unwritable_is_said(path, option):
        if _is_replaced(path):
            draft.touch()
            draft.unlink()
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write_text(path: Path, text: str, option: str = "--out") -> None:
    """Write a file in one step: a reader sees the old one or the new one.

    A device, a pipe and a link are written as they stand: nobody wants ``/dev/null`` replaced.
    """
    draft = draft_of(path, option)
    with unwritable_is_said(path, option):
        if not _is_replaced(path):
            path.write_text(text, encoding="utf-8")
            return
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError:
            with suppress(OSError):  # where nothing can be written nothing can be removed
                draft.unlink(missing_ok=True)
            raise


def draft_of(path: Path, option: str = "--out") -> Path:
    """Return where this process writes a file before it is put in its place."""
    if not path.name:
        raise UsageError(f"{option} ({path}) must name a file", f"such as {option} plan.json")
    return path.with_name(f".{path.name}.{os.getpid()}")


def _is_replaced(path: Path) -> bool:
    return not path.is_symlink() and (path.is_file() or not path.exists())
