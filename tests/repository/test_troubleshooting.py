"""docs/troubleshooting.md is what docs/troubleshooting.py writes: mistakes are made, what to write instead works."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("troubleshooting_writer", DOCS / "troubleshooting.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "troubleshooting_writer", made)  # dataclasses look themselves up
    spec.loader.exec_module(made)
    return made


def test_the_page_is_up_to_date(writer: Any) -> None:
    kept = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert kept == writer.page(), "run: python docs/troubleshooting.py > docs/troubleshooting.md"
    assert sum(len(mistakes) for _, mistakes in writer.SECTIONS.values()) >= 12
