"""Read a cluster from a YAML file or a preset; a file may extend a preset or another file.

``extends: atlas-800t-a2`` takes everything that the file does not say itself; ``extends:
ours.yaml`` looks beside the file. Tiers are matched by name; a number, a curve or a list is
replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hp_mesh.checks import nearest
from hp_tune.clusters.cluster import Cluster
from hp_tune.errors import UsageError
from hp_tune.files import Positions, explain_validation, load_yaml

__all__ = ["cluster_presets", "read_cluster"]


def cluster_presets() -> dict[str, Path]:
    """Return the embedded cluster files by name."""
    folder = Path(str(files("hp_tune") / "presets" / "clusters"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_cluster(source: str | Path) -> Cluster:
    """Return the cluster described by a preset name or a YAML file."""
    path = Path(source)
    if not path.is_file():
        path = _preset(str(source), "--cluster", "must be a YAML file or a preset")
    data, positions = _load(path)
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        raise explain_validation(error, Cluster, str(path), positions) from None


def _preset(name: str, where: str, must: str) -> Path:
    presets = cluster_presets()
    if name not in presets:
        close = nearest(name, presets)
        names = ", ".join(presets)
        raise UsageError(
            f"{where} ({name}) {must}",
            f"did you mean {close}? presets: {names}" if close else f"presets: {names}",
        )
    return presets[name]


def _load(path: Path, below: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Positions]:
    data, positions = load_yaml(path)
    base = data.pop("extends", None)
    if base is None:
        return data, positions
    found = path.parent / str(base)
    if not found.is_file():
        found = _preset(str(base), f"{path}: extends", "must be a preset or a file beside this one")
    chain = (*below, path.resolve())
    if found.resolve() in chain:
        raise UsageError(f"{path}: extends ({base}) must not come back to the file itself")
    inherited, _ = _load(found, chain)
    own = _tiers(path, data)
    _tiers(found, inherited)
    merged = _merged(inherited, data)
    # a tier's place in the merged list differs from its place in the file
    names = [tier.get("name") for tier in merged.get("tiers", [])]
    moved: dict[tuple[str | int, ...], tuple[int, int]] = {}
    for key, place in positions.items():
        if len(key) > 1 and key[0] == "tiers" and isinstance(key[1], int):
            name = own[key[1]].get("name")
            if name in names:
                moved[("tiers", names.index(name), *key[2:])] = place
        else:
            moved[key] = place
    return merged, moved


def _tiers(path: Path, data: Mapping[str, Any]) -> list[Any]:
    """Return the tiers of a file, which are matched by name when it extends or is extended."""
    tiers = data.get("tiers", [])
    named = isinstance(tiers, list) and all(
        isinstance(tier, Mapping) and isinstance(tier.get("name"), str) for tier in tiers
    )
    if not named:
        raise UsageError(f"{path}: tiers ({tiers!r}) must be a list of tiers with a name each")
    names = [tier["name"] for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{path}: tier {name!r} must be there once, not {names.count(name)}")
    return list(tiers)


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        old = base.get(key)
        if key == "tiers" and isinstance(old, list) and isinstance(value, list):
            result[key] = _merged_tiers(old, value)
        elif isinstance(old, Mapping) and isinstance(value, Mapping) and "source" not in old:
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result


def _merged_tiers(base: list[Any], change: list[Any]) -> list[Any]:
    found = {tier["name"]: tier for tier in base}
    for tier in change:
        name = tier["name"]
        found[name] = _merged(found[name], tier) if name in found else tier
    return list(found.values())
