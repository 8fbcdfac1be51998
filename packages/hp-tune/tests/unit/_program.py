"""``hp-tune`` as a program that runs within the process of a test."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hp_tune.cli import main

__all__ = ["empty_folder", "run"]


def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, and leave pytest's signal handlers in place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of one command; none of them shows a traceback."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    captured = capsys.readouterr()
    code = stopped.value.code
    assert isinstance(code, int)
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err
