"""``hp-tune`` as a program whose trials run nothing: the tests' measurer in place of torchrun.

python _fake_search.py LOG SECONDS STAYS search --mode measured ...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _fake_measurer import FakeMeasurer

import hp_tune.commands.search as command
from hp_tune.cli import main

if __name__ == "__main__":
    log, seconds, stays, *arguments = sys.argv[1:]
    fake = FakeMeasurer(log=Path(log), seconds=float(seconds), stays=int(stays), child=stays != "0")
    command._measurer = lambda *_: lambda workload: fake  # type: ignore[assignment]
    main(arguments)
