"""``use_local_input``: the module is handed this rank's rows and the keys that they may see.

For kernels that take plain tensors only. There is no uncut key for the module to find. Under load
balance the rows are two windows, and the module is called once for each.

Lengths and indices of a call are checked, and compared over the ranks, before keys are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hp_comm import preflight
from hp_dsa.indices import check_documents, drop_unseen
from hp_dsa.inputs import Inputs
from hp_dsa.operands import check_lengths
from hp_dsa.view import DSAView, Lengths
from hp_mesh.arguments import replace_slots
from hp_mesh.checks import require
from hp_mesh.documents import KeyWindow
from hp_mesh.window import AttentionWindow

__all__ = ["LocalCall"]


class LocalCall:
    """The calls of a module with local tensors, one for each window.

    Attributes:
        windows: What each call is handed.
        wholes: The gathered keys, once they are here.

    Args:
        view: The view of the call.
        inputs: Its tensors.
        args: The call's arguments.
        kwargs: Its keyword arguments; lengths among them are those of the whole sequence, and
            ``sparse_mode`` and ``sparse_block_size`` are known by these names.
    """

    def __init__(
        self,
        view: DSAView,
        inputs: Inputs,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._view, self._inputs = view, inputs
        self._args, self._kwargs = args, kwargs
        self._causal: bool = kwargs.get("sparse_mode", 3) == 3
        self._block: int = kwargs.get("sparse_block_size", 1)
        self.wholes: Mapping[str, Tensor] = {}
        self._parts: dict[str, tuple[Tensor, ...]] = {}
        self.windows: tuple[KeyWindow, ...] = self._agree()
        view.window = self.attention_window(0)

    def _agree(self) -> tuple[KeyWindow, ...]:
        """Return the windows, or raise what any rank found wrong, on all of them."""
        error: Exception | None = None
        lengths: Lengths = (None, None)
        windows: tuple[KeyWindow, ...] = ()
        try:
            lengths = self._check()
            batch = self._inputs.locals["query"].size(0)
            windows = self._view.windows(batch, lengths, self._causal)
        except Exception as problem:  # whatever it is, the others would wait for this rank
            error = problem
        preflight(
            self._view.group,
            f"{self._view.where}: lengths of the call",
            # those on a device were not compared with the rest of the call
            lambda: {"queries": lengths[0], "keys": lengths[1]},
            error=error,
            call_index=self._view.call_index,
        )
        return windows

    def _check(self) -> Lengths:
        view, inputs, kwargs = self._view, self._inputs, self._kwargs
        plan, names = view.plan, inputs.lengths
        require(
            plan.layout == "BSND" or len(names) == 2,
            view.where,
            'use_local_input with layout "TND" needs the lengths of queries and keys as keywords '
            f"of the call, which has {sorted(kwargs)}",
            "pass actual_seq_lengths_query and actual_seq_lengths_key of the whole sequence",
        )
        sides = [names.get(side, side) for side in ("query", "key")]
        given = [kwargs.get(name) if name in names.values() else None for name in sides]
        lengths = check_lengths(view.where, view, sides, given, inputs.locals["query"].size(0))
        indices = inputs.locals.get("topk_indices")
        if indices is not None:
            check_documents(view.where, "topk_indices", indices, view, lengths, self._block)
        return lengths

    def attention_window(self, index: int) -> AttentionWindow:
        """Return what `hp_mesh.attention_window` answers during a call."""
        window = self.windows[index]
        return AttentionWindow(
            window.rows[0], window.num_rows, window.num_keys, self._view.num_queries
        )

    def call(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call for one window."""
        plan, window, inputs = self._view.plan, self.windows[index], self._inputs
        cut: dict[int, Tensor] = {}
        values = []
        for argument in inputs.arguments:
            if argument.role == "keys":
                whole = self.wholes[argument.name]
                if id(whole) not in cut:
                    start = window.keys[0]
                    cut[id(whole)] = whole.narrow(plan.seq_dim, start, window.num_keys).contiguous()
                values.append(cut[id(whole)])
                continue
            dim = plan.statistics_dim if argument.role == "statistics" else plan.seq_dim
            part = self._rows(argument.name, dim)[index].contiguous()
            if argument.name == "topk_indices" and self._causal:
                part = drop_unseen(part, window, plan.layout, self._block)
            values.append(part)
        args, kwargs = replace_slots(self._args, self._kwargs, list(inputs.slots.values()), values)
        return args, {**kwargs, **self._lengths(window)}

    def _rows(self, name: str, dim: int) -> tuple[Tensor, ...]:
        """Return the rows of each window; they are split once."""
        if name not in self._parts:
            x = self._inputs.locals[name]
            self._parts[name] = self._view.split_rows(x, dim, len(self.windows))
        return self._parts[name]

    def _lengths(self, window: KeyWindow) -> dict[str, Any]:
        lengths = {"query": window.query_lengths, "key": window.key_lengths}
        found: dict[str, Any] = {}
        for side, name in self._inputs.lengths.items():
            given, here = self._kwargs[name], lengths[side]
            if here is None:
                continue
            found[name] = (
                torch.tensor(here, dtype=given.dtype, device=given.device)
                if isinstance(given, Tensor)
                else list(here)
            )
        return found
