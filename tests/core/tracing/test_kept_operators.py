"""Operators under a name of our own: they do the same, and are recorded as what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nimble_core.tracing.kept_operators import eager_form, kept_form
from nimble_core.tracing.recorded import check_inputs
from nimble_core.tracing.recorder import record

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "run"),
    [
        (aten.relu.default, lambda func, x: func(x)),
        (aten.mul.Tensor, lambda func, x: func(x, x)),
        (aten.mul.Tensor, lambda func, x: func(x, 2.5)),
        (aten.add.Tensor, lambda func, x: func(x, 2, alpha=3)),
        (aten.clamp.Tensor, lambda func, x: func(x, None, x)),
        (aten.native_layer_norm.default, lambda func, x: func(x, [4], None, None, 1e-5)[0]),
        (aten.gelu.default, lambda func, x: func(x, approximate="tanh")),
        (aten._softmax.default, lambda func, x: func(x, -1, False)),
        (aten.sum.dim_IntList, lambda func, x: func(x, [1], True, dtype=torch.float64)),
        (aten.cat.default, lambda func, x: func([x, x], 1)),
    ],
)
def test_a_kept_operator_does_the_same_and_is_recorded_as_what_it_does(func: Any, run: Callable[..., Any]) -> None:
    x, seen = torch.randn(3, 4), []

    def kept(*args: Any, **kwargs: Any) -> Any:
        form = kept_form(func, args)
        assert form is not None
        seen.append(form)
        return form(*args, **kwargs)

    made = run(func, x)
    assert torch.equal(run(kept, x), made)
    with FakeTensorMode() as fake:
        found = run(kept, fake.from_tensor(x))
    assert seen[0] is seen[1]
    assert eager_form(seen[0]) is func
    assert eager_form(func) is None
    assert (found.shape, found.dtype) == (made.shape, made.dtype)

    def model(x: torch.Tensor) -> Any:
        return run(kept, x)

    with torch.no_grad():
        recording = record(model, check_inputs(model, (x,), {}), args=(x,), kwargs={})
    assert [call.operator for call in recording.program.calls] == [str(func)]


@pytest.mark.parametrize("func", [aten.relu_.default, aten.view.default, aten.rand.default, torch.relu])
def test_what_writes_shows_or_draws_is_not_kept(func: Any) -> None:
    assert kept_form(func, ()) is None
