"""Searches for gradients: ``torch.autograd.grad`` and ``backward(inputs=...)``, answered for parameters out of reach.

A replayed backward puts gradients of parameters into ``.grad`` by itself. If autograd's graph led to each parameter as
well, its engine would look at each of them after every backward, for about 2 µs apiece, to hand on nothing. So the
graph ends at the replay, and whoever searches for a parameter behind it is answered here: the replay is asked for what
it would have put into ``.grad``, and that is added to what the engine finds.

Several threads may search one graph at once, so what a search asks for and what it finds is kept with the thread that
runs it, not with the graph's nodes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from nimble_core.torch_compat.autograd import ENGINE_RUN, STASHES, engine_run_is_own, stash, stashed
from nimble_core.torch_compat.compiler import EVAL_FRAME
from nimble_core.utils.locks import free_after_fork

__all__ = ["ACCUMULATING", "Behind", "current_search", "searches_are_answered"]

_SEARCH = "nimble_core.search"

ACCUMULATING = free_after_fork(threading.RLock())
"""Held while gradients go into ``.grad``, as autograd's accumulation holds a lock: backwards may run on any threads."""

if hasattr(os, "register_at_fork"):
    # Who held it there is not here.
    os.register_at_fork(after_in_child=ACCUMULATING._at_fork_reinit)  # type: ignore[attr-defined]  # typeshed lacks it

_expected: dict[int, frozenset[int]] = {}
"""Ids of the tensors that may lie behind nodes, by the id of who holds them: graphs are looked through only where one
of them is sought. No weak references to the tensors themselves: ``torch.utils.swap_tensors`` refuses those that have
any, and with it ``.to()`` where modules swap their parameters.
"""

_installed = False
"""Whether searches were ever answered in this process."""

_NAMES = ("grad_tensors", "keep_graph", "create_graph", "inputs", "allow_unreachable", "accumulate_grad")
"""Arguments of autograd's engine after its outputs."""


@dataclass(slots=True, eq=False)
class Behind:
    """Tensors behind a node of autograd's graph that no edge leads to; the node keeps it as ``behind``.

    Args:
        tensors: leaves that the node computes gradients of, by position.
        anchor: a leaf that an edge does lead to: the engine runs the node to find its gradient, which is none.
    """

    tensors: dict[int, torch.Tensor]
    anchor: torch.Tensor

    @staticmethod
    def expect(holder: object, tensors: Iterable[torch.Tensor]) -> None:
        """Say that these will lie behind nodes while ``holder``, which holds them, lives; searches for others are not
        looked into.
        """
        _expected[id(holder)] = frozenset(map(id, tensors))
        weakref.finalize(holder, _expected.pop, id(holder)).atexit = False


Search = dict[Behind, dict[int, torch.Tensor]]
"""Gradients that were found, by position, for each node that is asked; the node puts them there."""


def current_search() -> Search | None:
    """The search that autograd's engine runs on this thread; None if it runs none, or something else within one."""
    found: Search | None = stashed(_SEARCH)
    return found


@contextmanager
def _searching(search: Search | None) -> Iterator[None]:
    """Inside, runs of the engine that this thread starts are part of ``search``, or of none."""
    around = current_search()
    stash(_SEARCH, search)
    try:
        yield
    finally:
        stash(_SEARCH, around)


def searches_are_answered() -> bool:
    """Whether searches are seen before they begin, which they are from now on if torch has what that takes.

    Asked at each forward: who replaces the engine's run for a while may put torch's own back instead of ours.
    """
    global _installed
    own = engine_run_is_own()
    if own is None or not STASHES:
        return False
    if own or not _installed:  # later, what is not torch's own is ours, or somebody's around ours
        _installed = True
        answering = _answering(ENGINE_RUN.require())
        _pass_by(answering)
        ENGINE_RUN.replace(answering)
    return True


def _pass_by(function: Any) -> None:
    """Where code around a backward is compiled, let Dynamo not look into this, as it does not into what was there."""
    frames: Any = EVAL_FRAME.find()
    with suppress(AttributeError):  # one graph break more
        action = frames._FrameAction
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def _answering(run: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's run, with the gradients of tensors that lie behind its graph."""

    @wraps(run)
    def answering(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if current_search() is not None:
            # Called by a hook during a search: what that asks of nodes is not asked of them by this run.
            with _searching(None):
                return answering(outputs, *args, **kwargs)
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        inputs = given.get("inputs")
        if not inputs:  # all gradients are wanted
            return run(outputs, *args, **kwargs)
        sought = [_leaf(one) for one in inputs]
        if all(map(_ids(sought).isdisjoint, list(_expected.values()))):
            return run(outputs, *args, **kwargs)
        behind = [one for one in _behind(outputs) if not _ids(one.tensors.values()).isdisjoint(_ids(sought))]
        if not behind:
            return run(outputs, *args, **kwargs)
        anchors = {id(one.anchor): one.anchor for one in behind}
        asked = given | {"inputs": (*inputs, *anchors.values()), "allow_unreachable": True}
        search: Search = {one: {} for one in behind}
        with _searching(search):
            found = run(outputs, **asked)
        added = [_added(one, search) for one in sought]
        if given.get("accumulate_grad"):
            # One that is sought twice gets its gradient once, as in eager.
            each = {id(leaf): (leaf, gradient) for leaf, gradient in zip(sought, added, strict=True)}
            with ACCUMULATING:
                for leaf, gradient in each.values():
                    _accumulate(leaf, gradient)
            return found
        result = [_sum(one, more) for one, more in zip(found, added, strict=False)]
        if not given.get("allow_unreachable") and any(one is None for one in result):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if"
                " this is the desired behavior."
            )
        return tuple(result)

    return answering


def _leaf(one: Any) -> torch.Tensor | None:
    """The tensor that is sought, which may be named by its edge."""
    if isinstance(one, torch.Tensor):
        return one
    return getattr(one.node, "variable", None)


def _ids(tensors: Iterable[torch.Tensor | None]) -> set[int]:
    return {id(one) for one in tensors if one is not None}


def _behind(outputs: Iterable[Any]) -> list[Behind]:
    """All that lies behind the graph of ``outputs``."""
    pending = [one.grad_fn if isinstance(one, torch.Tensor) else one.node for one in outputs]
    seen: set[Any] = set()
    found: list[Behind] = []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        behind = getattr(node, "behind", None)
        if isinstance(behind, Behind):
            found.append(behind)
        pending += [following for following, _ in node.next_functions]
    return found


def _added(leaf: torch.Tensor | None, search: Search) -> torch.Tensor | None:
    """Sum of what nodes have left for a tensor; None if nothing."""
    total = None
    for behind, found in search.items():
        for at, tensor in behind.tensors.items():
            if tensor is leaf:
                total = _sum(total, found.get(at))
    return total


def _accumulate(leaf: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
    if leaf is None or gradient is None:
        return
    if leaf.grad is None:
        leaf.grad = gradient
    else:
        with torch.no_grad():
            leaf.grad += gradient


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
