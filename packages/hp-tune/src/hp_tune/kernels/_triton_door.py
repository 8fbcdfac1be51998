"""The one door of the tuner to triton, imported inside functions only.

Two tritons answer to that name, and only one of them can be installed: PyPI's (3.7) and
triton-ascend (3.2). Where their interfaces differ, the difference is here: 3.2 takes what is
constant by name and beside the signature, 3.7 by position and inside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

__all__ = ["ascend_linalg", "cuda_kernel", "cuda_tools", "failures", "kernel_function", "version"]

_FRONT_END = threading.Lock()  # only the programs that are called may run side by side

Constants = Mapping[str, int | bool | float]
ALIGNMENT = 16
"""What a launch looks for: addresses in bytes and numbers that this divides."""


def version() -> str:
    """Return the version that triton says it has."""
    return str(importlib.import_module("triton").__version__)


def kernel_function(name: str) -> Any:
    """Return the jit function of that name among our kernels."""
    return getattr(importlib.import_module("hp_comm.kernels._triton"), name)


def failures() -> tuple[type[Exception], ...]:
    """Return what triton raises for a kernel that it cannot compile."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    return (CompilationError, OutOfResources, RuntimeError)


def _source(
    function: Any, signature: Mapping[str, str], constants: Constants, aligned: Collection[str] = ()
) -> Any:
    from triton.compiler import ASTSource

    place = {name: i for i, name in enumerate(function.arg_names)}
    if "constexprs" not in inspect.signature(ASTSource).parameters:
        return ASTSource(fn=function, signature=dict(signature), constants=dict(constants))
    return ASTSource(
        fn=function,
        signature={name: signature.get(name, "constexpr") for name in function.arg_names},
        constexprs={(place[name],): value for name, value in constants.items()},
        attrs={(place[name],): [["tt.divisibility", ALIGNMENT]] for name in aligned},
    )


def ascend_linalg(
    function: Any, signature: Mapping[str, str], constants: Constants
) -> tuple[str, str]:
    """Lower a kernel with triton-ascend; return its linalg, or "" and the compiler's complaint."""
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget

    # linalg is the same for every Ascend target; the next compiler is told which one
    target = GPUTarget("npu", "Ascend910B3", 0)
    backend = AscendBackend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"target": target, **options.__dict__}
    with _FRONT_END:
        source = _source(function, signature, constants)
        module = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        ttir = make_ttir(module, metadata, options)
    try:
        return str(ttir_to_linalg(ttir, metadata, options, named_ops=True)), ""
    except CalledProcessError as error:
        return "", error.stderr.decode(errors="replace")


def cuda_kernel(
    function: Any,
    signature: Mapping[str, str],
    constants: Constants,
    *,
    aligned: Collection[str],
    capability: int,
    num_warps: int,
    num_stages: int,
) -> Any:
    """Compile a kernel with PyPI's triton, no device asked; return triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(function, signature, constants, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def cuda_tools() -> Path | None:
    """Return the folder of ``ptxas`` and ``cuobjdump`` in PyPI's triton, None where it is not."""
    try:
        found = importlib.util.find_spec("triton.backends.nvidia")
    except ModuleNotFoundError:  # no triton at all
        return None
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "bin"
