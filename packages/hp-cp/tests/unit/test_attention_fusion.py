"""The rewritten arguments make every rank's kernel compute its rows of the global result.

No NPU is needed: `emulate_npu_fusion_attention` below is a plain-torch *emulation* of what the
kernel's documentation says about layouts, sparse modes, tokens and lengths. That the emulation and
the device agree is for the tests marked `npu`; here the rewriting is held to the documentation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_cp.attention.fusion import _warn_mode_ignored, rewrite_fusion_attention
from hp_mesh.testing import assert_close
from hp_mesh.window import AttentionWindow, contiguous_rows

H, HKV, D, S = 6, 2, 4, 24
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
SEQ_DIM = {"BSH": 1, "SBH": 0, "BSND": 1, "BNSD": 2, "TND": 0}
TOKENS = {
    1: ("pre_tockens", "next_tockens"),
    2: ("pre_tokens", "next_tokens"),
    3: ("pre_tockens", "next_tockens"),
}
NO_LIMIT = 2**31 - 1


def emulate_npu_fusion_attention(
    version: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_num: int,
    input_layout: str,
    **kwargs: Any,
) -> Tensor:
    """Emulate the documented semantics of the kernel in plain torch; unknown names are errors."""
    names = {"atten_mask", "pse", "scale", "sparse_mode", "sink", *TOKENS[version]}
    names |= {"actual_seq_qlen", "actual_seq_kvlen", "keep_prob"}
    names |= {"query_rope", "key_rope"} if version == 2 else set()
    assert set(kwargs) <= names, f"unknown keyword argument {set(kwargs) - names}"
    if input_layout == "TND":
        return _emulate_packed(version, q, k, v, head_num, **kwargs)
    q4, k4, v4 = (_to_bnsd(x, input_layout, head_num, q.shape[-1]) for x in (q, k, v))
    assert q4.shape[1] == head_num
    out = _emulate_dense(version, q4, k4, v4, **kwargs)
    return _from_bnsd(out, input_layout)


def _emulate_packed(
    version: int, q: Tensor, k: Tensor, v: Tensor, head_num: int, **kwargs: Any
) -> Tensor:
    assert q.shape[1] == head_num
    if (ropes := [kwargs.pop(name, None) for name in ("query_rope", "key_rope")]) != [None, None]:
        q, k = torch.cat([q, ropes[0]], -1), torch.cat([k, ropes[1]], -1)
    ends = [kwargs.pop(name) for name in ("actual_seq_qlen", "actual_seq_kvlen")]
    for value in ends:
        assert isinstance(value, Tensor) == (version == 3), "int[] in v1 and v2, Tensor in v3"
    q_ends, k_ends = ([0, *map(int, value)] for value in ends)
    assert q_ends[-1] == q.shape[0] and k_ends[-1] == k.shape[0]
    pieces = []
    for i in range(len(q_ends) - 1):
        one, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        parts = (x.transpose(0, 1)[None] for x in (q[one], k[keys], v[keys]))
        pieces.append(_emulate_dense(version, *parts, **kwargs)[0].transpose(0, 1))
    return torch.cat(pieces)


def _emulate_dense(version: int, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """BNSD; ``atten_mask`` True is masked *out*; without it the mode and tokens are ignored."""
    rows, keys = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * kwargs.get("scale", 1.0)
    if kwargs.get("pse") is not None:
        scores = scores + kwargs["pse"]
    mask, mode = kwargs.get("atten_mask"), kwargs.get("sparse_mode", 0)
    if mask is not None:
        pre, after = (kwargs.get(name, NO_LIMIT) for name in TOKENS[version])
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        corner = keys - rows
        if mode in (2, 3, 4):
            assert mask is COMPRESSED or torch.equal(mask, COMPRESSED)
            hidden = {
                2: j > i,
                3: j > i + corner,
                4: (j > i + corner + after) | (j < i + corner - pre),
            }[mode]
        else:
            assert mode in (0, 1) and mask.shape[-2:] == (rows, keys)
            hidden = mask
            if mode == 0:
                hidden = hidden | (j > i + after) | (j < i - pre)
        scores = scores.masked_fill(hidden, -torch.inf)
    if kwargs.get("sink") is not None:
        sink = kwargs["sink"].to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1).nan_to_num(0.0) @ v


def _to_bnsd(x: Tensor, layout: str, head_num: int, q_hidden: int) -> Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    x = x.transpose(0, 1) if layout == "SBH" else x
    return x.unflatten(2, (-1, q_hidden // head_num)).transpose(1, 2)


def _from_bnsd(x: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    x = x.transpose(1, 2).flatten(2)
    return x.transpose(0, 1) if layout == "SBH" else x


def make(layout: str, keys: int = S) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(keys)
    made = []
    for rows, heads in ((S, H), (keys, HKV), (keys, HKV)):
        x = torch.randn(2, heads, rows, D, generator=gen, dtype=torch.float64)
        made.append(x[0].transpose(0, 1) if layout == "TND" else _from_bnsd(x, layout))
    q, k, v = (x.detach().requires_grad_() for x in made)
    return q, k, v


def check_every_rank(
    version: int,
    layout: str,
    kwargs: dict[str, Any],
    *,
    keys: int = S,
    sizes: Sequence[int] = (1, 2, 3, 4),
) -> list[dict[str, Any]]:
    """Compare ranks with the global call; return the last rank's arguments for each number."""
    q, k, v = make(layout, keys)
    dim = SEQ_DIM[layout]
    whole = emulate_npu_fusion_attention(version, q, k, v, H, layout, **kwargs)
    upstream = torch.randn(whole.shape, dtype=torch.float64)
    leaves = [q, k, v, *(x for x in kwargs.values() if isinstance(x, Tensor) and x.requires_grad)]
    expected = torch.autograd.grad(whole, leaves, upstream)
    last_arguments = []
    for size in sizes:
        outputs = []
        for rank in range(size):
            start, stop = contiguous_rows(rank, size, S)
            window = AttentionWindow(start, stop - start, keys, S)
            new_q, new_k, new_v, heads, new_kwargs = rewrite_fusion_attention(
                version,  # type: ignore[arg-type]
                q.narrow(dim, start, stop - start),
                k,
                v,
                H,
                layout,
                window,
                kwargs,
            )
            assert heads == H
            outputs.append(
                emulate_npu_fusion_attention(
                    version, new_q, new_k, new_v, heads, layout, **new_kwargs
                )
            )
        last_arguments.append({**new_kwargs, "keys": new_k.shape[dim]})
        mine = torch.cat(outputs, dim)
        assert_close(mine, whole, name=f"{size} ranks")
        grads = torch.autograd.grad(mine, leaves, upstream)
        assert_close(list(grads), list(expected), kind="grad", name=f"{size} ranks")
    return last_arguments


