"""Random state: what a preparation draws is put back, and what a model sets (``torch.manual_seed``) is no call.

The generators of Python, numpy and torch are one for all threads. In a process of one thread their state is put back
after each run. Beside other threads it is touched only once this thread draws: from then on the generator has a seed of
its own, and its state is put back at the end. So nothing is drawn twice by others: what they draw meanwhile comes from
that seed, and what they drew before, or draw after, from the state.

A replay draws on from wherever the last draw left off, so a model may change a generator's state by draws alone. Other
threads may draw from torch's own meanwhile, so what shows it is another seed, or a state that a draw has left behind;
where other threads set it, too, nothing tells. The second recording of a model that draws begins with seeds of ours, so
that a seed shows that was there before.

In a capture torch refuses to set a seed, unless to what it is. What puts a state back there without a seed is not seen.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import count
from operator import call
from typing import Any, NamedTuple

import torch

from nimble_core.tracing.provenance import warn
from nimble_core.utils.locks import free_after_fork

__all__ = ["SHARED", "TORCH", "Draws", "RandomStates", "alone", "random_state_kept", "seed_otherwise", "state_of"]

PYTHON, NUMPY, TORCH = SHARED = "Python's random", "numpy.random", "torch"
_HOST = "torch on the host"
"""Where ``TORCH`` is a GPU's."""

_seeds = count(20_001)  # never the same: what other threads draw meanwhile is not drawn again in the next preparation
_LOOKS, _LOOK_S = 400, 0.0005
_TELLING = free_after_fork(threading.RLock())  # held for moments


