"""Positions, padding, packed documents, labels and what a shard can't have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_comm.fingerprint import _warned
from hp_cp import ContextParallel, init_device_mesh, parallelize_module
from hp_mesh.testing import assert_close, count_collectives, ranks

pytest.importorskip("transformers", reason="the extra is not installed")

from transformers import DynamicCache

from hp_cp.transformers import add_core_attention

Tiny = Callable[..., Any]
PLAN = "model.layers.*.self_attn.core_attention"
MODES: dict[str, dict[str, Any]] = {
    "ulysses": {},
    "colossal": {"ulysses_degree": 1},
    "balanced": {"ulysses_degree": 1, "load_balance": True},
}
B, S, P = 2, 24, 2
IDS = torch.randint(0, 61, (B, S), generator=torch.Generator().manual_seed(1))
PACKED = torch.tensor([[p for n in (5, 12, 7) for p in range(n)]])  # no edge at S/2
RIGHT_PADDED = torch.tensor([[1] * 16 + [0] * 8, [1] * S])
LEFT_PADDED = torch.tensor([[0] * 5 + [1] * 19, [1] * S])


def cut(whole: Tensor, rank: int) -> Tensor:
    return whole.tensor_split(P, dim=1)[rank]


def parallel(model: Any, **style: Any) -> Any:
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
    model = add_core_attention(copy.deepcopy(model), gradient_divisor=1)
    parallelize_module(model, mesh["cp"], {PLAN: ContextParallel(seq_dim=2, head_dim=1, **style)})
    return model


def call_on_ranks(
    model: Any, mode: str, whole: dict[str, Any], local: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return logits and their gradient at the embeddings of each rank; ``local`` is cut first."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        own = parallel(model, **MODES[mode])
        embeds = own.get_input_embeddings()(cut(IDS, rank)).detach().requires_grad_()
        given = {**whole, **{name: cut(value, rank) for name, value in local.items()}}
        logits = own(inputs_embeds=embeds, **given).logits
        logits.square().sum().backward()
        return logits, embeds.grad

    return ranks(P).run(run)


def expected_of(model: Any, **call: Any) -> tuple[Tensor, Tensor]:
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, **call).logits
    logits.square().sum().backward()
    return logits, embeds.grad


def assert_shards(got: list[tuple[Tensor, Tensor]], expected: tuple[Tensor, Tensor]) -> None:
    for rank, (logits, grad) in enumerate(got):
        assert_close(logits, cut(expected[0], rank))
        assert_close(grad, cut(expected[1], rank), kind="grad")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("family", "implementation", "given"),
    [
        ("llama", "sdpa", "shard"),
        ("llama", "eager", "shard"),
        ("mistral", "sdpa", "whole"),
        ("mistral", "eager", "shard"),
    ],
)
def test_packed_documents_stay_apart_across_the_edges_of_shards(
    tiny: Tiny, family: str, implementation: str, given: str, mode: str
) -> None:
    model = tiny(family, implementation)
    # transformers looks for documents only where no KV cache is filled
    expected = expected_of(model, position_ids=PACKED, use_cache=False)
    arguments = {"position_ids": PACKED}

    got = call_on_ranks(
        model, mode, arguments if given == "whole" else {}, arguments if given == "shard" else {}
    )

    assert_shards(got, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("implementation", "mask", "given"),
    [
        ("sdpa", RIGHT_PADDED, "shard"),
        ("sdpa", LEFT_PADDED, "whole"),
        ("eager", RIGHT_PADDED, "shard"),
    ],
    ids=["sdpa-right-shard", "sdpa-left-whole", "eager-right-shard"],
)
def test_padding_is_no_key_on_any_rank(
    tiny: Tiny, implementation: str, mask: Tensor, given: str, mode: str
) -> None:
    model = tiny("mistral", implementation)
    expected = expected_of(model, attention_mask=mask)
    arguments = {"attention_mask": mask}

    got = call_on_ranks(
        model, mode, arguments if given == "whole" else {}, arguments if given == "shard" else {}
    )

    assert_shards(got, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_of_ones_and_plain_positions_change_nothing(tiny: Tiny, mode: str) -> None:
    model = tiny()
    expected = expected_of(model)

    got = call_on_ranks(
        model,
        mode,
        {},
        {"attention_mask": torch.ones(B, S), "position_ids": torch.arange(S)[None].expand(B, -1)},
    )

    assert_shards(got, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_of_the_callers_own_is_cut_to_the_rows_of_the_rank(
    tiny: Tiny, implementation: str, mode: str
) -> None:
    model = tiny("llama", implementation)
    visible = torch.ones(S, S, dtype=torch.bool).tril() & (torch.arange(S) % 5 != 3)
    visible |= torch.eye(S, dtype=torch.bool)
    mask = visible.expand(B, 1, S, S)
    if implementation == "eager":
        mask = torch.zeros(B, 1, S, S, dtype=torch.float64).masked_fill(~mask, -1e9)
    expected = expected_of(model, attention_mask=mask)

    assert_shards(call_on_ranks(model, mode, {"attention_mask": mask}, {}), expected)


def test_positions_are_global_without_being_given(tiny: Tiny) -> None:
    def positions(rank: int) -> Tensor:
        own = parallel(tiny())
        seen: list[Tensor] = []
        own.model.rotary_emb.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
        )
        own(cut(IDS, rank))
        return seen[0]

    for rank, got in enumerate(ranks(P).run(positions)):
        assert torch.equal(got, torch.arange(S)[None].tensor_split(P, dim=1)[rank])


def test_the_same_positions_on_all_ranks_are_documents_and_a_warning(tiny: Tiny) -> None:
    model = tiny()
    twice = torch.arange(S // P).repeat(P)[None]
    expected = model(IDS, position_ids=twice, use_cache=False).logits

    with pytest.warns(UserWarning, match="all 2 ranks gave the same ones"):
        got = ranks(P).run(
            lambda rank: parallel(model)(cut(IDS, rank), position_ids=cut(twice, rank)).logits
        )

    for rank, logits in enumerate(got):
        assert_close(logits, cut(expected, rank))


@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_the_same_tokens_on_all_ranks_are_a_warning(tiny: Tiny, given: str) -> None:
    """Once; positions are global all the same, and would hide it in q and k."""
    _warned.clear()

    def run(rank: int) -> None:
        own = parallel(tiny())
        whole = IDS if given == "input_ids" else own.get_input_embeddings()(IDS)
        for _ in range(2):
            own(**{given: whole.detach()})

    said = r"ContextParallel: v \(shape .*\) must be another part of the sequence on each of the 2"
    with pytest.warns(UserWarning, match=said) as record:
        ranks(P).run(run)
    assert len(record) == P


def test_ranks_compare_in_the_first_call_of_a_model_only_if_told_so(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HP_PREFLIGHT=first, the default on devices: once for the model, once for each of 2 layers."""
    monkeypatch.setenv("HP_PREFLIGHT", "first")

    def run(rank: int) -> list[int]:
        own, counts = parallel(tiny()), []
        for _ in range(3):
            with count_collectives() as counted:
                own(cut(IDS, rank))
            counts.append(counted.count("preflight"))
        return counts

    assert ranks(P).run(run) == [[3, 0, 0]] * P


