"""Record the calls of vendor operators and collectives, and hold each to its real schema."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Call", "Recording", "bind", "recorded"]


@dataclass(frozen=True)
class Call:
    """One call of an operator, every argument of its schema by name, defaults included."""

    operator: str
    given: dict[str, Any]

    @property
    def layout(self) -> str:
        names = ("input_layout", "layout_query", "layout")
        return next((str(self.given[name]) for name in names if name in self.given), "")

    @property
    def mode(self) -> str:
        if "sparse_mode" not in self.given:
            return ""
        if self.given.get("atten_mask", ...) is None:
            return "unmasked"
        return str(self.given["sparse_mode"])

    @property
    def dtype(self) -> str:
        return next((str(x.dtype).removeprefix("torch.") for x in self.tensors()), "")

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors among the arguments, those in lists included."""
        for value in self.given.values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (x for x in value if isinstance(x, Tensor))


@dataclass
class Recording:
    """What was called while it was on.

    Attributes:
        calls: Vendor operators as Python called them: our spelling.
        dispatched: Vendor operators and collectives as they ran, backward ones included.
    """

    calls: list[Call] = field(default_factory=list)
    dispatched: list[Call] = field(default_factory=list)

    def named(self, operator: str) -> list[Call]:
        """Return the dispatched calls of an operator."""
        return [call for call in self.dispatched if call.operator == operator]


@contextmanager
def recorded(source: str) -> Iterator[Recording]:
    """Record on this thread; calls go to the report as made by ``source``."""
    recording = Recording()
    with _Functions(recording), _Dispatched(recording):
        yield recording
    path = os.environ.get("HP_NPU_SCHEMA_REPORT")
    if path:
        with open(path, "a") as report:  # noqa: PTH123 - appended to, line by line
            for call in recording.dispatched:
                row = {
                    "operator": call.operator,
                    "layout": call.layout,
                    "mode": call.mode,
                    "dtype": call.dtype,
                    "from": source,
                }
                report.write(json.dumps(row) + "\n")


def bind(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of a call by name.

    Raises:
        TypeError: A name that the schema lacks, one too many, one missing, or of another type.
    """
    arguments = {argument.name: argument for argument in schema.arguments}
    positional = [name for name, argument in arguments.items() if not argument.kwarg_only]
    if len(args) > len(positional):
        raise TypeError(f"{schema.name}: {len(args)} positional arguments, of {len(positional)}")
    given = dict(zip(positional, args, strict=False))
    twice, unknown = sorted(set(given) & set(kwargs)), sorted(set(kwargs) - set(arguments))
    if twice or unknown:
        raise TypeError(f"{schema.name}: {unknown} unknown, {twice} given twice")
    given.update(kwargs)
    missing = [n for n, a in arguments.items() if n not in given and not a.has_default_value()]
    if missing:
        raise TypeError(f"{schema.name}: {missing} missing")
    for name, value in given.items():
        if not _fits(str(arguments[name].type), value):
            raise TypeError(f"{schema.name}: {name} ({value!r}) must be {arguments[name].type}")
    return {n: given.get(n, a.default_value) for n, a in arguments.items()}


def _fits(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(kind[9:-1], value)
    if kind.startswith("List["):
        return isinstance(value, (list, tuple)) and all(_fits(kind[5:-1], x) for x in value)
    plain = {"Tensor": Tensor, "str": str, "bool": bool, "float": (int, float)}
    if kind in ("int", "SymInt"):
        return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    # types of torch.distributed and the like are the dispatcher's to judge
    return isinstance(value, plain[kind]) if kind in plain else True


class _Functions(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverloadPacket):
            func_schema = func.default._schema if hasattr(func, "default") else None
        else:
            func_schema = getattr(func, "_schema", None)
        if func_schema is not None and func_schema.name.startswith("npu::"):
            name = func_schema.name.removeprefix("npu::")
            self.recording.calls.append(Call(name, bind(func_schema, args, kwargs)))
        return func(*args, **kwargs)


class _Dispatched(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it makes of itself comes by here again
        kwargs = kwargs or {}
        if func.namespace in ("npu", "c10d", "_c10d_functional"):
            name = func._schema.name.removeprefix("npu::")
            self.recording.dispatched.append(Call(name, bind(func._schema, args, kwargs)))
        return func(*args, **kwargs)
