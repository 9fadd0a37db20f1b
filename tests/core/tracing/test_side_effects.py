"""Runs leave no trace: no dispatch mode in force, no hook; and what autograd refuses is said with its place."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _python_dispatch as dispatch
from torch.utils.checkpoint import checkpoint

from nimble_core import CaptureError, Nimble, NimbleWarning, Options, TrainStep
from nimble_core.tracing.rng_state import Draws
from nimble_core.tracing.side_effects import Guard, installed_by_runs, preserved, run_preserved
from nimble_viz import compare
from tests.support.interrupts import interrupted

# -- dispatch modes ------------------------------------------------------------------------------------------------


class Mode(dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Interrupted(Mode):
    """Interrupted in its exit: torch's flags are back already, the mode itself still stands."""

    def __exit__(self, *error: object) -> None:
        self.old_dispatch_mode_flags.clear()
        dispatch._is_in_torch_dispatch_mode = False
        raise KeyboardInterrupt


def modes() -> tuple[object, ...]:
    flags = (dispatch._is_in_torch_dispatch_mode, dispatch._is_in_any_mode_without_ignore_compile_internals)
    return (*dispatch._get_current_dispatch_mode_stack(), *flags)


@pytest.mark.parametrize("depth", [1, 2])
def test_modes_that_a_run_has_left_in_force_end_with_it(depth: int) -> None:
    with Mode():
        before = modes()
        with preserved(nn.ReLU()):
            for _ in range(depth):
                Mode().__enter__()
            assert len(modes()) == len(before) + depth
        assert modes() == before


def test_a_mode_interrupted_in_its_exit_ends() -> None:
    before = modes()
    kept = Interrupted()

    def run(x: torch.Tensor) -> torch.Tensor:
        with kept:
            return x + 1

    with pytest.raises(KeyboardInterrupt):
        run_preserved(run, (torch.ones(2),), {})
    assert dispatch._get_current_dispatch_mode_stack() == list(before[:-2])


def test_an_interrupted_preparation_leaves_torch_usable() -> None:
    class Stops(nn.Module):
        stop = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.stop:
                Mode().__enter__()
                raise KeyboardInterrupt
            return x * 2

    net, before = Stops(), modes()
    with pytest.raises(KeyboardInterrupt):
        Nimble(net, Options(tune="off")).prepare(torch.ones(2))
    assert dispatch._get_current_dispatch_mode_stack() == list(before[:-2])
    net.stop = False
    assert torch.equal(Nimble(net, Options(tune="off")).prepare(torch.ones(2))(torch.ones(2)), torch.full((2,), 2.0))


# -- attributes ----------------------------------------------------------------------------------------------------


def messy() -> nn.Module:
    """A module with a submodule, and containers of every kind in both, filled and empty."""
    net = nn.Sequential(nn.BatchNorm1d(2))
    for part in (net, net[0]):
        part.listed, part.none, part.named, part.unnamed = [1, [2]], [], {"a": 1.5, "b": (3,)}, {}
        part.members, part.ordered = {"x", "y"}, OrderedDict(first=1, second=2)
        part.counted, part.number = defaultdict(list, {"k": [1]}), 1000
    return net


def held(net: nn.Module) -> list[Any]:
    """All attributes, and what containers among them hold, by identity and in order (of sets: what they hold)."""
    kinds = (list, dict, set, OrderedDict, defaultdict)
    found: list[Any] = []
    for part in net.modules():
        found += [(name, id(value)) for name, value in vars(part).items()]
        for value in vars(part).values():
            if isinstance(value, dict):
                found += [(key, id(entry)) for key, entry in value.items()]
            elif type(value) in kinds:
                found += [set(value)] if isinstance(value, set) else map(id, value)
    return found


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "number": lambda part: setattr(part, "number", int("1000")),  # equal, and another object
    "added": lambda part: setattr(part, "added", 1),
    "deleted": lambda part: delattr(part, "number"),
    "container": lambda part: setattr(part, "listed", list(part.listed)),
    "append": lambda part: part.listed.append(3),
    "fill": lambda part: part.none.append(3),
    "entry": lambda part: part.named.update(a=float("1.5")),
    "entries": lambda part: part.unnamed.update(a=1),
    "clear": lambda part: part.named.clear(),
    "member": lambda part: part.members.add("z"),
    "order": lambda part: part.ordered.move_to_end("first"),
    "default": lambda part: part.counted["made by a look"],
    "buffer": lambda part: part.register_buffer("later", torch.ones(1)),
    "tensor": lambda part: part.register_parameter("weights", nn.Parameter(torch.ones(1))),
    "module": lambda part: part.add_module("child", nn.ReLU()),
    "mode": lambda part: part.train(not part.training),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from([0, 1])), max_size=4, unique=True))
