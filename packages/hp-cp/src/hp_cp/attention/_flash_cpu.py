r"""Door to torch's private CPU flash kernel: causal attention of rows that start in mid-sequence.

The kernel knows one causal rule (row 0 sees key 0), so rows ``[start, end)`` are computed as two
blocks and merged by their log-sum-exp::

    keys  0 .......... start .... end
          [ prefix: all ][ \ diagonal ]

The kernel's backward takes the log-sum-exp and output as arguments; fed with the merged ones it
gives each block's share of the exact gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from hp_comm.kernels.arithmetic import merge

__all__ = ["attend", "attend_backward", "causal_rows_attention", "takes"]

_FLASH = SDPBackend.FLASH_ATTENTION.value
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch would compute attention without a mask or dropout with this kernel."""
    if q.device.type != "cpu":
        return False
    gqa = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, False, enable_gqa=gqa)
    return choice == _FLASH


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, H, Lq, D]`` and log-sum-exp ``[B, H, Lq]``, outside autograd.

    Args:
        q: ``[B, H, Lq, D]``, unit stride in the last dim, as in `causal_rows_attention`.
        k: ``[B, Hkv, K, D]``.
        v: ``[B, Hkv, K, D]``.
        causal: Row ``i`` sees keys ``<= i``; then no row is without a key.
        scale: Factor on the scores, ``1 / sqrt(D)`` for None.
    """
    out, lse = _flash(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; ``out`` and ``lse`` may be those of more keys."""
    dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    return dq, dk, dv


def causal_rows_attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float | None
) -> Tensor:
    """Compute causal attention of the rows at global positions ``start``, ``start + 1``, ...

    Args:
        q: ``[B, H, Lq, D]``, unit stride in the last dim (the kernel reads it unchecked).
        k: ``[B, Hkv, K, D]`` from global position 0, likewise.
        v: ``[B, Hkv, K, D]``, likewise.
        start: Global position of ``q``'s first row, ``0 < start``.
        scale: Factor on the scores, ``1 / sqrt(D)`` for None.

    Returns:
        ``[B, H, Lq, D]``. Nothing of size ``Lq * K`` is allocated, forward or backward.
    """
    return cast(Tensor, _CausalRows.apply(q, k, v, start, scale))  # type: ignore[no-untyped-call]


class _CausalRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float | None
    ) -> Tensor:
        prefix, diagonal = _blocks(start, start + q.shape[2], k.shape[2])
        out, lse = _flash(q, k[:, :, prefix], v[:, :, prefix], 0.0, False, scale=scale)
        if diagonal is not None:
            # each row sees its own first key in both blocks: no empty row, whose lse would be 0
            more, more_lse = _flash(q, k[:, :, diagonal], v[:, :, diagonal], 0.0, True, scale=scale)
            out, lse = merge(out, lse, more, more_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.start, ctx.scale = start, scale
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        prefix, diagonal = _blocks(ctx.start, ctx.start + q.shape[2], k.shape[2])
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        blocks = [(prefix, False)] if diagonal is None else [(prefix, False), (diagonal, True)]
        parts = [
            _flash_backward(
                grad, q, k[:, :, keys], v[:, :, keys], out, lse, 0.0, causal, scale=ctx.scale
            )
            for keys, causal in blocks
        ]
        grad_q = parts[0][0]
        for dq, _, _ in parts[1:]:
            grad_q += dq
        grad_k, grad_v = (_joined(x, [part[i] for part in parts]) for i, x in ((1, k), (2, v)))
        return grad_q, grad_k, grad_v, None, None


def _joined(x: Tensor, parts: list[Tensor]) -> Tensor:
    """Return the gradient of ``x`` from those of its first keys; later keys nobody saw."""
    seen = sum(part.shape[2] for part in parts)
    if len(parts) == 1 and seen == x.shape[2]:
        return parts[0]
    whole = torch.empty_like(x)
    at = 0
    for part in parts:
        whole[:, :, at : at + part.shape[2]] = part
        at += part.shape[2]
    whole[:, :, seen:] = 0
    return whole


def _blocks(start: int, end: int, keys: int) -> tuple[slice, slice | None]:
    """Return the keys that all rows see, and those under the diagonal if there are any."""
    if start >= keys:
        return slice(0, keys), None
    return slice(0, start), slice(start, min(end, keys))
