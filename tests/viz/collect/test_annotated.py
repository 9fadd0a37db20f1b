"""``annotated``: calls of an eager run as ranges with the indices of a report, heard by a tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_core.api.nimble import Nimble
from nimble_core.profiling.nvtx import COLOURS, colour
from nimble_core.utils.errors import InputError
from nimble_viz import annotated
from tests.core.profiling.test_nvtx import DEVICES, ENGINE, as_told
from tests.support.nvtx_tool import Heard, listened
from tests.support.sample_reports import sample_report

RUN = ENGINE + "from nimble_viz import annotated\n"


def eager(ranges: list[Heard]) -> list[Heard]:
    return [one for one in ranges if one.category == "eager"]


@pytest.mark.compiler
@pytest.mark.parametrize("device", DEVICES)
def test_calls_have_the_indices_of_the_program(tmp_path: Path, device: str) -> None:
    code = RUN.replace("DEVICE", repr(device)) + (
        "import nimble_viz\n"
        "net = Nimble(model, options).prepare(x)\n"
        "options = Options(policy='single', tune='off', budget_s=0.01, fuse='none')\n"
        "report = nimble_viz.load(nimble_viz.compare(model, x, options=options).save('FILE'))\n"
        "for run, (of, without) in enumerate(((net, torch.no_grad), (report, torch.inference_mode))):\n"
        "    with without(), annotated(of, name=f'run {run}'):\n"
        "        model(x)\n"
        "print(json.dumps(told(net.engines[0])))\n"
    ).replace("FILE", str(tmp_path / "report.nimble"))
    spoken = listened(code, tmp_path)
    runs, calls = eager(spoken.ranges), spoken.said["calls"]
    assert [one.message for one in runs] == ["run 0", "run 1"]
    for one in runs:
        assert one.color == colour(None)
        assert one.payload == {"call": len(calls), "nbytes": sum(nbytes for *_, nbytes in calls)}
        # Eager runs on one stream, whatever a plan says.
        assert [as_told(call) for call in one.inside] == [
            [name, phase, COLOURS[0], index, nbytes] for name, phase, _, index, nbytes in calls
        ]


@pytest.mark.compiler
def test_operators_are_counted_where_no_program_is_given(tmp_path: Path) -> None:
    code = RUN.replace("DEVICE", "'cpu'") + (
        "with annotated():\n"
        "    loss = model(x.clone().view(2, 2, 16).reshape(4, 16)).sum()\n"
        "    loss.backward()\n"
        "print('null')\n"
    )
    (run,) = eager(listened(code, tmp_path).ranges)
    assert [call.payload["call"] for call in run.inside] == list(range(len(run.inside)))
    assert [call.message for call in run.inside][:3] == ["clone", "addmm", "relu"]
    assert run.inside[0].payload["nbytes"] == 4 * 16 * 4
    assert not {"view", "t", "detach", "empty"} & {call.message for call in run.inside}
    phases = [call.category for call in run.inside]
    assert set(phases) == {"forward", "backward"}
    assert phases == sorted(phases, reverse=True)
    assert [call.message for call in run.inside if call.category == "backward"].count("mm") >= 3


@pytest.mark.compiler
def test_operators_that_the_program_does_not_know(tmp_path: Path) -> None:
    code = RUN.replace("DEVICE", "'cpu'") + (
        "net = Nimble(model, options).prepare(x)\n"
        "with torch.no_grad(), annotated(net):\n"
        "    model(x * 2).softmax(-1)\n"
        "print(len(told(net.engines[0])['calls']))\n"
    )
    spoken = listened(code, tmp_path)
    (run,) = eager(spoken.ranges)
    indices = [call.payload["call"] for call in run.inside]
    assert indices == [-1, *range(spoken.said), -1]
    assert [run.inside[0].message, run.inside[-1].message] == ["mul", "_softmax"]


def test_without_a_tool_nothing_is_done() -> None:
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    with annotated(sample_report(3)):
        assert _get_current_dispatch_mode_stack() == []
        torch.ones(2).sum()


def test_what_has_no_calls_is_refused() -> None:
    import torch

    for wrong, said in ((3, "given a int"), (Nimble(torch.nn.Linear(2, 2)), "Nimble that is not prepared")):
        with pytest.raises(InputError, match=said), annotated(wrong):  # type: ignore[arg-type]
            pass
