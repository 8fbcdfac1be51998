"""torchrun whose ranks are forks of it: what a script imports is loaded once and not on every rank.

python _forked.py RANKS SCRIPT ARGUMENTS...

The agent and what it tells the ranks are those of ``torchrun --standalone``; only the way in which
it starts them is another. A machine with two cores spends most of a small script's time on imports.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import runpy
import sys
import uuid
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def load(script: str) -> None:
    """Import what the script imports; what fails here is the script's to tell."""
    for node in ast.walk(ast.parse(Path(script).read_text(encoding="utf-8"))):
        with contextlib.suppress(Exception):
            if isinstance(node, ast.Import):
                for one in node.names:
                    importlib.import_module(one.name)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                module = importlib.import_module(node.module)
                for one in node.names:
                    getattr(module, one.name, None)  # lazy packages load it now


def run(script: str, *arguments: str) -> None:
    """Be one rank."""
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Load, and start the ranks."""
    ranks, script, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)  # as for a script that is run
    load(script)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, run)(script, *arguments)


if __name__ == "__main__":
    main()
