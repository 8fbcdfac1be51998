"""hp-dsa with its two dependencies alone: a mesh, and a style that says it is to come."""

from __future__ import annotations

import hp_dsa
from hp_mesh.testing import ranks


def mesh_size(rank: int) -> int:
    return hp_dsa.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)).size()


if __name__ == "__main__":
    assert ranks(2).run(mesh_size) == [2, 2]
    try:
        message = repr(hp_dsa.DSAIndexerContextParallel)
    except AttributeError as error:
        message = str(error)
    assert "not in this version" in message, message
