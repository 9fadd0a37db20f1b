"""What the training benchmark trains: models with their loss, optimizer and synthetic data, sizes as published.

Data are random numbers made on the device: times do not depend on them, and no accuracy means anything. Every task
has two batches, which training takes in turn, so that its loss falls for a reason: it learns them by heart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

__all__ = ["BATCHES", "PRECISIONS", "TASKS", "Batch", "CycleGAN", "Task", "load"]

Batch = tuple[tuple[Tensor, ...], Tensor | None]
"""Positional inputs of the model, and targets; None where the loss needs none."""

PRECISIONS = ("float32", "tf32", "bf16")
"""float32 with torch's defaults (on CUDA TF32 in convolutions, not in matrix products); TF32 in both; autocast to
bfloat16. The first two are chosen by ``benchmarks.zoo.precision``."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, on what, and how.

    Args:
        model: in training mode.
        batches: what it is trained on, in turn.
        loss_fn: of output and targets; of the output alone where targets are None.
        optimizer: makes one of parameters and keyword arguments (``fused=True``, ``capturable=True``).
        autocast: type that forward and loss are cast to; None for none.
        outputs: ``Options.outputs`` of a drop-in: static ones, as those of peers with CUDA graphs are; or copies, the
            default, which are freed with the loss as eager's are, where they are a large part of the memory.
    """

    model: nn.Module
    batches: tuple[Batch, ...]
    loss_fn: Callable[..., Tensor]
    optimizer: Callable[..., Optimizer]
    autocast: torch.dtype | None = None
    outputs: Literal["static", "copy"] = "static"

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def copied(self) -> Task:
        """The same, around a model of its own with the same values."""
        return replace(self, model=copy.deepcopy(self.model))

    def in_float64(self) -> Task:
        """The same in float64, model and data, without autocast."""

        def wide(tensor: Tensor | None) -> Any:
            return tensor.double() if tensor is not None and tensor.is_floating_point() else tensor

        batches = tuple((tuple(map(wide, inputs)), wide(targets)) for inputs, targets in self.batches)
        return replace(self, model=copy.deepcopy(self.model).double(), batches=batches, autocast=None)

    def make_optimizer(self, **how: Any) -> Optimizer:
        """A fresh optimizer of the model's parameters."""
        return self.optimizer(self.model.parameters(), **how)

    def casting(self, *, cache: bool = True) -> AbstractContextManager[Any]:
        """Autocast, if it is asked for; ``cache``: whether casts of weights are kept until the end of the block."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=cache)

    def loss(self, inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        """Forward and loss, under autocast if it is asked for."""
        with self.casting():
            return self.loss_of(self.model(*inputs), targets)

    def loss_of(self, output: Any, targets: Tensor | None) -> Tensor:
        """The loss of an output."""
        return self.loss_fn(output) if targets is None else self.loss_fn(output, targets)


Factory = Callable[[int, torch.device], Task]
"""A task, from its batch size and the device to make it on."""

_COUNT = 2


def _coloured(batch: int, size: int, colours: torch.Tensor) -> tuple[tuple[torch.Tensor], torch.Tensor]:
    """Noise in the colour of its class: something to learn, so that losses move."""
    targets = torch.randint(len(colours), (batch,), device=colours.device)
    return (torch.randn(batch, 3, size, size, device=colours.device) + colours[targets],), targets


def _images(name: str, size: int, classes: int, rate: float) -> Factory:
    """A classifier of torchvision's, trained by SGD as their authors do."""

    def factory(batch: int, device: torch.device) -> Task:
        import torchvision

        colours = 2 * torch.randn(classes, 3, 1, 1, device=device)
        return Task(
            getattr(torchvision.models, name)(weights=None, num_classes=classes).to(device),
            tuple(_coloured(batch, size, colours) for _ in range(_COUNT)),
            functional.cross_entropy,
            partial(SGD, lr=rate, momentum=0.9, weight_decay=5e-4),
        )

    return factory


class _Words(nn.Module):
    """A language model of transformers that takes words and returns their logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=words).logits
        return logits


def _masked_words(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the words that were masked; the others are labelled -100."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _bert(batch: int, device: torch.device, tokens: int = 128, **sizes: int) -> Task:
    """BERT base, masked words (Devlin et al. 2019): 15% of them are masked and asked for."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**sizes)

    def data() -> Batch:
        words = torch.randint(1000, config.vocab_size, (batch, tokens), device=device)
        masked = torch.rand(batch, tokens, device=device) < 0.15
        return (words.masked_fill(masked, 103),), words.masked_fill(~masked, -100)

    batches = tuple(data() for _ in range(_COUNT))
    model = _Words(BertForMaskedLM(config)).to(device)
    return Task(model, batches, _masked_words, partial(AdamW, lr=2e-4), outputs="copy")


