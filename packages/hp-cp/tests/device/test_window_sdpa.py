"""The rows of one window on an accelerator against the whole attention on CPU in float64."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from hp_cp.attention import window_sdpa
from hp_mesh.testing import assert_close, randn
from hp_mesh.window import AttentionWindow


def _device(kind: str) -> torch.device:
    if kind == "npu":
        importlib.import_module("torch_npu")
    return torch.device(kind)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("npu", marks=[pytest.mark.npu, pytest.mark.device]),
        pytest.param("cuda", marks=pytest.mark.device),
    ],
)
@pytest.mark.parametrize(
    ("start", "rows"), [(0, 128), (128, 128), (384, 128), (300, 77)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("kv_heads", [8, 2], ids=["mha", "gqa"])
def test_the_rows_of_a_window_match_the_whole_causal_attention(
    kind: str, start: int, rows: int, kv_heads: int
) -> None:
    """Output and gradients in bf16 agree with float64 on CPU, wherever the window begins."""
    device = _device(kind)
    length, heads, size = 512, 8, 64
    whole = [
        randn(2, h, length, size, seed=h + i) for i, h in enumerate((heads, kv_heads, kv_heads))
    ]
    whole = [x.bfloat16().double().requires_grad_() for x in whole]
    upstream = randn(2, heads, rows, size, seed=9).bfloat16()
    scale = 1 / math.sqrt(size)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, scale=scale, enable_gqa=True)
    expected = expected[:, :, start : start + rows]
    expected.backward(upstream.double())
    q, k, v = (x.detach().to(device, torch.bfloat16) for x in whole)
    local = [q[:, :, start : start + rows].contiguous(), k, v]
    for x in local:
        x.requires_grad_()

    output = window_sdpa(
        *local,
        AttentionWindow(start, rows, length, length),
        is_causal=True,
        scale=scale,
        enable_gqa=True,
    )
    output.backward(upstream.to(device))

    assert_close(output.cpu(), expected.to(torch.bfloat16))
    gradients = [whole[0].grad[:, :, start : start + rows], whole[1].grad, whole[2].grad]
    for x, gradient in zip(local, gradients, strict=True):
        assert_close(x.grad.cpu(), gradient.to(torch.bfloat16), kind="grad")
