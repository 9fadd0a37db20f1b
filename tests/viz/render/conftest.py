"""Pages opened in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.lab import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with chromium() as launched:
        yield launched


@dataclass
class Opened:
    page: object
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def opened(browser, tmp_path: Path):
    contexts = []

    def open_text(text: str, *, dark: bool = False, width: int = 1280, framed: bool = False) -> Opened:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        context = browser.new_context(
            color_scheme="dark" if dark else "light", viewport={"width": width, "height": 800}
        )
        contexts.append(context)
        shown = Opened(context.new_page())
        shown.page.on("console", lambda message: shown.troubles.append(message.text))
        shown.page.on("pageerror", lambda error: shown.troubles.append(str(error)))
        shown.page.on("request", lambda request: shown.requests.append(request.url))
        shown.page.goto(path.as_uri())
        if not framed:
            shown.page.wait_for_function("() => window.nimbleViewer")
        return shown

    yield open_text
    for context in contexts:
        context.close()
