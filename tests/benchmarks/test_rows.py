"""Suites of rows: processes of their own, rows kept as they come, several GPUs, and the arithmetic of verdicts.

The suite is this module itself: ``python -m tests.benchmarks.test_rows --child …`` is a row's own process.
"""

from __future__ import annotations

import doctest
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from benchmarks import rows
from benchmarks.rows import Place, Row, Settings, Suite, Told, TooSlowError, parser, run_suite, within

HERE = Path(__file__).parents[2]


def fine() -> float:
    return 2.0


def dies() -> float:
    print("last words", flush=True)
    os._exit(3)


def crashes() -> float:
    os.abort()


def sleeps() -> float:
    time.sleep(600)
    return 0.0


def raises() -> float:
    raise ValueError("no such weights")


def naps() -> float:
    """Leaves its id and waits, with a process of its own."""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["NAPS"], "naps").write_text(f"{os.getpid()} {helper.pid}")
    return sleeps()


def says() -> float:
    """Where it runs."""
    return float(os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith("cache")) + float(os.environ["CUDA_VISIBLE_DEVICES"])


MODELS = {one.__name__: one for one in (fine, dies, crashes, sleeps, raises, naps)}
FURTHER = {"says": says}


def measure(row: Row, settings: Settings) -> dict[str, Any]:
    models = {**MODELS, **rows.more_models(settings.models_from)}
    return {"value": models[row.model](), "run": settings.run, "peers": row.peers, "peer s": settings.peer_s}


def warm(row: Row, settings: Settings) -> dict[str, Any]:
    if row.model == "naps":
        naps()
    return {"wall s": 1.0, "notes": dict.fromkeys(row.peers, "not today")}


def selected(
    models: Sequence[str],
    *,
    patterns: Sequence[str],
    dtypes: Sequence[str],
    batches: Sequence[int],
    peers: Sequence[str] | None,
) -> list[Row]:
    return [Row(name, "float32", 1, tuple(peers or ())) for name in patterns if name in models]


def said(results: Mapping[str, Any]) -> list[str]:
    return [f"{key}: {row['value']}" for key, row in results["rows"].items()]


SUITE = Suite(
    "tests.benchmarks.test_rows",
    dict(MODELS),
    {"measure": measure, "warm": warm},
    selected,
    summary=lambda found: {"rows": len(found)},
    line=lambda key, row: f"{key} done",
    table=said,
    markdown=lambda results: ["# Rows", *said(results)],
    timed=("searches",),
)


def main(*argv: str, suite: Suite = SUITE) -> int:
    options = parser("Rows.", dtypes=("float32",), peers=("eager", "searches"), seconds=1.0)
    return run_suite(suite, options.parse_args(argv))


@pytest.fixture(autouse=True)
def _found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def results(out: Path) -> dict[str, Any]:
    return dict(json.loads(out.read_text()))


# -- rows are kept -------------------------------------------------------------------------------------------------


def test_rows_are_kept_and_not_measured_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--out", str(out), "--models", "fine", "--peers", "eager", "--in-process")
    assert main(*asked, "--run", "first") == 0
    before = results(out)
    assert before["rows"] == {
        "fine, float32, batch 1": {"value": 2.0, "run": "first", "peers": ["eager"], "peer s": math.inf}
    }
    assert before["summary"] == {"rows": 1}
    assert main(*asked, "--run", "second") == 0
    assert results(out) == before
    assert main(*asked, "--run", "third", "--again") == 0
    assert results(out)["rows"]["fine, float32, batch 1"]["run"] == "third"
    assert [path.name for path in sorted(out.parent.iterdir())] == ["results.json", "results.md"]
    assert out.with_suffix(".md").read_text() == "# Rows\nfine, float32, batch 1: 2.0\n"
    capsys.readouterr()
    assert main("--out", str(out), "--show") == 0
    assert capsys.readouterr().out == "fine, float32, batch 1: 2.0\n"


