"""torch.func and forward-mode AD at a boundary: refused, because they end where data is sent."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hp_mesh._torch import is_transformed
from hp_mesh.checks import fail

__all__ = ["refuse_transforms"]


def refuse_transforms(where: str, tensors: Iterable[Tensor]) -> None:
    """Refuse tensors that a transform or a tangent hangs on.

    What is sent is data: a tangent would be lost without a word, and a batch dim that is hidden
    from us cannot be sent.

    Raises:
        ValueError: If there is such a tensor.
    """
    if any(is_transformed(x) for x in tensors):
        raise fail(
            where,
            "tensors must not be under a transform of torch.func (vmap, grad, jvp and so on), "
            "forward-mode AD or is_grads_batched=True, which end where data is sent to other ranks",
            "use backward() or torch.autograd.grad, one gradient at a time, and a batch dim of the "
            "tensor's own",
        )
