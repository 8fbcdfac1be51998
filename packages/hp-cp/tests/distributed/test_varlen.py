"""``torch.nn.attention.varlen`` inside the boundary, with kernels for CPU that *emulate* it.

torch has them for CUDA only. That emulation and kernel agree is not shown here; what the operator
is handed on each rank is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

from hp_cp import ContextParallel, init_device_mesh
from hp_cp.attention.packed import packed_rows
from hp_mesh.testing import assert_close, ranks

from ._compare import Case, compare
from .test_packed import DOCUMENTS, MODES, Packed, visible


def _emulated(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, a: Any) -> Tensor:
    causal, scale, (left, right) = a
    assert causal == ((left, right) == (-1, 0)) and (left == -1 or right == 0)
    ends = (cu_q.tolist()[1:], cu_k.tolist()[1:])
    assert (ends[0][-1], ends[1][-1]) == (len(q), len(k)), "the kernel reads no row beyond"
    window = None if left < 0 else left + 1
    return packed_rows(q, k, v, *ends, causal=right == 0, window=window, scale=scale)


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> None:
    """Register CPU kernels for the operator and its backward, for this process."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        is_causal: bool = False, scale: Any = None, window_size: Any = None, *rest: Any,
    ) -> Any:  # fmt: skip
        assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
        out = _emulated(q, k, v, cu_q, cu_k, (is_causal, scale, window_size))
        return (
            out.contiguous(),
            q.new_zeros(q.shape[1], len(q)).float(),
            torch.zeros(2).to(torch.uint64),
        )

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor,
        cu_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng: Tensor, scale: Any = None,
        window_size: Any = None,
    ) -> Any:  # fmt: skip
        # below autograd: by the formula, with all scores at once
        left, right = window_size
        window = None if left < 0 else left + 1
        seen = visible(cu_q.tolist(), cu_k.tolist(), right == 0, window)
        groups = q.shape[1] // k.shape[1]
        kh, vh = (x.repeat_interleave(groups, 1) for x in (k, v))
        factor = q.shape[2] ** -0.5 if scale is None else scale
        scores = torch.einsum("ihd,jhd->hij", q, kh) * factor
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        dp = torch.einsum("ihd,jhd->hij", grad, vh)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * factor
        dk, dv = torch.einsum("hij,ihd->jhd", ds, q), torch.einsum("hij,ihd->jhd", p, grad)
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
        return torch.einsum("hij,jhd->ihd", ds, kh), dk, dv

    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)


class Varlen(nn.Module):
    """``varlen_attn`` as a model calls it on one device."""

    def __init__(self, bounds: Any, **options: Any) -> None:
        super().__init__()
        self.bounds, self.options = torch.tensor(bounds, dtype=torch.int32), options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        longest = int(self.bounds.diff().max())
        return varlen.varlen_attn(
            query, key, value, self.bounds, self.bounds, longest, longest,
            enable_gqa=True, **self.options,
        )  # fmt: skip


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)], ids=str)
@pytest.mark.parametrize("case", MODES, ids=str)
def test_documents_of_varlen_attention_are_cut(case: Case, window: tuple[int, int]) -> None:
    """Whole documents, causal, and a causal window; output, every gradient, the traffic."""
    bounds = DOCUMENTS["straddling"]
    ranks(case.P).run(compare, case, lambda: Varlen(bounds, window_size=window))


@pytest.mark.parametrize("case", MODES[1:3], ids=str)
def test_a_window_fetches_its_keys_and_gathers_nothing(case: Case) -> None:
    """``sliding_window`` of the style, and documents no longer than that without a window."""
    for bounds, window in (([0, 5, 17, 24], (3, 0)), ([0, 5, 11, 18, 24], (-1, 0))):
        core = lambda b=bounds, w=window: Varlen(b, window_size=w)  # noqa: E731 - a factory
        sent = ranks(case.P).run(compare, case, core, sliding_window=7)
        assert all("all_gather" not in one.by_kind for one in sent)


def test_documents_longer_than_the_window_are_refused_without_one() -> None:
    """Causal over whole documents sees more than is fetched."""
    case = MODES[1]

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        style = ContextParallel(0, 1, ulysses_degree=1, sliding_window=7)
        module = style.apply(Varlen([0, 8, 24], window_size=(-1, 0)), mesh)
        with pytest.raises(ValueError, match="documents of up to 16 tokens must see at most"):
            module(*(case.local(x, rank) for x in case.qkv()))

    ranks(3).run(on)


def test_the_emulation_is_packed_attention() -> None:
    """The same documents, on one device."""
    q, k, v = MODES[0].qkv()
    for window, options in (((-1, 0), {}), ((3, 0), {"sliding_window": 4})):
        out = Varlen([0, 5, 17, 24], window_size=window)(q, k, v)
        assert_close(out, Packed([0, 5, 17, 24], **options)(q, k, v))


@pytest.mark.parametrize(
    ("bounds", "window", "message"),
    [([0, 5, 8], (-1, 0), "end at 24"), ([0, 24], (3, 2), "must end at the query's own key")],
    ids=["local", "looks-ahead"],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(
    bounds: list[int], window: tuple[int, int], message: str
) -> None:
    """Boundaries of a shard, and a window that sees later keys."""
    case = MODES[1]

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        core = ContextParallel(0, 1, ulysses_degree=1)
        module = core.apply(Varlen(bounds, window_size=window), mesh)
        with pytest.raises(ValueError, match=message):
            module(*(case.local(x, rank) for x in case.qkv()))

    ranks(3).run(on)


def test_ranks_that_were_told_other_documents_are_all_told_so() -> None:
    """One text, before any of them computes."""
    case = MODES[1]

    def on(rank: int) -> str:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        bounds = [0, 6, 24] if rank == 1 else [0, 5, 24]
        module = ContextParallel(0, 1, ulysses_degree=1).apply(Varlen(bounds), mesh)
        with pytest.raises(ValueError, match="cu_seq_q must be the same on all ranks") as e:
            module(*(case.local(x, rank) for x in case.qkv()))
        return str(e.value)

    assert len(set(ranks(3).run(on))) == 1
