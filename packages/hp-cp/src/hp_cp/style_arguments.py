"""What a constructor can know to be wrong, before there is a mesh or a tensor; no torch."""

from __future__ import annotations

from hp_mesh.checks import fail, require, require_positive

__all__ = ["check_cross_attention", "check_degree", "check_style_arguments", "resolve_dims"]


def check_style_arguments(
    where: str,
    *,
    ulysses_degree: int | None,
    load_balance: bool,
    seq_dim: int,
    head_dim: int,
    balance_hybrid: bool = False,
) -> None:
    """Refuse what a constructor can know to be wrong, before there is a mesh or a tensor."""
    check_degree(where, ulysses_degree, load_balance, balance_hybrid)
    for name, dim in (("seq_dim", seq_dim), ("head_dim", head_dim)):
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise fail(
                where, f"{name} ({dim!r}) must be an integer", "BSHD is seq_dim=1, head_dim=2"
            )
    require(
        seq_dim != head_dim,
        where,
        f"seq_dim ({seq_dim}) must differ from head_dim ({head_dim})",
        "BSHD is seq_dim=1, head_dim=2 and BNSD is seq_dim=2, head_dim=1",
    )
    require(
        seq_dim != -1,
        where,
        "seq_dim (-1) must not be the last dim, which holds the head size",
        "BSHD is seq_dim=1, head_dim=2",
    )
    require(
        head_dim != -1 or ulysses_degree == 1,
        where,
        "head_dim (-1) must not be the last dim, which holds the head size",
        "BSHD is seq_dim=1, head_dim=2; ulysses_degree=1 needs no head dim",
    )


def check_cross_attention(
    where: str,
    cross_attention: bool,
    *,
    load_balance: bool,
    kv_chunks: int,
    sliding_window: int | None,
    balance_hybrid: bool,
    head_groups: int = 1,
) -> None:
    """Refuse options that count on q, k and v being of one sequence."""
    require(
        isinstance(cross_attention, bool),
        where,
        f"cross_attention ({cross_attention!r}) must be True or False",
    )
    others = {
        "load_balance": load_balance,
        "balance_hybrid": balance_hybrid,
        "kv_chunks": kv_chunks != 1,
        "sliding_window": sliding_window is not None,
        "head_groups": head_groups != 1,
    }
    taken = [name for name, is_set in others.items() if is_set]
    require(
        not (cross_attention and taken),
        where,
        f"cross_attention=True must not come with {' and '.join(taken)}, which count on q, k and v "
        "of one sequence",
        "leave one of them out",
    )


def resolve_dims(
    where: str, ndim: int, seq_dim: int, head_dim: int, *, needs_heads: bool = True
) -> tuple[int, int]:
    """Return ``(seq_dim, head_dim)`` counted from 0 for a tensor of ``ndim`` dims, or refuse them.

    With ``needs_heads=False`` (Colossal on ``[B, S, H*D]``) ``head_dim`` may name anything.
    """
    layouts = "BSHD is seq_dim=1, head_dim=2, BNSD 2, 1, TND 0, 1"
    resolved = []
    for name, dim in (("seq_dim", seq_dim), ("head_dim", head_dim)):
        required = name == "seq_dim" or needs_heads
        require(
            not required or -ndim <= dim < ndim,
            where,
            f"{name} ({dim}) must be a dim of a {ndim}-D tensor",
            layouts,
        )
        index = dim % ndim if -ndim <= dim < ndim else dim
        require(
            not required or index != ndim - 1,
            where,
            f"{name} ({dim}) must not be the last dim ({ndim}-D tensor), which holds the head size",
            layouts,
        )
        resolved.append(index)
    seq, head = resolved
    require(
        not needs_heads or seq != head,
        where,
        f"seq_dim ({seq_dim}) must differ from head_dim ({head_dim}): both are dim {seq} "
        f"of a {ndim}-D tensor",
        layouts,
    )
    return seq, head


def check_degree(
    where: str, ulysses_degree: int | None, load_balance: bool, balance_hybrid: bool = False
) -> None:
    """Refuse a degree that is none, load balance outside Colossal, and the other outside Hybrid."""
    if ulysses_degree is not None:
        require_positive(
            where, "ulysses_degree", ulysses_degree, "use None for Ulysses over all CP ranks"
        )
    require(
        isinstance(load_balance, bool),
        where,
        f"load_balance ({load_balance!r}) must be True or False",
    )
    require(
        not load_balance or ulysses_degree == 1,
        where,
        f"load_balance (True) requires ulysses_degree=1, not ulysses_degree ({ulysses_degree})",
        "set ulysses_degree=1, or leave load_balance off: Ulysses ranks see the whole sequence "
        "and are balanced without it, and Hybrid has balance_hybrid=True",
    )
    require(
        isinstance(balance_hybrid, bool),
        where,
        f"balance_hybrid ({balance_hybrid!r}) must be True or False",
    )
    require(
        not balance_hybrid or not load_balance,
        where,
        "balance_hybrid (True) must not come with load_balance (True), which is for "
        "ulysses_degree=1",
        "keep the one that fits the degree",
    )
    require(
        not balance_hybrid or (ulysses_degree is not None and ulysses_degree > 1),
        where,
        f"balance_hybrid (True) requires a degree between 1 and cp_size, not ulysses_degree "
        f"({ulysses_degree})",
        "use load_balance=True with ulysses_degree=1; None needs no balance",
    )
