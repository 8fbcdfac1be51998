"""What the DSA styles have in common: their options, and the boundary that they make.

Inside, the module sees the whole sequence; the operators of `hp_dsa.ops` and of torch_npu run on
this rank's rows and on the keys that these may see (`hp_dsa.operator_call`). The gradient of a
gathered tensor is the sum over the ranks, by one reduce-scatter, never divided.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dsa.arguments import Argument
from hp_dsa.boundary import DSABoundary
from hp_dsa.handlers import register_dsa_handlers
from hp_dsa.operators import Result
from hp_dsa.plan import DSAPlan, make_plan
from hp_mesh.boundary import BoundaryStyle
from hp_mesh.checks import require

__all__ = ["DSAStyle"]

register_dsa_handlers()

_RESULTS = ("rows", "attention", "statistics", "keys", "sum")


class DSAStyle(BoundaryStyle):
    """What the three styles have in common.

    Keyword Args:
        layout: ``"BSND"`` (sequence on dim 1) or ``"TND"`` (packed documents, dim 0).
        mode: ``"colossal"``, the only one: queries stay, keys are gathered.
        use_local_output: Return plain local tensors, whatever came in. Otherwise outputs are laid
            out as query was: plain, CP DTensor, or DTensor on other axes.
        use_local_input: Hand the module plain local tensors with the keys cut to what its rows may
            see, for kernels that take no DTensor. Lengths must then be keywords of the call; they
            are rewritten for the window.
        load_balance: Compute two chunks of the sequence on each rank, of equal causal work. What
            `attention_window` tells is then the first of them, or with ``use_local_input`` that of
            the call: the module is called for each.
        order: How the data lies on the ranks: ``"contiguous"``, or ``"head_tail"`` as
            ``shard_sequence(order="head_tail")`` cuts it. Default: ``"head_tail"`` with
            ``load_balance``, where nothing but keys is ever sent.
        keep_keys: Whether gathered keys are kept for backward. False keeps this rank's shard, and
            backward gathers again.
        outputs: What plain tensors that the module returns are, in order: ``"rows"``,
            ``"attention"`` (rows with the query's heads), ``"statistics"``, ``"keys"`` (a share of
            a gradient of keys), ``"sum"`` (a share of a sum). Default: as the operator returns.
        kwarg_names: Keywords of arguments that are passed by other names than the boundary's.
    """

    accepts_2d_mesh = True
    arguments: tuple[Argument, ...]
    balances_contiguous: ClassVar[bool] = False

    def __init__(
        self,
        *,
        layout: str,
        mode: str,
        use_local_output: bool,
        use_local_input: bool,
        load_balance: bool,
        order: str | None,
        keep_keys: bool,
        outputs: Sequence[str] | None,
        kwarg_names: Mapping[str, str | None],
    ) -> None:
        super().__init__()
        where = type(self).__name__
        plan = make_plan(
            1, layout=layout, mode=mode, load_balance=load_balance, order=order, where=where
        )
        require(
            not plan.swaps_tails or self.balances_contiguous,
            where,
            "order ('contiguous') must be 'head_tail' with load_balance=True: many heads of the "
            "query would have to travel, and this operator's work is balanced by itself for long "
            "sequences",
            "shard the data with shard_sequence(order='head_tail'), or balance the indexer alone",
        )
        for name, value in (
            ("use_local_output", use_local_output),
            ("use_local_input", use_local_input),
            ("keep_keys", keep_keys),
        ):
            require(isinstance(value, bool), where, f"{name} ({value!r}) must be True or False")
        for name, keyword in kwarg_names.items():
            require(
                keyword is None or (isinstance(keyword, str) and bool(keyword)),
                where,
                f"{name}_kwarg_name ({keyword!r}) must be the keyword of {name}",
            )
        require(
            outputs is None
            or (isinstance(outputs, (list, tuple)) and all(one in _RESULTS for one in outputs)),
            where,
            f"outputs ({outputs!r}) must be a list of {', '.join(map(repr, _RESULTS))}",
        )
        self.layout = layout
        self.mode = mode
        self.use_local_output = use_local_output
        self.use_local_input = use_local_input
        self.load_balance = load_balance
        self.order = order
        self.keep_keys = keep_keys
        self.outputs = None if outputs is None else tuple(outputs)
        self.kwarg_names = {name: k for name, k in kwarg_names.items() if k is not None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._shown())})"

    def _shown(self) -> list[str]:
        order = [] if self.order is None else [f"order={self.order!r}"]
        return [
            f"layout={self.layout!r}",
            f"mode={self.mode!r}",
            f"use_local_output={self.use_local_output}",
            f"use_local_input={self.use_local_input}",
            f"load_balance={self.load_balance}",
            *order,
            f"keep_keys={self.keep_keys}",
        ]

    @property
    def forgets_keys(self) -> bool:
        """Whether gathered keys are left to a second gather in backward."""
        return not self.keep_keys

    def plan(self, cp_size: int) -> DSAPlan:
        """Return the plan of this style on so many ranks; its ``describe`` predicts the traffic."""
        return make_plan(
            cp_size,
            layout=self.layout,
            mode=self.mode,
            load_balance=self.load_balance,
            order=self.order,
            where=type(self).__name__,
        )

    def result_kinds(self, count: int) -> Sequence[Result] | None:
        """Return what ``count`` plain outputs are; the last may be left open."""
        if self.outputs is not None:
            return cast("Sequence[Result]", self.outputs)
        return self._default_kinds(count)

    @abstractmethod
    def _default_kinds(self, count: int) -> Sequence[Result] | None:
        """Return what ``count`` plain outputs of this style's operator are."""

    def make_boundary(self, module: nn.Module, device_mesh: DeviceMesh) -> DSABoundary:
        """Return the boundary around ``module``; a mesh of several axes is flattened."""
        return self._boundary(self.plan(device_mesh.mesh.numel()), device_mesh)

    def _boundary(self, plan: DSAPlan, device_mesh: DeviceMesh) -> DSABoundary:
        return DSABoundary(self, plan, device_mesh)
