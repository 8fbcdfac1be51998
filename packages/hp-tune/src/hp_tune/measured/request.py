"""What a job is asked: layer shapes as one rank's attention sees them, and styles to run them with.

No torch and no pydantic: the ranks of a job start in the time of their imports.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hp_tune.models.model import Attention, Model
    from hp_tune.workload import Config, Layout, Workload

__all__ = ["JobRequest", "LayerShape", "Protocol", "StyleCall", "layer_shapes", "style_call"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One kind of layer: `hp_tune.Attention` with the heads of one TP rank.

    Attributes:
        count: How many layers of the model are like this.
    """

    kind: str
    count: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    window: int | None = None
    sink_tokens: int = 0
    latent_size: int | None = None
    rope_size: int = 0
    q_latent_size: int | None = None
    index_topk: int | None = None
    index_heads: int = 1
    index_head_size: int = 1
    has_indexer: bool = True

    @property
    def is_sparse(self) -> bool:
        """Whether the styles of hp_dsa run it."""
        return self.index_topk is not None

    @property
    def slides(self) -> bool:
        """Whether it sees a window, which a style can fetch."""
        return self.kind == "sliding" and self.window is not None

    @property
    def nope_size(self) -> int:
        """Features of a q head that carry no position."""
        return self.head_size - self.rope_size

    def shortened(self, seq_len: int) -> LayerShape:
        """Return the layer for a short sequence, where its window and its selection still cut."""
        window = None if self.window is None else max(1, min(self.window, seq_len // 3))
        topk = None if self.index_topk is None else max(1, min(self.index_topk, seq_len // 3))
        sinks = min(self.sink_tokens, seq_len // 6)
        return dataclasses.replace(self, window=window, sink_tokens=sinks, index_topk=topk)


@dataclass(frozen=True, slots=True)
class NamedStyle:
    """A style by its class and the arguments of the constructor."""

    name: str
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StyleCall:
    """A configuration as its styles are constructed.

    Attributes:
        label: For people.
        dense: Class and arguments of the style of hp_cp.
        windowed: That of sliding layers whose keys are fetched, but for their window; None if they
            run under ``dense``.
        sparse: Those of the three styles of hp_dsa, by boundary.
        overlap: Whether they are asynchronous ones.
    """

    label: str
    dense: NamedStyle
    sparse: dict[str, NamedStyle]
    overlap: bool = False
    windowed: NamedStyle | None = None

    def of(self, shape: LayerShape) -> NamedStyle:
        """Return the style of hp_cp that a layer runs under."""
        if self.windowed is None or not shape.slides:
            return self.dense
        own = {"sliding_window": shape.window, "sink_tokens": shape.sink_tokens}
        return NamedStyle(self.windowed.name, {**self.windowed.kwargs, **own})

    def sends_ahead(self, shape: LayerShape) -> bool:
        """Return whether a layer of hp_cp runs under an asynchronous style."""
        return self.overlap and (self.windowed is None or not shape.slides)


@dataclass(frozen=True, slots=True)
class Protocol:
    """How long a job measures.

    Attributes:
        warmup: Steps before the timed ones; at least two are made, the first of which learns.
        rounds: Timed rounds at most, of one trial.
        budget_s: Seconds after which no further round begins.
        precision: Half of the interval over the median at which it is enough.
        check_tokens: Length of the sequence in the comparison with the unsharded result, at most.
    """

    warmup: int = 2
    rounds: int = 9
    budget_s: float = 60.0
    precision: float = 0.01
    check_tokens: int = 384


@dataclass(frozen=True, slots=True)
class JobRequest:
    """All that a job is asked."""

    hidden_size: int
    layers: tuple[LayerShape, ...]
    styles: tuple[StyleCall, ...]
    seq_len: int
    cp_size: int
    tp_size: int
    batch: int
    dtype: Literal["bf16", "fp16", "fp32", "fp64"]
    layout: Layout
    causal: bool
    recompute: bool
    protocol: Protocol = dataclasses.field(default_factory=Protocol)

    def to_json(self) -> dict[str, Any]:
        """Return what JSON holds."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> JobRequest:
        """Return the request that ``to_json`` wrote."""
        parts = {
            "layers": tuple(LayerShape(**layer) for layer in found["layers"]),
            "styles": tuple(map(_style_call, found["styles"])),
            "protocol": Protocol(**found["protocol"]),
        }
        return JobRequest(**{**found, **parts})


def _style_call(found: dict[str, Any]) -> StyleCall:
    sparse = {at: NamedStyle(**style) for at, style in found["sparse"].items()}
    windowed = None if found["windowed"] is None else NamedStyle(**found["windowed"])
    dense = NamedStyle(**found["dense"])
    return StyleCall(**{**found, "dense": dense, "sparse": sparse, "windowed": windowed})


def layer_shapes(model: Model, tp_size: int) -> tuple[LayerShape, ...]:
    """Return the kinds of layers that context parallelism touches, for one TP rank."""
    return tuple(
        _shape(layer, count, tp_size) for layer, count in model.layer_groups if layer.exchanges
    )


def _shape(layer: Attention, count: int, tp_size: int) -> LayerShape:
    sparse = layer.is_sparse
    return LayerShape(
        kind=layer.kind,
        count=count,
        num_heads=layer.num_heads // tp_size,
        num_kv_heads=max(1, layer.num_kv_heads // tp_size),
        head_size=layer.head_size,
        v_head_size=layer.v_head_size,
        window=layer.window,
        sink_tokens=layer.sink_tokens,
        latent_size=layer.latent_size,
        rope_size=layer.rope_size if layer.latent_size else 0,
        q_latent_size=layer.q_latent_size,
        index_topk=layer.index_topk if sparse else None,
        index_heads=layer.index_heads or 1,
        index_head_size=layer.index_head_size or 1,
        has_indexer=layer.has_indexer,
    )


def style_call(config: Config, workload: Workload) -> StyleCall:
    """Return the styles of an entry of ``plan.json`` with this configuration."""
    dense, sparse = (_styles(config, workload.layout, name) for name in ("hp_cp", "hp_dsa"))
    label = config.label(workload.cp_size)
    windowed = dense.pop("sliding_attention", None)
    if windowed is not None:  # each layer has a window of its own
        windowed.kwargs.pop("sliding_window")
    return StyleCall(label, dense["attention"], sparse, config.overlap, windowed)


def _styles(config: Config, layout: str, package: str) -> dict[str, NamedStyle]:
    from hp_tune.plans.plan import Entry

    # of an entry only what its styles follow from: it has no numbers yet, and some window
    entry = Entry.model_construct(
        best=SimpleNamespace(config=config), layout=layout, styles=package, windows=(None, (1, 0))
    )
    specs = entry.style_specs()
    return {at: NamedStyle(spec.name, dict(spec.arguments)) for at, spec in specs.items()}


def check_length(request: JobRequest) -> int:
    """Return the length of the comparison: the longest that is short enough and can be cut."""
    multiple = 2 * request.cp_size
    if request.seq_len <= max(request.protocol.check_tokens, multiple):
        return request.seq_len
    return max(1, request.protocol.check_tokens // multiple) * multiple
