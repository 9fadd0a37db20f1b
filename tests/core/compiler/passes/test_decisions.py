"""What was decided once is decided again alike."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from nimble_core.compiler.passes.channels_last import to_channels_last
from nimble_core.compiler.passes.conv_algorithms import choose_forms
from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.fold_batchnorm import affine_norms, fold_affine
from nimble_core.compiler.passes.gemv import row_products_as_sums
from nimble_core.compiler.passes.merge_siblings import merge_siblings
from nimble_core.compiler.passes.pooling import choose_pools
from nimble_core.compiler.to_fx import lift
from nimble_core.ir.program import KernelChoice
from tests.support.rewrite_models import (
    Drawn,
    drawn_models,
    eager_effects,
    effects,
    fake_timer,
    lifted,
    recorded,
    same,
    targets,
)

HOST = torch.device("cpu")


def whole(module: fx.GraphModule, decisions: Decisions, *, compiled: bool, layout: bool) -> None:
    """All that is done to a graph, in the order in which it is done."""
    affine_norms(module)
    share_equal(module)
    layout = layout and to_channels_last(module) > 0
    merge_siblings(module, HOST, decisions, channels_last=layout, compiled=compiled)
    if compiled:
        row_products_as_sums(module)
    elif layout:
        choose_pools(module, HOST, decisions)
    choose_forms(module, HOST, decisions, channels_last=layout, compiled=compiled)
    if not compiled:
        fold_affine(module)


@settings(max_examples=30)
@given(
    drawn_models(dtype=torch.float32), st.booleans(), st.booleans(), st.lists(st.floats(1, 2), min_size=1, max_size=6)
)
def test_given_choices_make_the_same_graph(
    made: tuple[Drawn, tuple[torch.Tensor, ...]], compiled: bool, layout: bool, times: list[float]
) -> None:
    model, inputs = made
    one = recorded(model, *inputs)
    first, measured = lift(one.recording), Decisions(fake_timer(times))
    whole(first, measured, compiled=compiled, layout=layout)
    assert len(set(measured.made)) == len(measured.made)
    again, follow = lift(one.recording), Decisions(None, frozenset(measured.made))
    whole(again, follow, compiled=compiled, layout=layout)
    assert follow.made == measured.made
    assert targets(again) == targets(first)
    assert [list(map(str, node.all_input_nodes)) for node in again.graph.nodes] == [
        list(map(str, node.all_input_nodes)) for node in first.graph.nodes
    ]
    again.recompile()
    assert same(effects(again, one), eager_effects(one), 2e-4)


def node_of(calls: tuple[int, ...]) -> fx.Node:
    node = fx.Graph().call_function(torch.relu, ())
    node.meta["eager"] = calls
    return node


@given(st.lists(st.integers(0, 5), max_size=3).map(lambda calls: tuple(sorted(calls))), st.booleans())
def test_without_given_choices_what_is_wanted_is_taken_and_noted(calls: tuple[int, ...], wanted: bool) -> None:
    decisions = Decisions()
    assert decisions.take(node_of(calls), "k", wanted=wanted) is wanted
    assert decisions.made == [KernelChoice(min(calls, default=0), "k")] * wanted


@given(st.booleans(), st.sampled_from(["k", "other"]), st.integers(1, 3))
def test_given_choices_count_and_wishes_do_not(wanted: bool, kernel: str, call: int) -> None:
    decisions = Decisions(None, frozenset([KernelChoice(1, "k")]))
    taken = decisions.take(node_of((call, 7)), kernel, wanted=wanted)
    assert taken == ((call, kernel) == (1, "k"))
    assert decisions.made == [KernelChoice(1, "k")] * taken


def test_no_choices_at_all_are_choices_too() -> None:
    one, module = lifted(torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU()), torch.randn(1, 3, 4, 4))
    decisions = Decisions(fake_timer([2.0, 1.0]), frozenset())
    assert choose_forms(module, HOST, decisions, channels_last=False, compiled=False) == 0
    assert decisions.made == []
    assert choose_forms(lift(one.recording), HOST, Decisions(), channels_last=False, compiled=False) == 1
