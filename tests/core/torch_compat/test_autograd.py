"""Objects that are handed to the threads of autograd's engine: their references are counted right on every torch."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from nimble_core.torch_compat import autograd
from nimble_core.torch_compat.autograd import STASHES, stash, stashed

KEY = "nimble_core.tests"
pytestmark = pytest.mark.skipif(not STASHES, reason="this torch keeps nothing for a thread")


class Kept:
    pass


@pytest.fixture(params=[True, False], ids=["removed", "overwritten"], autouse=True)
def _with_and_without_removal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(autograd, "_remove", None)


def test_references_are_given_back() -> None:
    kept, none = Kept(), sys.getrefcount(None)
    gone = weakref.ref(kept)
    for _ in range(1000):
        stash(KEY, kept)
        assert stashed(KEY) is kept
        stash(KEY, None)
        assert stashed(KEY) is None
    assert sys.getrefcount(kept) == 2
    assert abs(sys.getrefcount(None) - none) < 500
    stash(KEY, kept)
    del kept
    gc.collect()
    assert isinstance(stashed(KEY), Kept)
    stash(KEY, None)
    assert gone() is None


def test_each_thread_has_its_own() -> None:
    found: list[Any] = []
    stash(KEY, "mine")
    thread = threading.Thread(target=lambda: found.append(stashed(KEY)))
    thread.start()
    thread.join()
    assert (found, stashed(KEY)) == ([None], "mine")
    stash(KEY, None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nodes_see_what_the_caller_of_their_backward_keeps(device: str) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    seen: list[Any] = []
    out = (x * 2).sum()
    out.grad_fn.register_prehook(lambda gradients: seen.append(stashed(KEY)))

    def search(name: str) -> None:
        kept = [name]
        for _ in range(50):
            stash(KEY, kept)
            torch.autograd.grad(out, x, retain_graph=True)
            stash(KEY, None)
        assert sys.getrefcount(kept) >= 2

    threads = [threading.Thread(target=search, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one[0] for one in seen) == sorted("abcd" * 50)
    torch.autograd.grad(out, x)
    assert seen[-1] is None
