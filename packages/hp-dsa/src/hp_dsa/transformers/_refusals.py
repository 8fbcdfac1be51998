"""What a call of a prepared model can't mean: refused by name, before any data moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from hp_comm.model_call import asks_for_attentions, check_logits_to_keep, read_cu_seq_lens
from hp_mesh.checks import require, require_type

if TYPE_CHECKING:
    from hp_dsa.transformers.call import ModelCall

__all__ = ["check_call", "check_labels", "check_positions", "read_ends"]


def check_call(model: PreTrainedModel, named: dict[str, Any], cp_size: int, where: str) -> None:
    """Refuse what the operators, or a shard, can't do."""
    _check_cache(named, where)
    _check_mask(named.get("attention_mask"), where)
    require(
        not asks_for_attentions(model.config, named),
        where,
        "output_attentions (True) must be False: no attention weights of all keys exist",
        "pass output_attentions=False",
    )
    dropout = model.config.attention_dropout
    require(
        dropout == 0 or not model.training,
        where,
        f"attention_dropout ({dropout}) must be 0: the operators have none",
        "set model.config.attention_dropout = 0 before prepare_model",
    )
    if cp_size == 1:
        return
    check_logits_to_keep(named, where)
    kind = (model.config.rope_parameters or {}).get("rope_type", "default")
    require(
        kind != "longrope" and "dynamic" not in kind,
        where,
        f"rope_type ({kind!r}) must be one whose frequencies do not depend on the largest "
        "position, which every rank sees differently",
        'use a static rope_type ("default", "yarn", "linear", "llama3")',
    )


def _check_cache(named: dict[str, Any], where: str) -> None:
    for name in ("cache", "past_key_values"):
        require(
            named.get(name) is None,
            where,
            f"{name} (a KV cache) must be None: prepared models are for training and prefill",
            "decode with restore_model(model)",
        )
    require(
        not named.get("use_cache"),
        where,
        "use_cache (True) must be False: prepared models are for training and prefill",
        "generate with restore_model(model)",
    )


def _check_mask(mask: Any, where: str) -> None:
    if mask is None:
        return
    shown = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    require(
        isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all()),
        where,
        f"attention_mask ({shown}) must be None, or 2-D and all ones: the operators know causality "
        "and documents only",
        "pad at the end, where no real token sees the padding, and ignore its labels; or pack "
        'documents with layout="TND" and cu_seq_lens_q',
    )


def read_ends(named: dict[str, Any], batch: int, global_length: int, where: str) -> list[int]:
    """Return the cumulative ends of packed documents, which ``cu_seq_lens_q`` holds after a 0."""
    require(
        batch == 1,
        where,
        f'the batch ({batch}) must be 1 with layout="TND": all documents are in one row',
        "concatenate the rows, and say where they end with cu_seq_lens_q",
    )
    bounds = read_cu_seq_lens(named, batch, global_length, where)
    return [global_length] if bounds is None else list(bounds[1:])


def check_labels(named: dict[str, Any], call: ModelCall, where: str) -> None:
    """Refuse labels that can't be shifted: the next label of a shard's last token is elsewhere."""
    if call.cp_size == 1 or named.get("labels") is None:
        return
    shifted, whole = named.get("shift_labels"), call.global_length
    allowed = [whole] if shifted is None else [whole // call.cp_size, whole]
    name, given = ("labels", named["labels"]) if shifted is None else ("shift_labels", shifted)
    require_type(where, name, given, Tensor, "a tensor")
    require(
        given.ndim == 2 and given.shape[1] in allowed,
        where,
        f"{name} (shape {tuple(given.shape)}) must be [B, {' or '.join(map(str, allowed))}]",
        "pass the labels of the whole sequence, or shift_labels=hp_mesh.next_token_labels(...) cut "
        "as the tokens are",
    )


def check_positions(given: Tensor, expected: Tensor, where: str) -> None:
    """Refuse positions that are not those of this rank's tokens; waits for the device."""
    local = expected.shape[-1]
    require(
        given.ndim == 2 and given.shape[1] == local and bool((given == expected).all()),
        where,
        f"position_ids (shape {tuple(given.shape)}) must be those of this rank's {local} tokens, "
        f"{_ends_of(expected[0])}, but are {_ends_of(given.reshape(-1))}",
        "leave position_ids out; documents that begin anew are said with cu_seq_lens_q",
    )


def _ends_of(positions: Tensor) -> str:
    shown = positions.tolist()
    if len(shown) > 6:
        return f"[{', '.join(map(str, shown[:3]))}, ..., {shown[-1]}]"
    return str(shown)
