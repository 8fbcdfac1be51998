"""Layers of a job with and without their styles, and what the styles are to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from hp_tune.measured.dense import DenseLayer, DenseParts
from hp_tune.measured.request import JobRequest, LayerShape, StyleCall

__all__ = ["DTYPES", "Cut", "Parts", "Step", "expected_traffic", "make_layer", "make_parts"]

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip

ALSO_DESCRIBED = ("kv_chunks", "sliding_window", "sink_tokens")
"""Arguments of a style that its plan's description takes under the same name."""

Totals: TypeAlias = Mapping[str, tuple[int, int]]
Parts: TypeAlias = nn.Module
"""The projections of one kind of layer: `DenseParts` or `SparseParts`."""


@dataclass(frozen=True)
class Cut:
    """Which rows of a sequence a rank holds.

    Attributes:
        seq_len: Tokens of the whole sequence.
        rank, size: CP rank and CP ranks.
        layout: Of q, k and v; hidden states are ``[S, B, hidden]`` for SBHD, ``[S, hidden]`` for
            TND, else ``[B, S, hidden]``.
    """

    seq_len: int
    rank: int = 0
    size: int = 1
    layout: str = "BSHD"

    @property
    def seq_dim(self) -> int:
        """Sequence dim of hidden states."""
        return 0 if self.layout in ("SBHD", "TND") else 1

    def shape(self, batch: int, hidden: int) -> tuple[int, ...]:
        """Return the shape of this rank's hidden states."""
        rows = self.seq_len // self.size
        if self.layout == "TND":
            return (rows, hidden)
        return (rows, batch, hidden) if self.layout == "SBHD" else (batch, rows, hidden)

    def take(self, whole: Tensor, dim: int | None = None) -> Tensor:
        """Return this rank's part."""
        from hp_mesh.sequence import shard_sequence

        dim = self.seq_dim if dim is None else dim
        return shard_sequence(whole, (self.rank, self.size), seq_dim=dim)

    def positions(self, device: torch.device) -> Tensor:
        """Return where this rank's rows lie, ``[S/P]``."""
        return self.take(torch.arange(self.seq_len, device=device), 0)


@dataclass
class Step:
    """One layer with its rows: forward and backward of it is what is timed."""

    layer: Any
    shape: LayerShape
    cut: Cut
    recompute: bool = False
    positions: Tensor | None = field(default=None, init=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and loss, which is None in a layer without an indexer's."""
        if self.recompute:
            found: tuple[Tensor, Tensor | None] = checkpoint(self._run, x, use_reentrant=False)
            return found
        return self._run(x)

    def backward(self, out: Tensor, loss: Tensor | None, upstream: Tensor) -> None:
        """Run backward with ``upstream`` as the gradient of ``out``."""
        if loss is None:
            out.backward(upstream)  # type: ignore[no-untyped-call]
        else:
            tensors, gradients = [out, loss], [upstream, torch.ones_like(loss)]
            torch.autograd.backward(tensors, gradients)

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.layer, DenseLayer):
            return self.layer(x), None
        if self.positions is None:
            self.positions = self.cut.positions(x.device)
        found: tuple[Tensor, Tensor | None] = self.layer(x, self.positions, self.cut.seq_len)
        return found


def make_parts(hidden: int, shape: LayerShape, like: Tensor, seed: int) -> Parts:
    """Return a layer's projections, the same on every rank, of dtype and device of ``like``."""
    if shape.is_sparse:
        from hp_tune.measured.sparse import SparseParts

        parts: Parts = SparseParts(hidden, shape, like)
    else:
        parts = DenseParts(hidden, shape, like)
    generator = torch.Generator(like.device).manual_seed(seed)
    with torch.no_grad():
        for weight in parts.parameters():
            weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
    return parts


def make_layer(
    parts: Parts, request: JobRequest, style: StyleCall | None, mesh: DeviceMesh | None
) -> Any:
    """Return a layer around ``parts``, under the styles of a configuration or under none."""
    if isinstance(parts, DenseParts):
        layer = DenseLayer(parts, request.layout, request.causal)
        if style is not None:
            _put_dense(layer, style, mesh)
        return layer
    from hp_tune.measured.sparse import SparseLayer, SparseParts

    assert isinstance(parts, SparseParts), "one of the two"
    sparse = SparseLayer(parts, request.layout)
    if style is not None:
        _put_sparse(sparse, style, mesh)
    return sparse


