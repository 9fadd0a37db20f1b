"""Kernels that bypass the dispatcher are calls of a recording, inside models, operators and backwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nimble_core import Nimble, Options
from nimble_core.runtime.fake import FakeDevice
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.utils.errors import CaptureError
from tests.support.launched_kernels import BY_ADDRESS, Compiled, UserKernel, work


def recording_of(model: Callable[..., Any], *args: torch.Tensor) -> Recording:
    return record_static(FakeDevice(), model, check_inputs(model, args, {}), strict=True, step=Stopwatch()).recording


def issued(recording: Recording, *inputs: torch.Tensor) -> list[torch.Tensor]:
    issuer = Issuer(recording, inputs)
    with issuing("cpu"):
        for call in range(len(recording.program.calls)):
            issuer.issue(call)
        return issuer.outputs()


def test_a_compiled_function_inside_a_model_is_recorded_kernel_by_kernel(compiled: Compiled) -> None:
    x, weight = compiled.args

    def model(x: torch.Tensor) -> torch.Tensor:
        return compiled.compiled(x * 2, weight) - 1

    model(x)
    recording = recording_of(model, x)
    names = [call.operator for call in recording.program.calls]
    assert [name for name in names if name.startswith("cpp_")] == compiled.kernels()
    assert "aten.mul.Tensor" in names
    assert "aten.sub.Tensor" in names
    assert not recording.unseen
    other = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(issued(recording, other)[0], work(other * 2, weight) - 1)
    net = Nimble(model, Options(fuse="none", tune="off")).prepare(x)
    with torch.no_grad():
        torch.testing.assert_close(net(other), work(other * 2, weight) - 1)


def test_a_compiled_function_inside_an_operator_is_recorded_once(compiled: Compiled) -> None:
    x, weight = compiled.args
    library = torch.library.Library("nimble_launcher_tests", "DEF")
    library.define("whole(Tensor x, Tensor weight) -> Tensor")
    library.impl("whole", lambda x, weight: compiled.compiled(x, weight), "CPU")
    operator = torch.ops.nimble_launcher_tests.whole
    recording = recording_of(lambda x: operator(x, weight) + 1, x)
    names = [call.operator for call in recording.program.calls]
    assert names == ["nimble_launcher_tests.whole.default", "aten.add.Tensor"]
    torch.testing.assert_close(issued(recording, x)[0], work(x, weight) + 1)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_with_such_a_kernel_is_not_taken_apart(inside: bool) -> None:
    """On the host, with a kernel that writes where a number says; within an operator, the operator's schema counts."""
    memory: dict[int, torch.Tensor] = {}

    def write(source: torch.Tensor, address: int) -> None:
        memory[address].copy_(source * 2)

    kernel = UserKernel("by_address", ["source", "address"], BY_ADDRESS, does=write)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        memory[out.data_ptr()] = out
        kernel[(1,)](x, out.data_ptr())
        return out

    run = doubled
    if inside:
        library = torch.library.Library("nimble_address_tests", "DEF")
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", doubled, "CPU")
        run = torch.ops.nimble_address_tests.doubled

    def model(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 5
        return (run(y) - 1) * z

    told = pytest.warns(
        UserWarning, match=r"by_address in the model at .*launched_kernels\.py:\d+, which may reach other"
    )
    with nullcontext() if inside else told:
        net = Nimble(model, Options(policy="nimble", tune="off")).prepare(torch.randn(8))
    assert ("doubled" in {call.label for call in net.engines[0].recorded.recording.program.calls}) is inside
    for _ in range(3):
        x = torch.randn(8)
        torch.testing.assert_close(net(x), (2 * (x + 1) - 1) * (x * 5))
    if not inside:
        with pytest.raises(CaptureError, match="by_address in the model"):
            Nimble(model, Options(strict=True)).prepare(x)


@pytest.mark.parametrize("fuse", ["library", "inductor"])
def test_a_compiled_function_inside_a_model_stays_when_the_rest_is_rewritten(compiled: Compiled, fuse: Any) -> None:
    x, weight = compiled.args
    layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3)).eval()

    def model(x: torch.Tensor) -> torch.Tensor:
        a, b, c = (layer(x) for layer in layers)
        return compiled.compiled(a * 2, weight) - b + c

    with torch.no_grad():
        model(x)
    net = Nimble(model, Options(fuse=fuse, tune="off")).prepare(x)
    engine = net.engines[0]
    program = engine.recorded.recording.program
    if fuse == "inductor":
        assert program.fuse == "none"
        assert any("past torch's dispatcher" in note for note in engine.notes)
    else:
        assert program.fuse == "library", engine.notes
        assert sum(call.label == "addmm" for call in program.calls) == 1
        kernels = [call for call in program.calls if call.operator in compiled.kernels()]
        assert [call.operator for call in kernels] == compiled.kernels()
        assert all(len(call.eager) == 1 for call in kernels)
    other = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(net(other), model(other), rtol=1e-4, atol=1e-5)


class _CompiledBehind(torch.autograd.Function):
    """Twice its input; its gradient is what a compiled function makes of one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, behind: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.behind = behind
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.behind(gradients[0]), None


@pytest.mark.compiler
def test_kernels_launched_in_the_backward_belong_to_it(compiled: Compiled) -> None:
    weight = compiled.args[1]

    class Behind(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return _CompiledBehind.apply(y, lambda g: compiled.compiled(g, weight))  # type: ignore[no-untyped-call,no-any-return]

    model, x = Behind(6, 6), compiled.args[0]
    net = Nimble(model, Options(fuse="none", tune="off", policy="single")).prepare(x, training=True)
    (engine,) = net.engines
    assert engine.backward is not None
    calls = engine.backward.recorded.recording.program.calls
    assert [call.operator for call in calls if call.operator.startswith("cpp_")] == compiled.kernels()
    assert {call.phase for call in calls} == {"backward"}
    found = []
    for one in (net, model):
        one(x).sin().sum().backward()
        found.append(model.weight.grad)
        model.weight.grad = None
    torch.testing.assert_close(*found)
    net.close()
