"""The graph as Graphviz source: what ``dot`` reads is what the report holds."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nimble_viz
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.dag import opening_schedule
from nimble_viz.export import dot
from nimble_viz.export.dot import digraph
from nimble_viz.render.report import Report
from tests.support.sample_reports import plan_report, sample_report, training_report

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "recordings").glob("*.nimble"))
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's dot")


def read(source: str) -> dict[str, Any]:
    """What ``dot`` makes of it, without laying it out."""
    found = subprocess.run(["dot", "-Tdot_json"], input=source.encode(), capture_output=True, check=True)
    read: dict[str, Any] = json.loads(found.stdout)
    return read


def nodes_and_edges(source: str) -> tuple[dict[str, dict[str, Any]], dict[tuple[int, int], dict[str, Any]]]:
    objects = read(source)
    names = {one["_gvid"]: one["name"] for one in objects.get("objects", ())}
    nodes = {one["name"]: one for one in objects.get("objects", ()) if not one["name"].startswith("cluster")}
    edges = {}
    for edge in objects.get("edges", ()):
        pair = int(names[edge["tail"]][1:]), int(names[edge["head"]][1:])
        assert pair not in edges
        edges[pair] = edge
    return nodes, edges


def agrees(report: Report, policy: str | None = None) -> None:
    schedule = opening_schedule(report) if policy is None else report.schedule(policy)
    nodes, edges = nodes_and_edges(digraph(report, policy).source)
    assert set(nodes) == {f"c{call.index}" for call in report.program.calls}
    syncs = set(schedule.syncs) if schedule else set()
    assert set(edges) == set(report.graph.meg) | syncs
    assert {pair for pair, edge in edges.items() if edge.get("style") == "dashed"} == syncs
    if schedule:
        for call, stream in enumerate(schedule.stream):
            assert f"stream {stream}" in nodes[f"c{call}"]["label"]
            same = stream % len(dot._STREAMS)
            assert nodes[f"c{call}"]["fillcolor"] == dot._STREAMS[same]
    bold = {name for name, node in nodes.items() if node["penwidth"] == "2.5"}
    assert bold == {f"c{call}" for call in report.critical_path}


@needs_dot
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_recordings_are_graphs_of_all_their_schedules(path: Path) -> None:
    report = nimble_viz.load(path)
    for plan in report.schedules:
        agrees(report, plan.policy)


@needs_dot
def test_transitive_edges_only_where_they_are_asked_for() -> None:
    report = nimble_viz.load(EXAMPLES[-1])
    _, edges = nodes_and_edges(digraph(report, transitive=True).source)
    schedule = opening_schedule(report)
    assert schedule is not None
    assert set(edges) == set(report.graph.edges) | set(schedule.syncs)
    dotted = {pair for pair, edge in edges.items() if edge.get("style") == "dotted"}
    assert dotted == set(report.graph.edges) - set(report.graph.meg) - set(schedule.syncs)


@needs_dot
@pytest.mark.parametrize("name", ['"quoted"', "back\\slash\\N", "<b>&amp;</b>", "new\nline", "nul\\", "ein Modell – ö"])
def test_names_that_mean_something_to_dot_are_only_names(name: str) -> None:
    report = replace(sample_report(12), model=name)
    calls = tuple(replace(call, operator=f"aten.{name}.default") for call in report.program.calls)
    report = replace(report, program=replace(report.program, calls=calls))
    nodes, _ = nodes_and_edges(digraph(report).source)
    assert len(nodes) == 12


def test_a_schedule_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"no schedule 'nosuch'(.|\n)*'single', 'nimble'"):
        digraph(sample_report(12), "nosuch")


@needs_dot
@pytest.mark.parametrize(("suffix", "begins"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
@pytest.mark.parametrize(
    "make", [lambda: sample_report(30), training_report, plan_report], ids=["plain", "train", "plan"]
)
def test_pictures_are_drawn(make: Any, suffix: str, begins: bytes, tmp_path: Path) -> None:
    path = make().export(tmp_path / f"graph.{suffix}")
    assert path.read_bytes().startswith(begins)


def test_a_picture_without_the_program_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"(?s)apt install graphviz.*graph\.gv"):
        sample_report(12).export(tmp_path / "graph.svg")
    assert not (tmp_path / "graph.svg").exists()


def test_what_dot_would_never_finish_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)2,001 calls takes dot hours.*to_html"):
        sample_report(2_001).export(tmp_path / "graph.svg")
    assert sample_report(2_001).export(tmp_path / "graph.gv").stat().st_size > 100_000
