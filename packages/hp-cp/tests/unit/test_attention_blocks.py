"""Blocks of scores when keys come in parts: each visible pair once, no row without a key."""

from __future__ import annotations

import pytest

from hp_cp.attention.blocks import by_runs, causal_blocks, key_runs, slices_of


@pytest.mark.parametrize("P", [1, 2, 3])
@pytest.mark.parametrize("shard", [1, 3, 5])
def test_blocks_of_parts_cover_each_visible_pair_once(P: int, shard: int) -> None:
    """For any rows and any number of parts: no pair twice, none left out, no row without a key."""
    for parts in range(1, shard + 1):
        slices = slices_of(shard, parts)
        assert [row for part in slices for row in range(*part)] == list(range(shard))
        for first in range(P * shard):
            for last in range(first + 1, P * shard + 1):
                seen = []
                for part in slices:
                    runs = key_runs(part, shard, P)
                    keys = [key for run in runs for key in range(*run)]
                    whole = causal_blocks((first, last), runs)
                    for blocks in (whole, by_runs(whole, part[1] - part[0])):
                        found = []
                        for block in blocks:
                            for i, row in enumerate(range(*block.rows)):
                                columns = range(*block.keys)[: i + 1 if block.causal else None]
                                assert columns
                                found += [(first + row, keys[column]) for column in columns]
                        if blocks is whole:
                            seen += found
                        else:
                            assert sorted(found) == sorted(seen[len(seen) - len(found) :])
                assert sorted(seen) == [(r, k) for r in range(first, last) for k in range(r + 1)]