# -- CycleGAN ------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """A residual block of the generator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width), nn.ReLU(True),
            nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _normal(model: nn.Module) -> nn.Module:
    """Weights drawn with a deviation of 0.02, biases 0."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def generator(width: int = 64, blocks: int = 9) -> nn.Module:
    """From image to image of the same size, a multiple of four: Johnson et al.'s residual network, as CycleGAN has it.

    >>> sum(p.numel() for p in generator().parameters())
    11378179
    """
    layers: list[nn.Module] = [nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width), nn.ReLU(True)]
    for wide in (2 * width, 4 * width):
        layers += [nn.Conv2d(wide // 2, wide, 3, 2, 1), nn.InstanceNorm2d(wide), nn.ReLU(True)]
    layers += [_Block(4 * width) for _ in range(blocks)]
    for wide in (2 * width, width):
        up = nn.ConvTranspose2d(2 * wide, wide, 3, 2, 1, output_padding=1)
        layers += [up, nn.InstanceNorm2d(wide), nn.ReLU(True)]
    return _normal(nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh()))


def discriminator(width: int = 64) -> nn.Module:
    """Whether each patch of 70 pixels of an image is real (PatchGAN, Isola et al. 2017).

    >>> sum(p.numel() for p in discriminator().parameters())
    2764737
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    for narrow, wide, stride in ((width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 1)):
        layers += [nn.Conv2d(narrow, wide, 4, stride, 1), nn.InstanceNorm2d(wide), nn.LeakyReLU(0.2, True)]
    return _normal(nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 1)))


class CycleGAN(nn.Module):
    """Two generators and two discriminators, and all that one training step of both sides asks of them.

    Zhu, Park, Isola and Efros, "Unpaired Image-to-Image Translation using Cycle-Consistent Adversarial Networks", 2017:
    least-squares adversarial loss, cycles weighted 10, identity 5. There generators and discriminators are updated in
    turn; neither's gradients depend on the other's update of the same step (fakes are made before both), so here they
    are the gradients of one sum, in which generators are judged by discriminators that stand still, and these learn
    from fakes that do. What is left out is the pool of fifty earlier fakes that discriminators also learn from.

    Args:
        width: channels of the first layers; 64 as published.
        blocks: residual blocks; 9 as published for images of 256 pixels.
    """

    def __init__(self, width: int = 64, blocks: int = 9) -> None:
        super().__init__()
        self.to_b, self.to_a = generator(width, blocks), generator(width, blocks)
        self.judge_a, self.judge_b = discriminator(width), discriminator(width)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The terms of the loss, weighted: six of the generators, then two of the discriminators."""
        fake_b, fake_a = self.to_b(a), self.to_a(b)
        return torch.stack(
            [
                _real(_standing_still(self.judge_b, fake_b)),
                _real(_standing_still(self.judge_a, fake_a)),
                10 * functional.l1_loss(self.to_a(fake_b), a),
                10 * functional.l1_loss(self.to_b(fake_a), b),
                5 * functional.l1_loss(self.to_b(b), b),
                5 * functional.l1_loss(self.to_a(a), a),
                _told_apart(self.judge_a, a, fake_a.detach()),
                _told_apart(self.judge_b, b, fake_b.detach()),
            ]
        )


def _real(judged: Tensor) -> Tensor:
    return (judged - 1).square().mean()


def _standing_still(judge: nn.Module, image: Tensor) -> Tensor:
    weights = {name: one.detach() for name, one in judge.named_parameters()}
    judged: Tensor = torch.func.functional_call(judge, weights, (image,))
    return judged


def _told_apart(judge: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return (_real(judge(real)) + judge(fake).square().mean()) / 2


def _cyclegan(batch: int, device: torch.device, size: int = 256, **sizes: int) -> Task:
    def image() -> Tensor:
        return torch.rand(batch, 3, size, size, device=device) * 2 - 1

    batches = tuple(((image(), image()), None) for _ in range(_COUNT))
    return Task(CycleGAN(**sizes).to(device), batches, torch.sum, partial(Adam, lr=2e-4, betas=(0.5, 0.999)))


# -- all of them ---------------------------------------------------------------------------------------------------

TASKS: dict[str, Factory] = {
    "ResNet-18 CIFAR": _images("resnet18", 32, 10, 0.004),
    "ResNet-50 CIFAR": _images("resnet50", 32, 10, 0.004),
    "MobileNetV2 CIFAR": _images("mobilenet_v2", 32, 10, 0.01),
    "EfficientNet-B0 CIFAR": _images("efficientnet_b0", 32, 10, 0.01),
    "BERT-base 128": _bert,
    "ResNet-50 ImageNet": _images("resnet50", 224, 1000, 0.01),
    "CycleGAN 256": _cyclegan,
}
"""By name; those on images of CIFAR-10's shape end in ``CIFAR``."""

BATCHES: dict[str, tuple[int, ...]] = {
    **{name: (32, 64, 128) for name in TASKS if name.endswith("CIFAR")},
    "BERT-base 128": (32,),
    "ResNet-50 ImageNet": (64,),
    "CycleGAN 256": (1,),
}
"""Batch sizes that each is measured with."""


def load(name: str, dtype: str, batch: int, device: str | torch.device = "cuda") -> Task:
    """Model, data, loss and optimizer on ``device``, seeded, in training mode.

    Args:
        name: a key of :data:`TASKS`.
        dtype: one of :data:`PRECISIONS`. What reads ``"tf32"`` must also run under ``benchmarks.zoo.precision``.
        batch: examples in each batch.
        device: where.

    Raises:
        KeyError: no task has that name.
        ImportError: the package that its model comes from (``torchvision``, ``transformers``) is not installed.
    """
    torch.manual_seed(0)
    task = TASKS[name](batch, torch.device(device))
    task.model.train()
    return replace(task, autocast=torch.bfloat16) if dtype == "bf16" else task
