from __future__ import annotations

import gzip
import html
import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from importlib import resources

import pytest

from nimble_viz.analysis.tiles import tiles
from nimble_viz.render.html import fragment, page
from tests.support.sample_reports import CASES, HOSTILE, RENDERED, sample_report


class _Tags(HTMLParser):
    """Collects start tags with their attributes, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def _data(text: str):
    found = re.search(r'<script type="text/plain" id="nimble-data">(.*?)</script>', text)
    return json.loads(gzip.decompress(b64decode(found[1])))


def _unpacked(frame: str) -> str:
    return gzip.decompress(b64decode(re.search(r'atob\("([^"]+)"\)', frame)[1])).decode()


@pytest.mark.parametrize("name", list(RENDERED))
def test_page_is_self_contained(name):
    report = RENDERED[name]()
    text = page(report)
    tags = _Tags(text).tags
    assert [tag for tag, _ in tags].count("script") == 2
    assert not [tag for tag, _ in tags if tag in {"img", "object", "embed", "iframe"}]
    assert not [attrs["src"] for _, attrs in tags if "src" in attrs]
    assert [attrs["href"] for _, attrs in tags if "href" in attrs] == ["data:,"]
    assert "default-src 'none'" in text
    assert _data(text)["summary"]["tiles"] == tiles(report)
    assert len(text.encode()) < 6_000_000


def test_viewer_is_at_most_300_kb():
    files = resources.files("nimble_viz.render.viewer")
    assert (
        sum(len(file.read_bytes()) for file in files.iterdir() if file.name.endswith((".js", ".css", ".html")))
        <= 300 * 1024
    )


def test_fragment_is_a_sandboxed_frame_with_readable_text():
    report = sample_report(1_000)
    text = fragment(report)
    frame = next(attrs for tag, attrs in _Tags(text).tags if tag == "iframe")
    assert frame["sandbox"] == "allow-scripts"
    assert _unpacked(frame["srcdoc"]) == page(report)
    outside = text.split("</iframe>")[1]
    assert html.escape(report.to_text(100)) in outside
    assert "<details open>" in outside
    assert "<pre>" in outside


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1_000, 10_000])
def test_a_notebook_grows_by_at_most_a_megabyte(calls):
    report = sample_report(calls, width=8)
    bundle = report._repr_mimebundle_()
    assert len(json.dumps(bundle).encode()) <= 1_000_000
    assert bundle["text/html"] == fragment(report)


def test_the_script_beside_the_frame_is_the_same_for_every_report():
    scripts = {fragment(report).rpartition("<script>")[2] for report in (sample_report(3), CASES["hostile"]())}
    assert len(scripts) == 1
    tags = [tag for tag, _ in _Tags(fragment(CASES["hostile"]())).tags]
    assert tags == ["iframe", "details", "summary", "pre", "script"]


def test_hostile_names_stay_text():
    report = CASES["hostile"]()
    for text in (page(report), fragment(report), _unpacked(_Tags(fragment(report)).tags[0][1]["srcdoc"])):
        assert "<img src=x" not in text
        assert "<script>window.hacked" not in text
    assert _data(page(report))["summary"]["model"] == HOSTILE
