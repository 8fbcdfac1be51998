"""Packed documents and windows on one device: which kernel runs, and that all give one result."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_cp.attention import _npu
from hp_cp.attention.band import KeySpans, band_attention, band_mask
from hp_cp.attention.packed import choose_kernel, packed_rows
from hp_mesh.testing import assert_close, randn

from .test_attention_fusion import emulate_npu_fusion_attention


def make(rows: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((rows, 6, 8), (keys, 2, 8), (keys, 2, 8))
    q, k, v = (randn(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    return q, k, v


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 4), (False, None)])
def test_an_npu_is_called_with_the_documents_in_tnd(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: int | None
) -> None:
    """The documented call; a stand-in for torch_npu that *emulates* the kernel answers it."""

    def fused(q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str, **kwargs: Any) -> Any:
        assert layout == "TND" and ("atten_mask" in kwargs) == causal
        return (emulate_npu_fusion_attention(1, q, k, v, heads, layout, **kwargs),)

    module = types.ModuleType("torch_npu")
    module.npu_fusion_attention = fused  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    q, k, v = make(17, 21)
    ends = ([5, 17], [9, 21])
    out = _npu.packed_attention(q, k, v, *ends, causal, window, 0.3)
    assert_close(out, packed_rows(q, k, v, *ends, causal=causal, window=window, scale=0.3))


class On:
    """As much of a tensor as the choice of a kernel reads."""

    def __init__(self, device: str, dtype: torch.dtype, size: int = 64) -> None:
        self.device, self.dtype, self.shape = (
            types.SimpleNamespace(type=device),
            dtype,
            (1, 1, size),
        )


@pytest.mark.parametrize(
    ("q", "size", "ends", "kernel"),
    [
        (On("cpu", torch.bfloat16), 64, ([4], [4]), "documents"),
        (On("cuda", torch.bfloat16), 64, ([4], [4]), "varlen"),
        (On("cuda", torch.float32), 64, ([4], [4]), "documents"),
        (On("cuda", torch.float16), 32, ([4], [4]), "documents"),  # v has another head size
        (On("npu", torch.float16), 64, ([4, 6], [4, 6]), "npu"),
        (On("npu", torch.float64), 64, ([4], [4]), "documents"),
        (On("npu", torch.float16), 64, ([4, 6], [4, 5]), "documents"),  # fewer keys than queries
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_kernel_is_chosen_by_device_dtype_and_lengths(
    q: Any, size: int, ends: Any, kernel: str
) -> None:
    """The table of `choose_kernel`."""
    v: Any = On(q.device.type, q.dtype, size)
    assert choose_kernel(q, v, *ends, causal=True) == kernel


@pytest.mark.parametrize(
    ("length", "window", "sinks"),
    [(7, 3, 0), (7, 3, 1), (200, 5, 3), (200, 70, 9), (200, 300, 2), (150, 1, 0), (150, 64, 65)],
)
def test_a_band_needs_the_keys_of_its_rows_only(length: int, window: int, sinks: int) -> None:
    """Rows from any start, with all keys and with those of the band and the sinks alone."""
    q, k, v = (x.transpose(0, 1)[None] for x in make(length, length))
    everything = torch.arange(length)
    mask = band_mask(everything, everything, window, sinks)
    whole = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )
    for start in (0, 3, length // 2):
        first = max(0, start - window + 1)
        held = min(sinks, first)
        spans = KeySpans(held, (first, length))
        assert spans.length == len(spans.positions(k.device))
        for keys, place in (
            (everything, KeySpans(0, (0, length))),
            (spans.positions(k.device), spans),
        ):
            out = band_attention(
                q[:, :, start:], k[:, :, keys], v[:, :, keys],
                start=start, spans=place, window=window, sinks=sinks,
            )  # fmt: skip
            assert_close(out, whole[:, :, start:])


def test_a_band_without_its_keys_is_an_error_and_no_number() -> None:
    """Our own invariant: keys that a row sees must be held."""
    q, k, v = (x.transpose(0, 1)[None] for x in make(6, 6))
    with pytest.raises(AssertionError, match="must be among"):
        band_attention(q, k[:, :, 3:], v[:, :, 3:], start=0, spans=KeySpans(0, (3, 6)), window=2)
