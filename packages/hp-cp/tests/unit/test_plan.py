"""Plan: what is valid, who computes what, and how much of it travels."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hp_cp.description import Description
from hp_cp.plan import Plan, make_plan
from hp_cp.style_arguments import check_style_arguments, resolve_dims

CP = "ContextParallel"


@pytest.mark.parametrize(
    ("cp_size", "degree", "mode", "u", "c"),
    [
        (4, None, "ulysses", 4, 1),
        (4, 4, "ulysses", 4, 1),
        (4, 1, "colossal", 1, 4),
        (4, 2, "hybrid", 2, 2),
        (6, 3, "hybrid", 3, 2),
        (1, None, "colossal", 1, 1),
        (1, 1, "colossal", 1, 1),
    ],
)
def test_degree_selects_the_mode(
    cp_size: int, degree: int | None, mode: str, u: int, c: int
) -> None:
    """The guide's table: None is Ulysses, 1 Colossal, between Hybrid; one rank is Colossal."""
    plan = make_plan(cp_size, degree)

    assert (plan.mode, plan.ulysses_degree, plan.colossal_degree) == (mode, u, c)


def test_degree_that_does_not_divide_is_refused_with_the_divisors() -> None:
    """Behaviour 2: the error names both numbers and what would work."""
    with pytest.raises(ValueError) as error:
        make_plan(4, 3)

    assert str(error.value) == (
        f"{CP}: cp_size (4) must be divisible by ulysses_degree (3); use a divisor of 4: 1, 2, 4"
    )


@pytest.mark.parametrize("degree", [0, -2, True, 2.0, "2", 8])
def test_degree_that_is_no_positive_divisor_is_refused(degree: int | None) -> None:
    """Behaviour 2: 0, negatives, bools, other types and degrees beyond cp_size."""
    with pytest.raises(ValueError, match=r"ulysses_degree \("):
        make_plan(4, degree)


@pytest.mark.parametrize("degree", [None, 2, 4])
def test_load_balance_outside_colossal_is_refused(degree: int | None) -> None:
    """Behaviour 3: at construction, naming the degree that was given."""
    with pytest.raises(
        ValueError, match=rf"requires ulysses_degree=1, not ulysses_degree \({degree}\)"
    ):
        check_style_arguments(CP, ulysses_degree=degree, load_balance=True, seq_dim=1, head_dim=2)
    with pytest.raises(ValueError, match="load_balance"):
        make_plan(4, degree, True)


def test_load_balance_takes_degree_one_and_nothing_but_bools() -> None:
    """Behaviour 3: degree 1 is the balanced mode; ``1`` and ``"yes"`` are typing slips."""
    assert make_plan(4, 1, True).load_balance
    with pytest.raises(ValueError, match=r"load_balance \('yes'\) must be True or False"):
        make_plan(4, 1, "yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seq_dim", "head_dim", "text"),
    [
        (1, 1, r"seq_dim \(1\) must differ from head_dim \(1\)"),
        (-2, -2, r"must differ"),
        (-1, 2, r"seq_dim \(-1\) must not be the last dim"),
        (1, -1, r"head_dim \(-1\) must not be the last dim"),
        (True, 2, r"seq_dim \(True\) must be an integer"),
        (1, 2.0, r"head_dim \(2.0\) must be an integer"),
    ],
)
def test_constructor_refuses_dims_that_can_never_be_right(
    seq_dim: int, head_dim: int, text: str
) -> None:
    """Behaviour 5: what needs no tensor is refused where it is written."""
    with pytest.raises(ValueError, match=text):
        check_style_arguments(
            CP, ulysses_degree=None, load_balance=False, seq_dim=seq_dim, head_dim=head_dim
        )


def test_constructor_takes_every_layout_of_the_guide() -> None:
    """BSHD, BNSD, SBHD, TND, negative spellings, and 3-D BSH for Colossal."""
    for seq_dim, head_dim in [(1, 2), (2, 1), (0, 2), (0, 1), (-3, -2), (-2, 1)]:
        check_style_arguments(
            CP, ulysses_degree=2, load_balance=False, seq_dim=seq_dim, head_dim=head_dim
        )
    check_style_arguments(CP, ulysses_degree=1, load_balance=True, seq_dim=1, head_dim=-1)


