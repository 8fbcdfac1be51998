"""ring-flash-attn: its ring, over a stand-in for the CUDA package that it imports.

Its backward keeps running sums in what ``.to(float32)`` returned, which in fp32 is the scratch
buffer itself, and it returns dq in bf16. So in fp32 its gradients are wrong; the check must say so.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

from torch import Tensor
from torch.distributed import ProcessGroup

from peers.adapters.bare import import_bare
from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention_with_lse, attention_with_lse_backward

__all__ = ["CONTENDERS"]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """Compute one block, ``[B, S, H, D]``, as the CUDA package's function of this name does."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = attention_with_lse(q, k, v, causal=causal, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    rng_state: None = None,
) -> None:
    """Write the gradients of one block into ``dq``, ``dk`` and ``dv``."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    found = attention_with_lse_backward(
        dout, q, k, v, out, softmax_lse.contiguous(), causal=causal, scale=softmax_scale
    )
    for buffer, gradient in zip((dq, dk, dv), found, strict=True):
        buffer.copy_(gradient.transpose(1, 2))


@functools.cache
def _package() -> ModuleType:
    """Import the package with our functions in the place of ``flash_attn``."""
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _forward  # type: ignore[attr-defined]
    interface._flash_attn_backward = _backward  # type: ignore[attr-defined]
    stand_in = ModuleType("flash_attn")
    stand_in.flash_attn_interface = interface  # type: ignore[attr-defined]
    names = {"flash_attn": stand_in, "flash_attn.flash_attn_interface": interface}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        # its __init__ patches Hugging Face models
        return import_bare("ring_flash_attn.ring_flash_attn")
    finally:  # nobody else may take the stand-in for the real package
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _build(case: Case, group: ProcessGroup) -> Attention:
    ring = _package().ring_flash_attn_func

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = ring(q, k, v, causal=case.causal, group=group)
        return output

    return run


CONTENDERS = (Contender("ring-flash-attn ring (stand-in kernel)", _build),)
