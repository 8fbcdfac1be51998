"""Backward of `torch.view_as_real` inside a boundary: gradients may lie otherwise on each rank."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from hp_mesh._torch import from_local
from hp_mesh.mesh import init_device_mesh
from hp_mesh.open_views import close_view, open_view
from hp_mesh.testing import assert_close, count_collectives, randn, ranks

from .test_contraction import view_on


def differentiate(rank: int, again: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    view = view_on(mesh, (0,))
    leaf = torch.view_as_complex(randn(3, 4, 2, seed=rank)).requires_grad_()
    open_view(view, sys._getframe())
    try:
        pairs = torch.view_as_real(from_local(leaf, mesh, [Replicate()], [Partial()]))
    finally:
        close_view(view)
    shape = (3, 4, 2) if rank else (2, 4, 3)
    share = randn(*shape, seed=5 + rank, requires_grad=True)
    upstream: Tensor = share if rank else share.transpose(0, 2)
    given = from_local(upstream, mesh, [Partial()], [Replicate()])
    with count_collectives() as counted:
        (grad,) = torch.autograd.grad(pairs, leaf, given, create_graph=again)
        assert_close(torch.view_as_real(grad), upstream, kind="grad")
        if again:
            (second,) = torch.autograd.grad(torch.view_as_real(grad).square().sum(), share)
            assert_close(second, 2 * share, kind="grad")
    assert counted.summary() == {}


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_pairs_that_lie_otherwise_on_one_rank_are_not_reduced_there(again: bool) -> None:
    """Its share of a gradient is made contiguous by each rank for itself, and so is the second."""
    ranks(2).run(differentiate, again)
