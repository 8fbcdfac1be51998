"""The three DSA styles: what each boundary receives, what is gathered, what is reduced.

==============  ==================================  =======================  =====================
boundary        stays sharded on the sequence       gathered                 returned
==============  ==================================  =======================  =====================
indexer         query, weights                      key                      indices, values: rows
attention       query, topk_indices, query_rope     key, value, key_rope     output, statistics:
                                                                             rows
indexer loss    query, query_index, weights,        key, key_index,          gradients: rows; of
                topk_indices, query_rope, softmax   key_rope                 key_index: summed, own
                statistics (their own dim)                                   rows; loss: summed
==============  ==================================  =======================  =====================

Inside, the module sees the whole sequence; the operators of `hp_dsa.ops` and of torch_npu run on
this rank's rows and on the keys that these may see (`hp_dsa.handlers`). The gradient of a gathered
tensor is the sum over the ranks, by one reduce-scatter, never divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dsa.arguments import ATTENTION, DENSE_LOSS, INDEXER, SPARSE_LOSS, Argument
from hp_dsa.boundary import DSABoundary
from hp_dsa.handlers import register_dsa_handlers
from hp_dsa.operators import Result
from hp_dsa.plan import DSAPlan, make_plan
from hp_mesh.boundary import BoundaryStyle
from hp_mesh.checks import fail, require

__all__ = [
    "DSAIndexerContextParallel",
    "DSAIndexerLossContextParallel",
    "DSASparseAttentionContextParallel",
    "DSAStyle",
]

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
        load_balance: Compute two chunks of the sequence on each rank, of equal causal work.
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

    def _default_kinds(self, count: int) -> Sequence[Result] | None:
        raise NotImplementedError

    def make_boundary(self, module: nn.Module, device_mesh: DeviceMesh) -> DSABoundary:
        """Return the boundary around ``module``; a mesh of several axes is flattened."""
        return self._boundary(self.plan(device_mesh.mesh.numel()), device_mesh)

    def _boundary(self, plan: DSAPlan, device_mesh: DeviceMesh) -> DSABoundary:
        return DSABoundary(self, plan, device_mesh)


class DSAIndexerContextParallel(DSAStyle):
    """Select keys on sequence shards: ``forward(query, key, weights, ...)``.

    ``key`` is gathered; backward, if the scores are returned and used, sends one reduce-scatter.
    Indices are positions in the whole batch row or document, the same on every rank.

    With ``load_balance=True`` and ``order="contiguous"`` the tail half of ``query`` and ``weights``
    goes to the mirror rank, and the indices come back: what `DSAPlan.describe` says it costs.

    Keyword Args are those of `DSAStyle`, and ``query_kwarg_name``, ``key_kwarg_name``,
    ``weights_kwarg_name``.

    Example::

        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        DSAIndexerContextParallel(layout="BSND").apply(attention.indexer, mesh)
    """

    arguments = INDEXER
    balances_contiguous = True

    def __init__(
        self,
        *,
        layout: str = "BSND",
        mode: str = "colossal",
        query_kwarg_name: str | None = None,
        key_kwarg_name: str | None = None,
        weights_kwarg_name: str | None = None,
        use_local_output: bool = False,
        use_local_input: bool = False,
        load_balance: bool = False,
        order: str | None = None,
        keep_keys: bool = True,
        outputs: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            layout=layout,
            mode=mode,
            use_local_output=use_local_output,
            use_local_input=use_local_input,
            load_balance=load_balance,
            order=order,
            keep_keys=keep_keys,
            outputs=outputs,
            kwarg_names={
                "query": query_kwarg_name,
                "key": key_kwarg_name,
                "weights": weights_kwarg_name,
            },
        )

    def _default_kinds(self, count: int) -> Sequence[Result]:
        return ("rows", "rows")


class DSASparseAttentionContextParallel(DSAStyle):
    """Attend on sequence shards.

    ``forward(query, key, value, topk_indices, query_rope, key_rope, ...)``.

    ``key`` and ``key_rope`` travel in one all-gather; ``value`` that is ``key`` is not sent again.
    Backward sends one reduce-scatter of both gradients. Softmax statistics are rows on their own
    sequence dim (2 for BSND, 1 for TND).

    Keyword Args are those of `DSAStyle`, and ``query_kwarg_name``, ``key_kwarg_name``,
    ``value_kwarg_name``, ``topk_indices_kwarg_name``, ``query_rope_kwarg_name``,
    ``key_rope_kwarg_name``.

    Example::

        DSASparseAttentionContextParallel(layout="BSND").apply(sparse_attention_boundary, cp_mesh)
    """

    arguments = ATTENTION

    def __init__(
        self,
        *,
        layout: str = "BSND",
        mode: str = "colossal",
        query_kwarg_name: str | None = None,
        key_kwarg_name: str | None = None,
        value_kwarg_name: str | None = None,
        topk_indices_kwarg_name: str | None = None,
        query_rope_kwarg_name: str | None = "query_rope",
        key_rope_kwarg_name: str | None = "key_rope",
        use_local_output: bool = False,
        use_local_input: bool = False,
        load_balance: bool = False,
        order: str | None = None,
        keep_keys: bool = True,
        outputs: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            layout=layout,
            mode=mode,
            use_local_output=use_local_output,
            use_local_input=use_local_input,
            load_balance=load_balance,
            order=order,
            keep_keys=keep_keys,
            outputs=outputs,
            kwarg_names={
                "query": query_kwarg_name,
                "key": key_kwarg_name,
                "value": value_kwarg_name,
                "topk_indices": topk_indices_kwarg_name,
                "query_rope": query_rope_kwarg_name,
                "key_rope": key_rope_kwarg_name,
            },
        )

    def _default_kinds(self, count: int) -> Sequence[Result]:
        return ("attention", "statistics", "statistics")


class DSAIndexerLossContextParallel(DSAStyle):
    """The indexer's training loss on sequence shards.

    ``forward(query, key, query_index, key_index, weights, topk_indices, softmax_max, softmax_sum,
    query_rope, key_rope, ...)``; with ``loss_variant="dense"`` ``forward(query, key, query_index,
    key_index, weights, softmax_max, softmax_sum, softmax_max_index, softmax_sum_index, scale,
    query_rope, key_rope, ...)``.

    What leaves is the loss summed over all ranks, the same on each; a rank's gradients are those of
    its own share, so that parameter gradients are to be summed over the ranks (FSDP). Divide it by
    the number of tokens of the whole step yourself: see `hp_dsa.normalize_loss`. Of gradients that
    the module returns, that of ``key_index`` is summed and this rank's rows are kept. This holds
    for any number of outputs.

    Keyword Args are those of `DSAStyle`, and ``loss_variant``, ``"sparse"`` or ``"dense"``;
    ``query_kwarg_name``, ``key_kwarg_name``, ``query_index_kwarg_name``, ``key_index_kwarg_name``,
    ``weights_kwarg_name``, ``topk_indices_kwarg_name``, ``softmax_max_kwarg_name``,
    ``softmax_sum_kwarg_name``, ``softmax_max_index_kwarg_name``, ``softmax_sum_index_kwarg_name``,
    ``query_rope_kwarg_name``, ``key_rope_kwarg_name``.
    """

    def __init__(
        self,
        *,
        layout: str = "BSND",
        mode: str = "colossal",
        loss_variant: str = "sparse",
        query_kwarg_name: str | None = None,
        key_kwarg_name: str | None = None,
        query_index_kwarg_name: str | None = None,
        key_index_kwarg_name: str | None = None,
        weights_kwarg_name: str | None = None,
        topk_indices_kwarg_name: str | None = None,
        softmax_max_kwarg_name: str | None = None,
        softmax_sum_kwarg_name: str | None = None,
        softmax_max_index_kwarg_name: str | None = None,
        softmax_sum_index_kwarg_name: str | None = None,
        query_rope_kwarg_name: str | None = "query_rope",
        key_rope_kwarg_name: str | None = "key_rope",
        use_local_output: bool = False,
        use_local_input: bool = False,
        load_balance: bool = False,
        order: str | None = None,
        keep_keys: bool = True,
        outputs: Sequence[str] | None = None,
    ) -> None:
        if loss_variant not in ("sparse", "dense"):
            raise fail(
                type(self).__name__, f"loss_variant ({loss_variant!r}) must be 'sparse' or 'dense'"
            )
        self.loss_variant = loss_variant
        self.arguments = SPARSE_LOSS if loss_variant == "sparse" else DENSE_LOSS
        super().__init__(
            layout=layout,
            mode=mode,
            use_local_output=use_local_output,
            use_local_input=use_local_input,
            load_balance=load_balance,
            order=order,
            keep_keys=keep_keys,
            outputs=outputs,
            kwarg_names={
                "query": query_kwarg_name,
                "key": key_kwarg_name,
                "query_index": query_index_kwarg_name,
                "key_index": key_index_kwarg_name,
                "weights": weights_kwarg_name,
                "topk_indices": topk_indices_kwarg_name,
                "softmax_max": softmax_max_kwarg_name,
                "softmax_sum": softmax_sum_kwarg_name,
                "softmax_max_index": softmax_max_index_kwarg_name,
                "softmax_sum_index": softmax_sum_index_kwarg_name,
                "query_rope": query_rope_kwarg_name,
                "key_rope": key_rope_kwarg_name,
            },
        )

    @property
    def forgets_keys(self) -> bool:
        """Never: the loss keeps its gradients for backward, and no key."""
        return False

    def _shown(self) -> list[str]:
        return [*super()._shown(), f"loss_variant={self.loss_variant!r}"]

    def _default_kinds(self, count: int) -> Sequence[Result] | None:
        kinds: Mapping[int, tuple[Result, ...]] = {
            1: ("sum",),
            4: ("rows", "keys", "rows", "sum"),
        }
        return kinds.get(count)