def causal_mask(keys: int = S) -> Tensor:
    return torch.ones(S, keys, dtype=torch.bool).triu(1)


def test_the_emulation_knows_torchs_causal_attention() -> None:
    """Mode 2 with scale is ``is_causal``; mode 3 on equal lengths is the same."""
    q, k, v = make("BNSD")
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for mode in (2, 3):
        got = emulate_npu_fusion_attention(
            1, q, k, v, H, "BNSD", atten_mask=COMPRESSED, sparse_mode=mode, scale=D**-0.5
        )
        assert_close(got, want)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "full"])
def test_causal_modes_become_bottom_right_on_cut_keys(
    version: int, layout: str, mode: int, compressed: bool
) -> None:
    """Keys end where the rank's last row ends; a full causal mask is replaced by the pattern."""
    kwargs = {"atten_mask": COMPRESSED, "sparse_mode": mode, "scale": 0.5}
    if not compressed:
        kwargs["atten_mask"] = causal_mask()[None, None]
        q, k, v = make(layout)
        window = AttentionWindow(8, 8, S, S)
        q = q.narrow(SEQ_DIM[layout], 8, 8)
        args = rewrite_fusion_attention(
            version,  # type: ignore[arg-type]
            q,
            k,
            v,
            H,
            layout,
            window,
            kwargs,
        )
        assert torch.equal(args[4]["atten_mask"], COMPRESSED)
        assert args[1].shape[SEQ_DIM[layout]] == 16 and args[4]["sparse_mode"] == 3
        return
    for size, seen in enumerate(check_every_rank(version, layout, kwargs), start=1):
        assert seen["keys"] == S
        assert seen["sparse_mode"] == (mode if size == 1 else 3)


