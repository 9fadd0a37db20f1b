"""Other kernels on a real GPU: right in every precision, captured as planned, kept, and gone when they are closed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nimble_core import Nimble
from tests.support.fused_models import engine, fused, made, quick
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
