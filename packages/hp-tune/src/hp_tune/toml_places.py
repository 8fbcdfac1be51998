"""Where the keys of a TOML file stand; ``tomllib`` reads values and tells no places."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["key_places"]

At = tuple[str | int, ...]

_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?'{3,5}|"(?:\\.|[^"\\])*"|'[^']*\'''', re.DOTALL
)
_PLAIN = re.compile(r"[^,\]}\n#]+")
"""A number, a date or a truth value."""


def key_places(text: str) -> dict[At, tuple[int, int]]:
    """Return line and column, from 1, of each key, table and item, by its path.

    ``text`` is TOML that ``tomllib`` has read without an error: nothing is checked again.
    """
    scanner = _Scanner(text)
    table: At = ()
    while scanner.next():
        if scanner.next() == "[":
            table = scanner.header()
        else:
            scanner.pair(table)
    return scanner.places


class _Scanner:
    """Goes through the text once; every method reads what it is called after."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.places: dict[At, tuple[int, int]] = {}
        self.tables: dict[At, int] = {}

    def next(self) -> str:
        """Go over blanks and comments; return the next character, or nothing at the end."""
        self._over(_BLANK)
        return self.text[self.at : self.at + 1]

    def header(self) -> At:
        """Read ``[a.b]`` or ``[[a.b]]``."""
        several = self.text.startswith("[[", self.at)
        self.at += 1 + several
        self.next()
        place, path = self._place(), self._key(())
        if several:
            number = self.tables[path] = self.tables.get(path, -1) + 1
            self.places[*path, number] = place
            path = (*path, number)
        self.next()
        self.at += 1 + several
        return path

    def pair(self, table: At) -> None:
        """Read ``key = value``."""
        path = self._key(table)
        self.next()
        self.at += 1
        self._value(path)

    def _key(self, table: At) -> At:
        """Read a key, dotted or not; of a dotted one each part stands where the first does."""
        self.next()
        place, path = self._place(), table
        while True:
            word = self._over(_KEY)
            path = (*path, word[1:-1] if word[0] in "\"'" else word)
            self.places.setdefault(path, place)
            if not self._over(_DOT):
                return path

    def _value(self, path: At) -> None:
        first = self.next()
        if first == "{":
            self._listed("}", lambda _: self.pair(path))
        elif first == "[":
            self._listed("]", lambda number: self._item((*path, number)))
        else:
            self._over(_STRING if first in "\"'" else _PLAIN)

    def _item(self, path: At) -> None:
        self.next()
        self.places[path] = self._place()
        self._value(path)

    def _listed(self, end: str, read: Callable[[int], None]) -> None:
        """Read what stands between brackets, with commas between."""
        self.at += 1
        number = 0
        while self.next() != end:
            read(number)
            number += 1
            self.at += self.next() == ","
        self.at += 1

    def _over(self, pattern: re.Pattern[str]) -> str:
        """Go over what a pattern finds here, and return it; nothing where it finds nothing."""
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[0]

    def _place(self) -> tuple[int, int]:
        line_start = self.text.rfind("\n", 0, self.at)
        return self.text.count("\n", 0, self.at) + 1, self.at - line_start
