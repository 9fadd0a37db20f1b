"""From a recording and a schedule to straight-line Python that re-issues the calls with as little else as possible.

What is done once, here, is not done again in a replay: the cheapest entry into each operator is found, results go to
buffers that exist already, views of such buffers are made, and calls on constants alone are run. What remains of one
call is one line, such as ``f12(g40, g41, out=g7)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from threading import Lock
from time import perf_counter_ns
from types import FunctionType
from typing import Any

import torch

from nimble_core.ir.schedule import Schedule
from nimble_core.profiling.nvtx import call_ranges
from nimble_core.runtime.device import PlacementError
from nimble_core.runtime.host.out_variants import Trial, accept, accepted, refuse, refused
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.torch_compat.dispatch import BINDINGS, OpOverload, TorchDispatchMode, has_kernel, pop_stack, push_stack
from nimble_core.tracing.recording import Recording, Slot, Step, fill, flat_tensors

__all__ = ["Code", "Lines", "Stopped", "compile_recording", "lay_out_buffers"]


class Stopped(Exception):
    """Raised in a worker because another one failed."""


@dataclass(frozen=True, slots=True)
class Lines:
    """One worker's function, and the call that each of its source lines belongs to."""

    function: FunctionType
    calls: dict[int, int]


@dataclass(slots=True)
class Code:
    """A compiled recording.

    Args:
        recording: what was compiled.
        schedule: for which schedule.
        memory: where the buffers lie.
        arena: the memory they lie in; may hold anything between runs.
        namespace: globals of the generated functions.
        nbytes: memory held by the arena and by constants.
        cells: length of the list through which workers hand over tensors.
        folded: calls that were run here, once, because they depend on constants alone.
        copied: positions of outputs that alias what the executable or its caller holds.
    """

    recording: Recording
    schedule: Schedule
    memory: MemoryPlan
    arena: torch.UntypedStorage
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


def lay_out_buffers(recording: Recording) -> Layout:
    """Which storages are the replay's own buffers: those that a call can fill, and those allocated between calls.

    Calls are given their results, they allocate none of these: there are no blocks. Constants keep their memory.

    Complexity:
        Linear in steps.
    """
    program = recording.program
    visible = _visible(recording)
    _, constant = _constants(recording, visible)
    calls = len(program.calls)
    return Layout(
        blocks=((),) * calls,
        arena={storage: program.storages[storage].nbytes for storage in _buffers(recording, visible | constant)},
        scratch=(0,) * calls,
        beside_nbytes=_constant_nbytes(recording, constant)
        + sum(program.inputs[position].nbytes for position in recording.written_inputs),
    )


def compile_recording(
    recording: Recording, schedule: Schedule, inputs: Sequence[torch.Tensor], memory: MemoryPlan
) -> Code:
    """Compile ``recording`` for ``schedule``.

    Runs every call once, on copies of what it writes, and tries once more whether it fills memory that it is given.

    Args:
        recording: made on the host.
        schedule: a checked schedule of its program.
        inputs: example values.
        memory: where the buffers of :func:`lay_out_buffers` lie; what it does not place is allocated in every run.

    Raises:
        PlacementError: a call does not fill memory that was planned for it; :func:`lay_out_buffers` leaves it out now.

    Complexity:
        Linear in steps, and one run of the model through the dispatcher; another of each call unlike all before.
    """
    plan = _Plan(recording, schedule, inputs, memory)
    outside = {storage for storage, kept in enumerate(recording.program.storages) if kept.role != "intermediate"}
    code = Code(
        recording=recording,
        schedule=schedule,
        memory=memory,
        arena=plan.arena,
        namespace={"Stopped": Stopped, "flat": flat_tensors} | {f"g{slot}": one for slot, one in plan.fixed.items()},
        nbytes=memory.nbytes + _constant_nbytes(recording, plan.constant),
        cells=len(plan.cells),
        folded=plan.folded,
        copied=tuple(p for p, slot in enumerate(recording.outputs) if recording.storage_of[slot] in outside),
        _plan=plan,
    )
    code.renew_locks()
    return code


# -- the cheapest entry into an operator ---------------------------------------------------------------------------


