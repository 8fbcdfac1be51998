"""Run DSA operators inside a boundary: on local rows, with the keys that these rows may see.

Inside, tensors are DTensors of the whole sequence, as the module was written for one device. An
operator works on local tensors::

    query [B, S, ..] Shard(1)     -> its rows of this rank            (two windows when balanced)
    key   [B, S, ..] Replicate()  -> rows [0, e), e the end of a window
    lengths of the whole sequence -> lengths of the window

An operator has no way past the cut: it is made where local tensors are made, and a module that
called ``to_local()`` is served alike. A kernel that is none of these operators is not seen here:
with ``use_local_input=True`` the boundary itself cuts, and the module is handed no other key.

Lengths and indices may be known only here, and only some ranks may find them wrong: the ranks
compare before anything moves. An operator must be called by all of them or by none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_comm import merge_head_tail, preflight, split_head_tail
from hp_dsa import ops
from hp_dsa.indices import check_documents, drop_unseen
from hp_dsa.inputs import options_of
from hp_dsa.operands import Operands
from hp_dsa.operators import NPU, OPERATORS, Operator, Result
from hp_dsa.view import DSAView, Lengths
from hp_mesh._torch import from_local
from hp_mesh.checks import require
from hp_mesh.documents import KeyWindow
from hp_mesh.view import View, register_handler

__all__ = ["join_keys", "register_dsa_handlers"]


def register_dsa_handlers() -> None:
    """Register the handlers of this file; called once, when the styles are imported."""
    for name, operator in OPERATORS.items():
        register_handler(getattr(ops, name), _Handler(name, operator), knows_rows=True)
    for name, operator in NPU.items():
        handler = _Handler(name.rpartition(":")[2], operator)
        register_handler(name, handler, knows_rows=True)


def join_keys(
    parts: Sequence[Tensor], windows: Sequence[KeyWindow], num_keys: int, dim: int
) -> Tensor:
    """Return gradients of the windows' keys summed in a tensor of all keys."""
    shape = list(parts[0].shape)
    if len(parts) == 1 and shape[dim] == num_keys:
        return parts[0]
    shape[dim] = num_keys
    whole = parts[0].new_zeros(shape)
    for part, window in zip(parts, windows, strict=True):
        whole.narrow(dim, window.keys[0], window.num_keys).add_(part)
    return whole


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
            given = {**dict(zip(self.operator.positional, args, strict=False)), **kwargs}
            return _Call(view, func, self.operator, given, f"{view.where}: {self.name}").run()
        require(
            not any(view.owns(x) for x in (*args, *kwargs.values())),
            view.where,
            f"{self.name} is called inside this style, which must be a DSA style",
            "apply a style of hp_dsa to a module around the operator",
        )
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Checked:
    """What a call was given, as plain tensors of this rank; mappings are by argument name."""

    rows: dict[str, Tensor]
    keys: dict[str, Tensor]
    lengths: Lengths
    windows: tuple[KeyWindow, ...]


