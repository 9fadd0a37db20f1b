"""Words that all views share: what a run or a call is called, where it ran, how a ratio is put."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from nimble_core.ir.measurement import Measurement, Ratio
from nimble_core.ir.program import Call
from nimble_core.utils.units import format_count, format_ns, format_percent, format_ratio
from nimble_viz.report.data import ReportData

__all__ = [
    "INTERVAL", "about", "common_module", "context", "doubt_of", "error_text", "explained", "interval_text",
    "label_call", "label_operators", "label_plan", "label_run", "one_stream", "planned", "plural", "ratio_figures",
    "ratio_parts", "ratio_sentence", "ratio_words", "share_rows", "shortened", "source_of", "spanned_modules",
    "split_plan", "trains", "visible",
]  # fmt: skip

_FEWEST = 5
"""Of fewer samples quartiles mean nothing."""

INTERVAL = "above 1x is faster; in brackets the 99.5% interval, which alone decides"
"""What a table of ratios says below it."""

_KERNELS = {"none": "", "library": "library ", "inductor": "compiled "}
_FUSED = tuple(_KERNELS)[1:]
_POLICIES = {
    "nimble": "as few waits as full concurrency allows",
    "critical_path": "longest remaining path first",
    "contention": "longest path first, with regard to calls that slow each other down",
    "opara": "heavy and light calls in turn",
    "torchsched": "the longest path on a stream of its own",
}
"""What a policy does, wherever its name stands alone."""
_UNNAMED = ("an unnamed CPU", "an unnamed GPU")
_MOST_OPERATORS = 4
_MOST_MEMBERS = 3
_SHORT = (
    ("batch_norm", "bn"),
    ("scaled_dot_product", "attention"),
    ("convolution", "conv"),
    ("to_copy", "copy"),
    *((name, name) for name in ("layer_norm", "group_norm", "max_pool", "avg_pool", "log_softmax", "softmax")),
)
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]")
_KERNEL = re.compile(r"triton_[a-z]+_(?:fused_)?_*(.*?)_*\d*")


def planned(report: ReportData) -> bool:
    """Tell whether this is a plan: nothing was run, so nothing was measured."""
    return report.complete and not (report.measurements or report.checks or report.timelines)


def context(report: ReportData) -> str:
    """Name what every ratio depends on, ``"float16, batch 1, NVIDIA H200"``, and say if it is training."""
    if report.sampling is not None:
        where = report.environment
        return f"profile of code as it is, {where.device_name or _UNNAMED[where.device == 'cuda']}"
    empty = any(one.sizes[:1] == (0,) for one in report.program.inputs[:1])
    batch = f"batch {report.batch}" if report.batch else "empty batch" if empty else "no batch dimension"
    return f"{report.dtype}, {batch}, {'training, ' if trains(report) else ''}{_place(report)}"


def trains(report: ReportData) -> bool:
    """Tell whether the report is about training steps."""
    return any(call.phase != "forward" for call in report.program.calls)


def split_plan(name: str) -> tuple[str, str]:
    """Split a plan's name into whose kernels it runs and the plan itself.

    >>> split_plan("inductor, nimble, 4 streams"), split_plan("nimble, 4 streams")
    (('inductor', 'nimble, 4 streams'), ('none', 'nimble, 4 streams'))
    """
    fuse, comma, plan = name.partition(", ")
    return (fuse, plan) if comma and fuse in _FUSED else ("none", name)


def label_plan(name: str) -> str:
    """Return a plan's display name: ``"inductor, single"`` reads ``"inductor, one stream"``."""
    fuse, plan = split_plan(name)
    plan = "one stream" if plan == "single" else plan
    return plan if fuse == "none" else f"{fuse}, {plan}"


def label_run(report: ReportData, name: str) -> str:
    """Return a run's display name: ``"single"`` reads ``"one-stream replay"``.

    Fused ones say whose kernels they run, ``"nimble replay (inductor)"``, and beside them those of eager's kernels
    ``"one-stream replay (unfused)"``. What was only planned is no replay: ``"one stream"``, ``"nimble"``. Peers keep
    their names.
    """
    if planned(report):
        return label_plan(name)
    fuse, plan = split_plan(name)
    ours = plan == "single" or report.schedule(name) or any(one.name == name for one in report.candidates)
    if not ours or any(peer.name == name for peer in report.peers):
        return name
    run = "one-stream replay" if plan == "single" else f"{plan} replay"
    if fuse != "none":
        return f"{run} ({fuse})"
    return f"{run} (unfused)" if report.eager is not None else run


