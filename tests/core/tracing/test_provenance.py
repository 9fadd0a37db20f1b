"""Where a call comes from: the innermost line that is neither torch's nor this package's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from nimble_core.tracing import provenance
from nimble_core.tracing.provenance import label_of, line_inside, pass_over, place_of, warn
from nimble_core.utils.errors import NimbleWarning


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


def test_what_is_passed_over_is_a_directory_and_not_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.tracing.provenance._passed", ("/nowhere/",))
    pass_over("/some/tool")
    assert place_of(frame_at("/some/tools/mine.py"), {})[1] == "mine.py"
    assert Path(place_of(frame_at("/some/tool/its.py"), {})[1]).name == "test_provenance.py"


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


def test_ipython_is_not_imported_for_a_label() -> None:
    code = (
        "import sys; from nimble_core.tracing.provenance import label_of; "
        "print(label_of('/a/b.py'), 'IPython' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["b.py", "False"]


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
