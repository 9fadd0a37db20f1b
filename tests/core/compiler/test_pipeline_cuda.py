"""Other kernels on a real GPU: right in every precision, captured as planned, kept, and gone when they are closed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import CaptureError, DeviceError, Nimble, Options, TrainStep
from nimble_core.api.engine import Engine
from nimble_core.autotune.capture_pipeline import device_for, observe
from nimble_core.compiler.attribution import unmapped
from nimble_core.ir.measurement import Measurement, Ratio, ratio
from nimble_core.runtime.cuda.device import CudaExecutable
from nimble_core.runtime.cuda.graph_nodes import read_graph
from nimble_core.tracing.kernel_launches import Relaunch
from tests.support.fused_models import MODELS, Attention, Residual, Tower, compiler_broken, made, mistaken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # compilers warn of what they would rather be told
]

KINDS = ["none", "library", "inductor"]
FLOOR = {"float32": 2e-5, "tf32": 1e-3, "float16": 1e-3, "bfloat16": 8e-3, "autocast": 1e-3}
"""Relative errors against float64 that any kernels may have."""


def quick(fuse: Any, **more: Any) -> Options:
    return Options(**{"fuse": fuse, "tune": "off", "policy": "nimble", **more})


def engine(net: Nimble) -> Engine:
    (found,) = net.engines
    return found


def fused(net: Nimble) -> str:
    return engine(net).recorded.recording.program.fuse


def tower() -> tuple[Any, Callable[[], torch.Tensor]]:
    model, draw = made("tower")
    return model.cuda(), lambda: draw().cuda()


@pytest.fixture
def tf32() -> Iterator[None]:
    """Products and convolutions in TF32."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.fixture
def exact() -> Iterator[None]:
    """Products and convolutions in float32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


# -- right -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("fuse", KINDS)
@pytest.mark.parametrize("precision", FLOOR)
@pytest.mark.parametrize("name", ["tower", "attention"])
def test_as_close_to_float64_as_eager(name: str, precision: str, fuse: str, request: pytest.FixtureRequest) -> None:
    if (name, precision) == ("tower", "bfloat16"):
        pytest.skip("its outputs move too little between inputs to show anything in bfloat16")
    request.getfixturevalue("tf32" if precision == "tf32" else "exact")
    model, draw = made(name)
    dtype = getattr(torch, precision) if precision in ("float16", "bfloat16") else torch.float32
    wide = copy.deepcopy(model).double().cuda()
    model = model.cuda().to(dtype)
    wide.load_state_dict({key: value.double() for key, value in model.state_dict().items()})

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, enabled=precision == "autocast"):
            return model(x)

    net = Nimble(run, quick(fuse)).prepare(draw().cuda().to(dtype))
    assert fused(net) == fuse, engine(net).notes
    for _ in range(3):
        x = draw().cuda().to(dtype)
        truth = wide(x.double())
        theirs, ours = run(x), net(x)
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        own, error = (float((out.double() - truth).norm() / truth.norm()) for out in (theirs, ours))
        assert error <= max(3 * (1 + 4 / truth.numel()) * own, FLOOR[precision])


@pytest.mark.parametrize("fuse", KINDS)
@pytest.mark.parametrize("name", ["tower", "attention"])
def test_under_inference_mode_the_same_is_prepared(name: str, fuse: str, exact: None) -> None:
    model, draw = made(name)
    model, x = model.cuda(), draw().cuda()
    with torch.no_grad():
        other = Nimble(model, quick(fuse)).prepare(x)
    with torch.inference_mode():
        net = Nimble(model, quick(fuse)).prepare(x)
        assert fused(net) == fuse, engine(net).notes
        programs = [engine(one).recorded.recording.program for one in (other, net)]
        assert len(programs[0].calls) == len(programs[1].calls)
        for _ in range(2):
            y = draw().cuda()
            torch.testing.assert_close(net(y), model(y), rtol=1e-4, atol=1e-4)


class Inception(nn.Module):
    """As in an Inception block; what reads the branches is a convolution, a sum, a pool and the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Conv2d(16, n, 1, bias=False) for n in (8, 16, 24, 5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (8, 16, 24, 5))
        self.after = nn.Conv2d(16, 8, 3, padding=1)
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            norm.running_mean.normal_()
        self.eval()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layers = (self.one, self.two, self.three, self.four)
        one, two, three, four = (norm(layer(x)).relu() for norm, layer in zip(self.norms, layers, strict=True))
        return torch.cat([one + self.after(two), nn.functional.max_pool2d(three, 3, 1, 1)], 1), four


