"""Everything that keeps a model from being prepared, at once: by its Python name, at the user's line."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import random
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options
from nimble_core.utils.errors import InputError, NimbleError
from nimble_viz import diagnose
from nimble_viz.collect import diagnose as module
from nimble_viz.render.diagnosis import PAGE

ROOT = Path(__file__).parents[3]
X = torch.arange(8.0).reshape(2, 4) - 3
FILE = "tests/viz/collect/test_diagnose.py"


IDIOMS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "x.sum().item()": (lambda x: x * x.sum().item(), ".item()"),
    "float(x.sum())": (lambda x: x * float(x.sum()), "float(tensor)"),
    "x.sum() > 0": (lambda x: x if x.sum() > 0 else -x, "if tensor:"),
    "3.0 in x": (lambda x: x * (3.0 in x), "value in tensor"),
    "torch.equal(x, x + 1)": (lambda x: x * torch.equal(x, x + 1), "torch.equal()"),
    "x[x > 0]": (lambda x: x[x > 0], "tensor[mask]"),
    "x.nonzero()": (lambda x: x.nonzero(), ".nonzero()"),
    "x.masked_select(x > 0)": (lambda x: x.masked_select(x > 0), ".masked_select()"),
    "x.tolist()": (lambda x: x * x.tolist()[0][0], ".tolist()"),
    "x.numpy()": (lambda x: x * float(x.numpy().mean()), ".numpy()"),
}


@pytest.mark.parametrize("code", IDIOMS)
def test_the_name_in_python_the_line_and_what_to_do(code: str) -> None:
    model, name = IDIOMS[code]
    before = X.clone()
    (blocker,) = diagnose(model, X).blockers
    assert (blocker.name, blocker.file, blocker.times) == (name, FILE, 1)
    assert blocker.line == model.__code__.co_firstlineno
    assert blocker.code[slice(*blocker.mark)] == code
    assert blocker.instead
    assert "aten" not in f"{blocker.what} {blocker.instead}"
    assert torch.equal(X, before)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(4, 4), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen.add_(1)
        for _ in range(3):
            assert x.isfinite().all()
        scale = x.abs().max().item()
        if x.mean() < 0:
            x = -x
        else:
            x = x[x[:, 0] < 5]
        return self.linear(x / scale) + random.random()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Gate()])

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * scale


def test_all_at_once_in_the_order_of_the_run() -> None:
    net = Net().eval()
    found = diagnose(net, X, kwargs={"scale": 2.0})
    assert not found.ok
    assert [(one.name, one.times) for one in found.blockers] == [
        ("if tensor:", 3),
        (".item()", 1),
        ("if tensor:", 1),
        ("tensor[mask]", 1),
        ("self.steps", 1),
    ]
    assert {one.module for one in found.blockers} == {"blocks.1"}
    assert found.blockers[-1].code == "self.steps += 1"
    assert {one.file for one in found.blockers} == {FILE}
    assert any("random" in note for note in found.notes)


def test_other_branches_are_looked_into() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if int(x.argmax()) == x.numel() - 1:  # where other values have it elsewhere
            return x
        return x[x > 0]

    assert [one.name for one in diagnose(model, X).blockers] == ["int(tensor)", "tensor[mask]"]


def test_the_model_is_left_as_it_was() -> None:
    net = Net().train()
    before, states = copy.deepcopy(net.state_dict()), (random.getstate(), torch.get_rng_state())
    for _ in range(2):
        diagnose(net, X)
    assert all(torch.equal(one, before[name]) for name, one in net.state_dict().items())
    assert net.blocks[1].steps == 0
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


MODELS: dict[str, Callable[..., Any]] = {
    "static": nn.Linear(4, 4).eval(),
    "normalises": nn.BatchNorm1d(4).eval(),
    "trains": nn.BatchNorm1d(4).train(),
    "drops": nn.Dropout(0.5).train(),
    "reads in vain": lambda x: x * len(x.tolist()),
    "draws in Python": lambda x: x * random.random(),
    "is sparse": lambda x: torch.sparse.mm(x.to_sparse(), x.T),
    "makes a set": lambda x: {1: x, 2: {3}},
    "counts": Gate(),
}


@pytest.mark.parametrize("name", MODELS)
def test_ok_means_that_it_can_be_prepared(name: str) -> None:
    model, prepared = MODELS[name], True
    found = diagnose(model, X)
    try:
        with warnings.catch_warnings(action="ignore"):
            Nimble(model, Options(fuse="none", tune="off")).prepare(X).close()
    except NimbleError:
        prepared = False
    assert found.ok == prepared
    assert all(one.what and one.instead for one in found.blockers)


class Masked(nn.Module):
    """As Hugging Face: reads its mask in eager, and has a branch for captures that does not; ``reads`` in both."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        try:
            capturing = torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # torch without CUDA
            capturing = False
        if not capturing and mask.all():
            return x
        return x * mask * (float(x.sum()) if self.reads else 1)


