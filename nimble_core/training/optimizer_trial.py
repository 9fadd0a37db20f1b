"""Twins of a user's optimizer: steps on them change nothing of the user's, and show what a step reads and changes.

A twin shares tensors with what it was made of, and has containers and plain objects of its own. A replay repeats what
goes to the device; so a trial step is refused that waits for the device, or that changes anything on the host.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import copy, deepcopy
from inspect import unwrap
from itertools import chain
from operator import is_
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import TorchDispatchMode
from nimble_core.torch_compat.members import CAPTURABLE_DEVICES
from nimble_core.tracing.operator_traits import has_memory, storage_address, written_tensors
from nimble_core.tracing.provenance import line_inside
from nimble_core.utils.errors import InputError
from nimble_core.utils.locks import free_after_fork

__all__ = [
    "PLAIN",
    "led_to",
    "name_of",
    "names_in_step",
    "plain_attributes",
    "run_step",
    "step_explained",
    "tensors_among",
    "trial_step",
    "twin_of",
]

_READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero)
"""Bring a value from the device to the host."""
_OWN = ("step", "state", "param_groups")
"""Attributes that a twin has of its own, or does without."""
PLAIN = (bool, int, float, complex, str)
_CONTAINERS = (dict, list, set, deque)
_COPIED_WHOLE = ("numpy", "random", "array")
"""Packages of values that change in place, and can be copied and compared like what they pickle to."""
_SHARED = ("torch", "triton", "logging", "threading", "concurrent")
"""Packages of objects that stand for more than their attributes: operators, kernels, loggers."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """What to call it in errors."""
    return type(optimizer).__name__


# -- a twin that steps -------------------------------------------------------------------------------------------------


def twin_of(
    optimizer: torch.optim.Optimizer,
    groups: Mapping[int, dict[str, Any]],
    state: Mapping[torch.Tensor, dict[str, torch.Tensor]],
    **attributes: Any,
) -> torch.optim.Optimizer:
    """An optimizer of the same kind for other groups and state; nothing of ``optimizer`` is changed by its steps.

    Tensors are shared, and what holds them in ``groups``, ``state`` and attributes is the twin's own.

    Args:
        optimizer: the user's.
        groups: what its groups are in the twin, by their position; those without parameters only where attributes lead
            to them.
        state: for parameters of these groups.
        attributes: of the twin, beside those of ``optimizer``.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {}
    instead = {at: _own(group, memo) for at, group in groups.items()}
    own: dict[str, Any] = {
        "param_groups": [group for group in instead.values() if group["params"]],
        "state": defaultdict(dict, {parameter: dict(kept) for parameter, kept in state.items()}),
        "_warned_capturable_if_run_uncaptured": True,
        "_need_device_dtype_check_for_fused": False,  # the form was chosen by devices and types
    }
    memo |= {id(optimizer): twin, id(optimizer.param_groups): own["param_groups"], id(optimizer.state): own["state"]}
    memo |= {id(optimizer.param_groups[at]): group for at, group in instead.items()}
    vars(twin).update(_inherited(optimizer, memo) | own | attributes)
    return twin


def run_step(twin: torch.optim.Optimizer, device: torch.device) -> None:
    """The twin's ``step``, without hooks."""
    step: Callable[..., Any] = type(twin).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    with _capturable_on(device, type(twin)):
        step(twin)


_patching = free_after_fork(threading.RLock())


