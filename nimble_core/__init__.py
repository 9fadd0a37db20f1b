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
    from nimble_core.check import check_schedule
    from nimble_core.costs import Costs
    from nimble_core.errors import (
        CaptureError,
        DeviceError,
        InputError,
        NimbleError,
        NimbleWarning,
        NotStaticError,
        ReportFileError,
        ScheduleError,
    )
    from nimble_core.graph import CallGraph, build_graph
    from nimble_core.nimble import Nimble
    from nimble_core.options import Options
    from nimble_core.plan import Plan, load_plan
    from nimble_core.program import Program
    from nimble_core.schedule import Schedule
    from nimble_core.timeline import Timeline
    from nimble_core.training import TrainStep

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

# No name here may also be the name of a submodule: importing the submodule would put the module in its place. So
# ``record`` and ``simulate`` stay where they are: ``from nimble_core.record import record``.
_HOMES = {
    "CallGraph": "graph",
    "Costs": "costs",
    "Nimble": "nimble",
    "Options": "options",
    "Plan": "plan",
    "Program": "program",
    "Schedule": "schedule",
    "Timeline": "timeline",
    "TrainStep": "training",
    "build_graph": "graph",
    "check_schedule": "check",
    "load_plan": "plan",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
