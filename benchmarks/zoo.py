"""The models the CUDA benchmarks measure: random weights, published sizes, outputs that mean something.

Batch normalisation is calibrated on random batches, so that outputs are finite and move with the input: with fresh
weights GoogLeNet's and Inception's hardly do, and HRNet's and EfficientNet's are NaN in float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["CASES", "ZOO", "load"]

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _torchvision(name: str, size: int = 224, **options: Any) -> Callable[[], Example]:
    def make() -> Example:
        import torchvision

        return _calibrated(getattr(torchvision.models, name)(weights=None, **options), size)

    return make


def _timm(name: str, size: int = 224) -> Callable[[], Example]:
    def make() -> Example:
        import timm

        return _calibrated(timm.create_model(name), size)

    return make


def _example(name: str) -> Callable[[], Example]:
    def make() -> Example:
        from examples import models

        model, args, kwargs = getattr(models, name)()
        return model, args, kwargs

    return make


def _calibrated(model: nn.Module, size: int) -> Example:
    model = model.cuda().train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
            module.reset_running_stats()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(2, 3, size, size, device="cuda"))
    return model.eval(), (torch.randn(1, 3, size, size, device="cuda"),), {}


ZOO: dict[str, Callable[[], Example]] = {
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

CASES = ("float32", "float16")
"""float32 with torch's defaults (TF32 in convolutions, not in matmul), contiguous; float16 in channels_last."""


def load(name: str, dtype: str) -> Example:
    """Model and inputs on the GPU, seeded, in evaluation mode."""
    torch.manual_seed(0)
    model, args, kwargs = ZOO[name]()
    model = model.cuda().eval()

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.cuda()
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
