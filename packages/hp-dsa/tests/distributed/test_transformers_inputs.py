"""What a prepared model takes, keeps and gives back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hp_comm.fingerprint import _warned
from hp_dsa import init_device_mesh
from hp_dsa.cores import SelectKeys, SparseAttention
from hp_mesh import next_token_labels, shard_sequence
from hp_mesh.testing import assert_close, ranks

pytest.importorskip("transformers", reason="the extra is not installed")

from hp_dsa.transformers import indexer_loss, prepare_model, restore_model

from ._tiny import IDS, MODULES, B, S, build, exact, formula_loss, lm_loss, watch

FAMILY = pytest.mark.parametrize("family", ["deepseek", "glm"])
ENDS = [7, 16, S]
"""Of packed documents: two of them straddle a shard's border on two or three ranks."""


def cut(x: Tensor, rank: int, size: int, order: str = "contiguous") -> Tensor:
    local: Tensor = shard_sequence(x, (rank, size), order=order)
    return local


@FAMILY
def test_each_row_selects_what_transformers_selects(family: str) -> None:
    model = build(family)
    seen, ours = watch(model), []
    with exact():
        model(input_ids=IDS)
        prepared = prepare_model(build(family))
        for module in prepared.modules():
            if isinstance(module, SelectKeys):
                module.register_forward_hook(lambda *given: ours.append(given[-1][:, :, 0]))
        prepared(input_ids=IDS)

    theirs = [call["topk"] for call in seen.values() if "topk" in call]
    assert len(ours) == len(theirs) == (2 if family == "glm" else 3)
    for one, other in zip(ours, theirs, strict=True):
        for row in range(S):  # transformers fills short rows with keys that it masks later
            selected = one[:, row, : row + 1].sort().values
            visible = other[:, row].sort().values[:, : selected.shape[1]]
            assert torch.equal(selected, visible.int())


@FAMILY
def test_a_float32_model_is_as_near_to_the_truth_as_transformers_is(family: str) -> None:
    """Nothing of transformers is widened in float32."""
    model = build(family)
    with exact():
        truth = model(input_ids=IDS).logits
    single = model.float()
    theirs = (single(input_ids=IDS).logits - truth).norm()
    ours = (prepare_model(single)(input_ids=IDS).logits - truth).norm()
    assert ours < 1.5 * theirs < 1e-3


