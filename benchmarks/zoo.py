"""The models the CUDA benchmarks measure: random weights, published sizes, outputs that mean something.

With fresh weights GoogLeNet's and Inception's outputs hardly move with the input, HRNet's and EfficientNet's are NaN in
float16, and the deeper a network the more it amplifies rounding. So batch normalisation is calibrated, see
:func:`calibrated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["CASES", "DTYPES", "SUITE", "ZOO", "Example", "calibrated", "load", "precision"]

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model and its arguments, positional and named."""

Factory = Callable[[int, torch.device], Example]
"""An example, from its batch size and the device to make it on."""


def _images(make: Callable[[], nn.Module], size: int = 224) -> Factory:
    """A classifier of square images, ``size`` pixels wide."""

    def factory(batch: int, device: torch.device) -> Example:
        model = calibrated(make().to(device), size)
        return model, (torch.randn(batch, 3, size, size, device=device),), {}

    return factory


def _torchvision(name: str, size: int = 224, **options: Any) -> Factory:
    def make() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, **options)

    return _images(make, size)


def _timm(name: str, size: int = 224) -> Factory:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name)

    return _images(make, size)


def _cells(name: str, size: int = 224) -> Factory:
    def make() -> nn.Module:
        from benchmarks import cells

        return getattr(cells, name)()

    return _images(make, size)


def _example(name: str) -> Factory:
    def make(batch: int, device: torch.device) -> Example:
        from examples import models

        return getattr(models, name)(batch)

    return make


def _gpt2(batch: int, device: torch.device, tokens: int = 128) -> Example:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(use_cache=False)
    return GPT2Model(config), (), {"input_ids": torch.randint(config.vocab_size, (batch, tokens))}


def _t5(batch: int, device: torch.device, tokens: int = 128, decoded: int = 32) -> Example:
    from transformers import T5Config, T5Model

    config = T5Config(use_cache=False)
    words = {"input_ids": tokens, "decoder_input_ids": decoded}
    return T5Model(config), (), {of: torch.randint(config.vocab_size, (batch, n)) for of, n in words.items()}


def _vit(batch: int, device: torch.device) -> Example:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig()
    return ViTModel(config), (), {"pixel_values": torch.randn(batch, 3, config.image_size, config.image_size)}


def calibrated(model: nn.Module, size: int) -> nn.Module:
    """The model, in evaluation mode, its batch normalisation's statistics taken from random images.

    Every normalisation shifts by 1, so that most of what it passes on is above ReLU's kink. Without that, deep random
    networks are chaotic (Yang et al., "A Mean Field Theory of Batch Normalization", 2019) and no check in float16 means
    anything: rounding moves ResNet-101's outputs by 9% of their norm and another input by 24%; so by 0.05% and 8%.

    Args:
        model: takes images. Changed in place.
        size: their height and width, pixels.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.ones_(module.bias)
            module.momentum = None
            module.reset_running_stats()
    device = next(model.parameters()).device
    model.train()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(2, 3, size, size, device=device))
    return model.eval()


ZOO: dict[str, Factory] = {
    "NASNet-A large": _timm("nasnetalarge", 331),
    "HRNet-W18": _timm("hrnet_w18"),
    "GoogLeNet": _torchvision("googlenet", init_weights=True, aux_logits=False),
    "Inception-v3": _torchvision("inception_v3", 299, init_weights=True),
    "ResNet-50": _torchvision("resnet50"),
    "MobileNetV2": _torchvision("mobilenet_v2"),
    "EfficientNet-B0": _torchvision("efficientnet_b0"),
    "BERT-base 128": _example("bert"),
    "CLIP ViT-B/32": _example("clip"),
}
"""What scheduling is measured on: wide graphs and narrow ones."""

SUITE: dict[str, Factory] = ZOO | {
    "NASNet-A mobile": _cells("nasnet_a_mobile"),
    "AmoebaNet-A": _cells("amoebanet_a", 331),
    "DARTS": _cells("darts"),
    "ResNet-101": _torchvision("resnet101"),
    "EfficientNet-B5": _torchvision("efficientnet_b5", 456),
    "DenseNet-121": _torchvision("densenet121"),
    "GPT-2 128": _gpt2,
    "T5-small 128+32": _t5,
    "ViT-B/16": _vit,
}
"""What inference is measured on, against peers: :data:`ZOO` and more."""

CASES = ("float32", "float16")
"""float32 with torch's defaults (TF32 in convolutions, not in matmul), contiguous; float16 in channels_last."""

DTYPES = ("float32", "tf32", "float16")
""":data:`CASES`, and float32 with TF32 in matmul, too, which :func:`precision` turns on."""


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """TF32 in matmul inside the block if ``dtype`` is ``"tf32"``, none otherwise; what was set before comes back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def load(name: str, dtype: str, batch: int = 1, device: str | torch.device = "cuda") -> Example:
    """Model and inputs on ``device``, seeded, in evaluation mode.

    Args:
        name: a key of :data:`SUITE`.
        dtype: one of :data:`DTYPES`. What reads ``"tf32"`` must also run under :func:`precision`.
        batch: images or token sequences in each input.
        device: where.

    Raises:
        KeyError: no model has that name.
        ImportError: the package it comes from (``torchvision``, ``timm``, ``transformers``) is not installed.
    """
    device = torch.device(device)
    torch.manual_seed(0)
    model, args, kwargs = SUITE[name](batch, device)
    model = model.to(device).eval()

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.to(device)
        if dtype == "float16" and value.is_floating_point():
            value = value.half()
            if value.dim() == 4:
                value = value.to(memory_format=torch.channels_last)
        return value

    if dtype == "float16":
        model = model.half()
        if any(isinstance(module, nn.Conv2d) for module in model.modules()):
            model = model.to(memory_format=torch.channels_last)
    return model, tuple(move(value) for value in args), {name: move(value) for name, value in kwargs.items()}
