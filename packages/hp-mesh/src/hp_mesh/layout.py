"""Tensor layouts by name: which dim is the sequence, which one the heads.

No torch here. ``B`` batch, ``S`` sequence, ``N`` heads, ``D`` head size, ``T`` tokens of all
sequences packed; ``H`` is heads in 4-D names (``BSHD``) and hidden size, heads folded in, in 3-D
names (``BSH``).
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_mesh.checks import fail, nearest

__all__ = ["LAYOUTS", "Layout", "layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The dims of one layout.

    Attributes:
        name: As the table writes it.
        seq_dim: Dim of the sequence (of the packed tokens).
        head_dim: Dim of the heads; None where they are folded into the hidden dim, so that only
            Colossal, which never cuts heads, can take it.
        batch_dim: Dim of the batch; None for packed tokens.
    """

    name: str
    seq_dim: int
    head_dim: int | None
    batch_dim: int | None

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.name)


LAYOUTS: dict[str, Layout] = {
    "BSHD": Layout("BSHD", seq_dim=1, head_dim=2, batch_dim=0),
    "BNSD": Layout("BNSD", seq_dim=2, head_dim=1, batch_dim=0),
    "SBHD": Layout("SBHD", seq_dim=0, head_dim=2, batch_dim=1),
    "TND": Layout("TND", seq_dim=0, head_dim=1, batch_dim=None),
    "BSH": Layout("BSH", seq_dim=1, head_dim=None, batch_dim=0),
    "SBH": Layout("SBH", seq_dim=0, head_dim=None, batch_dim=1),
}
"""The layouts by name."""

_ALIASES = {"BSND": "BSHD", "BHSD": "BNSD", "SBND": "SBHD", "THD": "TND"}


def layout(name: str) -> Layout:
    """Return the layout called ``name``, in any case; ``BSND``, ``BHSD``, ``SBND``, ``THD`` too."""
    key = name.upper()
    key = _ALIASES.get(key, key)
    if key not in LAYOUTS:
        known = [*LAYOUTS, *_ALIASES]
        close = nearest(key, known)
        raise fail(
            "layout",
            f"name ({name!r}) must be one of {', '.join(known)}",
            f"did you mean {close!r}?" if close else "",
        )
    return LAYOUTS[key]
