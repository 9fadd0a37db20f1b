from __future__ import annotations

import copy
import ctypes
import functools
import gc
import linecache
import math
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from nimble_core.api.nimble import Nimble, _fold_notes, _repeatable
from nimble_core.api.train_step import TrainStep
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.guards.module_guard import Watch
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.saved_plan import Plan
from nimble_core.tracing.folded_weights import Folded
from nimble_core.tracing.operator_traits import parts_of
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorded import Stopwatch, record_static
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import other_values
from nimble_core.utils.errors import CaptureError, DeviceError, InputError, NimbleError, NimbleWarning, NotStaticError
from nimble_viz.collect.compare import compare
from tests.support.folded_models import Foldable, example, folded, folded_engine, made, with_folds
from tests.support.models import CASES, Busy, Deep, Norms, Shared, Wide, make

QUICK = Options(tune="off")
FAST = Options(budget_s=0.05)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(flatten(a)[0], flatten(b)[0], rtol=1e-5, atol=1e-5, equal_nan=True)


# -- equal to eager ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("name", CASES)
def test_under_inference_mode_the_same_is_prepared(name: str, policy: str) -> None:
    """There dispatch modes are given composite operators whole, whose writes no schema tells."""
    if name == "gradient_inside":
        pytest.skip("a model that takes gradients does not run under inference_mode")
    model, args, kwargs = make(name)
    signature = Signature(args, kwargs)
    before = copy.deepcopy(model.state_dict()) if isinstance(model, nn.Module) else {}
    eager = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    with torch.inference_mode():
        net = Nimble(model, Options(tune="off", policy=policy)).prepare(*args, **kwargs)
        for key, value in before.items():
            assert torch.equal(model.state_dict()[key], value), key
        recording = net.engines[0].recorded.recording
        assert not any(parts_of(step.func) for step in recording.steps)
        for seed in (3, 4, 3):
            mine, theirs = (builder(signature.structure)(other_values(signature.tensors, seed=seed)) for _ in range(2))
            torch.manual_seed(seed)
            expected = eager(*theirs[0], **theirs[1])
            torch.manual_seed(seed)
            close(net(*mine[0], **mine[1]), expected)
    if isinstance(model, nn.Module) and isinstance(eager, nn.Module):
        close(list(model.buffers()), list(eager.buffers()))
    net.close()


@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("name", CASES)
def test_a_replay_equals_eager(name: str, policy: str) -> None:
    model, args, kwargs = make(name)
    eager = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    signature = Signature(args, kwargs)
    net = Nimble(model, Options(tune="off", policy=policy)).prepare(*args, **kwargs)
    for seed in (3, 4, 3):
        mine, theirs = (builder(signature.structure)(other_values(signature.tensors, seed=seed)) for _ in range(2))
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = eager(*theirs[0], **theirs[1])
        torch.manual_seed(seed)
        close(net(*mine[0], **mine[1]), expected)
        close(mine, theirs)  # inputs that the model writes
    if isinstance(model, nn.Module):
        close(list(model.state_dict().values()), list(eager.state_dict().values()))
    net.close()


