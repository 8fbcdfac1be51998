"""One node's torchrun, started as ``python -m hp_tune.torchrun.node FOLDER INDEX ARGUMENTS...``.

It ends with the controller: its stdin is a pipe that the controller holds open and never writes
to, which works through ssh, srun and network namespaces, too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from hp_tune.torchrun.rank import NODE
from hp_tune.torchrun.worker import write_json

__all__: list[str] = []


def _die_with_stdin() -> None:
    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)  # and the workers with it, see hp_tune.torchrun.rank

    threading.Thread(target=wait, daemon=True).start()


def _main() -> None:
    _die_with_stdin()
    folder, index, *arguments = sys.argv[1:]
    # a rank that is only starting when this process ends sees that from its parent being another
    os.environ[NODE] = str(os.getpid())

    # the slow import, behind the watch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(arguments)
    except ChildFailedError as failed:
        codes = {str(rank): found.exitcode for rank, found in failed.failures.items()}
        write_json(Path(folder) / f"node{index}.json", {"exit_codes": codes})
        sys.stderr.write(f"{failed}\n")
        sys.exit(1)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


if __name__ == "__main__":
    _main()
