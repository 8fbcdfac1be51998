"""The operands of an operator as plain tensors of this rank, and the lengths of the whole sequence.

Queries, indices and statistics become this rank's rows, keys become whole; `hp_dsa.operator_call`
cuts keys to a window. What does not line up is refused here, on this rank; the call tells the
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hp_dsa.operators import Operator
from hp_dsa.view import DSAView, Lengths
from hp_mesh._torch import redistribute, to_local
from hp_mesh.checks import fail, read_integers, require

__all__ = ["Operands", "check_lengths", "read_lengths"]


def read_lengths(where: str, name: str, given: Any) -> list[int] | None:
    """Return lengths on the host; a tensor on a device is waited for."""
    return None if given is None else read_integers(where, name, given)


def check_lengths(
    where: str, view: DSAView, names: Sequence[str], given: Sequence[Any], batch: int
) -> Lengths:
    """Return lengths of the whole sequence, checked, on the host; a device is waited for.

    Args:
        where: The style and the operator, for messages.
        view: The view of the call.
        names: What the lengths of queries and of keys are called there.
        given: The two: lists, tensors or None.
        batch: Number of batch rows.
    """
    queries, keys = (read_lengths(where, n, x) for n, x in zip(names, given, strict=True))
    check = _check_batch if view.plan.layout == "BSND" else _check_ends
    totals = (view.num_queries, view.num_keys)
    for name, lengths, total in zip(names, (queries, keys), totals, strict=True):
        check(where, name, lengths, total, batch, view.plan.cp_size)
    if view.plan.layout == "BSND":
        return queries, keys
    assert queries is not None and keys is not None, "checked above"
    require(
        len(queries) == len(keys),
        where,
        f"{names[0]} ({len(queries)} ends) must have as many entries as {names[1]} "
        f"({len(keys)} ends)",
    )
    return queries, keys


def _check_batch(
    where: str, name: str, given: list[int] | None, total: int, batch: int, cp_size: int
) -> None:
    """Require a length of at most ``total`` for each batch row."""
    if given is None:
        return
    require(
        len(given) == batch,
        where,
        f"{name} ({len(given)} entries) must have one for each row of the batch (B = {batch})",
    )
    require(
        all(0 <= n <= total for n in given),
        where,
        f"{name} ({given}) must be valid lengths of at most {total}",
    )


def _check_ends(
    where: str, name: str, given: list[int] | None, total: int, batch: int, cp_size: int
) -> None:
    """Require cumulative ends, the last of them ``total``."""
    if given is None:
        raise fail(
            where,
            f'{name} (None) must hold the cumulative ends of the documents for "TND"',
            f"pass [{total}] for a single document",
        )
    require(
        bool(given) and all(a <= b for a, b in pairwise([0, *given])),
        where,
        f"{name} ({given}) must be cumulative ends that do not fall",
    )
    require(
        given[-1] == total,
        where,
        f"{name} (last end {given[-1]}) must end at the length of the whole sequence "
        f"({total}: {total // cp_size} local rows on {cp_size} ranks)",
        "lengths are those of the whole sequence; make padding a document of its own",
    )


class Operands:
    """The arguments of one call of an operator.

    Args:
        view: The view that it runs under.
        operator: Which argument is what.
        given: The arguments by name.
        where: The style and the operator, for messages.
    """

    def __init__(
        self, view: DSAView, operator: Operator, given: Mapping[str, Any], where: str
    ) -> None:
        self.view, self.operator, self.given, self.where = view, operator, given, where
        self.plan = view.plan
        self.query: Tensor = given[operator.positional[0]]

    def has(self, name: str) -> bool:
        """Whether the call holds a tensor of this name."""
        return isinstance(self.given.get(name), Tensor)

    def check_layout(self) -> None:
        """Require the operator to be called in the layout of the style."""
        for name in self.operator.layouts:
            layout = self.given.get(name, "BSND")
            require(
                layout == self.plan.layout,
                self.where,
                f"{name} ({layout!r}) must be the style's layout ({self.plan.layout!r})",
                f"construct the style with layout={layout!r}, or pass {name}={self.plan.layout!r}",
            )

    def refuse_cut_heads(self) -> None:
        """Scores are sums over all index heads, the loss needs the mean over all heads."""
        if "attention" in self.operator.results:
            return
        for name in self.operator.rows:
            x = self.given.get(name)
            if not isinstance(x, DTensor) or not self.view.owns(x):
                continue
            cut = [p for axis, p in enumerate(x.placements) if axis != self.view.cp_axis]
            require(
                not any(isinstance(p, Shard) for p in cut),
                self.where,
                f"{name} with placements {x.placements} must be whole on the axes that are not CP",
                "gather its heads over TP first: scores and the loss are sums over all heads",
            )

    def rows(self, name: str, x: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of ``x`` as a plain tensor."""
        view = self.view
        if view.owns(x):
            assert isinstance(x, DTensor), "the view's own"
            placements = list(x.placements)
            present = placements[view.cp_axis]
            if present.is_replicate():
                placements[view.cp_axis] = Shard(dim)
                x = redistribute(x, placements)
            elif not present.is_shard(dim):
                raise fail(
                    self.where,
                    f"{name} with placements {tuple(placements)} must be Shard({dim}) on the CP "
                    "axis",
                    "pass it as the module received it",
                )
            return to_local(x, view.partial_grads(x.placements))
        size = x.size(dim)
        if size == view.local_length:
            return x
        require(
            size == view.num_queries and not self.plan.load_balance,
            self.where,
            f"{name} (shape {tuple(x.shape)}) has {size} rows in dim {dim}, which must be this "
            f"rank's ({view.local_length})",
            "pass it as the module received it",
        )
        return x.narrow(dim, view.rank * view.local_length, view.local_length)

    def keys(self) -> dict[str, Tensor]:
        """Return the whole keys as plain tensors; one that came twice is one."""
        found: dict[int, Tensor] = {}
        for name in self.operator.keys:
            x = self.given.get(name)
            if isinstance(x, Tensor) and id(x) not in found:
                found[id(x)] = self._whole(name, x)
        return {n: found[id(self.given[n])] for n in self.operator.keys if self.has(n)}

    def _whole(self, name: str, x: Tensor) -> Tensor:
        view, dim = self.view, self.plan.seq_dim
        if view.owns(x):
            assert isinstance(x, DTensor), "the view's own"
            require(
                x.placements[view.cp_axis].is_replicate(),
                self.where,
                f"{name} with placements {x.placements} must be Replicate() on the CP axis",
                "pass it as the module received it; a key side is gathered by the boundary",
            )
            x = to_local(x, view.key_grads(x.placements, self.query))
        require(
            x.size(dim) == view.num_keys,
            self.where,
            f"{name} (shape {tuple(x.shape)}) has {x.size(dim)} rows in dim {dim}, which must be "
            f"all keys ({view.num_keys})",
            "pass it as the module received it",
        )
        return x

    def lengths(self, batch: int) -> Lengths:
        """Return the lengths of the whole sequence."""
        names = self.operator.lengths
        given = [self.given.get(name) for name in names]
        return check_lengths(self.where, self.view, names, given, batch)