@contextmanager
def _capturable_on(device: torch.device, kind: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Let capturable forms run on the host too: torch asserts that they run on accelerators, their formulas do not."""
    name = CAPTURABLE_DEVICES
    modules = [sys.modules[one.__module__] for one in kind.__mro__ if one.__module__.startswith("torch.optim.")]
    if device.type != "cpu":
        yield
        return
    with _patching:
        before = [(module, getattr(module, name)) for module in dict.fromkeys(modules) if hasattr(module, name)]
        try:
            for module, supported in before:
                setattr(module, name, lambda *args, _of=supported, **kwargs: [*_of(*args, **kwargs), "cpu"])
            yield
        finally:
            for module, supported in before:
                setattr(module, name, supported)


# -- a trial ----------------------------------------------------------------------------------------------------------


def trial_step(
    optimizer: torch.optim.Optimizer,
    twin: torch.optim.Optimizer,
    at: int,
    options: Mapping[str, Any],
    parameter: torch.Tensor,
    beside: Set[int],
    rate: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """State as a step of ``twin`` on a copy of ``parameter`` makes it.

    Given ``rate``, a second step shows whether the optimizer reads the device, or changes on the host. ``beside``: as
    ``_Refusing`` takes it.
    """
    stand_in = parameter.detach().clone()
    stand_in.grad = torch.zeros_like(stand_in)
    name, where = name_of(optimizer), _step_of(optimizer)
    with step_explained(optimizer):
        twin.param_groups[0]["params"][:] = [stand_in]
        with _Refusing(name, beside):
            run_step(twin, stand_in.device)
        made = dict(twin.state.get(stand_in, {}))
        twin.param_groups[0]["params"].clear()  # memory of the device, which the next does not need
        twin.state.clear()
        for key, value in made.items():
            if not isinstance(value, torch.Tensor):
                raise InputError(f"{name} keeps {key} on the host, as a {type(value).__name__}", where=where)
        if rate is None:
            return made
        groups = {at: {**options, "lr": rate, "params": [stand_in]}}
        state = {stand_in: made} if made else {}
        before, twin = (twin_of(optimizer, groups, state) for _ in range(2))
        with _Refusing(name, beside, reads=True):
            run_step(twin, stand_in.device)
        changed = _changed(before, twin)
    if changed:
        raise InputError(
            f"{name} changes {changed} on the host in each step, which a replay would not",
            where=where,
            fix="keep it in optimizer.state[parameter], as a tensor that the step writes in place; if the first step "
            "alone changes it, take that one in eager before",
        )
    return made


def _step_of(optimizer: torch.optim.Optimizer) -> str:
    return f"step() of {type(optimizer).__module__}.{name_of(optimizer)}"


@contextmanager
def step_explained(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Errors of a step inside are told as such."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        what = f"{name_of(optimizer)} failed in its form for capture: {type(error).__name__}: {error}"
        raise InputError(what, where=_step_of(optimizer), fix="use SGD, Adam or AdamW, or a newer torch") from error


class _Refusing(TorchDispatchMode):
    """Refuses calls that a replay, or an update of some of the parameters, would not make as the step does.

    Args:
        name: of the optimizer.
        beside: where tensors lie that it keeps outside of ``state``; to write them is refused, before it is done.
        reads: whether to refuse calls that wait for the device and bring a value to the host.
    """

    def __init__(self, name: str, beside: Set[int], *, reads: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.name, self.beside, self.reads = name, beside, reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.reads and func.overloadpacket in _READS:
            raise InputError(
                f"{self.name} reads the learning rate or its state back from the device in each step: a replay would"
                " repeat the value that it read once",
                where=_line(),
                fix="use SGD, Adam or AdamW, or a newer torch",
            )
        written = written_tensors(func, args, kwargs or {}) if self.beside else ()
        if any(storage_address(one) in self.beside for one in written if has_memory(one)):
            raise InputError(
                f"{self.name} writes a tensor that it keeps beside its state: updates may be of some of the parameters"
                " alone, several in a step",
                where=_line(),
                fix="keep it in optimizer.state[parameter]",
            )
        return func(*args, **(kwargs or {}))


def _line() -> str:
    file, line = line_inside(sys._getframe(2))
    return f"{file}:{line}" if file else f"torch {torch.__version__}"


# -- what an optimizer keeps on the host -------------------------------------------------------------------------------


def _of_classes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer's classes, but for torch's, give it."""
    kinds = [kind for kind in type(optimizer).__mro__ if _package(kind) != "torch"]
    return {key: value for kind in reversed(kinds) for key, value in vars(kind).items() if not key.startswith("__")}


def plain_attributes(optimizer: torch.optim.Optimizer, names: Set[str]) -> dict[str, Any]:
    """Numbers and strings in attributes, also of its classes, which ``step`` may read."""
    shown = _of_classes(optimizer) | vars(optimizer)
    return {key: value for key, value in shown.items() if isinstance(value, PLAIN) and key in names}


def names_in_step(kind: type[torch.optim.Optimizer]) -> frozenset[str]:
    """Names and strings in the code of ``step``, and of all that it calls by name: what it may read.

    Followed are methods of all classes, and functions of the packages that these are from. What torch's own code names
    are its defaults: it is only followed into methods that others override.
    """
    packages = {_package(one) for one in kind.__mro__} - {"torch", "builtins"}
    names: set[str] = set()
    seen: set[FunctionType] = set()
    pending: list[Any] = [vars(one).get("step") for one in kind.__mro__]
    while pending:
        found = pending.pop()
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        function = unwrap(found) if callable(found) else None
        if not isinstance(function, FunctionType) or function in seen or _package(function) not in packages | {"torch"}:
            continue
        seen.add(function)
        words = _words(function.__code__)
        pending += (vars(one).get(word) for one in kind.__mro__ for word in words)
        if _package(function) in packages:
            names |= words
            pending += map(function.__globals__.get, words)
    return frozenset(names)


def _words(code: CodeType) -> set[str]:
    """Names and strings in code, and in the functions and comprehensions inside of it."""
    inside = [_words(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names, *(one for one in code.co_consts if isinstance(one, str)), *chain.from_iterable(inside)}


def _inherited(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> dict[str, Any]:
    """Attributes for a twin, with containers of its classes among them.

    Hooks are left alone: they may lead anywhere, and no step calls those of checkpoints.
    """
    held = {key: value for key, value in _of_classes(optimizer).items() if isinstance(value, _CONTAINERS)}
    return {
        key: value if key.startswith("_optimizer_") else _own(value, memo)
        for key, value in (held | vars(optimizer)).items()
        if key not in _OWN
    }


def led_to(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What its attributes lead to, copies where a twin has its own."""
    memo: dict[int, Any] = {id(one): one for one in (optimizer, optimizer.param_groups, optimizer.state)}
    _inherited(optimizer, memo)
    return list(memo.values())


def tensors_among(held: Iterable[Any]) -> Set[int]:
    """Where the tensors lie among these."""
    modules = [one for one in held if isinstance(one, torch.nn.Module)]
    inside = chain.from_iterable((*one.parameters(), *one.buffers()) for one in modules)
    tensors = chain((one for one in held if isinstance(one, torch.Tensor)), inside)
    return {storage_address(one) for one in tensors if has_memory(one)}


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """``value`` with copies of the containers and plain objects that it leads to; tensors and all else are shared.

    Args:
        value: what an optimizer keeps.
        memo: copies by the ids of what they are of; filled.

    Raises:
        InputError: it leads to another optimizer, whose steps would be real ones.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer keeps another one, a {name_of(value)}, which its step may run", fix="pass that one alone"
        )
    made: Any = value
    memo[id(value)] = made
    if isinstance(value, _CONTAINERS):
        memo[id(value)] = made = copy(value)  # with all that its class keeps: a factory, a length
        entries: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in () if isinstance(value, set) else entries:
            made[key] = _own(one, memo)
    elif isinstance(value, tuple):
        items = [_own(one, memo) for one in value]
        if not all(map(is_, items, value)):
            made = tuple.__new__(type(value), items)
    elif isinstance(value, MethodType):
        made = MethodType(value.__func__, _own(value.__self__, memo))
    elif _is_plain(value):
        memo[id(value)] = made = object.__new__(type(value))
        table = getattr(made, "__dict__", {})
        for name, one in _attributes(value).items():
            if name in getattr(value, "__dict__", ()):
                table[name] = _own(one, memo)  # past properties of the same name, whose setters may do more
            else:
                object.__setattr__(made, name, _own(one, memo))
    elif _package(type(value)) in _COPIED_WHOLE:
        made = deepcopy(value)
    memo[id(value)] = made
    return made


def _changed(before: torch.optim.Optimizer, after: torch.optim.Optimizer) -> str:
    """The first of what these twins keep that differs: a key of attributes, groups or state; empty if there is none."""
    seen: dict[tuple[int, int], Any] = {(id(before), id(after)): (before, after)}
    for was, now in zip(_tables(before), _tables(after), strict=True):
        for key in dict.fromkeys([*was, *now]):
            if not (key in was and key in now and _same(was[key], now[key], seen)):
                return str(key)
    return "" if _same(before.state, after.state, seen) else "state"


def _tables(twin: torch.optim.Optimizer) -> list[dict[str, Any]]:
    attributes = {key: value for key, value in vars(twin).items() if key not in _OWN}
    members = chain.from_iterable(group["params"] for group in twin.param_groups)
    return [attributes, *twin.param_groups, *(twin.state.get(one, {}) for one in members)]


def _same(one: Any, other: Any, seen: dict[tuple[int, int], Any]) -> bool:
    """Whether the values are equal; tensors are compared by identity, like all that says nothing of its value.

    Args:
        one: what a twin keeps.
        other: what another twin keeps in this place.
        seen: pairs that count as the same, by their ids, which are kept alive; filled.
    """
    if one is other or (id(one), id(other)) in seen:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    seen[id(one), id(other)] = one, other
    if isinstance(one, MethodType):
        return one.__func__ is other.__func__ and _same(one.__self__, other.__self__, seen)
    if isinstance(one, dict):
        one, other = _entries(one), _entries(other)
        return one.keys() == other.keys() and all(_same(value, other[key], seen) for key, value in one.items())
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(_same(*pair, seen) for pair in zip(one, other, strict=True))
    if _is_plain(one):
        return _same(_attributes(one), _attributes(other), seen)
    if _package(type(one)) in _COPIED_WHOLE:
        return _same(one.__reduce_ex__(4), other.__reduce_ex__(4), seen)
    try:
        return bool(one == other or (one != one and other != other))
    except Exception:  # an object whose comparison fails is the same as itself alone
        return False


def _entries(held: dict[Any, Any]) -> dict[Any, Any]:
    """Without those that a defaultdict makes when they are read."""
    made = getattr(held, "default_factory", None)
    return {key: value for key, value in held.items() if made is None or type(value) is not made or value}


def _is_plain(value: Any) -> bool:
    """Whether attributes are all that there is to an object, and nobody else works with it meanwhile."""
    kind = type(value)
    if _package(type(value)) in _SHARED and not isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return False
    new: object = kind.__new__
    if kind is object or new is not object.__new__ or hasattr(kind, "__del__"):
        return False
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, logging.Filterer, threading.Thread)):
        return False  # also of classes elsewhere
    try:
        object.__new__(kind)
    except TypeError:  # of a class in C
        return False
    return not any(isinstance(one, _LOCKS) for one in _attributes(value).values())


def _attributes(value: Any) -> dict[str, Any]:
    """Those of a plain object, in slots or not."""
    found = object.__getstate__(value)
    parts = found if isinstance(found, tuple) else (found,)
    return {name: one for part in parts for name, one in (part or {}).items()}


def _package(one: type[Any] | FunctionType) -> str:
    """That a class or a function is from."""
    return one.__module__.partition(".")[0]