@pytest.mark.parametrize("fuse", ["none", "library"])
def test_what_is_written_where_a_mask_is_true(fuse: Any) -> None:
    """On the host nobody waits to count the places."""

    def model(x: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeroed, given = x.clone(), x * 1
        zeroed[x > 0] = 0.0
        given[given < -1] = value
        given[:, :2][x[:, :2] > 1] = 3
        return zeroed.sum(1), given

    net = Nimble(model, Options(tune="off", fuse=fuse)).prepare(torch.randn(4, 4), torch.ones(()))
    for _ in range(5):
        inputs = torch.randn(4, 4), torch.randn(())
        close(net(*inputs), model(*inputs))


class _NumbersWhereTrue(nn.Module):
    """Writes numbers where masks are true, which counts no places on a GPU, either."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(x)
        scores[x > 0.5] = -math.inf
        rows = x.clone()
        rows[x[:, 0] > 0] = 2
        rows[:, x[0] > 0] = torch.tensor(3.0)
        rows[:, :2][x[:, :2] > 1] = 0.25
        return scores.softmax(1), rows


@pytest.mark.slow
@pytest.mark.parametrize("fuse", ["none", "library", pytest.param("inductor", marks=pytest.mark.compiler)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_are_written_where_a_mask_is_true(fuse: Any, device: str) -> None:
    model = _NumbersWhereTrue().to(device)
    net = Nimble(model, Options(tune="off", fuse=fuse)).prepare(torch.randn(4, 4, device=device) - 1)
    for _ in range(5):
        x = torch.randn(4, 4, device=device) - 1
        close(net(x), model(x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_written_where_a_mask_is_true_have_no_gradient(device: str) -> None:
    model = _NumbersWhereTrue().to(device)
    eager = copy.deepcopy(model)
    net = Nimble(model, QUICK).prepare(torch.randn(4, 4, device=device) - 1, training=True)
    for _ in range(3):
        x = torch.randn(4, 4, device=device) - 1
        for called in (net, eager):
            probabilities, rows = called(x)
            (probabilities.square().sum() + rows.sum()).backward()
    close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", ["none", "library", "inductor"])
def test_what_was_computed_is_written_where_a_mask_is_true_on_a_gpu(fuse: Any) -> None:
    def model(x: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        means, given, columns = x.clone(), x * 1, x.t().clone()
        means[x > 0] = x.mean()
        given[given < -1] = value
        columns[:, x[:, 0] > 0] = value[None]
        return means, given.sum(1), columns

    x, value = torch.randn(4, 5, device="cuda"), torch.ones((), device="cuda")
    net = Nimble(model, Options(tune="off", fuse=fuse)).prepare(x, value)
    for _ in range(5):
        inputs = torch.randn(4, 5, device="cuda"), torch.randn((), device="cuda")
        close(net(*inputs), model(*inputs))


@pytest.mark.gpu
def test_numbers_of_the_host_that_change_between_reads() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step, total, filled = torch.tensor(1.0), x * 0, x.clone()
        for row in range(3):
            total = total + x * step
            filled[row][x[row] > 0] = step
            step += 1
        return total, filled

    net = Nimble(model, QUICK).prepare(torch.randn(4, 4, device="cuda"))
    for _ in range(3):
        x = torch.randn(4, 4, device="cuda")
        close(net(x), model(x))


@pytest.mark.gpu
def test_a_gradient_of_what_is_written_where_a_mask_is_true_is_refused_on_a_gpu() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.most = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y[x > 1] = self.most
            return y

    with pytest.raises(CaptureError, match="shape depends on data"):
        Nimble(Clipped().cuda(), QUICK).prepare(torch.randn(4, 4, device="cuda"), training=True)


@pytest.mark.gpu
def test_many_values_written_where_a_mask_is_true_are_refused_on_a_gpu_with_what_to_write() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[x[:, 0] > 0] = x[0]
        return y

    with pytest.raises(CaptureError, match="writes where a mask is true") as caught:
        Nimble(model, QUICK).prepare(torch.randn(4, 4, device="cuda"))
    assert "torch.where" in caught.value.fix


def test_the_measured_choice_equals_eager() -> None:
    model, x = Wide(), torch.randn(2, 16)
    net = Nimble(model).prepare(x)
    (engine,) = net.engines
    assert engine.schedule.policy in ("single", *POLICIES)
    steps = {"warm-up", "record", "record again", "hazards", "capture single", "schedule", "check equality", "choose"}
    assert set(engine.seconds) >= steps
    assert [one.name for one in engine.candidates if one.chosen] == [engine.schedule.policy]
    assert "single" in {one.name for one in engine.candidates}
    close(net(x + 1), model(x + 1))
    assert "prepared: args[0]" in repr(net)
    net.close()


def test_nothing_is_collected_while_eagers_calls_are_planned() -> None:
    seen: list[bool] = []

    def policy(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        if len(seen) > 1:
            raise KeyError("the policy's own")
        return POLICIES["nimble"](*args, **kwargs)

    net = Nimble(Wide(), Options(fuse="none", policy=policy, tune="off"))
    net.prepare(torch.randn(2, 16))
    assert gc.isenabled()
    with pytest.raises(KeyError):
        net.prepare(torch.randn(4, 16))
    assert seen == [False, False]
    assert gc.isenabled()
    net.close()


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_do_not_require_grad_in_any_mode(grad: bool) -> None:
    model, x = Deep(), torch.randn(2, 8, requires_grad=True)
    net = Nimble(model, QUICK).prepare(x)
    with torch.set_grad_enabled(grad), pytest.warns(NimbleWarning, match="carry none") if grad else nullcontext():
        out = net(x)
        assert torch.is_grad_enabled() == grad
    assert not out.requires_grad
    with torch.inference_mode():
        close(net(x), model(x))
    with torch.inference_mode():
        y = x * 2
    close(net(y), model(x.detach() * 2))
    net.close()


def test_preparing_inside_inference_mode() -> None:
    model, x = Deep(), torch.randn(2, 8)
    with torch.inference_mode():
        net = Nimble(model, QUICK).prepare(x)
        close(net(x), model(x))
    close(net(x + 1), model(x + 1))
    net.close()


def test_other_memory_layouts_of_the_inputs() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1) * 2 + x.t().reshape(-1)

    net = Nimble(forward, QUICK).prepare(torch.randn(4, 4))
    x = torch.randn(4, 4)
    close(net(x.t()), forward(x.t()))
    wide = torch.randn(4, 8)
    close(net(wide[:, ::2]), forward(wide[:, ::2]))
    one = torch.randn(1, 4).expand(4, 4)
    close(net(one), forward(one))
    net.prepare(one)
    close(net(x), forward(x))
    net.close()


def test_inputs_that_start_inside_their_memory() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.view(2, 1, 2)
        y.squeeze_(1)
        y.t_()
        return y * torch.tensor([[1.0], [2.0]])

    base = torch.arange(12.0).view(3, 4)
    net = Nimble(forward, QUICK).prepare(base[0])
    close(net(base[2]), forward(base[2]))
    net.prepare(base[1])
    close(net(base[0].clone()), forward(base[0]))
    net.close()


def test_a_written_input_of_another_layout() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).reshape(-1) * 2

    net = Nimble(forward, QUICK).prepare(torch.zeros(2, 3))
    mine, theirs = torch.arange(6.0).view(3, 2).t(), torch.arange(6.0).view(3, 2).t()
    close(net(mine), forward(theirs))
    close(mine, theirs)
    net.close()


def test_a_tensor_given_twice() -> None:
    net = Nimble(lambda a, b: a * 2 + b, QUICK)
    x, y = torch.randn(3), torch.randn(3)
    net.prepare(x, x)
    close(net(y, y), y * 3)
    with pytest.raises(InputError, match="the same tensor as"):
        net(x, y)
    net.prepare(x, y)
    close(net(x, y), x * 2 + y)
    close(net(y, y), y * 3)
    net.close()


# -- outputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_outputs_survive_later_calls(policy: str) -> None:
    model = Wide()
    net = Nimble(model, Options(tune="off", policy=policy)).prepare(torch.randn(2, 16))
    inputs = [torch.randn(2, 16) for _ in range(4)]
    outputs = [net(x) for x in inputs]
    for x, out in zip(inputs, outputs, strict=True):
        close(out, model(x))
    assert len({out.data_ptr() for out in outputs}) == 4
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


def test_static_outputs() -> None:
    model, x = Wide(), torch.randn(2, 16)
    net = Nimble(model, Options(tune="off", outputs="static")).prepare(x)
    close(net(x), model(x))
    close(net(x + 1), model(x + 1))
    net.close()


# -- a module like the wrapped one ---------------------------------------------------------------------------------


def test_parameters_and_state_are_the_models_own() -> None:
    model = Norms().eval()
    net = Nimble(model, QUICK)
    assert list(net.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(net.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(net.buffers(), model.buffers(), strict=True))
    assert [name for name, _ in net.named_modules()][1:] == [name for name, _ in model.named_modules()][1:]
    assert net.convolution is model.convolution
    assert isinstance(net, nn.Module)
    before = copy.deepcopy(model.__dict__)
    net.prepare(torch.randn(1, 3, 4, 4))
    assert model.__dict__.keys() == before.keys()
    assert type(model) is Norms
    model.register_buffer("later", torch.ones(1))
    assert "later" in net.state_dict()
    net.close()


def test_attributes_are_passed_through() -> None:
    model = Wide()
    model.note = "hello"
    net = Nimble(model)
    assert net.note == "hello"
    assert net.branches is model.branches
    with pytest.raises(AttributeError, match="nothing"):
        _ = net.nothing


def test_a_function_can_be_wrapped() -> None:
    net = Nimble(torch.sin, QUICK).prepare(torch.ones(2))
    close(net(torch.zeros(2)), torch.zeros(2))
    assert list(net.parameters()) == []
    assert net.state_dict() == {}
    net.eval()
    net.train()
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


def test_live_buffers_in_training_mode() -> None:
    model = Norms().train()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3, 4, 4)
    net = Nimble(model, QUICK).prepare(x)
    close(list(model.state_dict().values()), list(twin.state_dict().values()))
    for turn in range(3):
        close(net(x + turn), twin(x + turn))
    close(list(model.state_dict().values()), list(twin.state_dict().values()))
    assert int(model.norm.num_batches_tracked) == 3
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


def test_copies_start_unprepared() -> None:
    model, x = Deep(), torch.randn(2, 8)
    net = Nimble(model, Options(tune="off", outputs="static")).prepare(x)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(twin, Nimble)
        assert twin.engines == ()
        assert list(twin.state_dict()) == list(model.state_dict())
        assert next(twin.parameters()) is not next(net.parameters())
        close(twin.prepare(x)(x), model(x))
        twin.close()
    close(net(x), model(x))
    net.close()


@pytest.mark.parametrize("training", [False, True])
def test_one_warning_says_that_what_hooks_keep_goes_stale(training: bool) -> None:
    kept: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        kept["out"] = out

    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train(training), torch.randn(2, 4)
    handles = [
        model[0].register_forward_hook(functools.partial(keep)),
        model.register_forward_pre_hook(lambda *_: None),
    ]
    with pytest.warns(NimbleWarning) as given:
        Nimble(model, QUICK).prepare(x, training=training).close()
    (warning,) = given
    assert "forward" in str(warning.message)
    assert "and 1 more: what hooks compute is replayed" in str(warning.message)
    assert warning.filename == __file__
    handles[1].remove()
    with pytest.warns(NimbleWarning, match="the forward hook keep of 0: "):
        Nimble(model, QUICK).prepare(x, training=training).close()
    handles[0].remove()
    Nimble(model, QUICK).prepare(x, training=training).close()


def test_hooks_of_libraries_are_not_warned_of() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    assert model[0]._forward_pre_hooks
    with pytest.warns(NimbleWarning) as given:  # of the pruned weight, an attribute
        net = Nimble(model.eval(), QUICK).prepare(x)
    assert not any("hook" in str(one.message) for one in given)
    close(net(x), model(x))
    net.close()


class Skipping(nn.Module):
    """Leaves out its layer as LayerDrop does, on a draw that ``draw`` makes."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = self.draw() < 1e-9
        return x if skipped else x + self.layer(x)


@pytest.mark.parametrize("way", ["inference", "in place of the model", "whole step"])
@pytest.mark.parametrize("library", ["random", "numpy.random"])
def test_one_warning_says_that_what_python_draws_is_frozen(library: str, way: str) -> None:
    draw = random.random if library == "random" else pytest.importorskip("numpy").random.uniform
    model, x = Skipping(draw), torch.randn(2, 4)
    net: Any = Nimble(model, QUICK)
    if way == "whole step":
        net = TrainStep(model, torch.Tensor.sum, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
    with pytest.warns(NimbleWarning) as given:
        net.prepare(x, training=True) if way == "in place of the model" else net.prepare(x)
    (warning,) = given
    assert f"{library}: what was drawn in preparation is frozen in every replay" in str(warning.message)
    assert warning.filename == __file__
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
        (lambda y: [y, {"a": y.numpy()}], "output[1]['a']"),
        (lambda y: (y, memoryview(y.numpy())), "output[1]"),
        (lambda y: (one for one in [y]), "output"),
        (lambda y: (y, map(torch.relu, [y])), "output[1]"),
        (lambda y: Slotted(y), "output.held"),
        (lambda y: [y, Slotted([1, "a"])], "output[1]"),
        (lambda y: ValueError(y), "output"),
        (lambda y: functools.partial(torch.add, y), "output"),
        (lambda y: lambda: y, "output"),
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


def test_plain_values_in_an_output_are_returned() -> None:
    net = Nimble(lambda x: (x * 2, [1, "a"], float("nan")), QUICK).prepare(torch.ones(2))
    y, plain, _ = net(torch.zeros(2))
    assert (y.tolist(), plain) == ([0.0, 0.0], [1, "a"])
    net.close()


def test_an_array_that_was_changed_in_place_is_another_input() -> None:
    numpy = pytest.importorskip("numpy")
    x, scale = torch.ones(2), numpy.ones(4)
    net = Nimble(lambda x, scale: x * float(scale.sum()), QUICK).prepare(x, scale)
    close(net(x, scale.copy()), x * 4)
    scale[1:] = 5
    with pytest.raises(InputError, match=r"args\[1\]: expected float64\[4\] \[1.0, 1.0.*given float64\[4\] \[1.0, 5.0"):
        net(x, scale)
    net.close()


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_lazy_views_are_refused_as_inputs(kind: str) -> None:
    z = torch.randn(3, dtype=torch.cfloat)
    with pytest.raises(InputError, match=r"args\[0\] is a lazy view") as caught:
        Nimble(lambda x: x * 2, QUICK).prepare(z.conj() if kind == "conj" else z.conj().imag)
    assert f".resolve_{kind}()" in caught.value.fix
    net = Nimble(lambda x: x.real + 1, QUICK).prepare(z)
    with pytest.raises(InputError, match="no conjugate view"):
        net(z.conj())
    close(net(z.conj().resolve_conj()), z.real + 1)
    net.close()


def test_hooks_run_as_they_did_when_recorded() -> None:
    model, x = Deep(), torch.randn(2, 8)
    model.layers[0].register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(NimbleWarning, match="forward hook"):
        net = Nimble(model, QUICK).prepare(x)
    close(net(x + 1), model(x + 1))
    seen: list[int] = []
    net.register_forward_hook(lambda *_: seen.append(1))
    net(x)
    assert seen == [1]
    net.close()


def test_inside_another_module() -> None:
    model, x = Deep(), torch.randn(2, 8)
    outer = nn.Sequential(Nimble(model, QUICK).prepare(x), nn.Linear(8, 2))
    close(outer(x), outer[1](model(x)))
    assert set(outer.state_dict()) == {f"0.{k}" for k in model.state_dict()} | {"1.weight", "1.bias"}
    outer[0].close()


# -- signatures ----------------------------------------------------------------------------------------------------


def test_several_signatures() -> None:
    model = Wide()
    net = Nimble(model, QUICK)
    for batch in (1, 2, 3):
        assert net.prepare(torch.randn(batch, 16)) is net
    assert len(net.engines) == 3
    for batch in (3, 1, 2, 2):
        x = torch.randn(batch, 16)
        close(net(x), model(x))
    net.prepare(torch.randn(2, 16))
    assert len(net.engines) == 3
    with pytest.raises(InputError, match=r"args\[0\]: expected float32\[2, 16\].*given float32\[4, 16\]") as caught:
        net(torch.randn(4, 16))
    assert "prepared: args[0]" in caught.value.where
    with pytest.raises(InputError, match="positional"):
        net()
    net.close()


def test_a_call_is_held_against_the_nearest_signature() -> None:
    net = Nimble(nn.Linear(4, 4), QUICK)
    for batch in (2, 8):
        net.prepare(torch.randn(batch, 4))
    both = "prepared: args[0]: float32[{}, 4] on cpu; args[0]: float32[{}, 4] on cpu"
    for x, nearest, other in (
        (torch.randn(3, 4), 8, 2),  # as near to each: the latest
        (torch.randn(2, 5), 2, 8),  # one of two dimensions is right
        (torch.randn(2, 4).double(), 2, 8),
        (torch.randn(8, 4).double(), 8, 2),
    ):
        with pytest.raises(InputError) as caught:
            net(x)
        dtype = str(x.dtype).removeprefix("torch.")
        assert caught.value.what == (
            f"no engine is prepared for these inputs: args[0]: expected float32[{nearest}, 4] on cpu, "
            f"given {dtype}{list(x.shape)} on cpu"
        )
        assert caught.value.where == both.format(nearest, other)
    net.eval()
    for batch in range(10, 15):
        net.prepare(torch.randn(batch, 4))
    with pytest.raises(InputError, match=r"expected float32\[14, 4\]") as caught:  # the others are of training mode
        net(torch.randn(2, 4))
    assert caught.value.where.endswith("args[0]: float32[12, 4] on cpu; and 2 more")
    assert "[8, 4]" not in caught.value.where
    net.close()


def test_inputs_that_are_no_tensors_are_listed_where_they_differ() -> None:
    numpy = pytest.importorskip("numpy")
    x, scale = torch.randn(3), numpy.ones(2)
    net = Nimble(lambda x, s, mode="a", same=1: x * s, QUICK)
    net.prepare(x, 2.0, same=1).prepare(x, 3.0, mode="b", same=1)
    with pytest.raises(InputError, match=r"inputs: args\[1\]: expected 2.0, given 5.0") as caught:
        net(x, 5.0, same=1)
    first, second = "args[0]: float32[3] on cpu, args[1]: 2.0", "args[0]: float32[3] on cpu, args[1]: 3.0"
    assert caught.value.where == f"prepared: {first}; {second}, kwargs['mode']: 'b'"
    with pytest.raises(InputError, match=r"args\[1\]: expected 3.0, given 5.0") as caught:
        net(x, 5.0, mode="b", same=1)
    assert caught.value.where == f"prepared: {second}, kwargs['mode']: 'b'; {first}"
    with pytest.raises(InputError) as caught:
        net(x, iter([1.0]), same=1)  # which cannot be looked into
    assert caught.value.where == "prepared: args[0]: float32[3] on cpu"
    net.close()

    net = Nimble(lambda x, held: x * float(held["scale"].sum()), QUICK).prepare(x, {"scale": scale})
    scale[:] = 7  # changed in place: what it was is said, not what it is
    with pytest.raises(InputError) as caught:
        net(x, {"scale": scale})
    assert caught.value.where == "prepared: args[0]: float32[3] on cpu, args[1]['scale']: float64[2] [1.0, 1.0]"
    net.close()


def test_keyword_inputs() -> None:
    model, args, kwargs = make("attention_masked")
    net = Nimble(model, QUICK).prepare(*args, **kwargs)
    with pytest.raises(InputError, match="key_padding_mask"):
        net(*args)
    with pytest.raises(InputError, match="need_weights"):
        net(*args, **kwargs, need_weights=False)
    net.close()


@pytest.mark.parametrize("answer", ["eager", "prepare"])
def test_other_shapes(answer: Any) -> None:
    model = Wide()
    net = Nimble(model, Options(tune="off", on_new_shape=answer)).prepare(torch.randn(1, 16))
    x = torch.randn(5, 16)
    close(net(x), model(x))
    assert len(net.engines) == (2 if answer == "prepare" else 1)
    close(net(x), model(x))
    net.close()
    assert net.engines == ()
    close(net(x), model(x))
    net.close()


def casting(to: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", to or torch.bfloat16, enabled=to is not None)


CASTS = [None, torch.bfloat16, torch.float16]


def asked_for_the_sum(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


PREPARING: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "inference": lambda net, x: Nimble(net, FAST).prepare(x).close(),
    "in place of the model": lambda net, x: Nimble(net, FAST).prepare(x, training=True).close(),
    "whole step": lambda net, x: (
        TrainStep(net, torch.Tensor.sum, torch.optim.SGD(net.parameters(), lr=0.1), options=FAST).prepare(x).close()
    ),
    "compare": lambda net, x: compare(net, x, options=FAST),
    "compare steps": lambda net, x: compare(net, x, options=FAST, training=True, loss_fn=torch.Tensor.sum),
    "an error": lambda net, x: Nimble(lambda one: asked_for_the_sum(net(one)), FAST).prepare(x),
}


@pytest.mark.parametrize("way", PREPARING)
def test_autocast_keeps_no_cast_of_a_weight_from_a_preparation(way: str) -> None:
    """What is read afterwards in the same region would be the weight as it was, written without a word to autocast."""
    net, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    with casting(torch.bfloat16):
        with pytest.raises(CaptureError) if way == "an error" else nullcontext():
            PREPARING[way](net, x)
        with torch.no_grad():
            net.weight.zero_()
        assert not net(x).any()


def test_a_preparation_between_forward_and_backward_under_autocast_leaves_gradients_as_they_were() -> None:
    net, x = nn.Linear(4, 4), torch.randn(8, 4)

    def trained(between: Callable[[], object]) -> list[torch.Tensor]:
        with casting(torch.bfloat16):
            y = net(x)
            between()
            y = net(y)  # its weight is cast again
        return list(torch.autograd.grad(y.float().sum(), list(net.parameters())))

    expected = trained(lambda: None)
    for way in ("inference", "in place of the model"):
        found = trained(lambda way=way: PREPARING[way](net, x))
        # Two casts of one weight, not one: their gradients are summed in float32.
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("then", "now"), [(a, b) for a in CASTS for b in CASTS if a is not b])
def test_another_autocast_is_another_signature(
    then: torch.dtype | None, now: torch.dtype | None, training: bool
) -> None:
    model, x = nn.Linear(8, 8).train(training), torch.randn(2, 8)
    net = Nimble(model, QUICK)
    with casting(then):
        net.prepare(x, training=training)
    with casting(now), torch.no_grad(), pytest.raises(InputError, match="under this autocast: autocast was") as caught:
        net(x)
    names = [str(one).removeprefix("torch.") if one else "off" for one in (then, now)]
    assert f"was {names[0]} then, and is {names[1]} now" in str(caught.value)
    assert "the same torch.autocast" in caught.value.fix
    with casting(now):
        net.prepare(x, training=training).prepare(x, training=training)
    assert len(net.engines) == 2
    for cast in (then, now, then):
        with casting(cast):
            made, wanted = net(x), model(x)
            with pytest.raises(InputError, match=r"args\[0\]: expected"):
                net(torch.randn(3, 8))
        assert made.dtype is wanted.dtype
        torch.testing.assert_close(made, wanted)
    net.close()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("answer", ["eager", "prepare"])
def test_other_autocasts(answer: Any, training: bool) -> None:
    model, x = nn.Linear(8, 8).train(training), torch.randn(2, 8)
    net = Nimble(model, Options(tune="off", on_new_shape=answer)).prepare(x, training=training)
    for _ in range(2):
        with casting(torch.bfloat16):
            made = net(x)
        assert made.dtype is torch.bfloat16
        assert made.requires_grad is (training or answer == "eager")
        assert net(x).dtype is torch.float32
    assert len(net.engines) == (2 if answer == "prepare" else 1)
    net.close()


def test_parameters_in_training_mode_whose_gradients_no_output_carries_are_mentioned_once_an_engine() -> None:
    model, head, x = Deep().train(), nn.Linear(8, 2), torch.randn(2, 8)
    net = Nimble(model, QUICK).prepare(x)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x)
    with pytest.warns(NimbleWarning, match=r"training mode, .*weight requires a gradient.*training=True") as caught:
        [head(net(x)).sum().backward() for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    net.requires_grad_(False).prepare(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x)
    net.close()


def test_gradients_that_no_output_carries_are_mentioned_once_an_engine() -> None:
    model, x = Deep().eval(), torch.randn(2, 8)
    net = Nimble(model, QUICK).prepare(x)
    wants = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # parameters require gradients as well: in evaluation mode nothing is said
        net(x)
        with torch.no_grad():
            net(wants)
        with torch.inference_mode():
            net(wants)
    with pytest.warns(
        NimbleWarning, match=r"args\[0\] requires a gradient.*prepare\(\.\.\., training=True\)"
    ) as caught:
        outputs = [net(wants * 1), net(wants)]
    assert not any(one.requires_grad for one in outputs)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    net.prepare(x)
    with pytest.warns(NimbleWarning, match="carry none"):
        net(wants)
    net.close()


def test_a_parameter_that_the_model_writes_under_no_grad_is_written() -> None:
    @torch.no_grad()
    def average(shadow: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        return shadow.mul_(0.5).add_(now)

    net = Nimble(average, QUICK).prepare(nn.Parameter(torch.randn(4)), torch.randn(4))
    shadow, now = nn.Parameter(torch.ones(4)), torch.ones(4)
    with pytest.warns(NimbleWarning, match="carry none"):
        net(shadow, now)
    assert torch.equal(shadow.detach(), torch.full((4,), 1.5))
    net.close()


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("turn", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn])
def test_what_is_not_dense_is_another_signature(turn: Any) -> None:
    x = torch.randn(2, 4)
    net = Nimble(lambda a: a * 2, QUICK).prepare(x)
    with pytest.raises(InputError, match=r"args\[0\]: expected a dense tensor, float32\[2, 4\]"):
        net(turn(x))
    net.close()
    for answer, words in (("eager", ""), ("prepare", "not a dense tensor")):
        net = Nimble(lambda a: a * 2, replace(QUICK, on_new_shape=answer)).prepare(x)
        with pytest.raises(InputError, match=words) if words else nullcontext():
            torch.testing.assert_close(net(turn(x)).to_dense(), x * 2)
        net.close()


class Halves(torch.Tensor):
    """Whatever is computed of it is half as much."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) / 2 if type(result) is cls else result


@pytest.mark.parametrize("training", [False, True])
def test_a_tensor_of_another_class_is_another_signature(training: bool) -> None:
    model, x = nn.Linear(4, 4).train(training), torch.randn(2, 4)
    other = x.as_subclass(Halves)
    expected = model(x) / 2
    torch.testing.assert_close(model(other), expected)
    net = Nimble(model, QUICK).prepare(x, training=training)
    with pytest.raises(InputError, match=r"args\[0\]: expected a torch.Tensor, given a Halves"):
        net(other)
    for plain in (nn.Parameter(x, requires_grad=False), nn.Buffer(x), other.as_subclass(torch.Tensor)):
        torch.testing.assert_close(net(plain), model(x))
    net.close()
    for answer in ("eager", "prepare"):
        net = Nimble(model, replace(QUICK, on_new_shape=answer)).prepare(x, training=training)
        if answer == "eager":
            torch.testing.assert_close(net(other), expected)
        else:
            with pytest.raises(InputError, match=r"args\[0\] is a Halves, a class of its own"):
                net(other)
        torch.testing.assert_close(net(x), model(x))
        net.close()
    with pytest.raises(InputError, match=r"args\[0\] is a Halves, a class of its own"):
        Nimble(model, QUICK).prepare(other, training=training)


@pytest.mark.parametrize("answer", ["error", "eager", "prepare"])
def test_inputs_that_contain_themselves(answer: str) -> None:
    def first(given: Any) -> Any:
        return given[0] * 2

    x = torch.randn(2, 4)
    holder: list[Any] = [x]
    holder.append(holder)
    net = Nimble(first, replace(QUICK, on_new_shape=answer)).prepare([x, 1])
    if answer == "eager":
        close(net(holder), x * 2)
    else:
        with pytest.raises(InputError, match=r"args\[0\] is a list that contains itself"):
            net(holder)
    with pytest.raises(InputError, match=r"args\[0\] is a list that contains itself"):
        net.prepare(holder)
    close(net([x, 1]), x * 2)
    net.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "error:the forward changes attributes")
@pytest.mark.parametrize("around", [lambda one: one, nn.Sequential])
def test_a_frozen_script_module_which_has_no_mode(around: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    net = Nimble(around(torch.jit.freeze(torch.jit.script(model))), QUICK).prepare(x)
    y = torch.randn(2, 4)
    close(net(y), model(y))
    net.close()


def test_a_part_in_which_nothing_is_prepared_is_named() -> None:
    x = torch.randn(2, 4)
    inner = Nimble(nn.Linear(4, 4), QUICK)
    model = nn.Sequential(nn.ReLU(), inner)
    for training in (False, True):
        with pytest.raises(InputError, match="1 is itself a Nimble, of a Linear, and nothing is prepared in it"):
            Nimble(model, QUICK).prepare(x, training=training)
    with pytest.raises(InputError, match="nothing is prepared in this Nimble of Linear"):
        model(x)
    model.eval()
    inner.prepare(x)
    net = Nimble(model, QUICK).prepare(x)
    close(net(x), inner._model(x.relu()))
    net.close()
    inner.close()


def test_an_input_that_is_memory_of_the_model() -> None:
    inner = nn.Linear(4, 4)
    for model, held in ((inner, "parameter weight"), (lambda w: w @ inner.weight + 1, "constant")):
        with pytest.raises(NotStaticError, match=rf"it reads args\[0\] in one run, {held} in the other") as caught:
            Nimble(model, QUICK).prepare(inner.weight)
        assert "prepare with args[0].clone()" in str(caught.value)
        net = Nimble(model, QUICK).prepare(inner.weight.detach().clone())
        close(net(inner.weight.detach()), model(inner.weight))
        net.close()


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*TypedStorage.*", "ignore:.*torch.ao.*")
def test_packed_weights_are_not_called_a_branch_on_data() -> None:
    if torch.backends.quantized.engine == "none":
        pytest.skip("no engine for quantized operators")
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval(), {nn.Linear})
    with pytest.raises(
        CaptureError, match=r"takes an object of TorchScript \(W_prepack\)[\s\S]*leave that part"
    ) as caught:
        Nimble(model, QUICK).prepare(torch.randn(2, 4))
    assert not isinstance(caught.value, NotStaticError)


def test_closing() -> None:
    net = Nimble(Deep(), QUICK)
    x = torch.randn(2, 8)
    with pytest.raises(InputError, match="nothing is prepared"):
        net(x)
    net.close()
    net.prepare(x)
    (engine,) = net.engines
    net.close()
    net.close()
    with pytest.raises(InputError, match="nothing is prepared"):
        net(x)
    with pytest.raises(DeviceError, match="closed"):
        engine.executable.run([x])
    engine.executable.close()


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [3, "model", None, nn.Linear, [nn.Linear(1, 1)]])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(InputError, match="Nimble takes"):
        Nimble(model)


def test_bad_preparations() -> None:
    net = Nimble(Deep(), QUICK)
    with pytest.raises(InputError, match="evaluation mode"):
        Nimble(Deep().eval(), QUICK).prepare(torch.randn(1, 8), training=True)
    with pytest.raises(InputError, match="training=True"):
        Nimble(torch.sin, QUICK).prepare(torch.randn(1, 8), training=True)
    with pytest.raises(InputError, match="no tensor"):
        net.prepare()
    with pytest.raises(InputError, match="mixed devices"):
        net.prepare(torch.randn(1, 8), torch.randn(1, device="meta"))
    with pytest.raises(InputError, match="mixed devices: parameter"):
        net.prepare(torch.randn(1, 8, device="meta"))
    with pytest.raises(InputError, match="only cuda and cpu"):
        Nimble(torch.sin).prepare(torch.randn(1, device="meta"))
    with pytest.raises(InputError, match="no policy 'nonsense'"):
        Nimble(Deep(), Options(policy="nonsense")).prepare(torch.randn(1, 8))
    with pytest.raises(DeviceError, match="memory_limit"):
        Nimble(Wide(), Options(tune="off", memory_limit=0)).prepare(torch.randn(2, 16))


def scaled_by_its_sum(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if x.detach().numpy()[0] > 1.9 else torch.tanh(x)


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(random.randrange(1000)):
            x = x + 1
        return x


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("the model's own error")


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (Reads(), CaptureError, "_local_scalar_dense"),
        (Draws(), NotStaticError, "calls in one run"),
        (Fails(), KeyError, "the model's own error"),
    ],
)
def test_an_error_leaves_earlier_engines_usable(model: nn.Module, error: type[Exception], words: str) -> None:
    switch = {"model": torch.sin}
    net = Nimble(lambda x: switch["model"](x), QUICK)
    x = torch.linspace(2, 0, 6)
    net.prepare(x)
    switch["model"] = model
    state = random.getstate()
    with pytest.raises(error, match=words):
        net.prepare(torch.randn(3, 4))
    assert random.getstate() == state
    close(net(x), torch.sin(x))
    assert len(net.engines) == 1
    net.close()


def test_a_branch_that_torch_does_not_show() -> None:
    net = Nimble(Branches(), QUICK)
    with pytest.raises(NotStaticError, match=r"relu.*tanh"):
        net.prepare(torch.linspace(2, 0, 60))


def test_preparing_leaves_everything_as_it_was() -> None:
    model = Busy().train()
    x = torch.randn(4, 3)
    tensors = [*model.state_dict().values(), model.tensor, x]
    kept = [tensor.clone() for tensor in tensors]
    state, drawn = torch.get_rng_state(), random.getstate()
    for options in (QUICK, Options(tune="fast", budget_s=0.1)):
        with pytest.warns(NimbleWarning) as given:
            net = Nimble(model, options).prepare(x)
        notes = net.engines[0].notes[:3]
        assert [str(one.message) for one in given] == list(notes)
        assert ["random" in notes[0], "count" in notes[1], "history" in notes[2]] == [True] * 3
        assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == drawn
        assert (model.history, model.table, model.number, model.gone) == ([1], {"a": 1}, 1, "here")
        net.close()


def test_values_from_numpy_are_captured_as_a_whole_or_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy() * 2)

    with pytest.warns(NimbleWarning, match="called as it is") as caught:
        net = Nimble(forward, QUICK).prepare(torch.randn(3))
    assert len(caught) == 1
    x = torch.randn(3)
    close(net(x), x * 3)
    assert "called as it is" in net.engines[0].notes[-1]
    assert "launch" not in net.engines[0].notes[-1]  # there are none on the host
    net.close()
    with pytest.raises(CaptureError, match="outside of torch"):
        Nimble(forward, Options(strict=True)).prepare(torch.randn(3))


def through_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[0] += 1


def through_array(x: torch.Tensor) -> None:
    import numpy

    numpy.asarray(x.detach())[:] *= 2


def through_dlpack(x: torch.Tensor) -> None:
    import numpy

    numpy.from_dlpack(x.detach())[-1] = 3


@pytest.mark.parametrize("place", ["output", "middle", "slice"])
def test_results_filled_past_the_dispatcher_are_noticed(place: str) -> None:
    """What a C++ extension does: torch makes the memory, and no call fills it."""

    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        return y if place == "output" else y[1:].neg() if place == "slice" else y * 2

    x = torch.randn(4)
    with pytest.warns(NimbleWarning, match="called as it is.*no call has filled"):
        net = Nimble(model, QUICK).prepare(x)
    x = torch.randn(4)
    close(net(x), model(x))
    net.close()
    with pytest.raises(CaptureError, match=r"outside of torch .*C\+\+"):
        Nimble(model, Options(strict=True)).prepare(x)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("answer", ["error", "prepare"])
def test_a_prepared_module_inside_of_another_is_recorded_call_by_call(answer: Any, device: str) -> None:
    x = torch.randn(4, 4, device=device)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    part = Nimble(inner, Options(fuse="none", tune="off", on_new_shape=answer))
    if answer == "error":
        part.prepare(x)
    model = nn.Sequential(part, nn.Linear(4, 4).to(device))
    net = Nimble(model, Options(fuse="none", tune="off", strict=True)).prepare(x)
    names = [call.label for call in net.engines[0].recorded.recording.program.calls]
    assert names == ["addmm", "tanh", "addmm"]
    x = torch.randn(4, 4, device=device)
    with torch.no_grad():
        close(net(x), model[1](inner(x)))
        close(part(x), inner(x))  # replays as before
    net.close()
    part.close()


@pytest.mark.parametrize("fuse", ["none", "library"])
def test_a_model_whose_replays_are_wrong_is_called_as_it_is(fuse: Any) -> None:
    """Whatever the reason is, such as a write that nothing shows."""

    def model(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, (x * 3).relu()
        ctypes.memmove(y.data_ptr(), z.data_ptr(), x.nbytes)
        return y * 2 + z.exp()

    x = torch.randn(4, 4)
    with pytest.warns(NimbleWarning, match="called as it is.*a one-stream replay is not what eager computes"):
        net = Nimble(model, Options(fuse=fuse, budget_s=0.2)).prepare(x)
    assert net.engines[0].plan is None
    x = torch.randn(4, 4)
    close(net(x), model(x))
    net.close()
    with pytest.raises(CaptureError, match="not what eager computes"):
        Nimble(model, Options(fuse=fuse, budget_s=0.2, strict=True)).prepare(x)


def test_memory_that_is_filled_by_calls_or_counts_for_nothing_is_no_news() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.mul(x, 2, out=y)
        z = x.new_empty(4, 4)
        z[0], z[1:] = y, 1
        return torch.addmm(torch.empty(4, 4), z, z, beta=0) + torch.empty(0).sum() + torch.empty(4).fill_(1)

    x = torch.randn(4)
    net = Nimble(model, Options(strict=True)).prepare(x)
    x = torch.randn(4)
    close(net(x), model(x))
    net.close()


def by_permutation(x: torch.Tensor) -> None:
    x.detach().numpy().sort()


@pytest.mark.parametrize("change", [through_numpy, through_array, through_dlpack, by_permutation])
@pytest.mark.parametrize("what", ["result", "output", "constant", "input", "weight"])
def test_results_changed_out_of_sight_are_noticed(change: Callable[[torch.Tensor], None], what: str) -> None:
    """What numpy writes into a tensor is no call: a replay would go on with what was there before."""
    pytest.importorskip("numpy")
    weight = nn.Parameter(torch.randn(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            constant = torch.arange(3.0).flip(0)
            change({"result": y, "output": y, "constant": constant, "input": x, "weight": self.weight}[what])
            return y if what == "output" else y + constant

    model, x, kept = Model(), torch.tensor([2.0, 3.0, 1.0]), weight.detach().clone()
    with pytest.warns(NimbleWarning, match=r"memory handed out in the model at .*test_nimble.py"):
        net = Nimble(model, QUICK).prepare(x)
    assert torch.equal(weight, kept)
    assert torch.equal(x, torch.tensor([2.0, 3.0, 1.0]))
    with pytest.raises(CaptureError, match="changed outside of torch") as caught:
        Nimble(model, Options(strict=True)).prepare(x)
    assert "test_nimble.py" in caught.value.where
    x = torch.randn(3)
    mine = net(x.clone())
    with torch.no_grad():
        weight.copy_(kept)
    close(mine, model(x.clone())) if what != "weight" else None
    net.close()


def by_list(n: torch.Tensor) -> int:
    return sum(n.tolist())


def by_numpy(n: torch.Tensor) -> int:
    return int(n.numpy().max())


def by_dlpack(n: torch.Tensor) -> int:
    import numpy

    return int(numpy.from_dlpack(n).sum())


@pytest.mark.parametrize("read", [by_list, by_numpy, by_dlpack])
@pytest.mark.parametrize("numbers", [[2, 2, 2], [1, 2, 3], [5, 0, 3], [0, 0, 0]], ids=str)
def test_integers_read_out_of_sight_are_never_frozen(read: Callable[[torch.Tensor], int], numbers: list[int]) -> None:
    """Another order of them leaves sum, extremes and whether all are equal as they are."""
    pytest.importorskip("numpy")
    x, n, other = torch.rand(3), torch.tensor(numbers), torch.tensor([7, 1, 2])
    with pytest.raises(NotStaticError):  # the number is an argument
        Nimble(lambda x, n: x * read(n), QUICK).prepare(x, n)
    with pytest.warns(NimbleWarning, match="called as it is"):  # it is in a tensor
        net = Nimble(lambda x, n: x * torch.tensor([float(read(n))]), QUICK).prepare(x, n)
    close(net(x, other), x * read(other))
    net.close()


def test_a_mask_read_out_of_sight_is_no_branch() -> None:
    pytest.importorskip("numpy")
    with pytest.raises(NotStaticError):
        Nimble(lambda x, m: x if m.numpy().all() else x * m, QUICK).prepare(torch.rand(3), torch.ones(3).bool())


def test_what_takes_no_contrary_values_is_called_as_it_is() -> None:
    def parts(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.sum() for part in x.split(n.tolist())])

    x = torch.arange(6.0)
    with pytest.warns(NimbleWarning, match=r"called as it is.*tolist in the model at .*test_nimble.py"):
        net = Nimble(parts, QUICK).prepare(x, torch.tensor([2, 2, 2]))
    close(net(x, torch.tensor([1, 2, 3])), torch.tensor([0.0, 3.0, 12.0]))
    with pytest.raises(CaptureError, match="outside of torch"):
        Nimble(parts, Options(strict=True)).prepare(x, torch.tensor([2, 2, 2]))
    net.close()


def test_a_refusal_holds_though_the_model_catches_it() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        try:
            scale = x.sum().item()
        except Exception:
            scale = 1.0
        return x * scale

    with pytest.raises(CaptureError, match="gives the host a value") as caught:
        Nimble(forward, QUICK).prepare(torch.rand(3))
    assert "test_nimble.py" in caught.value.where


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torchscript_reads_on_the_host_is_refused_as_in_eager() -> None:
    scripted = torch.jit.script(scaled_by_its_sum)
    with pytest.raises(CaptureError, match="gives the host a value"):
        Nimble(scripted, QUICK).prepare(torch.rand(3))


def test_an_error_about_values_that_the_model_catches_is_refused() -> None:
    def factor(x: torch.Tensor) -> torch.Tensor:
        for more in (0.0, 1.0):
            try:
                return torch.linalg.cholesky(x + more * torch.eye(3))
            except RuntimeError:
                pass
        return x

    with pytest.raises(NotStaticError, match="caught the error of a call that fails on some values") as caught:
        Nimble(factor, QUICK).prepare(-0.5 * torch.eye(3))
    assert "_linalg_check_errors" in caught.value.where

    def reshaped(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.view(-1)
        except RuntimeError:
            return x.reshape(-1)

    x = torch.rand(2, 3).t()
    assert torch.equal(Nimble(reshaped, QUICK).prepare(x)(x), x.reshape(-1))


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given.append(3),
        lambda given: given.__setitem__(0, given[0] * 2),
        lambda given: given.pop(),
    ],
    ids=["more", "another", "less"],
)
def test_containers_of_the_callers_are_not_changed(change: Callable[[list[Any]], object]) -> None:
    def forward(x: torch.Tensor, given: list[Any]) -> torch.Tensor:
        y = x + given[0]
        change(given)
        return y

    first = torch.rand(3)
    given = [first, 2]
    with pytest.raises(CaptureError, match=r"the forward changes args\[1\]") as caught:
        Nimble(forward, QUICK).prepare(torch.rand(3), given)
    assert given[0] is first
    assert given[1:] == [2]
    assert "return" in caught.value.fix


def test_what_only_reads_through_numpy_stays_a_replay() -> None:
    pytest.importorskip("numpy")

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.detach().numpy().sum()
        y += 1  # a call may write it
        y.detach().numpy().sum()
        return y * 2

    net = Nimble(forward, QUICK).prepare(torch.randn(3))
    assert net.engines[0].notes == ()
    assert net.engines[0].schedule.policy == "single"
    net.close()


def test_a_compiled_submodule() -> None:
    inner = Deep()
    compiled = torch.compile(inner, backend="aot_eager")
    x = torch.randn(2, 8)
    net = Nimble(lambda x: compiled(x) * 2, QUICK).prepare(x)
    close(net(x + 1), inner(x + 1) * 2)
    net.close()


# -- warnings ------------------------------------------------------------------------------------------------------


class Holding(nn.Module):
    """A model of which a part is prepared."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)  # inside


def hooked(net: nn.Module) -> nn.Module:
    net.register_forward_pre_hook(lambda module, args: None)
    return net


def decorated(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    @functools.wraps(net.forward)
    def call(x: torch.Tensor) -> torch.Tensor:
        return net(x)  # inside

    return call


HELD: dict[str, tuple[Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]], str]] = {
    "called": (lambda net: net, "outside"),
    "forward": (lambda net: net.forward, "outside"),
    "with a hook": (hooked, "outside"),
    "in torch's containers": (lambda net: nn.Sequential(nn.Identity(), nn.Sequential(net)), "outside"),
    "under torch's decorators": (lambda net: torch.no_grad()(torch.inference_mode()(net)), "outside"),
    "in a module": (lambda net: nn.Sequential(Holding(net)), "inside"),
    "in functools.wraps": (decorated, "inside"),
}


def lines_of(caught: list[warnings.WarningMessage]) -> list[str]:
    """The lines that warnings name, of this file."""
    assert {one.filename for one in caught} <= {__file__}
    return [linecache.getline(one.filename, one.lineno).strip() for one in caught]


@pytest.mark.parametrize("how", HELD)
def test_a_warning_of_a_call_names_the_users_line(how: str) -> None:
    hold, where = HELD[how]
    x = torch.randn(2, 4)
    net = Nimble(nn.Linear(4, 2).train(), QUICK).prepare(x, training=True)
    held = hold(net)
    net.eval()
    with pytest.warns(NimbleWarning, match="not prepared in evaluation mode") as caught:
        held(x)  # outside
    assert [line.rpartition("# ")[2] for line in lines_of(list(caught))] == [where]
    net.close()


def test_a_forward_that_comes_too_early_names_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 4)
    net = Nimble(nn.Linear(4, 2).train(), QUICK).prepare(x, training=True)
    monkeypatch.setattr(net.engines[0].backward, "fixed", True)  # as on CUDA
    waiting = net(x)
    with pytest.warns(NimbleWarning, match="before the backward of the last one") as caught:
        nn.Sequential(net)(x)
    assert lines_of(list(caught)) == ["nn.Sequential(net)(x)"]
    assert waiting.requires_grad
    net.close()


