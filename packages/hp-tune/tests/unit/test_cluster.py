"""Cluster files: presets carry sources, mistakes are found where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_tune.cluster import Cluster, Number, cluster_presets, read_cluster
from hp_tune.errors import UsageError


@pytest.mark.parametrize("name", ["atlas-800t-a2", "cpu-gloo", "hgx-h100"])
def test_every_number_of_a_preset_has_a_source_and_a_reference(name: str) -> None:
    """spec, measured or assumed, each with its ref; the name in the file is the file's."""
    cluster = read_cluster(name)

    assert cluster.name == name
    numbers = [v for part in (cluster.device, *cluster.tiers) for _, v in part]
    numbers += cluster.device.peak_TFLOPS.values()
    for number in numbers:
        if isinstance(number, Number):
            assert number.ref, number
    assert set(cluster_presets()) == {"atlas-800t-a2", "cpu-gloo", "hgx-h100"}


def edited(tmp_path: Path, old: str, new: str) -> Path:
    """A copy of a preset with one text replaced."""
    text = cluster_presets()["atlas-800t-a2"].read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_unknown_key_is_refused_with_its_place_and_the_nearest_key(tmp_path: Path) -> None:
    """The line and column of the key, and what was most likely meant."""
    path = edited(tmp_path, "  launch_us:", "  launch_ms:")

    with pytest.raises(UsageError) as error:
        read_cluster(path)
    assert "unknown key 'device.launch_ms'; did you mean 'launch_us'?" in str(error.value)
    line = (
        path.read_text()
        .splitlines()
        .index(next(x for x in path.read_text().splitlines() if "launch_ms" in x))
    )
    assert f"mine.yaml:{line + 1}:3:" in str(error.value)


def test_unknown_key_in_a_tier_or_a_number_names_its_own_neighbours(tmp_path: Path) -> None:
    """Nested places look among their own keys."""
    with pytest.raises(UsageError, match=r"'tiers.0.latency'; did you mean 'latency_us'"):
        read_cluster(edited(tmp_path, "    latency_us:", "    latency:"))
    with pytest.raises(UsageError, match=r"'device.memory_GiB.sorce'; did you mean 'source'"):
        read_cluster(edited(tmp_path, "60.32, source", "60.32, sorce"))


def test_duplicate_key_is_refused_with_both_lines(tmp_path: Path) -> None:
    """PyYAML alone would silently take the second."""
    path = edited(tmp_path, "tiers:\n", "name: again\ntiers:\n")

    with pytest.raises(UsageError, match=r"mine.yaml:\d+:1: key 'name' appears twice; first in"):
        read_cluster(path)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "{value: 28, source",
            "{value: 28000, source",
            r"28000 must be between 0.001 and 5000 GB/s",
        ),
        ("{value: 0.66, source", "{value: 66, source", r"66 must be between 0.001 and 1"),
        (
            "{value: 28, source: spec",
            "{value: 28, source: hearsay",
            r"'spec', 'measured' or 'assumed'",
        ),
        ("{value: 28, source", "{value: -28, source", r"greater than 0"),
        ("GBps_per_link", "GBps_per_rank", r"kind full_mesh must have GBps_per_link"),
        ("size: 8", "size: null", r"tier sizes .* must grow from inner to outer"),
        ("kind: full_mesh", "kind: hypercube", r"'switch', 'full_mesh' or 'shared_bus'"),
    ],
)
def test_numbers_that_no_device_has_are_refused(
    tmp_path: Path, old: str, new: str, text: str
) -> None:
    """Units off by a thousand, percent for fractions, both directions, unknown words."""
    with pytest.raises(UsageError, match=text):
        read_cluster(edited(tmp_path, old, new))


def test_bare_numbers_are_taken_as_assumed(tmp_path: Path) -> None:
    """A quick file may leave the sources out; the report then says assumed."""
    lines = cluster_presets()["atlas-800t-a2"].read_text().splitlines()
    (text,) = (line for line in lines if "memory_GiB" in line)
    cluster = read_cluster(edited(tmp_path, text, "  memory_GiB: 61"))

    assert cluster.device.memory_GiB == Number(
        value=61, source="assumed", ref="given without a source"
    )


def test_broken_and_missing_files_are_one_sentence(tmp_path: Path) -> None:
    """Syntax errors have a place; a wrong preset name has a suggestion."""
    path = tmp_path / "c.yaml"
    path.write_text("name: [\n")
    with pytest.raises(UsageError, match=r"c.yaml:\d+:\d+: not YAML"):
        read_cluster(path)
    path.write_text("- 1\n")
    with pytest.raises(UsageError, match="must hold a YAML mapping"):
        read_cluster(path)
    with pytest.raises(UsageError, match="did you mean hgx-h100"):
        read_cluster("hgx-h10")


def test_digest_follows_the_numbers(tmp_path: Path) -> None:
    """Equal numbers, equal digest; one changed number, another digest."""
    one, two = read_cluster("cpu-gloo"), read_cluster("cpu-gloo")
    changed = one.model_copy(update={"shared_cores": False})

    assert one.digest == two.digest != changed.digest
    assert Cluster.model_validate(one.model_dump()) == one
