"""The overlap benchmark: its bound is right on schedules worked out by hand, its hosts go away."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hp_tune.models.model import Attention
from hp_tune.workload import Config

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "two_hosts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"two_hosts_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


rig = load("rig")
schedule = load("schedule")
rules = load("regret_rules")
Task, COMPUTE, SLOW, LOCAL = schedule.Task, schedule.COMPUTE, schedule.SLOW, schedule.LOCAL


def pieces(**ms: float) -> dict[str, float]:
    """Every piece takes 1 ms, except those named; ``swap_3_4`` is the piece ``swap 3/4``."""
    names = [f"{a} {b}" for a in ("projection", "output") for b in ("forward", "backward")]
    for count in (1, 2, 4, 8):
        names += [f"attention {b}/{count}" for b in ("forward", "backward")]
        names += [
            f"{a} {n}/{count}"
            for a, n in itertools.product(("swap", "gather", "reduce"), (1, 2, 3))
        ]
    changed = {name.replace(" ", "_").replace("/", "_"): name for name in names}
    return dict.fromkeys(names, 1.0) | {changed[name]: value for name, value in ms.items()}


def best(family: str, kind: str, groups: int = 1, **ms: float) -> schedule.Schedule:
    return schedule.simulate(schedule.step(family, kind, groups, pieces(**ms)))


def test_a_resource_does_one_thing_at_a_time() -> None:
    found = schedule.simulate([Task("a", SLOW, 3.0), Task("b", SLOW, 2.0), Task("c", LOCAL, 4.0)])

    assert found.spans == {"a": (0.0, 3.0), "b": (3.0, 5.0), "c": (0.0, 4.0)}


def test_of_two_ready_tasks_the_one_with_more_behind_it_goes_first() -> None:
    tasks = [
        Task("last", SLOW, 1.0),
        Task("first", SLOW, 1.0),
        Task("behind", COMPUTE, 5.0, ("first",)),
    ]

    assert schedule.simulate(tasks).wall == 6.0


def test_what_is_behind_compute_is_hidden_and_the_rest_is_exposed() -> None:
    tasks = [
        Task("produce", COMPUTE, 1.0),
        Task("send", SLOW, 5.0, ("produce",)),
        Task("meanwhile", COMPUTE, 3.0, ("produce",)),
        Task("consume", COMPUTE, 1.0, ("send", "meanwhile")),
    ]
    found = schedule.simulate(tasks)

    assert (found.wall, found.compute, found.transfers) == (7.0, 5.0, 5.0)
    assert (found.exposed, found.hideable) == (2.0, 3.0)


@pytest.mark.parametrize("family", ["ulysses", "hybrid", "colossal"])
def test_sync_hides_nothing(family: str) -> None:
    found = best(family, "sync")

    assert found.hideable == 0.0
    assert found.compute == 3 + 1 + 1 + 1 + 1 + 3


@pytest.mark.parametrize("family", ["ulysses", "hybrid", "colossal"])
@pytest.mark.parametrize(("kind", "groups"), [("async", 1), ("groups", 2), ("groups", 8)])
def test_every_mode_computes_the_same_and_its_tasks_come_in_order(
    family: str, kind: str, groups: int
) -> None:
    ms = {f"attention_{way}_{groups}": 1 / groups for way in ("forward", "backward")}

    assert best(family, kind, groups, **ms).compute == pytest.approx(best(family, "sync").compute)
    seen: set[str] = set()
    for task in schedule.step(family, kind, groups, pieces()):
        assert seen.issuperset(task.needs)
        seen.add(task.name)


def test_async_ulysses_hides_what_projections_leave_room_for() -> None:
    # forward: q and k behind the projections after them, v exposed; out and d out exposed;
    # backward: dv exposed, dk and dq behind the gradients of v and k
    assert best("ulysses", "async").exposed == 1 + 1 + 1 + 1
    # a link three times slower: 9 of q, k, v less 2 of projections; 3 + 3; 9 less 2
    assert best("ulysses", "async", swap_1_1=3.0).exposed == 7 + 3 + 3 + 7


def test_async_colossal_can_use_the_gradient_of_q_which_waits_for_nothing() -> None:
    # forward: v exposed; backward: dv behind the gradient of q, dk behind that of v
    assert best("colossal", "async").exposed == 1


def test_async_hybrid_gathers_at_the_module() -> None:
    # exposed: v's exchange and the gather behind it, out, d out, the reduction (dq travels beside
    # it, inside the host); dv is behind the gradient of q, dk behind that of v
    found = best("hybrid", "async", gather_2_1=10.0)

    assert found.spans["kv"][0] >= found.spans["v projection"][1]
    assert found.exposed == 1 + 10 + 1 + 1 + 1


def test_head_groups_expose_the_first_way_in_and_the_last_way_out() -> None:
    # attention of a group takes as long as its way in or longer: forward 1 + 1, backward 1 + 1
    found = best("ulysses", "groups", 4, attention_forward_4=2.0, attention_backward_4=2.0)

    assert found.exposed == 4.0
    assert found.transfers == 2 * 4 * 2


def test_head_groups_on_a_slow_link_are_as_long_as_the_link() -> None:
    # forward: 4 ways in and 4 out, one after the other; the link waits for the first attention only
    # if nothing else is ready, and for the last one
    slow = {"swap_3_4": 3.0, "attention_forward_4": 1.0, "attention_backward_4": 1.0}
    found = best("ulysses", "groups", 4, **slow)

    last_in = found.spans["qkv 3"][1]
    assert last_in == 3 + 4 * 3
    assert found.spans["o"][0] == last_in + 4


def test_hosts_of_dead_runs_are_found_and_no_others() -> None:
    listing = "hpov-12-0 (id: 3)\nhpov-12-1\nhpov-34-0\nhpov-12-2\nhpov-x-0\nmine-12-0\n"

    assert rig.stale(listing, lambda pid: pid == 34) == ["hpov-12-0", "hpov-12-1"]
    assert rig.stale("", lambda pid: False) == []


def test_names_are_of_the_run_and_are_found_again() -> None:
    hosts = rig.namespaces(4194304)

    assert rig.stale("\n".join(hosts), lambda pid: pid != 4194304) == list(hosts)


def test_nothing_is_made_outside_of_the_hosts() -> None:
    a, b = hosts = rig.namespaces(7)
    commands = [" ".join(command) for command in rig.setup_commands(hosts)]

    assert commands[:3] == [
        "ip netns add hpov-7-0",
        "ip netns add hpov-7-1",
        "ip link add slow netns hpov-7-0 type veth peer name slow netns hpov-7-1",
    ]
    assert all(command.startswith((f"ip -n {a} ", f"ip -n {b} ")) for command in commands[3:])
    assert rig.delete_command(a) == ["ip", "netns", "del", a]


def test_the_rate_is_set_inside_a_host() -> None:
    rate = "qdisc replace dev slow root tbf rate 150mbit burst 128kb latency 50ms"

    assert " ".join(rig.rate_command(150.0)) == f"tc {rate}"
    assert " ".join(rig.rate_command(150.0, "hpov-7-0")) == f"tc -n hpov-7-0 {rate}"


def test_without_root_there_are_no_hosts_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.os, "geteuid", lambda: 1000)

    with pytest.raises(rig.Unavailable, match="need root"), rig.TwoHosts():
        pass


LAYER = Attention(num_heads=16, num_kv_heads=4, head_size=8, v_head_size=8)
SPACE = [
    Config(ulysses_degree=u, load_balance=balance, overlap=overlap)
    for u in (1, 2, 4)
    for balance, overlap in ((True, False), (False, True), (False, False))
]


def test_fixed_rules_pick_plain_modes_by_their_rule() -> None:
    """The gather below H / Hkv + 1 = 5 ranks, and Ulysses from there on."""
    gather, ulysses = Config(ulysses_degree=1), Config(ulysses_degree=4)
    few, many = rules.RULES["P < H/Hkv + 1"](SPACE, LAYER, 4), rules.RULES["P < H/Hkv + 1"]

    assert rules.RULES["largest Ulysses"](SPACE, LAYER, 4) == ulysses
    assert rules.RULES["always Colossal"](SPACE, LAYER, 4) == few == gather
    assert many(SPACE, LAYER, 5) == ulysses


def test_regret_is_the_time_over_the_least_and_its_interval_follows_the_rounds() -> None:
    """Medians, not means; rounds are drawn for all configurations at once."""
    a, b, c = SPACE[:3]
    # b is a tenth slower than a in every round, however slow the round is
    samples = {a: [10.0, 20.0, 30.0], b: [11.0, 22.0, 33.0], c: [40.0, 60.0, 60.0]}

    assert rules.regret(samples, a) == 0
    assert rules.regret(samples, b) == pytest.approx(0.1)
    assert rules.regret(samples, c) == pytest.approx(2.0)
    assert rules.interval(rules.regrets(samples, b)) == pytest.approx((0.1, 0.1))
    low, high = rules.mean_interval([rules.regrets(samples, b), rules.regrets(samples, a)])
    assert (low, high) == pytest.approx((0.05, 0.05))
    low, high = rules.interval(rules.regrets(samples, c))
    assert (low, high) == pytest.approx((1.0, 3.0))
