"""Every kernel, in the variants that real layouts ask for, to be compiled and checked; no torch.

`nox -s npu_compile` and `nox -s cuda_compile` compile them without a device; `hp_tune` ranks launch
configs by what the compilers say of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hp_comm.kernels.config import default_launch
from hp_comm.kernels.layout import Shape, View, copies
from hp_comm.kernels.limits import bundles
from hp_comm.kernels.plans import Launch, Work, head_launch, merge_launch, move_launch
from hp_comm.kernels.segments import head_segments, move_segments, sum_segments
from hp_mesh.window import head_tail_chunks

__all__ = ["DTYPES", "Case", "Variant", "cases", "launches", "layout_of", "variants", "variants_of"]

DTYPES = ("bf16", "fp16", "fp32")
FLOAT = frozenset(
    ("cos", "sin", "grad_weight", "lse", "lse1", "lse2", "grad_lse", "grad_lse1", "grad_lse2")
)
"""Tensors that are fp32 whatever is packed."""
ROWS_DIM, HEADS_DIM = 1, 2
Cut = tuple[Shape, Shape, Shape, Shape]


@cache
def arguments(kernel: str) -> tuple[str, ...]:
    """Return the names of a kernel's arguments, in order, read from its source: no triton here."""
    tree = ast.parse(Path(__file__).with_name("_triton.py").read_text(encoding="utf-8"))
    (found,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == kernel
    )
    return tuple(argument.arg for argument in found.args.args)


