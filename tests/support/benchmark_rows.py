"""Rows of benchmarks that measure each in a process of its own, without measuring."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import cuda
from nimble_core.profiling.machine import environment


def asked_rows(monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]) -> list[tuple[str, ...]]:
    """Module and options of each row that is asked for from now on; what comes back is ``row``."""
    asked = []

    def measured(module: str, *options: str) -> dict[str, Any]:
        asked.append((module, *options))
        return row

    monkeypatch.setattr(cuda, "in_a_process", measured)
    monkeypatch.setattr(cuda, "environment", lambda _: environment("cpu"))
    return asked
