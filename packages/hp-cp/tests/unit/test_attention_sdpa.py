"""One rank's rows of attention equal the same rows of the whole, output and every gradient."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_cp.attention import _npu
from hp_cp.attention.inputs import prepare
from hp_cp.attention.sdpa import choose_path, window_sdpa
from hp_mesh.testing import assert_close, peak_memory
from hp_mesh.window import AttentionWindow


def make_qkv(
    S: int,
    *,
    B: int = 2,
    H: int = 6,
    Hkv: int = 6,
    D: int = 8,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float64,
    keys: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random leaves ``[B, H, S, D]`` whose memory lies as BSHD, so the views are strided."""
    gen = torch.Generator().manual_seed(S * 131 + Hkv)
    shapes = ((S, H, D), (keys or S, Hkv, D), (keys or S, Hkv, Dv or D))
    return tuple(  # type: ignore[return-value]
        torch.randn(B, *shape, generator=gen, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for shape in shapes
    )


def windows(S: int, parts: int, keys: int | None = None) -> list[AttentionWindow]:
    """Uneven contiguous rows that cover the sequence, every part at least one row."""
    cuts = [round(S * p / parts) for p in range(parts + 1)]
    return [AttentionWindow(a, b - a, keys or S, S) for a, b in itertools.pairwise(cuts)]


def check_window(
    qkv: tuple[Tensor, ...],
    window: AttentionWindow,
    *,
    reference: dict[str, Any],
    call: dict[str, Any] | None = None,
    extra: tuple[Tensor, ...] = (),
) -> None:
    """Compare the window's rows with the whole call: output, dq, dk, dv and those of ``extra``."""
    rows = slice(window.query_start, window.query_end)
    q, k, v = qkv
    whole = F.scaled_dot_product_attention(q, k, v, **reference)[..., rows, :]
    upstream = torch.randn(whole.shape, generator=torch.Generator().manual_seed(3)).to(whole.dtype)
    leaves = (*qkv, *extra)
    expected = torch.autograd.grad(whole, leaves, upstream)

    mine = window_sdpa(q[..., rows, :], k, v, window, **(reference if call is None else call))
    actual = torch.autograd.grad(mine, leaves, upstream)

    assert mine.dtype == whole.dtype
    assert_close(mine, whole)
    assert_close(actual, expected, kind="grad")


@pytest.mark.parametrize("Hkv", [6, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("S", [17, 29, 45])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_rows_and_gradients_equal_the_whole_sequence(S: int, Hkv: int, causal: bool) -> None:
    """Every start position, one to four parts."""
    qkv = make_qkv(S, Hkv=Hkv)
    for parts in (1, 2, 3, 4):
        for window in windows(S, parts):
            options = {"is_causal": causal, "enable_gqa": Hkv != 6}
            check_window(qkv, window, reference=options)


def test_every_start_of_a_short_sequence_is_right() -> None:
    """One to three rows, starting anywhere."""
    qkv = make_qkv(11, B=1, H=2, Hkv=1)
    for start in range(11):
        for rows in range(1, min(3, 11 - start) + 1):
            window = AttentionWindow(start, rows, 11, 11)
            check_window(qkv, window, reference={"is_causal": True, "enable_gqa": True})


@pytest.mark.parametrize("keys", [7, 12, 40])
def test_causal_with_another_key_length_keeps_torchs_top_left_rule(keys: int) -> None:
    """Row ``i`` sees keys ``<= i`` whether there are fewer or more keys than rows."""
    qkv = make_qkv(29, keys=keys)
    for window in windows(29, 3, keys):
        check_window(qkv, window, reference={"is_causal": True})


@pytest.mark.parametrize("scale", [0.3, 1.0])
@pytest.mark.parametrize("Dv", [8, 5], ids=["same-head-size", "smaller-v"])
def test_scale_and_v_head_size_are_honoured(scale: float, Dv: int) -> None:
    """Both the fused and the tiled way."""
    qkv = make_qkv(29, Hkv=3, Dv=Dv)
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    for window in windows(29, 3):
        check_window(qkv, window, reference=options)


@pytest.mark.parametrize("Dv", [8, 5])
@pytest.mark.parametrize("rows", ["global", "local"])
@pytest.mark.parametrize(
    "shape",
    [(29, 29), (1, 1, 29, 29), (2, 1, 29, 29), (2, 6, 29, 29), (6, 29, 29), (2, 1, 1, 29)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_are_cut_to_the_rows(kind: str, shape: tuple[int, ...], rows: str, Dv: int) -> None:
    """Global masks and masks that are cut already give the same rows."""
    gen = torch.Generator().manual_seed(5)
    mask = torch.rand(shape, generator=gen) > 0.4
    mask[..., 0] = True
    if kind == "float":
        mask = torch.randn(shape, generator=gen).to(torch.float64).masked_fill(~mask, -torch.inf)
    qkv = make_qkv(29, Dv=Dv)
    for window in windows(29, 3):
        own = mask
        if rows == "local" and shape[-2] > 1:
            own = mask[..., window.query_start : window.query_end, :]
        check_window(qkv, window, reference={"attn_mask": mask}, call={"attn_mask": own})


@pytest.mark.parametrize("shape", [(29, 29), (2, 1, 29, 29), (2, 6, 1, 29), (1, 6, 29, 1)], ids=str)
def test_a_float_mask_gets_its_gradient(shape: tuple[int, ...]) -> None:
    """A learned bias: torch's math path, ours tiled."""
    bias = torch.randn(shape, dtype=torch.float64).requires_grad_()
    qkv = make_qkv(29, Hkv=2)
    options = {"attn_mask": bias, "enable_gqa": True}
    for window in windows(29, 3):
        check_window(qkv, window, reference=options, extra=(bias,))


@pytest.mark.parametrize("Dv", [8, 5])
def test_a_fully_masked_row_is_zero_and_has_no_gradient(Dv: int) -> None:
    """No nan from a row without keys, as in torch."""
    mask = torch.rand(17, 17) > 0.3
    mask[[3, 9]] = False
    qkv = make_qkv(17, Dv=Dv)
    for window in windows(17, 2):
        check_window(qkv, window, reference={"attn_mask": mask})


def test_inputs_of_three_two_and_five_dims_keep_their_shape() -> None:
    """``[H, L, D]``, ``[L, D]`` and two batch dims; k and v may broadcast over the batch."""
    window = AttentionWindow(6, 7, 17, 17)
    q, k, v = make_qkv(17)
    for qkv in ((q[0], k[0], v[0]), (q[0, 0], k[0, 0], v[0, 0]), (q, k[:1], v[:1])):
        leaves = tuple(x.detach().requires_grad_() for x in qkv)
        check_window(leaves, window, reference={"is_causal": True})
    five = tuple(x.detach()[None].expand(3, -1, -1, -1, -1).requires_grad_() for x in (q, k, v))
    check_window(five, window, reference={"is_causal": True})
    mask = torch.rand(3, 2, 1, 17, 17) > 0.2
    check_window(five, window, reference={"attn_mask": mask})


def test_a_last_dim_with_stride_is_read_right() -> None:
    """The CPU kernel reads the last dim unchecked; we hand it unit strides."""
    q, k, v = (x.detach().mT.contiguous().mT.requires_grad_() for x in make_qkv(29))
    assert q.stride(-1) != 1
    for window in windows(29, 3):
        check_window((q, k, v), window, reference={"is_causal": True})


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=["fp32", "fp16", "bf16"],
)
@pytest.mark.parametrize("Dv", [8, 5])
def test_lower_precisions_stay_near_the_fp64_result(
    dtype: torch.dtype, tolerance: float, Dv: int
) -> None:
    """Sums run in float32; the result and gradients come back in the input's dtype."""
    qkv = make_qkv(29, Hkv=2, Dv=Dv, dtype=dtype)
    exact = tuple(x.detach().double().requires_grad_() for x in qkv)
    whole = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    for window in windows(29, 3):
        rows = slice(window.query_start, window.query_end)
        mine = window_sdpa(qkv[0][:, :, rows], *qkv[1:], window, is_causal=True, enable_gqa=True)
        upstream = torch.randn_like(mine)
        actual = torch.autograd.grad(mine, qkv, upstream)
        expected = torch.autograd.grad(
            whole[:, :, rows], exact, upstream.double(), retain_graph=True
        )
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), whole[:, :, rows], rtol=tolerance, atol=tolerance)
        for got, want in zip(actual, expected, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("Dv", [8, 5])
def test_autocast_casts_as_torchs_own_attention_does(Dv: int) -> None:
    """Every rank's result has the autocast dtype, whichever path its rows take."""
    q, k, v = make_qkv(17, Dv=Dv, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for window in windows(17, 2):
            rows = q[:, :, window.query_start : window.query_end]
            mine = window_sdpa(rows, k, v.bfloat16(), window, is_causal=True)
            whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            expected = whole[:, :, window.query_start : window.query_end]
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2)
            grads = torch.autograd.grad(mine.float().sum(), (q, k, v))
            assert all(g.dtype == torch.float32 for g in grads)


def test_each_case_takes_the_path_that_the_table_names() -> None:
    """Fused where torch has a kernel, blocks in mid-sequence, tiles where it has none."""

    def path(window: AttentionWindow, qkv: tuple[Tensor, ...], **options: Any) -> str:
        causal, p = options.get("causal", False), options.get("p", 0.0)
        rows = qkv[0][:, :, window.query_start : window.query_end]
        x = prepare(rows, *qkv[1:], options.get("mask"), window, True, "test")
        return choose_path(x.q, x.k, x.v, window, x.mask, p, causal)

    first, last = windows(16, 2)
    qkv, narrow_v = make_qkv(16, Hkv=2), make_qkv(16, Dv=4)
    bias = torch.zeros(8, 16, dtype=torch.float64)
    assert path(first, qkv, causal=True) == "torch"
    assert path(last, qkv, causal=True) == "prefix_and_diagonal"
    assert path(last, qkv) == "torch"
    assert path(last, qkv, mask=bias) == "torch"
    assert path(last, qkv, mask=bias.clone().requires_grad_()) == "tiled"
    assert path(last, qkv, causal=True, p=0.1) == "tiled"
    assert path(first, narrow_v, causal=True) == "tiled"
    assert path(last, narrow_v) == "tiled"


@pytest.mark.parametrize("start", [0, 512], ids=["first-rows", "last-rows"])
@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"is_causal": True, "dropout_p": 0.1}, {"dropout_p": 0.1}, {"Dv": 2}],
    ids=["causal", "causal-dropout", "dropout", "narrow-v"],
)
def test_nothing_of_the_size_of_the_scores_is_allocated(
    start: int, options: dict[str, Any]
) -> None:
    """Neither forward nor backward, not even for one head, ever holds ``Lq * K`` elements."""
    options = dict(options)
    S, window = 1024, AttentionWindow(start, 512, 1024, 1024)
    q, k, v = make_qkv(S, B=1, H=2, Hkv=1, D=4, Dv=options.pop("Dv", None))
    rows = q[:, :, start : start + 512]
    with peak_memory() as seen:
        out = window_sdpa(rows, k, v, window, enable_gqa=True, **options)
        out.backward(torch.ones_like(out))
    scores = window.query_length * S * q.element_size()  # of one head
    assert seen.largest <= scores // 8, seen.largest_op
    assert seen.peak <= scores // 2


