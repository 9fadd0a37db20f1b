"""Scripts as they are, under ``profile`` and from the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

import nimble_viz
from nimble_core.utils.errors import InputError
from nimble_viz.cli.command import main
from nimble_viz.collect.profile import profile, profile_script
from nimble_viz.collect.sampler import Counts

SCRIPT = """
import sys
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 16)
        self.outer = torch.nn.Linear(16, 2)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))

def main(batches, workers):
    data = torch.utils.data.TensorDataset(torch.randn(batches * 4, 8), torch.randint(0, 2, (batches * 4,)))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("trained", len(sys.argv))

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    argv, path, following = sys.argv, sys.path[:], _BaseDataLoaderIter.__next__
    yield
    assert (sys.argv, sys.path) == (argv, path)
    assert _BaseDataLoaderIter.__next__ is following


def written(folder: Path, text: str) -> Path:
    path = folder / "own.py"
    path.write_text(f"import sys, torch\n{text}\n")
    return path


LOOP = "net = torch.nn.Linear(4, 4)\nfor _ in range(40):\n    net(torch.ones(2, 4))\n"


def test_a_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, code = profile_script(script, ["30", "0", "0"], Counts())
    assert (code, capsys.readouterr().out) == (0, "trained 4\n")
    taken, profile_ = report.sampling, report.overhead
    assert taken is not None
    assert profile_ is not None
    assert (taken.subject, taken.iteration) == ("train.py", "one batch of the data loader")
    assert (taken.timed, taken.profiled) == (10, 3)
    assert taken.loader_ns > 0
    assert [one.phase for one in profile_.phases] == ["loader", "forward", "backward", "optimizer"]
    assert profile_.loader_ns > 0
    assert [call.label for call in report.program.calls].count("linear") == 2
    linear, relu = (next(c for c in report.program.calls if c.label == name) for name in ("linear", "relu"))
    lines = SCRIPT.splitlines()
    assert (linear.module, linear.origins[0].file) == ("inner", "train.py")
    assert "torch.relu(self.inner(x))" in lines[linear.origins[0].line - 1]
    assert (relu.module, relu.origins[0].line) == ("", linear.origins[0].line)
    backward = [call for call in report.program.calls if call.phase == "backward"]
    assert "cross_entropy" in lines[backward[0].origins[0].line - 1]
    assert [call.module for call in backward if call.label == "mm"] == ["outer", "outer", "inner"]
    eager = report.measurement("eager")
    assert eager is not None
    assert len(eager.samples_ns) == 10
    assert profile_.unprofiled_ns == eager.median_ns


def test_workers_of_the_loader_and_an_early_end(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, code = profile_script(script, ["40", "1", "5"], Counts(1, 2, 1), stop=True)
    assert (code, capsys.readouterr().out) == (0, "")  # it ended before it printed or failed
    assert report.sampling is not None
    assert (report.sampling.iteration, report.sampling.timed) == ("one batch of the data loader", 2)
    assert report.overhead is not None
    assert report.overhead.phases[0].phase == "loader"


def test_an_interrupted_script_is_not_complete(tmp_path: Path) -> None:
    report, code = profile_script(written(tmp_path, f"{LOOP}raise KeyboardInterrupt"), [], Counts())
    assert (report.complete, code) == (False, 130)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("raise LookupError('mine')", LookupError, "mine"),
        ("x = 1", InputError, "nothing was profiled"),
        ("sys.exit(5)", SystemExit, "5"),
    ],
)
def test_a_script_that_runs_no_operator_ends_as_it_would(
    tmp_path: Path, text: str, error: type[BaseException], said: str
) -> None:
    with pytest.raises(error, match=said):
        profile_script(written(tmp_path, text), [], Counts())


def test_the_command_line(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = tmp_path / "a.nimble", tmp_path / "a.html"
    code = main(["profile", "--save", str(out), "--html", str(html), str(script), "30", "0", "3"])
    assert code == 3  # the script's own
    text = capsys.readouterr().out
    assert text.startswith("trained 4\nnimble_viz: train.py, profile of code as it is")
    assert "-bound" in text or "Profile again on a quiet machine" in text  # a busy one has iterations unlike
    report = nimble_viz.load(out)
    assert report.sampling is not None
    assert "<html" in html.read_text()
    assert main(["profile", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["profile", "--timed", "-1", str(script)]) == 2
    assert "timed=-1" in capsys.readouterr().err


def test_a_script_that_raises_is_reported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, f"{LOOP}raise LookupError('mine')"), tmp_path / "out.nimble"
    with pytest.raises(LookupError, match="mine"):
        main(["profile", "--save", str(out), str(path)])
    assert capsys.readouterr().out.startswith("nimble_viz: own.py, ")
    taken = nimble_viz.load(out).sampling
    assert taken is not None
    assert (taken.iteration, taken.timed, taken.profiled) == ("one call of the outermost module", 10, 3)


def test_what_is_no_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "a.nimble"
    profile(torch.ones, 2, warmup=0, timed=1, profiled=1).save(report)
    assert main(["profile", str(report)]) == 2
    said = capsys.readouterr().err
    assert "is a report" in said
    assert f"show {report}" in said


def test_a_script_that_goes_elsewhere_and_keeps_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "away").mkdir()
    written(tmp_path, f"import io, os\nos.chdir('away')\nsys.stdout = io.StringIO()\n{LOOP}")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert main(["profile", "--save", "r.nimble", "own.py"]) == 0
    finally:
        os.chdir(before)
    assert (tmp_path / "r.nimble").exists()
    assert "nimble_viz: own.py" in capsys.readouterr().out
