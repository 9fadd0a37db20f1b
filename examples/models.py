"""Models to compare: each factory returns ``(model, args, kwargs)``, as ``python -m nimble_viz compare`` expects.

Weights are random but seeded, and batch normalisation is calibrated, so that outputs are finite and move with the
inputs: an equality check on them means something. Everything is in float32 and evaluation mode, on the GPU if there
is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["bert", "bert_small", "branches", "clip", "inception_like", "resnet18", "resnet50"]

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def clip(batch: int = 1) -> Example:
    """CLIP ViT-B/32: an image tower beside a text tower, sizes as published. A wide graph.

    Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021.
    """
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    config = CLIPConfig()
    size, tokens = config.vision_config.image_size, config.text_config.max_position_embeddings
    words = torch.randint(1, config.text_config.vocab_size - 2, (batch, tokens))
    kwargs = {"input_ids": words, "pixel_values": torch.randn(batch, 3, size, size)}
    return _ready(CLIPModel(config), (), kwargs)


def bert(batch: int = 1, length: int = 128, layers: int = 12) -> Example:
    """BERT base: layers one after the other (twelve as published), sizes as published. A narrow graph.

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019.
    """
    return _bert(batch, length, num_hidden_layers=layers)


def bert_small(batch: int = 1, length: int = 64) -> Example:
    """BERT with four layers of width 256: small kernels, so that the framework's share is large."""
    return _bert(batch, length, num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024)


def resnet18(batch: int = 1, image: int = 224) -> Example:
    """ResNet-18. He et al., "Deep Residual Learning for Image Recognition", 2016."""
    return _vision(ResNet(BasicBlock, (2, 2, 2, 2)), batch, image)


def resnet50(batch: int = 1, image: int = 224) -> Example:
    """ResNet-50. He et al., "Deep Residual Learning for Image Recognition", 2016."""
    return _vision(ResNet(Bottleneck, (3, 4, 6, 3)), batch, image)


def inception_like(batch: int = 1, image: int = 64, blocks: int = 3) -> Example:
    """Make a stack of blocks with four parallel branches each: small, and as wide as GoogLeNet's."""
    return _vision(InceptionLike(blocks), batch, image)


def branches(blocks: int = 6, paths: int = 4, width: int = 64, batch: int = 4) -> Example:
    """Make a stack of blocks with parallel paths of small calls: the framework's share of the time is large."""
    torch.manual_seed(0)
    return _ready(Branches(*(Paths(paths, width) for _ in range(blocks))), (torch.randn(batch, width),), {})


class Branches(nn.Sequential):
    """Blocks of parallel paths, one after the other."""


class Paths(nn.Module):
    """Paths beside each other, each a layer norm, a product and a GELU; their mean is added to the input."""

    def __init__(self, paths: int, width: int) -> None:
        super().__init__()
        self.paths = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(paths)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to (batch, width)."""
        return x + torch.stack([path(x) for path in self.paths]).mean(0)


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch normalisation and, unless ``last``, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, last: bool = False) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs), *([] if last else [nn.ReLU()]))


class _Residual(nn.Module):
    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class BasicBlock(_Residual):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        body = nn.Sequential(ConvNorm(inputs, width, 3, stride), ConvNorm(width, width, 3, last=True))
        super().__init__(body, _shortcut(inputs, width, stride))


class Bottleneck(_Residual):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; four times as many channels come out as ``width``."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        outputs = width * self.expansion
        body = nn.Sequential(
            ConvNorm(inputs, width, 1), ConvNorm(width, width, 3, stride), ConvNorm(width, outputs, 1, last=True)
        )
        super().__init__(body, _shortcut(inputs, outputs, stride))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 and inputs == outputs else ConvNorm(inputs, outputs, 1, stride, last=True)


class ResNet(nn.Module):
    """The residual network for images of the paper.

    Args:
        block: kind of block.
        depths: blocks per stage.
        classes: outputs.
    """

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, 64, 7, 2), nn.MaxPool2d(3, 2, padding=1))
        stages, inputs = [], 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for index in range(depth):
                stages.append(block(inputs, width, 2 if stage and not index else 1))
                inputs = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images of shape (batch, 3, height, width)."""
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class InceptionBlock(nn.Module):
    """Four branches beside each other: 1x1, 3x3, 5x5, and pooling; their channels are concatenated."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                ConvNorm(inputs, width, 1),
                nn.Sequential(ConvNorm(inputs, width, 1), ConvNorm(width, width, 3)),
                nn.Sequential(ConvNorm(inputs, width, 1), ConvNorm(width, width, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, padding=1), ConvNorm(inputs, width, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, 4 · width, h, w)."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class InceptionLike(nn.Module):
    """A stem, ``blocks`` Inception blocks and a linear head."""

    def __init__(self, blocks: int, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = ConvNorm(3, width, 3, 2)
        self.blocks = nn.Sequential(*(InceptionBlock(4 * width if i else width, width) for i in range(blocks)))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes) from images of shape (batch, 3, height, width)."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def _bert(batch: int, length: int, **sizes: int) -> Example:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(**sizes)
    words = torch.randint(0, config.vocab_size, (batch, length))
    return _ready(BertModel(config), (), {"input_ids": words})


def _vision(model: nn.Module, batch: int, image: int) -> Example:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=generator)
            nn.init.zeros_(module.bias)
    _calibrate(model, torch.randn(8, 3, min(image, 64), min(image, 64), generator=generator))
    return _ready(model, (torch.randn(batch, 3, image, image, generator=generator),), {})


def _calibrate(model: nn.Module, x: Tensor) -> None:
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    for norm in norms:
        norm.momentum = 0.1


def _ready(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Example:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moved = {name: value.to(device) for name, value in kwargs.items()}
    return model.eval().to(device), tuple(value.to(device) for value in args), moved
