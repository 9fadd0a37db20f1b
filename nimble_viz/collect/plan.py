"""``plan``: the operator graph, streams and synchronisations of a model, on fake tensors: no kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Never

import torch

from nimble_core.algorithms.critical_path import critical_path
from nimble_core.autotune.capture_pipeline import schedule_by
from nimble_core.ir.call_graph import build_graph, predecessors
from nimble_core.ir.costs import uniform_costs
from nimble_core.profiling.machine import environment
from nimble_core.scheduling.options import Options, require_options
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.tracing.fake_run import dry_run
from nimble_core.tracing.recorded import Recorded, require_callable
from nimble_core.tracing.rng_state import random_state_kept, seed_otherwise
from nimble_core.tracing.signature import require_initialised
from nimble_core.tracing.static_check import check_static
from nimble_core.utils.errors import InputError
from nimble_core.utils.tracebacks import short_traceback
from nimble_viz.collect.comparison import dtype_of
from nimble_viz.collect.flops import count_work
from nimble_viz.collect.progress import Progress
from nimble_viz.collect.sources import pass_over_machinery, read_sources
from nimble_viz.collect.suggestions import keyword_inputs, original, refuse_unknown
from nimble_viz.render.report import Report

__all__ = ["plan"]

_TARGETS = ("cuda", "cpu")


@short_traceback
def plan(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    target: str | torch.device = "cuda",
    options: Options | None = None,
    **unknown: Never,
) -> Report:
    """Plan ``model`` for ``target`` without running it: operator graph, streams, synchronisation counts.

    No kernel runs and no memory is allocated for tensors, so models that are larger than this machine, or were built
    on ``meta``, can be planned. Every call counts the same, since nothing was measured. The model is left as it was.

    Args:
        model: module or function, on any device.
        args: positional inputs, on any device; their values do not matter.
        kwargs: keyword inputs, likewise.
        target: kind of device to plan for, ``"cuda"`` or ``"cpu"``; it need not be there.
        options: ``policy`` (``"auto"`` means ``"nimble"``) and ``max_streams``; the rest is about running.
        unknown: refused, with a word on what to write instead.

    Returns:
        A Report whose ``schedules`` are one stream and the policy's plan, without measurements.

    Raises:
        InputError: no model, no tensor among the inputs, another target, an option that is not available.
        NotStaticError: two runs of the model do not make the same calls.
        CaptureError: a call whose result depends on values, or whose shapes torch does not know without running it.
    """
    refuse_unknown(plan, unknown)
    pass_over_machinery()
    options = Options() if options is None else options
    require_options(options)
    device, progress = _device(target), Progress()
    require_callable(model := original(model))
    for name, parameter in model.named_parameters() if isinstance(model, torch.nn.Module) else ():
        require_initialised(name, parameter)
    recorded, warnings = _recorded(model, args, keyword_inputs(kwargs), device, progress)
    return _report(recorded, device, options, progress, warnings)


def _recorded(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, progress: Progress
) -> tuple[Recorded, tuple[str, ...]]:
    """Record the model on fake tensors twice, and require the same calls; return warnings too."""
    stand_in, warnings = _stand_in(device)
    with progress.step("record without running"):
        recording, signature = dry_run(model, args, kwargs, stand_in)
    host, drawn = torch.device("cpu"), recording.drawn
    with progress.step("record again"), random_state_kept(host, draws=drawn):
        seed_otherwise(host, (), drawn)
        check_static(recording, dry_run(model, args, kwargs, stand_in)[0])
    with progress.step("hazards"):
        graph = build_graph(replace(recording.program, device=device.type))
    return Recorded(model, signature, recording, graph), warnings


def _report(
    recorded: Recorded, device: torch.device, options: Options, progress: Progress, warnings: tuple[str, ...]
) -> Report:
    graph, tensors = recorded.graph, recorded.signature.tensors
    program = replace(recorded.recording.program, device=device.type)
    costs = uniform_costs(graph.size)
    schedules = {}
    with progress.step("schedule"):
        for policy in ("single", "nimble" if options.policy == "auto" else options.policy):
            schedule = schedule_by(recorded, policy, costs, options.max_streams)
            schedules[schedule.policy] = check_schedule(graph, schedule, program)
    _, path = critical_path(predecessors(graph, meg=True), costs.ns)
    where = replace(environment("cpu"), device=device.type, device_name=f"no device (planned for {device.type})")
    return Report(
        model=getattr(recorded.model, "__name__", type(recorded.model).__name__),
        dtype=dtype_of(recorded.model, tensors, None),
        batch=int(tensors[0].shape[0]) if tensors[0].dim() else 0,
        environment=where,
        program=program,
        graph=graph,
        costs=costs,
        critical_path=tuple(path),
        critical_path_ns=0.0,
        schedules=tuple(schedules.values()),
        measurements=(),
        preparation=progress.steps,
        chosen=tuple(schedules)[-1],
        warnings=warnings,
        work=count_work(recorded.recording, None, None),
        sources=read_sources(program.calls),
    )


def _device(target: Any) -> torch.device:
    try:
        device = torch.device(target)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"target={target!r} is no device", fix=f"one of {', '.join(_TARGETS)}") from error
    if device.type not in _TARGETS:
        raise InputError(f"target={target!r} cannot be planned for", fix=f"one of {', '.join(_TARGETS)}")
    return torch.device(device.type)


def _stand_in(device: torch.device) -> tuple[torch.device, tuple[str, ...]]:
    """Return where fake tensors are said to be, and what the reader should know about that."""
    if device.type == "cpu" or torch.backends.cuda.is_built():
        return device, ()
    # Parts of a torch without CUDA abort the process when they meet a tensor that is said to be there.
    return torch.device("cpu"), (
        "this build of torch knows no CUDA: operators that depend on the device (attention, recurrent layers, dropout) "
        "are those of the host, and copies to the host are not refused",
    )
