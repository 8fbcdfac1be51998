"""What a configuration must keep to, such as ``memory_gib <= 52 and imbalance < 1.2``.

Names, numbers, comparisons, ``and``, ``or`` and parentheses; read by a parser of its own, so that
nothing in it is ever run.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hp_mesh.checks import nearest
from hp_tune.cost.memory import GIB
from hp_tune.errors import UsageError
from hp_tune.searching.ranking import Ranked
from hp_tune.searching.rules import Rejection

__all__ = ["NAMES", "Requirement", "read_requirement"]

NAMES: Mapping[str, Callable[[Ranked], float]] = {
    "memory_gib": lambda one: one.memory_bytes / GIB,
    "time_ms": lambda one: one.ms,
    "forward_ms": lambda one: one.prediction.forward * 1e3,
    "backward_ms": lambda one: one.prediction.backward * 1e3,
    "exposed_ms": lambda one: one.prediction.exposed_comm * 1e3,
    "imbalance": lambda one: one.prediction.imbalance,
    "collectives": lambda one: float(one.prediction.num_collectives),
    "sent_gib": lambda one: sum(one.prediction.bytes_sent.values()) / GIB,
    "u": lambda one: float(one.config.ulysses_degree),
}
"""What can be asked for. Time and memory are the measured ones where a configuration ran."""

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_TOKEN = re.compile(r"\s*(?:(<=|>=|==|!=|<|>|\(|\))|([A-Za-z_]\w*)|(\d+\.?\d*(?:[eE][+-]?\d+)?))")

DEEPEST = 50
"""Parentheses in parentheses."""

Test = Callable[[Mapping[str, float]], bool]


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition on the numbers of a configuration.

    Attributes:
        text: As it was typed.
        names: The numbers that it looks at, in the order in which it names them.
    """

    text: str
    names: tuple[str, ...]
    _test: Test

    def check(self, ranked: Ranked) -> Rejection | None:
        """Return why a configuration does not keep to it, or None."""
        numbers = {name: NAMES[name](ranked) for name in self.names}
        if self._test(numbers):
            return None
        values = ", ".join(f"{name} ({value:.4g})" for name, value in numbers.items())
        return Rejection(
            "R01",
            f"{values} must keep to {self.text}",
            {**numbers, "require": self.text},
            "loosen --require, or change the cluster, the degrees or the length",
        )


def read_requirement(text: str) -> Requirement:
    """Return the requirement that ``text`` states; `UsageError` says where it does not read."""
    reader = _Reader(text)
    test = reader.either()
    reader.end()
    return Requirement(" ".join(text.split()), tuple(dict.fromkeys(reader.names)), test)


class _Reader:
    """Recursive descent: either = both {or both}; both = one {and one}; one = a < b or (either)."""

    def __init__(self, text: str) -> None:
        self.text, self.names = text, list[str]()
        self._tokens: list[tuple[str, int]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise self._error(f"{text[at]!r} cannot be read", at)
            self._tokens.append((match[0].strip(), match.end() - len(match[0].strip())))
            at = match.end()
        self._next = self._depth = 0

    def either(self) -> Test:
        tests = [self.both()]
        while self._take("or"):
            tests.append(self.both())
        return lambda numbers: any(test(numbers) for test in tests)

    def both(self) -> Test:
        tests = [self.one()]
        while self._take("and"):
            tests.append(self.one())
        return lambda numbers: all(test(numbers) for test in tests)

    def one(self) -> Test:
        if self._take("("):
            self._depth += 1
            if self._depth > DEEPEST:
                raise self._error(f"more than {DEEPEST} parentheses are open")
            inner = self.either()
            self._depth -= 1
            if not self._take(")"):
                raise self._error("a closing parenthesis is missing")
            return inner
        left = self._number()
        token = self._peek()
        if token not in COMPARISONS:
            raise self._error(f"a comparison ({' '.join(COMPARISONS)}) is missing")
        self._next += 1
        compare, right = COMPARISONS[token], self._number()
        return lambda numbers: compare(left(numbers), right(numbers))

    def end(self) -> None:
        if self._peek():
            raise self._error(f"{self._peek()!r} is not expected")

    def _number(self) -> Callable[[Mapping[str, float]], float]:
        token = self._peek()
        if token and token[0].isdigit():
            self._next += 1
            value = float(token)
            return lambda _: value
        if not token or not (token[0].isalpha() or token[0] == "_") or token in ("and", "or"):
            raise self._error("a name or a number is missing")
        if token not in NAMES:
            close = nearest(token, NAMES)
            hint = f"did you mean {close!r}?" if close else f"known names: {', '.join(NAMES)}"
            raise self._error(f"unknown name {token!r}", hint=hint)
        self._next += 1
        self.names.append(token)
        return lambda numbers: numbers[token]

    def _take(self, token: str) -> bool:
        found = self._peek() == token
        self._next += found
        return found

    def _peek(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _error(self, problem: str, at: int | None = None, hint: str = "") -> UsageError:
        if at is None:
            ends = self._next >= len(self._tokens)
            at = len(self.text) if ends else self._tokens[self._next][1]
        return UsageError(
            f"--require {self.text!r}, column {at + 1}: {problem}",
            hint or "such as 'memory_gib <= 52 and imbalance < 1.2'",
        )
