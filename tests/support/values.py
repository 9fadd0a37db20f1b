"""Values that tests compare."""

from __future__ import annotations

from typing import Any

import torch

from nimble_core.tracing.pytree import flatten


def close(a: Any, b: Any) -> None:
    """Assert near tensors in equal places."""
    torch.testing.assert_close(flatten(a)[0], flatten(b)[0], rtol=1e-5, atol=1e-5, equal_nan=True)