def test_attributes_are_put_back_and_told(changes: list[tuple[str, int]]) -> None:
    net = messy()
    parts, before = list(net.modules()), held(net)
    with preserved(net) as guard:
        assert not guard.changed_attributes()
        for name, at in changes:
            with suppress(AttributeError):  # deleted before
                CHANGES[name](parts[at])
        assert bool(guard.changed_attributes()) == (held(net) != before)
    assert held(net) == before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("number", ["0.number"]),
        ("append", ["0.listed"]),
        ("fill", ["0.none"]),
        ("order", ["0.ordered"]),
        ("member", ["0.members"]),
        ("buffer", ["0.later"]),
        ("mode", ["0.training"]),
    ],
)
def test_changed_attributes_are_named(name: str, told: list[str]) -> None:
    net = messy()
    with preserved(net) as guard:
        CHANGES[name](net[0])
        assert list(guard.changed_attributes()) == told


def test_a_tensor_moved_between_tables_is_one_change() -> None:
    net = nn.BatchNorm1d(2)
    was = net.running_mean
    with preserved(net) as guard:
        del net.running_mean
        net.running_mean = was * 2  # an attribute now, no buffer
        (name, change), *others = guard.changed_attributes().items()
        assert (name, others) == ("running_mean", [])
        assert change[0] is was
        assert change[1] is net.running_mean
    assert net.running_mean is was


def numpy_random() -> Any:
    return pytest.importorskip("numpy").random


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda: None, []),
        (lambda: torch.rand(2), []),
        (lambda: random.Random(1).random(), []),
        (lambda: random.random(), ["Python's random"]),
        (lambda: numpy_random().uniform(), ["numpy.random"]),
        (lambda: (numpy_random().permutation(3), random.shuffle([1, 2])), ["Python's random", "numpy.random"]),
    ],
)
def test_draws_from_the_interpreters_generators_are_told(draw: Callable[[], object], told: list[str]) -> None:
    numpy_random()
    with preserved(nn.ReLU()) as guard:
        draw()
        assert guard.draws.drawn() == told
    with preserved(nn.ReLU()) as guard:
        assert guard.draws.drawn() == []


# -- hooks ---------------------------------------------------------------------------------------------------------


def test_hooks_of_runs_are_told_from_others() -> None:
    def theirs(*args: object) -> None:
        return None

    def ours(*args: object) -> None:
        return None

    layer = nn.ReLU()
    layer.register_forward_hook(ours)
    with preserved(layer):
        layer.register_forward_hook(partial(theirs, 1))
        layer.register_forward_pre_hook(ours).remove()
    assert list(layer._forward_hooks.values()) == [ours]
    assert installed_by_runs(theirs)
    assert installed_by_runs(partial(theirs, 2))
    assert not installed_by_runs(ours)
    assert not installed_by_runs(partial(ours))


# -- what autograd refuses -----------------------------------------------------------------------------------------


def test_an_input_that_is_written_in_place_is_named_with_its_layer() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(CaptureError, match="written in place") as caught:
        Nimble(net, Options(tune="off")).prepare(x, training=True)
    assert "test_side_effects.py:" in caught.value.where
    assert "inplace=False" in caught.value.fix
    Nimble(net, Options(tune="off")).prepare(x.detach(), training=True)  # as the fix says


