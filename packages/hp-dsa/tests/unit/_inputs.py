"""Inputs of the operators: exact ones for values worked out by hand, random ones to compare."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hp_dsa import ops
from hp_mesh.testing import randn


def det(*shape: int, a: int, b: int, m: int) -> Tensor:
    """Return ``(((a i + b) mod m) - (m - 1) / 2) / ((m - 1) / 2)`` for the flat position i."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return ((((a * i + b) % m) - (m - 1) / 2) / ((m - 1) / 2)).view(shape)


@dataclass
class Inputs:
    """Tensors of all operators for one call, BSND or TND."""

    q: Tensor
    k: Tensor
    qr: Tensor
    kr: Tensor
    qi: Tensor
    ki: Tensor
    w: Tensor
    do: Tensor
    scale: float = 0.5
    layout: str = "BSND"
    mode: int = 3
    query_lengths: Any = None
    key_lengths: Any = None
    value: Tensor | None = field(default=None)

    def leaves(self, *names: str) -> dict[str, Tensor]:
        """Make the named tensors leaves that collect gradients, and return them."""
        for name in names:
            setattr(self, name, getattr(self, name).detach().clone().requires_grad_())
        return {name: getattr(self, name) for name in names}

    def indexer(self, count: int, **options: Any) -> tuple[Tensor, Tensor]:
        return ops.lightning_indexer(
            self.qi,
            self.ki,
            self.w,
            actual_seq_lengths_query=self.query_lengths,
            actual_seq_lengths_key=self.key_lengths,
            layout_query=self.layout,
            layout_key=self.layout,
            sparse_count=count,
            sparse_mode=self.mode,
            **options,
        )

    def attention(self, indices: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        return ops.sparse_flash_attention(
            self.q,
            self.k,
            self.k if self.value is None else self.value,
            indices,
            self.scale,
            actual_seq_lengths_query=self.query_lengths,
            actual_seq_lengths_kv=self.key_lengths,
            query_rope=self.qr,
            key_rope=self.kr,
            layout_query=self.layout,
            layout_kv=self.layout,
            sparse_mode=self.mode,
            attention_mode=2,
            return_softmax_lse=True,
            **options,
        )

    def sparse(self, indices: Tensor, m: Tensor, z: Tensor, *, grad: bool = False) -> Any:
        operator = (
            ops.sparse_lightning_indexer_grad_kl_loss
            if grad
            else ops.sparse_lightning_indexer_kl_loss
        )
        return operator(
            self.q,
            self.k,
            self.qi,
            self.ki,
            self.w,
            indices,
            m,
            z,
            self.scale,
            query_rope=self.qr,
            key_rope=self.kr,
            **self._lengths(),
        )

    def index_lse(self) -> tuple[Tensor, Tensor]:
        return ops.dense_lightning_indexer_softmax_lse(self.qi, self.ki, self.w, **self._lengths())

    def dense(self, m: Tensor, z: Tensor, *, grad: bool = False) -> Any:
        operator = (
            ops.dense_lightning_indexer_grad_kl_loss
            if grad
            else ops.dense_lightning_indexer_kl_loss
        )
        return operator(
            self.q,
            self.k,
            self.qi,
            self.ki,
            self.w,
            m,
            z,
            *self.index_lse(),
            self.scale,
            query_rope=self.qr,
            key_rope=self.kr,
            **self._lengths(),
        )

    def _lengths(self) -> dict[str, Any]:
        return {
            "actual_seq_qlen": self.query_lengths,
            "actual_seq_klen": self.key_lengths,
            "layout": self.layout,
            "sparse_mode": self.mode,
        }


def base(S: int, S2: int | None = None, *, layout: str = "BSND", **changes: Any) -> Inputs:
    """Return the exact inputs: B 1, 2 heads of 4 and 2, 2 index heads of 4; value is the key."""
    lead, keys = ((1, S), (1, S2 or S)) if layout == "BSND" else ((S,), (S2 or S,))
    return Inputs(
        q=det(*lead, 2, 4, a=37, b=11, m=17),
        k=det(*keys, 1, 4, a=29, b=5, m=19),
        qr=det(*lead, 2, 2, a=23, b=3, m=13),
        kr=det(*keys, 1, 2, a=31, b=7, m=11),
        qi=det(*lead, 2, 4, a=41, b=2, m=23),
        ki=det(*keys, 1, 4, a=43, b=9, m=29),
        w=det(*lead, 2, a=47, b=13, m=15),
        do=det(*lead, 2, 4, a=53, b=1, m=21),
        layout=layout,
        **changes,
    )


@dataclass(frozen=True)
class Case:
    """Sizes of random inputs."""

    S: int
    S2: int
    B: int = 2
    heads: int = 4
    kv_heads: int = 1
    index_heads: int = 3
    D: int = 10
    Dr: int = 6
    DI: int = 12
    K: int = 5
    mode: int = 3
    layout: str = "BSND"
    query_lengths: Any = None
    key_lengths: Any = None
    strided: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def id(self) -> str:
        documents = "" if self.query_lengths is None else f"-docs{len(self.query_lengths)}"
        return (
            f"{self.layout}-B{self.B}-S{self.S}x{self.S2}-N{self.heads}:{self.kv_heads}"
            f"-I{self.index_heads}-K{self.K}-mode{self.mode}{documents}"
            f"{'-strided' if self.strided else ''}"
        )

    def inputs(self) -> Inputs:
        tnd = self.layout == "TND"
        lead, keys = ((self.S,), (self.S2,)) if tnd else ((self.B, self.S), (self.B, self.S2))
        shapes = {
            "q": (*lead, self.heads, self.D),
            "k": (*keys, self.kv_heads, self.D),
            "qr": (*lead, self.heads, self.Dr),
            "kr": (*keys, self.kv_heads, self.Dr),
            "qi": (*lead, self.index_heads, self.DI),
            "ki": (*keys, 1, self.DI),
            "w": (*lead, self.index_heads),
            "do": (*lead, self.heads, self.D),
        }
        tensors = {
            name: self._draw(shape, seed) for seed, (name, shape) in enumerate(shapes.items())
        }
        return Inputs(
            **tensors,
            scale=0.31,
            layout=self.layout,
            mode=self.mode,
            query_lengths=self.query_lengths,
            key_lengths=self.key_lengths,
        )

    def _draw(self, shape: tuple[int, ...], seed: int) -> Tensor:
        if not self.strided:
            return randn(*shape, seed=seed, dtype=self.dtype)
        # every other row of a tensor whose last two dims lie the other way round
        sequence = 0 if self.layout == "TND" else 1
        wide = list(shape)
        wide[sequence] *= 2
        wide[-1], wide[-2] = wide[-2], wide[-1]
        drawn = randn(*wide, seed=seed, dtype=self.dtype)
        if len(wide) - 2 == sequence - 1:  # weights without a head size
            return randn(*shape[:-1], 2 * shape[-1], seed=seed, dtype=self.dtype)[..., ::2]
        drawn = drawn.transpose(-1, -2)
        return drawn[::2] if sequence == 0 else drawn[:, ::2]


def attention_statistics(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return dense causal attention's statistics ``[B, N2, S1, G]`` for BSND inputs."""
    group = x.q.shape[2] // x.k.shape[2]
    k, kr = (t.repeat_interleave(group, 2) for t in (x.k, x.kr))
    scores = torch.einsum("bqnd,bknd->bnqk", x.q, k) + torch.einsum("bqnd,bknd->bnqk", x.qr, kr)
    S1, S2 = scores.shape[-2:]
    if x.mode == 3:
        hidden = torch.ones(S1, S2).triu(S2 - S1 + 1).bool()
        scores = scores.masked_fill(hidden, -math.inf)
    scores = x.scale * scores
    m = scores.amax(-1)
    z = (scores - m[..., None]).exp().sum(-1)
    return tuple(t.unflatten(1, (x.k.shape[2], group)).transpose(2, 3).contiguous() for t in (m, z))  # type: ignore[return-value]
