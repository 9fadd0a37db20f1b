"""A shell of IPython, and a file with factories of models."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FACTORIES = """
import sibling

def model(x): return x
def two(): return model, (sibling.VALUE,)
def one(): return model, sibling.VALUE
def named(): return model, {"scale": 3}
def three(): return model, [1, 2], {"scale": 3}
def wrong(): return model

def step():
    return {"model": model, "args": [1], "kwargs": {"scale": 2}, "target": 3, "loss_fn": max, "clip_grad_norm": 0.5}

def misspelt(): return {"model": model, "args": (1,), "loss": max}
def trained(): return {**step(), "training": True}

def fine():
    import torch
    return torch.nn.ReLU(), [torch.ones(3)]

def blocked():
    return lambda x: x * 2 if x.sum() > 0 else x, fine()[1]

number = 3
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a .py file with factories, beside a module that it imports."""
    (tmp_path / "sibling.py").write_text("VALUE = 5\n")
    path = tmp_path / "factories_for_tests.py"
    path.write_text(FACTORIES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("sibling", "factories_for_tests"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(path)


@pytest.fixture
def shell() -> Iterator[Any]:
    interactiveshell = pytest.importorskip(
        "IPython.core.interactiveshell", reason="needs IPython: make test installs it"
    )
    from traitlets.config import Config

    main = sys.modules["__main__"]  # which a shell replaces by its own, and what starts processes asks
    shell = interactiveshell.InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    shell.run_line_magic("colors", "nocolor")
    yield shell
    sys.modules["__main__"] = main
    # reset(), which IPython calls at exit, collects garbage: over a second for each shell.
    atexit.unregister(shell.atexit_operations)
    shell.user_ns.clear()
