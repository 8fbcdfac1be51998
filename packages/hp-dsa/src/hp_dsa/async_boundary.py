"""The boundary of an asynchronous DSA style: gathers that run already are claimed, or made now."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hp_comm import preflight
from hp_dsa.boundary import DSABoundary
from hp_dsa.call import DSACall
from hp_dsa.gather import Source
from hp_dsa.gather_cache import open_gathers
from hp_dsa.inputs import LENGTH, Inputs, advise
from hp_mesh.handoff import Waitable
from hp_mesh.handoffs import HandoffState, TakesHandoffs

__all__ = ["AsyncDSABoundary"]


class AsyncDSABoundary(TakesHandoffs, DSABoundary):
    """An asynchronous DSA style around one module."""

    advice = (
        "Hand off the last module before the boundary, or put hp_dsa.Handoff() behind what changes "
        "the tensor and pass that"
    )
    takes_detached = True  # the loss is handed the latent without its graph

    def launch_ahead(self, name: str, x: Tensor, context: Any, work: Any) -> Waitable:
        """Start the gather of a key."""
        return self.gatherer.start(x)

    def compare_ahead(self, handoff: HandoffState, x: Tensor, context: Any, work: Any) -> None:
        """Let the ranks compare what they are about to send."""
        seq_dim = self.plan.seq_dim
        shape = [n for dim, n in enumerate(x.shape) if dim != seq_dim]
        preflight(
            self.group,
            f"{self.where}: {handoff.name} handed off by {handoff.module}",
            {
                LENGTH: x.size(seq_dim),
                "shape without its sequence dim": shape,
                "dtype": x.dtype,
                "requires_grad": x.requires_grad,
            },
            call_index=1,  # the boundary's first call has been compared
            way_out=lambda differing: advise(self.plan, differing),
        )

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DSACall:
        """Do as the synchronous boundary does, but wait for what was sent ahead."""
        try:
            call = super().enter(module, args, kwargs)
        except BaseException:  # Ctrl-C too: peers have sent their part; raised again below
            self.flush()  # also what was claimed: nobody will ask for it again
            raise
        self.release(call.inputs.under_way)
        return call

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        inputs = super()._read(args, kwargs)
        for name, handoff in self.handoffs.items():
            source = inputs.sources.get(name)
            claimed = None
            if source is not None and self._comes_anyway(source, inputs):
                handoff.disarm()
            elif source is not None:
                claimed = self.claim(name, source.tensor, None)
            if claimed is not None:
                inputs.under_way[name] = claimed
            inputs.handoffs[name] = handoff.state(claimed is not None)
        return inputs

    def _comes_anyway(self, source: Source, inputs: Inputs) -> bool:
        """Whether the same data is gathered for another argument, or was for another boundary."""
        known = open_gathers()
        state = source.state()
        return (known is not None and known.has(source, self.gatherer)) or any(
            inputs.sources[other].state() == state for other in inputs.under_way
        )
