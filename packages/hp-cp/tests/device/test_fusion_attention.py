"""The fused operator on an NPU against float64 on CPU: the unit tests' promises, with real numbers.

The unit tests hold the rewritten arguments to an *emulation* of the operator's documentation. Here
the operator itself is held to the emulation, for the whole sequence and for every rank's rows, in
every version, layout and sparse mode; output and every gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_cp.attention import rewrite_fusion_attention
from hp_cp.attention.rng import seeded
from hp_mesh.testing import assert_close, randn
from hp_mesh.window import AttentionWindow, contiguous_rows, head_tail_rows

from ..unit.test_attention_fusion import (  # noqa: TID252 - there is no package of tests
    COMPRESSED,
    SEQ_DIM,
    TOKENS,
    emulate_npu_fusion_attention,
)

pytestmark = [pytest.mark.npu, pytest.mark.device]

B, S, H, HKV, D, RANKS = 2, 264, 6, 2, 64, 4
SUFFIX = {1: "", 2: "_v2", 3: "_v3"}
DENSE = ("BSH", "SBH", "BSND", "BNSD")
SCALE = D**-0.5


@pytest.fixture(scope="module")
def npu() -> Any:
    """Return torch_npu, which makes the device known to torch."""
    return importlib.import_module("torch_npu")


def operator(npu: Any, version: int) -> Any:
    """Return the operator; one that this torch_npu lacks is a failure, not a skip."""
    return getattr(npu, f"npu_fusion_attention{SUFFIX[version]}")


def made(layout: str, rows: int, heads: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that ``dtype`` holds exactly, in float64."""
    shape = {
        "BSH": (B, rows, heads * D),
        "SBH": (rows, B, heads * D),
        "BSND": (B, rows, heads, D),
        "BNSD": (B, heads, rows, D),
        "TND": (rows, heads, D),
    }[layout]
    return randn(*shape, seed=seed).to(dtype).double()


def on_device(x: Any, dtype: torch.dtype) -> Any:
    """Move an argument as the operator takes it; sinks are float32 whatever the rest is."""
    if not isinstance(x, Tensor):
        return x
    if not x.is_floating_point():
        return x.to("npu")
    return x.detach().to("npu", torch.float32 if x.ndim == 1 else dtype)


def windows() -> Iterator[tuple[str, AttentionWindow]]:
    yield "whole", AttentionWindow(0, S, S, S)
    for rank in range(RANKS):
        start, stop = contiguous_rows(rank, RANKS, S)
        yield f"rank {rank}", AttentionWindow(start, stop - start, S, S)


def halves() -> Iterator[tuple[str, AttentionWindow]]:
    for rank in range(RANKS):
        for start, stop in head_tail_rows(rank, RANKS, S):
            yield f"half of rank {rank}", AttentionWindow(start, stop - start, S, S)


