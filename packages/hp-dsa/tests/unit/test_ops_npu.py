"""The door to torch_npu, with a stand-in that has the operators' signatures and computes on CPU.

It checks what the kernels ask for and cannot say: dense tensors, int32 lengths here, lists there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from hp_dsa import _npu, ops
from hp_dsa.ops import dispatch, tiled
from hp_dsa.ops.rows import Rows
from hp_dsa.ops.split import query_parts
from hp_mesh.testing import assert_close

from ._fake_npu import Npu
from ._inputs import Case

REAL = dispatch.implementation


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Npu:
    stand_in = Npu()
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    monkeypatch.setattr(_npu, "_DTYPES", (torch.float64, torch.bfloat16))
    monkeypatch.setattr(_npu, "_LOSS_COUNTS", (6, 1024))
    return stand_in


REAL_SIZES: dict[str, Any] = {"heads": 32, "index_heads": 8, "D": 512, "Dr": 64, "DI": 128, "K": 6}
CASES = [
    Case(S=13, S2=17, B=2, strided=True, **REAL_SIZES),
    Case(S=13, S2=9, B=1, **REAL_SIZES),
    Case(S=12, S2=12, B=2, mode=0, **REAL_SIZES),
    Case(S=13, S2=15, query_lengths=[3, 13], key_lengths=[15, 4], **REAL_SIZES),
    Case(
        S=19, S2=25, layout="TND", query_lengths=[3, 3, 15, 19], key_lengths=[4, 9, 19, 25],
        strided=True, **REAL_SIZES,
    ),
    Case(
        S=12, S2=8, layout="TND", query_lengths=[9, 12], key_lengths=torch.tensor([2, 8]),
        **REAL_SIZES,
    ),
]  # fmt: skip


@pytest.mark.parametrize("limit", [8192, 5], ids=["whole", "parts"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_door_gives_what_the_tiled_operators_give(
    npu: Npu, monkeypatch: pytest.MonkeyPatch, case: Case, limit: int
) -> None:
    """Outputs and gradients; also where a loss is split into parts of 5 queries."""
    monkeypatch.setattr(_npu, "_LOSS_QUERIES", limit)
    found = []
    for name in ("npu", "tiled"):
        monkeypatch.setenv("HP_DSA", name)
        x = case.inputs()
        names = ("q", "k", "qr", "kr", "qi", "ki", "w")
        for leaf in names:
            getattr(x, leaf).requires_grad_()
        indices, values = x.indexer(case.K, return_value=True)
        out, m, z = x.attention(indices)
        sparse, lse = x.sparse(indices, m, z), x.index_lse()
        full = x.attention(x.indexer(case.S2)[0])[1:]
        dense = x.dense(*full)
        out.backward(x.do)
        (0.3 * sparse + 0.7 * dense + values.where(indices >= 0, 0.0).sum()).backward()
        found.append(
            ([indices, values, out, m, z, sparse, dense, *lse], [getattr(x, n).grad for n in names])
        )

    (results, gradients), (expected, expected_gradients) = found
    assert_close(results, [e.to(r.dtype) for r, e in zip(results, expected, strict=True)])
    assert_close(gradients, expected_gradients, kind="grad")
    sparse_calls = [given for name, given in npu.calls if name == "sparse loss"]
    sequence = 1 if case.layout == "BSND" else 0
    assert len(sparse_calls) > 1 or limit > case.S
    assert all(given["query_index"].shape[sequence] <= limit for given in sparse_calls)


def test_parts_hold_the_keys_that_their_queries_see() -> None:
    """Causal, 10 queries at the end of 12 keys, 4 at a time."""
    rows = Rows("here", "BSND", 3, 2, 10, 12)

    parts = [(p.first, p.last, p.key_first, p.key_last) for p in query_parts(rows, 4)]

    assert parts == [(0, 4, 0, 6), (4, 8, 0, 10), (8, 10, 0, 12)]


def test_parts_of_a_stream_start_at_the_first_document_with_queries() -> None:
    rows = Rows("here", "TND", 3, 1, 9, 11, [2, 2, 7, 9], [3, 5, 9, 11])

    parts = list(query_parts(rows, 3))

    assert [(p.first, p.last, p.key_first, p.key_last) for p in parts] == [
        (0, 3, 0, 5), (3, 6, 5, 8), (6, 9, 5, 11),
    ]  # fmt: skip
    assert [(p.rows.query_lengths, p.rows.key_lengths) for p in parts] == [
        ([2, 2, 3], [3, 5, 5]), ([3], [3]), ([1, 3], [4, 6]),
    ]  # fmt: skip


def test_nothing_is_asked_for_that_the_caller_does_not_need(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics in training are needed by the kernel's own backward, and only there."""
    monkeypatch.setenv("HP_DSA", "npu")
    x = CASES[0].inputs()
    indices, nothing = x.indexer(6)
    args = (x.q, x.k, None, indices.long(), 0.5)
    rope = {"query_rope": x.qr, "key_rope": x.kr}

    _, m, _ = ops.sparse_flash_attention(*args, **rope)
    x.k.requires_grad_()
    _, trained, _ = ops.sparse_flash_attention(*args, **rope)

    assert nothing.numel() == m.numel() == trained.numel() == 0
    asked = [given["return_softmax_lse"] for name, given in npu.calls if name == "attention"]
    assert asked == [False, True]
    assert all(given["value"] is given["key"] for name, given in npu.calls if name == "attention")


