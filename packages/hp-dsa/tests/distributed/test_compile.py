"""torch.compile of a block around styled modules: the boundaries are breaks in its graph."""

from __future__ import annotations

import warnings

import torch
from torch._dynamo.utils import counters

from hp_mesh.testing import ranks

from ._layer import Case, Layer, check, reference, scalar, styles, upstreams


def _compiled(rank: int, case: Case) -> None:
    expected, grads = reference(case)
    layer = Layer(case)
    styles(case)(layer, case.mesh())
    leaves = {n: case.local(x, rank).clone().requires_grad_() for n, x in case.inputs().items()}
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dynamo tells what it does not trace
        outputs = torch.compile(layer, backend="eager")(*leaves.values())
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    scalar(outputs, {n: case.local(x, rank) for n, x in upstreams(case).items()}).backward()
    check(case, rank, outputs, expected, leaves, grads)


def test_a_compiled_layer_gives_the_same_numbers_and_gradients() -> None:
    """Indexer, attention and loss, with a gather cache; operators run as they do outside."""
    ranks(2, backend="processes").run(_compiled, Case(P=2, cached=True), timeout=600.0)
