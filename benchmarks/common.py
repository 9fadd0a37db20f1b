"""What scripts share: results files that say where they were measured, tables in pages, processes of their own."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement, quantile, ratio
from nimble_core.profiling.machine import finish

__all__ = ["ROOT", "figures", "filled", "held", "in_process", "markdown", "options", "over", "publish", "write"]

ROOT = Path(__file__).parents[1]


def options(about: str | None) -> argparse.ArgumentParser:
    """Options of a script that is told about by its docstring; ``--out`` is one."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    return parser


def in_process(*arguments: str, **variables: str) -> Any:
    """Run ``python -m`` with these arguments in a process of its own; return what its last line holds, as JSON.

    Raises:
        RuntimeError: it failed; the message is the last line that it wrote to its standard error.
    """
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or ["died"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with each part between its two marks; parts without marks are not for this page."""
    for name, text in parts.items():
        mark = f"<!-- {name} -->"
        if page.count(mark) == 2:
            before, _, after = page.split(mark)
            page = f"{before}{mark}\n{text}\n{mark}{after}"
    return page


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def publish(pages: Mapping[Path, str], command: str, *, check: bool) -> int:
    """Write pages as they should be; with ``check`` only say which are not, and return 1 for the exit status."""
    changed = {path: text for path, text in pages.items() if text != path.read_text(encoding="utf-8")}
    for path, text in changed.items():
        if check:
            print(f"{path.name} does not say what the results do: python -m {command}", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(changed))


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
