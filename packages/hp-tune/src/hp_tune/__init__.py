"""Choose how to parallelise attention over the sequence, and say why.

``hp-tune search`` is the way in; a training script needs only `load`. Importing this package
imports neither torch nor optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_tune.clusters.cluster import Cluster
    from hp_tune.clusters.cluster_files import read_cluster
    from hp_tune.cost.predict import Prediction, predict
    from hp_tune.errors import (
        NoConfigurationError,
        PlanMismatchError,
        PlanSchemaError,
        RankMismatchError,
        StudyError,
        TuneError,
        UsageError,
    )
    from hp_tune.explanation.explain import Explanation, explain
    from hp_tune.models.hf_config import model_from_config, read_model
    from hp_tune.models.model import Attention, Model
    from hp_tune.plans.plan import Entry, PlanFile
    from hp_tune.plans.plan_file import load
    from hp_tune.plans.verify import verify_ranks
    from hp_tune.searching.engine import Result, search
    from hp_tune.workload import Config, Workload

__all__ = [
    "Attention",
    "Cluster",
    "Config",
    "Entry",
    "Explanation",
    "Model",
    "NoConfigurationError",
    "PlanFile",
    "PlanMismatchError",
    "PlanSchemaError",
    "Prediction",
    "RankMismatchError",
    "Result",
    "StudyError",
    "TuneError",
    "UsageError",
    "Workload",
    "explain",
    "load",
    "model_from_config",
    "predict",
    "read_cluster",
    "read_model",
    "search",
    "verify_ranks",
]

_HOMES = {
    "hp_tune.clusters.cluster": ("Cluster",),
    "hp_tune.clusters.cluster_files": ("read_cluster",),
    "hp_tune.cost.predict": ("Prediction", "predict"),
    "hp_tune.searching.engine": ("Result", "search"),
    "hp_tune.errors": (
        "NoConfigurationError",
        "PlanMismatchError",
        "PlanSchemaError",
        "RankMismatchError",
        "StudyError",
        "TuneError",
        "UsageError",
    ),
    "hp_tune.explanation.explain": ("Explanation", "explain"),
    "hp_tune.models.hf_config": ("model_from_config", "read_model"),
    "hp_tune.models.model": ("Attention", "Model"),
    "hp_tune.plans.plan": ("Entry", "PlanFile"),
    "hp_tune.plans.plan_file": ("load",),
    "hp_tune.plans.verify": ("verify_ranks",),
    "hp_tune.workload": ("Config", "Workload"),
}

__getattr__, __dir__ = lazy_names(
    __name__, {name: home for home, names in _HOMES.items() for name in names}
)