def compare(
    npu: Any,
    version: int,
    layout: str,
    kwargs: dict[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    cuts: Any = windows,
) -> None:
    """Hold each window's rows, and the sum of the windows' gradients, to the emulation in float64.

    Windows come as whole partitions of the sequence, ``whole`` being one of its own; the gradients
    of keys and values are summed over a partition in float32, as the ranks' reduce-scatter may.
    """
    dim = SEQ_DIM[layout]
    leaves = [
        made(layout, S, heads, i, dtype).requires_grad_() for i, heads in enumerate((H, HKV, HKV))
    ]
    expected = emulate_npu_fusion_attention(version, *leaves, H, layout, **kwargs)
    upstream = made(layout, S, H, 9, dtype)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    summed = [torch.zeros_like(x, dtype=torch.float32) for x in leaves[1:]]
    given = {name: on_device(x, dtype) for name, x in kwargs.items()}
    for name, window in cuts():
        start, rows = window.query_start, window.query_length
        q, k, v = (x.detach().to("npu", dtype) for x in leaves)
        q = q.narrow(dim, start, rows).contiguous()
        for x in (q, k, v):
            x.requires_grad_()
        new_q, new_k, new_v, heads, new = rewrite_fusion_attention(
            version,  # type: ignore[arg-type]
            q,
            k,
            v,
            H,
            layout,
            window,
            given,
        )
        out = operator(npu, version)(new_q, new_k, new_v, heads, layout, **new)[0]
        out.backward(upstream.narrow(dim, start, rows).to("npu", dtype))
        at = f"{layout}, version {version}, {name}"
        want = expected.narrow(dim, start, rows).to(dtype)
        assert_close(out.cpu(), want, name=f"output of {at}")
        assert q.grad is not None and k.grad is not None and v.grad is not None, at
        want = gradients[0].narrow(dim, start, rows).to(dtype)
        assert_close(q.grad.cpu(), want, kind="grad", name=f"dq of {at}")
        if name == "whole":
            for label, x, full in zip("kv", (k, v), gradients[1:], strict=True):
                assert x.grad is not None
                assert_close(x.grad.cpu(), full.to(dtype), kind="grad", name=f"d{label} of {at}")
        else:
            for total, x in zip(summed, (k, v), strict=True):
                assert x.grad is not None
                total += x.grad.float().cpu()
    for label, total, full in zip("kv", summed, gradients[1:], strict=True):
        want = full.to(dtype)
        assert_close(total.to(dtype), want, kind="grad", name=f"sum of d{label}, {layout}")


def causal_mask() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def scattered_mask(*lead: int) -> Tensor:
    """Return a mask that hides seven of ten keys, never the first."""
    mask = randn(*lead, S, S, seed=3) > -0.5
    mask[..., 0] = False
    return mask


def modes(version: int) -> dict[str, dict[str, Any]]:
    pre, after = TOKENS[version]
    return {
        "unmasked": {},
        "mask": {"atten_mask": scattered_mask(1, 1)},
        "tokens": {"atten_mask": causal_mask(), pre: 40, after: 0},
        "mask per head": {"atten_mask": scattered_mask(B, H), "sparse_mode": 1},
        "left-up": {"atten_mask": COMPRESSED, "sparse_mode": 2},
        "right-down": {"atten_mask": COMPRESSED, "sparse_mode": 3},
        "band": {"atten_mask": COMPRESSED, "sparse_mode": 4, pre: 70, after: 0},
        "band past the diagonal": {"atten_mask": COMPRESSED, "sparse_mode": 4, pre: 30, after: 9},
    }


MODES = tuple(modes(1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("version", SUFFIX)
def test_every_rank_computes_its_rows_of_the_whole(
    npu: Any, version: int, layout: str, mode: str
) -> None:
    """bfloat16, grouped heads, 264 rows on one rank and on four."""
    compare(npu, version, layout, {"scale": SCALE, **modes(version)[mode]})


@pytest.mark.parametrize("mode", ["left-up", "right-down", "band", "mask"])
@pytest.mark.parametrize("layout", DENSE)
def test_mirror_halves_compute_their_rows_of_the_whole(npu: Any, layout: str, mode: str) -> None:
    """Load balance: two calls a rank, on rows that do not follow each other."""
    compare(npu, 1, layout, {"scale": SCALE, **modes(1)[mode]}, cuts=halves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["unmasked", "right-down"])
def test_other_dtypes_hold_their_own_tolerance(npu: Any, dtype: torch.dtype, mode: str) -> None:
    """float16 and float32, by the table of `hp_mesh.testing`."""
    compare(npu, 1, "BNSD", {"scale": SCALE, **modes(1)[mode]}, dtype=dtype)


DOCUMENTS = ([S], [50, 200, S], [66, 132, 198, S], [1, 2, 3, 100, S])


@pytest.mark.parametrize("mode", [None, 2, 3, 4])
@pytest.mark.parametrize("ends", DOCUMENTS, ids=str)
@pytest.mark.parametrize("version", SUFFIX)
def test_packed_documents_keep_their_own_causal_rule(
    npu: Any, version: int, ends: list[int], mode: int | None
) -> None:
    """Documents that straddle ranks, end with them, and are one token long."""
    lengths = torch.tensor(ends) if version == 3 else ends
    kwargs: dict[str, Any] = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths}
    if mode is not None:
        kwargs |= {"atten_mask": COMPRESSED, "sparse_mode": mode}
    if mode == 4:
        kwargs |= dict(zip(TOKENS[version], (20, 0), strict=True))
    compare(npu, version, "TND", {"scale": SCALE, **kwargs})


@pytest.mark.parametrize("version", SUFFIX)
def test_biases_and_sinks_enter_the_softmax(npu: Any, version: int) -> None:
    """``pse`` on the scaled scores and one sink a head, cut with the rows."""
    pse = (0.5 * randn(1, H, S, S, seed=4)).bfloat16().double()
    kwargs = {"scale": SCALE, "atten_mask": COMPRESSED, "sparse_mode": 3}
    compare(npu, version, "BNSD", {**kwargs, "pse": pse})
    compare(npu, version, "BSND", {**kwargs, "sink": randn(H, seed=5)})


def test_dropout_follows_the_seed_and_keeps_the_mean(npu: Any) -> None:
    """The same seed drops the same weights, another one others; the others are scaled up."""
    q, k = (made("BNSD", S, heads, i, torch.bfloat16) for i, heads in enumerate((H, HKV)))
    q, k = (x.to("npu", torch.bfloat16) for x in (q, k))
    v = torch.ones_like(k)

    def drawn(seed: int) -> Tensor:
        with seeded(torch.device("npu", torch.npu.current_device()), seed):
            out = operator(npu, 1)(q, k, v, H, "BNSD", scale=SCALE, keep_prob=0.8)[0]
        return out.float().cpu()

    first = drawn(7)
    assert torch.equal(first, drawn(7)) and not torch.equal(first, drawn(8))
    # B * H * S rows of a mean of 1 and a spread of about 0.05
    assert abs(first.mean().item() - 1.0) < 0.01
