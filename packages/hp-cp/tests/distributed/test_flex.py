"""`flex_attention` in every mode: score and mask functions are asked about the whole sequence.

torch's own has no backward on a CPU, so gradients are those of an emulation in plain torch, put in
its place; torch's own is run forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs_flex_attention

import hp_cp.flex
from hp_cp import flex_attention
from hp_mesh.testing import assert_close, randn, ranks

from ._compare import EACH, Case, compare, compare_under_tensor_parallel
from ._cores import heads_back, heads_first

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
CASES = [
    *EACH,
    Case(P=3, degree=1, layout="BNSD"),
    Case(P=4, HK=6, DV=4),  # a KV head for each query head
    Case(P=4, degree=2, balance_hybrid=True),
    Case(P=2, HK=12, head_groups=2),
]


def emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Any = None,
) -> Tensor:
    """Compute what torch's function does, and check that no visible key is in a block left out."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    shape = scores.shape
    places = [
        torch.arange(n).view([-1 if d == dim else 1 for d in range(4)])
        for dim, n in enumerate(shape)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if block_mask is not None:
        visible = block_mask.mask_mod(*places)
        blocks = block_mask.to_dense().bool()
        for dim, size in zip((2, 3), block_mask.BLOCK_SIZE, strict=True):
            blocks = blocks.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
        assert not bool((visible & ~blocks).any())
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hp_cp.flex, "_kernel", lambda device: emulate)


class Calls(nn.Module):
    """A core given as a function."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k, v)


class Flex(nn.Module):
    """Scores and a mask that depend on everything: batch, head, query, key."""

    def __init__(self, layout: str, heads: int = 12, block: int | None = 4) -> None:
        super().__init__()
        self.layout, self.heads, self.block = layout, heads, block
        self.slopes = nn.Parameter(randn(heads, seed=3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads_first(x, self.layout, 6) for x in (q, k, v))

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + self.slopes[h] * (j - i) * (0.1 + 0.03 * b)

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & ((i - j < 9 + b) | (h % 3 == 0))

        mask = None
        if self.block is not None:
            sizes = (q.shape[0], self.heads, k.shape[2], k.shape[2])
            mask = create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=self.block)
        out = flex_attention(q, k, v, score_mod, mask, 0.4, enable_gqa=True)
        return heads_back(out, self.layout)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("block", [None, 4, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mode_has_the_numbers_of_one_device(case: Case, block: int | None) -> None:
    """Output, every gradient, the slopes' too, and no collective beside those of the plan.

    Blocks of 4 rows fit each rank's first row, blocks of 5 do not.
    """
    ranks(case.P).run(compare, case, lambda: Flex(case.layout, block=block))


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("case", EACH, ids=str)
def test_plain_tensors_inside_are_counted_alike(case: Case) -> None:
    """``use_local_input=True``: heads and rows from the view."""
    ranks(case.P).run(compare, case, lambda: Flex(case.layout), use_local_input=True)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("case", EACH[:3], ids=str)
def test_heads_cut_by_tp_are_counted_over_all_of_them(case: Case) -> None:
    """A DTensor of TP says how many heads there are."""
    case = case.but(H=24, HK=8)
    for one in (case, case.but(head_groups=2)):
        ranks(2 * case.P).run(compare_under_tensor_parallel, one, lambda: Flex("BSHD", heads=24), 2)


def _forward(rank: int, case: Case) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", UserWarning)  # that it is not compiled
        whole = case.qkv()
        expected = Flex(case.layout)(*whole)
        module = case.style().apply(Flex(case.layout), case.mesh())
        assert_close(module(*(case.local(x, rank) for x in whole)), case.local(expected, rank))


def test_torchs_own_kernel_gives_the_same_forward() -> None:
    """Not the emulation: what torch runs on a CPU."""
    ranks(2, backend="processes").run(_forward, EACH[1], timeout=300.0)


@pytest.mark.parametrize("options", [{}, {"use_local_input": True}], ids=["dtensors", "plain"])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_torchs_own_function_is_refused_by_name(case: Case, options: dict[str, Any]) -> None:
    """It would count rows and heads from 0; the same error on all ranks, and then as before."""

    case = case.but(layout="BNSD")

    def on(rank: int) -> str:
        core = Calls(lambda q, k, v: torchs_flex_attention(q, k, v, enable_gqa=True))
        module = case.style(**options).apply(core, case.mesh())
        local = [case.local(x, rank) for x in case.qkv()]
        with pytest.raises(ValueError, match=r"must be hp_cp\.flex_attention") as caught:
            module(*local)
        core.call = lambda q, k, v: q * 2
        assert_close(module(*local), local[0] * 2)
        return str(caught.value)

    first, *others = ranks(case.P).run(on)
    assert all(one == first for one in others)


@pytest.mark.usefixtures("_emulated")
def test_masks_of_another_size_are_refused() -> None:
    """Of a part of the rows, and of a group of the heads; 3-D tensors."""

    def refused(case: Case, text: str, call: Call) -> None:
        def on(rank: int) -> None:
            module = case.style().apply(Calls(call), case.mesh())
            with pytest.raises(ValueError, match=text):
                module(*(case.local(x, rank) for x in case.qkv()))

        ranks(case.P).run(on)

    def masked(*sizes: int) -> Any:
        return create_block_mask(lambda b, h, i, j: i >= j, *sizes, device="cpu", BLOCK_SIZE=4)

    case = Case(P=2, degree=1, layout="BNSD", HK=12)
    refused(
        case,
        r"block_mask \(1, 1, 12, 24\) must be of all rows and keys \(24, 24\)",
        lambda q, k, v: flex_attention(q, k, v, None, masked(1, 1, 12, 24)),
    )
    refused(
        case.but(head_groups=2),
        r"must be for 1 or all \(12\) of the heads, not 6",
        lambda q, k, v: flex_attention(q, k, v, None, masked(1, q.shape[1], 24, 24)),
    )
    refused(
        case,
        r"must have 4 dims, \[batch, heads, tokens, size\]",
        lambda q, k, v: flex_attention(q[0], k[0], v[0]),
    )