@dataclass(frozen=True, slots=True)
class Case:
    """A layout: ``heads[t]`` heads of ``size``, ``rows`` positions, ``batch`` entries.

    Attributes:
        name: What it stands for.
        dim: ``"heads"`` cuts heads for ranks, ``"rows"`` the sequence, ``"chunks"`` a sequence in
            head-tail order: ``rows`` are its chunks, and what is in one counts among the heads.
        layout: Order of dims in memory: BSHD, BNSD, SBHD or TND.
        ranks: Ranks that share the heads or rows.
        joined: Whether tensors lie side by side on the wire.
        work: For the kernels that compute; None where nothing is computed.
    """

    name: str
    batch: int
    rows: int
    heads: tuple[int, ...]
    size: int
    ranks: int
    dim: str = "heads"
    layout: str = "BSHD"
    joined: bool = True
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilable form of a kernel.

    Attributes:
        kernel: Name of the jit function in `hp_comm.kernels._triton`.
        case: Text: where it comes from.
        dtype: Of the data: ``bf16``, ``fp16``, ``fp32``.
        signature: Runtime arguments in their order, with Triton's names of types.
        constants: Compile-time arguments.
        aligned: Integer arguments that a launch finds divisible by 16.
        launch: Launch config: tile, and what the compiler takes.
        discrete_expected: Element-wise memory accesses that the layout cannot avoid.
    """

    kernel: str
    case: str
    dtype: str
    signature: Mapping[str, str]
    constants: Mapping[str, int | float | bool]
    aligned: frozenset[str]
    launch: Mapping[str, int]
    discrete_expected: int = 0


def cases(quick: bool) -> Iterator[tuple[str, Case]]:
    """Yield the kernel and a case; one per kernel if ``quick``."""
    plain = Case("Ulysses in, 32:8 heads of 128, 8 ranks", 1, 8192, (32, 8, 8), 128, 8)
    llama = (128, False, False, 1e-6)
    qwen = (128, False, True, 1e-6)
    first = [
        ("pack", plain),
        ("unpack", Case("gradient of MQA on 4 ranks", 1, 2048, (8, 1, 1), 128, 4)),
        ("pack_rotary", Case("QK-norm, rotary", 1, 8192, (32,), 128, 8, work=qwen)),
        ("unpack_rotary", Case("QK-norm, rotary", 1, 8192, (32,), 128, 8, work=qwen)),
        ("merge", Case("two blocks", 1, 4096, (8,), 128, 1)),
        ("merge_backward", Case("two blocks", 1, 4096, (8,), 128, 1)),
    ]
    yield from first
    if quick:
        return
    for name, one in (
        ("BNSD, 2 batches", Case("", 2, 4096, (16, 4, 4), 128, 4, layout="BNSD")),
        ("SBHD", Case("", 2, 4096, (16, 4, 4), 128, 4, layout="SBHD")),
        ("TND", Case("", 1, 4096, (16, 4, 4), 128, 4, layout="TND")),
        ("heads of 80, 3:3:3 per rank", Case("", 2, 1001, (12, 12, 12), 80, 4)),
        ("one tensor, apart", Case("", 1, 8192, (32,), 128, 8, joined=False)),
        ("rows, one tensor", Case("", 2, 8192, (4,), 128, 8, "rows", joined=False)),
        # 16 chunks of 512 rows of latent and rotary part, which have one head
        ("head-tail gather, MLA", Case("", 2, 16, (512,), 576, 8, "chunks", joined=False)),
        ("rows of a gather, BNSD", Case("", 1, 8192, (8,), 128, 8, "rows", "BNSD", joined=False)),
    ):
        named = Case(name, *(getattr(one, f) for f in list(Case.__slots__)[1:]))
        yield "pack", named
        yield "unpack", named
    for name, layout, size, work in (
        ("rotary", "BSHD", 128, llama),
        ("rotary", "BNSD", 128, llama),
        ("norm", "BSHD", 128, (0, False, True, 1e-6)),
        ("half of a head, GLM", "BSHD", 128, (64, True, False, 1e-6)),
        ("norm, part of a head", "TND", 96, (64, False, True, 1e-6)),
    ):
        one = Case(name, 1, 4096, (16,), size, 4, layout=layout, work=work)
        yield "pack_rotary", one
        yield "unpack_rotary", one
    yield "merge", Case("two blocks, heads of 80", 2, 1001, (8,), 80, 1)
    yield "merge_backward", Case("two blocks, heads of 80", 2, 1001, (8,), 80, 1)


def _laid(case: Case, heads: int) -> tuple[Shape, Shape]:
    """Return shape and strides as ``[B, S, H, D]`` of a tensor."""
    order = {"BSHD": (0, 1, 2, 3), "TND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "SBHD": (1, 0, 2, 3)}
    sizes = (case.batch, case.rows, heads, case.size)
    lying = View.dense(tuple(sizes[d] for d in order[case.layout])).stride
    strides = [0] * 4
    for place, dim in enumerate(order[case.layout]):
        strides[dim] = lying[place]
    return sizes, tuple(strides)


def _parts(case: Case, heads: int) -> tuple[list[int], list[int]]:
    """Return how many positions each rank gets, and which, of a tensor."""
    if case.dim == "rows":
        return [case.rows // case.ranks] * case.ranks, list(range(case.rows))
    if case.dim == "chunks":
        return [case.rows // case.ranks] * case.ranks, list(head_tail_chunks(case.ranks))
    if heads % case.ranks:  # fewer KV heads than ranks: each rank gets the one that it needs
        return [1] * case.ranks, [rank * heads // case.ranks for rank in range(case.ranks)]
    return [heads // case.ranks] * case.ranks, list(range(heads))


def layout_of(case: Case) -> tuple[tuple[Shape, ...], tuple[Shape, ...], Cut]:
    """Return shapes and strides of a case's tensors as ``[B, S, H, D]``, and how they are cut.

    The cut is dims, counts, index and joined as in `hp_comm.kernels.layout`.
    """
    shapes, strides = zip(*(_laid(case, heads) for heads in case.heads), strict=True)
    parts = [_parts(case, heads) for heads in case.heads]
    index = [n for _, of_one in parts for n in of_one]
    if all(of_one == list(range(len(of_one))) for _, of_one in parts):
        index = []
    cut = (
        (HEADS_DIM if case.dim == "heads" else ROWS_DIM,) * len(parts),
        tuple(n for counts, _ in parts for n in counts),
        tuple(index),
        (ROWS_DIM, HEADS_DIM) if case.joined else (),
    )
    return shapes, strides, cut


def launches(kernel: str, case: Case, launch: Mapping[str, int]) -> list[Launch]:
    """Return the calls of a kernel in a case."""
    if kernel.startswith("merge"):
        return [merge_launch(case.batch * case.rows * case.heads[0], case.size, launch)]
    shapes, strides, cut = layout_of(case)
    found = copies(shapes, strides, *cut)
    if case.work is None:
        segments = move_segments(found) if kernel == "pack" else sum_segments(found)
        return [move_launch(kernel, bundle, launch) for bundle in bundles(segments)]
    angles = (0, max(case.work[0] // 2, 1), 0, 1)
    alike = [found, copies(shapes, (angles,), *cut)]
    if kernel == "unpack_rotary":
        alike.insert(1, found)
    parallel = list(zip(*alike, strict=True))
    at = 0 if case.joined else ROWS_DIM
    pieces = head_segments(parallel, at, 4, summed=kernel == "unpack_rotary")
    return [head_launch(kernel, one, case.work, launch) for one in pieces]


def variants_of(
    kernel: str, case: Case, dtype: str, launch: Mapping[str, int]
) -> Iterator[Variant]:
    """Yield what a kernel is compiled to in a case."""
    for one in launches(kernel, case, launch):
        names = arguments(kernel)
        constants = {n: one.numbers[n] for n in names if n in one.numbers and n.isupper()}
        runtime = {n: one.numbers[n] for n in names if n in one.numbers and not n.isupper()}
        signature = {n: _type(n, n in runtime, dtype) for n in names if n not in constants}
        aligned = frozenset(n for n, value in runtime.items() if n != "eps" and value % 16 == 0)
        yield Variant(kernel, case.name, dtype, signature, constants, aligned, dict(launch))


def _type(name: str, is_number: bool, dtype: str) -> str:
    """Return Triton's name of an argument's type."""
    if is_number:
        return "fp32" if name == "eps" else "i32"
    if name == "table":
        return "*i64"
    return "*fp32" if name in FLOAT else f"*{dtype}"


def variants(quick: bool, device: str = "ascend") -> Iterator[Variant]:
    """Yield every kernel in every case and dtype with the default launch of a device."""
    for kernel, case in cases(quick):
        for dtype in ("bf16",) if quick else DTYPES:
            yield from variants_of(kernel, case, dtype, default_launch(device))