class Checkpointed(nn.Module):
    def __init__(self, how: Callable[[nn.Module], Callable[..., Any]], reentrant: bool) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how, self.reentrant = how, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.how(self.block), self.stem(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        (lambda block: block, "checkpoint of block"),
        (lambda block: partial(block.__call__), "checkpoint of block"),
        (lambda block: lambda x: block(x), "checkpoint of <lambda>, test_side_effects.py:"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_reentrant_checkpoints_are_refused(how: Any, where: str, whole: bool) -> None:
    def prepare(net: nn.Module) -> object:
        options, x = Options(tune="off"), torch.randn(2, 4)
        if whole:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            return TrainStep(net, torch.Tensor.mean, optimizer, options=options).prepare(x)
        return Nimble(net, options).prepare(x, training=True)

    with pytest.raises(CaptureError, match="use_reentrant=True runs a backward inside") as caught:
        prepare(Checkpointed(how, reentrant=True))
    assert caught.value.where.startswith(where)
    assert "use_reentrant=False" in caught.value.fix
    prepare(Checkpointed(how, reentrant=False))


def test_other_errors_of_a_model_stay_its_own() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$") as caught:
        run_preserved(fails, (torch.ones(1),), {})
    assert not isinstance(caught.value, CaptureError)


class Binary(nn.Module):
    """Puts other memory in the place of its own, and of its input's."""

    def __init__(self, error: Exception | None, inputs: bool = True) -> None:
        super().__init__()
        self.error, self.inputs = error, inputs
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.sign()
        self.last.data = x * self.weight
        if self.inputs:
            x.data = x.half()
        if self.error:
            raise self.error
        return self.last


@pytest.mark.parametrize("error", [None, KeyError("its own")])
def test_other_memory_does_not_stay(error: Exception | None) -> None:
    model, x = Binary(error), torch.randn(3)
    tensors = [model.weight, model.last, x]
    before = [(one.data_ptr(), one.detach().clone()) for one in tensors]
    with pytest.raises(KeyError) if error else nullcontext():
        run_preserved(model, (x,), {})
    for one, (pointer, values) in zip(tensors, before, strict=True):
        assert one.data_ptr() == pointer
        assert one.dtype is values.dtype
        assert torch.equal(one, values)


def test_an_expanded_input_that_is_written_gets_its_values_back() -> None:
    x = torch.randn(3)
    before = x.clone()
    run_preserved(lambda x: x.expand(2, 3).zero_(), (x,), {})
    assert torch.equal(x, before)
    net = Nimble(lambda x: x.expand(2, 3).zero_() + x, Options(tune="off")).prepare(x)
    assert torch.equal(x, before)
    net.close()


def test_what_is_written_through_numpy_is_put_back() -> None:
    pytest.importorskip("numpy")
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3)

    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.detach().numpy()[:] = 2
            x.numpy()[:] = 3
            return x * self.weight

    run_preserved(Numpy(), (x,), {})
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(x, torch.ones(3))


class Counting(nn.Module):
    """Writes a buffer, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("count").add_(1.0)
        return self.linear(x) * self.count


PREPARES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "inference": lambda model, x: Nimble(model, Options(tune="off")).prepare(x),
    "in place of the model": lambda model, x: Nimble(model, Options(tune="off")).prepare(x, training=True),
    "measured": lambda model, x: Nimble(model, Options(budget_s=0.2)).prepare(x, training=True),
    "step": lambda model, x: TrainStep(
        model, torch.sum, torch.optim.Rprop(model.parameters()), options=Options(tune="off")
    ).prepare(x),
}


@pytest.mark.parametrize("way", PREPARES)
def test_a_backward_of_eager_that_reads_what_the_forward_writes_may_come_after_preparing(way: str) -> None:
    model, x = Counting(), torch.randn(3, 8)
    weight = torch.randn(4, requires_grad=True)
    pending = (model.count * weight).sum()
    before = [one._version for one in (*model.parameters(), *model.buffers(), x)]
    net = PREPARES[way](model, x)
    assert [one._version for one in (*model.parameters(), *model.buffers(), x)] == before
    pending.backward()
    assert torch.equal(weight.grad, torch.ones(4))
    net.close()


def test_what_a_run_closes_over_keeps_its_version() -> None:
    outside, x = torch.ones(3), torch.ones(3)
    before = [outside._version, x._version]
    run_preserved(lambda x: x[:2].mul_(outside.view(-1).add_(1.0)[:2]), (x,), {})
    assert [outside._version, x._version] == before
    assert torch.equal(outside, x)


def test_versions_are_kept_under_a_capture_too() -> None:
    model = Counting()
    before = model.count._version
    with preserved(model, live=False):
        model.count.zero_()
    assert model.count._version == before


def test_candidates_are_judged_without_giving_weights_other_memory() -> None:
    model = Binary(None, inputs=False)
    x = torch.randn(3)
    pointers = [model.weight.data_ptr(), model.last.data_ptr()]
    with pytest.warns(NimbleWarning) as given:
        net = Nimble(model, Options(tune="off", fuse="library")).prepare(x)
    assert ["parameter weight" in str(one.message) for one in given] == [True, False]
    assert "last.data" in str(given[1].message)
    assert [model.weight.data_ptr(), model.last.data_ptr()] == pointers
    net.close()


class Drawing(nn.Module):
    """Draws from generators of its own, each more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = GENERATORS
        noise = torch.rand(4, generator=first) + torch.randn(x.shape, generator=second)
        return self.layer(x) * noise + torch.randn(x.shape).normal_(generator=first)


GENERATORS = torch.Generator(), torch.Generator()


@pytest.mark.parametrize("tune", ["off", "fast"])
@pytest.mark.parametrize("way", ["inference", "in place of the model", "whole step"])
def test_generators_of_the_users_own_are_put_back_and_draw_on_as_in_eager(way: str, tune: Any) -> None:
    model, x, options = Drawing(), torch.randn(3, 4), Options(tune=tune)
    before = [one.manual_seed(7).get_state() for one in GENERATORS]
    if way == "whole step":
        net: Any = TrainStep(model, torch.Tensor.sum, torch.optim.SGD(model.parameters(), lr=0.0), options=options)
    else:
        net = Nimble(model, options)
    net.prepare(x, training=True) if way == "in place of the model" else net.prepare(x)
    assert all(map(torch.equal, before, (one.get_state() for one in GENERATORS)))
    state = torch.get_rng_state()
    expected = model(x)
    after = [one.get_state() for one in GENERATORS]
    torch.set_rng_state(state)
    for one, was in zip(GENERATORS, before, strict=True):
        one.set_state(was)
    found = net(x)
    torch.testing.assert_close(found, expected.sum() if way == "whole step" else expected)
    assert all(map(torch.equal, after, (one.get_state() for one in GENERATORS)))
    net.close()


def test_generators_are_put_back_after_an_error() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()

    def fails(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3, generator=generator)
        raise ValueError("after the draw")

    with pytest.raises(ValueError, match="after the draw"):
        Nimble(fails, Options(tune="off")).prepare(torch.randn(3))
    assert torch.equal(before, generator.get_state())


def test_what_is_put_back_is_put_back_to_the_end() -> None:
    """An interrupt in between is raised after it; one as it begins is all that can leave everything to be done."""
    written, generator = [torch.zeros(3) for _ in range(4)], torch.Generator()
    state, begun, before, after = generator.get_state(), False, 0, 0

    def undo() -> None:
        nonlocal begun
        guard = Guard(live=True, changed=dict, draws=Draws(torch.device("cpu"), ()))
        for one in written:
            guard.before_write(one)
            one.fill_(1)
        guard.before_draw(generator)
        torch.rand(1, generator=generator)
        begun = True
        guard.restore()

    for _ in interrupted(undo):
        left = [bool(one.any()) for one in written] + [not torch.equal(generator.get_state(), state)]
        before, after = before + (begun and any(left)), after + (begun and not any(left))
        assert not begun or all(left) or not any(left)
        assert torch.is_grad_enabled()
        begun = False
        for one in written:
            one.zero_()
        generator.set_state(state)
    assert before <= 2 < after


class Forces(nn.Module):
    """The gradient of an energy, as in molecular dynamics."""

    def __init__(self, *, on: bool) -> None:
        super().__init__()
        self.energy, self.on = nn.Linear(3, 1), on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.on or torch.is_grad_enabled()):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).tanh().sum(), x)[0]


def test_models_that_differentiate_are_told_to_switch_gradients_on() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(CaptureError, match="the model differentiates in its own forward") as caught:
        Nimble(Forces(on=False)).prepare(x)
    assert caught.value.where.startswith("the model at tests/core/tracing/test_side_effects.py:")
    assert "torch.enable_grad()" in caught.value.fix
    model = Forces(on=True)
    with torch.no_grad():
        torch.testing.assert_close(Nimble(model).prepare(x)(x), model(x))


class Asking(Forces):
    """It asks its input for a gradient."""

    def __init__(self) -> None:
        super().__init__(on=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(self.energy(x.requires_grad_()).tanh().sum(), x)[0]


def test_inputs_require_what_they_did() -> None:
    model, x = Asking(), torch.randn(2, 3)
    net = Nimble(model, Options(fuse="none", tune="off")).prepare(x)
    assert not x.requires_grad
    compare(model, x, options=Options(fuse="none", tune="off"))
    assert not x.requires_grad
    with torch.no_grad():
        found = net(x)
    torch.testing.assert_close(found, model(x))
    assert x.requires_grad, "as the model asks for"
    Nimble(model).prepare(x).close()
    assert x.requires_grad
    net.close()