def test_a_warning_of_a_preparation_names_the_users_line() -> None:
    x = torch.randn(4, 3)
    net = Nimble(Busy().train(), Options(tune="off", on_new_shape="prepare"))
    with pytest.warns(NimbleWarning) as caught:
        net.prepare(x)
    assert set(lines_of(list(caught))) == {"net.prepare(x)"}
    with pytest.warns(NimbleWarning) as caught:
        nn.Sequential(net)(x[:2])  # prepares
    assert set(lines_of(list(caught))) == {"nn.Sequential(net)(x[:2])  # prepares"}
    net.close()


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_calls_from_many_threads(policy: str) -> None:
    model = Wide()
    net = Nimble(model, Options(tune="off", policy=policy)).prepare(torch.randn(2, 16))
    errors: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(50):
                x = torch.randn(2, 16, generator=generator)
                try:
                    if not torch.allclose(net(x), model(x), atol=1e-5):
                        errors.append(f"thread {seed}: other values")
                except NimbleError as error:
                    errors.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    net.close()


def test_tied_weights_in_state_dict() -> None:
    model = Shared()
    net = Nimble(model, QUICK).prepare(torch.randint(0, 11, (2, 3)))
    assert list(net.state_dict()) == list(model.state_dict())
    net.close()


def test_hugging_face_outputs() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    model = BertModel(config).eval()
    ids, mask = torch.randint(0, 50, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    net = Nimble(model, QUICK).prepare(ids, attention_mask=mask)
    other = torch.randint(0, 50, (2, 6))
    out, expected = net(other, attention_mask=mask), model(other, attention_mask=mask)
    assert type(out) is type(expected)
    assert list(out.keys()) == list(expected.keys())
    close(out.last_hidden_state, expected.last_hidden_state)
    close(out[1], expected.to_tuple()[1])
    net.close()


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


def test_a_lazy_module_is_refused_and_stays_lazy() -> None:
    model, x = torch.nn.LazyLinear(4), torch.randn(2, 3)
    with pytest.raises(InputError, match="weight is not initialised"):
        Nimble(model, QUICK).prepare(x)
    assert model(x).shape == (2, 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # torch's own, once a process
def test_nested_tensors_are_refused_with_what_to_do() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1).eval()
    mask = torch.tensor([[False, False, True], [False, True, True]])
    with pytest.raises(CaptureError, match="enable_nested_tensor=False"):
        Nimble(model, QUICK).prepare(torch.randn(2, 3, 8), src_key_padding_mask=mask)


def test_options_that_are_none() -> None:
    with pytest.raises(InputError, match="not an Options"):
        Nimble(torch.nn.Identity(), {"strict": True})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="returned a NoneType"):
        Nimble(lambda x: x + 1, Options(policy=lambda graph, costs: None)).prepare(torch.ones(1))


