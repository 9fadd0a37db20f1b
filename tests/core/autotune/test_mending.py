"""Kernels that are wrong, or not shown right, give way to eager's calls there; the rest, and plans, keep the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from nimble_core import Nimble, TrainStep
from nimble_core.autotune.choice import Choice
from nimble_core.compiler import pipeline
from nimble_core.ir.program import EAGER_CALL, KernelChoice
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.saved_plan import Plan
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from nimble_core.validation.judge import issued
from nimble_core.validation.kernel_check import check_kernels
from tests.support.fused_models import KINDS, MODELS, AlwaysTheSame, engine, fused, made, programs, quick

CONVOLUTION, RELU = torch.ops.aten.convolution.default, torch.ops.aten.relu.default


def without_bias(module: fx.GraphModule, node: fx.Node) -> None:
    node.update_arg(2, None)


def of_old_weights(module: fx.GraphModule, node: fx.Node) -> None:
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    module.register_buffer("old", getattr(module, str(weight.target)) + 0.5)
    with module.graph.inserting_before(node):
        old = module.graph.get_attr("old")
    old.meta.update(weight.meta)
    node.update_arg(1, old)


def a_row_too_far(module: fx.GraphModule, node: fx.Node) -> None:
    with module.graph.inserting_after(node):
        moved = module.graph.call_function(torch.ops.aten.roll.default, (node, [1], [-2]))
    moved.meta.update(node.meta)
    node.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)


FAULTS = pytest.mark.parametrize("fault", [without_bias, of_old_weights, a_row_too_far])


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[fx.GraphModule, fx.Node], None], wanted: Any) -> None:
    """Let the first rewrite make a mistake at convolutions, where they meet a condition."""
    real = pipeline.affine_norms

    def wrong(module: fx.GraphModule) -> int:
        for node in list(module.graph.nodes):
            if node.target is CONVOLUTION and wanted(node):
                fault(module, node)
        return real(module)

    monkeypatch.setattr(pipeline, "affine_norms", wrong)


def reads_the_input(node: fx.Node) -> bool:
    return node.all_input_nodes[0].op == "placeholder"


def constant() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return AlwaysTheSame().eval(), torch.randn(2, 3, 8, 8)


def telling() -> tuple[nn.Module, torch.Tensor]:
    model, x = constant()
    for parameter in (model.body[4].weight, model.head.weight):  # type: ignore[union-attr, index]  # of a known module
        nn.init.uniform_(parameter, 0.5, 1.5)  # type: ignore[arg-type]
    return model, x


@torch.no_grad()
@KINDS
@FAULTS
@pytest.mark.parametrize("make", [constant, telling])
def test_a_wrong_kernel_gives_way_to_eagers_calls_there(
    make: Any, fault: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, fault, reads_the_input)
    model, x = make()
    net = Nimble(model, quick(kind)).prepare(x)
    assert fused(net) == kind
    mine, eager = programs(net)
    assert 0 in mine.kept
    assert max(mine.kept) <= 2, "of the first convolution, norm and ReLU alone"
    assert {call.eager: call.operator for call in mine.calls}[0,] == eager.calls[0].operator
    assert any(len(call.eager) > 1 for call in mine.calls), "the others are still done by kernels for several calls"
    (note,) = [note for note in engine(net).notes if "eager's calls run in place of" in note]
    assert "body.0" in note
    assert ".py:" in note
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-4)
    assert check_kernels(engine(net).recorded, [x]).passed


@pytest.mark.gpu
@pytest.mark.compiler
@torch.no_grad()
@FAULTS
@pytest.mark.parametrize("kind", ["library", "inductor"])
@pytest.mark.parametrize("make", [constant, telling])
def test_a_wrong_kernel_gives_way_on_a_gpu(make: Any, fault: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault, reads_the_input)
    model, x = (one.cuda() for one in make())
    net = Nimble(model, quick(kind)).prepare(x)
    assert fused(net) == kind
    assert 0 in programs(net)[0].kept
    assert any("eager's calls run in place of" in note for note in engine(net).notes)
    torch.testing.assert_close(net(x), model(x), rtol=1e-3, atol=1e-3)  # TF32, in other orders


@KINDS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.compiler])])
def test_a_wrong_kernel_of_a_training_step_gives_way(kind: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, activation = pipeline.split_backward, torch.ops.aten.gelu_backward.default

    def wrong(module: fx.GraphModule) -> None:
        for node in [one for one in module.graph.nodes if one.target is activation][:1]:
            a_row_too_far(module, node)
        real(module)

    monkeypatch.setattr(pipeline, "split_backward", wrong)
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)]
    model = nn.Sequential(*layers).to(device)
    other, x, y = copy.deepcopy(model), torch.randn(4, 16, device=device), torch.randn(4, 8, device=device)
    step = TrainStep(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), options=quick(kind)
    ).prepare(x, y)
    assert step.engine is not None
    program = step.engine.recorded.recording.program
    assert program.fuse == kind
    assert program.kept
    eager = step.engine.recorded.eager
    assert eager is not None
    assert len(program.kept) < len(eager.recording.program.calls) / 3, "others are done by kernels of this kind"
    assert any("eager's calls run in place of" in note for note in step.engine.notes)
    loss = nn.functional.mse_loss(other(x), y)
    loss.backward()
    torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-4, atol=1e-4)
    for mine, eager in zip(model.parameters(), other.parameters(), strict=True):
        assert eager.grad is not None
        torch.testing.assert_close(mine, eager - 0.1 * eager.grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@KINDS
def test_a_saved_plan_makes_the_same_kernels_again(kind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, without_bias, reads_the_input)
    model, x = constant()
    first = Nimble(model, quick(kind)).prepare(x)
    kept = engine(first).plan
    assert kept is not None
    plan = Plan.from_json(kept.to_json())
    assert EAGER_CALL in {choice.kernel for choice in plan.kernels}
    again = Nimble(model, quick(kind)).prepare(x, plan=plan)
    assert [call.operator for call in programs(again)[0].calls] == [call.operator for call in programs(first)[0].calls]
    assert programs(again)[0].kept == programs(first)[0].kept
    # Without what was kept it is another program, and the mistake is back.
    with pytest.raises(Exception, match="another program"):
        Nimble(model, quick(kind)).prepare(x, plan=replace(plan, kernels=()))


@torch.no_grad()
@KINDS
def test_a_choice_that_is_recalled_keeps_eagers_calls(
    kind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("nimble_core.autotune.autotune.kinds_of", lambda device, options: ("none", kind))
    plant(monkeypatch, without_bias, reads_the_input)
    model, x = constant()
    options = quick("auto", tune="fast", policy="auto", budget_s=60.0)
    monkeypatch.setattr("nimble_core.autotune.autotune.choose", the_last)
    found = [Nimble(model, options).prepare(x) for _ in range(2)]
    assert any("chosen by an earlier process" in note for note in engine(found[1]).notes), engine(found[1]).notes
    assert programs(found[0])[0].kept == programs(found[1])[0].kept != frozenset()


@torch.no_grad()
@KINDS
def test_what_was_wrong_of_a_recalled_choice_says_nothing_of_new_kernels(
    kind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("nimble_core.autotune.autotune.kinds_of", lambda device, options: ("none", kind))
    monkeypatch.setattr("nimble_core.autotune.autotune.choose", the_last)
    model, x = constant()
    options = quick("auto", tune="fast", policy="auto", budget_s=60.0)
    Nimble(model, options).prepare(x)
    first = iter([True])
    plant(monkeypatch, of_old_weights, lambda node: reads_the_input(node) and next(first, False))
    net = Nimble(model, options).prepare(x)
    assert next(first, None) is None
    assert fused(net) == kind
    assert not programs(net)[0].kept


def the_last(found: Any, *args: Any, **more: Any) -> Choice:
    return Choice(list(found)[-1], True)


@torch.no_grad()
@KINDS
def test_a_kernel_of_which_nothing_can_be_shown_gives_way_as_well(kind: Any) -> None:
    """Whatever it is given, it makes the same of it; eager's own call needs no showing."""
    layer = nn.Linear(4, 3)
    net = Nimble(lambda x: layer(x).clamp(min=100), quick(kind)).prepare(torch.randn(5, 4))
    assert fused(net) == kind
    assert programs(net)[0].kept == {1}
    assert programs(net)[0].calls[-1].operator == "aten.clamp.default"


