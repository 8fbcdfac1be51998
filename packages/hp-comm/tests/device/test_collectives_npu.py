"""The collectives over HCCL on two NPUs and more: moves bit for bit, sums within the tolerances.

Ranks are started once for the file, one a device, and run every check of `_device_ranks`; each test
reads off whether its check failed. Under ``torchrun --nproc-per-node=N -m pytest <this file>`` the
ranks are those of torchrun.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ._device_ranks import CHECKS, identifier, run_all, work

pytestmark = [pytest.mark.npu, pytest.mark.device]

CASES = [
    identifier(name, dtype, uneven)
    for name, (_, dtypes, has_uneven) in CHECKS.items()
    for dtype in dtypes
    for uneven in (False, True)[: 1 + has_uneven]
]
MOST = 8


def under_torchrun() -> dict[str, str]:
    """Run as one of the ranks that torchrun has started."""
    device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
    torch.npu.set_device(device)
    dist.init_process_group("hccl")
    try:
        return run_all(device)
    finally:
        dist.destroy_process_group()


def spawned(size: int, folder: Path, backend: str, kind: str) -> dict[str, str]:
    """Start ``size`` ranks, wait for them, and return what failed."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    args = (size, str(folder / "store"), backend, kind, results)
    ranks = [context.Process(target=work, args=(rank, *args)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * size, f"exit codes of the ranks: {codes}"
    failed: dict[str, str] = results.get()
    return failed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    importlib.import_module("torch_npu")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return under_torchrun()
    devices = torch.npu.device_count()
    if devices < 2:
        pytest.skip(f"{devices} NPU here; a collective of one rank sends nothing")
    return spawned(min(devices, MOST), tmp_path_factory.mktemp("ranks"), "hccl", "npu")


@pytest.mark.parametrize("case", CASES)
def test_on_every_rank(case: str, failed: dict[str, str]) -> None:
    """See the docstring of the check in `_device_ranks`."""
    assert case not in failed, failed[case]
