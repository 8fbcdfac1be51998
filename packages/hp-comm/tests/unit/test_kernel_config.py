from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hp_comm.kernels import config
from hp_comm.kernels.config import (
    DEFAULTS,
    Entry,
    KernelConfig,
    choose,
    default_launch,
    kernel_hash,
    launch_of,
    path_of,
    read,
    validate,
    write,
)

GOOD: dict[str, Any] = {
    "format": 1,
    "kernel": "pack",
    "device": "ascend910b3",
    "found_by": "a test",
    "entries": [
        {"when": {"inner": [64, 128], "rows": [8, None]}, "launch": {"tile": 64, "programs": 4}},
        {"when": {}, "launch": {"tile": 32}},
    ],
}


def test_a_config_survives_the_way_through_a_file(tmp_path: Path) -> None:
    """What is written is what is read; nothing else is left in the folder."""
    tuned = KernelConfig(
        "pack",
        "cuda-sm90",
        (Entry({"inner": (64, None)}, {"tile": 64}), Entry({}, {"tile": 16})),
        "hp-tune",
    )
    path = path_of("pack", "cuda-sm90", tmp_path / "configs")
    write(tuned, path)
    write(tuned, path)

    assert read(path) == tuned
    assert [p.name for p in path.parent.iterdir()] == ["pack.cuda-sm90.json"]


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ({"inner": 64, "rows": 8}, 64),
        ({"inner": 128, "rows": 99}, 64),
        ({"inner": 129, "rows": 8}, 32),
        ({"inner": 64, "rows": 7}, 32),
        ({"inner": 64}, 32),
        ({}, 32),
    ],
)
def test_the_first_entry_whose_bounds_hold_is_chosen(sizes: dict[str, int], tile: int) -> None:
    """Both ends count, null is no bound, a size that is not given holds none."""
    assert choose(validate(GOOD, "here"), sizes)["tile"] == tile


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, r"format \(2\) must be 1"),
        ({"kernel": ""}, r"kernel \(''\) must be a name"),
        ({"device": None}, r"device \(None\) must be a name"),
        ({"blocks": 3}, r"fields \(blocks\) must be among"),
        ({"entries": []}, "entries must be a list with an entry"),
        (
            {"entries": [{"when": {"inner": [1, 2]}, "launch": {"tile": 1}}]},
            "last entry must serve every",
        ),
        (
            {"entries": [{"when": {"inner": [3, 2]}, "launch": {"tile": 1}}]},
            r"\[3, 2\]\) must not be empty",
        ),
        ({"entries": [{"when": {"inner": 3}, "launch": {"tile": 1}}]}, r"must be \[low, high\]"),
        ({"entries": [{"when": {}, "launch": {}}]}, "must not be empty"),
        (
            {"entries": [{"when": {}, "launch": {"tile": 0}}]},
            r"launch tile \(0\) must be at least 1",
        ),
        ({"entries": [{"when": {}, "launch": {"tile": True}}]}, r"launch tile \(True\) must be"),
        (
            {"entries": [{"when": {}, "launch": {"tile": 48}}]},
            r"tile \(48\) must be a power of two",
        ),
        ({"entries": [{"when": {}, "launch": {"programs": 4}}]}, r"tile \(None\) must be a power"),
        ({"entries": [{"when": {}, "launch": {"BLOCK": 4}}]}, "launch BLOCK must be one of"),
        (
            {"entries": [{"when": {"rowz": [1, None]}, "launch": {"tile": 4}}]},
            "when rowz must be one",
        ),
        (
            {"entries": [{"when": {}, "launch": {"tile": 4, "num_warps": 4}}]},
            "for a device of cuda",
        ),
        (
            {
                "device": "cuda-sm90",
                "entries": [{"when": {}, "launch": {"tile": 4, "num_warps": 3}}],
            },
            r"num_warps \(3\) must be a power",
        ),
        ({"entries": [{"when": {}, "launch": {"tile": 2**21}}]}, "at most 1048576"),
        ({"kernel": "pakc"}, r"kernel \('pakc'\) must be one of"),
        ({"kernel_hash": 3}, r"kernel_hash \(3\) must be text"),
        ({"entries": [{"launch": {"tile": 1}}]}, "must be an object with when and launch"),
    ],
)
def test_a_bad_config_is_refused_with_its_field(change: dict[str, Any], words: str) -> None:
    """The message begins with the place and names field and value."""
    with pytest.raises(ValueError, match=f"^here.*{words}"):
        validate({**GOOD, **change}, "here")


