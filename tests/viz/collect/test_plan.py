"""``nimble_viz.plan``: a Report without measurements, labelled as one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nimble_viz
from nimble_core import Options
from nimble_core.ir.call_graph import build_graph
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.saved_plan import schedule_of
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import CaptureError, InputError, NotStaticError
from nimble_viz.analysis.labels import planned
from nimble_viz.analysis.tiles import verdict
from nimble_viz.render.text import plain_text
from tests.support.models import CASES, Wide, make


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_a_plan_is_a_report_that_says_so(target: str, tmp_path: Path) -> None:
    report = nimble_viz.plan(Wide(5), torch.randn(2, 16), target=target)
    assert (report.model, report.dtype, report.batch) == ("Wide", "float32", 2)
    assert [plan.policy for plan in report.schedules] == ["single", "nimble"]
    assert report.chosen == "nimble"
    assert report.environment.device == report.program.device == report.plan.device == target
    assert planned(report)
    assert report.measurements == report.checks == report.timelines == ()
    sentence = verdict(report)
    assert sentence.startswith("Plan: nothing was run; 12 calls on 5 streams, ")
    assert "(nimble), with 4 synchronisations" in sentence
    assert f"float32, batch 2, planned for {target}" in sentence
    assert "plan: nothing was run" in plain_text(report, 120, full=True)
    assert f"no device (planned for {target})" in plain_text(report, 120, full=True)
    assert "plan: nothing was run" in report.to_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "plan: nothing was run" in report._repr_mimebundle_()["text/plain"]
    assert nimble_viz.load(report.save(tmp_path / "plan.nimble")) == report


@pytest.mark.parametrize("name", [name for name in CASES if name != "custom_operators"])
def test_every_model_can_be_planned_and_the_plan_fits_the_real_program(name: str) -> None:
    model, args, kwargs = make(name)
    report = nimble_viz.plan(model, *args, kwargs=kwargs, target="cpu")
    assert planned(report)
    plain_text(report, 80, full=True)
    program = record(model, Signature(args, kwargs), args=args, kwargs=kwargs).program
    assert schedule_of(report.plan, program, build_graph(program)).stream == report.schedules[-1].stream


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_and_the_cap_are_kept(policy: str) -> None:
    report = nimble_viz.plan(Wide(6), torch.randn(2, 16), options=Options(policy=policy, max_streams=3))
    assert report.chosen == policy
    schedule = report.schedule(policy)
    assert schedule is not None
    assert schedule.streams == (1 if policy == "single" else 3)
    check_schedule(report.graph, schedule)


def test_keyword_inputs_and_models_that_are_nowhere() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(4096, 32, 65_536, batch_first=True).half().train()
        x = torch.empty(1, 16, 4096, dtype=torch.float16)
    report = nimble_viz.plan(model, kwargs={"src": x}, target="cpu")
    assert report.dtype == "float16"
    assert len(report.program.calls) > 10
    assert [report.program.storages[ref.storage].name for ref in report.program.inputs] == ["kwargs['src']"]


def test_a_build_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    (warning,) = nimble_viz.plan(Wide(), torch.randn(2, 16)).warnings
    assert "knows no CUDA" in warning
    assert nimble_viz.plan(Wide(), torch.randn(2, 16), target="cpu").warnings == ()


def test_models_that_are_not_static() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * random.random()

    state = random.getstate()
    with pytest.raises(NotStaticError, match="call 0 is aten"):
        nimble_viz.plan(forward, torch.randn(3))
    assert random.getstate() == state
    with pytest.raises(CaptureError, match="gives the host a tensor") as caught:
        nimble_viz.plan(lambda x: x * 2 if x.sum() > 0 else x, torch.randn(3))
    assert "test_plan.py" in caught.value.where


def refuse(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        nimble_viz.plan(*args, **kwargs)
    return caught.value.what


def test_wrong_arguments_are_named() -> None:
    x = torch.randn(2, 16)
    assert "cannot be planned for" in refuse(Wide(), x, target="meta")
    assert "is no device" in refuse(Wide(), x, target="gpu")
    assert "is no device" in refuse(Wide(), x, target=None)
    assert "Wide itself" in refuse(Wide, x)
    assert "no tensor among the inputs" in refuse(Wide())
    assert "kwargs is a list" in refuse(Wide(), x, kwargs=[1])
    assert "not an Options" in refuse(Wide(), x, options={"policy": "single"})
    assert "is not initialised" in refuse(nn.LazyLinear(3), x)
