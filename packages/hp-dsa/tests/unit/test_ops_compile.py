"""The Triton kernels compile for a GPU that is not here, at DeepSeek-V3.2's sizes, and fit it.

Needs a triton that can be imported and is not interpreting; `nox -s cuda_compile` runs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no triton here; nox -s cuda_compile runs it")
# under the interpreter jit functions are plain Python; nox -s cuda_compile runs this without it
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hp_dsa.ops import _triton, launch

SHARED = 227 * 1024  # bytes that a program may have on sm_90
INDEX = {"HEADS": 64, "BLOCK_D": 128}
BUFFERS = {"maximum", "total", "delta", "d_k", "d_v", "d_k_rope", "d_scores", "d_w"}
NUMBERS = {"indices", "starts", "counts", "ends"}


def latent(dtype: torch.dtype) -> dict[str, Any]:
    """The constants that `launch` gives to attention's kernels for 128 heads."""
    one = torch.empty(1, 128, 512, dtype=dtype, device="meta")
    rope = torch.empty(1, 128, 64, dtype=dtype, device="meta")
    flat = launch._Flat(one, one[:, 0], None, rope, rope[:, 0])
    return {**launch._constants(flat), "BLOCK": 1, "BLOCK_HEADS": launch._head_block(128)}


def options_of(name: str, dtype: torch.dtype) -> dict[str, Any]:
    if name == "index_scores":
        return {**INDEX, "BLOCK_ROWS": 64, "BLOCK_KEYS": 64}
    if name == "index_scores_backward_rows":
        return {"BLOCK_D": 128, "BLOCK_ROWS": 32, "BLOCK_KEYS": 64}
    if name == "index_scores_backward_keys":
        return {**INDEX, "BLOCK_ROWS": 64, "BLOCK_KEYS": 32}
    return {**latent(dtype), "N": 128} if name.endswith("keys") else latent(dtype)


def pointer(name: str, argument: str, element: str) -> str:
    if argument == "scale":
        return "fp32"
    if argument in NUMBERS:
        return "*i32"
    if argument in BUFFERS or (name.startswith("index") and argument in ("out", "d_q")):
        return "*fp32"
    tensors = {"q", "k", "v", "w", "q_rope", "k_rope", "out", "d_out", "d_q", "d_q_rope"}
    return f"*{element}" if argument in tensors else "i32"


KERNELS = [
    "index_scores",
    "index_scores_backward_rows",
    "index_scores_backward_keys",
    "sparse_attention",
    "sparse_attention_backward_rows",
    "sparse_attention_backward_keys",
]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_for_sm_90_and_fits_its_shared_memory(name: str) -> None:
    kernel: Callable[..., None] = getattr(_triton, name)
    constants = options_of(name, torch.bfloat16)
    launched = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
    names = kernel.arg_names  # type: ignore[attr-defined]
    signature = {n: "constexpr" if n in constants else pointer(name, n, "bf16") for n in names}
    places = {(i,): constants[n] for i, n in enumerate(names) if n in constants}

    compiled = triton.compile(
        ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options=launched
    )

    assert compiled.metadata.shared <= SHARED
    assert "mma" in compiled.asm["ptx"], "products run on tensor cores"
