"""Work counted pair by pair: windows, chunks, packed documents, and their imbalance."""

from __future__ import annotations

from typing import Any

import pytest

from hp_cp.plan import make_plan
from hp_tune.cost.pairs import document_ends, seen_pairs, tiled_pairs, work_shares
from hp_tune.models.model import Attention
from hp_tune.workload import Workload


def layer(**fields: Any) -> Attention:
    """One layer of 4 heads."""
    return Attention(num_heads=4, num_kv_heads=4, head_size=8, v_head_size=8, **fields)


def brute(rows: range, ends: list[int], *, causal: bool, window: int | None) -> int:
    """Pairs counted one by one."""
    count = 0
    for i in rows:
        first = max([0, *(end for end in ends if end <= i)])
        last = min(end for end in ends if end > i)
        keys = range(first, i + 1 if causal else last)
        count += len(keys) if window is None or not causal else min(len(keys), window)
    return count


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("documents", [None, ((7, 1.0),), ((5, 2.0), (11, 1.0), (30, 0.5))])
def test_pairs_of_packed_documents_equal_a_loop(
    causal: bool, window: int | None, documents: tuple[tuple[int, float], ...] | None
) -> None:
    """Each row sees its own document only, and of it at most a window."""
    workload = Workload(seq_len=96, cp_size=4, causal=causal, documents=documents)
    ends = [96] if documents is None else list(document_ends(96, documents))
    for start, stop in ((0, 24), (24, 48), (72, 96), (0, 96)):
        found = seen_pairs((start, stop), layer(), workload, window=window)
        assert found == brute(range(start, stop), ends, causal=causal, window=window)


def test_chunks_are_documents_of_their_size() -> None:
    """A chunked layer sees its own block, and of a document only what is in the block."""
    chunked = layer(kind="chunked", window=16)
    plain = Workload(seq_len=96, cp_size=2)
    packed = Workload(seq_len=96, cp_size=2, documents=((10, 1.0),))

    assert seen_pairs((0, 96), chunked, plain) == 6 * (16 * 17 // 2)
    ends = sorted({*range(16, 97, 16), *document_ends(96, ((10, 1.0),))})
    assert seen_pairs((8, 90), chunked, packed) == brute(
        range(8, 90), ends, causal=True, window=None
    )


def test_a_histogram_is_mixed_evenly_and_fills_the_sequence() -> None:
    """Two short documents for each long one, everywhere; the last is cut."""
    ends = document_ends(1000, ((10, 2.0), (80, 1.0)))
    lengths = [b - a for a, b in zip((0, *ends), ends, strict=False)]

    assert ends[-1] == 1000
    assert sorted(lengths[:3]) == sorted(lengths[3:6]) == [10, 10, 80]


def test_packed_documents_even_out_the_work_of_contiguous_shards() -> None:
    """One document is unbalanced by 2 - 1/8; short ones hardly are, and cost less."""
    one = work_shares(make_plan(8, 1), layer(), Workload(seq_len=8192, cp_size=8))
    short = work_shares(
        make_plan(8, 1), layer(), Workload(seq_len=8192, cp_size=8, documents=((256, 1.0),))
    )

    assert max(one) * 8 / sum(one) == pytest.approx(1.875, rel=1e-3)
    assert max(short) == min(short)
    assert sum(short) == pytest.approx(sum(one) * 256 / 8192, rel=0.01)


def test_a_kernel_that_does_not_skip_computes_everything() -> None:
    """No mask helps it."""
    workload = Workload(seq_len=96, cp_size=4, skips_masked=False, documents=((8, 1.0),))

    assert seen_pairs((24, 48), layer(window=4, kind="sliding"), workload) == 24 * 96


@pytest.mark.parametrize("tile", [1, 2, 5, 16, 64, 512])
def test_tiled_pairs_equal_a_loop(tile: int) -> None:
    """A row takes keys up to the end of its tile, and no kernel takes more than there are."""
    for rows in (1, 5, 16, 63):
        brute = sum(min(rows, (row // tile + 1) * tile) for row in range(rows))
        assert tiled_pairs(rows, tile) == brute
    workload = Workload(seq_len=96, cp_size=4)
    seen = seen_pairs((24, 48), layer(), workload, tile=tile)
    assert seen == 24 * 24 + tiled_pairs(24, tile), "every row sees all keys before the first"


def test_shorter_blocks_of_rows_waste_less_on_tiles() -> None:
    """With tiles of half the sequence Ulysses computes 1.5 times its pairs, gathered rows less."""
    workload = Workload(seq_len=1024, cp_size=4)

    def total(u: int, balance: bool = False) -> float:
        shares = work_shares(make_plan(4, u, balance), layer(), workload, 512)
        return sum(shares) * u / (1024 * 1025 / 2)

    assert total(4) / 4 == pytest.approx(1.5, rel=0.01)
    assert total(1) == pytest.approx(1.25, rel=0.01)
    assert total(1, balance=True) == pytest.approx(1.125, rel=0.01)
