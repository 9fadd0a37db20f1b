"""Models in float64: the truth is found, and nothing is left behind."""

from __future__ import annotations

import copy
import random
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from nimble_core.validation.bounds import BOUNDS, lowest_precision, tolerance_for
from nimble_core.validation.distances import relative_error
from nimble_core.validation.float64_reference import Reference, in_float64, memory_limit, reference_outputs, wide_bytes
from tests.support.models import CASES, make

HALVES = (torch.float16, torch.bfloat16)
FLOATING = (*HALVES, torch.float32)


def truth(model: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    found = reference_outputs(model, args, kwargs)
    assert found.outputs is not None, found.reason
    assert found.reason == ""
    return found.outputs


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FLOATING), st.lists(st.integers(1, 12), min_size=2, max_size=5), st.integers(0, 99))
def test_it_is_what_the_model_cast_to_float64_computes(dtype: torch.dtype, widths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.GELU())]
    model, x = nn.Sequential(*layers).to(dtype), torch.randn(3, widths[0]).to(dtype)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    assert relative_error(truth(model, x), [expected]) < 1e-14


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_model_is_left_as_it_was_and_its_reference_is_near_eager(name: str) -> None:
    model, args, kwargs = make(name)
    before = bits(model) if isinstance(model, nn.Module) else {}
    attributes = {path: dict(vars(one)) for path, one in getattr(model, "named_modules", dict)()} if before else {}
    given_before = [tensor.clone() for tensor in flatten((args, kwargs))[0]]
    state, python = torch.get_rng_state(), random.getstate()
    found = reference_outputs(model, args, kwargs)
    assert torch.equal(state, torch.get_rng_state())
    assert random.getstate() == python
    assert all(map(same, given_before, flatten((args, kwargs))[0]))
    if before:
        after = bits(model)
        assert after.keys() == before.keys()
        assert all(same(before[key], after[key]) for key in before)
        for path, one in model.named_modules():
            assert all(vars(one)[key] is value for key, value in attributes[path].items())
    if found.outputs is None:
        assert found.reason
        return
    assert all(tensor.dtype not in FLOATING for tensor in found.outputs)
    lowest = lowest_precision(record(model, Signature(args, kwargs), args=args, kwargs=kwargs).program)
    with torch.no_grad():
        eager = flatten(model(*args, **kwargs))[0]
    assert [tensor.shape for tensor in eager] == [tensor.shape for tensor in found.outputs]
    draws = not torch.equal(state, torch.get_rng_state())
    if not draws:
        assert relative_error(eager, found.outputs) <= tolerance_for(eager, lowest)


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = torch.rand(8)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).float().to(self.first.weight.dtype) * self.scale.to(x.dtype)
        y = torch.softmax(y, -1, dtype=torch.float32).to(torch.bfloat16).to(x.dtype)
        y = y + torch.zeros(8, dtype=torch.float16)
        return self.second(y.type_as(x)).float()


def test_casts_inside_the_model_stay_in_float64() -> None:
    torch.manual_seed(0)
    model, x = Casts(), torch.randn(4, 8)
    first, second = copy.deepcopy(model.first).double(), copy.deepcopy(model.second).double()
    with torch.no_grad():
        expected = second(torch.softmax(first(x.double()) * model.scale.double(), -1))
    assert relative_error(truth(model, x), [expected]) < 1e-14


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.body(x)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_inside_and_around_the_model_is_undone(outside: bool) -> None:
    torch.manual_seed(0)
    model, x = Autocast(), torch.randn(2, 8)
    with torch.no_grad():
        expected = copy.deepcopy(model.body).double()(x.double())
    closed = model.body if outside else model
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        for one in (closed, lambda x: closed(x)):  # a module, and a function that reaches one
            assert relative_error(truth(one, x), [expected]) < 1e-14
        # Nothing of the run is left in autocast's cache of weights.
        assert closed(x).dtype is torch.bfloat16


def test_what_the_run_writes_can_be_read_in_it_and_nothing_outside_changes() -> None:
    table, count, x = torch.ones(3, dtype=torch.float16), torch.zeros(2, dtype=torch.long), torch.rand(3).half()

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count[0] += 1
        row = table[:2]
        row += x[:2] / 3
        x.mul_(2)
        return table, x, count + 0, row * 1

    outputs = truth(model, x)
    changed = torch.ones(3, dtype=torch.float64)
    changed[:2] += x[:2].double() / 3
    assert relative_error(outputs, [changed, x.double() * 2, torch.tensor([1, 0]), changed[:2]]) < 1e-15
    assert torch.equal(table, torch.ones(3).half())
    assert not count.any()
    assert relative_error(truth(model, x), outputs) == 0


