"""The search behind a study again, from its model and its cluster.

A study names both and holds digests of them, the workload, and every point that was looked at. What
is explained is predicted anew; how a point ran is taken from its trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.errors import PlanMismatchError, StudyError
from hp_tune.explanation.source import other_description, read_described
from hp_tune.files import sha256
from hp_tune.models.hf_config import read_model
from hp_tune.searching.engine import COST_MODEL, search
from hp_tune.searching.requirement import read_requirement
from hp_tune.searching.restriction import FIELDS, Restriction
from hp_tune.searching.result import Result
from hp_tune.study.records import measured_from
from hp_tune.study.studies import read_study
from hp_tune.study.trials import FINALS, point_key
from hp_tune.workload import Config, Workload

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["result_of_study"]


def result_of_study(
    path: Path, *, model: str | Path | None = None, cluster: str | Path | None = None
) -> Result:
    """Return the search that a study is of, made again.

    Args:
        path: Its Journal file.
        model: Where its model is described; None takes the preset of the name in the study.
        cluster: Likewise.

    Raises:
        StudyError: It is no study of configurations.
        PlanMismatchError: Another model, cluster or cost model than that of the study.
        UsageError: There is no preset of that name, and nothing was given.
    """
    name, attributes, trials = read_study(path)
    inputs: dict[str, Any] = attributes.get("inputs", {})
    named = name.partition(", cp ")[0].rpartition(" on ")
    if not trials or "workload.seq_len" not in inputs or not named[0]:
        raise StudyError(
            f"{path}: a study of configurations must have points of a workload, and {name!r} has "
            "none",
            "name the Journal file of `hp-tune search`; one of launches is shown by `hp-tune show`",
        )
    if inputs["cost_model"] != COST_MODEL:
        raise PlanMismatchError(
            f"{path}: cost_model of the study ({inputs['cost_model']}) must be that of this "
            f"hp-tune ({COST_MODEL}): the numbers would be others",
            "search again with another --study",
        )
    found_model = read_described("model", named[0], model, read_model, "study")
    digest = sha256(found_model.model_dump(mode="json"))
    if digest != inputs["model"]:
        raise other_description("model", named[0], inputs["model"], digest, model, "study")
    found_cluster = read_described("cluster", named[2], cluster, read_cluster, "study")
    digest = found_cluster.digest
    if digest != inputs["cluster"]:
        raise other_description("cluster", named[2], inputs["cluster"], digest, cluster, "study")
    workload = Workload.model_validate(
        {
            key.removeprefix("workload."): inputs[key]
            for key in inputs
            if key.startswith("workload.")
        }
    )
    configs = {Config.model_validate(trial.params) for trial in trials}
    result = search(
        found_model,
        found_cluster,
        workload,
        recompute="on" if workload.recompute else "off",
        overlap=any(config.overlap for config in configs),
        only=Restriction(
            {field: tuple(sorted({getattr(one, field) for one in configs}))
             for field in FIELDS.values()}
        ),
        require=read_requirement(inputs["require"]) if "require" in inputs else None,
    )  # fmt: skip
    ran = _ran(trials, attributes.get(FINALS, {}))
    return replace(
        result,
        ranking=tuple(
            replace(one, **ran.get(point_key(one.config), {}))
            for one in result.ranking
            if one.config in configs
        ),
        rejected=tuple(one for one in result.rejected if one[0] in configs),
    )


def _ran(trials: Sequence[FrozenTrial], finals: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of `Ranked` that say how a point ran, by its key; nothing of failures."""
    found: dict[str, dict[str, Any]] = {}
    for trial in trials:
        key = trial.user_attrs["point"]
        told = finals.get(key) or trial.user_attrs.get("measured")
        if told is not None and told["outcome"] == "ok":
            found[key] = {"measured": measured_from(told), "in_finals": key in finals}
    return found
