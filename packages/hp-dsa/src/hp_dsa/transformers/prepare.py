"""`prepare_model`: a model of transformers whose attention runs through the DSA operators."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from hp_dsa import cores
from hp_dsa.plan import make_plan
from hp_dsa.transformers import attention
from hp_dsa.transformers._source import check_source as check_source_of
from hp_dsa.transformers._styles import apply_styles, remove_styles
from hp_dsa.transformers.call import DIVISOR, enter_model, leave_model
from hp_dsa.transformers.loss import GlobalCausalLoss
from hp_mesh.checks import require, require_positive
from hp_mesh.handoff import Handoff

__all__ = ["prepare_model", "restore_model"]

_WHERE = "prepare_model"
_HANDLES = "_hp_dsa_handles"
_CHILDREN = (
    "latent_ready",
    "key_rope_ready",
    "key_index_ready",
    "select_keys",
    "sparse_attention",
    "indexer_loss",
)

Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass(frozen=True)
class _Family:
    """One model family: its module, and which class becomes which."""

    prefix: str
    module: ModuleType
    attention: type[nn.Module]
    absorbed: type[nn.Module]
    indexer: type[nn.Module]
    inputs: type[nn.Module]


_FAMILIES = (
    _Family(
        "DeepseekV32",
        deepseek,
        deepseek.DeepseekV32Attention,
        attention.DeepseekV32AbsorbedAttention,
        deepseek.DeepseekV32Indexer,
        attention.DeepseekV32IndexInputs,
    ),
    _Family(
        "GlmMoeDsa",
        glm,
        glm.GlmMoeDsaAttention,
        attention.GlmMoeDsaAbsorbedAttention,
        glm.GlmMoeDsaIndexer,
        attention.GlmMoeDsaIndexInputs,
    ),
)


def prepare_model(
    model: Model,
    mesh: DeviceMesh | None = None,
    *,
    indexer_loss: str | None = "sparse",
    layout: str = "BSND",
    load_balance: bool = False,
    overlap: bool = False,
    keep_keys: bool = True,
    gradient_divisor: int | None = None,
    check_source: bool = True,
) -> Model:
    """Let the attention of ``model`` run through the DSA operators, in place.

    Each attention layer computes in the absorbed form through three modules, ``select_keys``,
    ``sparse_attention`` and ``indexer_loss``, on which the DSA styles are applied if there is a
    mesh. The model's code, parameters and state dict stay as they are, and so do its outputs, but
    for ties: with few index heads and many scores of 0, transformers' ``torch.topk`` may choose
    other keys than ours (score descending, index ascending). `restore_model` undoes it.

    A call of the model on a rank's shard of the tokens

    - gets the positions of the rank's tokens, and no mask: a call sends, for each layer, one
      all-gather of latent and rotary part and one of the index key, and the scalar of the loss;
    - returns with ``labels`` of the whole sequence, or ``shift_labels`` of the shard, the loss of
      the whole sequence, whose gradients are to be averaged over the ranks as FSDP and DDP do (see
      ``gradient_divisor``);
    - leaves the indexers' loss for `indexer_loss`;
    - refuses a KV cache (so generation), padding masks, ``output_attentions`` and
      ``logits_to_keep``.

    Args:
        model: A DeepSeek-V3.2 or GLM-MoE-DSA model, with or without its causal LM head.
        mesh: The context-parallel mesh; one of several axes is flattened. None: one device.
        indexer_loss: ``"sparse"``, over the selected keys. ``"dense"``, over all keys: attention is
            then dense as well, the warm-up of an indexer. None: no loss.
        layout: ``"BSND"``, or ``"TND"`` for packed documents: a batch of one row, whose documents
            the call gives as ``cu_seq_lens_q``, positions ``[0, ..., S]`` in the whole sequence.
        load_balance: The data lies in head-tail order, as ``shard_sequence(order="head_tail")``
            cuts it; the indexers' work is then the same on all ranks.
        overlap: Start each gather as soon as its key exists, behind which queries are computed.
        keep_keys: Whether gathered keys are kept for backward, or gathered again.
        gradient_divisor: By how much the reduction of gradients divides their sum over the ranks.
            Default: the number of ranks of ``mesh``; 1 if you sum gradients yourself.
        check_source: Refuse a transformers whose code of these layers differs from the tested one.

    Returns:
        The same model.
    """
    family = _family(model)
    layers = [m for m in model.modules() if type(m) is family.attention]
    require(
        bool(layers) and not hasattr(model, _HANDLES),
        _WHERE,
        f"{type(model).__name__} is prepared already and must be as transformers made it",
        "restore_model(model) first",
    )
    require(
        indexer_loss in ("sparse", "dense", None),
        _WHERE,
        f"indexer_loss ({indexer_loss!r}) must be 'sparse', 'dense' or None",
    )
    plan = make_plan(1, layout=layout, load_balance=load_balance, where=_WHERE)
    require(
        mesh is not None or not load_balance,
        _WHERE,
        "load_balance (True) must come with a mesh: it is an order of shards",
    )
    if gradient_divisor is not None:
        require_positive(_WHERE, "gradient_divisor", gradient_divisor)
    if check_source:
        check_source_of(family.module, family.prefix, _WHERE)

    try:
        for layer in layers:
            _prepare_layer(layer, family, plan.layout, indexer_loss)
            if mesh is not None:
                apply_styles(layer, mesh, plan=plan, keep_keys=keep_keys, overlap=overlap)
    except BaseException:  # such as of a mesh that no style takes: the model stays as it was
        _restore_layers(model)
        raise
    entered = {id(m): m for m in (model, model.base_model)}.values()
    handles: list[Any] = []
    for one in entered:
        handles.append(one.register_forward_pre_hook(enter_model, with_kwargs=True))
        handles.append(one.register_forward_hook(leave_model, with_kwargs=True))
        if gradient_divisor is not None:
            setattr(one, DIVISOR, gradient_divisor)
    if model is not model.base_model:
        model.loss_function = GlobalCausalLoss(model.loss_function, gradient_divisor)
    setattr(model, _HANDLES, handles)
    return model


def restore_model(model: Model) -> Model:
    """Undo `prepare_model`: the model is as transformers made it."""
    if not hasattr(model, _HANDLES):
        return model
    for handle in getattr(model, _HANDLES):
        handle.remove()
    delattr(model, _HANDLES)
    for one in (model, model.base_model):
        vars(one).pop(DIVISOR, None)
    _restore_layers(model)
    if isinstance(getattr(model, "_loss_function", None), GlobalCausalLoss):
        model.loss_function = model.loss_function.stock
    return model


def _restore_layers(model: nn.Module) -> None:
    for family in _FAMILIES:
        for module in list(model.modules()):
            if type(module) is family.absorbed:
                remove_styles(module)
                for name in _CHILDREN:
                    if hasattr(module, name):  # not yet, where a layer failed half way
                        delattr(module, name)
                module.__class__ = family.attention
            elif type(module) is family.inputs:
                module.__class__ = family.indexer


def _family(model: nn.Module) -> _Family:
    for family in _FAMILIES:
        names = [f"{family.prefix}{kind}" for kind in ("Model", "ForCausalLM")]
        if type(model) in [getattr(family.module, name) for name in names]:
            return family
    raise TypeError(
        f"{_WHERE}: model ({type(model).__name__}) must be a model of transformers' deepseek_v32 "
        "or glm_moe_dsa, base or causal LM; pass it before wrapping it (fully_shard comes after)"
    )


def _prepare_layer(layer: Any, family: _Family, layout: str, indexer_loss: str | None) -> None:
    dense = indexer_loss == "dense"
    layer.__class__ = family.absorbed
    layer.latent_ready = Handoff()
    layer.key_rope_ready = Handoff()
    layer.key_index_ready = Handoff()
    layer.sparse_attention = cores.SparseAttention(layout, layer.scaling, dense)
    layer.select_keys = layer.indexer_loss = None
    if layer.indexer is not None:
        layer.indexer.__class__ = family.inputs
        if not dense:
            layer.select_keys = cores.SelectKeys(layout, layer.indexer.index_topk)
        if indexer_loss is not None:
            kind = cores.DenseIndexerLoss if dense else cores.IndexerLoss
            layer.indexer_loss = kind(layout, layer.scaling)
    layer.train(layer.training)  # the new modules too
