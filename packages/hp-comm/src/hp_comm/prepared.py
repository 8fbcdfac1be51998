"""An exchange whose heads are normalised and rotated while they are packed.

QK-norm and rotary stand between projection and attention in most models. Done inside the pack they
cost no pass of their own, and what can be sent ahead is again what the projection returned.

Forward packs with `pack_heads` instead of `pack`; the mirrored exchange of the gradients ends with
`unpack_heads`, for which the inputs of norms are kept. Not linear, so, other than a plain exchange,
it can be differentiated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from torch import Tensor

from hp_comm.kernels.arithmetic import HeadWork
from hp_comm.kernels.ops_heads import check_work, pack_heads, unpack_heads
from hp_comm.moves import Pending
from hp_comm.transfers import Exchange, Wire
from hp_mesh.checks import fail, require

__all__ = ["PreparedExchange", "listed_works", "prepared"]

Works = tuple[HeadWork | None, ...]


def listed_works(
    where: str,
    works: HeadWork | Sequence[HeadWork | None] | None,
    xs: Sequence[Tensor],
    head_dim: int,
    *,
    single: bool,
) -> Works | None:
    """Return the work for each tensor, checked; None if there is none at all."""
    if works is None:
        return None
    listed = (works,) if single or isinstance(works, HeadWork) else tuple(works)
    if all(one is None for one in listed):
        return None
    require(
        len(listed) == len(xs),
        where,
        f"work ({len(listed)} entries) must have one entry, or None, per tensor of x ({len(xs)})",
    )
    dtypes = {str(x.dtype) for x in xs}
    require(
        len(dtypes) == 1,
        where,
        f"x ({', '.join(sorted(dtypes))}) must be of one dtype where heads are prepared",
        "cast, or do the norm and the rotary before",
    )
    for t, (x, work) in enumerate(zip(xs, listed, strict=True)):
        if work is not None and not isinstance(work, HeadWork):
            raise fail(where, f"work[{t}] ({type(work).__name__}) must be a HeadWork or None")
        if work is not None:
            check_work(f"{where}: work[{t}]", x, work, head_dim % x.ndim)
    return cast(Works, listed)


def prepared(exchange: Exchange, works: Works, seq_dim: int) -> PreparedExchange:
    """Return ``exchange`` with ``works`` done on its way; its inputs are tensors and weights."""
    parts = {field.name: getattr(exchange, field.name) for field in fields(exchange)}
    return PreparedExchange(**parts, works=works, seq_dim=seq_dim)


def weights_of(works: Works) -> list[Tensor]:
    """Return the weights that there are, which are inputs of the exchange after its tensors."""
    return [work.weight for work in works if work is not None and work.weight is not None]


@dataclass(frozen=True, eq=False)
class PreparedExchange(Exchange):
    """See the head of this file; one dtype, so one all-to-all."""

    works: Works = ()
    seq_dim: int = 0

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        """Launch the all-to-all of the tensors; weights stay."""
        return super().start(xs[: len(self.works)], overlap=overlap)

    def _packed(self, xs: list[Tensor], wire: Wire, overlap: bool) -> Tensor:
        return pack_heads(xs, self.works, *wire.flat(), self.joined, self.seq_dim)

    def mirror(self, needed: Sequence[int]) -> Exchange:
        """Send gradients back, and leave them as they arrive: `gradients` lays them out."""
        plain = super().mirror(needed)
        parts = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return _Arriving(**parts)

    def _normed(self) -> list[int]:
        return [
            t for t, work in enumerate(self.works) if work is not None and work.weight is not None
        ]

    def results(self, needed: Sequence[int]) -> Sequence[int]:
        """A result has a gradient if its tensor or its weight wants one."""
        count, normed = len(self.works), self._normed()
        found = {t if t < count else normed[t - count] for t in needed}
        return tuple(sorted(found))

    def kept(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Keep the inputs of norms and the weights, then the angles, for autograd to watch."""
        angles = [x for work in self.works if work is not None for x in (work.cos, work.sin)]
        return [
            *(xs[t] for t in self._normed()),
            *xs[len(self.works) :],
            *(x for x in angles if x is not None),
        ]

    def gradients(
        self, arrived: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[int]
    ) -> Sequence[Tensor]:
        """Unpack what arrived, rotate it back and differentiate the norms."""
        (buffer,) = arrived
        normed = self._normed()
        inputs = dict(zip(normed, kept, strict=False))
        weights = dict(zip(normed, kept[len(normed) :], strict=False))
        angles = iter(kept[2 * len(normed) :])
        restored: list[HeadWork | None] = []
        for t, work in enumerate(self.works):
            if work is not None:
                cos, sin = (None if work.cos is None else next(angles) for _ in range(2))
                work = work.again(weights.get(t), cos, sin)
            restored.append(work)
        results = self.results(needed)
        works = [restored[t] for t in results]
        cuts = [self.sends[t] for t in results]
        index: list[int] = []
        if any(cut.index is not None for cut in cuts):
            for cut in cuts:
                index += cut.index if cut.index is not None else range(sum(cut.counts))
        grads, weight_grads = unpack_heads(
            buffer,
            [inputs.get(t) for t in results],
            works,
            [list(self.in_shapes[t]) for t in results],
            [cut.dim for cut in cuts],
            [n for cut in cuts for n in cut.counts],
            index,
            self.joined,
            self.seq_dim,
        )
        found: dict[int, Any] = dict(zip(results, grads, strict=True))
        places = {t: len(self.works) + i for i, t in enumerate(normed)}
        found |= {
            places[t]: grad
            for t, grad in zip(results, weight_grads, strict=True)
            if grad is not None
        }
        return [found[place] for place in needed]


@dataclass(frozen=True, eq=False)
class _Arriving(Exchange):
    """An exchange whose one result is what was received, as it lies."""

    def start(self, xs: Sequence[Tensor], *, overlap: bool) -> Pending:
        places = list(range(len(xs)))
        return Pending([((0,), self._start(places, list(xs), overlap, overlap))])

    def _landing(self, like: Tensor, wire: Wire) -> tuple[Tensor, Callable[[], list[Tensor]]]:
        buffer = like.new_empty(sum(wire.sizes))
        return buffer, lambda: [buffer]
