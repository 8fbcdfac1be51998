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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hp_comm import Handle, exchange_head_tail, gather_seq, head_to_seq, preflight, seq_to_head
from hp_cp.handlers import register_attention_handlers
from hp_cp.output import OutputDims, output_dims
from hp_cp.plan import HeadTable, Plan, check_style_arguments, make_plan, resolve_dims
from hp_mesh._torch import from_local
from hp_mesh.arguments import Slot, find_slots, map_outputs, read_slots, replace_slots
from hp_mesh.boundary import Boundary, BoundaryStyle, Entry
from hp_mesh.checks import fail, require
from hp_mesh.mesh import flatten_mesh, split_cp_mesh
from hp_mesh.placement import TensorLayout, compose, read_layout
from hp_mesh.view import View
from hp_mesh.window import Range

__all__ = ["ContextParallel"]

LABELS = ("q", "k", "v")
_LENGTH = "local sequence length"

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

    Example::

        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=2).apply(attention.core, mesh)

    .. note::
        K and V gradients are summed over the CP ranks and not divided: with FSDP, its mesh must
        contain the CP axis.
    """

    accepts_2d_mesh = True

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
    ) -> None:
        super().__init__()
        where = type(self).__name__
        check_style_arguments(
            where,
            ulysses_degree=ulysses_degree,
            load_balance=load_balance,
            seq_dim=seq_dim,
            head_dim=head_dim,
        )
        for name, value in (("qkv_indices", qkv_indices), ("qkv_kwarg_names", qkv_kwarg_names)):
            allowed = (3,) if name == "qkv_indices" else (0, 3)
            require(
                not isinstance(value, str) and len(value) in allowed,
                where,
                f"{name} ({value!r}) must name q, k and v, in this order",
                "give three of them",
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
            device_mesh.mesh.numel(), self.ulysses_degree, self.load_balance, where=where
        )
        return self._boundary(plan, device_mesh)

    def _boundary(self, plan: Plan, device_mesh: DeviceMesh) -> CPBoundary:
        return CPBoundary(self, plan, device_mesh)


@dataclass
class _Call(Entry):
    """What one call of the module keeps between its hooks.

    Attributes:
        slots: Where the call holds q, k and v.
        layout: Layout that q came with; the output is restored to it.
        dims: ``(seq_dim, head_dim)`` of q, counted from the front.
        heads: Query heads of this rank and their number, after TP.
        length: Global sequence length.
        tail: Second half of the work under load balance: q of the mirror rank's tail.
    """

    slots: list[Slot]
    layout: TensorLayout
    dims: tuple[int, int]
    heads: tuple[Range, int]
    length: int
    tail: Tensor | None


@dataclass
class Inputs:
    """q, k and v of one call, checked on this rank."""

    slots: list[Slot]
    tensors: list[Tensor]
    locals: list[Tensor]
    layouts: list[TensorLayout]
    dims: tuple[int, int]
    table: HeadTable
    num_heads: int
    num_kv_heads: int
    claimed: dict[str, Handle[Tensor]] = field(default_factory=dict)

    def signature(self) -> dict[str, object]:
        """Return what must be the same on every CP rank, by the name to show."""
        seq_dim, _ = self.dims
        signature: dict[str, object] = {_LENGTH: self.locals[0].size(seq_dim)}
        signature["sent ahead"] = sorted(self.claimed)
        for name, x, layout in zip(LABELS, self.locals, self.layouts, strict=True):
            shape = [n for dim, n in enumerate(x.shape) if dim != seq_dim]
            signature[f"shape of {name} without its sequence dim"] = shape
            signature[f"dtype of {name}"] = x.dtype
            signature[f"requires_grad of {name}"] = x.requires_grad and torch.is_grad_enabled()
            signature[f"placements of {name}"] = layout.placements
        return signature


class CPBoundary(Boundary[_Call]):
    """`ContextParallel` around one module.

    Attributes:
        style: The configuration.
        plan: Its resolved degrees on this mesh.
        cp_mesh: Mesh of the CP axes inside: 1-D, or ``("co", "ds")`` for Hybrid.
        rank: CP rank.
    """

    def __init__(self, style: ContextParallel, plan: Plan, device_mesh: DeviceMesh) -> None:
        super().__init__(type(style).__name__, device_mesh)
        self.style = style
        self.plan = plan
        flat = flatten_mesh(device_mesh)
        self.group = flat.get_group()
        self.rank = flat.get_local_rank()
        if plan.mode == "hybrid":
            self.cp_mesh = split_cp_mesh(device_mesh, plan.ulysses_degree)
        else:
            self.cp_mesh = flat

    @property
    def ulysses_group(self) -> ProcessGroup | None:
        """Ranks that trade sequence for heads; None if there is one only."""
        if self.plan.ulysses_degree == 1:
            return None
        return self.cp_mesh.get_group(self.cp_mesh.ndim - 1)

    @property
    def colossal_group(self) -> ProcessGroup | None:
        """Ranks that gather k and v; None if there is one only."""
        return None if self.plan.colossal_degree == 1 else self.cp_mesh.get_group(0)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Select q, k, v; check; compare with the other ranks; send; wrap; describe the view."""
        inputs = self._agree(args, kwargs)
        q, k, v = inputs.locals
        seq_dim, _ = inputs.dims
        length = q.size(seq_dim) * self.plan.cp_size
        windows = self.plan.rows(self.rank, length)
        q, k, v = self._send(q, k, v, inputs)
        tail = None
        if self.plan.load_balance:
            q, own_tail = q.chunk(2, dim=seq_dim)
            tail = exchange_head_tail(own_tail, self.group)
        d = self.rank % self.plan.ulysses_degree
        heads = inputs.table.query[d]
        layout = inputs.layouts[0]
        mesh, q_placements = compose(
            layout, self.cp_mesh, self._cp_placements(0, inputs), self.where
        )
        first = mesh.ndim - self.cp_mesh.ndim
        view = View(
            mesh=mesh,
            cp_axes=tuple(range(first, mesh.ndim)),
            window=windows[0],
            query_placements=q_placements,
            heads=heads,
            num_heads=inputs.num_heads,
            is_local=self.style.use_local_input,
            is_balanced=self.plan.load_balance,
            where=self.where,
        )
        wrapped = [self._wrap(x, i, inputs, view) for i, x in enumerate((q, k, v))]
        new_args, new_kwargs = replace_slots(args, kwargs, inputs.slots, wrapped)
        if tail is not None:
            tail = self._wrap(tail, 0, inputs, view)
        return _Call(
            args=new_args,
            kwargs=new_kwargs,
            view=view,
            slots=inputs.slots,
            layout=layout,
            dims=inputs.dims,
            heads=(heads, inputs.num_heads),
            length=length,
            tail=tail,
        )

    def leave(self, module: nn.Module, entry: _Call, output: Any) -> Any:
        """Send the declared outputs back and lay them out as q was."""
        if entry.tail is None:
            return self._map(entry, output, lambda x: self._restore(entry, *self._return(entry, x)))
        heads: list[tuple[Tensor, OutputDims]] = []
        self._map(entry, output, lambda x: heads.append(self._return(entry, x)))
        _, entry.view.window = self.plan.rows(self.rank, entry.length)
        args, kwargs = replace_slots(entry.args, entry.kwargs, entry.slots[:1], [entry.tail])
        second = module.forward(*args, **kwargs)
        queue = iter(heads)

        def join(x: Tensor) -> Tensor:
            head, dims = next(queue)
            tail, _ = self._return(entry, x)
            own_tail = exchange_head_tail(tail, self.group)
            return self._restore(entry, torch.cat([head, own_tail], dim=dims.seq_dim), dims)

        return self._map(entry, second, join, balanced=True)

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the checked inputs, or raise what any rank found wrong, on all of them."""
        error: Exception | None = None
        inputs: Inputs | None = None
        try:
            inputs = self._read(args, kwargs)
        except (TypeError, ValueError) as problem:
            error = problem
        preflight(
            self.group,
            self.where,
            {} if inputs is None else inputs.signature(),
            error=error,
            call_index=self.next_call_index(),
            way_out=self._advise,
        )
        assert inputs is not None, "preflight raises the error it is given"
        # only now: the ranks have one length, so all of them refuse it with one text
        self.plan.check_length(inputs.locals[0].size(inputs.dims[0]), self.where)
        return inputs

    def _advise(self, differing: Mapping[str, Sequence[str]]) -> str:
        """Name the way out of what the ranks disagree about: unequal shards need padding."""
        lengths = differing.get(_LENGTH, ())
        if not lengths or not all(length.isdigit() for length in lengths):
            return ""  # alike, or some ranks are in another call
        total = sum(map(int, lengths))
        return (
            f"if these are the shards of one sequence of {total}, pad it to "
            f"{self.plan.next_length(total)} with pad_sequence before it is cut"
        )

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        where, plan, style = self.where, self.plan, self.style
        slots = find_slots(
            args,
            kwargs,
            labels=LABELS,
            indices=style.qkv_indices,
            kwarg_names=style.qkv_kwarg_names,
            where=where,
        )
        tensors: list[Tensor] = read_slots(args, kwargs, slots)
        ndim = tensors[0].ndim
        require(
            all(x.ndim == ndim for x in tensors),
            where,
            f"q, k and v with {[x.ndim for x in tensors]} dims must have one number of dims",
            "check qkv_indices and qkv_kwarg_names",
        )
        needs_heads = plan.ulysses_degree > 1
        seq_dim, head_dim = resolve_dims(
            where, ndim, style.seq_dim, style.head_dim, needs_heads=needs_heads
        )
        pairs = [
            read_layout(x, self.cp_mesh, seq_dim, name, where)
            for name, x in zip(LABELS, tensors, strict=True)
        ]
        q, k, v = locals_ = [local for local, _ in pairs]
        lengths = [x.size(seq_dim) for x in locals_]
        require(
            len(set(lengths)) == 1,
            where,
            f"q, k and v {[list(x.shape) for x in locals_]} have {lengths} rows in seq_dim "
            f"({style.seq_dim}); they must have one length",
            "check that seq_dim and head_dim name the layout (BSHD is 1, 2 and BNSD is 2, 1) and "
            "that each is this rank's shard",
        )
        num_heads = num_kv_heads = 1
        if needs_heads:
            num_heads, num_kv_heads = q.size(head_dim), k.size(head_dim)
            require(
                v.size(head_dim) == num_kv_heads,
                where,
                f"v has {v.size(head_dim)} heads in head_dim ({style.head_dim}), which must be "
                f"the number of heads of k ({num_kv_heads})",
                "check qkv_indices and the layout",
            )
        elif head_dim < ndim:
            num_heads, num_kv_heads = q.size(head_dim), k.size(head_dim)
        layout = pairs[0][1]
        table = plan.heads(
            num_heads,
            num_kv_heads,
            where=where,
            head_dim=head_dim if needs_heads else None,
            shape=list(q.shape),
            tp_size=layout.foreign_size(head_dim),
        )
        return Inputs(
            slots=slots,
            tensors=tensors,
            locals=locals_,
            layouts=[layout for _, layout in pairs],
            dims=(seq_dim, head_dim),
            table=table,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )

    def _send(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        """Trade sequence for heads, then gather what is left of the sequence of k and v."""
        seq_dim, head_dim = inputs.dims
        if self.ulysses_group is not None:
            kv_heads = inputs.table.kv_sent
            q, k, v = seq_to_head(
                (q, k, v),
                self.ulysses_group,
                seq_dim=seq_dim,
                head_dim=head_dim,
                heads=(None, kv_heads, kv_heads),
            )
        if self.colossal_group is not None:
            k, v = gather_seq((k, v), self.colossal_group, seq_dim=seq_dim)
        return self._expand(q, k, v, inputs)

    def _expand(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        """Give each query head a KV head of its own where they do not share them evenly."""
        _, head_dim = inputs.dims
        if inputs.table.kv_expand is not None:
            index = torch.tensor(
                inputs.table.kv_expand[self.rank % self.plan.ulysses_degree], device=k.device
            )
            k, v = k.index_select(head_dim, index), v.index_select(head_dim, index)
        return q, k, v

    def _cp_placements(self, which: int, inputs: Inputs) -> list[Placement]:
        """Return the placements of q (0), k or v on the CP mesh, inside the boundary."""
        seq_dim, head_dim = inputs.dims
        rows: Placement = Shard(seq_dim) if which == 0 else Replicate()
        if self.plan.mode == "hybrid":
            return [rows, Shard(head_dim)]
        return [Shard(head_dim)] if self.plan.mode == "ulysses" else [rows]

    def _wrap(self, local: Tensor, which: int, inputs: Inputs, view: View) -> Tensor:
        if self.style.use_local_input:
            return local
        mesh, placements = compose(
            inputs.layouts[which], self.cp_mesh, self._cp_placements(which, inputs), self.where
        )
        if mesh != view.mesh:
            raise fail(
                self.where,
                f"{LABELS[which]} on {mesh} must lie on the same axes as q ({view.mesh})",
                "lay out q, k and v alike over the axes that are not CP",
            )
        return from_local(local, mesh, placements, view.partial_grads(placements))

    def _map(self, entry: _Call, output: Any, convert: Any, balanced: bool = False) -> Any:
        """Convert the declared outputs; the other tensors keep their data."""
        plain = self.style.use_local_output or entry.layout.is_plain

        def other(x: Tensor) -> Tensor:
            if balanced:
                raise TypeError(
                    f"{self.where}: under load_balance the module is called twice, and output "
                    f"{list(x.shape)} must be joined like the first; name all tensor outputs that "
                    "have the sequence in the same dim with outputs=, or return the attention "
                    "output only"
                )
            return x.to_local() if plain and isinstance(x, DTensor) else x

        return map_outputs(output, self.style.outputs, convert, other, self.where)

    def _return(self, entry: _Call, output: Tensor) -> tuple[Tensor, OutputDims]:
        """Return this rank's sequence shard of ``output``, with its dims."""
        dims = output_dims(
            output,
            view=entry.view,
            in_dims=entry.dims,
            foreign=entry.layout.foreign_placements,
            seq_dim=self.style.output_seq_dim,
            head_dim=self.style.output_head_dim,
            heads=entry.heads,
            has_heads=self.plan.ulysses_degree > 1,
            view_length=entry.length // (2 if self.plan.load_balance else 1),
        )
        local = dims.take(output, entry.view)
        if self.ulysses_group is not None and dims.trades_heads:
            local = head_to_seq(
                local, self.ulysses_group, seq_dim=dims.seq_dim, head_dim=dims.head_dim
            )
        return local, dims

    def _restore(self, entry: _Call, local: Tensor, dims: OutputDims) -> Tensor:
        if self.style.use_local_output:
            return local
        return entry.layout.restore(local, dims.seq_dim, dims.foreign)
