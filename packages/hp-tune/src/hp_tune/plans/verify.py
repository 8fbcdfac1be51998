"""Whether all ranks of a job hold the same plan, found out before anything is exchanged.

A rank with another plan, an edited copy or none waits for collectives that its peers never start.
Here every rank sends one header, whatever became of its plan::

    | status 1 | digest 32 | text length 2 | text 989 |     bytes
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hp_tune.errors import RankMismatchError, TuneError
from hp_tune.plans.plan import PlanFile
from hp_tune.plans.plan_file import VARIABLE, load

__all__ = ["verify_ranks"]

WHERE = "verify_ranks"
HELD, NONE, BROKEN = 0, 1, 2
TEXT_AT = 1 + 32 + 2


def verify_ranks(plan: PlanFile | str | Path | None = None, group: Any = None) -> PlanFile:
    """Return the plan if every rank of ``group`` holds the same one.

    Every rank must call it, also one that has no plan: it is one all-gather of 1 KiB, and what is
    wrong on one rank is the same error on all. A path is loaded here, so that a file that is
    missing on one host is an error there and not a hang elsewhere.

    Args:
        plan: A plan, the path of one, or None for what ``HP_TUNE_PLAN`` names on this rank.
        group: The process group; None takes all ranks. Without `torch.distributed` only this
            process is checked.

    Raises:
        RankMismatchError: With one text on all ranks: which ranks hold which digest, which hold
            none, and what is wrong with the file of others.
    """
    found, header = _header(plan)
    dist = importlib.import_module("torch.distributed")
    if dist.is_available() and dist.is_initialized():
        agreement = importlib.import_module("hp_comm.agreement")
        ours = dist.group.WORLD if group is None else group
        rows = agreement.gather_headers(WHERE, ours, header.ljust(agreement.HEADER_BYTES, b"\0"))
        headers = [bytes(row) for row in rows.tolist()]
    else:
        headers = [header]
    problem = _verdict(headers)
    if problem:
        raise RankMismatchError(
            problem, "give every rank the same file, such as one on a shared folder"
        )
    assert found is not None, "a rank without a plan is a problem"
    return found


def _header(plan: PlanFile | str | Path | None) -> tuple[PlanFile | None, bytes]:
    """Return this rank's plan, if it has one, and what it tells the others."""
    if plan is None and not os.environ.get(VARIABLE):
        return None, _packed(NONE, b"", f"{VARIABLE} is not set")
    try:
        found = plan if isinstance(plan, PlanFile) else load(plan)
        digest = bytes.fromhex(found.digest)
    except TuneError as error:
        return None, _packed(BROKEN, b"", error.message)
    except (TypeError, ValueError) as error:  # no path at all, or a plan that was never sealed
        return None, _packed(BROKEN, b"", f"{type(plan).__name__} is no plan: {error}")
    return found, _packed(HELD, digest, "")


def _packed(status: int, digest: bytes, text: str) -> bytes:
    words = text.encode()[: 1024 - TEXT_AT]
    return bytes([status]) + digest.ljust(32, b"\0") + len(words).to_bytes(2, "big") + words


def _verdict(headers: Sequence[bytes]) -> str:
    """Say what is wrong, from the headers alone: the same words on every rank; empty if nothing."""
    kinds: dict[str, list[int]] = {}
    for rank, header in enumerate(headers):
        length = int.from_bytes(header[33:35], "big")
        text = header[TEXT_AT : TEXT_AT + length].decode(errors="ignore")
        said = {
            HELD: header[1:33].hex()[:12],
            NONE: f"none ({text})",
            BROKEN: f"one that cannot be used ({text})",
        }[header[0]]
        kinds.setdefault(said, []).append(rank)
    if len(kinds) == 1 and headers[0][0] == HELD:
        return ""
    told = " and ".join(f"{said} on {_ranks(ranks)}" for said, ranks in kinds.items())
    return f"{WHERE}: the plan's digest must be the same on all {len(headers)} ranks, not {told}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
