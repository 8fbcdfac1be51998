"""What a plan says: for which lengths and ranks which configuration, and what it was chosen from.

No torch and no optuna: a training script asks it for its style.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hp_cp.plan import Plan, make_plan
from hp_mesh.checks import require_positive
from hp_tune.errors import PlanMismatchError
from hp_tune.files import sha256
from hp_tune.workload import Config, Layout, Workload

if TYPE_CHECKING:
    from hp_cp import ContextParallel
    from hp_tune.plans.styles import StyleSpec

__all__ = [
    "SCHEMA",
    "Entry",
    "FailedConfig",
    "MeasuredTime",
    "PlanFile",
    "PricedConfig",
    "RejectedConfig",
    "When",
    "seal",
]

SCHEMA: Literal["hp-tune/plan/4"] = "hp-tune/plan/4"
"""Its number rises with every change of the fields, for a digest is of the whole content."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class When(_Strict):
    """What an entry was made for.

    Attributes:
        world_size: All ranks. A multiple of ``cp_size * tp_size`` is accepted too: more data
            replicas change nothing that the choice depends on.
        seq_len: The length whose numbers the entry holds: the one with the largest weight.
        seq: Lengths that the entry serves, both ends included: from half to twice what was
            searched, and the geometric mean where the next entry begins.
        lengths: All lengths that were searched and have this winner.
        weight: Their share among all that were searched.
    """

    world_size: int
    cp_size: int
    tp_size: int
    seq_len: int
    seq: tuple[int, int]
    lengths: tuple[int, ...] = ()
    weight: float = 1.0


class MeasuredTime(_Strict):
    """How a configuration ran, in ms per micro-batch.

    Attributes:
        median_ms: Of ``samples_ms``: forward and backward, the largest of the ranks in each round.
        interval_ms: 95 % interval of the median.
        memory_GiB: Peak of the busiest rank; 0 where it could not be read.
        in_finals: Whether it was timed in turns with the other finalists, in one job.
    """

    median_ms: float
    interval_ms: tuple[float, float]
    forward_ms: float
    backward_ms: float
    samples_ms: tuple[float, ...]
    memory_GiB: float = 0.0
    in_finals: bool = False


class PricedConfig(_Strict):
    """A valid configuration with what it was predicted to cost per micro-batch.

    Attributes:
        vs_best: Its time over that of the best; both measured, or both predicted.
        measured: How it ran, if it did; then ``source`` says so.
    """

    config: Config
    mode: str
    forward_ms: float
    backward_ms: float
    exposed_comm_ms: float
    imbalance: float
    bytes_sent: dict[str, int]
    memory_GiB: float
    vs_best: float = 1.0
    source: Literal["analytic", "measured"] = "analytic"
    measured: MeasuredTime | None = None


class FailedConfig(_Strict):
    """A configuration that was measured and has no time."""

    config: Config
    outcome: str
    reason: str


class RejectedConfig(_Strict):
    """A configuration that is not valid, with the rule, its numbers and the way out."""

    config: Config
    rule: str
    message: str
    numbers: dict[str, Any]
    hint: str


