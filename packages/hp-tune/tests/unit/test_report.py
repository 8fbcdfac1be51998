"""The page: one file that needs nothing, says what the search says, and is well formed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.explanation.explain import Explanation, explain
from hp_tune.models.hf_config import read_model
from hp_tune.report.charts import front, length_lines, pareto, short_length, stacked_bars
from hp_tune.report.lengths import AtLength, default_lengths, search_lengths
from hp_tune.report.page import CONTENTS, report_html
from hp_tune.report.svg import PALETTE, ticks
from hp_tune.searching.engine import search
from hp_tune.searching.restriction import read_restriction
from hp_tune.workload import Workload

from ._program import empty_folder, run

VOID = {"meta", "br", "hr", "img", "input", "link"}


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    """Qwen2.5-7B on one Atlas node."""
    workload = Workload(seq_len=65536, cp_size=8)
    model, cluster = read_model("Qwen2.5-7B"), read_cluster("atlas-800t-a2")
    return explain(search(model, cluster, workload, overlap=True))


@pytest.fixture(scope="module")
def lengths(explanation: Explanation) -> tuple[AtLength, ...]:
    """Three lengths, the last of which no configuration can cut."""
    return search_lengths(explanation.result, (16384, 65536, 65540))


@pytest.fixture(scope="module")
def page(explanation: Explanation, lengths: tuple[AtLength, ...]) -> str:
    """The page of that search."""
    return report_html(explanation, lengths)


class Nesting(HTMLParser):
    """Every tag that opens is closed, in order; anchors and links are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if found.get("id"):
            self.anchors.add(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        loaded = {"src", "srcset", "xlink:href", "onload", "onclick"} & set(found)
        assert not loaded and tag not in ("script", "iframe", "link", "img"), (tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_loads_nothing_and_is_well_formed(page: str) -> None:
    """No script, no request, tags closed in order, and every link leads to a part of the page."""
    found = Nesting()
    found.feed(page)

    assert found.open == []
    assert found.links == [f"#{anchor}" for anchor, _ in CONTENTS]
    assert {link[1:] for link in found.links} <= found.anchors
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_colours_are_the_pages_own_in_light_and_dark(page: str) -> None:
    """Each variable that is used is defined twice: for light and for dark."""
    used = set(re.findall(r"var\((--\w+)\)", page))
    style = page[page.index("<style>") : page.index("</style>")]

    assert {"--c0", "--front", "--ink"} <= used
    for name in used:
        assert style.count(f"{name}:") == 2, name
    drawn = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    assert not re.search(r"#[0-9a-fA-F]{6}\b", drawn), "a fixed colour would vanish in one of them"


def test_every_part_is_there_with_its_numbers(explanation: Explanation, page: str) -> None:
    """Ranking, rejections, sources and provenance as the search has them."""
    result = explanation.result
    parser = Nesting()
    parser.feed(page)
    words = " ".join(parser.words)

    for ranked in result.ranking:
        assert words.count(ranked.config.label(8)) >= 4, "in ranking, bytes, memory and the front"
    for _, rejection in result.rejected:
        assert rejection.message in words
    for term in explanation.best.prediction.terms:
        assert term.formula in words
    assert result.cluster.digest in words and result.model.digest in words
    assert "tiers.HCCS.efficiency" in words and "limulidae" in words
    assert page.count("<svg") == 8, "bars, two of lengths, two timelines, bytes, memory, front"
    assert "nothing is valid: sequence length (65540)" in words


def test_the_same_search_gives_the_same_page(
    explanation: Explanation, lengths: tuple[AtLength, ...], page: str
) -> None:
    """No clock, no host, no order of a set."""
    assert report_html(explanation, lengths) == page


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    """Less memory or less time; a tie in one is decided by the other."""
    points = [("a", 1.0, 9.0), ("b", 2.0, 5.0), ("c", 3.0, 6.0), ("d", 4.0, 1.0), ("e", 2.0, 7.0)]

    assert front(points) == ["a", "b", "d"]


@pytest.mark.parametrize(("low", "high"), [(0.0, 4687.0), (0.97, 1.93), (35.9, 38.2), (0.0, 3e-4)])
def test_ticks_are_few_round_numbers_inside(low: float, high: float) -> None:
    """Two to six, evenly spaced, each with few digits."""
    found = ticks(low, high)

    assert 2 <= len(found) <= 7
    assert all(low - 1e-9 <= tick <= high * (1 + 1e-9) for tick in found)
    assert [float(f"{tick:.4g}") for tick in found] == pytest.approx(found, abs=1e-12)


def test_bars_and_lines_are_as_long_as_their_values() -> None:
    """Twice the value is twice the width; a gap in a line is a gap."""
    svg = stacked_bars([("one", {"x": 1.0}), ("two", {"x": 2.0})], "ms", "t")
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="18.00"', svg)]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.02)
    svg = length_lines([1024, 2048, 4096], {"a": [1.0, 2.0, 4.0], "b": [1.0, None, 4.0]}, "ms", "t")
    assert svg.count("<polyline") == 1
    assert svg.count("<circle") == 5
    assert (short_length(131072), short_length(2**21), short_length(65540)) == (
        "128K", "2M", "65540",
    )  # fmt: skip


def test_default_lengths_can_be_cut_by_every_degree(explanation: Explanation) -> None:
    """An eighth to four times the length, rounded up to what two halves per rank need."""
    found = default_lengths(explanation.result)

    assert found == (8192, 16384, 32768, 65536, 131072, 262144)


def test_the_command_writes_the_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the options of a search; a place that cannot be written is one sentence."""
    empty_folder(tmp_path, monkeypatch)
    asked = ["report", "--model", "Qwen2.5-7B", "--cluster", "atlas-800t-a2", "--cp", "8",
             "--seq", "64K", "--lengths", "32K"]  # fmt: skip

    code, out, _ = run(capsys, *asked, "--json")
    assert code == 0
    assert json.loads(out)["lengths"] == [32768, 65536]
    assert Path("report.html").read_text().startswith("<!DOCTYPE html>")
    code, _, err = run(capsys, *asked, "--out", "none/r.html")
    assert (code, "--out none/r.html cannot be written" in err) == (2, True)


def test_many_configurations_are_drawn_in_colours_that_differ() -> None:
    """The nearest to the fastest, as many as there are colours; the page says who is left out."""
    workload = Workload(seq_len=65536, cp_size=8, handoffs=True)
    model, cluster = read_model("Llama-3.1-8B"), read_cluster("atlas-800t-a2")
    result = search(model, cluster, workload, overlap=True, variants=True)
    label = result.ranking[0].config.label(8)
    explained = Explanation(result, label, rivals=(), flips=(), opportunities=())
    page = report_html(explained, search_lengths(explained.result, (32768, 65536)))

    count = len(explained.result.ranking)
    assert count > 2 * PALETTE
    assert f"Drawn are the {PALETTE} that come nearest to the fastest at some length; " in page
    left_out = re.search(r"at some length; (\d+) slower ones are left out", page)
    assert left_out is not None and int(left_out[1]) >= count - PALETTE
    for label in ("Time against sequence length", "Time over the fastest"):
        chart = svg_of(page, label)
        strokes = re.findall(r'<polyline [^>]*stroke="(var\(--c\d\))"', chart)
        assert len(strokes) == len(set(strokes)) == PALETTE
        assert explained.label in chart
    names = re.findall(r"<text[^>]*>([^<]*u=[^<]*)</text>", svg_of(page, "Time against memory"))
    assert set(names) == set(front(points_of(explained))), "others say it when pointed at"
    assert svg_of(page, "Time against memory").count("<title>") == count


def svg_of(page: str, label: str) -> str:
    """The drawing of that label."""
    (found,) = re.findall(rf'<svg [^>]*aria-label="{label}".*?</svg>', page, re.DOTALL)
    return str(found)


def points_of(explained: Explanation) -> list[tuple[str, float, float]]:
    """Name, GiB and milliseconds of each configuration."""
    return [
        (r.config.label(8), r.memory.total / 2**30, r.prediction.seconds * 1e3)
        for r in explained.result.ranking
    ]


def test_names_of_points_stay_on_the_drawing() -> None:
    """Twelve points in one place: their names go up to the edge, then down, and none is covered."""
    points = [(f"configuration {i}", 1.0, 5.0) for i in range(12)]
    svg = pareto(points, ("GiB", "ms"), "t")
    height = float(re.findall(r'viewBox="0 0 \d+ (\d+)"', svg)[0])
    rows = [float(y) for y in re.findall(r'<text [^>]*y="([\d.-]+)"[^>]*>configuration', svg)]

    assert len(rows) == 12
    assert all(10 < row < height for row in rows)
    ordered = sorted(rows)
    assert min(b - a for a, b in pairwise(ordered)) >= 13.9


def test_other_lengths_search_the_same_space() -> None:
    """Variants and a part of the space too: a gap in a line is one of validity."""
    workload = Workload(seq_len=65536, cp_size=8)
    model, cluster = read_model("Llama-3.1-8B"), read_cluster("atlas-800t-a2")
    for options in ({"variants": True}, {"only": read_restriction("u=1,2 lb=off", 8)}):
        result = search(model, cluster, workload, overlap=False, **options)
        (other, own) = search_lengths(result, (32768, 65536))
        assert own.result is result
        assert {r.config for r in other.result.ranking} == {r.config for r in result.ranking}
