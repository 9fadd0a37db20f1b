"""The notebook extension in a real shell and in a real kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from nimble_core.utils.errors import CaptureError, InputError
from nimble_viz.render.report import Report
from tests.repository.test_readme import GUIDE, blocks

PREPARED = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 16)
        self.outer = torch.nn.Linear(16, 2)

    def forward(self, x, *, mask=None):
        x = torch.relu(self.inner(x))
        return self.outer(x if mask is None else x * mask)

def dynamic(x):
    return x * 2 if x.sum() > 0 else x

def wrong(x):
    return x.nothing

model = Net().eval()
x = torch.randn(4, 8)
m = torch.ones(4, 16)
"""


@pytest.fixture
def run(shell: Any, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Any]:
    """Runs a cell; its result, with what it printed as ``printed``."""

    def run(cell: str) -> Any:
        capsys.readouterr()
        result = shell.run_cell(cell, store_history=True)
        told = capsys.readouterr()
        result.printed = told.out + told.err
        return result

    assert run("%load_ext nimble_viz").success
    assert run(PREPARED).success
    return run


def registered(shell: Any) -> tuple[Any, ...]:
    manager = shell.magics_manager
    return (
        manager.magics["line"].get("nimble"),
        manager.magics["cell"].get("nimble"),
        vars(manager.user_magics).get("nimble"),
    )


def test_loads_and_unloads_in_any_order(shell: Any) -> None:
    before = registered(shell)
    for step in ("unload", "load", "load", "reload", "unload", "unload", "load", "unload"):
        shell.run_line_magic(f"{step}_ext", "nimble_viz")
        assert (shell.find_line_magic("nimble") is None) == (step == "unload")
        assert (shell.find_cell_magic("nimble") is None) == (step == "unload")
    assert registered(shell) == before == (None, None, None)


# -- %nimble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    ["torch.randn(4, 8)", "x mask='m > 0'", "*(x,) **dict(mask=m)", "x,"],
)
def test_the_value_is_the_report(run: Any, inputs: str) -> None:
    result = run(f"%nimble model {inputs} --tune off --fuse none")
    assert result.success
    assert isinstance(result.result, Report)
    assert result.result.model == "Net"
    assert ("mul" in {call.label for call in result.result.program.calls}) == ("mask" in inputs)
    assert "nimble_viz: Net, float32, batch 4" in result.printed


def test_options_reach_compare_and_a_name_is_bound(run: Any, shell: Any) -> None:
    assert run("%nimble model x --policy single -o report --tune off --against eager-tuned;").printed == ""
    report = shell.user_ns["report"]
    assert [plan.policy for plan in report.schedules] == ["single"]
    assert [peer.name for peer in report.peers] == ["eager-tuned"]
    again = "def f(local):\n    again = %nimble model local --tune off\n    return again\nf(x).batch"
    assert run(again).result == 4


def test_policies_and_peers_of_the_users_own(run: Any, shell: Any) -> None:
    run(
        "from nimble_core.scheduling.policies import plan_streams\n"
        "def zero(graph, costs):\n    return plan_streams(graph, [0] * graph.size, policy='zero')\n"
        "class Same:\n    name = 'same'\n    def prepare(self, model, args, kwargs):\n        return model"
    )
    assert run("%nimble model x --policy zero --tune off --against Same() -o report;").success
    report = shell.user_ns["report"]
    assert report.schedule("zero") is not None
    assert [peer.name for peer in report.peers] == ["same"]


def test_training_is_compared_with_keywords_of_compare(run: Any) -> None:
    line = "%nimble model x --training --loss-fn 'lambda y: y.sum()' --tune off --fuse none"
    result = run(f"model.train()\n{line}")
    assert result.success
    assert "backward" in {call.phase for call in result.result.program.calls}


@pytest.mark.parametrize("magic", ["%nimble -h", "%nimble model --help", "%%nimble -h\nran = 1"])
def test_help_is_printed_and_nothing_runs(run: Any, shell: Any, magic: str) -> None:
    result = run(magic)
    assert result.success
    assert result.result is None
    assert "--max-streams" in result.printed
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ("%nimble model", InputError, "required: INPUT"),
        ("%nimble model x --policy none", InputError, "no policy 'none'"),
        ("%nimble model x --against nobody", InputError, "nobody"),
        ("%nimble model (x", InputError, "never closed"),
        ("%nimble model a=x x", InputError, "positional argument follows"),
        ("%nimble lambda x", InputError, "not a Python expression"),
        ("%nimble modle x", NameError, "'modle' is not defined"),
        ("%nimble dynamic x", CaptureError, "to do:"),
        ("%%nimble\nran = 1\nran = = 2", InputError, "line 3"),
    ],
)
def test_errors_are_one_message(run: Any, shell: Any, line: str, kind: type, said: str) -> None:
    result = run(line)
    assert type(result.error_in_exec) is kind
    assert said in result.printed
    assert "Traceback" not in result.printed
    assert len(result.printed.strip().splitlines()) <= 5
    assert "ran" not in shell.user_ns


