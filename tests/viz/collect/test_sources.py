"""The code that calls come from: the right lines, no more, bounded, and said where it is missing."""

from __future__ import annotations

import ast
import linecache
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core import Options
from nimble_core.ir.program import Call, Origin
from nimble_core.tracing.provenance import place_of
from nimble_viz import compare, load, plan, profile
from nimble_viz.collect.sources import code_around, pass_over_machinery, read_sources
from nimble_viz.render.report import Report
from nimble_viz.report.data import SourceLines
from tests.core.tracing.test_provenance import frame_at
from tests.support import models


def call(file: str, line: int) -> Call:
    return Call(0, "aten.mm.default", (), (), origins=(Origin("aten.mm.default", "", file, line),))


def covered(report: Report) -> bool:
    """Whether every line that an origin names is there, as it stands in its file."""
    for one in report.eager_calls:
        for origin in one.origins:
            if origin.file and not any(
                piece.file == origin.file and piece.first <= origin.line < piece.first + len(piece.lines)
                for piece in report.sources
            ):
                return False
    return bool(report.sources)


@pytest.mark.parametrize("package", ["IPython", "ipykernel", "nimble_viz", "threading", "tornado"])
def test_frames_of_notebooks_threads_and_our_own_are_skipped(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip(package, reason=f"needs {package}: make test installs it")
    pass_over_machinery()
    assert Path(place_of(frame_at(str(module.__file__)), {})[1]).name == "test_provenance.py"
    assert place_of(frame_at(f"{Path(str(module.__file__)).parent}s/mine.py"), {})[1].endswith("mine.py")
    monkeypatch.setitem(sys.modules, "tornado", ModuleType("tornado"))  # frozen into a program, without a file
    pass_over_machinery()


def test_a_comparison_carries_the_functions_that_its_calls_name(tmp_path: Path) -> None:
    report = compare(models.Wide(), torch.randn(2, 16), options=Options(budget_s=0.2))
    assert covered(report)
    (piece,) = report.sources
    assert piece.name == "Wide.forward"
    assert piece.lines[0].strip().startswith("def forward(self")
    assert len(piece.lines) == 2
    assert load(report.save(tmp_path / "r.nimble")).sources == report.sources


def test_a_plan_and_a_profile_carry_them_too() -> None:
    model, x = models.Wide(), torch.randn(2, 16)
    assert covered(plan(model, x, target="cpu"))
    report = profile(model, x, warmup=0, timed=0, profiled=1)
    assert {piece.name for piece in report.sources} == {"Wide.forward"}


def test_a_cell_of_a_notebook_is_read_where_python_keeps_it() -> None:
    text = "def f(x):\n    return x @ x\n"
    path = "/nowhere/ipykernel_1/123456.py"
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    try:
        assert read_sources([call("123456.py", 2)]) == (
            SourceLines("123456.py", 1, "f", ("def f(x):", "    return x @ x")),
        )
    finally:
        del linecache.cache[path]


def test_what_cannot_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "short_one.py").write_text("x = 1\n")
    (tmp_path / "data.txt").write_text("no Python at all\n")
    missing, short, data = (
        read_sources([call(file, line)])[0] for file, line in (("gone.py", 3), ("short_one.py", 9), ("data.txt", 1))
    )
    assert (missing.lines, missing.first, missing.note) == ((), 3, "not found where it ran")
    assert "shorter" in short.note
    assert (data.lines, data.note) == ((), "no Python code")


def test_two_files_of_one_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    paths = [str(tmp_path / folder / "same_name_twice.py") for folder in "ab"]
    for path in paths:
        text = f"def f():\n    return {path!r}\n"
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    try:
        assert read_sources([call("same_name_twice.py", 2)])[0].note == "not found where it ran"
    finally:
        for path in paths:
            del linecache.cache[path]


def test_a_file_in_the_working_directory_is_not_taken_for_an_imported_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    (tmp_path / "bystander.py").write_text("def f():\n    return 1\n")
    assert read_sources([call("bystander.py", 2)])[0].lines == ()


def test_the_most_used_functions_are_kept_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    body = "\n".join(f"    x = {10_000 + number}" for number in range(100))
    (tmp_path / "several.py").write_text(f"def a():\n{body}\n\n\ndef b():\n{body}\n")
    few, many = [call("several.py", 2)], [call("several.py", 106)] * 2
    first, second = read_sources([*few, *many], most=2_000)
    assert (first.name, first.lines) == ("a", ())
    assert "2,000 characters" in first.note
    assert (second.name, len(second.lines), second.note) == ("b", 101, "")


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Functions in functions and classes, with statements between them."""
    lines: list[str] = []

    def block(depth: int) -> None:
        for _ in range(draw(st.integers(1, 3))):
            kind = draw(st.sampled_from(["x = 1", "def", "class"] if depth < 3 else ["x = 1"]))
            lines.append("    " * depth + (kind if kind == "x = 1" else f"{kind} f{len(lines)}():"))
            if kind != "x = 1":
                block(depth + 1)

    block(0)
    return "\n".join(lines)


@given(text=programs(), data=st.data())
def test_every_line_is_in_exactly_one_piece_and_pieces_are_whole_functions(text: str, data: st.DataObject) -> None:
    count = text.count("\n") + 1
    wanted = data.draw(st.sets(st.integers(1, count), min_size=1))
    pieces = code_around(text, wanted)
    for line in wanted:
        assert sum(first <= line <= last for first, last, _ in pieces) == 1
    functions = {
        (node.lineno, node.end_lineno) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    }
    for first, last, name in pieces:
        assert ((first, last) in functions) == bool(name)
        assert any(first <= line <= last for line in wanted)
