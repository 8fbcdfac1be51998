"""What is run: lengths, batch, parallel degrees, and what a configuration may choose."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
)

from hp_mesh.layout import layout as layout_by_name

__all__ = ["ELEMENT_SIZE", "Config", "Dtype", "Layout", "Workload"]

Dtype = Literal["bf16", "fp16", "fp32", "fp64"]
Layout = Literal["BSHD", "BNSD", "SBHD", "TND"]

ELEMENT_SIZE: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def _canonical_layout(name: Any) -> Any:
    return layout_by_name(name).name if isinstance(name, str) else name


class Workload(BaseModel):
    """One micro-batch of training.

    Attributes:
        seq_len: Global sequence length, in tokens.
        cp_size: Ranks that share one sequence.
        tp_size: Ranks that share the heads; innermost in the mesh, next to each other.
        world_size: All ranks, over which parameters and optimizer are sharded (FSDP). None when it
            is not known: then these are not counted as memory.
        batch: Sequences per CP group.
        layout: Order of dims of q, k and v at the attention boundary; aliases such as ``BSND`` are
            taken as the name that `hp_mesh.layout` has for them.
        causal: Whether a token sees only earlier ones; None takes the model's.
        skips_masked: Whether the attention kernel leaves out blocks that are masked entirely.
        handoffs: Whether the model marks where q, k and v are final (`hp_cp.Handoff`), which
            asynchronous exchanges need; a rotary embedding stands behind the projections.
        recompute: Whether each layer's forward runs again in backward (activation checkpointing).
        documents: Lengths of packed documents and how often each occurs; a token sees only its own.
            None for one document.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq_len: int = Field(ge=1)
    cp_size: int = Field(ge=1)
    tp_size: int = Field(default=1, ge=1)
    world_size: int | None = Field(default=None, ge=1)
    batch: int = Field(default=1, ge=1)
    dtype: Dtype = "bf16"
    layout: Annotated[Layout, BeforeValidator(_canonical_layout)] = "BSHD"
    causal: bool = True
    skips_masked: bool = True
    handoffs: bool = False
    recompute: bool = False
    documents: tuple[tuple[PositiveInt, PositiveFloat], ...] | None = Field(
        default=None, min_length=1
    )

    @property
    def num_ranks(self) -> int:
        """All ranks; without a world size, those of one CP x TP group."""
        return self.world_size or self.cp_size * self.tp_size

    @property
    def element_size(self) -> int:
        """Bytes of one element of q, k and v."""
        return ELEMENT_SIZE[self.dtype]


class Config(BaseModel):
    """One point of the space: what a context-parallel style is constructed with.

    Attributes:
        ulysses_degree: As in `hp_cp.ContextParallel`, resolved (never None).
        load_balance: As in `hp_cp.ContextParallel`.
        overlap: `hp_cp.AsyncContextParallel` instead: q, k, v travel behind the projections.
        head_groups: As in `hp_cp.AsyncContextParallel`: groups of heads, the exchange of one behind
            the attention of another, and nothing behind the projections.
        keep_kv: As in `hp_cp.ContextParallel`: False gathers K and V again in backward.
        kv_chunks: As in `hp_cp.ContextParallel`: K and V are gathered in so many parts while
            attention runs.
        balance_hybrid: As in `hp_cp.ContextParallel`: load balance of a Hybrid.
        halo: Ulysses degree of sliding layers under a style of their own,
            ``ContextParallel(sliding_window=...)``, which fetches the keys of a window and gathers
            nothing; all else is said of the other layers. 0: sliding layers run as the others do.
        gather: ``"latent"``: MLA's latents are gathered instead of K and V. No style does; priced
            to say what it would win.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ulysses_degree: int = Field(ge=1)
    load_balance: bool = False
    overlap: bool = False
    head_groups: int = Field(default=1, ge=1)
    keep_kv: bool = True
    kv_chunks: int = Field(default=1, ge=1)
    balance_hybrid: bool = False
    halo: int = Field(default=0, ge=0)
    gather: Literal["kv", "latent"] = "kv"

    @property
    def balances(self) -> bool:
        """Whether tails of q are swapped so that causal work is even."""
        return self.load_balance or self.balance_hybrid

    def of_layers(self, *, slide: bool) -> Config:
        """Return what layers run under that slide, or that do not.

        Under ``halo`` the style of sliding ones has no other option, and that of others no halo.
        """
        if not self.halo:
            return self
        if slide:
            return Config(ulysses_degree=self.halo, halo=self.halo)
        return self.model_copy(update={"halo": 0})

    def label(self, cp_size: int) -> str:
        """Return a short name, such as ``hybrid u=2 async`` or ``ulysses u=8 halo=1``."""
        u = self.ulysses_degree
        mode = "colossal" if u == 1 else "ulysses" if u == cp_size else "hybrid"
        words = [mode, f"u={u}"]
        words += ["load_balance"] * self.load_balance + ["async"] * self.overlap
        words += [f"head_groups={self.head_groups}"] * (self.head_groups > 1)
        words += ["balance_hybrid"] * self.balance_hybrid
        words += [f"kv_chunks={self.kv_chunks}"] * (self.kv_chunks > 1)
        words += ["keep_kv=False"] * (not self.keep_kv) + ["latent"] * (self.gather == "latent")
        words += [f"halo={self.halo}"] * (self.halo > 0)
        return " ".join(words)
