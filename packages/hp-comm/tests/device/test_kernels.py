"""The kernels on a GPU or an NPU: the interpreter's cases, compiled, and larger ones.

Every result is compared with the definition on the same device; what is written must not depend on
what memory held before.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hp_comm.kernels import HeadWork, arithmetic, reference
from hp_mesh.testing import assert_close, poison_empty

pytestmark = pytest.mark.device


def _device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if importlib.util.find_spec("torch_npu") is None:
        return ""
    return "npu" if torch.get_device_module("npu").is_available() else ""


if not _device():
    pytest.skip("no GPU or NPU here, for which these are compiled", allow_module_level=True)

from hp_comm.kernels import launch, launch_heads, launch_merge  # noqa: E402 - they import triton

DEVICE = _device()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Cut = tuple[list[int], list[int], list[int], list[int]]


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "BSHD": lambda x: x,
    "from-BNSD": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "from-SBHD": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "slice-of-qkv": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
    "D-not-last": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}
CUTS: dict[str, Cut] = {
    "ulysses": ([2] * 3, [4] * 4 + [1] * 8, [], [1, 2]),
    "apart": ([2] * 3, [4] * 4 + [1] * 8, [], []),
    "repeated": (
        [2] * 3, [2] * 8 + [1] * 16,
        [*range(16), *(r // 2 for r in range(8)), *(r // 2 for r in range(8))], [1, 2],
    ),
    "rows": ([1] * 3, [250, 1, 0, 752] * 3, [], []),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CUTS)
def test_moves_are_bit_equal_to_their_definition(
    name: str, layout: str, dtype: torch.dtype
) -> None:
    """Pack and unpack, any strides, odd sizes; sums to the precision of the dtype."""
    sizes = (80, 80, 80) if CUTS[name][3] else (80, 80, 56)
    xs = [
        _randn(2, 1003, n, d, seed=n, dtype=dtype) for n, d in zip((16, 4, 4), sizes, strict=True)
    ]
    given, cut = [LAYOUTS[layout](x) for x in xs], CUTS[name]

    packed = launch.pack(given, *cut)
    assert torch.equal(packed, reference.pack(given, *cut))

    shapes = [list(x.shape) for x in xs]
    ours, theirs = launch.unpack(packed, shapes, *cut), reference.unpack(packed, shapes, *cut)
    for one, other in zip(ours, theirs, strict=True):
        if name == "repeated":
            assert_close(one, other)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("size", "rotary"), [(128, 128), (128, 64), (96, 64), (80, 0)])
@pytest.mark.parametrize("cut", ["ulysses", "repeated"])
def test_prepared_heads_and_their_gradients_hold_the_tolerance(
    cut: str, size: int, rotary: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """QK-norm and rotary, forward and backward, the weight's gradient included."""
    q, k, v = (_randn(2, 1003, n, size, seed=n, dtype=dtype) for n in (16, 4, 4))
    angle = _randn(2, 1003, 1, rotary // 2, seed=5) if rotary else None
    cos, sin = (None, None) if angle is None else (angle.cos(), angle.sin())
    work = HeadWork(_randn(size, seed=6, dtype=dtype), 1e-6, cos, sin, interleaved)
    works, given = [work, work, None], (*CUTS[cut], 1)

    packed = launch_heads.pack_heads([q, k, v], works, *given)
    assert_close(packed, arithmetic.pack_heads([q, k, v], works, *given))

    grad, shapes = torch.randn_like(packed), [list(x.shape) for x in (q, k, v)]
    ours = launch_heads.unpack_heads(grad, [q, k, None], works, shapes, *given)
    theirs = arithmetic.unpack_heads(grad, [q, k, None], works, shapes, *given)
    for one, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            # a weight's gradient sums what was rounded to the dtype
            assert_close(one.to(dtype), other.to(dtype), kind="grad")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_partials_hold_the_tolerance(dtype: torch.dtype) -> None:
    """Outputs, log-sum-exps and their gradients; rows without keys on one side and on both."""
    out1, out2, grad = (_randn(2, 7, 1003, 80, seed=i, dtype=dtype) for i in range(3))
    lse1, lse2, grad_lse = (_randn(2, 7, 1003, seed=i) for i in range(3, 6))
    lse1[0, 0, :3] = lse2[0, 0, 1:5] = -torch.inf
    given = (out1, lse1, out2, lse2)

    ours = launch_merge.merge(*given) + launch_merge.merge_backward(*given, grad, grad_lse)
    theirs = arithmetic.merge(*given) + arithmetic.merge_backward(*given, grad, grad_lse)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, kind="grad")


def test_a_tensor_of_more_than_2_31_elements_is_moved_right() -> None:
    """Offsets are int64: the last heads of a tensor of 2.2 billion numbers arrive."""
    x = torch.zeros(1, 2**17, 130, 128, dtype=torch.uint8, device=DEVICE)
    x[0, -1] = torch.arange(128, device=DEVICE, dtype=torch.uint8)
    cut = ([2], [65, 65], [], [1, 2])
    packed = launch.pack([x], *cut)
    parts = packed.view(2, 2**17, 65, 128)
    assert (parts[:, -1] == torch.arange(128, device=DEVICE)).all() and not parts[:, :-1].any()


def test_the_whole_buffer_is_written() -> None:
    """Poisoned memory does not shine through."""
    x = _randn(2, 37, 6, 10)
    with poison_empty():
        packed = launch.pack([x], [2], [2, 4], [], [])
        (back,) = launch.unpack(packed, [[2, 37, 6, 10]], [2], [2, 4], [], [])
    assert torch.equal(back, x)
