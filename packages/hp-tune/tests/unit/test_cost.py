"""Predictions against closed formulas and published figures."""

from __future__ import annotations

from typing import Any

import pytest

from hp_cp.plan import make_plan
from hp_tune.cluster import Cluster
from hp_tune.cluster_files import read_cluster
from hp_tune.cost import Prediction, predict
from hp_tune.hf_config import read_model
from hp_tune.pairs import causal_pairs, work_shares
from hp_tune.memory import memory_use
from hp_tune.model import Attention, Model
from hp_tune.workload import Config, Workload

MIB = 2**20


def model(heads: int = 32, kv: int = 8, layers: int = 1, **fields: Any) -> Model:
    """A model of equal layers with heads of 128."""
    layer = Attention(num_heads=heads, num_kv_heads=kv, head_size=128, v_head_size=128, **fields)
    return Model(
        name="m", model_type="llama", hidden_size=heads * 128, layers=(layer,) * layers,
        mlp_size=1, active_mlp_size=1, vocab_size=1,
    )  # fmt: skip


def job(seq: int = 65536, cp: int = 8, **fields: Any) -> Workload:
    """A causal training step on 8 CP ranks."""
    return Workload(seq_len=seq, cp_size=cp, **fields)


def price(
    m: Model, w: Workload, u: int, *, cluster: str | Cluster = "atlas-800t-a2", **config: Any
) -> Prediction:
    """Predict one configuration."""
    found = read_cluster(cluster) if isinstance(cluster, str) else cluster
    return predict(m, found, w, Config(ulysses_degree=u, **config))


def seconds(found: Prediction, name: str, phase: str = "forward") -> float:
    """Time of the terms whose name starts with ``name``."""
    return sum(t.seconds for t in found.terms if t.name.startswith(name) and t.phase == phase)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
def test_pair_count_equals_a_loop(window: int | None) -> None:
    """Row i sees i + 1 keys, or the last ``window`` of them."""
    for start, stop in [(0, 7), (3, 9), (6, 6)]:
        brute = sum(min(i + 1, window or i + 1) for i in range(start, stop))
        assert causal_pairs(start, stop, window) == brute