@pytest.mark.parametrize(
    ("mode", "keys", "sizes"),
    [(2, 10, (1, 2, 3, 4)), (2, 31, (2, 4)), (3, 10, (1,)), (3, 17, (1, 2, 3)), (3, 31, (2, 4))],
)
def test_causal_modes_hold_for_other_key_lengths(
    mode: int, keys: int, sizes: Sequence[int]
) -> None:
    """Top-left and bottom-right differ then, and rows without keys give 0."""
    kwargs = {"atten_mask": COMPRESSED, "sparse_mode": mode}
    check_every_rank(1, "BNSD", kwargs, keys=keys, sizes=sizes)


@pytest.mark.parametrize(
    ("mode", "tokens", "keys", "which"),
    [
        (3, {}, 17, "first"),
        (4, {"next_tockens": -9}, S, "first"),
        (4, {"pre_tockens": -7, "next_tockens": 9}, S, "last"),
    ],
)
def test_a_rank_that_sees_no_key_is_refused_by_all(
    mode: int, tokens: dict[str, int], keys: int, which: str
) -> None:
    """The tokens that would say so are ones that the kernel's documentation rules out."""
    q, k, v = make("BNSD", keys)
    kwargs = {"atten_mask": COMPRESSED, "sparse_mode": mode, **tokens}
    for rank in range(4):
        window = AttentionWindow(6 * rank, 6, keys, S)
        rows = q[:, :, 6 * rank : 6 * rank + 6]
        with pytest.raises(ValueError, match=rf"6 rows, not hide all {keys} keys from the {which}"):
            rewrite_fusion_attention(1, rows, k, v, H, "BNSD", window, kwargs)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("keys", [S, 31])
@pytest.mark.parametrize(
    ("pre", "after"), [(5, 0), (3, 4), (NO_LIMIT, 2), (6, NO_LIMIT), (7, -2), (100, 100)]
)
def test_a_band_is_shifted_in_the_versions_spelling(
    version: int, keys: int, pre: int, after: int
) -> None:
    """Mode 4, sliding windows included, counted from the bottom-right corner."""
    names = TOKENS[version]
    kwargs = {"atten_mask": COMPRESSED, "sparse_mode": 4, names[0]: pre, names[1]: after}
    check_every_rank(version, "BSND", kwargs, keys=keys)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", [(S, S), (1, 1, S, S), (2, 1, S, S), (2, H, S, S)], ids=str)
