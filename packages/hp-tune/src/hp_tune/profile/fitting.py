"""Least squares with few unknowns that cannot be negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

__all__ = ["fit"]


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the factors, none negative, with which the columns of ``rows`` add up to ``values``.

    Of all sets of columns the one whose best factors are positive and fit best.
    """
    width = len(rows[0])
    best = [0.0] * width
    least = sum(value**2 for value in values)
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            columns = [[row[at] for at in chosen] for row in rows]
            found = _solve(columns, values)
            if found is None or min(found) < 0:
                continue
            rest = sum(
                (value - sum(f * x for f, x in zip(found, row, strict=True))) ** 2
                for row, value in zip(columns, values, strict=True)
            )
            if rest < least - 1e-12 * least:
                least = rest
                best = [0.0] * width
                for at, factor in zip(chosen, found, strict=True):
                    best[at] = factor
    return best


def _solve(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Return the solution of the normal equations, by elimination; None if there is no one."""
    n = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(n)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda at: abs(matrix[at][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:
            return None
        for j in range(n):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] for i in range(n)]
