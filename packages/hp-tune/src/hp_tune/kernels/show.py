"""Print what tuning found: tables for people, one JSON object for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_tune.kernels.bandwidth import ASSUMED
from hp_tune.kernels.report import markdown
from hp_tune.kernels.space import label
from hp_tune.kernels.tuning import Settings, Trial, Tuned
from hp_tune.kernels.verdict import Number, Verdict

__all__ = ["COMPILED", "as_json", "as_text", "found_by", "mode_line"]

SHOWN = 5
COMPILED = "compiled, not measured"


def mode_line(settings: Settings) -> str:
    """Say what the numbers are, and are not."""
    return {
        "check": "interpreted on a CPU for correctness only: this is no tuning, no file is written",
        "compile": f"{COMPILED}: ranked by what the compiler says and a model; {ASSUMED}",
        "measure": "measured beside a device-to-device copy of the same bytes, in turns",
    }[settings.mode]


def as_text(
    settings: Settings, found: Sequence[Tuned], files: Mapping[str, Path], notes: Sequence[str]
) -> str:
    """Return the report."""
    facts = settings.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    lines = [f"device   {facts.name} ({facts.description}); {versions}"]
    lines += [f"mode     {mode_line(settings)}"]
    lines += [f"note     {note}" for note in notes]
    for one in found:
        lines += ["", *_kernel(settings, one)]
    if files:
        lines += [""]
    for kernel, path in files.items():
        lines.append(f"file     {path}  ({kernel}; found under HP_KERNEL_CONFIGS={path.parent})")
    return "\n".join(lines)


def _kernel(settings: Settings, one: Tuned) -> list[str]:
    """Return the part of one kernel and shape."""
    lines = [
        f"kernel   {one.kernel} at {one.shape}: {one.count('complete')} work, "
        f"{one.count('failed')} failed, {one.count('pruned')} refused before compiling, "
        f"of {len(settings.space)}; {one.ended or 'stopped before its end'}"
    ]
    if settings.mode != "check" and one.ranking:
        lines.append(_table(settings, one.ranking[:SHOWN]))
    lines += _why_not(one)
    best = one.best
    if settings.mode == "check":
        return lines
    if best is None:
        lines.append("best     none: the default launch stays")
        return lines
    text = f"best     {label(best.launch)}"
    first = one.untuned
    if first is not None and first is not best and first.verdict.ms and best.verdict.ms:
        ratio = first.verdict.ms / best.verdict.ms
        by = " by the model" if settings.mode == "compile" else ""
        text += f"; {ratio:.2f} times as fast{by} as untuned ({label(first.launch)})"
    elif first is best:
        text += ", which is what runs untuned"
    lines.append(text)
    return lines


def _table(settings: Settings, ranking: Sequence[Trial]) -> str:
    measured = ("ms", "GB/s", "copy GB/s", "share of copy")
    compiled = ("model ms", "model GB/s", "UB bytes", "double buffer", "discrete", "by element")
    head = measured if settings.mode == "measure" else compiled
    rows = [
        (str(rank), label(one.launch), *_cells(settings, one.verdict))
        for rank, one in enumerate(ranking, 1)
    ]
    return markdown(("rank", "launch", *head), rows)


def _cells(settings: Settings, verdict: Verdict) -> tuple[str, ...]:
    numbers, ms = verdict.numbers, f"{verdict.ms or 0.0:.4f}"
    if settings.mode == "measure":
        return ms, _g(numbers, "GBps"), _g(numbers, "copy_GBps"), f"{verdict.share:.1%}"
    kept = "kept" if numbers.get("double_buffered") else "no"
    counts = [str(numbers.get(name, "")) for name in ("discrete", "element_buffers")]
    return ms, _g(numbers, "GBps"), str(numbers.get("ub_bytes", "")), kept, *counts


def _g(numbers: Mapping[str, Number], name: str) -> str:
    return f"{float(numbers.get(name, 0.0)):.0f}"


def _why_not(one: Tuned) -> list[str]:
    """Return each reason once, with an example and how often."""
    lines = []
    for state, word in (("pruned", "refused"), ("failed", "failed ")):
        trials = [trial for trial in one.trials if trial.verdict.state == state]
        for rule, count in sorted(Counter(trial.verdict.rule for trial in trials).items()):
            example = next(trial for trial in trials if trial.verdict.rule == rule)
            lines.append(
                f"{word}  {count} x {rule}, such as {label(example.launch)}: "
                f"{example.verdict.reason}"
            )
    return lines


def found_by(
    settings: Settings, found: Sequence[Tuned], command: str, today: str, version: str
) -> str:
    """Return where a file's launches are from, one line."""
    facts = settings.facts
    versions = {"hp-tune": version, **facts.versions}
    where = ", ".join(f"{name} {number}" for name, number in versions.items())
    results = []
    for one in found:
        if one.best is None:
            continue
        verdict = one.best.verdict
        rate = float(verdict.numbers.get("GBps", 0.0))
        if settings.mode == "measure":
            results.append(f"{one.shape} {rate:.0f} GB/s, {verdict.share:.0%} of a copy")
        else:
            results.append(f"{one.shape} {rate:.0f} GB/s by a model")
    start = f"{COMPILED}: " if settings.mode == "compile" else "measured: "
    return f"{start}{command}; {today}; {facts.description}; {where}; {'; '.join(results)}"


def as_json(
    settings: Settings, found: Sequence[Tuned], files: Mapping[str, Path], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the report for programs."""
    facts = settings.facts
    return {
        "device": facts.name,
        "description": facts.description,
        "versions": dict(facts.versions),
        "mode": settings.mode,
        "what": mode_line(settings),
        "seed": settings.seed,
        "budget": settings.budget,
        "space": {name: list(values) for name, values in settings.space.parameters.items()},
        "notes": list(notes),
        "kernels": [
            {
                "kernel": one.kernel,
                "shape": str(one.shape),
                "sizes": one.shape.sizes(one.kernel),
                "bytes": one.shape.bytes(one.kernel),
                "ended": one.ended or None,
                "study": None if one.study is None else str(one.study),
                "best": None if one.best is None else one.best.launch,
                "trials": [_trial(trial) for trial in one.trials],
            }
            for one in found
        ],
        "files": {kernel: str(path) for kernel, path in files.items()},
    }


def _trial(trial: Trial) -> dict[str, Any]:
    verdict = trial.verdict
    return {
        "launch": trial.launch,
        "state": verdict.state,
        "ms": verdict.ms,
        "rule": verdict.rule or None,
        "reason": verdict.reason or None,
        "numbers": dict(verdict.numbers),
        "replayed": trial.replayed,
    }
