"""Runs that leave no trace: attributes, parameters, buffers, inputs and random state are restored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nimble_core.torch_compat.autograd import preserve_version_counter, set_version_counter
from nimble_core.torch_compat.dispatch import (
    HigherOrderOperator,
    Mode,
    modes_off,
    pytree,
)
from nimble_core.tracing.operator_traits import (
    draws_numbers,
    has_memory,
    parts_of,
    shown_by,
    storage_address,
    traits_of,
    written_tensors,
)
from nimble_core.tracing.provenance import module_paths, place_of
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recording import flat_tensors
from nimble_core.tracing.rng_state import TORCH, Draws, random_state_kept
from nimble_core.tracing.snapshot import Change, Changes, Snapshot
from nimble_core.tracing.step_wrapper import Around
from nimble_core.tracing.strides import elements_once
from nimble_core.tracing.tensor_escapes import exports_seen
from nimble_core.tracing.torchscript import operator_by_operator, scripted_parts
from nimble_core.utils.errors import CaptureError, InputError
from nimble_core.utils.interrupts import interrupts_postponed

__all__ = [
    "Change",
    "Changes",
    "Guard",
    "Saved",
    "after_a_run",
    "installed_by_runs",
    "only_watches",
    "preserved",
    "rehearse",
    "requirements_kept",
    "run_preserved",
]


_HOST = torch.device("cpu")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_installed: weakref.WeakSet[Any] = weakref.WeakSet()  # code, or type, of hooks


def installed_by_runs(hook: object) -> bool:
    """Whether ``hook`` has the code of one that a run inside ``preserved`` has registered.

    Such hooks are part of the forward, and so of the recording: libraries install theirs when a model first runs.
    """
    return _code(hook) in _installed


def only_watches(hook: Callable[..., Any]) -> None:
    """Do not refuse a model for ``hook``: it neither changes nor needs what the model computes."""
    _installed.add(_code(hook))


def _code(hook: Any) -> Any:
    hook = _function(hook)
    return getattr(hook, "__code__", type(hook))


def _function(called: Any) -> Any:
    while isinstance(called, partial):
        called = called.func
    return called


@contextmanager
def _attributes_kept(model: Callable[..., Any]) -> Iterator[Callable[[], Changes]]:
    """Restore the attributes of modules at the end; yield a function that says what has changed."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    before = Snapshot(dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {})
    try:
        yield before.changes
    finally:
        changed = before.changed()
        tables = {id(vars(module).get(name)) for module in modules for name in _HOOKS} if changed else ()
        for held, copy in changed:
            if id(held) in tables:
                _installed.update(_code(held[key]) for key in held.keys() - copy.keys())
        before.restore()


@dataclass(frozen=True, slots=True)
class Saved:
    """A copy of a tensor's value, and its version.

    Args:
        tensor: the tensor itself, since an alias has a version counter of its own within a dispatch mode.
        alone: the part of it that shows each element once.
        value: a copy of ``alone``.
        version: None for a tensor without a version counter.
    """

    tensor: torch.Tensor
    alone: torch.Tensor
    value: torch.Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Saved:
        """Copy what ``tensor`` holds now."""
        version = None if tensor.is_inference() else tensor._version
        alone = elements_once(tensor.detach())
        return cls(tensor, alone, alone.clone(), version)

    def restore(self) -> None:
        """Restore the value, and with it the version: a backward that saved the tensor may still come."""
        self.alone.copy_(self.value)
        if self.version is not None:
            set_version_counter((self.tensor,), (self.version,))