def test_a_tensor_given_twice_is_one_tensor() -> None:
    x = torch.rand(3)
    assert relative_error(truth(lambda a, b: a.add_(1) * b, x, x), [(x.double() + 1) ** 2]) < 1e-15


@torch.library.custom_op("nimble_tests::single_only", mutates_args=())
def single_only(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"float32 only, given {x.dtype}")
    return x * 2


def no_reference(found: Reference, reason: str) -> bool:
    return found.outputs is None and reason in found.reason


def test_an_operator_without_float64_gives_the_reason() -> None:
    assert no_reference(reference_outputs(single_only, (torch.ones(2),), {}), "float32 only")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_kernels_on_a_gpu_have_a_float64_that_is_right(kernel: str, masked: bool) -> None:
    if masked and kernel == "flash":
        pytest.skip("it takes no mask")
    query, key, value = (torch.randn(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.randn(2, 4, 16, 16, device="cuda", dtype=torch.bfloat16) if masked else None
    call = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    args = (query, key, value) if kernel == "flash" else (query, key, value, mask, True)
    saved = call(*args)
    with in_float64([], 1 << 30):
        found = call(*args)
    wide = [None if one is None else one.double() for one in (query, key, value, mask)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide)
    assert found[0].dtype is torch.float64
    torch.testing.assert_close(found[0], want)
    assert [type(one) for one in found] == [type(one) for one in saved]
    torch.testing.assert_close(saved[0].double(), want, rtol=0.05, atol=0.05)


def test_a_module_that_cannot_be_copied_gives_the_reason() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    assert no_reference(reference_outputs(model, (torch.ones(2),), {}), "TypeError")


def test_too_large_is_not_tried() -> None:
    model, x = nn.Linear(100, 100, bias=False), torch.ones(100)
    assert no_reference(reference_outputs(model, (x,), {}, limit_bytes=80_799), "float64")
    assert reference_outputs(model, (x,), {}, limit_bytes=80_800).outputs is not None
    # What a function reaches is only known once it does.
    assert no_reference(reference_outputs(lambda x: model(x), (x,), {}, limit_bytes=80_799), "float64")
    assert reference_outputs(lambda x: model(x), (x,), {}, limit_bytes=80_800).outputs is not None


def test_a_gpu_lends_half_of_what_it_has_free_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, limit in ((76 << 30, 32 << 30), (10 << 30, 5 << 30)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 << 30))
        assert memory_limit(torch.device("cuda")) == limit
    assert memory_limit(torch.device("cpu")) == 8 << 30
    weight = torch.ones(4, dtype=torch.bfloat16)
    assert wide_bytes([weight, weight, torch.ones(2, dtype=torch.int32)]) == 4 * 8 + 2 * 4


def test_compiled_regions_run_eagerly_and_stay_compiled() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(1)
        return graph.forward

    inner = nn.Linear(4, 4)
    model, x = torch.compile(inner, backend=backend), torch.rand(2, 4)
    expected = copy.deepcopy(inner).double()(x.double())
    assert relative_error(truth(lambda x: model(x), x), [expected]) < 1e-14
    assert not compiled
    with torch.no_grad():
        model(x)
        assert relative_error(truth(lambda x: model(x), x), [expected]) < 1e-14
        model(x)
    assert len(compiled) == 1


@pytest.mark.parametrize("training", [False, True])
def test_random_numbers_have_no_reference(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(training)
    state = torch.get_rng_state()
    found = reference_outputs(model, (torch.ones(2, 4),), {})
    assert torch.equal(state, torch.get_rng_state())
    if training:
        assert no_reference(found, "draws random numbers")
    else:
        assert found.outputs is not None


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_in_float64_have_their_weights_in_one_piece(kind: type[nn.LSTM | nn.GRU]) -> None:
    model, x = kind(8, 8, num_layers=2, bidirectional=True).eval().cuda(), torch.randn(3, 2, 8, device="cuda")
    warned = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        found = truth(model, x)
    finally:
        torch.set_warn_always(warned)
    with torch.no_grad():
        expected, _ = flatten(model(x), what="output")
    assert relative_error(expected, found) < 10 * BOUNDS["tf32"].tolerance  # which cuDNN computes them in
