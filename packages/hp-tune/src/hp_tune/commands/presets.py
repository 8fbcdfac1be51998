"""``hp-tune presets``: the models and clusters that come along."""

from __future__ import annotations

from pathlib import Path

import click

from hp_mesh.checks import nearest
from hp_tune.commands.options import json_option
from hp_tune.errors import UsageError

__all__ = ["presets"]


@click.command()
@click.argument("name", required=False)
@json_option()
def presets(name: str | None, as_json: bool) -> None:
    """List models and clusters, or show one with the source of each number.

    NAME is a preset or, as for search, a cluster file (YAML), a config.json or a folder with one.
    """
    from hp_tune.clusters.cluster_files import cluster_presets, read_cluster
    from hp_tune.models.hf_config import model_presets, read_model
    from hp_tune.printing import render

    if name is None:
        models = [read_model(known) for known in model_presets()]
        render.presets(models, [read_cluster(known) for known in cluster_presets()], as_json)
    elif name in cluster_presets():
        render.cluster(read_cluster(name), as_json)
    elif name.lower() in {known.lower() for known in model_presets()}:
        render.model(read_model(name), as_json)
    elif Path(name).suffix.lower() in (".yaml", ".yml") and Path(name).is_file():
        render.cluster(read_cluster(name), as_json)
    elif Path(name).exists():
        render.model(read_model(name), as_json)
    else:
        known = {one.lower(): one for one in (*model_presets(), *cluster_presets())}
        close = nearest(name.lower(), known)
        guess = f"did you mean {known[close]}? " if close else ""
        raise UsageError(
            f"there is no preset {name!r}", f"{guess}presets: {', '.join(known.values())}"
        )
