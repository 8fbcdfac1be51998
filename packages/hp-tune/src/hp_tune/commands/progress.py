"""What a command says while it works: sentences on stderr, and a bar where that is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hp_tune.commands.options import tell

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Bar"]


class Bar:
    """Sentences as they come, and below them how far the work is.

    The bar has what is worked on, how much is done, and the time that is left once that can be
    told. It is drawn on a terminal only, from the first `step` on, and wiped away at the end: what
    is no terminal gets the sentences alone. Stdout is left to the results.

    Args:
        title: What is done.
        quiet: Say and show nothing.
    """

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._shown: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None

    def tell(self, sentence: str) -> None:
        """Say a sentence."""
        if self._quiet:
            return
        if self._shown is None:
            tell(sentence)
        else:
            console = self._shown[0].console
            console.print(f"hp-tune: {sentence}", markup=False, highlight=False, soft_wrap=True)

    def step(self, what: str, done: int, total: int) -> None:
        """Show what is worked on now, and how many of how many are done."""
        if self._quiet or not sys.stderr.isatty():
            return
        if self._shown is None:
            self._shown = _start(self._title)
        progress, task = self._shown
        known = progress.tasks[0].total
        if known is not None and known != total:  # other work, of which no time is known yet
            progress.remove_task(task)
            task = progress.add_task(self._title, total=total)
            self._shown = progress, task
        # what is new is drawn at once, whatever the thread that draws has had time for; more of the
        # same, which may come thousands of times a second, when it has
        description = f"{self._title}: {what}"
        new = description != progress.tasks[0].description
        progress.update(task, description=description, completed=done, total=total, refresh=new)


def _start(title: str) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.progress import TimeRemainingColumn as Remaining

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        Elapsed(),
        TextColumn("left"),
        Remaining(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # results are none of a bar's business
    )
    progress.start()
    return progress, progress.add_task(title, total=None)
