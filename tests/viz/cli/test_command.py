"""The command line: exit codes, messages, files, and flags that come from ``Options``."""

from __future__ import annotations

import gzip
import json
import os
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import nimble_viz.collect.compare
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError
from nimble_viz import __version__, load
from nimble_viz.cli.command import _parser, main
from nimble_viz.collect.progress import Progress
from nimble_viz.collect.sampler import Counts
from nimble_viz.render.report import Report
from tests.support.factories import FACTORIES
from tests.support.sample_reports import sample_report

ROOT = Path(__file__).parents[3]


class Called(dict[str, Any]):
    """What ``compare`` was called with."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """``compare`` replaced by one that measures nothing."""
    seen = Called()

    def compare(model: Any, *args: Any, **named: Any) -> Any:
        seen.update(model=model, args=args, **named)
        if "raises" in seen:
            raise seen["raises"]
        return sample_report(12, complete=seen.get("complete", True))

    monkeypatch.setattr(nimble_viz.collect.compare, "compare", compare)
    return seen


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a .py file with factories, beside a module that it imports."""
    (tmp_path / "sibling.py").write_text("VALUE = 5\n")
    path = tmp_path / "factory_for_tests.py"
    path.write_text(FACTORIES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("sibling", "factory_for_tests"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(path)


def test_compare_prints_the_report(called: Called, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{factory}:two"]) == 0
    assert "nimble_viz: SampleNet" in capsys.readouterr().out
    assert called["args"] == (5,)
    assert called["kwargs"] == {}
    assert called["options"] == Options()
    assert called["progress"] is None


def test_keyword_inputs_and_a_module_by_name(
    called: Called, factory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(factory).parent))
    assert main(["compare", "factory_for_tests:three"]) == 0
    assert (called["args"], called["kwargs"]) == ((1, 2), {"scale": 3})
    assert capsys.readouterr().err == ""


def test_every_option_has_a_flag(called: Called, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "fuse": "library",
        "policy": "single",
        "tune": "full",
        "budget_s": "1.5",
        "max_streams": "none",
        "memory_limit": "1000",
        "outputs": "static",
        "strict": None,
        "on_new_shape": "prepare",
    }
    assert set(flags) == {field.name for field in fields(Options)}
    line = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value) if part]
    assert main(["compare", f"{factory}:two", *line]) == 0
    assert called["options"] == Options(
        fuse="library",
        policy="single",
        tune="full",
        budget_s=1.5,
        max_streams=None,
        memory_limit=1000,
        outputs="static",
        strict=True,
        on_new_shape="prepare",
    )
    with pytest.raises(SystemExit):
        main(["compare", "-h"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"--{name.replace('_', '-')}" in shown for name in flags)
    assert "cap on streams" in shown


def test_peers_are_named_with_commas(called: Called, factory: str) -> None:
    assert main(["compare", f"{factory}:two", "--against", "torchscript, compile:reduce-overhead"]) == 0
    assert called["against"] == ("torchscript", "compile:reduce-overhead")


def test_quiet_and_files(called: Called, factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, page = tmp_path / "r.nimble", tmp_path / "r.html"
    assert main(["compare", f"{factory}:two", "--quiet", "--save", str(saved), "--html", str(page)]) == 0
    assert capsys.readouterr().out == ""
    assert type(called["progress"]) is Progress
    assert load(saved) == sample_report(12)
    assert page.stat().st_size > 1000


def test_a_folder_that_is_missing_is_said_before_measuring(
    called: Called, factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", f"{factory}:two", "--save", str(tmp_path / "no" / "r.nimble")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not called


def test_a_folder_is_no_file(called: Called, factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{factory}:two", "--save", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert not called


def test_an_interruption_keeps_what_there_is(
    called: Called, factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called["complete"] = False
    saved = tmp_path / "r.nimble"
    assert main(["compare", f"{factory}:two", "--save", str(saved)]) == 130
    assert load(saved).complete is False
    assert "interrupted; what was measured is in" in capsys.readouterr().err


def test_an_interruption_before_anything(called: Called, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    called["raises"] = KeyboardInterrupt()
    assert main(["compare", f"{factory}:two"]) == 130
    assert "before anything" in capsys.readouterr().err


def test_an_interruption_while_the_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupts:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "nimble_viz.cli.command":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "nimble_viz.cli.command")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:  # the latter would end all tests
        runpy.run_module("nimble_viz", run_name="__main__")
    assert repr(ended.value) == "SystemExit(130)"
    assert capsys.readouterr().err == "interrupted before anything was measured\n"


def test_an_error_is_its_message(called: Called, factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    called["raises"] = CaptureError("a host read", where="net.py:3", fix="do not")
    assert main(["compare", f"{factory}:two"]) == 1
    more = f"all blockers at once: python -m nimble_viz diagnose {factory}:two\n"
    assert capsys.readouterr().err == f"error: a host read\n  where: net.py:3\n  to do: do not\n{more}"
    with pytest.raises(CaptureError):
        main(["compare", f"{factory}:two", "--traceback"])


@pytest.mark.parametrize("line", [[], ["compare"], ["compare", "json:loads", "--tune", "much"], ["nothing"]])
def test_bad_usage(line: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line)
    assert caught.value.code == 2


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sample_report(12).save(tmp_path / "r.nimble")
    assert main(["show", str(path), "--html", str(tmp_path / "r.html")]) == 0
    assert "nimble_viz: SampleNet" in capsys.readouterr().out
    assert (tmp_path / "r.html").exists()


def test_show_what_is_missing_or_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "nothing.nimble")]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "bad.nimble").write_bytes(b"bad")
    assert main(["show", str(tmp_path / "bad.nimble")]) == 2
    assert "not a gzip file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "show BAD",
        "export BAD out.json",
        "annotate BAD --report GOOD",
        "annotate GOOD --report BAD",
        "diff BAD GOOD",
        "diff GOOD BAD",
        "gate BAD",
        "gate GOOD --baseline BAD",
        "profile BAD.json",
        "profile BAD.json.gz",
    ],
)
@pytest.mark.parametrize("damage", ["missing", "cut short", "not ours", "newer"])
def test_a_file_that_says_nothing_is_bad_input_to_every_command(
    line: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = sample_report(12).save(tmp_path / "good.nimble")
    whole = good.read_bytes()
    content = {
        "cut short": whole[: len(whole) // 2],
        "not ours": b"bad",
        "newer": gzip.compress(gzip.decompress(whole).replace(b'"nimble_report":', b'"nimble_report":9', 1)),
    }
    for name in ("bad", "bad.json", "bad.json.gz"):
        if damage in content:
            (tmp_path / name).write_bytes(content[damage])
    places = line.replace("GOOD", str(good)).replace("BAD", str(tmp_path / "bad")).replace("out.", f"{tmp_path}/out.")
    assert main(places.split()) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_what_follows_the_script_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Any] = []

    def profile_script(script: Path, *given: Any, **named: Any) -> tuple[Report, int]:
        run.append((script.name, *given, named))
        return sample_report(12), 7

    monkeypatch.setattr("nimble_viz.collect.profile.profile_script", profile_script)
    assert main(["profile", "--quiet", "--stop", "--timed", "4", "train.py", "--html", "--epochs", "3"]) == 7
    assert run == [("train.py", ["--html", "--epochs", "3"], Counts(3, 4, 3), {"stop": True})]


def test_the_readme_writes_options_of_profile_before_the_script() -> None:
    lines = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "viz profile " in line]
    assert lines
    for line in lines:
        words = line.partition("#")[0].split()
        found = _parser().parse_args(words[words.index("profile") :])
        assert not {one.partition("=")[0] for one in found.arguments} & {"--html", "--save", "--stop", "--quiet"}, line


def test_as_a_program(tmp_path: Path) -> None:
    path = sample_report(12).save(tmp_path / "r.nimble")

    def run(*line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "nimble_viz", *line]
        return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, env=environment)

    assert run("--version").stdout.decode().strip() == f"nimble_viz {__version__}"
    shown = run("show", str(path), PYTHONIOENCODING="utf-8")
    assert shown.returncode == 0
    assert b"\x1b" not in shown.stdout
    assert "µs" in shown.stdout.decode()
    assert run("show", str(path), PYTHONIOENCODING="ascii").returncode == 0


