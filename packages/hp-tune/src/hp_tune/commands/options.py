"""Options and values that several commands read."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hp_tune.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from hp_tune.models.model import Model
    from hp_tune.searching.requirement import Requirement
    from hp_tune.searching.restriction import Restriction
    from hp_tune.workload import Layout, Workload

__all__ = [
    "count_option",
    "counts_option",
    "duration_option",
    "is_study",
    "json_option",
    "read_documents",
    "read_lengths",
    "read_only",
    "read_require",
    "read_workload",
    "tell",
]

Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)


def json_option(text: str = "Print JSON.") -> Callable[[Decorated], Decorated]:
    """Add ``--json``, which every command has, as the parameter ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def _count(value: str) -> int:
    """Read a positive whole number; ``128K`` is 131072."""
    match = re.fullmatch(r"([0-9]{1,18})([kKmM]?)", str(value).replace("_", ""))
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(
            f"{value!r} must be a whole number of at least 1, such as 131072 or 128K"
        )
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def count_option(
    name: str, text: str, *, required: bool = False, default: int | None = None
) -> Callable[[Decorated], Decorated]:
    """Add an option that takes a positive whole number, such as 128K."""
    shown = default is not None
    return click.option(
        name, type=_count, metavar="N", help=text, required=required, default=default,
        show_default=shown,
    )  # fmt: skip


def read_lengths(text: str) -> tuple[int, ...]:
    """Return the sequence lengths of ``16K,64K,256K``."""
    return tuple(_count(part.strip()) for part in text.split(",") if part.strip())


def counts_option(name: str, text: str) -> Callable[[Decorated], Decorated]:
    """Add an option that takes a list of positive whole numbers, such as 32K,128K."""

    def read(value: str | list[int]) -> list[int]:
        listed = value if isinstance(value, list) else [_count(one) for one in value.split(",")]
        return sorted(set(listed))

    return click.option(name, type=read, metavar="N,...", help=text, default=None)


def duration_option(name: str, text: str) -> Callable[[Decorated], Decorated]:
    """Add an option that takes a time, such as 90s, 20m or 1.5h, in seconds."""

    def read(value: str) -> float:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|)", str(value))
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0
        if seconds <= 0:
            raise click.BadParameter(f"{value!r} must be a time above 0, such as 90s, 20m or 1.5h")
        return seconds

    return click.option(name, type=read, metavar="TIME", help=text, default=None)


def read_workload(
    model: Model,
    options: dict[str, Any],
    seq_len: int | None = None,
    documents: tuple[tuple[int, float], ...] | None = None,
) -> Workload:
    """Return the workload that the options of ``search`` describe, at one length.

    ``seq_len`` is that of the option ``seq`` unless it is given.
    """
    from hp_tune.workload import Dtype, Workload

    causal = model.causal if options["causal"] is None else options["causal"]
    dtype: Dtype = options["dtype"] or model.dtype
    return Workload(
        seq_len=options["seq"] if seq_len is None else seq_len,
        cp_size=options["cp"],
        tp_size=options["tp"],
        world_size=options["world"],
        batch=options["batch"],
        dtype=dtype,
        layout=_layout(options["layout"]),
        causal=causal,
        skips_masked=not options["dense_mask"],
        handoffs=options["handoffs"],
        recompute=options["recompute"] == "on",
        documents=documents,
    )


def read_documents(options: dict[str, Any]) -> tuple[tuple[int, float], ...] | None:
    """Return the histogram of packed documents that ``--documents`` names, or None."""
    path: Path | None = options["documents"]
    if path is None:
        return None
    from hp_tune.searching.lengths import read_histogram

    return tuple(read_histogram(path, "--documents"))


def read_only(options: dict[str, Any]) -> Restriction | None:
    """Return the part of the space that ``--space`` names, or None."""
    words = " ".join(options["restrict"])
    if not words:
        return None
    from hp_tune.searching.restriction import read_restriction

    return read_restriction(words, options["cp"])


def read_require(options: dict[str, Any]) -> Requirement | None:
    """Return what ``--require`` asks for, or None."""
    if not options["require"]:
        return None
    from hp_tune.searching.requirement import read_requirement

    return read_requirement(options["require"])


def _layout(name: str) -> Layout:
    from hp_mesh.layout import layout

    try:
        found = layout(name)
    except ValueError as error:
        raise UsageError(f"--layout: {error}") from None
    if found.head_dim is None:
        raise UsageError(f"--layout ({name}) must have a dim of heads", "use BSHD or SBHD")
    known: Layout = found.name  # type: ignore[assignment]
    return known


def is_study(path: Path) -> bool:
    """Return whether a file is an Optuna journal; one that cannot be read is not."""
    try:
        with path.open("rb") as file:
            return file.read(64).startswith(b'{"op_code"')
    except OSError:
        return False


def tell(sentence: str) -> None:
    """Say a sentence on stderr while a command runs; the work goes on where nobody reads it."""
    with suppress(OSError):
        click.echo(f"hp-tune: {sentence}", err=True)