def test_an_explicit_mask_is_cut_to_the_rows(mode: int, shape: tuple[int, ...]) -> None:
    """Full rows of any documented shape."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.7
    mask[..., 0] = False
    check_every_rank(1, "BSND", {"atten_mask": mask, "sparse_mode": mode})


@pytest.mark.parametrize("version", [1, 2, 3])
def test_tokens_of_mode_0_are_moved_with_the_top_left_corner(version: int) -> None:
    """Where a mask is given, the tokens cut a band out of it as well; hidden keys are cut off."""
    names = TOKENS[version]
    for pre, after in ((5, 0), (4, 3), (NO_LIMIT, 0), (6, NO_LIMIT), (7, -2)):
        kwargs = {"atten_mask": causal_mask(), names[0]: pre, names[1]: after}
        for seen in check_every_rank(version, "BNSD", kwargs)[1:]:
            assert seen["keys"] == seen["atten_mask"].shape[-1] <= S
            rows = seen["atten_mask"].shape[-2]
            assert seen[names[0]] > -rows and seen[names[1]] > -seen["keys"], "documented limits"


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("tokens", [(0, 0), (3, 0), (0, 5), (-2, -2)], ids=str)
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_modes_that_ignore_tokens_ignore_them(
    mode: int, tokens: tuple[int, int], version: int
) -> None:
    """The mask alone decides in mode 1, and the diagonal in 2 and 3, whatever else is passed."""
    mask = COMPRESSED
    if mode == 1:
        mask = torch.rand(S, S, generator=torch.Generator().manual_seed(2)) > 0.7
        mask[:, 0] = False
    kwargs = {
        "atten_mask": mask,
        "sparse_mode": mode,
        **dict(zip(TOKENS[version], tokens, strict=True)),
    }
    for seen in check_every_rank(version, "BNSD", kwargs):
        assert seen["keys"] == S, "the last rank sees every key"


def test_a_bias_that_is_compressed_to_its_last_rows_is_refused() -> None:
    """1024 rows of 4096: on four ranks they could be taken for the rank's own."""
    q, k = torch.randn(1, 1, 1024, 2), torch.randn(1, 1, 4096, 2)
    pse = torch.zeros(1, 1, 1, 1).expand(1, 1, 1024, 4096)
    for rank in range(4):
        window = AttentionWindow(1024 * rank, 1024, 4096, 4096)
        with pytest.raises(ValueError, match="must not be compressed to its last 1024 rows"):
            rewrite_fusion_attention(1, q, k, k, 1, "BNSD", window, {"pse": pse})


def test_a_position_bias_is_cut_to_rows_and_keys_and_gets_its_gradient() -> None:
    """``pse`` with all rows, with one row, beside a causal mode that cuts keys."""
    for rows in (S, 1):
        pse = torch.randn(2, H, rows, S, dtype=torch.float64, requires_grad=True)
        check_every_rank(1, "BNSD", {"pse": pse, "atten_mask": COMPRESSED, "sparse_mode": 2})
        check_every_rank(1, "BNSD", {"pse": pse})


