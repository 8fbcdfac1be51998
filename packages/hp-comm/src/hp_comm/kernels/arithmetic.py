"""The kernels that compute, in plain torch: the definition, and the path on a CPU.

What stands between projection and attention in most models, the norm of each head (QK-norm) and
the rotary embedding, is done while heads are packed; and two partial attentions are merged.

Everything runs in fp32 (fp64 for fp64) and is rounded once, into the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hp_comm.kernels.reference import pack, unpack
from hp_mesh.checks import require

__all__ = [
    "HeadWork",
    "merge",
    "merge_backward",
    "pack_heads",
    "prepare",
    "prepare_backward",
    "unpack_heads",
]


@dataclass(frozen=True, slots=True, eq=False)
class HeadWork:
    """What is done to the heads of one tensor while they are packed; None leaves it out.

    Attributes:
        weight: ``[D]``: each head is divided by the root of its mean square and multiplied with
            it. For a weight that is stored minus one, pass ``1 + weight``.
        eps: Added to the mean square.
        cos: Cosines of the rotary angles, ``[1 or B, S, 1, R / 2]`` in the tensor's layout (one
            position, or none, where the tensor has heads). The first ``R <= D`` numbers of a head
            are rotated.
        sin: Their sines, of the same shape.
        interleaved: Whether numbers ``2 i`` and ``2 i + 1`` form pair ``i`` (GPT-J, GLM), not ``i``
            and ``i + R / 2`` (NeoX, Llama).
    """

    weight: Tensor | None = None
    eps: float = 1e-6
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        where = "HeadWork"
        for name in ("weight", "cos", "sin"):
            x = getattr(self, name)
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{where}: {name} ({type(x).__name__}) must be a tensor or None")
            require(
                x is None or x.is_floating_point(),
                where,
                f"{name} ({None if x is None else x.dtype}) must be of a real floating dtype",
                "of complex angles, pass their real and imaginary parts as cos and sin"
                if name != "weight"
                else "",
            )
        require(
            isinstance(self.eps, (int, float)) and self.eps >= 0,
            where,
            f"eps ({self.eps!r}) must be a number of at least 0",
        )
        require(
            self.weight is None or self.weight.ndim == 1,
            where,
            f"weight {None if self.weight is None else tuple(self.weight.shape)} must be [D], one "
            "number for each of a head's",
        )
        require((self.cos is None) == (self.sin is None), where, "cos and sin must come together")
        if self.cos is not None and self.sin is not None:
            require(
                self.cos.shape == self.sin.shape,
                where,
                f"cos {tuple(self.cos.shape)} must be of the shape of sin {tuple(self.sin.shape)}",
            )

    def again(self, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> HeadWork:
        """Return the same work with tensors that say the same, which need not be checked again."""
        work = object.__new__(HeadWork)
        given = (weight, self.eps, cos, sin, self.interleaved)
        for field, value in zip(fields(HeadWork), given, strict=True):
            object.__setattr__(work, field.name, value)
        return work

    @property
    def rotary(self) -> int:
        """Numbers of a head that are rotated."""
        return 0 if self.cos is None else 2 * self.cos.shape[-1]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _pairs(x: Tensor, work: HeadWork) -> tuple[Tensor, Tensor, Tensor]:
    """Return both numbers of every pair, and the numbers that are not rotated."""
    rotated, rest = x[..., : work.rotary], x[..., work.rotary :]
    if work.interleaved:
        return rotated[..., 0::2], rotated[..., 1::2], rest
    first, second = rotated.chunk(2, -1) if work.rotary else (rotated, rotated)
    return first, second, rest


def _joined(first: Tensor, second: Tensor, rest: Tensor, work: HeadWork) -> Tensor:
    if not work.rotary:
        return rest
    if work.interleaved:
        return torch.cat([torch.stack([first, second], -1).flatten(-2), rest], -1)
    return torch.cat([first, second, rest], -1)


def _turned(x: Tensor, work: HeadWork, sign: int) -> Tensor:
    """Rotate every pair by its angle, or back."""
    if work.cos is None or work.sin is None:
        return x
    a, b, rest = _pairs(x, work)
    cos, sin = work.cos.to(x.dtype), sign * work.sin.to(x.dtype)
    return _joined(a * cos - b * sin, b * cos + a * sin, rest, work)


def prepare(x: Tensor, work: HeadWork) -> Tensor:
    """Normalise heads by their root mean square and rotate them by their position.

    Args:
        x: ``[.., D]``, heads in its last dim.
        work: What to do; Zhang and Sennrich 2019 (RMS norm), Su et al. 2021 (rotary).

    Returns:
        A tensor like ``x``.
    """
    y = x.to(_wide(x))
    if work.weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + work.eps) * work.weight.to(y.dtype)
    return _turned(y, work, 1).to(x.dtype)


def prepare_backward(
    grad: Tensor, x: Tensor | None, work: HeadWork
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `prepare`: of ``x``, and of the weight in fp32 (fp64), or None.

    Args:
        grad: Gradient of the result.
        x: What was prepared; only read with a weight.
        work: As in `prepare`; ``cos`` and ``sin`` get no gradient.
    """
    g = _turned(grad.to(_wide(grad)), work, -1)
    if work.weight is None:
        return g.to(grad.dtype), None
    assert x is not None, "a norm needs its input"
    y = x.to(g.dtype)
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + work.eps)
    normal = y * scale
    weight_grad = (g * normal).flatten(0, -2).sum(0)
    g = g * work.weight.to(g.dtype)
    # what goes along x is what the norm takes out
    g = scale * (g - normal * (g * normal).mean(-1, keepdim=True))
    return g.to(grad.dtype), weight_grad


