"""A whole step as one module: phases, names, state."""

from __future__ import annotations

import copy

import pytest
import torch

from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.training.whole_step import WholeStep
from tests.support.training_problems import OPTIMIZERS, made
from tests.support.training_steps import assert_values, both

ORDER = ["forward", "loss", "backward", "optimizer"]


@pytest.mark.parametrize("name", ["resnet", "transformer", "shared", "nested", "aliases"])
def test_phases_come_in_order_and_backward_calls_say_where_they_come_from(name: str) -> None:
    given, step, _ = both(name, OPTIMIZERS["adam"])
    assert step.engine is not None
    calls = step.engine.recorded.recording.program.calls
    at = [ORDER.index(call.phase) for call in calls]
    assert at == sorted(at)
    assert set(at) == {0, 1, 2, 3}
    modules = {path for path, _ in given.model.named_modules()} | {"loss_fn"}
    forward = {(call.module, call.origins[0].file, call.origins[0].line) for call in calls if call.phase == "forward"}
    loss = {(call.origins[0].file, call.origins[0].line) for call in calls if call.phase == "loss"}
    named = 0
    for call in calls:
        assert call.origins
        assert call.module in modules
        if call.phase == "backward":
            origin = call.origins[0]
            named += bool(origin.file)
            known = (origin.module, origin.file, origin.line) in forward or (origin.file, origin.line) in loss
            # Where the backward starts there is no node of autograd yet.
            assert known or call.operator == "aten.ones_like.default"
    assert named > 0.7 * sum(call.phase == "backward" for call in calls)
    step.close()


def test_updates_carry_the_modules_of_what_they_update() -> None:
    given, step, _ = both("resnet", OPTIMIZERS["adam"])
    assert step.engine is not None
    program = step.engine.recorded.recording.program
    owners = {name.rpartition(".")[0] for name, _ in given.model.named_parameters()}
    found: set[str] = set()
    for call in program.calls:
        if call.phase == "optimizer":
            names = {program.storages[ref.storage].name.split(" ")[0] for ref in call.writes}
            written = {name.rpartition(".")[0] for name in names if name}
            if written:
                assert {origin.module for origin in call.origins} == written
            found |= written
    assert found == owners
    step.close()


def test_a_whole_step_has_the_models_names() -> None:
    given = made("resnet")
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    whole = WholeStep(given.model, given.loss_fn, CapturedOptimizer(optimizer, "cpu"))
    assert dict(whole.named_parameters()).keys() == dict(given.model.named_parameters()).keys()
    assert dict(whole.named_modules()).keys() >= dict(given.model.named_modules()).keys()
    assert dict(whole.named_buffers()).keys() >= dict(given.model.named_buffers()).keys()
    assert whole.training
    given.model.eval()
    assert not whole.training


def test_a_whole_step_without_an_optimizer_only_differentiates() -> None:
    given = made("mlp")
    kept = copy.deepcopy(given.model.state_dict())
    inputs, targets = given.draw()
    loss, output, gradients = WholeStep(given.model, given.loss_fn, None)(inputs, targets)
    expected = given.loss_fn(given.model(inputs), targets)
    assert_values((loss, output), (expected, given.model(inputs)))
    found = torch.autograd.grad(expected, list(given.model.parameters()))
    assert_values(list(gradients.values()), list(found))
    assert_values(given.model.state_dict(), kept)
