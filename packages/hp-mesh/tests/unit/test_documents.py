from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_mesh.documents import batch_window, packed_window


def _seen(query_ends: tuple[int, ...], key_ends: tuple[int, ...], first_key: int) -> list[set[int]]:
    """Return the keys, as rows of the stream, that each query sees by the bottom-right rule."""
    rows = []
    documents = zip(pairwise([0, *query_ends]), pairwise([0, *key_ends]), strict=True)
    for (qa, qe), (ka, ke) in documents:
        for i in range(qe - qa):
            visible = min(max(ke - ka - (qe - qa) + i + 1, 0), ke - ka)
            rows.append({first_key + ka + j for j in range(visible)})
    return rows


# the same examples on every machine, however slow
CALM = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

lengths = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5)


@CALM
@given(lengths, st.data())
def test_a_window_of_documents_shows_each_query_the_keys_it_saw_before(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever the documents (straddling, outside, empty, fewer or more keys than queries)."""
    query_ends = tuple(sum(q for q, _ in lengths[: i + 1]) for i in range(len(lengths)))
    key_ends = tuple(sum(k for _, k in lengths[: i + 1]) for i in range(len(lengths)))
    total = query_ends[-1]
    start = data.draw(st.integers(0, total))
    end = data.draw(st.integers(start, total))

    window = packed_window((start, end), query_ends, key_ends)

    whole = _seen(query_ends, key_ends, 0)
    assert _seen(window.query_lengths, window.key_lengths, window.keys[0]) == whole[start:end]
    if start < end:
        assert window.query_lengths[-1] == end - start == window.num_rows
        assert window.key_lengths[-1] == window.num_keys
        assert window.num_keys > 0 or key_ends[-1] == 0


@CALM
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), min_size=1, max_size=3), st.data())
def test_a_window_of_a_batch_shows_each_valid_query_the_keys_it_saw_before(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Rows behind the valid length see nothing; the keys end with the last that anyone sees."""
    start = data.draw(st.integers(0, 8))
    end = data.draw(st.integers(start, 8))

    window = batch_window(
        (start, end),
        8,
        9,
        batch=len(lengths),
        query_lengths=[q for q, _ in lengths],
        key_lengths=[k for _, k in lengths],
    )

    for b, (q, k) in enumerate(lengths):
        whole = _seen((q,), (k,), 0)[start:end]
        assert _seen((window.query_lengths[b],), (window.key_lengths[b],), 0) == whole
        assert window.key_lengths[b] <= window.num_keys


@pytest.mark.parametrize(("rank", "queries", "keys"), [(0, (4,), (4,)), (1, (4,), (8,))])
def test_one_document_over_two_ranks_is_cut_at_the_end_of_the_rows(
    rank: int, queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    """The uncut key length would let rank 0 see the future."""
    window = packed_window((4 * rank, 4 * rank + 4), (8,), (8,))

    assert (window.query_lengths, window.key_lengths) == (queries, keys)
    assert window.keys == (0, keys[-1])


def test_a_batch_without_lengths_is_cut_to_its_causal_prefix() -> None:
    """More keys than queries are a prefix that all queries see."""
    assert batch_window((2, 4), 6, 6, batch=2).keys == (0, 4)
    assert batch_window((2, 4), 6, 9, batch=2).keys == (0, 7)
    assert batch_window((2, 4), 6, 6, batch=2, causal=False).keys == (0, 6)
    none = batch_window((0, 2), 6, 3, batch=2)
    assert (none.keys, none.query_lengths, none.key_lengths) == ((0, 1), (2, 2), (0, 0))
