"""What the indexer's loss is divided by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_dsa import normalize_loss


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (None, r"total \(None\) must be a number of tokens"),
        ("9", r"total \('9'\) must be a number of tokens"),
        (-1, r"total \(-1\) must be at least 0"),
        (torch.tensor(-2), r"total \(-2\) must be at least 0"),
        (float("nan"), r"total \(nan\) must be at least 0"),
        (torch.tensor(float("nan")), r"total \(nan\) must be at least 0"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused(total: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalize_loss(torch.ones(1), total)


def test_no_token_at_all_is_a_loss_of_zero_without_gradient() -> None:
    loss = torch.full((1,), 3.0, requires_grad=True)

    mean = normalize_loss(loss, 0)
    mean.sum().backward()

    assert mean.item() == 0.0
    assert loss.grad is not None and loss.grad.item() == 0.0
