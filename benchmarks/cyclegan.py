"""CycleGAN as Zhu et al. train it: two generators of nine residual blocks, two discriminators of patches, LSGAN losses.

Their step updates the generators, then the discriminators on images made before that update. The gradients of either
depend on weights from before the step alone, so one backward of the sum of all losses, in which judging a generator
leaves the discriminator's weights out, and one optimizer over all weights take the same step. Left out: the pool of
earlier images, from which discriminators also draw, and the learning rate's schedule.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import Training

WEIGHTS = (10.0, 10.0, 5.0, 5.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5)  # of two cycles, identities, generators; discriminators


class Residual(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = [nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width)]
        self.body = nn.Sequential(*half, nn.ReLU(), *copy.deepcopy(half))

    def forward(self, x: Tensor) -> Tensor:
        """(n, width, h, w) to the same shape."""
        return x + self.body(x)  # type: ignore[no-any-return]  # torch's modules return Any


def generator(width: int = 64, blocks: int = 9) -> nn.Sequential:
    """Image to image, of the same size."""
    layers: list[nn.Module] = [nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width), nn.ReLU()]
    for at in (width, 2 * width):
        layers += [nn.Conv2d(at, 2 * at, 3, 2, 1), nn.InstanceNorm2d(2 * at), nn.ReLU()]
    layers += [Residual(4 * width) for _ in range(blocks)]
    for at in (4 * width, 2 * width):
        layers += [nn.ConvTranspose2d(at, at // 2, 3, 2, 1, 1), nn.InstanceNorm2d(at // 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())


def discriminator(width: int = 64) -> nn.Sequential:
    """Image to a map of scores, each of a patch of 70 x 70."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for at, stride in ((width, 2), (2 * width, 2), (4 * width, 1)):
        layers += [nn.Conv2d(at, 2 * at, 4, stride, 1), nn.InstanceNorm2d(2 * at), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 1))


def judged(judge: nn.Sequential, x: Tensor) -> Tensor:
    """Scores of a discriminator whose weights get no gradient."""
    for layer in judge:
        if isinstance(layer, nn.Conv2d):
            assert layer.bias is not None
            weight, bias = layer.weight.detach(), layer.bias.detach()
            x = functional.conv2d(x, weight, bias, layer.stride, layer.padding)
        else:
            x = layer(x)
    return x


class CycleGAN(nn.Module):
    """From images of both kinds, (2 n, 3, h, w), to the ten losses that ``WEIGHTS`` weighs."""

    def __init__(self, width: int = 64, blocks: int = 9) -> None:
        super().__init__()
        self.to_b, self.to_a = generator(width, blocks), generator(width, blocks)
        self.judge_a, self.judge_b = discriminator(width), discriminator(width)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Losses, (10,)."""
        a, b = x.chunk(2)
        fake_b, fake_a = self.to_b(a), self.to_a(b)
        losses = [functional.l1_loss(self.to_a(fake_b), a), functional.l1_loss(self.to_b(fake_a), b)]
        losses += [functional.l1_loss(self.to_a(a), a), functional.l1_loss(self.to_b(b), b)]
        for judge, real, fake in ((self.judge_a, a, fake_a), (self.judge_b, b, fake_b)):
            losses.append((judged(judge, fake) - 1).square().mean())
            losses += [(judge(real) - 1).square().mean(), judge(fake.detach()).square().mean()]
        order = (0, 1, 2, 3, 4, 7, 5, 6, 8, 9)  # the generators' before the discriminators'
        return torch.stack([losses[at] for at in order])


def training(batch: int, device: str, tiny: bool) -> Training:
    """Make the step at 256 x 256, with Adam as published."""
    model = (CycleGAN(4, 1) if tiny else CycleGAN()).to(device).train()
    count, side = (1, 64) if tiny else (batch, 256)
    weights = torch.tensor(WEIGHTS, device=device)
    how: dict[str, Any] = {"fused": True} if device.startswith("cuda") else {}

    def data() -> tuple[Tensor, Tensor]:
        return torch.rand(2 * count, 3, side, side, device=device) * 2 - 1, weights

    adam = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999), **how)
    return Training(lambda: copy.deepcopy(model), lambda losses, weights: (losses * weights).sum(), adam, data)
