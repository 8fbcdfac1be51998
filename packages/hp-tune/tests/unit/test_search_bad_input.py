"""Bad input of ``hp-tune search``: one clear message, its exit code, no traceback."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import optuna
import pytest

from ._program import empty_folder, run

QWEN = ["search", "--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--cp", "8"]
SEARCH = [*QWEN, "--seq", "64K"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in an empty folder."""
    return empty_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (QWEN, "one of --seq and --seq-hist must be given"),
        ([*SEARCH, "--seq-hist", "h"], "one of --seq and --seq-hist must be given"),
        ([*QWEN, "--seq-hist", "none.txt"], "none.txt: cannot be read"),
        ([*QWEN, "--seq", "32K,x"], "'x' must be a whole number of at least 1"),
        ([*SEARCH, "--documents", "none.txt"], "none.txt: cannot be read"),
        ([*SEARCH, "--space", "ul=1"], "did you mean 'u'?"),
        ([*SEARCH, "--space", "u=3"], "u (3) must be among 1, 2, 4, 8"),
        ([*SEARCH, "--require", "memory_gb<1"], "did you mean 'memory_gib'?"),
        ([*SEARCH, "--require", "__import__('os')"], "column 12"),
        ([*SEARCH, "--budget", "soon"], "'soon' must be a time above 0"),
        ([*SEARCH, "--max-trials", "0"], "'0' must be a whole number of at least 1"),
        ([*SEARCH, "--mode", "guess"], "'guess' is not one of"),
        ([*SEARCH, "--kernels", "cuda"], "--kernels (cuda) must be an Ascend"),
        ([*SEARCH, "--storage", "nonsense"], "--storage (nonsense) must be an address"),
        ([*SEARCH, "--storage", "sqlite:///a.db", "--study", "s"], "must not both be given"),
        ([*SEARCH, "--within", "0.5"], "is not in the range"),
        ([*SEARCH, "--within", "nan"], "'nan' must be a number of at least 1"),
        ([*SEARCH, "--out", ""], "--out (.) must name a file"),
        ([*SEARCH, "--require", "(" * 2000 + "u>1"], "more than 50 parentheses are open"),
        ([*QWEN, "--seq", "9" * 5000], "must be a whole number of at least 1"),
        ([*SEARCH, "--cp", "999999999999"], "--cp (999999999999) must be at most 16384"),
    ],
)
def test_wrong_options_are_exit_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    """Each names the option and what it takes; nothing is written."""
    code, _, err = run(capsys, *arguments)

    assert code == 2
    assert text in err
    assert not Path("plan.json").exists()


