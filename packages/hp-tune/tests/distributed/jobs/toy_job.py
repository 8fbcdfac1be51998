"""A job without torch: ends, answers or stays as it is asked; every rank does the same or one."""

from __future__ import annotations

import os
import signal
import time

from hp_tune.torchrun.worker import answer, request

asked = request()
rank = int(os.environ["RANK"])
if asked["do"] == "answer":
    if rank == 0:
        answer({"ranks": int(os.environ["WORLD_SIZE"]), "backend": os.environ["HP_TUNE_BACKEND"]})
elif rank == asked.get("rank", 1) and asked["do"] == "raise":
    raise RuntimeError("out of luck")
elif rank == asked.get("rank", 1) and asked["do"] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(3600)  # longer than any deadline of a test
