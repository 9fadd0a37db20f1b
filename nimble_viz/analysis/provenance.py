"""Which eager calls a fused call stands for, which fused call an eager call became, and what nobody explains."""

from __future__ import annotations

import re
from itertools import accumulate

from nimble_core.ir.program import Call
from nimble_core.utils.units import format_count, format_percent
from nimble_viz.analysis.labels import common_module, plural, spanned_modules
from nimble_viz.report.data import ReportData

__all__ = ["became", "is_layout_copy", "module_of", "modules_of", "nesting_modules", "provenance"]

_POINTWISE = re.compile(r"(?:triton_poi|cpp)_fused_+(?P<names>\w+?)_\d+")
_COPIES = "clone|_?to_copy|contiguous|copy_?|permute|transpose|t|view|reshape|_?unsafe_view|expand|slice|select"
_MOVES = f"{_COPIES}|(?:cudnn_)?convolution|convolution_backward"


def became(report: ReportData) -> tuple[tuple[int, ...], ...]:
    """For each eager call the calls that stand for it; where nothing was fused, itself."""
    if report.eager is None:
        return tuple((call.index,) for call in report.program.calls)
    stand: list[list[int]] = [[] for _ in report.eager.calls]
    for call in report.program.calls:
        for index in dict.fromkeys(call.eager):
            stand[index].append(call.index)
    return tuple(map(tuple, stand))


def module_of(call: Call) -> str:
    """Find the innermost module that holds what the call stands for; empty for the model itself, or if unknown."""
    return common_module([origin.module for origin in call.origins])


def modules_of(call: Call) -> str:
    """Return ``module_of``, saying which members where a call stands for several of a list."""
    return spanned_modules([origin.module for origin in call.origins])


def is_layout_copy(call: Call) -> bool:
    """Whether a call that stands for no eager call only copies tensors to another layout or place.

    Told by its operator (``"aten.clone.default"``) or the operators in a fused kernel's name
    (``"triton_poi_fused_clone_permute_3"``), and by what it moves: for each tensor that it writes one of as many
    elements is read. A fused pointwise kernel may be named after the convolution whose weights it prepares; where it
    adds a bias it reads more.
    """
    if call.eager:
        return False
    fused = _POINTWISE.fullmatch(call.operator)
    names = fused["names"] if fused else call.label
    moved = _MOVES if fused else _COPIES
    if not re.fullmatch(f"(?:{moved})(?:_(?:{moved}))*", names):
        return False
    return sorted(ref.numel for ref in call.reads) == sorted(ref.numel for ref in call.writes)


def nesting_modules(report: ReportData) -> list[str]:
    """Return a module path for each call to group by.

    A fused call that no eager call explains goes with its neighbours, to the module that holds both, so that it does
    not tear their module apart. One that stands for several members of a list is in a group of these members.
    """
    calls = report.program.calls
    if report.eager is None:
        return [modules_of(call) for call in calls]
    known = [modules_of(call) if call.origins else None for call in calls]

    def nearest(last: str | None, path: str | None) -> str | None:
        return last if path is None else path

    before, after = accumulate(known, nearest), [*accumulate(known[::-1], nearest)][::-1]
    found = []
    for path, earlier, later in zip(known, before, after, strict=True):
        near = [one for one in (earlier, later) if one is not None]
        found.append(common_module(near) if path is None else path)
    return found


def provenance(report: ReportData) -> list[tuple[str, str]] | None:
    """Say how much of a fused program is explained by eager calls, and what is not; None where nothing was fused."""
    if report.eager is None:
        return None
    calls, ns = report.program.calls, report.costs.ns
    copies = [call.index for call in calls if is_layout_copy(call)]
    unmapped = [call.index for call in calls if not call.eager and not is_layout_copy(call)]
    gone = sum(not stand for stand in became(report))
    total = report.costs.total_ns if report.costs.source != "uniform" else 0.0

    def counted(which: list[int]) -> str:
        share = format_percent(len(which) / len(calls) if calls else 0.0)
        time = sum(ns[index] for index in which) / total if total else None
        of_time = "" if time is None else f", {format_percent(time)} of replay time"
        return f"{plural(len(which), 'call')}: {share} of calls{of_time}"

    mapped = f"{plural(len(calls), 'call')} ({report.program.fuse}) for {plural(len(report.eager.calls), 'eager call')}"
    return [
        ("Calls after fusing", mapped),
        ("Layout copies (another layout, no eager call)", counted(copies)),
        ("Unmapped (no eager call explains it)", counted(unmapped)),
        ("Eager calls that left no call (folded, not needed)", format_count(gone)),
    ]
