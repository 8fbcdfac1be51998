"""``npu_fusion_attention`` inside the boundary, by way of an operator that *emulates* it on CPU.

`define_emulated_operator` registers ``npu::npu_fusion_attention`` with the documented schema and
the plain-torch emulation of the unit tests. That emulation and device agree is not shown here.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_cp import attention_window, init_device_mesh
from hp_mesh.testing import assert_close, randn, ranks

from ..unit.test_attention_fusion import (  # noqa: TID252 - there is no package of tests
    COMPRESSED,
    emulate_npu_fusion_attention,
)
from ._compare import Case, compare, compare_under_tensor_parallel, reference
from ._cores import heads_first

SCHEMA = (
    "{name}(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, {star}"
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, {rope}float scale=1., "
    "float keep_prob=1., int {pre}=2147483647, int {next}=2147483647, int inner_precise=0, "
    "int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    "int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, "
    'str softmax_layout="", Tensor? sink=None) '
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
ROPE = "Tensor? query_rope=None, Tensor? key_rope=None, "
LAYOUTS = {"BSHD": "BSND", "BNSD": "BNSD", "TND": "TND", "BSH": "BSH", "SBH": "SBH"}
ULYSSES, COLOSSAL = Case(P=2), Case(P=3, degree=1)
HYBRID, BALANCED = Case(P=4, degree=2), Case(P=2, degree=1, load_balance=True)
ALL = [ULYSSES, COLOSSAL, HYBRID, BALANCED]


def _emulate(version: int, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run the emulation on the arguments that differ from the schema's defaults."""
    arguments = getattr(torch.ops.npu, name).default._schema.arguments
    given = {**dict(zip([a.name for a in arguments], args, strict=False)), **kwargs}
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    q, k, v, heads, layout = (
        given.pop(n) for n in ("query", "key", "value", "head_num", "input_layout")
    )
    given = {n: x for n, x in given.items() if isinstance(x, Tensor) or x != defaults[n]}
    assert not any(isinstance(x, DTensor) for x in (q, k, v, *given.values()))
    out = emulate_npu_fusion_attention(version, q, k, v, heads, layout, **given)
    tokens = (q.shape[0], heads, 8) if layout == "TND" else None
    rows = q.shape[0 if layout == "SBH" else 2 if layout == "BNSD" else 1]
    batch = q.shape[1 if layout == "SBH" else 0]
    statistics = q.new_zeros(tokens or (batch, heads, rows, 8))
    return out, statistics, statistics.clone(), q.new_empty(0), 0, 0, 0


@pytest.fixture(scope="module", autouse=True)
def define_emulated_operator() -> Any:
    """Register both spellings of the operator for the tests of this file."""
    if hasattr(torch.ops.npu, "npu_fusion_attention"):
        pytest.skip("torch_npu has registered the real operator")
    library = torch.library.Library("npu", "FRAGMENT")
    for version, suffix, star, rope, tokens in (
        (1, "", "", "", "tockens"),
        (2, "_v2", "*, ", ROPE, "tokens"),
    ):
        name = f"npu_fusion_attention{suffix}"
        schema = SCHEMA.format(
            name=name, star=star, rope=rope, pre=f"pre_{tokens}", next=f"next_{tokens}"
        )
        library.define(schema)

        kernel = functools.partial(_emulate, version, name)
        library.impl(name, kernel, "CompositeImplicitAutograd")
    yield
    library._destroy()


