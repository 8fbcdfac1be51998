"""`parallelize_module`: torch's, where a plan that does not fit is an error.

A plan key is a path whose tokens are matched one by one with the names of child modules, so ``*``
stands for one name and never for a dot: ``layers.*.attention`` reaches ``layers.3.attention`` and
not ``mtp.attention`` or ``layers.3.inner.attention``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module

from hp_mesh._torch import current_mesh
from hp_mesh.checks import fail, nearest

__all__ = ["matching_modules", "parallelize_module"]

WHERE = "parallelize_module"


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply styles to ``module`` or to the sub-modules that a plan names, if all of it fits.

    Args:
        module: The model.
        device_mesh: 1-D mesh; 2-D ``("co", "ds")`` too for styles with ``accepts_2d_mesh = True``,
            as `ContextParallel` has. Default: the mesh of the ``with mesh:`` block.
        parallelize_plan: A style for ``module`` itself, or styles by path: one ``fnmatch`` pattern
            per name (``"layers.*.attention.sdpa_core"``), ``""`` for ``module`` itself.
        src_data_rank: As in torch: whose data a style that distributes parameters takes.

    Returns:
        ``module``.

    Raises:
        ValueError: A key matches no module, or a style does not take this mesh. Nothing is applied.
        TypeError: The plan is neither a style nor a mapping of styles.
        RuntimeError: No mesh is given and none is active.
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    if parallelize_plan is None or isinstance(parallelize_plan, ParallelStyle):
        if parallelize_plan is not None:
            _check_mesh(parallelize_plan, mesh)
        return torch_parallelize_module(module, mesh, parallelize_plan, src_data_rank=src_data_rank)
    if not isinstance(parallelize_plan, Mapping):
        raise TypeError(
            f"{WHERE}: parallelize_plan ({type(parallelize_plan).__name__}) must be a "
            "ParallelStyle or a dict of them by module path"
        )
    targets = []
    for key, style in parallelize_plan.items():
        if not isinstance(style, ParallelStyle):
            given = f"class {style.__name__}" if isinstance(style, type) else repr(style)
            raise TypeError(
                f"{WHERE}: parallelize_plan[{key!r}] ({given}) must be a ParallelStyle object"
                + (f"; use {style.__name__}(...)" if isinstance(style, type) else "")
            )
        _check_mesh(style, mesh)
        found = matching_modules(module, key)
        if not found:
            raise _no_match(module, key)
        targets += [(target, style) for target in found.values()]
    for target, style in targets:
        torch_parallelize_module(target, mesh, style, src_data_rank=src_data_rank)
    return module


def matching_modules(module: nn.Module, key: str) -> dict[str, nn.Module]:
    """Return the sub-modules that a plan key names, by path; a shared module once."""
    if not key:
        return {"": module}
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for path, target in _walk(module, key.split("."), ""):
        if id(target) not in seen:
            seen.add(id(target))
            found[path] = target
    return found


def _walk(module: nn.Module, tokens: list[str], path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if fnmatchcase(name, tokens[0]):
            here = f"{path}.{name}" if path else name
            if len(tokens) == 1:
                yield here, child
            else:
                yield from _walk(child, tokens[1:], here)


def _check_mesh(style: ParallelStyle, mesh: DeviceMesh) -> None:
    if mesh.ndim == 1 or (mesh.ndim == 2 and getattr(style, "accepts_2d_mesh", False)):
        return
    names = mesh.mesh_dim_names
    takes = "1-D, or 2-D" if getattr(style, "accepts_2d_mesh", False) else "1-D"
    raise fail(
        WHERE,
        f"device_mesh {names or tuple(mesh.shape)} must be {takes} for {type(style).__name__}",
        f"pass one axis of it, such as mesh[{names[-1]!r}]"
        if names
        else "name the axes and pass one of them",
    )


def _no_match(module: nn.Module, key: str) -> ValueError:
    """Say which module comes closest; numbered siblings are shown as ``*`` if the key has one."""
    paths = [path for path, _ in module.named_modules() if path]
    if "*" in key:
        paths = [".".join("*" if p.isdigit() else p for p in path.split(".")) for path in paths]
    close = nearest(key, dict.fromkeys(paths))
    return fail(
        WHERE,
        f"plan key {key!r} must match a sub-module of {type(module).__name__}, and matches none",
        f"did you mean {close!r}?" if close else "list them with model.named_modules()",
    )
