"""Two halves of a recording do together what the whole does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.autotune.capture_pipeline import device_for, schedule_by
from nimble_core.ir.call_graph import build_graph
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recorded import Recorded, record_static
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.tracing.signature import Signature
from nimble_core.training.joint_function import ForwardBackward
from nimble_core.training.partition import Halves, halve
from nimble_core.utils.errors import CaptureError
from tests.support.training_problems import PROBLEMS, made


@dataclass(frozen=True)
class Joint:
    """A recorded forward and backward, where it was cut, and inputs for both."""

    recording: Recording
    halves: Halves
    inputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    outputs: int


def joint(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Joint:
    """Forward and backward of ``model``, recorded and cut; floating inputs get gradients."""
    kwargs = kwargs or {}
    tensors, _ = flatten((args, kwargs))
    leaves = [at for at, one in enumerate(tensors) if one.is_floating_point()]
    whole = ForwardBackward(model, leaves)
    kept = {name: one.clone() for name, one in model.state_dict().items()}
    whole(args, kwargs)
    model.load_state_dict(kept)
    gradients = [torch.randn_like(one) for one in whole.templates]
    signature = Signature((args, kwargs, gradients), {})
    made_of = record_static(
        device_for(torch.device("cpu")),
        whole,
        signature,
        strict=True,
        step=_untimed,
    )
    halves = halve(made_of.recording, len(tensors), whole.outputs)
    return Joint(made_of.recording, halves, tensors, gradients, whole.outputs)


def _untimed(name: str) -> Any:
    from contextlib import nullcontext

    return nullcontext()


def issued(recording: Recording, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute what a recording makes of ``inputs``, call by call."""
    issuer = Issuer(recording, inputs)
    with issuing("cpu"):
        for call in range(len(recording.program.calls)):
            issuer.issue(call)
        return issuer.outputs()


def restored(recording: Recording, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Run, and put back what it wrote to the model."""
    kept = [(one, one.clone()) for one in recording.given.values()]
    try:
        return [one.clone() for one in run()]
    finally:
        for one, value in kept:
            one.copy_(value)


def assert_halves_are_the_whole(found: Joint, *, fixed: bool) -> None:
    """Forward, then backward on what it saved: bit for bit what the whole makes."""
    halves, recording = found.halves, found.recording
    torch.manual_seed(1)
    expected = restored(recording, lambda: issued(recording, [*found.inputs, *found.gradients]))

    def both() -> list[torch.Tensor]:
        produced = issued(halves.forward, found.inputs)
        outputs, saved = produced[: found.outputs], produced[found.outputs :]
        assert len(saved) == halves.saved_outputs
        saved = [*saved, *(found.inputs[at] for at in halves.saved_inputs)]
        if fixed:
            return [*outputs, *issued(halves.with_saved(saved), found.gradients)]
        return [*outputs, *issued(halves.backward, [*found.gradients, *saved])]

    torch.manual_seed(1)
    mine = restored(recording, both)
    assert len(mine) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def assert_well_formed(found: Joint) -> None:
    """Each call is in one half; both halves are recordings of their own."""
    whole, parts = found.recording, (found.halves.forward, found.halves.backward)
    calls = [call for part in parts for call in part.program.calls]
    assert [call.operator for call in calls] == [call.operator for call in whole.program.calls]
    assert [call.origins for call in calls] == [call.origins for call in whole.program.calls]
    assert [ref.sizes for call in calls for ref in call.reads] == [
        ref.sizes for call in whole.program.calls for ref in call.reads
    ]
    assert {call.phase for call in parts[0].program.calls} <= {"forward", "loss"}
    assert {call.phase for call in parts[1].program.calls} <= {"backward"}
    for part in parts:
        program = part.program
        assert [call.index for call in program.calls] == list(range(len(program.calls)))
        steps = [step.call for step in part.steps if step.call is not None]
        assert steps == list(range(len(program.calls)))
        assert part.asks == ()  # nobody knows on the host
        assert len(program.inputs) == len(part.inputs)
        assert len(program.outputs) == len(part.outputs)
        for ref in (*program.inputs, *program.outputs, *(a.ref for call in program.calls for a in call.accesses)):
            assert 0 <= ref.storage < len(program.storages)
            home = program.storages[ref.storage]
            assert home.role == "generator" or ref.span[1] <= home.nbytes
        graph = build_graph(program)
        for policy in ("single", "nimble"):
            recorded = Recorded(lambda: None, Signature((torch.ones(1),), {}), part, graph)
            check_schedule(graph, schedule_by(recorded, policy, None, 4), program)
    # Text of arguments names the same storage as the access beside it.
    for part in parts:
        for call in part.program.calls:
            named = {int(text[1:]) for _, text in call.arguments if text.startswith("%") and text[1:].isdigit()}
            assert named <= {access.ref.storage for access in call.accesses}


# -- random models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True], ids=["given", "fixed"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_halves_of_a_network_are_the_whole(name: str, fixed: bool) -> None:
    found_problem = made(name)
    inputs = found_problem.draw()[0]
    found = (
        joint(found_problem.model, (), inputs) if isinstance(inputs, dict) else joint(found_problem.model, (inputs,))
    )
    assert_well_formed(found)
    assert_halves_are_the_whole(found, fixed=fixed)


# -- what is shared --------------------------------------------------------------------------------------------------


def test_an_input_that_the_backward_reads_is_saved_as_it_is() -> None:
    found = joint(nn.Linear(3, 2), (torch.randn(4, 3),))
    assert found.halves.saved_inputs == (0,)
    assert found.halves.saved_outputs == 0
    assert len(found.halves.forward.outputs) == 1


def test_an_output_that_the_backward_reads_is_saved_once_more() -> None:
    found = joint(nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()), (torch.randn(4, 3),))
    forward = found.halves.forward
    assert found.halves.saved_outputs == 1
    assert len({forward.storage_of[slot] for slot in forward.outputs}) == 1


def test_saved_tensors_are_inputs_or_constants_of_the_backward() -> None:
    found = joint(nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()), (torch.randn(4, 3),))
    backward = found.halves.backward
    count = found.halves.saved_outputs + len(found.halves.saved_inputs)
    roles = [backward.program.storages[ref.storage].role for ref in backward.program.inputs]
    assert roles == ["input"] * (len(found.gradients) + count)
    saved = [torch.zeros(one.shape) for one in found.inputs] + [torch.zeros(4, 2)]
    fixed = found.halves.with_saved(saved[:count])
    assert len(fixed.inputs) == len(found.gradients) == len(fixed.program.inputs)
    for slot in backward.inputs[len(found.gradients) :]:
        assert fixed.program.storages[fixed.storage_of[slot]].role == "constant"
        assert slot in fixed.given
    assert backward.program.storages[backward.program.inputs[-1].storage].role == "input"  # the halves are as before


# -- refused ---------------------------------------------------------------------------------------------------------


def test_a_forward_call_after_the_backwards_first_is_refused() -> None:
    found = joint(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), (torch.randn(4, 3),))
    program = found.recording.program
    *calls, last = program.calls
    late = replace(program, calls=(*calls, replace(last, phase="forward")))
    with pytest.raises(CaptureError, match="follows the backward"):
        halve(replace(found.recording, program=late), 1, found.outputs)


def test_a_forward_that_reads_an_output_gradient_is_refused() -> None:
    found = joint(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), (torch.randn(4, 3),))
    program = found.recording.program
    calls = tuple(replace(call, phase="forward") for call in program.calls)
    with pytest.raises(CaptureError, match="gradient of an output"):
        halve(replace(found.recording, program=replace(program, calls=calls)), 1, found.outputs)
