"""``plan.json``: the answer of a search as a file that a training script loads.

No torch, no optuna and no code from the file: loading is a JSON parse and a digest.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import ValidationError

from hp_tune.errors import PlanSchemaError, UsageError
from hp_tune.files import load_json, sha256
from hp_tune.output import write_text
from hp_tune.plans.plan import SCHEMA, PlanFile

__all__ = ["VARIABLE", "load", "write"]

VARIABLE = "HP_TUNE_PLAN"
"""Names the plan that `load` reads when it is given no path."""


def write(plan: PlanFile, path: Path) -> None:
    """Write ``plan`` to ``path`` as one step: a reader sees the old file or the new one."""
    content = {**plan.content(), "digest": plan.digest}
    write_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def load(path: str | Path | None = None) -> PlanFile:
    """Return the plan in ``path``.

    Args:
        path: The file; None takes what the environment variable ``HP_TUNE_PLAN`` names.

    Raises:
        PlanSchemaError: It is missing, not a plan, of another schema, or was changed since it was
            written.
    """
    path = Path(path) if path is not None else _path_from_environment()
    try:
        data = load_json(path)
    except UsageError as error:
        raise PlanSchemaError(error.message, "write one with `hp-tune search --out`") from None
    if data.get("schema") != SCHEMA:
        raise _other_schema(path, data.get("schema"))
    try:
        plan = PlanFile.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise PlanSchemaError(f"{path}: {key}: {problem['msg']}") from None
    if plan.digest != sha256(plan.content()):
        raise PlanSchemaError(
            f"{path}: its digest does not match its content: it was changed after it was written",
            "write it again with `hp-tune search --out`",
        )
    return plan


def _other_schema(path: Path, schema: object) -> PlanSchemaError:
    """Return the error of a plan that is older or newer than this hp-tune, or of no plan at all."""
    kind, _, reads = SCHEMA.rpartition("/")
    found, _, number = str(schema).rpartition("/")
    must = f"{path}: schema ({schema!r}) must be {SCHEMA!r}, which this hp-tune reads"
    if found != kind or not (number.isascii() and number.isdecimal()):
        return PlanSchemaError(f"{must}: it is no plan", "write one with `hp-tune search --out`")
    if int(number) < int(reads):
        return PlanSchemaError(
            f"{must}: an older hp-tune wrote it",
            f"write it again with this one: `hp-tune search ... --out {path}`",
        )
    return PlanSchemaError(
        f"{must}: a newer hp-tune wrote it",
        f"install that one here, or write it again: `hp-tune search ... --out {path}`",
    )


def _path_from_environment() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        raise PlanSchemaError(
            f"load: there is no path, and {VARIABLE} is not set",
            f"pass the path of a plan, or set {VARIABLE}=plan.json on every rank",
        )
    return Path(named)
