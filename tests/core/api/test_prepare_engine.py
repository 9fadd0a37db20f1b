"""Preparing: what is refused, what is left as it was, plans, and what engines say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.api.prepare_engine import _fold_notes, _repeatable
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.guards.module_guard import Watch
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.saved_plan import Plan
from nimble_core.tracing.folded_weights import Folded
from nimble_core.tracing.recorded import Stopwatch, record_static
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import CaptureError, DeviceError, InputError, NimbleWarning, NotStaticError
from nimble_viz.collect.compare import compare
from tests.support.folded_models import folded, made
from tests.support.models import Busy, Deep, Wide
from tests.support.values import close

QUICK = Options(tune="off")


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


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(random.randrange(1000)):
            x = x + 1
        return x


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (Reads(), CaptureError, "_local_scalar_dense"),
        (Draws(), NotStaticError, "calls in one run"),
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


def test_preparing_leaves_everything_as_it_was() -> None:
    model = Busy().train()
    x = torch.randn(4, 3)
    tensors = [*model.state_dict().values(), model.tensor, x]
    kept = [tensor.clone() for tensor in tensors]
    state, drawn = torch.get_rng_state(), random.getstate()
    for options in (QUICK, Options(tune="fast", budget_s=0.1)):
        with pytest.warns(NimbleWarning) as given:
            net = Nimble(model, options).prepare(x)
        notes = net.engines[0].notes[:2]
        assert [str(one.message) for one in given] == list(notes)
        assert ["random" in notes[0], "history" in notes[1]] == [True] * 2
        assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == drawn
        assert (model.history, model.table, model.number, model.gone) == ([1], {"a": 1}, 1, "here")
        net.close()


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


@pytest.mark.parametrize("value", ["no", 1, None])
def test_whether_to_train_is_yes_or_no(value: Any) -> None:
    model = nn.Linear(2, 2).train()
    with pytest.raises(InputError, match="is neither True nor False"):
        Nimble(model).prepare(torch.ones(1, 2), training=value)
    with pytest.raises(InputError, match="is neither True nor False"):
        compare(model, torch.ones(1, 2), training=value)


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


def test_engines_with_folded_weights_say_what_they_do_not_notice() -> None:
    with torch.inference_mode():
        blind = torch.ones(2)
    folds = Folded(lambda: [blind * 2], (torch.ones(2),), (("mask", blind),))
    notes = list(_fold_notes(folds, Watch(nn.Identity(), folds.sources)))
    assert "refresh()" in notes[0]
    assert "mask" in notes[1]
    assert len(list(_fold_notes(folded(made()), Watch(nn.Identity())))) == 1


def test_a_compiled_submodule() -> None:
    inner = Deep()
    compiled = torch.compile(inner, backend="aot_eager")
    x = torch.randn(2, 8)
    net = Nimble(lambda x: compiled(x) * 2, QUICK).prepare(x)
    close(net(x + 1), inner(x + 1) * 2)
    net.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "error:the forward changes attributes")
@pytest.mark.parametrize("around", [lambda one: one, nn.Sequential])
def test_a_frozen_script_module_which_has_no_mode(around: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    net = Nimble(around(torch.jit.freeze(torch.jit.script(model))), QUICK).prepare(x)
    y = torch.randn(2, 4)
    close(net(y), model(y))
    net.close()


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
