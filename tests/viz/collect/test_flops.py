"""FLOPs: those of torch's counter where it counts, and of fused calls those of the eager calls they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.ir.program import Call, Program
from nimble_core.tracing.recorded import check_inputs
from nimble_core.tracing.recording import Recording
from nimble_viz.collect.flops import call_flops, count_work, shared_flops


def recorded(model: nn.Module, *args: torch.Tensor) -> Recording:
    signature = check_inputs(model, args, {})
    return device_for(signature.device).record(model, signature, args, {})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), (3, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, 2, groups=2), nn.BatchNorm2d(8)).eval(), (2, 4, 16, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 8, 3, 2), (2, 4, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    make, sizes = MODELS[name]
    model, x = make(), torch.randn(sizes)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    counts = call_flops(recorded(model, x))
    assert sum(count or 0 for count, product in counts if product) == counter.get_total_flops() > 0


def test_attention_is_two_products() -> None:
    counts = call_flops(recorded(Attention().eval(), torch.randn(2, 8, 16)))
    products = [count for count, product in counts if product]
    assert products[0] == 2 * 16 * 16 * 48
    assert sum(products[1:]) == 2 * (2 * 2 * 2 * 8 * 8 * 8)  # q kᵀ and p v: each 2 FLOPs, batch 2, 2 heads, 8 × 8 × 8


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x + x, 24),
        (lambda x: x.sum(), 24),
        (lambda x: x.softmax(-1), 5 * 24),
        (lambda x: torch.cat([x, x]), 0),
        (lambda x: x.t().contiguous(), 0),
        (lambda x: x @ torch.ones(6), 2 * 24),
        (lambda x: torch.sort(x)[0], None),
    ],
)
def test_what_has_no_formula(run: object, expected: int | None) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return run(x)  # type: ignore[operator, no-any-return]

    counts = [count for count, _ in call_flops(recorded(Model(), torch.randn(4, 6)))]
    assert counts[-1] == expected


def test_a_recording_without_shapes_is_not_counted() -> None:
    recording = recorded(nn.Linear(2, 2), torch.randn(1, 2))
    assert count_work(recording, None, None).flops == (8,)
    assert count_work(replace(recording, refs=()), None, None).flops == (None,)


def program(*eager: tuple[int, ...]) -> Program:
    return Program(tuple(Call(k, "fused", (), (), eager=one) for k, one in enumerate(eager)), (), (), ())


def test_a_kernel_does_what_its_eager_calls_do() -> None:
    unknown = ((None, False),)
    assert shared_flops(program((0, 1)), unknown, (10, 5)) == (15,)
    assert shared_flops(program((0, 1)), unknown, (10, None)) == (None,)
    assert shared_flops(program(()), unknown, (10, 5)) == (None,)


def test_a_product_is_counted_once() -> None:
    """The library's convolution is in a call of its own, and the kernel after it names it too."""
    assert shared_flops(program((0,), (0, 1)), ((100, True), (None, False)), (100, 7)) == (100, 7)


@given(st.lists(st.lists(st.integers(0, 4), unique=True).map(tuple), min_size=1, max_size=6), st.data())
def test_nothing_is_counted_twice(groups: list[tuple[int, ...]], data: st.DataObject) -> None:
    eager = data.draw(st.lists(st.integers(0, 1000), min_size=5, max_size=5))
    found = shared_flops(program(*groups), ((None, False),) * len(groups), eager)
    covered = {one for group in groups for one in group}
    assert sum(count or 0 for count in found) <= sum(eager[one] for one in covered)
