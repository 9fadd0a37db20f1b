"""What is lifted does what eager does: to its outputs, its inputs and the model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from nimble_core.compiler.to_fx import CALL_PREFIX, calls_of, reference_of
from nimble_core.tracing.operator_traits import is_view
from tests.support.models import CASES, make
from tests.support.rewrite_models import Drawn, claimed, drawn_models, eager_effects, effects, lifted, same, targets

aten = torch.ops.aten


@settings(max_examples=40)
@given(drawn_models())
def test_a_lifted_graph_does_what_eager_does(made: tuple[Drawn, tuple[torch.Tensor, ...]]) -> None:
    model, inputs = made
    one, module = lifted(model, *inputs)
    module.graph.lint()
    wanted = eager_effects(one)
    for _ in range(2):
        assert same(effects(module, one), wanted, strides=True)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_model_of_the_recorder(name: str) -> None:
    model, args, kwargs = make(name)
    one, module = lifted(model, *args, **kwargs)
    assert same(effects(module, one), eager_effects(one), strides=True)


def overlapping_slices(x: torch.Tensor) -> Any:
    y = x * 2
    y[:, :2].add_(1)
    y[:, 1:].mul_(3)
    return y


def mixed_types(x: torch.Tensor) -> Any:
    y = x.half()
    y += x * 0.3
    y.mul_(x)
    return y, y.dtype == torch.float16


def truths(x: torch.Tensor) -> Any:
    return (x * 1).gt_(0), (x * 1).logical_not_(), (x * 1).ne_(x) + 1


def strided_target(x: torch.Tensor) -> Any:
    return (x * 2).t().add_(x.t().contiguous()), (x * 1).t().copy_(x.t()), (x * 1).t().relu_()


def broadcast_into(x: torch.Tensor) -> Any:
    return (x * 2).add_(x[0]).masked_fill_(x[0] > 0, 1.0).addcmul_(x[0], x[:1], value=2)


def written_through_expanded_base(x: torch.Tensor) -> Any:
    y = x[:1] * 1
    wide = y.expand(3, 4)
    y.add_(1)
    return wide * 2


def half_written_by_out(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 4)
    torch.add(x[:2], 1, out=y[:2])
    return y


def as_another_type(x: torch.Tensor) -> Any:
    y = x * 2
    bits = y.view(torch.int32)
    bits.bitwise_and_(0x7FFFFFFF)
    return y


def constant_written(x: torch.Tensor) -> Any:
    total = torch.tensor([1.0, 2.0, 3.0, 4.0])
    total += x.sum(0)
    return total * 2


TRAPS = [
    overlapping_slices, mixed_types, truths, strided_target, broadcast_into, written_through_expanded_base,
    half_written_by_out, as_another_type, constant_written,
]  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_writes_in_place_are_seen_by_all_who_look(trap: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    one, module = lifted(trap, torch.randn(3, 4))
    wanted = eager_effects(one)
    for _ in range(2):
        assert same(effects(module, one), wanted, strides=True), module.graph


def test_dead_work_is_left_out_but_random_numbers_are_still_drawn() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x.exp().sin()
        torch.rand(3)
        torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
        return x + torch.rand(3, 4)

    one, module = lifted(forward, torch.randn(3, 4))
    assert same(effects(module, one), eager_effects(one))
    run = targets(module)
    assert run.count("aten.rand.default") == 2
    assert not any(name.startswith(("aten.exp", "aten.sin", "aten._scaled")) for name in run)


def test_checks_stay() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > -100).all())
        return x + 1

    _, module = lifted(forward, torch.randn(3))
    module(torch.zeros(3))
    with pytest.raises(RuntimeError, match="got zero"):
        module(torch.full((3,), -200.0))


@pytest.mark.parametrize("trap", TRAPS)
def test_every_eager_call_is_one_node_of_its_name_and_shape(trap: Callable[..., Any]) -> None:
    one, module = lifted(trap, torch.randn(3, 4))
    assert claimed(module) == set(range(len(one.recording.program.calls)))
    found = {node.name: calls_of(node) for node in module.graph.nodes if node.name.startswith(CALL_PREFIX)}
    assert found == {f"{CALL_PREFIX}{call.index}": (call.index,) for call in one.recording.program.calls}
    outputs = module.graph.output_node().args[0]
    for node, recorded in zip(outputs, one.recording.program.outputs, strict=True):  # type: ignore[arg-type]
        assert reference_of(node).sizes == recorded.sizes  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("mask", [[True, True, True], [True, True, False], [False, True, True], [False, True, False]])
def test_results_that_an_operator_leaves_out(mask: list[bool]) -> None:
    weight = torch.randn(4, 3, 3, 3)

    def forward(grad: torch.Tensor, x: torch.Tensor) -> Any:
        made = aten.convolution_backward(
            grad, x, weight, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, output_mask=mask
        )
        return [one for one in made if one is not None]

    one, module = lifted(forward, torch.randn(2, 4, 4, 4), torch.randn(2, 3, 6, 6))
    assert same(effects(module, one), eager_effects(one))


def test_windows_that_differ_in_strides_of_no_matter_count_in_results_only() -> None:
    """Gradients of 1x1 convolutions are such windows: optimizers want them laid out like the parameter."""

    def forward(x: torch.Tensor) -> Any:
        made = x.mean((2, 3), keepdim=True)
        window = made.as_strided(made.shape, (4, 1, 4, 4))
        inner = x.sum((2, 3), keepdim=True)
        return made, window, inner.as_strided(made.shape, (4, 1, 4, 4)) * 2

    one, module = lifted(forward, torch.randn(2, 4, 3, 3))
    wanted = eager_effects(one)
    assert same(effects(module, one), wanted)
    made, window, _ = effects(module, one).outputs
    assert (made.stride(), window.stride()) == ((4, 1, 1, 1), (4, 1, 4, 4))
    assert aten.as_strided.default not in targets(module)


@pytest.mark.parametrize("split", [lambda x: x.unsafe_chunk(2, 1), lambda x: x.unsafe_split_with_sizes([1, 3], 1)])
def test_splits_say_that_they_are_views(split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        whole = x + 1
        first, second = split(whole)
        return first.sigmoid_().sum() + second.tanh_().sum() + whole.sum()

    one, module = lifted(forward, torch.randn(3, 4))
    assert all(is_view(node.target) for node in module.graph.nodes if "split" in str(node.target))
    assert same(effects(module, one), eager_effects(one))