def test_dims_are_counted_from_zero_once_the_tensor_is_known() -> None:
    """Negative dims resolve; a coincidence that only the tensor shows is refused."""
    assert resolve_dims(CP, 4, -3, -2) == (1, 2)
    assert resolve_dims(CP, 3, 1, 2, needs_heads=False) == (1, 2)
    for ndim, seq_dim, head_dim, text in [
        (4, 1, -3, "both are dim 1"),
        (4, 4, 1, r"seq_dim \(4\) must be a dim of a 4-D"),
        (3, 1, 2, r"head_dim \(2\) must not be the last dim \(3-D"),
        (4, 3, 1, r"seq_dim \(3\) must not be the last dim"),
    ]:
        with pytest.raises(ValueError, match=text):
            resolve_dims(CP, ndim, seq_dim, head_dim)


def test_heads_that_do_not_divide_are_refused_with_every_number() -> None:
    """B04: 28 heads on 8 ranks; heads, KV heads, degree, tensor, dim and way out are named."""
    with pytest.raises(ValueError) as error:
        make_plan(8).heads(28, 4, head_dim=2, shape=[1, 32, 28, 8])

    assert str(error.value) == (
        "ContextParallel: num_heads (28) must be divisible by ulysses_degree (8): "
        "q [1, 32, 28, 8] has 28 heads in dim 2 (k and v have 4); "
        "use ulysses_degree=4 or 2, or 1 for Colossal, which has no such limit "
        "(if dim 2 is not the heads, seq_dim and head_dim name another layout: "
        "BSHD is 1, 2 and BNSD is 2, 1)"
    )
    with pytest.raises(ValueError, match=r"num_heads \(7\).*use ulysses_degree=1 for Colossal"):
        make_plan(4, 2).heads(7, 7)
    with pytest.raises(ValueError, match=r"on each of 2 TP ranks"):
        make_plan(4).heads(6, 2, tp_size=2)


def test_more_kv_heads_than_query_heads_are_taken_for_swapped_arguments() -> None:
    """The mapping h * Hkv // H would leave KV heads unused: q and k were most likely swapped."""
    with pytest.raises(
        ValueError, match=r"num_kv_heads \(8\) of k, v must be at most .*qkv_indices"
    ):
        make_plan(2).heads(4, 8)


def test_colossal_takes_any_head_counts() -> None:
    """B03: degree 1 has no head rule, and every rank keeps all heads."""
    table = make_plan(3, 1).heads(7, 5)

    assert (table.query, table.kv_sent, table.kv_expand) == (((0, 7),), ((0, 1, 2, 3, 4),), None)


def test_each_ulysses_rank_gets_its_heads_in_order() -> None:
    """Behaviour 10: rank r gets heads [r H/P, (r+1) H/P) and the KV heads that serve them."""
    table = make_plan(4).heads(8, 4)

    assert table.query == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert table.kv_sent == ((0,), (1,), (2,), (3,))
    assert table.kv_expand is None


def test_fewer_kv_heads_than_ranks_are_repeated_not_tiled() -> None:
    """Behaviour 11: H=8, Hkv=2 on 4 ranks gives 0, 0, 1, 1; MQA gives head 0 to all."""
    assert make_plan(4).heads(8, 2).kv_sent == ((0,), (0,), (1,), (1,))
    assert make_plan(4).heads(8, 1).kv_sent == ((0,),) * 4
    assert make_plan(4).heads(8, 2).kv_expand is None


def test_kv_heads_shared_unevenly_are_expanded_per_query_head() -> None:
    """B03: H=12, Hkv=6 on 4 ranks; neither divides the other, so each query head gets its own."""
    table = make_plan(4).heads(12, 6)

    assert table.kv_sent == ((0, 1), (1, 2), (3, 4), (4, 5))
    assert table.kv_expand == ((0, 0, 1), (0, 1, 1), (0, 0, 1), (0, 1, 1))