def test_results_are_drawn_where_they_can_be(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drawing.py").write_text(
        "def compare(results, out):\n    out.write_text(','.join(results['rows']))\n"
        "    if not out.stem.startswith('results'):\n        raise SystemExit('no bars')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = ("--models", "fine", "--in-process")
    assert main("--out", str(out), *asked, suite=replace(SUITE, figure="drawing")) == 0
    assert out.with_suffix(".svg").read_text() == "fine, float32, batch 1"
    assert f"drawn: {out.with_suffix('.svg')}" in capsys.readouterr().out
    assert main("--out", str(tmp_path / "other.json"), *asked, suite=replace(SUITE, figure="drawing")) == 0
    assert "not drawn: no bars" in capsys.readouterr().out
    assert main("--out", str(out), *asked, suite=replace(SUITE, figure="not_there")) == 0
    assert "not drawn: No module named 'not_there'" in capsys.readouterr().out


def test_what_else_a_file_holds_stays(out: Path) -> None:
    out.write_text(json.dumps({"digits": [1, 2]}))
    assert main("--out", str(out), "--models", "fine", "--in-process") == 0
    assert results(out)["digits"] == [1, 2]


def test_failed_rows_are_tried_again_after_the_others(out: Path) -> None:
    tried = []

    def unlucky(row: Row, settings: Settings) -> dict[str, Any]:
        tried.append(row.model)
        if len(tried) == 1:
            raise RuntimeError("bad luck")
        return {"value": 1.0}

    suite = replace(SUITE, jobs={"measure": unlucky})
    assert main("--out", str(out), "--models", "dies", "--in-process", suite=suite) == 1
    (failed,) = results(out)["failed"].values()
    assert failed["reason"] == "RuntimeError: bad luck"
    assert main("--out", str(out), "--models", "dies,fine", "--in-process", suite=suite) == 0
    assert tried == ["dies", "fine", "dies"]
    assert not results(out)["failed"]
    assert len(results(out)["rows"]) == 2


def test_a_failure_leaves_what_was_measured_before(out: Path) -> None:
    suite = replace(SUITE, jobs={"measure": lambda row, settings: 1 / 0})
    asked = ("--out", str(out), "--models", "fine", "--in-process", "--again")
    assert main(*asked) == 0
    assert main(*asked, suite=suite) == 1
    assert set(results(out)["rows"]) == set(results(out)["failed"]) == {"fine, float32, batch 1"}


def test_a_run_ends_between_rows(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--out", str(out), "--models", "fine,dies", "--in-process", "--limit-s", "-1") == 0
    assert not out.exists()
    assert "rows left: 2" in capsys.readouterr().out


def test_nothing_to_do_is_said(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--out", str(out), "--models", "no such model") == 2
    assert "there are fine, dies" in capsys.readouterr().err
    assert main("--models", "fine") == 2
    with pytest.raises(SystemExit):
        main("--out", str(out), "--peers", "no-such-peer")


# -- processes -----------------------------------------------------------------------------------------------------


def test_a_process_for_each_row_so_that_one_may_die(out: Path) -> None:
    assert main("--out", str(out), "--models", "dies,crashes,raises,fine") == 1
    assert list(results(out)["rows"]) == ["fine, float32, batch 1"]
    reasons = {key.split(",")[0]: one["reason"] for key, one in results(out)["failed"].items()}
    assert reasons == {
        "dies": "ended with status 3: last words",
        "crashes": reasons["crashes"],
        "raises": "ValueError: no such weights",
    }
    assert reasons["crashes"].startswith("died of SIGABRT")
    assert "failed: dies, float32, batch 1: ended with status 3" in out.with_suffix(".md").read_text()


def test_a_row_that_takes_too_long_is_killed(out: Path) -> None:
    start = time.monotonic()
    assert main("--out", str(out), "--models", "sleeps", "--row-s", "1") == 1
    assert time.monotonic() - start < 60
    assert results(out)["failed"]["sleeps, float32, batch 1"]["reason"].startswith("killed after 1 s")


def test_what_begins_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Told({"eager": 2.0})
    with watch("ours"):
        assert capsys.readouterr().out == "ours from 2 s on\n"
    assert set(watch.seconds) == {"eager", "ours"}


def test_a_row_is_told_models_cache_and_gpu(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    further = ("--models-from", f"{__name__}:FURTHER", "--cache", str(out.parent / "cache"))
    assert main("--out", str(out), "--models", "says", *further) == 0
    assert results(out)["rows"]["says, float32, batch 1"]["value"] == 8.0


def test_a_row_at_a_time_on_each_gpu(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    meeting, seen = Barrier(2, timeout=30), []

    def apart(suite: Suite, job: str, row: Row, settings: Settings, *, place: Place, **_: Any) -> dict[str, Any]:
        meeting.wait()  # both at once, or neither
        seen.append((place.variables["CUDA_VISIBLE_DEVICES"], tuple(os.sched_getaffinity(0))))
        return {"value": 1.0}

    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(rows, "apart", apart)
    assert main("--out", str(out), "--gpus", "2", "--models", "fine,dies,sleeps,raises") == 0
    assert len(results(out)["rows"]) == 4
    assert sorted(gpu for gpu, _ in seen) == ["5", "5", "7", "7"]
    assert os.sched_getaffinity(0) == cores
    if len(cores) > 1:
        first, second = ({core for gpu, part in seen if gpu == one for core in part} for one in ("5", "7"))
        assert not first & second


@pytest.mark.parametrize(("cores", "places"), [(8, 3), (2, 2), (1, 4)])
def test_places_share_the_cores(cores: int, places: int) -> None:
    parts = [Place(index, places).part(range(cores)) for index in range(places)]
    assert all(parts)
    assert len({len(part) for part in parts}) == 1
    if cores >= places:
        assert len({core for part in parts for core in part}) == sum(map(len, parts))


def test_warming_writes_nothing_and_keeps_no_choice_made_beside_others(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = out.parent / "cache"
    cache.mkdir()
    (cache / "a.best_config").write_text("{}")
    (cache / "a.py").write_text("")
    asked = ("--out", str(out), "--models", "fine", "--peers", "eager,searches", "--in-process", "--warm-only")
    assert main(*asked, "--cache", str(cache), "--jobs", "1") == 0
    assert "searches left out: not today" in capsys.readouterr().out
    assert len(list(cache.iterdir())) == 2
    assert main(*asked, "--cache", str(cache), "--jobs", "2") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "[1/1] fine, float32, batch 1: compiled in 1 s; eager left out: not today"
    assert said[1].startswith("compiled: 1; 0 s; ")
    assert said[1].endswith("cache holds 2 files")
    assert [path.name for path in cache.iterdir()] == ["a.py"]
    assert not out.exists()
    failing = replace(SUITE, jobs={"warm": lambda row, settings: 1 / 0})
    assert main(*asked, suite=failing) == 1


def test_several_jobs_warm_a_way_at_a_time(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warmed: list[tuple[str, tuple[str, ...]]] = []

    def warming(row: Row, settings: Settings) -> dict[str, Any]:
        warmed.append((row.model, row.peers))
        return {"wall s": 1.0, "notes": {}}

    suite = replace(SUITE, jobs={"warm": warming}, compiled=lambda row: ("searches", *row.peers[:1], "ours"))
    asked = ("--out", str(out), "--models", "fine,raises", "--peers", "eager,searches", "--in-process", "--warm-only")
    assert main(*asked, "--jobs", "1", suite=suite) == 0
    assert warmed == [(name, ("searches", "eager", "ours")) for name in ("fine", "raises")]
    warmed.clear()
    assert main(*asked, "--jobs", "2", suite=suite) == 0
    assert sorted(warmed) == [(name, (way,)) for name in ("fine", "raises") for way in ("eager", "ours")]


def test_warming_says_of_each_row_what_took_how_long_and_which_are_left(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out.write_text(json.dumps({"rows": {"raises, float32, batch 1": {"value": 1.0}}}))

    def warming(row: Row, settings: Settings) -> dict[str, Any]:
        if row.model == "dies":
            raise RuntimeError("no such compiler")
        return {"wall s": 5.0, "ways s": {"ours": 3.0, "compile": 2.0}, "notes": {}}

    suite = replace(SUITE, jobs={"warm": warming})
    asked = ("--out", str(out), "--models", "raises,fine,dies", "--in-process", "--warm-only", "--jobs", "1")
    assert main(*asked, suite=suite) == 1
    assert capsys.readouterr().out.splitlines() == [
        "measured already, and not compiled: 1 row",
        "[1/2] fine, float32, batch 1: compiled in 5 s; ours 3 s, compile 2 s",
        "[2/2] dies, float32, batch 1: failed: RuntimeError: no such compiler",
        "compiled: 1, failed: 1; 0 s",
    ]
    assert main(*asked, "--limit-s", "-1", suite=suite) == 1
    assert "not begun: 2; 0 s" in capsys.readouterr().out
    assert main(*asked, "--models", "raises", suite=suite) == 0
    assert "nothing to compile" in capsys.readouterr().out


# -- a run that is ended from outside ------------------------------------------------------------------------------


def started(out: Path, *more: str) -> subprocess.Popen[str]:
    """A run of its own on ``out``; what it says can be read."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.test_rows", "--out", str(out), *more],
        cwd=rows.ROOT,
        env={**os.environ, "NAPS": str(out.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def eventually(ready: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not (found := ready()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def napping(out: Path) -> list[int]:
    """Ids of the row's process and of the one that it started, once they run."""
    place = out.parent / "naps"
    assert eventually(lambda: place.exists() and len(place.read_text().split()) == 2)
    return [int(one) for one in place.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["1", "2"])
def test_a_run_that_is_terminated_keeps_its_rows_and_goes_on(out: Path, gpus: str) -> None:
    chosen = ("--models", "fine,naps" if gpus == "1" else "naps,fine", "--gpus", gpus)
    run = started(out, *chosen)
    pids = napping(out)
    assert eventually(lambda: out.exists() and "fine, float32, batch 1" in results(out)["rows"])
    run.terminate()
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM, rows left: 1" in said
    assert all(eventually(lambda pid=pid: gone(pid), 10) for pid in pids)
    before = results(out)
    assert list(before["rows"]) == ["fine, float32, batch 1"]
    assert not before["failed"]
    assert before["summary"] == {"rows": 1}
    assert [path.name for path in sorted(out.parent.iterdir())] == ["naps", "results.json", "results.md"]
    assert main("--out", str(out), "--models", "fine,raises", "--run", "second") == 1
    assert results(out)["rows"] == before["rows"]
    assert list(results(out)["failed"]) == ["raises, float32, batch 1"]


@pytest.mark.slow
def test_a_terminated_warming_says_what_it_has_done(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(out, "--models", "fine,naps,dies", "--warm-only", "--jobs", "1")
    pids = napping(out)
    run.terminate()
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert "compiled: 1, not done: 2" in said
    assert all(eventually(lambda pid=pid: gone(pid), 10) for pid in pids)
    assert not out.exists()


@pytest.mark.slow
def test_a_row_does_not_outlive_a_run_that_is_killed(out: Path) -> None:
    run = started(out, "--models", "fine,naps")
    pids = napping(out)
    run.kill()
    run.communicate(timeout=60)
    assert all(eventually(lambda pid=pid: gone(pid), 30) for pid in pids)
    assert list(results(out)["rows"]) == ["fine, float32, batch 1"]
    assert main("--out", str(out), "--models", "fine", "--run", "second") == 0


def test_a_row_that_is_killed_for_its_time_leaves_a_file_to_go_on_with(out: Path) -> None:
    assert main("--out", str(out), "--models", "fine", "--in-process", "--run", "first") == 0
    for run in ("second", "third"):
        assert main("--out", str(out), "--models", "sleeps,fine", "--row-s", "1", "--run", run) == 1
        assert results(out)["failed"]["sleeps, float32, batch 1"]["run"] == run
        assert results(out)["rows"]["fine, float32, batch 1"]["run"] == "first"
    assert [path.name for path in sorted(out.parent.iterdir())] == ["results.json", "results.md"]


# -- a block's time ------------------------------------------------------------------------------------------------


def test_a_block_that_takes_too_long_is_left_however_often_it_tries_again() -> None:
    start, tried = time.monotonic(), 0

    def stubborn() -> None:
        nonlocal tried
        for _ in range(2):
            tried += 1
            try:
                time.sleep(30)
            except Exception:
                continue

    with pytest.raises(TooSlowError, match=r"not ready after 0\.05 s"), within(0.05):
        stubborn()
    assert tried == 1
    assert time.monotonic() - start < 20


def test_a_block_in_its_time_is_left_alone() -> None:
    with within(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(ValueError, match="mine"), within(60):
        raise ValueError("mine")


def test_other_threads_and_no_bound_are_no_error() -> None:
    with within(math.inf):
        time.sleep(0.01)
    ended = []

    def work() -> None:
        with within(0.001):
            time.sleep(0.05)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]


# -- what rows say -------------------------------------------------------------------------------------------------


def test_examples_in_the_code() -> None:
    found = doctest.testmod(rows)
    assert found.failed == 0
    assert found.attempted >= 7


def test_no_value_is_no_verdict() -> None:
    assert rows.verdict(rows.mean([None]), lambda value: value > 0) == {"value": None, "rows": 0, "met": None}
    assert rows.sentence("at least 1x", {"value": None, "met": None}) == "not measured: at least 1x:"
    assert rows.verdict({"value": 0.0}, lambda value: value > 0)["met"] is False
    assert rows.speed_of({"speed": {"step": {}}}, rows.BEST, "step") is None


def test_a_sentence_names_row_host_and_what_misses() -> None:
    found = {"value": 3.456, "where": "A", "host cpu": ["One", "Two"], "met": True}
    assert rows.sentence("more than 3x", found, "; below: B") == "met: more than 3x: 3.46 on A, One, Two; below: B"


def test_the_fastest_is_the_first_of_equals_and_none_of_ours() -> None:
    row = {"times": {name: {"median us": us} for name, us in {"eager": 3.0, "b": 2.0, "a": 2.0, "ours": 1.0}.items()}}
    assert rows.fastest(row, ("ours", "not measured")) == "b"


def test_machines_are_named_once_with_their_runs() -> None:
    def row(device: str, run: str) -> dict[str, Any]:
        stamp = {"device_name": device, "host_cpu": "C", "torch": "2", "python": "3", "date": "2026-01-02T03:04:05"}
        return {"environment": stamp, "run": run}

    found = rows.machines({"a": row("A", "r2"), "b": row("A", "r1"), "c": row("A", "r1"), "d": row("B", "r1")})
    assert found == [
        "A, C, torch 2, Python 3; runs 2026-01-02 r1, 2026-01-02 r2",
        "B, C, torch 2, Python 3; runs 2026-01-02 r1",
    ]


def test_tables_are_aligned_or_markdown() -> None:
    heads, cells = ("model", "µs"), [("A", "100"), ("long name", "1")]
    assert rows.aligned(heads, cells) == ["model      µs", "A          100", "long name  1"]
    assert rows.as_markdown(heads, cells)[:3] == ["| model | µs |", "| --- | --- |", "| A | 100 |"]
    assert rows.as_us({"times": {"a": {"median us": 12.6}}}, "a") == "13"
    assert rows.as_us({"times": {}}, "a") == "–"


def test_errors_are_told_on_one_line() -> None:
    assert rows.why(ValueError("a\n  b")) == "ValueError: a b"
    assert len(rows.why(ValueError("x" * 1000))) <= 401


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
