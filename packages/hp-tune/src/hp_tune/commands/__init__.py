"""The commands of ``hp-tune``: read options, ask the engine, print.

Each command is one file, imported when it is run: the program answers in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

from hp_mesh.checks import nearest

__all__ = ["ReaderGoneError", "cli"]

HOMES = {
    "search": "hp_tune.commands.search",
    "explain": "hp_tune.commands.explain",
    "report": "hp_tune.commands.report",
    "show": "hp_tune.commands.show",
    "export": "hp_tune.commands.export",
    "validate": "hp_tune.commands.validate",
    "profile": "hp_tune.commands.profile",
    "import": "hp_tune.commands.import_",
    "presets": "hp_tune.commands.presets",
    "doctor": "hp_tune.commands.doctor",
    "kernels": "hp_tune.kernels.command",
}
"""Where each command lives, under its own name, or with an underscore if that is a keyword."""

SHORT_HELP = {
    "search": "Rank every configuration for a model on a cluster; write the best as a plan.",
    "explain": "Say why the best is the best, by what the others lose, and what would change it.",
    "report": "Write one HTML page: ranking, lengths, bytes, memory, timeline, sources.",
    "show": "Show a plan (plan.json) or a study (its Journal file).",
    "export": "Write a plan as a Python snippet, YAML, JSON, CSV or shell variables.",
    "validate": "Check model, cluster, plan and study files; score recorded measurements.",
    "profile": "Measure this cluster: collectives, copies, products, attention; write it down.",
    "import": "Read logs of nccl-tests or hccl_test into a cluster file.",
    "presets": "List models and clusters, or show one with the source of each number.",
    "doctor": "Look at versions, backends, devices, folders, locks and tools.",
    "kernels": "Tune the launch parameters of the pack, unpack and merge kernels.",
}
"""What ``hp-tune --help`` says of each, so that it imports none of them."""


class ReaderGoneError(Exception):
    """Whoever read our output has closed it, as ``head -1`` does after a line."""


@contextmanager
def _told_when_nobody_reads() -> Iterator[None]:
    """Raise an error of ours in place of one that click would end the program for, with code 1."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderGoneError from None


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = HOMES.get(cmd_name)
        if home is None:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command: click.Command = getattr(import_module(home), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in HOMES and not name.startswith("-"):
            close = nearest(name, HOMES)
            way_out = f"did you mean {close!r}?" if close else f"commands: {', '.join(HOMES)}"
            ctx.fail(f"No such command {name!r}; {way_out}")
        return super().resolve_command(ctx, args)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Read the options before a command, among them those that print and end."""
        with _told_when_nobody_reads():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        with _told_when_nobody_reads():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SHORT_HELP[name]) for name in HOMES])


def _print_version(context: click.Context, option: click.Parameter, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("hp-tune")
    except PackageNotFoundError:
        found = "of a checkout"
    click.echo(f"hp-tune {found}")
    context.exit()


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True,
              callback=_print_version, help="Say which version this is.")  # fmt: skip
def cli() -> None:
    """Choose how to parallelise attention over the sequence, and say why."""
