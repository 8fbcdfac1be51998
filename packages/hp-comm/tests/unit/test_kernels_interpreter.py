"""The Triton kernels, interpreted on a CPU, against their definition in plain torch.

Needs a triton that can be imported; `nox -s npu_compile` and `nox -s cuda_compile` have one.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no triton here; nox -s npu_compile and cuda_compile run it")
# triton reads it when it is imported, so a test cannot set it; the nox sessions do
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run on a CPU only under TRITON_INTERPRET=1", allow_module_level=True)

from hp_comm.kernels import HeadWork, arithmetic, launch, launch_heads, launch_merge, reference
from hp_mesh.testing import assert_close

# triton-ascend's interpreter makes numbers of one-element arrays, which numpy will forbid
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

Cut = tuple[list[int], list[int], list[int], list[int]]

# q has 6 heads, k 2, v 2 of another size; 4 ranks; 20 rows, two batch entries
CUTS: dict[str, Cut] = {
    "heads": ([2, 2, 2], [2, 2, 1, 1] + [1, 1, 0, 0] * 2, [], []),
    "heads-even": ([2, 2, 2], [3, 3] + [1, 1] * 2, [], []),
    "rows": ([1, 1, 1], [5, 5, 5, 5] * 3, [], []),
    "rows-uneven": ([1, 1, 1], [4, 2, 0, 14, 3, 3, 5, 9, 20, 0, 0, 0], [], []),
    "kv-repeated": ([2, 2, 2], [2, 2, 1, 1] + [1, 1, 1, 1] * 2,
                    [0, 1, 2, 3, 4, 5, 0, 0, 1, 1, 0, 0, 1, 1], []),
    "kv-overlapping": ([2, 2, 2], [2, 2, 1, 1] + [2, 1, 1, 1] * 2,
                       [0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1], []),
    "one-missing": ([2, 2, 2], [1, 2, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0], [3, 0, 2, 1, 1, 0], []),
    "batch": ([0, 0, 0], [1, 1] * 3, [], []),
}  # fmt: skip
JOINED = {
    "joined-heads": ([2, 2, 2], [3, 3] + [1, 1] * 2, [], [1, 2]),
    "joined-rows": ([1, 1, 1], [10, 10] * 3, [], [1, 2]),
    "joined-repeated": ([2, 2, 2], [2, 2, 1, 1] + [1, 1, 1, 1] * 2,
                        [0, 1, 2, 3, 4, 5, 0, 0, 1, 1, 0, 0, 1, 1], [1, 2]),
}  # fmt: skip
LAYOUTS = ("BSHD", "from-BNSD", "from-SBHD", "strided", "D-not-last")
# one tile per program, few programs that loop, tiles smaller than a row
LAUNCHES = {
    "tiles": {"tile": 256},
    "loops": {"tile": 128, "programs": 3},
    "rows-in-parts": {"tile": 4, "programs": 2},
}


def _lay(x: Tensor, layout: str) -> Tensor:
    """The same numbers, ``[B, S, H, D]``, in memory as another layout has them."""
    if layout == "from-BNSD":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "from-SBHD":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided":
        return torch.cat([x, x + 1], -1)[..., : x.shape[-1]]
    if layout == "D-not-last":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x


def _tensors(dtype: torch.dtype, sizes: tuple[int, int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(2, 20, heads, size, generator=generator, dtype=torch.float32).to(dtype)
        for heads, size in zip((6, 2, 2), sizes, strict=True)
    ]


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A way to lay tiles over pieces."""
    for module in (launch, launch_heads):
        monkeypatch.setattr(module, "launch_of", lambda *_: LAUNCHES[request.param])
        module._planned.cache_clear()
    return str(request.param)


# every cut, every layout and every grid, though not all with all: the interpreter is slow
WAYS = [
    *((name, "BSHD", "tiles") for name in [*CUTS, *JOINED]),
    *((name, layout, "loops") for name in ("kv-overlapping", "joined-heads") for layout in LAYOUTS),
    ("heads-even", "BSHD", "rows-in-parts"),
    ("batch", "strided", "rows-in-parts"),
]


@pytest.mark.parametrize(("name", "layout", "tiles"), WAYS, indirect=["tiles"])
def test_pack_is_bit_equal_to_its_definition(name: str, layout: str, tiles: str) -> None:
    """Same bits in the same places, whatever the strides, the cut and the grid."""
    dims, counts, index, joined = {**CUTS, **JOINED}[name]
    xs = _tensors(torch.bfloat16, (7, 7, 7) if joined else (7, 7, 5))
    given = [_lay(x, layout) for x in xs]

    packed = launch.pack(given, dims, counts, index, joined)

    assert torch.equal(packed, reference.pack(given, dims, counts, index, joined))


SUMS = [
    *((name, torch.float32, "tiles") for name in [*CUTS, *JOINED]),
    *((name, torch.float16, "loops") for name in ("kv-overlapping", "joined-repeated")),
    ("kv-repeated", torch.bfloat16, "tiles"),
    ("rows-uneven", torch.float32, "loops"),
]


