from __future__ import annotations

import json

from benchmarks.verdicts import DOCS, MARK, table
from nimble_core.algorithms.median_interval import ERROR

KEPT = json.loads((DOCS.parents[1] / "benchmarks" / "results" / "verdicts.json").read_text())


def test_the_page_holds_what_was_simulated() -> None:
    _, kept, _ = DOCS.read_text().split(MARK)
    assert kept.strip() == table(KEPT["rows"]), (
        "run: python -m benchmarks.verdicts --out benchmarks/results/verdicts.json"
    )
    assert max(row["wrong"] for row in KEPT["rows"]) <= ERROR