class _Shared(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], object]
    text: Callable[[Any], bytes]
    seed: Callable[[int], object] | None = None

    def now(self) -> bytes:
        return self.text(self.get())

    def moves(self) -> bool:
        """Whether other threads draw from it: it changes while this one waits."""
        before = self.now()
        for _ in range(_LOOKS // 4):
            time.sleep(_LOOK_S)
            if self.now() != before:
                return True
        return False


def alone() -> bool:
    """Whether this is the only thread, so that what is drawn is its own."""
    return threading.active_count() < 2


def _owners() -> dict[str, tuple[Any, Any]]:
    """Modules whose functions are methods of a generator for all threads, and that generator."""
    found: dict[str, tuple[Any, Any]] = {PYTHON: (random, random.getstate.__self__)}  # type: ignore[attr-defined]
    if numpy := sys.modules.get("numpy"):
        found[NUMPY] = numpy.random, numpy.random.get_state.__self__
    return found


def _shared(device: torch.device) -> dict[str, _Shared]:
    """The generators that all threads share, by name."""
    torchs = torch.default_generator
    host = _Shared(torchs.get_state, torchs.set_state, _bytes, torchs.manual_seed)
    names = {PYTHON: ("getstate", "setstate"), NUMPY: ("get_state", "set_state")}
    found = {TORCH: host}
    for name, (_, owner) in _owners().items():
        get, put = (getattr(owner, one) for one in names[name])
        # In C too: random's own is Python around it.
        seed = super(random.Random, owner).seed if name == PYTHON else owner.seed
        found[name] = _Shared(get, put, pickle.dumps, seed)
    if device.type == "cuda":
        get, put = (partial(one, device=device) for one in (torch.cuda.get_rng_state, torch.cuda.set_rng_state))
        found |= {_HOST: host, TORCH: _Shared(get, put, _bytes)}
    return found


class Draws:
    """What this thread draws from generators that all threads share.

    Args:
        device: torch's is that of this device.
        known: what is drawn from; None: what ``told`` says.
    """

    def __init__(self, device: torch.device, known: Collection[str] | None) -> None:
        self.alone = alone()
        self._generators = _shared(device)
        self._before = {name: self._generators[name].now() for name in _owners()} if known is None else {}
        self._host = self._generators.get(_HOST, self._generators[TORCH])
        self._entered, self._seed = self._host.get(), torch.initial_seed()
        self._told: set[str] = set()
        self._kept: dict[str, Any] = {}
        self._around = () if self.alone else tuple(_inside.get(threading.get_ident(), ()))
        self._watches = known is None and not self.alone
        for name in self._generators if self.alone else known or ():
            self._keep(name)

    def told(self, name: str) -> None:
        """This thread is about to draw from a generator."""
        if self._watches:
            self._told.add(name)
            if not any(name in one._kept for one in self._around):
                self._keep(name)

    def _keep(self, name: str) -> None:
        one = self._generators.get(name)
        if one is None or name in self._kept:
            return
        if self.alone or one.seed is None:
            self._kept[name] = one.get()
            return
        seeded = torch.initial_seed()
        seed = zlib.crc32(one.now())  # the same numbers from the same state: eager and replays are compared
        # Called from C: Python lets no other thread have its turn in between, to draw what would be drawn again.
        both: tuple[Callable[[], Any], ...] = (one.get, partial(one.seed, seed))
        state, _ = [*map(call, both)]
        if one is self._host:
            _leave_seed(torch.default_generator)
        # What the model has set before is not what is put back.
        self._kept[name] = self._entered if self._watches and one is self._host and seeded != self._seed else state

    def drawn(self) -> list[str]:
        """Names of the interpreter's generators, Python's and numpy's, that this thread has drawn from."""
        moved = [name for name, before in self._before.items() if self._generators[name].now() != before]
        if self.alone:
            return moved
        # Methods may be called past their modules: then it is ours if it does not go on by itself.
        return [name for name in moved if name in self._told or not self._generators[name].moves()]

    def seed_set(self) -> bool:
        """Whether this thread has given torch's generator on the host another seed, and drawn nothing."""
        changed = torch.initial_seed() != self._seed
        return changed and (self.alone or not (TORCH in self._told or self._host.moves()))

    def end(self) -> None:
        """Put all states back."""
        if self._watches and self.seed_set():
            self._host.put(self._entered)
        for name, state in self._kept.items():
            self._generators[name].put(state)
        if self._kept and not self.alone:
            # A turn for the others: who draws all the time does so now, and the next state to be kept is another one.
            time.sleep(sys.getswitchinterval())


@contextmanager
def random_state_kept(
    device: torch.device, generators: Iterable[torch.Generator] = (), draws: Collection[str] | None = ()
) -> Iterator[Draws]:
    """Put back, at the end, what this thread draws inside.

    Args:
        device: that torch draws on.
        generators: the user's own.
        draws: names of those for all threads that it draws from (``Recording.draws``); None: those that it is seen to.
    """
    own = [(one, one.get_state()) for one in generators]
    drawn = Draws(device, draws)
    with ExitStack() as stack:
        for one, state in own:
            stack.callback(one.set_state, state)
        stack.callback(drawn.end)
        if not drawn.alone:
            stack.enter_context(_functions_told(drawn))
        yield drawn


_inside: dict[int, list[Draws]] = {}
"""By thread. While there are any, functions of ``random`` and ``numpy.random`` tell them of their thread's calls."""
_unwatched: list[tuple[Any, dict[str, Any]]] = []
"""Modules, and their functions as they are when nobody watches."""


def _telling(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        for draws in _inside.get(threading.get_ident(), ()):
            draws.told(name)
        return function(*args, **kwargs)

    return told


@contextmanager
def _functions_told(draws: Draws) -> Iterator[None]:
    """Inside, functions of ``random`` and ``numpy.random`` that this thread calls tell ``draws`` first."""
    thread = threading.get_ident()
    with _TELLING:
        for name, (module, owner) in () if _inside else _owners().items():
            methods = {key: one for key, one in vars(module).items() if getattr(one, "__self__", None) is owner}
            methods = {key: one for key, one in methods.items() if key not in ("getstate", "get_state")}
            _unwatched.append((module, methods))
            vars(module).update({key: _telling(name, one) for key, one in methods.items()})
        _inside.setdefault(thread, []).append(draws)
    try:
        yield
    finally:
        with _TELLING:
            _inside[thread].remove(draws)
            if not _inside[thread]:
                del _inside[thread]
            while _unwatched and not _inside:
                module, methods = _unwatched.pop()
                vars(module).update(methods)


def seed_otherwise(device: torch.device, generators: Iterable[torch.Generator], draws: Collection[str]) -> None:
    """Seed what a model draws from as no model would: so branches on it, and seeds that it sets, show.

    Args:
        device: that torch draws on.
        generators: the user's own.
        draws: names of the others.
    """
    for one in generators:
        if one.device.type == device.type:  # what a host draws for a GPU's model is a constant of it
            _seed(one)  # each another: they are told apart by their states
    for name, (_, owner) in _owners().items():
        if name in draws:
            owner.seed(next(_seeds))
    if TORCH in draws and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(next(_seeds))
    elif TORCH in draws:
        _seed(torch.default_generator)


def _seed(generator: torch.Generator) -> None:
    generator.manual_seed(next(_seeds))
    if generator.device.type == "cpu":
        _leave_seed(generator)


def _leave_seed(generator: torch.Generator) -> None:
    """Draw once: to be seeded so again shows as a state that was left behind."""
    torch.rand((), generator=generator, device="cpu")


def state_of(generator: torch.Generator | None) -> torch.Tensor:
    """State of a generator on the host; None is torch's own."""
    return (generator or torch.default_generator).get_state()


class RandomStates:
    """Follows generators on the host through the draws of a model that began after ``seed_otherwise``.

    Args:
        own: those of the user's that the model draws from.
    """

    def __init__(self, own: Sequence[torch.Generator]) -> None:
        self._generators = [torch.default_generator, *own]
        self._seeds = {one.initial_seed() for one in self._generators}
        self._shared = False
        self._left_behind = {_bytes(torch.Generator().manual_seed(seed).get_state()) for seed in self._seeds}

    def follow(self, generator: torch.Generator | None, before: torch.Tensor) -> bool:
        """Note a draw from a generator in the state ``before``. False if the model has set that."""
        one, state = generator or torch.default_generator, _bytes(before)
        known = one.initial_seed() in self._seeds and state not in self._left_behind
        self._left_behind.add(state)
        return known or (generator is None and self._others_set_it())

    def settled(self) -> bool:
        """Whether no generator has been given another seed, or a state that a draw has left behind."""
        changed = [
            one
            for one in self._generators
            if one.initial_seed() not in self._seeds or _bytes(one.get_state()) in self._left_behind
        ]
        return not changed or (changed == [torch.default_generator] and self._others_set_it())

    def _others_set_it(self) -> bool:
        self._shared = self._shared or _set_by_others()  # found once it stays so: looking sets another seed, too
        return self._shared


def _set_by_others() -> bool:
    """Whether torch's own state is set while this thread does not: then nothing tells whether a model does as well."""
    if alone():
        return False
    for _ in range(_LOOKS):
        torch.default_generator.manual_seed(seed := next(_seeds))
        time.sleep(_LOOK_S)
        if torch.initial_seed() != seed:
            warn(
                "other threads set torch's random state while a model was recorded: whether the model does, too, which "
                "a replay would not repeat, was not seen"
            )
            return True
    return False


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())
