"""Run DSA operators inside a boundary: on local rows, with the keys that these rows may see.

Inside, tensors are DTensors of the whole sequence, as the module was written for one device. An
operator works on local tensors::

    query [B, S, ..] Shard(1)     -> its rows of this rank            (two windows when balanced)
    key   [B, S, ..] Replicate()  -> rows [0, e), e the end of a window
    lengths of the whole sequence -> lengths of the window

There is no way past the cut: it is made where local tensors are made. A module that called
``to_local()`` is served alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_comm import exchange_head_tail
from hp_dsa import ops
from hp_dsa.operators import NPU, OPERATORS, Operator, Result
from hp_dsa.view import DSAView, Lengths
from hp_mesh._torch import from_local, redistribute, to_local
from hp_mesh.checks import fail, require
from hp_mesh.documents import KeyWindow
from hp_mesh.view import View, register_handler

__all__ = ["join_keys", "read_lengths", "register_dsa_handlers"]


def register_dsa_handlers() -> None:
    """Register the handlers of this file; called once, when the styles are imported."""
    for name, operator in OPERATORS.items():
        register_handler(getattr(ops, name), _Handler(name, operator), knows_rows=True)
    for name, operator in NPU.items():
        handler = _Handler(name.rpartition(":")[2], operator)
        register_handler(name, handler, knows_rows=True)


def read_lengths(where: str, name: str, given: Any) -> list[int] | None:
    """Return lengths on the host; a tensor on a device is waited for."""
    if given is None:
        return None
    numbers = given.tolist() if isinstance(given, Tensor) else list(given)
    require(
        all(isinstance(n, int) and not isinstance(n, bool) for n in numbers),
        where,
        f"{name} ({numbers}) must be integers, a list or a tensor of one dim",
    )
    return numbers


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
        self.view, self.func, self.operator = view, func, operator
        self.given, self.where = given, where
        self.query: Tensor = given[operator.positional[0]]
        self.plan = view.plan

    def run(self) -> Any:
        """Cut, call for each window, join, wrap."""
        self._check_layout()
        self._refuse_cut_heads()
        op, plan = self.operator, self.plan
        dims = dict.fromkeys(op.rows, plan.seq_dim)
        dims |= dict.fromkeys(op.statistics, plan.statistics_dim)
        rows = {n: self._rows(n, self.given[n], d) for n, d in dims.items() if self._has(n)}
        keys = self._keys()
        batch = rows[op.positional[0]].size(0)
        lengths = self._lengths()
        causal = self.given.get("sparse_mode", 3) == 3
        windows = self.view.windows(batch, lengths, causal)
        parts = []
        for i, window in enumerate(windows):
            here = {
                name: self._swap(i, self._part(x, dims[name], i, len(windows)))
                for name, x in rows.items()
            }
            cut = {id(x): self._cut(x, window) for x in keys.values()}
            here |= {name: cut[id(x)] for name, x in keys.items()}
            parts.append(self._call({**self.given, **here, **self._window_lengths(window)}))
        return self._join(parts, windows)

    def _has(self, name: str) -> bool:
        return isinstance(self.given.get(name), Tensor)

    def _check_layout(self) -> None:
        for name in self.operator.layouts:
            layout = self.given.get(name, "BSND")
            require(
                layout == self.plan.layout,
                self.where,
                f"{name} ({layout!r}) must be the style's layout ({self.plan.layout!r})",
                f"construct the style with layout={layout!r}, or pass {name}={self.plan.layout!r}",
            )

    def _refuse_cut_heads(self) -> None:
        """Scores are sums over all index heads, the loss needs the mean over all heads."""
        if "attention" in self.operator.results:
            return
        for name in self.operator.rows:
            x = self.given.get(name)
            if not isinstance(x, DTensor) or not self.view.owns(x):
                continue
            cut = [p for axis, p in enumerate(x.placements) if axis != self.view.cp_axis]
            require(
                not any(isinstance(p, Shard) for p in cut),
                self.where,
                f"{name} with placements {x.placements} must be whole on the axes that are not CP",
                "gather its heads over TP first: scores and the loss are sums over all heads",
            )

    def _rows(self, name: str, x: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of ``x`` as a plain tensor."""
        view = self.view
        if view.owns(x):
            assert isinstance(x, DTensor), "the view's own"
            placements = list(x.placements)
            present = placements[view.cp_axis]
            if present.is_replicate():
                placements[view.cp_axis] = Shard(dim)
                x = redistribute(x, placements)
            elif not present.is_shard(dim):
                raise fail(
                    self.where,
                    f"{name} with placements {tuple(placements)} must be Shard({dim}) on the CP "
                    "axis",
                    "pass it as the module received it",
                )
            return to_local(x, view.partial_grads(x.placements))
        size = x.size(dim)
        if size == view.local_length:
            return x
        require(
            size == view.num_queries and not self.plan.load_balance,
            self.where,
            f"{name} (shape {tuple(x.shape)}) has {size} rows in dim {dim}, which must be this "
            f"rank's ({view.local_length})",
            "pass it as the module received it",
        )
        return x.narrow(dim, view.rank * view.local_length, view.local_length)

    def _keys(self) -> dict[str, Tensor]:
        """Return the whole keys as plain tensors; one that came twice is one."""
        found: dict[int, Tensor] = {}
        for name in self.operator.keys:
            x = self.given.get(name)
            if isinstance(x, Tensor) and id(x) not in found:
                found[id(x)] = self._whole(name, x)
        return {n: found[id(self.given[n])] for n in self.operator.keys if self._has(n)}

    def _whole(self, name: str, x: Tensor) -> Tensor:
        view, dim = self.view, self.plan.seq_dim
        if view.owns(x):
            assert isinstance(x, DTensor), "the view's own"
            require(
                x.placements[view.cp_axis].is_replicate(),
                self.where,
                f"{name} with placements {x.placements} must be Replicate() on the CP axis",
                "pass it as the module received it; a key side is gathered by the boundary",
            )
            x = to_local(x, view.key_grads(x.placements, self.query))
        require(
            x.size(dim) == view.num_keys,
            self.where,
            f"{name} (shape {tuple(x.shape)}) has {x.size(dim)} rows in dim {dim}, which must be "
            f"all keys ({view.num_keys})",
            "pass it as the module received it",
        )
        return x

    def _lengths(self) -> Lengths:
        """Return the lengths of the whole sequence, checked alike on all ranks."""
        view, names = self.view, self.operator.lengths
        totals = (view.num_queries, view.num_keys)
        queries, keys = (read_lengths(self.where, n, self.given.get(n)) for n in names)
        if self.plan.layout == "BSND":
            for name, given, total in zip(names, (queries, keys), totals, strict=True):
                require(
                    given is None or all(0 <= n <= total for n in given),
                    self.where,
                    f"{name} ({given}) must be valid lengths of at most {total}",
                )
            return queries, keys
        for name, given, total in zip(names, (queries, keys), totals, strict=True):
            if given is None:
                raise fail(
                    self.where,
                    f'{name} (None) must hold the cumulative ends of the documents for "TND"',
                    f"pass [{total}] for a single document",
                )
            require(
                bool(given) and all(a <= b for a, b in pairwise([0, *given])),
                self.where,
                f"{name} ({given}) must be cumulative ends that do not fall",
            )
            require(
                given[-1] == total,
                self.where,
                f"{name} (last end {given[-1]}) must end at the length of the whole sequence "
                f"({total}: {total // self.plan.cp_size} local rows on {self.plan.cp_size} ranks)",
                "lengths are those of the whole sequence; make padding a document of its own",
            )
        assert queries is not None and keys is not None, "checked above"
        require(
            len(queries) == len(keys),
            self.where,
            f"{names[0]} ({len(queries)} ends) must have as many entries as {names[1]} "
            f"({len(keys)} ends)",
        )
        return queries, keys

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

    def _part(self, x: Tensor, dim: int, index: int, count: int) -> Tensor:
        size = x.size(dim) // count
        return x if count == 1 else x.narrow(dim, index * size, size)

    def _swap(self, index: int, x: Tensor) -> Tensor:
        """Trade a tail half with the mirror rank, where the data is not balanced by itself."""
        if index == 0 or not self.plan.swaps_tails:
            return x
        return exchange_head_tail(x.contiguous(), self.view.group)

    def _cut(self, x: Tensor, window: KeyWindow) -> Tensor:
        if window.num_keys == x.size(self.plan.seq_dim):
            return x
        return x.narrow(self.plan.seq_dim, window.keys[0], window.num_keys)

    def _call(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        if isinstance(self.func, (torch._ops.OpOverloadPacket, torch._ops.OpOverload)):
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
            parts = [self._swap(i, part) for i, part in enumerate(parts)]
            whole, cp = parts[0] if len(parts) == 1 else torch.cat(parts, dim), Shard(dim)
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
