"""The boundary of a DSA style: gather, wrap, let the module run, reduce what it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hp_comm import preflight
from hp_comm.agreement import compares_always, next_module
from hp_comm.backward_order import note_backward
from hp_comm.fingerprint import RowsWatch
from hp_dsa.call import DSACall
from hp_dsa.gather import Gathered, Gatherer
from hp_dsa.gather_cache import open_gathers
from hp_dsa.hand_over import hand_over
from hp_dsa.indices import check_indices, waits
from hp_dsa.inputs import Inputs, advise, read_inputs
from hp_dsa.key_refetch import GatheredKeys
from hp_dsa.late_errors import LateErrors
from hp_dsa.outputs import Returned
from hp_dsa.plan import DSAPlan
from hp_dsa.view import DSAView
from hp_dsa.windowed import LocalCall
from hp_mesh.boundary import Boundary
from hp_mesh.mesh import flatten_mesh, require_ascending
from hp_mesh.placement import compose
from hp_mesh.recorder import may_forget
from hp_mesh.window import AttentionWindow

if TYPE_CHECKING:
    from hp_dsa.style import DSAStyle

__all__ = ["DSABoundary"]


class DSABoundary(Boundary[DSACall]):
    """A DSA style around one module.

    Attributes:
        style: The configuration.
        plan: Its plan on this mesh.
        cp_mesh: The 1-D CP mesh.
        rank: CP rank.
        gatherer: How keys are gathered.
        late_errors: What earlier calls found wrong on a device.
        identity: What tells the ranks that they are in the same call.
        watch: Looks whether all ranks are handed the same rows.
    """

    def __init__(self, style: DSAStyle, plan: DSAPlan, device_mesh: DeviceMesh) -> None:
        super().__init__(type(style).__name__, device_mesh)
        self.style = style
        self.plan = plan
        self.cp_mesh = flatten_mesh(device_mesh)
        require_ascending(self.where, self.cp_mesh)
        self.group = self.cp_mesh.get_group()
        self.rank = self.cp_mesh.get_local_rank()
        self.late_errors = LateErrors()
        self.gatherer = Gatherer(self.group, plan.seq_dim, plan.order)
        self.watch = RowsWatch()
        self.identity = {
            "module": next_module(self.group),
            "style": f"{style!r}",
        }

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DSACall:
        """Select; check; compare with the other ranks; gather; wrap; describe the view."""
        known = open_gathers() or Gathered()
        index = self.next_call_index()
        inputs = self._agree(args, kwargs, known, index)
        view = self._view(inputs, index)
        local = LocalCall(view, inputs, args, kwargs) if self.style.use_local_input else None
        wholes = known.collect(inputs.sources, self.gatherer, inputs.under_way)
        if local is not None:
            local.wholes = wholes
            return DSACall(*local.call(0), view, inputs, index, local)
        args, kwargs = hand_over(args, kwargs, inputs, view, wholes, self.cp_mesh)
        call = DSACall(args, kwargs, view, inputs, index)
        self._forget(call, known)
        return call

    def _forget(self, call: DSACall, known: Gathered) -> None:
        """Under ``keep_keys=False``, keep what was gathered out of the graph that follows."""
        if not self.style.forgets_keys or self.plan.cp_size == 1 or not may_forget():
            return
        packs = known.packs_of(call.inputs.sources.values(), self.gatherer)
        call.take_notes_of(GatheredKeys(self.where, packs, self.gatherer), packs)

    def abandon(self, entry: DSACall) -> None:
        """Take the hooks on saved tensors off this thread."""
        if entry.recorder is not None:
            entry.recorder.close()

    def leave(self, module: nn.Module, entry: DSACall, output: Any) -> Any:
        """Reduce what is a share of a sum, and lay the outputs out as the query was."""
        try:
            result = self._leave(module, entry, output)
            if entry.recorder is not None:
                entry.recorder.launch_with(result)
            name = f"call {entry.index} of module {self.identity['module']}"
            note_backward(self.group, name, result)
            return result
        finally:
            self.abandon(entry)

    def _leave(self, module: nn.Module, entry: DSACall, output: Any) -> Any:
        returned = Returned(
            self.where,
            entry.view,
            entry.inputs,
            self.style.result_kinds,
            use_local_output=self.style.use_local_output,
            call_index=entry.index,
        )
        outputs = [output]
        windows = None
        if entry.local is not None:
            windows = entry.local.windows
            for index in range(1, len(windows)):
                args, kwargs = entry.local.call(index)
                entry.view.window = entry.local.attention_window(index)
                outputs.append(module.forward(*args, **kwargs))
        with entry.view.paused():
            return returned.finish(outputs, windows)

    def _agree(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], known: Gathered, index: int
    ) -> Inputs:
        """Return the checked inputs, or raise what any rank found wrong, on all of them."""
        error: Exception | None = None
        inputs: Inputs | None = None
        try:
            self.late_errors.check()
            inputs = self._read(args, kwargs)
            self._check_indices(inputs, index)
            inputs.packs = known.packs(inputs.sources, self.gatherer, inputs.under_way)
        except Exception as problem:  # whatever it is, the others would wait for this rank
            error = problem
        preflight(
            self.group,
            self.where,
            lambda: (
                {} if inputs is None else {**self.identity, **inputs.signature(self.plan, kwargs)}
            ),
            error=error,
            call_index=index,
            way_out=lambda differing: advise(self.plan, differing),
            watch=self.watch,
            local=None if inputs is None else inputs.told_apart(self.plan),
        )
        assert inputs is not None, "preflight raises the error it is given"
        # only now: the ranks have one length, so all of them refuse it with one text
        self.plan.check_length(inputs.local_length, self.where)
        if inputs.local_keys != inputs.local_length:
            self.plan.check_length(inputs.local_keys, self.where)
        return inputs

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        return read_inputs(
            args,
            kwargs,
            boundary=self.style.arguments,
            renamed=self.style.kwarg_names,
            plan=self.plan,
            cp_mesh=self.cp_mesh,
            where=self.where,
        )

    def _check_indices(self, inputs: Inputs, index: int) -> None:
        """Check indices before ranks compare; on a device, which waits, once or when asked to."""
        indices = inputs.locals.get("topk_indices")
        if indices is None:
            return
        if index == 0 or not waits(indices) or compares_always():
            num_keys = inputs.local_keys * self.plan.cp_size
            check_indices(self.where, "topk_indices", indices, num_keys)

    def _view(self, inputs: Inputs, index: int) -> DSAView:
        plan, layout = self.plan, inputs.layouts["query"]
        mesh, placements = compose(layout, self.cp_mesh, [Shard(plan.seq_dim)], self.where)
        num_queries, num_keys = (n * plan.cp_size for n in (inputs.local_length, inputs.local_keys))
        start, end = plan.rows(self.rank, num_queries)[0]
        num_heads = inputs.locals["query"].size(plan.seq_dim + 1)
        return DSAView(
            mesh=mesh,
            cp_axes=(mesh.ndim - 1,),
            window=AttentionWindow(start, end - start, num_keys, num_queries),
            query_placements=placements,
            heads=(0, num_heads),
            num_heads=num_heads,
            is_local=self.style.use_local_input,
            is_balanced=plan.order == "head_tail",
            where=self.where,
            plan=plan,
            group=self.group,
            rank=self.rank,
            local_length=inputs.local_length,
            num_keys=num_keys,
            call_index=index,
            late_errors=self.late_errors,
        )
