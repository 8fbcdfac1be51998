"""``--config FILE``: the options of ``hp-tune search`` in a file, under the names that they have.

Click knows which of several values counts: the command line, ``HP_TUNE_<OPTION>``, the file, the
default. Here a file is read, and each of its values is checked as if it had been typed, so that a
mistake is said with the place where it stands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hp_mesh.checks import nearest
from hp_tune.errors import UsageError
from hp_tune.files import Positions, load_table

__all__ = [
    "config_option",
    "is_config",
    "options_of",
    "read_config",
    "strange_variables",
    "take_config",
    "told_by",
]

VERSION = 1
DESCRIPTIONS = ("model", "cluster")
"""What stands outside of all sections."""
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "workload": (
        "seq", "seq-hist", "documents", "batch", "dtype", "layout", "causal", "dense-mask",
        "handoffs", "recompute",
    ),
    "parallel": ("cp", "tp", "world"),
    "measure": (
        "backend", "nproc-per-node", "host", "master-addr", "trial-timeout", "rounds", "warmup",
    ),
    "output": ("out", "study", "storage"),
}  # fmt: skip
REST = "search"
"""The section of all other options."""
NOT_IN_FILES = ("config", "json", "quiet", "help")

PREFIX = "HP_TUNE_"
OTHERS = ("HP_TUNE_PLAN", "HP_TUNE_PLAN_DIGEST")
"""Variables that are no options: what training scripts load, and what `hp-tune export` writes."""

WORDS = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}


def config_option(command: click.Command) -> click.Command:
    """Add ``--config`` to ``search``, and to each of its options the variable ``HP_TUNE_<OPTION>``.

    ``--json`` has none: what reads the output must know it.
    """
    option = click.Option(
        ["--config"],
        is_eager=True,
        callback=take_config,
        type=click.Path(path_type=Path, dir_okay=False),
        help="A YAML, JSON or TOML file with options; these and HP_TUNE_<OPTION> come first.",
    )
    command.params.insert(0, option)
    for known in command.params:
        name = known.opts[0].removeprefix("--")
        if name not in ("json", "help"):
            known.envvar = f"{PREFIX}{name.replace('-', '_').upper()}"
    return command


def take_config(
    context: click.Context,
    option: click.Parameter,
    path: Path | None,
    *,
    without: Collection[str] = (),
) -> Path | None:
    """Let the values in a file stand in for the defaults of a command; a callback of an option.

    Args:
        context: Of the command, ``search`` or one that has its options.
        option: ``--config``.
        path: The file.
        without: Parameters that are not those of ``search``, though they are called so.
    """
    if path is not None:
        from hp_tune.commands.search import search

        found = read_config(path, search)
        context.default_map = {key: found[key] for key in found if key not in without}
    return path


def told_by(context: click.Context) -> dict[str, str]:
    """Return which option was told by what: ``command line``, ``environment`` or ``file``."""
    found = {}
    for option in context.command.params:
        source = context.get_parameter_source(option.name) if option.name else None
        if source in WORDS:
            found[option.opts[0].removeprefix("--")] = WORDS[source]
    return found


def strange_variables(command: click.Command, environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable ``HP_TUNE_...`` that nothing reads, with the nearest.

    Args:
        command: ``search``, whose options have variables.
        environment: Of this process.
    """
    known = {str(option.envvar) for option in command.params if option.envvar} | set(OTHERS)
    names = [name.removeprefix(PREFIX) for name in sorted(known)]
    found = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            close = nearest(name.removeprefix(PREFIX), names)
            way_out = f"; did you mean {PREFIX}{close}?" if close else ""
            found.append(f"{name} is set, and no option has this variable{way_out}")
    return found


def is_config(data: Mapping[str, Any]) -> bool:
    """Return whether a file that holds ``data`` is one for ``--config``."""
    return any(key in data for key in ("cluster", *SECTIONS, REST))


