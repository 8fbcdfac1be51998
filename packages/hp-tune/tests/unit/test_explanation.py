"""Why the winner wins: terms that add up, rivals, exact flips, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.cost.predict import predict
from hp_tune.errors import UsageError
from hp_tune.explanation.explain import Explanation, explain, find_rival
from hp_tune.explanation.flips import find_exact_flips
from hp_tune.explanation.text import explanation_json
from hp_tune.explanation.timeline import timeline_lines
from hp_tune.explanation.what_if import find_opportunities
from hp_tune.models.hf_config import read_model
from hp_tune.searching.engine import Result, search
from hp_tune.searching.ranking import with_number
from hp_tune.workload import Config, Workload


def result(
    model: str = "Qwen2.5-7B", cluster: str = "atlas-800t-a2", cp: int = 8, **workload: object
) -> Result:
    """A search without a study."""
    asked = Workload.model_validate({"seq_len": 65536, "cp_size": cp, **workload})
    return search(read_model(model), read_cluster(cluster), asked, overlap=True)


@pytest.fixture(scope="module")
def qwen() -> Explanation:
    """28 heads on 8 ranks: balanced Colossal wins on causal imbalance."""
    return explain(result())


def test_differences_add_up_and_the_largest_is_first(qwen: Explanation) -> None:
    """What a rival loses term by term is what it loses; here, to the imbalance of attention."""
    best = qwen.best.prediction.seconds * 1e3

    assert [rival.rank for rival in qwen.rivals] == [2, 3, 4]
    for rival in qwen.rivals:
        losses = [difference.ms for difference in rival.differences]
        assert sum(losses) == pytest.approx(rival.ms - best, rel=1e-9)
        assert losses == sorted(losses, reverse=True)
        assert rival.vs_best == pytest.approx(rival.ms / best)
        assert (rival.differences[0].phase, rival.differences[0].name) == ("backward", "attention")


def test_every_term_of_the_waterfall_has_its_source(qwen: Explanation) -> None:
    """Formula, inputs, bytes with their rate, share of the peak, and where the numbers are from."""
    found = explanation_json(qwen)

    assert sum(term["exposed_ms"] for term in found["waterfall"]) == pytest.approx(
        found["winner"]["forward_ms"] + found["winner"]["backward_ms"]
    )
    for term in found["waterfall"]:
        assert term["formula"] and term["inputs"] and term["sources"], term["name"]
        assert term["source"] in ("spec", "measured", "assumed")
        assert (term["GBps"] is not None) == (term["bytes"] > 0)
    gather = next(term for term in found["waterfall"] if term["name"] == "all_gather k")
    link = gather["inputs"]["GBps"]
    assert 0.9 * link < gather["GBps"] < link, "the rate with latency is just below the link's"


def test_a_rival_is_found_by_label_or_rank_and_others_say_why_not(qwen: Explanation) -> None:
    """A rejected one names its rule, a duplicate what it is, a typo the nearest."""
    assert find_rival(qwen, "hybrid u=4") is find_rival(qwen, "2")
    for label, message in [
        ("ulysses u=8", r"V03 rejects it: num_heads \(28\)"),
        ("colossal u=1 load_balance", "another configuration than the winner"),
        ("colossal u=1 load_balance async", "load_balance runs synchronously"),
        ("hybrid u=5", "did you mean 'hybrid u="),
    ]:
        with pytest.raises(UsageError, match=message):
            find_rival(qwen, label)


def test_the_flip_is_where_the_winner_changes() -> None:
    """A hair before the factor the winner is the old one, at the factor it is the new one."""
    asked = result("gpt-oss-20b", "hgx-h100", seq_len=32768, handoffs=True)
    flips = list(find_exact_flips(asked.model, asked.cluster, asked.workload, asked.ranking))
    best = asked.ranking[0].config

    def winner(name: str, value: float) -> Config:
        changed = with_number(asked.cluster, name, value)
        found = [
            replace(r, prediction=predict(asked.model, changed, asked.workload, r.config))
            for r in asked.ranking
        ]
        return min(found, key=lambda ranked: ranked.order).config

    assert flips, "this search is close"
    assert {flip.number for flip in asked.flips} <= {flip.number for flip in flips}
    for flip in flips:
        assert 0.3 <= flip.factor <= 3
        beyond = 1.001 if flip.factor > 1 else 0.999
        assert winner(flip.number, flip.value * flip.factor * beyond) == flip.winner != best
        assert winner(flip.number, flip.value * flip.factor / beyond) == best


def test_numbers_that_do_not_matter_are_no_flips(qwen: Explanation) -> None:
    """A margin of 38 % survives every assumed number between x0.3 and x3."""
    assert qwen.flips == ()
    assert qwen.result.margin == pytest.approx(0.379, abs=0.005)


def test_what_is_missing_is_priced_and_ranked(qwen: Explanation) -> None:
    """Features of the runtime, and of the model: with time, gain, and whether they would win."""
    found = {o.feature: o for o in qwen.opportunities}
    best = qwen.best.prediction.seconds * 1e3

    assert {"async with load_balance", "zigzag ring", "async exchanges"} <= set(found)
    assert found["async exchanges"].missing_in == "model"
    assert [o.ms for o in qwen.opportunities] == sorted(o.ms for o in qwen.opportunities)
    for opportunity in qwen.opportunities:
        assert opportunity.gain == pytest.approx(1 - opportunity.ms / best)
        assert opportunity.is_new_best == (opportunity.ms < best)
        assert opportunity.how
    # 2 gathers of 2.2 ms behind projections of 1.3 ms, twice: about one percent
    assert 0.005 < found["async with load_balance"].gain < 0.02


def test_balanced_hybrid_takes_the_imbalance_off_the_hybrid(qwen: Explanation) -> None:
    """Against the hybrid of the same degree: even attention, and the swaps that the winner has."""
    asked = qwen.result
    balanced = Config(ulysses_degree=4, balance_hybrid=True)
    found = predict(asked.model, asked.cluster, asked.workload, balanced)
    plain = next(r.ranked.prediction for r in qwen.rivals if r.label == "hybrid u=4")
    attention = sum(term.seconds for term in plain.terms if "attention" in term.name)
    even = attention / plain.imbalance

    swaps = sum(t.exposed for t in qwen.best.prediction.terms if "p2p" in t.name)

    # half the rows a call fill the device a little less
    assert found.seconds == pytest.approx(plain.seconds - (attention - even) + swaps, rel=0.02)


def test_what_the_runtime_has_is_no_opportunity() -> None:
    """Balanced hybrids and windows that are fetched are points of the space, sinks among them."""
    gone = {"balanced hybrid", "halo exchange", "a style per kind of layer"}
    for name in ("gpt-oss-20b", "gemma-4-26B-A4B", "Mistral-7B-v0.1", "Llama-3.1-8B"):
        found = {o.feature for o in explain(result(name, "hgx-h100")).opportunities}
        assert found and not gone & found, name


def test_latents_are_offered_for_latent_attention_alone() -> None:
    """MLA: the latent is 576 wide where K and V are 40960."""
    found = {o.feature: o for o in explain(result("DeepSeek-V3", "hgx-h100", cp=16)).opportunities}

    assert found["latent gather"].label.endswith("latent")
    assert "latent gather" not in {o.feature for o in explain(result(cp=4)).opportunities}


def test_sliding_layers_need_no_whole_gather() -> None:
    """gpt-oss: half of the layers see 128 keys, which they fetch where Colossal gathers all."""
    asked = result("gpt-oss-20b", "hgx-h100", seq_len=131072)
    gathered, fetched = (
        next(r.prediction for r in asked.ranking if r.config == Config(ulysses_degree=1, halo=halo))
        for halo in (0, 1)
    )
    gathers = sum(
        term.exposed
        for term in gathered.terms
        if term.name.startswith(("all_gather", "reduce_scatter")) and term.layers == 12
    )

    saved = gathered.seconds - fetched.seconds
    assert 0.3 * gathers < saved < gathers, "half of the layers' gathers, but for the halo"
    assert asked.ranking[0].config.halo == 1


def test_one_rank_or_sparse_layers_offer_nothing_that_cannot_be() -> None:
    """Nothing is exchanged on one rank; DSA has no hybrids, no latents and no ring."""
    assert explain(result(cp=1)).opportunities == ()
    sparse = explain(result("DeepSeek-V3.2", "hgx-h100", cp=16)).opportunities
    assert {o.feature for o in sparse} <= {"async exchanges", "a style per kind of layer"}


def test_a_timeline_shows_both_streams_in_the_order_of_time(qwen: Explanation) -> None:
    """Columns of one strip belong to one moment; a collective runs where compute waits for it."""
    line = qwen.best.prediction.timelines[0]
    head, compute, network, *legend = timeline_lines(line, width=60)

    assert head.startswith("forward of a layer, 28 x full: 28 heads")
    letters = {row.split()[0]: row for row in legend}
    assert len(letters) == len(line.slots)
    swap = next(letter for letter, row in letters.items() if "p2p q" in row)
    column = network.index(swap)
    assert compute[column] == ".", "the swap of q hides behind nothing"
    starts = [float(row.split("..")[0].split()[-1]) for row in legend]
    assert starts == sorted(starts)


def test_async_exchanges_are_offered_beside_windows_that_are_fetched() -> None:
    """Of the full layers; a window is fetched as the winner does, and not gathered after all."""
    model, cluster = read_model("gpt-oss-20b"), read_cluster("atlas-800t-a2")
    workload = Workload(seq_len=32768, cp_size=8)
    result = search(model, cluster, workload, overlap=True)
    assert result.ranking[0].config.halo == 1
    (offer,) = [o for o in find_opportunities(result) if o.feature == "async exchanges"]

    assert "async halo=1" in offer.label
    marked = result.workload.model_copy(update={"handoffs": True})
    searched = search(model, cluster, marked, overlap=True, recompute="off")
    times = [r.prediction.seconds for r in searched.ranking if r.config.overlap]
    assert offer.ms == pytest.approx(min(times) * 1e3)
