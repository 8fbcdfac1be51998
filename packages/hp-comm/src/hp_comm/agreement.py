"""Let the ranks compare a call before any data moves, so that a mistake is an error and not a hang.

Every rank sends one header of fixed size: whether it has an error to report, a digest of the whole
signature, and as much of its text as fits; also a fingerprint of data that must differ::

    | status 1 | text length 2 | digest 16 | fingerprint 16 | text 989 |     bytes

Whether the comparison runs follows from the call's index and ``HP_PREFLIGHT`` alone. It must never
follow from what one rank has seen before: a rank that meets a new shape would then wait for peers
that do not.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_comm import _torch
from hp_comm.backward_order import noted
from hp_comm.counters import record
from hp_comm.failures import Naming
from hp_comm.fingerprint import FINGERPRINT_BYTES, NO_FINGERPRINT, LocalRows, RowsWatch
from hp_mesh.checks import fail

__all__ = ["HEADER_BYTES", "compares_always", "gather_headers", "next_module", "preflight"]

HEADER_BYTES = 1024
_DATA_AT = 1 + 2 + 16
_TEXT_AT = _DATA_AT + FINGERPRINT_BYTES
_TEXT_BYTES = HEADER_BYTES - _TEXT_AT
_VARIABLE = "HP_PREFLIGHT"
_MODES = ("always", "first", "off")
_ABSENT = "absent"
_BACKWARD = "backward passes since the ranks last compared"
_applied: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_module(group: ProcessGroup) -> str:
    """Name a module by how many styles were applied on ``group`` before, alike on all its ranks.

    For signatures: ranks that are in the calls of different modules must not be paired.
    """
    number = _applied[group] = _applied.get(group, 0) + 1
    return f"number {number} that a style was applied to"


def preflight(
    group: ProcessGroup,
    where: str,
    signature: Mapping[str, object] | Callable[[], Mapping[str, object]],
    *,
    error: Exception | None = None,
    call_index: int,
    way_out: Callable[[Mapping[str, Sequence[str]]], str] | None = None,
    watch: RowsWatch | None = None,
    local: LocalRows | None = None,
) -> None:
    """Raise the same ``ValueError`` on every rank if one has an error or the ranks disagree.

    ``HP_PREFLIGHT=always|first|off`` says when ranks compare; ``first`` is the call with index 0,
    and the next one where all ranks came with the same rows.
    Default: ``always`` on gloo, ``first`` elsewhere. It must be set alike on all ranks.
    Also compared is which calls on ``group`` went backward since the last comparison, in what order
    (`hp_comm.backward_order`): ranks that differ have traded gradients of different modules.

    Args:
        group: The ranks that must agree.
        where: Who asks, as an error message begins.
        signature: What must be the same on all ranks, by the name to show: shapes, dtypes, plan;
            or what returns it, called only if ranks compare. What it raises is an ``error``.
        error: What is already wrong on this rank. The others learn of it in the same call.
        call_index: How many calls of this boundary went before, counted alike on all ranks.
        way_out: Ends the message about ranks that disagree. Called on every rank with the entries
            that differ, ``{name: value as text by rank}``; must return the same text on all.
        watch: The boundary's own, if ``local`` is to be looked at; given with an ``error``, too.
        local: What each rank must hold another part of. If all hold the same, `RowsWatch` warns.

    Raises:
        ValueError: With one text on all ranks. If nothing is compared, ``error``, only here.
    """
    looks = watch is not None and watch.begin_call()
    if not _runs(where, group, call_index, looks):
        if error is not None:
            raise error
        return
    said: Mapping[str, object] = {}
    passes = noted(group)
    data = NO_FINGERPRINT
    if error is None:
        try:
            said = signature() if callable(signature) else signature
            said = {_BACKWARD: passes, **said} if passes else said
            if looks and local is not None:
                data = local.fingerprint()
        except Exception as problem:  # whatever it is, the others would wait for this rank
            error = problem
    headers = gather_headers(where, group, _header(where, said, error, data))
    # one comparison of digests on the good path; texts are read only when they are needed
    agreed = torch.equal(headers[:, :_DATA_AT], headers[:1, :_DATA_AT].expand(len(headers), -1))
    if agreed and not int(headers[0, 0]):
        if watch is not None and local is not None and looks:
            watch.take(where, group, local, headers[:, _DATA_AT:_TEXT_AT])
        return
    rows = [bytes(row) for row in headers.tolist()]
    raise ValueError(_verdict(where, rows, way_out)) from error


def compares_always() -> bool:
    """Whether ``HP_PREFLIGHT=always`` asks for all that ranks can compare, whatever it costs."""
    return os.environ.get(_VARIABLE) == "always"


def _runs(where: str, group: ProcessGroup, call_index: int, looks: bool) -> bool:
    mode = os.environ.get(_VARIABLE) or ("always" if _torch.is_plain_gloo(group) else "first")
    if mode not in _MODES:
        raise fail(where, f"HP_PREFLIGHT ({mode!r}) must be one of {', '.join(_MODES)}")
    if _torch.group_size(group) == 1:
        return False
    return mode == "always" or (mode == "first" and (call_index == 0 or looks))


def _header(
    where: str, signature: Mapping[str, object], error: Exception | None, data: bytes
) -> bytes:
    if error is not None:
        text = str(error) or type(error).__name__
    else:
        lines = {"call": where, **signature}
        text = "\n".join(f"{name}={_flat(value)}" for name, value in lines.items())
    encoded = text.encode()
    cut = encoded[:_TEXT_BYTES]
    status = bytes([error is not None])
    digest = blake2b(encoded, digest_size=16).digest()
    header = status + len(cut).to_bytes(2, "big") + digest + data + cut
    return header.ljust(HEADER_BYTES, b"\0")


def _flat(value: object) -> str:
    return str(value).replace("\n", " ")


def gather_headers(where: str, group: ProcessGroup, header: bytes) -> Tensor:
    """Return every rank's header, ``[P, HEADER_BYTES]`` bytes on the CPU; one collective.

    Args:
        where: Who asks; a collective that does not complete says so.
        group: The ranks, all of which must call.
        header: `HEADER_BYTES` long.
    """
    device, size = _torch.group_device(group), _torch.group_size(group)
    mine = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    headers = torch.empty(size * HEADER_BYTES, dtype=torch.uint8, device=device)
    record("preflight", size, (size - 1) * HEADER_BYTES)
    with Naming(where, "preflight", group):
        _torch.all_gather(headers, mine, group, async_op=False)
    return headers.view(size, HEADER_BYTES).cpu()


def _text(header: bytes) -> str:
    length = int.from_bytes(header[1:3], "big")
    return header[_TEXT_AT : _TEXT_AT + length].decode(errors="ignore")


def _verdict(
    where: str,
    headers: Sequence[bytes],
    way_out: Callable[[Mapping[str, Sequence[str]]], str] | None,
) -> str:
    """Say what is wrong, from the headers alone: the same words on every rank."""
    failed = {rank: _text(header) for rank, header in enumerate(headers) if header[0]}
    if failed:
        return _failures(failed, len(headers))
    fields = [dict(_fields(_text(header))) for header in headers]
    where = fields[0].get("call", where)  # the ranks may be in different calls
    names = dict.fromkeys(name for one in fields for name in one)
    differing = {
        name: values
        for name in names
        if len(set(values := [one.get(name, _ABSENT) for one in fields])) > 1
    }
    parts = [
        f"{name} must be the same on all ranks of the group, not {_by_rank(values)}"
        for name, values in differing.items()
    ] or [f"signatures must be the same on all ranks (beyond {_TEXT_BYTES} bytes)"]
    if _BACKWARD in differing:
        parts.append("run backward of the same outputs, in the same order, on all of them")
    if way_out is not None and (advice := way_out(differing)):
        parts.append(advice)
    return f"{where}: " + "; ".join(parts)


def _failures(failed: Mapping[int, str], size: int) -> str:
    texts = dict.fromkeys(failed.values())
    if len(texts) > 1:
        return "; ".join(f"on {_ranks([r for r in failed if failed[r] == t])}: {t}" for t in texts)
    (text,) = texts
    return text if len(failed) == size else f"{text} (on {_ranks(list(failed))} of {size})"


def _fields(text: str) -> list[tuple[str, str]]:
    parts = (line.partition("=") for line in text.split("\n"))
    return [(name, value) for name, _, value in parts]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _by_rank(values: Sequence[str]) -> str:
    kinds = dict.fromkeys(values)
    return " and ".join(
        f"{kind} on {_ranks([r for r, value in enumerate(values) if value == kind])}"
        for kind in kinds
    )
