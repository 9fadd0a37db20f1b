"""One decode step of a Llama, as servers capture it: a static cache that it reads in full, the position a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Size", "llama"]


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a Llama; by default those of Llama 3.2 1B, and a cache of 1024 tokens."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    inner: int = 8192
    length: int = 1024
    vocab: int = 128256


_linear = partial(nn.Linear, bias=False)
_norm = partial(nn.RMSNorm, eps=1e-5)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their position (RoPE)."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class _LlamaLayer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, kv_width = size.width, size.width // size.heads * size.kv_heads
        self.heads, self.kv_heads = size.heads, size.kv_heads
        self.before_attention, self.before_mlp = _norm(width), _norm(width)
        self.query, self.output = _linear(width, width), _linear(width, width)
        self.key, self.value = _linear(width, kv_width), _linear(width, kv_width)
        self.gate, self.up = _linear(width, size.inner), _linear(width, size.inner)
        self.down = _linear(size.inner, width)

    def forward(
        self, x: Tensor, cache: tuple[Tensor, Tensor], at: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(1, 1, heads, -1).transpose(1, 2)

        h = self.before_attention(x)
        query = _turned(split(self.query(h), self.heads), *turn)
        # Nothing is kept between calls, so that every call does the same.
        keys = torch.where(at, _turned(split(self.key(h), self.kv_heads), *turn), cache[0])
        values = torch.where(at, split(self.value(h), self.kv_heads), cache[1])
        each = self.heads // self.kv_heads
        attended = functional.scaled_dot_product_attention(
            query, keys.repeat_interleave(each, 1), values.repeat_interleave(each, 1), attn_mask=mask
        )
        x = x + self.output(attended.transpose(1, 2).reshape(x.shape))
        h = self.before_mlp(x)
        down: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + down


class Llama(nn.Module):
    """One decode step over a static key-value cache, which the step reads in full; the position is a tensor."""

    keys: Tensor
    values: Tensor
    frequencies: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        head = size.width // size.heads
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(_LlamaLayer(size) for _ in range(size.layers))
        self.norm = _norm(size.width)
        self.head = _linear(size.width, size.vocab)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.empty(size.layers, 1, size.kv_heads, size.length, head))
        self.register_buffer("frequencies", torch.empty(head // 2))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits of shape (1, 1, vocab) of the token that follows ``token``, which is at ``position``."""
        every = torch.arange(self.keys.shape[3], device=token.device)
        at, mask = (every == position).view(1, 1, -1, 1), (every <= position).view(1, 1, 1, -1)
        x = self.embedding(token)
        # As published models do: in bfloat16 angles of hundreds of radians are rounding alone, other in every way.
        angles = position.float() * self.frequencies.float()
        angles = torch.cat((angles, angles), -1)
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, (self.keys[index], self.values[index]), at, mask, turn)
        logits: Tensor = self.head(self.norm(x))
        return logits


@torch.no_grad()
def llama(size: Size, device: str) -> Llama:
    """Make a Llama whose weights are drawn on ``device``: 1.2 billion of them take long on the host."""
    with torch.device("meta"):
        model = Llama(size)
    model = model.to_empty(device=device).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.02) if weight.dim() > 1 else nn.init.ones_(weight)
    nn.init.normal_(model.keys)
    nn.init.normal_(model.values)
    model.frequencies.copy_(500000.0 ** -torch.linspace(0, 1, len(model.frequencies) + 1)[:-1])
    return model
