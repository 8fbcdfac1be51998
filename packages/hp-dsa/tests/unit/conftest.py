from __future__ import annotations

import pytest

from hp_dsa.ops import tiles


@pytest.fixture(params=["reference", "tiled", "tiny tiles"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each implementation, and with tiles of a few rows and keys."""
    name = request.param.split()[-1].replace("tiles", "tiled")
    monkeypatch.setenv("HP_DSA", name)
    if request.param == "tiny tiles":
        monkeypatch.setitem(tiles.SIZES, "cpu", tiles.TileSize(elements=6, rows=3, gathered=90))
    return request.param
