"""What mask transformers asked for, before any tensor of it exists.

transformers builds one mask per forward, for the length that the model was handed: this rank's
shard. `MaskDescription` keeps the request instead, and builds only the rows that a call of the
core attention computes, over all keys::

                 keys 0 ........ S-1
    rank 0       #
                 ##
    rank 1       ###          <- rows(window) of rank 1: two rows of the global mask
                 ####
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
)

from hp_mesh.checks import require

if TYPE_CHECKING:
    from hp_cp.transformers.call import GlobalCall
    from hp_mesh.window import AttentionWindow

__all__ = ["MaskDescription"]

MaskFunction = Callable[..., Tensor]


class MaskDescription:
    """A mask as transformers described it: pattern, lengths, padding.

    Takes the keyword arguments that transformers hands to a mask interface, and the name of the
    stock interface (``"sdpa"``: boolean, True is visible; ``"eager"``: additive) that turns them
    into a tensor. One description serves all layers of a forward; what it builds is kept for it.
    """

    def __init__(self, implementation: str, arguments: dict[str, Any]) -> None:
        self.implementation = implementation
        self.arguments = arguments
        self._built: dict[object, Tensor | None] = {}

    def stock(self) -> Tensor | None:
        """Return what transformers builds when no context parallelism is applied."""
        if "stock" not in self._built:
            self._built["stock"] = self._build({})
        return self._built["stock"]

    def rows(self, window: AttentionWindow, call: GlobalCall) -> Tensor | None:
        """Return the rows of ``window``, ``[B, 1, query_length, key_length]``.

        None where the attention implementation needs no tensor: plain causal (or plain full)
        attention under sdpa.
        """
        described = self.arguments["kv_length"]
        require(
            described == window.global_length,
            "core_attention",
            f"the mask was described for {described} keys and must be described for the whole "
            f"sequence ({window.global_length})",
            "call the model itself, whose hook gives the mask its global length, and let it build "
            "the mask, or pass a 4-D tensor",
        )
        if self._needs_no_tensor(call):
            return None
        key = (window.query_start, window.query_length, window.key_length)
        if key not in self._built:
            self._built[key] = self._build_rows(window, call)
        return self._built[key]

    def _needs_no_tensor(self, call: GlobalCall) -> bool:
        if call.padding is not None or call.documents is not None:
            return False
        size = self.arguments.get("local_size")
        if size is not None and call.global_length >= size:
            return False
        if self.arguments.get("allow_is_bidirectional_skip", False):
            return True
        return self.implementation == "sdpa" and self.arguments.get("allow_is_causal_skip", True)

    def _build_rows(self, window: AttentionWindow, call: GlobalCall) -> Tensor | None:
        function: MaskFunction = self.arguments["mask_function"]
        if call.documents is not None:
            # as transformers does it: positions count inside a document, and documents are apart
            batch = self.arguments["batch_size"]
            positions = call.position_ids.expand(batch, -1)
            documents = call.documents.expand(batch, -1)
            function = and_masks(
                remap_positions_for_packed_sequence(function, positions),
                packed_sequence_mask_function(documents),
            )
        return self._build(
            {
                "q_length": window.query_length,
                "q_offset": window.query_start,
                "kv_length": window.key_length,
                "kv_offset": 0,
                "mask_function": function,
                "attention_mask": call.padding,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        )

    def _build(self, changes: dict[str, Any]) -> Tensor | None:
        build: MaskFunction = ALL_MASK_ATTENTION_FUNCTIONS[self.implementation]
        return build(**{**self.arguments, **changes})


def describe_mask(implementation: str, **arguments: Any) -> MaskDescription:
    """Stand in for transformers' mask interface ``implementation``."""
    return MaskDescription(implementation, arguments)
