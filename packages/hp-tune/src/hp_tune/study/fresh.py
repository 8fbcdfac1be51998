"""A new study as lines of a Journal file, and whether one already has all points, without Optuna.

What follows in a study, and every study that is anything else than this, is Optuna's business: its
import takes longer than all the rest of a search by prediction. The format is that of its Journal:
one JSON object per record. A study is its creation, its attributes, and a whole trial per point.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.study.records import STATES, Fate, attributes_of, choices, values_of

if TYPE_CHECKING:
    from hp_tune.searching.evaluate import Point

__all__ = ["first_records", "holds"]

CREATE_STUDY, SET_STUDY_USER_ATTR, CREATE_TRIAL = 0, 2, 4
"""Numbers of Optuna's `JournalOperation`."""
MINIMIZE = 1
"""Of its `StudyDirection`."""
STATE_NUMBERS = {"COMPLETE": 1, "PRUNED": 2}
"""Of its `TrialState`; what waits is measured, with Optuna."""


def first_records(
    name: str,
    inputs: Mapping[str, Any],
    points: Sequence[tuple[Point, Fate, str]],
    cp_size: int,
    objectives: int,
) -> Iterator[str]:
    """Yield the lines of a new study, as Optuna would write them.

    Args:
        name: Of the study.
        inputs: All that its numbers follow from.
        points: Each with what became of it and its key; none of them waits.
        cp_size: Number of CP ranks.
        objectives: How many values a trial has.
    """
    worker = {"worker_id": f"hp-tune-{os.getpid()}-{os.urandom(8).hex()}"}
    directions = [MINIMIZE] * objectives
    yield _line({"op_code": CREATE_STUDY, **worker, "study_name": name, "directions": directions})
    of_study = {**worker, "study_id": 0}
    yield _line({"op_code": SET_STUDY_USER_ATTR, **of_study, "user_attr": {"inputs": dict(inputs)}})
    possible = choices(cp_size)
    distributions = {
        key: json.dumps({"name": "CategoricalDistribution", "attributes": {"choices": found}})
        for key, found in possible.items()
    }
    for point, fate, key in points:
        values = values_of(point, fate, objectives)
        several = values is not None and len(values) > 1
        now = datetime.now(tz=UTC).isoformat(timespec="microseconds")
        yield _line(
            {
                "op_code": CREATE_TRIAL,
                **of_study,
                "datetime_start": now,
                "state": STATE_NUMBERS[STATES[fate]],
                "value": values[0] if values is not None and not several else None,
                "values": values if several else None,
                "datetime_complete": now,
                "distributions": distributions,
                "params": {
                    name: possible[name].index(value)
                    for name, value in point.config.model_dump().items()
                },
                "user_attrs": attributes_of(point, fate, key, cp_size),
                "system_attrs": {},
                "intermediate_values": {},
            }
        )


def holds(
    path: Path, name: str, inputs: Mapping[str, Any], objectives: int, keys: set[str]
) -> bool:
    """Return whether a file is such a study, of these inputs, and has all of these points.

    It is False for everything that Optuna should look at: another study, a file that is broken or
    torn, records of other kinds.
    """
    try:
        content = path.read_bytes()
        records = [json.loads(line) for line in content.splitlines()]
    except (OSError, ValueError):
        return False
    if not content.endswith(b"\n") or not all(isinstance(one, dict) for one in records):
        return False
    first, trials = records[:2], records[2:]
    if [one.get("op_code") for one in first] != [CREATE_STUDY, SET_STUDY_USER_ATTR]:
        return False
    if any((one.get("op_code"), one.get("study_id")) != (CREATE_TRIAL, 0) for one in trials):
        return False
    as_json = json.loads(json.dumps({"inputs": dict(inputs)}))
    points = [one.get("user_attrs", {}).get("point") for one in trials]
    return (
        first[0].get("study_name") == name
        and first[0].get("directions") == [MINIMIZE] * objectives
        and first[1].get("user_attr") == as_json
        and None not in points
        and keys <= set(points)
    )


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"