def test_preparing_from_several_threads_puts_the_capture_query_back() -> None:
    real = torch.cuda.is_current_stream_capturing
    threads = [threading.Thread(target=lambda: Nimble(lambda x: x + 1, QUICK).prepare(torch.ones(2))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.cuda.is_current_stream_capturing is real


def test_a_plan_is_followed_without_tuning() -> None:
    model, x = Wide(), torch.randn(2, 16)
    first = Nimble(model, Options(policy="nimble")).prepare(x)
    plan = first.engines[0].plan
    assert plan is not None
    again = Nimble(model).prepare(x, plan=Plan.from_json(plan.to_json()))
    (engine,) = again.engines
    assert engine.schedule == first.engines[0].schedule
    assert engine.plan == plan
    assert not engine.candidates
    assert set(engine.seconds) == {"warm-up", "record", "record again", "hazards", "capture"}
    close(again(x + 1), model(x + 1))
    for net in (first, again):
        net.close()


def test_a_plan_for_something_else_is_refused() -> None:
    x = torch.randn(2, 16)
    net = Nimble(Wide(), Options(policy="nimble")).prepare(x)
    plan = net.engines[0].plan
    with pytest.raises(InputError, match="plan"):
        Nimble(Wide(branches=5)).prepare(x, plan=plan)
    with pytest.raises(InputError, match="plan"):
        Nimble(Wide()).prepare(torch.randn(3, 16), plan=plan)
    with pytest.raises(InputError, match="plan is a str"):
        Nimble(Wide()).prepare(x, plan="plan.json")  # type: ignore[arg-type]
    net.close()


# -- folded weights ------------------------------------------------------------------------------------------------


def step(model: nn.Module, **options: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    torch.optim.AdamW(model.parameters(), lr=0.05, **options).step()


def train_statistics(model: Foldable) -> None:
    model.norm.train()(torch.randn(2, 4, 3, 3, dtype=torch.float64))
    model.norm.eval()


@torch.no_grad()
def add_in_place(model: Foldable) -> None:
    model.k.weight.add_(0.25)
    model.scale.add_(1)


@torch.no_grad()
def set_a_row(model: Foldable) -> None:
    model.conv.weight[1] = 0.75


def load(model: Foldable) -> None:
    model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})


@torch.inference_mode()
def average(model: Foldable) -> None:
    model.norm.running_var.lerp_(torch.full((4,), 2.0, dtype=torch.float64), 0.5)


def write_data(model: Foldable) -> None:
    model.v.weight.data.mul_(-1)
    model.norm.running_mean.numpy()[0] += 0.5


SHOWN: list[Callable[[Foldable], object]] = [
    step,
    lambda model: step(model, fused=True),
    train_statistics,
    add_in_place,
    set_a_row,
    load,
    average,
]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*SHOWN, write_data]), st.integers(0, 3)), max_size=5),
    st.booleans(),
    st.sampled_from(["single", "nimble"]),
)
def test_folded_weights_follow_whatever_changes_them(
    changes: list[tuple[Callable[[Foldable], object], int]], first: bool, policy: str
) -> None:
    model = made()
    net, _ = folded_engine(model, check_first=first, options=Options(tune="off", policy=policy))
    for change, calls in ((lambda model: None, 1), *changes, (lambda model: None, 1)):
        change(model)
        if change is write_data:
            net.refresh()
        for seed in range(calls):
            with torch.no_grad():
                torch.testing.assert_close(net(example(seed)), model(example(seed)), rtol=1e-9, atol=1e-9)
    net.close()