def pack_heads(
    xs: list[Tensor],
    works: Sequence[HeadWork | None],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
    seq_dim: int = 0,
) -> Tensor:
    """Do ``works`` to the heads of each tensor and `pack` them; ``seq_dim`` is the rows' dim."""
    ready = [x if work is None else prepare(x, work) for x, work in zip(xs, works, strict=True)]
    return pack(ready, dims, counts, index, joined)


def unpack_heads(
    buffer: Tensor,
    xs: Sequence[Tensor | None],
    works: Sequence[HeadWork | None],
    shapes: list[list[int]],
    dims: list[int],
    counts: list[int],
    index: list[int],
    joined: Sequence[int] = (),
    seq_dim: int = 0,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the gradients of `pack_heads`: of each tensor, and of each weight.

    Args:
        buffer: Gradient of the buffer.
        xs: What was packed; None where there is no norm.
        works: As in `pack_heads`.
        shapes: Shape of each tensor.
        dims: As in `pack`, like the rest.
        counts: As in `pack`.
        index: As in `pack`.
        joined: As in `pack`.
        seq_dim: As in `pack_heads`.
    """
    grads = unpack(buffer, shapes, dims, counts, index, joined)
    pairs = [
        (grad, None) if work is None else prepare_backward(grad, x, work)
        for grad, x, work in zip(grads, xs, works, strict=True)
    ]
    return [grad for grad, _ in pairs], [weight for _, weight in pairs]


def _shares(lse1: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    joint = torch.logaddexp(lse1, lse2)
    none = joint == -torch.inf  # no key in either part: nothing to share, and no NaN
    return (
        torch.where(none, 0.0, torch.exp(lse1 - joint)).unsqueeze(-1),
        torch.where(none, 0.0, torch.exp(lse2 - joint)).unsqueeze(-1),
        joint,
    )


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attentions over different keys into that over all of them.

    Args:
        out1: ``[.., D]``, the first part's output.
        lse1: ``[..]``, natural logarithm of its sum of exponentials, -inf for a row without keys.
        out2: Like ``out1``.
        lse2: Like ``lse1``.

    Returns:
        Output and log-sum-exp; Dao et al. 2022, appendix B.
    """
    wide = _wide(out1)
    share1, share2, lse = _shares(lse1.to(wide), lse2.to(wide))
    out = out1.to(wide) * share1 + out2.to(wide) * share2
    return out.to(out1.dtype), lse.to(lse1.dtype)


def merge_backward(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, grad: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `merge`, in the order of its arguments."""
    wide = _wide(out1)
    share1, share2, _ = _shares(lse1.to(wide), lse2.to(wide))
    g, g_lse = grad.to(wide), grad_lse.to(wide)
    between = (g * (out1.to(wide) - out2.to(wide))).sum(-1)
    moved = (share1 * share2).squeeze(-1) * between
    return (
        (g * share1).to(out1.dtype),
        (share1.squeeze(-1) * g_lse + moved).to(lse1.dtype),
        (g * share2).to(out2.dtype),
        (share2.squeeze(-1) * g_lse - moved).to(lse2.dtype),
    )
