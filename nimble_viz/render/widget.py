"""The viewer as a widget: a report in a notebook that code can follow and drive.

The page's own code draws it, so both look alike. Needs a running kernel, but neither torch nor a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from operator import index
from typing import Any, SupportsIndex

import traitlets
from anywidget import AnyWidget

from nimble_core.scheduling.policies import POLICIES
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.dag import opening_schedule
from nimble_viz.analysis.provenance import became
from nimble_viz.analysis.what_if import Simulated, no_simulation, simulate_plan
from nimble_viz.render.html import asset, joined, packed, still
from nimble_viz.report.data import ReportData

__all__ = ["ReportWidget", "Selection"]

_MOST_STREAMS = 32


@dataclass(frozen=True, slots=True)
class Selection:
    """What is marked in all views: calls of the program, and the eager calls that these stand for."""

    calls: tuple[int, ...] = ()
    eager: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.calls or self.eager)


class ReportWidget(AnyWidget):
    """A report's views in a notebook, linked with the kernel both ways.

    Made by ``report.dashboard()``. Everything shown is a value of the report; only ``what_if`` computes something, a
    simulation, and says so.

    Args:
        report: any report, one from a file included.
        pane: the view to open first.

    Attributes:
        selected: a ``Selection``: what is marked in all views. Follows clicks; ``select`` sets it.
        plan: name of the schedule in view; set it to one of those of ``report.schedules``.
        dark: whether the theme is dark. Follows the page.
        simulated: what ``what_if`` shows below the measured runs; None takes it away.
    """

    _esm = f"{joined('widget.js')}\nexport default widget({json.dumps(asset('viewer.css'))});\n"
    _data = traitlets.Bytes().tag(sync=True)
    _pane = traitlets.Unicode().tag(sync=True)
    _what_if = traitlets.Dict().tag(sync=True)
    selected = traitlets.Instance(Selection, args=()).tag(
        sync=True,
        to_json=lambda value, _: {"calls": list(value.calls), "eager": list(value.eager)},
        from_json=lambda value, _: Selection(tuple(value["calls"]), tuple(value["eager"])),
    )
    plan = traitlets.Unicode().tag(sync=True)
    dark = traitlets.Bool(False).tag(sync=True)
    simulated = traitlets.Instance(Simulated, allow_none=True, default_value=None).tag(
        sync=True,
        to_json=lambda value, _: value and {"text": str(value), **asdict(value)},
        from_json=lambda value, widget: value and widget.simulated,
    )

    def __init__(self, report: ReportData, pane: str = "summary") -> None:
        self.report = report
        self._became = became(report)
        policies = [name for name in POLICIES if name != "single"]
        own = report.chosen.rpartition(", ")[2]
        super().__init__(
            _data=packed(report),
            _pane=pane,
            _what_if={
                "policies": policies,
                "own": own if own in policies else policies[0],
                "most": _MOST_STREAMS,
                "why": no_simulation(report),
            },
            plan=opened.policy if (opened := opening_schedule(report)) else "",
        )
        self.on_msg(lambda _, said, __: self.what_if(said["policy"], said["streams"]))

    @traitlets.validate("plan")
    def _is_plan(self, proposal: Any) -> str:
        plans = [plan.policy for plan in self.report.schedules] or [""]
        if proposal.value not in plans:
            raise InputError(f"there is no schedule {proposal.value!r}", fix=f"one of {', '.join(plans) or 'none'}")
        return str(proposal.value)

    def select(self, *calls: int) -> None:
        """Select calls of the program; those that are not there are left out, none of them clears the selection.

        Raises:
            InputError: something else than numbers of calls.
        """
        found = _among(calls, len(self.report.program.calls))
        stands = found
        if self.report.eager is not None:
            stands = tuple(dict.fromkeys(other for call in found for other in self.report.program.calls[call].eager))
        self.selected = Selection(found, stands)

    def select_eager(self, *calls: int) -> None:
        """Select eager calls, and with them the calls that stand for them. Raises InputError as ``select`` does."""
        found = _among(calls, len(self._became))
        self.selected = Selection(tuple(dict.fromkeys(call for other in found for call in self._became[other])), found)

    def clear(self) -> None:
        """Select nothing."""
        self.selected = Selection()

    def what_if(self, policy: str, streams: int) -> Simulated:
        """Simulate ``policy`` on at most ``streams`` streams, show it below the measured runs and return it.

        Its times are compared with those of one stream and of the chosen schedule, simulated by the same model.

        Raises:
            InputError: no such policy, no number of streams, or a report that says too little to simulate anything.
        """
        self.simulated = simulate_plan(self.report, policy, streams)
        return self.simulated

    def _ipython_display_(self) -> None:
        """Show the widget, then what a saved notebook shows without its kernel: a page in an output of its own."""
        from IPython.display import display

        bundle: Any = super()._repr_mimebundle_()
        shown = dict(bundle if isinstance(bundle, dict) else bundle[0])
        shown["text/plain"] = f"Report of {self.report.model}: run this cell in a notebook to use it."
        for one in (shown, {"text/html": still(self.report)}):
            display(one, raw=True)  # type: ignore[no-untyped-call]  # IPython has no types


def _among(calls: Iterable[object], size: int) -> tuple[int, ...]:
    """Return those of ``calls`` that there are, once each."""
    found: dict[int, None] = {}
    for call in calls:
        if not isinstance(call, SupportsIndex):
            there = f"numbers from 0 to {size - 1}" if size else "there are none"
            raise InputError(f"{call!r} is no number of a call", fix=f"{there}, one by one: select(2, 5)")
        if 0 <= (at := index(call)) < size:
            found[at] = None
    return tuple(found)