@pytest.mark.parametrize(("name", "dtype", "tiles"), SUMS, indirect=["tiles"])
def test_unpack_is_its_definition_with_sums_rounded_once(
    name: str, dtype: torch.dtype, tiles: str
) -> None:
    """Where nothing is summed, bit for bit; where it is, to the precision of the dtype."""
    dims, counts, index, joined = {**CUTS, **JOINED}[name]
    xs = _tensors(dtype, (7, 7, 7) if joined else (7, 7, 5))
    shapes = [list(x.shape) for x in xs]
    buffer = torch.randn(
        reference.pack(xs, dims, counts, index, joined).numel(),
        generator=torch.Generator().manual_seed(5),
    ).to(dtype)

    ours = launch.unpack(buffer, shapes, dims, counts, index, joined)
    expected = reference.unpack(buffer, shapes, dims, counts, index, joined)

    for one, other in zip(ours, expected, strict=True):
        if "repeated" not in name and "overlapping" not in name:
            assert torch.equal(one, other)
        else:
            assert_close(one, other)


HEADS = [
    # rotated numbers, interleaved, norm, layout, joined, KV heads repeated, grid
    (8, False, True, "BSHD", False, False, "tiles"),
    (8, False, True, "BNSD", True, True, "loops"),
    (6, True, True, "BSHD", True, False, "loops"),
    (6, False, False, "BNSD", False, True, "tiles"),
    (0, False, True, "TND", False, True, "loops"),
    (8, True, False, "D-not-last", False, False, "tiles"),
]


def _dtypes() -> list[torch.dtype]:
    """fp64 where there is one: triton-ascend refuses it, also when it interprets."""
    ascend = importlib.util.find_spec("triton.backends.ascend") is not None
    return [torch.float32 if ascend else torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize(
    ("rotary", "interleaved", "norm", "layout", "joined", "repeated", "tiles"),
    HEADS,
    indirect=["tiles"],
)
def test_prepared_heads_and_their_gradients_are_the_definitions(
    rotary: int, interleaved: bool, norm: bool, layout: str, joined: bool, repeated: bool,
    tiles: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    """QK-norm and rotary inside the pack, and back, with the weight's gradient: tolerance table."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k, v = randn(2, 20, 6, 10), randn(2, 20, 2, 10), randn(2, 20, 2, 10)
    angle = torch.randn(2, 20, 1, rotary // 2, generator=generator)
    seq_dim, head_dim = 1, 2
    if layout == "BNSD":
        q, k, v, angle = (x.transpose(1, 2) for x in (q, k, v, angle))
        seq_dim, head_dim = 2, 1
    elif layout == "TND":
        q, k, v, angle = (x[0] for x in (q, k, v, angle))
        seq_dim, head_dim = 0, 1
    elif layout == "D-not-last":
        q, k, v = (_lay(x, layout) for x in (q, k, v))
    cos, sin = (angle.cos(), angle.sin()) if rotary else (None, None)
    work = HeadWork(randn(10) if norm else None, 1e-5, cos, sin, interleaved)
    works = [work, work, None]
    cut = (
        [head_dim] * 3,
        [2, 2, 1, 1] + [1, 1, 1, 1] * 2 if repeated else [3, 3] + [1, 1] * 2,
        [0, 1, 2, 3, 4, 5, 0, 0, 1, 1, 0, 0, 1, 1] if repeated else [],
        [seq_dim, head_dim] if joined else [],
        seq_dim,
    )

    packed = launch_heads.pack_heads([q, k, v], works, *cut)
    expected = arithmetic.pack_heads([q, k, v], works, *cut)
    assert_close(packed, expected)

    grad = randn(packed.numel())
    shapes = [list(x.shape) for x in (q, k, v)]
    ours = launch_heads.unpack_heads(grad, [q, k, None], works, shapes, *cut)
    theirs = arithmetic.unpack_heads(grad, [q, k, None], works, shapes, *cut)
    for one, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        if other is None:
            assert one is None
        else:
            assert one is not None
            # the definition has already rounded the sum of a repeated head's gradients
            assert_close(one.to(dtype), other.to(dtype), kind="grad")


@pytest.mark.parametrize("dtype", _dtypes())
def test_merged_partials_are_the_definition(dtype: torch.dtype) -> None:
    """Outputs, log-sum-exps and their gradients; rows without keys on one side and on both."""
    generator = torch.Generator().manual_seed(7)
    out1, out2, grad = (torch.randn(2, 3, 37, 10, generator=generator).to(dtype) for _ in range(3))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse1, lse2, grad_lse = (torch.randn(2, 3, 37, generator=generator).to(wide) for _ in range(3))
    lse1[0, 0, :3] = lse2[0, 0, 1:5] = -torch.inf

    ours = launch_merge.merge(out1, lse1, out2, lse2)
    theirs = arithmetic.merge(out1, lse1, out2, lse2)
    given = (out1, lse1, out2, lse2, grad, grad_lse)
    ours += launch_merge.merge_backward(*given)
    theirs += arithmetic.merge_backward(*given)

    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, kind="grad")


@pytest.mark.parametrize("dtype", _dtypes())
def test_cos_and_sin_may_lie_differently(dtype: torch.dtype) -> None:
    """A slice of a table beside a dense one, and one that is expanded over the batch."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 6, 2, 8, generator=generator).to(dtype)
    table = torch.randn(2, 6, 1, 8, generator=generator).to(dtype)
    cut = ([2], [1, 1], [], [], 1)
    for cos, sin in (
        (table[..., :4], table[..., 4:].contiguous()),
        (table[:1, ..., :4].expand(2, -1, -1, -1), table[..., 4:].contiguous()),
    ):
        work = HeadWork(None, 1e-6, cos, sin)
        ours = launch_heads.pack_heads([x], [work], *cut)
        assert_close(ours, arithmetic.pack_heads([x], [work], *cut))
        grads = [
            module.unpack_heads(ours, [None], [work], [list(x.shape)], *cut)[0][0]
            for module in (launch_heads, arithmetic)
        ]
        assert_close(*grads, kind="grad")
