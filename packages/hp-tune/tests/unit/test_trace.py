"""The trace is one that Perfetto reads: Chrome's trace event format, checked field by field."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.cost.predict import Prediction, predict
from hp_tune.errors import UsageError
from hp_tune.explanation.trace import write_trace
from hp_tune.models.hf_config import read_model
from hp_tune.workload import Config, Workload


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Complete(Strict):
    """Duration event ``X``: microseconds, in one thread of one process."""

    ph: Literal["X"]
    name: str = Field(min_length=1)
    cat: Literal["compute", "network"]
    pid: int
    tid: int
    ts: float = Field(ge=0)
    dur: float = Field(ge=0)
    args: dict[str, str | float | int]


class Metadata(Strict):
    """Names and order of processes and threads."""

    ph: Literal["M"]
    name: Literal["process_name", "thread_name", "thread_sort_index"]
    pid: int
    tid: int
    args: dict[str, str | int]


class Trace(Strict):
    """The JSON object format."""

    traceEvents: list[Complete | Metadata]
    displayTimeUnit: Literal["ms", "ns"]
    otherData: dict[str, str]


def prediction() -> Prediction:
    """Two kinds of layers, asynchronous, so that both streams are busy at once."""
    workload = Workload(seq_len=32768, cp_size=8, handoffs=True)
    config = Config(ulysses_degree=8, overlap=True)
    return predict(read_model("gpt-oss-20b"), read_cluster("hgx-h100"), workload, config)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A written trace."""
    found = tmp_path / "trace.json"
    write_trace(prediction(), "ulysses", found)
    return found


def test_a_trace_has_the_fields_of_the_format_and_no_others(path: Path) -> None:
    """Unknown phases, missing times and values that JSON has no word for are errors here."""
    found = Trace.model_validate_json(path.read_text())

    named = {(e.pid, e.tid) for e in found.traceEvents if e.name == "thread_name"}
    assert {(e.pid, e.tid) for e in found.traceEvents if e.ph == "X"} <= named
    processes = [e for e in found.traceEvents if e.name == "process_name"]
    assert len(processes) == 2, "one per kind of layer"
    for event in found.traceEvents:
        TypeAdapter(dict[str, Any]).validate_python(event.args)


def test_tracks_are_streams_and_nothing_on_one_overlaps(path: Path) -> None:
    """Two tracks per phase and kind of layer; backward starts where forward ends."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    lines = prediction().timelines

    assert len(events) == sum(len(line.slots) for line in lines)
    for pid in (1, 2):
        ends = {}
        for tid in (1, 2, 3, 4):
            track = sorted((e["ts"], e["ts"] + e["dur"]) for e in events
                           if (e["pid"], e["tid"]) == (pid, tid))  # fmt: skip
            assert all(b[0] >= a[1] - 0.01 for a, b in pairwise(track))
            ends[tid] = (track[0][0], track[-1][1])
        assert min(ends[3][0], ends[4][0]) >= max(ends[1][1], ends[2][1]) - 0.01
        total = max(end for _, end in ends.values())
        length = sum(max(s.end for s in line.slots) for line in lines[2 * pid - 2 : 2 * pid])
        assert total == pytest.approx(length * 1e6, abs=0.02)


def test_an_event_says_what_it_is_made_of(path: Path) -> None:
    """Formula, bytes, share of the peak and source travel with a collective."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    sent = [e for e in events if e["cat"] == "network"]

    assert sent
    for event in sent:
        assert {"formula", "bytes", "share_of_peak", "source", "exposed_us"} <= set(event["args"])
        assert event["args"]["exposed_us"] <= event["dur"] + 0.01


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """A folder that is not there."""
    with pytest.raises(UsageError, match=r"--trace .* cannot be written"):
        write_trace(prediction(), "x", tmp_path / "none" / "t.json")


def test_kinds_of_layers_that_are_as_many_keep_their_own_numbers(path: Path) -> None:
    """Twelve slide and twelve are full: each track has the pairs of its own attention."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    found = {e["pid"]: e["args"]["pairs"] for e in events if e["name"] == "attention"}
    terms = [term for term in prediction().terms if term.name == "attention"]
    wanted = [dict(term.inputs)["pairs"] for term in terms if term.phase == "forward"]

    assert [term.layers for term in terms] == [12] * 4
    assert found == {1: pytest.approx(wanted[0], rel=1e-5), 2: pytest.approx(wanted[1], rel=1e-5)}
    assert wanted[0] != wanted[1]
