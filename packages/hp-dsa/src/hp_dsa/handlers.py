"""Which DSA operators a boundary sees, and what it does with a call of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dsa import ops
from hp_dsa.operator_call import OperatorCall
from hp_dsa.operators import NPU, OPERATORS, Operator
from hp_dsa.view import DSAView
from hp_mesh.checks import require
from hp_mesh.handlers import register_handler
from hp_mesh.view import View

__all__ = ["register_dsa_handlers"]


def register_dsa_handlers() -> None:
    """Register the operators' handlers; called once, when the styles are imported."""
    for name, operator in OPERATORS.items():
        register_handler(getattr(ops, name), _Handler(name, operator), knows_rows=True)
    for name, operator in NPU.items():
        handler = _Handler(name.rpartition(":")[2], operator)
        register_handler(name, handler, knows_rows=True)


class _Handler:
    """Runs one operator under a view."""

    def __init__(self, name: str, operator: Operator) -> None:
        self.name = name
        self.operator = operator

    def __call__(
        self, view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if isinstance(view, DSAView):
            if view.is_local:  # the boundary has cut the keys
                return func(*args, **kwargs)
            where = f"{view.where}: {self.name}"
            given = self._named(args, kwargs, where)
            return OperatorCall(view, func, self.operator, given, where).run()
        require(
            not any(view.owns(x) for x in (*args, *kwargs.values())),
            view.where,
            f"{self.name} is called inside this style, which must be a DSA style",
            "apply a style of hp_dsa to a module around the operator",
        )
        return func(*args, **kwargs)

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the arguments by name; what is no call on one device is none here."""
        names = self.operator.positional
        if len(args) > len(names):
            raise TypeError(
                f"{where}: positional arguments ({len(args)}) must be at most {len(names)}: "
                f"{', '.join(names)}; pass the others by keyword"
            )
        given = dict(zip(names, args, strict=False))
        twice = [name for name in given if name in kwargs]
        if twice or names[0] not in {**given, **kwargs}:
            raise TypeError(f"{where}: {(twice or names)[0]} must be given once")
        return {**given, **kwargs}
