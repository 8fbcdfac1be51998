"""What the operators refuse, by the argument's name and with the values that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hp_dsa import ops
from hp_dsa.ops import implementation

from ._inputs import Case, Inputs, base

Call = Callable[[Inputs], Any]
INDICES = torch.zeros(1, 4, 1, 3, dtype=torch.int32)


def attend(x: Inputs, indices: torch.Tensor = INDICES, **options: Any) -> Any:
    return x.attention(indices, **options)


def sparse(x: Inputs, **options: Any) -> Any:
    m = torch.zeros(1, 1, 4, 2)
    given: dict[str, Any] = {"softmax_max": m, "softmax_sum": m, "sparse_indices": INDICES}
    return ops.sparse_lightning_indexer_kl_loss(
        query=x.q, key=x.k, query_index=x.qi, key_index=x.ki, weights=x.w,
        **({"scale_value": 0.5} | given | options),
    )  # fmt: skip


def index(x: Inputs, **options: Any) -> Any:
    return ops.lightning_indexer(x.qi, x.ki, x.w, **options)


CASES: list[tuple[Call, str]] = [
    (lambda x: index(x, layout_query="BNSD"), r"layout_query \('BNSD'\) must be 'BSND' or 'TND'"),
    (lambda x: index(x, layout_query="bsnd", layout_key="bsnd"), r"'bsnd'\).*use 'BSND'"),
    (
        lambda x: index(x, layout_query="TND"),
        r"layout_query \('TND'\) and layout_key \('BSND'\) must be the same",
    ),
    (lambda x: index(x, layout_key="PA_BSND"), r"layout_key \('PA_BSND'\) must be"),
    (
        lambda x: index(x, layout_query="TND", layout_key="TND"),
        r"query \(shape \(1, 4, 2, 4\)\) must have 3 dims in layout 'TND'",
    ),
    (lambda x: index(x, sparse_mode=2), r"sparse_mode \(2\) must be 0 .* or 3"),
    (lambda x: index(x, sparse_count=0), r"sparse_count \(0\) must be an integer of at least 1"),
    (lambda x: index(x, sparse_count=2.0), r"sparse_count \(2.0\) must be an integer"),
    (lambda x: index(x, pre_tokens=5), r"pre_tokens \(5\) must be its default"),
    (lambda x: index(x, next_tokens=0), r"next_tokens \(0\) must be its default"),
    (lambda x: index(x, block_table=torch.zeros(1)), r"block_table \(given\) must be None"),
    (
        lambda x: index(x, actual_seq_lengths_query=[4, 4]),
        r"actual_seq_lengths_query \(\[4, 4\]\) must hold a valid length of at most S1 \(4\) for "
        r"each of B \(1\) rows",
    ),
    (lambda x: index(x, actual_seq_lengths_key=[5]), r"actual_seq_lengths_key \(\[5\]\) must hold"),
    (
        lambda x: index(x, actual_seq_lengths_key=torch.ones(1)),
        r"actual_seq_lengths_key \(torch.float32 of shape \(1,\)\) must be integers",
    ),
    (lambda x: index(x, actual_seq_lengths_key=4), r"lengths_key \(4\) must be integers"),
    (lambda x: sparse(x, scale_value=None), r"scale_value \(None\) must be a number"),
    (
        lambda x: ops.sparse_flash_attention(x.q, x.k, x.k, INDICES, None),  # type: ignore[arg-type]
        r"scale_value \(None\) must be a number",
    ),
    (lambda x: index(x, actual_seq_lengths_key=[4.0]), r"\(\[4.0\]\) must be integers"),
    (lambda x: index(replace(x, ki=x.ki[..., :3])), r"key \(shape \(.., 3\)\) must be one i"),
    (lambda x: index(replace(x, w=x.w[:, :3])), r"weights \(shape \(.., 3, 2\)\) must be query's"),
    (lambda x: index(replace(x, ki=x.ki.float())), r"key \(torch.float32 on cpu\) must be like q"),
    (lambda x: index(replace(x, w=x.w.int())), r"weights \(torch.int32\) must be a floating-point"),
    (lambda x: index(replace(x, ki=x.ki.expand(2, 4, 1, 4))), r"must have one batch size"),
    (lambda x: attend(x, INDICES.double()), r"sparse_indices \(torch.float64\) must be int32"),
    (lambda x: attend(x, INDICES[:, :3]), r"sparse_indices \(shape \(.., 3, 1, 3\)\) must be"),
    (lambda x: attend(x, INDICES[..., :0]), r"sparse_indices \(K = 0\) must hold"),
    (lambda x: attend(x, INDICES[0, 0, 0, 0]), r"sparse_indices \(shape \(\)\) must be"),
    (lambda x: attend(x, INDICES + 4), r"sparse_indices \(4\) must be -1 or below 4, the keys of"),
    (lambda x: attend(x, INDICES - 2), r"sparse_indices \(-2\) must be -1 or below 4"),
    (
        lambda x: attend(x, INDICES + 2, sparse_block_size=2),
        r"sparse_indices \(2\) must be -1 or below 2, the blocks of 2 keys of row 0",
    ),
    (lambda x: attend(x, sparse_block_size=0), r"sparse_block_size \(0\) must be at least 1"),
    (lambda x: attend(x, sinks=torch.zeros(2)), r"sinks \(given\) must be None"),
    (
        lambda x: attend(replace(x, k=torch.cat([x.k, x.k], 2))),
        r"key \(shape \(.., 2, 4\)\) must be one head of query's size",
    ),
    (
        lambda x: ops.sparse_flash_attention(x.q, x.k, x.k, INDICES, 1.0, query_rope=x.qr),
        r"key_rope \(None\) must come together with the other rotary part",
    ),
    (
        lambda x: ops.sparse_flash_attention(x.q, x.k, x.k, INDICES, 1.0, attention_mode=1),
        r"attention_mode \(1\) must be 2, the absorbed form",
    ),
    (
        lambda x: sparse(x, softmax_max=torch.zeros(1, 4, 1, 2)),
        r"softmax_max \(shape \(.., 4, 1, 2\)\) must be heads before rows",
    ),
    (
        lambda x: sparse(x, softmax_max=None),
        r"softmax_max \(None\) must be what sparse_flash_attention returns with return_softmax_lse",
    ),
    (
        lambda x: sparse(x, softmax_sum=torch.zeros(0)),
        r"softmax_sum \(empty\) must be what sparse_flash_attention returns with",
    ),
    (lambda x: sparse(replace(x, ki=x.ki[:, :3])), r"key_index \(shape \(.., 3, 1, 4\)\) must be"),
    (lambda x: sparse(x, sparse_indices=INDICES + 9), r"sparse_indices \(9\) must be -1 or below"),
    (lambda x: sparse(x, sinks=torch.zeros(2)), r"sinks \(given\) must be None"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message[:30] for _, message in CASES])
@pytest.mark.parametrize("name", ["reference", "tiled"])
def test_a_wrong_argument_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, call: Call, message: str
) -> None:
    monkeypatch.setenv("HP_DSA", name)
    with pytest.raises(ValueError, match=message):
        call(base(4))


STREAM = Case(S=8, S2=8, layout="TND")
ENDS: list[tuple[Any, Any, str]] = [
    (None, [8], r"actual_seq_lengths_query \(None\) must hold the cumulative ends"),
    ([8], None, r"actual_seq_lengths_key \(None\) must hold"),
    ([3, 5], [3, 8], r"actual_seq_lengths_query \(last end 5\) must end at the tensor's length"),
    ([4, 8], [8], r"\(2 ends\) must have as many entries as actual_seq_lengths_key \(1 ends\)"),
    ([5, 3, 8], [5, 5, 8], r"\(\[5, 3, 8\]\) must be cumulative ends that do not fall"),
    ([], [8], r"\(\[\]\) must be cumulative ends"),
    ([-1, 8], [0, 8], r"\(\[-1, 8\]\) must be cumulative ends"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "key", "message"), ENDS, ids=[m[:30] for *_, m in ENDS])
def test_lengths_that_do_not_add_up_are_refused(query: Any, key: Any, message: str) -> None:
    x = replace(STREAM.inputs(), query_lengths=query, key_lengths=key)

    with pytest.raises(ValueError, match=message):
        x.indexer(3)


def test_a_packed_stream_counts_indices_from_its_documents() -> None:
    """Packed-global indices are the other convention: out of range in all documents but one."""
    x = replace(STREAM.inputs(), query_lengths=[3, 8], key_lengths=[3, 8])
    stream = torch.arange(8, dtype=torch.int32).view(8, 1, 1)

    with pytest.raises(ValueError, match=r"\(7\) must be -1 or below 5, the keys of document 1"):
        x.attention(stream)


def test_weights_may_be_float32_beside_bfloat16() -> None:
    x = replace(Case(S=5, S2=5, dtype=torch.bfloat16).inputs())
    mixed = replace(x, w=x.w.float().requires_grad_())
    indices, values = mixed.indexer(3, return_value=True)

    values.where(indices >= 0, 0.0).sum().backward()

    assert torch.equal(indices, x.indexer(3)[0])
    assert mixed.w.grad is not None and mixed.w.grad.dtype is torch.float32


def test_an_unknown_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_DSA", "fast")
    with pytest.raises(ValueError, match=r"HP_DSA \('fast'\) must be one of reference, tiled"):
        implementation(torch.zeros(1))


def test_triton_that_is_not_there_or_cannot_run_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HP_DSA", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"install hp-dsa\[cuda\], or use HP_DSA=tiled"):
        implementation(torch.zeros(1))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"must be used with tensors on cuda, not on cpu"):
        implementation(torch.zeros(1))


def test_second_derivatives_are_refused() -> None:
    """Recomputed gradients are not differentiable: an error, not a silent zero."""
    x = base(4)
    x.leaves("qi", "k", "q")
    indices, values = x.indexer(2, return_value=True)
    for result, leaf in ((values[0, 3], x.qi), (x.attention(indices)[0], x.q)):
        (d,) = torch.autograd.grad(result.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            d.square().sum().backward()
