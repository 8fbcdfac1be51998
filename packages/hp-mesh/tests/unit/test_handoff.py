"""Views are learned and replayed, and only an unchanged view of an output counts as that output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_mesh.geometry import Geometry, learn_view
from hp_mesh.handoff import (
    IN_FLIGHT,
    Handoff,
    Lane,
    Launched,
    is_pure_view,
    same_origin,
    split_output,
)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "heads": lambda y: y.view(*y.shape[:2], 4, 6),
    "heads-first": lambda y: y.view(*y.shape[:2], 4, 6).transpose(1, 2),
    "sequence-first": lambda y: y.transpose(0, 1),
    "grouped": lambda y: y.view(*y.shape[:2], 2, 2, 6).permute(3, 0, 2, 1, 4),
    "joined": lambda y: y.view(-1, 4, 6),
    "flat": lambda y: y.view(-1),
    "split-and-joined": lambda y: y.view(*y.shape[:2], 4, 6).flatten(0, 1).flatten(1),
    "one-more-dim": lambda y: y.unsqueeze(1).unsqueeze(-1),
    "one-head": lambda y: y.view(*y.shape[:2], 1, 24).transpose(1, 2),
}
NOT_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda y: y.clone(),
    "fewer-heads": lambda y: y.view(*y.shape[:2], 4, 6)[:, :, :2],
    "every-other": lambda y: y[..., ::2],
    "repeated": lambda y: y.unsqueeze(1).expand(-1, 3, -1, -1),
    "diagonal": lambda y: y.view(-1, 4, 6).diagonal(dim1=1, dim2=2),
    "transposed-copy": lambda y: y.transpose(0, 1).contiguous(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_replayed_on_data_of_other_sizes(view: Callable[[Tensor], Tensor]) -> None:
    """Learned on ``[2, 5, 24]``; batch and length may change, the parts of a split dim may not."""
    y = torch.randn(2, 5, 24)
    recipe = learn_view(y, view(y))
    assert recipe is not None
    for B, S in ((2, 5), (3, 7), (1, 5), (2, 1)):
        other = torch.randn(B, S, 24)
        replayed = recipe.apply(other)
        assert replayed is not None and replayed.data_ptr() == other.data_ptr()
        assert torch.equal(replayed, view(other))
    assert recipe.apply(torch.randn(2, 24)) is None


@pytest.mark.parametrize("change", NOT_VIEWS.values(), ids=NOT_VIEWS)
def test_what_is_not_all_of_the_output_is_not_learned(change: Callable[[Tensor], Tensor]) -> None:
    """Copies, parts, repetitions."""
    y = torch.randn(2, 5, 24)
    assert learn_view(y, change(y)) is None


def test_a_learned_split_that_no_longer_fits_is_not_replayed() -> None:
    """24 was split as 4 x 6: 36 is another model; strided data may not join."""
    y = torch.randn(2, 5, 24)
    heads, joined = learn_view(y, y.view(2, 5, 4, 6)), learn_view(y, y.view(10, 24))
    assert heads is not None and joined is not None
    assert heads.apply(torch.randn(2, 5, 36)) is None
    assert joined.apply(torch.randn(5, 2, 24).transpose(0, 1)) is None


def test_a_dropped_dim_of_size_one_must_stay_one() -> None:
    """[1, S, D] -> [S, D] says nothing about two batches."""
    y = torch.randn(1, 5, 24)
    recipe = learn_view(y, y.squeeze(0))
    assert recipe is not None
    assert recipe.apply(torch.randn(2, 5, 24)) is None
    again = recipe.apply(torch.randn(1, 9, 24))
    assert again is not None and again.shape == (9, 24)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_any_chain_of_splits_and_transposes_is_learned(data: st.DataObject) -> None:
    """Whatever the sizes and strides: replayed on the same data it is the same view."""
    y = torch.randn(*data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    x = y
    for _ in range(data.draw(st.integers(0, 4))):
        if x.ndim > 1 and data.draw(st.booleans()):
            x = x.permute(data.draw(st.permutations(range(x.ndim))))
        else:
            dim = data.draw(st.integers(0, x.ndim - 1))
            size = x.size(dim)
            part = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            x = x.unflatten(dim, (part, size // part))
    recipe = learn_view(y, x)
    assert recipe is not None
    replayed = recipe.apply(y)
    assert replayed is not None and Geometry.of(replayed).is_same(Geometry.of(x))


def _produced() -> tuple[Tensor, Tensor, Launched]:
    layer = torch.nn.Linear(3, 24)
    y = layer(torch.randn(2, 5, 3))
    view = y.view(2, 5, 4, 6)
    return y, view, Launched.of(y, y, view=view)


def test_the_view_that_was_sent_matches_and_nothing_else() -> None:
    """Other views, copies, detached views, and gradients that bypass do not."""
    y, view, item = _produced()
    assert item.matches(view)
    assert item.matches(y.view(2, 5, 24, 1).view(2, 5, 4, 6))
    assert item.matches(y[:].split(24, -1)[0].reshape(2, 5, 4, 6))
    for other in (view.clone(), view.detach(), view.data, 1 * view, view.transpose(1, 2), view + 0):
        assert not item.matches(other)
    view.register_hook(lambda grad: grad)
    assert not item.matches(view)
    assert item.matches(y.view(2, 5, 4, 6))
    with torch.no_grad():
        assert item.matches(view.detach())  # no gradient is asked for
        view.mul_(2)
        assert not item.matches(view)


def test_hooks_on_the_output_itself_do_not_matter() -> None:
    """They stand behind the launch in the graph, and see its gradient."""
    y, _, _ = _produced()
    y.retain_grad()
    y.register_hook(lambda grad: grad)
    item = Launched.of(y, y, view=y)
    assert item.matches(y)


def test_a_leaf_may_be_handed_off() -> None:
    """`Handoff` returns its argument, which may be a leaf."""
    x = torch.randn(2, 5, 24, requires_grad=True)
    y = Handoff()(x)
    assert y is x
    item = Launched.of(y, y, view=y)
    assert item.matches(y)
    assert item.matches(y.view(2, 5, 4, 6).view(2, 5, 24))
    assert not item.matches(torch.randn(2, 5, 24, requires_grad=True))


def test_requires_grad_must_be_what_it_was() -> None:
    """What was sent without a graph has no gradient to give."""
    y = torch.randn(2, 24)
    item = Launched.of(y, y, view=y)
    assert is_pure_view(y, item)
    y.requires_grad_()
    assert not is_pure_view(y, item)


def test_an_output_lives_as_long_as_a_view_of_it() -> None:
    """The queue holds it weakly."""
    y, view, item = _produced()
    del y
    assert item.is_alive() and item.is_source_of(view)
    del view
    assert not item.is_alive()


def test_a_change_through_data_shows_while_the_view_is_learned() -> None:
    """It counts no version; NaN is equal to itself here."""
    y = torch.tensor([[1.0, float("nan")]])
    item = Launched.of(y, y)
    assert item.is_unchanged(y)
    y.data.mul_(2)
    assert not item.is_unchanged(y)


class _Sent:
    """Stands for a handle."""

    def wait(self) -> None:
        pass


def _launch(lane: Lane, y: Tensor) -> Launched:
    lane.tidy()
    item = Launched.of(y, y, _Sent(), y)  # type: ignore[arg-type]
    lane.add(item)
    return item


def test_a_lane_is_bounded_and_notices_waste() -> None:
    """What fails to arrive once is forgiven; more in sixteen is not; nothing is kept for ever."""
    for unused, wasteful in ((1, False), (2, True)):
        lane, held = Lane(), [torch.randn(2, 3) for _ in range(3 * IN_FLIGHT)]
        seen = False
        for n, y in enumerate(held):
            item = _launch(lane, y)
            if n >= unused:
                assert lane.find(y) is item
                item.reached = True
                lane.items.remove(item)
            assert len(lane.items) <= IN_FLIGHT
            seen = seen or lane.is_wasteful()
        assert seen is wasteful
        assert not lane.items
        assert not lane.expects()


def test_of_several_outputs_in_one_buffer_the_matching_one_is_found() -> None:
    """A static buffer that is written anew for each call."""
    lane, buffer = Lane(), torch.zeros(2, 3)
    first = _launch(lane, buffer)
    buffer.add_(1)
    second = _launch(lane, buffer)
    assert lane.find(buffer) is second
    assert not first.matches(buffer)
    assert lane.find(torch.zeros(2, 3)) is None


def test_one_tensor_is_found_in_what_a_module_returns() -> None:
    """Alone, in a list, beside None; not two, not a dict."""
    y = torch.randn(2, 9)
    for output in (y, [y], (y,), (y, None)):
        found = split_output(output, None, 0)
        assert found is not None and all(part is y for part in found)
    for bad in (None, (y, y), {"y": y}, ()):
        assert split_output(bad, None, 0) is None
    found = split_output(y, (4, 3, 2), 1)
    assert found is not None and torch.equal(found[1], y[:, 4:7])
    assert split_output(y, (4, 3, 3), 1) is None


def test_two_views_of_one_output_have_one_origin_and_a_detached_one_has_none() -> None:
    """A gradient may take another way only if it arrives at the same place and nobody looks."""
    leaf = torch.randn(2, 6, 4, requires_grad=True)
    y = leaf * 2

    assert same_origin(y.unsqueeze(2), y.view(2, 6, 1, 4))
    assert same_origin(leaf.unsqueeze(2), leaf.unsqueeze(2)) and same_origin(
        leaf, leaf.view_as(leaf)
    )
    assert not same_origin(y, y.detach())
    assert not same_origin(y.unsqueeze(2), (y * 1).unsqueeze(2))
    watched = y.unsqueeze(2)
    watched.retain_grad()
    assert not same_origin(watched, y.unsqueeze(2)) and same_origin(watched, watched)
