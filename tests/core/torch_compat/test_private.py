"""Private names of torch: each has an entry, each entry says what it is for, and a torch without one is survived."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nimble_core.torch_compat.private import CHECKED, ENTRIES, Private, all_entries, function
from nimble_core.utils.errors import DeviceError

ROOT = Path(__file__).parents[3]
SMOKE = """
import torch
from torch import nn

from nimble_core.torch_compat import private

find, missing, seen = private.Private.find, [], []


def without(self):
    if self.essential:
        return find(self)
    missing.append(self.name)


private.Private.find = without

from nimble_core import InputError, Nimble, Options
from nimble_core.torch_compat import autograd

assert not autograd.transforms_active()
torch.func.vmap(lambda one: seen.append(autograd.transforms_active()) or one)(torch.ones(2))
assert seen == [True]
autograd._forward_ad = {}  # as if the level were kept elsewhere

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 4))
x = torch.randn(3, 8)
options = Options(tune="off", fuse="none")
with torch.no_grad():
    replayed = Nimble(net, options).prepare(x)
    assert torch.equal(replayed(x), net(x))
    many = torch.stack([x, x])
    for transform in (
        lambda: torch.func.vmap(replayed)(many),
        lambda: torch.func.grad(lambda one: replayed(one).sum())(x),
        lambda: torch.func.jvp(replayed, (x,), (x,)),
    ):
        try:
            transform()
        except InputError:
            continue
        raise AssertionError("a transform was not noticed")
    with torch.autograd.forward_ad.dual_level():
        try:
            replayed(torch.autograd.forward_ad.make_dual(x, x))
        except InputError:
            pass
        else:
            raise AssertionError("a tangent was not noticed")
prepared = Nimble(net, options).prepare(x, training=True)
prepared(x).square().sum().backward()
found = [one.grad.clone() for one in net.parameters()]
net.zero_grad()
net(x).square().sum().backward()
assert all(torch.allclose(one, two.grad) for one, two in zip(found, net.parameters()))
net.zero_grad()
wanted = tuple(net.parameters())
searched = torch.autograd.grad(prepared(x).square().sum(), wanted)
assert all(torch.allclose(one, two) for one, two in zip(searched, found))
print(len(set(missing)))
"""


@pytest.mark.parametrize("entry", all_entries(), ids=lambda entry: entry.name)
def test_each_is_there_and_says_what_it_is_for(entry: Private) -> None:
    assert entry.purpose
    assert entry.without
    assert entry.checked
    assert set(entry.checked) <= set(CHECKED)
    running = tuple(map(int, torch.__version__.split(".")[:2]))
    if entry.expected and running >= tuple(map(int, entry.checked[0].split("."))):
        assert entry.find() is not None
        assert entry.require() is not None


def test_what_has_no_fallback_raises_when_it_is_used_and_names_this_torch() -> None:
    try:
        missing = function("torch._C:_no_such_name", "test this")
        with pytest.raises(
            DeviceError, match=r"torch \d.* has no torch\._C\._no_such_name, needed to test this"
        ) as caught:
            missing(1, two=3)
        assert CHECKED[-1] in caught.value.fix
        assert not ENTRIES["torch._C:_no_such_name"].loaded or ENTRIES["torch._C:_no_such_name"].find() is None
        other = function("torch.no.such.module:name", "test this", "nothing", fallback=lambda: "instead")
        assert other() == "instead"
    finally:
        ENTRIES.pop("torch._C:_no_such_name", None)
        ENTRIES.pop("torch.no.such.module:name", None)


class _Above:
    inherited = staticmethod(lambda: "above")


class _Owner(_Above):
    own = staticmethod(lambda: "own")


@pytest.mark.parametrize("name", ["own", "inherited"])
def test_what_is_replaced_is_put_back(name: str) -> None:
    entry = Private(f"{__name__}:_Owner.{name}", "test this", "nothing")
    before = dict(vars(_Owner))
    found = []
    with pytest.raises(ZeroDivisionError), entry.replaced_by(staticmethod(lambda: "ours")):
        found.append(getattr(_Owner, name)() + str(1 / len(found)))
    with entry.replaced_by(staticmethod(lambda: "ours")):
        assert getattr(_Owner, name)() == "ours"
    assert dict(vars(_Owner)) == before
    absent = Private(f"{__name__}:_Owner.absent", "test this", "nothing")
    with absent.replaced_by("ours"):
        assert not hasattr(_Owner, "absent")


def test_without_all_that_is_not_essential_everything_is_right() -> None:
    done = subprocess.run([sys.executable, "-c", SMOKE], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5, "names were missing"


def test_private_names_of_torch_are_spelled_out_in_this_folder_alone() -> None:
    found = []
    for package in ("nimble_core", "nimble_viz"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "torch_compat" not in path.parts:
                found += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in _private_names(path)]
    assert not found, "\n".join(found)


def test_they_would_be_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import torch\nimport torch._dynamo as dynamo\nfrom torch.utils import _pytree\nfrom torch import nn\n"
        "torch._C.name()\ntorch.ops.aten._reshape_alias(nn.Module.__init__)\nnn.modules._private.name\n"
    )
    assert [line for line, _ in _private_names(module)] == [2, 3, 5, 7]


def _private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that import a private name of torch or Triton, or read one; names of operators are the dispatcher's."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported: dict[str, str] = {}
    places: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                imported[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.split(".")[0]
                if _private(one.name):
                    places[node.lineno] = one.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                imported[one.asname or one.name] = f"{node.module}.{one.name}"
                if _private(f"{node.module}.{one.name}"):
                    places[node.lineno] = f"{node.module}.{one.name}"

    def full(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return imported.get(node.id, "")
        if isinstance(node, ast.Attribute):
            above = full(node.value)
            return above and f"{above}.{node.attr}"
        return ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(full(node)):
            places.setdefault(node.lineno, full(node))
    yield from sorted(places.items())


def _private(name: str) -> bool:
    first, *rest = name.split(".")
    if first not in ("torch", "triton") or name.startswith("torch.ops."):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in rest)