def test_npu_tensors_go_to_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnNpu:
        device = torch.device("npu") if hasattr(torch, "npu") else type("D", (), {"type": "npu"})

    monkeypatch.delenv("HP_DSA", raising=False)
    assert REAL(OnNpu()) is _npu  # type: ignore[arg-type]
    assert REAL(torch.ones(1)) is tiled


LIMITS = [
    ({"index_heads": 65}, "indexer", r"N1 \(65\) must be 1 to 64 index heads on npu"),
    ({"DI": 64}, "indexer", r"D \(64\) must be an index head size of 128 on npu"),
    ({"K": 2049}, "indexer", r"sparse_count \(2049\) must be 1 to 2048, or 3072 to 8192"),
    ({"D": 256}, "attention", r"D \(256\) must be a latent of 512 on npu"),
    ({"Dr": 32}, "attention", r"Dr \(32\) must be a rotary part of 64 on npu"),
    ({"heads": 48}, "attention", r"N1 \(48\) must be a power of two up to 128 on npu"),
    ({"heads": 16}, "sparse", r"N1 \(16\) must be 32, 64 or 128 heads on npu"),
    ({"index_heads": 4}, "sparse", r"N1 of query_index \(4\) must be 8, 16, 32 or 64 on npu"),
    ({"K": 7}, "sparse", r"K \(7\) must be 1024, 2048, ... 8192 keys on npu"),
    ({"dtype": torch.float32}, "indexer", r"query \(torch.float32\) must be bfloat16 or float16"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "operator", "message"), LIMITS, ids=lambda x: str(x)[:24])
def test_a_limit_is_refused_by_name_with_the_way_out(
    npu: Npu, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], operator: str, message: str
) -> None:
    case = replace(Case(S=4, S2=4, B=1, **REAL_SIZES), **changes)
    x = case.inputs()
    indices = torch.zeros(1, 4, 1, case.K, dtype=torch.int32)
    m = torch.zeros(1, 1, 4, case.heads)
    monkeypatch.setenv("HP_DSA", "npu")

    with pytest.raises(ValueError, match=message) as caught:
        {
            "indexer": lambda: x.indexer(case.K),
            "attention": lambda: x.attention(indices),
            "sparse": lambda: x.sparse(indices, m, m, grad=True),
        }[operator]()

    assert "HP_DSA=tiled" in str(caught.value) and not npu.calls


def test_attention_without_rope_is_refused_on_npu(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HP_DSA", "npu")
    x = CASES[0].inputs()

    with pytest.raises(ValueError, match="query_rope and key_rope"):
        ops.sparse_flash_attention(x.q, x.k, None, torch.zeros(2, 13, 1, 6).int(), 0.5)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_lengths_of_a_loss_are_checked_before_the_kernel_has_them(
    npu: Npu, monkeypatch: pytest.MonkeyPatch, dense: bool
) -> None:
    """The kernels take lists as they are, and would read a wrong last end as a right one."""
    monkeypatch.setenv("HP_DSA", "npu")
    case = Case(
        S=12, S2=12, layout="TND", query_lengths=[9, 11], key_lengths=[9, 12], **REAL_SIZES
    )  # fmt: skip
    x = case.inputs()
    indices, m = torch.zeros(12, 1, 6, dtype=torch.int32), torch.zeros(1, 12, 32)

    for call in (x.index_lse,) if dense else (lambda: x.sparse(indices, m, m),):
        with pytest.raises(ValueError, match=r"actual_seq_qlen \(last end 11\) must end at"):
            call()

    assert not npu.calls


def test_a_torch_npu_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_DSA", "npu")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    x = replace(CASES[0], dtype=torch.bfloat16).inputs()

    with pytest.raises(ImportError, match=r"install hp-dsa\[npu\] beside CANN, or use HP_DSA"):
        x.indexer(6)