@pytest.mark.parametrize("first", [True, False])
def test_folded_once_for_each_change(first: bool) -> None:
    model = made()
    net, counted = folded_engine(model, check_first=first)
    outputs = net(example())
    assert counted.times == 0
    for change in SHOWN:
        counted.times = 0
        change(model)
        assert counted.times == 0
        other = net(example())
        assert not torch.equal(other, outputs)
        net(example())
        assert counted.times == 1
        outputs = other
    net.close()


def test_writes_past_the_version_counter_need_refresh() -> None:
    model = made()
    net, counted = folded_engine(model, check_first=False)
    before = net(example())
    write_data(model)
    assert torch.equal(net(example()), before)
    net.refresh()
    assert counted.times == 1
    with torch.no_grad():
        close(net(example()), model(example()))
    assert counted.times == 1
    net.close()
    net.refresh()
    Nimble(model).refresh()


@pytest.mark.parametrize("first", [True, False])
def test_folded_weights_in_other_memory_are_refused(first: bool) -> None:
    model = made()
    net, _ = folded_engine(model, check_first=first)
    model.q.weight.data = torch.zeros_like(model.q.weight)
    for use in (lambda: net(example()), net.refresh):
        with pytest.raises(InputError, match=r"q.weight has other memory") as caught:
            use()
        assert "prepare" in caught.value.fix
    net.close()


