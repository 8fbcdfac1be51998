"""What every test of the repository shares: threads, randomness, devices that must be there."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

# ranks share the cores; set before torch is imported, so that a bare `pytest` behaves as nox does
os.environ.setdefault("OMP_NUM_THREADS", "1")
# what is printed is as wide as where nobody looks; a shell may export this, and pytest-xdist does
os.environ.pop("COLUMNS", None)


def _npu_here() -> bool:
    return bool(list(Path("/dev").glob("davinci[0-9]*"))) or shutil.which("npu-smi") is not None


def _accelerator_here() -> bool:
    return _npu_here() or Path("/dev/nvidiactl").exists()


@pytest.fixture(autouse=True)
def _own_randomness() -> None:
    """What a test draws does not follow from which tests have run before it in this process."""
    if "torch" in sys.modules:  # some tests need none
        sys.modules["torch"].default_generator.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {
        "npu": (_npu_here(), "no Ascend device here"),
        "device": (_accelerator_here(), "no accelerator here"),
    }
    for item in items:
        for marker, (here, reason) in needs.items():
            if item.get_closest_marker(marker) and not here:
                item.add_marker(pytest.mark.skip(reason=reason))
