"""Modes of ours, with and without Dynamo in the process."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from nimble_core.torch_compat.dispatch import Mode

_PREPARES = """
import sys, torch
from torch import nn
from nimble_core import Nimble, Options
layers = [nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(8, 8)]
x = torch.randn(2, 4, 8)
Nimble(nn.Sequential(*layers).eval()).prepare(x)(x)
Nimble(nn.Sequential(*layers).eval(), Options(fuse="library")).prepare(x)(x)
Nimble(nn.Sequential(*layers).train()).prepare(x, training=True)(x).sum().backward()
assert "torch._dynamo" not in sys.modules
"""


def test_what_compiles_nothing_does_not_import_dynamo() -> None:
    subprocess.run([sys.executable, "-c", _PREPARES], check=True)


class _Counts(Mode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("imported", [False, True])
def test_a_mode_sees_each_call(imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if imported:
        import_module("torch._dynamo")
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with _Counts() as mode:
        torch.ones(2) + 1
    assert mode.calls == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_dynamo_does_not_look_into_a_mode() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with _Counts() as mode:
        compiled(torch.ones(2))
    assert mode.calls >= 2
    assert len(seen) == 1, "the function's own call, and none of the mode's"