@pytest.mark.parametrize("first", [True, False])
def test_folding_that_fails_is_tried_again(first: bool) -> None:
    model = made()
    net, counted = folded_engine(model, check_first=first)
    compute = counted.compute

    def fail() -> list[torch.Tensor]:
        raise RuntimeError("out of memory")

    add_in_place(model)
    counted.compute = fail
    for _ in range(2):
        with pytest.raises(DeviceError, match="out of memory"):
            net(example())
    counted.compute = compute
    with torch.no_grad():
        close(net(example()), model(example()))
    net.close()


class Counter(nn.Module):
    """Counts its runs in a buffer, and writes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.add_(1)
        return x.add_(self.weight * 2)


def test_what_writes_state_or_inputs_runs_once() -> None:
    model = Counter().eval()
    folds = Folded(lambda: [model.weight * 2], (model.weight.detach() * 2,), (("weight", model.weight),))

    def run(x: torch.Tensor) -> torch.Tensor:
        model.runs.add_(1)
        return x.add_(folds.constants[0])

    net = with_folds(model, folds, run, torch.zeros(3), check_first=True)
    for turn in range(1, 4):
        with torch.no_grad():
            model.weight.add_(turn)
        x = torch.zeros(3)
        close(net(x), model.weight.detach() * 2)
        close(x, model.weight.detach() * 2)
        assert int(model.runs) == turn
    net.close()


def test_which_programs_can_run_twice() -> None:
    x = torch.randn(2, 4)
    buffer = torch.zeros(4)
    cases: list[tuple[Any, bool]] = [
        (lambda x: x.exp().add_(1), True),
        (lambda x: x.add_(1), False),
        (lambda x: buffer.add_(x.sum(0)), False),
        (lambda x: torch.nn.functional.dropout(x), False),
        (lambda x: nn.functional.batch_norm(x, buffer, buffer + 1, training=True), False),
    ]
    for forward, repeatable in cases:
        recorded = record_static(device_for(x.device), forward, Signature((x,), {}), strict=True, step=Stopwatch())
        assert _repeatable(recorded.recording) is repeatable


class Statistics(nn.Module):
    """Running statistics without anything that counts how often they were written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


