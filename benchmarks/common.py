"""What scripts share: results files that say where they were measured, and how samples and ratios are kept in them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement, quantile, ratio
from nimble_core.profiling.machine import finish

__all__ = ["figures", "held", "options", "over", "write"]


def options(about: str | None) -> argparse.ArgumentParser:
    """Options of a script that is told about by its docstring; ``--out`` is one."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    return parser


def held(path: Path | None) -> dict[str, Any]:
    """Results that the file holds; without a file, none of any model."""
    found: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {"models": {}}
    return found


def write(path: Path | None, results: Mapping[str, Any], stamp: Environment) -> None:
    """Write the results with their environment, if there is a file to write."""
    if path:
        written = {**results, "environment": asdict(finish(stamp))}
        path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def figures(one: Measurement) -> dict[str, Any]:
    """Median and quartiles in µs, number of samples, and why to doubt them."""
    return {
        "median us": one.median_ns / 1e3,
        "quartiles us": [quantile(one.samples_ns, 0.25) / 1e3, quantile(one.samples_ns, 0.75) / 1e3],
        "samples": len(one.samples_ns),
        "warnings": list(one.warnings),
    }


def over(faster: Measurement, baseline: Measurement) -> dict[str, Any]:
    """Speed of the one over the other with its verdict, and its interval, where samples are enough for one."""
    found = ratio(faster, baseline)
    ends = {"low": found.low, "high": found.high} if found.low and math.isfinite(found.high) else {}
    return {"value": found.value, "verdict": found.verdict, **ends}
