"""Sliding layers under ``halo``: what a window sends, what it takes, and what others still do."""

from __future__ import annotations

from typing import Any

import pytest

from hp_cp.halo import fetched_by, passed_rows
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.cost.halo import busiest_messages, busiest_ranks
from hp_tune.cost.layer import LayerCost
from hp_tune.cost.memory import memory_use
from hp_tune.cost.pairs import causal_pairs
from hp_tune.cost.predict import Prediction, predict
from hp_tune.models.hf_config import read_model
from hp_tune.models.model import Attention, Model
from hp_tune.workload import Config, Workload

FULL = Attention(num_heads=12, num_kv_heads=4, head_size=48, v_head_size=40)
S, P, B, E = 24 * 1024, 8, 3, 2
TOKEN = B * E * 48  # bytes of one head of one row of k, for all sequences


def sliding(window: int, sinks: int = 0) -> Attention:
    """A layer of twelve heads, four of K and V, 48 wide and 40."""
    return FULL.model_copy(update={"kind": "sliding", "window": window, "sink_tokens": sinks})


def price(*layers: Attention, cp: int = P, **config: Any) -> Prediction:
    """Predict layers of one model on P ranks of a node."""
    model = Model(name="m", model_type="m", hidden_size=96, layers=layers)
    workload = Workload(seq_len=S, cp_size=cp, batch=B)
    return predict(model, read_cluster("hgx-h100"), workload, Config(**config))


def fetched_rows(rank: int, shard: int, window: int, sinks: int) -> int:
    """Rows that a rank fetches: those before its own that its first query sees."""
    start = rank * shard
    first = max(0, start - window + 1)
    return start - first + min(sinks, first)


@pytest.mark.parametrize("sinks", [0, 3, 17])
@pytest.mark.parametrize("window", [1, 2, 6, 11, 12, 13, 30, 41, 200])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_the_busiest_ranks_are_among_a_few(ranks: int, window: int, sinks: int) -> None:
    """Against all ranks: who sends, fetches, does both, and holds most."""
    facts = (12, window, sinks)
    few = busiest_ranks(ranks, *facts)

    def most(among: Any) -> list[int]:
        passed = [[sum(side) for side in passed_rows(r, ranks, *facts)] for r in among]
        held = [sum(b - a for a, b in fetched_by(r, *facts)) for r in among]
        sent, fetched = zip(*passed, strict=True)
        return [max(sent), max(fetched), max(map(sum, passed)), max(held)]

    assert most(few) == most(range(ranks))
    assert few[-1] == ranks - 1, "the last holds most"
    assert sum(busiest_messages(ranks, *facts)) == max(most(range(ranks))[:2])


@pytest.mark.parametrize(("window", "sinks"), [(100, 0), (1, 0), (100, 7), (7000, 0)])
def test_bytes_are_the_rows_of_the_formula_both_ways(window: int, sinks: int) -> None:
    """Rows x B x Hkv x (D + Dv) x e, of the rank that sends and gives back most; no gather."""
    shard = S // P
    row = B * 4 * (48 + 40) * E
    rows = [fetched_rows(rank, shard, window, sinks) for rank in range(P)]
    # what a rank sends forward others have fetched; sinks are all the first rank's
    sent = [sum(max(0, min((q + 1) * shard, r * shard) - max(q * shard, r * shard - window + 1))
                for r in range(q + 1, P)) for q in range(P)]  # fmt: skip
    sent[0] += sum(min(sinks, max(0, r * shard - window + 1)) for r in range(1, P))
    assert sum(sent) == sum(rows)
    found = price(sliding(window, sinks), sliding(window, sinks), ulysses_degree=1, halo=1)

    most = max(a + b for a, b in zip(sent, rows, strict=True))
    assert found.bytes_sent.get("p2p", 0) == 2 * most * row
    assert found.bytes_sent.keys() <= {"p2p"}
    if window == 100 and not sinks:
        assert most == 2 * 99, "the rows before the shard, forward and back"
        assert found.num_collectives == 2 * 2


def test_under_hybrid_heads_are_traded_and_a_window_of_one_kv_head_is_fetched() -> None:
    """u = 4: a Ulysses group's rows are four times as many; of four KV heads each rank has one."""
    found = price(sliding(100), ulysses_degree=1, halo=4)
    tokens = S // P
    # three of four parts of q, k, v and the output leave, each way
    traded = 2 * tokens * B * E * 3 // 4 * (12 * 48 + 4 * 48 + 4 * 40 + 12 * 40)

    assert found.bytes_sent == {"all_to_all": traded, "p2p": 99 * B * 1 * (48 + 40) * E}
    # of two groups one sends forward, the other gives gradients back


def test_full_layers_do_what_they_did_and_sliding_ones_do_not() -> None:
    """A model of both: the sum of each alone, whatever the others' options are."""
    window = price(sliding(100), ulysses_degree=1, halo=1)
    for options in (
        {"ulysses_degree": 1}, {"ulysses_degree": 1, "load_balance": True}, {"ulysses_degree": 4},
        {"ulysses_degree": 2, "balance_hybrid": True}, {"ulysses_degree": 1, "kv_chunks": 4},
        {"ulysses_degree": 1, "keep_kv": False}, {"ulysses_degree": 2, "overlap": True},
    ):  # fmt: skip
        full = price(FULL, **options)
        both = price(FULL, sliding(100), halo=1, **options)

        assert both.seconds == pytest.approx(full.seconds + window.seconds)
        kinds = full.bytes_sent.keys() | window.bytes_sent.keys()
        assert both.bytes_sent == {
            kind: full.bytes_sent.get(kind, 0) + window.bytes_sent.get(kind, 0) for kind in kinds
        }
        assert both.num_collectives == full.num_collectives + window.num_collectives


