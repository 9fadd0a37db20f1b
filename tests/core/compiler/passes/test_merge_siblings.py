"""Siblings run as one where it pays, and each gets its own part."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.compiler.passes.channels_last import to_channels_last
from nimble_core.compiler.passes.conv_algorithms import Site, choose_forms, forms_of
from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.fold_batchnorm import affine_norms, fold_affine
from nimble_core.compiler.passes.merge_siblings import joined, merge_siblings
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.to_fx import calls_of, lift
from nimble_core.ir.program import KernelChoice
from nimble_core.runtime.device import Timed
from tests.support.rewrite_models import (
    Drawn,
    claimed,
    drawn_models,
    eager_effects,
    effects,
    fake_timer,
    lifted,
    recorded,
    same,
    targets,
    unchanged_by,
)

HOST = torch.device("cpu")
TOGETHER = fake_timer([1.0])


def is_copy(call: Timed) -> bool:
    return isinstance(call, partial) and getattr(call.func, "__name__", "") == "contiguous"


def copies_for_free(calls: Any) -> list[float | None]:
    """Of libraries: every convolution takes as long as any other, and slices are copied in no time."""
    return [0.0 if is_copy(call) else 1.0 for call in calls]


def merged(
    module: fx.GraphModule,
    decisions: Decisions | None = None,
    *,
    compiled: bool = True,
    channels_last: bool = False,
) -> int:
    chosen = decisions or Decisions(TOGETHER)
    return merge_siblings(module, HOST, chosen, channels_last=channels_last, compiled=compiled)


@settings(max_examples=25)
@given(drawn_models(("siblings", "conv", "conv", "conv_norm", "again", "slice_", "input_", "add_")), st.booleans())
def test_any_model_computes_the_same(made: tuple[Drawn, tuple[torch.Tensor, ...]], cut: bool) -> None:
    model, inputs = made
    one = recorded(model, *inputs)

    def rewrite(module: fx.GraphModule) -> None:
        merged(module)
        if cut:
            split_constants(module, {})

    module = unchanged_by(rewrite, one, strides=True)
    if not cut:
        assert claimed(module) == claimed(lift(one.recording))


class Siblings(nn.Module):
    """Layers of any widths, with and without bias, on one input."""

    def __init__(self, widths: list[int], biases: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, n, bias=b) for n, b in zip(widths, biases, strict=True))
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        x = x.sin()
        return [layer(x) for layer in self.layers]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=2, max_size=5), st.booleans())
def test_products_of_any_width(kinds: list[tuple[int, bool]], batched: bool) -> None:
    one = recorded(Siblings(*map(list, zip(*kinds, strict=True))), torch.randn(*[2] * batched, 3, 4).double())

    def rewrite(module: fx.GraphModule) -> None:
        share_equal(module)  # each layer has a view of its own of the same rows
        merged(module)

    module = unchanged_by(rewrite, one, strides=True)
    with_bias = sum(bias for _, bias in kinds)
    groups = [size for size in (with_bias, len(kinds) - with_bias) if size]
    products = [node for node in module.graph.nodes if "mm" in str(node.target)]
    assert sorted(len(calls_of(node)) for node in products) == sorted(groups)


@settings(max_examples=15)
@given(
    kinds=st.lists(
        st.tuples(
            st.integers(1, 4), st.sampled_from([1, 3]), st.integers(1, 2), st.sampled_from([1, 3]), st.booleans()
        ),
        min_size=2,
        max_size=5,
    ),
    layout=st.booleans(),
    norms=st.booleans(),
    compiled=st.booleans(),
    batch=st.integers(1, 2),
)
def test_convolutions_of_any_kind(kinds: list[Any], layout: bool, norms: bool, compiled: bool, batch: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Conv2d(3, 3 * n, k, s, k // 2, groups=g, bias=b) for n, k, s, g, b in kinds).double()
    scales = nn.ModuleList(nn.BatchNorm2d(3 * n) for n, *_ in kinds).double().eval()

    def forward(x: torch.Tensor) -> Any:
        made = [layer(x) for layer in layers]
        return [scale(y).relu() for scale, y in zip(scales, made, strict=True)] if norms else made

    def rewrite(module: fx.GraphModule) -> None:
        affine_norms(module)
        last = layout and to_channels_last(module) > 0
        before = sum(node.target is torch.ops.aten.convolution.default for node in module.graph.nodes)
        saved = merged(module, Decisions(copies_for_free), compiled=compiled, channels_last=last)
        after = sum(node.target is torch.ops.aten.convolution.default for node in module.graph.nodes)
        assert before - after == saved
        alike: dict[Any, int] = {}
        for _, k, s, g, bias in kinds:
            key = k, s, g, bias and not compiled and not norms  # libraries compute the bias as well
            alike[key] = alike.get(key, 0) + (g == 1)
        assert saved == sum(max(count - 1, 0) for count in alike.values())
        if norms and not compiled:  # one scale and shift, and one ReLU, for all of them
            assert sum(node.target is torch.ops.aten.relu.default for node in module.graph.nodes) == after
        if not compiled:
            choose_forms(module, HOST, Decisions(TOGETHER), channels_last=last, compiled=False)
        fold_affine(module)
        split_constants(module, {})

    one = recorded(forward, torch.randn(batch, 3, 5, 5).double())
    module = unchanged_by(rewrite, one, strides=True)
    assert claimed(module) == claimed(lift(one.recording))


# -- who else uses what they are made of -----------------------------------------------------------------------------

A, B, C = (nn.Linear(4, 4).double() for _ in range(3))


def input_of_the_program(x: torch.Tensor) -> Any:
    return A(x) * B(x)


def weights_used_before(x: torch.Tensor) -> Any:
    y = F.linear(x, B.weight).tanh()
    return A(y) + F.linear(y, B.weight, A.bias), B.weight


def bias_used_before(x: torch.Tensor) -> Any:
    y = (x + B.bias).tanh()
    return A(y), B(y)


def same_weight_twice(x: torch.Tensor) -> Any:
    y = x.tanh()
    return A(y), F.linear(y, A.weight, B.bias), A(y)


def one_bias_for_all(x: torch.Tensor) -> Any:
    y = x.tanh()
    bias = A.bias[:1].detach()
    return torch.addmm(bias, y, B.weight.t()) + torch.addmm(A.bias, y, C.weight.t())


def scaled_sum(x: torch.Tensor) -> Any:
    y = x.tanh()
    return torch.addmm(A.bias, y, B.weight.t(), alpha=2), torch.addmm(A.bias, y, C.weight.t(), beta=3), A(y), B(y)


def viewed_and_returned(x: torch.Tensor) -> Any:
    y = x.tanh()
    return A(y), B(y), C(y).view(-1), A(y).t()


def far_apart(x: torch.Tensor) -> Any:
    y = x.tanh()
    first = A(y)
    return B(y + first) + B(y) * C(first)


@pytest.mark.parametrize(
    ("forward", "saved"),
    [
        (input_of_the_program, 1), (weights_used_before, 1), (bias_used_before, 1), (same_weight_twice, 2),
        (one_bias_for_all, 0), (scaled_sum, 1), (viewed_and_returned, 3), (far_apart, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", [False, True])
def test_what_siblings_share(forward: Callable[..., Any], saved: int, cut: bool) -> None:
    def rewrite(module: fx.GraphModule) -> None:
        assert merged(module) == saved
        if cut:
            split_constants(module, {})

    unchanged_by(rewrite, recorded(forward, torch.randn(3, 4).double()), strides=True)


def input_written(x: torch.Tensor) -> Any:
    first = A(x)
    x.mul_(2)
    return first, B(x)


def memory_written(x: torch.Tensor) -> Any:
    y = x * 2
    first = A(y)
    y[0] = 1
    return first, B(y)


def weight_written(x: torch.Tensor) -> Any:
    y = x.tanh()
    first = A(y)
    B.weight.data.mul_(2)
    return first, B(y)


@pytest.mark.parametrize("forward", [input_written, memory_written, weight_written])
def test_what_is_written_in_between_is_read_twice(forward: Callable[..., Any]) -> None:
    def rewrite(module: fx.GraphModule) -> None:
        assert merged(module) == 0

    unchanged_by(rewrite, recorded(forward, torch.randn(3, 4).double()))


def test_returned_parts_can_be_viewed_as_eagers_can() -> None:
    one, module = lifted(Siblings([2, 3], [True, True]), torch.randn(3, 4).double())
    assert merged(module) == 1
    for part, wanted in zip(effects(module, one).outputs, eager_effects(one).outputs, strict=True):
        assert torch.equal(part.view(-1), wanted.view(-1)) or same(effects(module, one), eager_effects(one), 1e-12)
    for part in module(torch.randn(3, 4).double()):
        assert part.is_contiguous()


def test_provenance() -> None:
    _, module = lifted(Siblings([2, 3, 4], [True] * 3), torch.randn(3, 4).double())
    before = claimed(module)
    merged(module)
    (product,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.addmm.default)
    assert calls_of(product) == (1, 2, 3)
    assert claimed(module) == before
    owners = [node for node in module.graph.nodes if set(calls_of(node)) & {1, 2, 3}]
    assert owners[0] is product


# -- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "beside", "pays"),
    [  # widths 2, 3, then both together; or as the set of widths happens to be ordered
        ({2: 10_000.0, 3: 10_000.0, 5: 12_000.0}, None, True),  # hardly longer than one of them
        ({2: 10_000.0, 3: 10_000.0, 5: 14_000.0}, None, False),  # longer than one and a hand-off
        ({2: 10_000.0, 3: 10_000.0, 5: 14_000.0}, 14_500.0, True),  # which share the device badly
        ({2: 10_000.0, 3: 10_000.0, 5: 12_000.0}, 11_500.0, False),  # or well
        ({2: 500.0, 3: 500.0, 5: 1_100.0}, 1_200.0, False),  # longer than both after each other
        ({2: 10_000.0, 3: 10_000.0, 5: None}, 20_000.0, False),  # does not run
        ({2: None, 3: 10_000.0, 5: 1.0}, None, False),
    ],
)
def test_it_has_to_pay(times: dict[int, float | None], beside: float | None, pays: bool) -> None:
    def timer(calls: Any) -> list[float | None]:
        together = [[one().shape[-1] for one in call] for call in calls if isinstance(call, tuple)]
        assert together == [[2, 3]]
        return [beside if isinstance(call, tuple) else times[call().shape[-1]] for call in calls]

    _, module = lifted(Siblings([2, 3], [True, True]), torch.randn(3, 4).double())
    decisions = Decisions(timer)
    assert merged(module, decisions) == int(pays)
    assert decisions.made == [KernelChoice(1, "merged siblings")] * pays


def test_the_same_siblings_are_timed_once() -> None:
    asked: list[int] = []

    def timer(calls: Any) -> list[float | None]:
        asked.append(len(calls))
        return [1.0] * len(calls)

    first, second, wider = Siblings([4, 4], [True, True]), Siblings([4, 4], [True, True]), Siblings([4, 8], [True] * 2)

    def forward(x: torch.Tensor) -> Any:
        one, two = first(x)
        return *second(one + two), *wider(x)

    _, module = lifted(forward, torch.randn(3, 4).double())
    assert merged(module, Decisions(timer)) == 3
    assert asked == [3, 4]  # each width, all of them together, and side by side


@pytest.mark.parametrize("fastest", ["separate", "onednn fused"])
@pytest.mark.parametrize(("beside", "saved"), [(10_500.0, 1), (9_500.0, 0)])
def test_sites_are_timed_side_by_side_in_their_fastest_form(fastest: str, beside: float, saved: int) -> None:
    forms = forms_of(
        Site(((1, 3, 5, 5), (2, 3, 1, 1)), ((1, 1), (0, 0), (1, 1), 1), "float32", False, True, False, True), "cpu"
    )
    names = {form.run.__qualname__: name for name, form in forms.items()}
    assert len(names) == len(forms) > 1
    asked: list[int] = []

    def timer(calls: Any) -> list[float | None]:
        asked.append(len(calls))
        times: list[float | None] = []
        for one in calls:
            if isinstance(one, tuple):
                assert sorted(call().shape[1] for call in one) == [2, 4]
                assert {names[call.func.__qualname__] for call in one} == {fastest}
                assert len({call.args[0].data_ptr() for call in one}) == 1, "they read one input"
                times.append(beside)
            else:
                times.append(10_000.0 if is_copy(one) or names[one.func.__qualname__] == fastest else 20_000.0)
        return times

    decisions = Decisions(timer)
    for _ in range(2):
        _, module = lifted(Branches("cat"), torch.randn(1, 3, 5, 5))
        affine_norms(module)
        assert merged(module, decisions, compiled=False) == saved
    assert asked == [2 * 3, 1]  # forms of both and of the two as one; then side by side; the second time nothing


def test_sites_that_do_not_run_are_not_merged() -> None:
    def timer(calls: Any) -> list[float | None]:
        return [1.0 if isinstance(one, tuple) or one().shape[1] == 6 else None for one in calls]

    _, module = lifted(Branches("cat"), torch.randn(1, 3, 5, 5))
    affine_norms(module)
    assert merged(module, Decisions(timer), compiled=False) == 0


def test_unmeasured_products_are_merged_and_convolutions_are_not() -> None:
    _, module = lifted(Siblings([2, 3], [True, True]), torch.randn(3, 4).double())
    assert merged(module, Decisions()) == 1
    layers = [nn.Conv2d(3, n, 1) for n in (2, 3)]
    _, module = lifted(lambda x: [layer(x) for layer in layers], torch.randn(1, 3, 4, 4))
    assert merged(module, Decisions()) == 0
    assert merged(module, Decisions(), compiled=False) == 0
    assert merged(module) == 1


class Branches(nn.Module):
    """As in an Inception block: two convolutions of one input, and what reads them."""

    def __init__(self, read: str, norms: bool = True, relu: tuple[bool, bool] = (True, True)) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 2, 1, bias=not norms), nn.Conv2d(3, 4, 1, bias=not norms)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) if norms else nn.Identity() for n in (2, 4))
        self.after = nn.Conv2d(4, 2, 3, padding=1)
        self.read, self.relu = read, relu
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = (norm(layer(x)) for norm, layer in zip(self.norms, (self.one, self.two), strict=True))
        one, two = (y.relu() if relu else y for y, relu in zip((one, two), self.relu, strict=True))
        return torch.cat([one, self.after(two) if self.read == "convolution" else two], 1)


@pytest.mark.parametrize(
    ("batch", "last", "read", "copies", "pays"),
    [
        (1, False, "convolution", 0, True),  # slices of channels are in one piece
        (2, False, "convolution", 1, False),
        (1, True, "convolution", 1, False),
        (1, True, "cat", 0, True),  # which copies anyway
    ],
)
def test_copies_of_slices_count(batch: int, last: bool, read: str, copies: int, pays: bool) -> None:
    """A convolution takes 10 us of any width, and a copy 11."""
    copied: list[object] = []

    def timer(calls: Any) -> list[float | None]:
        found = [is_copy(call) for call in calls]
        copied.extend(call() for call, one in zip(calls, found, strict=True) if one)
        return [None if isinstance(call, tuple) else 11_000.0 if is_copy(call) else 10_000.0 for call in calls]

    one = recorded(Branches(read), torch.randn(batch, 3, 5, 5))

    def rewrite(module: fx.GraphModule) -> None:
        affine_norms(module)
        channels_last = last and to_channels_last(module) > 0
        assert merged(module, Decisions(timer), compiled=False, channels_last=channels_last) == int(pays)
        choose_forms(module, HOST, Decisions(TOGETHER), channels_last=channels_last, compiled=False)
        fold_affine(module)

    unchanged_by(rewrite, one, 1e-5)
    assert len(copied) == copies


@pytest.mark.parametrize(("last", "dense"), [(False, True), (True, False)])
def test_slices_of_one_contiguous_image_have_no_gaps(last: bool, dense: bool) -> None:
    """Weights of 1x1 kernels lie in either layout: joined, too, or the merged convolution would write another."""
    _, module = lifted(Branches("cat"), torch.randn(1, 3, 5, 5))
    affine_norms(module)
    assert merged(module, Decisions(copies_for_free), compiled=False) == 1
    fold_affine(module)
    module.recompile()
    seen: list[bool] = []

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made = super().run_node(n)
            if n.target is operator.getitem:
                seen.append(made.is_contiguous())
            return made

    x = torch.randn(1, 3, 5, 5)
    Watched(module).run(x.to(memory_format=torch.channels_last) if last else x)
    assert seen == [dense] * 2


@pytest.mark.parametrize("readers", [1, 2])
def test_every_reader_copies(readers: int) -> None:
    one, two, *after = (nn.Conv2d(*sizes) for sizes in [(3, 4, 1), (3, 4, 1), *[(4, 2, 3)] * readers])
    copies: list[int] = []

    def timer(calls: Any) -> list[float | None]:
        copies.append(sum(is_copy(call) for call in calls))
        return [1.0] * len(calls)

    def forward(x: torch.Tensor) -> torch.Tensor:
        read, joined_again = one(x).relu(), two(x).relu()
        return torch.cat([*(layer(read) for layer in after), joined_again[:, :, 1:-1, 1:-1]], 1)

    _, module = lifted(forward, torch.randn(2, 3, 5, 5))
    merged(module, Decisions(timer), compiled=False)
    assert sum(copies) == readers + 1  # that slice of it


def test_a_copy_that_does_not_run_does_not_pay() -> None:
    def timer(calls: Any) -> list[float | None]:
        return [None if is_copy(call) else 1.0 for call in calls]

    for batch, saved in ((1, 1), (2, 0)):
        _, module = lifted(Branches("convolution"), torch.randn(batch, 3, 5, 5))
        affine_norms(module)
        assert merged(module, Decisions(timer), compiled=False) == saved


@pytest.mark.parametrize("norms", [False, True])
def test_siblings_in_libraries_are_alike_in_what_follows(norms: bool) -> None:
    for relu, saved in (((True, True), 1), ((True, False), 0), ((False, False), 1)):
        _, module = lifted(Branches("cat", norms, relu), torch.randn(1, 3, 5, 5))
        affine_norms(module)
        assert merged(module, Decisions(copies_for_free), compiled=False) == saved


def test_what_is_added_to_stays_alone() -> None:
    layers = [nn.Conv2d(3, 4, 1) for _ in range(2)]

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        addend = torch.cat([x, x[:, :1]], 1)
        return [(layer(x) + addend).relu() for layer in layers]

    _, module = lifted(forward, torch.randn(1, 3, 4, 4))
    assert merged(module, Decisions(copies_for_free), compiled=False) == 0


def test_given_choices_are_made_again() -> None:
    one = recorded(Siblings([2, 3, 2, 1], [True, True, False, False]), torch.randn(3, 4).double())
    measured = Decisions(TOGETHER)
    first = lift(one.recording)
    assert merged(first, measured) == 2
    again = lift(one.recording)
    follow = Decisions(None, frozenset(measured.made))
    assert merged(again, follow) == 2
    assert targets(again) == targets(first)
    assert follow.made == measured.made
    none = lift(one.recording)
    assert merged(none, Decisions(TOGETHER, frozenset())) == 0


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4), st.booleans())
def test_joined_lies_side_by_side(parts: list[tuple[int, bool]], last: bool) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    weights = [torch.randn(n, 3, 2, 2).to(memory_format=layout) for n, _ in parts]
    sizes = [n for n, _ in parts]
    made = joined(weights, sizes, weights[0])
    assert [torch.equal(a, b) for a, b in zip(made.split(sizes), weights, strict=True)] == [True] * len(parts)
    assert made.is_contiguous(memory_format=layout)
    biases = [torch.randn(n) if there else None for n, there in parts]
    rows = joined(biases, sizes, weights[0]).split(sizes)
    assert all(
        torch.equal(row, torch.zeros(len(row)) if one is None else one) for row, one in zip(rows, biases, strict=False)
    )
