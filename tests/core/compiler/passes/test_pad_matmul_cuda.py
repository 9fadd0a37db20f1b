"""Products of odd sizes on a real GPU: padded where that is faster, and right either way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options, TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # compilers warn of what they would rather be told
]


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(matmul)


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