LABELS = IDS.masked_fill(torch.arange(S) < 9, -100)
SHIFTED = F.pad(LABELS, (0, 1), value=-100)[:, 1:]


@pytest.mark.parametrize(
    ("names", "given"),
    [(("labels",), "shard"), (("labels",), "whole"), (("labels", "shift_labels"), "shard")],
    ids=["labels", "whole-labels", "shift_labels"],
)
def test_labels_give_the_loss_of_the_whole_sequence(
    tiny: Tiny, names: tuple[str, ...], given: str
) -> None:
    # 15 targets: 2 on rank 0 (one of them is the first token of rank 1), the rest on rank 1
    model = tiny()
    logits = model(IDS).logits
    loss = F.cross_entropy(logits.flatten(0, 1), SHIFTED.flatten(), ignore_index=-100)
    loss.backward()
    values = {"labels": LABELS, "shift_labels": SHIFTED}

    def run(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        own = parallel(model)
        own.zero_grad()
        labels = {
            name: values[name] if given == "whole" else cut(values[name], rank) for name in names
        }
        got = own(cut(IDS, rank), **labels).loss
        got.backward()
        return got, {name: p.grad for name, p in own.named_parameters()}

    (first, grads), (second, others) = ranks(P).run(run)
    assert_close([first, second], [loss, loss], kind="loss")
    for name, parameter in model.named_parameters():
        assert_close(grads[name] + others[name], parameter.grad, kind="grad", name=name)


def test_num_items_in_batch_divides_the_sum_as_in_transformers(tiny: Tiny) -> None:
    model = tiny()
    logits = model(IDS).logits
    total = F.cross_entropy(
        logits.flatten(0, 1), SHIFTED.flatten(), ignore_index=-100, reduction="sum"
    )

    def run(rank: int) -> Tensor:
        loss: Tensor = parallel(model)(
            cut(IDS, rank), labels=cut(LABELS, rank), num_items_in_batch=40
        ).loss
        return loss

    for loss in ranks(P).run(run):
        assert_close(loss, total / 40, kind="loss")


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(B, 2, 3, 10), torch.zeros(B, 2, 3, 10), 0)
    return cache


