"""Tables: the frame and the CSV say the same, with the types and the rows of the report."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.utils.errors import InputError
from nimble_viz.export.tables import KINDS, Table, make_table, no_formula, to_csv
from tests.support.sample_reports import CASES, fused_report, sample_report, training_report

REPORTS = {**CASES, "fused": fused_report, "training": training_report}
SMALL = [name for name in REPORTS if name not in ("ten thousand", "fused thousand")]


def kind_of(cells: Sequence[Any]) -> type:
    """The one type of a column's cells, but for what is missing; float where all are."""
    (found,) = {type(cell) for cell in cells if cell is not None} or {float}
    return found


def read_csv(table: Table) -> list[tuple[Any, ...]]:
    """The rows that ``to_csv`` wrote, with the columns' types."""
    header, *rows = csv.reader(io.StringIO(to_csv(table), newline=""))
    assert header == list(table)

    def cell(text: str, of: Any) -> Any:
        if of is str:
            return text.removeprefix("'")  # no text of the samples begins with one
        if not text:
            return None
        return text == "True" if of is bool else of(text)

    types = [kind_of(cells) for cells in table.values()]
    return [tuple(cell(text, of) for text, of in zip(row, types, strict=True)) for row in rows]


def cells_of(report: Any, kind: str) -> dict[str, list[Any]]:
    return {name: list(cells) for name, cells in make_table(report, kind).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SMALL)
def test_cells_have_the_types_of_their_columns_and_csv_gives_them_back(name: str, kind: str) -> None:
    table = make_table(REPORTS[name](), kind)
    assert not any(kind_of(cells) is str and None in cells for cells in table.values())
    assert read_csv(table) == list(zip(*table.values(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fused", "training", "hostile", "empty"])
def test_the_frame_equals_the_csv(name: str, kind: str) -> None:
    pytest.importorskip("pandas", reason="needs pandas (extra export)")
    report = REPORTS[name]() if name in REPORTS else sample_report(0)
    frame, table = report.to_dataframe(kind), make_table(report, kind)
    assert list(frame.columns) == list(table)
    plain = frame.map(no_formula) if len(frame) else frame
    assert plain.to_csv(index=False, lineterminator="\r\n") == to_csv(table)
    for name, cells in table.items():
        if kind_of(cells) in (int, bool) and None not in cells:
            assert frame[name].dtype == kind_of(cells)


def test_calls_hold_cost_place_and_provenance() -> None:
    report = fused_report(60)
    table = cells_of(report, "calls")
    assert table["call"] == list(range(len(report.program.calls)))
    plan = report.schedule(report.chosen)
    assert plan is not None
    assert table["stream"] == list(plan.stream)
    assert table["cost_ns"] == list(report.costs.ns)
    assert table["eager_calls"] == [" ".join(map(str, call.eager)) for call in report.program.calls]
    assert [call for call in table["call"] if table["critical"][call]] == sorted(report.critical_path)


def test_a_module_holds_all_that_is_in_it() -> None:
    report = sample_report(120)
    table = cells_of(report, "modules")
    rows = dict(
        zip(table["module"], zip(table["depth"], table["calls"], table["overhead_ns"], strict=True), strict=True)
    )
    assert report.overhead is not None
    outer = [(calls, ns) for depth, calls, ns in rows.values() if depth == 0]
    assert sum(calls for calls, _ in outer) == len(report.overhead.calls)
    assert sum(ns for _, ns in outer) == pytest.approx(report.overhead.overhead_ns)
    assert all(name.rpartition(".")[0] for name, (depth, _, _) in rows.items() if depth)


def test_an_unmeasured_plan_has_missing_values() -> None:
    report = sample_report(20)
    kernels = (replace(report.costs.kernels[0], call=None), *report.costs.kernels[1:])
    unknown = replace(report, costs=replace(report.costs, spread_ns=(), demand=()), chosen="")
    columns = cells_of(unknown, "calls")
    for name in ("cost_spread_ns", "demand", "stream"):
        assert set(columns[name]) == {None}
    pandas = pytest.importorskip("pandas", reason="needs pandas (extra export)")
    frame = unknown.to_dataframe("calls")
    assert frame["stream"].isna().all()
    assert frame["demand"].dtype == float
    frame = replace(report, costs=replace(report.costs, kernels=kernels)).to_dataframe("kernels")
    assert frame["call"].dtype == pandas.Int64Dtype()


@given(st.lists(st.tuples(st.text(), st.floats(allow_nan=False), st.integers() | st.none())))
def test_any_cell_survives_csv(rows: list[tuple[str, float, int | None]]) -> None:
    cells = list(zip(*rows, strict=True)) or [(), (), ()]
    table = dict(zip(("text", "float", "int"), cells, strict=True))
    assert read_csv(table) == rows


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="one of calls, kernels"):
        make_table(sample_report(4), "nothing")


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"nimble-viz\[export\]"):
        sample_report(4).to_dataframe("calls")


@pytest.mark.parametrize("start", ["=", "@", "+", "-", "\t", "\r"])
def test_text_is_no_formula_to_a_spreadsheet(start: str) -> None:
    cells = (f"{start}1+cmd|' /C calc'!A0", "conv", "")
    table: Table = {"module": cells, "ns": (-1.5, 2.0, None)}
    assert to_csv(table).splitlines()[1].lstrip('"').startswith(f"'{start}") or start in "\r"
    rows = list(csv.reader(io.StringIO(to_csv(table), newline="")))
    assert [row[0] for row in rows] == ["module", f"'{cells[0]}", "conv", ""]
    assert [row[1] for row in rows] == ["ns", "-1.5", "2.0", ""]  # numbers stay numbers
