"""ContextParallel: what enters the attention module, what leaves it, and what is sent between.

====================  ==========================================  ================================
mode                  before attention                            inside (q / k, v)
====================  ==========================================  ================================
Ulysses               all-to-all of q, k, v: sequence -> heads    Shard(head) / Shard(head)
Colossal              all-gather of k and v                       Shard(seq) / Replicate()
Hybrid ("co", "ds")   all-to-all on ds, then all-gather on co     (Shard(seq), Shard(head)) /
                                                                  (Replicate(), Shard(head))
====================  ==========================================  ================================

After attention the output's heads are traded back for its sequence (Ulysses, Hybrid). Backward
sends the mirror of each: all-to-all for all-to-all, reduce-scatter for all-gather. Which of these
run follows from the two degrees of the `Plan`; a group of one rank sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_cp.balanced import BalancedBoundary
from hp_cp.core_boundary import CPBoundary
from hp_cp.gathers import check_streamed_style
from hp_cp.halo import check_window_arguments
from hp_cp.handlers import register_attention_handlers
from hp_cp.plan import Plan, make_plan
from hp_cp.style_arguments import check_cross_attention, check_style_arguments
from hp_mesh.boundary import BoundaryStyle
from hp_mesh.checks import require

__all__ = ["ContextParallel"]

register_attention_handlers()


class ContextParallel(BoundaryStyle):
    """Let an attention module written for one device compute on sequence shards.

    The module receives q, k and v as shards of the sequence and returns its output as such a
    shard; inside it sees the whole sequence (see `hp_mesh.view`). Nothing in the module changes.

    Args:
        seq_dim: Dim that holds the sequence: 1 for BSHD, 2 for BNSD, 0 for TND and SBHD.
        head_dim: Dim that holds the heads: 2 for BSHD and SBHD, 1 for BNSD and TND. Colossal does
            not cut heads, so it also takes ``[B, S, H * D]``.
        ulysses_degree: Size of a Ulysses group. None for all CP ranks (pure Ulysses), 1 for
            Colossal, a divisor in between for Hybrid.
        qkv_indices: Positions of q, k and v in the call of the module.
        qkv_kwarg_names: Keywords of q, k and v; one that is present wins over the position.
        use_local_output: Return plain local tensors, whatever came in. Otherwise the output is
            laid out as q was: plain, CP DTensor, or DTensor on other axes (TP).
        load_balance: Only with ``ulysses_degree=1``. Swap the tail half of q with the mirror rank
            and call the module twice, so that causal work is equal on all ranks. Masks must then
            take their length from k.

    Keyword Args:
        use_local_input: Hand the module plain local tensors, for kernels that take no DTensor; it
            reads `attention_window` to learn its rows. Default: False.
        output_seq_dim: Sequence dim of a plain output. Default: ``seq_dim``.
        output_head_dim: Head dim of a plain output. Default: ``head_dim``.
        outputs: Positions or keys of the outputs to lay out. Default: the first tensor.
        keep_kv: Whether the gathered K and V are kept for backward. False, in Colossal and Hybrid,
            keeps only what this rank held before the gather, and backward gathers again. What the
            module computes from K and V and keeps itself (a cast, repeated heads) is not freed.
            Under activation checkpointing or other hooks on saved tensors it changes nothing; k
            and v must not be changed in place before backward. Default: True.
        cross_attention: Whether k and v may be shards of another sequence than q, of another length
            that the CP size divides as well. DTensors that are ``Replicate()`` on the CP axis are
            taken as the whole, of any length: k and v are not sent (a rank takes the heads that it
            needs), and their gradients are ``Partial()`` there. Default: False, so that tensors of
            another layout are noticed.
        kv_chunks: In how many parts K and V are gathered, in Colossal and Hybrid, each while
            attention to the one before it runs; two are in memory at a time, and backward gathers
            them again. Inside, k and v are still the whole sequence, but only
            ``F.scaled_dot_product_attention`` may read across it. Default: 1, all at once.
        sliding_window: In Colossal and Hybrid, what the module's attention may see: the last so
            many keys, the query's own included. They are fetched from the ranks before this one,
            and nothing is gathered. It changes what is sent, never what is computed: the module's
            attention must say its window itself (`hp_cp.sliding_window_attention`, a band of
            ``npu_fusion_attention``, a mask), and whatever would see more is refused. Default:
            None, everything is gathered.
        sink_tokens: With ``sliding_window``, how many first keys it may see as well. Default: 0.
        balance_hybrid: What ``load_balance`` is for Colossal, for Hybrid: behind the exchange of
            heads, the tail half of a Ulysses group's rows is swapped with the mirror group, and the
            module called twice. Default: False.

    Example::

        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=2).apply(attention.core, mesh)

    .. note::
        K and V gradients are summed over the CP ranks and not divided: with FSDP, its mesh must
        contain the CP axis.
    """

    accepts_2d_mesh = True
    overlaps = False
    """Whether exchanges start ahead of the module: in `AsyncContextParallel`."""
    head_groups = 1
    """Groups of heads that are exchanged one by one; more than one in `AsyncContextParallel`."""

    def __init__(
        self,
        seq_dim: int = 1,
        head_dim: int = 2,
        ulysses_degree: int | None = None,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        use_local_output: bool = False,
        load_balance: bool = False,
        *,
        use_local_input: bool = False,
        output_seq_dim: int | None = None,
        output_head_dim: int | None = None,
        outputs: Sequence[int | str] | None = None,
        keep_kv: bool = True,
        kv_chunks: int = 1,
        sliding_window: int | None = None,
        sink_tokens: int = 0,
        balance_hybrid: bool = False,
        cross_attention: bool = False,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        check_style_arguments(
            where,
            ulysses_degree=ulysses_degree,
            load_balance=load_balance,
            balance_hybrid=balance_hybrid,
            seq_dim=seq_dim,
            head_dim=head_dim,
        )
        require(isinstance(keep_kv, bool), where, f"keep_kv ({keep_kv!r}) must be True or False")
        check_streamed_style(
            kv_chunks,
            use_local_input=use_local_input,
            head_groups=1,
            overlap=self.overlaps,
            where=where,
        )
        check_window_arguments(
            where,
            sliding_window,
            sink_tokens,
            balance="load_balance=True"
            if load_balance
            else "balance_hybrid=True"
            if balance_hybrid
            else None,
            keep_kv=keep_kv,
            kv_chunks=kv_chunks,
            use_local_input=use_local_input,
            overlap=self.overlaps,
        )
        check_cross_attention(
            where,
            cross_attention,
            load_balance=load_balance,
            kv_chunks=kv_chunks,
            sliding_window=sliding_window,
            balance_hybrid=balance_hybrid,
        )
        for name, value, lengths in (
            ("qkv_indices", qkv_indices, (3,)),
            ("qkv_kwarg_names", qkv_kwarg_names, (0, 3)),
        ):
            require(
                isinstance(value, (list, tuple))
                and len(value) in lengths
                and len(set(value)) == len(value),
                where,
                f"{name} ({value!r}) must name q, k and v, three different ones in this order",
                f"for example {name}={(0, 1, 2) if name == 'qkv_indices' else ('q', 'k', 'v')}",
            )
        require(
            outputs is None or isinstance(outputs, (list, tuple)),
            where,
            f"outputs ({outputs!r}) must be a list of positions or keys",
            "for example outputs=(0,)",
        )
        self.seq_dim = seq_dim
        self.head_dim = head_dim
        self.ulysses_degree = ulysses_degree
        self.qkv_indices = tuple(qkv_indices)
        self.qkv_kwarg_names = tuple(qkv_kwarg_names)
        self.use_local_output = use_local_output
        self.load_balance = load_balance
        self.use_local_input = use_local_input
        self.output_seq_dim = output_seq_dim
        self.output_head_dim = output_head_dim
        self.outputs = None if outputs is None else tuple(outputs)
        self.keep_kv = keep_kv
        self.kv_chunks = kv_chunks
        self.cross_attention = cross_attention
        self.sliding_window = sliding_window
        self.sink_tokens = sink_tokens
        self.balance_hybrid = balance_hybrid

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(seq_dim={self.seq_dim}, head_dim={self.head_dim}, "
            f"ulysses_degree={self.ulysses_degree}, load_balance={self.load_balance}, "
            f"use_local_output={self.use_local_output})"
        )

    def make_boundary(self, module: nn.Module, device_mesh: DeviceMesh) -> CPBoundary:
        """Return the boundary around ``module``; the degree is checked against the mesh here."""
        where = type(self).__name__
        plan = make_plan(
            device_mesh.mesh.numel(),
            self.ulysses_degree,
            self.load_balance,
            balance_hybrid=self.balance_hybrid,
            where=where,
        )
        plan.check_keep_kv(self.keep_kv, where=where)
        plan.check_kv_chunks(self.kv_chunks, where=where)
        plan.check_window(self.sliding_window, self.sink_tokens, where=where)
        return self._boundary(plan, device_mesh)

    def _boundary(self, plan: Plan, device_mesh: DeviceMesh) -> CPBoundary:
        kind = BalancedBoundary if plan.load_balance else CPBoundary
        return kind(self, plan, device_mesh)
