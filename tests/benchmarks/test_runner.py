import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from benchmarks.runner import plan
from benchmarks.store import Record, read
from tests.benchmarks.small_rows import PID

ROOT = Path(__file__).parents[2]
NAMES = ["fr-graph", "ours", "ours-static", "eager", "max-autotune"]
OURS = ("ours", "ours-static")


def command(folder, rows, *more):
    arguments = ["--out", folder / "cpu.jsonl.gz", "--cache", folder / "cache", "--rows", rows, *more]
    fixed = ["--device", "cpu", "--tiny", "--models", "tests.benchmarks.small_rows"]
    return [sys.executable, "-m", "benchmarks.runner", *map(str, arguments), *fixed]


def ran(folder, rows, *more):
    """Records by row, way and whether together, after a run."""
    done = subprocess.run(command(folder, rows, *more), cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return {(one.row, one.way, one.together): one for one in read(folder / "cpu.jsonl.gz")}


def held(*ways, run="1", error="", together=False):
    return {(way, together): Record("", way, together, run, error=error) for way in ways}


def test_everything_is_due_at_first_and_what_is_missing_later_beside_the_anchor():
    alone = [(("fr-graph",), False), (OURS, False), (("eager",), False), (("max-autotune",), False)]
    assert plan(NAMES, "fr-graph", {}, (), "1", together=True) == [*alone, (tuple(NAMES[:-1]), True)]
    everything = held(*NAMES) | held(*NAMES, together=True)
    assert plan(NAMES, "fr-graph", everything, (), "2", together=True) == []
    assert plan(NAMES, "fr-graph", held(*NAMES[:3]), (), "2") == [alone[0], *alone[2:]]
    assert plan(NAMES, "", held(*NAMES[:3]), (), "2") == alone[2:], "its anchor was measured already"


def test_what_failed_is_retried_by_a_later_run_alone_and_stays_out_of_shared_processes():
    failed = held(*NAMES) | held("eager", error="no")
    assert plan(NAMES, "fr-graph", failed, (), "2") == []
    assert plan(NAMES, "", failed, (), "2", retrying=True) == [(("eager",), False)]
    assert plan(NAMES, "fr-graph", failed, (), "2", retrying=True) == [(("fr-graph",), False), (("eager",), False)]
    assert plan(NAMES, "fr-graph", failed, (), "1", retrying=True) == []
    assert plan(NAMES, "fr-graph", failed, (), "2", together=True) == [(("fr-graph", *OURS), True)]


@pytest.mark.slow
def test_a_run_keeps_every_way_alone_and_together_and_notes_failures(tmp_path):
    rows, ways = "mlp,on-its-input,endless,trained", ("--ways", "eager,ours,ours-static,drop-in")
    first = ran(tmp_path, rows, *ways, "--together", 1, "--row-s", 15, "--run", "a")
    for way, together in product(("eager", "ours", "ours-static"), (False, True)):
        one = first["mlp", way, together]
        assert len(one.latency_us) >= 5
        assert one.rel_err <= one.bound < one.effect
        assert (one.title, one.anchor) == ("MLP", first["mlp", "eager", together].medians)
    assert first["mlp", "ours", False].work["flops"] == first["mlp", "eager", False].work["flops"] > 0
    assert {way for row, way, _ in first if row == "trained"} == {"eager", "ours", "drop-in"}
    assert not any(one.error or one.wrong for (row, way, _), one in first.items() if row == "trained")
    assert "CaptureError" in first["on-its-input", "ours", False].error
    assert first["endless", "eager", False].error.startswith("killed after 15 s")

    second = ran(tmp_path, "mlp,on-its-input,trained", *ways, "--together", 1, "--run", "b")
    runs = {key: one.run for key, one in second.items() if key[0] != "endless"}
    retried = {key for key, run in runs.items() if run == "b"}
    assert retried == {("on-its-input", way, False) for way in OURS}, "only what had failed is measured again"

    third = ran(tmp_path, "mlp", *ways, "--together", 0, "--again", "ours", "--run", "c")
    runs = {way: one.run for (row, way, together), one in third.items() if row == "mlp" and not together}
    assert runs == {"eager": "c", "ours": "c", "ours-static": "c"}, "and the anchor beside ours"
    assert {key: one for key, one in third.items() if key[2]} == {key: one for key, one in second.items() if key[2]}

    fourth = ran(tmp_path, "mlp", "--ways", "eager,torchscript", "--together", 0, "--run", "d")
    assert fourth["mlp", "torchscript", False].run == "d"
    assert fourth["mlp", "torchscript", False].anchor, "another peer knows its own anchor"
    assert fourth["mlp", "eager", False] == third["mlp", "eager", False], "which stays the one beside ours"


@pytest.mark.slow
def test_what_compiles_waits_for_its_turn_before_it_is_timed(tmp_path):
    done = ran(tmp_path, "mlp,on-its-input,broken", "--ways", "eager,compile", "--together", 0, "--jobs", 2)
    compiled = {row: one for (row, way, _), one in done.items() if way == "compile"}
    assert "cannot be made" in compiled.pop("broken").error
    for one in compiled.values():
        assert len(one.latency_us) >= 5
        assert one.prepare_s is None, "it was compiled beside others"


@pytest.mark.slow
def test_sigterm_ends_a_run_at_once_keeps_complete_records_and_leaves_no_process(tmp_path):
    pid = tmp_path / "pid"
    asked = command(tmp_path, "mlp,endless", "--ways", "eager", "--together", 0, "--start", "spawn")
    process = subprocess.Popen(asked, cwd=ROOT, env={**os.environ, PID: str(pid)}, stdout=subprocess.DEVNULL)
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert [(one.row, one.way) for one in read(tmp_path / "cpu.jsonl.gz")] == [("mlp", "eager")]
