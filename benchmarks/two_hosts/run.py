"""Measure how much communication each mode leaves exposed when the link between hosts is slow.

    nox -s bench_overlap [-- --rounds 15 --record FILE.jsonl --timeline]

Two hosts of two ranks each are made as network namespaces on this machine (see `rig`), which needs
root; elsewhere it says so and ends well, or badly with HP_REQUIRE_TWO_HOSTS=1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import report
from rig import TwoHosts, Unavailable

HERE = Path(__file__).resolve().parent


def numbers(text: str) -> list[float]:
    """Read ``1,2,3``."""
    return [float(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit code 1 if a mode was not right or exposes too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds, interleaved")
    parser.add_argument("--rates", type=numbers, default=[150.0, 500.0, 1500.0], help="mbit/s")
    parser.add_argument("--families", default="ulysses,hybrid,colossal")
    parser.add_argument("--groups", type=numbers, default=[2, 4, 8], help="head groups")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument(
        "--emulate", action="store_true", help="sleep instead of computing, as beside a device"
    )
    parser.add_argument("--limit", type=float, default=1800, help="seconds, then it ends")
    parser.add_argument("--timeline", action="store_true", help="print when each exchange ran")
    parser.add_argument("--record", type=Path, help="append the rows to this file as JSON lines")
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        found = measure(options)
    except Unavailable as reason:
        print(f"no two hosts here: {reason}")
        return 1 if os.environ.get("HP_REQUIRE_TWO_HOSTS") == "1" else 0
    return report.report(found, timeline=options.timeline, record=options.record)


def stop(number: int, frame: FrameType | None) -> None:
    """Leave by the same way as an error does, which deletes the hosts."""
    raise SystemExit(128 + number)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what the ranks found."""
    with tempfile.TemporaryDirectory() as folder, TwoHosts() as hosts:
        config = {
            "sizes": {
                "seq": options.seq,
                "heads": options.heads,
                "head_size": options.head_size,
                "hidden": options.hidden,
            },
            "families": options.families.split(","),
            "groups": [int(count) for count in options.groups],
            "rates": options.rates,
            "rounds": options.rounds,
            "emulate": options.emulate,
            "result": f"{folder}/found.json",
        }
        hosts.run(
            [str(HERE / "job.py"), json.dumps(config)], python=sys.executable, limit=options.limit
        )
        found: list[dict[str, Any]] = json.loads(Path(config["result"]).read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
