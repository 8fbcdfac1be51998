"""Files of launches: which entry serves which size, and that the runtime reads what is written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from hp_comm.kernels import config
from hp_tune.kernels import entries
from hp_tune.kernels.entries import Found, entries_of


def sizes(rows: int, inner: int, element_size: int = 2) -> dict[str, int]:
    return {"rows": rows, "inner": inner, "element_size": element_size}


def choose(found: list[Found], wanted: dict[str, int]) -> int:
    tuned = config.KernelConfig("pack", "cuda-sm90", entries_of(found))
    return config.choose(tuned, wanted)["tile"]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Files are looked for anew."""
    config._tuned.cache_clear()
    yield
    config._tuned.cache_clear()


def test_borders_lie_in_the_middle_of_ratios() -> None:
    """Between 1024 and 4096 it is 2048, and both ends count."""
    found = [(sizes(1024, 512), {"tile": 1}), (sizes(4096, 512), {"tile": 2})]

    first, last = entries_of(found)
    assert first.when == {"rows": (None, 2048)} and last.when == {}
    assert [choose(found, sizes(n, 512)) for n in (1, 2048, 2049, 10**9)] == [1, 1, 2, 2]


def test_on_a_grid_every_size_finds_the_nearest_in_log_distance() -> None:
    """Rows x inner x bytes of an element, each with a launch of its own."""
    points = [sizes(r, i, e) for r in (512, 4096, 65536) for i in (128, 1024) for e in (2, 4)]
    found = [(point, {"tile": 2**n}) for n, point in enumerate(points)]

    for rows in (1, 700, 3000, 20000, 10**6):
        for inner in (8, 300, 500, 4096):
            for element_size in (1, 2, 4, 8):
                wanted = sizes(rows, inner, element_size)
                nearest = min(
                    range(len(points)),
                    key=lambda n: [
                        round(abs(math.log(points[n][name] / wanted[name])), 9)
                        for name in ("rows", "inner", "element_size")
                    ],
                )
                assert choose(found, wanted) == 2**nearest, wanted


def test_every_measured_size_finds_its_own_launch_wherever_it_lies() -> None:
    """No grid: sizes that a user asked for, one by one."""
    points = [(7, 3), (7, 4000), (90, 64), (91, 64), (5000, 1), (5000, 2), (6000, 70000)]
    found = [(sizes(r, i), {"tile": 2**n}) for n, (r, i) in enumerate(points)]

    for size, launch in found:
        assert choose(found, dict(size)) == launch["tile"]
    assert entries_of(found)[-1].when == {}


def test_neighbours_with_one_launch_share_an_entry() -> None:
    """Three sizes, one launch: one entry without bounds; two launches: two entries."""
    same = [(sizes(n, 512), {"tile": 8}) for n in (512, 4096, 32768)]
    assert [entry.when for entry in entries_of(same)] == [{}]

    last_two = [(sizes(512, 512), {"tile": 4}), *same[1:]]
    assert [entry.launch["tile"] for entry in entries_of(last_two)] == [4, 8]


def test_the_runtime_finds_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """Written, read back, and chosen by hp_comm's own launch_of through HP_KERNEL_CONFIGS."""
    small, large = {"tile": 1024, "num_warps": 2}, {"tile": 16384, "num_warps": 8, "num_stages": 2}
    found = [(sizes(1024, 512), small), (sizes(16384, 512), large)]

    path = entries.write("pack", "cuda-sm90", found, "measured: a test", tmp_path / "configs")
    monkeypatch.setenv("HP_KERNEL_CONFIGS", str(path.parent))

    assert config.launch_of("pack", "cuda-sm90", sizes(2000, 512)) == small
    assert config.launch_of("pack", "cuda-sm90", sizes(2**20, 64, 4)) == large
    assert config.launch_of("merge", "cuda-sm90", sizes(2000, 512)) == config.DEFAULTS["cuda"]
    content = json.loads(path.read_text())
    assert content["kernel_hash"] == config.kernel_hash()
    assert content["found_by"] == "measured: a test"


def test_a_file_for_other_kernels_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh: None
) -> None:
    """The hash that hp-tune writes is the one that the runtime compares."""
    path = entries.write("pack", "cuda-sm90", [(sizes(1, 1), {"tile": 64})], "", tmp_path)
    path.write_text(path.read_text().replace(config.kernel_hash(), "0" * 16))
    monkeypatch.setenv("HP_KERNEL_CONFIGS", str(tmp_path))

    assert config.launch_of("pack", "cuda-sm90", sizes(1, 1)) == config.DEFAULTS["cuda"]
    assert "tune again with hp-tune kernels" in caplog.text
