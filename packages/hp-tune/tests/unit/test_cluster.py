"""Cluster files: presets carry sources, mistakes are found where they stand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hp_tune.clusters.cluster import Cluster, Curve, Number
from hp_tune.clusters.cluster_files import cluster_presets, read_cluster
from hp_tune.errors import UsageError

PRESETS = (
    "4090x8-pcie", "ascend-910b2", "ascend-910b3", "ascend-910b4", "atlas-350", "atlas-800t-a2",
    "atlas-900-a3", "cpu-gloo", "dgx-a100", "gb200-nvl72", "hgx-a800", "hgx-b200", "hgx-h100",
    "hgx-h200", "hgx-h800", "l20x8-pcie",
)  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_of_a_preset_has_a_source_and_a_reference(name: str) -> None:
    """spec, measured or assumed, each with its ref; the name in the file is the file's."""
    cluster = read_cluster(name)

    assert cluster.name == name
    numbers = [v for part in (cluster.device, *cluster.tiers) for _, v in part]
    numbers += cluster.device.peak_TFLOPS.values()
    for number in numbers:
        if isinstance(number, Number):
            assert number.ref, number
    assert set(cluster_presets()) == set(PRESETS)


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
        ("kind: full_mesh", "kind: hypercube", r"'switch', 'full_mesh', 'ring' or 'shared_bus'"),
        ("{value: 28, source", "{value: '28', source", r"value: Input should be a valid number"),
        ("{value: 28, source", "{value: true, source", r"value: Input should be a valid number"),
        (
            "{value: 10, source",
            "{value: !!int ten, source",
            r"mine.yaml:\d+:\d+: 'ten': invalid literal",
        ),
        ("{value: 10, source", "{value: !us 10, source", r"constructor for the tag '!us'"),
        ("name: RoCE", "name: HCCS", r"tiers \(HCCS, HCCS\) must have different names"),
    ],
)
def test_numbers_that_no_device_has_are_refused(
    tmp_path: Path, old: str, new: str, text: str
) -> None:
    """Units off by a thousand, percent for fractions, both directions, unknown words."""
    with pytest.raises(UsageError, match=text):
        read_cluster(edited(tmp_path, old, new))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tiers:", r"mine.yaml: tiers \(None\) must be a list of tiers with a name each"),
        ("tiers: 5", r"tiers \(5\) must be a list"),
        ("tiers: {a: 1}", r"tiers \({'a': 1}\) must be a list"),
        ("tiers: [1, 2]", r"tiers \(\[1, 2\]\) must be a list"),
        ("tiers: [{name: [a]}]", r"must be a list of tiers with a name each"),
        ("tiers: [{name: RoCE}, {name: RoCE}]", r"tier 'RoCE' must be there once, not 2"),
        ("device: {launch_us: 1e1}", r"'1e1' must be a number, with a dot and a sign"),
        ("device: {launch_us: }", r"None must be a number, or have value, source and ref"),
        ("tiers: &t [*t]", r"mine.yaml:\d+:\d+: must not be nested so deeply, or hold itself"),
        ("description: 2001-99-99", r"mine.yaml:3:14: '2001-99-99': month"),
        ("description: 2026-02-30", r"mine.yaml:3:14: '2026-02-30': day"),
        (
            "description: !!python/object:os.system x",
            r"not YAML: could not determine a constructor",
        ),
    ],
)
def test_what_is_no_cluster_is_one_sentence(tmp_path: Path, text: str, problem: str) -> None:
    """Wrong types, a tier given twice, a list that holds itself: no traceback."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: atlas-800t-a2\nname: mine\n{text}\n")

    with pytest.raises(UsageError, match=problem):
        read_cluster(path)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    """Nine lines of YAML may stand for as many million entries as memory has room for."""
    names = "abcdefgh"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{n}: &{n} [{', '.join([f'*{b}'] * 10)}]" for b, n in itertools.pairwise(names)]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines))

    with pytest.raises(UsageError, match="hold so much by aliases"):
        read_cluster(path)


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
    changed = one.model_copy(update={"shared_cores": 3})

    assert one.digest == two.digest != changed.digest
    assert Cluster.model_validate(one.model_dump()) == one


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("{value: 294.9, source", "{value: 2949, source", "TFLOPS.bf16 .2949. must be near"),
        ("{value: 313, source", "{value: 3130, source", "TFLOPS.fp16 .3130. must be near"),
        ("{value: 1600, source", "{value: 160, source", "device.memory_GBps .160. must be near"),
        ("{value: 60.32, source", "{value: 603.2, source", "device.memory_GiB .603.2. must be"),
        ("{value: 28, source", "{value: 280, source", "tiers.HCCS.GBps_per_link .280. must be"),
        ("{value: 28, source", "{value: 2.8, source", "tiers.HCCS.GBps_per_link .2.8. must be"),
        ("{value: 25, source", "{value: 200, source", r"RoCE.*one direction, bytes and not bits"),
    ],
)
def test_numbers_off_by_ten_are_caught(tmp_path: Path, old: str, new: str, text: str) -> None:
    """Within all limits of the unit, but not near what is known of the part or the link."""
    with pytest.raises(UsageError, match=text):
        read_cluster(edited(tmp_path, old, new))


@pytest.mark.parametrize("times", [0.1, 10])
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "cpu-gloo"])
def test_memory_bandwidth_off_by_ten_is_caught_under_any_name(name: str, times: float) -> None:
    """An accelerator that nobody knows still has the ratio of one."""
    data = read_cluster(name).model_dump()
    data["device"]["name"] = "Mystery X1"
    assert Cluster.model_validate(data).device.name == "Mystery X1"
    data["device"]["memory_GBps"]["value"] *= times

    with pytest.raises(ValueError, match=r"off by a power of ten|must be between"):
        Cluster.model_validate(data)


def test_a_file_extends_a_preset_and_says_only_what_differs(tmp_path: Path) -> None:
    """Tiers are matched by name, numbers replaced whole; mistakes keep their place in the file."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: atlas-800t-a2\nname: mine\ntiers:\n  - name: RoCE\n"
        "    GBps_per_rank: {value: 12.5, source: measured, ref: ours}\n"
    )
    mine, base = read_cluster(path), read_cluster("atlas-800t-a2")

    assert (mine.name, mine.device) == ("mine", base.device)
    assert mine.tiers[0] == base.tiers[0]
    assert mine.tiers[1].bandwidth == Number(value=12.5, source="measured", ref="ours")
    assert mine.tiers[1].efficiency == base.tiers[1].efficiency
    path.write_text("extends: atlas-800t-a2\ntiers:\n  - name: RoCE\n    latency: 3\n")
    with pytest.raises(UsageError, match=r"mine.yaml:4:5: unknown key 'tiers.1.latency'"):
        read_cluster(path)
    path.write_text("extends: atlas-800t-a3\n")
    with pytest.raises(UsageError, match=r"extends \(atlas-800t-a3\).*did you mean atlas-800t-a2"):
        read_cluster(path)


