"""A rank's side of a job: what it is asked, and what it answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["answer", "report", "request", "write_json"]


def request() -> dict[str, Any]:
    """Return what this job was asked."""
    found: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return found


def report(what: str, done: int, total: int) -> None:
    """Write how far the job is, as rank 0, for who waits for it."""
    write_json(Path(sys.argv[1]).with_name("progress.json"), [what, done, total])


def answer(value: dict[str, Any]) -> None:
    """Write what this job answers, as rank 0; a later answer replaces an earlier one."""
    write_json(Path(sys.argv[1]).with_name("answer.json"), value)


def write_json(path: Path, value: dict[str, Any] | list[Any]) -> None:
    """Write ``value`` to ``path`` as one step: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)
