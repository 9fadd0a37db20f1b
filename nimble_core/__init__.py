"""Ahead-of-time, multi-stream scheduling for static PyTorch models.

``Nimble(model).prepare(x)`` replays a model, in eager's kernels or in faster ones (``Options(fuse=...)``), and
``TrainStep(model, loss_fn, optimizer).prepare(x, y)`` a training step; the steps in between are here too, each a
function from value to value.
Importing this package imports neither torch nor anything else that is heavy: names are fetched when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from nimble_core.utils.version import __version__

if TYPE_CHECKING:
    from nimble_core.api.nimble import Nimble
    from nimble_core.api.train_step import TrainStep
    from nimble_core.ir.call_graph import CallGraph, build_graph
    from nimble_core.ir.costs import Costs
    from nimble_core.ir.program import Program
    from nimble_core.ir.schedule import Schedule
    from nimble_core.ir.timeline import Timeline
    from nimble_core.scheduling.options import Options
    from nimble_core.scheduling.saved_plan import Plan, load_plan
    from nimble_core.scheduling.verify_schedule import check_schedule
    from nimble_core.utils.errors import (
        CaptureError,
        DeviceError,
        InputError,
        NimbleError,
        NimbleWarning,
        NotStaticError,
        ReportFileError,
        ScheduleError,
    )

__all__ = [
    "CallGraph",
    "CaptureError",
    "Costs",
    "DeviceError",
    "InputError",
    "Nimble",
    "NimbleError",
    "NimbleWarning",
    "NotStaticError",
    "Options",
    "Plan",
    "Program",
    "ReportFileError",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "TrainStep",
    "__version__",
    "build_graph",
    "check_schedule",
    "load_plan",
]

_HOMES = {
    "CallGraph": "ir.call_graph",
    "Costs": "ir.costs",
    "Nimble": "api.nimble",
    "Options": "scheduling.options",
    "Plan": "scheduling.saved_plan",
    "Program": "ir.program",
    "Schedule": "ir.schedule",
    "Timeline": "ir.timeline",
    "TrainStep": "api.train_step",
    "build_graph": "ir.call_graph",
    "check_schedule": "scheduling.verify_schedule",
    "load_plan": "scheduling.saved_plan",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'utils.errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