@FAMILY
def test_bfloat16_runs_with_the_weights_in_float32_as_transformers_keeps_them(family: str) -> None:
    """Selections of two precisions differ, so that only the losses are near."""
    model = build(family)
    for name, parameter in model.named_parameters():
        kept = "weights_proj" in name or "gate.weight" in name
        parameter.data = parameter.data.to(torch.float32 if kept else torch.bfloat16)
    expected = prepare_model(build(family))
    expected(input_ids=IDS)

    def run(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = prepare_model(copy.deepcopy(model), mesh, overlap=True)
        for _ in range(2):
            ids = cut(IDS, rank, 2)
            out = own(input_ids=ids, labels=IDS)
            (out.loss + indexer_loss(own)).backward()
        assert out.logits.dtype == torch.bfloat16
        for name, parameter in own.named_parameters():
            grad = parameter.grad
            assert grad is None or (grad.dtype == parameter.dtype and grad.isfinite().all()), name
        return indexer_loss(own).detach()

    for loss in ranks(2).run(run):
        assert loss.dtype == torch.float32
        assert abs(loss / indexer_loss(expected) - 1) < 0.1


@FAMILY
def test_under_autocast_the_losses_are_near_those_of_transformers(family: str) -> None:
    """What is gathered has the dtype of autocast, though norms and angles are in float32."""
    model = build(family).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(input_ids=IDS, labels=IDS).loss
    expected = prepare_model(build(family))
    expected(input_ids=IDS)

    def run(rank: int, size: int, overlap: bool) -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        own = prepare_model(copy.deepcopy(model), mesh, overlap=overlap)
        keys: list[torch.dtype] = []
        for module in own.modules():
            if isinstance(module, SparseAttention | SelectKeys):
                module.register_forward_pre_hook(lambda _, given: keys.append(given[1].dtype))
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = own(input_ids=cut(IDS, rank, size), labels=IDS)
                (out.loss + indexer_loss(own)).backward()
        assert set(keys) == {torch.bfloat16}
        for name, parameter in own.named_parameters():
            grad = parameter.grad
            assert grad is None or (grad.dtype == torch.float32 and grad.isfinite().all()), name
        return out.loss.detach(), indexer_loss(own).detach()

    for size in (1, 2):
        for loss, learned in ranks(size).run(run, size, size > 1):
            assert loss.dtype == learned.dtype == torch.float32
            assert abs(loss / stock - 1) < 0.1
            assert abs(learned / indexer_loss(expected) - 1) < 0.1


@FAMILY
def test_no_mask_is_made(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(MODULES[family], "create_causal_mask")
    prepare_model(build(family))(input_ids=IDS)


@FAMILY
def test_more_keys_than_there_are_may_be_asked_for(family: str) -> None:
    model = build(family, index_topk=S + 9)
    with exact():
        expected = model(input_ids=IDS).logits
        assert_close(prepare_model(model)(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("balance", [False, True], ids=["contiguous", "balanced"])
@FAMILY
def test_packed_documents_do_not_see_each_other(family: str, balance: bool, kind: str) -> None:
    """As transformers packs: positions begin anew in each document."""
    ids, order = IDS[:1], "head_tail" if balance else "contiguous"
    positions = torch.cat([torch.arange(b - a) for a, b in zip([0, *ENDS], ENDS, strict=False)])
    model = build(family, **({"index_topk": S} if kind == "dense" else {}))
    seen = watch(model)

    def run(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = prepare_model(
            build(family), mesh, layout="TND", load_balance=balance, indexer_loss=kind
        )
        starts = torch.tensor([0, *ENDS], dtype=torch.int32)
        out = own(input_ids=cut(ids, rank, 2, order), cu_seq_lens_q=starts)
        loss = indexer_loss(own, gradient_divisor=1)
        loss.backward()
        grads = {n: p.grad for n, p in own.named_parameters() if ".indexer." in n}
        for grad in grads.values():
            dist.all_reduce(grad)
        return {"logits": out.logits.detach(), "loss": loss.detach(), "grads": grads}

    with exact():
        expected = model(input_ids=ids, position_ids=positions[None], use_cache=False).logits
        loss = formula_loss(model, seen, ends=ENDS, dense=kind == "dense") / S
        loss.backward()
        for rank, got in enumerate(ranks(2).run(run)):
            assert_close(got["logits"], cut(expected, rank, 2, order), name="logits")
            assert_close(got["loss"], loss, kind="loss", name="loss")
            for name, grad in got["grads"].items():
                assert_close(grad, model.get_parameter(name).grad, kind="grad", name=name)


def _trained(model: Any, **call: Any) -> dict[str, Any]:
    out = model(**call)
    (out.loss + indexer_loss(model)).backward()
    return {
        "loss": out.loss.detach(),
        "indexer": indexer_loss(model).detach(),
        "grads": {n: p.grad for n, p in model.named_parameters()},
    }


def test_the_same_tokens_on_all_ranks_are_a_warning() -> None:
    """Once; positions are global all the same, and would hide it in queries and keys."""
    _warned.clear()
    model = build("glm")

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = prepare_model(copy.deepcopy(model), mesh)
        for _ in range(2):
            own(input_ids=IDS)

    said = r"DSA.*ContextParallel: .* must be another part of the sequence on each of the 2 ranks"
    with pytest.warns(UserWarning, match=said) as record:
        ranks(2).run(run)
    assert len(record) == 2


@pytest.mark.parametrize("balance", [False, True], ids=["contiguous", "balanced"])
def test_whole_labels_are_shifted_before_they_are_cut(balance: bool) -> None:
    """Gradients averaged over the ranks, as FSDP does, are those of the loss."""
    order = "head_tail" if balance else "contiguous"
    labels = IDS.masked_fill(IDS % 3 == 0, -100)

    def run(rank: int, given: dict[str, Tensor]) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = prepare_model(build("glm"), mesh, load_balance=balance)
        got = _trained(own, input_ids=cut(IDS, rank, 2, order), **given)
        for parameter in own.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        return {**got, "grads": {n: p.grad for n, p in own.named_parameters()}}

    with exact():
        model = build("glm")
        alone = prepare_model(model)
        targets = next_token_labels(labels)
        out = alone(input_ids=IDS)
        loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        (loss + indexer_loss(alone)).backward()
        for given in ({"labels": labels}, {"labels": labels, "shift_labels": targets}):
            for got in ranks(2).run(run, given):
                assert_close(got["loss"], loss, kind="loss")
                for name, parameter in model.named_parameters():
                    assert_close(got["grads"][name], parameter.grad, kind="grad", name=name)


@FAMILY
def test_checkpointing_without_reentry_trains_alike(family: str) -> None:
    with exact():
        expected = prepare_model(build(family))
        (lm_loss(expected(input_ids=IDS).logits) + indexer_loss(expected)).backward()

        def run(rank: int) -> dict[str, Tensor]:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
            own = prepare_model(build(family), mesh, gradient_divisor=1)
            own.activation_checkpointing_enable({"use_reentrant": False})
            ids, labels = cut(IDS, rank, 2), next_token_labels(IDS, (rank, 2))
            out = own.train()(input_ids=ids, labels=ids, shift_labels=labels)
            (out.loss + indexer_loss(own)).backward()
            for parameter in own.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            return {n: p.grad for n, p in own.named_parameters()}

        for got in ranks(2).run(run):
            for name, parameter in expected.named_parameters():
                assert_close(got[name], parameter.grad, kind="grad", name=name)


def test_micro_batches_add_up_to_the_step() -> None:
    with exact():
        whole, parts = prepare_model(build("deepseek")), prepare_model(build("deepseek"))
        whole(input_ids=IDS)
        indexer_loss(whole, total=B * S).backward()
        for row in IDS:
            parts(input_ids=row[None])
            indexer_loss(parts, total=B * S).backward()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_close(other.grad, one.grad, kind="grad")


@FAMILY
def test_restoring_leaves_the_model_as_transformers_made_it(family: str) -> None:
    model, names = build(family), [n for n, _ in build(family).named_modules()]
    kinds = [type(module) for module in model.modules()]
    expected = model(input_ids=IDS).logits

    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        own = prepare_model(copy.deepcopy(model), mesh, overlap=True)
        assert list(own.state_dict()) == list(model.state_dict())
        own(input_ids=IDS)
        return restore_model(own)

    (restored,) = ranks(1).run(run)
    assert [n for n, _ in restored.named_modules()] == names
    assert [type(module) for module in restored.modules()] == kinds
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in restored.modules())
    assert torch.equal(restored(input_ids=IDS).logits, expected)
    assert restore_model(restored) is restored


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_of_a_prepared_model_are_prepared_and_independent(
    clone: Callable[[Any], Any],
) -> None:
    model = prepare_model(build("glm"))
    expected = model(input_ids=IDS).logits
    twin = clone(model)
    with pytest.raises(ValueError, match="must have been called"):
        indexer_loss(twin)

    restore_model(model)

    assert torch.equal(twin(input_ids=IDS).logits, expected)
    assert indexer_loss(twin).requires_grad
    restore_model(twin)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())


@FAMILY
def test_evaluation_and_training_without_the_indexers_loss(family: str) -> None:
    def run(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        own = prepare_model(build(family), mesh, indexer_loss=None, overlap=True)
        ids = cut(IDS, rank, 2)
        for _ in range(2):
            own(input_ids=ids, labels=IDS).loss.backward()
        assert all((p.grad is None) == (".indexer." in n) for n, p in own.named_parameters())
        with pytest.raises(ValueError, match="prepared with indexer_loss=None"):
            indexer_loss(own)
        with torch.no_grad():
            logits: Tensor = own.eval()(inputs_embeds=own.get_input_embeddings()(ids)).logits
        return logits

    with exact():
        expected = build(family)(input_ids=IDS).logits
        for rank, logits in enumerate(ranks(2).run(run)):
            assert_close(logits, cut(expected, rank, 2))
