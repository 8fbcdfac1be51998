"""Train a Llama of transformers with its sequence split over all ranks, in a few lines.

::

    torchrun --standalone --nproc-per-node 4 examples/llama_cp.py
    torchrun --standalone --nproc-per-node 4 examples/llama_cp.py --ulysses-degree 1 --load-balance

The model is small and new; with ``LlamaForCausalLM.from_pretrained(...)`` nothing else changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hp_cp import ContextParallel, init_device_mesh, parallelize_module
from hp_cp.transformers import add_core_attention
from hp_mesh.sequence import next_token_labels, shard_sequence


def new_model() -> LlamaForCausalLM:
    """Return the model, with the same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def read_tokens() -> torch.Tensor:
    """Return two sequences of bytes, ``[2, 512]``."""
    text = (Path(__file__).parent.parent / "LICENSE").read_bytes()[: 2 * 512]
    return torch.tensor(list(text)).view(2, 512)


def main() -> None:
    """Train for some steps and print the loss, which is that of the whole sequence."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ulysses-degree", type=int, default=None)
    parser.add_argument("--load-balance", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))

    model = add_core_attention(new_model(), gradient_divisor=1)
    style = ContextParallel(
        seq_dim=2,
        head_dim=1,
        ulysses_degree=options.ulysses_degree,
        load_balance=options.load_balance,
    )
    parallelize_module(model, mesh["cp"], {"model.layers.*.self_attn.core_attention": style})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    tokens = read_tokens()  # every rank reads the whole batch ...
    ids = shard_sequence(tokens, mesh["cp"])  # ... and keeps its part, [2, 512 / ranks]
    targets = next_token_labels(tokens, mesh["cp"])  # shifted before the cut

    for step in range(options.steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=targets, shift_labels=targets).loss
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # a rank holds its share; FSDP would do this
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
