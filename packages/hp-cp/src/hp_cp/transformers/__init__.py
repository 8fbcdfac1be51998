"""Context parallelism for Hugging Face models, without an edit of their code.

::

    from hp_cp.transformers import add_core_attention

    model = add_core_attention(AutoModelForCausalLM.from_pretrained(...))
    parallelize_module(
        model,
        mesh["cp"],
        {"model.layers.*.self_attn.core_attention": ContextParallel(seq_dim=2, head_dim=1)},
    )
    loss = model(input_ids=local_ids, shift_labels=local_targets, labels=local_targets).loss

transformers is an extra (``pip install "hp-cp[transformers]"``): it is imported when one of the
names below is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_cp.transformers.call import GlobalCall
    from hp_cp.transformers.core import CoreAttention
    from hp_cp.transformers.loss import GlobalCausalLoss
    from hp_cp.transformers.masks import MaskDescription
    from hp_cp.transformers.prepare import add_core_attention, remove_core_attention

__all__ = [
    "CoreAttention",
    "GlobalCall",
    "GlobalCausalLoss",
    "MaskDescription",
    "add_core_attention",
    "remove_core_attention",
]

_resolve, __dir__ = lazy_names(
    __name__,
    {
        "CoreAttention": "hp_cp.transformers.core",
        "GlobalCall": "hp_cp.transformers.call",
        "GlobalCausalLoss": "hp_cp.transformers.loss",
        "MaskDescription": "hp_cp.transformers.masks",
        "add_core_attention": "hp_cp.transformers.prepare",
        "remove_core_attention": "hp_cp.transformers.prepare",
    },
)


def __getattr__(name: str) -> Any:
    try:
        return _resolve(name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"hp_cp.transformers.{name}: transformers must be installed; "
            'pip install "hp-cp[transformers]"',
            name="transformers",
        ) from error
