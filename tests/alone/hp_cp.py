"""hp-cp with its two dependencies alone: causal attention on two ranks equals one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_cp import ContextParallel, init_device_mesh
from hp_mesh.testing import ranks


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def difference(rank: int, ulysses_degree: int | None) -> float:
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    whole = [torch.randn(2, 4, 10, 6, **draw).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 4, 10, 6, **draw)
    expected = Core()(*whole)
    (expected * upstream).sum().backward()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=ulysses_degree)
    core = style.apply(Core(), mesh)
    local = [x.detach().chunk(2, dim=2)[rank].clone().requires_grad_() for x in whole]
    out = core(*local)
    (out * upstream.chunk(2, dim=2)[rank]).sum().backward()

    pairs = [(out, expected), *((x.grad, w.grad) for x, w in zip(local, whole, strict=True))]
    return max((a - b.chunk(2, dim=2)[rank]).abs().max().item() for a, b in pairs)


if __name__ == "__main__":
    for degree in (None, 1):
        errors = ranks(2).run(difference, degree)
        assert max(errors) < 1e-9, (degree, errors)
