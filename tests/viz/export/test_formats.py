"""``report.export`` and the command: which format, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nimble_core.utils.errors import InputError
from nimble_viz.cli.command import main
from nimble_viz.export.formats import format_of
from nimble_viz.export.tables import KINDS, make_table, to_csv
from tests.support.sample_reports import sample_report

REPORT = sample_report(20)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return str(REPORT.save(tmp_path / "report.nimble"))


def test_suffixes(tmp_path: Path) -> None:
    wanted = {
        "a.json": "chrome",
        "calls.csv": "csv",
        "a": "csv",
    }
    assert {name: format_of(Path(name)) for name in wanted} == wanted
    (tmp_path / "v1.2").mkdir()
    assert format_of(tmp_path / "v1.2") == "csv"
    with pytest.raises(InputError, match="no format has this suffix"):
        format_of(Path("a.txt"))
    with pytest.raises(InputError, match=r"a page: report.to_html\('OUT.html'\)"):
        format_of(Path("a.html"))


def test_tables(tmp_path: Path) -> None:
    folder = REPORT.export(tmp_path / "tables")
    assert {path.name for path in folder.iterdir()} == {f"{kind}.csv" for kind in KINDS}
    one = REPORT.export(tmp_path / "calls.csv")
    assert one.read_bytes().decode() == to_csv(make_table(REPORT, "calls"))
    with pytest.raises(InputError, match="give a folder, or name one: calls"):
        REPORT.export(tmp_path / "report.csv")


def test_the_format_given_wins(tmp_path: Path) -> None:
    assert json.loads(REPORT.export(tmp_path / "run.txt", format="chrome").read_text())["traceEvents"]
    with pytest.raises(InputError, match="there is no format 'webp'"):
        REPORT.export(tmp_path / "run.json", format="webp")


def test_nothing_to_trace_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    report = sample_report(20, timelines=False)
    with pytest.raises(InputError, match="holds no timelines"):
        report.export(tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []
    assert report.export(tmp_path / "tables").is_dir()


def test_command(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", saved, str(tmp_path / "run.json")]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert main(["export", saved, str(tmp_path / "run.txt")]) == 2
    assert main(["export", saved, str(tmp_path / "missing" / "run.json")]) == 2
    assert main(["export", str(tmp_path / "none.nimble"), str(tmp_path / "run.json")]) == 2
    errors = capsys.readouterr().err
    assert "no format has this suffix" in errors
    assert "No such file" in errors
