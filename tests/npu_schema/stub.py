"""Build stand-ins for the libraries that torch_npu links to, so that it imports without CANN.

Nothing of the vendor is in them. The names come from the installed wheel: symbols that its own
libraries leave undefined, and names that they look up while they run. Every function answers 0,
"success", except those that hand something back: one Ascend910B3, streams and events that are never
used, and no memory at all, so that a tensor with real NPU storage is an error and no garbage.

What this gives: all operators of ``torch.ops.npu`` with their schemas, autograd, and the kernels
for fake tensors. What it cannot give: any number.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["StubError", "build", "generate", "installed", "symbols"]

LIBRARIES = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
"""What the wheel asks the loader for; each is a copy of the one library that is built."""

LINKED = ("_C*.so", "lib/libtorch_npu.so", "lib/libnpu_profiler.so", "lib/libtensorpipe.so")
"""What of the wheel is loaded by ``import torch_npu``."""

_UNDEFINED = re.compile(r"(acl|Hccl|Msprof|ge[A-Z]|rt[A-Z])\w+")
_LOOKED_UP = re.compile(rb"\0(acl(?:rt|mdl|op|Get|Set|Create|Destroy)[A-Z]\w{2,60})(?=\0)")

_HANDLE = "long {name}(void **out) {{ *out = cell; return 0; }}"
_ANSWERS = {
    "aclrtGetDeviceCount": "long {name}(unsigned *out) {{ *out = 1; return 0; }}",
    "aclrtGetDevice": "long {name}(int *out) {{ *out = 0; return 0; }}",
    "aclrtGetSocName": 'const char *{name}(void) {{ return "Ascend910B3"; }}',
    "aclGetCompileoptSize": "unsigned long {name}(void) {{ return sizeof(cell); }}",
    # the runtime's code for "out of memory"
    "aclrtMalloc": "long {name}(void **out) {{ *out = 0; return 207001; }}",
    "aclrtMallocAlign32": "long {name}(void **out) {{ *out = 0; return 207001; }}",
    "aclrtGetMemInfo": (
        "long {name}(int kind, unsigned long *free, unsigned long *total)"
        " {{ *free = *total = 1ul << 30; return 0; }}"
    ),
    **dict.fromkeys(
        (
            "aclrtCreateEventExWithFlag",
            "aclrtCreateEventWithFlag",
            "aclrtCreateStream",
            "aclrtCreateStreamWithConfig",
            "aclrtGetCurrentContext",
            "aclrtMallocHost",
        ),
        _HANDLE,
    ),
}


class StubError(RuntimeError):
    """The stub cannot be built here; the message says what is missing."""


def installed() -> tuple[Path, str]:
    """Return the folder and the version of the installed torch_npu, without importing it."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise StubError(
            "torch_npu must be installed in this environment; nox -s npu_schema makes one of its "
            "own (next to a torch that is to work without it, it breaks `import torch`)"
        )
    return Path(spec.origin).parent, importlib.metadata.version("torch_npu")


def symbols(package: Path) -> list[str]:
    """Return the functions that the wheel expects from elsewhere, sorted."""
    libraries = [path for pattern in LINKED for path in sorted(package.glob(pattern))]
    if len(libraries) < len(LINKED):
        raise StubError(f"{package} must hold {', '.join(LINKED)}, not only {libraries}")
    nm = _tool("nm", "binutils")
    found: set[str] = set()
    for library in libraries:
        command = [nm, "-D", "--undefined-only", str(library)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = (line.split()[-1] for line in listing.splitlines() if line)
        found |= {name for name in names if _UNDEFINED.fullmatch(name)}
    # "Failed to find function": these are asked for by name, when they are first needed
    text = (package / "lib" / "libtorch_npu.so").read_bytes()
    return sorted(found | {name.decode() for name in _LOOKED_UP.findall(text)})


def generate(names: Iterable[str]) -> str:
    """Return the C source of a library with these functions."""
    lines = ["static char cell[4096];"]
    for name in names:
        body = _ANSWERS.get(name, "long {name}(void) {{ return 0; }}")
        lines.append(body.format(name=name))
    return "\n".join(lines) + "\n"


def build(cache: Path | None = None) -> Path:
    """Return the folder with the stand-ins for the installed wheel; built once per version.

    Args:
        cache: Where to keep them. Default: ``hyper-parallel`` in the user's cache folder.
    """
    package, version = installed()
    source = generate(symbols(package))
    if cache is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = Path(home) / "hyper-parallel"
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    target = cache / f"npu-stub-{version}-{digest}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=target.name, dir=cache))
    (made / "stub.c").write_text(source)
    first = made / f"lib{LIBRARIES[0]}.so"
    gcc = _tool("gcc", "gcc")
    command = [gcc, "-shared", "-fPIC", "-w", "-o", str(first), str(made / "stub.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(made)
        raise StubError(f"gcc must compile the stub, but said:\n{done.stderr}")
    for name in LIBRARIES[1:]:
        shutil.copy(first, made / f"lib{name}.so")
    try:
        made.rename(target)  # whole or not at all: another session may build the same
    except OSError:
        shutil.rmtree(made)
    return target


def _tool(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise StubError(f"{name} must be on PATH to build the stub; install {package}")
    return path