class Fused(nn.Module):
    """Calls the operator with what a model passes on one device."""

    def __init__(self, layout: str, suffix: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.layout, self.suffix, self.kwargs = layout, suffix, kwargs

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        op = getattr(torch.ops.npu, f"npu_fusion_attention{self.suffix}")
        heads = (
            q.shape[-1] // 6
            if self.layout in ("BSH", "SBH")
            else q.shape[Case(layout=self.layout).head_dim]
        )
        out, softmax_max, softmax_sum, *_ = op(
            q, k, v, heads, LAYOUTS[self.layout], scale=0.4, **self.kwargs
        )
        assert softmax_max.shape == softmax_sum.shape
        assert heads in softmax_max.shape and softmax_max.shape[-1] == 8
        return out


@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize(
    "case",
    [case.but(layout=layout) for case in ALL for layout in ("BSHD", "BNSD")]
    # heads that are merged with the head size are not cut by CP
    + [case.but(layout=layout) for case in (COLOSSAL, BALANCED) for layout in ("BSH", "SBH")],
    ids=str,
)
def test_causal_sparse_modes_equal_one_device(case: Case, mode: int) -> None:
    """The compressed mask and ``sparse_mode`` 2 or 3, as models pass them; every gradient."""
    kwargs = {"atten_mask": COMPRESSED, "sparse_mode": mode}
    ranks(case.P).run(compare, case, lambda: Fused(case.layout, **kwargs))


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_sliding_window_equals_one_device(case: Case) -> None:
    """Mode 4, in both spellings of the tokens."""
    for suffix, word in (("", "tockens"), ("_v2", "tokens")):
        tokens = {f"pre_{word}": 5, f"next_{word}": 0}
        kwargs = {"atten_mask": COMPRESSED, "sparse_mode": 4, **tokens}
        ranks(case.P).run(compare, case, lambda s=suffix, k=kwargs: Fused("BSHD", s, **k))


@pytest.mark.parametrize("shape", [(24, 24), (2, 1, 24, 24), (2, 12, 24, 24)], ids=str)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_an_explicit_mask_is_cut(case: Case, shape: tuple[int, ...]) -> None:
    """Mode 1, True is masked out; rows and heads of the rank."""
    mask = randn(*shape, seed=3) > 0.6
    mask[..., 0] = False
    kwargs = {"atten_mask": mask, "sparse_mode": 1}
    ranks(case.P).run(compare, case, lambda: Fused("BSHD", **kwargs))


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_position_bias_and_sinks_are_cut_per_head(case: Case) -> None:
    """``pse`` [B, H, S, S] and ``sink`` [H] beside a causal mode."""
    kwargs = {
        "pse": randn(2, 12, 24, 24, seed=4),
        "sink": randn(12, seed=5).float(),
        "atten_mask": COMPRESSED,
        "sparse_mode": 2,
    }
    ranks(case.P).run(compare, case, lambda: Fused("BSHD", **kwargs))


@pytest.mark.parametrize("shape", [(24, 24), (2, 1, 24, 24), (2, 12, 24, 24)], ids=str)
@pytest.mark.parametrize("layout", ["BSHD", "BNSD"])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_masks_biases_and_sinks_may_be_dtensors(
    case: Case, layout: str, shape: tuple[int, ...]
) -> None:
    """As they come out of other DTensors; their dims are not those of q."""
    mask = randn(*shape, seed=3) > 0.6
    mask[..., 0] = False

    class Dressed(Fused):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            if isinstance(q, DTensor):
                places = [Replicate()] * q.device_mesh.ndim
                self.kwargs = {
                    name: DTensor.from_local(x, q.device_mesh, places, run_check=False)
                    if type(x) is Tensor
                    else x
                    for name, x in self.kwargs.items()
                }
            return super().forward(q, k, v)

    def core() -> Dressed:
        sink, pse = randn(12, seed=5).float(), randn(1, 12, 24, 24, seed=4)
        return Dressed(layout, atten_mask=mask, sparse_mode=1, sink=sink, pse=pse)

    ranks(case.P).run(compare, case.but(layout=layout), core)


@pytest.mark.parametrize("groups", [2, 4])
def test_per_head_arguments_are_cut_to_a_head_group(groups: int) -> None:
    """`AsyncContextParallel(head_groups=...)` calls the module for some heads at a time."""
    mask = randn(2, 16, 24, 24, seed=3) > 0.6
    mask[..., 0] = False
    kwargs = {"atten_mask": mask, "sparse_mode": 1, "sink": randn(16, seed=5).float()}
    case = Case(P=2, H=16, HK=8, head_groups=groups)
    ranks(2).run(compare, case, lambda: Fused("BSHD", **kwargs))


@pytest.mark.parametrize("dressed", [False, True], ids=["plain", "dtensor"])
@pytest.mark.parametrize("case", [ULYSSES, COLOSSAL, HYBRID], ids=str)
def test_rotary_parts_of_version_2_are_cut_as_q_and_k_are(case: Case, dressed: bool) -> None:
    """Plain ones are the whole sequence's; slices of q and k are DTensors, and get gradients."""
    ropes = [randn(24, heads, 4, seed=6 + heads) for heads in (12, 4)]

    class Roped(Fused):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            q_rope, k_rope = (q[..., :4] * 1.5, k[..., :4] * 0.5) if dressed else ropes
            self.kwargs |= {"query_rope": q_rope, "key_rope": k_rope}
            return super().forward(q, k, v)

    lengths = [5, 17, 24]
    kwargs = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths, "sparse_mode": 3}
    kwargs["atten_mask"] = COMPRESSED
    ranks(case.P).run(compare, case.but(layout="TND"), lambda: Roped("TND", "_v2", **kwargs))


@pytest.mark.parametrize("mode", ["causal", "window", "full"])
@pytest.mark.parametrize("case", [*ALL, Case(P=4, degree=2, balance_hybrid=True)], ids=str)
def test_documents_of_tnd_are_cut(case: Case, mode: str) -> None:
    """Lengths that end inside a rank's rows, one that spans ranks; halves under load balance."""
    lengths = [5, 17, 24]
    kwargs: dict[str, Any] = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths}
    if mode != "full":
        kwargs |= {"atten_mask": COMPRESSED, "sparse_mode": 3}
    if mode == "window":
        kwargs |= {"sparse_mode": 4, "pre_tockens": 3, "next_tockens": 0}
    ranks(case.P).run(compare, case.but(layout="TND"), lambda: Fused("TND", **kwargs))


