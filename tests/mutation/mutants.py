"""Small faults, put into the sources one at a time by the operators of cosmic-ray."""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

__all__ = ["Mutant", "sample"]


NEED_ARGUMENTS = ("VariableInserter", "VariableReplacer")
"""Operators that are told names of variables, which are not the same in any two functions."""


@dataclass(frozen=True)
class Mutant:
    """One changed expression: of the places where ``operator`` applies, number ``occurrence``."""

    path: Path
    line: int
    operator: str
    occurrence: int

    def code(self) -> str:
        """Return the whole changed file."""
        operator = get_operator(self.operator)()
        changed: str | None = mutate_code(self.path.read_text(), operator, self.occurrence)
        assert changed is not None, f"{self} changes nothing"
        return changed

    def change(self) -> str:
        """Return the changed lines, before and after."""
        before, after = self.path.read_text().splitlines(), self.code().splitlines()
        lines = [x for x in difflib.unified_diff(before, after, n=0, lineterm="") if x[0] in "-+"]
        return "  ->  ".join(" ".join(x[1:].split()) for x in lines[2:])


def sample(paths: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants: a line by chance, then one of the faults that fit it.

    Lines are drawn first because a ``+`` has eleven replacements and a ``return`` has none: drawn
    over all faults alike, arithmetic would be all that is tested.
    """
    by_line: dict[tuple[Path, int], list[Mutant]] = defaultdict(list)
    for path in paths:
        for mutant in _all(path):
            by_line[path, mutant.line].append(mutant)
    chance = random.Random(seed)
    drawn = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [chance.choice(by_line[line]) for line in drawn]


def _all(path: Path) -> Iterator[Mutant]:
    tree = get_ast_from_path(path)
    meaningless = _meaningless(path)
    nodes = list(ast_nodes(tree))  # in the order in which `mutate_code` counts
    for name in sorted(operator_names()):
        if name.rpartition("/")[2] in NEED_ARGUMENTS:
            continue
        operator = get_operator(name)()
        occurrence = 0
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                if not any(start <= (line, column) < end for start, end in meaningless):
                    yield Mutant(path, line, name, occurrence)
                occurrence += 1


Place = tuple[int, int]


def _meaningless(path: Path) -> list[tuple[Place, Place]]:
    """Return where a change changes nothing: annotations are never evaluated, nor are overloads."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            overload = any(ast.unparse(d) == "overload" for d in node.decorator_list)
            parts = [node if overload else node.returns]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts = [node]
        elif isinstance(node, ast.Assert):
            parts = [node.msg]
        for part in parts:
            if part is not None:
                assert isinstance(part, ast.expr | ast.stmt)
                assert part.end_lineno is not None and part.end_col_offset is not None
                end = (part.end_lineno, part.end_col_offset)
                found.append(((part.lineno, part.col_offset), end))
    return found
