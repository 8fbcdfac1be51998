"""Mistakes: one clear error on every rank before data moves, no hang, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_cp import ContextParallel, attention_window, init_device_mesh, parallelize_module
from hp_mesh.boundary import boundary_of
from hp_mesh.testing import count_collectives, randn, ranks

from ._compare import EACH, Case, compare
from ._cores import Eager, Sdpa

CONSTRUCTORS = [
    ({"ulysses_degree": 0}, r"ulysses_degree \(0\) must be at least 1"),
    ({"ulysses_degree": -2}, r"ulysses_degree \(-2\) must be at least 1"),
    ({"ulysses_degree": True}, r"ulysses_degree \(True\) must be an integer"),
    ({"ulysses_degree": 2.0}, r"ulysses_degree \(2.0\) must be an integer"),
    ({"load_balance": True}, r"load_balance \(True\) requires ulysses_degree=1"),
    ({"load_balance": True, "ulysses_degree": 2}, r"requires ulysses_degree=1"),
    ({"load_balance": 1, "ulysses_degree": 1}, r"load_balance \(1\) must be True or False"),
    ({"seq_dim": 1, "head_dim": 1}, r"seq_dim \(1\) must differ from head_dim \(1\)"),
    ({"seq_dim": -1}, r"seq_dim \(-1\) must not be the last dim"),
    ({"head_dim": -1}, r"head_dim \(-1\) must not be the last dim"),
    ({"seq_dim": "1"}, r"seq_dim \('1'\) must be an integer"),
    ({"qkv_indices": (0, 1)}, r"qkv_indices \(\(0, 1\)\) must name q, k and v"),
    ({"qkv_kwarg_names": "qkv"}, r"qkv_kwarg_names \('qkv'\) must name q, k and v"),
    ({"qkv_kwarg_names": ("q",)}, r"qkv_kwarg_names \(\('q',\)\) must name q, k and v"),
]


@pytest.mark.parametrize(("arguments", "message"), CONSTRUCTORS, ids=lambda x: str(x)[:40])
def test_the_constructor_refuses_what_it_can_know(arguments: Any, message: str) -> None:
    """Behaviours 2, 3, 5: with the argument as it was typed, and its value."""
    with pytest.raises(ValueError, match=f"ContextParallel: .*{message}"):
        ContextParallel(**arguments)


def test_the_constructor_takes_the_positional_order_of_the_guide() -> None:
    """seq_dim, head_dim, ulysses_degree, qkv_indices, qkv_kwarg_names, then the two flags."""
    style = ContextParallel(2, 1, 1, (2, 0, 1), ("q", "k", "v"), True, True)
    assert (style.seq_dim, style.head_dim, style.ulysses_degree) == (2, 1, 1)
    assert (style.qkv_indices, style.qkv_kwarg_names) == ((2, 0, 1), ("q", "k", "v"))
    assert style.use_local_output and style.load_balance


@pytest.mark.parametrize("degree", [3, 8])
def test_a_degree_that_does_not_divide_is_refused_by_apply(degree: int) -> None:
    """Behaviour 2: it names both numbers and the degrees that would do."""

    def on(rank: int) -> None:
        mesh = Case(P=4).mesh()
        with count_collectives() as counted:
            message = rf"cp_size \(4\) must be divisible by ulysses_degree \({degree}\)"
            with pytest.raises(ValueError, match=message + ".*1, 2, 4"):
                ContextParallel(ulysses_degree=degree).apply(Sdpa(), mesh)
        assert not counted.records

    ranks(4).run(on)


@pytest.mark.parametrize("degree", [None, 1, 2])
def test_the_whole_mesh_is_no_cp_mesh(degree: int | None) -> None:
    """Ranks along ``dp_shard`` would take each other's batches for parts of one sequence."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
        core, style = Sdpa(), ContextParallel(ulysses_degree=degree)
        message = r"ContextParallel: the CP mesh \(axes \('dp_shard', 'cp'\)\) must hold the ranks"
        with pytest.raises(ValueError, match=message + r".*; pass .* mesh\['cp'\]"):
            style.apply(core, mesh)
        with pytest.raises(ValueError, match=message):
            parallelize_module(nn.ModuleDict({"core": core}), mesh, {"core": style})
        assert boundary_of(core) is None

    ranks(4).run(on)