@torch.no_grad()
@pytest.mark.parametrize("tune", ["off", "fast"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_merged_siblings_are_right(
    layout: torch.memory_format,
    dtype: torch.dtype,
    batch: int,
    tune: Any,
    exact: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nimble_core.compiler.passes.merge_siblings._sites_pay", lambda *given: True)
    torch.manual_seed(0)
    model = Inception().cuda().to(dtype)
    x = torch.randn(batch, 16, 12, 12, device="cuda", dtype=dtype).to(memory_format=layout)
    net = Nimble(model, quick("library", tune=tune)).prepare(x)
    assert fused(net) == "library", engine(net).notes
    choices = engine(net).recorded.recording.program.choices
    assert sum(one.kernel == "merged siblings" for one in choices) == (tune == "fast")
    for _ in range(2):
        y = torch.randn_like(x)
        for mine, theirs in zip(net(y), model(y), strict=True):
            strides = [
                [step for step, size in zip(one.stride(), one.shape, strict=True) if size > 1] for one in (mine, theirs)
            ]
            assert strides[0] == strides[1]
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=2e-2 if dtype is torch.float16 else 1e-4)
        with torch.no_grad():
            model.two.weight.mul_(1.1)  # what is joined follows


@torch.no_grad()
@pytest.mark.parametrize("fuse", KINDS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_keep_the_strides_of_eagers(fuse: str, layout: torch.memory_format) -> None:
    model, draw = made("residual")
    model = model.cuda()
    x = draw().cuda().to(memory_format=layout)
    net = Nimble(model, quick(fuse)).prepare(x)
    assert fused(net) == fuse, engine(net).notes
    y = draw().cuda().to(memory_format=layout)
    assert net(y).stride() == model(y).stride()
    torch.testing.assert_close(net(y), model(y), rtol=1e-2, atol=1e-2)
    assert y.is_contiguous(memory_format=layout), "the caller's tensor is left as it is"


@torch.no_grad()
@pytest.mark.parametrize("fuse", KINDS)
def test_an_input_that_starts_elsewhere_in_its_memory(fuse: str) -> None:
    model = Attention().cuda().eval()
    whole = torch.randn(4, 5, 16, device="cuda")
    net = Nimble(model, quick(fuse)).prepare(whole[1:3])
    assert fused(net) == fuse, engine(net).notes
    for x in (whole[1:3], whole[2:], torch.randn(2, 5, 16, device="cuda")):
        torch.testing.assert_close(net(x), model(x), rtol=1e-3, atol=1e-4)


# -- what is captured ------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Residual blocks side by side."""

    def __init__(self, branches: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Residual() for _ in range(branches))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1).mean((2, 3))


@torch.no_grad()
@pytest.mark.parametrize("fuse", KINDS)
def test_emitted_as_promised(fuse: str) -> None:
    torch.manual_seed(0)
    model = Branches().cuda().eval()
    x = torch.randn(2, 3, 16, 16, device="cuda")
    net = Nimble(model, quick(fuse)).prepare(x)
    found = engine(net)
    assert fused(net) == fuse, found.notes
    executable, schedule, program = found.executable, found.schedule, found.recorded.recording.program
    assert schedule.streams > 1
    assert executable.counts.emitted == executable.counts.planned == schedule.meg_edges - schedule.matched
    assert executable.raw is not None
    owner, stream = executable.raw.owner, schedule.stream
    assert None not in owner, "every node of the graph belongs to a call"
    assert set(owner) == set(range(len(program.calls)))
    pairs = {(owner[tail], owner[head]) for tail, head in executable.raw.edges}
    assert {(u, v) for u, v in pairs if stream[u] != stream[v]} == set(schedule.syncs)
    for _ in range(5):
        x = torch.randn(2, 3, 16, 16, device="cuda")
        torch.testing.assert_close(net(x), model(x), rtol=1e-2, atol=1e-2)


# -- launched ahead --------------------------------------------------------------------------------------------------

HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="no kernels wait for others"
)


def turning(x: torch.Tensor) -> torch.Tensor:
    """Compiled kernels that read all that the ones before have written, each on two streams."""
    y = x
    for _ in range(4):
        x, y = (x.t() + y).softmax(-1), (y * 2 - y.mean(0, keepdim=True)).t().tanh()
    return x + y


def again(executable: CudaExecutable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [executable.run([x])[0] for x in inputs]


@HOPPER
@torch.no_grad()
@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("name", ["tower", "attention", "turning"])
def test_compiled_kernels_are_launched_ahead_and_wait(name: str, policy: str) -> None:
    model, draw = made(name) if name in MODELS else (turning, lambda: torch.randn(1500, 1500))
    model = model.cuda() if isinstance(model, nn.Module) else model
    inputs = [draw().cuda() for _ in range(20)]
    net = Nimble(model, quick("inductor", policy=policy)).prepare(inputs[0])
    executable, recording = engine(net).executable, engine(net).recorded.recording
    assert isinstance(executable, CudaExecutable)
    raw, graph = executable.raw, executable.graph
    assert fused(net) == "inductor", engine(net).notes
    assert raw.ahead
    assert graph is not None
    launched = {step.call: step.func for step in recording.steps if isinstance(step.func, Relaunch)}
    assert launched
    assert all(function.waits for function in launched.values())
    between = {(tail, head) for tail, head in raw.edges if raw.owner[head] in launched and raw.kinds[tail] == "kernel"}
    assert between
    assert between <= set(raw.ahead)
    found = again(executable, inputs)
    with executable.none_ahead():
        assert read_graph(graph.raw_cuda_graph()).ahead == ()
        one_by_one = again(executable, inputs)
    assert read_graph(graph.raw_cuda_graph()) == replace(raw, owner=())
    assert all(map(torch.equal, found, one_by_one))
    assert all(map(torch.equal, again(executable, inputs), one_by_one))
    torch.testing.assert_close(found[-1], model(inputs[-1]), rtol=1e-2, atol=1e-2)
    net.close()


@HOPPER
@torch.no_grad()
def test_what_a_kernel_costs_does_not_hold_its_wait_for_the_one_before() -> None:
    net = Nimble(turning, quick("inductor", policy="single")).prepare(torch.randn(1500, 1500, device="cuda"))
    found = engine(net)
    assert isinstance(found.executable, CudaExecutable)
    assert found.executable.raw.ahead, found.notes
    seen = observe(device_for(torch.device("cuda")), found.recorded, found.executable)
    assert seen.timeline.reliable, seen.timeline.note
    assert seen.costs.reliable
    spans = seen.timeline.spans
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(spans)), "one stream: one after the other"
    # Each is timed in replays of its own kind: clocks vary, and what is launched ahead may be done a little sooner.
    assert 0.8 * seen.timeline.length_ns < seen.costs.total_ns < 1.1 * seen.timeline.length_ns
    with found.executable.none_ahead():
        alone = observe(device_for(torch.device("cuda")), found.recorded, found.executable)
    assert alone.costs.total_ns == pytest.approx(seen.costs.total_ns, rel=0.1)
    net.close()


@HOPPER
@torch.no_grad()
def test_a_graph_that_cannot_be_instantiated_again_is_never_touched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100, 100, device="cuda")
    net = Nimble(turning, quick("inductor")).prepare(x)
    executable = engine(net).executable
    assert isinstance(executable, CudaExecutable)
    with executable.none_ahead(), executable.none_ahead():  # one of them waits for nobody
        assert executable.raw.ahead == ()
    assert executable.raw.ahead

    def refused(graph: torch.cuda.CUDAGraph) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "instantiate", refused)
        with (
            pytest.raises(DeviceError, match="could not be instantiated again: out of memory"),
            executable.none_ahead(),
        ):
            pytest.fail("nothing runs without a graph")
    with pytest.raises(DeviceError, match="closed"):
        net(x)
    net.close()
    again = Nimble(turning, quick("inductor")).prepare(x)
    torch.testing.assert_close(again(x), turning(x), rtol=1e-3, atol=1e-3)
    again.close()