def test_a_file_that_is_no_json_is_refused_with_its_path(tmp_path: Path) -> None:
    """Half a file, or none, is an error about that file."""
    path = tmp_path / "pack.x.json"
    with pytest.raises(ValueError, match=r"pack\.x\.json: the file must be readable JSON"):
        read(path)
    path.write_text(json.dumps(GOOD)[:-5])
    with pytest.raises(ValueError, match=r"pack\.x\.json: the file must be readable JSON"):
        read(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of launch configs of its own, read afresh."""
    monkeypatch.setattr(config, "path_of", lambda k, d: path_of(k, d, tmp_path))
    config._tuned.cache_clear()
    yield tmp_path
    config._tuned.cache_clear()


def test_a_device_without_a_file_has_defaults_and_one_log_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The miss names the file that was looked for, once, however often it is asked."""
    with caplog.at_level("INFO", "hp_comm.kernels"):
        for _ in range(3):
            launch = launch_of("pack", "ascend910b3", {"rows": 3})

    assert launch == default_launch("ascend910b3") == DEFAULTS["ascend"]
    assert [r.message for r in caplog.records] == [
        "ascend910b3: no launch config (pack.ascend910b3.json); default blocks are used"
    ]


def test_a_file_tuned_for_these_kernels_is_used_and_a_stale_one_is_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hash of other kernels means the defaults, and one line that says how to tune again."""
    good = {**GOOD, "kernel_hash": kernel_hash()}
    path = folder / "pack.ascend910b3.json"
    path.write_text(json.dumps(good))
    assert launch_of("pack", "ascend910b3", {"inner": 64, "rows": 8})["tile"] == 64

    config._tuned.cache_clear()
    path.write_text(json.dumps({**good, "kernel_hash": "old"}))
    for _ in range(2):
        assert launch_of("pack", "ascend910b3", {"inner": 64, "rows": 8}) == DEFAULTS["ascend"]
    (line,) = [r.message for r in caplog.records]
    assert "tuned for another version of the kernels (old" in line and "hp-tune kernels" in line


def test_a_file_for_another_device_is_refused(folder: Path) -> None:
    """A copied file is found out by its content."""
    (folder / "pack.cuda-sm90.json").write_text(json.dumps(GOOD))
    with pytest.raises(ValueError, match=r"pack on ascend910b3\) must be for pack on cuda-sm90"):
        launch_of("pack", "cuda-sm90", {})


def test_the_folder_that_the_environment_names_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tuned here serves without touching the installed package, which fills the gaps."""
    own, packaged = tmp_path / "own", tmp_path / "packaged"
    for folder in (own, packaged):
        folder.mkdir()
    monkeypatch.setattr(config, "FOLDER", packaged)
    monkeypatch.setenv("HP_KERNEL_CONFIGS", str(own))

    assert path_of("pack", "cuda-sm90") == own / "pack.cuda-sm90.json"
    (packaged / "pack.cuda-sm90.json").write_text("{}")
    assert path_of("pack", "cuda-sm90") == packaged / "pack.cuda-sm90.json"
    (own / "pack.cuda-sm90.json").write_text("{}")
    assert path_of("pack", "cuda-sm90") == own / "pack.cuda-sm90.json"

    monkeypatch.delenv("HP_KERNEL_CONFIGS")
    assert path_of("merge", "cuda-sm90") == packaged / "merge.cuda-sm90.json"


def test_a_folder_of_launch_configs_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt variable would otherwise mean slow kernels in silence."""
    monkeypatch.setenv("HP_KERNEL_CONFIGS", str(tmp_path / "misspelt"))
    with pytest.raises(ValueError, match=r"HP_KERNEL_CONFIGS \('.*misspelt'\) must be a folder"):
        path_of("pack", "cuda-sm90")


@pytest.mark.parametrize("asked", [0, 1])
def test_double_buffering_can_be_switched_off(asked: int) -> None:
    """Left out it is the compiler's choice; 0 means off."""
    launch = {"tile": 64, "multibuffer": asked}
    found = validate({**GOOD, "entries": [{"when": {}, "launch": launch}]}, "here")
    assert found.entries[0].launch == launch
    with pytest.raises(ValueError, match=r"launch multibuffer \(2\) must be 0 or 1"):
        validate(
            {**GOOD, "entries": [{"when": {}, "launch": {"tile": 64, "multibuffer": 2}}]}, "here"
        )
