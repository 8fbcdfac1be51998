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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hp_dsa.arguments import ATTENTION, DENSE_LOSS, INDEXER, SPARSE_LOSS
from hp_dsa.operators import Result
from hp_dsa.style import DSAStyle
from hp_mesh.checks import fail

__all__ = [
    "DSAIndexerContextParallel",
    "DSAIndexerLossContextParallel",
    "DSASparseAttentionContextParallel",
]


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