class Entry(_Strict):
    """One answer: the configuration for some lengths and a number of ranks.

    Attributes:
        styles: Whose styles run it; those of ``hp_dsa`` are three: see `styles_dict`.
        windows: Window and sink tokens of each kind of sliding layer; None for layers without.
        recompute: Whether it was searched with activation checkpointing.
        margin: How much slower the next is, as a fraction.
        front: With the objective ``pareto``, what no other beats in both time and memory.
        kernels: Launch parameters by kernel, where they were searched too.
        outranked: How many valid configurations were predicted too slow to be measured.
    """

    when: When
    best: PricedConfig
    layout: Layout
    styles: Literal["hp_cp", "hp_dsa"] = "hp_cp"
    windows: tuple[tuple[int, int] | None, ...] = (None,)
    recompute: bool = False
    margin: float | None = None
    alternatives: tuple[PricedConfig, ...] = ()
    rejected: tuple[RejectedConfig, ...] = ()
    front: tuple[PricedConfig, ...] = ()
    failed: tuple[FailedConfig, ...] = ()
    kernels: dict[str, dict[str, int]] = Field(default_factory=dict)
    outranked: int = 0

    @property
    def plan(self) -> Plan:
        """The `hp_cp` plan of the chosen configuration, for layers without a style of their own."""
        config = self.best.config
        return make_plan(
            self.when.cp_size,
            config.ulysses_degree,
            config.load_balance,
            balance_hybrid=config.balance_hybrid,
        )

    def style_kwargs(self, **overrides: Any) -> dict[str, Any]:
        """Return the arguments of the style's constructor; ``overrides`` win.

        Where there are several styles they are those of the first; see `style_specs` for all.
        """
        first = next(iter(self.style_specs().values()))
        return {**first.arguments, **overrides}

    def style_specs(self) -> dict[str, StyleSpec]:
        """Return the class and the arguments of each style by its boundary; imports no torch.

        ``attention``, for sparse attention ``indexer`` and ``indexer_loss`` too, and
        ``sliding_attention`` where sliding layers have a style of their own.
        """
        from hp_tune.plans.styles import style_specs

        return style_specs(self)

    def style(self, **overrides: Any) -> ContextParallel:
        """Return the style object to apply to every layer; imports torch.

        Raises:
            PlanMismatchError: There are several; take them from `styles_dict`.
        """
        if self.styles != "hp_cp":
            raise PlanMismatchError(
                "this plan is for sparse attention, which takes the three styles of hp_dsa",
                "take them from styles_dict(), one for each boundary",
            )
        specs = self.style_specs()
        if len(specs) > 1:
            raise PlanMismatchError(
                f"this plan has a style for each kind of layer ({', '.join(specs)})",
                "take them from styles_dict(), or search with --space halo=0 for one style",
            )
        (spec,) = specs.values()
        style: ContextParallel = spec.build(**overrides)
        return style

    def styles_dict(self, **overrides: Any) -> dict[str, Any]:
        """Return the style objects by the boundary that they go on; imports torch.

        ``attention`` for the styles of ``hp_cp``; ``indexer``, ``attention`` and ``indexer_loss``
        for those of ``hp_dsa``; ``sliding_attention`` where sliding layers have one of their own
        (``halo``). ``overrides`` go to each of them.
        """
        return {role: spec.build(**overrides) for role, spec in self.style_specs().items()}


class PlanFile(_Strict):
    """The content of a ``plan.json``.

    Attributes:
        workload: Of the first entry.
        made_by: How it was searched: mode, objective, seed, what was required.
        digest: sha256 of everything else; equal digests on all ranks mean equal plans.
    """

    schema_: Literal["hp-tune/plan/4"] = Field(default=SCHEMA, alias="schema")
    cost_model: int
    model: dict[str, Any]
    cluster: dict[str, Any]
    workload: Workload
    made_by: dict[str, Any] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = Field(min_length=1)
    digest: str = ""

    def content(self) -> dict[str, Any]:
        """Return the file's JSON object without its digest."""
        content = self.model_dump(mode="json", by_alias=True)
        del content["digest"]
        return content

    def select(self, *, seq_len: int, world_size: int, extrapolate: bool = False) -> Entry:
        """Return the entry for a length and a number of ranks.

        Among the entries that serve ``world_size``, it is the one whose bucket holds the length.

        Args:
            seq_len: Global sequence length.
            world_size: All ranks of the job.
            extrapolate: Take the nearest entry even outside the lengths that it serves.

        Raises:
            PlanMismatchError: Nothing fits; the message says what the plan was made for. Or a
                number is none, or below 1.
        """
        try:
            require_positive("select", "seq_len", seq_len)
            require_positive("select", "world_size", world_size)
        except ValueError as error:
            raise PlanMismatchError(str(error)) from None
        fitting = [
            entry
            for entry in self.entries
            if world_size % (entry.when.cp_size * entry.when.tp_size) == 0
        ]
        if not fitting:
            made_for = sorted({(e.when.cp_size, e.when.tp_size) for e in self.entries})
            raise PlanMismatchError(
                f"world_size ({world_size}) must be a multiple of cp_size x tp_size of the plan "
                f"({', '.join(f'{cp} x {tp}' for cp, tp in made_for)})",
                "run `hp-tune search` for this number of ranks",
            )
        entry = min(fitting, key=lambda e: (_distance(seq_len, e.when.seq), e.when.seq))
        low, high = entry.when.seq
        if not (extrapolate or low <= seq_len <= high):
            raise PlanMismatchError(
                f"seq_len ({seq_len}) must be in [{low}, {high}], the nearest lengths of the plan",
                "run `hp-tune search` for this length, or pass extrapolate=True",
            )
        try:
            entry.plan.split_length(seq_len, "plan")
        except ValueError as error:
            raise PlanMismatchError(str(error)) from None
        return entry


def _distance(seq_len: int, seq: tuple[int, int]) -> float:
    """Return how far outside a bucket a length is, as the logarithm of a ratio; 0 inside."""
    low, high = seq
    return math.log(max(low / seq_len, seq_len / high, 1.0))


def seal(plan: PlanFile) -> PlanFile:
    """Return ``plan`` with its digest."""
    return plan.model_copy(update={"digest": sha256(plan.content())})