def _refused(
    case: Case,
    bad: Callable[[int, nn.Module, list[Tensor]], Any],
    *patterns: str,
    core: Callable[[], nn.Module] = Sdpa,
    before_data_moves: bool = True,
    **options: Any,
) -> str:
    """Assert one error on all ranks, in time; then a good call through the same module."""

    def on(rank: int) -> tuple[str, dict[str, int]]:
        module = core()
        case.style(**options).apply(module, case.mesh())
        local = [case.local(x, rank) for x in case.qkv()]
        with count_collectives() as counted:
            try:
                bad(rank, module, local)
            except (ValueError, TypeError) as error:
                text = f"{type(error).__name__}: {error}"
            else:
                raise AssertionError("nothing was raised")
        assert attention_window() is None
        if not options:
            compare(rank, case, core, applied=module)
        return text, counted.summary()

    answers = ranks(case.P).run(on)
    texts = {text for text, _ in answers}
    assert len(texts) == 1, texts
    (text,) = texts
    for pattern in patterns:
        assert pattern in text, text
    if before_data_moves:
        assert all(not sent for _, sent in answers), answers
    return text


@pytest.mark.parametrize("case", [Case(P=4, H=4, HK=4), Case(P=4, degree=2, H=4, HK=4)], ids=str)
def test_heads_that_do_not_divide_are_refused_by_number(case: Case) -> None:
    """B04, behaviour 4: heads, degree, dim and the allowed degrees."""
    u = 4 if case.degree is None else case.degree

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(*(x[:, :, :3] for x in local))

    _refused(
        case,
        bad,
        f"num_heads (3) must be divisible by ulysses_degree ({u})",
        "in dim 2",
        "use ulysses_degree=1 for Colossal",
    )


def test_28_heads_on_8_ranks_name_the_degrees_that_work() -> None:
    """B04: the model of the report."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        x = torch.zeros(1, 4, 28, 8)
        module(x, x, x)

    _refused(Case(P=8, H=8, HK=8), bad, "num_heads (28)", "ulysses_degree=4 or 2, or 1")


def test_a_bnsd_tensor_given_to_a_bshd_style_is_guessable() -> None:
    """B04: 24 heads are read as the sequence and 6 rows as heads; the message shows the shape."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        x = torch.zeros(1, 24, 2, 8)
        module(x, x, x)

    _refused(Case(P=4), bad, "q [1, 24, 2, 8] has 2 heads in dim 2", "BNSD is 2, 1")


def test_a_head_count_wrong_on_one_rank_is_every_ranks_error() -> None:
    """B04: nobody waits for the one that raises."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(*(x[:, :, :3] if rank == 1 else x for x in local))

    _refused(Case(P=4), bad, "num_heads (3)", "(on rank 1 of 4)")


def test_whatever_fails_on_one_rank_is_every_ranks_error() -> None:
    """Not only what was foreseen: the others are in a collective, and would wait."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        boundary: Any = boundary_of(module)

        def fails(*_: object) -> None:
            raise RuntimeError("out of memory")

        if rank == 1:
            boundary._read = fails
        try:
            module(*local)
        finally:
            vars(boundary).pop("_read", None)

    _refused(Case(P=2), bad, "out of memory (on rank 1 of 2)")


def test_more_kv_heads_than_heads_are_refused() -> None:
    """q and k swapped by mistake."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(local[1], local[0], local[0])

    _refused(Case(P=2), bad, "num_kv_heads (12) of k, v must be at most num_heads (4)")


def test_k_and_v_with_other_head_counts_are_refused() -> None:
    """4 and 2 KV heads."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(local[0], local[1], local[2][:, :, :2])

    _refused(Case(P=2), bad, "v has 2 heads", "heads of k (4)")


