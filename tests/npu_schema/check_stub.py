"""The stand-ins give torch_npu a device, schemas and autograd; they never give a number."""

from __future__ import annotations

import pytest
import torch

from .fakes import DEVICE, npu, tensor, torch_npu


def test_one_ascend_910b_is_there() -> None:
    """What decides which way torch_npu goes: device count and the name of the chip."""
    assert torch.npu.is_available() and torch.npu.device_count() == 1
    assert torch.npu.get_device_name(0) == "Ascend910B3"


def test_real_memory_is_refused() -> None:
    """No check can take an uninitialised number for a result."""
    with pytest.raises(RuntimeError):
        torch.empty(3, device=DEVICE)


def test_fake_tensors_have_a_forward_and_a_backward() -> None:
    """Through the operator's own autograd, in C++."""
    with npu():
        q = tensor(2, 6, 12, 64)
        out, *_ = torch_npu.npu_fusion_attention(q, q, q, 6, "BNSD")
        out.sum().backward()
    assert out.grad_fn.name() == "NpuFusionAttentionBackward0"
    assert q.grad is not None and q.grad.shape == q.shape
