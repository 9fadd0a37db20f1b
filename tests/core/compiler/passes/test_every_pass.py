"""Every rewrite, alone and in any sequence, computes what eager computes and accounts for every eager call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.compiler.passes import pad_matmul
from nimble_core.compiler.passes.channels_last import keep_strides, to_channels_last
from nimble_core.compiler.passes.conv_algorithms import choose_forms
from nimble_core.compiler.passes.crop_kernels import crop_kernels
from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.fold_batchnorm import affine_norms, fold_affine
from nimble_core.compiler.passes.gemv import row_products_as_sums
from nimble_core.compiler.passes.merge_siblings import merge_siblings
from nimble_core.compiler.passes.pad_matmul import pad_products
from nimble_core.compiler.passes.pooling import choose_pools
from nimble_core.compiler.passes.split_backward import split_backward
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.to_fx import lift
from tests.support.rewrite_models import (
    HOST,
    Drawn,
    claimed,
    drawn_models,
    eager_effects,
    effects,
    fake_timer,
    recorded,
    same,
    targets,
    unchanged_by,
)

Pass = Callable[[fx.GraphModule, Decisions], object]

PASSES: dict[str, Pass] = {
    "norms apart": lambda module, _: affine_norms(module),
    "norms folded": lambda module, _: (affine_norms(module), fold_affine(module)),
    "equal once": lambda module, _: share_equal(module),
    "channels last": lambda module, _: to_channels_last(module),
    "products merged": lambda module, made: merge_siblings(module, HOST, made, convolutions=False),
    "siblings merged": lambda module, made: merge_siblings(module, HOST, made, convolutions=True),
    "padded": lambda module, made: pad_products(module, HOST, made, compiled=True, constant=False),
    "padded once": lambda module, made: pad_products(module, HOST, made, compiled=False, constant=True),
    "rows as sums": lambda module, made: row_products_as_sums(module, HOST, made),
    "pools": lambda module, made: choose_pools(module, HOST, made),
    "forms": lambda module, made: choose_forms(module, HOST, made, channels_last=False, compiled=False),
    "compiled forms": lambda module, made: choose_forms(module, HOST, made, channels_last=True, compiled=True),
    "backward": lambda module, _: split_backward(module),
    "kernels cropped": lambda module, _: crop_kernels(module),
    "constants": lambda module, _: split_constants(module, {}),
}
FORGETFUL = {"constants"}
"""Passes after which some eager calls are done ahead of time."""


@pytest.fixture(autouse=True)
def _every_product_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_LEAST_SIZE", 1), ("_LEAST_WORK", 1), ("_WORTH", 0.0)):
        monkeypatch.setattr(pad_matmul, name, value)


@pytest.mark.parametrize("name", PASSES)
def test_any_model_computes_the_same_in_eagers_strides(name: str) -> None:
    @settings(max_examples=18)
    @given(drawn_models(), st.lists(st.floats(1, 2), min_size=1, max_size=3))
    def check(made: tuple[Drawn, tuple[torch.Tensor, ...]], times: list[float]) -> None:
        model, inputs = made
        one = recorded(model, *inputs)

        def rewrite(module: fx.GraphModule) -> None:
            PASSES[name](module, Decisions(fake_timer(times)))
            keep_strides(module)

        module = unchanged_by(rewrite, one, strides=True)
        if name not in FORGETFUL:
            assert claimed(module) == claimed(lift(one.recording))

    check()


LAYER, OTHER, CONV = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), nn.Conv2d(3, 4, 3).double()
NORM = nn.BatchNorm2d(4).double().eval()
ROWS, IMAGES = torch.randn(1, 4).double(), torch.randn(2, 3, 6, 6).double()


def input_written(x: torch.Tensor) -> Any:
    first = LAYER(x)
    x.mul_(2)
    return first, OTHER(x), x + 1


def weight_written(x: torch.Tensor) -> Any:
    y = x.tanh()
    first = LAYER(y), OTHER(y)
    OTHER.weight.data.mul_(2)
    return first, LAYER(y), OTHER(y)


def result_written(x: torch.Tensor) -> Any:
    y = LAYER(x)
    y[:, 0] = 1
    return y, OTHER(x)


def images_written(x: torch.Tensor) -> Any:
    first = CONV(x)
    x.mul_(3)
    return NORM(first).relu(), CONV(x), x


def images_written_through_a_view(x: torch.Tensor) -> Any:
    y = CONV(x).relu()
    y.view(2, -1)[0] = 0
    return y * 2, nn.functional.max_pool2d(y, 2)


def statistics_written(x: torch.Tensor) -> Any:
    y = NORM(CONV(x))
    NORM.running_mean.add_(1)
    return y.relu(), NORM(CONV(x))


WRITING = [input_written, weight_written, result_written]
WRITING_IMAGES = [images_written, images_written_through_a_view, statistics_written]


@pytest.mark.parametrize("forward", [*WRITING, *WRITING_IMAGES])
def test_what_is_written_in_between_is_read_again(forward: Callable[..., Any]) -> None:
    one = recorded(forward, ROWS if forward in WRITING else IMAGES)
    for rewrite in PASSES.values():
        unchanged_by(lambda module, rewrite=rewrite: rewrite(module, Decisions(fake_timer([1.0]))), one)


def rewrite_all(module: fx.GraphModule, names: Sequence[str], decisions: Decisions) -> None:
    for name in names:
        PASSES[name](module, decisions)
        module.graph.lint()
    module.recompile()


SEQUENCES = st.lists(st.sampled_from([name for name in PASSES if name not in FORGETFUL]), max_size=6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_any_sequence_of_rewrites(dtype: torch.dtype, tolerance: float) -> None:
    @settings(max_examples=35)
    @given(drawn_models(dtype=dtype), SEQUENCES, st.lists(st.floats(1.0, 2.0), min_size=1, max_size=5))
    def check(made: tuple[Drawn, tuple[torch.Tensor, ...]], names: list[str], times: list[float]) -> None:
        model, inputs = made
        one = recorded(model, *inputs)
        wanted = eager_effects(one)
        module = lift(one.recording)
        before = claimed(module)
        rewrite_all(module, names, Decisions(fake_timer(times)))
        assert claimed(module) == before
        assert same(effects(module, one), wanted, tolerance)
        split_constants(module, {})
        module.recompile()
        for _ in range(2):
            assert same(effects(module, one), wanted, tolerance)

    check()


@settings(max_examples=30)
@given(drawn_models(dtype=torch.float32), SEQUENCES, st.lists(st.floats(1, 2), min_size=1, max_size=6))
def test_given_choices_make_the_same_graph_without_measuring(
    made: tuple[Drawn, tuple[torch.Tensor, ...]], names: list[str], times: list[float]
) -> None:
    model, inputs = made
    one = recorded(model, *inputs)
    first, measured = lift(one.recording), Decisions(fake_timer(times))
    rewrite_all(first, dict.fromkeys(names), measured)
    again, follow = lift(one.recording), Decisions(None, frozenset(measured.made))
    rewrite_all(again, dict.fromkeys(names), follow)
    assert set(follow.made) == set(measured.made)
    assert targets(again) == targets(first)
    assert str(again.graph) == str(first.graph)