def test_long_names_are_cut_in_the_name_of_the_study(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """A file name has 255 bytes; one that the user chose too long is said to be."""
    (folder / "long.yaml").write_text(f"extends: atlas-800t-a2\nname: {'n' * 300}\n")

    assert run(capsys, *SEARCH, "--cluster", "long.yaml")[0] == 0
    code, _, err = run(capsys, *SEARCH, "--study", "s" * 300)
    assert code == 8
    assert "cannot be written: File name too long" in err


def test_nothing_that_keeps_to_a_requirement_is_exit_three(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole table, with the numbers that break it."""
    code, out, err = run(capsys, *SEARCH, "--require", "time_ms < 1")

    assert code == 3
    assert "R01" in out
    assert "must keep to time_ms < 1" in out
    assert "configurations are rejected" in err


def test_a_length_beyond_the_model_is_said_and_priced(capsys: pytest.CaptureFixture[str]) -> None:
    """Rope scaling may follow: a note, not an error."""
    code, out, _ = run(capsys, *QWEN, "--seq", "256K")

    assert code == 0
    assert "seq_len (262144) is longer than Qwen2.5-7B allows (131072)" in out


def test_broken_and_foreign_studies_are_exit_eight(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """Damage inside, another tool's study, text, a folder that is a file, a full or wrong place."""
    run(capsys, *SEARCH, "--study", "s.journal")
    lines = Path("s.journal").read_bytes().splitlines(keepends=True)
    Path("s.journal").write_bytes(b"".join([*lines[:2], b"garbage\n", *lines[2:]]))
    code, _, err = run(capsys, *SEARCH, "--study", "s.journal")
    assert (code, "is broken in line 3" in err) == (8, True)

    theirs = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend("theirs.journal")
    )
    optuna.create_study(study_name="theirs", storage=theirs).enqueue_trial({"x": 1})
    code, _, err = run(capsys, *SEARCH, "--study", "theirs.journal")
    assert (code, "holds another search ('theirs'" in err) == (8, True)

    Path("letter").write_text("dear diary")
    code, _, err = run(capsys, *SEARCH, "--study", "letter")
    assert (code, "letter is not an Optuna journal" in err) == (8, True)
    code, _, err = run(capsys, *SEARCH, "--study", "letter/s.journal")
    assert (code, "study letter/s.journal cannot be written" in err) == (8, True)
    code, _, err = run(capsys, *SEARCH, "--study", "/proc/none/s.journal")
    assert (code, "cannot be written" in err) == (8, True)
    code, _, err = run(capsys, *SEARCH, "--study", "t.journal", "--json", "--batch", "2")
    code, _, err = run(capsys, *SEARCH, "--study", "t.journal", "--json", "--batch", "4")
    assert json.loads(err)["code"] == code == 8


def test_several_lengths_are_one_plan_with_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    """A histogram, too; the study of each length is named after it."""
    Path("h.txt").write_text("8192 3\n65536 1\n")
    code, out, _ = run(
        capsys, *QWEN, "--seq-hist", "h.txt", "--handoffs", "--study", "s.journal", "--json"
    )
    found = json.loads(out)

    assert code == 0
    assert [s["workload"]["seq_len"] for s in found["searches"]] == [8192, 65536]
    assert [b["weight"] for b in found["buckets"]] == [0.75, 0.25]
    assert {p.name for p in Path().glob("*.journal")} == {"s-s8192.journal", "s-s65536.journal"}
    assert len(json.loads(Path("plan.json").read_text())["entries"]) == 2


def test_the_same_seed_gives_the_same_study_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte the plan; the same sequence of trials in the study."""
    from hp_tune.study.studies import read_study

    for name in ("a", "b"):
        run(capsys, *SEARCH, "--objective", "pareto", "--variants", "--seed", "7",
            "--study", f"{name}.journal", "--out", f"{name}.json")  # fmt: skip
    trials = [
        [(t.number, t.state, t.values, t.params, t.user_attrs) for t in read_study(Path(path))[2]]
        for path in ("a.journal", "b.journal")
    ]

    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    assert trials[0] == trials[1]


def test_a_model_without_attention_is_one_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """Nothing to choose, nothing divided by a time of nought; ``validate`` still describes it."""
    config = {
        "model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "layer_types": ["linear_attention"] * 2,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    for command in (("search",), ("explain",), ("report",), ("search", "--mode", "measured")):
        code, _, err = run(capsys, command[0], "--model", "config.json", *QWEN[3:], "--seq", "64K",
                           *command[1:])  # fmt: skip
        assert code == 2
        assert "must have a layer that context parallelism touches, and has none: all 2 are" in err
    assert not Path("plan.json").exists()
    assert run(capsys, "validate", "config.json")[0] == 0


def test_what_would_never_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks by the million, a million documents in a sequence."""
    Path("h.txt").write_text("2 1\n4 1\n")
    words = ("search", "--model", "Qwen2.5-7B", "--cluster", "hgx-h100")
    for more, text in (
        (("--cp", "1024M", "--seq", "2048M"), "--cp (1073741824) must be at most 16384"),
        (("--cp", "8", "--world", "1024M", "--seq", "64K"), "--world (1073741824) must be at most"),
        (
            ("--cp", "8", "--seq", "1M", "--documents", "h.txt"),
            "at most 100000 documents, and they",
        ),
    ):
        code, _, err = run(capsys, *words, *more)
        assert (code, text in err) == (2, True), err


def test_a_place_that_cannot_be_written_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that is read only, where nothing can be removed either; no study is begun."""

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    for name in ("touch", "unlink", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    for command in (SEARCH, [*SEARCH, "--mode", "measured"], ["profile", "--name", "x"]):
        code, out, err = run(capsys, *command)
        place = "x.yaml" if command[0] == "profile" else "plan.json"
        assert (code, out) == (2, "")
        assert f"--out {place} cannot be written: Read-only file system" in err
        assert "name another place with --out" in err
    assert not Path(".hp-tune").exists()
