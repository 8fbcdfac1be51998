from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from hp_comm.kernels import implementation, pack, reference, unpack
from hp_mesh.testing import assert_close, poison_empty, randn

CUTS: dict[str, tuple[list[int], list[int], list[int]]] = {
    "heads-even": ([2, 2], [2, 2, 1, 1], []),
    "rows-even": ([1, 1], [3, 3, 3, 3] * 2, []),
    "rows-uneven": ([1, 1], [4, 2, 0, 6, 3, 3, 5, 1], []),
    "kv-repeated": ([2, 2], [2, 2, 1, 1], [0, 1, 2, 3, 0, 0]),
    "kv-overlapping": ([2, 2], [2, 2, 2, 2], [0, 1, 2, 3, 0, 1, 1, 0]),
    "heads-out-of-order-and-one-missing": ([2, 2], [1, 2, 1, 0], [3, 0, 2, 1]),
}


def _tensors() -> list[Tensor]:
    q = torch.arange(2 * 12 * 4 * 3, dtype=torch.float64).view(2, 12, 4, 3)
    k = 1000 + torch.arange(2 * 12 * 2 * 5, dtype=torch.float64).view(2, 12, 2, 5)
    return [q, k]


def _lists(xs: list[Tensor], counts: list[int], index: list[int]) -> list[list[list[int]]]:
    """The cut written as nested lists, tensor by tensor and rank by rank."""
    num_parts, at, tables = len(counts) // len(xs), 0, []
    for t in range(len(xs)):
        table, start = [], 0
        for count in counts[t * num_parts : (t + 1) * num_parts]:
            table.append(index[at : at + count] if index else list(range(start, start + count)))
            at, start = at + count, start + count
        tables.append(table)
    return tables


