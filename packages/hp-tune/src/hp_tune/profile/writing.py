"""Write a cluster file that people can read: one number a line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hp_tune.clusters.cluster import Cluster
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import UsageError
from hp_tune.files import yaml_scalar
from hp_tune.output import draft_of, unwritable_is_said, write_text

__all__ = ["as_said_in", "write_cluster"]


def write_cluster(content: Mapping[str, Any], path: Path, *, heading: str) -> Cluster:
    """Write a description, read it as everybody will, and only then put it in its place.

    Args:
        content: As `hp_tune.clusters.cluster_files.read_cluster` takes it.
        path: Of the YAML file.
        heading: A comment on top.

    Returns:
        What the file says.
    """
    lines = [*(f"# {line}" for line in heading.splitlines()), *_mapping(content, "")]
    text = "\n".join(lines) + "\n"
    draft = draft_of(path)
    draft = draft.with_name(f"{draft.name}.yaml")
    try:
        with unwritable_is_said(path):
            draft.write_text(text, encoding="utf-8")
        found = _read_draft(draft, path)
    finally:
        with suppress(OSError):  # where nothing can be written nothing can be removed
            draft.unlink(missing_ok=True)
    write_text(path, text)
    return found


def _read_draft(draft: Path, path: Path) -> Cluster:
    try:
        return read_cluster(draft)
    except UsageError as error:
        reason = error.message.replace(str(draft), str(path))
        raise UsageError(
            f"what was measured is not plausible: {reason}",
            "measure again on a quiet machine, or without a base",
        ) from None


def as_said_in(out: Path, base: str) -> str:
    """Return a base as the file ``out`` names it: a preset, or a path from where it stands."""
    if not Path(base).is_file():
        return base
    return os.path.relpath(Path(base).resolve(), out.resolve().parent)


def _mapping(content: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{key}:"
            for item in value:
                first, *rest = _mapping(item, f"{indent}    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        elif isinstance(value, Mapping) and "source" not in value:
            yield f"{indent}{key}:"
            yield from _mapping(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {_flow(value)}"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return yaml_scalar(value)