def test_time_is_a_start_and_the_rows_on_one_port() -> None:
    """99 rows of k and v at what NVSwitch gives so few bytes; waited for, forward and backward."""
    found = price(sliding(100), ulysses_degree=1, halo=1)
    terms = [term for term in found.terms if term.name == "p2p window of k,v"]
    size = 99 * B * 4 * (48 + 40) * E
    tier = read_cluster("hgx-h100").tiers[0]
    by_size = tier.efficiency_by_size

    assert [term.phase for term in terms] == ["forward", "backward"]
    for term in terms:
        assert term.bytes == size
        assert dict(term.inputs)["bytes_sent"] == size
        rate = dict(term.inputs)["GBps"] * 1e9
        assert term.seconds == pytest.approx(tier.latency_us.value * 1e-6 + size / rate)
        assert term.exposed == term.seconds
        assert rate <= tier.bandwidth.value * 1e9
        assert by_size is not None or rate == tier.bandwidth.value * 1e9 * tier.efficiency.value


def test_a_rank_holds_its_rows_and_the_window_before_them() -> None:
    """In place of the whole sequence: L + w - 1 rows of k and v in every layer."""
    model = Model(name="m", model_type="m", hidden_size=96, layers=(sliding(100),) * 5)
    workload, cluster = Workload(seq_len=S, cp_size=P, batch=B), read_cluster("hgx-h100")
    row = B * 4 * (48 + 40) * E
    held = {
        halo: dict(memory_use(model, cluster, workload, Config(ulysses_degree=1, halo=halo)).terms)[
            "resident K and V"
        ]
        for halo in (0, 1)
    }

    assert held == {0: 5 * S * row, 1: 5 * (S // P + 99) * row}
    assert price(sliding(100), ulysses_degree=1, halo=1).resident_kv_bytes == (S // P + 99) * row


@pytest.mark.parametrize("sinks", [0, 1, 4, 50])
@pytest.mark.parametrize("window", [1, 3, 5, 100])
def test_pairs_with_sinks_equal_a_loop(window: int, sinks: int) -> None:
    """Row i sees the last ``window`` keys, and of the first ``sinks`` those before them."""
    for start, stop in [(0, 9), (3, 60), (6, 6)]:
        brute = sum(
            sum(1 for j in range(i + 1) if i - j < window or j < sinks) for i in range(start, stop)
        )
        assert causal_pairs(start, stop, window, sinks) == brute


def test_sinks_are_read_and_told() -> None:
    """From a config's ``sink_tokens``, for sliding layers alone."""
    found = read_model("Mistral-7B-v0.1").layers[0]
    assert (found.slides, found.window, found.sink_tokens) == (True, 4096, 0)
    told = sliding(128, 4).describe()
    assert told.endswith("window 128, 4 sink tokens")


def windows(found: Prediction) -> dict[str, float]:
    """Seconds of the fetch of a window, by phase."""
    return {t.phase: t.seconds for t in found.terms if t.name == "p2p window of k,v"}


@pytest.mark.parametrize(
    ("cp", "halo", "window"),
    [(2, 1, 100), (8, 4, 100), (4, 1, S), (8, 2, S)],
    ids=["two", "hybrid", "whole", "hybrid-whole"],
)
def test_all_ranks_wait_for_a_window_in_both_phases(cp: int, halo: int, window: int) -> None:
    """Where the rank that sends most sends nothing back: others do, and it waits for them."""
    found = price(sliding(window), cp=cp, ulysses_degree=1, halo=halo)
    both = windows(found)

    assert list(both) == ["forward", "backward"]
    assert both["forward"] == both["backward"] > 0
    for line in found.timelines:
        keys = [slot.key for slot in line.slots if slot.resource == "network"]
        heads = {"forward": ["all_to_all q,k,v"], "backward": ["all_to_all out"]}[line.phase]
        last = {"forward": ["all_to_all out"], "backward": ["all_to_all q,k,v"]}[line.phase]
        traded = halo > 1
        assert keys == [*heads * traded, "p2p window of k,v", *last * traded]


def test_a_window_of_one_key_fetches_nothing() -> None:
    """Each query sees its own key alone."""
    found = price(sliding(1), cp=2, ulysses_degree=1, halo=1)

    assert windows(found) == {}
    assert found.bytes_sent == {}


def test_a_kernel_that_skips_nothing_computes_the_keys_that_are_there() -> None:
    """Under a halo that is a rank's rows and what it fetched, and not the whole sequence."""
    model = Model(name="m", model_type="m", hidden_size=96, layers=(sliding(100, 7),))
    workload = Workload(seq_len=S, cp_size=P, batch=B, skips_masked=False)
    cluster = read_cluster("hgx-h100")
    pairs = {}
    for halo in (0, 1):
        found = predict(model, cluster, workload, Config(ulysses_degree=1, halo=halo))
        (pairs[halo],) = {dict(t.inputs)["pairs"] for t in found.terms if t.name == "attention"}

    rows = S // P
    assert pairs == {0: rows * S, 1: rows * (rows + 99 + 7)}


def test_latents_of_sliding_layers_are_not_gathered_under_a_halo() -> None:
    """The feature that is priced is one of the other layers."""
    latent = sliding(100).model_copy(update={"latent_size": 20, "rope_size": 4})
    model = Model(name="m", model_type="m", hidden_size=96, layers=(latent,))
    config = Config(ulysses_degree=1, halo=1, gather="latent")
    cost = LayerCost(
        model, latent, read_cluster("hgx-h100"), Workload(seq_len=S, cp_size=P, batch=B), config
    )

    assert {move.kind for move in cost.moves} == {"p2p"}
