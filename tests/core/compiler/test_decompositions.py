"""Operators that eager calls whole compute the same taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nimble_core import Nimble, Options
from nimble_core.compiler.decompositions import taken_apart
from nimble_core.torch_compat.compiler import DECOMPOSITIONS

ATTENTION = torch.ops.aten._native_multi_head_attention.default
LAYER = torch.ops.aten._transformer_encoder_layer_fwd.default
BATCH, LENGTH, HEADS, WIDTH = 3, 5, 2, 8


def apart(operator: Any) -> Any:
    with taken_apart():
        return DECOMPOSITIONS.require()[operator]


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def mask_of(kind: int | None) -> Tensor | None:
    """One that hides some keys, but never all."""
    if kind is None:
        return None
    sizes = {0: (LENGTH, LENGTH), 1: (BATCH, LENGTH), 2: (BATCH, HEADS, LENGTH, LENGTH)}[kind]
    mask = torch.rand(sizes) > 0.5
    mask[..., 0] = False
    return mask


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from([None, 0, 1, 2]),
    weights=st.booleans(),
    average=st.booleans(),
    crossed=st.booleans(),
    seed=st.integers(0, 9),
)
def test_attention(kind: int | None, weights: bool, average: bool, crossed: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x = drawn(BATCH, LENGTH, WIDTH)
    inputs = (x, drawn(BATCH, LENGTH, WIDTH), drawn(BATCH, LENGTH, WIDTH)) if crossed else (x, x, x)
    parameters = (drawn(3 * WIDTH, WIDTH), drawn(3 * WIDTH), drawn(WIDTH, WIDTH), drawn(WIDTH))
    args = (*inputs, WIDTH, HEADS, *parameters, mask_of(kind), weights, average, kind)
    wanted, found = ATTENTION(*args), apart(ATTENTION)(*args)
    torch.testing.assert_close(found[0], wanted[0])
    assert (found[1] is None) == (not weights)
    if weights:
        torch.testing.assert_close(found[1], wanted[1])


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from([None, 0, 1]), gelu=st.booleans(), first=st.booleans(), seed=st.integers(0, 9))
def test_encoder_layers(kind: int | None, gelu: bool, first: bool, seed: int) -> None:
    torch.manual_seed(seed)
    attention = (drawn(3 * WIDTH, WIDTH), drawn(3 * WIDTH), drawn(WIDTH, WIDTH), drawn(WIDTH))
    forward = (drawn(16, WIDTH), drawn(16), drawn(WIDTH, 16), drawn(WIDTH))
    norms = [drawn(WIDTH) for _ in range(4)]
    args = (drawn(BATCH, LENGTH, WIDTH), WIDTH, HEADS, *attention, gelu, first, 1e-5, *norms, *forward)
    args = (*args, mask_of(kind), kind)
    torch.testing.assert_close(apart(LAYER)(*args), LAYER(*args))


def test_the_table_is_as_it_was_afterwards() -> None:
    before = dict(DECOMPOSITIONS.require())
    with taken_apart():
        assert ATTENTION in DECOMPOSITIONS.require()
    assert before == DECOMPOSITIONS.require()


@pytest.mark.slow
@pytest.mark.compiler
def test_an_encoder_of_torchs_is_compiled_as_a_whole() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 6, 16)
    net = Nimble(model, Options(fuse="inductor", policy="single")).prepare(x)
    calls = net.engines[0].recorded.recording.program.calls
    assert str(LAYER) not in {call.operator for call in calls}
    assert len(calls) > 10
    assert {index for call in calls for index in call.eager} == {0, 1}
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x))
