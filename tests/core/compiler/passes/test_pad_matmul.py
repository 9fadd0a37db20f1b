"""Products of odd sizes, padded: the same numbers, from fewer and larger loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from nimble_core.compiler import pipeline
from nimble_core.compiler.passes import pad_matmul
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.pad_matmul import pad_products
from nimble_core.compiler.rerecord import tracked
from nimble_core.compiler.to_fx import lift
from nimble_core.runtime.host.device import HostDevice
from nimble_core.tracing.recording import Issuer, Rewritten
from tests.support.rewrite_models import HOST, fake_timer, recorded, unchanged_by

_aten = torch.ops.aten
WEIGHT = torch.randn(7, 4, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _every_product_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pad_matmul, "_LEAST_SIZE", 1)
    monkeypatch.setattr(pad_matmul, "_LEAST_WORK", 1)
    monkeypatch.setattr(pad_matmul, "_WORTH", 0.0)


def pad(module: fx.GraphModule, *, compiled: bool = True, constant: bool = False) -> int:
    return pad_products(module, HOST, Decisions(fake_timer([1.0])), compiled=compiled, constant=constant)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9), terms=st.integers(1, 9), columns=st.integers(1, 9), compiled=st.booleans(),
    turned=st.tuples(st.booleans(), st.booleans()), dtype=st.sampled_from([torch.float64, torch.float32]),
)  # fmt: skip
def test_a_product_of_any_size(
    rows: int, terms: int, columns: int, compiled: bool, turned: tuple[bool, bool], dtype: torch.dtype
) -> None:
    a = torch.randn(*((terms, rows) if turned[0] else (rows, terms)), dtype=dtype)
    b = torch.randn(*((columns, terms) if turned[1] else (terms, columns)), dtype=dtype)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return (x.t() if turned[0] else x) @ (b.t() if turned[1] else b)

    count = []
    unchanged_by(lambda module: count.append(pad(module, compiled=compiled)), recorded(forward, a), 1e-5)
    multiple = 16 // dtype.itemsize
    assert count == [int(any(size % multiple for size in (rows, terms, columns)))]


def test_a_weight_is_read_when_its_product_is() -> None:
    weight = torch.randn(7, 4, dtype=torch.float64)

    def step(x: torch.Tensor) -> Any:
        before = x.cos() @ weight.t()
        weight.mul_(0.5)
        return before, x.sin() @ weight.t()

    unchanged_by(pad, recorded(step, torch.randn(6, 4, dtype=torch.float64)))


@pytest.mark.parametrize(("rows", "columns", "count"), [(7, 4, 1), (7, 6, 1), (6, 7, 0), (9, 7, 1)])
def test_a_gradient_that_is_written_in_place_stays_row_after_row(rows: int, columns: int, count: int) -> None:
    x = torch.randn(16, columns, dtype=torch.float64)

    def step(made: torch.Tensor) -> torch.Tensor:
        gradient = made.cos().t() @ x
        gradient.view(-1).mul_(0.5)
        return gradient

    counted = []
    one = recorded(step, torch.randn(16, rows, dtype=torch.float64))
    unchanged_by(lambda module: counted.append(pad(module)), one)
    assert counted == [count]


@torch.library.custom_op("nimble_padding::rows", mutates_args=())
def rows(x: torch.Tensor) -> torch.Tensor:
    """Asks for memory row after row, as kernels of one's own do."""
    assert x.is_contiguous()
    return x.sum(1)


def test_foreign_operators_get_what_they_got() -> None:
    weight = torch.randn(7, 4)
    for forward, count in (
        (lambda x: (rows(h := x.sin()), h @ weight, h * 2), 1),  # the operand is there twice
        (lambda x: rows(x.sin() @ weight.t()), 0),  # a part of the result would not do
    ):
        one = recorded(forward, torch.randn(6, 7 if count else 4))
        counted: list[int] = []
        unchanged_by(lambda module, counted=counted: counted.append(pad(module)), one, 1e-5)
        assert counted == [count]


def test_nothing_is_padded_without_a_measurement_or_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 4)
    one = recorded(lambda x: x.sin() @ weight.t(), torch.randn(6, 4))
    unmeasured = Decisions()
    assert pad_products(lift(one.recording), HOST, unmeasured, compiled=True, constant=False) == 0
    monkeypatch.setattr(pad_matmul, "_WORTH", 1.05)
    times = iter([[10.0, 9.0, 1.0], [10.0, 8.0, 1.0], [10.0, None, 1.0]])
    found = [
        pad_products(lift(one.recording), HOST, Decisions(lambda calls: next(times)), compiled=True, constant=False)
        for _ in range(3)
    ]
    assert found == [0, 1, 0]
    monkeypatch.setattr(pad_matmul, "_LEAST_WORK", 1 << 30)
    assert pad(lift(one.recording)) == 0


def backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    """Of a layer with bias, given the gradient of its results for each of several words."""
    made = gradient.view(-1, 7)
    return made @ WEIGHT, made.t() @ x, made.sum(0)


def group_norm_backward(gradient: torch.Tensor) -> torch.Tensor:
    """Of inputs, and a gradient that has to be contiguous."""
    x = torch.linspace(-1, 1, 42, dtype=torch.float64).view(2, 3, 7)
    found: torch.Tensor = _aten.native_group_norm_backward(
        gradient, x, x[:, :1, 0], x[:, 1:2, 0], None, 2, 3, 7, 1, [True, False, False]
    )[0]
    return found


def widen(module: fx.GraphModule) -> int:
    decisions = Decisions(fake_timer([1.0]))
    return pad_products(module, HOST, decisions, compiled=True, constant=False, copied_in=1)


@pytest.mark.parametrize("flat", [False, True])
def test_a_gradient_that_is_copied_is_asked_for_with_its_padding(flat: bool) -> None:
    gradient, x = torch.randn(*((6,) if flat else (2, 3)), 7, dtype=torch.float64), torch.randn(6, 4).double()
    one = recorded(backward, gradient, x)
    module = lift(one.recording)
    assert widen(module) == 2
    module.graph.lint()
    module.recompile()
    signature = pipeline._widened(one.signature, module)
    assert [tuple(each.shape) for each in signature.tensors] == [(*gradient.shape[:-1], 8), (6, 4)]
    padded = [node for node in module.graph.nodes if node.target is _aten.constant_pad_nd.default]
    assert [node.args[0].op for node in padded] == ["get_attr"], "the weight alone is padded by a copy"
    expected = backward(gradient, x)
    for found, wanted in zip(module(*signature.tensors), expected, strict=True):
        torch.testing.assert_close(found, wanted, check_stride=True)
    run, provenance = tracked(module, one.recording.program)
    recording = HostDevice().record(one.model, signature, (), {}, Rewritten("library", run, provenance))
    assert recording.program.inputs[0].sizes == (*gradient.shape[:-1], 8)
    issuer = Issuer(recording, [gradient, x])
    for call in recording.program.calls:
        issuer.issue(call.index)
    for found, wanted in zip(issuer.outputs(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("view", [False, True])
def test_kernels_that_do_not_look_at_strides_get_what_they_got(view: bool) -> None:
    """Where the gradient is computed: its other readers look at a part of the padded one."""

    def forward(x: torch.Tensor) -> Any:
        gradient = x.cos()
        return gradient.view(6, 7) @ WEIGHT, group_norm_backward(gradient.view(2, 3, 7) if view else gradient)

    counted = []
    one = recorded(forward, torch.randn(*((6, 7) if view else (2, 3, 7)), dtype=torch.float64))
    unchanged_by(lambda module: counted.append(pad(module)), one)
    assert counted == [1]


@pytest.mark.parametrize(
    ("forward", "sizes"),
    [
        (lambda g: (g @ WEIGHT, g), (6, 7)),  # it is returned
        (lambda g: (g @ WEIGHT, g.mul_(2)), (6, 7)),  # it is written
        (lambda g: (g @ WEIGHT, rows(g)), (6, 7)),  # somebody asks for row after row
        (lambda g: g.t() @ g, (7, 7)),  # its rows are odd as well
        (lambda g: g.view(-1, 7) @ WEIGHT, (2, 21)),  # the matrix has other rows
        (lambda g: g[:, :, 0] @ WEIGHT, (6, 7, 2)),  # or is a part
        (lambda g: (g.view(6, 7) @ WEIGHT, group_norm_backward(g)), (2, 3, 7)),  # kernels that do not look at strides
        (lambda g: (g @ WEIGHT, group_norm_backward(g.view(2, 3, 7))), (6, 7)),
        (lambda g: torch.complex(g, g).conj() @ WEIGHT.to(torch.complex128), (6, 7)),
    ],
)
def test_inputs_that_others_look_at_stay_as_they_are(forward: Any, sizes: tuple[int, ...]) -> None:
    one = recorded(forward, torch.randn(sizes, dtype=torch.float64))
    module = unchanged_by(widen, one)
    assert pipeline._widened(one.signature, module) is one.signature