def test_a_curve_has_one_kind_of_points() -> None:
    """Points, or points by number of ranks: the largest measured group that is not too large."""
    points = ((1.0, 2.0), (2.0, 3.0))
    curve = Curve(by_ranks={2: points, 8: ((1.0, 1.0), (2.0, 1.0))}, source="measured", ref="x")

    assert curve.for_ranks(4) == points
    assert curve.for_ranks(16)[0] == (1.0, 1.0)
    for wrong in ({}, {"points": points, "by_ranks": {2: points}}, {"points": points[:1]}):
        with pytest.raises(ValueError, match="curve must have"):
            Curve(source="measured", ref="x", **wrong)
    with pytest.raises(ValueError, match="at least two points"):
        Curve(source="measured", ref="x", by_ranks={2: points, 4: ()})
    with pytest.raises(ValueError, match=r"by_ranks \[0, 2\] must be numbers of ranks"):
        Curve(source="measured", ref="x", by_ranks={2: points, 0: points})


def test_fractions_by_size_are_checked_for_every_number_of_ranks() -> None:
    """Not only for two."""
    data = read_cluster("atlas-800t-a2").model_dump()
    curve = {2: ((1.0, 0.2), (2.0, 0.3)), 8: ((1.0, 20.0), (2.0, 30.0))}
    data["tiers"][0]["efficiency_by_size"] = {"by_ranks": curve, "source": "measured", "ref": "x"}

    with pytest.raises(ValueError, match="efficiency_by_size must hold fractions"):
        Cluster.model_validate(data)
