"""Where a call comes from, also one that asks for too much memory: module, and the line of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import DeviceError, Nimble, Options, TrainStep
from nimble_core.tracing import provenance
from nimble_core.tracing.provenance import label_of, line_inside, memory_explained, pass_over, place_of, warn
from nimble_core.utils.errors import NimbleWarning
from nimble_viz import compare
from tests.support.models import Deep
from tests.support.recordings import recorded


def frame_at(file: str) -> FrameType:
    """The frame of a function whose code says that it lies in ``file``."""
    found: dict[str, Any] = {}
    exec(compile("def here(look):\n    return look()", file, "exec"), found)
    frame: FrameType = found["here"](sys._getframe)
    return frame


ROOT = Path(torch.__path__[0])


@pytest.mark.parametrize("package", ["torchvision", "torch_geometric", "torchaudio"])
def test_packages_whose_name_begins_with_torch_are_not_torch(package: str) -> None:
    file = ROOT.with_name(package) / "models" / "net.py"
    frame = frame_at(str(file))
    assert place_of(frame, {}) == ("", f"{package}/models/net.py", 2)
    assert line_inside(frame) == (f"{package}/models/net.py", 2)


@pytest.mark.parametrize("file", [str(ROOT / "nn" / "functional.py"), "<frozen runpy>"])
def test_torch_and_what_runs_modules_stand_for_nobody(file: str) -> None:
    module, file, _ = place_of(frame_at(file), {})
    assert (module, Path(file).name) == ("", "test_provenance.py")


def test_a_warning_is_given_where_the_user_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.tracing.provenance._passed", (f"{Path(provenance.__file__).parents[1]}/",))
    pass_over("/some/tool")
    for file, named in (("/some/tool/its.py", __file__), ("/some/tools/mine.py", "/some/tools/mine.py")):
        found: dict[str, Any] = {}
        exec(compile("def here(warn):\n    warn('told')", file, "exec"), found)
        with pytest.warns(NimbleWarning, match="told") as caught:
            found["here"](warn)
        assert [one.filename for one in caught] == [named]


def test_files_are_called_by_their_place_on_the_import_path_and_others_by_their_name() -> None:
    assert label_of(torch.__file__) == "torch/__init__.py"
    assert label_of("/nowhere/on/the/path/net.py") == "net.py"


def test_a_cell_is_called_by_the_number_of_its_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compilerop = pytest.importorskip("IPython.core.compilerop", reason="needs IPython: make test installs it")
    compiler = compilerop.CachingCompiler()
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=compiler))
    name = compiler.cache("x = 1", 12)
    assert place_of(frame_at(name), {}) == ("", "In[12]", 2)
    compiler.cache("x = 1\ny = 2", 13)
    assert (label_of(name), label_of("/nowhere/on/the/path/net.py")) == ("In[12]", "net.py")
    monkeypatch.setattr(compiler, "get_code_name", lambda *_: name)
    compiler.cache("x = 1", 14)
    assert label_of(name) == "In[14]"


def test_origins_name_the_innermost_module_and_the_line() -> None:
    model = Deep(layers=2)
    program = recorded(model, torch.randn(1, 8)).program
    assert [call.module for call in program.calls] == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    for call in program.calls:
        (origin,) = call.origins
        assert origin.operator == call.operator
        assert origin.file.endswith("modules.py")
        assert not origin.file.startswith("/")
        assert origin.line > 0


def test_origins_in_a_library_are_relative_paths() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    program = recorded(BertModel(config).eval(), torch.randint(0, 50, (1, 4))).program
    files = {call.origins[0].file for call in program.calls}
    assert any(file.startswith("transformers/models/bert/") for file in files)
    assert not [file for file in files if file.startswith("/") or not file]
    assert any(call.module.startswith("encoder.layer.0.attention") for call in program.calls)


class Greedy(nn.Module):
    """Asks for far too much on more than four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.add_(1)
        if len(x) > 4:
            x = x + torch.empty(1 << 50)[:1]
        return self.layer(x)


QUICK = Options(tune="off")
LARGE = torch.ones(5, 4)
WAYS: dict[str, Callable[[nn.Module], object]] = {
    "prepare": lambda model: Nimble(model, QUICK).prepare(LARGE),
    "step": lambda model: TrainStep(
        model, lambda out: out.sum(), torch.optim.SGD(model.parameters(), 0.1), options=QUICK
    ).prepare(LARGE),
    "compare": lambda model: compare(model, LARGE),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_named_and_the_model_left_as_it_was(way: str) -> None:
    greedy = Greedy()
    model = nn.Sequential(nn.ReLU(), greedy)
    net = Nimble(model, QUICK).prepare(LARGE[:2])
    with pytest.raises(DeviceError) as caught:
        WAYS[way](model)
    text = str(caught.value)
    assert "out of memory on the host, which was asked for 4194304 GiB more" in text
    assert "where: 1 at " in text
    assert "test_provenance.py:" in text
    assert "a smaller batch" in text
    assert greedy.runs == 0
    with torch.no_grad():
        assert torch.equal(net(LARGE[:2]), model(LARGE[:2]))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), "a GPU, .* for 2.50 GiB more"),
        (MemoryError(), "on the host$"),
    ],
)
def test_errors_of_allocators(error: Exception, told: str) -> None:
    def fail() -> Any:
        try:
            raise error
        except type(error) as cause:
            raise RuntimeError("kernels do not run") from cause

    with pytest.raises(DeviceError) as caught, memory_explained(fail):
        fail()
    with pytest.raises(DeviceError, match=told):
        raise DeviceError(caught.value.what)