@torch.no_grad()
@KINDS
def test_what_cannot_be_mended_is_left_out_after_two_rounds(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made_again = []
    real = pipeline.affine_norms

    def wrong(module: fx.GraphModule) -> int:
        made_again.append(module)
        for node in list(module.graph.nodes):
            if "convolution" in str(node.target):
                without_bias(module, node)
        return real(module)

    monkeypatch.setattr(pipeline, "affine_norms", wrong)
    model, x = constant()
    net = Nimble(model, quick(kind)).prepare(x)
    assert fused(net) == "none"
    assert len(made_again) == 3
    assert any(note.startswith(f"{kind}: left out") for note in engine(net).notes)
    assert not any("in place of" in note for note in engine(net).notes)
    torch.testing.assert_close(net(x), model(x))


class Positions(nn.Module):
    """Tensors made of no tensor, numbers where operators take tensors, and a write in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[-1], device=x.device) * 0.5 + 1
        y = (x * 2 + at).softmax(-1)
        y[:, 0] = 3
        return torch.cat([y, x.masked_fill(x > 0, 0.0)]).sum(-1, dtype=torch.float64)


@torch.no_grad()
@KINDS
@pytest.mark.parametrize("name", [*MODELS, "positions"])
@pytest.mark.parametrize("every", [1, 2])
def test_any_calls_can_be_kept(name: str, every: int, kind: Any) -> None:
    model, draw = made(name) if name in MODELS else (Positions(), lambda: torch.randn(5, 4))
    x = draw()
    device = HostDevice()
    eager = record_static(device, model, check_inputs(model, (x,), {}), strict=True, step=Stopwatch())
    calls = eager.recording.program.calls
    choices = [KernelChoice(call.index, EAGER_CALL) for call in calls[::every]]
    variant = pipeline.fuse(device, eager, kind, choices=choices, step=Stopwatch())
    program = variant.recording.program
    assert program.kept
    if every == 1:
        others = {call.operator for call in program.calls} - {call.operator for call in calls}
        assert all("fill" in one for one in others), "what writes in place is never kept"
    found = check_kernels(variant, [x])
    assert found.wrong == ""
    assert found.passed or every > 1
    torch.testing.assert_close(issued(device, variant)([x])[0], model(x))