def test_without_a_mask_everything_is_visible_and_the_mode_is_warned_about_once() -> None:
    """What the kernel does in silence stays so, but is said, on every rank and in any layout."""
    _warn_mode_ignored.cache_clear()
    with pytest.warns(UserWarning, match=r"sparse_mode \(3\) has no effect without atten_mask"):
        check_every_rank(1, "BSH", {"sparse_mode": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_every_rank(1, "BSH", {"sparse_mode": 3})
        check_every_rank(1, "BSH", {})


DOCUMENTS = [[24], [5, 24], [3, 9, 11, 24], [6, 12, 18, 24], [1, 2, 3, 4, 24], [4, 4, 20, 20, 24]]


def lengths(version: int, ends: list[int]) -> Any:
    return torch.tensor(ends) if version == 3 else ends


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("ends", DOCUMENTS, ids=str)
@pytest.mark.parametrize("mode", [None, 2, 3, 4])
def test_documents_that_straddle_ranks_keep_their_own_causal_rule(
    version: int, ends: list[int], mode: int | None
) -> None:
    """Prefix sums are shifted and clamped; the keys are those of the local documents only."""
    kwargs: dict[str, Any] = {
        name: lengths(version, ends) for name in ("actual_seq_qlen", "actual_seq_kvlen")
    }
    if mode is not None:
        kwargs |= {"atten_mask": COMPRESSED, "sparse_mode": mode}
    if mode == 4:
        kwargs |= dict(zip(TOKENS[version], (4, 0), strict=True))
    check_every_rank(version, "TND", kwargs)


def test_rotary_parts_of_version_2_are_cut_with_the_keys() -> None:
    """``query_rope`` comes with the rank's rows, ``key_rope`` with all keys, as q and k do."""
    q, k, v = make("TND")
    q_rope, k_rope = (torch.randn(S, heads, 2, dtype=torch.float64) for heads in (H, HKV))
    kwargs: dict[str, Any] = {"actual_seq_qlen": [9, S], "actual_seq_kvlen": [9, S]}
    kwargs |= {"atten_mask": COMPRESSED, "sparse_mode": 3}
    ropes = {"query_rope": q_rope, "key_rope": k_rope}
    whole = emulate_npu_fusion_attention(2, q, k, v, H, "TND", **kwargs, **ropes)
    for rank in range(4):
        rows = slice(6 * rank, 6 * rank + 6)
        window = AttentionWindow(6 * rank, 6, S, S)
        given = {**kwargs, "query_rope": q_rope[rows], "key_rope": k_rope}
        *tensors, heads, new = rewrite_fusion_attention(2, q[rows], k, v, H, "TND", window, given)
        assert_close(emulate_npu_fusion_attention(2, *tensors, heads, "TND", **new), whole[rows])
        with pytest.raises(ValueError, match=r"query_rope \(shape \[24, 6, 2\]\) must have 6 rows"):
            rewrite_fusion_attention(2, q[rows], k, v, H, "TND", window, {**kwargs, **ropes})


@pytest.mark.parametrize("mode", [None, 3])
def test_documents_with_more_keys_than_queries_stay_bottom_right(mode: int | None) -> None:
    """Also a document that has keys and no queries between two others."""
    kwargs: dict[str, Any] = {"actual_seq_qlen": [5, 5, 13, 24], "actual_seq_kvlen": [7, 9, 19, 31]}
    if mode is not None:
        kwargs |= {"atten_mask": COMPRESSED, "sparse_mode": mode}
    check_every_rank(1, "TND", kwargs, keys=31)


def test_the_figure_of_the_documents_module_is_true() -> None:
    """Two ranks, eleven tokens, three documents."""
    ends = [3, 9, 11]
    expected = (([3, 6], [3, 6], 6), ([3, 5], [6, 8], 8))
    for (start, stop), (qlen, kvlen, keys) in zip(((0, 6), (6, 11)), expected, strict=True):
        window = AttentionWindow(start, stop - start, 11, 11)
        kwargs = {
            "actual_seq_qlen": ends,
            "actual_seq_kvlen": ends,
            "atten_mask": COMPRESSED,
            "sparse_mode": 3,
        }
        x = torch.randn(11, 2, 4)
        _, k, _, _, new = rewrite_fusion_attention(1, x[start:stop], x, x, 2, "TND", window, kwargs)
        assert (new["actual_seq_qlen"], new["actual_seq_kvlen"], len(k)) == (qlen, kvlen, keys)


def test_per_head_arguments_and_head_num_are_cut_to_the_ranks_heads() -> None:
    """Ulysses: a whole window, two of six heads."""
    window = AttentionWindow(0, S, S, S)
    x = torch.randn(2, S, 2, D)
    kwargs = {
        "sink": torch.arange(6.0),
        "pse": torch.arange(6.0)[None, :, None, None].expand(1, 6, S, S),
        "atten_mask": torch.zeros(2, 6, S, S, dtype=torch.bool),
    }
    *_, heads, new = rewrite_fusion_attention(
        1, x, x, x, 6, "BSND", window, kwargs, heads=(2, 4), num_heads=6
    )
    assert heads == 2
    assert new["sink"].tolist() == [2, 3] and new["pse"].shape == (1, 2, S, S)
    assert new["pse"][0, :, 0, 0].tolist() == [2, 3] and new["atten_mask"].shape[1] == 2
    flat = x.flatten(2)
    args = rewrite_fusion_attention(
        1, flat, flat, flat, 6, "BSH", window, {}, heads=(2, 4), num_heads=6
    )
    assert args[3] == 2


def test_a_whole_window_passes_any_mode_through() -> None:
    """One rank, or Ulysses: the kernel sees the whole sequence, nothing is rewritten."""
    x = torch.randn(2, S, 2, D)
    kwargs = {"atten_mask": COMPRESSED, "sparse_mode": 6, "prefix": [3, 4]}
    args = rewrite_fusion_attention(1, x, x, x, 2, "BSND", AttentionWindow(0, S, S, S), kwargs)
    assert args[1] is x and args[4] == kwargs


MASKED: dict[str, Any] = {"atten_mask": COMPRESSED}
PACKED: dict[str, Any] = {"actual_seq_qlen": [5, 24], "actual_seq_kvlen": [5, 24]}


@pytest.mark.parametrize(
    ("layout", "kwargs", "words"),
    [
        ("BSND", {**MASKED, "sparse_mode": 5}, r"sparse_mode \(5\) must be 0 to 4"),
        ("BSND", {**MASKED, "sparse_mode": 7}, r"sparse_mode \(7\) must be 0 to 4"),
        ("BSND", {**MASKED, "sparse_mode": 0}, r"atten_mask .* must have 24 keys"),
        (
            "BSND",
            {"atten_mask": torch.zeros(8, 8, dtype=torch.bool), "sparse_mode": 2},
            r"atten_mask \(shape \[8, 8\]\) must have 24 keys",
        ),
        ("BSND", {"dropout_mask": torch.zeros(1)}, r"dropout_mask must be None"),
        ("BSND", {"pse": torch.zeros(6), "pse_type": 2}, r"pse_type \(2\) must be 0 or 1"),
        ("BSND", {"pse": torch.zeros(2, 6, 9, 24)}, r"pse .* must have 24 rows"),
        ("NBSD", {}, r"input_layout \('NBSD'\) must be one of"),
        ("TND", {}, r"actual_seq_qlen \(None\) must be given"),
        ("TND", {**PACKED, "actual_seq_qlen": [5, 12]}, r"must be ascending .* end at 24"),
        ("TND", {**PACKED, "actual_seq_qlen": [24]}, r"\(1 documents\) must have as many"),
        ("TND", {**PACKED, **MASKED}, r"sparse_mode \(0\) must be 2, 3 or 4"),
        (
            "TND",
            {"actual_seq_qlen": [5, 24], "actual_seq_kvlen": [6, 24], **MASKED, "sparse_mode": 2},
            r"sparse_mode \(2\) must meet documents with as many keys \(6\)",
        ),
        (
            "TND",
            {"actual_seq_qlen": [5, 24], "actual_seq_kvlen": [4, 24], **MASKED, "sparse_mode": 3},
            r"at least as many keys \(4\)",
        ),
        (
            "TND",
            {**PACKED, **MASKED, "sparse_mode": 4, "pre_tockens": 4, "next_tockens": 1},
            r"next tokens must be at most 0",
        ),
        ("TND", {**PACKED, "pse": torch.zeros(6)}, r"pse must be None"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name_on_every_rank(
    layout: str, kwargs: dict[str, Any], words: str
) -> None:
    """The condition never depends on a rank's own rows, so no rank runs on alone."""
    q, k, v = make("BSND" if layout == "NBSD" else layout)
    dim = SEQ_DIM.get(layout, 1)
    for rank in range(4):
        window = AttentionWindow(6 * rank, 6, S, S)
        with pytest.raises(ValueError, match=words):
            rewrite_fusion_attention(1, q.narrow(dim, 6 * rank, 6), k, v, H, layout, window, kwargs)


def test_a_layout_that_does_not_fit_the_tensors_is_refused() -> None:
    """BNSD tensors called BSND have their heads where rows are expected."""
    q, k, v = make("BNSD")
    with pytest.raises(ValueError, match=r"query \(shape \[2, 6, 12, 4\]\) must have 12 rows"):
        rewrite_fusion_attention(1, q[:, :, :12], k, v, H, "BSND", AttentionWindow(0, 12, S, S), {})
