"""DeepSeek-V3.2 and GLM-5 of transformers through the DSA operators, without an edit of their code.

::

    from hp_dsa.transformers import indexer_loss, prepare_model

    model = prepare_model(DeepseekV32ForCausalLM(config), mesh["cp"])
    out = model(input_ids=local_ids, shift_labels=local_targets, labels=local_targets)
    (out.loss + indexer_loss(model)).backward()

transformers is an extra (``pip install "hp-dsa[transformers]"``): it is imported when one of the
names below is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_mesh.lazy import lazy_names

if TYPE_CHECKING:
    from hp_dsa.transformers.call import ModelCall
    from hp_dsa.transformers.loss import GlobalCausalLoss, indexer_loss
    from hp_dsa.transformers.prepare import prepare_model, restore_model

__all__ = [
    "GlobalCausalLoss",
    "ModelCall",
    "indexer_loss",
    "prepare_model",
    "restore_model",
]

_resolve, __dir__ = lazy_names(
    __name__,
    {
        "GlobalCausalLoss": "hp_dsa.transformers.loss",
        "ModelCall": "hp_dsa.transformers.call",
        "indexer_loss": "hp_dsa.transformers.loss",
        "prepare_model": "hp_dsa.transformers.prepare",
        "restore_model": "hp_dsa.transformers.prepare",
    },
)


def __getattr__(name: str) -> Any:
    try:
        return _resolve(name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"hp_dsa.transformers.{name}: transformers must be installed; "
            'pip install "hp-dsa[transformers]"',
            name="transformers",
        ) from error
