"""``hp-tune search --mode hybrid`` with real trials: two gloo ranks under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hp_tune
from hp_tune.study.studies import read_study

MODEL = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip


def test_hybrid_prunes_one_point_and_measures_the_other(tmp_path: Path) -> None:
    """The plan's best ran: right, with the collectives of its mode, timed; its rival was ruled out.

    All numbers of the cluster pass for measured, so that no assumption keeps the rival in.
    """
    preset = Path(hp_tune.__file__).parent / "presets" / "clusters" / "cpu-gloo.yaml"
    text = preset.read_text().replace("source: assumed", "source: measured")
    (tmp_path / "cluster.yaml").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    done = subprocess.run(
        [sys.executable, "-m", "hp_tune", "search", "--model", "config.json",
         "--cluster", "cluster.yaml", "--cp", "2", "--seq", "256", "--dtype", "fp64",
         "--space", "lb=off overlap=off", "--mode", "hybrid", "--keep", "1", "--within", "1",
         "--backend", "cpu-gloo", "--rounds", "3", "--study", "s.journal"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    plan = hp_tune.load(tmp_path / "plan.json")
    (entry,) = plan.entries
    assert entry.best.source == "measured"
    assert entry.best.measured is not None
    assert entry.best.measured.median_ms > 0
    assert entry.outranked == 1
    assert plan.made_by["mode"] == "hybrid"
    trials = read_study(tmp_path / "s.journal")[2]
    assert Counter(trial.state.name for trial in trials) == {"COMPLETE": 1, "PRUNED": 1}
    (ran,) = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert ran.value == ran.user_attrs["measured"]["median_ms"]
    kind = "all_to_all" if entry.best.config.ulysses_degree == 2 else "all_gather"
    assert ran.user_attrs["measured"]["collectives"][kind] > 0
