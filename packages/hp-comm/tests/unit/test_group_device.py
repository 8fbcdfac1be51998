"""From which device a small buffer travels; groups of accelerators are stood in for here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_comm._torch import group_device


def _group(*types: str) -> Any:
    return SimpleNamespace(_device_types=[torch.device(kind) for kind in types])


@pytest.mark.parametrize("types", [(), ("cpu",), ("cpu", "cuda")], ids=str)
def test_the_cpu_is_taken_where_the_group_serves_it(types: tuple[str, ...]) -> None:
    """A group that does not say what it serves is taken for one of CPUs."""
    assert group_device(_group(*types)) == torch.device("cpu")


def test_a_group_of_devices_alone_sends_from_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not from the first: each rank has its own."""
    module = SimpleNamespace(current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {"cuda": module}[kind])

    assert group_device(_group("cuda")) == torch.device("cuda", 3)
