"""Exports of Nsight Systems are read as documented; what is damaged, hostile or something else is refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nimble_core.utils.errors import ReportFileError
from nimble_viz.traces.events import HostEvent
from nimble_viz.traces.nsight import Created, read_export
from tests.support.nsys_exports import PID, TID, Profile, Ran, profile_of, write_export
from tests.support.sample_reports import sample_report

NODE = (8 << 32) + 5
ONE = Profile([Ran("gemm", 100, 130, 13, 77, NODE)], {77: (TID, 90)})


def changed(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as file, file:
        for statement in statements:
            file.execute(statement)
    return path


def test_what_is_read(tmp_path: Path) -> None:
    profile = Profile(
        [
            Ran("add", 140, 150, 13, 77, NODE + 1, grid=3),
            Ran("gemm", 100, 130, 14, 77, NODE),
            Ran("memcpy", 131, 133, 13, 77, NODE + 2, "memcpy"),
            Ran("memset", 134, 135, 13, 77, NODE + 3, "memset"),
            Ran("gemm", 10, 20, 7, 76, 0),
        ],
        {77: (TID, 90)},
        [(TID, 5, 7 << 32, None), (TID, 6, NODE, 7 << 32)],
        [(TID, 1, 9, "capture nimble"), (TID, 80, 95, "replay nimble")],
        "NVIDIA H200",
    )
    found = read_export(write_export(tmp_path / "p.sqlite", profile))
    (replay,) = found.replays
    assert (replay.process, replay.launch, replay.thread, replay.launched_ns) == (PID, 77, TID, 90)
    assert replay.nodes == (NODE, NODE + 2, NODE + 3, NODE + 1)
    assert replay.graph == (PID, 8)
    gemm, copy, fill, add = replay.activities
    assert (gemm.kind, gemm.name) == ("kernel", "void at::native::gemm<float, (int)4>(float *, int)")
    assert (gemm.start_ns, gemm.end_ns, gemm.stream, gemm.node) == (100, 130, 14, 5)
    assert (add.grid, add.block, add.registers, add.shared_bytes) == ((3, 1, 1), (64, 1, 1), 32, 1536)
    assert (copy.kind, fill.kind, copy.name) == ("memcpy", "memset", "memcpy")
    assert found.created == (Created(TID, 5, 7 << 32),)
    assert dict(found.copied) == {(PID, NODE): 7 << 32}
    assert found.ranges == (HostEvent("capture nimble", 1, 9, TID), HostEvent("replay nimble", 80, 95, TID))
    assert found.gpu == "NVIDIA H200"


def test_only_ranges_of_our_domain_where_the_file_names_them(tmp_path: Path) -> None:
    profile = replace_ranges(ONE, (TID, 80, 95, "replay nimble"))
    path = write_export(tmp_path / "p.sqlite", profile)
    others = "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) VALUES "
    changed(path, f"{others} (81, 90, 59, 'of another domain', {TID}, 0)")
    assert [one.name for one in read_export(path).ranges] == ["replay nimble"]
    unnamed = write_export(tmp_path / "q.sqlite", profile, domain=False)
    changed(unnamed, f"{others} (81, 90, 59, 'of another domain', {TID}, 0)")
    assert [one.name for one in read_export(unnamed).ranges] == ["replay nimble", "of another domain"]


def replace_ranges(profile: Profile, *ranges: tuple[int, int, int, str]) -> Profile:
    return replace(profile, ranges=list(ranges))


def test_tables_are_written_when_there_is_something_in_them(tmp_path: Path) -> None:
    activities = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME")
    without = (*activities, "CUDA_GRAPH_NODE_EVENTS", "NVTX_EVENTS", "TARGET_INFO_GPU")
    assert len(read_export(write_export(tmp_path / "p.sqlite", ONE, without=without)).replays) == 1


def test_columns_that_older_versions_do_not_write(tmp_path: Path) -> None:
    path = write_export(tmp_path / "p.sqlite", replace(ONE, nodes=[(TID, 5, 7 << 32, None)]))
    dropped = [("CUDA_GRAPH_NODE_EVENTS", "originalGraphNodeId"), ("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName")]
    changed(path, *(f"ALTER TABLE {table} DROP COLUMN {column}" for table, column in dropped))
    found = read_export(path)
    assert [one.name for one in found.replays[0].activities] == ["gemm"]
    assert len(found.created) == 1


def test_a_file_that_may_not_be_written(tmp_path: Path) -> None:
    path = write_export(tmp_path / "p.sqlite", ONE)
    changed(path, "PRAGMA journal_mode = WAL")
    before = path.read_bytes()
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert len(read_export(path).replays) == 1
    finally:
        tmp_path.chmod(0o755)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["p.sqlite"]


def test_names_with_marks_of_addresses(tmp_path: Path) -> None:
    path = write_export(tmp_path / "a?mode=rwc&b#c%20.sqlite", ONE)
    assert len(read_export(path).replays) == 1
    with pytest.raises(FileNotFoundError):
        read_export(tmp_path / "none.sqlite")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not an SQLite database"),
        (b"SQLite format 3\0" + b"x" * 99, "damaged"),
    ],
)
def test_what_is_no_database(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(content)
    with pytest.raises(ReportFileError, match=said) as error:
        read_export(path)
    assert str(path) in error.value.where
    assert "nsys export --type sqlite" in error.value.fix


def test_graphs_traced_as_a_whole_name_the_option(tmp_path: Path) -> None:
    path = write_export(tmp_path / "p.sqlite", Profile([Ran("gemm", 10, 20, 7, 76, 0)]))
    with pytest.raises(ReportFileError, match=r"no CUDA graph was launched") as error:
        read_export(path)
    assert "--cuda-graph-trace=node" in error.value.fix
    changed(path, "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER)")
    with pytest.raises(ReportFileError, match="graphs were traced as a whole"):
        read_export(path)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 1", "from 100 to 99"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9223372036854775807", "to 9223372036854775807"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN end", "there is no column end"),
    ],
)
def test_what_is_damaged_inside(tmp_path: Path, statement: str, said: str) -> None:
    path = changed(write_export(tmp_path / "p.sqlite", ONE), statement)
    with pytest.raises(ReportFileError, match=said):
        read_export(path)


@pytest.mark.parametrize(
    "statements",
    [
        ["UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 'x', shortName = -4, gridX = 'many', streamId = 'x'"],
        ["UPDATE StringIds SET value = x'ff00fe'"],
        ["UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET nameId = 999, start = 'never'"],
    ],
)
def test_what_is_no_number_is_none(tmp_path: Path, statements: list[str]) -> None:
    found = read_export(changed(write_export(tmp_path / "p.sqlite", ONE), *statements))
    assert [one.start_ns for one in found.replays[0].activities] == [100]


def test_views_and_generated_columns_are_not_run(tmp_path: Path) -> None:
    path = write_export(tmp_path / "p.sqlite", ONE)
    forever = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x, x, x, x, x FROM n"
    changed(
        path, "DROP TABLE NVTX_EVENTS", f"CREATE VIEW NVTX_EVENTS (start, end, text, textId, globalTid) AS {forever}"
    )
    changed(path, "DROP TABLE CUPTI_ACTIVITY_KIND_MEMSET")
    changed(path, "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end AS (hex(zeroblob(start))))")
    with pytest.raises(ReportFileError, match="there is no column end"):
        read_export(path)
    changed(path, "DROP TABLE CUPTI_ACTIVITY_KIND_MEMSET")
    assert read_export(path).ranges == ()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_an_error_or_an_export(tmp_path: Path, data: st.DataObject) -> None:
    whole = tmp_path / "whole.sqlite"
    if not whole.exists():
        report = sample_report(6)
        write_export(whole, profile_of(report, report.chosen, 1))
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(16, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = content[: data.draw(st.integers(100, len(content)))] if data.draw(st.booleans()) else content
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(cut)
    try:
        found = read_export(path)
    except ReportFileError:
        return
    assert found.replays
