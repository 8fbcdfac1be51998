"""DeepSpeed: DistributedAttention, and ALST's module for Hugging Face models."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention

__all__ = ["CONTENDERS"]


@functools.cache
def _start() -> None:
    """Put DeepSpeed on the process group that is there, without compiling its shared-memory op."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    backend = importlib.import_module("deepspeed.comm.torch")
    # the op is for reductions only, and its build waits for ever on a lock that was left behind
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    importlib.import_module("deepspeed.comm").init_distributed("gloo", verbose=False)


def _distributed_attention(case: Case, group: ProcessGroup) -> Attention:
    _start()
    layer = importlib.import_module("deepspeed.sequence.layer")
    wrapped = layer.DistributedAttention(
        functools.partial(attention, causal=case.causal), group, scatter_idx=2, gather_idx=1
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = wrapped(q, k, v, 0)
        return output

    return run


def _alst(case: Case, group: ProcessGroup) -> Attention:
    _start()
    alst = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")

    def core(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, S, D] -> [B, S, H, D]
        return attention(q, k, v, causal=case.causal), None

    wrapped = alst.UlyssesSPAttentionHF(
        core,
        batch_size=case.batch,
        attn_head_count=case.heads,
        attn_head_size=case.head_size,
        kv_head_count=case.kv_heads,
        num_hidden_layers=1,
        process_group=group,
        local_seq_length=case.local_seq,
        global_seq_length=case.seq,
    )
    start = group.rank() * case.local_seq
    positions = torch.arange(start, start + case.local_seq).expand(case.batch, -1).contiguous()
    module = nn.Module()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        output, _ = wrapped(module, *heads_first, None, position_ids=positions)
        rows: Tensor = output.view(q.shape)
        return rows

    return run


CONTENDERS = (
    Contender("DeepSpeed DistributedAttention", _distributed_attention),
    Contender("DeepSpeed ALST", _alst),
)
