"""Imports stay light: in a fresh interpreter, what a package or a loaded report pulls in."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nimble_core
import nimble_viz
from tests.support.sample_reports import sample_report

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "plotly", "IPython", "ipywidgets", "numpy", "scipy", "networkx", "graphviz"}


def imported(code: str) -> set[str]:
    """Top-level names of the modules that a new interpreter has after running ``code``."""
    told = f"{code}\nimport sys, json; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_check_can_fail() -> None:
    assert "graphviz" in imported("import graphviz") & HEAVY


@pytest.mark.parametrize("package", ["nimble_core", "nimble_viz"])
def test_importing_a_package(package: str) -> None:
    assert not imported(f"import {package}") & {*HEAVY, "rich", "msgspec"}


@pytest.mark.parametrize("name", ["Options", "Report", "load", "__version__"])
def test_public_names_that_need_no_torch(name: str) -> None:
    assert not imported(f"import nimble_viz; nimble_viz.{name}") & HEAVY


def test_loading_and_showing_a_report(tmp_path: Path) -> None:
    path = sample_report(30).save(tmp_path / "report.nimble")
    code = f"import nimble_viz; r = nimble_viz.load({str(path)!r}); r.to_text(80); r._repr_mimebundle_()"
    assert not imported(code) & HEAVY - {"numpy", "scipy"}  # verdicts are statistics


@pytest.mark.parametrize("package", [nimble_core, nimble_viz])
def test_no_public_name_is_hidden_by_a_submodule(package: object) -> None:
    names = [f"{package.__name__}.{name}" for name in package.__all__]  # type: ignore[attr-defined]
    assert [name for name in names if importlib.util.find_spec(name)] == []


@pytest.mark.parametrize("package", [nimble_core, nimble_viz])
def test_public_names(package: object) -> None:
    assert set(package.__all__) <= set(dir(package))  # type: ignore[attr-defined]
    assert all(getattr(package, name) for name in package.__all__)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_both_packages_have_one_version() -> None:
    assert nimble_core.__version__ == nimble_viz.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", nimble_core.__version__)
