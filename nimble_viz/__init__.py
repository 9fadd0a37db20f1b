"""See what ahead-of-time scheduling changes about a PyTorch model.

``compare(model, x)`` measures and returns a ``Report``; ``plan(model, x)`` makes one without running a kernel;
``diagnose(model, x)`` finds everything that keeps a model from being prepared; ``profile(...)`` and
``from_trace(path)`` show where the time goes in code as it is; ``load(path)`` reads a saved report, without
torch and without a GPU; ``annotate(export, report)`` joins a profile of Nsight Systems to one.
Importing this package imports nothing heavy: names are fetched when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from nimble_core import __version__ as __version__

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nimble_core.scheduling.options import Options as Options
    from nimble_viz.analysis.gate import Rules as Rules
    from nimble_viz.collect.annotate import annotate as annotate
    from nimble_viz.collect.annotated import annotated as annotated
    from nimble_viz.collect.compare import compare as compare
    from nimble_viz.collect.diagnose import diagnose as diagnose
    from nimble_viz.collect.from_trace import from_trace as from_trace
    from nimble_viz.collect.plan import plan as plan
    from nimble_viz.collect.profile import profile as profile
    from nimble_viz.render.report import Report as Report
    from nimble_viz.render.report import load as load
    from nimble_viz.render.verdicts import diff as diff
    from nimble_viz.render.verdicts import gate as gate

_HOMES = {
    "Options": "nimble_core.scheduling.options",
    "Report": "nimble_viz.render.report",
    "Rules": "nimble_viz.analysis.gate",
    "annotate": "nimble_viz.collect.annotate",
    "annotated": "nimble_viz.collect.annotated",
    "compare": "nimble_viz.collect.compare",
    "diagnose": "nimble_viz.collect.diagnose",
    "diff": "nimble_viz.render.verdicts",
    "from_trace": "nimble_viz.collect.from_trace",
    "gate": "nimble_viz.render.verdicts",
    "load": "nimble_viz.render.report",
    "plan": "nimble_viz.collect.plan",
    "profile": "nimble_viz.collect.profile",
}
__all__ = ["__version__", *_HOMES]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics: ``%nimble`` compares a model, ``%%nimble`` profiles a cell."""
    from nimble_viz.cli.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics."""
    from nimble_viz.cli.magics import unload

    unload(shell)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
