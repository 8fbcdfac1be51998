"""Tensors on an NPU that is not there, and groups of ranks that are not there either."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of fake tensors
import torch_npu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["DEVICE", "compressed", "npu", "tensor", "torch_npu", "world"]

DEVICE = "npu:0"

# what a fake tensor raises reaches the test; its log repeats it
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@contextmanager
def npu() -> Iterator[None]:
    """Let tensors of `DEVICE` be made and computed with; real CPU tensors may join them."""
    # what is set below is this thread's, so backward must run on it, too
    backward_here = torch.autograd.set_multithreading_enabled(False)
    with FakeTensorMode(allow_non_fake_inputs=True), backward_here:
        # or `torch.tensor(numbers, device=...)` would copy them to a device before it is faked
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    """Return an uninitialised tensor on the NPU."""
    return torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=grad)


def compressed() -> Tensor:
    """Return the mask that sparse modes 2, 3 and 4 want."""
    return tensor(2048, 2048, dtype=torch.bool, grad=False)


@contextmanager
def world(rank: int, size: int = 4) -> Iterator[None]:
    """Be one rank of a world whose other ranks answer with anything of the right shape."""
    dist.init_process_group("cpu:fake,npu:fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it keeps meshes, and a mesh its groups


def _backward_of_v2(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    nothing, sink = query.new_empty(0), named.get("sink")
    ropes = [nothing if (x := named.get(n)) is None else torch.empty_like(x) for n in _ROPES]
    gradients = (torch.empty_like(x) for x in (query, key, value))
    return (*gradients, nothing, *ropes, None if sink is None else torch.empty_like(sink))


_ROPES = ("query_rope", "key_rope")
_library = torch.library.Library("npu", "IMPL", "Meta")


def mend_backward_of_v2() -> None:
    """Give version 2 the shapes of its backward, which the wheel's own rule fails to compute."""
    _library.impl("npu_fusion_attention_grad_v2", _backward_of_v2, allow_override=True)
