"""Where results are written: in one step, and never in place of what is no plain file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hp_tune.errors import UsageError
from hp_tune.output import require_place, write_text


def test_a_file_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there stays until all is written, and nothing else is left in the folder."""
    path = tmp_path / "plan.json"
    write_text(path, "old")

    def full(self: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(UsageError, match=r"--out .* cannot be written: No space left"):
            write_text(path, "new")
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path) -> None:
    """``latest.json`` goes on naming the file that it names."""
    path, link = tmp_path / "one.json", tmp_path / "latest.json"
    link.symlink_to(path)
    for text in ("first", "second"):
        require_place(link)
        write_text(link, text)
        assert link.is_symlink()
        assert path.read_text() == text


def test_a_pipe_or_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    """``--out /dev/null`` must not make a file of it."""
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    require_place(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_text(path, "content")
    reader.join(timeout=300)

    assert read == ["content"]
    assert path.is_fifo()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", r"--trace \(.*\) must name a file; such as --trace plan.json"),
        ("none/plan.json", "cannot be written: No such file.*; name another place with --trace"),
        ("folder", "cannot be written: Is a directory"),
    ],
)
def test_a_place_that_is_none_is_named_with_its_option(
    tmp_path: Path, name: str, problem: str
) -> None:
    """The sentence is the same before the work and after it."""
    (tmp_path / "folder").mkdir()
    path = tmp_path / name if name else Path()
    with pytest.raises(UsageError, match=problem):
        write_text(path, "", "--trace")
    with pytest.raises(UsageError, match=problem):
        require_place(path, "--trace")
