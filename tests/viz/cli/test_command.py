"""The command line: exit codes, messages, files, and flags that come from ``Options``."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nimble_viz.collect.compare
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError
from nimble_viz import __version__, load
from nimble_viz.cli.command import main
from nimble_viz.collect.progress import Progress
from nimble_viz.collect.sampler import Counts
from nimble_viz.render.html import page
from nimble_viz.render.report import Report
from tests.support.sample_reports import sample_report

ROOT = Path(__file__).parents[3]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``compare`` was called with; it measures nothing."""
    seen: dict[str, Any] = {}

    def compare(model: Any, *args: Any, **named: Any) -> Any:
        seen.update(model=model, args=args, **named)
        if "raises" in seen:
            raise seen["raises"]
        return sample_report(12, complete=seen.get("complete", True))

    monkeypatch.setattr(nimble_viz.collect.compare, "compare", compare)
    return seen


def test_compare_prints_the_report(called: dict[str, Any], factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--fuse", "library", "--max-streams", "none", "--against", "eager-tuned, compile:reduce-overhead"]
    assert main(["compare", f"{factory}:three", *line]) == 0
    assert "nimble_viz: SampleNet" in capsys.readouterr().out
    assert (called["args"], called["kwargs"]) == ((1, 2), {"scale": 3})
    assert called["options"] == Options(fuse="library", max_streams=None)
    assert called["against"] == ("eager-tuned", "compile:reduce-overhead")
    assert called["progress"] is None


@pytest.mark.parametrize(("place", "said"), [("no/r.nimble", "there is no folder"), (".", "is a folder")])
def test_a_file_that_cannot_be_written_is_said_before_measuring(
    called: dict[str, Any], factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, said: str
) -> None:
    assert main(["compare", f"{factory}:two", "--save", str(tmp_path / place)]) == 2
    assert said in capsys.readouterr().err
    assert not called


def test_quiet_and_files(
    called: dict[str, Any], factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, page = tmp_path / "r.nimble", tmp_path / "r.html"
    assert main(["compare", f"{factory}:two", "--quiet", "--save", str(saved), "--html", str(page)]) == 0
    assert capsys.readouterr().out == ""
    assert type(called["progress"]) is Progress
    assert load(saved) == sample_report(12)
    assert page.stat().st_size > 1000


def test_an_interruption_keeps_what_there_is(
    called: dict[str, Any], factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called["complete"] = False
    saved = tmp_path / "r.nimble"
    assert main(["compare", f"{factory}:two", "--save", str(saved)]) == 130
    assert load(saved).complete is False
    assert "interrupted; what was measured is in" in capsys.readouterr().err


def test_an_interruption_before_anything(
    called: dict[str, Any], factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    called["raises"] = KeyboardInterrupt()
    assert main(["compare", f"{factory}:two"]) == 130
    assert "before anything" in capsys.readouterr().err


def test_an_error_is_its_message(called: dict[str, Any], factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    called["raises"] = CaptureError("a host read", where="net.py:3", fix="do not")
    assert main(["compare", f"{factory}:two"]) == 1
    more = f"all blockers at once: python -m nimble_viz diagnose {factory}:two\n"
    assert capsys.readouterr().err == f"error: a host read\n  where: net.py:3\n  to do: do not\n{more}"
    with pytest.raises(CaptureError):
        main(["compare", f"{factory}:two", "--traceback"])


@pytest.mark.parametrize("line", [[], ["compare", "json:loads", "--tune", "much"]])
def test_bad_usage(line: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line)
    assert caught.value.code == 2


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sample_report(12).save(tmp_path / "r.nimble")
    assert main(["show", str(path), "--html", str(tmp_path / "r.html")]) == 0
    assert "nimble_viz: SampleNet" in capsys.readouterr().out
    assert (tmp_path / "r.html").exists()
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load(path).summary()


def test_show_is_short_unless_all_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(sample_report(12).save(tmp_path / "r.nimble"))
    assert main(["show", path]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 12
    assert main(["show", path, "--full"]) == 0
    full = capsys.readouterr().out
    assert "Streams and synchronisations" in full
    assert "Streams and synchronisations" not in short


def test_diff_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (sample_report(12).save(tmp_path / name) for name in ("old.nimble", "new.nimble"))
    assert main(["diff", str(old), str(new), "--html", str(tmp_path / "d.html")]) == 0
    assert capsys.readouterr().out.startswith("nimble_viz diff: SampleNet")
    assert (tmp_path / "d.html").read_text(encoding="utf-8") == page(load(new), before=load(old))


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
    for name in ("bad", "bad.json.gz"):
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


def test_as_a_program(tmp_path: Path) -> None:
    """A full disk is said; a reader that has had enough is not."""
    path = str(sample_report(12).save(tmp_path / "r.nimble"))

    def run(line: str, stdout: Any = subprocess.PIPE, encoding: str = "utf-8") -> tuple[int, str, str]:
        command = [sys.executable, "-m", "nimble_viz", *line.split()]
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, timeout=60, env=environment)
        return done.returncode, (done.stdout or b"").decode(), done.stderr.decode()

    assert run("--version")[1].strip() == f"nimble_viz {__version__}"
    shown = run(f"show {path}")[1]
    assert "\x1b" not in shown
    assert "µs" in shown
    assert run(f"show {path}", encoding="ascii")[0] == 0
    for line, code in {f"show {path}": 0, f"gate {path} --max-calls 1": 1}.items():
        reads, writes = os.pipe()
        os.close(reads)
        try:
            assert run(line, writes) == (code, "", "")
        finally:
            os.close(writes)
    if Path("/dev/full").exists():
        with open("/dev/full", "wb") as full:
            code, _, said = run(f"diff {path} {path} --json", full)
        assert (code, said.splitlines()[0]) == (2, "error: standard output: No space left on device")


def test_diagnose(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", f"{factory}:fine"]) == 0
    assert "ReLU can be prepared." in capsys.readouterr().out
    assert main(["diagnose", f"{factory}:blocked"]) == 1
    assert "if tensor:" in capsys.readouterr().out
    assert main(["diagnose", "--json", f"{factory}:blocked"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["diagnose", "--training", f"{factory}:fine"]) == 2
    said = capsys.readouterr().err
    assert "diagnose looks at the forward pass alone" in said
    assert f"for training: python -m nimble_viz compare {factory}:fine --training" in said


def test_names_of_files_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = tmp_path / "a\x1b[31m\x07.nimble"
    assert main(["show", str(hostile)]) == 2
    hostile.write_bytes(b"nothing")
    assert main(["show", str(hostile)]) == 2
    out, err = capsys.readouterr()
    assert "a\N{REPLACEMENT CHARACTER}[31m" in err
    assert not set(out + err) & {"\x1b", "\x07"}
