"""What the module returned: which of it is rows, and which a share of a sum over the ranks.

A DTensor says so itself: ``Shard`` is rows, ``Partial`` a share; a share with a row for each key is
a gradient of keys, whose rows go to their owners, any other is summed. A plain tensor is what its
place among the outputs says it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hp_comm import preflight, scatter_seq, sum_shares
from hp_dsa.inputs import Inputs
from hp_dsa.operators import Result
from hp_dsa.results import join_keys
from hp_dsa.view import DSAView
from hp_mesh._torch import from_local, to_local
from hp_mesh.arguments import map_outputs
from hp_mesh.checks import fail, require
from hp_mesh.documents import KeyWindow

__all__ = ["ResultKinds", "Returned"]

ResultKinds = Callable[[int], Sequence[Result] | None]
"""Kinds of so many plain outputs, or None if that cannot be known."""


class Returned:
    """The outputs of one call.

    Args:
        where: Name of the style.
        view: The view of the call.
        inputs: Its tensors.
        kinds: What plain outputs are.
        use_local_output: Whether the caller wants plain tensors whatever came in.
        call_index: How many calls of the boundary went before.
    """

    def __init__(
        self,
        where: str,
        view: DSAView,
        inputs: Inputs,
        kinds: ResultKinds,
        *,
        use_local_output: bool,
        call_index: int,
    ) -> None:
        self._where, self._view, self._inputs = where, view, inputs
        self._kinds, self._call_index = kinds, call_index
        self._plan = view.plan
        self._plain = use_local_output or inputs.layouts["query"].is_plain

    def finish(self, outputs: Sequence[Any], windows: Sequence[KeyWindow] | None) -> Any:
        """Return what the caller gets.

        Args:
            outputs: What each call of the module returned.
            windows: With ``use_local_input``, the window of each call.
        """
        parts = [_tensors(output) for output in outputs]
        first = parts[0]
        kinds: list[Result | None] = []
        if any(not isinstance(x, DTensor) for x in first):
            kinds = self._agree(parts, windows)
        results = [
            self._of_dtensor(x)
            if isinstance(x, DTensor)
            else self._of_plain(kinds[i], column, windows)
            for i, (x, column) in enumerate(zip(first, zip(*parts, strict=True), strict=True))
        ]
        queue = iter(results)
        if isinstance(outputs[0], Tensor):
            return results[0]
        if not first:
            return outputs[0]
        keys = [key for key, value in _items(outputs[0]) if isinstance(value, Tensor)]
        return map_outputs(outputs[0], keys, lambda _: next(queue), lambda x: x, self._where)

    def _agree(
        self, parts: Sequence[Sequence[Tensor]], windows: Sequence[KeyWindow] | None
    ) -> list[Result | None]:
        """Return what plain outputs are, or raise what any rank found wrong, on all of them."""
        error: Exception | None = None
        kinds: list[Result | None] = []
        try:
            kinds = self._read(parts, windows)
        except Exception as problem:  # whatever it is, the others would wait for this rank
            error = problem
        preflight(
            self._view.group,
            f"{self._where}: what the module returned",
            {"outputs": kinds},
            error=error,
            call_index=self._call_index,
        )
        return kinds

    def _read(
        self, parts: Sequence[Sequence[Tensor]], windows: Sequence[KeyWindow] | None
    ) -> list[Result | None]:
        """Check the shapes of plain outputs against what they are, before anything is sent."""
        counts = [len(part) for part in parts]
        require(
            len(set(counts)) == 1,
            self._where,
            f"the calls of the module returned {counts} tensors, which must be as many each time",
        )
        known = self._kinds(counts[0])
        if known is None:
            raise fail(
                self._where,
                f"the module returned {counts[0]} plain tensors, of which it cannot be known "
                "which are gradients of keys and which are sums",
                "name each with outputs=, for example outputs=('rows', 'keys', 'rows', 'sum')",
            )
        kinds: list[Result | None] = [*known, *[None] * counts[0]][: counts[0]]
        plan, calls = self._plan, len(parts)
        rows = [self._view.local_length // calls] * calls
        keys = [self._view.num_keys] if windows is None else [w.num_keys for w in windows]
        for kind, column in zip(kinds, zip(*parts, strict=True), strict=True):
            if kind == "sum" or any(isinstance(x, DTensor) for x in column):
                continue
            dim = plan.statistics_dim if kind == "statistics" else plan.seq_dim
            if kind is None or column[0].ndim <= dim:  # unknown, or not asked for
                require(
                    calls == 1 or column[0].numel() == 0,
                    self._where,
                    f"the module is called {calls} times, and it cannot be known how its output "
                    f"{tuple(column[0].shape)} is joined",
                    "name each output with outputs=",
                )
            else:
                self._check_rows(column, keys if kind == "keys" else rows, dim, kind)
        return kinds

    def _of_dtensor(self, x: DTensor) -> Tensor:
        view = self._view
        if not view.owns(x):
            return x
        placements, axis = tuple(x.placements), view.cp_axis
        cp, foreign = placements[axis], placements[:axis]
        local = to_local(x, view.partial_grads(placements))
        if isinstance(cp, Shard):
            return self._restore(local, cp.dim, foreign)
        if not cp.is_partial():
            return local if self._plain else x
        if x.ndim == self._plan.ndim and x.size(self._plan.seq_dim) == view.num_keys:
            return self._restore(self._scatter(local), self._plan.seq_dim, foreign)
        return self._summed(local)

    def _of_plain(
        self,
        kind: Result | None,
        parts: Sequence[Tensor],
        windows: Sequence[KeyWindow] | None,
    ) -> Tensor:
        plan = self._plan
        if kind == "sum":
            return self._summed(torch.stack(list(parts)).sum(0) if len(parts) > 1 else parts[0])
        if kind == "keys":
            share = parts[0]
            if windows is not None:
                share = join_keys(parts, windows, self._view.num_keys, plan.seq_dim)
            return self._restore(self._scatter(share), plan.seq_dim, None)
        dim = plan.statistics_dim if kind == "statistics" else plan.seq_dim
        if kind is None or parts[0].ndim <= dim:
            return parts[0]
        local = self._view.join_rows(parts, dim)
        return self._restore(local, dim, self._heads() if kind == "attention" else None)

    def _check_rows(
        self, parts: Sequence[Tensor], expected: Sequence[int], dim: int, what: str
    ) -> None:
        for part, rows in zip(parts, expected, strict=True):
            require(
                part.ndim > dim and part.size(dim) == rows,
                self._where,
                f"the output {tuple(part.shape)}, {what!r}, must have {rows} rows in dim {dim}",
                "return what the operator returned, or name each output with outputs=",
            )

    def _scatter(self, share: Tensor) -> Tensor:
        """Return this rank's rows of a gradient of keys, in the order of its data."""
        plan = self._plan
        return scatter_seq(share, self._view.group, seq_dim=plan.seq_dim, order=plan.order)

    def _summed(self, share: Tensor) -> Tensor:
        total = sum_shares(share, self._view.group)
        mesh = self._inputs.layouts["query"].mesh
        if self._plain or mesh is None:
            return total
        return from_local(total, mesh, [Replicate()] * mesh.ndim)

    def _heads(self) -> tuple[Placement, ...]:
        return self._inputs.layouts["query"].foreign_placements

    def _restore(self, local: Tensor, dim: int, foreign: Sequence[Placement] | None) -> Tensor:
        layout = self._inputs.layouts["query"]
        if self._plain:
            return local
        if foreign is None:
            foreign = [Replicate()] * len(layout.foreign_axes)
        return layout.restore(local, dim, foreign)


def _items(output: Any) -> list[tuple[Any, Any]]:
    if isinstance(output, Mapping):
        return list(output.items())
    return list(enumerate(output)) if isinstance(output, (tuple, list)) else []


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of what a module returned, at its first level, in order."""
    if isinstance(output, Tensor):
        return [output]
    return [value for _, value in _items(output) if isinstance(value, Tensor)]
