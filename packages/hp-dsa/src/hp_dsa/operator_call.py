"""One call of a DSA operator inside a boundary: on local rows, with the keys that they may see.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hp_comm import preflight
from hp_dsa.indices import check_documents, drop_unseen
from hp_dsa.inputs import options_of
from hp_dsa.operands import Operands
from hp_dsa.operators import Operator
from hp_dsa.results import join_results
from hp_dsa.view import DSAView, Lengths
from hp_mesh.documents import KeyWindow

__all__ = ["OperatorCall"]


@dataclass(frozen=True)
class _Checked:
    """What a call was given, as plain tensors of this rank; mappings are by argument name."""

    rows: dict[str, Tensor]
    keys: dict[str, Tensor]
    lengths: Lengths
    windows: tuple[KeyWindow, ...]


class OperatorCall:
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
        rows = {
            n: self.view.split_rows(x, self._dim(n), len(windows)) for n, x in checked.rows.items()
        }
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
        return join_results(self.operator.results, parts, windows, self.query, self.view)

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
        block: int = self.given.get("sparse_block_size", 1)  # `check_documents` looks at it
        return block

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
