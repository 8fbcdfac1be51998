from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_comm.kernels.config import Entry, KernelConfig, choose, path_of, read, validate, write

GOOD: dict[str, Any] = {
    "format": 1,
    "kernel": "pack",
    "device": "ascend910b",
    "found_by": "a test",
    "entries": [
        {"when": {"D": [64, 128], "H": [8, None]}, "launch": {"BLOCK": 64, "num_warps": 4}},
        {"when": {}, "launch": {"BLOCK": 32}},
    ],
}


def test_a_config_survives_the_way_through_a_file(tmp_path: Path) -> None:
    """What is written is what is read; nothing else is left in the folder."""
    config = KernelConfig(
        "pack",
        "cuda-sm90",
        (Entry({"D": (64, None)}, {"BLOCK": 64}), Entry({}, {"BLOCK": 16})),
        "hp-tune",
    )
    path = path_of("pack", "cuda-sm90", tmp_path / "configs")
    write(config, path)
    write(config, path)

    assert read(path) == config
    assert [p.name for p in path.parent.iterdir()] == ["pack.cuda-sm90.json"]


@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        ({"D": 64, "H": 8}, 64),
        ({"D": 128, "H": 99}, 64),
        ({"D": 129, "H": 8}, 32),
        ({"D": 64, "H": 7}, 32),
        ({"D": 64}, 32),
        ({}, 32),
    ],
)
def test_the_first_entry_whose_bounds_hold_is_chosen(sizes: dict[str, int], block: int) -> None:
    """Both ends count, null is no bound, a size that is not given holds none."""
    assert choose(validate(GOOD, "here"), sizes)["BLOCK"] == block


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, r"format \(2\) must be 1"),
        ({"kernel": ""}, r"kernel \(''\) must be a name"),
        ({"device": None}, r"device \(None\) must be a name"),
        ({"blocks": 3}, r"fields \(blocks\) must be among"),
        ({"entries": []}, "entries must be a list with an entry"),
        ({"entries": [{"when": {"D": [1, 2]}, "launch": {"B": 1}}]}, "last entry must serve every"),
        (
            {"entries": [{"when": {"D": [3, 2]}, "launch": {"B": 1}}]},
            r"\[3, 2\]\) must not be empty",
        ),
        ({"entries": [{"when": {"D": 3}, "launch": {"B": 1}}]}, r"must be \[low, high\]"),
        ({"entries": [{"when": {}, "launch": {}}]}, "must not be empty"),
        ({"entries": [{"when": {}, "launch": {"B": 0}}]}, r"launch B \(0\) must be at least 1"),
        ({"entries": [{"when": {}, "launch": {"B": True}}]}, r"launch B \(True\) must be"),
        ({"entries": [{"launch": {"B": 1}}]}, "must be an object with when and launch"),
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
