"""AsyncContextParallel: the exchange starts where q, k and v are produced.

========  ==================================================  ====================================
mode      started after the projections                       waited for before attention
========  ==================================================  ====================================
Ulysses   all-to-all of q, of k, of v                         all three
Colossal  all-gather of k, of v                               both; q never moves
Hybrid    all-to-all of q, of k, of v                         k and v; then their all-gather starts,
                                                              q is waited for, then the gather
========  ==================================================  ====================================

Backward mirrors it without a hook: autograd runs the waits' backward (which launch) before the
launches' backward (which wait), so the exchange of dk overlaps with whatever stands between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_cp.async_boundary import AsyncBoundary
from hp_cp.core_boundary import CPBoundary
from hp_cp.grouped import GroupedBoundary
from hp_cp.inputs import LABELS
from hp_cp.plan import Plan
from hp_cp.style import ContextParallel
from hp_cp.style_arguments import check_cross_attention
from hp_mesh.boundary import boundary_of
from hp_mesh.checks import require, require_positive
from hp_mesh.handoffs import warn_once

__all__ = ["AsyncContextParallel"]


class AsyncContextParallel(ContextParallel):
    """`ContextParallel` whose exchanges overlap with the projections, forward and backward.

    Takes the arguments of `ContextParallel`. The first call of a module is synchronous: it learns
    how the projections' outputs reach the module. From the second call on each output is sent as
    soon as it exists. What reaches the module must be that output or a view of it; if something
    changes it in between (rotary, norm, in place), it is sent synchronously, one warning says so,
    and this handoff is not tried again.

    Keyword Args:
        qkv_split: Sizes of q, k and v in the last dim of one fused projection that is passed as
            ``q_proj``, ``k_proj`` and ``v_proj``. Default: three separate projections.
        head_groups: Run the module once for each of so many groups of heads, the exchange of one
            group behind the attention of another (see `hp_cp.grouped`). Needs no projections, so
            it overlaps in any model; without a graph, two groups are in memory at a time.
            Default: 1.

    .. note::
        A fallback to the synchronous path warns once, with its reason.
    """

    overlaps = True

    def __init__(
        self,
        *args: Any,
        qkv_split: Sequence[int] | None = None,
        head_groups: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        where = type(self).__name__
        self.head_groups = require_positive(where, "head_groups", head_groups)
        check_cross_attention(
            where,
            self.cross_attention,
            load_balance=self.load_balance,
            kv_chunks=self.kv_chunks,
            sliding_window=self.sliding_window,
            balance_hybrid=self.balance_hybrid,
            head_groups=head_groups,
        )
        require(
            head_groups == 1 or not (self.load_balance or self.balance_hybrid),
            where,
            f"head_groups ({head_groups}) must be 1 with load_balance=True, which calls the module "
            "for halves of q already (as balance_hybrid=True does)",
            "leave one of them out",
        )
        require(
            qkv_split is None
            or (len(qkv_split) == 3 and all(isinstance(n, int) and n > 0 for n in qkv_split)),
            where,
            f"qkv_split ({qkv_split!r}) must be the three sizes of q, k and v in the last dim",
        )
        self.qkv_split = None if qkv_split is None else tuple(qkv_split)

    def apply(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        q_proj: nn.Module | None = None,
        k_proj: nn.Module | None = None,
        v_proj: nn.Module | None = None,
    ) -> nn.Module:
        """Put the boundary around ``module`` and start its exchanges behind the projections.

        Args:
            module: The module whose ``forward`` receives q, k and v.
            device_mesh: The CP mesh.
            q_proj: The last module that q comes from; what it returns must reach ``module`` as it
                is or as a view. One missing of the three: all is synchronous.
            k_proj: Likewise for k.
            v_proj: Likewise for v.

        Raises:
            ValueError: If one projection stands for several of the three without ``qkv_split``.
        """
        where = type(self).__name__
        projections = dict(zip(LABELS, (q_proj, k_proj, v_proj), strict=True))
        missing = [f"{name}_proj" for name, proj in projections.items() if proj is None]
        given = [proj for proj in projections.values() if proj is not None]
        distinct = len({id(proj) for proj in given})
        if distinct < len(given):
            require(
                distinct == 1 and not missing and self.qkv_split is not None,
                where,
                f"q_proj, k_proj and v_proj must be {len(given)} modules, not {distinct}",
                "for one fused projection pass it three times and give the sizes of its parts with "
                "qkv_split=(q, k, v)",
            )
        else:
            require(
                self.qkv_split is None or bool(missing),
                where,
                f"qkv_split ({self.qkv_split}) must come with one fused projection, not three",
                "leave it out",
            )
        super().apply(module, device_mesh)
        reason = None
        if self.head_groups > 1:
            if given:
                warn_once(
                    f"{where}: head_groups ({self.head_groups}) exchanges groups of heads at the "
                    "module; the projections are not used"
                )
            return module
        if missing:
            reason = f"{', '.join(missing)} not given"
        elif self.load_balance or self.balance_hybrid:
            option = "load_balance" if self.load_balance else "balance_hybrid"
            reason = f"{option}=True swaps q at the boundary"
        if reason is not None:
            warn_once(f"{where}: {reason}; {type(module).__name__} exchanges synchronously")
            return module
        boundary = boundary_of(module)
        assert isinstance(boundary, AsyncBoundary), "just applied"
        if boundary.plan.cp_size == 1:
            return module  # nothing is exchanged
        for name, projection in projections.items():
            assert projection is not None, "none is missing"
            if name == "q" and boundary.plan.mode == "colossal":
                continue  # q stays where it is
            boundary.add(name, projection)
        return module

    def remove(self, module: nn.Module) -> nn.Module:
        """Take the boundary and its handoffs off; the modules are as they were."""
        boundary = boundary_of(module)
        super().remove(module)
        if isinstance(boundary, AsyncBoundary):
            boundary.remove_hooks()
        return module

    def flush(self, module: nn.Module) -> None:
        """Finish what the projections sent ahead and ``module`` has not received.

        For the end of a run, before the process group is destroyed: a forward pass that was
        abandoned between projection and attention may have left work on the wire.
        """
        boundary = boundary_of(module)
        if isinstance(boundary, AsyncBoundary):
            boundary.flush()

    def _boundary(self, plan: Plan, device_mesh: DeviceMesh) -> CPBoundary:
        if self.head_groups > 1:
            return GroupedBoundary(self, plan, device_mesh)
        if plan.load_balance:
            return super()._boundary(plan, device_mesh)
        return AsyncBoundary(self, plan, device_mesh)
