"""What one call of a module keeps between the hooks of its boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hp_cp.inputs import Inputs
from hp_cp.kv_refetch import GatheredKV
from hp_mesh.boundary import Entry, inner_hooks
from hp_mesh.checks import require
from hp_mesh.recorder import Recorder, may_forget

__all__ = ["Call", "refuse_inner_hooks"]


@dataclass
class Call(Entry):
    """What one call of the module keeps between its hooks.

    Attributes:
        inputs: q, k and v as they came; the output is laid out as q was.
        recorder: Under ``keep_kv=False``, what keeps K and V out of the graph.
    """

    inputs: Inputs
    recorder: Recorder | None = None

    def may_forget(self) -> bool:
        """Whether what is gathered can be left to a second gather in backward."""
        return self.recorder is not None or may_forget()

    def take_notes_of(
        self, source: GatheredKV, gathered: Sequence[Tensor], handed: Sequence[Tensor]
    ) -> None:
        """Keep ``gathered`` (K, V), handed to the module as ``handed``, out of the graph."""
        recorder = self.recorder or Recorder(self.view)
        recorder.watch(source, list(zip(gathered, handed, strict=True)))
        if self.recorder is None:
            self.recorder = recorder
            recorder.open()


def refuse_inner_hooks(module: nn.Module, several: str, where: str) -> None:
    """Refuse hooks that would see one of the calls that ``several`` makes, and not the rest."""
    hooks = inner_hooks(module)
    require(
        not hooks,
        where,
        f"with {several} {type(module).__name__} is called several times, and its "
        f"hooks {hooks} would run for one call only; there must be none between those of "
        f"{where}",
        "put them on the module around it: pre-hooks there, or before the style is applied",
    )
