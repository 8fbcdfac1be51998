"""The attention block that is measured, in every mode, and its pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import emulated
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_cp import AsyncContextParallel, ContextParallel
from hp_mesh.testing import randn

FAMILIES: dict[str, int | None] = {"ulysses": None, "hybrid": 2, "colossal": 1}
"""Ulysses degree of each; with 2, heads are traded inside a host and gathered between hosts."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the block, all ranks together; batch is 1."""

    seq: int
    heads: int
    head_size: int
    hidden: int

    @property
    def width(self) -> int:
        """Return the size of all heads together."""
        return self.heads * self.head_size


@dataclass(frozen=True)
class Mode:
    """A way to exchange: ``kind`` is sync, async or groups."""

    family: str
    kind: str
    groups: int = 1

    @property
    def name(self) -> str:
        """Return the mode as the table calls it."""
        return self.kind if self.groups == 1 else f"{self.groups} head groups"


class Core(nn.Module):
    """Causal attention as a model writes it, ``[B, S, H, D]``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, ``[B, S, H, D]``."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Projections, attention, output projection; weights are the same on all ranks."""

    def __init__(self, sizes: Sizes, *, emulate: int = 0) -> None:
        """Make the block; ``emulate`` is the number of ranks if it is to sleep, not compute."""
        super().__init__()
        self.shape = (sizes.heads, sizes.head_size)
        self.emulate = emulate
        into, out_of = (sizes.hidden, sizes.width), (sizes.width, sizes.hidden)
        self.q_proj, self.k_proj, self.v_proj = (self._linear(*into) for _ in range(3))
        self.core = self.new_core(sizes)
        self.o_proj = self._linear(*out_of)
        with torch.no_grad():
            for seed, weight in enumerate(self.parameters()):
                random = randn(*weight.shape, seed=seed, dtype=torch.float32)
                weight.copy_(random / weight.size(1) ** 0.5)

    def _linear(self, width_in: int, width_out: int) -> nn.Module:
        if self.emulate:
            return emulated.Projection()
        return nn.Linear(width_in, width_out, bias=False)

    def new_core(self, sizes: Sizes) -> nn.Module:
        """Return attention without a boundary."""
        if self.emulate:
            return emulated.Core(sizes.seq * sizes.width // self.emulate)
        return Core()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x``, both ``[B, S/P, hidden]``."""
        q, k, v = (
            projection(x).unflatten(-1, self.shape)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        output: Tensor = self.o_proj(self.core(q, k, v).flatten(2))
        return output


def build(mode: Mode, sizes: Sizes, mesh: DeviceMesh, *, emulate: bool) -> Block:
    """Return the block with its attention made parallel as ``mode`` says."""
    block = Block(sizes, emulate=mesh.size() if emulate else 0)
    degree = FAMILIES[mode.family]
    if mode.kind == "sync":
        ContextParallel(ulysses_degree=degree, use_local_input=emulate).apply(block.core, mesh)
        return block
    style = AsyncContextParallel(
        ulysses_degree=degree, use_local_input=emulate, head_groups=mode.groups
    )
    handed_off = (
        {}
        if mode.kind == "groups"
        else {f"{x}_proj": block.get_submodule(f"{x}_proj") for x in "qkv"}
    )
    style.apply(block.core, mesh, **handed_off)
    return block


def step(block: nn.Module, x: Tensor, upstream: Tensor) -> Tensor:
    """Run forward and backward from fresh gradients; return the output."""
    x.grad = None
    block.zero_grad(set_to_none=True)
    output: Tensor = block(x)
    output.backward(upstream)
    return output.detach()


def local_pieces(
    family: str, sizes: Sizes, mesh: DeviceMesh, groups: Sequence[int], *, emulate: bool
) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """Return the compute pieces: each a forward to call, and the gradient to call backward with.

    Attention pieces carry the packing of their exchange; run them with the wires cut.
    """
    rows = sizes.seq // mesh.size()
    block = Block(sizes, emulate=mesh.size() if emulate else 0)
    x = torch.randn(1, rows, sizes.hidden, requires_grad=True)
    heads = torch.randn(1, rows, sizes.width, requires_grad=True)
    pieces: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "projection": (lambda: block.q_proj(x), torch.randn(1, rows, sizes.width)),
        "output": (lambda: block.o_proj(heads), torch.randn(1, rows, sizes.hidden)),
    }
    for count in groups:
        core = block.new_core(sizes)
        style = ContextParallel(ulysses_degree=FAMILIES[family], use_local_input=emulate)
        style.apply(core, mesh)
        shape = (1, rows, sizes.heads // count, sizes.head_size)
        qkv = [torch.randn(*shape, requires_grad=True) for _ in range(3)]

        def attend(core: nn.Module = core, qkv: list[Tensor] = qkv) -> Tensor:
            output: Tensor = core(*qkv)
            return output

        pieces[f"attention/{count}"] = (attend, torch.randn(*shape))
    return pieces
