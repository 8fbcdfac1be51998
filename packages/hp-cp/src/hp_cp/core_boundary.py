"""The boundary of `ContextParallel` around one module: send, wrap, let it run, send back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hp_comm import gather_seq, head_to_seq, preflight, seq_to_head
from hp_comm.agreement import next_module
from hp_comm.backward_order import note_backward
from hp_comm.fingerprint import RowsWatch
from hp_cp.call import Call
from hp_cp.hand_over import describe_view, hand_over
from hp_cp.inputs import Inputs, advise, read_inputs
from hp_cp.kv_refetch import GatheredKV
from hp_cp.output import OutputDims, output_dims
from hp_cp.plan import Plan
from hp_cp.prepared import done
from hp_mesh.arguments import map_outputs, read_slots
from hp_mesh.boundary import Boundary
from hp_mesh.lent import lend
from hp_mesh.mesh import flatten_mesh, require_ascending, split_cp_mesh

if TYPE_CHECKING:
    from hp_cp.style import ContextParallel

__all__ = ["CPBoundary"]


class CPBoundary(Boundary[Call]):
    """`ContextParallel` around one module.

    Attributes:
        style: The configuration.
        plan: Its resolved degrees on this mesh.
        cp_mesh: Mesh of the CP axes inside: 1-D, or ``("co", "ds")`` for Hybrid.
        rank: CP rank.
        identity: What tells the ranks that they are in the same call.
        watch: Looks whether all ranks are handed the same rows.
    """

    def __init__(self, style: ContextParallel, plan: Plan, device_mesh: DeviceMesh) -> None:
        super().__init__(type(style).__name__, device_mesh)
        self.style = style
        self.plan = plan
        flat = flatten_mesh(device_mesh)
        self.group = flat.get_group()
        self.rank = flat.get_local_rank()
        require_ascending(self.where, flat)
        self.watch = RowsWatch()
        self.identity = {
            "module": next_module(self.group),
            # what changes what is sent, and in what order it lies on the wire
            "style": f"{style!r}, head_groups={style.head_groups}, keep_kv={style.keep_kv}, "
            f"use_local_input={style.use_local_input}, kv_chunks={style.kv_chunks}, "
            f"cross_attention={style.cross_attention}, "
            f"sliding_window={style.sliding_window}, sink_tokens={style.sink_tokens}, "
            f"balance_hybrid={style.balance_hybrid}",
        }
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

    @property
    def streams_kv(self) -> bool:
        """Whether k and v stay this rank's shard, and attention asks for what it needs."""
        asked = self.style.kv_chunks > 1 or self.style.sliding_window is not None
        return asked and self.plan.colossal_degree > 1

    @property
    def wants_dense(self) -> bool:
        """Whether the module must be handed dense tensors: plain ones, for kernels that ask for it.

        DTensors need not be: ``view`` of one that lies apart is a reshape (`hp_mesh.reshape`).
        """
        return self.style.use_local_input

    @property
    def reads_dense(self) -> bool:
        """Whether heads cut out of a larger tensor must be laid together.

        Attention on a CPU reads K and V again for every block of queries: rows that lie apart cost
        it more than laying them together once.
        """
        return self.wants_dense or self.mesh.device_type == "cpu"

    @property
    def exchanges_dense(self) -> bool:
        """Whether what the all-to-all brings must be dense: a gather sends it on."""
        return self.reads_dense or self.plan.mode != "ulysses"

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Select q, k, v; check; compare with the other ranks; send; wrap; describe the view."""
        inputs = self._agree(args, kwargs)
        q, k, v = self._send(inputs)
        view = describe_view(self, inputs)
        args, kwargs = hand_over(self, args, kwargs, inputs, view, (q, k, v))
        call = Call(args, kwargs, view, inputs)
        self._forget(call, inputs, (k, v), args, kwargs)
        return call

    def leave(self, module: nn.Module, entry: Call, output: Any) -> Any:
        """Send the declared outputs back and lay them out as q was."""
        try:
            result = self._leave(module, entry, output)
            if entry.recorder is not None:
                entry.recorder.launch_with(result)
            if self._sends_back(entry.inputs):
                name = f"call {entry.inputs.call_index} of module {self.identity['module']}"
                note_backward(self.group, name, result)
            return result
        finally:
            self.abandon(entry)

    def _sends_back(self, inputs: Inputs) -> bool:
        """Say whether backward sends anything on any rank; known alike to all of them."""
        style = self.style
        if self.ulysses_group is not None or style.load_balance or style.kv_chunks > 1:
            return True
        trains = any(x.requires_grad for x in inputs.locals[1:])
        return not style.keep_kv or (trains and not inputs.kv_is_whole)

    def abandon(self, entry: Call) -> None:
        """Take the hooks on saved tensors off this thread."""
        if entry.recorder is not None:
            entry.recorder.close()

    def _leave(self, module: nn.Module, entry: Call, output: Any) -> Any:
        with entry.view.paused():
            return self._map(entry, output, lambda x: self._restore(entry, *self._return(entry, x)))

    def length(self, inputs: Inputs) -> int:
        """Return the global sequence length."""
        return inputs.locals[0].size(inputs.dims[0]) * self.plan.cp_size

    def _view_length(self, inputs: Inputs) -> int:
        """Return the length of the sequence of q inside the boundary."""
        return self.length(inputs)

    def _agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the checked inputs, or raise what any rank found wrong, on all of them."""
        error: Exception | None = None
        inputs: Inputs | None = None
        index = self.next_call_index()
        try:
            inputs = self._read(args, kwargs)
        except Exception as problem:  # whatever it is, the others would wait for this rank
            error = problem
        preflight(
            self.group,
            self.where,
            lambda: {} if inputs is None else {**self.identity, **inputs.signature()},
            error=error,
            call_index=index,
            way_out=lambda differing: advise(self.plan, differing),
            watch=self.watch,
            local=None if inputs is None else inputs.told_apart(),
        )
        assert inputs is not None, "preflight raises the error it is given"
        inputs.call_index = index
        # only now: the ranks have one length, so all of them refuse it with one text
        length = inputs.locals[0].size(inputs.dims[0])
        self.plan.check_length(length, self.where)
        if inputs.is_cross and not inputs.kv_is_whole:
            self.plan.check_length(inputs.locals[1].size(inputs.dims[0]), self.where)
        self.plan.check_kv_chunks(self.style.kv_chunks, length, where=self.where)
        return inputs

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        return read_inputs(
            args, kwargs, style=self.style, plan=self.plan, cp_mesh=self.cp_mesh, where=self.where
        )

    def _send(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Trade sequence for heads, then gather what is left of the sequence of k and v."""
        q, k, v = inputs.locals
        seq_dim, head_dim = inputs.dims
        if self.ulysses_group is None:
            q, k, v = (done(x, work) for x, work in zip(inputs.locals, inputs.works, strict=True))
        elif inputs.kv_is_whole:
            q = seq_to_head(
                q,
                self.ulysses_group,
                seq_dim=seq_dim,
                head_dim=head_dim,
                dense=self.exchanges_dense,
                work=inputs.works[0],
            )
            place = self.rank % self.plan.ulysses_degree
            k, v = inputs.own_heads(place, dense=self.reads_dense)
        else:
            kv_heads = inputs.table.kv_sent
            q, k, v = seq_to_head(
                (q, k, v),
                self.ulysses_group,
                seq_dim=seq_dim,
                head_dim=head_dim,
                heads=(None, kv_heads, kv_heads),
                dense=self.exchanges_dense,
                work=inputs.works,
            )
        if self.colossal_group is not None and not (self.streams_kv or inputs.kv_is_whole):
            self.keep_shards(inputs, k, v)
            k, v = gather_seq((k, v), self.colossal_group, seq_dim=seq_dim, dense=self.wants_dense)
        return self.expand(q, k, v, inputs)

    def keep_shards(self, inputs: Inputs, k: Tensor, v: Tensor) -> None:
        """Under ``keep_kv=False``, remember what is about to be gathered."""
        if not self.style.keep_kv:
            inputs.shards = (k.detach(), v.detach())

    def _forget(
        self,
        call: Call,
        inputs: Inputs,
        gathered: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Under ``keep_kv=False``, keep ``gathered`` (K, V) out of the graph that follows."""
        if inputs.shards is None or self.colossal_group is None or not call.may_forget():
            return
        alone = self.plan.mode == "colossal" and not self.plan.load_balance
        # a DTensor's local tensor does not count the changes of the DTensor
        outside = () if self.ulysses_group is not None else inputs.tensors[1:]
        source = GatheredKV(
            self.where,
            self.colossal_group,
            inputs.shards,
            [x for x in outside if isinstance(x, DTensor)],
            gathered,
            seq_dim=inputs.dims[0],
            head_dim=inputs.dims[1],
            index=self._kv_index(inputs),
            dense=self.wants_dense,
            overlap=not alone or self.style.head_groups > 1,
        )
        call.take_notes_of(source, gathered, read_slots(args, kwargs, inputs.slots)[1:])

    def expand(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        """Give each query head a KV head of its own where they do not share them evenly."""
        _, head_dim = inputs.dims
        index = self._kv_index(inputs)
        if index is not None:
            k, v = k.index_select(head_dim, index), v.index_select(head_dim, index)
        return q, k, v

    def _kv_index(self, inputs: Inputs) -> Tensor | None:
        """Return the KV head of each query head, or None where they share them evenly."""
        table = inputs.table.kv_expand
        if table is None:
            return None
        place = self.rank % self.plan.ulysses_degree
        return torch.tensor(table[place], device=inputs.locals[1].device)

    def _map(
        self,
        entry: Call,
        output: Any,
        convert: Callable[[Tensor], Any],
        several: str | None = None,
    ) -> Any:
        """Convert the declared outputs; the other tensors keep their data.

        ``several`` is the option that calls the module more than once: each call returns a part of
        every output, so there must be no other tensors.
        """
        plain = self.style.use_local_output or entry.inputs.layouts[0].is_plain

        def other(x: Tensor) -> Tensor:
            streamed = entry.view.streamed
            if streamed is not None and streamed.holds(x):
                raise streamed.refusal("an output")
            if several is not None:
                raise TypeError(
                    f"{self.where}: with {several} the module is called several times, and output "
                    f"{list(x.shape)} must be joined like the first; name all tensor outputs of "
                    "the same dims with outputs=, or return the attention output only"
                )
            if not plain or not isinstance(x, DTensor):
                return x
            whole = [Replicate() if p.is_partial() else p for p in x.placements]
            return x.redistribute(placements=whole).to_local()

        return map_outputs(output, self.style.outputs, convert, other, self.where)

    def _take(self, entry: Call, output: Tensor) -> tuple[Tensor, OutputDims]:
        """Return this rank's rows and heads of ``output`` as a plain tensor, with its dims."""
        inputs, view = entry.inputs, entry.view
        dims = output_dims(
            output,
            view=view,
            in_dims=inputs.dims,
            foreign=inputs.layouts[0].foreign_placements,
            seq_dim=self.style.output_seq_dim,
            head_dim=self.style.output_head_dim,
            heads=(view.heads, view.num_heads),
            has_heads=self.plan.ulysses_degree > 1,
            view_length=self._view_length(inputs),
        )
        return dims.take(output, view), dims

    def _return(self, entry: Call, output: Tensor) -> tuple[Tensor, OutputDims]:
        """Return this rank's sequence shard of ``output``, with its dims."""
        local, dims = self._take(entry, output)
        returned = self._trade_back(local, dims)
        if returned is local:  # the caller gets the data that the module's last op may have saved
            lend(entry.view, output, local)
        return returned, dims

    def _trade_back(self, local: Tensor, dims: OutputDims) -> Tensor:
        """Trade this rank's heads for its rows, where it has heads of its own."""
        if self.ulysses_group is None or not dims.trades_heads:
            return local
        return head_to_seq(local, self.ulysses_group, seq_dim=dims.seq_dim, head_dim=dims.head_dim)

    def _restore(self, entry: Call, local: Tensor, dims: OutputDims) -> Tensor:
        if self.style.use_local_output:
            return local
        return entry.inputs.layouts[0].restore(local, dims.seq_dim, dims.foreign)