def test_an_error_of_the_model_shows_the_users_frames_only(run: Any) -> None:
    for line, shown in (("%nimble wrong x", "x.nothing"), ("%nimble model torch.ones(4, 9)", "self.inner(x)")):
        printed = run(line).printed
        assert shown in printed
        assert "nimble_core" not in printed
        assert "nimble_viz" not in printed
        assert "run_line_magic" not in printed
    assert "nimble_core" in run("%nimble wrong x --traceback").printed


# -- %%nimble ------------------------------------------------------------------------------------------------------


def test_a_cell_that_is_one_call_is_captured(run: Any, shell: Any) -> None:
    result = run("%%nimble -o report --tune off\ny = model(x, mask=m)\nz = y.sum()\nz")
    assert result.success
    report = shell.user_ns["report"]
    assert report is result.result
    assert report.model == "Net"
    assert report.measurement("single") is not None
    assert shell.user_ns["z"] == shell.user_ns["y"].sum()
    assert "Captured: the call of Net, line 2" in result.printed
    assert "under the profiler" in result.printed
    assert result.printed.index("tensor(") < result.printed.index("Captured")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("for _ in range(30):\n    y = model(x)", "more than once (first Net, line 3)"),
        ("y = model(x)\nz = torch.nn.ReLU()(y)", "more than once"),
        ("y = x @ x.T", "no module is called"),
        ("y = model(x).sum()\ny.backward()", "a backward or an optimizer ran"),
        ("class Dynamic(torch.nn.Module):\n    forward = staticmethod(dynamic)\ny = Dynamic()(x)", "to do:"),
    ],
)
def test_a_cell_that_is_not_one_call_says_why(run: Any, shell: Any, body: str, why: str) -> None:
    result = run(f"%%nimble -o report\n{body}")
    assert result.success
    assert result.result is shell.user_ns["report"]
    assert result.result.sampling.subject.startswith("In[")
    assert "Not captured" in result.printed
    assert why in result.printed
    assert isinstance(shell.user_ns["y"], torch.Tensor)


def test_loops_are_sampled_and_capture_can_be_left_out(run: Any) -> None:
    report = run("%%nimble --warmup 1 --timed 4 --profiled 2\nfor _ in range(30):\n    y = model(x)").result
    assert report.sampling.iteration == "one call of the outermost module"
    assert (report.sampling.timed, report.sampling.profiled) == (4, 2)
    result = run("%%nimble --no-capture\ny = model(x)")
    assert result.result.sampling is not None
    assert "aptured" not in result.printed.partition("nimble_viz")[0]


def test_a_cell_without_torch_keeps_its_values(run: Any, shell: Any) -> None:
    result = run("%%nimble -o nothing\nran = 41 + 1\nran")
    assert result.success
    assert "nothing was profiled" in result.printed
    assert "42" in result.printed
    assert shell.user_ns["ran"] == 42
    assert "nothing" not in shell.user_ns


@pytest.mark.parametrize("error", ["1 / 0", "raise KeyboardInterrupt", "model(torch.ones(4, 9))"])
def test_an_error_in_a_cell_leaves_everything_as_it_was(run: Any, shell: Any, error: str) -> None:
    result = run(f"%%nimble -o report\nhalf = model(x)\n{error}")
    assert type(result.error_in_exec) in (ZeroDivisionError, KeyboardInterrupt, RuntimeError)
    assert error in result.printed
    assert "nimble_viz" not in result.printed
    assert "run_cell_magic" not in result.printed
    assert "half" in shell.user_ns
    assert "report" not in shell.user_ns
    assert not _global_forward_hooks
    assert not _global_forward_pre_hooks
    assert run("%%nimble -o report\nmodel(x)").success


def test_the_magics_of_the_guide_run(run: Any, shell: Any) -> None:
    (block,) = blocks("ipython", GUIDE)
    shell.user_ns |= {"model": torch.nn.Linear(128, 4).eval(), "x": torch.randn(4, 128)}
    for line in block.splitlines():
        assert run(line).success, line
    assert shell.user_ns["report"].model == "Linear"


@pytest.mark.parametrize(
    ("cell", "line", "code"),
    [
        ("z = 1\n%nimble layers x --tune off -o report;", 2, "get_ipython().run_line_magic"),
        ("%%nimble --tune off -o report\nz = 1\n\ny = layers(x)", 4, "y = layers(x)"),
        ("%%nimble --no-capture -o report\nfor _ in range(30):\n    y = layers(x)", 3, "    y = layers(x)"),
    ],
)
def test_a_model_of_torchs_modules_alone_comes_from_the_line_of_the_cell(
    run: Any, shell: Any, monkeypatch: pytest.MonkeyPatch, cell: str, line: int, code: str
) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert run("layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())").success
    assert run(cell).success
    report = shell.user_ns["report"]
    number = len(shell.user_ns["In"]) - 1
    assert {(one.file, one.line) for call in report.eager_calls for one in call.origins} == {(f"In[{number}]", line)}
    (piece,) = report.sources
    assert piece.lines[line - piece.first].startswith(code)
