"""From a recording and a schedule to straight-line Python that re-issues the calls with as little else as possible.

What is done once, here, is not done again in a replay: the cheapest entry into each operator is found, results go to
buffers that exist already, views of such buffers are made, and calls on constants alone are run. What remains of one
call is one line, such as ``f12(g40, g41, out=g7)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from threading import Lock
from time import perf_counter_ns
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core.memory import release_plan
from nimble_core.recording import Recording, Slot, Step, fill, flat_tensors, slots_in
from nimble_core.schedule import Schedule

__all__ = ["Code", "Lines", "Stopped", "compile_recording"]

_ALIGNMENT = 64

# Where torch keeps the functions behind its Python interface. They parse arguments in C++: about 0.35 µs less per call
# than an OpOverload's own entry.
_BINDINGS: tuple[Any, ...] = (
    torch._C._VariableFunctions,
    torch._C._nn,
    torch._C.TensorBase,
    torch._C._linalg,
    torch._C._special,
    torch._C._fft,
)


class Stopped(Exception):
    """Raised in a worker because another one failed."""


@dataclass(frozen=True, slots=True)
class Lines:
    """One worker's function, and the call that each of its source lines belongs to."""

    function: Callable[[Sequence[torch.Tensor], list[Any]], Any]
    calls: dict[int, int]


@dataclass(slots=True)
class Code:
    """A compiled recording.

    Args:
        recording: what was compiled.
        schedule: for which schedule.
        namespace: globals of the generated functions.
        nbytes: memory held by buffers and constants.
        cells: length of the list through which workers hand over tensors.
        folded: calls that were run here, once, because they depend on constants alone.
        copied: positions of outputs that alias what the executable or its caller holds.
    """

    recording: Recording
    schedule: Schedule
    namespace: dict[str, Any]
    nbytes: int
    cells: int
    folded: frozenset[int]
    copied: tuple[int, ...]
    _plan: _Plan
    _timed: list[Lines] = field(default_factory=list)

    def lines(self) -> list[Lines]:
        """One function per stream; that of stream 0 returns the outputs."""
        return _emit(self._plan, self, timed=False)

    def timed_lines(self) -> list[Lines]:
        """The same, noting when each call begins and ends in the lists ``A`` and ``B`` of the namespace."""
        if not self._timed:
            calls = len(self.recording.program.calls)
            self.namespace.update(A=[0] * calls, B=[0] * calls, now=perf_counter_ns)
            self._timed = _emit(self._plan, self, timed=True)
        return self._timed

    def renew_locks(self) -> None:
        """Make the locks between workers anew: after a failure some are open and some are not."""
        for index in range(len(self.schedule.syncs)):
            lock = Lock()
            lock.acquire()
            self.namespace[f"w{index}"], self.namespace[f"s{index}"] = lock.acquire, lock.release
        self.namespace["failed"] = False

    def open_locks(self) -> None:
        """Wake every worker that waits, telling it to stop."""
        self.namespace["failed"] = True
        for index in range(len(self.schedule.syncs)):
            try:
                self.namespace[f"s{index}"]()
            except RuntimeError:  # open already
                continue


def compile_recording(recording: Recording, schedule: Schedule, inputs: Sequence[torch.Tensor]) -> Code:
    """Compile ``recording`` for ``schedule``.

    Runs every call once, on copies of what it writes.

    Args:
        recording: made on the host.
        schedule: a checked schedule of its program.
        inputs: example values.

    Complexity:
        Linear in steps, and one run of the model through the dispatcher.
    """
    plan = _Plan(recording, schedule, inputs)
    outside = {storage for storage, kept in enumerate(recording.program.storages) if kept.role != "intermediate"}
    code = Code(
        recording=recording,
        schedule=schedule,
        namespace={f"g{slot}": tensor for slot, tensor in plan.static.items()} | {"Stopped": Stopped, "flat": flat_tensors},
        nbytes=plan.nbytes,
        cells=len(plan.shared),
        folded=frozenset(plan.folded),
        copied=tuple(p for p, slot in enumerate(recording.outputs) if recording.storage_of[slot] in outside),
        _plan=plan,
    )
    code.renew_locks()
    return code


# -- the cheapest entry into an operator ---------------------------------------------------------------------------