REFUSED: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "filled cache": (lambda _: {"cache": filled_cache()}, r"cache \(a KV cache holding 3 tokens\)"),
    "use_cache": (lambda _: {"use_cache": True}, r"use_cache \(True\) must be False"),
    "attentions": (lambda _: {"output_attentions": True}, r"output_attentions \(True\)"),
    "logits_to_keep": (lambda _: {"logits_to_keep": 1}, r"logits_to_keep \(1\) must be 0"),
    "mask of another length": (
        lambda _: {"attention_mask": torch.ones(B, 17)},
        r"attention_mask \(shape \(2, 17\)\) must be \[batch, 12\]",
    ),
    "labels of another length": (
        lambda _: {"labels": torch.ones(B, 11, dtype=torch.long)},
        r"labels \(shape \(2, 11\)\)",
    ),
    "4-D mask of the shard": (
        lambda _: {"attention_mask": torch.ones(B, 1, 12, 12, dtype=torch.bool)},
        r"attention_mask has 12 key columns and must .* \(24\)",
    ),
    "documents under a mask": (
        lambda r: {"attention_mask": torch.ones(B, 12), "position_ids": cut(PACKED, r)},
        "position_ids: they restart between visible tokens",
    ),
    "labels in a list, on one rank only": (
        lambda r: {"labels": [[1] * 12] * B if r == 0 else cut(IDS, r)},
        r"labels \(list\) must be a tensor \(on rank 0 of 2\)",
    ),
    "documents in two rows, on one rank only": (
        lambda r: {"cu_seq_lens_q": torch.tensor([[0, S]])} if r == 1 else {},
        r"cu_seq_lens_q \(torch\.int64 of shape \(1, 2\)\) must be integers.*\(on rank 1 of 2\)",
    ),
    "a mask on one rank only": (
        lambda r: {"attention_mask": torch.ones(B, 12)} if r == 0 else {},
        "attention_mask",
    ),
    "cu_seq_lens of a batch": (
        lambda _: {"cu_seq_lens_q": torch.tensor([0, 5, 24])},
        r"the batch \(2\) must be 1 with cu_seq_lens_q: all documents are in one row",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_shard_cannot_honour_is_refused_by_name_on_every_rank(tiny: Tiny, case: str) -> None:
    model = tiny()
    make, message = REFUSED[case]

    errors = ranks(P).errors(lambda rank: parallel(model)(cut(IDS, rank), **make(rank)))

    for error in errors:
        assert isinstance(error, ValueError), error
        with pytest.raises(ValueError, match=message):
            raise error


def test_tokens_without_a_batch_dim_are_named(tiny: Tiny) -> None:
    """What `shard_packed` gives is one row, ``[S/P]``."""
    model = tiny()
    for error in ranks(P).errors(lambda rank: parallel(model)(cut(IDS, rank)[0])):
        with pytest.raises(ValueError, match=r"input_ids \(shape \(12,\)\) must have a batch dim"):
            raise error


def test_a_refused_call_leaves_the_next_one_right(tiny: Tiny) -> None:
    model = tiny()
    expected = model(IDS).logits

    def run(rank: int) -> Tensor:
        own = parallel(model)
        with pytest.raises(ValueError, match="use_cache"):
            own(cut(IDS, rank), use_cache=True)
        logits: Tensor = own(cut(IDS, rank)).logits
        return logits

    for rank, logits in enumerate(ranks(P).run(run)):
        assert_close(logits, cut(expected, rank))


def _bare_layer(own: Any) -> None:
    own.model.layers[1].self_attn.core_attention = type(
        own.model.layers[1].self_attn.core_attention
    )()


def _stock_attention(own: Any) -> None:
    own.set_attn_implementation("sdpa")


def _linear_layers(own: Any) -> None:
    own.config.layer_types = ["full_attention", "linear_attention"]


def _dynamic_rotary(own: Any) -> None:
    own.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    own.config.max_position_embeddings = 16


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_bare_layer, "1 of 2 core_attention modules have no context-parallel style"),
        (_stock_attention, r"the attention implementation \(sdpa\) must be one of hp_cp_sdpa"),
        (_linear_layers, r"layer_types \(linear_attention\) must be attention layers"),
        (_dynamic_rotary, r"the sequence length \(24\) must be at most 16 with rope_type"),
    ],
    ids=["bare-layer", "stock-attention", "linear-layers", "dynamic-rotary"],
)
def test_a_model_that_would_silently_attend_to_its_shard_is_refused(
    tiny: Tiny, break_it: Callable[[nn.Module], None], message: str
) -> None:
    def run(rank: int) -> None:
        own = parallel(tiny())
        break_it(own)
        own(cut(IDS, rank))

    for error in ranks(P).errors(run):
        assert isinstance(error, ValueError), error
        with pytest.raises(ValueError, match=message):
            raise error
