"""What the documentation says of the code is there: messages, and the tests that hold a promise."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TROUBLES = [ROOT / "docs" / "guide" / tongue / "troubleshooting.md" for tongue in ("en", "zh")]
COMPOSE = [ROOT / "docs" / "guide" / tongue / "compose.md" for tongue in ("en", "zh")]
TABLES = [ROOT / "docs" / "faults.md", *TROUBLES, *COMPOSE]
TEST = re.compile(r"`([\w./-]+\.py)::(test_\w+)`")
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
VARIES = "\N{HORIZONTAL ELLIPSIS}"
SPOKEN = ("hp-mesh", "hp-comm", "hp-cp", "hp-dsa")


@cache
def texts() -> tuple[str, ...]:
    """Return every string of the sources, what is formatted into it replaced by an ellipsis."""
    found = set()
    for package in SPOKEN:
        for path in (ROOT / "packages" / package / "src").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.add("".join(map(_piece, node.values)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return tuple(found)


def _piece(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else VARIES


def is_said(message: str) -> bool:
    """Whether a text of the sources contains ``message``, or is ``message`` with values in it."""
    if any(message in text for text in texts()):
        return True
    enough = (text for text in texts() if len(text.replace(VARIES, "").strip()) > 12)
    patterns = (".+?".join(map(re.escape, text.split(VARIES))) for text in enough)
    return any(re.fullmatch(pattern, message) for pattern in patterns)


@pytest.mark.parametrize("page", TABLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = TEST.findall(page.read_text())

    def exists(file: str, name: str) -> bool:
        paths = [path for path in (ROOT / file, ROOT / "packages" / file) if path.is_file()]
        return any(f"def {name}(" in path.read_text() for path in paths)

    assert named
    assert [f"{file}::{name}" for file, name in named if not exists(file, name)] == []


@pytest.mark.parametrize("page", TROUBLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_message_of_the_troubleshooting_page_is_in_the_sources(page: Path) -> None:
    """A message that was reworded would no longer be found by who searches for it."""
    messages = MESSAGE.findall(page.read_text())

    assert len(messages) > 50
    assert [message for message in messages if not is_said(message)] == []


def test_both_troubleshooting_pages_explain_the_same_messages() -> None:
    english, chinese = (MESSAGE.findall(page.read_text()) for page in TROUBLES)

    assert english == chinese


def test_every_kind_of_fault_has_a_line() -> None:
    rows = re.findall(r"^\| (B\d\d) \|", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)

    assert sorted(rows) == [f"B{number:02}" for number in range(1, 26)]
