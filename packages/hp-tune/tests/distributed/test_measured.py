"""Measured trials under a real torchrun: every mode runs right, and every failure has its class."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hp_tune.measured.measurer import TorchrunMeasurer
from hp_tune.measured.request import Protocol
from hp_tune.measured.result import Measured
from hp_tune.models.model import Attention, Model
from hp_tune.torchrun import Launcher
from hp_tune.workload import Config, Workload

from ._marked import Marked

FULL = Attention(num_heads=8, num_kv_heads=4, head_size=6, v_head_size=6)
SLIDING = FULL.model_copy(update={"kind": "sliding", "window": 5})
MLA = Attention(
    num_heads=4, num_kv_heads=4, head_size=7, v_head_size=5, latent_size=9, rope_size=3,
    q_latent_size=8,
)  # fmt: skip
DSA = MLA.model_copy(
    update={
        "num_heads": 3, "num_kv_heads": 3, "index_topk": 4, "index_heads": 3, "index_head_size": 4,
    }
)  # fmt: skip
HYBRID: list[dict[str, Any]] = [
    {}, {"keep_kv": False}, {"overlap": True}, {"overlap": True, "head_groups": 2},
]  # fmt: skip
COLOSSAL = [*HYBRID, {"load_balance": True}, {"load_balance": True, "keep_kv": False}]
GATHER, ULYSSES = Config(ulysses_degree=1), Config(ulysses_degree=2)
AGAIN = Config(ulysses_degree=1, keep_kv=False)


@pytest.fixture
def marked() -> Marked:
    """A mark of its own for each test."""
    return Marked()


def measurer(
    marked: Marked, logs: Path, ranks: int, *layers: Attention, fault: str = "", **options: Any
) -> TorchrunMeasurer:
    """Return a measurer of a small model on this machine."""
    measuring = {key: options.pop(key) for key in ("timeout",) if key in options}
    workload = {"seq_len": 48, "cp_size": ranks, "batch": 2, "dtype": "fp64", "handoffs": True}
    environment = {**marked.environment, "FAULT": fault}
    return TorchrunMeasurer(
        Model(name="tiny", model_type="tiny", hidden_size=20, layers=layers),
        Workload(**{**workload, **options}),
        Launcher(nproc_per_node=ranks, env=environment),
        logs,
        protocol=Protocol(rounds=1),  # three in the finals
        module="faulty_job" if fault else "hp_tune.measured.job",
        **measuring,
    )


def assert_timed(found: Measured) -> None:
    """Assert that a configuration ran to its end, with numbers that hang together."""
    assert found.outcome == "ok", found.reason + found.details
    assert len(found.samples_ms) == 3
    assert found.interval_ms[0] <= found.median_ms <= found.interval_ms[1]
    assert 0 < found.forward_ms < found.median_ms
    assert 0 < found.backward_ms < found.median_ms
    assert found.memory_bytes > 0
    assert found.checked_len == 48


def test_every_mode_of_hp_cp_is_right_active_and_timed(marked: Marked, tmp_path: Path) -> None:
    """Colossal, balanced, hybrid, Ulysses; async, groups of heads, K and V gathered again."""
    configs = [
        Config(ulysses_degree=u, **options)
        for u, options in [
            *((1, options) for options in COLOSSAL),
            *((2, options) for options in HYBRID),
            (4, {}),
            (4, {"overlap": True}),
        ]
    ]
    found = measurer(marked, tmp_path, 4, FULL, SLIDING, FULL).finals(configs)

    assert list(found) == configs
    for said in found.values():
        assert_timed(said)
    # both kinds of layers: q, k, v in one exchange and the output in another, and their gradients
    assert found[Config(ulysses_degree=4)].collectives == {"all_to_all": 8}
    ahead = found[Config(ulysses_degree=4, overlap=True)]
    assert ahead.collectives == {"all_to_all": 16}
    assert ahead.bytes_sent == found[Config(ulysses_degree=4)].bytes_sent
    assert found[AGAIN].collectives == {"all_gather": 8, "reduce_scatter": 4}
    assert found[Config(ulysses_degree=1, load_balance=True)].collectives == {
        "all_gather": 4, "p2p": 8, "reduce_scatter": 4,
    }  # fmt: skip
    assert marked.pids() == []


def test_latent_and_sparse_layers_run_under_their_styles(marked: Marked, tmp_path: Path) -> None:
    """MLA by hp_cp and DSA by hp_dsa, with its own indexer and without, in one model."""
    shared = DSA.model_copy(update={"has_indexer": False})
    configs = [GATHER, AGAIN, *(Config(ulysses_degree=1, **{k: True}) for k in
               ("load_balance", "overlap"))]  # fmt: skip
    found = measurer(marked, tmp_path, 2, MLA, DSA, shared, recompute=True).finals(configs)

    for said in found.values():
        assert_timed(said)
    # forward runs twice: latent in all three layers, V of MLA, the index key; one loss
    assert found[GATHER].collectives is not None
    assert found[GATHER].collectives["all_gather"] == 2 * (2 + 2 + 1)
    assert found[GATHER].collectives["all_reduce"] == 2
    assert marked.pids() == []


def test_a_runtime_that_ignores_an_option_is_found_out(marked: Marked, tmp_path: Path) -> None:
    """Its result is right, and its time is that of something else; a wrong result is ``wrong``."""
    wrong = Config(ulysses_degree=2, overlap=True, head_groups=2)
    found = measurer(marked, tmp_path, 2, FULL, fault="degree").finals([GATHER, ULYSSES, wrong])

    assert_timed(found[ULYSSES])
    assert found[GATHER].outcome == "inactive"
    assert "must send 2 all_gather of" in found[GATHER].reason
    assert "and sent 4 all_to_all of" not in found[ULYSSES].reason
    assert found[wrong].outcome == "wrong"
    assert "output must equal the unsharded one within 1e-09" in found[wrong].reason
    assert math.isnan(found[wrong].median_ms)


def test_a_rank_that_crashes_costs_only_its_configuration(marked: Marked, tmp_path: Path) -> None:
    """Of three finalists the other two are measured in another job."""
    finalists = [ULYSSES, AGAIN, GATHER]
    found = measurer(marked, tmp_path, 2, FULL, fault="crash").finals(finalists)

    assert list(found) == finalists
    assert_timed(found[ULYSSES])
    assert_timed(found[GATHER])
    assert found[AGAIN].outcome == "crash"
    assert "rank 1 on" in found[AGAIN].reason
    assert "raised RuntimeError: the third wheel came off (stage: warm-up)" in found[AGAIN].reason
    assert 'raise RuntimeError("the third wheel came off")' in found[AGAIN].details
    assert marked.pids() == []


def test_a_rank_that_finds_no_memory_is_out_of_memory(marked: Marked, tmp_path: Path) -> None:
    """The allocator's own words, as it speaks them under a real limit."""
    said = measurer(marked, tmp_path, 2, FULL, fault="oom", seq_len=4096).trial(AGAIN)
    assert said.outcome == "oom", said.reason + said.details
    assert "rank 1 on" in said.reason
    assert marked.pids() == []


def test_a_rank_that_hangs_is_a_timeout_and_says_where(marked: Marked, tmp_path: Path) -> None:
    """All ranks are ended in time, and the innermost frame of each is told."""
    for timeout in (30, 90, 270):  # until the ranks have come so far on a busy machine
        said = measurer(marked, tmp_path, 2, FULL, fault="hang", timeout=timeout).trial(AGAIN)
        assert said.outcome == "timeout", said.reason
        assert f"the job had not ended after {timeout} s" in said.reason
        if "rank1 in hang (faulty_job.py:" in said.reason and "rank0 in " in said.reason:
            break
    assert "rank1 in hang (faulty_job.py:" in said.reason, said.reason
    assert "rank0 in " in said.reason
    assert "(stage: warm-up)" in said.reason
    assert marked.pids() == []