class _Call:
    """One call of an operator."""

    def __init__(
        self,
        view: DSAView,
        func: Callable[..., Any],
        operator: Operator,
        given: dict[str, Any],
        where: str,
    ) -> None:
        self.view, self.func, self.operator, self.given = view, func, operator, given
        self.operands = Operands(view, operator, given, where)
        self.query = self.operands.query
        self.plan = view.plan

    def run(self) -> Any:
        """Check, compare, cut, call for each window, join, wrap."""
        checked = self._agree()
        keys, windows, plan = checked.keys, checked.windows, self.plan
        rows = {n: self._split(x, self._dim(n), len(windows)) for n, x in checked.rows.items()}
        parts = []
        for i, window in enumerate(windows):
            here = {name: of_window[i] for name, of_window in rows.items()}
            if self._causal and "sparse_indices" in here and not self._is_of_torch():
                here["sparse_indices"] = drop_unseen(
                    here["sparse_indices"], window, plan.layout, self._block
                )
            cut = {id(x): self._cut(x, window) for x in keys.values()}
            here |= {name: cut[id(x)] for name, x in keys.items()}
            parts.append(self._call({**self.given, **here, **self._window_lengths(window)}))
        return self._join(parts, windows)

    def _agree(self) -> _Checked:
        """Return the checked call, or raise what any rank found wrong, on all of them."""
        error: Exception | None = None
        checked: _Checked | None = None
        try:
            checked = self._check()
        except Exception as problem:  # whatever it is, the others would wait for this rank
            error = problem
        preflight(
            self.view.group,
            self.operands.where,
            lambda: {} if checked is None else self._signature(checked),
            error=error,
            call_index=self.view.call_index,
        )
        assert checked is not None, "preflight raises the error it is given"
        return checked

    def _check(self) -> _Checked:
        found, op = self.operands, self.operator
        found.check_layout()
        found.refuse_cut_heads()
        names = (*op.rows, *op.statistics)
        rows = {n: found.rows(n, self.given[n], self._dim(n)) for n in names if found.has(n)}
        keys = found.keys()
        batch = rows[op.positional[0]].size(0)
        lengths = found.lengths(batch)
        if "sparse_indices" in rows:
            indices = rows["sparse_indices"]
            check_documents(found.where, "sparse_indices", indices, self.view, lengths, self._block)
        return _Checked(rows, keys, lengths, self.view.windows(batch, lengths, self._causal))

    def _signature(self, checked: _Checked) -> dict[str, object]:
        """Return what must be the same on every CP rank, by the name to show."""
        tensors = {**checked.rows, **checked.keys}
        return {
            **options_of(self.given),
            "sparse_mode": self._mode,
            **{name: f"{list(x.shape)} {x.dtype}" for name, x in tensors.items()},
            **{
                name: None if lengths is None else tuple(lengths)
                for name, lengths in zip(self.operator.lengths, checked.lengths, strict=True)
            },
        }

    @property
    def _mode(self) -> Any:
        return self.given.get("sparse_mode", 3)

    @property
    def _causal(self) -> bool:
        return bool(self._mode == 3)

    @property
    def _block(self) -> int:
        return int(self.given.get("sparse_block_size", 1))

    def _dim(self, name: str) -> int:
        is_statistics = name in self.operator.statistics
        return self.plan.statistics_dim if is_statistics else self.plan.seq_dim

    def _window_lengths(self, window: KeyWindow) -> dict[str, Any]:
        """Return the lengths of a window in the form in which those of the sequence came."""
        found: dict[str, Any] = {}
        sides = (window.query_lengths, window.key_lengths)
        for name, lengths in zip(self.operator.lengths, sides, strict=True):
            if lengths is None:
                continue
            like = self.given.get(name)
            found[name] = list(lengths)
            if isinstance(like, Tensor):
                found[name] = torch.tensor(lengths, dtype=like.dtype, device=like.device)
            elif like is None and self.operator.lengths_are_tensors:
                found[name] = torch.tensor(lengths, dtype=torch.int32, device=self.query.device)
        return found

    def _split(self, x: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
        """Return the rows of each window; tails are the mirror's where data is not balanced."""
        if count == 1:
            return (x,)
        return split_head_tail(x, self.view.group, seq_dim=dim, trade=self.plan.swaps_tails)

    def _cut(self, x: Tensor, window: KeyWindow) -> Tensor:
        if window.num_keys == x.size(self.plan.seq_dim):
            return x
        return x.narrow(self.plan.seq_dim, window.keys[0], window.num_keys)

    def _call(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        if self._is_of_torch():
            # torch_npu's kernels want dense tensors, and a cut of keys is none; ours see to it
            dense = {id(x): x.contiguous() for x in given.values() if isinstance(x, Tensor)}
            given = {name: dense.get(id(x), x) for name, x in given.items()}
        args = []
        for name in self.operator.positional:
            if name not in given:
                break
            args.append(given.pop(name))
        result = self.func(*args, **given)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    def _is_of_torch(self) -> bool:
        """Whether the operator is torch_npu's own, whose kernels skip what a row does not see."""
        return isinstance(self.func, (torch._ops.OpOverloadPacket, torch._ops.OpOverload))

    def _join(self, parts: Sequence[tuple[Tensor, ...]], windows: Sequence[KeyWindow]) -> Any:
        outs = [
            self._result(kind, list(several), windows)
            for kind, several in zip(self.operator.results, zip(*parts, strict=True), strict=True)
        ]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _result(self, kind: Result, parts: list[Tensor], windows: Sequence[KeyWindow]) -> Tensor:
        plan, view = self.plan, self.view
        dim = plan.statistics_dim if kind == "statistics" else plan.seq_dim
        if kind != "sum" and parts[0].ndim <= dim:
            return parts[0]  # an output that was not asked for is empty
        cp: Placement
        if kind == "sum":
            whole, cp = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0], Partial()
        elif kind == "keys":
            whole, cp = join_keys(parts, windows, view.num_keys, dim), Partial()
        else:
            whole, cp = parts[0], Shard(dim)
            if len(parts) > 1:
                (head, tail), trade = parts, plan.swaps_tails
                whole = merge_head_tail(head, tail, view.group, seq_dim=dim, trade=trade)
        if not view.owns(self.query):
            return whole
        placements = view.placements(cp, self._foreign(kind, whole))
        return from_local(whole, view.mesh, placements, view.partial_grads(placements))

    def _foreign(self, kind: Result, x: Tensor) -> list[Placement]:
        """Return where the output lies on the axes that are not CP: as the query does."""
        assert isinstance(self.query, DTensor), "the caller has looked"
        placements: list[Placement] = []
        for axis, placement in enumerate(self.query.placements):
            if axis == self.view.cp_axis:
                continue
            if isinstance(placement, Shard) and placement.dim > self.plan.seq_dim:  # heads
                dim = x.ndim - 1 if kind == "statistics" else placement.dim
                placements.append(Shard(dim))
            else:
                placements.append(placement if isinstance(placement, Shard) else Replicate())
        return placements
