"""Runs that leave no trace: attributes, parameters, buffers, inputs and random state are put back."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core.errors import CaptureError
from nimble_core.operators import has_memory, storage_address, written_tensors
from nimble_core.recording import flat_tensors

__all__ = ["Guard", "Saved", "preserved", "random_state_kept", "run_preserved"]


_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def _attribute_guard(model: Callable[..., Any]) -> Iterator[Callable[[], list[str]]]:
    modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
    before = {path: _containers(module) for path, module in modules.items()}

    def changed() -> list[str]:
        names = []
        for path, containers in before.items():
            found: set[str] = set()
            for name, (held, copy) in containers.items():
                if _same_items(held, copy):
                    continue
                if not name or name in _TABLES:
                    found |= {
                        key for key in held.keys() | copy.keys() if held.get(key, held) is not copy.get(key, held)
                    }
                elif not name.startswith("_"):  # private ones are no news: hooks that a library installs by itself
                    found.add(name)
            names += [f"{path}.{name}".lstrip(".") for name in sorted(found)]
        return names

    try:
        yield changed
    finally:
        for containers in before.values():
            for held, copy in containers.values():
                if not _same_items(held, copy):
                    _put_back(held, copy)


def _containers(module: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    """The module's attributes, under the name "", and the containers among them: each with a copy of what it holds."""
    attributes = module.__dict__
    found: dict[str, tuple[Any, Any]] = {"": (attributes, attributes.copy())}
    for name, value in attributes.items():
        if type(value) in (list, dict, set, OrderedDict, defaultdict):
            found[name] = (value, value.copy())
    return found


def _put_back(held: Any, copy: Any) -> None:
    if isinstance(held, list):
        held[:] = copy
    elif isinstance(held, dict):
        for key in held.keys() - copy.keys():
            del held[key]
        held.update(copy)
        if list(held) != list(copy):  # something was deleted: back in its old place
            held.clear()
            held.update(copy)
    else:
        held.clear()
        held.update(copy)


def _same_items(held: Any, copy: Any) -> bool:
    if len(held) != len(copy):
        return False
    if not held:
        return True
    if isinstance(held, set):
        return bool(held == copy)
    if isinstance(held, dict) and not all(map(is_, held.values(), copy.values())):
        return False
    return all(map(is_, held, copy))


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor's value and version, as they were."""

    tensor: torch.Tensor
    value: torch.Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Saved:
        """Copy what ``tensor`` holds now."""
        version = None if tensor.is_inference() else tensor._version
        return cls(tensor.detach(), tensor.detach().clone(), version)

    def restore(self) -> None:
        """Put it back. The version too, since the values are the same: a backward that saved them may still come."""
        self.tensor.copy_(self.value)
        if self.version is not None:
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self.version,))


class Guard:
    """Keeps what a live run is about to overwrite."""

    def __init__(self, live: bool, changed: Callable[[], list[str]]) -> None:
        self.live = live
        self.changed_attributes = changed
        self._saved: list[Saved] = []
        self._fresh: set[int] = set()

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keep a copy of ``tensor``. Under a capture nothing is written, so there is nothing to keep."""
        if self.live:
            self._saved.append(Saved.of(tensor))

    def restore(self) -> None:
        """Undo the writes, last first."""
        with torch.no_grad():
            for one in reversed(self._saved):
                one.restore()


@contextmanager
def preserved(model: Callable[..., Any], *, live: bool = True) -> Iterator[Guard]:
    """Put back, at the end or after an error, what runs of ``model`` inside change.

    Attributes, random state, and the tensors reported to the guard's ``before_write``.

    Args:
        model: module or function.
        live: whether the runs execute (False under a capture).
    """
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(torch.device("cpu")))
        changed = stack.enter_context(_attribute_guard(model))
        guard = Guard(live, changed)
        stack.callback(guard.restore)
        yield guard


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Put the random state of Python, numpy (if loaded), torch's host generator and ``device`` back at the end."""
    python, host = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy else None
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(host)
        if numpy:
            numpy.random.set_state(array)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)


class _WriteGuard(TorchDispatchMode):
    """Lets a model run, telling the guard of every tensor it is about to write that existed before.

    Operators that take functions (``torch.cond``) are refused here, in the first run of a model.
    """

    supports_higher_order_operators = True

    def __init__(self, guard: Guard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.guard = guard
        self.made: dict[int, StorageWeakRef] = {}  # while held, a storage's address names no other storage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise CaptureError(
                f"{func} takes functions: what they do cannot be recorded as calls",
                fix="write the branch or loop that is taken as plain operators, or move it out of the prepared module",
            )
        for tensor in written_tensors(func, args, kwargs):
            if has_memory(tensor) and storage_address(tensor) not in self.made:
                self.guard.before_write(tensor)
        result = func(*args, **kwargs)
        given = {storage_address(t) for t in flat_tensors([*args, *kwargs.values()]) if has_memory(t)}
        for tensor in flat_tensors(result):
            if has_memory(tensor) and storage_address(tensor) not in given:
                self.made.setdefault(storage_address(tensor), StorageWeakRef(tensor.untyped_storage()))
        return result


def run_preserved(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``model`` once for real (warm-up), leaving it, its inputs and the random state as they were.

    Raises:
        CaptureError: it calls an operator that takes functions.
    """
    with preserved(model) as guard, torch.no_grad(), _WriteGuard(guard):
        return model(*args, **kwargs)