def _put_dense(layer: DenseLayer, style: StyleCall, mesh: Any) -> None:
    import hp_cp

    shape = layer.parts.shape
    named = style.of(shape)
    kwargs = named.kwargs
    made = getattr(hp_cp, named.name)(**kwargs)
    handoffs = {}
    if style.sends_ahead(shape) and kwargs.get("head_groups", 1) == 1:
        handoffs = {f"{name}_proj": layer.handoffs[name] for name in "qkv"}
    made.apply(layer.core, mesh, **handoffs)


def _put_sparse(layer: Any, style: StyleCall, mesh: Any) -> None:
    import hp_dsa

    has_indexer = layer.parts.shape.has_indexer
    if has_indexer:  # keys that attention and indexer have gathered serve the loss too
        hp_dsa.DSAGatherCache().apply(layer)
    latent, rope, key = (layer.handoffs[name] for name in ("latent", "rope", "index_key"))
    handoffs: dict[str, dict[str, Any]] = {"indexer": {}, "attention": {}, "indexer_loss": {}}
    if style.overlap:
        handoffs["indexer"] = {"key_handoff": key}
        handoffs["attention"] = {"key_handoff": latent, "value_handoff": latent}
        handoffs["attention"]["key_rope_handoff"] = rope
    modules = {"attention": layer.attention}
    if has_indexer:
        modules |= {"indexer": layer.indexer, "indexer_loss": layer.loss}
    for at, module in modules.items():
        named = style.sparse[at]
        getattr(hp_dsa, named.name)(**named.kwargs).apply(module, mesh, **handoffs[at])


def expected_traffic(
    shape: LayerShape, request: JobRequest, style: StyleCall, *, seq_len: int, batch: int,
    element_size: int, rank: int,
) -> dict[str, tuple[int, int]]:  # fmt: skip
    """Return ``{kind: (calls, bytes)}`` of a step of one layer on a CP rank, from its plan."""
    sizes = {"seq_len": seq_len, "batch": batch, "element_size": element_size, "rank": rank}
    rows = _sparse_rows(shape, request, style, sizes) if shape.is_sparse else None
    if rows is None:
        rows = _dense_rows(shape, request, style, sizes)
    found: dict[str, tuple[int, int]] = {}
    for phase, kind, calls, sent in rows:
        # under recomputation a layer's forward runs once more in backward
        times = 2 if request.recompute and phase == "forward" else 1
        before = found.get(kind, (0, 0))
        found[kind] = (before[0] + times * calls, before[1] + times * sent)
    return {kind: both for kind, both in sorted(found.items()) if both[0]}


Row: TypeAlias = tuple[str, str, int, int]


def _dense_rows(
    shape: LayerShape, request: JobRequest, style: StyleCall, sizes: Mapping[str, Any]
) -> Sequence[Row]:
    from hp_cp.plan import make_plan

    given = style.of(shape).kwargs
    plan = make_plan(
        request.cp_size,
        given["ulysses_degree"],
        given.get("load_balance", False),
        balance_hybrid=given.get("balance_hybrid", False),
    )
    groups = given.get("head_groups", 1)
    described = plan.describe(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        v_head_size=shape.v_head_size,
        overlap=style.sends_ahead(shape) and groups == 1,
        head_groups=groups,
        # what is recomputed is gathered again anyway
        keep_kv=given.get("keep_kv", True) or request.recompute,
        **{name: given[name] for name in ALSO_DESCRIBED if name in given},
        **sizes,
    )
    return [(row.phase, row.kind, row.count, row.bytes_sent) for row in described.collectives]


def _sparse_rows(
    shape: LayerShape, request: JobRequest, style: StyleCall, sizes: Mapping[str, Any]
) -> Sequence[Row]:
    from hp_dsa.plan import make_plan

    given = style.sparse["indexer"].kwargs
    described = make_plan(
        request.cp_size,
        layout=given["layout"],
        load_balance=given.get("load_balance", False),
        order=given.get("order"),
    ).describe(
        latent=(shape.latent_size or 0) - shape.rope_size,
        rope=shape.rope_size,
        index_dim=shape.index_head_size,
        index_heads=shape.index_heads,
        topk=shape.index_topk or 1,
        keep_keys=given.get("keep_keys", True) or request.recompute,
        **sizes,
    )
    return [
        # two handoffs, latent and rotary part, are two exchanges of the same bytes
        (row.phase, row.kind, 2 if style.overlap and "|" in row.what else 1, row.bytes_sent)
        for row in described.collectives
        if shape.has_indexer or row.boundary == "attention"
    ]
