"""axolotl-ringmaster: Ulysses through its registry, and its two rings.

On gloo its all-to-all is an all-gather, four times the bytes at 4 ranks: that is said in the name.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from peers.cases import Case
from peers.contender import Attention, Contender
from peers.kernel import attention

__all__ = ["CONTENDERS"]

KERNEL = "bench_peers"


def _ulysses(case: Case, group: ProcessGroup) -> Attention:
    ringmaster = importlib.import_module("ringmaster")
    interface = importlib.import_module("transformers").AttentionInterface

    def core(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, S, D] -> [B, S, H, D]
        return attention(q, k, v, causal=case.causal), None

    interface.register(KERNEL, core)
    config = ringmaster.RingmasterConfig(
        size=case.ranks, backend=ringmaster.Backend.ULYSSES, ulysses_size=case.ranks, ring_size=1
    )
    runtime = ringmaster.setup(
        config, num_kv_heads=case.kv_heads, device_type="cpu", inner_attn=KERNEL
    )
    wrapped = interface()[runtime.attn_implementation]
    module = nn.Module()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        # its state is one for the process, and another contender may have set it
        ringmaster.set_runtime(runtime)
        output: Tensor = wrapped(module, *heads_first, None, is_causal=case.causal)[0]
        return output

    return run


def _block(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scaling: float | None, **_: Any
) -> tuple[Tensor, None]:
    """Attend to a prefix of the keys that ends where the queries end, as its blocks do."""
    rows, columns = q.shape[1], k.shape[1]
    mask = None
    if causal:
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def _ring(case: Case, group: ProcessGroup, *, rotate: str, provider: str) -> Attention:
    loop = importlib.import_module("ringmaster.ring.loop")
    method = importlib.import_module("ringmaster.config").RotateMethod(rotate)
    loop.PROVIDERS[KERNEL] = _block

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output: Tensor = loop.ring_attention(
            q,
            k,
            v,
            group=group,
            causal=case.causal,
            scaling=None,
            dropout=0.0,
            provider=provider,
            rotate_method=method,
            attn_implementation="math",
        )
        return output

    return run


CONTENDERS = (
    Contender("ringmaster Ulysses (all-gather on gloo)", _ulysses),
    Contender(
        "ringmaster ring allgather (stand-in kernel)",
        functools.partial(_ring, rotate="allgather", provider=KERNEL),
    ),
    Contender(
        "ringmaster ring p2p (its math kernel)",
        functools.partial(_ring, rotate="alltoall", provider="math"),
    ),
)