@pytest.mark.parametrize("suffix", ["", "_v2"])
@pytest.mark.parametrize("layout", ["BSHD", "BNSD", "TND"])
@pytest.mark.parametrize("case", [COLOSSAL, HYBRID], ids=str)
def test_a_band_fetches_the_keys_of_its_window(case: Case, layout: str, suffix: str) -> None:
    """``sliding_window`` of the style, mode 4 of the kernel: the same numbers, no gather."""
    word = "tokens" if suffix else "tockens"
    kwargs: dict[str, Any] = {"atten_mask": COMPRESSED, "sparse_mode": 4}
    kwargs |= {f"pre_{word}": 6, f"next_{word}": 0}
    if layout == "TND":
        kwargs |= {"actual_seq_qlen": [5, 17, 24], "actual_seq_kvlen": [5, 17, 24]}
    else:
        kwargs |= {"pse": randn(2, 12, 24, 24, seed=4), "sink": randn(12, seed=5).float()}
    core = lambda: Fused(layout, suffix, **kwargs)  # noqa: E731 - a factory
    options = {"sliding_window": 8, "sink_tokens": 2}  # more than the band needs
    sent = ranks(case.P).run(compare, case.but(layout=layout), core, **options)
    assert all("all_gather" not in one.by_kind for one in sent)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sparse_mode": 3}, r"sparse_mode \(3\) must be 4 with atten_mask and next_tockens=0"),
        ({"sparse_mode": 4, "pre_tockens": 8, "next_tockens": 0}, r"pre_tockens \(8\) must see"),
        ({"sparse_mode": 4, "pre_tockens": 2}, "must be 4 with atten_mask and next_tockens=0"),
    ],
    ids=["causal", "wide", "looks-ahead"],
)
def test_a_kernel_that_sees_more_than_is_fetched_is_refused(
    kwargs: dict[str, Any], message: str
) -> None:
    """Every rank reads the same numbers in the call."""
    case = COLOSSAL

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        core = Fused("BSHD", atten_mask=COMPRESSED, **kwargs)
        module = case.style(sliding_window=8).apply(core, mesh)
        with pytest.raises(ValueError, match=message):
            module(*(case.local(x, rank) for x in case.qkv()))

    ranks(3).run(on)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_local_tensors_get_the_window_too(case: Case) -> None:
    """``use_local_input=True``: the operator sees plain tensors, causality is still global."""

    class Local(Fused):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            assert attention_window() is None or not isinstance(q, DTensor)
            return super().forward(q, k, v)

    kwargs = {"atten_mask": COMPRESSED, "sparse_mode": 2}
    ranks(case.P).run(compare, case, lambda: Local("BSHD", **kwargs), use_local_input=True)


@pytest.mark.parametrize("case", [ULYSSES.but(H=8, HK=4), HYBRID.but(H=8, HK=4)], ids=str)
def test_tp_shards_are_its_heads(case: Case) -> None:
    """``head_num`` counts all heads of q as the core sees it; the rank's are passed on."""
    kwargs = {"atten_mask": COMPRESSED, "sparse_mode": 2}

    def on(rank: int) -> None:
        root = init_device_mesh("cpu", (case.P, 2), mesh_dim_names=("cp", "tp"))
        cp, tp = root.get_local_rank("cp"), root.get_local_rank("tp")
        expected, grads = reference(Fused("BSHD", **kwargs), case.qkv(), case.upstream())

        def cut(x: Tensor) -> Tensor:
            return case.local(x.chunk(2, 2)[tp], cp)

        local = [cut(x).clone().requires_grad_() for x in case.qkv()]
        placements = [Shard(2)]
        fed = [DTensor.from_local(x, root["tp"], placements, run_check=False) for x in local]
        out = case.style().apply(Fused("BSHD", **kwargs), root["cp"])(*fed)
        assert_close(out.to_local(), cut(expected))
        out.to_local().backward(cut(case.upstream()))
        for x, full in zip(local, grads, strict=True):
            assert full is not None
            assert_close(x.grad, cut(full), kind="grad")

    ranks(case.P * 2).run(on)


