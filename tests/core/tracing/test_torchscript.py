"""TorchScript inside of models is recorded operator by operator, whatever its executor has compiled."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch

from nimble_core import Nimble, Options
from nimble_core.tracing.torchscript import forget_compiled, operator_by_operator


@torch.jit.script
def buckets(x: torch.Tensor, middle: int) -> torch.Tensor:
    """As DeBERTa's: pointwise work that TorchScript fuses, and a constant from the host."""
    sign = torch.sign(x)
    near = torch.where((x < middle) & (x > -middle), torch.tensor(middle - 1).type_as(x), torch.abs(x))
    return torch.where(near <= middle, x, torch.log(near / middle) * sign)


class Bucketed(torch.nn.Module):
    """Calls a scripted function by its name, as models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(buckets(self.linear(x), 2))


class Inside(torch.nn.Module):
    """Has a scripted module, and a scripted function as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Tanh()))
        self.function = torch.jit.trace(lambda x: (x * 2).sigmoid().tanh(), torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.part(x))


@pytest.fixture
def compiled_on_the_host() -> Iterator[None]:
    """TorchScript fuses on the host as it does on a GPU, interpreting its kernels where there is no LLVM."""
    jit: Any = torch._C
    fused, llvm = jit._jit_can_fuse_on_cpu(), jit._jit_get_te_must_use_llvm_cpu()
    jit._jit_override_can_fuse_on_cpu(True)
    jit._jit_set_te_must_use_llvm_cpu(False)
    yield
    jit._jit_override_can_fuse_on_cpu(fused)
    jit._jit_set_te_must_use_llvm_cpu(llvm)
    forget_compiled(buckets)


@pytest.mark.usefixtures("compiled_on_the_host")
@pytest.mark.parametrize("runs", [0, 1, 3])
@pytest.mark.parametrize("make", [Bucketed, Inside])
def test_scripted_parts_are_recorded_call_by_call(make: type[torch.nn.Module], runs: int) -> None:
    model, x, other = make().eval(), torch.randn(4, 8), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(runs):
            model(x)
        net = Nimble(model, Options(tune="off", strict=True)).prepare(x)
        torch.testing.assert_close(net(other), model(other))
    recorded = [call.operator for call in net.engines[0].recorded.recording.program.calls]
    assert {"aten.log.default"} <= {*recorded} if make is Bucketed else "aten.tanh.default" in recorded


def test_other_threads_go_on_optimising() -> None:
    told: list[bool] = []
    with operator_by_operator():
        assert not torch._C._get_graph_executor_optimize()
        other = Thread(target=lambda: told.append(torch._C._get_graph_executor_optimize()))
        other.start()
        other.join()
    assert told == [True]
    assert torch._C._get_graph_executor_optimize()


@pytest.mark.gpu
@pytest.mark.parametrize("runs", [0, 3])
def test_scripted_functions_are_replayed_call_by_call_on_a_gpu(runs: int) -> None:
    model, x, other = Bucketed().eval().cuda(), torch.randn(4, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    with torch.no_grad():
        for _ in range(runs):
            model(x)
        net = Nimble(model, Options(fuse="none")).prepare(x)
        torch.testing.assert_close(net(other), model(other))
    assert net.engines[0].plan is not None, "it was captured as a whole"
    assert "aten.log.default" in [call.operator for call in net.engines[0].recorded.recording.program.calls]