LENGTHS = [
    pytest.param(Case(P=2), (4, 3), 7, 8, id="ulysses-4-3"),
    pytest.param(Case(P=4), (3, 3, 2, 2), 10, 12, id="ulysses-3-3-2-2"),
    pytest.param(Case(P=2, degree=1), (3, 4), 7, 8, id="colossal-3-4"),
    pytest.param(Case(P=4, degree=2), (3, 3, 2, 2), 10, 12, id="hybrid-3-3-2-2"),
    pytest.param(Case(P=2, degree=1, load_balance=True), (5, 4), 9, 12, id="balanced-5-4"),
]


@pytest.mark.parametrize(("case", "lengths", "total", "good"), LENGTHS)
def test_unequal_lengths_name_the_helper_and_the_next_good_length(
    case: Case, lengths: tuple[int, ...], total: int, good: int
) -> None:
    """B15, behaviour 44: `tensor_split` gives such shards; gloo alone would abort the process."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(*(x[:, : lengths[rank]] for x in local))

    _refused(
        case,
        bad,
        "local sequence length must be the same on all ranks",
        f"one sequence of {total}, pad it to {good} with pad_sequence",
    )


def test_an_odd_local_length_is_refused_under_load_balance() -> None:
    """B15: the same length on all ranks, and the total that would do."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(*(x[:, :5] for x in local))

    case = Case(P=4, degree=1, load_balance=True)
    _refused(case, bad, "local sequence length (5) must be even", "pad the sequence to 24")


@pytest.mark.parametrize("case", EACH, ids=str)
def test_an_empty_shard_is_refused(case: Case) -> None:
    """Zero tokens on every rank."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(*(x[:, :0] for x in local))

    _refused(case, bad, "local sequence length (0) must be at least 1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda x: x.float(), "dtype of q must be the same on all ranks", id="dtype"),
        pytest.param(lambda x: x[:1], "shape of q without its sequence dim must be", id="batch"),
        pytest.param(lambda x: x[..., :4], "shape of q without its sequence dim", id="head-size"),
        pytest.param(lambda x: x.requires_grad_(), "requires_grad of q must be", id="grad"),
    ],
)
@pytest.mark.parametrize("case", EACH, ids=str)
def test_q_that_differs_on_one_rank_is_refused(
    case: Case, change: Callable[[Tensor], Tensor], message: str
) -> None:
    """It would hang, abort or mix data: what differs is named with the ranks."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        q = local[0].clone()
        module(change(q) if rank == case.P - 1 else q, *local[1:])

    _refused(case, bad, message, f"on rank {case.P - 1}")


def test_q_and_k_of_different_lengths_are_refused() -> None:
    """Local lengths must agree between q, k and v: each is this rank's shard."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(local[0], local[1][:, :6], local[2][:, :6])

    _refused(Case(P=2, degree=1), bad, "have [12, 6, 6] rows", "must have one length")


def test_tensors_with_other_numbers_of_dims_are_refused() -> None:
    """q 4-D, k 3-D."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(local[0], local[1].flatten(2), local[2])

    _refused(Case(P=2, degree=1), bad, "[4, 3, 4] dims must have one number of dims")


@pytest.mark.parametrize(
    ("ndim", "seq_dim", "head_dim", "message"),
    [
        pytest.param(4, 4, 2, "seq_dim (4) must be a dim of a 4-D tensor", id="seq-4"),
        pytest.param(4, 1, 3, "head_dim (3) must not be the last dim", id="head-last"),
        pytest.param(4, 1, -3, "both are dim 1 of a 4-D tensor", id="same-from-the-end"),
        pytest.param(3, 1, 2, "head_dim (2) must not be the last dim (3-D tensor)", id="3-D"),
    ],
)
def test_dims_that_the_tensor_contradicts_are_refused(
    ndim: int, seq_dim: int, head_dim: int, message: str
) -> None:
    """Behaviour 5: what only the tensor can show."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(*(x if ndim == 4 else x[0] for x in local))

    _refused(Case(P=2), bad, message, seq_dim=seq_dim, head_dim=head_dim)


def test_keywords_that_the_style_was_not_told_are_refused() -> None:
    """B08: the default style and an all-keyword call; the message lists what was found."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(query=local[0], key=local[1], value=local[2])

    _refused(
        Case(P=2),
        bad,
        "q must be at position 0, but the call has 0 positional arguments",
        "['key', 'query', 'value']",
        "set qkv_indices or qkv_kwarg_names",
    )


