"""Measure how much slower the tuner's picks are than the best, on two hosts with a set link.

    nox -s bench_regret [-- --rates 100,500,2000 --seq 256,512,1024 --record FILE.jsonl]

For each rate of the link ``hp-tune profile`` measures the two hosts; for each sequence length every
valid configuration is measured, all in turn in one job. The regret of a pick is its time over that
of the fastest, less one. Picks are those of the analytic search on the profile, of the hybrid one,
and of three fixed rules. Two ranks on each host share this machine's cores, so causal imbalance is
all but invisible in wall time, and the profile says so.

Needs root (network namespaces); elsewhere it says so and ends well, or badly with
HP_REQUIRE_TWO_HOSTS=1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
import regret_report
from regret_rules import RULES
from rig import ADDRESSES, DEVICE, TwoHosts, Unavailable

from hp_tune.clusters.cluster import Cluster
from hp_tune.errors import TuneError
from hp_tune.measured.measurer import TorchrunMeasurer
from hp_tune.measured.request import Protocol
from hp_tune.measured.result import Measured
from hp_tune.measured.statistics import FEWEST_ROUNDS
from hp_tune.models.model import Attention, Model
from hp_tune.profile.running import Effort, profile
from hp_tune.searching.engine import search
from hp_tune.torchrun import Launcher
from hp_tune.workload import Config, Workload

CP = 4


def numbers(text: str) -> list[int]:
    """Read ``1,2,3``."""
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit code 1 if a regret is above what is promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", type=numbers, default=[100, 500, 4000], help="mbit/s")
    parser.add_argument("--seq", type=numbers, default=[256, 512, 1024])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of a trial")
    parser.add_argument("--profile-rounds", type=int, default=11)
    parser.add_argument("--no-hybrid", action="store_true", help="leave the hybrid search out")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one configuration")
    parser.add_argument("--keep", type=Path, help="folder for profiles and logs")
    parser.add_argument("--record", type=Path, help="append the cells to this file as JSON lines")
    options = parser.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    cells: list[dict[str, Any]] = []
    failed = ""
    try:
        measure(options, cells)
    except Unavailable as reason:
        print(f"no two hosts here: {reason}")
        return 1 if os.environ.get("HP_REQUIRE_TWO_HOSTS") == "1" else 0
    except TuneError as error:  # what was measured until then is reported
        failed = f"MISS all cells: {error}"
    code = regret_report.report(cells) if cells else 1
    if failed:
        print(failed)
    return 1 if failed else code


def stop(number: int, frame: FrameType | None) -> None:
    """Leave by the same way as an error does, which deletes the hosts."""
    raise SystemExit(128 + number)


@dataclass
class Remembering:
    """A measurer that has run every configuration once, so that trials need not run again.

    Finals do, in a job of their own: what they decide must not be what they are judged by.
    """

    inner: TorchrunMeasurer
    known: Mapping[Config, Measured]

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return what the times depend on, as the real one does."""
        return self.inner.identity

    def check(self) -> None:
        """Ask every host, as the real one does."""
        self.inner.check()

    def trial(self, config: Config) -> Measured:
        """Return what the exhaustive run said, in fewer rounds, as a trial has."""
        found = self.known[config]
        return replace(found, samples_ms=found.samples_ms[:FEWEST_ROUNDS])

    def finals(self, configs: Sequence[Config]) -> Mapping[Config, Measured]:
        """Run the finalists."""
        return self.inner.finals(configs)


def measure(options: argparse.Namespace, cells: list[dict[str, Any]]) -> None:
    """Append a cell per rate and length, and record each at once."""
    layer = Attention(
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_size=options.head_size,
        v_head_size=options.head_size,
    )
    hidden = options.heads * options.head_size
    model = Model(
        name="two-hosts", model_type="llama", hidden_size=hidden, layers=(layer,),
        mlp_size=4 * hidden, active_mlp_size=4 * hidden, vocab_size=32000, dtype="fp32",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary, TwoHosts() as hosts:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        enter = tuple(
            f"ip netns exec {host} env GLOO_SOCKET_IFNAME={DEVICE}" for host in hosts.hosts
        )
        # comparing the ranks in each call is for debugging, and a message of its own
        env = {"HP_PREFLIGHT": "first"}
        launcher = Launcher("cpu-gloo", 2, enter, env, master_addr=ADDRESSES[0], threads=1)
        for rate in options.rates:
            hosts.set_rate(rate)
            start = time.monotonic()
            cluster = profiled(launcher, folder / f"{rate}mbit.yaml", options)
            say(f"{rate} mbit: profiled in {time.monotonic() - start:.0f} s")
            for length in options.seq:
                start = time.monotonic()
                workload = Workload(seq_len=length, cp_size=CP, dtype="fp32", handoffs=True)
                measurer = TorchrunMeasurer(
                    model,
                    workload,
                    launcher,
                    folder / f"{rate}-{length}",
                    options.limit,
                    Protocol(rounds=options.rounds, budget_s=options.limit, precision=0.005),
                )
                cell = one_cell(model, cluster, workload, measurer, hybrid=not options.no_hybrid)
                cells.append({"rate": rate, "seq_len": length, **cell})
                if options.record is not None:
                    regret_report.record(cells[-1], options.record)
                say(f"  {length} tokens: measured in {time.monotonic() - start:.0f} s")


def say(text: str) -> None:
    """Print at once: the whole takes minutes."""
    print(text, flush=True)


def profiled(launcher: Launcher, out: Path, options: argparse.Namespace) -> Cluster:
    """Return the two hosts as ``hp-tune profile`` measures them."""
    longest = max(options.seq)
    effort = replace(
        Effort.of("cpu-gloo"),
        rounds=options.profile_rounds,
        lengths=tuple(sorted({max(64, longest // 8), longest // 4, longest // 2})),
        largest=longest // CP * options.heads * options.head_size * 3 * 4,
    )
    return profile(launcher, out, name="two-hosts", effort=effort, timeout=options.limit * 4)[0]


def one_cell(
    model: Model, cluster: Cluster, workload: Workload, measurer: TorchrunMeasurer, *, hybrid: bool
) -> dict[str, Any]:
    """Measure every valid configuration, and say who picks which."""
    result = search(model, cluster, workload)
    predicted = {ranked.config: ranked.prediction.seconds * 1e3 for ranked in result.ranking}
    found = measurer.finals(list(predicted))
    failed = {
        config.label(CP): said.reason for config, said in found.items() if not said.samples_ms
    }
    if failed:
        raise RuntimeError(f"not measured: {failed}")
    picks = {"analytic": result.ranking[0].config}
    if hybrid:
        chosen = search(
            model, cluster, workload, mode="hybrid", measurer=Remembering(measurer, found)
        )
        picks["hybrid"] = chosen.ranking[0].config
    layer = model.layers[0]
    picks |= {name: rule(list(predicted), layer, CP) for name, rule in RULES.items()}
    return {
        "samples": {config: said.samples_ms for config, said in found.items()},
        "predicted": predicted,
        "picks": picks,
    }


if __name__ == "__main__":
    sys.exit(main())