@pytest.fixture
def fake_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A stand-in for torch_npu: checks the documented call and computes bottom-right causal."""
    calls: list[dict[str, Any]] = []

    def npu_fusion_attention(
        q: Tensor, k: Tensor, v: Tensor, head_num: int, input_layout: str, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        calls.append({"head_num": head_num, "input_layout": input_layout, **kwargs})
        assert kwargs["sparse_mode"] == 3
        assert torch.equal(kwargs["atten_mask"], torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        visible = visible.tril(k.shape[2] - q.shape[2])
        scale = kwargs["scale"]
        return (
            F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True),
            q,
            q,
        )

    module = types.ModuleType("torch_npu")
    module.npu_fusion_attention = npu_fusion_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    yield calls
    _npu._masks.clear()


def test_the_npu_door_calls_the_kernel_as_documented(fake_npu: list[dict[str, Any]]) -> None:
    """Bottom-right causal with the compressed mask on keys cut to the prefix, BNSD, our scale."""
    q, k, v = make_qkv(29, Hkv=2, dtype=torch.float32)
    window = AttentionWindow(10, 9, 29, 29)
    out = _npu.causal_attention(q[:, :, 10:19], k[:, :, :19], v[:, :, :19], None, 0.0)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, whole[:, :, 10:19])
    assert fake_npu[0]["head_num"] == 6 and fake_npu[0]["keep_prob"] == 1.0
    assert window.query_end == 19 and _npu.takes(q, v)
    assert not _npu.takes(q, v[..., :4]) and not _npu.takes(q.double(), v)


def test_the_kernels_mask_is_made_once_and_fit_for_a_backward() -> None:
    """Also when the first call is in inference mode, and with a tracer in between."""
    device = torch.device("cpu")
    _npu._masks.clear()
    with torch.inference_mode():
        mask = _npu.compressed_causal_mask(device)
    assert not mask.is_inference()
    with FakeTensorMode():
        assert _npu.compressed_causal_mask(device) is not mask
    assert _npu.compressed_causal_mask(device) is mask
    _npu._masks.clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[:, :, :5], k, v), r"query .* must have 8 rows"),
        (lambda q, k, v: (q, k[:, :, :8], v), r"key .* must have 16 rows"),
        (lambda q, k, v: (q, k, v[:, :, :8]), r"value .* must have 16 rows"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), r"key heads \(2\) must equal query heads \(6\)"),
        (lambda q, k, v: (q, k, v.float()), "same dtype"),
    ],
    ids=["query-rows", "key-rows", "value-rows", "heads", "dtypes"],
)
def test_wrong_inputs_are_refused_by_name(
    change: Callable[..., tuple[Tensor, ...]], words: str
) -> None:
    """Before any compute, naming what is wrong."""
    q, k, v = make_qkv(16)
    window = AttentionWindow(8, 8, 16, 16)
    with pytest.raises(ValueError, match=words):
        window_sdpa(*change(q[:, :, 8:], k, v), window, is_causal=True)


@pytest.mark.parametrize(
    ("heads_of_k", "heads_of_v", "gqa"), [(2, 3, True), (1, 6, True), (6, 1, False), (1, 6, False)]
)
@pytest.mark.parametrize("window", windows(16, 3)[:2], ids=["first-rows", "later-rows"])
def test_k_and_v_may_have_unequal_numbers_of_heads(
    window: AttentionWindow, heads_of_k: int, heads_of_v: int, gqa: bool
) -> None:
    """Each is shared as torch shares it: one head by all, or by groups under ``enable_gqa``."""
    q = make_qkv(16)[0]
    k, v = make_qkv(16, Hkv=heads_of_k)[1], make_qkv(16, Hkv=heads_of_v)[2]
    rows = slice(window.query_start, window.query_end)
    each = (x.repeat_interleave(6 // x.shape[1], 1) for x in (k, v))
    whole = F.scaled_dot_product_attention(q, *each, is_causal=True)[:, :, rows]
    upstream = torch.randn(whole.shape, dtype=torch.float64)

    mine = window_sdpa(q[:, :, rows], k, v, window, is_causal=True, enable_gqa=gqa)

    assert_close(mine, whole)
    grads = (torch.autograd.grad(x, (q, k, v), upstream) for x in (mine, whole))
    assert_close(*grads, kind="grad")


def test_heads_that_do_not_divide_are_refused_under_gqa() -> None:
    """Torch's rule, our words."""
    q, k, v = make_qkv(16, Hkv=4)
    with pytest.raises(ValueError, match=r"key heads \(4\) must divide query heads \(6\)"):
        window_sdpa(q, k, v, AttentionWindow(0, 16, 16, 16), enable_gqa=True)


def test_causal_with_a_mask_is_refused_in_torchs_words() -> None:
    """As torch's documentation and math path say."""
    q, k, v = make_qkv(16)
    with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set"):
        window_sdpa(
            q,
            k,
            v,
            AttentionWindow(0, 16, 16, 16),
            attn_mask=torch.ones(16, 16, dtype=torch.bool),
            is_causal=True,
        )
    with pytest.raises(ValueError, match=r"dropout_p \(1.5\)"):
        window_sdpa(q, k, v, AttentionWindow(0, 16, 16, 16), dropout_p=1.5)
    with pytest.raises(ValueError, match=r"attn_mask .* must be bool"):
        window_sdpa(
            q,
            k,
            v,
            AttentionWindow(0, 16, 16, 16),
            attn_mask=torch.zeros(16, 16, dtype=torch.int64),
        )
