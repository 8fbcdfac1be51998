"""`sliding_window_attention` in every mode, without an option of the style."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import ContextParallel, init_device_mesh, sliding_window_attention
from hp_cp.attention.band import band_mask
from hp_mesh.testing import assert_close, ranks

from ._compare import EACH, Case, compare, reference
from ._cores import Sdpa, heads_back, heads_first

WINDOWS = [(1, 0), (4, 0), (5, 2), (13, 9), (40, 0)]
CASES = [
    *EACH,
    Case(P=3, degree=1, load_balance=True),
    Case(P=4, degree=2, balance_hybrid=True),
]


class Sliding(nn.Module):
    """The operator as a model calls it on one device."""

    def __init__(self, window: int, sinks: int = 0, layout: str = "BSHD", **options: Any) -> None:
        super().__init__()
        self.window, self.sinks, self.layout, self.options = window, sinks, layout, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (heads_first(x, self.layout, 6) for x in (query, key, value))
        out = sliding_window_attention(q, k, v, self.window, sink_tokens=self.sinks, **self.options)
        return heads_back(out, self.layout)


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_on_one_device_it_is_attention_under_a_band(window: int, sinks: int) -> None:
    """Output and gradients, against one call with a mask of sequence length squared."""
    case = Case(DV=5)
    i = torch.arange(case.S)
    mask = band_mask(i, i, window, sinks)
    assert mask[20, 20 - window + 1 if window < 20 else 0] and mask.diagonal().all()
    expected, grads = reference(
        Sdpa(), case.qkv(), case.upstream(), lambda core, *x: core(*x, mask)
    )
    out, got = reference(Sliding(window, sinks), case.qkv(), case.upstream())
    assert_close(out, expected)
    for one, other in zip(got, grads, strict=True):
        assert_close(one, other, kind="grad")


@pytest.mark.parametrize(("window", "sinks"), WINDOWS[1:4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_one_device_in_every_mode(case: Case, window: int, sinks: int) -> None:
    """Everything is gathered, as ever; under load balance each half has its place."""
    ranks(case.P).run(compare, case, lambda: Sliding(window, sinks, scale=0.3))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_local_tensors_get_the_window_too(case: Case) -> None:
    """``use_local_input=True``."""
    bnsd = case.but(layout="BNSD")
    ranks(case.P).run(compare, bnsd, lambda: Sliding(4, 2, "BNSD"), use_local_input=True)


@pytest.mark.parametrize(
    ("core", "message"),
    [
        (Sliding(0), r"sliding_window \(0\) must be at least 1"),
        (Sliding(4, -1), r"sink_tokens \(-1\) must be an integer of at least 0"),
        (Sliding(4, layout="none"), r"must have 24, 24 and 24 tokens in dim 2"),
    ],
    ids=["window", "sinks", "layout"],
)
def test_what_no_rank_can_compute_is_refused_by_all(core: Sliding, message: str) -> None:
    """A window of nothing, and tensors in another layout."""
    case = Case(P=3, degree=1)

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        module = ContextParallel(1, 2, ulysses_degree=1).apply(
            Sliding(core.window, core.sinks, core.layout), mesh
        )
        with pytest.raises(ValueError, match=f"sliding_window_attention: .*{message}"):
            module(*(case.local(x, rank) for x in case.qkv()))

    ranks(3).run(on)
