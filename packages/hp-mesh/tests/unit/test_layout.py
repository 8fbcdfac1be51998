"""The table of layouts."""

from __future__ import annotations

import pytest

from hp_mesh.layout import LAYOUTS, layout


@pytest.mark.parametrize(
    ("name", "seq_dim", "head_dim", "batch_dim", "ndim"),
    [
        ("BSHD", 1, 2, 0, 4),
        ("BNSD", 2, 1, 0, 4),
        ("SBHD", 0, 2, 1, 4),
        ("TND", 0, 1, None, 3),
        ("BSH", 1, None, 0, 3),
        ("SBH", 0, None, 1, 3),
    ],
)
def test_each_layout_says_its_dims(
    name: str, seq_dim: int, head_dim: int | None, batch_dim: int | None, ndim: int
) -> None:
    found = layout(name)

    assert (found.seq_dim, found.head_dim, found.batch_dim) == (seq_dim, head_dim, batch_dim)
    assert found.ndim == ndim and found.name == name
    assert found.name[found.seq_dim] in "ST"


@pytest.mark.parametrize(
    ("alias", "name"),
    [("bsnd", "BSHD"), ("BHSD", "BNSD"), ("SBND", "SBHD"), ("thd", "TND"), ("tnd", "TND")],
)
def test_other_names_and_any_case_are_understood(alias: str, name: str) -> None:
    assert layout(alias) is LAYOUTS[name]


def test_an_unknown_layout_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"layout: name \('BSDH'\) must be one of .*did you mean"):
        layout("BSDH")
    with pytest.raises(ValueError, match=r"must be one of BSHD, BNSD, .*THD$"):
        layout("xyz")