def options_of(command: click.Command) -> dict[str, dict[str, click.Option]]:
    """Return what may stand in a file: options by name, by section; ``""`` is outside of all."""
    sections = {name: section for section, names in SECTIONS.items() for name in names}
    sections |= dict.fromkeys(DESCRIPTIONS, "")
    found: dict[str, dict[str, click.Option]] = {key: {} for key in ("", *SECTIONS, REST)}
    for option in command.params:
        name = option.opts[0].removeprefix("--")
        if isinstance(option, click.Option) and name not in NOT_IN_FILES:
            found[sections.get(name, REST)][name] = option
    return found


def read_config(path: Path, command: click.Command) -> dict[str, Any]:
    """Return the values in ``path`` by the parameter of ``command``, as they would be typed.

    Relative paths are made to start from the file's folder.

    Raises:
        UsageError: An unknown key, or a value that its option does not take; with its place.
    """
    data, positions = load_table(path)
    known = options_of(command)
    values: dict[str, Any] = {}
    version = data.pop("version", None)
    if version != VERSION or isinstance(version, bool):
        raise _wrong(
            path, positions, ("version",), f" ({version!r}) must be {VERSION}", "write version: 1"
        )
    for key, value in data.items():
        if key in known[""]:
            values |= _read(path, positions, (key,), known[""][key], value)
        elif key not in known or not key:
            raise _unknown(path, positions, (key,), known)
        elif not isinstance(value, dict):
            raise _wrong(
                path, positions, (key,), f" ({value!r}) must hold options",
                f"such as {key}: {{{next(iter(known[key]))}: ...}}",
            )  # fmt: skip
        else:
            for name, inner in value.items():
                if name not in known[key]:
                    raise _unknown(path, positions, (key, name), known)
                values |= _read(path, positions, (key, name), known[key][name], inner)
    return values


def _read(
    path: Path, positions: Positions, key: tuple[str, ...], option: click.Option, value: Any
) -> dict[str, Any]:
    """Return the value of one option by its parameter, checked by the option's own type."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise _wrong(path, positions, key, f" ({value!r}) must be true or false")
        return {str(option.name): value}
    items = value if isinstance(value, list) else [value]
    if not items or any(one is None or isinstance(one, bool | dict | list) for one in items):
        raise _wrong(
            path, positions, key, f" ({value!r}) must be a word, a number or a list of them",
            "leave the key out for the default",
        )  # fmt: skip
    typed = [_beside(path, option, str(one)) for one in items]
    text: Any = typed if option.multiple else ",".join(typed)
    try:
        option.type_cast_value(click.Context(click.Command("search")), text)
    except click.BadParameter as error:
        raise _wrong(path, positions, key, f": {error.message}") from None
    return {str(option.name): text}


def _beside(path: Path, option: click.Option, text: str) -> str:
    """Return a path as one from the file's folder; the name of a preset, and all else, as it is."""
    if option.name in DESCRIPTIONS:
        from hp_tune.clusters.cluster_files import cluster_presets
        from hp_tune.models.hf_config import model_presets

        presets = model_presets() if option.name == "model" else cluster_presets()
        beside = path.parent / text
        is_preset = text.lower() in {name.lower() for name in presets}
        return text if is_preset and not beside.exists() else str(beside)
    return str(path.parent / text) if isinstance(option.type, click.Path) else text


def _unknown(
    path: Path,
    positions: Positions,
    key: tuple[str, ...],
    known: Mapping[str, Mapping[str, click.Option]],
) -> UsageError:
    *section, name = key
    here = known[section[0]] if section else ("version", *known[""], *filter(None, known))
    elsewhere = {
        option: ".".join(filter(None, (where, option)))
        for where, options in known.items()
        for option in options
    }
    close = nearest(name, here) or elsewhere.get(name)
    close = close or elsewhere.get(nearest(name, elsewhere) or "")
    return UsageError(
        f"{_at(path, positions, key)}: unknown key {'.'.join(key)!r}",
        f"did you mean {close!r}?" if close else f"known keys: {', '.join(here)}",
    )


def _wrong(
    path: Path, positions: Positions, key: tuple[str, ...], problem: str, way_out: str = ""
) -> UsageError:
    return UsageError(f"{_at(path, positions, key)}: {'.'.join(key)}{problem}", way_out)


def _at(path: Path, positions: Positions, key: tuple[str, ...]) -> str:
    return ":".join(map(str, (path, *positions.get(key, ()))))
