"""``hp-tune search --mode measured``: stopped in a trial, and taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ._marked import Marked, wait_for

MODEL = {
    "model_type": "llama", "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 30, "vocab_size": 40,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip
COMMAND = [
    *(sys.executable, "-m", "hp_tune", "search", "--model", "config.json"),
    *("--cluster", "cpu-gloo", "--cp", "2", "--seq", "96", "--mode", "measured"),
    *("--space", "u=2", "--space", "lb=off", "--rounds", "3", "--trial-timeout", "600"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_search_that_is_stopped_in_a_trial_leaves_no_rank_and_goes_on(tmp_path: Path) -> None:
    """Exit code 143; the same command measures what was being measured, and writes the plan."""
    marked = Marked()
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    environment = {**os.environ, **marked.environment}
    first = subprocess.Popen(
        COMMAND, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert wait_for(lambda: len(list(tmp_path.glob(".hp-tune/*.logs/*/rank?.json"))) == 2)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=300)
    assert first.returncode == 143, said
    assert "stopped by SIGTERM" in said
    assert "resume with: hp-tune search" in said
    assert marked.pids() == []

    again = subprocess.run(
        COMMAND, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    best = plan["entries"][0]["best"]
    assert best["source"] == "measured"
    assert best["config"]["ulysses_degree"] == 2
    assert marked.pids() == []
