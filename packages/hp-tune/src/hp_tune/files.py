"""Read JSON, YAML and TOML as a careful person would: no key twice, positions are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_mesh.checks import nearest
from hp_tune.errors import UsageError

if TYPE_CHECKING:
    import yaml
    from pydantic import BaseModel, ValidationError

__all__ = [
    "Positions",
    "canonical_json",
    "dump_yaml",
    "explain_validation",
    "load_json",
    "load_table",
    "load_yaml",
    "sha256",
    "yaml_scalar",
]

Positions = Mapping[tuple[str | int, ...], tuple[int, int]]
"""Line and column (from 1) of each key or list item, by its path."""
DEEPEST, MOST_NODES = 100, 200_000
"""Of a YAML file: how deep keys may lie in keys, and how many there may be."""


def canonical_json(value: object) -> str:
    """Return ``value`` as JSON with sorted keys and no spaces: equal values, equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def sha256(value: object) -> str:
    """Return the hex digest of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; a BOM is skipped, NaN and Infinity become None."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UsageError(f"{path}: key {key!r} appears twice in one object")
            seen[key] = value
        return seen

    return _json_object(path, _read(path), unique)


def _json_object(
    path: Path, text: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict
) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UsageError:
        raise
    except RecursionError:
        raise UsageError(f"{path}: must not be nested so deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def load_yaml(path: Path) -> tuple[dict[str, Any], Positions]:
    """Return the YAML mapping in ``path`` and where each of its keys stands."""
    return _yaml_mapping(path, _read(path))


def _yaml_mapping(path: Path, text: str) -> tuple[dict[str, Any], Positions]:
    import yaml

    positions: dict[tuple[str | int, ...], tuple[int, int]] = {}
    try:
        # libyaml is ten times as fast, where it was built in
        node = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        value = None if node is None else _build(path, node, (), positions)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise UsageError(f"{path}{place}: not YAML: {problem}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: must hold a YAML mapping")
    return value, positions


def load_table(path: Path) -> tuple[dict[str, Any], Positions]:
    """Return the mapping in a YAML, JSON or TOML file, by its ending, and where its keys stand."""
    if path.suffix.lower() == ".toml":
        return _load_toml(path)
    if path.suffix.lower() != ".json":
        return load_yaml(path)
    text = _read(path)
    value = _json_object(path, text)
    # JSON is YAML but for tabs between its words; columns stay
    return value, _yaml_mapping(path, text.replace("\t", " "))[1]


def _load_toml(path: Path) -> tuple[dict[str, Any], Positions]:
    import re
    import tomllib

    from hp_tune.toml_places import key_places

    text = _read(path)
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said, _, place = str(error).partition(" (at ")
        numbers = "".join(f":{number}" for number in re.findall(r"\d+", place))
        raise UsageError(f"{path}{numbers}: not TOML: {said}") from None
    return value, key_places(text)


def yaml_scalar(value: str | float | bool | None) -> str:
    """Return one value as YAML, on one line; text that is no plain word in quotes."""
    import yaml

    is_text = isinstance(value, str) and not value.replace("_", "").isalnum()
    text: str = yaml.safe_dump(
        value, default_style='"' if is_text else None, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("...").strip()


def dump_yaml(value: object) -> str:
    """Return ``value`` as YAML, keys in their order."""
    import yaml

    text: str = yaml.safe_dump(value, sort_keys=False)
    return text


def explain_validation(
    error: ValidationError, model: type[BaseModel], name: str, positions: Positions
) -> UsageError:
    """Turn the first problem that pydantic found into one sentence with place and nearest key."""
    # a misspelt key is both unknown and missing: the unknown one says more
    problem = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    location: tuple[str | int, ...] = problem["loc"]
    path = location
    while path and path not in positions:
        path = path[:-1]
    place = "".join(f":{number}" for number in positions.get(path, ()))
    key = ".".join(map(str, location))
    if problem["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        close = nearest(str(location[-1]), known)
        return UsageError(
            f"{name}{place}: unknown key {key!r}",
            f"did you mean {close!r}?" if close else f"known keys: {', '.join(sorted(known))}",
        )
    message = str(problem["msg"]).removeprefix("Value error, ")
    return UsageError(f"{name}{place}: {key or 'the file'}: {message}")


def _known_keys(model: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    from pydantic import BaseModel

    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            found = [
                kind
                for kind in _types_in(model.model_fields[part].annotation)
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ]
            if found:
                model = found[0]
    return list(model.model_fields)


def _types_in(annotation: Any) -> list[Any]:
    inner = getattr(annotation, "__args__", ())
    return [annotation, *(kind for argument in inner for kind in _types_in(argument))]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}") from None


def _build(
    path: Path,
    node: yaml.Node,
    at: tuple[str | int, ...],
    positions: dict[tuple[str | int, ...], tuple[int, int]],
) -> Any:
    import yaml

    if len(at) > DEEPEST or len(positions) > MOST_NODES:  # an alias may stand for what it is in
        place = f"{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        problem = "must not be nested so deeply, or hold itself, or hold so much by aliases"
        raise UsageError(f"{path}:{place}: {problem}")
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line, column = key_node.start_mark.line + 1, key_node.start_mark.column + 1
            if key in found:
                first = positions[(*at, key)][0]
                raise UsageError(
                    f"{path}:{line}:{column}: key {key!r} appears twice; first in line {first}"
                )
            positions[(*at, key)] = (line, column)
            found[key] = _build(path, value_node, (*at, key), positions)
        return found
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            positions[(*at, index)] = (item.start_mark.line + 1, item.start_mark.column + 1)
            items.append(_build(path, item, (*at, index), positions))
        return items
    loader: Any = yaml.SafeLoader  # its methods carry no types
    try:
        return loader("").construct_object(node)
    except (ValueError, OverflowError) as error:  # the 30th of February
        place = f"{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        raise UsageError(f"{path}:{place}: {node.value!r}: {error}") from None
