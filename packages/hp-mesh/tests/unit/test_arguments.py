"""Selection of the tensors of a call, and outputs that keep their type."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_mesh.arguments import find_slots, map_outputs, read_slots, replace_slots

Q, K, V = (torch.full((1,), float(i)) for i in range(3))
LABELS = ("q", "k", "v")


def find(*args: Any, indices: Any = (0, 1, 2), names: Any = (), **kwargs: Any) -> Any:
    return find_slots(
        args, kwargs, labels=LABELS, indices=indices, kwarg_names=names, where="Style"
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "indices", "names", "keys"),
    [
        ((Q, K, V), {}, (0, 1, 2), (), [0, 1, 2]),
        ((V, Q, K, "mask"), {}, (1, 2, 0), (), [1, 2, 0]),
        (("x", Q, K, V), {}, (-3, -2, -1), (), [-3, -2, -1]),
        ((), {"query": Q, "key": K, "value": V}, (0, 1, 2), ("query", "key", "value"), None),
        ((Q, K), {"value": V}, (0, 1, 2), ("query", "key", "value"), [0, 1, "value"]),
        ((), {"query": Q, "key": K, "value": V}, (), ("query", "key", "value"), None),
    ],
    ids=["index", "permuted", "negative", "keyword", "mixed", "keyword-only"],
)
def test_tensors_are_found_by_position_keyword_and_both(
    args: Any, kwargs: Any, indices: Any, names: Any, keys: Any
) -> None:
    slots = find(*args, indices=indices, names=names, **kwargs)
    assert [s.key for s in slots] == (keys or list(names))
    assert all(a is b for a, b in zip(read_slots(args, kwargs, slots), (Q, K, V), strict=True))


def test_keyword_that_is_present_wins_over_the_position() -> None:
    slots = find("not q", K, V, names=("query", "key", "value"), query=Q)
    assert [s.key for s in slots] == ["query", 1, 2]


def test_replacing_leaves_everything_else_the_same_object() -> None:
    mask, other = object(), object()
    args, kwargs = (mask, Q, K), {"value": V, "other": other}
    slots = find(*args, indices=(1, 2, 9), names=("a", "b", "value"), **kwargs)
    new_args, new_kwargs = replace_slots(args, kwargs, slots, ["q", "k", "v"])
    assert new_args == (mask, "q", "k")
    assert new_kwargs == {"value": "v", "other": other}
    assert args == (mask, Q, K) and kwargs["value"] is V, "the caller's call is not changed"


@pytest.mark.parametrize(
    ("args", "kwargs", "indices", "names", "parts"),
    [
        ((Q, K), {}, (0, 1, 2), (), ["Style: v must be at position 2", "2 positional", "[]"]),
        ((Q, K), {"vlaue": V}, (0, 1, 2), ("q", "k", "value"), ["keyword 'value'", "['vlaue']"]),
        ((), {}, (), ("q", "k", "v"), ["no position or keyword 'q'", "qkv_kwarg_names"]),
        ((Q, K, V), {}, (0, 1, -4), (), ["position -4"]),
    ],
    ids=["too-few", "misspelt", "nowhere", "before-the-first"],
)
def test_missing_tensor_is_named_with_what_the_call_holds(
    args: Any, kwargs: Any, indices: Any, names: Any, parts: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        find(*args, indices=indices, names=names, **kwargs)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, [torch.ones(1)]], ids=["None", "int", "list"])
def test_argument_that_is_no_tensor_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Style: k \(argument 1\) must be a tensor, got"):
        find(Q, value, V)


Pair = namedtuple("Pair", ["out", "lse"])


class Output(OrderedDict[str, Any]):
    """As transformers' ModelOutput: an ordered dict with attributes, None hidden."""

    def __init__(self, out: Any = None, extra: Any = None, weights: Any = None) -> None:
        super().__init__()
        for name, value in (("out", out), ("extra", extra), ("weights", weights)):
            object.__setattr__(self, name, value)
            if value is not None:
                super().__setitem__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def double(output: Any, declared: Any = None) -> Any:
    return map_outputs(output, declared, lambda x: x * 2, lambda x: x, "Style")


OUT, LSE = torch.tensor([3.0]), torch.tensor([5.0])


@pytest.mark.parametrize(
    ("output", "first", "second"),
    [
        ((OUT, LSE), 0, 1),
        ([OUT, LSE], 0, 1),
        (Pair(OUT, LSE), 0, 1),
        ({"out": OUT, "lse": LSE}, "out", "lse"),
        ({0: OUT, 1: LSE}, 0, 1),
        (OrderedDict([(7, OUT), (3, LSE)]), 7, 3),
        (defaultdict(list, out=OUT, lse=LSE), "out", "lse"),
        (MappingProxyType({"out": OUT, "lse": LSE}), "out", "lse"),
        (Output(out=OUT, weights=LSE), "out", "weights"),
        (torch.return_types.max((OUT, LSE)), 0, 1),
        ((None, OUT, LSE), 1, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outputs_keep_their_type_and_only_the_first_tensor_is_converted(
    output: Any, first: Any, second: Any
) -> None:
    result = double(output)
    assert type(result) is type(output)
    assert result[first].item() == 6.0
    assert result[second] is LSE, "an extra output is the same object"
    if hasattr(output, "keys"):
        assert list(result) == list(output), "keys and their order"
    declared = double(output, [first, second])
    assert (declared[first].item(), declared[second].item()) == (6.0, 10.0)


def test_the_modules_own_output_object_is_not_changed() -> None:
    output = {"out": OUT}
    assert double(output) is not output and output["out"] is OUT


def test_attributes_of_a_model_output_follow_its_entries() -> None:
    result = double(Output(out=OUT, weights=LSE))
    assert result.out.item() == 6.0 and result.extra is None and result.weights is LSE


def test_transformers_model_output_keeps_its_type() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="an extra of hp-cp")
    result = double(outputs.BaseModelOutput(last_hidden_state=OUT, attentions=(LSE,)))
    assert type(result) is outputs.BaseModelOutput
    assert result.last_hidden_state.item() == 6.0 and result["last_hidden_state"].item() == 6.0
    assert result.hidden_states is None and result.attentions[0] is LSE


def test_objects_that_are_no_tensors_and_nested_ones_are_left_alone() -> None:
    nested = (LSE, [LSE])
    result = double((OUT, "x", nested, None))
    assert result[1] == "x" and result[2] is nested and result[3] is None


@dataclass
class Record:
    out: Tensor


@pytest.mark.parametrize(
    ("output", "declared", "text"),
    [
        (None, None, "returned NoneType, which must hold a tensor at its first level"),
        (("x", [OUT]), None, "tuple of ['str', 'list']"),
        ({"a": 1}, None, "dict with keys ['a']"),
        ((OUT, "x"), (1,), "must hold a tensor at [1]"),
        ((OUT,), (2,), "must hold a tensor at [2]"),
        ((OUT, LSE), (), "must hold a tensor at []"),
        (Record(OUT), None, "returned Record"),
    ],
)
def test_output_without_the_tensor_is_refused_with_what_was_returned(
    output: Any, declared: Any, text: str
) -> None:
    with pytest.raises(TypeError) as caught:
        double(output, declared)
    assert str(caught.value).startswith("Style: the module ") and text in str(caught.value)
