"""The models, batches and shapes that the paper (Nimble, NeurIPS 2020) measured, and what it published of them.

All in float32 without TF32. Training is without dropout and stochastic depth, so that losses can be compared.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks import cyclegan
from benchmarks.models import Build, Row, Training, images, same_masks, sgd, trained


def bert(batch: int, device: str, tiny: bool) -> Training:
    """BERT-base that tells texts of 128 tokens apart in two classes."""
    transformers: Any = importlib.import_module("transformers")
    same_masks()
    small = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **(small if tiny else {})
    )
    model = transformers.BertForSequenceClassification(config).to(device).train()
    count, tokens = (2, 16) if tiny else (batch, 128)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(config.vocab_size, (count, tokens), device=device)
        return ids, torch.randint(2, (count,), device=device)

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits, target)

    return Training(lambda: copy.deepcopy(model), loss, sgd(0.002, device), data)


def _row(name: str, title: str, build: Build, batch: int = 1) -> Row:
    return Row(name, title, "strict", batch, partial(build, batch), name.startswith("train-"))


_SMALL = {
    "train-resnet50": ("ResNet-50", trained("torchvision.resnet50", 0.004)),
    "train-mobilenet": ("MobileNetV2", trained("torchvision.mobilenet_v2", 0.01, dropout=0.0)),
    "train-efficientnet": (
        "EfficientNet-B0",
        trained("torchvision.efficientnet_b0", 0.01, dropout=0.0, stochastic_depth_prob=0.0),
    ),
}
_TABLE = (
    _row("resnet50", "ResNet-50", images("torchvision.resnet50")),
    _row("resnet101", "ResNet-101", images("torchvision.resnet101")),
    _row("inception-v3", "Inception-v3", images("torchvision.inception_v3", 299, 299, init_weights=True)),
    _row("mobilenet", "MobileNetV2", images("torchvision.mobilenet_v2")),
    _row("efficientnet-b0", "EfficientNet-B0", images("torchvision.efficientnet_b0")),
    _row("efficientnet-b5", "EfficientNet-B5", images("torchvision.efficientnet_b5", 456)),
    _row("nasnet-mobile", "NASNet-A mobile", images("cells.nasnet_a_mobile")),
    _row("nasnet-large", "NASNet-A large", images("timm.nasnetalarge", 331)),
    _row("darts", "DARTS", images("cells.darts")),
    _row("amoebanet", "AmoebaNet-A", images("cells.amoebanet_a", 331)),
    *(_row(f"{name}-b{batch}", *about, batch) for name, about in _SMALL.items() for batch in (32, 64, 128)),
    _row("train-bert", "BERT-base 128", bert, 32),
    _row("train-resnet50-imagenet", "ResNet-50 ImageNet", trained("torchvision.resnet50", 0.004, 224, 1000), 64),
    _row("train-cyclegan", "CycleGAN", cyclegan.training),
)
ROWS: Mapping[str, Row] = {row.name: row for row in _TABLE}
LARGE = ("train-bert", "train-resnet50-imagenet", "train-cyclegan")
PUBLISHED: Mapping[str, float] = {
    "resnet50": 4.32, "resnet101": 4.59, "inception-v3": 5.16, "nasnet-mobile": 22.34, "nasnet-large": 5.49,
    "mobilenet": 9.99, "efficientnet-b0": 9.03, "efficientnet-b5": 3.82,
    "train-resnet50-b32": 1.90, "train-resnet50-b64": 1.54, "train-resnet50-b128": 1.33,
    "train-mobilenet-b32": 3.61, "train-mobilenet-b64": 3.10, "train-mobilenet-b128": 2.28,
    "train-efficientnet-b32": 3.32, "train-efficientnet-b64": 2.72, "train-efficientnet-b128": 1.88,
}  # fmt: skip
"""Speed over eager on a V100."""
STREAMS_ALONE, PREPARE_MEAN_S, PREPARE_MOST_S = 1.88, 0.35, 1.07
BASELINES = {
    "TensorRT": ("up to 2.81x over it, inference", "TensorRT is not measured here"),
    "TVM": ("up to 1.70x over it after a day of tuning; slower on MobileNetV2", "TVM is not measured here"),
    "Caffe2": ("named, no ratio given", "not maintained any more"),
    "TFRT": ("discussed, no ratio given", "not measured here"),
    "XLA": ("asked for by a reviewer, no ratio given", "way `xla` of the runner: ResNet-50 in float16"),
}
