"""A program that runs a job for ever; ``python controller.py FOLDER``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import NoReturn

from hp_tune.torchrun import Launcher


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, _stop)
Launcher(nproc_per_node=2).run("toy_job", {"do": "stay"}, folder=Path(sys.argv[1]), timeout=100)
