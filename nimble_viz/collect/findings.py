"""What a comparison has found out so far, and the Report that it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nimble_core.algorithms.critical_path import critical_path
from nimble_core.ir.call_graph import predecessors
from nimble_core.ir.candidates import Candidate, EqualityCheck, simplicity
from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement, not_slower
from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Timeline
from nimble_core.profiling.machine import finish
from nimble_core.tracing.recorded import Recorded
from nimble_viz.collect.flops import count_work
from nimble_viz.collect.sources import read_sources
from nimble_viz.render.report import Report
from nimble_viz.report.data import EngineMemory, Memory, OverheadProfile, PeerResult, PrepareStep

__all__ = ["Findings", "dtype_of", "name_of"]


@dataclass
class Findings:
    """What is known so far; ``report`` makes a Report of it at any time once the model is recorded.

    ``recorded`` is the model as eager runs it, ``replayed`` perhaps with other kernels.
    """

    model: str
    dtype: str
    environment: Environment
    recorded: Recorded | None = None
    replayed: Recorded | None = None
    schedules: dict[str, Schedule] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    costs: Costs | None = None
    measurements: dict[str, Measurement] = field(default_factory=dict)
    checks: list[EqualityCheck] = field(default_factory=list)
    prepared: tuple[PrepareStep, ...] = ()
    overhead: OverheadProfile | None = None
    timelines: list[Timeline] = field(default_factory=list)
    engine_bytes: dict[str, int] = field(default_factory=dict)
    planned: list[EngineMemory] = field(default_factory=list)
    eager_peak: int = 0
    compare_peak: int = 0
    peers: tuple[PeerResult, ...] = ()
    warnings: list[str] = field(default_factory=list)
    interrupted: bool = False
    others: list[int] = field(default_factory=list)
    processors: Multiprocessors | None = None

    def is_replay(self, name: str) -> bool:
        """Say whether an engine runs the calls of the report's program, not others for comparison."""
        assert self.replayed is not None
        fuse = self.replayed.recording.program.fuse
        return {one.name: one.fuse for one in self.candidates}.get(name, fuse) == fuse

    def report(self) -> Report:
        """Return what is known, as one value."""
        assert self.recorded is not None
        assert self.replayed is not None
        eager, own, inputs = self.recorded.recording, self.replayed.recording, self.recorded.signature.tensors
        graph, program = self.replayed.graph, own.program
        measured = self.costs is not None and self.costs.source != "uniform"
        costs = self.costs or uniform_costs(graph.size)
        length, path = critical_path(predecessors(graph, meg=True), costs.ns)
        chosen = self._chosen()
        replaced = program.fuse != "none"
        return Report(
            model=self.model,
            dtype=self.dtype,
            batch=int(inputs[0].shape[0]) if inputs[0].dim() else 0,
            environment=finish(self.environment, self.others),
            program=program,
            graph=graph,
            costs=costs,
            critical_path=tuple(path),
            critical_path_ns=float(length) if measured else 0.0,
            schedules=tuple(self.schedules.values()),
            measurements=tuple(self.measurements.values()),
            checks=tuple(self.checks),
            preparation=self.prepared,
            overhead=self.overhead,
            timelines=tuple(self._with_time(line) for line in self.timelines),
            memory=Memory(self.eager_peak, tuple(self.engine_bytes.items()), self.compare_peak, tuple(self.planned)),
            chosen=chosen,
            candidates=tuple(replace(one, chosen=one.name == chosen) for one in self.candidates),
            eager=eager.program if replaced else None,
            peers=self.peers,
            warnings=(*self.warnings, *(f"{one.name}: {one.note}" for one in self.peers if one.note)),
            complete=not self.interrupted,
            work=count_work(own, eager if replaced else None, self.processors),
            sources=read_sources(eager.program.calls),
        )

    def _chosen(self) -> str:
        """Return what preparation chose; if another right plan is decidedly faster here, the simplest of the best."""
        differ = {check.name for check in self.checks if check.differs}
        right = {
            name: taken for name, taken in self.measurements.items() if name in self.schedules and name not in differ
        }
        close = not_slower(right)
        prepared = next((one.name for one in self.candidates if one.chosen), "")
        if prepared in close or not close:
            return prepared if prepared in close else ""
        found = {one.name: one for one in self.candidates}
        return min(close, key=lambda name: simplicity(found[name]) if name in found else (True,))

    def _with_time(self, line: Timeline) -> Timeline:
        taken = self.measurements.get(line.run)
        return replace(line, unprofiled_ns=taken.median_ns) if taken else line


def name_of(model: Callable[..., Any]) -> str:
    """Return the class of a module, or the name of a function."""
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")


def dtype_of(model: Callable[..., Any], inputs: Sequence[torch.Tensor], cast: torch.dtype | None) -> str:
    """Return the floating-point type of most weights and inputs, and what they are cast to."""
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    elements: Counter[str] = Counter()
    for tensor in [*parameters, *inputs]:
        if tensor.is_floating_point():
            elements[_short(tensor.dtype)] += tensor.numel()
    held = elements.most_common(1)[0][0] if elements else _short(inputs[0].dtype)
    return held if cast is None else f"{held} under {_short(cast)} autocast"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
