"""What the benchmark of merged siblings says of its rows, and that it measures two ways of one model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import siblings
from benchmarks.siblings import APART, MERGED, both, line, main
from tests.support.benchmark_rows import asked_rows


class Twins(nn.Module):
    """Two convolutions of one input, side by side in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x).relu() for layer in self.layers], 1)


def test_both_ways_of_a_model_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "SECONDS", 0.05)
    monkeypatch.setattr("nimble_core.compiler.passes.merge_siblings._sites_pay", lambda *given: True)
    found = both(Twins().eval(), (torch.randn(1, 3, 8, 8),), {}, "single")
    assert [found["plans"][name]["merged"] for name in (MERGED, APART)] == [1, 0], found
    said = line("Twins, float32", {"single": found})
    assert said.startswith("Twins, float32: single: ")
    assert "x with 1 groups merged" in said


def test_rows_that_the_file_holds_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    asked = asked_rows(monkeypatch, {})
    main(["--out", str(out), "--models", "DARTS", "--dtypes", "float16"])
    main(["--out", str(out), "--models", "DARTS"])
    assert [one[-1] for one in asked] == ["float16", "float32"]
    assert asked[0] == ("benchmarks.siblings", "--models", "DARTS", "--dtypes", "float16")
    assert list(json.loads(out.read_text())["rows"]) == ["DARTS, float16", "DARTS, float32"]
    assert capsys.readouterr().out.splitlines() == ["DARTS, float16: ", "DARTS, float16: ", "DARTS, float32: "]
