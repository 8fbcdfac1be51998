"""The ``hp-tune`` program: signals and exit codes; the commands are in `hp_tune.commands`.

This file imports little, so that an early signal finds its handlers in place. Exit codes: 0 done;
2 wrong use; 3 no valid configuration; 4 the budget ran out; 5 a device or compiler that is not
here; 6 every measured trial failed; 7 a wrong result; 8 a study or plan that cannot be used; 130
and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import click

__all__ = ["main"]


class _SignalledError(BaseException):
    """Raised out of whatever runs when a signal asks to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``hp-tune`` and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    code = 0
    try:
        _make_streams_usable()
        code = _run(given)
    except _SignalledError as stopped:
        _ignore_further_signals()
        name = signal.Signals(stopped.number).name
        code = 128 + stopped.number
        _say(given, code, "interrupted", f"stopped by {name}", _resume(given))
    except BrokenPipeError:  # dropped below
        pass
    _write_out()
    sys.exit(code)


def _write_out() -> None:
    """Write what is left; drop it where its reader has gone, as in ``hp-tune presets | head -1``.

    Python would try again while it ends, and exit with 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _make_streams_usable() -> None:
    """Write what an encoding has no character for as an escape, and into closed streams nothing.

    Python has no stream at all where a shell has closed one (``>&-``).
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: list[str]) -> int:
    # a second is the budget: no collector for so short a run, no scan of every installed package
    # for pydantic plugins (together a fifth of the time)
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    import click

    from hp_tune.commands import ReaderGoneError, cli
    from hp_tune.errors import TuneError

    try:
        cli.main(arguments, prog_name="hp-tune", standalone_mode=False)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        hint = _variable(error)
        if "--json" not in arguments and isinstance(error, click.UsageError):
            with suppress(OSError):
                error.show()
                if hint:
                    print(f"  {hint}", file=sys.stderr)
        else:
            _say(arguments, 2, "usage", error.format_message(), hint)
        return 2
    except click.Abort:
        return 130
    except TuneError as error:
        _say(arguments, error.exit_code, error.id, error.message, error.hint)
        return error.exit_code
    except ReaderGoneError:
        raise BrokenPipeError from None
    except OSError as error:  # a full disk, say: nobody is helped by where in our code
        place = f"{error.filename}: " if error.filename else ""
        way_out = "look at it with `hp-tune doctor`"
        _say(arguments, 2, "system", f"{place}{error.strerror or error}", way_out)
        return 2
    return 0


def _variable(error: click.ClickException) -> str:
    """Return a hint to the variable of the environment that a wrong value is from, if it is."""
    from click.core import ParameterSource

    option, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if option is None or context is None:
        return ""
    is_variable = context.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT
    return f"that is the environment variable {option.envvar}" if is_variable else ""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _SignalledError(number)


def _ignore_further_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _resume(arguments: list[str]) -> str:
    import shlex

    if arguments[:1] not in (["search"], ["kernels"]):
        return ""
    return f"nothing recorded is lost; resume with: {shlex.join(['hp-tune', *arguments])}"


def _say(arguments: list[str], code: int, name: str, message: str, hint: str) -> None:
    """Write one error to stderr, as an object if the output is JSON."""
    if "--json" in arguments:
        text = json.dumps({"code": code, "id": name, "message": message, "hint": hint})
    else:
        text = f"hp-tune: {message}" + (f"\n  {hint}" if hint else "")
    with suppress(OSError):  # nobody reads it; the exit code still says it
        print(text, file=sys.stderr)
