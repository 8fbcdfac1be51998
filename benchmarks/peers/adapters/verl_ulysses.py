"""verl: the two functions that its patched models call around attention."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from peers.adapters.bare import import_bare
from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention

__all__ = ["CONTENDERS"]


def _build(case: Case, group: ProcessGroup) -> Attention:
    verl = import_bare("verl.utils.ulysses")  # verl/__init__ starts ray
    # verl repeats KV heads that are fewer than ranks before it trades them
    repeats = max(case.ranks // case.kv_heads, 1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        q, k, v = (
            verl.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2, group=group) for x in (q, k, v)
        )
        out = attention(q, k, v, causal=case.causal)
        output: Tensor = verl.gather_heads_scatter_seq(out, head_dim=2, seq_dim=1, group=group)
        return output

    return run


CONTENDERS = (Contender("verl ulysses", _build),)