class Guard:
    """Keeps copies of what a live run is about to overwrite.

    Args:
        live: whether runs execute; under a capture they do not.
        changed: returns the attributes that have changed.
        draws: notes what is drawn from generators that all threads share.
    """

    def __init__(self, live: bool, changed: Callable[[], Changes], draws: Draws) -> None:
        self.live = live
        self.changed_attributes = changed
        self.draws = draws
        self._saved: list[Saved] = []
        self._drawn: dict[torch.Generator, torch.Tensor] = {}

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keep a copy of ``tensor``, if the run executes."""
        if self.live:
            self._saved.append(Saved.of(tensor))

    def before_draw(self, generator: torch.Generator | None) -> None:
        """Keep the state of ``generator``; None is torch's own. A capture draws from those of the host alone."""
        if generator is None:
            if self.live:  # a capture draws from a GPU's, and the guard's is the host's
                self.draws.told(TORCH)
            return
        if (self.live or generator.device.type == "cpu") and generator not in self._drawn:
            self._drawn[generator] = generator.get_state()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep copies of all that runs inside overwrite."""
        with _WriteGuard(self) as writes, exports_seen(writes.exported):
            yield

    def restore(self) -> None:
        """Undo the writes and the draws, last first; an interrupt waits until all is undone."""
        with interrupts_postponed(), torch.no_grad():
            for one in reversed(self._saved):
                one.restore()
            for generator, state in reversed(self._drawn.items()):  # one may go by as several objects
                generator.set_state(state)


@contextmanager
def preserved(
    model: Callable[..., Any],
    *,
    live: bool = True,
    memory: bool = True,
    device: torch.device = _HOST,
    draws: Collection[str] | None = None,
) -> Iterator[Guard]:
    """Restore, at the end or after an error, what runs of ``model`` inside change.

    That is attributes, memory of parameters and buffers, random state, the tensors reported to the guard's
    ``before_write`` and the generators reported to its ``before_draw``.

    Args:
        model: module or function.
        live: whether the runs execute (False under a capture).
        memory: whether to give parameters and buffers back the memory that they had; False if the caller does that.
        device: the device that torch draws random numbers on.
        draws: the generators that the model draws from, if known (``random_state_kept``).
    """
    with ExitStack() as stack:
        drawn = stack.enter_context(random_state_kept(device, draws=draws))
        if memory:
            stack.enter_context(_memory_kept(_owned(model)))
        if not live:
            # A capture writes nothing, but raises version counters as if it did.
            counted = tuple(one for one in _owned(model) if not one.is_inference())
            stack.enter_context(preserve_version_counter(counted))
        changed = stack.enter_context(_attributes_kept(model))
        guard = Guard(live, changed, drawn)
        stack.callback(guard.restore)
        yield guard


class _WriteGuard(Mode):
    """Tells the guard before each write to a tensor that existed before the run.

    Refuses operators that take functions (``torch.cond``), in the first run of a model.
    """

    supports_higher_order_operators = True

    def __init__(self, guard: Guard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.guard = guard
        self.made: dict[int, StorageWeakRef] = {}  # while held, a storage's address names no other storage

    def exported(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """Keep a copy of ``tensor``, whose memory is handed out and may be written without a call."""
        if has_memory(tensor) and storage_address(tensor) not in self.made:
            with modes_off():
                self.guard.before_write(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise CaptureError(
                f"{func} takes functions: what they do cannot be recorded as calls",
                fix="write the branch or loop that is taken as plain operators, or move it out of the prepared module",
            )
        if (parts := parts_of(func)) is not None:
            with self:
                return parts(*args, **kwargs)
        if "generator" in kwargs or (traits_of(func).seeded and draws_numbers(func, args, kwargs)):
            self.guard.before_draw(kwargs.get("generator"))
        for tensor in written_tensors(func, args, kwargs):
            if has_memory(tensor) and storage_address(tensor) not in self.made:
                self.guard.before_write(tensor)
        result = func(*args, **kwargs)
        new = [t for t in flat_tensors(result) if has_memory(t) and storage_address(t) not in self.made]
        if new:
            given = {storage_address(t) for t in flat_tensors([*args, *kwargs.values()]) if has_memory(t)}
            for tensor in new:
                if storage_address(tensor) not in given:
                    self.made[storage_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return result


def run_preserved(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``model`` once (warm-up) and leave it, its inputs and the random state as they were.

    Raises:
        CaptureError: it calls an operator that takes functions, writes a leaf of autograd in place, or has a backward
            that runs another backward inside.
    """
    with after_a_run(model, args, kwargs) as result:
        return result


