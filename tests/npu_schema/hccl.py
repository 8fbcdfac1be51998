"""What HCCL takes, read from the header that the wheel ships and from its library's symbols."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Set
from pathlib import Path

__all__ = ["METHODS", "dtypes", "methods", "reductions"]

METHODS = {
    "c10d::_allgather_base_": ("AllGather", "_allgather_base"),
    "c10d::_reduce_scatter_base_": ("ReduceScatter", "_reduce_scatter_base"),
    "c10d::allreduce_": ("AllReduce", "allreduce"),
    "c10d::alltoall_base_": ("AlltoAllV", "alltoall_base"),
    "c10d::recv_": ("Recv", "recv"),
    "c10d::send": ("Send", "send"),
}
"""HCCL's function and the process group's method, by torch's operator."""

# the header's text is behind here: torch_npu's own check in front of the call lists int64, too
_ALSO = {"AllReduce": {"int64"}}
_FUNCTION = re.compile(r"/\*\*((?:(?!\*/).)*)\*/\s*extern HcclResult Hccl(\w+)\(", re.DOTALL)
_TYPES = re.compile(r"must be one of the following types: ([\w,\s]+?)\.")


def dtypes(package: Path) -> Mapping[str, Set[str]]:
    """Return the dtypes that each function's documentation names, by the function's name."""
    header = package / "include/third_party/hccl/inc/hccl/hccl.h"
    found: dict[str, set[str]] = {}
    for comment, name in _FUNCTION.findall(header.read_text(errors="replace")):
        lists = [re.findall(r"\w+", text) for text in _TYPES.findall(comment)]
        types = [set(names) for names in lists if "float16" in names]
        if types:
            found[name] = set.intersection(*types) | _ALSO.get(name, set())
    return found


def reductions(package: Path) -> Set[str]:
    """Return the names of HCCL's reductions, as torch spells them."""
    header = package / "include/third_party/hccl/inc/hccl/hccl_types.h"
    names = set(re.findall(r"HCCL_REDUCE_(\w+)\s*=", header.read_text(errors="replace")))
    return {"PRODUCT" if name == "PROD" else name for name in names - {"RESERVED"}}


def methods(package: Path) -> Set[str]:
    """Return what ``ProcessGroupHCCL`` implements itself, read from the library's symbols."""
    command = ["nm", "-DC", "--defined-only", str(package / "lib/libtorch_npu.so")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" c10d_npu::ProcessGroupHCCL::(\w+)\(", listing))
