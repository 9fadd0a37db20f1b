"""Networks of one denoising step: DiT-B/2 (Peebles and Xie, 2022) and the U-Net of DDPM (Ho et al., 2020).

Weights are random, none zero: as trained, every part moves the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sinusoids(steps: Tensor, width: int) -> Tensor:
    """Return (batch, width) features of (batch,) time steps."""
    rates = torch.exp(torch.arange(width // 2, device=steps.device) * (-math.log(10_000.0) / (width // 2)))
    angles = steps[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], 1)


class TimeEmbedding(nn.Sequential):
    """From (batch,) time steps to (batch, width)."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width))
        self.features = features

    def forward(self, steps: Tensor) -> Tensor:
        """Embed."""
        return super().forward(sinusoids(steps, self.features).to(self[0].weight.dtype))


class DiTBlock(nn.Module):
    """Attention and an MLP, shifted, scaled and gated by what the step is conditioned on."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.condition = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """``x`` is (batch, tokens, width), ``condition`` (batch, width)."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.condition(F.silu(condition))[:, None].chunk(6, 2)
        heads = self.qkv(_modulated(x, shift, scale)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).flatten(2)
        x = x + gate * self.out(mixed)
        return x + gate_mlp * self.mlp(_modulated(x, shift_mlp, scale_mlp))


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class DiT(nn.Module):
    """Noise and variance of a latent image, given its class and time step."""

    def __init__(self, side: int = 32, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.places = nn.Parameter(torch.randn(1, (side // 2) ** 2, width) * 0.02)
        self.time, self.label = TimeEmbedding(256, width), nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.condition, self.out = nn.Linear(width, 2 * width), nn.Linear(width, 2 * 2 * 8)

    def forward(self, x: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        """``x`` is (batch, 4, side, side); returns (batch, 8, side, side)."""
        side = x.shape[-1] // 2
        condition = self.time(steps) + self.label(labels)
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, condition)
        x = self.out(_modulated(x, *self.condition(F.silu(condition))[:, None].chunk(2, 2)))
        return x.view(-1, side, side, 2, 2, 8).permute(0, 5, 1, 3, 2, 4).reshape(-1, 8, 2 * side, 2 * side)


class ResidualBlock(nn.Module):
    """Two convolutions around a time step's shift; attention over all places behind, if asked for."""

    def __init__(self, before: int, after: int, time: int, attends: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(32, before), nn.GroupNorm(32, after)))
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time, self.skip = nn.Linear(time, after), nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.norm = nn.GroupNorm(32, after) if attends else None
        self.qkv, self.out = (nn.Conv2d(after, n * after, 1) if attends else None for n in (3, 1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``x`` is (batch, before, height, width), ``time`` (batch, width)."""
        y = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        y = self.skip(x) + self.second(F.silu(self.norms[1](y)))
        if self.norm is None or self.qkv is None or self.out is None:
            return y
        heads = self.qkv(self.norm(y)).flatten(2).transpose(1, 2)[:, None].chunk(3, 3)
        return y + self.out(F.scaled_dot_product_attention(*heads)[:, 0].transpose(1, 2).reshape(y.shape))


class UNet(nn.Module):
    """Noise of an image, given its time step: levels of half the side each, with attention where ``attends`` says."""

    def __init__(self, base: int = 128, widths: Sequence[int] = (1, 2, 2, 2), attends: int = 1, depth: int = 2) -> None:
        super().__init__()
        time, levels = 4 * base, [base * width for width in widths]
        self.time, self.first = TimeEmbedding(base, time), nn.Conv2d(3, base, 3, padding=1)
        self.down, self.up, kept = nn.ModuleList(), nn.ModuleList(), [base]
        for level, (before, after) in enumerate(pairwise([base, *levels])):
            for number in range(depth):
                self.down.append(ResidualBlock(before if number == 0 else after, after, time, level == attends))
                kept.append(after)
            if level < len(levels) - 1:
                self.down.append(nn.Conv2d(after, after, 3, 2, 1))
                kept.append(after)
        self.middle = nn.ModuleList(ResidualBlock(after, after, time, number == 0) for number in range(2))
        for level, width in reversed(list(enumerate(levels))):
            for _ in range(depth + 1):
                self.up.append(ResidualBlock(after + kept.pop(), width, time, level == attends))
                after = width
            if level:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(32, base), nn.Conv2d(base, 3, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """``x`` is (batch, 3, side, side), and so is the result."""
        time = self.time(steps)
        x = self.first(x)
        kept = [x]
        for block in self.down:
            x = block(x, time) if isinstance(block, ResidualBlock) else block(x)
            kept.append(x)
        for block in self.middle:
            x = block(x, time)
        for block in self.up:
            if isinstance(block, ResidualBlock):
                x = block(torch.cat([x, kept.pop()], 1), time)
            else:
                x = block(F.interpolate(x, scale_factor=2.0))
        return self.last(F.silu(self.norm(x)))
