"""Named ranges around captures and replays, for a tool that draws them: NVTX, in a domain ``nimble``.

Whether a tool listens is asked once, when something is captured: where none does, executables are left exactly as they
are, so that a replay costs what it costs without this module. ``NIMBLE_NVTX=0`` asks nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from nimble_core.ir.program import Call, Program
from nimble_core.ir.schedule import Schedule

__all__ = [
    "COLOURS",
    "DOMAIN",
    "Range",
    "call_bytes",
    "call_name",
    "call_range",
    "call_ranges",
    "capture_range",
    "colour",
    "listener",
    "make_range",
    "replays_marked",
    "whole_name",
]

DOMAIN = "nimble"
COLOURS = (0xFF0072B2, 0xFFE69F00, 0xFF009E73, 0xFFCC79A7, 0xFF56B4E9, 0xFFD55E00, 0xFFE8D92F, 0xFF8A8F92)
"""ARGB of stream 0, 1, 2, …, then again from the first: the colours of the viewer."""
_NO_STREAM = 0xFF566167

E = TypeVar("E")
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Range:
    """A named range; what runs inside ``with`` is drawn under its name. Can be entered again and again.

    Args:
        domain: of nvtx.
        attributes: name, colour, category and payload, as nvtx keeps them.
    """

    domain: Any
    attributes: Any

    def __enter__(self) -> None:
        self.domain.push_range(self.attributes)

    def __exit__(self, *_: object) -> None:
        self.domain.pop_range()


@cache
def listener() -> Any | None:
    """Return the domain of a tool that listens; None if none does, nvtx is missing, or it was turned off."""
    if os.environ.get("NIMBLE_NVTX") == "0":
        return None
    try:
        import nvtx

        domain = nvtx.get_domain(DOMAIN)
        if not nvtx.enabled():
            return None
        if isinstance(domain, nvtx.Domain):
            return domain
    except (ImportError, AttributeError):  # not installed, or older than domains
        return None
    # Where nobody listens it is a dummy, of another class.
    if os.environ.get("NVTX_INJECTION64_PATH"):  # set by the tool
        from nimble_core.tracing.provenance import warn  # which needs torch

        warn(
            "a tool is attached, but the nvtx package does not find that it listens, so there are no ranges. "
            "Nsight Systems 2024.2 and older do not tell nvtx 0.2.12 and later. Use a newer one"
        )
    return None


def colour(stream: int | None) -> int:
    """Return the ARGB of a stream; of None, that of what is on no stream.

    >>> colour(0) == colour(8), hex(colour(1)), hex(colour(None))
    (True, '0xffe69f00', '0xff566167')
    """
    return _NO_STREAM if stream is None else COLOURS[stream % len(COLOURS)]


def call_name(call: Call) -> str:
    """Return operator and module of a call: ``"addmm encoder.layer.0"``."""
    return f"{call.label} {call.module}".rstrip()


def call_bytes(call: Call) -> int:
    """Return the bytes that a call reads and writes."""
    return sum(access.ref.nbytes for access in call.accesses)


def make_range(domain: Any, name: str, category: str, *, call: int, nbytes: int, stream: int | None = None) -> Range:
    """Make a range of ``domain``.

    Its payload is a structure of two 64-bit integers, ``call`` and ``nbytes``; without numpy, which nvtx needs for
    structures, it is ``call`` alone.

    Args:
        domain: a tool's.
        name: what it is called.
        category: a phase of a step, or what kind of range it is.
        call: index of a call; of what is no single call, how many calls it holds.
        nbytes: bytes read and written.
        stream: whose colour it gets; None: that of no stream.
    """
    payload: Any = call
    try:
        import numpy
    except ImportError:
        pass
    else:
        payload = numpy.array((call, nbytes), dtype=[("call", numpy.int64), ("nbytes", numpy.int64)])
    return Range(domain, domain.get_event_attributes(name, colour(stream), category, payload))


def call_range(domain: Any, call: Call, stream: int) -> Range:
    """Make the range of one call on a stream."""
    return make_range(domain, call_name(call), call.phase, call=call.index, nbytes=call_bytes(call), stream=stream)


def capture_range(program: Program, schedule: Schedule) -> AbstractContextManager[None]:
    """Make a range around the capture of ``schedule``."""
    domain = listener()
    return _whole_range(domain, "capture", program, schedule) if domain else _NOTHING


def call_ranges(program: Program, schedule: Schedule) -> Callable[[int | None], AbstractContextManager[None]]:
    """Return what makes each call's range while ``schedule`` is captured; nothing for None."""
    domain = listener()
    if domain is None:
        return lambda call: _NOTHING

    def range_of(call: int | None) -> AbstractContextManager[None]:
        return _NOTHING if call is None else call_range(domain, program.calls[call], schedule.stream[call])

    return range_of


def replays_marked(executable: E, program: Program, schedule: Schedule) -> E:
    """Make every run and replay of ``executable`` a range, if a tool listens; else leave it as it is."""
    domain = listener()
    if domain is not None:
        around = _whole_range(domain, "replay", program, schedule)
        for name in ("run", "replay"):
            setattr(executable, name, _inside(around, getattr(executable, name)))
        cast(Any, executable).quick = lambda ready, *, static: None  # all calls go the way that has a range
    return executable


def _inside(around: Range, method: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with around:
            return method(*args, **kwargs)

    return marked


def whole_name(kind: str, program: Program, schedule: Schedule) -> str:
    """Name the range around a whole capture or replay: ``"replay nimble (forward, loss, backward)"``."""
    plan = schedule.policy
    if program.fuse != "none" and not plan.startswith(f"{program.fuse}, "):
        plan = f"{program.fuse}, {plan}"
    phases = dict.fromkeys(call.phase for call in program.calls)
    return f"{kind} {plan}" if set(phases) <= {"forward"} else f"{kind} {plan} ({', '.join(phases)})"


def _whole_range(domain: Any, kind: str, program: Program, schedule: Schedule) -> Range:
    nbytes = sum(map(call_bytes, program.calls))
    name = whole_name(kind, program, schedule)
    return make_range(domain, name, kind, call=len(program.calls), nbytes=nbytes)
