"""Packed batches and sliding layers of models: no mask of the whole sequence, windows fetched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_cp import ContextParallel, init_device_mesh, parallelize_module
from hp_mesh import shard_packed
from hp_mesh.testing import assert_close, count_collectives, ranks

pytest.importorskip("transformers", reason="the extra is not installed")

from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from hp_cp.transformers import MaskDescription, add_core_attention
from hp_cp.transformers.patterns import Pattern, pattern_of

from .test_transformers_cp import MODES, PLAN, cut, sharded, single

Tiny = Callable[..., Any]
S, CU = 24, [0, 5, 6, 17, 24]
IDS = torch.randint(0, 61, (1, S), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.cat([torch.arange(b - a) for a, b in pairwise(CU)])[None]


def test_transformers_patterns_are_told_by_their_functions() -> None:
    """The two of causal models, and nothing that only looks like them."""
    window = sliding_window_causal_mask_function(5)
    assert pattern_of(causal_mask_function) == Pattern(None)
    assert pattern_of(window) == Pattern(5)
    for other in (
        and_masks(causal_mask_function, causal_mask_function),
        or_masks(window, causal_mask_function),
        and_masks(window, causal_mask_function),
        lambda *_: True,
    ):
        assert pattern_of(other) is None


def expected_of(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits
    logits.square().sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("given", ["cu_seq_lens", "position_ids", "both"])
@pytest.mark.parametrize(
    ("family", "mode", "size"),
    [
        ("llama", "ulysses", 2),
        ("llama", "colossal", 3),
        ("mistral", "balanced", 2),
        ("mistral", "hybrid", 4),
    ],
)
def test_packed_batches_need_no_mask(
    monkeypatch: pytest.MonkeyPatch, tiny: Tiny, family: str, mode: str, size: int, given: str
) -> None:
    """What a collator for flash attention gives, or positions alone; logits and every gradient."""
    expected, grads = expected_of(tiny(family))

    def refuse(*_: Any) -> None:
        raise AssertionError("a mask of the whole sequence was built")

    monkeypatch.setattr(MaskDescription, "_build_rows", refuse)

    def on(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        model = add_core_attention(tiny(family))
        parallelize_module(model, mesh["cp"], {PLAN: ContextParallel(2, 1, **MODES[mode])})
        batch = shard_packed(IDS, CU, mesh["cp"])
        lengths = torch.tensor(CU, dtype=torch.int32)
        arguments: dict[str, Any] = {}
        if given != "position_ids":
            arguments |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 11}
        if given != "cu_seq_lens":
            arguments["position_ids"] = batch.position_ids[None]
        logits = model(input_ids=batch.tokens, **arguments).logits
        logits.square().sum().backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        return logits, {name: p.grad for name, p in model.named_parameters()}

    for rank, (logits, got) in enumerate(ranks(size).run(on)):
        assert_close(logits, expected.chunk(size, 1)[rank], name="logits")
        assert_close(got, grads, kind="grad", name="grads")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seq_lens_q": [0, 5, 12]}, r"cu_seq_lens_q \(\[0, 5, 12\]\) must start with 0.* 24"),
        ({"cu_seq_lens_k": [0, 24]}, "must be the same boundaries"),
        ({"cu_seq_lens_q": [0, 24], "cu_seq_lens_k": [0, 5, 24]}, "must be the same boundaries"),
        ({"cu_seq_lens_q": [0, 9, 24], "position_ids": POSITIONS}, "must restart where"),
        ({"cu_seq_lens_q": CU, "attention_mask": torch.ones(1, S)}, "without attention_mask"),
    ],
    ids=["shard", "keys-alone", "two", "positions", "mask"],
)
def test_documents_that_contradict_are_refused_on_every_rank(
    tiny: Tiny, arguments: dict[str, Any], message: str
) -> None:
    """Boundaries of a shard, and positions or a mask that say something else."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = add_core_attention(tiny())
        parallelize_module(model, mesh["cp"], {PLAN: ContextParallel(2, 1)})
        with pytest.raises(ValueError, match=message):
            model(input_ids=IDS.chunk(2, 1)[rank], **arguments)

    ranks(2).run(on)


@pytest.mark.parametrize(("mode", "size"), [("colossal", 3), ("hybrid", 4)])
def test_sliding_layers_fetch_their_window_and_gather_nothing(
    tiny: Tiny, mode: str, size: int
) -> None:
    """Mistral, whose layers all have a window of 5: told to the style, no all-gather is left."""
    model = tiny("mistral")
    expected = single(copy.deepcopy(model))
    style = {**MODES[mode], "sliding_window": 5}
    for rank, got in enumerate(ranks(size).run(sharded, model, size, style)):
        assert_close(got["logits"], cut(expected["logits"], rank, size), name="logits")
        assert_close(got["loss"], expected["loss"], kind="loss", name="loss")
        assert_close(got["grads"], expected["grads"], kind="grad", name="grads")

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        own = add_core_attention(copy.deepcopy(model))
        parallelize_module(own, mesh["cp"], {PLAN: ContextParallel(2, 1, **style)})
        with count_collectives() as counted:
            own(input_ids=IDS.chunk(size, 1)[rank]).logits.sum().backward()
        assert counted.count("all_gather") == counted.count("reduce_scatter") == 0
        assert counted.count("p2p") > 0 or rank in (size - 1,)

    ranks(size).run(on)


def test_layers_of_two_kinds_have_a_style_each(tiny: Tiny) -> None:
    """Qwen2 with a full layer and a sliding one: the window is fetched in one, all in the other."""
    model = tiny("qwen2")
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    expected = model(input_ids=IDS).logits

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        own = add_core_attention(tiny("qwen2"))
        plan = {
            "model.layers.0.self_attn.core_attention": ContextParallel(2, 1, ulysses_degree=1),
            "model.layers.1.self_attn.core_attention": ContextParallel(
                2, 1, ulysses_degree=1, sliding_window=5
            ),
        }
        parallelize_module(own, mesh["cp"], plan)
        with count_collectives() as counted:
            logits = own(input_ids=IDS.chunk(3, 1)[rank]).logits
        assert counted.count("all_gather") == 2
        assert_close(logits, expected.chunk(3, 1)[rank])

    ranks(3).run(on)


def test_a_full_layer_told_a_window_is_refused(tiny: Tiny) -> None:
    """The style of the sliding layers on a layer that has no window."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = add_core_attention(tiny("llama"))
        style = ContextParallel(2, 1, ulysses_degree=1, sliding_window=5)
        parallelize_module(own, mesh["cp"], {PLAN: style})
        with pytest.raises(ValueError, match=r"is_causal \(True\) without attn_mask"):
            own(input_ids=IDS.chunk(2, 1)[rank])

    ranks(2).run(on)
