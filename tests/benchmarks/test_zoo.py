"""The benchmarks' models load: seeded, in every dtype and batch, with outputs that mean something."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks.zoo import CASES, DTYPES, SUITE, ZOO, load, precision
from nimble_core import Nimble, Options

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "policies-h200.json"

WRITTEN_HERE = ["NASNet-A mobile", "DARTS"]
TRANSFORMERS = ["GPT-2 128", "T5-small 128+32", "ViT-B/16"]
TORCHVISION = ["ResNet-101", "EfficientNet-B5", "DenseNet-121"]


def tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def other(value: torch.Tensor) -> torch.Tensor:
    """Different values of the same kind."""
    return torch.randn_like(value) if value.is_floating_point() else torch.randint_like(value, 1000)


def test_committed_results_are_of_the_models_scheduling_is_measured_on() -> None:
    measured = json.loads(RESULTS.read_text())["models"]
    assert set(measured) == {f"{name}, {dtype}" for name in ZOO for dtype in CASES}
    assert ZOO.keys() < SUITE.keys()
    assert set(CASES) < set(DTYPES)


@pytest.mark.parametrize("name", [*WRITTEN_HERE, *TRANSFORMERS, *TORCHVISION])
def test_outputs_are_finite_move_with_the_input_and_have_the_batch(name: str) -> None:
    if name in TORCHVISION:
        pytest.importorskip("torchvision", reason="torchvision's models need it")
    model, args, kwargs = load(name, "float32", batch=2, device="cpu")
    assert not model.training
    assert {value.shape[0] for value in tensors((args, kwargs))} == {2}
    with torch.inference_mode():
        outputs = tensors(dict(enumerate(pytree.tree_leaves(model(*args, **kwargs)))))
        moved = tensors(pytree.tree_leaves(model(*map(other, args), **{of: other(v) for of, v in kwargs.items()})))
    assert outputs
    for output, after in zip(outputs, moved, strict=True):
        assert output.shape[0] == 2
        assert output.isfinite().all()
        assert (output - after).norm() > 0.05 * output.norm()
        assert (output[0] - output[1]).norm() > 0.05 * output[0].norm()


def test_an_encoder_and_decoder_replay_as_in_eager() -> None:
    model, args, kwargs = load("T5-small 128+32", "float32", device="cpu")
    with torch.inference_mode():
        expected = model(*args, **kwargs)
    with closing(Nimble(model, Options(tune="off")).prepare(*args, **kwargs)) as net:
        result = net(*args, **kwargs)
    assert type(result) is type(expected)
    assert result.last_hidden_state.shape == (1, 32, model.config.d_model)
    assert result.encoder_last_hidden_state.shape == (1, 128, model.config.d_model)
    for ours, theirs in zip(result.values(), expected.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_float16_is_float32_rounded_in_channels_last_and_moves_by_far_more_than_rounding() -> None:
    single, (image,), _ = load("DARTS", "float32", device="cpu")
    half, (rounded,), _ = load("DARTS", "float16", device="cpu")
    assert image.is_contiguous()
    for ours, theirs in zip(half.state_dict().values(), single.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs.half() if theirs.is_floating_point() else theirs)
        assert ours.dim() != 4 or ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(rounded, image.half())
    assert rounded.is_contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        image, rounded = image[..., :64, :64], rounded[..., :64, :64]  # convolutions in float16 are slow on a CPU
        expected, moved = single(image), single(torch.randn_like(image))
        error = (half(rounded).float() - expected).norm() / expected.norm()
    assert error < 0.005
    assert (moved - expected).norm() / expected.norm() > 20 * error


@pytest.mark.parametrize("before", ["float32", "tf32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_holds_inside_and_comes_back(dtype: str, before: str) -> None:
    with precision(before):
        with suppress(RuntimeError), precision(dtype):
            assert torch.backends.cuda.matmul.allow_tf32 is (dtype == "tf32")
            raise RuntimeError
        assert torch.backends.cuda.matmul.allow_tf32 is (before == "tf32")
