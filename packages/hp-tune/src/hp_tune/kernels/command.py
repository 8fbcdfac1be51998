"""``hp-tune kernels``: read options, tune, print, write. Imports little until it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hp_tune.commands.options import tell
from hp_tune.commands.progress import Bar
from hp_tune.errors import NoConfigurationError, UsageError, WrongResultError

if TYPE_CHECKING:
    from hp_tune.kernels.devices import Asked
    from hp_tune.kernels.tuning import Settings, Tuned
    from hp_tune.kernels.verdict import Judge, Mode

__all__ = ["kernels"]

OUT = Path("configs")

Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)


def _folder_option(
    name: str, text: str, default: Path | None = None
) -> Callable[[Decorated], Decorated]:
    return click.option(
        name,
        type=click.Path(path_type=Path, file_okay=False),
        help=text,
        default=default,
        show_default=default is not None,
    )


def _number_option(
    name: str, text: str, kind: click.IntRange | click.FloatRange, default: float
) -> Callable[[Decorated], Decorated]:
    return click.option(name, type=kind, metavar="N", help=text, default=default, show_default=True)


@click.command()
@click.option(
    "--device",
    default=None,
    metavar="NAME",
    help="cuda, cuda:1, cuda-sm90, npu, an Ascend like ascend910b3, or cpu (correctness only).",
)
@click.option(
    "--shapes",
    default=None,
    metavar="LIST",
    help="Such as S8192-H32:8:8-D128-P8,S2048-H8:1:1-D64-P4-fp16: local positions, heads of each "
    "tensor, head size, ranks.  [default: three sizes of 32:8 heads]",
)
@click.option("--kernel", default=None, metavar="NAME", help="One kernel.  [default: all]")
@click.option("--compile-only", is_flag=True, help="Rank for an Ascend that is not here.")
@_folder_option(
    "--out",
    "For <kernel>.<device>.json; HP_KERNEL_CONFIGS names it to the runtime.  [default: configs]",
)
@click.option("--apply", is_flag=True, help="Write into the installed package, for everyone.")
@_number_option(
    "--budget",
    "Launches to try per kernel and shape; what cannot fit is free.",
    click.IntRange(min=1),
    40,
)
@_number_option(
    "--seed", "Of the sampler; the same gives the same study.", click.IntRange(min=0), 0
)
@_number_option("--timeout", "Seconds for one launch.", click.FloatRange(min=0.1), 120.0)
@_folder_option("--studies", "For Optuna Journal files, to resume from.", Path(".hp-tune"))
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def kernels(**options: Any) -> None:
    """Tune how kernels are launched on a device, and write what the runtime reads.

    On a device every launch is compared with the reference first and then timed beside a copy of
    the same bytes. --device cpu only compares: it is no tuning and writes nothing.

    Exit codes: 0 done, or every launch right on cpu; 2 wrong use; 3 no launch works; 5 no such
    device or compiler here; 7 a wrong result on cpu; 8 a study that cannot be used.
    """
    from hp_tune.kernels import shapes
    from hp_tune.kernels.devices import Asked
    from hp_tune.kernels.tuning import Settings, Tuned, tune

    if options["device"] is None:
        raise UsageError(
            "--device must say where launches are tried",
            "cuda or npu measures there; cpu checks that they are right, and "
            "ascend910b3 --compile-only ranks them, without a device",
        )
    asked = Asked.parse(options["device"])
    mode = _mode(asked, options["compile_only"])
    names = shapes.kernels(options["kernel"])
    wanted = options["shapes"]
    given = shapes.defaults(asked.family) if wanted is None else shapes.parse(wanted)
    folder = _folder(options, mode)
    judge = _judge(options["timeout"])
    notes: list[str] = []
    found: list[Tuned] = []
    files: dict[str, Path] = {}
    settings: Settings | None = None
    try:
        facts = judge.open(asked, mode)
        settings = Settings(mode, facts, options["budget"], options["seed"], options["studies"])
        if folder is not None:
            _make(folder)
            _keep_measured(settings, names, folder)
        for name in names:
            distinct, twins = shapes.distinct(name, given)
            notes += [
                f"{name}: {one} has the sizes of {twin}, and is not tuned again"
                for one, twin in twins
            ]
            of_kernel = [Tuned(name, shape) for shape in distinct]
            for tuned in of_kernel:
                found.append(tuned)
                with Bar("tuning") as bar:
                    tune(tuned, settings, judge, bar.tell, bar.step)
            if folder is not None and any(one.best for one in of_kernel):
                files[name] = _write(settings, of_kernel, folder)
    finally:  # an interrupt too prints what is known so far
        judge.close()
        if settings is not None:
            _print(settings, found, files, notes, options["as_json"])
    _end(settings, found)


def _mode(asked: Asked, compile_only: bool) -> Mode:
    if not compile_only:
        return "check" if asked.family == "cpu" else "measure"
    if asked.family != "ascend":
        raise UsageError(
            f"--compile-only ranks for an Ascend, not for {asked.name or asked.family}",
            "nox -s cuda_compile compiles the kernels for CUDA",
        )
    if not asked.name:
        raise UsageError(
            "--compile-only must know which Ascend is meant", "use --device ascend910b3"
        )
    return "compile"


def _folder(options: dict[str, Any], mode: Mode) -> Path | None:
    """Return where files are written; None for none."""
    from hp_comm.kernels import config

    out: Path | None = options["out"]
    if mode == "check":
        if out is not None or options["apply"]:
            raise UsageError(
                "--device cpu writes no file: an interpreter says nothing about speed",
                "leave out --out and --apply, or name a device",
            )
        return None
    if options["apply"] and out is not None:
        raise UsageError("--apply and --out name two places", "use one of them")
    folder = config.FOLDER if options["apply"] else out or OUT
    if not options["apply"] and folder.resolve() == config.FOLDER.resolve():
        raise UsageError(
            f"--out ({folder}) is the installed package", "say --apply if that is meant"
        )
    return folder


def _make(folder: Path) -> None:
    """Make the folder, or say that it cannot be written before hours are spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".hp-tune"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}", "use --out") from None