def test_what_another_engine_writes_is_noticed() -> None:
    model, x = Statistics().eval(), torch.randn(8, 4) + 3
    folds = Folded(lambda: [model.mean * -1], (torch.zeros(4),), (("mean", model.mean),))
    net = with_folds(model, folds, lambda x: x + folds.constants[0], x, check_first=True)
    training = Nimble(model.train(), QUICK).prepare(x)
    version = model.mean._version
    training(x)
    assert model.mean._version == version  # as in eager: a backward pass may need it
    model.eval()
    assert model.mean.abs().min() > 0
    close(net(x), x - model.mean)
    for one in (net, training):
        one.close()


def test_refresh_leaves_engines_of_the_other_mode_for_later() -> None:
    model = made()
    net, counted = folded_engine(model, check_first=True)
    model.train()
    write_data(model)
    net.refresh()
    assert counted.times == 0
    model.eval()
    with torch.no_grad():
        close(net(example()), model(example()))
    assert counted.times == 1
    net.close()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_threads_that_find_folded_weights_stale(policy: str, first: bool) -> None:
    size = 50_000
    weight = torch.zeros(size)
    computed: list[int] = []

    def compute() -> list[torch.Tensor]:
        computed.append(1)
        return [weight + 1, weight * -1]

    folds = Folded(compute, (torch.ones(size), torch.zeros(size)), (("weight", weight),))
    plus, minus = folds.constants

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * plus, x + minus

    options = Options(tune="off", policy=policy)
    net = with_folds(nn.Identity().eval(), folds, run, torch.ones(size), check_first=first, options=options)
    rounds, threads = 15, 4
    barrier = threading.Barrier(threads)
    wrong: list[str] = []

    def work() -> None:
        for turn in range(1, rounds + 1):
            if barrier.wait() == 0:
                with torch.no_grad():
                    weight.fill_(turn)
            barrier.wait()
            for _ in range(2):
                grown, shrunk = net(torch.ones(size))
                seen = set(grown.unique().tolist()), set(shrunk.unique().tolist())
                if seen != ({turn + 1.0}, {1.0 - turn}):
                    wrong.append(f"round {turn}: {seen}")

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong
    assert len(computed) == 1 + rounds
    net.close()


