"""Models on a GPU, and their one-stream and multi-stream captures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nimble_core import Options
from nimble_core.autotune.capture_pipeline import capture, device_for, observe, schedule_by
from nimble_core.runtime.cuda.executable import CudaExecutable
from nimble_core.runtime.cuda.graph_nodes import read_graph
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static

UNFUSED = Options(fuse="none")
"""Eager's own kernels: their replays give eager's bits."""


class Wide(nn.Module):
    """Branches that may run side by side, then one that needs them all."""

    def __init__(self, branches: int = 6, channels: int = 8) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
            for _ in range(branches)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1).mean((2, 3))


class Towers(nn.Module):
    """Independent branches whose results are small beside what they need on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x).mean((2, 3)) for branch in self.branches], 1)


def inputs(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 8, 32, 32, device="cuda")


def plans(model: Any, *args: Any, max_streams: int | None = None, **kwargs: Any) -> Any:
    signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    device.warm_up(model, args, kwargs)
    recorded = record_static(device, model, signature, strict=True, step=Stopwatch())
    single = capture(device, recorded, schedule_by(recorded, "single", None, 1))
    costs = observe(device, recorded, single).costs
    multi = capture(device, recorded, schedule_by(recorded, "nimble", costs, max_streams))
    return device, recorded, single, multi, costs


def graph_of(executable: CudaExecutable) -> RawGraph:
    """Read the graph that an executable replays, but for the nodes that copy its inputs."""
    assert executable.graph is not None
    found, known = read_graph(executable.graph.raw_cuda_graph()), set(executable.raw.nodes)
    place = {at: new for new, at in enumerate(at for at, node in enumerate(found.nodes) if node in known)}
    edges, ahead = (
        tuple((place[tail], place[head]) for tail, head in some if tail in place and head in place)
        for some in (found.edges, found.ahead)
    )
    nodes, kinds = (tuple(some[at] for at in place) for some in (found.nodes, found.kinds))
    return RawGraph(nodes, kinds, edges, ahead=ahead)