@pytest.mark.parametrize("u", [2, 3, 4, 6])
@pytest.mark.parametrize("kv", range(1, 13))
def test_every_query_head_meets_its_kv_head(u: int, kv: int) -> None:
    """For any Hkv: even grouping of what was received, or kv_expand, is h * Hkv // H."""
    H = 12
    table = make_plan(u).heads(H, kv)

    for d, (start, stop) in enumerate(table.query):
        received, local = table.kv_sent[d], stop - start
        for i in range(local):
            if table.kv_expand is None:
                assert local % len(received) == 0
                index = i // (local // len(received))
            else:
                index = table.kv_expand[d][i]
            assert received[index] == (start + i) * kv // H


def test_hybrid_rows_start_at_the_colossal_block() -> None:
    """Behaviour 18: the query start of rank (c, d) is c * (u * L), not rank * L."""
    plan = make_plan(8, 2)

    starts = [plan.rows(r, 48)[0].query_start for r in range(8)]
    assert starts == [0, 0, 12, 12, 24, 24, 36, 36]
    assert [len(plan.rows(r, 48)) for r in range(8)] == [1] * 8
    assert plan.rows(3, 48)[0].query_length == 12


def test_ulysses_sees_every_row_and_colossal_its_own() -> None:
    """Behaviours 9 and 13: Ulysses needs no offset; Colossal rank r starts at r * L."""
    (window,) = make_plan(4).rows(3, 24)
    assert (window.query_start, window.query_length, window.key_length) == (0, 24, 24)
    (window,) = make_plan(4, 1).rows(3, 24)
    assert (window.query_start, window.query_length, window.global_length) == (18, 6, 24)