class _Probe(TorchDispatchMode):
    """Notes which operators are called, and answers with a result known before: nothing runs."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return self.result


def _entry(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Callable[..., Any]:
    """The cheapest callable that calls exactly ``func`` with exactly these arguments."""
    if not isinstance(func, OpOverload):
        return func  # type: ignore[no-any-return]
    for candidate in _candidates(func):
        probe = _Probe(result)
        try:
            with probe:
                candidate(*args, **kwargs)
        except Exception:  # another signature, or a function of several operators that stumbled over the known result
            continue
        if len(probe.seen) == 1 and probe.seen[0][0] is func and _same_call(func, (args, kwargs), probe.seen[0][1:]):
            return candidate
    return func._op  # type: ignore[no-any-return]


@cache
def _candidates(func: OpOverload) -> tuple[Callable[..., Any], ...]:
    library, _, name = func._schema.name.partition("::")
    if library != "aten":
        return ()
    return tuple(getattr(space, name) for space in _BINDINGS if hasattr(space, name))


def _same_call(func: OpOverload, one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        _same_value(a, b) for a, b in zip(_bound(func, *one), _bound(func, *other), strict=True)
    )


def _bound(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [
        given.get(argument.name, argument.default_value if argument.has_default_value() else None)
        for argument in arguments
    ]


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same_value(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or a != a)


@cache
def _out_variant(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload of ``func`` that fills given tensors by a kernel of its own, and the names of those arguments.

    Generated variants run the allocating kernel and copy: they are not worth it.
    """
    if not isinstance(func, OpOverload) or func._schema.is_mutable:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        given = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        outs = tuple(a.name for a in other._schema.arguments if a.is_out)
        if outs and given == wanted and len(outs) == len(func._schema.returns):
            full = f"{other._schema.name}.{other._schema.overload_name}"
            if torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
                return other, outs
    return None


def _into(step: Step, args: list[Any], kwargs: dict[str, Any], result: Any) -> Step | None:
    """``step`` as a call that fills the tensors of its output slots; None if no kernel does."""
    if step.call is None or not step.outputs or min(step.outputs) < 0:
        return None
    name = getattr(getattr(step.func, "_schema", None), "name", "")
    if name in ("aten::clone", "aten::_to_copy"):
        # Both are an allocation and this copy.
        target = Slot(step.outputs[0])
        function = _entry(torch.ops.aten.copy_.default, [result, args[0]], {}, result)
        return Step(function, (target, step.args[0]), (), (), (*step.reads, target.index), step.call)
    func, extra = step.func, ()
    if name == "aten::relu":
        # What relu itself calls.
        func, extra = torch.ops.aten.clamp_min.default, (0,)
    found = _out_variant(func)
    results = flat_tensors(result)
    if found is None or len(results) != len(found[1]):
        return None
    variant, names = found
    slots = tuple(Slot(slot) for slot in step.outputs)
    args, template = [*args, *extra], (*step.args, *extra)
    reads = (*step.reads, *step.outputs)
    python = {"out": results[0] if len(results) == 1 else tuple(results)}
    function = _entry(variant, args, kwargs | python, result) if len(results) == 1 else variant._op
    if len(results) > 1:
        named = tuple(zip(names, slots, strict=True))
        return Step(function, template, (*step.kwargs, *named), (), reads, step.call)
    key = "out" if function is not variant._op else names[0]
    return Step(function, template, (*step.kwargs, (key, slots[0])), (), reads, step.call)


# -- what is fixed, and where it lies ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Meta:
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Form:
    """A step ready to be written down. ``returns``: how its result holds tensors (see ``_returns``)."""

    step: Step
    returns: str


