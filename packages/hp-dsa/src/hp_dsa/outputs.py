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

from hp_comm import exchange_head_tail, scatter_seq, sum_shares
from hp_dsa.chunks import in_chunks
from hp_dsa.handlers import join_keys
from hp_dsa.inputs import Inputs
from hp_dsa.operators import Result
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
    """

    def __init__(
        self,
        where: str,
        view: DSAView,
        inputs: Inputs,
        kinds: ResultKinds,
        *,
        use_local_output: bool,
    ) -> None:
        self._where, self._view, self._inputs = where, view, inputs
        self._kinds = kinds
        self._plan = view.plan
        self._plain = use_local_output or inputs.layouts["query"].is_plain

    def finish(self, outputs: Sequence[Any], windows: Sequence[KeyWindow] | None) -> Any:
        """Return what the caller gets.

        Args:
            outputs: What each call of the module returned.
            windows: With ``use_local_input``, the window of each call.
        """
        parts = [list(_tensors(output)) for output in outputs]
        require(
            len({len(part) for part in parts}) == 1,
            self._where,
            f"the calls of the module returned {[len(part) for part in parts]} tensors, which "
            "must be as many each time",
        )
        first, *_ = parts
        plain = [x for x in first if not isinstance(x, DTensor)]
        kinds = self._kinds(len(first)) if plain else None
        if plain and kinds is None:
            raise fail(
                self._where,
                f"the module returned {len(first)} plain tensors, of which it cannot be known "
                "which are gradients of keys and which are sums",
                "name each with outputs=, for example outputs=('rows', 'keys', 'rows', 'sum')",
            )
        results = [
            self._of_dtensor(x)
            if isinstance(x, DTensor)
            else self._of_plain(kinds[i] if kinds and i < len(kinds) else None, column, windows)
            for i, (x, *column) in enumerate((one[0], *one) for one in zip(*parts, strict=True))
        ]
        queue = iter(results)
        if isinstance(outputs[0], Tensor):
            return results[0]
        if not first:
            return outputs[0]
        keys = [key for key, value in _items(outputs[0]) if isinstance(value, Tensor)]
        return map_outputs(outputs[0], keys, lambda _: next(queue), lambda x: x, self._where)

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
                self._check_rows(parts, [w.num_keys for w in windows], plan.seq_dim, "keys")
                share = join_keys(parts, windows, self._view.num_keys, plan.seq_dim)
            self._check_rows([share], [self._view.num_keys], plan.seq_dim, "keys")
            return self._restore(self._scatter(share), plan.seq_dim, None)
        dim = plan.statistics_dim if kind == "statistics" else plan.seq_dim
        if kind is None or parts[0].ndim <= dim:  # unknown, or not asked for
            require(
                len(parts) == 1 or parts[0].numel() == 0,
                self._where,
                f"the module is called {len(parts)} times, and it cannot be known how its output "
                f"{tuple(parts[0].shape)} is joined",
                "name each output with outputs=",
            )
            return parts[0]
        rows = self._view.local_length // len(parts)
        self._check_rows(parts, [rows] * len(parts), dim, "rows")
        if len(parts) > 1 and plan.swaps_tails:
            parts = [parts[0], exchange_head_tail(parts[1].contiguous(), self._view.group)]
        local = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
        return self._restore(local, dim, self._heads() if kind == "attention" else None)

    def _check_rows(
        self, parts: Sequence[Tensor], expected: Sequence[int], dim: int, what: str
    ) -> None:
        for part, rows in zip(parts, expected, strict=True):
            require(
                part.ndim > dim and part.size(dim) == rows,
                self._where,
                f"the output {tuple(part.shape)} must have this rank's {what} ({rows}) in dim "
                f"{dim}",
                "return what the operator returned, or name each output with outputs=",
            )

    def _scatter(self, share: Tensor) -> Tensor:
        """Return this rank's rows of a gradient of keys, in the order of its data."""
        if self._plan.order == "head_tail":
            share = in_chunks(share, self._plan.seq_dim, self._plan.chunk_order())
        return scatter_seq(share, self._view.group, seq_dim=self._plan.seq_dim)

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
