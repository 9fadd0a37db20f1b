from __future__ import annotations

import json

from benchmarks.common import ROOT, filled
from benchmarks.verdicts import PAGE, table
from nimble_core.algorithms.median_interval import ERROR

KEPT = json.loads((ROOT / "benchmarks" / "results" / "verdicts.json").read_text())


def test_the_page_holds_what_was_simulated() -> None:
    page, wanted = PAGE.read_text(), "run: python -m benchmarks.verdicts --out benchmarks/results/verdicts.json"
    assert filled(page, {"simulated": table(KEPT["rows"])}) == page, wanted
    assert filled(page, {"simulated": ""}) != page
    assert max(row["wrong"] for row in KEPT["rows"]) <= ERROR
