"""Fixtures of tests about kernels that bypass the dispatcher."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.launched_kernels import Compiled, InductorKernel, UserKernel, work


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(6, 6, generator=generator) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Compiled(work, x, weight)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both launchers where ``launches_seen`` looks for them."""
    heuristics: Any = ModuleType("torch._inductor.runtime.triton_heuristics")
    heuristics.CachingAutotuner = InductorKernel
    jit: Any = ModuleType("triton.runtime.jit")
    jit.JITFunction = UserKernel
    monkeypatch.setitem(sys.modules, heuristics.__name__, heuristics)
    monkeypatch.setitem(sys.modules, jit.__name__, jit)
    run, launch = InductorKernel.run, UserKernel.run
    yield
    assert InductorKernel.run is run
    assert UserKernel.run is launch