def _keep_measured(settings: Settings, names: Sequence[str], folder: Path) -> None:
    """Refuse to write a model's launches over measured ones."""
    from hp_comm.kernels import config
    from hp_tune.kernels.show import COMPILED

    if settings.mode != "compile":
        return
    for name in names:
        path = config.path_of(name, settings.facts.name, folder)
        if path.is_file() and not config.read(path).found_by.startswith(COMPILED):
            raise UsageError(
                f"{path} holds launches that were not found by a model", "use another --out"
            )


def _judge(timeout_s: float) -> Judge:
    from hp_tune.kernels.worker import Worker

    return Worker(timeout_s)


def _write(settings: Settings, found: Sequence[Tuned], folder: Path) -> Path:
    import datetime
    import importlib.metadata
    import shlex

    from hp_tune.kernels import entries, show

    kernel = found[0].kernel
    shapes = ",".join(str(one.shape) for one in found)
    words = ["hp-tune", "kernels", "--device", settings.facts.name, "--kernel", kernel]
    words += ["--shapes", shapes, "--budget", str(settings.budget), "--seed", str(settings.seed)]
    words += ["--compile-only"] if settings.mode == "compile" else []
    try:
        version = importlib.metadata.version("hp-tune")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        version = "of a checkout"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    by = show.found_by(settings, found, shlex.join(words), today, version)
    best = [(one.shape.sizes(kernel), one.best.launch) for one in found if one.best is not None]
    return entries.write(kernel, settings.facts.name, best, by, folder)


def _print(
    settings: Settings,
    found: Sequence[Tuned],
    files: dict[str, Path],
    notes: Sequence[str],
    as_json: bool,
) -> None:
    from hp_tune.kernels import show

    if as_json:
        import json

        click.echo(json.dumps(show.as_json(settings, found, files, notes), indent=1))
    else:
        click.echo(show.as_text(settings, found, files, notes))


def _end(settings: Settings, found: Sequence[Tuned]) -> None:
    """Raise where the result is not what was asked for; everything is printed already."""
    if settings.mode == "check":
        wrong = sum(one.count("failed") for one in found)
        total = sum(one.count("failed") + one.count("complete") for one in found)
        if wrong:
            raise WrongResultError(
                f"{wrong} of {total} launches are not right on cpu", "their reasons are above"
            )
        tell(f"all {total} launches are right; nothing was tuned, for --device is cpu")
        return
    without = [f"{one.kernel} at {one.shape}" for one in found if one.best is None]
    if without:
        raise NoConfigurationError(
            f"no launch works on {settings.facts.name} for {', '.join(without)}",
            "the reasons are above; the default launch is used there",
        )