@pytest.mark.parametrize("layout", ["BSHD", "BNSD", "BSH", "SBH"])
def test_a_mask_of_each_sequence_follows_a_batch_that_is_sharded(layout: str) -> None:
    """Data parallel ranks hold sequences of one batch (DTensors); masks are whole DTensors."""
    case = Case(P=2, degree=1, layout=layout, B=4)
    batch_dim = 1 if layout == "SBH" else 0
    mask = randn(4, 1, 24, 24, seed=3) > 0.6
    mask[..., 0] = False

    class Masked(Fused):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            own = mask
            if isinstance(q, DTensor):
                places = [Replicate()] * q.device_mesh.ndim
                own = DTensor.from_local(mask, q.device_mesh, places, run_check=False)
            self.kwargs = {"atten_mask": own, "sparse_mode": 1}
            return super().forward(q, k, v)

    def on(rank: int) -> None:
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        dp, cp = root.get_local_rank("dp"), root.get_local_rank("cp")
        expected, grads = reference(Masked(layout), case.qkv(), case.upstream())

        def cut(x: Tensor) -> Tensor:
            return case.local(x.chunk(2, batch_dim)[dp], cp)

        local = [cut(x).clone().requires_grad_() for x in case.qkv()]
        placements = [Shard(batch_dim)]
        fed = [DTensor.from_local(x, root["dp"], placements, run_check=False) for x in local]
        out = case.style().apply(Masked(layout), root["cp"])(*fed)
        assert_close(out.to_local(), cut(expected))
        out.to_local().backward(cut(case.upstream()))
        for x, full in zip(local, grads, strict=True):
            assert full is not None
            assert_close(x.grad, cut(full), kind="grad")

    ranks(4).run(on)


def test_a_mode_that_cannot_be_cut_is_refused_by_all() -> None:
    """Prefix modes: the message says what to pass instead."""

    def on(rank: int) -> None:
        core = Fused("BSHD", atten_mask=COMPRESSED, sparse_mode=6)
        COLOSSAL.style().apply(core, COLOSSAL.mesh())
        with pytest.raises(ValueError, match=r"sparse_mode \(6\) must be 0 to 4"):
            core(*(COLOSSAL.local(x, rank) for x in COLOSSAL.qkv()))

    ranks(3).run(on)


def test_a_layout_that_is_not_known_is_refused() -> None:
    """``input_layout`` of a later version."""

    class Odd(nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return torch.ops.npu.npu_fusion_attention(q, k, v, 12, "NTD_TND")[0]

    def on(rank: int) -> None:
        core = ULYSSES.style().apply(Odd(), ULYSSES.mesh())
        with pytest.raises(ValueError, match=r"input_layout \('NTD_TND'\) must be one of BSH"):
            core(*(ULYSSES.local(x, rank) for x in ULYSSES.qkv()))

    ranks(2).run(on)


def test_heads_first_is_what_the_emulation_compares_with() -> None:
    """The emulated operator without a mask is softmax attention."""
    q, k, v = (heads_first(x, "BSHD", 6) for x in ULYSSES.qkv())
    out = torch.ops.npu.npu_fusion_attention(q, k, v, 12, "BNSD", scale=6**-0.5)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_close(out, expected)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_an_input_layout_that_is_not_the_styles_is_refused_where_sizes_fit(case: Case) -> None:
    """B04: the operator says its layout, and the style was told another one."""

    def on(rank: int) -> str:
        module = case.style().apply(Fused("BNSD"), case.mesh())
        x = randn(2, 8, 6, 4, seed=rank)
        with pytest.raises(ValueError, match="must be its heads here") as e:
            module(x, x, x)
        return str(e.value)

    first, *others = ranks(case.P).run(on)
    assert all(one == first for one in others)


@pytest.mark.parametrize("case", [Case(P=2), Case(P=2, degree=1)], ids=str)
def test_sinks_and_biases_of_a_group_of_heads_are_found_under_tp(case: Case) -> None:
    """Each rank of TP has heads of every group: a group's heads lie apart in the model's."""
    case = case.but(H=24, HK=8)
    kwargs = {"sink": randn(24, seed=5).float(), "pse": randn(2, 24, 24, 24, seed=4)}
    for one in (case, case.but(head_groups=2)):
        ranks(4).run(compare_under_tensor_parallel, one, lambda: Fused("BSHD", **kwargs), 2)


@pytest.mark.parametrize("options", [{}, {"use_local_input": True}], ids=["view", "local"])
def test_ranks_that_were_told_other_documents_are_all_told_so(options: dict[str, Any]) -> None:
    """One text, before any of them computes."""
    case = Case(P=3, degree=1, layout="TND")

    def on(rank: int) -> str:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        lengths = [6, 24] if rank == 1 else [5, 24]
        core = Fused("TND", actual_seq_qlen=lengths, actual_seq_kvlen=lengths)
        module = case.style(**options).apply(core, mesh)
        with pytest.raises(ValueError, match="actual_seq_qlen must be the same on all ranks") as e:
            module(*(case.local(x, rank) for x in case.qkv()))
        return str(e.value)

    assert len(set(ranks(3).run(on))) == 1
