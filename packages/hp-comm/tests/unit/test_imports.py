from __future__ import annotations

import subprocess
import sys

import pytest

import hp_comm

BLOCKED = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; "


@pytest.mark.parametrize(
    "module",
    ["hp_comm", "hp_comm.kernels", "hp_comm.kernels.config", "hp_comm.kernels.catalog"],
)
def test_what_needs_no_torch_imports_without_it(module: str) -> None:
    """The tuner and its command line read launch configs on machines without torch."""
    subprocess.run([sys.executable, "-W", "error", "-c", BLOCKED + f"import {module}"], check=True)


def test_every_public_name_resolves_and_is_sorted() -> None:
    """__all__ promises nothing that is not there, also after submodules were imported."""
    assert hp_comm.__all__ == sorted(hp_comm.__all__)
    for name in hp_comm.__all__:
        assert callable(getattr(hp_comm, name)), name
    assert set(hp_comm.__all__) <= set(dir(hp_comm))


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A lazily resolved package still says what it does not have."""
    with pytest.raises(AttributeError, match="'hp_comm' has no attribute 'seq_to_heads'"):
        hp_comm.seq_to_heads  # noqa: B018


def test_the_package_imports_no_vendor_and_nothing_above_it() -> None:
    """Importing everything that it has loads neither triton nor torch_npu nor a package above."""
    code = (
        "import sys, hp_comm; [getattr(hp_comm, n) for n in hp_comm.__all__]; "
        "import hp_comm.kernels.ops; "
        "bad = {'triton', 'torch_npu', 'hp_cp', 'hp_dsa', 'hp_tune'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
