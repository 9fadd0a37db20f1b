"""A prepared model gives what eager gives, whatever its inputs, outputs and mode."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.tracing.operator_traits import parts_of
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import other_values
from nimble_core.utils.errors import InputError, NotStaticError
from nimble_viz.collect.compare import compare
from tests.support.models import CASES, Deep, Norms, Wide, make
from tests.support.values import close

QUICK = Options(tune="off")
FAST = Options(budget_s=0.05)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("name", CASES)
def test_a_replay_equals_eager(name: str, policy: str, mode: Any) -> None:
    """Under inference mode dispatch modes are given composite operators whole, whose writes no schema tells."""
    if name == "gradient_inside" and mode is torch.inference_mode:
        pytest.skip("a model that takes gradients does not run under inference_mode")
    model, args, kwargs = make(name)
    eager = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    signature = Signature(args, kwargs)
    with mode() if mode is torch.inference_mode else nullcontext():
        net = Nimble(model, Options(tune="off", policy=policy)).prepare(*args, **kwargs)
        if isinstance(model, nn.Module):
            assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
        assert not any(parts_of(step.func) for step in net.engines[0].recorded.recording.steps)
        for seed in (3, 4, 3):
            mine, theirs = (builder(signature.structure)(other_values(signature.tensors, seed=seed)) for _ in range(2))
            torch.manual_seed(seed)
            with mode():
                expected = eager(*theirs[0], **theirs[1])
            torch.manual_seed(seed)
            close(net(*mine[0], **mine[1]), expected)
            close(mine, theirs)  # inputs that the model writes
    if isinstance(model, nn.Module):
        close(list(model.state_dict().values()), list(eager.state_dict().values()))
    net.close()


def flattened_twice(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1) * 2 + x.t().reshape(-1)


def viewed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.view(2, 1, 2)
    y.squeeze_(1)
    y.t_()
    return y * torch.tensor([[1.0], [2.0]])


def written(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1).reshape(-1) * 2


ROWS = torch.arange(12.0).view(3, 4)
SQUARE, WIDE = torch.arange(16.0).view(4, 4), torch.arange(32.0).view(4, 8)
LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]] = {
    "transposed": (flattened_twice, SQUARE, SQUARE.t()),
    "every second column": (flattened_twice, SQUARE, WIDE[:, ::2]),
    "expanded": (flattened_twice, SQUARE, SQUARE[:1].expand(4, 4)),
    "prepared on an expanded one": (flattened_twice, SQUARE[:1].expand(4, 4), SQUARE),
    "further inside its memory": (viewed_in_place, ROWS[0], ROWS[2]),
    "prepared inside its memory": (viewed_in_place, ROWS[1], ROWS[0].clone()),
    "transposed and written": (written, torch.zeros(2, 3), torch.arange(6.0).view(3, 2).t()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_memory_layouts_of_an_input(name: str) -> None:
    forward, example, given = LAYOUTS[name]
    net = Nimble(forward, QUICK).prepare(example)
    mine, theirs = copy.deepcopy(given), copy.deepcopy(given)
    assert mine.stride() == given.stride()
    close(net(mine), forward(theirs))
    close(mine, theirs)
    net.close()


def test_outputs_that_alias_inputs_or_parameters_are_copies() -> None:
    for name in ("returns_input", "returns_parameter", "constant_written", "no_calls"):
        model, args, kwargs = make(name)
        net = Nimble(model, QUICK).prepare(*args, **kwargs)
        first = flatten(net(*args, **kwargs))[0]
        kept = [tensor.clone() for tensor in first]
        net(*[arg + 1 for arg in args])
        args[0].add_(5)
        close(first, kept)
        net.close()


def test_live_weights() -> None:
    model, x = Wide(), torch.randn(2, 16)
    net = Nimble(model, QUICK).prepare(x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    model(x).sum().backward()
    optimizer.step()
    close(net(x), model(x))
    with torch.no_grad():
        model.branches[0].weight.mul_(3)
    close(net(x), model(x))
    model.branches[1].bias.data.fill_(7)
    close(net(x), model(x))
    other = Wide()
    net.load_state_dict(other.state_dict())
    close(net(x), other(x))
    close(model(x), other(x))
    net.close()


def test_training_and_evaluation_have_their_own_engines() -> None:
    model = Norms().eval()
    x = torch.randn(4, 3, 4, 4)
    net = Nimble(model, QUICK).prepare(x)
    assert net.training is False
    net.train()
    assert model.training
    assert net.training
    with pytest.raises(InputError, match=r"training mode.*prepared in evaluation"):
        net(x)
    net.prepare(x)
    assert len(net.engines) == 2
    net.eval()
    assert not model.norm.training
    close(net(x), model(x))
    model.train()
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
    close(net(x), expected)
    net.close()


@pytest.mark.parametrize("move", [lambda net: net.half(), lambda net: net.to(torch.float64), lambda net: net.double()])
def test_moving_the_parameters_closes_the_engines(move: Any) -> None:
    model, x = Deep(), torch.randn(2, 8)
    net = Nimble(model, QUICK).prepare(x)
    assert move(net) is net
    assert net.engines == ()
    assert next(model.parameters()).dtype != torch.float32
    assert next(net.parameters()) is next(model.parameters())
    with pytest.raises(InputError, match="nothing is prepared"):
        net(x)
    x = x.to(next(model.parameters()).dtype)
    close(net.prepare(x)(x), model(x))
    net.close()


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("returned", "where"),
    [
        (lambda y: y.numpy(), "output"),
        (lambda y: (y, memoryview(y.numpy())), "output[1]"),
        (lambda y: (one for one in [y]), "output"),
        (lambda y: [y, Slotted([1, "a"])], "output[1]"),
        (lambda y: functools.partial(torch.add, y), "output"),
        (lambda y: (y, nn.Linear(1, 1)), "output[1]"),
    ],
)
def test_outputs_that_a_replay_would_return_stale_are_refused(returned: Any, where: str, strict: bool) -> None:
    with pytest.raises(InputError) as caught:
        Nimble(lambda x: returned(x * 2), Options(tune="off", strict=strict)).prepare(torch.randn(3))
    assert caught.value.where == where
    assert "return" in caught.value.fix


@pytest.mark.parametrize("training", [False, True])
def test_attributes_beside_the_fields_of_an_output_are_replayed(training: bool) -> None:
    @dataclass
    class Result:
        y: Any

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            result = Result(super().forward(x))
            result.more = result.y * 2  # type: ignore[attr-defined]  # beside its fields
            return result

    model, x = Model(3, 3).train(training), torch.randn(2, 3)
    net = Nimble(model, QUICK).prepare(x, training=training)
    close(net(x + 1).more, model(x + 1).more)
    net.close()


def test_numbers_in_an_output_that_follow_the_input_are_refused() -> None:
    with pytest.raises(NotStaticError, match=r"output\[1\].* is -?[0-9.e-]+, not ") as caught:
        Nimble(lambda x: (x, (x * 2).tolist()), QUICK).prepare(torch.randn(3))
    assert caught.value.where.startswith("output[1]")


@dataclass
class Doubled:
    value: torch.Tensor

    def __post_init__(self) -> None:
        self.value = self.value * 2


@torch.no_grad()
def test_a_dataclass_output_is_not_initialised_twice() -> None:
    net = Nimble(lambda x: Doubled(x + 1), QUICK).prepare(torch.ones(2))
    close(net(torch.zeros(2)).value, torch.full((2,), 2.0))


@torch.no_grad()
def test_tensors_from_outside_are_read_live() -> None:
    outside = torch.ones(4)
    net = Nimble(lambda x: x + outside.exp(), QUICK).prepare(torch.zeros(4))
    outside.add_(1)
    close(net(torch.zeros(4)), outside.exp())


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in dir(torch) if name.startswith("float8")])
def test_outputs_in_float8_are_prepared_and_compared(dtype: torch.dtype) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to(dtype), x.to(torch.float8_e5m2).float()

    x = torch.randn(4)
    net = Nimble(model, FAST).prepare(torch.randn(4))
    assert [one.dtype for one in net(x)] == [dtype, torch.float32]
    for out, wanted in zip(net(x), model(x), strict=True):
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    net.close()
    report = compare(model, x, options=FAST)
    assert report.checks
    assert all(check.passed for check in report.checks), report.checks
