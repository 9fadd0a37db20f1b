"""Where a call comes from: the innermost line that is neither torch's nor this package's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from nimble_core.origins import label_of, line_inside, pass_over, place_of


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


def test_torch_stands_for_nobody() -> None:
    module, file, _ = place_of(frame_at(str(ROOT / "nn" / "functional.py")), {})
    assert (module, Path(file).name) == ("", "test_origins.py")


def test_what_is_passed_over_is_a_directory_and_not_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimble_core.origins._passed", ("/nowhere/",))
    pass_over("/some/tool")
    assert place_of(frame_at("/some/tools/mine.py"), {})[1] == "mine.py"
    assert Path(place_of(frame_at("/some/tool/its.py"), {})[1]).name == "test_origins.py"


def test_files_are_called_by_their_place_on_the_import_path_and_others_by_their_name() -> None:
    assert label_of(torch.__file__) == "torch/__init__.py"
    assert label_of("/nowhere/on/the/path/net.py") == "net.py"