class _Plan:
    """What each step becomes, which tensors are fixed, and the memory of those."""

    def __init__(self, recording: Recording, schedule: Schedule, inputs: Sequence[torch.Tensor]) -> None:
        self.recording = recording
        self.schedule = schedule
        program = recording.program
        self.visible = {recording.storage_of[slot] for slot in recording.outputs}
        self.static: dict[int, torch.Tensor] = dict(recording.given)
        self.forms: list[_Form] = []
        self.intos: list[Step | None] = []
        self.metas: dict[int, _Meta] = {}
        self.allocated: set[int] = set()
        """Storages that a host step allocates."""
        self.folded, self.constant = _constants(recording, self.visible)
        self.nbytes = sum(program.storages[storage].nbytes for storage in self.constant if self._ours(storage))
        self._try(inputs)
        self._choose_buffers()
        self._fix_views()
        self.shared: dict[int, int] = {}
        self.maker = {slot: form for form in self.forms for slot in form.step.outputs if slot >= 0}

    def _ours(self, storage: int) -> bool:
        return self.recording.program.storages[storage].role == "intermediate"

    def _try(self, inputs: Sequence[torch.Tensor]) -> None:
        """Run every step once, in program order, each tensor as short as it is needed."""
        recording = self.recording
        last: dict[int, int] = {}
        for index, step in enumerate(recording.steps):
            last |= dict.fromkeys((*step.reads, *step.outputs), index)
        tensors: list[torch.Tensor | None] = [None] * recording.slots
        for slot, tensor in _without_effect(recording, inputs).items():
            tensors[slot] = tensor
        known = {recording.storage_of[slot] for slot, tensor in enumerate(tensors) if tensor is not None}
        for index, step in enumerate(recording.steps):
            args, kwargs = fill(list(step.args), tensors), {name: fill(value, tensors) for name, value in step.kwargs}
            result = step.func(*args, **kwargs)
            returned = flat_tensors(result)
            for slot, tensor in zip(step.outputs, returned, strict=bool(step.outputs)):
                if slot < 0:
                    continue
                tensors[slot] = tensor
                storage = recording.storage_of[slot]
                self.metas[slot] = _Meta(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
                if storage in self.constant or (self._ours(storage) and not tensor.numel() and storage not in self.visible):
                    self.static[slot] = tensor
                if storage not in known and step.call is None:
                    self.allocated.add(storage)
            fresh = {recording.storage_of[slot] for slot in step.outputs if slot >= 0} - known
            owned = len(fresh) == len(step.outputs) and not fresh & (self.visible | self.constant)
            self.intos.append(_into(step, args, kwargs, result) if owned else None)
            self.forms.append(_Form(replace(step, func=_entry(step.func, args, kwargs, result)), _returns(result)))
            known |= fresh
            del args, kwargs, result, returned
            for slot in {*step.reads, *step.outputs}:
                if slot >= 0 and last[slot] == index:
                    tensors[slot] = None

    def _choose_buffers(self) -> None:
        """Give every storage that a call can fill a block; blocks are used again where the release plan allows."""
        recording, schedule = self.recording, self.schedule
        sizes = [storage.nbytes for storage in recording.program.storages]
        by_call = {step.call: index for index, step in enumerate(recording.steps) if step.call is not None}
        plan = release_plan(recording.program, schedule)
        block_of: dict[int, torch.UntypedStorage] = {}
        free: list[list[torch.UntypedStorage]] = [[] for _ in range(schedule.streams)]

        def block(storage: int, spare: list[torch.UntypedStorage]) -> None:
            wanted = max(-(-sizes[storage] // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
            fits = [one for one in spare if wanted <= one.nbytes() <= 2 * wanted + 4096]
            if fits:
                # The smallest; among equals the one that was freed last is warmest.
                found = min(reversed(fits), key=lambda one: one.nbytes())
                spare.remove(found)
            else:
                found = torch.empty(wanted, dtype=torch.uint8).untyped_storage()
                self.nbytes += wanted
            block_of[storage] = found

        for storage in sorted(self.allocated - self.visible - self.constant):
            # Several calls may be the first to write it, unordered: it takes over nobody's memory.
            block(storage, [])
        for position, call in enumerate(schedule.order):
            stream = schedule.stream[call]
            for storage in plan.before[position]:
                if storage in block_of:
                    free[stream].append(block_of[storage])
            into = self.intos[by_call[call]]
            if into is not None and call not in self.folded:
                for slot in recording.steps[by_call[call]].outputs:
                    block(recording.storage_of[slot], free[stream])
        for index, step in enumerate(recording.steps):
            fixed = self.intos[index]
            for slot in step.outputs:
                storage = recording.storage_of[slot]
                if slot < 0 or slot in self.static or storage not in block_of:
                    continue
                if fixed is not None or (step.call is None and not any(recording.storage_of[r] == storage for r in step.reads)):
                    self.static[slot] = _window(block_of[storage], self.metas[slot])

    def _fix_views(self) -> None:
        """Make every view of fixed tensors that there is."""
        for form in self.forms:
            step = form.step
            todo = [slot for slot in step.outputs if slot >= 0 and slot not in self.static]
            if step.call is not None or not todo or not step.reads or any(slot not in self.static for slot in step.reads):
                continue
            if any(self.recording.storage_of[slot] in self.allocated for slot in todo) and not any(
                self.recording.storage_of[slot] == self.recording.storage_of[read] for slot in todo for read in step.reads
            ):
                continue  # an allocation like a fixed tensor, for an output
            tensors = [self.static.get(slot) for slot in range(self.recording.slots)] if False else _Lookup(self.static)
            result = step.func(*fill(list(step.args), tensors), **{n: fill(v, tensors) for n, v in step.kwargs})
            for slot, tensor in zip(step.outputs, flat_tensors(result), strict=True):
                if slot >= 0:
                    self.static[slot] = tensor
