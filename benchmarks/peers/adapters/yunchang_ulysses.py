"""yunchang (USP): its Ulysses layer, around our kernel, because its own needs CUDA."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention

__all__ = ["CONTENDERS"]


def _build(case: Case, group: ProcessGroup) -> Attention:
    ulysses = importlib.import_module("yunchang.ulysses.attn_layer")
    kernels = importlib.import_module("yunchang.kernels")
    layer = ulysses.UlyssesAttention(group, attn_type=kernels.AttnType.TORCH_FLASH)

    def stand_in(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: Any) -> Tensor:
        return attention(q, k, v, causal=causal)

    layer.attn_fn = stand_in  # whatever the type asked for, backward is CUDA only

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = layer(q, k, v, causal=case.causal)
        return output

    return run


CONTENDERS = (Contender("yunchang Ulysses (stand-in kernel)", _build),)