def test_absent_keyword_names_are_refused() -> None:
    """B08: configured names that the call does not have."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(local[0], local[1], value=local[2])

    names = ("q", "k", "v")
    _refused(Case(P=2), bad, "position 2 or keyword 'v'", "'value'", qkv_kwarg_names=names)


def test_an_argument_that_is_no_tensor_is_refused() -> None:
    """A None in q's place; on one rank only, it is still everyone's error."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(None, *local[1:])

    text = _refused(Case(P=2), bad, "q (argument 0) must be a tensor, got NoneType")
    assert text.startswith(("ValueError", "TypeError"))


MASKS = [
    pytest.param((1, 1, 8, 8), id="local-size"),
    pytest.param((1, 1, 24, 8), id="few-keys"),
    pytest.param((1, 1, 7, 24), id="odd-rows"),
    pytest.param((1, 5, 24, 24), id="other-heads"),
]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("case", EACH, ids=str)
def test_a_mask_that_cannot_match_is_refused(case: Case, shape: tuple[int, ...]) -> None:
    """B07: before attention runs, on every rank, with the shape that would do."""

    def bad(rank: int, module: nn.Module, local: list[Tensor]) -> None:
        module(*local, attn_mask=torch.ones(shape, dtype=torch.bool))

    _refused(case, bad, "attn_mask", str(list(shape)), before_data_moves=False)


@pytest.mark.parametrize("case", EACH, ids=str)
@pytest.mark.parametrize("core", [Sdpa, Eager])
def test_an_exception_inside_attention_leaves_nothing_behind(
    case: Case, core: type[nn.Module]
) -> None:
    """Behaviour 25: on all ranks at once; the next call and the next module are right."""

    class Fails(core):  # type: ignore[misc, valid-type]
        fail = True

        def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
            if self.fail:
                raise KeyError("on purpose")
            return super().forward(q, k, v)

    def on(rank: int) -> None:
        module = Fails()
        case.style().apply(module, case.mesh())
        with pytest.raises(KeyError, match="on purpose"):
            module(*(case.local(x, rank) for x in case.qkv()))
        assert attention_window() is None
        module.fail = False
        compare(rank, case, core, applied=module)
        compare(rank, case, core)

    ranks(case.P).run(on)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_indices": (0, 0, 1)}, r"qkv_indices \(\(0, 0, 1\)\) must name q, k and v, three"),
        ({"qkv_indices": 3}, r"qkv_indices \(3\) must name q, k and v"),
        ({"qkv_kwarg_names": ("q", "k", "k")}, r"qkv_kwarg_names .* three different ones"),
        ({"qkv_kwarg_names": "qkv"}, r"qkv_kwarg_names \('qkv'\) must name q, k and v"),
        ({"outputs": 0}, r"outputs \(0\) must be a list of positions or keys"),
    ],
)
def test_arguments_that_name_no_three_tensors_are_refused_at_construction(
    options: dict[str, Any], message: str
) -> None:
    """One tensor for two of the three would be exchanged and handed over as one."""
    with pytest.raises(ValueError, match=message):
        ContextParallel(**options)


