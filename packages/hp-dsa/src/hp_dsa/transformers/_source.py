"""Whether transformers' code is the code that the absorbed layers were written against.

They take transformers' parameters, projections and rotary embeddings and put the rest in their own
order, so that a change of what a layer computes would not be noticed: it must be the same code.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import threading
import tokenize
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import transformers

from hp_mesh.checks import fail

__all__ = ["check_source", "fingerprints"]

TESTED = "5.24"

_IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

_lock = threading.Lock()  # inspect parses the module, which CPython 3.11 does not do in two threads
_found: dict[str, dict[str, str]] = {}

_OBJECTS = (
    "RotaryEmbedding",
    "Indexer",
    "Attention",
    "DecoderLayer",
    "Model",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_interleave",
    "yarn_get_mscale",
    "yarn_apply_mscale",
)
_KNOWN: Mapping[str, Mapping[str, str]] = {
    "DeepseekV32": {
        "RotaryEmbedding": "1b87043bb6218fe2",
        "Indexer": "99238b32966644a7",
        "Attention": "33ead6513a48ba8f",
        "DecoderLayer": "794f77fcdfaf7bea",
        "Model": "25b1be955607fd59",
        "apply_rotary_pos_emb": "43e8cd5d29ae763a",
        "apply_rotary_pos_emb_interleave": "5dcc4c1fea514886",
        "yarn_get_mscale": "54482122c14d7e0b",
        "yarn_apply_mscale": "0ea0b1447a2e0091",
    },
    "GlmMoeDsa": {
        "RotaryEmbedding": "be62ef5245e95418",
        "Indexer": "496d738fd73bf268",
        "Attention": "23d1df3217308f77",
        "DecoderLayer": "5b0a4a28860c764e",
        "Model": "1f6b503c75c19834",
        "apply_rotary_pos_emb_interleave": "5dcc4c1fea514886",
        "yarn_get_mscale": "54482122c14d7e0b",
        "yarn_apply_mscale": "0ea0b1447a2e0091",
    },
}
"""Of transformers 5.24.0."""


def fingerprints(module: ModuleType, prefix: str) -> dict[str, str]:
    """Return a digest for each object of a model's module that the layers rely on.

    Args:
        module: The modeling module.
        prefix: What its classes' names begin with.
    """
    with _lock:
        if prefix not in _found:
            names = {n: prefix + n if n[0].isupper() else n for n in _OBJECTS}
            items = {n: getattr(module, name, None) for n, name in names.items()}
            _found[prefix] = {n: _digest(item) for n, item in items.items() if item is not None}
        return _found[prefix]


def _digest(item: Any) -> str:
    """Return a digest of the source without comments, docstrings and layout."""
    source = inspect.getsource(inspect.unwrap(item))
    kept: list[str] = []
    at_start = True  # a string that is a statement of its own is a docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _IGNORED:
            at_start = at_start or token.type in (tokenize.NEWLINE, tokenize.INDENT)
            continue
        if not (at_start and token.type == tokenize.STRING):
            kept.append(token.string)
        at_start = False
    return hashlib.sha256(" ".join(kept).encode()).hexdigest()[:16]


def check_source(module: ModuleType, prefix: str, where: str) -> None:
    """Refuse a transformers whose layers are not those that ours were written against."""
    try:
        found = fingerprints(module, prefix)
    except OSError:  # compiled without its source
        return
    known = _KNOWN[prefix]
    differing = sorted(name for name in known if found.get(name) != known[name])
    if differing:
        shown = ", ".join(prefix + n if n[0].isupper() else n for n in differing)
        raise fail(
            where,
            f"transformers ({transformers.__version__}) must have the {prefix} code of {TESTED}, "
            f"but {shown} differ",
            f"install transformers=={TESTED}.*, or pass check_source=False after comparing logits",
        )
