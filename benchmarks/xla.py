"""ResNet-50 in JAX, for XLA: the shapes, dtype and layout (NHWC) that PyTorch's row has; weights are random.

BatchNorm is folded into the convolutions, and weights are constants of the compiled program, as freezing makes them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

_STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))  # blocks, width, stride of the first block


def resnet50(batch: int, size: int, dtype: str, device: str) -> tuple[Callable[[], Any], Callable[[], object]]:
    """Return a call that starts the network on an image of its own, and one that waits for the last result.

    Raises ImportError where there is no JAX, RuntimeError where that does not see the GPU.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch's memory is on the same GPU
    jax: Any = importlib.import_module("jax")
    if device == "cuda" and jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX runs on {jax.default_backend()}")
    kind = dtype if dtype in ("float16", "bfloat16") else "float32"
    image = jax.random.normal(jax.random.key(1), (batch, size, size, 3), kind)
    forward = jax.jit(_network(jax, kind))
    last = [forward(image)]

    def run() -> Any:
        last[0] = forward(image)
        return last[0]

    return run, lambda: last[0].block_until_ready()


def _network(jax: Any, kind: str) -> Callable[[Any], Any]:
    keys, lax, relu = iter(jax.random.split(jax.random.key(0), 64)), jax.lax, jax.nn.relu

    def conv(inputs: int, outputs: int, side: int, stride: int = 1) -> Callable[[Any], Any]:
        # Output channels first, which is what cuDNN takes for NHWC.
        drawn = jax.random.normal(next(keys), (outputs, side, side, inputs)) * (2 / (inputs * side * side)) ** 0.5
        kernel, bias = drawn.astype(kind), jax.numpy.zeros(outputs, kind)
        how = {"window_strides": (stride, stride), "padding": [(side // 2, side // 2)] * 2}
        names = ("NHWC", "OHWI", "NHWC")
        return lambda x: lax.conv_general_dilated(x, kernel, dimension_numbers=names, **how) + bias

    blocks, inputs = [], 64
    for count, width, first in _STAGES:
        for stride in [first] + [1] * (count - 1):
            narrow, middle, wide = conv(inputs, width, 1), conv(width, width, 3, stride), conv(width, 4 * width, 1)
            shortcut = conv(inputs, 4 * width, 1, stride) if inputs != 4 * width else lambda x: x
            blocks.append((narrow, middle, wide, shortcut))
            inputs = 4 * width
    stem, dense = conv(3, 64, 7, 2), (jax.random.normal(next(keys), (inputs, 1000)) / inputs**0.5).astype(kind)

    def forward(x: Any) -> Any:
        least, edges = jax.numpy.array(-jax.numpy.inf, kind), ((0, 0), (1, 1), (1, 1), (0, 0))
        x = lax.reduce_window(relu(stem(x)), least, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), edges)
        for narrow, middle, wide, shortcut in blocks:
            x = relu(wide(relu(middle(relu(narrow(x))))) + shortcut(x))
        return x.mean((1, 2)) @ dense

    return forward
