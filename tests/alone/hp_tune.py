"""hp-tune with its closure alone: a search and its page, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SEARCH = """
import sys
from hp_tune.cli import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules, "the search imported torch"
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", "llama-3.1-8b", "--cp", "4", "--seq", "8192"]
        command = [sys.executable, "-I", "-c", SEARCH, "search", *model, "--cluster", "cpu-gloo"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        plans = list(Path(folder).glob("**/plan.json"))
        assert plans, (done.stdout, list(Path(folder).iterdir()))
        assert json.loads(plans[0].read_text())
        command = [sys.executable, "-I", "-c", SEARCH, "report", "--lengths", "8192"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        page = (Path(folder) / "report.html").read_text()
        assert "<style>:root" in page, "the style sheet came along in the wheel"