def test_balanced_rows_pair_a_head_with_the_mirrors_tail() -> None:
    """Behaviour 19: with 4 ranks the chunks are {0,7} {2,5} {4,3} {6,1}."""
    plan = make_plan(4, 1, True)

    chunks = [tuple(w.query_start // 4 for w in plan.rows(r, 32)) for r in range(4)]
    assert chunks == [(0, 7), (2, 5), (4, 3), (6, 1)]


@pytest.mark.parametrize(("cp_size", "length"), [(2, 8), (3, 18), (4, 32)])
def test_balance_equals_the_causal_pairs(cp_size: int, length: int) -> None:
    """Behaviour 20: every rank has the same number of visible keys; without balance it has not."""

    def pairs(plan: Plan, rank: int) -> int:
        return sum(sum(range(w.query_start + 1, w.query_end + 1)) for w in plan.rows(rank, length))

    balanced = {pairs(make_plan(cp_size, 1, True), r) for r in range(cp_size)}
    assert balanced == {length * (length + 1) // 2 // cp_size}
    if (cp_size, length) == (2, 8):
        assert balanced == {18}
        assert [pairs(make_plan(2, 1), r) for r in range(2)] == [10, 26]


def test_odd_local_length_asks_for_the_next_good_length() -> None:
    """Behaviour 21: no token is dropped; the helper and the length are named."""
    with pytest.raises(ValueError) as error:
        make_plan(4, 1, True).check_length(5)

    assert str(error.value) == (
        "ContextParallel: local sequence length (5) must be even under load_balance=True, that is, "
        "the global length (20) a multiple of 2 * cp_size (8); "
        "pad the sequence to 24 with pad_sequence"
    )
    make_plan(4, 1, True).check_length(6)
    make_plan(4, 1).check_length(5)


def test_global_length_that_does_not_divide_asks_for_the_next_good_length() -> None:
    """B15: S=10 on 4 ranks; and the balanced plan wants a multiple of 2 * cp_size."""
    with pytest.raises(
        ValueError, match=r"\(10\) must be divisible by cp_size \(4\); pad .* to 12 with pad_seq"
    ):
        make_plan(4).rows(0, 10)
    with pytest.raises(
        ValueError, match=r"\(12\) must be divisible by 2 \* cp_size \(8\); pad .* to 16"
    ):
        make_plan(4, 1, True).split_length(12)
    assert make_plan(4).split_length(12) == 3


# A is one head of the global sequence, in bytes

B, S, D, E = 2, 72, 5, 2
A = B * S * D * E


def volume(
    P: int, u: int | None, H: int, kv: int, *, lb: bool = False, rank: int = 0, **kw: Any
) -> Description:
    """Describe one case of the formula tests."""
    return make_plan(P, u, lb).describe(
        num_heads=H, num_kv_heads=kv, seq_len=S, head_size=D, batch=B, rank=rank, **kw
    )


@pytest.mark.parametrize(("P", "H", "kv"), [(2, 6, 6), (3, 6, 3), (4, 8, 4)])
def test_ulysses_bytes_match_the_formula(P: int, H: int, kv: int) -> None:
    """A (2 Hq + 2 Hk) (P-1) / P^2 each way, one all-to-all in and one out per direction."""
    found = volume(P, None, H, kv)

    assert found.bytes(phase="forward") == A * (2 * H + 2 * kv) * (P - 1) // P**2
    assert found.bytes(phase="backward") == found.bytes(phase="forward")
    assert (found.count("all_to_all", "forward"), found.count("all_to_all", "backward")) == (2, 2)
    assert found.resident_kv_bytes == 2 * A * kv // P


@pytest.mark.parametrize(("P", "H", "kv"), [(4, 8, 1), (4, 8, 2), (6, 12, 3)])
def test_ulysses_bytes_with_replicated_kv_match_the_formula(P: int, H: int, kv: int) -> None:
    """A [2 Hq (P-1)/P^2 + 2 (P-1)/P]: an owner sends each copy that is needed."""
    found = [volume(P, None, H, kv, rank=r) for r in range(P)]

    expected = A * 2 * H * (P - 1) // P**2 + A * 2 * (P - 1) // P
    assert [d.bytes(phase="forward") for d in found] == [expected] * P
    assert [d.bytes(phase="backward") for d in found] == [expected] * P
    assert found[0].resident_kv_bytes == 2 * A


@pytest.mark.parametrize(("P", "H", "kv"), [(2, 3, 3), (3, 7, 5), (4, 8, 1)])
def test_colossal_bytes_match_the_formula(P: int, H: int, kv: int) -> None:
    """2 A Hk (P-1)/P: two all-gathers, then two reduce-scatters of the same size."""
    found = volume(P, 1, H, kv)

    assert found.totals() == {
        "all_gather": (2, 2 * A * kv * (P - 1) // P),
        "reduce_scatter": (2, 2 * A * kv * (P - 1) // P),
    }
    assert found.resident_kv_bytes == 2 * A * kv


@pytest.mark.parametrize(("u", "c", "H", "kv"), [(2, 2, 6, 2), (2, 3, 4, 4), (3, 2, 6, 3)])
def test_hybrid_bytes_match_the_formula(u: int, c: int, H: int, kv: int) -> None:
    """(A/P) [(2 Hq + 2 Hk)(u-1)/u + 2 Hk (c-1)]: the exchange in the group, then the gather."""
    found = volume(u * c, u, H, kv)

    inside = A * (2 * H + 2 * kv) * (u - 1) // u // (u * c)
    across = A * 2 * kv * (c - 1) // (u * c)
    assert found.bytes("all_to_all", "forward") == inside
    assert found.bytes("all_gather") == across == found.bytes("reduce_scatter")
    assert found.bytes("all_to_all", "backward") == inside
    assert (found.count("all_to_all"), found.count("all_gather")) == (4, 2)
    assert found.resident_kv_bytes == 2 * A * kv // u
    assert found.groups["ulysses"] == tuple(range(u))
    assert found.groups["colossal"] == tuple(range(0, u * c, u))


def test_balance_adds_one_half_of_q_out_and_one_of_the_output_back() -> None:
    """gather + A Hq / P per direction; the middle rank of an odd group swaps with nobody."""
    for P, rank, swaps in [(4, 1, True), (3, 0, True), (3, 1, False), (1, 0, False)]:
        found, plain = volume(P, 1, 6, 2, lb=True, rank=rank), volume(P, 1, 6, 2, rank=rank)
        for phase in ("forward", "backward"):
            extra = found.bytes(phase=phase) - plain.bytes(phase=phase)
            assert extra == (A * 6 // P if swaps else 0)
            assert found.count("p2p", phase) == (2 if swaps else 0)


@pytest.mark.parametrize(
    ("P", "u", "H", "kv", "lb"),
    [(2, 1, 3, 3, False), (3, 1, 7, 5, True), (4, 1, 8, 1, False), (4, 2, 8, 4, False)],
)
def test_kv_that_are_not_kept_cost_one_more_gather(
    P: int, u: int, H: int, kv: int, lb: bool
) -> None:
    """(A/P) 2 Hk (c-1) more in backward, first of all; between passes 1/c of K and V stays."""
    kept, gathered = volume(P, u, H, kv, lb=lb), volume(P, u, H, kv, lb=lb, keep_kv=False)
    c = P // u

    rows = [row for row in gathered.collectives if row.phase == "backward"]
    assert [(row.kind, row.axis, row.what) for row in rows[:2]] == [
        ("all_gather", "colossal", "k"),
        ("all_gather", "colossal", "v"),
    ]
    assert sum(row.bytes_sent for row in rows[:2]) == A * 2 * kv * (c - 1) // P
    assert [row for row in gathered.collectives if row not in rows[:2]] == list(kept.collectives)
    assert kept.saved_kv_bytes == kept.resident_kv_bytes == 2 * A * kv // u
    assert gathered.saved_kv_bytes == kept.saved_kv_bytes // c
    assert gathered.resident_kv_bytes == kept.resident_kv_bytes


def test_saved_kv_are_those_of_all_head_groups_and_of_expanded_heads() -> None:
    """Groups at work are one, saved are all; one KV head per query head where they are uneven."""
    one, four = (volume(4, 1, 8, 8, head_groups=n) for n in (1, 4))
    assert four.saved_kv_bytes == one.saved_kv_bytes == 4 * four.resident_kv_bytes

    uneven = volume(4, 2, 12, 3)
    assert uneven.saved_kv_bytes == 2 * A * 6  # 6 query heads, which share 2 KV heads as 4 and 2
    assert volume(4, 2, 12, 3, keep_kv=False).saved_kv_bytes == 2 * A * 2 // 2


def test_ulysses_has_no_gather_to_repeat() -> None:
    """The plan refuses it, with the degrees that do gather; one rank may say anything."""
    with pytest.raises(
        ValueError,
        match=r"X: keep_kv \(False\) must come with a gather of k and v, which ulysses_degree "
        r"\(4\) on 4 ranks does not do; leave keep_kv out, or use ulysses_degree=1 or 2$",
    ):
        make_plan(4).check_keep_kv(False, where="X")
    with pytest.raises(ValueError, match=r"^Plan.describe: keep_kv"):
        volume(3, None, 6, 6, keep_kv=False)
    make_plan(4).check_keep_kv(True)
    make_plan(1).check_keep_kv(False)
    make_plan(6, 2).check_keep_kv(False)


def test_overlap_sends_each_of_q_k_v_by_itself() -> None:
    """Async Ulysses is three all-to-alls in and one out, with the bytes of the sync one."""
    sync, split = volume(4, None, 8, 4), volume(4, None, 8, 4, overlap=True)

    assert split.count("all_to_all", "forward") == 4 == split.count("all_to_all", "backward")
    assert split.bytes() == sync.bytes()


def test_llama_heads_on_four_ranks_send_sixty_or_forty_eight_features() -> None:
    """Behaviour 46: cp 4, H 32, Hkv 8: Ulysses sends 60 L D elements, Colossal receives 48 L D."""
    kw = {"num_heads": 32, "num_kv_heads": 8, "seq_len": 64, "head_size": 128, "element_size": 1}
    per = 64 // 4 * 128

    assert make_plan(4).describe(**kw).bytes(phase="forward") == 60 * per
    assert make_plan(4, 1).describe(**kw).bytes(phase="forward") == 48 * per


@pytest.mark.parametrize(("P", "u"), [(4, 4), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize(("H", "kv"), [(12, 6), (12, 5), (12, 1), (12, 12)])
def test_bytes_equal_a_count_of_every_row_and_head(P: int, u: int, H: int, kv: int) -> None:
    """Brute force: follow each KV row, head by head, from its owner to those who need it."""
    plan, dv, L = make_plan(P, u), 3, S // P
    table = plan.heads(H, kv)
    for rank in range(P):
        found = plan.describe(
            num_heads=H, num_kv_heads=kv, seq_len=S, head_size=D, v_head_size=dv,
            element_size=1, rank=rank,
        )  # fmt: skip
        _, mine = plan.coordinates(rank)
        sent = received = 0
        for d in range(u):
            if d != mine:
                queries = table.query[d][1] - table.query[d][0]
                sent += L * (queries * D + len(table.kv_sent[d]) * (D + dv))
                received += L * (queries * D + len(table.kv_sent[mine]) * (D + dv))
        out = L * (H // u) * dv * (u - 1)
        assert found.bytes("all_to_all", "forward") == sent + out
        assert found.bytes("all_to_all", "backward") == received + L * (H - H // u) * dv
        gathered = (P // u - 1) * u * L * len(table.kv_sent[mine]) * (D + dv)
        assert found.bytes("all_gather") == gathered == found.bytes("reduce_scatter")


def test_ulysses_needs_at_most_twice_the_exchanged_tensors() -> None:
    """The peak of the exchange is its send and its receive buffer."""
    found = volume(4, None, 8, 4)

    assert found.peak_extra_bytes == 2 * (A * 8 + 2 * A * 4) // 4


def test_one_rank_sends_nothing() -> None:
    """Behaviour 6: cp 1 has no collective in any mode, balanced or not."""
    for lb in (False, True):
        found = volume(1, 1, 6, 2, lb=lb)
        assert (found.collectives, found.peak_extra_bytes) == ((), 0)


def test_plan_imports_without_torch() -> None:
    """The tuner asks the plan and must answer in under a second: torch stays unimported."""
    code = (
        "import sys; sys.modules['torch'] = None; import hp_cp.plan as p; p.make_plan(4).rows(0, 8)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_parts_of_k_and_v_send_the_same_bytes_in_more_calls() -> None:
    """kv_chunks: n gathers of k and of v forward, 2n and 2n sums backward; two parts in memory."""
    once, parts = volume(4, 1, 12, 4, keep_kv=False), volume(4, 1, 12, 4, kv_chunks=3)
    for kind, calls in (("all_gather", 2 * (3 + 6)), ("reduce_scatter", 2 * 6)):
        assert parts.count(kind) == calls
        assert parts.bytes(kind) == once.bytes(kind)
    assert parts.saved_kv_bytes == once.saved_kv_bytes
    assert 3 * parts.resident_kv_bytes == 2 * once.resident_kv_bytes
    assert parts.peak_extra_bytes < once.peak_extra_bytes


def test_what_is_streamed_is_as_attention_sees_it() -> None:
    """Hybrid with 3 KV heads for 12: each query head's own travels, and nothing is expanded."""
    once, parts = volume(4, 2, 12, 3), volume(4, 2, 12, 3, kv_chunks=2)
    assert parts.bytes("all_gather", "forward") == 3 * once.bytes("all_gather", "forward")
    assert parts.bytes("all_to_all") == once.bytes("all_to_all")


@pytest.mark.parametrize(
    ("plan", "chunks", "length", "message"),
    [
        (make_plan(4), 2, None, r"ulysses_degree \(4\) on 4 ranks.*ulysses_degree=1 or 2$"),
        (make_plan(4, 1, True), 2, None, "must be 1 with load_balance=True, which calls"),
        (make_plan(4, 1), 7, 6, r"at most the rows of k that a rank passes on \(6\)"),
        (make_plan(4, 2), 13, 6, r"passes on \(12\); use kv_chunks=12 or less"),
        (make_plan(4, 1), 0, None, r"kv_chunks \(0\) must be at least 1"),
        (make_plan(4, 1), True, None, r"kv_chunks \(True\) must be an integer"),
    ],
)
def test_parts_that_a_plan_cannot_gather_are_refused(
    plan: Plan, chunks: int, length: int | None, message: str
) -> None:
    """Each with its numbers and the way out; as many parts as rows, and one rank, are fine."""
    with pytest.raises(ValueError, match=message):
        plan.check_kv_chunks(chunks, length)
    make_plan(4, 2).check_kv_chunks(12, 6)
    make_plan(1, 1).check_kv_chunks(50, 6)
    with pytest.raises(ValueError, match=r"^Plan.describe: kv_chunks .*AsyncContextParallel"):
        volume(4, 1, 12, 4, kv_chunks=2, overlap=True)


@pytest.mark.parametrize(("P", "u"), [(4, 2), (8, 2), (8, 4), (6, 2), (6, 3), (9, 3)])
def test_a_balanced_hybrid_gives_each_rank_as_many_causal_pairs(P: int, u: int) -> None:
    """Ranks of a Ulysses group have the same two chunks; all rows are covered, max/mean is 1."""
    plan = make_plan(P, u, balance_hybrid=True)
    assert (plan.mode, plan.load_balance) == ("hybrid", True)
    length = plan.next_length(P * 2 * 5)
    tables = [plan.rows(rank, length) for rank in range(P)]
    pairs = [sum(i + 1 for w in t for i in range(w.query_start, w.query_end)) for t in tables]
    assert set(pairs) == {sum(range(length + 1)) // (P // u)}
    for d in range(u):
        rows = [i for t in tables[d::u] for w in t for i in range(w.query_start, w.query_end)]
        assert sorted(rows) == list(range(length))


def test_halves_of_a_group_s_rows_need_an_even_length() -> None:
    """An even group halves any; an odd one needs 2 * cp_size, and says so in its own words."""
    assert make_plan(8, 2, balance_hybrid=True).length_multiple == 8
    make_plan(8, 2, balance_hybrid=True).check_length(3)
    odd = make_plan(6, 3, balance_hybrid=True)
    assert odd.length_multiple == 12
    with pytest.raises(ValueError, match=r"\(3\) must be even under balance_hybrid=True.*24 with"):
        odd.check_length(3)
    with pytest.raises(ValueError, match=r"divisible by 2 \* cp_size \(12\)"):
        odd.split_length(18)


@pytest.mark.parametrize("rank", range(6))
def test_a_balanced_hybrid_swaps_half_of_q_and_of_the_output(rank: int) -> None:
    """Beside what Hybrid sends: A H / 2P each way and tensor, over the Colossal group."""
    plain = volume(6, 2, 12, 4, rank=rank)
    found = make_plan(6, 2, balance_hybrid=True).describe(
        num_heads=12, num_kv_heads=4, seq_len=S, head_size=D, batch=B, rank=rank
    )
    swaps = [row for row in found.collectives if row.kind == "p2p"]
    assert {row.axis for row in swaps} <= {"colossal"}
    in_the_middle = rank // 2 == 1  # its own mirror
    assert found.count("p2p") == (0 if in_the_middle else 4)
    assert found.bytes("p2p") == (0 if in_the_middle else 4 * A * 12 // 6 // 2)
    for kind in ("all_to_all", "all_gather", "reduce_scatter"):
        assert found.bytes(kind) == plain.bytes(kind)


def test_balance_of_a_hybrid_is_asked_for_by_its_own_name() -> None:
    """load_balance keeps the guide's limit; with all ranks in a group there is nothing to do."""
    with pytest.raises(ValueError, match=r"load_balance \(True\) requires ulysses_degree=1"):
        make_plan(4, 2, True)
    with pytest.raises(ValueError, match=r"requires ulysses_degree \(4\) below cp_size \(4\)"):
        make_plan(4, 4, balance_hybrid=True)
    with pytest.raises(ValueError, match="must not come with load_balance"):
        make_plan(4, 1, True, balance_hybrid=True)
