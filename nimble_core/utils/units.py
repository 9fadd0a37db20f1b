"""Numbers as text, in one place. Times are nanoseconds, sizes bytes."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_count", "format_ns", "format_percent", "format_ratio"]


def format_ns(ns: float) -> str:
    """Format a duration with three significant digits: ``"850 ns"``, ``"1.23 µs"``, ``"45.6 ms"``, ``"3.21 s"``."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= scale * 0.9995:
            return f"{_three(ns / scale)} {unit}"
    return f"{ns:.0f} ns"


def format_bytes(nbytes: float) -> str:
    """Format a size in binary units: ``"512 B"``, ``"1.50 KiB"``, ``"32.0 MiB"``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= scale:
            return f"{_three(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def format_ratio(value: float) -> str:
    """Format a speed ratio: ``"2.31x"``, ``"<0.01x"``, ``">1000x"``."""
    return "<0.01x" if 0 < value < 0.005 else ">1000x" if 1000 < value < math.inf else f"{value:.2f}x"


def format_percent(share: float) -> str:
    """Format a share of one: ``"12.3%"``."""
    return f"{share:.1%}"


def format_count(count: int) -> str:
    """Format an integer with thousands separated: ``"12,345"``."""
    return f"{count:,}"


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