@pytest.mark.parametrize("name", CUTS)
def test_pack_lays_each_ranks_slices_one_tensor_after_the_other(name: str) -> None:
    """Bit for bit what an index_select per rank and tensor gives, for even, uneven and GQA cuts."""
    dims, counts, index = CUTS[name]
    xs = _tensors()
    tables = _lists(xs, counts, index)
    pieces = [
        x.index_select(dim, torch.tensor(tables[t][p], dtype=torch.long)).flatten()
        for p in range(len(counts) // 2)
        for t, (x, dim) in enumerate(zip(xs, dims, strict=True))
    ]

    with poison_empty():
        packed = pack(xs, dims, counts, index)

    assert torch.equal(packed, torch.cat(pieces))


@pytest.mark.parametrize("layout", ["BSHD", "BNSD"])
@pytest.mark.parametrize("name", CUTS)
def test_joined_parts_lie_side_by_side_rows_first(name: str, layout: str) -> None:
    """Each part is the slices, rows in front, concatenated along the heads; unpack undoes it."""
    dims, counts, index = CUTS[name]
    if name == "rows-uneven":
        counts = counts[:4] * 2  # side by side, tensors have the same rows
    xs = [x[..., :3].contiguous() for x in _tensors()]
    tables = _lists(xs, counts, index)
    pieces = [
        torch.cat(
            [
                x.index_select(dim, torch.tensor(tables[t][p], dtype=torch.long)).movedim(1, 0)
                for t, (x, dim) in enumerate(zip(xs, dims, strict=True))
            ],
            dim=2,
        ).flatten()
        for p in range(len(counts) // 2)
    ]
    swapped = layout == "BNSD"
    given = [x.transpose(1, 2) if swapped else x for x in xs]
    cut_dims = [3 - d if swapped else d for d in dims]
    joined = [2, 1] if swapped else [1, 2]

    with poison_empty():
        packed = pack(given, cut_dims, counts, index, joined)
        back = unpack(packed, [list(x.shape) for x in given], cut_dims, counts, index, joined)

    assert torch.equal(packed, torch.cat(pieces))
    flat = packed.clone().normal_(generator=torch.Generator().manual_seed(1))
    transposed = unpack(flat, [list(x.shape) for x in given], cut_dims, counts, index, joined)
    inner = sum((x * y).sum() for x, y in zip(given, transposed, strict=True))
    assert_close(inner, (packed * flat).sum())
    assert all(x.is_contiguous() for x in back)


@pytest.mark.parametrize("name", CUTS)
def test_unpack_is_the_transpose_of_pack(name: str) -> None:
    """<pack(x), y> equals <x, unpack(y)>: each is the other's exact gradient, sums included."""
    dims, counts, index = CUTS[name]
    xs = [randn(*x.shape, seed=t) for t, x in enumerate(_tensors())]
    packed = pack(xs, dims, counts, index)
    y = randn(*packed.shape, seed=7)

    with poison_empty():
        back = unpack(y, [list(x.shape) for x in xs], dims, counts, index)

    left = (packed * y).sum()
    right = sum((x * b).sum() for x, b in zip(xs, back, strict=True))
    assert_close(left, right)


def test_unpack_zeroes_a_position_that_nobody_sends() -> None:
    """A head that no rank was given gets a gradient of zero, not what memory held."""
    xs = [randn(2, 3, 4, 2)]
    with poison_empty():
        (back,) = unpack(pack(xs, [2], [1, 1], [3, 1]), [[2, 3, 4, 2]], [2], [1, 1], [3, 1])

    assert torch.equal(back[:, :, [1, 3]], xs[0][:, :, [1, 3]])
    assert not back[:, :, [0, 2]].any()

    with poison_empty():
        (nothing,) = unpack(torch.empty(0), [[2, 3, 4, 2]], [2], [0, 0], [])
    assert not nothing.any()


def test_pack_takes_any_strides() -> None:
    """Transposed, expanded and sliced inputs give the bits of their dense copies."""
    base = randn(2, 4, 12, 3)
    forms = [
        base.transpose(1, 2),
        randn(2, 12, 1, 3).expand(2, 12, 4, 3),
        randn(2, 12, 8, 3)[:, :, ::2],
    ]
    for x in forms:
        assert torch.equal(pack([x], [2], [2, 2], []), pack([x.contiguous()], [2], [2, 2], []))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_pack_and_unpack_keep_the_dtype(dtype: torch.dtype) -> None:
    """Nothing is cast on the way."""
    x = torch.arange(24).view(2, 3, 4).to(dtype)
    packed = pack([x], [2], [3, 1], [])
    (back,) = unpack(packed, [[2, 3, 4]], [2], [3, 1], [])

    assert packed.dtype == back.dtype == dtype
    assert torch.equal(back, x)


def test_the_operators_pass_torchs_own_checks() -> None:
    """Schema, fake implementation and gradient agree with what the operators do."""
    xs = [randn(2, 3, 4, 2, requires_grad=True), randn(2, 3, 2, 3, seed=1, requires_grad=True)]
    cut = ([2, 2], [2, 2, 1, 1], [0, 1, 2, 3, 0, 0])
    torch.library.opcheck(torch.ops.hp_comm.pack.default, (xs, *cut, []))
    buffer = randn(2 * 3 * (4 * 2 + 2 * 3), requires_grad=True)
    shapes = ([2, 3, 4, 2, 2, 3, 2, 3], [4, 4])
    torch.library.opcheck(torch.ops.hp_comm.unpack.default, (buffer, *shapes, *cut, []))
    torch.library.opcheck(torch.ops.hp_comm.pack.default, (xs, [2, 2], [2, 2, 1, 1], [], []))
    alike = [randn(2, 3, n, 2, seed=n, requires_grad=True) for n in (4, 2)]
    torch.library.opcheck(torch.ops.hp_comm.pack.default, (alike, *cut, [1, 2]))
    buffer = randn(2 * 3 * (4 + 2) * 2, requires_grad=True)
    shapes = ([2, 3, 4, 2, 2, 3, 2, 2], [4, 4])
    torch.library.opcheck(torch.ops.hp_comm.unpack.default, (buffer, *shapes, *cut, [1, 2]))


def test_the_operators_gradients_match_finite_differences() -> None:
    """With a head that goes to two ranks: its gradient is the sum."""
    cut = ([1], [1, 2], [0, 0, 1])
    x = randn(2, 2, 3, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pack([x], *cut), (x,))
    buffer = randn(18, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b: unpack(b, [[2, 2, 3]], *cut)[0], (buffer,))


def test_the_reference_is_what_runs_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment, no vendor: plain torch."""
    monkeypatch.delenv("HP_KERNELS", raising=False)
    assert implementation(torch.empty(0)) is reference
    monkeypatch.setenv("HP_KERNELS", "reference")
    assert implementation(torch.empty(0)) is reference


def test_triton_that_is_not_installed_is_one_clear_import_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HP_KERNELS=triton without triton names both extras and the way back."""
    monkeypatch.setenv("HP_KERNELS", "triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"hp-comm\[cuda\].*hp-comm\[npu\].*HP_KERNELS=reference"):
        pack([torch.zeros(2, 2)], [1], [1, 1], [])


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do not run on a CPU tensor by themselves; the way out is named."""
    monkeypatch.setenv("HP_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1, or use HP_KERNELS=reference"):
        implementation(torch.empty(0))


def test_a_triton_that_does_not_import_names_the_reason_and_the_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both extras in one environment mix their files; the message says that."""
    broken = ModuleType("triton")
    monkeypatch.setitem(sys.modules, "triton", broken)
    monkeypatch.setattr(broken, "__spec__", ModuleSpec("triton", None), raising=False)
    monkeypatch.setitem(sys.modules, "triton.language", None)
    monkeypatch.delitem(sys.modules, "hp_comm.kernels._triton", raising=False)
    monkeypatch.setenv("HP_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ImportError, match=r"cannot be imported .*both put a triton there"):
        pack([torch.zeros(2, 2)], [1], [1, 1], [])


def test_another_device_takes_triton_and_says_so_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No silent fallback on a GPU or an NPU: the extra of that device, or the reference by name."""
    monkeypatch.delenv("HP_KERNELS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fake = SimpleNamespace(device=SimpleNamespace(type="npu"))
    with pytest.raises(ImportError, match=r"on npu .* install hp-comm\[npu\], or use HP_KERNELS"):
        implementation(cast(Tensor, fake))
    monkeypatch.setenv("HP_KERNELS", "reference")
    assert implementation(cast(Tensor, fake)) is reference


@pytest.mark.parametrize("grad", [True, False])
def test_operator_and_direct_call_give_the_same_bits(grad: bool) -> None:
    """Without a graph the implementation is called directly; the numbers do not depend on it."""
    xs, cut = _tensors(), CUTS["kv-repeated"]
    with torch.set_grad_enabled(grad):
        packed = pack(xs, *cut)
        back = unpack(packed, [list(x.shape) for x in xs], *cut)
    assert torch.equal(packed, reference.pack(xs, *cut))
    expected = reference.unpack(packed, [list(x.shape) for x in xs], *cut)
    assert all(torch.equal(b, e) for b, e in zip(back, expected, strict=True))


def test_an_unknown_implementation_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo in HP_KERNELS does not fall back in silence."""
    monkeypatch.setenv("HP_KERNELS", "tritn")
    with pytest.raises(
        ValueError, match="HP_KERNELS \\('tritn'\\) must be one of reference, triton"
    ):
        implementation(torch.empty(0))


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (([1], [2, 3], []), r"positions up to 4 of tensor 0 must be below its size in dim 1 \(4\)"),
        (([1], [2, 2], [0, 1, 2, 9]), "positions up to 9"),
        (([1], [2, 2], [0, -1, 2, 3]), "and not negative"),
        (([1], [2, 2], [0, 1]), r"index \(2 positions\) must have as many as counts add up to \(4"),
        (([1], [-1, 5], []), r"counts \(-1\) must be numbers of at least 0"),
        (([5], [2, 2], []), r"dims\[0\] \(5\) must be a dim of the tensor \(3, 4\)"),
        (([-1], [2, 2], []), "must be a dim of the tensor"),
        (([1, 1], [2, 2], []), r"dims \(2\) must be one per tensor \(1\)"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(cut: tuple[list[int], ...], words: str) -> None:
    """It would read what lies beside the tensor."""
    with pytest.raises(ValueError, match=words):
        pack([torch.zeros(3, 4)], *cut)


def test_tensors_that_share_a_buffer_are_of_one_dtype_and_a_buffer_is_of_one_size() -> None:
    """Nothing is cast on its way, nor read behind the end."""
    with pytest.raises(ValueError, match="must be of one dtype"):
        pack([torch.zeros(4), torch.zeros(4).double()], [0, 0], [2, 2, 2, 2], [])
    with pytest.raises(ValueError, match=r"buffer \(3 elements\) must have those of the cut \(4\)"):
        unpack(torch.zeros(3), [[4]], [0], [2, 2], [])
