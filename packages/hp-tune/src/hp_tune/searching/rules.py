"""Why a configuration is not valid: the rules, each with an id, its numbers and the way out.

`hp_cp.plan` says what is valid; this file only asks it, rule by rule, and keeps which rule it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_cp.gathers import check_streamed_style
from hp_cp.plan import Plan, make_plan
from hp_mesh.checks import divisors
from hp_tune.clusters.cluster import Cluster
from hp_tune.cost.halo import layer_config, layer_plan
from hp_tune.cost.memory import GIB, memory_use
from hp_tune.models.model import Attention, Model
from hp_tune.workload import Config, Workload

__all__ = ["Rejection", "check"]

INT32 = 2**31
ASKED = "search"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a configuration is not valid.

    Attributes:
        rule: A stable id, ``V01`` and so on.
        message: The broken rule with its numbers.
        numbers: Those numbers by name.
        hint: The way out.
    """

    rule: str
    message: str
    numbers: dict[str, Any]
    hint: str


def check(model: Model, cluster: Cluster, workload: Workload, config: Config) -> Plan | Rejection:
    """Return the plan of a valid configuration, or the first rule that it breaks."""
    rejection = (
        _check_mesh(model, workload)
        or _check_kinds(model, workload, config)
        or _check_halo(model, workload, config)
    )
    if rejection is not None:
        return rejection
    cp, u, tp = workload.cp_size, config.ulysses_degree, workload.tp_size
    group: dict[str, Any] = {"cp_size": cp, "ulysses_degree": u}
    rule, numbers = "V02", dict[str, Any](group)
    try:
        make_plan(cp, u, where=ASKED)
        rule, numbers = "V05", {**group, "load_balance": config.load_balance}
        balance_hybrid = config.balance_hybrid
        plan = make_plan(cp, u, config.load_balance, balance_hybrid=balance_hybrid, where=ASKED)
        rule, numbers = "V15", {**group, "keep_kv": config.keep_kv}
        plan.check_keep_kv(config.keep_kv, where=ASKED)
        rule, numbers = "V16", {**group, "kv_chunks": config.kv_chunks}
        plan.check_kv_chunks(config.kv_chunks, workload.seq_len // cp, where=ASKED)
        check_streamed_style(
            config.kv_chunks,
            use_local_input=False,
            head_groups=config.head_groups,
            overlap=config.overlap,
            where=ASKED,
        )
        if config.halo:
            rule, numbers = "V17", {"cp_size": cp, "halo": config.halo}
            windowed = make_plan(cp, config.halo, where=ASKED)
            for layer, _ in model.layer_groups:
                if layer.slides:
                    numbers |= {"window": layer.window, "sink_tokens": layer.sink_tokens}
                    windowed.check_window(layer.window, layer.sink_tokens, where=ASKED)
        rule = "V03"
        for layer, _ in model.layer_groups:
            if layer.exchanges and not layer.is_sparse:
                own, layers_plan = layer_config(layer, config), layer_plan(layer, config, cp)
                heads, kv = layer.num_heads // tp, max(1, layer.num_kv_heads // tp)
                numbers = {**group, "num_heads": heads, "num_kv_heads": kv, "tp_size": tp}
                layers_plan.heads(heads, kv, where=ASKED, tp_size=tp)
                if own.head_groups > 1:
                    numbers["head_groups"] = own.head_groups
                    layers_plan.check_head_groups(own.head_groups, heads, kv, where=ASKED)
        rule, numbers = "V01", {**group, "seq_len": workload.seq_len}
        plan.split_length(workload.seq_len, ASKED)
    except ValueError as error:
        message, _, hint = str(error).removeprefix(f"{ASKED}: ").partition("; ")
        return Rejection(rule, message, dict(numbers), hint)
    return (
        _check_handoffs(workload, config)
        or _check_index(model, workload, group)
        or _check_memory(model, cluster, workload, config, group)
        or plan
    )


def _check_handoffs(workload: Workload, config: Config) -> Rejection | None:
    if not config.overlap or workload.handoffs or config.head_groups > 1:
        return None
    return Rejection(
        "V09",
        "async needs handoffs, and a rotary embedding stands between projections and attention",
        {"overlap": True, "handoffs": False},
        "mark where q, k and v are final with hp_cp.Handoff, and search with --handoffs",
    )


def _check_mesh(model: Model, workload: Workload) -> Rejection | None:
    world, tp, cp = workload.num_ranks, workload.tp_size, workload.cp_size
    if world % (tp * cp):
        return Rejection(
            "V10",
            f"world_size ({world}) must be divisible by tp_size x cp_size ({tp} x {cp})",
            {"world_size": world, "tp_size": tp, "cp_size": cp},
            f"use --world {-(-world // (tp * cp)) * tp * cp}",
        )
    for layer, _ in model.layer_groups:
        heads, kv = layer.num_heads, layer.num_kv_heads
        for name, count in (("num_heads", heads), ("num_kv_heads", kv)):
            if count % tp and (name == "num_heads" or tp % count):
                return Rejection(
                    "V10",
                    f"{name} ({count}) must be divisible by tp_size ({tp})",
                    {name: count, "tp_size": tp},
                    f"use --tp with one of {', '.join(map(str, divisors(count)))}",
                )
    return None


def _check_kinds(model: Model, workload: Workload, config: Config) -> Rejection | None:
    """Refuse kinds of layers that no style serves, and what their styles do not have."""
    for layer, _ in model.layer_groups:
        found = _check_kind(layer, workload, config)
        if found is not None:
            return found
    if config.balances and workload.documents is not None:
        option, way_out = "balance_hybrid", "leave balance_hybrid off"
        if config.load_balance:
            option = "load_balance"
            way_out = "use ulysses_degree above 1, or leave load_balance off"
        return Rejection(
            "V06",
            f"{option} evens out one causal sequence and must not meet packed documents, whose "
            "work it does not know",
            {option: True, "documents": len(workload.documents)},
            way_out,
        )
    return None


def _check_kind(layer: Attention, workload: Workload, config: Config) -> Rejection | None:
    if layer.kind == "compressed":
        return Rejection(
            "V12",
            f"layers with one key per {layer.compression} tokens must have a context "
            "parallelism of their own, which neither hp_cp nor hp_dsa has",
            {"compression": layer.compression},
            "this model can be described, not parallelised",
        )
    if config.gather == "latent":
        return Rejection(
            "V09",
            "gather of latents must be something that a style does, and none does",
            {"gather": "latent"},
            "use gather='kv'; predict() says what the latent would win",
        )
    if layer.index_topk is None:
        return None
    sparse = {"index_topk": layer.index_topk, "ulysses_degree": config.ulysses_degree}
    if not layer.is_sparse:
        return Rejection(
            "V08",
            f"sparse attention (index_topk {layer.index_topk}) must have latent keys, which the "
            "styles of hp_dsa gather",
            sparse,
            "no style serves an indexer on other keys",
        )
    if config.ulysses_degree > 1:
        return Rejection(
            "V08",
            f"ulysses_degree ({config.ulysses_degree}) must be 1 for sparse attention: all heads "
            "share one key, and queries stay where they are",
            sparse,
            "use ulysses_degree=1, the one mode of hp_dsa's styles",
        )
    if config.head_groups > 1:
        return Rejection(
            "V08",
            f"head_groups ({config.head_groups}) must be 1 for sparse attention: the styles of "
            "hp_dsa have no groups of heads",
            sparse,
            "leave head_groups out",
        )
    if config.kv_chunks > 1:
        return Rejection(
            "V08",
            f"kv_chunks ({config.kv_chunks}) must be 1 for sparse attention: the styles of hp_dsa "
            "gather all keys, of which each query takes its own",
            sparse,
            "leave kv_chunks out",
        )
    if workload.layout not in ("BSHD", "TND"):
        return Rejection(
            "V08",
            f"layout ({workload.layout}) must be BSHD (BSND) or TND for sparse attention",
            {**sparse, "layout": workload.layout},
            "search with --layout BSND",
        )
    return None


def _check_halo(model: Model, workload: Workload, config: Config) -> Rejection | None:
    """Refuse windows that no style fetches; `Plan.check_window` says which plans fetch them."""
    if not config.halo:
        return None
    numbers = {"halo": config.halo, "causal": workload.causal}
    if not any(layer.slides for layer in model.layers):
        return Rejection(
            "V17",
            f"halo ({config.halo}) must come with sliding layers, and {model.name} has none",
            numbers,
            "leave halo out",
        )
    if not workload.causal:
        return Rejection(
            "V17",
            f"halo ({config.halo}) must come with causal attention: of a window, keys before the "
            "query are fetched, and none after it",
            numbers,
            "leave halo out",
        )
    return None


def _check_index(model: Model, workload: Workload, numbers: dict[str, Any]) -> Rejection | None:
    tokens = workload.batch * workload.seq_len // workload.cp_size
    layer = max(model.layers, key=lambda a: a.num_heads * max(a.head_size, a.v_head_size))
    size = layer.num_heads // workload.tp_size * max(layer.head_size, layer.v_head_size)
    if tokens * size < INT32:
        return None
    return Rejection(
        "V14",
        f"q has {tokens * size} elements per rank and must have less than 2^31 for one exchange",
        {**numbers, "elements": tokens * size, "limit": INT32},
        "use a smaller batch, more CP ranks or more TP ranks",
    )


def _check_memory(
    model: Model, cluster: Cluster, workload: Workload, config: Config, numbers: dict[str, Any]
) -> Rejection | None:
    use = memory_use(model, cluster, workload, config)
    if use.fits:
        return None
    recompute = "" if workload.recompute else "--recompute on, "
    return Rejection(
        "V11",
        f"memory ({use.total / GIB:.1f} GiB per rank) must be at most what the device has "
        f"({use.capacity / GIB:.1f} GiB): {use.top()}",
        {**numbers, "bytes": use.total, "capacity": use.capacity, "terms": dict(use.terms)},
        f"use {recompute}more CP or TP ranks, a larger --world or a shorter sequence",
    )
