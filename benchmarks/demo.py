"""The main job on any machine: find a configuration, train a Llama with it, and check every number.

1. ``hp-tune search`` ranks the context-parallel configurations of a small Llama on 4 CPU ranks.
2. 4 gloo processes train the Llama of transformers with the chosen plan, and with each other valid
   mode, on the text of this repository's license, byte by byte.
3. One process trains the same model as transformers made it.

Losses, gradients, collectives and bytes must agree. A difference beyond the tolerance ends the
demo with exit code 1 and the reason. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
TRAINING = Path(__file__).with_name("demo_training.py")
RANKS = 4
SEQ, BATCH, STEPS = 512, 2, 4
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": SEQ,
    "torch_dtype": "float32",
}
# float32 of docs/numerics.md: the loss, and gradients after up to three optimizer steps
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4


def main() -> int:
    """Run the demo; return the exit code."""
    started = time.monotonic()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        model = out / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL, indent=2))
        chosen = search(model, out / "plan.json")
        console.print(f"\nchosen: {describe(chosen)}; training with every valid mode\n")
        modes = valid_modes(chosen)
        run_training(model, out, modes)
        ranks = json.loads((out / "results.json").read_text())
    problems = report(console, list(modes), ranks)
    console.print(f"{time.monotonic() - started:.0f} s on {os.cpu_count()} CPU cores")
    for problem in problems:
        console.print(f"[bold red]demo: {problem}[/]")
    if not problems:
        console.print("every mode trained as the single process did, and sent what its plan says")
    return 1 if problems else 0


def search(model: Path, plan: Path) -> dict[str, Any]:
    """Let ``hp-tune search`` choose; return the degree and balance of its plan."""
    import hp_tune

    command = [sys.executable, "-m", "hp_tune", "search", "--model", str(model)]
    command += ["--cluster", "cpu-gloo", "--cp", str(RANKS), "--seq", str(SEQ)]
    command += ["--batch", str(BATCH), "--layout", "BNSD", "--out", str(plan)]
    subprocess.run(command, check=True, cwd=plan.parent)
    chosen = hp_tune.load(plan).select(seq_len=SEQ, world_size=RANKS).plan
    return {"ulysses_degree": chosen.ulysses_degree, "load_balance": chosen.load_balance}


def valid_modes(chosen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arguments of every valid mode by its name, the chosen one first."""
    from hp_cp.plan import make_plan

    heads = MODEL["num_attention_heads"]
    degrees = make_plan(RANKS).valid_degrees(heads)
    every = [{"ulysses_degree": u, "load_balance": False} for u in reversed(degrees)]
    every += [{"ulysses_degree": 1, "load_balance": True}]
    ordered = [chosen, *(arguments for arguments in every if arguments != chosen)]
    return {describe(arguments): arguments for arguments in ordered}


def describe(arguments: dict[str, Any]) -> str:
    """Return the name of a mode as the table shows it."""
    from hp_cp.plan import make_plan

    plan = make_plan(RANKS, **arguments)
    degree = f" {plan.ulysses_degree}" if plan.mode == "hybrid" else ""
    return f"{plan.mode}{degree}{' balanced' if plan.load_balance else ''}"


def run_training(model: Path, out: Path, modes: dict[str, dict[str, Any]]) -> None:
    """Train in one process, then on the ranks; both write into ``out``."""
    from demo_training import Job

    job = Job(
        model=str(model),
        text=str(ROOT / "LICENSE"),
        out=str(out),
        seq=SEQ,
        batch=BATCH,
        steps=STEPS,
        plan=str(out / "plan.json"),
        chosen=next(iter(modes)),
        modes=modes,
    )
    path = str(job.write(out / "job.json"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    subprocess.run([sys.executable, str(TRAINING), path], check=True, env=environment)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={RANKS}", str(TRAINING), path]
    subprocess.run(torchrun, check=True, env=environment, timeout=900)


def report(console: Console, modes: list[str], ranks: list[dict[str, Any]]) -> list[str]:
    """Print the two tables; return what is wrong, in words."""
    alone = ranks[0][modes[0]]["reference_losses"]
    training = Table(title=f"Llama on {RANKS} gloo ranks, {SEQ} bytes of text, float32")
    training.add_column("mode", no_wrap=True)
    for step in range(1, STEPS + 1):
        training.add_column(f"loss {step}", justify="right", no_wrap=True)
    training.add_column("grad diff", justify="right")
    training.add_row("one process", *(f"{x:.4f}" for x in alone), "", end_section=True)
    wire = Table(title="Sent by rank 0 in one step, forward and backward")
    for column in ("mode", "collective", "calls", "plan", "bytes", "plan"):
        wire.add_column(column, justify="left" if column in ("mode", "collective") else "right")
    for mode in modes:
        found = ranks[0][mode]
        worst = max(rank[mode]["gradient_difference"] for rank in ranks)
        training.add_row(mode, *(f"{x:.4f}" for x in found["losses"]), f"{worst:.1e}")
        rows = [
            (kind, *found["measured"][kind], *found["predicted"][kind])
            for kind in found["measured"]
            if found["measured"][kind][0] or found["predicted"][kind][0]
        ]
        for row, (kind, calls, size, planned_calls, planned_size) in enumerate(rows):
            wire.add_row(
                "" if row else mode,
                kind,
                str(calls),
                str(planned_calls),
                f"{size:,}",
                f"{planned_size:,}",
                end_section=row == len(rows) - 1,
            )
    console.print(training)
    console.print(wire)
    return [problem for mode in modes for problem in differences(mode, ranks)]


def differences(mode: str, ranks: list[dict[str, Any]]) -> list[str]:
    """Return what a mode did otherwise than the single process, or than its plan says."""
    wrong = []
    for rank, results in enumerate(ranks):
        found = results[mode]
        pairs = zip(found["losses"], found["reference_losses"], strict=True)
        for step, (loss, expected) in enumerate(pairs, 1):
            if not abs(loss - expected) <= LOSS_TOLERANCE * (1 + abs(expected)):
                wrong.append(f"{mode}, rank {rank}: loss {loss} in step {step}, not {expected}")
        if not found["gradient_difference"] <= GRADIENT_TOLERANCE:
            wrong.append(
                f"{mode}, rank {rank}: gradients differ by {found['gradient_difference']:.1e}, "
                f"more than {GRADIENT_TOLERANCE:.0e}"
            )
        wrong += [
            f"{mode}, rank {rank}: {kind} sent {found['measured'][kind]} (calls, bytes), and the "
            f"plan says {expected}"
            for kind, expected in found["predicted"].items()
            if found["measured"][kind] != expected
        ]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
