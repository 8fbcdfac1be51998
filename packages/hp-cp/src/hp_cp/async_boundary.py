"""The boundary of `AsyncContextParallel`: what was sent ahead is claimed here, or sent now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_comm import Handle, HeadWork, gather_seq, preflight, seq_to_head
from hp_cp.call import Call
from hp_cp.core_boundary import CPBoundary
from hp_cp.heads import HeadTable
from hp_cp.inputs import LABELS, LENGTH, Inputs, advise
from hp_cp.prepared import check_work, describe, done
from hp_mesh.handoff import split_output
from hp_mesh.handoffs import HandoffState, TakesHandoffs

if TYPE_CHECKING:
    from hp_cp.async_style import AsyncContextParallel

__all__ = ["AsyncBoundary"]

_Context = tuple[tuple[int, int], HeadTable]
"""``(seq_dim, head_dim)`` of an argument, and the heads of each Ulysses rank."""


class AsyncBoundary(TakesHandoffs, CPBoundary):
    """`AsyncContextParallel` around one module."""

    style: AsyncContextParallel
    advice = (
        "Hand off the last module before attention, or put hp_cp.Handoff() behind the rotary "
        "embedding or norm and pass that"
    )

    def split_handoff(self, name: str, output: Any) -> tuple[Tensor, Tensor] | None:
        """Cut a fused projection."""
        return split_output(output, self.style.qkv_split, LABELS.index(name))

    def unusable(self, output: Any) -> str:
        """Say why ``output`` is no handoff."""
        split = self.style.qkv_split
        if isinstance(output, DTensor):
            return "its output is a DTensor, which qkv_split does not cut"
        if isinstance(output, Tensor):
            return f"the last dim of its output {list(output.shape)} is not the sum of {split}"
        return super().unusable(output)

    def compare_ahead(
        self, handoff: HandoffState, x: Tensor, context: _Context, work: HeadWork | None
    ) -> None:
        """Let the ranks compare what they are about to send."""
        (seq_dim, head_dim), _ = context
        if work is not None:
            check_work(f"{self.where}: {handoff.name}", x, work, head_dim)
        preflight(
            self.group,
            f"{self.where}: {handoff.name} handed off by {handoff.module}",
            {
                LENGTH: x.size(seq_dim),
                "shape without its sequence dim": [
                    n for dim, n in enumerate(x.shape) if dim != seq_dim
                ],
                "dtype": x.dtype,
                "requires_grad": x.requires_grad,
                "work": describe(work),
            },
            call_index=1,  # the boundary's first call has been compared
            way_out=lambda differing: advise(self.plan, differing),
        )

    def launch_ahead(
        self, name: str, x: Tensor, context: _Context, work: HeadWork | None
    ) -> Handle[Tensor]:
        """Start the exchange of q, k or v."""
        (seq_dim, head_dim), table = context
        if self.ulysses_group is None:
            assert self.colossal_group is not None, "one rank has no handoffs"
            return gather_seq(
                done(x, work),
                self.colossal_group,
                seq_dim=seq_dim,
                dense=self.wants_dense,
                async_op=True,
            )
        return seq_to_head(
            x,
            self.ulysses_group,
            seq_dim=seq_dim,
            head_dim=head_dim,
            heads=None if name == "q" else table.kv_sent,
            dense=self.exchanges_dense,
            work=work,
            async_op=True,
        )

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Do as the synchronous boundary does, but wait for what was sent ahead."""
        try:
            return super().enter(module, args, kwargs)
        except BaseException:
            self.flush()  # also what was claimed: nobody will ask for it again
            raise

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        inputs = super()._read(args, kwargs)
        for name, handoff in self.handoffs.items():
            x = inputs.tensors[LABELS.index(name)]
            work = inputs.works[LABELS.index(name)]
            claimed = self.claim(name, x, (inputs.dims, inputs.table), work)
            if claimed is not None:
                inputs.claimed[name] = claimed
            inputs.handoffs[name] = handoff.state(claimed is not None)
        return inputs

    def _send(self, inputs: Inputs) -> tuple[Tensor, ...]:
        if not inputs.claimed:
            return super()._send(inputs)
        xs = dict(zip(LABELS, inputs.locals, strict=True))
        works = dict(zip(LABELS, inputs.works, strict=True))
        if self.ulysses_group is None:
            for name in [name for name in LABELS if name not in inputs.claimed]:
                xs[name] = done(xs[name], works[name])
            self._wait_for_rows(xs, inputs)
        else:
            self._wait_for_heads(xs, works, inputs)
        self.release(inputs.claimed)
        return self.expand(xs["q"], xs["k"], xs["v"], inputs)

    def _wait_for_rows(self, xs: dict[str, Tensor], inputs: Inputs) -> None:
        """Colossal: gather what was not sent ahead, then wait for what was."""
        assert self.colossal_group is not None, "one rank has no handoffs"
        if not self.style.keep_kv:
            # what was sent ahead is the prepared k, of which nobody has kept this rank's rows
            work = inputs.works[1] if "k" in inputs.claimed else None
            self.keep_shards(inputs, done(xs["k"].detach(), work), xs["v"])
        late = [name for name in ("k", "v") if name not in inputs.claimed]
        if late:
            rows = gather_seq(
                [xs[name] for name in late],
                self.colossal_group,
                seq_dim=inputs.dims[0],
                dense=self.wants_dense,
            )
            xs.update(zip(late, rows, strict=True))
        for name, handle in inputs.claimed.items():
            xs[name] = handle.wait()

    def _wait_for_heads(
        self, xs: dict[str, Tensor], works: dict[str, HeadWork | None], inputs: Inputs
    ) -> None:
        """Ulysses and Hybrid; backward launches in the reverse order of these waits."""
        assert self.ulysses_group is not None, "the caller has looked"
        seq_dim, head_dim = inputs.dims
        late = [name for name in LABELS if name not in inputs.claimed]
        if late:
            heads = seq_to_head(
                [xs[name] for name in late],
                self.ulysses_group,
                seq_dim=seq_dim,
                head_dim=head_dim,
                heads=[None if name == "q" else inputs.table.kv_sent for name in late],
                dense=self.exchanges_dense,
                work=[works[name] for name in late],
            )
            xs.update(zip(late, heads, strict=True))
        if self.colossal_group is None:
            for name, handle in inputs.claimed.items():
                xs[name] = handle.wait()
            return
        for name in [name for name in ("k", "v") if name in inputs.claimed]:
            xs[name] = inputs.claimed[name].wait()
        self.keep_shards(inputs, xs["k"], xs["v"])
        # the gather runs while q is still on its way
        rows = gather_seq(
            (xs["k"], xs["v"]),
            self.colossal_group,
            seq_dim=seq_dim,
            dense=self.wants_dense,
            async_op=True,
        )
        if "q" in inputs.claimed:
            xs["q"] = inputs.claimed["q"].wait()
        xs["k"], xs["v"] = rows.wait()
