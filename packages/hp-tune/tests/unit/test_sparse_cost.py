"""DSA and MLA layers against closed formulas and published figures."""

from __future__ import annotations

from typing import Any

import pytest

from hp_dsa.plan import make_plan
from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.clusters.network import Group, transfer
from hp_tune.cost.memory import memory_use
from hp_tune.cost.predict import Prediction, predict
from hp_tune.errors import PlanMismatchError
from hp_tune.models.hf_config import read_model
from hp_tune.models.model import Model
from hp_tune.plans.plan import Entry
from hp_tune.searching.engine import search
from hp_tune.searching.rules import Rejection, check
from hp_tune.workload import Config, Workload

U1 = Config(ulysses_degree=1)


def one_layer(name: str) -> Model:
    """A preset cut to its first layer."""
    model = read_model(name)
    return model.model_copy(update={"layers": model.layers[:1]})


def price(name: str, config: Config = U1, cluster: str = "atlas-900-a3", **job: Any) -> Prediction:
    """Price one layer of a preset, 32768 tokens on 8 ranks unless ``job`` says otherwise."""
    workload = Workload(**{"seq_len": 32768, "cp_size": 8, **job})
    return predict(one_layer(name), read_cluster(cluster), workload, config)


def seconds(found: Prediction, name: str, phase: str = "forward") -> float:
    """Time of the terms of that name."""
    return sum(t.seconds for t in found.terms if t.name == name and t.phase == phase)


def test_gathers_of_glm_5_are_as_published() -> None:
    """32768 tokens on 8 ranks: 33.0 MB of latents and 7.3 MB of index keys reach each rank."""
    found = {
        term.name: term.bytes
        for term in price("GLM-5").terms
        if term.name.startswith("all_gather") and term.phase == "forward"
    }

    assert found["all_gather key|key_rope"] / 1e6 == pytest.approx(33.0, rel=0.01)
    assert found["all_gather key_index"] / 1e6 == pytest.approx(7.3, rel=0.01)


def test_small_gathers_are_slower_per_byte() -> None:
    """Why one bandwidth is wrong: on H200 the index keys get less than half of the latents'."""
    cluster, group = read_cluster("hgx-h200"), Group(8, 1, 8)
    latent = transfer(cluster, "all_gather", group, 33.0e6)
    index = transfer(cluster, "all_gather", group, 7.3e6)

    assert 33.0e6 / latent.seconds / 1e9 == pytest.approx(330, rel=0.25)
    assert 7.3e6 / index.seconds / 1e9 == pytest.approx(136, rel=0.25)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("balance", [True, False])
def test_bytes_are_those_of_the_plan_of_hp_dsa(keep: bool, balance: bool) -> None:
    """The model adds nothing to what `DSAPlan.describe` says."""
    config = Config(ulysses_degree=1, load_balance=balance, keep_kv=keep)
    plan = make_plan(8, load_balance=balance, order="contiguous")
    described = plan.describe(seq_len=32768, index_heads=32, keep_keys=keep)
    found = price("GLM-5", config)

    totals = described.totals()
    assert found.bytes_sent == {kind: size for kind, (_, size) in totals.items()}
    assert found.num_collectives == sum(count for count, _ in totals.values())


def test_indexer_follows_pairs_and_core_is_flat_in_the_length() -> None:
    """Scores are quadratic, the core sees at most index_topk keys: balanced once S is long."""
    short, long = price("GLM-5", seq_len=65536), price("GLM-5", seq_len=131072)
    scores = seconds(long, "indexer scores") / seconds(short, "indexer scores")
    core = seconds(long, "sparse attention") / seconds(short, "sparse attention")

    assert scores == pytest.approx(4, rel=0.25)  # a fuller device gains a little
    assert core == pytest.approx(2, rel=0.1)
    assert long.imbalance == pytest.approx(2 - 1 / 8, rel=1e-3)
    balanced = price("GLM-5", Config(ulysses_degree=1, load_balance=True), seq_len=131072)
    assert balanced.imbalance < 1.02
    assert seconds(balanced, "indexer scores") < 0.6 * seconds(long, "indexer scores")


def test_core_flops_are_those_of_the_absorbed_form() -> None:
    """2 b min(k, pos) H ((dc + dr) + dc) per row, on the last rank."""
    found, device = price("DeepSeek-V3.2"), read_cluster("atlas-900-a3").device
    rows, heads = 4096, 128
    flops = 2 * rows * 2048 * heads * (576 + 512)
    fill = rows * heads / (rows * heads + device.attention_saturation.value)
    rate = device.peak_TFLOPS["bf16"].value * 1e12 * device.attention_efficiency.value * fill

    assert seconds(found, "sparse attention") == pytest.approx(flops / rate, rel=0.01)
    assert seconds(found, "sparse attention", "backward") == pytest.approx(
        2.5 * flops / rate, rel=0.01
    )