def explained(report: ReportData, name: str) -> str:
    """Say what a replay runs, and where its policy's name stands, what that policy does.

    ``"81 compiled calls for 195 of eager on 3 streams, longest remaining path first (critical_path)"``.
    """
    plan = report.schedule(name)
    if plan is None:
        return ""
    fuse, policy = split_plan(name)
    calls = plural(len(report.program.calls), f"{_KERNELS[fuse]}call")
    if report.eager is not None:
        calls += f" for {format_count(len(report.eager.calls))} of eager"
    if plan.streams < 2:
        return f"{calls} on one stream"
    policy = policy.partition(",")[0]
    how = f", {_POLICIES[policy]} ({policy})" if policy in _POLICIES else f", by the policy {policy}"
    return f"{calls} on {plan.streams} streams{how}"


def one_stream(name: str) -> str:
    """Name the run of the same kernels as ``name`` on one stream.

    >>> one_stream("inductor, nimble"), one_stream("nimble")
    ('inductor, single', 'single')
    """
    fuse, _ = split_plan(name)
    return "single" if fuse == "none" else f"{fuse}, single"


def label_call(call: Call) -> str:
    """Return a call's short name: its operator's, or that of the operators it stands for.

    ``"triton_poi_fused__native_batch_norm_relu_3"`` reads ``"bn+relu"`` after its origins; without origins, after the
    kernel's own name.
    """
    if call.eager and call.origins:
        return label_operators(origin.operator for origin in call.origins)
    kernel = _KERNEL.fullmatch(call.operator)
    return (kernel[1] or "triton") if kernel else call.label


def source_of(call: Call) -> str:
    """Return the source line of the first origin, ``"net.py:12"``; empty if unknown."""
    origin = call.origins[0] if call.origins else None
    return f"{origin.file}:{origin.line}" if origin and origin.file else ""


def label_operators(operators: Iterable[str]) -> str:
    """Name a call that stands for these operators, in order.

    >>> label_operators(["aten.convolution.default", "aten.native_batch_norm.default", "aten.relu_.default"])
    'conv+bn+relu'
    >>> label_operators(["aten.addmm.default"] * 3)
    '3×addmm'
    >>> label_operators(["aten.addmm.default", "aten.gelu.default"] * 2)
    '2×(addmm+gelu)'
    """
    counts = Counter(_short(operator) for operator in operators)
    times = set(counts.values())
    if len(counts) > 1 and len(times) == 1 and times != {1}:
        return f"{times.pop()}×({label_operators(counts)})"
    parts = [name if count == 1 else f"{count}×{name}" for name, count in counts.items()]
    rest = len(parts) - _MOST_OPERATORS
    return "+".join(parts if rest < 2 else [*parts[:_MOST_OPERATORS], f"{rest} more"])


def common_module(modules: Sequence[str]) -> str:
    """Find the innermost module that holds all of ``modules``; empty for the model itself.

    >>> common_module(["layer.0.attention.query", "layer.0.attention.key"])
    'layer.0.attention'
    """
    steps = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))


def spanned_modules(modules: Sequence[str]) -> str:
    """Return ``common_module`` and, where that is a list, which of its members hold ``modules``.

    >>> spanned_modules(["cells.3.lefts.0", "cells.5.before", "cells.4"])
    'cells.3–5'
    >>> spanned_modules(["cells.3", "cells.5"]), spanned_modules(["cells.3.lefts", "cells.3.rights"])
    ('cells.3, 5', 'cells.3')
    """
    shared = common_module(modules)
    start = len(shared) + 1 if shared else 0
    steps = {module[start:].partition(".")[0] for module in modules}
    if len(steps) < 2 or not all(step.isdecimal() for step in steps):
        return shared
    members = sorted(map(int, steps))
    runs = members[-1] - members[0] == len(members) - 1 or len(members) > _MOST_MEMBERS
    said = f"{members[0]}–{members[-1]}" if runs else ", ".join(map(str, members))
    return f"{shared}.{said}" if shared else said


def _short(operator: str) -> str:
    parts = operator.split(".")
    name = (parts[1] if len(parts) > 1 else operator).strip("_")
    return next((short for long, short in _SHORT if long in name), name)


