"""Report files: what is saved is loaded, and nothing else than a report ever comes out of a file."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nimble_core.utils.errors import ReportFileError
from nimble_viz import load
from nimble_viz.render.html import packed
from nimble_viz.render.report import Report
from nimble_viz.render.text import plain_text
from nimble_viz.report.data import EqualityCheck
from nimble_viz.report.file import MAX_RATIO, save
from tests.support.sample_reports import HOSTILE, RENDERED, fused_report, old_report, sample_report

ROOT = Path(__file__).parents[3]
RECORDINGS = sorted(path for of in ("examples", "tests") for path in (ROOT / of / "recordings").glob("*.nimble"))


@pytest.mark.parametrize("case", RENDERED)
def test_round_trip_of_every_case(tmp_path: Path, case: str) -> None:
    report = RENDERED[case]()
    path = report.save(tmp_path / "report.nimble")
    loaded = load(path)
    assert loaded == report
    assert loaded.save(tmp_path / "again.nimble").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_recordings_of_this_and_earlier_versions_can_be_shown(tmp_path: Path, path: Path) -> None:
    report = load(path)
    assert "Streams and synchronisations" in plain_text(report, 80, full=True)
    packed(report)
    assert load(report.save(tmp_path / "again.nimble")) == report


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.nimble"
    sample_report(3).save(path)
    before = path.read_bytes()
    broken = replace(sample_report(3), critical_path_ns=math.nan)
    with pytest.raises(ReportFileError, match=r"cannot be saved: nan(.|\n)*critical_path_ns"):
        broken.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["report.nimble"]


@pytest.mark.parametrize("value", [object(), "\ud800", 7])
def test_what_json_cannot_hold_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ReportFileError, match="cannot be saved"):
        save(replace(sample_report(3), model=value), tmp_path / "r.nimble")


def _file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "report.nimble"
    path.write_bytes(content)
    return path


def _tree(tmp_path: Path, report: Report | None = None) -> dict[str, Any]:
    path = (report or sample_report(12)).save(tmp_path / "whole.nimble")
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def _pack(tree: Any) -> bytes:
    return _packed(json.dumps(tree).encode())


def _packed(content: bytes) -> bytes:
    """The same bytes in every process: they are part of a test's name, by which workers know it."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not hold JSON"),
        (b"\x80\x05 a pickle", "does not hold JSON"),
        (b"\x1f\x8b nonsense", "damaged"),
        (_packed(b"\xff\xfe"), "does not hold JSON"),
        (_packed(b'{"nimble_report": 1, "report": ' + b'{"model":' * 200_000), "JSON|not a nimble report"),
        (_packed(b"[]"), "Expected `object`, got `array`"),
        (_packed(b'{"nimble_report": 1}'), "missing required field `report`"),
        (_packed(b'{"nimble_report": 99, "other": []}'), r"format 99(.|\n)*upgrade"),
        (_packed(b"{}") + b"more", "damaged"),
    ],
)
def test_what_is_no_report(tmp_path: Path, content: bytes, message: str) -> None:
    path = _file(tmp_path, content)
    with pytest.raises(ReportFileError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert caught.value.fix


def test_a_small_bomb_is_refused_by_its_ratio(tmp_path: Path) -> None:
    path = _file(tmp_path, gzip.compress(b'{"nimble_report": 1, "report": [' + b"0," * 20_000_000))
    assert path.stat().st_size < 50_000
    with pytest.raises(ReportFileError, match=f"more than {MAX_RATIO} times its size"):
        load(path)


def test_a_bomb_is_not_unpacked_into_memory(tmp_path: Path) -> None:
    path = _file(tmp_path, gzip.compress(b'{"nimble_report": 1' + b" " * 400_000_000 + b"}", 1))
    tracemalloc.start()
    try:
        with pytest.raises(ReportFileError, match="larger than"):
            load(path, max_bytes=30_000_000)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_a_report_of_one_thing_over_and_over_is_no_bomb(tmp_path: Path) -> None:
    report = replace(sample_report(3), warnings=("x" * 10_000_000,))
    assert load(report.save(tmp_path / "r.nimble")) == report


def test_loading_runs_nothing(tmp_path: Path) -> None:
    """Python's own audit events while a hostile report is read: files are opened, nothing else."""
    source = """
import sys
from nimble_viz import load
good, hostile = sys.argv[1:]
load(good)
heard, on = [], [False]
sys.addaudithook(lambda event, args: heard.append(event) if on[0] else None)
on[0] = True
load(hostile)
on[0] = False
print(sorted(set(heard) - {"open"}))
"""
    good, hostile = sample_report(3).save(tmp_path / "a"), sample_report(12, hostile=HOSTILE).save(tmp_path / "b")
    done = subprocess.run(
        [sys.executable, "-c", source, str(good), str(hostile)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = sample_report(3).save(tmp_path / "whole.nimble").read_bytes()
    for length in range(0, len(whole), 7):
        with pytest.raises(ReportFileError):
            load(_file(tmp_path, whole[:length]))


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = []
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in children:
        if isinstance(value, dict | list) and value:
            found += _places(value, (*path, key))
        found.append((*path, key))
    return found


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_value_replaced_by_any_other(tmp_path: Path, data: st.DataObject) -> None:
    tree = _tree(tmp_path, data.draw(st.sampled_from([sample_report(5, width=2), fused_report(5, width=2)])))
    *parents, last = data.draw(st.sampled_from(_places(tree)))
    holder: Any = tree
    for key in parents:
        holder = holder[key]
    numbers = (-1, 0, 1, 7, 10**15, 10**30, -(10**15), 0.5, -1.5, 1e308, 5e-324)
    others = (None, True, "", "\ud800", "\x1b[2J", [], {}, [0, 0], [0, 1], [[1, 0]], [0, 0, 0, 0, 0])
    repeated = [holder[last] * times for times in (2, 1000) if isinstance(holder[last], list)]
    holder[last] = data.draw(st.sampled_from([*numbers, *others, *repeated]))
    _refused_or_drawn(_file(tmp_path, _pack(tree)))


def _refused_or_drawn(path: Path) -> None:
    """A file gives ReportFileError or a report whose views can all be drawn."""
    try:
        report = load(path)
    except ReportFileError:
        return
    plain_text(report, 80, full=True).encode()
    packed(report)


_SAMPLES = {"plain": lambda: sample_report(12), "old": old_report}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_cannot_write_is_not_saved(tmp_path: Path, value: float) -> None:
    check = EqualityCheck("a", value, 1e-3, 0.5, False, "outputs are not finite")
    with pytest.raises(ReportFileError, match="cannot be saved") as caught:
        replace(sample_report(12), checks=(check,)).save(tmp_path / "r.nimble")
    assert "relative_error" in caught.value.where


_LATER_FIELDS = (
    ("old", "candidates memory.planned costs.demand"),
    ("old", "schedules.*.counts.forks schedules.*.counts.joins schedules.*.counts.inside"),
    ("plain", "eager peers program.fuse program.calls.*.eager candidates.*.fuse candidates.*.fuse_s"),
    ("plain", "sampling overhead.waiting_ns overhead.loader_ns overhead.idle overhead.calls.*.tail_ns"),
    ("old", "work sources"),
    ("plain", "timelines.*.streams timelines.*.check"),
)
"""Fields that came later, and a sample in which they have their defaults."""


@pytest.mark.parametrize(("sample", "names"), _LATER_FIELDS)
def test_files_from_before_a_field_load(tmp_path: Path, sample: str, names: str) -> None:
    report = _SAMPLES[sample]()
    tree = _tree(tmp_path, report)
    for name in names.split():
        holders = [tree["report"]]
        *parents, last = name.split(".")
        for key in parents:
            holders = [one for holder in holders for one in (holder if key == "*" else [holder[key]])]
        for holder in holders:
            del holder[last]
    assert load(_file(tmp_path, _pack(tree))) == report


def test_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    tree["report"]["added_later"] = {"by": "a newer version of the same format"}
    assert load(_file(tmp_path, _pack(tree))) == sample_report(12)


def test_a_trace_is_no_report_and_its_reader_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(_packed(b'{"traceEvents": []}'))
    with pytest.raises(ReportFileError, match="from_trace"):
        load(path)
