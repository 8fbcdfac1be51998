"""`packed_attention` inside the boundary: documents that straddle ranks, windows, other lengths."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import ContextParallel, init_device_mesh, packed_attention
from hp_mesh.testing import ranks

from ._compare import Case, compare, reference
from ._cores import Sdpa

MODES = [
    Case(P=2, layout="TND"),
    Case(P=3, degree=1, layout="TND"),
    Case(P=4, degree=2, layout="TND"),
    Case(P=3, degree=1, load_balance=True, layout="TND"),
    Case(P=4, degree=2, balance_hybrid=True, layout="TND"),
]
DOCUMENTS = {
    "straddling": [0, 5, 17, 24],
    "one": [0, 24],
    "cut where the ranks are": [0, 8, 12, 24],
    "short, and some empty": [0, 1, 2, 2, 2, 7, 7, 23, 24, 24],
    "a padded tail": [0, 3, 10, 24],
}


class Packed(nn.Module):
    """The operator as a model calls it on one device."""

    def __init__(self, cu_seqlens: Any, **options: Any) -> None:
        super().__init__()
        self.cu_seqlens, self.options = cu_seqlens, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(query, key, value, self.cu_seqlens, **self.options)


def visible(
    queries: Sequence[int], keys: Sequence[int], causal: bool, window: int | None
) -> Tensor:
    """Return who sees whom, document by document, as one mask."""
    mask = torch.zeros(queries[-1], keys[-1], dtype=torch.bool)
    for (a, b), (c, e) in zip(pairwise(queries), pairwise(keys), strict=True):
        block = torch.ones(b - a, e - c, dtype=torch.bool)
        offset = (e - c) - (b - a)
        if causal:
            block = block.tril(offset)
            if window is not None:
                block = block.triu(offset - window + 1)
        mask[a:b, c:e] = block
    return mask


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_on_one_device_it_is_attention_under_a_mask_of_blocks(
    name: str, window: int | None
) -> None:
    """Output and gradients of `packed_attention` without a style, against one masked call."""
    bounds, case = DOCUMENTS[name], Case(layout="TND", DV=5)
    for causal in (True, False) if window is None else (True,):
        mask = visible(bounds, bounds, causal, window)
        expected, grads = reference(
            Sdpa("TND"), case.qkv(), case.upstream(), lambda core, *x, m=mask: core(*x, m)
        )
        core = Packed(bounds, causal=causal, sliding_window=window)
        out, got = reference(core, case.qkv(), case.upstream())
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
        torch.testing.assert_close(got, grads, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("case", MODES, ids=str)
def test_documents_equal_one_device_in_every_mode(case: Case, name: str) -> None:
    """Causal and not, and a window: output, every gradient, and the traffic of the mode."""
    bounds = DOCUMENTS[name]
    for options in ({}, {"causal": False}, {"sliding_window": 4, "scale": 0.3}):
        ranks(case.P).run(compare, case, lambda o=options: Packed(bounds, **o))


@pytest.mark.parametrize("case", MODES, ids=str)
def test_queries_and_keys_may_have_other_lengths(case: Case) -> None:
    """More keys than queries in one document, fewer in another, none in a third."""
    queries, keys = [0, 5, 9, 14, 24], [0, 8, 10, 10, 24]
    for options in ({}, {"causal": False}, {"sliding_window": 3}):
        given = {"cu_seqlens_k": keys, **options}
        ranks(case.P).run(compare, case, lambda g=given: Packed(torch.tensor(queries), **g))


def test_a_rank_whose_queries_see_no_key_still_takes_part_in_backward() -> None:
    """Zeros, and the gradients that the other rank waits for."""
    given = {"cu_seqlens_k": [0, 0, 24]}
    for options in ({}, {"causal": False}, {"sliding_window": 3}):
        for case in (Case(P=2, degree=1, layout="TND"), MODES[2]):
            ranks(case.P).run(compare, case, lambda o=options: Packed([0, 12, 24], **given, **o))


@pytest.mark.parametrize("case", MODES, ids=str)
def test_a_batch_of_one_is_squeezed_in_the_core(case: Case) -> None:
    """``[1, S, H, D]``, as models with packed batches have it."""

    class Squeezed(Packed):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return super().forward(*(x.squeeze(0) for x in (query, key, value))).unsqueeze(0)

    batched = case.but(layout="BSHD", B=1)
    ranks(case.P).run(compare, batched, lambda: Squeezed(DOCUMENTS["straddling"]))


@pytest.mark.parametrize("case", MODES, ids=str)
def test_plain_local_tensors_get_the_window_too(case: Case) -> None:
    """``use_local_input=True``: q has this rank's rows, the documents are those of the whole."""
    core = lambda: Packed(DOCUMENTS["straddling"])  # noqa: E731 - a factory
    ranks(case.P).run(compare, case, core, use_local_input=True)


