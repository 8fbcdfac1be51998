"""Every Python block of the README files and the guide runs, or says above it why it does not.

A page is one program: its blocks in order, each at its own line, so that a traceback names the line
of the page. Two comments steer it:

    <!-- ranks: 4 -->            anywhere on the page: run it as torchrun does with four CPU ranks
    <!-- not run: the reason --> directly above a block
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from hp_mesh.testing import TOLERANCES
from hp_tune.commands import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
)
FENCE = re.compile(r"^```(\w*)\s*$")
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
GUIDE = ROOT / "docs" / "guide"
AWAITED: set[str] = set()
"""Pages of the English guide that are not translated yet; a page must be in one of the two."""
RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    lines: tuple[str, ...]
    not_run: str | None


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    lines = text.splitlines()
    start: int | None = None
    language = ""
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if start is None and fence:
            start, language = number, fence[1]
        elif start is not None and line == "```":
            above = next((entry for entry in reversed(lines[:start]) if entry.strip()), "")
            reason = NOT_RUN.match(above)
            body = tuple(lines[start + 1 : number])
            found.append(Block(start + 1, language, body, reason[1] if reason else None))
            start = None
    assert start is None, f"the block that opens at line {start} is never closed"
    return found


# a page ends with its last example; a rank that then exits while a peer still uses gloo's threads
# is, now and then, aborted by the C++ runtime
LEAVING = """
import torch.distributed
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def program(text: str) -> str:
    """Return the page with everything blanked out but the Python that runs, lines kept."""
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python" and block.not_run is None:
            lines[block.line : block.line + len(block.lines)] = block.lines
    return "\n".join(lines) + "\n" + LEAVING


TRANSLATED = [ROOT / "README.zh.md", *sorted((GUIDE / "zh").glob("*.md"))]
WITH_PYTHON = [
    page
    for page in PAGES
    if page not in TRANSLATED  # their code is that of the originals, line by line: a test below
    and any(block.language == "python" for block in blocks(page.read_text()))
]


def test_the_readme_and_the_guide_have_python_to_run() -> None:
    names = {str(page.relative_to(ROOT)) for page in WITH_PYTHON}

    guide = {f"docs/guide/en/{name}.md" for name in ("context_parallel", "dsa", "troubleshooting")}
    assert {"README.md", *guide} <= names
    assert sum(name.startswith("docs/coming-from/") for name in names) == 4


def test_every_page_of_the_guide_is_translated_or_awaited() -> None:
    english, chinese = (
        {page.name for page in (GUIDE / tongue).iterdir()} for tongue in ("en", "zh")
    )

    assert "context_parallel.md" in english
    assert english - chinese == AWAITED
    assert chinese - english == set()


@pytest.mark.parametrize("chinese", TRANSLATED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_translated_page_has_the_code_of_the_original(chinese: Path) -> None:
    """Line by line, and what runs there would run here; only the prose is another."""
    is_guide = chinese.parent.name == "zh"
    english = GUIDE / "en" / chinese.name if is_guide else ROOT / chinese.name.replace(".zh.", ".")

    def code(page: Path) -> list[tuple[str, tuple[str, ...], bool]]:
        found = blocks(page.read_text())
        return [(block.language, block.lines, block.not_run is None) for block in found]

    assert code(english) == code(chinese)
    assert RANKS.findall(english.read_text()) == RANKS.findall(chinese.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_a_page_is_marked_as_python(page: Path) -> None:
    """A block without a language would be passed over in silence."""
    for block in blocks(page.read_text()):
        code = "\n".join(block.lines)
        looks_like_python = re.search(r"^(import \w|from \w+ import )", code, re.MULTILINE)
        assert block.language in ("python", "console", "text", "toml", "json") and (
            block.language == "python" or not looks_like_python
        ), f"line {block.line}"


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    script = tmp_path / page.name.replace(".md", ".py")
    script.write_text(program(text))
    count = RANKS.search(text)
    # forks of one process; that a page runs under torchrun itself is shown by the first of all
    forked = [str(Path(__file__).with_name("_forked.py"))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    launcher = torchrun if page.parent == ROOT else forked
    command = [sys.executable, *([*launcher, count[1]] if count else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    done = subprocess.run(
        [*command, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


COMMAND = re.compile(r"^\$ hp-tune (.+)$", re.MULTILINE)
WITH_COMMANDS = [page for page in PAGES if COMMAND.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_hp_tune_command_of_a_page_is_one_that_the_program_takes(page: Path) -> None:
    """Read by the program's own parser, not run: commands, options, values, missing ones."""
    for line in COMMAND.findall(page.read_text()):
        name, *arguments = shlex.split(line, comments=True)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        command.make_context(name, arguments)


def test_the_page_of_tolerances_is_the_table_that_assert_close_reads() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    kinds = ("forward", "grad", "loss")
    written = {
        row[0]: dict(zip(kinds, map(float, row[1:]), strict=True))
        for row in rows
        if row[0] not in ("dtype", "---")
    }

    table = {str(dtype).removeprefix("torch."): dict(row) for dtype, row in TOLERANCES.items()}

    assert written == table


def test_a_link_to_a_file_of_the_repository_leads_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]

    assert dead == []
