"""Kernels of the user's on a real GPU: calls with reads and writes of their own, or noticed and never raced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import CaptureError, Nimble, Options
from tests.support.fused_models import Attention, engine, fused, quick

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # compilers warn of what they would rather be told
]

KINDS = ["none", "library", "inductor"]


def user_kernel(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a model that launches a Triton kernel between calls of torch."""
    pytest.importorskip("triton")
    from tests.support import triton_kernels_for_tests as kernels

    def doubled(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 5
        out = torch.empty_like(y)
        kernels.double[(1,)](y, out, y.numel(), BLOCK=64)
        return (out - 1) * z

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 5
        kernels.add_in_place[(1,)](y, z, y.numel(), BLOCK=64)
        return y.relu() + z

    def tuned(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 5
        out = torch.empty_like(y)
        kernels.triple[lambda meta: (-(-y.numel() // meta["BLOCK"]),)](y, out, y.numel())
        return (out - 1) * z

    return {"double": doubled, "add_in_place": in_place, "triple": tuned}[name]


@torch.no_grad()
@pytest.mark.parametrize("fuse", ["none", "library"])
@pytest.mark.parametrize(("name", "read", "written"), [("double", 1, 1), ("add_in_place", 2, 1), ("triple", 1, 1)])
def test_a_triton_kernel_is_a_call_with_its_reads_and_writes(name: str, read: int, written: int, fuse: str) -> None:
    model = user_kernel(name)
    x = torch.randn(64, device="cuda")
    net = Nimble(model, quick(fuse, strict=True)).prepare(x)
    assert fused(net) == fuse, engine(net).notes
    program = engine(net).recorded.recording.program
    (call,) = [call for call in program.calls if call.operator == name]
    assert len({ref.storage for ref in call.writes}) == written, "only what the kernel's code writes"
    assert len({ref.storage for ref in call.reads}) in (read, read + (name != "add_in_place"))
    assert call.origins
    assert all(origin.file.endswith("test_user_kernels_cuda.py") for origin in call.origins), "the line that launches"
    assert engine(net).schedule.streams > 1, "the calls beside it run beside it"
    for _ in range(5):
        y = torch.randn(64, device="cuda")
        assert torch.equal(net(y), model(y))


def reaching_elsewhere(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a model whose Triton kernel writes memory that none of its tensor arguments has."""
    pytest.importorskip("triton")
    from tests.support import triton_kernels_for_tests as kernels

    kept = torch.zeros(64, device="cuda")
    table = torch.tensor([kept.data_ptr()], device="cuda")

    def double_to(y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(y)
        kernels.double_to[(1,)](y, out.data_ptr(), y.numel(), BLOCK=64)
        return out

    def double_through(y: torch.Tensor) -> torch.Tensor:
        kernels.double_through[(1,)](y, table, y.numel(), BLOCK=64)
        return kept

    def double_of_pair(y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(y)
        kernels.double_of_pair[(1,)]((y, out), y.numel(), BLOCK=64)
        return out

    run: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "double_to": double_to,
        "double_through": double_through,
        "double_of_pair": double_of_pair,
    }

    def model(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 5
        for _ in range(3):
            z = z.tanh() + x
        return (run[name](y) - 1) * z

    return model


@torch.no_grad()
@pytest.mark.parametrize("fuse", [*KINDS, "auto"])
@pytest.mark.parametrize("name", ["double_to", "double_through", "double_of_pair"])
def test_a_triton_kernel_that_may_reach_other_memory_is_noticed_and_never_raced(name: str, fuse: str) -> None:
    model = reaching_elsewhere(name)
    x = torch.randn(64, device="cuda")
    net = Nimble(model, Options(fuse=fuse, policy="nimble", budget_s=1.0)).prepare(x)
    (note,) = [note for note in engine(net).notes if "captured as a whole" in note]
    assert f"{name} in the model at " in note
    assert "test_user_kernels_cuda.py" in note
    assert engine(net).schedule.streams == 1
    for _ in range(200):
        y = torch.randn(64, device="cuda")
        assert torch.equal(net(y), model(y))
    with pytest.raises(CaptureError, match=f"{name} in the model at "):
        Nimble(model, Options(fuse=fuse, strict=True)).prepare(x)


@torch.no_grad()
def test_a_triton_kernel_that_a_compiler_cannot_take_in() -> None:
    model = user_kernel("double")
    net = Nimble(model, quick("inductor")).prepare(torch.randn(64, device="cuda"))
    assert fused(net) == "none"
    assert any("past torch's dispatcher" in note for note in engine(net).notes)
    y = torch.randn(64, device="cuda")
    assert torch.equal(net(y), model(y))


@torch.no_grad()
@pytest.mark.parametrize("fuse", KINDS)
def test_a_triton_operator_is_one_call_or_a_kernel_of_the_compilers(fuse: str) -> None:
    pytest.importorskip("triton")
    from torch.library import triton_op, wrap_triton

    from tests.support import triton_kernels_for_tests as kernels

    if not hasattr(torch.ops.nimble_triton_tests, "doubled"):

        @triton_op("nimble_triton_tests::doubled", mutates_args={})
        def doubled(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            wrap_triton(kernels.double)[(1,)](x, out, x.numel(), BLOCK=64)
            return out

    operator = torch.ops.nimble_triton_tests.doubled

    def model(x: torch.Tensor) -> torch.Tensor:
        return operator(x + 1).relu() * 3 - x

    x = torch.randn(64, device="cuda")
    net = Nimble(model, quick(fuse, strict=True)).prepare(x)
    assert fused(net) == fuse, engine(net).notes
    program = engine(net).recorded.recording.program
    if fuse != "inductor":
        assert sum(call.operator.startswith("nimble_triton_tests.doubled") for call in program.calls) == 1
        assert not any(call.operator == "double" for call in program.calls), "not recorded twice"
    y = torch.randn(64, device="cuda")
    torch.testing.assert_close(net(y), model(y))


DOUBLE = """
extern "C" __global__ void double_it(const float* x, float* out, int count) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) out[at] = 2 * x[at];
}
"""


def launched_by_the_driver() -> Any:
    """Compile a kernel whose launcher nobody watches."""
    try:
        return torch.cuda._compile_kernel(DOUBLE, "double_it")
    except (AttributeError, OSError, RuntimeError) as error:
        pytest.skip(f"needs torch.cuda._compile_kernel and NVRTC: {error}")


@torch.no_grad()
@pytest.mark.parametrize("fuse", ["none", "library", "inductor", "auto"])
def test_a_launcher_that_is_not_known_is_noticed_and_never_raced(fuse: Any) -> None:
    kernel = launched_by_the_driver()

    def model(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 5
        out = torch.empty_like(y)
        kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[y, out, y.numel()])
        return (out - 1) * z

    x = torch.randn(64, device="cuda")
    net = Nimble(model, Options(fuse=fuse, budget_s=1.0)).prepare(x)
    assert any("captured as a whole" in note for note in engine(net).notes)
    assert engine(net).schedule.streams == 1
    for _ in range(5):
        y = torch.randn(64, device="cuda")
        assert torch.equal(net(y), model(y))
    with pytest.raises(CaptureError, match="come from no call"):
        Nimble(model, Options(fuse=fuse, strict=True)).prepare(x)


@torch.no_grad()
def test_a_copy_from_the_host_in_what_is_captured_as_a_whole_is_refused_in_words() -> None:
    kernel = launched_by_the_driver()

    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[x, out, x.numel()])
        return out + torch.tensor(3.0).type_as(x)

    x = torch.randn(64, device="cuda")
    with pytest.raises(CaptureError, match=r"the model cannot be captured: .* during CUDA graph capture"):
        Nimble(model, Options(fuse="none")).prepare(x)
    assert model(x).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("fuse", KINDS)
def test_a_compiled_submodule(fuse: str) -> None:
    """Its kernels are Inductor's already; a second compiler leaves them alone, or is left out."""
    inner = torch.compile(Attention().cuda().eval())
    outer = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)).cuda().eval()

    def model(x: torch.Tensor) -> torch.Tensor:
        a, b, c = (layer(x) for layer in outer)
        return inner(a) - b * c

    x = torch.randn(2, 5, 16, device="cuda")
    model(x)
    net = Nimble(model, quick(fuse, strict=True)).prepare(x)
    assert fused(net) == ("none" if fuse == "inductor" else fuse), engine(net).notes
    program = engine(net).recorded.recording.program
    assert any(call.operator.startswith("triton_") for call in program.calls)
    y = torch.randn(2, 5, 16, device="cuda")
    torch.testing.assert_close(net(y), model(y), rtol=1e-3, atol=1e-4)
