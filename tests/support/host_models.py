"""Models recorded on the host, ready to be captured under any schedule, and random programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from nimble_core.ir.call_graph import CallGraph, build_graph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.host.device import HostDevice, HostExecutable
from nimble_core.scheduling.memory_planner import MemoryPlan, plan_memory
from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.scheduling.policies import nimble, single
from nimble_core.scheduling.policies.base import plan_streams
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.signature import Signature
from tests.support.modules import Wide


class Prepared:
    """A model recorded on the host, ready to be captured under any schedule."""

    def __init__(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.model, self.device = model, HostDevice()
        self.signature = Signature(args, kwargs)
        self.recording: Recording = self.device.record(model, self.signature, args, kwargs)
        self.graph = build_graph(self.recording.program)
        self.costs = uniform_costs(self.graph.size)

    def layout(self, schedule: Schedule) -> Layout:
        return self.device.lay_out(self.recording, schedule)

    def plan(self, schedule: Schedule) -> MemoryPlan:
        return plan_memory(self.recording.program, schedule, place=self.layout(schedule).arena)

    def capture(self, schedule: Schedule | None = None) -> HostExecutable:
        schedule = schedule or single(self.graph, self.costs)
        check_schedule(self.graph, schedule, self.recording.program)
        return self.device.capture(self.recording, schedule, self.signature.tensors)

    def wide(self, streams: int | None = None) -> HostExecutable:
        return self.capture(nimble(self.graph, self.costs, max_streams=streams))


def eager(model: Callable[..., Any], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [tensor.clone() for tensor in flatten(model(*args), what="output")[0]]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


class Branches(Wide):
    """Independent branches over eight features."""

    def __init__(self, branches: int = 4) -> None:
        super().__init__(branches, 8)


CASES = ("wide", "convolutions", "encoder_fast_path", "views", "constants", "slices_written", "out_arguments")
"""Names of models whose outputs depend on their inputs alone."""


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    steps = []
    for index in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(["add", "mm", "in place", "slice", "slice in place", "norm", "clone", "empty"]))
        steps.append((kind, draw(st.integers(0, index)), draw(st.integers(0, index)), draw(st.integers(0, 2))))
    return steps


def interpreted(steps: Sequence[tuple[str, int, int, int]]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    weight = torch.linspace(-1, 1, 4)

    def model(x: torch.Tensor) -> list[torch.Tensor]:
        made = [x * 1]
        for kind, i, j, k in steps:
            a, b = made[i], made[j]
            if kind == "add":
                made.append(a + b)
            elif kind == "mm":
                made.append((a @ b).tanh())
            elif kind == "in place":
                made.append(a.mul_(0.5).add_(b.clone()))
            elif kind == "slice":
                made.append(torch.cat([a[:2], b[2:]]))
            elif kind == "slice in place":
                a[k : k + 2].copy_(b[1:3].clone())
                made.append(a.t())
            elif kind == "norm":
                made.append(nn.functional.layer_norm(a, (4,), weight))
            elif kind == "clone":
                made.append(b.clone().t().contiguous())
            else:
                made.append(torch.empty(4, 4).copy_(a).sub_(b))
        return [made[-1], made[len(made) // 2]]

    return model


def drawn_streams(graph: CallGraph, draw: random.Random, lanes: int, order: Sequence[int] | None = None) -> Schedule:
    """A safe schedule that puts each call on any of ``lanes`` streams."""
    draws = [draw.randrange(lanes) for _ in range(graph.size)]
    names = {lane: index for index, lane in enumerate(dict.fromkeys(draws))}
    return plan_streams(graph, [names[lane] for lane in draws], policy="drawn", order=order)


def poison(executable: HostExecutable) -> None:
    assert executable.arena is not None
    executable.arena.fill_(0xFF)
