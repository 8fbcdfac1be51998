"""ColossalAI: the all-to-all of its sequence-parallel shard policies."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from peers.adapters.bare import import_bare
from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention

__all__ = ["CONTENDERS"]


def _build(case: Case, group: ProcessGroup) -> Attention:
    # the packages on the way import CUDA extensions and quantization libraries
    for module in ("quantization.fp8", "pipeline.weight_grad_store"):
        import_bare(f"colossalai.{module}")
    exchange = import_bare("colossalai.shardformer.layer._operation").all_to_all_comm

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (exchange(x, group, scatter_dim=2, gather_dim=1) for x in (q, k, v))
        out = attention(q, k, v, causal=case.causal)
        output: Tensor = exchange(out, group, scatter_dim=1, gather_dim=2)
        return output

    return run


CONTENDERS = (Contender("ColossalAI all_to_all_comm", _build),)
