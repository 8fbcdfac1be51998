"""A plan of another schema is told from one that was changed, and from what is no plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hp_tune.errors import PlanSchemaError
from hp_tune.plans.plan import SCHEMA, PlanFile
from hp_tune.plans.plan_file import load

from ._program import empty_folder, run

OLDER = Path(__file__).with_name("plan_of_schema_3.json")
"""Written by the hp-tune of that time: two layers on two CPU ranks."""

FIELDS = {
    "Config": "balance_hybrid gather halo head_groups keep_kv kv_chunks load_balance overlap "
    "ulysses_degree",
    "Entry": "alternatives best failed front kernels layout margin outranked recompute rejected "
    "styles when windows",
    "FailedConfig": "config outcome reason",
    "MeasuredTime": "backward_ms forward_ms in_finals interval_ms median_ms memory_GiB samples_ms",
    "PlanFile": "cluster cost_model digest entries made_by model notes schema_ workload",
    "PricedConfig": "backward_ms bytes_sent config exposed_comm_ms forward_ms imbalance measured "
    "memory_GiB mode source vs_best",
    "RejectedConfig": "config hint message numbers rule",
    "When": "cp_size lengths seq seq_len tp_size weight world_size",
    "Workload": "batch causal cp_size documents dtype handoffs layout recompute seq_len "
    "skips_masked tp_size world_size",
}
"""Of ``hp-tune/plan/4``."""


def fields_of(model: type[BaseModel]) -> dict[str, str]:
    """The fields of a model and of all models in it, by their names."""
    found = {model.__name__: " ".join(sorted(model.model_fields))}
    for field in model.model_fields.values():
        found |= in_type(field.annotation)
    return found


def in_type(kind: Any) -> dict[str, str]:
    """The same of whatever a field's type is made of."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return fields_of(kind)
    found: dict[str, str] = {}
    for part in getattr(kind, "__args__", ()):
        found |= in_type(part)
    return found


def test_new_fields_are_a_new_schema() -> None:
    """A digest is of the whole content: a field more makes every older plan look edited."""
    assert SCHEMA == "hp-tune/plan/4"
    assert fields_of(PlanFile) == FIELDS, "raise SCHEMA, and change this table"


def test_a_real_plan_of_the_schema_before_is_called_older() -> None:
    """Which one it is, which one is read, and what to do; not that somebody had changed it."""
    with pytest.raises(PlanSchemaError) as error:
        load(OLDER)

    assert error.value.message == (
        f"{OLDER}: schema ('hp-tune/plan/3') must be 'hp-tune/plan/4', which this hp-tune reads: "
        "an older hp-tune wrote it"
    )
    assert error.value.hint == (f"write it again with this one: `hp-tune search ... --out {OLDER}`")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("hp-tune/plan/5", "a newer hp-tune wrote it; install that one here, or write it again"),
        ("hp-tune/plan/12", "a newer hp-tune wrote it"),
        ("hp-tune/plan/1", "an older hp-tune wrote it"),
        ("hp-tune/plan/x", "it is no plan; write one"),
        ("hp-tune/plan/", "it is no plan"),
        ("hp-tune/acceptance/1", "it is no plan"),
        (4, "it is no plan"),
        (None, "schema (None) must be 'hp-tune/plan/4', which this hp-tune reads: it is no plan"),
    ],
)
def test_newer_ones_and_other_files_are_told_apart(
    tmp_path: Path, schema: object, text: str
) -> None:
    """By the number behind the name, as a number."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(OLDER.read_text()), "schema": schema}))

    with pytest.raises(PlanSchemaError) as error:
        load(path)
    assert text in str(error.value)
    assert "changed" not in str(error.value)


def test_an_older_plan_under_this_schema_is_a_changed_one(tmp_path: Path) -> None:
    """Somebody who only edits the number is told so."""
    path = tmp_path / "plan.json"
    path.write_text(OLDER.read_text().replace("hp-tune/plan/3", SCHEMA))

    with pytest.raises(PlanSchemaError, match="it was changed after it was written"):
        load(path)


@pytest.mark.parametrize(
    "arguments", [["show"], ["explain"], ["export"], ["report"], ["validate"], ["show", "--json"]]
)
def test_every_command_that_reads_one_says_so(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    """Exit code 8, and the way out."""
    empty_folder(tmp_path, monkeypatch)
    Path("plan.json").write_bytes(OLDER.read_bytes())
    command, *more = arguments
    code, _, err = run(capsys, command, "plan.json", *more)

    said = json.loads(err)["hint"] if more else err
    assert code == 8
    assert "hp-tune search ... --out plan.json" in said
