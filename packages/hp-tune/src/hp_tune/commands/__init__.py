"""The commands of ``hp-tune``: read options, ask the engine, print.

Each command is one file, imported when it is run: the program answers in a fraction of a second.
"""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword

import click

__all__ = ["cli"]

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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SHORT_HELP[name]) for name in HOMES])


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def cli() -> None:
    """Choose how to parallelise attention over the sequence, and say why."""
