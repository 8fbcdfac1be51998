"""Measure our context parallelism beside its peers on 4 gloo ranks: correct first, then timed.

python benchmarks/peers/bench.py [--seq 4096] [--heads 8:2] [--causal yes] [--only verl,ours]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
sys.path[0] = str(HOME)  # `peers` is then a package, here and in the ranks

from provenance import provenance  # noqa: E402

from peers.cases import HEADS, SEQS, cases  # noqa: E402
from peers.report import LIBRARIES, show_case, show_verdicts  # noqa: E402
from peers.run import Bench  # noqa: E402
from peers.verdict import failures_of_ours, verdicts  # noqa: E402

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": 2**25, "MALLOC_TRIM_THRESHOLD_": 2**32}
"""glibc returns freed megabytes to the system and takes them again page by page: not in a step."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; exit code 1 if one of our modes is wrong, fails or sends other bytes."""
    options = arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, size in KEEP_MEMORY.items():
        os.environ.setdefault(name, str(size))
    masks = [answer == "yes" for answer in options.causal]
    rows = []
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder), options.only) as bench:
        for case in cases(options.seq, options.heads, masks):
            found = bench.run(case, options.rounds)
            show_case(case, found, options.rounds)
            rows += found
            if options.record is not None:
                taken = provenance(libraries=LIBRARIES)
                with options.record.open("a") as file:
                    file.writelines(json.dumps({**row, **taken}) + "\n" for row in found)
    show_verdicts(verdicts(rows))
    failed = failures_of_ours(rows)
    for line in failed:
        print(f"ours is not right: {line}", file=sys.stderr)
    return 1 if failed else 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; lists are separated by commas."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seq", type=_numbers, default=SEQS, help="global lengths: 2048,4096")
    parser.add_argument("--heads", type=_words, default=HEADS, help="query:kv heads: 8:8,8:2")
    parser.add_argument(
        "--causal", type=_words, default=["yes", "no"], help="yes, no or yes,no (default)"
    )
    parser.add_argument("--only", type=_words, default=[], help="parts of contenders' names")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; 0: check and count")
    parser.add_argument("--record", type=Path, help="append the rows to this file as JSON lines")
    return parser.parse_args(argv)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


if __name__ == "__main__":
    sys.exit(main())