def visible(text: str) -> str:
    r"""Replace each character that a terminal or a browser would obey instead of showing it, or XML cannot hold.

    >>> visible("a\x1b[31mb\u202ec") == "a\ufffd[31mb\ufffdc"
    True
    """
    return _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``"1 stream"``, ``"1,024 streams"``."""
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def error_text(error: float) -> str:
    """Format a relative error; files hold those that are not finite as 1e300.

    >>> error_text(3.14e-7), error_text(1e300)
    ('3.1e-07', 'not finite')
    """
    return f"{error:.1e}" if error < 1e300 else "not finite"


def ratio_words(ratio: Ratio, baseline: str = "", note: str = "") -> str:
    """Say how a run compares with another one: the verdict and its interval, as all views put it.

    A ratio below 1 is turned over, and so is its interval.

    Args:
        ratio: what was measured.
        baseline: what the other is called; its name if empty.
        note: what else stands in the brackets.

    >>> for value, low, high in ((1.8, 1.76, 1.85), (0.5, 0.4, 0.8), (1.0, 0.99, 1.01), (2.0, 0.0, math.inf)):
    ...     print(ratio_words(Ratio("nimble", "eager", value, low, high)))
    1.80x faster than eager (1.76x to 1.85x)
    2.00x slower than eager (1.25x to 2.50x)
    no difference from eager (0.99x to 1.01x)
    undecided against eager (too few samples)
    """
    words, interval = ratio_parts(ratio)
    joined = {"no difference": "from", "undecided": "against"}.get(ratio.verdict, "than")
    return f"{words} {joined} {baseline or ratio.baseline} ({interval}{note and '; '}{note})"


def ratio_parts(ratio: Ratio) -> tuple[str, str]:
    """Say a verdict and its interval, ``("1.80x faster", "1.76x to 1.85x")``; what is slower is turned over."""
    value, low, high = ratio.value, ratio.low, ratio.high
    if ratio.verdict == "slower":
        value, low, high = 1 / value, 1 / high, 1 / low if low else math.inf
    known = ratio.low > 0 and math.isfinite(ratio.high)
    words = f"{format_ratio(value)} {ratio.verdict}" if ratio.verdict in ("faster", "slower") else ratio.verdict
    return words, f"{format_ratio(low)} to {format_ratio(high)}" if known else "too few samples"


def ratio_sentence(subject: str, ratio: Ratio, baseline: str = "", note: str = "") -> str:
    """Make a sentence of ``ratio_words``: ``"nimble replay is 1.80x faster than …"``."""
    return f"{subject}{':' if ratio.verdict == 'no difference' else ' is'} {ratio_words(ratio, baseline, note)}"


def ratio_figures(ratio: Ratio) -> tuple[str, str]:
    """Format a ratio and its interval for a table: ``("1.80x", "[1.76, 1.85]")``."""
    interval = interval_text(ratio.low, ratio.high)
    return format_ratio(ratio.value) if ratio.decided else "undecided", interval


def interval_text(low: float, high: float) -> str:
    """Format an interval of ratios: ``"[1.76, 1.85]"``."""
    ends = f"[{format_ratio(low)[:-1]}, {format_ratio(high)[:-1]}]"
    return ends if low > 0 and math.isfinite(high) else "too few samples"


def share_rows(parts: Iterable[tuple[str, float, str]], *, zeros: bool = False) -> list[dict[str, Any]]:
    """Turn ``(name, nanoseconds, meaning)`` of one time's parts into rows with shares, without zeros if not asked."""
    kept = [part for part in parts if part[1] or zeros]
    total = sum(ns for _, ns, _ in kept) or 1.0
    return [
        {"name": name, "ns": ns, "text": format_ns(ns), "share": format_percent(ns / total), "meaning": meaning}
        for name, ns, meaning in kept
    ]


def doubt_of(taken: Measurement | None) -> float:
    """Return a run's spread, infinite for too few samples: its doubt beside what was not taken in turn with it."""
    return taken.spread if taken and len(taken.samples_ns) >= _FEWEST else math.inf


def about(value: str, doubt: float) -> str:
    """Format a number with its doubt, where it comes of two measurements that were not taken in turn.

    >>> about("1.08x", 0.052), about("1.08x", math.inf)
    ('1.08x ± 5%', '1.08x ± unknown')
    """
    return f"{value} ± {f'{doubt:.{int(doubt < 0.0095)}%}' if math.isfinite(doubt) else 'unknown'}"


def _place(report: ReportData) -> str:
    where = report.environment
    if planned(report):
        return f"planned for {where.device}"
    if where.device == "cuda":
        return where.device_name
    return f"host replay on {where.device_name or where.host_cpu or 'an unnamed CPU'}, no GPU"


def shortened(text: str, most: int) -> str:
    """Cut a text to ``most`` characters, the last of which says that it was cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