def test_engines_with_folded_weights_say_what_they_do_not_notice() -> None:
    with torch.inference_mode():
        blind = torch.ones(2)
    folds = Folded(lambda: [blind * 2], (torch.ones(2),), (("mask", blind),))
    notes = list(_fold_notes(folds, Watch(nn.Identity(), folds.sources)))
    assert "refresh()" in notes[0]
    assert "mask" in notes[1]
    assert len(list(_fold_notes(folded(made()), Watch(nn.Identity())))) == 1


def test_constants_made_of_no_weight_need_no_word() -> None:
    folds = Folded(lambda: [torch.arange(3)], (torch.arange(3),), ())
    assert not list(_fold_notes(folds, Watch(nn.Identity())))


class Scaled(nn.Module):
    """What it is lies in an attribute and in an extra state, too."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_attributes_of_the_model_are_written_where_they_are_read() -> None:
    model = Scaled(1.0)
    net = Nimble(model, Options(tune="off"))
    net.scale = 5.0
    net.note = "mine"
    assert model.scale == 5.0
    assert not hasattr(model, "note")
    x = torch.randn(3, 2)
    with torch.no_grad():
        torch.testing.assert_close(net.prepare(x)(x), model(x))
    net.close()


@pytest.mark.parametrize("around", [lambda one: one, lambda one: nn.Sequential(one, nn.Linear(2, 2))])
def test_state_dicts_are_the_models_with_their_extra_state(around: Callable[[nn.Module], nn.Module]) -> None:
    for ours, theirs in ((Nimble(Scaled(2.0)), Scaled(3.0)), (Scaled(2.0), Nimble(Scaled(3.0)))):
        mine, other = around(ours), around(theirs)
        assert list(mine.state_dict()) == list(other.state_dict())
        mine.load_state_dict(other.state_dict())
        assert ours.scale == theirs.scale == 3.0
        torch.testing.assert_close(ours.layer.weight, theirs.layer.weight)


def test_zeros_of_other_signs_are_other_inputs() -> None:
    net = Nimble(lambda x, k: torch.copysign(x, torch.tensor(k)), Options(tune="off")).prepare(torch.ones(2), 0.0)
    with pytest.raises(InputError, match=r"expected 0\.0, given -0\.0"):
        net(torch.ones(2), -0.0)
    net.close()


def test_what_was_freed_says_so() -> None:
    net = Nimble(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"nothing is prepared in this Nimble of Linear\n"):
        net(torch.ones(1, 2))
    net.prepare(torch.ones(1, 2)).double()
    with pytest.raises(InputError, match=r"any more: close\(\), or a move or conversion"):
        net(torch.ones(1, 2).double())


@pytest.mark.parametrize("value", ["no", 1, None])
def test_whether_to_train_is_yes_or_no(value: Any) -> None:
    model = nn.Linear(2, 2).train()
    with pytest.raises(InputError, match="is neither True nor False"):
        Nimble(model).prepare(torch.ones(1, 2), training=value)
    with pytest.raises(InputError, match="is neither True nor False"):
        compare(model, torch.ones(1, 2), training=value)