class _Probe(TorchDispatchMode):
    """Notes which operators are called, and answers with a result known before: nothing runs."""

    def __init__(self, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
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
        found: Callable[..., Any] = func
        return found
    for candidate in _candidates(func):
        probe = _Probe(result)
        try:
            # Not by "with", which is Python: an interrupt at its beginning or end would leave the mode in force.
            push_stack(probe)
            candidate(*args, **kwargs)
        except Exception:  # another signature, or a function of several operators that stumbled over the known result
            continue
        finally:
            pop_stack(None)
        if len(probe.seen) == 1 and probe.seen[0][0] is func and _same_call(func, (args, kwargs), probe.seen[0][1:]):
            return candidate
    return func._op


@cache
def _candidates(func: OpOverload) -> tuple[Callable[..., Any], ...]:
    library, _, name = func._schema.name.partition("::")
    if library != "aten":
        return ()
    return tuple(getattr(space, name) for space in BINDINGS if hasattr(space, name))


def _same_call(func: OpOverload, one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(_same_value(a, b) for a, b in zip(_bound(func, *one), _bound(func, *other), strict=True))


def _bound(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    defaults = _defaults(func)
    given = dict(zip(defaults, args, strict=False)) | kwargs
    return [given.get(name, default) for name, default in defaults.items()]


@cache
def _defaults(func: OpOverload) -> dict[str, Any]:
    """What each argument is where it is not given, in their order; None where it has to be."""
    return {
        argument.name: argument.default_value if argument.has_default_value() else None
        for argument in func._schema.arguments
    }


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
            if has_kernel(full, "CPU"):
                return other, outs
    return None


def _filler(step: Step, recording: Recording) -> tuple[Any, tuple[str, ...], tuple[int, ...]] | None:
    """The operator that does what ``step`` does, but fills tensors that are there; None if no kernel is known to.

    Returns:
        The operator, the names of the arguments that it fills (none: the first one), and arguments to add.
    """
    if step.call is None or not step.outputs or min(step.outputs) < 0 or refused(step, recording):
        return None
    name = getattr(getattr(step.func, "_schema", None), "name", "")
    if name in ("aten::clone", "aten::_to_copy"):
        # Both are an allocation and this copy.
        return torch.ops.aten.copy_.default, (), ()
    # What relu itself calls.
    func, extra = (torch.ops.aten.clamp_min.default, (0,)) if name == "aten::relu" else (step.func, ())
    found = _out_variant(func)
    return (*found, extra) if found is not None and len(found[1]) == len(step.outputs) else None


def _into(step: Step, recording: Recording, args: list[Any], kwargs: dict[str, Any], result: Any) -> Step | None:
    """``step`` as a call that fills the tensors of its output slots; None if no kernel does."""
    found = _filler(step, recording)
    if found is None:
        return None
    variant, names, extra = found
    slots = tuple(Slot(slot) for slot in step.outputs)
    reads = (*step.reads, *step.outputs)
    if not names:
        function = _entry(variant, [result, args[0]], {}, result)
        return Step(function, (slots[0], step.args[0]), (), (), reads, step.call)
    args, template = [*args, *extra], (*step.args, *extra)
    if len(names) > 1:
        named = tuple(zip(names, slots, strict=True))
        return Step(variant._op, template, (*step.kwargs, *named), (), reads, step.call)
    function = _entry(variant, args, kwargs | {"out": result}, result)
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
    """A step ready to be written down.

    Args:
        step: with the cheapest entry into its operator.
        into: the step as a call that fills tensors given to it; None if it cannot be, or must not.
        shape: ``"tensor"``, ``"flat"`` (a tuple or list of tensors) or ``"nested"``: what it returns.
        allocates: it is a host step whose results are new memory.
    """

    step: Step
    into: Step | None
    shape: str
    allocates: bool


class _Plan:
    """What each step becomes, which tensors are fixed, and the memory of those.

    A tensor is fixed if it is the same object in every replay: the model's own, constants, buffers, and views of these.
    """

    def __init__(
        self, recording: Recording, schedule: Schedule, inputs: Sequence[torch.Tensor], memory: MemoryPlan
    ) -> None:
        self.recording = recording
        self.schedule = schedule
        self.visible = _visible(recording)
        self.fixed: dict[int, torch.Tensor] = dict(recording.given)
        self.metas: dict[int, _Meta] = {}
        self.folded, self.constant = _constants(recording, self.visible)
        self.forms = self._try(inputs, memory)
        self.arena = torch.UntypedStorage(memory.nbytes)
        self._fix_buffers(memory)
        self._fix_views()
        self.maker = {slot: form for form in self.forms for slot in form.step.outputs if slot >= 0}
        self.cells = self._handed_over()
        """Place of each slot that one worker hands to others, in the list they share."""

    def _ours(self, storage: int) -> bool:
        return self.recording.program.storages[storage].role == "intermediate"

    def _try(self, inputs: Sequence[torch.Tensor], memory: MemoryPlan) -> list[_Form]:
        """Run every step once, in program order, and see what it is; tensors live as short as they are needed."""
        recording, storage_of = self.recording, self.recording.storage_of
        last: dict[int, int] = {}
        for index, step in enumerate(recording.steps):
            last |= dict.fromkeys((*step.reads, *step.outputs), index)
        tensors, outputs = _without_effect(recording, inputs), set(recording.outputs)
        range_of = call_ranges(recording.program, self.schedule)
        forms, misplaced = [], None
        for index, (step, fresh) in enumerate(zip(recording.steps, _made(recording), strict=True)):
            args, kwargs = fill(list(step.args), tensors), {name: fill(value, tensors) for name, value in step.kwargs}
            placed = step.call is not None and any(memory.offsets[storage] >= 0 for storage in fresh)
            trial = self._trial(step, tensors) if placed else None
            with range_of(step.call):
                result = step.func(*args, **kwargs)
            made = [
                (slot, tensor) for slot, tensor in zip(step.outputs, flat_tensors(result), strict=True) if slot >= 0
            ]
            for slot, tensor in made:
                tensors[slot] = tensor
                offset = int(tensor.storage_offset())
                self.metas[slot] = _Meta(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)
                storage = storage_of[slot]
                if storage in self.constant:
                    self.fixed[slot] = tensor
                elif not tensor.numel() and self._ours(storage) and slot not in outputs:
                    # Nothing orders its readers after the call that makes the rest of its memory.
                    self.fixed[slot] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            ownable = (
                placed
                and len(fresh) == len(step.outputs)
                and not fresh & (self.visible | self.constant)
                and not any(tensor.is_conj() or tensor.is_neg() or tensor.is_quantized for _, tensor in made)
            )
            into = _into(step, recording, args, kwargs, result) if ownable else None
            if into is not None and trial is not None:
                if trial.passed(into, dict(made)):
                    accept(step, recording, tensors)
                else:
                    refuse(step, recording)
                    misplaced = step.call
            forms.append(
                _Form(
                    step=replace(step, func=_entry(step.func, args, kwargs, result)),
                    into=into,
                    shape=_shape(result),
                    allocates=step.call is None and bool(fresh),
                )
            )
            del args, kwargs, result, made, trial
            for slot in {*step.reads, *step.outputs} - {-1}:
                if last[slot] == index:
                    tensors.pop(slot, None)
        if misplaced is not None:
            raise PlacementError(f"memory is not filled as planned by {recording.program.calls[misplaced]}")
        return forms

    def _trial(self, step: Step, tensors: Mapping[int, torch.Tensor]) -> Trial | None:
        """Of a call that may be given memory to fill, if none like it was tried before."""
        recording, storage_of = self.recording, self.recording.storage_of
        if step.call is None or _filler(step, recording) is None or accepted(step, recording, tensors):
            return None
        written = {ref.storage for ref in recording.program.calls[step.call].writes}
        return Trial(step, tensors, {slot for slot in step.reads if storage_of[slot] in written})

    def _fix_buffers(self, memory: MemoryPlan) -> None:
        """Make the tensors that calls fill, and those allocated between calls, where ``memory`` has them."""
        for form in self.forms:
            if form.into is None and not form.allocates:
                continue
            for slot in form.step.outputs:
                offset = memory.offsets[self.recording.storage_of[slot]] if slot >= 0 else -1
                if offset >= 0 and slot not in self.fixed:
                    meta = self.metas[slot]
                    start = offset // meta.dtype.itemsize + meta.offset
                    made = torch.empty(0, dtype=meta.dtype)
                    self.fixed[slot] = made.set_(self.arena, start, meta.sizes, meta.strides)

    def _fix_views(self) -> None:
        """Make every view of fixed tensors."""
        for form in self.forms:
            step = form.step
            if step.call is not None or form.allocates or not step.outputs:
                continue
            if not all(slot in self.fixed for slot in step.reads):
                continue
            result = step.func(*fill(list(step.args), self.fixed), **{n: fill(v, self.fixed) for n, v in step.kwargs})
            for slot, tensor in zip(step.outputs, flat_tensors(result), strict=True):
                if slot >= 0:
                    self.fixed.setdefault(slot, tensor)

    def _handed_over(self) -> dict[int, int]:
        stream_of = self.schedule.stream
        sources: dict[int, frozenset[int]] = {}
        """Tensors made by calls or allocations that each slot is a view of."""
        for form in self.forms:
            for slot in form.step.outputs:
                if slot >= 0 and slot not in self.fixed:
                    viewed = form.step.call is None and not form.allocates
                    near = [sources.get(read, frozenset()) for read in form.step.reads]
                    sources[slot] = frozenset().union(*near) if viewed else frozenset((slot,))
        calls = [form.step for form in self.forms if form.step.call is not None]
        needs = [(slot, stream_of[step.call]) for step in calls if step.call is not None for slot in step.reads]
        needs += [(slot, 0) for slot in self.recording.outputs]
        cells: dict[int, int] = {}
        for slot, stream in needs:
            for source in sources.get(slot, ()):
                call = self.maker[source].step.call
                if stream != (0 if call is None else stream_of[call]):
                    cells.setdefault(source, len(cells))
        return cells


def _shape(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return "tensor"
    flat = isinstance(result, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in result)
    return "flat" if flat else "nested"


def _visible(recording: Recording) -> set[int]:
    """Storages of the outputs: these belong to the caller."""
    return {recording.storage_of[slot] for slot in recording.outputs}


def _made(recording: Recording) -> list[set[int]]:
    """Storages that each step makes."""
    storage_of = recording.storage_of
    known = {storage_of[slot] for slot in (*recording.given, *recording.inputs)}
    made = []
    for step in recording.steps:
        fresh = {storage_of[slot] for slot in step.outputs if slot >= 0} - known
        known |= fresh
        made.append(fresh)
    return made


def _buffers(recording: Recording, others: Collection[int]) -> frozenset[int]:
    """Storages whose memory can be given to the step that makes them, but for ``others``."""
    found: set[int] = set()
    for step, fresh in zip(recording.steps, _made(recording), strict=True):
        if step.call is None:
            found |= fresh - set(others)
        elif len(fresh) == len(step.outputs) and fresh.isdisjoint(others) and _filler(step, recording):
            found |= fresh
    storages = recording.program.storages
    return frozenset(one for one in found if storages[one].nbytes and storages[one].role == "intermediate")


def _constant_nbytes(recording: Recording, constant: Collection[int]) -> int:
    storages = recording.program.storages
    return sum(storages[one].nbytes for one in constant if storages[one].role == "intermediate")


def _without_effect(recording: Recording, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The tensors that exist before the first step, by slot; those that will be written, on copies of their memory."""
    tensors = dict(recording.given) | dict(zip(recording.inputs, inputs, strict=True))
    written = {ref.storage for call in recording.program.calls for ref in call.writes}
    copies: dict[int, torch.UntypedStorage] = {}
    for slot, tensor in tensors.items():
        storage = recording.storage_of[slot]
        if storage in written:
            copy = copies.setdefault(storage, tensor.untyped_storage().clone())
            empty = torch.empty(0, dtype=tensor.dtype)
            tensors[slot] = empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensors


def _constants(recording: Recording, visible: set[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Calls that do the same in every replay, and the storages that only they write.

    Constants are what the forward makes itself (``torch.tensor``, ``arange``): a tensor that it finds outside, in a
    closure or a plain attribute, may be changed by its owner. A call is such if it reads constants only, draws no
    random numbers, no other call writes what it writes, and no other call has read that before: it would find the last
    value there.
    """
    program = recording.program
    given = {recording.storage_of[slot] for slot in (*recording.given, *recording.inputs)}
    written = {ref.storage for call in program.calls for ref in call.writes}
    lifted = {
        recording.storage_of[slot]
        for step in recording.steps
        if step.func is torch.ops.aten.lift_fresh.default
        for slot in step.reads
    }
    roots = lifted - written
    made = {storage for storage in written if program.storages[storage].role == "intermediate"} - given - visible
    while True:
        constant = set(roots)
        folded: set[int] = set()
        spoiled: set[int] = set()
        begun: set[int] = set()
        needed: set[int] = set()  # by calls in every replay
        for call in program.calls:
            writes = {ref.storage for ref in call.writes}
            # Its own results are among what it may read: they were allocated, not computed, before it.
            reads = {ref.storage for ref in call.reads} - (writes - begun)
            begun |= writes
            if reads <= constant and writes <= made - needed:
                constant |= writes
                folded.add(call.index)
            else:
                spoiled |= writes & made
                needed |= reads
        if not spoiled & constant:
            return frozenset(folded), frozenset(constant)
        made -= spoiled


# -- source --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Line:
    text: str
    call: int | None
    names: tuple[str, ...] = ()
    """Local variables read or set."""


class _Writer:
    """Writes the function of one stream."""

    def __init__(self, plan: _Plan, namespace: dict[str, Any], stream: int, timed: bool) -> None:
        self.plan = plan
        self.namespace = namespace
        self.stream = stream
        self.timed = timed
        self.lines: list[_Line] = []
        self.local: set[int] = set()
        self.call: int | None = None
        self.inputs = {slot: f"i{position}" for position, slot in enumerate(plan.recording.inputs)}
        self.add(", ".join(self.inputs.values()) + ", = I")

    def add(self, text: str, names: Sequence[str] = ()) -> None:
        self.lines.append(_Line(text, self.call, tuple(names)))

    def name(self, slot: int) -> str:
        if slot in self.plan.fixed:
            return f"g{slot}"
        return self.inputs.get(slot, f"t{slot}")

    def need(self, slot: int) -> None:
        """Make ``slot`` a local variable, by the views that lead to it."""
        pending = [slot]
        while pending:
            now = pending[-1]
            if now in self.plan.fixed or now in self.inputs or now in self.local:
                pending.pop()
                continue
            form = self.plan.maker[now]
            if now in self.plan.cells:
                self.set(now, f"C[{self.plan.cells[now]}]")
            else:
                missing = [read for read in form.step.reads if self._is_missing(read)]
                if missing:
                    pending += missing
                    continue
                self.run(form, form.step)
            pending.pop()

    def _is_missing(self, slot: int) -> bool:
        return slot not in self.plan.fixed and slot not in self.inputs and slot not in self.local

    def set(self, slot: int, text: str) -> None:
        self.local.add(slot)
        self.add(f"t{slot} = {text}", [f"t{slot}"])

    def run(self, form: _Form, step: Step) -> None:
        """Write ``step``, whose reads are there."""
        function = self.constant(step.func)
        words = [self.value(arg) for arg in step.args] + [f"{name}={self.value(arg)}" for name, arg in step.kwargs]
        text = f"{function}({', '.join(words)})"
        names = [self.name(slot) for slot in step.reads if slot in self.local]
        targets = [f"t{slot}" if slot >= 0 and slot not in self.plan.fixed else "" for slot in step.outputs]
        self.local |= {slot for slot, target in zip(step.outputs, targets, strict=True) if target}
        made = [target for target in targets if target]
        if form.shape == "nested":
            text = f"flat({text})"
        if not made:
            self.add(text, names)
        elif form.shape == "tensor":
            self.add(f"{made[0]} = {text}", names + made)
        else:
            unpacked = ", ".join(target or "_" for target in targets)
            self.add(f"{unpacked}, = {text}" + ("; del _" if "" in targets else ""), names + made)

    def value(self, arg: Any) -> str:
        if type(arg) is Slot:
            return self.name(arg.index)
        if arg is None or type(arg) in (bool, int, str) or (type(arg) is float and math.isfinite(arg)):
            return repr(arg)
        if type(arg) is list:
            return f"[{', '.join(self.value(item) for item in arg)}]"
        if type(arg) is tuple:
            return f"({''.join(self.value(item) + ', ' for item in arg)})"
        return self.constant(arg)

    def constant(self, value: Any) -> str:
        name = f"k{id(value)}"  # the namespace keeps it alive, so that its id stays its own
        self.namespace[name] = value
        return name

    def function(self, name: str) -> Lines:
        """Compile. Every variable is let go of on the line of its last use, so that its memory serves again at once."""
        last = {used: index for index, line in enumerate(self.lines) for used in line.names}
        gone: dict[int, list[str]] = {}
        for used, index in last.items():
            gone.setdefault(index, []).append(used)
        source = [f"def {name}(I, C):"]
        calls = {}
        for index, line in enumerate(self.lines):
            drop = f"; del {', '.join(gone[index])}" if index in gone and not line.text.startswith("return") else ""
            source.append(f"    {line.text}{drop}")
            if line.call is not None:
                calls[len(source)] = line.call
        exec(compile("\n".join(source) + "\n", f"<host replay: {name}>", "exec"), self.namespace)
        function = self.namespace.pop(name)
        assert isinstance(function, FunctionType)
        return Lines(function, calls)


def _emit(plan: _Plan, code: Code, *, timed: bool) -> list[Lines]:
    recording, schedule, namespace = plan.recording, plan.schedule, code.namespace
    writers = [_Writer(plan, namespace, stream, timed) for stream in range(max(schedule.streams, 1))]
    of_call = {form.step.call: form for form in plan.forms if form.step.call is not None}
    main = writers[0]
    for form in plan.forms:
        if form.allocates:
            for slot in form.step.outputs:
                if slot not in plan.fixed:
                    meta = plan.metas[slot]
                    dtype = main.constant(meta.dtype)
                    empty = main.constant(torch.empty_strided)
                    main.set(slot, f"{empty}({meta.sizes}, {meta.strides}, dtype={dtype})")
                    _hand_over(plan, main, slot)
    if schedule.streams > 1:
        main.add("kick()")
    waits: dict[int, list[int]] = {}
    signals: dict[int, list[int]] = {}
    for index, (producer, consumer) in enumerate(schedule.syncs):
        signals.setdefault(producer, []).append(index)
        waits.setdefault(consumer, []).append(index)
    for call in schedule.order:
        writer = writers[schedule.stream[call]]
        writer.call = call
        for index in waits.get(call, ()):
            writer.add(f"w{index}()")
            writer.add("if failed: raise Stopped")
        if timed:
            writer.add(f"A[{call}] = now()")
        if call not in plan.folded:
            form = of_call[call]
            for slot in form.step.reads:
                writer.need(slot)
            fixed = form.into is not None and all(slot in plan.fixed for slot in form.step.outputs)
            writer.run(form, form.into if fixed and form.into else form.step)
            for slot in form.step.outputs:
                _hand_over(plan, writer, slot)
        if timed:
            writer.add(f"B[{call}] = now()")
        for index in signals.get(call, ()):
            writer.add(f"s{index}()")
        writer.call = None
    if schedule.streams > 1:
        main.add("join()")
    for slot in recording.outputs:
        main.need(slot)
    names = [main.name(slot) for slot in recording.outputs]
    main.add(f"return [{', '.join(names)}]", [main.name(slot) for slot in recording.outputs if slot in main.local])
    return [writer.function(f"stream_{writer.stream}" + "_timed" * timed) for writer in writers]


def _hand_over(plan: _Plan, writer: _Writer, slot: int) -> None:
    if slot in plan.cells and slot in writer.local:
        writer.add(f"C[{plan.cells[slot]}] = t{slot}", [f"t{slot}"])
