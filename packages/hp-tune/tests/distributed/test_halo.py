"""A plan with a style per kind of layer, applied: right, and with the bytes that were predicted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_comm import traffic
from hp_cp import init_device_mesh, sliding_window_attention
from hp_mesh.testing import assert_close, count_collectives, randn, ranks
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.measured.measurer import TorchrunMeasurer
from hp_tune.measured.request import Protocol
from hp_tune.models.model import Attention, Model
from hp_tune.plans.plan import Entry
from hp_tune.searching.engine import Result, search
from hp_tune.searching.restriction import read_restriction
from hp_tune.torchrun import Launcher
from hp_tune.workload import Config, Workload

from ._marked import Marked

P, S, B, H, HKV, D, DV = 3, 36, 2, 6, 3, 5, 7
FULL = Attention(num_heads=H, num_kv_heads=HKV, head_size=D, v_head_size=DV)


def layers(window: int, sinks: int) -> tuple[Attention, ...]:
    """Two sliding layers for each full one, as gemma has them."""
    slides = {"kind": "sliding", "window": window, "sink_tokens": sinks}
    one = FULL.model_copy(update=slides)
    return (one, FULL, one)


def searched(window: int, sinks: int, words: str) -> Result:
    """Search a part of the space for the model, in fp64."""
    model = Model(name="m", model_type="m", hidden_size=H * D, layers=layers(window, sinks))
    return search(
        model, read_cluster("cpu-gloo"), Workload(seq_len=S, cp_size=P, batch=B, dtype="fp64"),
        overlap=False, only=read_restriction(words, P),
    )  # fmt: skip


class Core(nn.Module):
    """Attention as a model has it, ``[B, S, H, D]``."""

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.layer.window is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            sinks = self.layer.sink_tokens
            out = sliding_window_attention(q, k, v, self.layer.window, sink_tokens=sinks)
        return out.transpose(1, 2)


def run_layer(core: Core, tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    # rows that lie apart, as a slice of a fused projection does
    out = core(*(torch.cat([x, x], -1)[..., : x.shape[-1]] for x in leaves))
    out.backward(upstream)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def measure(rank: int, entry: Entry, window: int, sinks: int) -> list[dict[str, tuple[int, int]]]:
    """Hold this rank's part to the unsharded one, and return what it sent in each layer."""
    whole = [randn(B, S, h, d, seed=i) for i, (h, d) in enumerate([(H, D), (HKV, D), (HKV, DV)])]
    upstream = randn(B, S, H, DV, seed=9)
    mesh, styles = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",)), entry.styles_dict()

    def own(x: Tensor) -> Tensor:
        return x.chunk(P, 1)[rank]

    found = []
    for layer in layers(window, sinks):
        core = Core(layer)
        wanted = run_layer(core, whole, upstream)
        at = "sliding_attention" if layer.slides else "attention"
        styles.get(at, styles["attention"]).apply(core, mesh)
        with traffic() as sent, count_collectives() as seen:
            parts = run_layer(core, [own(x) for x in whole], own(upstream))
        assert_close(parts[0], own(wanted[0]))
        assert_close(parts[1:], [own(x) for x in wanted[1:]], kind="grad")
        summary = {kind: both for kind, both in sent.summary().items() if kind != "preflight"}
        assert summary == {kind: (seen.count(kind), seen.bytes(kind)) for kind in seen.summary()}
        found.append(summary)
    return found


@pytest.mark.parametrize(
    ("window", "sinks", "words"),
    [
        (5, 0, "u=1 lb=off"), (5, 2, "u=1 lb=on"), (20, 0, "u=3"), (30, 3, "u=1 lb=off"),
    ],
    ids=lambda value: str(value).replace(" ", ","),
)  # fmt: skip
def test_styles_of_a_plan_send_what_was_predicted(window: int, sinks: int, words: str) -> None:
    """Within the neighbour's shard of 12 rows and two ranks back; with sinks; beside each mode."""
    result = searched(window, sinks, f"{words} halo=1")
    best = result.ranking[0]
    assert result.plan is not None and best.config.halo == 1
    sent = ranks(P).run(measure, result.plan.entries[0], window, sinks)

    most: Counter[str] = Counter()
    for of_layer in zip(*sent, strict=True):  # a step waits for the busiest rank of each layer
        busiest = max(of_layer, key=lambda one: sum(size for _, size in one.values()))
        most.update({kind: size for kind, (_, size) in busiest.items()})
    assert dict(most) == best.prediction.bytes_sent
    rows = 0  # what is fetched forward is given back as gradients
    for rank in range(P):
        start = 12 * rank
        first = max(0, start - window + 1)
        rows += start - first + min(sinks, first)
    for number in (0, 2):
        assert all(one[number].keys() == {"p2p"} for one in sent if one[number])
        total = sum(one[number].get("p2p", (0, 0))[1] for one in sent)
        assert total == 2 * rows * B * HKV * (D + DV) * 8
    gathers = [one[1].get("all_gather", (0, 0))[0] for one in sent]
    assert gathers == [0 if words == "u=3" else 2] * P, "k and v of the full layer alone"


def test_without_a_halo_one_style_serves_all_and_gathers_three_times() -> None:
    """The other side of the comparison: what the search leaves out of sliding layers."""
    result = searched(5, 0, "u=1 lb=off halo=0")
    assert result.plan is not None
    entry = result.plan.entries[0]
    assert set(entry.styles_dict()) == {"attention"}
    first = ranks(P).run(measure, entry, 5, 0)[0]
    bytes_sent = result.ranking[0].prediction.bytes_sent
    for kind in ("all_gather", "reduce_scatter"):
        assert [one[kind][0] for one in first] == [2, 2, 2]
        assert sum(one[kind][1] for one in first) == bytes_sent[kind]


def test_measured_trials_run_windows_under_their_own_style(tmp_path: Path) -> None:
    """Right, active and timed on real ranks: beside balance, streams, async and Ulysses."""
    marked, options = Marked(), [
        {"ulysses_degree": 1, "load_balance": True}, {"ulysses_degree": 1, "kv_chunks": 4},
        {"ulysses_degree": 3, "overlap": True}, {"ulysses_degree": 3},
    ]  # fmt: skip
    configs = [Config(**one, halo=1) for one in options]  # type: ignore[arg-type]
    workload: dict[str, Any] = {"seq_len": S, "cp_size": P, "batch": B, "dtype": "fp64"}
    found = TorchrunMeasurer(
        Model(name="m", model_type="m", hidden_size=H * D, layers=layers(5, 2)),
        Workload(**workload, handoffs=True),
        Launcher(nproc_per_node=P, env=marked.environment),
        tmp_path,
        protocol=Protocol(rounds=3),
    ).finals(configs)

    for config, said in found.items():
        assert said.outcome == "ok", f"{config}: {said.reason}{said.details}"
        assert said.collectives is not None
        assert said.collectives.get("p2p", 0) > 0
    ulysses = found[configs[3]]
    # one kind of sliding layer: rank 0 sends to both others, and has nothing to give back
    assert ulysses.collectives == {"all_to_all": 4, "p2p": 2}
    assert ulysses.bytes_sent is not None
    assert ulysses.bytes_sent["p2p"] == (4 + 2 + 2) * B * HKV * (D + DV) * 8
    assert marked.pids() == []
