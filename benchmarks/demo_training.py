"""Train the demo's Llama: in one process, or as one rank of many. Started by ``demo.py``.

The single process runs the model exactly as transformers made it and writes its losses and
gradients; the ranks train the same model, from the same weights, on the same text, once for every
mode, and compare.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hp_tune
from hp_comm import traffic
from hp_cp import ContextParallel, init_device_mesh, parallelize_module
from hp_cp.plan import make_plan
from hp_cp.transformers import add_core_attention
from hp_mesh.sequence import next_token_labels, shard_sequence

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "p2p")
"""What attention sends; the loss adds scalar all-reduces, the preflight its headers."""


@dataclass(frozen=True)
class Job:
    """What all processes agree on; travels as JSON.

    Attributes:
        model: Folder with the model's ``config.json``.
        text: File to train on, read as bytes.
        out: Folder for ``reference.pt`` and ``results.json``.
        seq: Sequence length, in bytes of text.
        batch: Sequences a step.
        steps: Optimizer steps.
        plan: What ``hp-tune search`` wrote.
        chosen: The mode that it stands for; its style comes from the plan.
        modes: Degree and balance, by mode.
    """

    model: str
    text: str
    out: str
    seq: int
    batch: int
    steps: int
    plan: str
    chosen: str
    modes: dict[str, dict[str, Any]]

    def write(self, path: Path) -> Path:
        """Write the job for `read`; return the path."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Job:
        """Return the job that `write` wrote."""
        return cls(**json.loads(path.read_text()))

    def batches(self) -> list[Tensor]:
        """Return one ``[batch, seq]`` of consecutive bytes of the text per step."""
        data = Path(self.text).read_bytes()
        size = self.batch * self.seq
        if len(data) < size * self.steps:
            raise ValueError(f"demo: {self.text} must hold {size * self.steps} bytes")
        tokens = torch.frombuffer(bytearray(data[: size * self.steps]), dtype=torch.uint8).long()
        return list(tokens.view(self.steps, self.batch, self.seq))


def new_model(job: Job) -> LlamaForCausalLM:
    """Return the model with the weights that every process starts from."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(job.model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient, by the parameter's name."""
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def train_alone(job: Job) -> None:
    """Train in this process, with transformers' own attention and loss."""
    model = new_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = []
    for tokens in job.batches():
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        steps.append({"loss": loss.item(), "gradients": gradients(model)})
        optimizer.step()
    torch.save(steps, Path(job.out) / "reference.pt")


def style_of(job: Job, mode: str, world_size: int) -> ContextParallel:
    """Return the style of a mode: the plan's own for the chosen one."""
    if mode == job.chosen:
        return hp_tune.load(job.plan).select(seq_len=job.seq, world_size=world_size).style()
    return ContextParallel(seq_dim=2, head_dim=1, **job.modes[mode])


def train_on_ranks(job: Job, mode: str) -> dict[str, Any]:
    """Train with one mode; return losses, traffic a step, and the difference to the reference."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model = add_core_attention(new_model(job), gradient_divisor=1)
    plan = {"model.layers.*.self_attn.core_attention": style_of(job, mode, size)}
    parallelize_module(model, mesh["cp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    reference = torch.load(Path(job.out) / "reference.pt", weights_only=True)

    losses: list[float] = []
    apart: list[float] = []
    measured: dict[str, list[int]] = {}
    for tokens, expected in zip(job.batches(), reference, strict=True):
        ids, targets = shard_sequence(tokens, mesh["cp"]), next_token_labels(tokens, mesh["cp"])
        optimizer.zero_grad()
        with traffic() as sent:
            loss = model(input_ids=ids, labels=targets, shift_labels=targets).loss
            loss.backward()
        measured = {kind: [sent.count(kind), sent.bytes(kind)] for kind in KINDS}
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # each rank holds its own share
        losses.append(loss.item())
        found = gradients(model)
        apart += [relative_difference(found[n], g) for n, g in expected["gradients"].items()]
        optimizer.step()
    return {
        "losses": losses,
        "reference_losses": [step["loss"] for step in reference],
        "gradient_difference": torch.tensor(apart).max().item(),  # NaN stays NaN
        "measured": measured,
        "predicted": predicted(model.config, job, job.modes[mode], size, rank),
    }


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest entry of ``expected``."""
    return float((found - expected).abs().max() / expected.abs().max())


def predicted(
    config: LlamaConfig, job: Job, arguments: dict[str, Any], size: int, rank: int
) -> dict[str, list[int]]:
    """Return what the plan says this rank sends in one step, all layers together."""
    described = make_plan(size, **arguments).describe(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        seq_len=job.seq,
        head_size=config.head_dim,
        batch=job.batch,
        element_size=4,
        rank=rank,
    )
    layers = config.num_hidden_layers
    return {k: [described.count(k) * layers, described.bytes(k) * layers] for k in KINDS}


def main() -> None:
    """Run the job named on the command line."""
    job = Job.read(Path(sys.argv[1]))
    torch.set_num_threads(1)
    if not dist.is_torchelastic_launched():
        train_alone(job)
        return
    dist.init_process_group("gloo")
    found = {mode: train_on_ranks(job, mode) for mode in job.modes}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    if dist.get_rank() == 0:
        (Path(job.out) / "results.json").write_text(json.dumps(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