def test_a_full_disk_is_said_and_a_reader_that_has_had_enough_is_not(tmp_path: Path) -> None:
    path = str(sample_report(12).save(tmp_path / "r.nimble"))

    def run(line: str, stdout: Any) -> tuple[int, str]:
        command = [sys.executable, "-m", "nimble_viz", *line.split()]
        done = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, timeout=60, text=True)
        return done.returncode, done.stderr

    lines = {f"show {path}": 0, f"diff {path} {path} --json": 0, f"gate {path} --max-calls 1": 1}
    for line, code in lines.items():
        reads, writes = os.pipe()
        os.close(reads)
        try:
            assert run(line, writes) == (code, "")
        finally:
            os.close(writes)
        if Path("/dev/full").exists():
            with open("/dev/full", "wb") as full:
                code, said = run(line, full)
            assert (code, said.splitlines()[0]) == (2, "error: standard output: No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sample_report(12).save(tmp_path / "r.nimble")
    assert main(["show", str(path), "--html", "/dev/full"]) == 2
    assert "/dev/full: No space left on device" in capsys.readouterr().err


# -- diagnose ------------------------------------------------------------------------------------------------------

DIAGNOSED = """
import torch

class Net(torch.nn.Module):
    def forward(self, x, *, scale):
        return x * scale if x.sum() > 0 else x[x > 1]

def blocked():
    return Net().eval(), [torch.ones(3)], {"scale": 2.0}

def fine():
    return torch.nn.ReLU(), [torch.ones(3)]
"""


def test_diagnose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "diagnosed_for_tests.py"
    path.write_text(DIAGNOSED)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "diagnosed_for_tests", raising=False)
    assert main(["diagnose", f"{path}:fine"]) == 0
    assert "ReLU can be prepared." in capsys.readouterr().out
    assert main(["diagnose", f"{path}:blocked"]) == 1
    out = capsys.readouterr().out
    assert "Net cannot be prepared" in out
    assert "if tensor:" in out
    assert main(["diagnose", "--json", f"{path}:blocked"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["diagnose", str(path)]) == 2
    assert "MODULE:FACTORY" in capsys.readouterr().err


def test_names_of_files_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = tmp_path / "a\x1b[31m\x07.nimble"
    assert main(["show", str(hostile)]) == 2
    hostile.write_bytes(b"nothing")
    assert main(["show", str(hostile)]) == 2
    with pytest.raises(SystemExit):
        main(["diff", "a", "b", str(hostile)])
    out, err = capsys.readouterr()
    assert "a\N{REPLACEMENT CHARACTER}[31m" in err
    assert not set(out + err) & {"\x1b", "\x07"}