def test_head_groups_compute_documents_group_by_group() -> None:
    """`AsyncContextParallel(head_groups=2)` in Hybrid."""
    case = Case(P=4, degree=2, layout="TND", head_groups=2, H=8, HK=4)
    ranks(4).run(compare, case, lambda: Packed(DOCUMENTS["straddling"]))


@pytest.mark.parametrize(
    ("bounds", "options", "message"),
    [
        ([0, 5, 12], {}, r"cu_seqlens \(\[0, 5, 12\]\) must start with 0.* end at 24.*whole seq"),
        ([5, 24], {}, "must start with 0"),
        ([0, 9, 5, 24], {}, "not descend"),
        ([0, 9.7, 24], {}, r"cu_seqlens \(\[0, 9\.7, 24\]\) must be integers"),
        ([24], {}, "must start with 0"),
        ([0, 24], {"cu_seqlens_k": [0, 3, 24]}, "as many documents as"),
        ([0, 24], {"cu_seqlens_k": [0, 23]}, r"cu_seqlens_k \(\[0, 23\]\) must"),
        ([0, 24], {"sliding_window": 0}, r"sliding_window \(0\) must be at least 1"),
        ([0, 24], {"sliding_window": 3, "causal": False}, "must come with causal=True"),
    ],
    ids=[
        "local",
        "no-zero",
        "descending",
        "floats",
        "no-document",
        "counts",
        "keys",
        "window",
        "causal",
    ],
)
def test_lengths_that_do_not_add_up_are_refused_on_every_rank(
    bounds: Any, options: dict[str, Any], message: str
) -> None:
    """The local ``cu_seqlens`` of a rank among them: they would make a rank see its shard only."""
    case = MODES[1]

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        core = ContextParallel(0, 1, ulysses_degree=1).apply(Packed(bounds, **options), mesh)
        q, k, v = (case.local(x, rank) for x in case.qkv())
        with pytest.raises(ValueError, match=message):
            core(q, k, v)

    ranks(3).run(on)


@pytest.mark.parametrize("options", [{}, {"use_local_input": True}], ids=["view", "local"])
@pytest.mark.parametrize("case", MODES, ids=str)
@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            [0, 6, 24],
            r"cu_seqlens must be the same on all ranks of the group, not \[5, 24\] on rank",
        ),
        ([0, 6, 12], r"cu_seqlens \(\[0, 6, 12\]\) must start with 0.* \(on rank 1 of"),
    ],
    ids=["others", "wrong"],
)
def test_ranks_that_were_told_other_documents_are_all_told_so(
    own: list[int], message: str, case: Case, options: dict[str, Any]
) -> None:
    """Each would compute another attention without a word, or leave the others waiting."""

    def on(rank: int) -> str:
        mesh = init_device_mesh("cpu", (case.P,), mesh_dim_names=("cp",))
        core = case.style(**options).apply(Packed(own if rank == 1 else [0, 5, 24]), mesh)
        with pytest.raises(ValueError, match=message) as e:
            core(*(case.local(x, rank) for x in case.qkv()))
        return str(e.value)

    assert len(set(ranks(case.P).run(on))) == 1


def test_a_batch_is_refused_with_the_way_to_flatten_it() -> None:
    """4-D tensors: ``packed_attention: query ... must have 3 dims``."""
    q, k, v = Case().qkv()
    with pytest.raises(ValueError, match=r"must have 3 dims.*squeeze\(0\)"):
        packed_attention(q, k, v, [0, 24])


class Block(nn.Module):
    """What stands around attention: something to trace on both sides of the boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Packed(DOCUMENTS["straddling"])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.core(query * 1.5, key, value).sin()


def _compiled(rank: int, case: Case) -> None:
    block = Block()
    case.style().apply(block.core, case.mesh())
    block.compile(backend="eager")
    for name in DOCUMENTS:  # dynamo makes symbols of numbers that change
        block.core.cu_seqlens = tuple(DOCUMENTS[name])

        def alone(bounds: Any = block.core.cu_seqlens) -> Block:
            one = Block()
            one.core.cu_seqlens = bounds
            return one

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # dynamo tells what it does not trace
            compare(rank, case, alone, applied=block)


@pytest.mark.parametrize("degree", [None, 1])
def test_documents_that_change_in_a_compiled_block(degree: int | None) -> None:
    """The same output and gradients, whatever documents a call is told of."""
    case = Case(P=2, degree=degree, layout="TND")
    ranks(2, backend="processes").run(_compiled, case, timeout=600.0)
