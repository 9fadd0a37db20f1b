"""Forms of Triton kernels compete in replays, and nothing else of a run changes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options
from nimble_core.runtime.cuda import kernel_forms
from nimble_core.torch_compat.compiler import AUTOTUNER_BENCH, BENCHMARKER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.compiler,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class Rows(nn.Module):
    """Sums and products that Inductor has several forms for."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return torch.nn.functional.gelu(self.norm(x) * 2 + x).transpose(1, 2).contiguous() + 1


def test_forms_are_timed_in_replays_once_and_results_are_eagers(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or what an earlier process chose is found
    taken, usual = [], kernel_forms._Replays.benchmark

    def benchmark(self, fn, *args, **kwargs):
        taken.append(self.time_ns(fn))
        return usual(self, fn, *args, **kwargs)

    monkeypatch.setattr(kernel_forms._Replays, "benchmark", benchmark)
    width = 1000 + torch.randint(1, 500, ()).item()
    model, x = Rows(width).cuda().eval(), torch.randn(4, 300, width, device="cuda")
    state = torch.cuda.get_rng_state()
    with torch.inference_mode():
        net = Nimble(model, Options(fuse="inductor", policy="single")).prepare(x)
        torch.testing.assert_close(net(x), model(x))
    assert taken, "no kernel had several forms"
    assert all(ns is not None and 0 < ns < 1e7 for ns in taken)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert not isinstance(BENCHMARKER.require(), kernel_forms._Replays)
    assert AUTOTUNER_BENCH.require().__module__ == "torch._inductor.runtime.triton_heuristics"
    net.close()


def test_what_cannot_be_captured_is_timed_as_usual():
    import torch._inductor.runtime.triton_heuristics  # else there is nothing to choose

    x = torch.ones(8, device="cuda")
    found = kernel_forms._Replays(BENCHMARKER.require(), lambda fn: None).benchmark(lambda: x + x, device="cuda")
    assert 0 < found < 100


def test_another_thread_times_as_usual():
    import torch._inductor.runtime.triton_heuristics

    x, asked = torch.ones(8, device="cuda"), []
    replays = kernel_forms._Replays(BENCHMARKER.require(), asked.append)
    with ThreadPoolExecutor() as other:
        found = other.submit(replays.benchmark, lambda: x + x, device="cuda").result()
    assert 0 < found < 100
    assert not asked
