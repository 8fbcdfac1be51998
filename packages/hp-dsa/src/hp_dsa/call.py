"""What one call of a module keeps between the hooks of its DSA boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_dsa.gather import Pack
from hp_dsa.inputs import Inputs
from hp_dsa.key_refetch import GatheredKeys
from hp_dsa.view import DSAView
from hp_dsa.windowed import LocalCall
from hp_mesh.boundary import Entry
from hp_mesh.recorder import Recorder

__all__ = ["DSACall"]


@dataclass
class DSACall(Entry):
    """What one call of the module keeps between its hooks.

    Attributes:
        view: The view of the call.
        inputs: The tensors as they came; outputs are laid out as the query was.
        index: How many calls of the boundary went before.
        local: With ``use_local_input``, the calls of the module with local tensors.
        recorder: Under ``keep_keys=False``, what keeps gathered keys out of the graph.
    """

    view: DSAView
    inputs: Inputs
    index: int
    local: LocalCall | None = None
    recorder: Recorder | None = None

    def take_notes_of(self, keys: GatheredKeys, packs: Sequence[Pack]) -> None:
        """Keep ``keys``, which came in ``packs``, out of the graph that follows."""
        handed = [
            self.kwargs[k] if isinstance(k, str) else self.args[k]
            for k in (self.inputs.slots[name].key for name in self.inputs.sources)
        ]
        self.recorder = Recorder(self.view)
        self.recorder.watch(keys, [(pack.whole, *handed) for pack in packs])
        self.recorder.open()