@HOPPER
@torch.no_grad()
@pytest.mark.parametrize("fuse", ["none", "inductor"])
def test_kernels_that_wait_only_for_what_their_author_knew_of_are_not_launched_ahead(fuse: str) -> None:
    pytest.importorskip("triton")
    from tests.support import triton_kernels_for_tests as kernels

    def model(x: torch.Tensor) -> torch.Tensor:
        size, out = x.numel(), torch.empty_like(x)
        square = x @ x
        kernels.add_what_was_there[(-(-size // 1024),)](square, x, out, size, BLOCK=1024, launch_pdl=True)
        return out @ out

    x = torch.randn(512, 512, device="cuda")
    net = Nimble(model, quick(fuse)).prepare(x)
    found = engine(net)
    assert isinstance(found.executable, CudaExecutable)
    raw, calls = found.executable.raw, found.recorded.recording.program.calls
    (own,) = (call.index for call in calls if "add_what_was_there" in call.operator)
    assert not [edge for edge in raw.ahead if raw.owner[edge[1]] == own]
    assert [edge for edge in raw.edges if raw.owner[edge[1]] == own]
    torch.testing.assert_close(net(x), model(x), rtol=1e-3, atol=1e-2)
    net.close()


class Attending(nn.Module):
    """Attention of cuDNN's, three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, False)[0].mul(2).tanh()
        return x


@HOPPER
@torch.no_grad()
@pytest.mark.parametrize("policy", ["single", "nimble"])
@pytest.mark.parametrize("fuse", ["none", "inductor"])
def test_what_attention_counts_in_is_zero_from_the_beginning_whatever_was_there(fuse: str, policy: str) -> None:
    model = Attending()
    inputs = [torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.float16) for _ in range(6)]
    net = Nimble(model, quick(fuse, policy=policy)).prepare(inputs[0])
    found = engine(net)
    executable = found.executable
    assert isinstance(executable, CudaExecutable)
    raw = executable.raw
    if "memset" not in raw.kinds:
        pytest.skip("this cuDNN sets nothing to zero before its attention")
    assert [node for node, kind in enumerate(raw.kinds) if kind == "memset"] == [0]
    assert raw.owner[0] is None
    assert set(raw.owner[1:]) == set(range(len(found.recorded.recording.program.calls)))
    assert executable.counts.forks == 1
    assert executable.arena is not None
    for x in inputs:
        executable.arena.fill_(255)
        torch.testing.assert_close(net(x), model(x), rtol=1e-2, atol=1e-2)
    seen = observe(device_for(torch.device("cuda")), found.recorded, executable)
    assert seen.timeline.reliable, seen.timeline.note
    net.close()


@pytest.mark.parametrize("fuse", ["library", "inductor"])
def test_query_key_and_value_are_one_product(fuse: str) -> None:
    net = Nimble(Attention().cuda().eval(), quick(fuse)).prepare(torch.randn(2, 5, 16, device="cuda"))
    assert fused(net) == fuse, engine(net).notes
    recorded = engine(net).recorded
    assert recorded.eager is not None
    program, eager = recorded.recording.program, recorded.eager.recording.program
    products = {call.index for call in eager.calls if call.label == "addmm"}
    assert len(products) == 4
    doing = [call for call in program.calls if "mm" in call.operator and products & set(call.eager)]
    assert max(len(products & set(call.eager)) for call in doing) == 3
    merged = next(call for call in doing if len(products & set(call.eager)) == 3)
    assert {"query", "key", "value"} <= {origin.module for origin in merged.origins}


@pytest.mark.parametrize("fuse", ["library", "inductor"])
def test_every_eager_call_is_traced(fuse: str) -> None:
    model, draw = tower()
    net = Nimble(model, quick(fuse)).prepare(draw())
    recorded = engine(net).recorded
    assert recorded.eager is not None
    program, eager = recorded.recording.program, recorded.eager.recording.program
    assert {index for call in program.calls for index in call.eager} == set(range(len(eager.calls)))
    convolutions = sum("convolution" in call.operator for call in eager.calls)
    assert unmapped(program) <= 2 * convolutions, "changes of layout around them at most: how many, timing decides"
    for call in program.calls:
        if call.eager:
            assert all(origin.line > 0 and origin.file for origin in call.origins)


@pytest.mark.parametrize("fuse", ["library", "inductor"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_choosing_kernels_leaves_the_switches_alone(fuse: str, deterministic: bool) -> None:
    def switches() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        return cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, cudnn.allow_tf32, cudnn.enabled

    model, draw = tower()
    torch.backends.cudnn.deterministic = deterministic
    try:
        before, state = switches(), torch.cuda.get_rng_state()
        stream = torch.cuda.current_stream()
        net = Nimble(model.half(), quick(fuse, tune="fast")).prepare(draw().half())
        assert switches() == before
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert torch.cuda.current_stream() == stream
        with torch.no_grad():
            net(draw().half())
        assert switches() == before
    finally:
        torch.backends.cudnn.deterministic = False


def certain(new: Measurement, old: Measurement) -> Ratio:
    """A ratio without doubt."""
    found = ratio(new, old)
    return replace(found, low=found.value, high=found.value)


# -- choosing --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_choice_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's noise: what is undecided is not kept, so intervals are shrunk to their middle here."""
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("nimble_core.autotune.choice.ratio", certain)
    model, draw = tower()
    options = Options(budget_s=200.0)
    first = Nimble(model, options).prepare(draw())
    tried = engine(first).candidates
    assert {one.fuse for one in tried} == {"none", "library", "inductor"}
    assert all(one.check and one.check.passed for one in tried if one.measurement), tried
    assert all(one.measurement or one.note for one in tried)
    second = Nimble(model, options).prepare(draw())
    assert len(engine(second).candidates) == 1
    assert any("chosen by an earlier process" in note for note in engine(second).notes)
    assert fused(second) == fused(first)
    assert engine(second).plan is not None
    assert engine(second).schedule.stream == engine(first).schedule.stream
    assert engine(second).recorded.recording.program.choices == engine(first).recorded.recording.program.choices
    x = draw()
    torch.testing.assert_close(second(x), first(x))
    wide = Nimble(Branches().cuda().eval(), options).prepare(torch.randn(2, 3, 16, 16, device="cuda"))
    assert len(engine(wide).candidates) > 1, "another model has a choice of its own"


def test_a_budget_that_is_too_small_to_compile_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    model, draw = tower()
    net = Nimble(model, Options(budget_s=0.5)).prepare(draw())
    (left,) = [one for one in engine(net).candidates if one.fuse == "inductor"]
    assert left.note.startswith("not compiled: about")


def test_a_memory_limit_that_only_some_kernels_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    model, draw = tower()
    x = draw()
    held = engine(Nimble(model, quick("none", policy="single")).prepare(x)).executable.nbytes
    net = Nimble(model, Options(budget_s=1.0, memory_limit=2 * held)).prepare(x)
    assert engine(net).executable.nbytes <= 2 * held
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x), rtol=1e-2, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("fuse", ["library", "inductor"])
def test_a_plan_makes_the_same_kernels_again(fuse: str, tmp_path: Path) -> None:
    from nimble_core.scheduling.saved_plan import load_plan

    model, draw = tower()
    first = Nimble(model, quick(fuse, tune="fast")).prepare(draw())
    plan = engine(first).plan
    assert plan is not None
    kept = load_plan(plan.save(tmp_path / "fused.plan.json"))
    second = Nimble(model).prepare(draw(), plan=kept)
    again = engine(second).plan
    assert again is not None
    assert (again.fingerprint, again.fuse, again.kernels) == (plan.fingerprint, fuse, plan.kernels)
    x = draw()
    torch.testing.assert_close(second(x), first(x))


# -- what is not right, or cannot be made ------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("fuse", ["library", "inductor", "auto"])
def test_kernels_that_compute_something_else_are_left_out(
    fuse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    mistaken(monkeypatch)
    model, draw = made("residual")
    model = model.cuda()
    net = Nimble(model, Options(fuse=fuse, budget_s=200.0)).prepare(draw().cuda())
    assert fused(net) == "none"
    for kind in ("library", "inductor") if fuse == "auto" else (fuse,):
        assert any(note.startswith(f"{kind}: left out: outputs differ") for note in engine(net).notes)
        wrong = [one for one in engine(net).candidates if one.fuse == kind]
        assert wrong
        assert all(one.check and one.check.differs for one in wrong)
    for _ in range(3):
        x = draw().cuda()
        torch.testing.assert_close(net(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize(("fuse", "scale"), [("inductor", 2.345), ("auto", 3.456)])
def test_a_kernel_that_does_not_compile_is_left_out(
    fuse: str, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))

    def model(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * scale + 1).sigmoid() * x).softmax(-1)

    with compiler_broken():
        net = Nimble(model, Options(fuse=fuse, budget_s=200.0)).prepare(torch.randn(6, 7, device="cuda"))
    assert fused(net) in ("none", "library")
    (note,) = [note for note in engine(net).notes if note.startswith("inductor: ")]
    assert "PassManager::run failed" in note
    (left,) = [one for one in engine(net).candidates if one.fuse == "inductor"]
    assert left.note in note
    for _ in range(3):
        x = torch.randn(6, 7, device="cuda")
        torch.testing.assert_close(net(x), model(x))


# -- weights ---------------------------------------------------------------------------------------------------------


def same(net: Nimble, model: nn.Module, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(net(x), model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("fuse", KINDS)
@pytest.mark.parametrize("how", ["sgd", "adamw", "fused adamw", "load_state_dict", "data"])
def test_weights_that_change_are_followed(fuse: str, how: str) -> None:
    model, draw = tower()
    net = Nimble(model, quick(fuse)).prepare(draw())
    x = draw()
    assert same(net, model, x)
    assert not engine(net).check_first, "asked while the device is busy with the run"
    with torch.no_grad():
        before = model(x).clone()
    folds = engine(net).watch.folds
    if how == "load_state_dict":
        torch.manual_seed(11)
        model.load_state_dict(Tower().cuda().state_dict())
    elif how == "data":
        model.block.first.weight.data.mul_(-2)
        model.block.second.weight.data.mul_(-2)
        net.refresh()
    else:
        kinds = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.5),
            "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.1),
            "fused adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        }
        optimizer = kinds[how]()
        model(draw()).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert not torch.allclose(before, model(x), rtol=5e-2, atol=5e-2)
    assert same(net, model, x), "the first run after the change is right already"
    assert (engine(net).watch.folds > folds) == (engine(net).folded is not None)


@pytest.mark.parametrize(("fuse", "rounds"), [("none", 20), ("library", 20), ("inductor", 6)])
def test_closing_frees_everything(fuse: str, rounds: int) -> None:
    model, draw = tower()
    x = draw()

    def one_round() -> None:
        net = Nimble(model, quick(fuse)).prepare(x)
        with torch.no_grad():
            net(x)
        assert fused(net) == fuse, engine(net).notes
        net.close()

    def held() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    one_round()
    one_round()
    allocated, reserved = held()
    for _ in range(rounds):
        one_round()
    now = held()
    assert now[0] <= allocated
    assert now[1] <= reserved


# -- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", ["library", "inductor", "auto"])
def test_a_report_with_peers(fuse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nimble_viz

    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path / "choices"))
    model, draw = tower()
    peers = ["compile:reduce-overhead", "cuda-graph"]
    options = Options(fuse=fuse, budget_s=60.0 if fuse == "auto" else 1.0)
    report = nimble_viz.compare(model, draw(), against=peers, options=options)
    assert report.complete
    assert [result.name for result in report.peers] == peers
    assert all(result.check is not None and result.check.passed for result in report.peers), report.peers
    names = {taken.name for taken in report.measurements}
    assert {"eager", "single", report.chosen, *peers} <= names
    assert report.chosen in {plan.policy for plan in report.schedules}
    assert all(check.passed for check in report.checks), report.checks
    if fuse != "auto":
        assert report.program.fuse == fuse, report.warnings
    assert (report.eager is None) == (report.program.fuse == "none")
    for one in report.schedules:
        assert one.counts.emitted == one.counts.planned
    kept = nimble_viz.load(report.save(tmp_path / "peers.nimble"))
    assert kept == report
    net = Nimble(model).prepare(draw(), plan=kept.plan)
    assert fused(net) == report.program.fuse
    x = draw()
    assert same(net, model, x)


# -- kernels of the user's -------------------------------------------------------------------------------------------


def user_kernel(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model that launches a Triton kernel between calls of torch."""
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
    assert all(origin.file.endswith("test_pipeline_cuda.py") for origin in call.origins), "the line that launches"
    assert engine(net).schedule.streams > 1, "the calls beside it run beside it"
    for _ in range(5):
        y = torch.randn(64, device="cuda")
        assert torch.equal(net(y), model(y))


def reaching_elsewhere(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model with a Triton kernel that writes memory which is none of its tensor arguments'."""
    pytest.importorskip("triton")
    from torch.library import triton_op, wrap_triton

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

    if not hasattr(torch.ops.nimble_triton_tests, "doubled_to"):

        @triton_op("nimble_triton_tests::doubled_to", mutates_args={})
        def doubled_to(y: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(y)
            wrap_triton(kernels.double_to)[(1,)](y, out.data_ptr(), y.numel(), BLOCK=64)
            return out

    run: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "double_to": double_to,
        "double_through": double_through,
        "double_of_pair": double_of_pair,
        "doubled_to": torch.ops.nimble_triton_tests.doubled_to,
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
    assert "test_pipeline_cuda.py" in note
    assert engine(net).schedule.streams == 1
    for _ in range(200):
        y = torch.randn(64, device="cuda")
        assert torch.equal(net(y), model(y))
    with pytest.raises(CaptureError, match=f"{name} in the model at "):
        Nimble(model, Options(fuse=fuse, strict=True)).prepare(x)


@torch.no_grad()
@pytest.mark.parametrize("fuse", [*KINDS, "auto"])
def test_what_an_operator_gives_its_kernels_is_its_own_affair(fuse: str) -> None:
    model = reaching_elsewhere("doubled_to")
    net = Nimble(model, Options(fuse=fuse, policy="nimble", budget_s=1.0)).prepare(torch.randn(64, device="cuda"))
    assert not any("captured as a whole" in note for note in engine(net).notes)
    for _ in range(200):
        y = torch.randn(64, device="cuda")
        torch.testing.assert_close(net(y), model(y))


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
    """A kernel whose launcher nobody watches."""
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
    with pytest.raises(CaptureError, match="belong to no call"):
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
def test_such_a_launcher_inside_an_operator_with_a_schema_is_a_call(fuse: str) -> None:
    kernel = launched_by_the_driver()
    if not hasattr(torch.ops.nimble_driver_tests, "doubled"):

        @torch.library.custom_op("nimble_driver_tests::doubled", mutates_args=("out",))
        def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
            kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[x, out, x.numel()])

        doubled.register_fake(lambda x, out: None)

    def model(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 5
        out = torch.empty_like(y)
        torch.ops.nimble_driver_tests.doubled(y, out)
        return (out - 1) * z

    net = Nimble(model, quick(fuse, strict=True)).prepare(torch.randn(64, device="cuda"))
    assert fused(net) == fuse, engine(net).notes
    program = engine(net).recorded.recording.program
    (call,) = [call for call in program.calls if call.operator.startswith("nimble_driver_tests.doubled")]
    assert len({ref.storage for ref in call.writes}) == 1
    for _ in range(5):
        y = torch.randn(64, device="cuda")
        assert torch.equal(net(y), model(y))


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


# -- products of odd sizes -------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A language model's end: logits over an odd vocabulary."""

    def __init__(self, words: int = 10_003) -> None:
        super().__init__()
        self.body = nn.Linear(256, 512)
        self.out = nn.Linear(512, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x).relu())


def padded_sizes(program: Any) -> set[int]:
    """Sizes of matrices that products read."""
    products = [call for call in program.calls if ".mm" in call.operator or ".addmm" in call.operator]
    return {size for call in products for ref in call.reads for size in ref.sizes}


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("fuse", ["library", "inductor"])
def test_a_step_with_an_odd_vocabulary_trains_as_in_eager_on_padded_products(fuse: Any) -> None:
    torch.manual_seed(0)
    model = Words().cuda().train()
    eager = copy.deepcopy(model)
    x, y = torch.randn(1024, 256, device="cuda"), torch.randint(10_003, (1024,), device="cuda")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, fused=True) for one in (model, eager)]
    options = Options(fuse=fuse, policy="nimble", tune="fast", budget_s=60.0)
    step = TrainStep(model, nn.functional.cross_entropy, optimizers[0], options=options).prepare(x, y)
    program = step.engine.recorded.recording.program
    assert program.fuse == fuse
    taken = [choice.kernel for choice in program.choices if choice.kernel.startswith("padded")]
    assert taken in ([], ["padded to 10004"])
    assert (10_004 in padded_sizes(program)) == bool(taken)
    for _ in range(5):
        optimizers[1].zero_grad()
        expected = nn.functional.cross_entropy(eager(x), y)
        expected.backward()
        optimizers[1].step()
        assert float((step(x, y) - expected).abs()) < 1e-2
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-3
    step.close()


@pytest.mark.usefixtures("tf32")
def test_a_drop_in_and_an_inference_with_an_odd_vocabulary_are_right() -> None:
    torch.manual_seed(0)
    model = Words().cuda().train()
    eager = copy.deepcopy(model)
    x, y = torch.randn(1024, 256, device="cuda"), torch.randint(10_003, (1024,), device="cuda")
    net = Nimble(model, Options(budget_s=60.0, outputs="static")).prepare(x, training=True)
    for one in (net, eager):
        nn.functional.cross_entropy(one(x), y).backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert float((mine.grad - theirs.grad).norm() / theirs.grad.norm()) < 1e-2
    net.close()
    net = Nimble(eager.eval(), Options(budget_s=60.0)).prepare(x)
    with torch.no_grad():
        expected = eager(x)
        assert net(x).stride() == expected.stride()
        assert float((net(x) - expected).norm() / expected.norm()) < 1e-2
    net.close()
