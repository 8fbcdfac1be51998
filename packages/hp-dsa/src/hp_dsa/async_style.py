"""The DSA styles whose gathers start where the keys are produced.

Each key side argument may have a *handoff*: the module that it comes from. The first call of a
boundary is synchronous: it learns how the handoff's output reaches the argument (as it is, a view
of it, or detached). From then on the gather starts when the output exists, and the boundary waits
for it. An argument without handoff, or one that turns out to be something else, is gathered at the
boundary as by the synchronous style; placements and numbers are the same.

Gradients travel on the tensor: those of every consumer of a handoff's output are added, and
backward's reduce-scatter overlaps with what stands between boundary and handoff.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dsa.async_boundary import AsyncDSABoundary
from hp_dsa.boundary import DSABoundary
from hp_dsa.plan import DSAPlan
from hp_dsa.style import DSAStyle
from hp_dsa.styles import (
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
)
from hp_mesh.boundary import boundary_of
from hp_mesh.checks import require_type

__all__ = [
    "AsyncDSAIndexerContextParallel",
    "AsyncDSAIndexerLossContextParallel",
    "AsyncDSASparseAttentionContextParallel",
]


class _AsyncStyle(DSAStyle):
    """What the asynchronous styles add to the synchronous ones."""

    def _hand_off(
        self, module: nn.Module, device_mesh: DeviceMesh, handoffs: dict[str, nn.Module | None]
    ) -> nn.Module:
        for name, handoff in handoffs.items():
            if handoff is not None:
                require_type(
                    type(self).__name__,
                    f"{name}_handoff",
                    handoff,
                    nn.Module,
                    "a torch.nn.Module",
                    "put hp_dsa.Handoff() where the tensor is final, and pass that",
                )
        super().apply(module, device_mesh)
        boundary = boundary_of(module)
        assert isinstance(boundary, AsyncDSABoundary), "just applied"
        if boundary.plan.cp_size == 1:
            return module  # nothing is sent
        taken: list[nn.Module] = []
        for name, handoff in handoffs.items():
            # one module for key and value: they are one tensor, which is gathered once
            if handoff is not None and not any(handoff is other for other in taken):
                taken.append(handoff)
                boundary.add(name, handoff)
        return module

    def remove(self, module: nn.Module) -> nn.Module:
        """Take the boundary and its handoffs off; the modules are as they were."""
        boundary = boundary_of(module)
        super().remove(module)
        if isinstance(boundary, AsyncDSABoundary):
            boundary.remove_hooks()
        return module

    def flush(self, module: nn.Module) -> None:
        """Finish what the handoffs sent ahead and ``module`` has not received.

        For the end of a run, before the process group is destroyed: a forward pass that was
        abandoned in between may have left work on the wire.
        """
        boundary = boundary_of(module)
        if isinstance(boundary, AsyncDSABoundary):
            boundary.flush()

    def _boundary(self, plan: DSAPlan, device_mesh: DeviceMesh) -> DSABoundary:
        return AsyncDSABoundary(self, plan, device_mesh)


class AsyncDSAIndexerContextParallel(_AsyncStyle, DSAIndexerContextParallel):
    """`DSAIndexerContextParallel` whose gather overlaps with what follows the index key."""

    def apply(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        *,
        key_handoff: nn.Module | None = None,
    ) -> nn.Module:
        """Put the boundary around ``module`` and start its gather behind the handoff.

        Args:
            module: The module whose ``forward`` receives the tensors.
            device_mesh: The CP mesh; one of several axes is flattened.
            key_handoff: The module that ``key`` comes from.
        """
        return self._hand_off(module, device_mesh, {"key": key_handoff})


class AsyncDSASparseAttentionContextParallel(_AsyncStyle, DSASparseAttentionContextParallel):
    """`DSASparseAttentionContextParallel` whose gathers overlap with what follows the keys.

    Latent and rotary part that come from two handoffs travel in two gathers, of the same bytes.
    """

    def apply(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        *,
        key_handoff: nn.Module | None = None,
        value_handoff: nn.Module | None = None,
        key_rope_handoff: nn.Module | None = None,
    ) -> nn.Module:
        """Put the boundary around ``module`` and start its gathers behind the handoffs.

        Args:
            module: The module whose ``forward`` receives the tensors.
            device_mesh: The CP mesh; one of several axes is flattened.
            key_handoff: The module that ``key`` comes from.
            value_handoff: The module that ``value`` comes from; may be ``key_handoff``.
            key_rope_handoff: The module that ``key_rope`` comes from.
        """
        return self._hand_off(
            module,
            device_mesh,
            {"key": key_handoff, "value": value_handoff, "key_rope": key_rope_handoff},
        )


class AsyncDSAIndexerLossContextParallel(_AsyncStyle, DSAIndexerLossContextParallel):
    """`DSAIndexerLossContextParallel` whose gathers overlap with what follows the keys.

    Within a `DSAGatherCache` attention and indexer have gathered all of its keys, and its own
    handoffs are given up at once.
    """

    def apply(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        *,
        key_handoff: nn.Module | None = None,
        key_index_handoff: nn.Module | None = None,
        key_rope_handoff: nn.Module | None = None,
    ) -> nn.Module:
        """Put the boundary around ``module`` and start its gathers behind the handoffs.

        Args:
            module: The module whose ``forward`` receives the tensors.
            device_mesh: The CP mesh; one of several axes is flattened.
            key_handoff: The module that ``key`` comes from.
            key_index_handoff: The module that ``key_index`` comes from.
            key_rope_handoff: The module that ``key_rope`` comes from.
        """
        return self._hand_off(
            module,
            device_mesh,
            {"key": key_handoff, "key_index": key_index_handoff, "key_rope": key_rope_handoff},
        )