def test_a_style_inside_a_module_with_local_input_is_refused() -> None:
    """A plan that hits a module and its child: the inner one cannot know what it holds."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = Sdpa()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = self.core(q, k, v)
            return out

    def run(rank: int) -> None:
        case = Case(P=2)
        outer = Outer()
        case.style(use_local_input=True).apply(outer, case.mesh())
        case.style().apply(outer.core, case.mesh())
        with pytest.raises(ValueError, match="inside another one with use_local_input"):
            outer(*(case.local(x, rank) for x in case.qkv()))

    ranks(2).run(run)


@pytest.mark.parametrize("fault", ["skipped", "other order", "degree", "balance", "groups"])
def test_ranks_in_different_calls_or_styles_are_not_paired(fault: str) -> None:
    """Equal shapes would be exchanged without a word; the error names what differs, everywhere."""

    def run(rank: int) -> str:
        case = Case(P=2, degree=1) if fault == "balance" else Case(P=2)
        mesh, odd = case.mesh(), rank == 1
        styles = [case.style(), case.style()]
        if odd and fault == "degree":
            styles[0] = case.but(degree=1).style()
        if odd and fault == "balance":
            styles[0] = case.but(load_balance=True).style()
        if odd and fault == "groups":
            styles[0] = case.but(head_groups=2).style()
        first, second = (style.apply(Sdpa(), mesh) for style in styles)
        shards = [case.local(x, rank) for x in case.qkv()]
        other = odd and fault in ("skipped", "other order")
        with pytest.raises(ValueError, match="must be the same on all ranks") as caught:
            (second if other else first)(*shards)
        (first if other else second)(*shards) if fault == "other order" else None
        return str(caught.value)

    if fault == "other order":  # both calls differ: the second is refused as well
        errors = ranks(2).errors(run)
        assert all("must be the same on all ranks" in str(error) for error in errors)
        return
    first, second = ranks(2).run(run)
    assert first == second
    assert ("module" if fault == "skipped" else "style") in first


def test_causal_attention_over_fewer_keys_than_the_window_is_refused() -> None:
    """With local input, keys shortened to the number of rows would hide where the rows begin."""

    class Shortened(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2)

    def run(rank: int) -> None:
        case = Case(P=2, degree=1, HK=12)
        core = case.style(use_local_input=True).apply(Shortened(), case.mesh())
        with pytest.raises(ValueError, match="must be the rows"):
            core(*(case.local(x, rank) for x in case.qkv()))

    ranks(2).run(run)


def test_a_mesh_whose_ranks_do_not_ascend_is_refused() -> None:
    """B16: a group numbers its ranks in ascending order, so shards and ranks would disagree."""

    def run(rank: int) -> None:
        mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",))
        with pytest.raises(ValueError, match="must ascend"):
            ContextParallel(ulysses_degree=1).apply(Sdpa(), mesh)

    ranks(2).run(run)


def test_fewer_kv_heads_are_shared_only_if_the_call_says_so() -> None:
    """Torch's rule, inside the boundary as outside: ``enable_gqa`` is False unless passed."""
    case = Case(P=2, degree=1, layout="BNSD")

    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    def on(rank: int) -> None:
        core = case.style().apply(Plain(), case.mesh())
        with pytest.raises(ValueError, match=r"key heads \(4\) must equal query heads \(12\)"):
            core(*(case.local(x, rank) for x in case.qkv()))

    ranks(2).run(on)


@pytest.mark.parametrize("options", [{}, {"use_local_input": True}], ids=["dtensors", "plain"])
@pytest.mark.parametrize("case", EACH, ids=str)
def test_another_layout_whose_sizes_happen_to_fit_is_refused(
    case: Case, options: dict[str, Any]
) -> None:
    """B04: BNSD given to a BSHD style, 8 heads on 6 rows a rank; attention sees what is what."""

    def on(rank: int) -> str:
        module = case.style(**options).apply(Sdpa("BNSD", causal=False), case.mesh())
        x = randn(2, 8, 6, 4, seed=rank)
        with pytest.raises(ValueError, match="which must be its heads here") as caught:
            module(x, x, x)
        assert attention_window() is None
        return str(caught.value)

    first, *others = ranks(case.P).run(on)
    assert all(one == first for one in others)
    assert "has the sequence (" in first and "BSHD is 1, 2 and BNSD is 2, 1" in first