@contextmanager
def after_a_run(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, attributes: bool = True
) -> Iterator[Any]:
    """Run ``model`` once and yield its result; at the end, undo what the run changed, in inputs too.

    Args:
        model: module or function.
        args: positional inputs.
        kwargs: keyword inputs.
        attributes: whether attributes stay as the run leaves them until the end, as the values of tensors do.

    Raises:
        CaptureError: as ``run_preserved``.
    """
    given = [one for one in pytree.tree_leaves((list(args), dict(kwargs))) if isinstance(one, torch.Tensor)]
    device = next((one.device for one in given if one.is_cuda), _HOST)
    with preserved(model, device=device) as guard, _memory_kept(given), torch.no_grad():
        with nullcontext() if attributes else _attributes_kept(model):
            try:
                with guard.watching():
                    result = model(*args, **kwargs)
            except RuntimeError as error:
                refusal = _refusal(error, module_paths(model), differentiates=isinstance(model, Around))
                if refusal is None:
                    raise
                raise refusal from error
        yield result


def rehearse(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run ``model`` once as recordings do, TorchScript operator by operator; see ``run_preserved``."""
    for part in scripted_parts(model):
        getattr(part, "forward", None)  # torch makes it an attribute at its first use, which is no change by a run
    with operator_by_operator():
        run_preserved(model, args, kwargs)


def _owned(model: Callable[..., Any]) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []


@contextmanager
def _memory_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give tensors back their memory at the end, if they were given other memory inside (``.data = …``)."""
    before = [(one, one.detach()) for one in tensors if has_memory(one)]
    try:
        yield
    finally:
        for tensor, alias in before:
            if shown_by(tensor) != shown_by(alias):
                tensor.data = alias


@contextmanager
def requirements_kept(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Restore which inputs require a gradient: a model that differentiates may change that."""
    tensors: list[torch.Tensor] = []
    with suppress(InputError):  # raised again by the preparation, with the names of the inputs
        tensors = [one for one in flatten((tuple(args), dict(kwargs)))[0] if one.is_leaf]
    before = [one.requires_grad for one in tensors]
    try:
        yield
    finally:
        for tensor, required in zip(tensors, before, strict=True):
            if tensor.is_leaf and tensor.requires_grad != required:
                tensor.requires_grad_(required)


def _refusal(error: RuntimeError, modules: Mapping[int, str], *, differentiates: bool) -> CaptureError | None:
    """Return an error with a place and a remedy for what autograd refuses; None for other errors."""
    text, frame = str(error), [frame for frame, _ in walk_tb(error.__traceback__)][-1]
    if "leaf Variable that requires grad" in text:
        return CaptureError(
            "an input or parameter that requires a gradient is written in place",
            where=_place(*place_of(frame, modules)),
            fix="inplace=False in that layer, or prepare with an input that requires no gradient",
        )
    if not differentiates and "does not require grad and does not have a grad_fn" in text:
        return CaptureError(
            "the model differentiates in its own forward, and what is prepared for inference runs without gradients",
            where=_place(*place_of(frame, modules)),
            fix="with torch.enable_grad(): around what it differentiates, of tensors that require a gradient there",
        )
    if "use_reentrant=True" in text:
        return CaptureError(
            "torch.utils.checkpoint with use_reentrant=True runs a backward inside the backward",
            where=_checkpointed(getattr(frame.f_locals.get("ctx"), "run_function", None), modules),
            fix="checkpoint(..., use_reentrant=False); Hugging Face: gradient_checkpointing_enable("
            "gradient_checkpointing_kwargs={'use_reentrant': False})",
        )
    return None


def _checkpointed(computed: Any, modules: Mapping[int, str]) -> str:
    computed = _function(computed)
    module, code = modules.get(id(getattr(computed, "__self__", computed))), getattr(computed, "__code__", None)
    if module is None and code is not None:
        return f"checkpoint of {code.co_name}, {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
    return f"checkpoint of {module or 'the model'}"


def _place(module: str, file: str, line: int) -> str:
    return f"{module or 'the model'} at {file}:{line}" if file else module or "the model"
