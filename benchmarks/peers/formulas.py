"""Bytes that one rank sends in one layer, in closed form.

``A`` is the bytes of one head of the global sequence, ``P = u * c`` the ranks, ``Hq`` and ``Hk``
the heads. Fewer KV heads than Ulysses ranks are sent to all who need them, so that each rank of a
Ulysses group gets one: ``K = max(Hk, u)`` heads travel. Gradients have the dtype of activations,
so backward sends as much as forward.

==================  =====================================================
Ulysses             ``A (2 Hq + 2 K) (P - 1) / P²``
Colossal            ``A 2 Hk (P - 1) / P``
  with balance      ``+ A Hq / P``: half of q out, half of the output back
Hybrid ``u x c``    ``A/P ((2 Hq + 2 K) (u - 1) / u + 2 K (c - 1))``
==================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from peers.cases import Case

__all__ = ["FORMULAS", "bytes_each_way", "exchange_elements"]


def hybrid(case: Case, ulysses_degree: int) -> Fraction:
    """Return the bytes of one direction with Ulysses groups of ``ulysses_degree`` ranks."""
    u, c = ulysses_degree, case.ranks // ulysses_degree
    kv_heads = max(case.kv_heads, u)
    traded = (2 * case.heads + 2 * kv_heads) * Fraction(u - 1, u)
    return Fraction(case.head_bytes, case.ranks) * (traded + 2 * kv_heads * (c - 1))


def balanced(case: Case) -> Fraction:
    """Return the bytes of one direction of Colossal with the swap of half the queries."""
    return hybrid(case, 1) + Fraction(case.head_bytes * case.heads, case.ranks)


FORMULAS: Mapping[str, Callable[[Case], Fraction]] = {
    "ulysses": lambda case: hybrid(case, case.ranks),
    "colossal": lambda case: hybrid(case, 1),
    "colossal balanced": balanced,
    "hybrid": lambda case: hybrid(case, 2),
}
"""By mode of `peers.contender.Contender`."""


def bytes_each_way(mode: str, case: Case) -> float:
    """Return the bytes that a rank sends in forward, which are those of backward too."""
    return float(FORMULAS[mode](case))


def exchange_elements(case: Case) -> tuple[int, int]:
    """Return the elements of a rank's buffers for the Ulysses exchange in (q, k, v) and out.

    Its own share is in them, as ``all_to_all_single`` wants it.
    """
    rows = case.batch * case.local_seq * case.head_size
    kv_heads = max(case.kv_heads, case.ranks)
    return rows * (case.heads + 2 * kv_heads), rows * case.heads
