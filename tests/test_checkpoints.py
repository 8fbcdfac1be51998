"""Distributed checkpoints: saved under one degree of context parallelism, loaded under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_cp import ContextParallel, init_device_mesh
from hp_mesh.testing import assert_close, ranks

from ._llama import (
    BALANCED,
    HYBRID,
    ULYSSES,
    alone,
    assert_whole,
    batch,
    llama,
    optimizer_of,
    rows_of,
    sharded_loss,
)


def _composed(dp: int, cp: int, mode: dict[str, Any]) -> tuple[Any, Any, Any]:
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp_shard", "cp"))
    model = llama()
    for layer in model.layers.values():
        ContextParallel(**mode).apply(layer.attention.sdpa_core, mesh["cp"])
        fully_shard(layer, mesh=mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp"))
    fully_shard(model, mesh=mesh["dp_shard", "cp"].flatten(mesh_dim_name="fsdp"))
    return mesh, model, optimizer_of(model)


def _step(mesh: Any, model: Any, optimizer: Any, step: int) -> Tensor:
    optimizer.zero_grad()
    loss = sharded_loss(model, rows_of(batch(step), mesh), mesh)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def _save(rank: int, folder: str, dp: int, cp: int, mode: dict[str, Any]) -> Any:
    mesh, model, optimizer = _composed(dp, cp, mode)
    for step in range(2):
        _step(mesh, model, optimizer, step)
    state = _state(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    return _whole(state)


def _load(rank: int, folder: str, dp: int, cp: int, mode: dict[str, Any], saved: Any) -> None:
    mesh, model, optimizer = _composed(dp, cp, mode)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    loaded = _whole(_state(model, optimizer))
    for part in ("model", "optimizer"):
        assert set(loaded[part]) == set(saved[part])
    for key, value in saved["model"].items():
        assert torch.equal(loaded["model"][key], value), key
    for key, moments in saved["optimizer"]["state"].items():
        for kind, value in moments.items():
            assert torch.equal(loaded["optimizer"]["state"][key][kind], value), (key, kind)
    loss = _step(mesh, model, optimizer, 2)
    assert_close(loss, alone().losses[2], kind="loss")
    assert_whole(dict(model.named_parameters()), alone().parameters)


def test_a_checkpoint_is_loaded_under_other_degrees(tmp_path: Path) -> None:
    """Weights and moments bit by bit; the third step is that of one process throughout."""
    alone()
    saved = ranks(4).run(_save, str(tmp_path), 2, 2, ULYSSES)[0]
    assert any(moments for moments in saved["optimizer"]["state"].values())

    ranks(4).run(_load, str(tmp_path), 1, 4, HYBRID, saved)
    ranks(2).run(_load, str(tmp_path), 1, 2, BALANCED, saved)
    ranks(2).run(_load, str(tmp_path), 2, 1, ULYSSES, saved)
