"""A call as the module is to see it: each argument a DTensor of the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hp_dsa.arguments import Argument
from hp_dsa.inputs import Inputs
from hp_dsa.view import DSAView
from hp_mesh._torch import from_local
from hp_mesh.arguments import replace_slots
from hp_mesh.checks import fail
from hp_mesh.lent import lend
from hp_mesh.placement import compose

__all__ = ["hand_over"]


def hand_over(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Inputs,
    view: DSAView,
    wholes: Mapping[str, Tensor],
    cp_mesh: DeviceMesh,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with DTensors; a key that came twice is handed over as one.

    Args:
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
        inputs: The tensors that were found in it.
        view: Its view.
        wholes: The gathered keys by argument name.
        cp_mesh: The 1-D CP mesh.
    """
    wrapped: dict[int, Tensor] = {}
    values = []
    for argument in inputs.arguments:
        name = argument.name
        if argument.role == "keys":
            whole = wholes[name]
            if id(whole) not in wrapped:
                wrapped[id(whole)] = _wrap(whole, argument, inputs, view, cp_mesh)
            values.append(wrapped[id(whole)])
        else:
            values.append(_wrap(inputs.locals[name], argument, inputs, view, cp_mesh))
    return replace_slots(args, kwargs, list(inputs.slots.values()), values)


def _wrap(
    local: Tensor, argument: Argument, inputs: Inputs, view: DSAView, cp_mesh: DeviceMesh
) -> Tensor:
    layout, plan = inputs.layouts[argument.name], view.plan
    cp: Placement = Replicate()
    if argument.role != "keys":
        cp = Shard(plan.statistics_dim if argument.role == "statistics" else plan.seq_dim)
    if layout.foreign_mesh() is None:  # plain: whole on the axes that are not CP
        mesh, placements = view.mesh, view.placements(cp)
    else:
        mesh, placements = compose(layout, cp_mesh, [cp], view.where)
    if mesh != view.mesh:
        raise fail(
            view.where,
            f"{argument.name} on {mesh} must lie on the same axes as query ({view.mesh})",
            "lay the tensors out alike over the axes that are not CP",
        )
    wrapped = from_local(local, mesh, placements, view.partial_grads(placements))
    lend(view, wrapped, inputs.locals[argument.name])
    return wrapped
