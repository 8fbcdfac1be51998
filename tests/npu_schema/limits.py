"""What the operators' documentation allows, as far as a call's shapes and numbers can break it.

Neither schema nor shape rules of the wheel look at this; the device does, or computes something
else. Each function takes every argument of a call by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

__all__ = ["check_fusion_attention"]

_DIMS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_COMPRESSED = (2048, 2048)
_INT32 = 2**31 - 1


def check_fusion_attention(given: Mapping[str, Any]) -> None:
    """Assert the documented limits of ``npu_fusion_attention``, in any of its versions."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    layout, heads = given["input_layout"], given["head_num"]
    assert layout in _DIMS, f"layout {layout}"
    assert q.ndim == k.ndim == v.ndim == _DIMS[layout], f"{layout} with {q.shape}, {k.shape}"
    assert q.dtype == k.dtype == v.dtype and q.dtype in _FLOATS, f"{q.dtype}, {k.dtype}"
    assert k.shape == v.shape, f"key {k.shape} and value {v.shape}"
    batch, rows, keys, kv_heads = _sizes(q, k, layout, heads)
    assert 1 <= heads <= 256 and heads % kv_heads == 0, f"{heads} heads on {kv_heads}"
    assert min(batch, rows, keys) >= 1, f"nothing to compute: {q.shape}, {k.shape}"
    assert 0.0 < given["keep_prob"] <= 1.0 and given["padding_mask"] is None
    pre = given.get("pre_tockens", given.get("pre_tokens"))
    after = given.get("next_tockens", given.get("next_tokens"))
    _check_mask(given["atten_mask"], given["sparse_mode"], pre, after, (batch, heads, rows, keys))
    pse, sink = given["pse"], given["sink"]
    if pse is not None:
        assert pse.dtype == q.dtype, f"pse {pse.dtype} beside {q.dtype}"
        assert layout != "TND" and pse.shape[1:] in ((heads, rows, keys), (heads, 1, keys))
        assert pse.shape[0] in (1, batch)
    if sink is not None:
        assert sink.shape == (heads,) and sink.dtype == torch.float32, f"sink {sink.shape}"
    if layout == "TND":
        _check_documents(given, rows, keys)
    if given.get("query_rope") is not None:
        _check_ropes(given)


def _sizes(q: Tensor, k: Tensor, layout: str, heads: int) -> tuple[int, int, int, int]:
    """Return batch, query rows, keys and KV heads; assert what q and k must share."""
    if layout in ("BSH", "SBH"):
        assert q.shape[2] % heads == 0, f"{heads} heads in {q.shape}"
        size = q.shape[2] // heads
        assert k.shape[2] % size == 0, f"heads of {size} in {k.shape}"
        b, s = (0, 1) if layout == "BSH" else (1, 0)
        kv_heads = k.shape[2] // size
    else:
        b, s, n = {"BSND": (0, 1, 2), "BNSD": (0, 2, 1), "TND": (None, 0, 1)}[layout]
        assert q.shape[n] == heads, f"head_num {heads}, but {q.shape} in {layout}"
        assert q.shape[-1] == k.shape[-1], f"head sizes of {q.shape} and {k.shape}"
        size, kv_heads = q.shape[-1], k.shape[n]
    assert size <= 768, f"head size {size}"
    batch = 1 if b is None else q.shape[b]
    assert b is None or k.shape[b] == batch, f"batch of {q.shape} and {k.shape}"
    return batch, q.shape[s], k.shape[s], kv_heads


def _check_mask(
    mask: Tensor | None, mode: int, pre: int, after: int, sizes: tuple[int, int, int, int]
) -> None:
    if mask is None:  # mode and tokens have no effect
        return
    batch, heads, rows, keys = sizes
    assert mask.dtype in (torch.bool, torch.uint8), f"mask {mask.dtype}"
    if mode in (2, 3, 4):
        assert mask.shape == _COMPRESSED, f"mode {mode} with a mask {mask.shape}"
    else:
        assert mode in (0, 1), f"mode {mode}"
        assert mask.shape[-2:] == (rows, keys), f"mask {mask.shape} for {rows} x {keys}"
        assert mask.ndim == 2 or (
            mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
        ), f"mask {mask.shape}"
    if mode in (0, 4):
        assert -_INT32 <= pre <= _INT32 and -_INT32 <= after <= _INT32, f"{pre}, {after}"
        if after < 0:
            assert pre >= -after and -after < keys, f"next {after}, pre {pre}, {keys} keys"
        if pre < 0:
            assert after >= -pre and -pre < rows, f"pre {pre}, next {after}, {rows} rows"


def _check_documents(given: Mapping[str, Any], rows: int, keys: int) -> None:
    ends = []
    for name, total in (("actual_seq_qlen", rows), ("actual_seq_kvlen", keys)):
        value = given[name]
        assert value is not None, f"{name} is needed in TND"
        ends.append(_numbers(value))
        assert ends[-1][-1] == total, f"{name} {ends[-1]} must end at {total}"
    lengths = [[b - a for a, b in itertools.pairwise([0, *one])] for one in ends]
    assert len(lengths[0]) == len(lengths[1]) <= 1024, f"{ends}"
    assert min(*lengths[0], *lengths[1]) >= 0, f"{ends} must ascend"
    if given["atten_mask"] is not None:
        assert given["sparse_mode"] not in (0, 1) or given["atten_mask"].ndim == 2
        # rows that see nothing are not allowed here
        assert all(q <= k for q, k in zip(*lengths, strict=True)), f"{ends}"


def _numbers(value: Any) -> list[int]:
    """Read the lengths; a fake tensor that was made of numbers still knows them."""
    known = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
    assert known is not None, "lengths must not be computed on the device"
    with unset_fake_temporarily():
        return [int(n) for n in (known.tolist() if isinstance(known, Tensor) else known)]


def _check_ropes(given: Mapping[str, Any]) -> None:
    q, k, q_rope, k_rope = (given[n] for n in ("query", "key", "query_rope", "key_rope"))
    assert given["input_layout"] == "TND" and q.dtype == torch.bfloat16
    assert given["atten_mask"] is not None and given["keep_prob"] == 1.0
    assert q_rope.shape[:2] == q.shape[:2] and k_rope.shape[:2] == k.shape[:2]
    assert q_rope.dtype == k_rope.dtype == q.dtype and q_rope.shape[2] == k_rope.shape[2]
