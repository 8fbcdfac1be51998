from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from hp_comm.kernels import catalog
from hp_comm.kernels.catalog import Case
from hp_comm.kernels.config import default_launch
from hp_comm.kernels.fitting import fitting
from hp_comm.kernels.limits import UB_BYTES, predict_ub_bytes
from hp_comm.kernels.plans import Launch

TUNED = {"tile": 32768, "programs": 40, "multibuffer": 1}


def planned(
    kernel: str, case: Case, launch: Mapping[str, int], device: str = "ascend910b3"
) -> tuple[Launch, ...]:
    return fitting(kernel, device, 2, launch, lambda one: catalog.launches(kernel, case, one))


def numbers(launches: tuple[Launch, ...]) -> list[dict[str, float]]:
    return [dict(one.numbers) for one in launches]


def test_a_tile_that_fits_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """What was tuned for a layout runs as it was tuned, and nothing is said."""
    case = Case("", 1, 8192, (32, 8, 8), 128, 8)
    with caplog.at_level("INFO", "hp_comm.kernels"):
        found = planned("pack", case, TUNED)

    assert numbers(found) == numbers(tuple(catalog.launches("pack", case, TUNED)))
    assert not caplog.records


def test_a_tile_that_does_not_fit_another_layout_is_made_smaller_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Places that are summed need fp32 tiles: the largest that fits is taken, and said."""
    case = Case("gradient of MQA", 1, 8192, (32, 1, 1), 128, 8)
    with caplog.at_level("INFO", "hp_comm.kernels"):
        found = planned("unpack", case, TUNED)

    assert all(predict_ub_bytes("unpack", 2, one.numbers) <= UB_BYTES for one in found)
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("unpack: a tile of 32768 does not fit this layout on ascend910b3; ")
    used = int(line.split("; ")[1].split()[0])
    larger = catalog.launches("unpack", case, {**TUNED, "tile": 2 * used})
    assert any(predict_ub_bytes("unpack", 2, one.numbers) > UB_BYTES for one in larger)
    assert all(one.options == {"multibuffer": 1} for one in found)


def test_another_device_takes_what_it_is_given() -> None:
    """Registers that do not suffice are spilled: slow, and no error."""
    case = Case("gradient of MQA", 1, 8192, (32, 1, 1), 128, 8)
    launch = {"tile": 65536, "num_warps": 8}

    found = planned("unpack", case, launch, "cuda-sm90")
    assert numbers(found) == numbers(tuple(catalog.launches("unpack", case, launch)))


def test_every_case_of_the_catalogue_fits_with_its_largest_and_its_default_tile() -> None:
    """Whatever a file says, no layout reaches the compiler with more than there is."""
    sizes = ({**TUNED, "tile": 2**17}, default_launch("ascend"))
    for (kernel, case), launch in product(catalog.cases(quick=False), sizes):
        for one in planned(kernel, case, launch):
            assert predict_ub_bytes(kernel, 2, one.numbers) <= UB_BYTES, (kernel, case.name)
