"""``doctor`` says what works and never crashes, whatever is missing or broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_core.torch_compat.private import Private, all_entries
from nimble_core.torch_compat.unchanged import InPython
from nimble_viz.cli.command import main
from nimble_viz.cli.doctor import CHECKS, Diagnosis, Finding, examine
from tests.support.hidden import hiding

ROOT = Path(__file__).parents[3]
ALWAYS = ("torch", "networkx", "plotly", "ipywidgets", "graphviz", "nvtx", "rich", "msgspec")
SOMETIMES = ("numpy", "pandas", "triton", "cuda", "cupti", "pynvml", "IPython", "ipykernel")
STATES = {"works", "fallback", "off", "broken"}
RUN = "import sys\nfrom nimble_viz.cli.command import main\nsys.exit(main(sys.argv[1:]))\n"


def doctor(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a new interpreter, after the code ``before``."""
    return subprocess.run(
        [sys.executable, "-c", before + RUN, "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def states(*arguments: str, **more: Any) -> tuple[int, dict[str, str]]:
    """Exit code, and the state of each feature."""
    done = doctor("--json", *arguments, **more)
    assert "Traceback" not in done.stderr, done.stderr
    assert "profiler_start" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode
    assert [one["feature"] for one in found["findings"]] == [feature for _, feature, *_ in CHECKS]
    for one in found["findings"]:
        assert one["state"] in STATES
        assert one["why"]
        assert one["fix"] or one["state"] != "broken"
    return done.returncode, {one["feature"]: one["state"] for one in found["findings"]}


@pytest.fixture(scope="module")
def here() -> Diagnosis:
    return examine()


def test_the_process_is_as_it_was(here: Diagnosis) -> None:
    """Once ``here`` has imported the packages, some of which set variables."""
    before = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_num_threads(), dict(os.environ)
    examine()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.is_grad_enabled(), torch.get_num_threads(), dict(os.environ)) == before[1:]


def test_this_machine(here: Diagnosis) -> None:
    found = {one.feature: one for one in here.findings}
    assert here.exit_code == 0
    assert here.verdict.startswith("Ready: ")
    for feature in ("torch", "replay", "report files", "terminal", "replay timeline"):
        assert found[feature].state == "works", found[feature]
    assert "equal to eager" in found["replay"].why


@pytest.mark.gpu
def test_a_gpu(here: Diagnosis) -> None:
    found = {one.feature: one for one in here.findings}
    assert found["GPU and driver"].state == "works"
    assert "as a CUDA graph" in found["replay"].why
    assert found["captured graph"].state == "works"
    assert found["planned memory"].state == "works", found["planned memory"]
    assert "CUPTI saw" in found["replay timeline"].why or found["replay timeline"].state == "fallback"


@pytest.mark.gpu
def test_a_tool_that_watches_the_gpu() -> None:
    code, found = states(NSYS_PROFILING_SESSION_ID="1")
    assert code == 0
    assert found["replay timeline"] == found["eager profile"] == "fallback"


def test_what_is_optional_may_be_missing() -> None:
    code, found = states(before=hiding([name for name in (*ALWAYS, *SOMETIMES) if name not in ("torch", "msgspec")]))
    assert code == 1
    assert found["terminal"] == "broken"
    assert {found[name] for name in ("NVTX ranges", "graphviz dot", "widgets", "statistics", "networkx")} == {"off"}
    assert found["data frames"] == "fallback"
    assert found["replay"] in ("works", "broken")  # without numpy, torch itself may not be whole


RAISING = """
import sys
class Breaking:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise {error}
sys.meta_path.insert(0, Breaking())
"""


@pytest.mark.parametrize(
    "error", ["OSError('libfoo.so: cannot open')", "RuntimeError('CUDA driver\\ntoo old')", "SystemExit(3)"]
)
def test_packages_that_break_on_import(error: str) -> None:
    names = ("torch", "nvtx", "graphviz", "ipykernel", "pandas", "plotly.graph_objects", "msgspec")
    code, found = states(before=RAISING.format(names=names, error=error))
    assert code == 1
    assert {found["torch"], found["report files"]} == {"broken"}
    assert {found["NVTX ranges"], found["graphviz dot"], found["statistics"]} == {"off"}


def test_looks_at_parameters_in_python_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.torch_compat.unchanged._found", [InPython])
    (found,) = (one for one in examine().findings if one.feature == "checks of calls")
    assert (found.state, found.fix) == ("fallback", "apt install g++ python3-dev")


def test_a_tool_that_is_not_heard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/no/such/tool.so")
    monkeypatch.setattr("nimble_core.profiling.nvtx.listener", lambda: None)
    (found,) = (one for one in examine().findings if one.feature == "NVTX ranges")
    assert (found.state, found.fix) == ("off", "Nsight Systems after 2024.2")


def test_a_program_that_hangs_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dot = tmp_path / "dot"
    dot.write_text("#!/bin/sh\nexit 1\n")
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {one.feature: one for one in examine().findings}["graphviz dot"]
    assert (found.state, found.why) == ("fallback", f"{dot} drew nothing")


def test_text_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = tuple(
        Finding("Running", f"feature {state}", state, "why", "what to do")  # type: ignore[arg-type]
        for state in ("works", "fallback", "off", "broken")
    )
    monkeypatch.setattr("nimble_viz.cli.doctor.examine", lambda: Diagnosis(findings))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    for one in findings:
        assert f"  {one.state:<8}  {one.feature}: why\n            -> what to do\n" in shown
    assert [one["feature"] for one in told["findings"]] == [one.feature for one in findings]
    assert shown.startswith(told["verdict"])


def test_a_check_that_nobody_thought_of_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(on: object) -> Any:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr("nimble_viz.cli.doctor.CHECKS", (("Running", "a", False, wrong), ("Running", "b", True, wrong)))
    assert [(one.state, one.why) for one in examine().findings] == [
        ("off", "ZeroDivisionError: nobody thought of this"),
        ("broken", "ZeroDivisionError: nobody thought of this"),
    ]


def test_each_private_name_of_torch_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_viz.cli.doctor.CHECKS", ())
    entries = all_entries()
    found = examine()
    assert [one.feature for one in found.internals] == [entry.name.replace(":", ".") for entry in entries]
    assert {one.state for one in found.internals} <= {"works", "off"}
    assert found.to_text().count("\n") < 10, "one line for all that are as they should be"
    monkeypatch.setattr(Private, "find", lambda self: None)
    found = examine()
    states = {entry.name: one.state for entry, one in zip(entries, found.internals, strict=True)}
    assert states["torch._C:_will_engine_execute_node"] == "broken"
    assert states["torch._C:_current_autograd_node"] == "fallback"
    assert "torch._C._will_engine_execute_node" in found.verdict
    text = found.to_text()
    assert "calls of a backward have the source line of the call before" in text
    assert "-> a torch from 2.11 to 2.15" in text


def test_another_profiler_is_left_alone() -> None:
    with torch.profiler.profile() as theirs:
        found = {one.feature: one for one in examine().findings}["eager profile"]
        torch.ones(2).exp()
    assert found.state == "fallback"
    assert "another profiler is running" in found.why
    assert any(event.name == "aten::exp" for event in theirs.events())
