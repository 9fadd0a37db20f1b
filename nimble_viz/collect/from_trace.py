"""``from_trace``: make a Report of a trace that ``torch.profiler`` exported, of code as it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement
from nimble_core.ir.program import Origin
from nimble_core.utils.errors import InputError
from nimble_viz.collect.device_time import iteration_bound
from nimble_viz.collect.eager_timeline import eager_timeline
from nimble_viz.collect.iterations import one_iteration
from nimble_viz.collect.observed import observed
from nimble_viz.collect.overhead import overhead_profile
from nimble_viz.render.report import Report
from nimble_viz.report.data import Sampling
from nimble_viz.traces.chrome import MAX_BYTES, Recording, read_trace

__all__ = ["from_trace", "make_report"]


class _Profiler(Protocol):
    """What this needs of ``torch.profiler.profile``."""

    def export_chrome_trace(self, path: str) -> Any: ...


def from_trace(source: str | os.PathLike[str] | _Profiler, *, max_bytes: int = MAX_BYTES) -> Report:
    """Make a Report of a Chrome trace that ``torch.profiler`` exported, or of the profiler itself.

    It shows the iteration of median length: what lies between two steps of the profiler, else between two batches of a
    data loader, else between two steps of an optimizer, else all of it. It holds no engine and no time without the
    profiler. Source lines are known if the trace was recorded ``with_stack=True``. Needs neither torch nor a GPU, and
    runs nothing from the file.

    Args:
        source: path of the trace (``*.json``, ``*.json.gz``), or a ``torch.profiler.profile`` that has stopped.
        max_bytes: refuse a file that is larger, unpacked.

    Raises:
        ReportFileError: no trace, damaged, without operators, or too large.
        InputError: a profiler whose trace was exported before, or that has none.
        OSError: the file cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        recording, subject = read_trace(source, max_bytes=max_bytes), Path(source).name
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            try:
                source.export_chrome_trace(str(path))
            except (AssertionError, AttributeError, RuntimeError) as error:  # Kineto gives its trace away once
                if "already saved" in str(error):
                    raise InputError(
                        "the trace of this profiler has been exported before", fix="give that file to from_trace"
                    ) from error
                raise InputError(
                    f"a {type(source).__name__} gave no trace: {error}", fix="give a torch.profiler that has stopped"
                ) from error
            recording, subject = read_trace(path, max_bytes=max_bytes), "torch.profiler"
    settings = dict(recording.settings)
    where = Environment(
        device=recording.device,
        device_name=recording.device_name,
        host_cpu="",
        cores=0,
        threads=0,
        torch="",
        python="",
        system="",
        cuda=settings.pop("cuda", ""),
        settings=tuple(settings.items()),
    )
    return make_report(recording, where, subject=subject)


def make_report(
    recording: Recording,
    where: Environment,
    *,
    subject: str,
    iteration: str = "",
    seen: int = 0,
    timed: Measurement | None = None,
    loader_ns: float = -1.0,
    origins: Sequence[Origin] = (),
    warnings: Sequence[str] = (),
) -> Report:
    """Make a Report of what was recorded.

    Args:
        recording: what the profiler saw.
        where: the machine.
        subject: what was profiled.
        iteration: what lies between two ticks, in words.
        seen: iterations that went by.
        timed: iterations without the profiler.
        loader_ns: median wait for the data loader in those; -1 if not timed.
        origins: what one further iteration dispatched, in order, and where from.
        warnings: what the reader should know.

    Raises:
        ReportFileError: no operator ran.
    """
    trace, found = one_iteration(recording, iteration)
    what = observed(trace, recording.frames, origins, recording.backward_of)
    program, trace = what.program, what.trace
    profile = overhead_profile(what, timed.median_ns if timed else 0.0)
    if timed is None:
        profile = replace(profile, source=f"{profile.source}; without the profiler it was not timed")
    size = len(program.calls)
    return Report(
        model=subject,
        dtype="",
        batch=0,
        environment=where,
        program=program,
        graph=CallGraph(size, (), (), ()),
        costs=uniform_costs(size),
        critical_path=(),
        critical_path_ns=0.0,
        schedules=(),
        measurements=(timed,) if timed else (),
        overhead=profile,
        timelines=(eager_timeline(what, profile),),
        warnings=tuple(warnings),
        sampling=Sampling(
            subject=subject,
            iteration=found.what,
            seen=seen or len(found.windows),
            timed=len(timed.samples_ns) if timed else 0,
            profiled=len(found.windows),
            bound=iteration_bound(trace, profile),
            loader_ns=loader_ns,
        ),
    )
