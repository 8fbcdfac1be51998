"""K and V in parts on 8 gloo ranks of Colossal: what is in memory at once, against the full gather.

One row per number of parts, ``n = 1`` the full gather. ``forward`` and ``backward`` are the most
bytes that operators held on the last rank, which sees most keys, in units of K and V of the whole
sequence. Without the tensors of q's size (the output and a block of it; in backward the gradients
and a block of q's) it is ``kv forward`` and ``kv backward``: K and V, in backward with their
gradients, and what is on the wire. ``allowed`` is ``2 / n + 0.1``. A row is checked if output and
gradients are those of one process, the bytes sent those of `Plan.describe`, and ``kv`` within what
is allowed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_comm import traffic
from hp_cp import ContextParallel, init_device_mesh, make_plan
from hp_mesh.testing import assert_close, peak_memory, randn, ranks

RANKS, BATCH, SEQ, HEADS, HEAD_SIZE = 8, 2, 768, 8, 32
ELEMENT = 8
CASES = [(causal, n) for causal in (True, False) for n in (1, 4, 8)]


class Core(nn.Module):
    """Fused attention as a model writes it, ``[B, S, H, D]``."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, ``[B, S, H, D]``."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)


def run(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each mode and number of parts; the least of ``rounds`` peaks counts."""
    pool = ranks(RANKS)
    rows = []
    for causal, n in CASES:
        results = pool.run(measure, causal, n, rounds, timeout=300.0)
        last, allowed = results[-1], 2 / n + 0.1
        fits = n == 1 or max(last["kv forward"], last["kv backward"]) <= allowed
        rows.append(
            {
                "case": f"{'causal' if causal else 'full'}, n = {n}",
                **{name: value for name, value in last.items() if name != "checked"},
                "allowed": allowed,
                "checked": all(one["checked"] for one in results) and fits,
            }
        )
    return rows


def measure(rank: int, causal: bool, n: int, rounds: int) -> dict[str, Any]:
    """Hold one call against one process, and return its peaks."""
    whole = [randn(BATCH, SEQ, HEADS, HEAD_SIZE, seed=i).requires_grad_() for i in range(3)]
    up = randn(BATCH, SEQ, HEADS, HEAD_SIZE, seed=9)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    module = ContextParallel(ulysses_degree=1, kv_chunks=n).apply(Core(causal), mesh)

    def mine(x: Tensor) -> Tensor:
        return x.detach().chunk(RANKS, 1)[rank].clone()

    expected = Core(causal)(*whole)
    expected.backward(up)
    local, upstream = [mine(x).requires_grad_() for x in whole], mine(up)
    with traffic() as sent:
        out = module(*local)
        out.backward(upstream)
    assert_close(out, mine(expected))
    for x, full in zip(local, whole, strict=True):
        assert full.grad is not None
        assert_close(x.grad, mine(full.grad), kind="grad")
    planned = make_plan(RANKS, 1).describe(
        num_heads=HEADS, num_kv_heads=HEADS, seq_len=SEQ, head_size=HEAD_SIZE, batch=BATCH,
        element_size=ELEMENT, rank=rank, kv_chunks=n,
    )  # fmt: skip
    counted = {kind: both for kind, both in sent.summary().items() if kind != "preflight"}
    found: dict[str, Any] = {"bytes": planned.bytes(), "checked": counted == planned.totals()}

    both = 2 * BATCH * SEQ * HEADS * HEAD_SIZE * ELEMENT
    of_q = BATCH * (SEQ // RANKS) * HEADS * HEAD_SIZE * ELEMENT
    peaks: list[tuple[int, int]] = []
    for _ in range(max(rounds, 3)):
        for x in local:
            x.grad = None
        if rank < RANKS - 1:
            module(*local).backward(upstream)
            continue
        with peak_memory() as forward:
            out = module(*local)
        with peak_memory() as backward:
            out.backward(upstream)
        peaks.append((forward.peak, backward.peak))
    if peaks:
        ahead, back = (min(one) for one in zip(*peaks, strict=True))
        found |= {
            "forward": ahead / both,
            "backward": back / both,
            "kv forward": (ahead - 2 * of_q) / both,
            "kv backward": (back - 4 * of_q) / both,
        }
    return found


if torch.get_num_threads() > 1:  # ranks are threads
    torch.set_num_threads(1)
