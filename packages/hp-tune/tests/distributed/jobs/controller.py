"""A program that runs a job for ever; ``python controller.py FOLDER [HOST...]``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from hp_tune.torchrun import Launcher


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, _stop)
folder, *hosts = sys.argv[1:]
# what marks this process marks its nodes, also where no environment is handed on
marks = {name: value for name, value in os.environ.items() if name.startswith("HP_TUNE_TEST")}
launcher = Launcher(nproc_per_node=2, hosts=tuple(hosts), env=marks)
launcher.run("toy_job", {"do": "stay"}, folder=Path(folder), timeout=3600)