@pytest.mark.parametrize("c", [1, 2, 4, 8])
def test_contiguous_causal_work_is_unbalanced_by_two_minus_one_over_c(c: int) -> None:
    """The last of c blocks does 2 - 1/c times the mean, and 1 - 1/2c of an unmasked block."""
    S, plan = 65536, make_plan(8, 8 // c)
    shares = work_shares(plan, model().layers[0], job(S))

    assert len(shares) == c
    assert max(shares) / (sum(shares) / c) == pytest.approx(2 - 1 / c, rel=1e-3)
    assert max(shares) / (S * S / c) == pytest.approx(1 - 1 / (2 * c), rel=1e-3)


def test_balance_and_windows_even_the_work_out() -> None:
    """Head-tail work is equal to the last pair; a short window makes balance useless."""
    layer, sliding = model().layers[0], model(kind="sliding", window=128).layers[0]

    assert len(set(work_shares(make_plan(8, 1, True), layer, job()))) == 1
    shares = work_shares(make_plan(8, 1), sliding, job())
    assert max(shares) / min(shares) < 1.01
    dense = work_shares(make_plan(8, 1), layer, job(skips_masked=False))
    assert set(dense) == {65536 * 65536 // 8}


@pytest.mark.parametrize(
    ("heads", "kv", "ratio"), [(64, 8, 0.89), (32, 8, 1.6), (32, 32, 4.0), (32, 1, 0.2)]
)
def test_volume_ratio_of_gather_to_ulysses_is_the_rule_of_thumb(
    heads: int, kv: int, ratio: float
) -> None:
    """P Hkv / (H + max(Hkv, u)): 0.89 for Llama 70B, 1.6 for 8B, 4 for MHA on 8 ranks."""
    m, w = model(heads, kv), job()
    ulysses, gather = price(m, w, 8), price(m, w, 1)

    assert gather.bytes_sent["all_gather"] / (ulysses.bytes_sent["all_to_all"] / 2) == (
        pytest.approx(ratio, rel=0.01)
    )
    assert ratio == pytest.approx(8 * kv / (heads + max(kv, 8)), rel=0.01)


def test_resident_kv_of_llama_8b_at_128k() -> None:
    """512 MiB per layer when gathered, 64 MiB under Ulysses on 8 ranks."""
    m, w = read_model("Llama-3.1-8B"), job(131072)

    assert price(m, w, 1).resident_kv_bytes == 512 * MIB
    assert price(m, w, 8).resident_kv_bytes == 64 * MIB


@pytest.mark.parametrize(("u", "balance"), [(8, False), (1, True), (2, False), (1, False)])
def test_flops_follow_the_formula(u: int, balance: bool) -> None:
    """2 b (S/c) S (H/u) (d + dv) times the executed fraction; 2.5 times that in backward."""
    S, c = 65536, 8 // u
    cluster = read_cluster("atlas-800t-a2")
    found = price(model(), job(S), u, load_balance=balance)
    fraction = 0.5 if u == 8 or balance else 1 - 1 / (2 * c)
    flops = 2 * (S / c) * S * (32 / u) * 256 * fraction
    device = cluster.device
    busy = S / c * 32 / u / (2 if balance else 1)
    fill = busy / (busy + device.attention_saturation.value)
    peak = device.peak_TFLOPS["bf16"].value * 1e12
    ideal = flops / (peak * device.attention_efficiency.value * fill)

    assert seconds(found, "attention") == pytest.approx(ideal, rel=0.002)
    assert seconds(found, "attention", "backward") == pytest.approx(2.5 * ideal, rel=0.002)
    n = S / 8
    gemms = 2 * n * 4096 * (32 + 8 + 8 + 32) * 128
    rate = device.peak_TFLOPS["bf16"].value * 1e12 * device.gemm_efficiency.value
    projections = sum(seconds(found, f"{x} projection") for x in ("q", "k", "v", "out"))
    assert projections == pytest.approx(gemms / rate)


def test_qwen_on_an_atlas_node_comes_out_as_the_prototype_did() -> None:
    """Within a tenth of an independent prototype: 30.0 + 71.9 ms balanced, 41.1 + 97.6 for u=4."""
    m, w = read_model("Qwen2.5-7B"), job()
    balanced, hybrid = price(m, w, 1, load_balance=True), price(m, w, 4)
    layers = len(m.layers)

    assert balanced.forward * 1e3 / layers == pytest.approx(30.0, rel=0.1)
    assert balanced.backward * 1e3 / layers == pytest.approx(71.9, rel=0.1)
    assert hybrid.forward * 1e3 / layers == pytest.approx(41.1, rel=0.1)
    assert hybrid.backward * 1e3 / layers == pytest.approx(97.6, rel=0.1)


def test_bytes_are_those_of_the_plan() -> None:
    """The model adds nothing to what `Plan.describe` says, layer by layer."""
    m, w = model(layers=3), job()
    found = price(m, w, 2)
    described = make_plan(8, 2).describe(num_heads=32, num_kv_heads=8, seq_len=65536, head_size=128)

    assert found.bytes_sent == {k: 3 * size for k, (_, size) in described.totals().items()}
    assert found.num_collectives == 3 * described.count()


def test_recomputation_repeats_the_forward_with_its_collectives() -> None:
    """Backward grows by exactly one forward."""
    plain, again = price(model(), job(), 4), price(model(), job(recompute=True), 4)

    assert again.forward == pytest.approx(plain.forward)
    assert again.backward == pytest.approx(plain.backward + plain.forward)
    assert again.bytes_sent["all_gather"] == 2 * plain.bytes_sent["all_gather"]


def test_shared_cores_hide_the_imbalance() -> None:
    """Ranks that share cores: wall time follows the mean work."""
    cluster = read_cluster("cpu-gloo")
    alone = cluster.model_copy(update={"shared_cores": False})
    w = job(4096, 4, dtype="fp32")

    assert price(model(), w, 1, cluster=cluster).imbalance == 1
    assert price(model(), w, 1, cluster=alone).imbalance == pytest.approx(1.75, rel=0.01)


def test_layout_and_batch_decide_the_copies() -> None:
    """BNSD needs a third copy around an all-to-all; a gathered BSHD batch of one needs none."""

    def copies(u: int, **fields: Any) -> float:
        return seconds(price(model(), job(**fields), u), "copies")

    assert copies(8, layout="BNSD") == pytest.approx(1.5 * copies(8, layout="BSHD"), rel=0.01)
    assert copies(1, layout="BSHD") == 0
    assert copies(1, layout="BSHD", batch=2) > 0


@pytest.mark.parametrize("u", [1, 2, 8])
def test_overlap_hides_no_more_than_the_projections_take(u: int) -> None:
    """The exchange runs behind the projections: it never gains more than they last, nor loses."""
    sync, split = price(model(), job(), u), price(model(), job(), u, overlap=True)
    gemms = sum(seconds(sync, f"{x} projection") for x in "qkv")

    assert 0 < sync.exposed_comm - split.exposed_comm <= 3 * gemms
    assert split.seconds < sync.seconds
    gathers = [t for t in split.terms if t.name.startswith("all_gather")]
    if u == 2:  # the gather of the hybrid stays at the boundary
        assert all(t.exposed == t.seconds for t in gathers)


def test_every_term_says_how_and_from_what() -> None:
    """Formula and sources on every addend; exposed terms add up to the total."""
    found = price(model(), job(), 2)

    assert all(term.formula and term.sources for term in found.terms)
    assert sum(term.exposed for term in found.terms) == pytest.approx(found.seconds)
    assert {t.resource for t in found.terms} == {"compute", "network", "memory"}


def test_linear_layers_are_not_priced() -> None:
    """Context parallelism does not touch them."""
    mixed = model().model_copy(
        update={"layers": (model().layers[0], model(kind="linear").layers[0])}
    )

    assert price(mixed, job(), 2).seconds == price(model(), job(), 2).seconds


def test_memory_counts_parameters_only_when_the_ranks_are_known() -> None:
    """Without a world size, activations only; with it, 16 bytes per parameter over all ranks."""
    m, cluster = read_model("Llama-3.1-8B"), read_cluster("atlas-800t-a2")
    bare = memory_use(m, cluster, job(), Config(ulysses_degree=8))
    known = memory_use(m, cluster, job(world_size=16), Config(ulysses_degree=8))

    assert m.parameters is not None
    assert known.total - bare.total == m.parameters * 16 // 16
    assert bare.fits
    assert [size for _, size in known.terms] == sorted((s for _, s in known.terms), reverse=True)
