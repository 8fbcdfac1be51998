"""Gather keys, each of them once: packed where they fit, and known again when they come back.

Two tensors that show the same data (``value`` that is ``key``; the latent of attention in the loss,
detached or not) are gathered once. What differs is where their gradients go:

=====================================  ===========================================================
the second                             gets
=====================================  ===========================================================
needs no gradient                      the gathered data without graph
passes its gradient to the same place  the same tensor: one reduce-scatter for both
passes it elsewhere                    the data with a reduce-scatter of its own behind it
=====================================  ===========================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_comm import gather_seq, scatter_seq
from hp_mesh._torch import local_shard
from hp_mesh.geometry import Geometry
from hp_mesh.handoff import Waitable, same_origin
from hp_mesh.sequence import Order

__all__ = ["Gathered", "Gatherer", "Pack", "Source"]


@dataclass(frozen=True, eq=False)
class Source:
    """A key of a call.

    Attributes:
        tensor: What the caller passed, in its layout.
        local: This rank's shard of it.
    """

    tensor: Tensor
    local: Tensor

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient is to come back."""
        return torch.is_grad_enabled() and self.tensor.requires_grad

    def state(self) -> tuple[object, ...]:
        """Return what tells its data from all other data, as long as the tensor lives."""
        local = local_shard(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor
        versions = [-1 if x.is_inference() else x._version for x in (self.tensor, local)]
        return (local.untyped_storage()._cdata, Geometry.of(local), *versions)


@dataclass(frozen=True)
class Gatherer:
    """How keys are gathered; two that are equal gather alike.

    Attributes:
        group: The ranks.
        seq_dim: Sequence dim.
        order: How the data lies on the ranks; what is gathered is in the order of the sequence.
    """

    group: ProcessGroup
    seq_dim: int
    order: Order = "contiguous"

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gather several shards, all of them started before the first is waited for."""
        if not shards:
            return []
        wholes = gather_seq(list(shards), self.group, seq_dim=self.seq_dim, order=self.order)
        return list(wholes)

    def start(self, shard: Tensor) -> Waitable:
        """Start one gather."""
        return gather_seq(shard, self.group, seq_dim=self.seq_dim, order=self.order, async_op=True)

    def scatter(self, grad: Tensor) -> Tensor:
        """Return a shard's gradient: the sum over the ranks of what they found for it."""
        return scatter_seq(grad, self.group, seq_dim=self.seq_dim, order=self.order)


class _Adopt(torch.autograd.Function):
    """Take data that was gathered before as the gather of ``shard``; sends in backward only."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, whole: Tensor, gatherer: Gatherer) -> Tensor:
        ctx.gatherer = gatherer
        return whole.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gatherer.scatter(grad), None, None


@dataclass(frozen=True, eq=False)
class Pack:
    """What travelled in one gather.

    Attributes:
        sources: Side by side in the last dim.
        whole: The result.
    """

    sources: tuple[Source, ...]
    whole: Tensor


@dataclass(frozen=True, eq=False)
class _Known:
    source: Source
    state: tuple[object, ...]
    gatherer: Gatherer
    whole: Tensor
    pack: Pack


@dataclass(eq=False)
class Gathered:
    """What has been gathered, as long as it may come back."""

    known: list[_Known] = field(default_factory=list)

    def add(self, source: Source, gatherer: Gatherer, whole: Tensor, pack: Pack) -> None:
        """Remember the gather of ``source``, which is kept alive meanwhile."""
        self.known.append(_Known(source, source.state(), gatherer, whole, pack))

    def packs_of(self, sources: Iterable[Source], gatherer: Gatherer) -> list[Pack]:
        """Return the gathers that ``sources`` came in, each once."""
        found: list[Pack] = []
        for state in [source.state() for source in sources]:
            known = (k for k in self.known if k.gatherer == gatherer and k.state == state)
            pack = next(known).pack
            if not any(pack is one for one in found):
                found.append(pack)
        return found

    def find(self, source: Source, gatherer: Gatherer) -> Tensor | None:
        """Return the gather of the data of ``source`` for ``source``, or None."""
        state = source.state()
        found = [
            one
            for one in self.known
            if one.gatherer == gatherer and one.state == state and one.source.state() == state
        ]
        if not found:
            return None
        if not source.needs_grad:
            whole = found[0].whole
            return whole.detach() if whole.requires_grad else whole
        for one in found:
            if one.whole.requires_grad and same_origin(one.source.tensor, source.tensor):
                return one.whole
        adopted: Tensor = cast(Any, _Adopt).apply(source.local, found[0].whole, gatherer)
        self.add(source, gatherer, adopted, found[0].pack)
        return adopted

    def has(self, source: Source, gatherer: Gatherer) -> bool:
        """Whether the data of ``source`` has been gathered."""
        state = source.state()
        return any(one.gatherer == gatherer and one.state == state for one in self.known)

    def clear(self) -> None:
        """Forget everything."""
        self.known.clear()

    def collect(
        self,
        sources: Mapping[str, Source],
        gatherer: Gatherer,
        under_way: Mapping[str, Waitable],
    ) -> dict[str, Tensor]:
        """Return the whole of each source, by name, gathering what is not known yet.

        Args:
            sources: The keys of a call.
            gatherer: How to gather.
            under_way: Gathers that were started ahead.
        """
        wholes: dict[str, Tensor] = {}
        for name, source in sources.items():
            if name in under_way:
                continue
            whole = self.find(source, gatherer)
            if whole is not None:
                wholes[name] = whole
        late = self._unknown(sources, gatherer, under_way)
        packs = _packs(late)
        shards = [
            late[pack[0]].local if len(pack) == 1 else torch.cat([late[n].local for n in pack], -1)
            for pack in packs
        ]
        for pack, whole in zip(packs, gatherer.gather(shards), strict=True):
            sizes = [late[name].local.size(-1) for name in pack]
            parts = [whole] if len(pack) == 1 else torch.split(whole, sizes, -1)
            travelled = Pack(tuple(late[name] for name in pack), whole)
            for name, part in zip(pack, parts, strict=True):
                self.add(late[name], gatherer, part, travelled)
        for name, handle in under_way.items():
            whole = handle.wait()
            self.add(sources[name], gatherer, whole, Pack((sources[name],), whole))
        for name, source in sources.items():
            if name not in wholes:
                found = self.find(source, gatherer)
                assert found is not None, "just gathered"
                wholes[name] = found
        return {name: wholes[name] for name in sources}

    def packs(
        self, sources: Mapping[str, Source], gatherer: Gatherer, under_way: Collection[str]
    ) -> list[str]:
        """Return what `collect` would gather, in words, for the ranks to compare first."""
        return ["|".join(p) for p in _packs(self._unknown(sources, gatherer, under_way))]

    def _unknown(
        self, sources: Mapping[str, Source], gatherer: Gatherer, under_way: Collection[str]
    ) -> dict[str, Source]:
        states = [one.state for one in self.known if one.gatherer == gatherer]
        states += [sources[name].state() for name in under_way]
        late: dict[tuple[object, ...], str] = {}
        for name, source in sources.items():
            state = source.state()
            if name in under_way or state in states:
                continue
            # of two that show the same data, the one with a gradient travels
            if state not in late or (source.needs_grad and not sources[late[state]].needs_grad):
                late[state] = name
        return {name: sources[name] for name in late.values()}


def _packs(sources: Mapping[str, Source]) -> list[list[str]]:
    """Return the names of what fits in one gather: rows alike, and gradients for all or none."""
    packs: dict[tuple[object, ...], list[str]] = {}
    for name, source in sources.items():
        x = source.local
        packs.setdefault((x.dtype, x.device, x.shape[:-1], source.needs_grad), []).append(name)
    return list(packs.values())
