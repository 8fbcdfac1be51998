"""One rank, started as ``python -m hp_tune.torchrun.rank MODULE REQUEST`` before any large import.

It keeps the rank's logs and status file, and ends with the torchrun that started it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from hp_tune.torchrun.worker import write_json

__all__: list[str] = []

LAST_WORDS_S = (0.7, 10.0)
"""How long before its time is up a rank writes where it stands: a twentieth of all the time that it
has, within these limits; a busy machine takes its time for that, too."""
PR_SET_PDEATHSIG = 1
NODE = "HP_TUNE_NODE"
"""Process id of the torchrun that started this rank, see `hp_tune.torchrun.node`."""


def _die_with_parent() -> None:
    """End this process when the process that started it ends, however that one ends.

    torchrun starts its workers in sessions of their own, so that no signal to its process group
    reaches them, and when it is killed nobody tells them.
    """
    parent = int(os.environ.get(NODE) or os.getppid())
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _redirect(folder: Path, rank: str) -> None:
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(folder / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)


def _main() -> None:
    _die_with_parent()
    module, path = sys.argv[1:]
    folder, rank = Path(path).parent, os.environ["RANK"]
    _redirect(folder, rank)
    status: dict[str, Any] = {"rank": int(rank), "host": socket.gethostname(), "pid": os.getpid()}
    write_json(folder / f"rank{rank}.json", {**status, "state": "running", "at": time.time()})
    sys.argv = [module, path]
    # where it hangs, in its .err, a moment before it is ended
    left = float(os.environ.get("HP_TUNE_UNTIL", "inf")) - time.time()
    left -= min(max(LAST_WORDS_S[0], left / 20), LAST_WORDS_S[1])
    if 0 < left < threading.TIMEOUT_MAX:
        faulthandler.dump_traceback_later(left)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        failure = {"error": type(error).__name__, "message": str(error), "at": time.time()}
        text = traceback.format_exc()
        status |= {"state": "failed", **failure, "traceback": text}
        write_json(folder / f"rank{rank}.json", status)
        sys.stderr.write(text)
        sys.stderr.flush()
        # no teardown: a process group that waits for the others would hide the failure from them
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    write_json(folder / f"rank{rank}.json", {**status, "state": "done", "at": time.time()})


if __name__ == "__main__":
    _main()