def test_a_branch_for_captures_is_taken_as_a_preparation_takes_it() -> None:
    x, mask = torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    found = diagnose(Masked(reads=False), x, mask)
    assert not found.blockers
    assert any("the branch that the model keeps for captures" in note for note in found.notes)
    Nimble(Masked(reads=False), Options(tune="off")).prepare(x, mask).close()
    (one,) = diagnose(Masked(reads=True), x, mask).blockers
    assert one.name == "float(tensor)", "what eager's branch reads is no blocker"


def test_a_counter_alone_is_tried_out() -> None:
    class Counts(nn.Module):
        n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return x * self.n

    (blocker,) = diagnose(Counts().eval(), X).blockers
    assert blocker.kind == "attribute-that-changes"
    assert "register_buffer('n'" in blocker.instead
    assert blocker.code == "return x * self.n"


def test_what_a_replay_keeps_is_noted() -> None:
    found = diagnose(MODELS["reads in vain"], X)
    assert found.ok
    assert any(note.startswith(f".tolist() at {FILE}:") for note in found.notes)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a library that reads values, in a helper."""
    path = tmp_path / "lib_for_tests" / "helpers.py"
    path.parent.mkdir()
    path.write_text(
        "import torch\n\n"
        "def helper(x):\n    return bool(x.any())\n\n"
        "class Layer(torch.nn.Module):\n    def forward(self, x):\n        return x if helper(x) else -x\n"
    )
    spec = importlib.util.spec_from_file_location("helpers_for_tests", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "helpers_for_tests", made)
    spec.loader.exec_module(made)
    monkeypatch.setattr(module, "_LIBRARIES", (*module._LIBRARIES, f"{path.parent}/"))
    return made


def test_of_a_librarys_helper_the_users_line_is_shown(library: Any) -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = library.Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + 1

    (blocker,) = diagnose(Mine().eval(), X).blockers
    assert (blocker.name, blocker.code, blocker.file) == ("if tensor:", "return self.layer(x) + 1", FILE)
    assert (blocker.module, blocker.inside) == ("", "helpers.py:4")
    (own,) = diagnose(library.Layer(), X).blockers
    assert (own.code, own.inside) == ("return bool(x.any())", "")  # the model itself is the library's


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((X.numpy(),), [r"torch\.from_numpy"]),
        (([X],), ["separately"]),
        ((X, X.to_sparse(), X.to_sparse()), ["to_dense", "to_dense"]),
        ((), ["at least one example tensor"]),
    ],
)
def test_inputs_that_are_refused(inputs: tuple[Any, ...], said: list[str]) -> None:
    found = diagnose(nn.Linear(4, 4), *inputs).blockers
    assert [one.kind for one in found] == ["inputs"] * len(said)
    assert all(re.search(text, one.instead) for text, one in zip(said, found, strict=True))


def test_a_model_that_does_not_run() -> None:
    (blocker,) = diagnose(nn.Linear(3, 3), X).blockers
    assert blocker.kind == "error-in-eager"
    assert "RuntimeError" in blocker.what
    (blocker,) = diagnose(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), X).blockers
    assert (blocker.module, "F.linear" in blocker.code) == ("1", True), "not a line of this package"


def test_what_is_no_model_and_no_keyword() -> None:
    with pytest.raises(InputError, match="Linear itself"):
        diagnose(nn.Linear, X)
    with pytest.raises(InputError, match=r"diagnose\(\) has no keyword 'tune'"):
        diagnose(nn.Linear(4, 4), X, tune="off")  # type: ignore[arg-type]  # what is tested


def test_every_kind_has_a_section() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    sections = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall("^## (.+)", page, re.M)}
    source = inspect.getsource(module)
    kinds = {kind for _, kind, _ in module._NAMES.values()} | set(module._KINDS)
    kinds |= {"attribute-that-changes", "inputs", "error-in-eager", "two-runs-that-differ", "other-refusals"}
    assert kinds <= sections
    assert all(f'"{kind}"' in source for kind in kinds)


def test_what_a_recording_says_in_general_is_known() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "nimble_core" / "tracing").glob("*.py"))
    assert [text for text in module._GENERAL if text not in source] == []


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    net = Net().eval().cuda()
    found = diagnose(net, X.cuda(), kwargs={"scale": 2.0})
    assert [one.name for one in found.blockers][:4] == ["if tensor:", ".item()", "if tensor:", "tensor[mask]"]
    (copied,) = diagnose(lambda x: x.cpu().cuda() + 1, X.cuda()).blockers
    assert (copied.name, copied.kind) == (".cpu()", "copy-to-the-host")
    assert diagnose(nn.Linear(4, 4).cuda(), X.cuda()).ok