def test_handoffs_of_dsa_hide_gathers_and_never_lose() -> None:
    """Gathers start when the latent and the index key exist."""
    sync, ahead = price("GLM-5"), price("GLM-5", Config(ulysses_degree=1, overlap=True))

    assert ahead.exposed_comm < sync.exposed_comm
    assert ahead.seconds < sync.seconds
    for found in (sync, ahead):
        assert sum(term.exposed for term in found.terms) == pytest.approx(found.seconds)


def test_layers_that_share_an_indexer_have_none_of_their_own() -> None:
    """GLM-5.2: a layer that takes an earlier selection gathers latents only."""
    model = read_model("GLM-5.2")
    shared = next(layer for layer in model.layers if not layer.has_indexer)
    found = predict(
        model.model_copy(update={"layers": (shared,)}),
        read_cluster("atlas-900-a3"),
        Workload(seq_len=32768, cp_size=8),
        U1,
    )

    assert not any("ind" in term.name for term in found.terms)
    assert {t.name for t in found.terms if t.resource == "network"} == {
        "all_gather key|key_rope", "reduce_scatter key|key_rope",
    }  # fmt: skip


def test_a_latent_is_71_times_smaller_than_its_keys_and_values() -> None:
    """DeepSeek-V3: 128 heads x (192 + 128) against 512 + 64 features per token."""
    plain = price("DeepSeek-V3").bytes_sent["all_gather"]
    latent = price("DeepSeek-V3", Config(ulysses_degree=1, gather="latent"))

    assert plain / latent.bytes_sent["all_gather"] == pytest.approx(71.1, rel=0.01)
    # the up-projection is repeated on every rank
    up = seconds(latent, "k projection") / seconds(price("DeepSeek-V3"), "k projection")
    assert up == pytest.approx(8)


def test_gather_of_latents_is_priced_but_not_proposed() -> None:
    """No style does it: the rule says so, and the search never lists it."""
    config = Config(ulysses_degree=1, gather="latent")
    found = check(
        one_layer("DeepSeek-V3"), read_cluster("hgx-h200"),
        Workload(seq_len=32768, cp_size=8), config,
    )  # fmt: skip

    assert isinstance(found, Rejection)
    assert found.rule == "V09"
    for overlap in (False, True):
        many = price("DeepSeek-V3", config.model_copy(update={"overlap": overlap}))
        assert sum(term.exposed for term in many.terms) == pytest.approx(many.seconds)


def test_search_of_a_sparse_model_finds_the_styles_of_hp_dsa() -> None:
    """Degree 1 only, with and without balance; the plan names whose styles run it."""
    result = search(
        one_layer("DeepSeek-V3.2"),
        read_cluster("atlas-900-a3"),
        Workload(seq_len=65536, cp_size=8),
        overlap=False,
    )

    assert {ranked.config.ulysses_degree for ranked in result.ranking} == {1}
    assert result.ranking[0].config.load_balance
    assert {rejection.rule for _, rejection in result.rejected} == {"V08"}
    assert result.plan is not None
    entry: Entry = result.plan.entries[0]
    natural = {"layout": "BSND", "load_balance": True, "order": "contiguous"}
    assert entry.style_kwargs() == natural
    with pytest.raises(PlanMismatchError, match="three styles of hp_dsa"):
        entry.style()


@pytest.mark.parametrize(
    ("name", "config", "layout", "rule"),
    [
        ("DeepSeek-V3.2", Config(ulysses_degree=2), "BSHD", "V08"),
        ("DeepSeek-V3.2", Config(ulysses_degree=1, head_groups=2, overlap=True), "BSHD", "V08"),
        ("DeepSeek-V3.2", U1, "SBHD", "V08"),
        ("DeepSeek-V4-Flash", U1, "BSHD", "V12"),
    ],
)
def test_what_sparse_layers_cannot_have_is_refused(
    name: str, config: Config, layout: str, rule: str
) -> None:
    """With the numbers and a way out."""
    workload = Workload.model_validate({"seq_len": 32768, "cp_size": 8, "layout": layout})
    found = check(read_model(name), read_cluster("atlas-900-a3"), workload, config)

    assert isinstance(found, Rejection)
    assert (found.rule, bool(found.hint), bool(found.numbers)) == (rule, True, True)


def test_memory_of_sparse_layers_counts_gathered_latents_once() -> None:
    """One latent for all heads; gathered again in backward it is not kept."""
    model, cluster = one_layer("DeepSeek-V3.2"), read_cluster("atlas-900-a3")
    job = Workload(seq_len=32768, cp_size=8)
    kept = dict(memory_use(model, cluster, job, U1).terms)
    again = dict(memory_use(model, cluster, job, Config(ulysses_degree=1, keep_kv=False)).terms)

    assert kept["resident K and V"] == 32768 * (576 + 128) * 2
    assert again["resident K and V"] == 32768 // 8 * (576 + 128) * 2
    assert kept["selected keys"] == 4096 * 2048 * 4
