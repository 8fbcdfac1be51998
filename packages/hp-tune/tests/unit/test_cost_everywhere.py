"""Every preset on clusters of every kind: nothing crashes, nothing is faster than physics."""

from __future__ import annotations

import pytest

from hp_tune.clusters.cluster_files import read_cluster
from hp_tune.cost.memory import memory_use
from hp_tune.cost.predict import predict
from hp_tune.models.hf_config import model_presets, read_model
from hp_tune.searching.rules import Rejection, check
from hp_tune.searching.space import enumerate_space
from hp_tune.workload import Workload

CLUSTERS = [read_cluster(name) for name in ("atlas-800t-a2", "hgx-h200", "l20x8-pcie")]
JOBS = [
    Workload(seq_len=16384, cp_size=8, batch=2, recompute=True, handoffs=True),
    Workload(
        seq_len=16384, cp_size=4, tp_size=2, layout="BNSD", handoffs=True,
        documents=((700, 1.0), (5000, 0.1)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(model_presets()))
def test_every_valid_configuration_of_a_preset_is_plausible(name: str) -> None:
    """Exposed terms add up, no term beats a peak, and what does not fit says why."""
    model, priced = read_model(name), 0
    for job in JOBS:
        slides = any(layer.slides for layer in model.layers)
        every, _ = enumerate_space(
            job.cp_size, overlap=True, variants=True, sliding="some" if slides else "none"
        )
        for config in every:
            for cluster in CLUSTERS:
                found = check(model, cluster, job, config)
                if isinstance(found, Rejection):
                    assert found.message
                    assert found.hint
                    if found.rule != "V11":
                        continue
                prediction = predict(model, cluster, job, config)
                exposed = sum(term.exposed for term in prediction.terms)
                assert exposed == pytest.approx(prediction.seconds)
                assert all(term.share_of_peak <= 1.000001 for term in prediction.terms
                           if term.share_of_peak is not None)  # fmt: skip
                assert all(term.formula and term.inputs for term in prediction.terms)
                assert prediction.imbalance > 0.999999
                assert memory_use(model, cluster, job, config).total > 0
                priced += 1
    assert priced or name == "DeepSeek-V4-Flash", "only compressed keys have no style"
