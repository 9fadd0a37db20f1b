"""Rows of the training suite made up here: what a results file would hold, without a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.rows import Row
from benchmarks.train_zoo import TASKS
from benchmarks.training import DROP_IN, OURS, REPLAY, selected
from tests.benchmarks.test_training import made


def keyed(*rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {Row(row["model"], row["dtype"], row["batch"], ()).key: row for row in rows}


def results(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rows": keyed(*rows), "failed": {}, **more}


def full(model: str = "A CIFAR", dtype: str = "tf32", batch: int = 32, **how: Any) -> dict[str, Any]:
    """A row as it is measured on a GPU: the bare replay, parts of its distance to the limit, engines' sizes."""
    row = made(model, dtype, batch, **how)
    row["times"][REPLAY] = {"median us": 0.9 * row["times"][OURS]["median us"], "warnings": []}
    row["memory"] = {name: {**one, "bytes": 200_000_000} for name, one in row["memory"].items()}
    row["ours"] |= {"memory bytes": 150_000_000}
    row["drop-in"] = {"memory bytes": 120_000_000, "chosen": "library, single"}
    if row["ours"]["limit"]:
        row["ours"]["limit"]["parts us"] = {"launch": 1.0, "gaps": 9.0}
    return row


def suite(*dtypes: str) -> dict[str, dict[str, Any]]:
    """Every row of the suite in these dtypes, with times that look like times."""
    rows = []
    for index, one in enumerate(selected(tuple(TASKS), dtypes=dtypes)):
        small, share = one.model.endswith("CIFAR"), 1 + 0.03 * (index % 5)
        eager = 9000.0 if small else 30_000.0
        ours = eager / ((6.5 - 1.4 * (one.batch / 64)) * share if small else 1.05 * share)
        peers = {
            "eager-tuned": eager / 1.02, "graphed-callables": eager / (3.4 if small else 1.01),
            "compile": eager / 1.3, "RO": eager / (2.6 if small else 1.03 * share),
            "compile-step": eager / (1.5 * share), "compile-step:reduce-overhead": eager / (3.9 if small else 1.06),
        }  # fmt: skip
        row = full(
            one.model, one.dtype, one.batch, eager=eager, ours=ours, drop_in=ours * 1.8 if small else ours, **peers
        )
        for way, name in (("step", OURS), ("drop-in", DROP_IN)):
            for peer, found in row["speed"][way].items():
                value = row["times"][peer]["median us"] / row["times"][name]["median us"]
                found |= {"low": 0.94 * value, "high": 1.07 * value, "stable": index % 4 != 1}
        rows.append(row)
    return keyed(*rows)
