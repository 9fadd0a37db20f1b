"""Other kernels on a real GPU: right in every precision, captured as planned, kept, and gone when they are closed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options
from nimble_core.ir.measurement import Measurement, Ratio, ratio
from tests.support.fused_models import Residual, engine, fused, made, quick
from tests.support.rewrite_models import strides_that_matter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # compilers warn of what they would rather be told
]

KINDS = ["none", "library", "inductor"]
FLOOR = {"float32": 2e-5, "tf32": 1e-3, "float16": 1e-3, "bfloat16": 8e-3, "autocast": 1e-3}
"""Relative errors against float64 that any kernels may have."""


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_merged_convolutions_are_right(
    layout: torch.memory_format, dtype: torch.dtype, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nimble_core.compiler.passes.merge_siblings._pays", lambda *given: True)
    torch.manual_seed(0)
    model = Inception().cuda().to(dtype)
    x = torch.randn(3, 16, 12, 12, device="cuda", dtype=dtype).to(memory_format=layout)
    net = Nimble(model, quick("inductor")).prepare(x)
    assert fused(net) == "inductor", engine(net).notes
    choices = engine(net).recorded.recording.program.choices
    assert sum(one.kernel == "merged siblings" for one in choices) == 1
    for _ in range(2):
        y = torch.randn_like(x)
        for mine, theirs in zip(net(y), model(y), strict=True):
            assert strides_that_matter([mine]) == strides_that_matter([theirs])
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=2e-2 if dtype is torch.float16 else 1e-4)
        with torch.no_grad():
            model.two.weight.mul_(1.1)  # what is joined follows


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


@pytest.mark.parametrize("fuse", ["library", "inductor"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_choosing_kernels_leaves_the_switches_alone(fuse: str, deterministic: bool) -> None:
    def switches() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        return cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, cudnn.allow_tf32, cudnn.enabled

    model, draw = made("tower", "cuda")
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


# -- choosing --------------------------------------------------------------------------------------------------------


def certain(new: Measurement, old: Measurement) -> Ratio:
    """Return a ratio without doubt."""
    found = ratio(new, old)
    return replace(found, low=found.value, high=found.value)


@torch.no_grad()
def test_a_choice_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's noise: what is undecided is not kept, so intervals are shrunk to their middle here."""
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("nimble_core.autotune.choice.ratio", certain)
    model, draw = made("tower", "cuda")
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


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fuse", "rounds"), [("none", 20), ("library", 20), ("inductor", 6)])
def test_closing_frees_everything(fuse: str, rounds: int) -> None:
    model, draw = made("tower", "cuda")
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
    model, draw = made("tower", "cuda")
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
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x), rtol=1e-2, atol=1e-2)
