from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_core import Options
from tests.coverage import survey


def row(name: str, group: str = "host", **more: Any) -> dict[str, Any]:
    return {"name": name, "group": group, "static": True, "passes": True, "exact": True, "error": "", **more}


def inputs(turn: int) -> dict[str, Any]:
    return {"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(turn))}


class _Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() if float(x.sum()) > 0 else x.sin()


class _Doubles(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_the_page_says_what_the_results_say() -> None:
    assert survey.main(["--check"]) == 0, "python -m tests.coverage --table"


def test_the_table_counts_static_ones_and_tells_of_each_that_fails() -> None:
    said = "CaptureError: a | b\n  where: <here>"
    rows = [row("m:a"), row("m:b", exact=False), row("m:c", passes=False, error=said), row("m:d", static=False)]
    text = survey.table(rows)
    assert "| on the host, default options | 4 | 3 | 2 (66.7%) | 1 |" in text
    assert "| host | `m:c` | yes | CaptureError: a \\| b where: \\<here> |" in text
    assert "m:d" not in text
    assert survey.works(rows).startswith("Of 3 static architectures of `transformers`, 2 are prepared")
    assert "not measured yet" in text


def test_two_runs_that_issue_other_calls_are_not_static() -> None:
    assert survey.why_not_static(_Doubles(), inputs) == ""
    turns = {0: torch.ones(2, 4), 1: -torch.ones(2, 4)}
    assert "aten.exp" in survey.why_not_static(_Branches(), lambda turn: {"x": turns[turn]})


def test_a_wrong_output_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(tune="off")
    model = _Doubles().eval()
    assert survey.compared(model, inputs, options)["passes"]
    monkeypatch.setattr(survey, "relative_error", lambda *_: 1.0)
    assert "off by" in survey.compared(model, inputs, options)["error"]


def test_one_architecture_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "coverage.jsonl"
    given = ["--group", "host", "--names", "transformers:bert", "transformers:none", "--out", str(out)]
    for _ in range(2):  # the second finds all done
        assert survey.main(given) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["name"], one["passes"], one["static"]) for one in rows] == [
        ("transformers:bert", True, True),
        ("transformers:none", False, None),
    ]
    assert "pass host transformers:bert" in capsys.readouterr().out


def test_graphs_of_one_architecture_from_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert survey.main(["--group", "lowering", "--names", "transformers:bert", "transformers:none"]) == 0
    bert, none = capsys.readouterr().out.splitlines()
    assert bert.strip() == "pass lowering transformers:bert"
    assert none.startswith("not static lowering transformers:none KeyError")
