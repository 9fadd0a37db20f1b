"""The viewer's modules: small, joined in order, and the same joined as apart."""

from __future__ import annotations

import re
from collections import Counter
from importlib import resources

import pytest

from nimble_viz.render.html import asset, joined, page
from tests.support.lab import chromium
from tests.support.sample_reports import sample_report

MODULES = sorted(
    file.name for file in resources.files("nimble_viz.render.viewer").iterdir() if file.name.endswith(".js")
)
_TOP = re.compile(r"^(?:export )?(?:const|let|function|async function|class) (\w+)", re.MULTILINE)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_small_and_import_by_one_line_each(name: str) -> None:
    text = asset(name)
    assert len(text.splitlines()) < 500
    for line in (line for line in text.splitlines() if re.match(r"import\b|export (?!const|let|function|async)", line)):
        assert re.fullmatch(r'import \{ [\w, ]+ \} from "\./[\w.]+";', line)


@pytest.mark.parametrize("entry", ["page.js", "widget.js"])
def test_joined_modules_follow_what_they_import_and_share_no_name(entry: str) -> None:
    text = joined(entry)
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)
    assert [name for name, times in Counter(_TOP.findall(text)).items() if times > 1] == []
    for name in set(MODULES) - {"page.js", "widget.js"}:
        own = _TOP.findall(asset(name))[0]
        at = re.search(rf"^(?:const|function|async function) {own}\b", text, re.MULTILINE)
        assert at
        for needed in re.findall(r'^import .* from "\./(.+)";', asset(name), re.MULTILINE):
            assert text.index(_TOP.findall(asset(needed))[0]) < at.start()


@pytest.mark.browser
def test_the_page_works_with_its_modules_apart() -> None:
    """What is joined is what the imports say: a page that imports the files shows the same."""
    whole = page(sample_report(60))
    apart = whole.replace(joined("page.js"), 'import "./page.js";')
    apart = apart.replace("script-src 'unsafe-inline'", "script-src 'unsafe-inline' *")
    assert apart != whole
    with chromium() as browser:
        shown = browser.new_page()
        troubles: list[str] = []
        shown.on("pageerror", lambda error: troubles.append(str(error)))

        def serve(route) -> None:
            name = route.request.url.rpartition("/")[2]
            kind, body = ("text/javascript", asset(name)) if name.endswith(".js") else ("text/html", apart)
            route.fulfill(status=200, content_type=f"{kind}; charset=utf-8", body=body)

        shown.route("http://viewer.test/**", serve)
        shown.goto("http://viewer.test/")
        shown.click("#nv-tab-dag")
        assert shown.evaluate("nimbleViewer.views.dag.visible()") > 0
        assert troubles == []
