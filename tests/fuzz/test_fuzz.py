"""Random models beside eager; ``python -m tests.fuzz`` runs as many as there is time for."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_core import Nimble
from tests.fuzz import __main__ as command
from tests.fuzz import check as checking
from tests.fuzz.check import check
from tests.fuzz.generator import generate

FIRST = [pytest.param(first, marks=[pytest.mark.slow] * (first >= 100)) for first in range(0, 500, 25)]


@pytest.mark.parametrize("first", FIRST)
def test_what_is_prepared_is_eagers_twin_or_refused(first: int) -> None:
    results = [(case, check(case)) for case in map(generate, range(first, first + 25))]
    failed = [f"{case.program()}\n# seed {case.seed}: {one.why}" for case, one in results if one.failed]
    assert not failed, "\n\n".join(failed)
    static = Counter(one.outcome for _, one in results if one.static)
    assert static["equal"] >= 0.9 * static.total(), static


@pytest.mark.gpu
def test_what_is_prepared_on_a_gpu_is_eagers_twin() -> None:
    results = [check(case, "cuda") for case in map(generate, range(50))]
    assert not [one for one in results if one.failed]


def test_a_case_is_a_function_of_its_seed_alone() -> None:
    states = random.getstate(), torch.get_rng_state()
    cases = [generate(seed) for seed in (3, 4, 5)]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    torch.manual_seed(1)
    random.seed(1)
    assert [generate(seed) for seed in (5, 4, 3)] == cases[::-1]


def test_a_case_is_a_program_that_runs_as_it_is_printed() -> None:
    found: dict[str, Any] = {}
    case = next(case for case in map(generate, range(100)) if case.static and case.mode == "inference")
    exec(case.program(), found)
    assert isinstance(found["net"], Nimble)


class _Wrong(Nimble):
    """Gives eager's outputs, but for one number."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        first = next(one for one in checking.tensors_of(found) if one.is_floating_point() and one.numel())
        first.detach().view(-1)[0] += 0.5
        return found


def test_what_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "Nimble", _Wrong)
    cases = [case for case in map(generate, range(30)) if case.static and case.mode == "inference"]
    outcomes = Counter(check(case).outcome for case in cases)
    assert outcomes["wrong"] >= 0.8 * outcomes.total(), outcomes


def test_the_command_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fuzz.jsonl"
    assert command.main(["--count", "2", "--out", str(out)]) == 0
    assert command.main(["--count", "4", "--out", str(out)]) == 0
    assert [json.loads(line)["seed"] for line in out.read_text().splitlines()] == [0, 1, 2, 3]
    assert "2 cases in" in capsys.readouterr().out.splitlines()[-1]
    assert command.main(["--seed", "2"]) == 0
    assert "class Model(nn.Module)" in capsys.readouterr().out
