"""Record: run a model once and write down every call that reaches its device.

A ``TorchDispatchMode`` sees every ATen call below autograd, with all arguments. On CUDA the run happens under a
throwaway stream capture: nothing executes, libraries branch as they will in the real capture, and the captured nodes
tell calls from host steps and betray launches that the mode did not see. On the host the run is live.

Whatever the run changed (parameters, buffers, inputs, attributes, random state) is put back.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, compress
from traceback import walk_tb
from types import FrameType
from typing import Any, Protocol

import torch

from nimble_core.ir.allocations import Ask, Window
from nimble_core.ir.program import Access, Call, Origin, Phase, Program, Role, Storage, TensorRef
from nimble_core.scheduling.failure_order import checks_values
from nimble_core.torch_compat.autograd import current_node, sequence_number
from nimble_core.torch_compat.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    lifts_host_tensors,
    modes_off,
    pytree,
    set_lifts_host_tensors,
)
from nimble_core.torch_compat.members import FREE_WEAK_STORAGE
from nimble_core.torch_compat.public import IS_CAPTURING
from nimble_core.tracing import unread_values
from nimble_core.tracing.input_windows import require_same_windows, windows_of
from nimble_core.tracing.kernel_launches import Launch, Relaunch, launches_seen, relative_window
from nimble_core.tracing.operator_traits import (
    INDEXED,
    TOLD_BY_VALUE,
    Shown,
    Traits,
    argument_texts,
    copies_to_host,
    draws_numbers,
    fills_where_true,
    has_memory,
    masks_among,
    owned_tensors,
    parts_of,
    same_arguments,
    seeds_among,
    shape_depends_on_data,
    shown_by,
    storage_address,
    traits_of,
    view_form,
    written_tensors,
    written_where_true,
)
from nimble_core.tracing.phase import current_phase
from nimble_core.tracing.provenance import issued_in, line_inside, module_paths, place_of, running_module
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recording import (
    Held,
    Recording,
    Slot,
    Step,
    flat_tensors,
    issuing,
    places_of,
)
from nimble_core.tracing.rewritten import Rewritten
from nimble_core.tracing.rng_state import TORCH, RandomStates, state_of
from nimble_core.tracing.side_effects import Change, Changes, preserved
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.tensor_escapes import exports_seen, host_copies_seen, readings_seen
from nimble_core.tracing.torchscript import operator_by_operator
from nimble_core.utils.errors import CaptureError, NimbleError, NotStaticError, first_line
from nimble_core.utils.gc_pause import collector_paused
from nimble_core.utils.locks import free_after_fork

__all__ = ["NodeCounter", "announced", "expecting", "noting_refusals", "record", "recording_here"]

# Operators that copy host arguments to the device by themselves, which a capture does not allow. So do those that put,
# x[index] = 0.5, unless they fill.
_COPIES_HOST_ARGUMENTS = ("aten::copy_", "aten::index")

_ALIAS = torch.ops.aten.alias.default
_AS_STRIDED = torch.ops.aten.as_strided.default
_EMPTY_STRIDED = torch.ops.aten.empty_strided.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_NONZERO = torch.ops.aten.nonzero.default
_RNN = torch.ops.aten.mkldnn_rnn_layer.default


def _rnn_with_workspace(*args: Any, **kwargs: Any) -> Any:
    """oneDNN's recurrent layer as in training: it asks the gradient mode whether to make what its backward reads."""
    with torch.enable_grad():
        return _RNN(*args, **kwargs)


_COPIES = (
    "aten._to_copy.default",
    "aten.clone.default",
    "aten.copy_.default",
    "aten._cudnn_rnn_flatten_weight.default",  # all weights of recurrent layers into one piece of memory
)
_CHOOSES = "compute both and choose: torch.where(condition, a, b)"
_TO_HOST = "copies from the device to the host", "keep the tensor on the device, or copy it outside the model"
_LOOKS = "gives the host a value computed on the device", "compute it on the device, or pass it as an input"
_PUTS_WHERE_TRUE = (
    "writes where a mask is true, and counts these places",
    "use torch.where(mask, values of x's shape, x), or one value, with the mask on the device",
)
_SHAPE_BY_DATA = (
    "has an output whose shape depends on data",
    "use a form with a fixed shape (torch.where, a mask, a size argument)",
)
_EXPERTS = (
    'model.set_experts_implementation("batched_mm") before preparing, or from_pretrained(..., '
    'experts_implementation="batched_mm"): no loop over the experts that are chosen'
)
_FIXES = {
    torch.nn.modules.batchnorm.__file__: "give momentum a number: with None torch reads how many batches there were",
    torch.distributions.distribution.__file__: "give distributions validate_args=False: else torch looks at all values",
    unread_values.__file__: "give F.one_hot its number of classes: F.one_hot(x, num_classes=n)",
}
"""What to do about it by the file of torch's own that asks for a value, whose lines users cannot change."""
_WAITS = "the host would have to wait for the device, and a replay cannot"
_SWAPS = "torch.utils"  # where swap_tensors is

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class NodeCounter(Protocol):
    """Counts the nodes of the capture under way, so that calls can be told from host steps."""

    def nodes(self) -> int:
        """Nodes captured so far."""

    def begin(self, label: str) -> None:
        """What this thread allocates from now on is of the call with this label."""

    def end(self) -> None:
        """What it allocates from now on is of none."""

    def asks(self, windows: Sequence[Window]) -> tuple[tuple[Ask, ...], ...]:
        """What each of these asked of the allocator; empty if that is not known."""

    def outside(self) -> AbstractContextManager[None]:
        """Inside this, work runs for real instead of being captured (copies of host constants)."""


def record(
    model: Callable[..., Any],
    signature: Signature,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    counter: NodeCounter | None = None,
    stand_in: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
    rewritten: Rewritten | None = None,
    remote: bool = False,
) -> Recording:
    """Run ``model(*args, **kwargs)`` once and return what it asked of the device.

    Args:
        model: module or function.
        signature: of the inputs; its tensors are the ones in ``args`` and ``kwargs``.
        args: positional inputs.
        kwargs: keyword inputs.
        counter: nodes of the capture this runs under; None for a live run on the host.
        stand_in: for a run on tensors without values (fake ones): ``(func, tensor)`` to what takes the tensor's place
            among the arguments of ``func`` (None for an output of the model).
        rewritten: what to run in the model's place, on the tensors of ``signature``.
        remote: the host stands in for another device: copies to the host, which are no calls then, are refused too.

    Raises:
        CaptureError: a call whose result the host needs, or whose shape depends on data; names it, its module path
            and source line.
        NotStaticError: with a backward: a buffer, or another tensor of the model's, is read and then replaced.
        InputError: an output of an unknown type that holds tensors.
    """
    recorder = _Recorder(model, signature, counter, stand_in, rewritten)
    windows = windows_of(signature.tensors)
    kept = preserved(model, live=counter is None, memory=False)  # which the recorder puts back: it knows the names
    with collector_paused(), _casts_forgotten(), kept as guard, torch.no_grad():
        recorder.before_write, recorder.before_draw = guard.before_write, guard.before_draw
        try:
            if remote:
                escapes: AbstractContextManager[None] = host_copies_seen(recorder.copied_to_host)
            else:
                live = counter is None and stand_in is None
                escapes = _escapes_seen(recorder) if live else nullcontext()
            seen = launches_seen(recorder.launched, recorder.inside_operator, recorder.reached_elsewhere)
            unread = unread_values.values_unread(recorder.knows)
            with escapes, unread, operator_by_operator(), _tensors_lifted_first(), _said_to_record(), seen, recorder:
                result = rewritten.run(*signature.tensors) if rewritten else model(*args, **kwargs)
            require_same_windows(windows, signature.tensors, signature.paths)
            if not rewritten:
                signature.require_unchanged(args, kwargs)
            outputs, structure = flatten(result, what="output", given=(args, kwargs))
            if stand_in:
                outputs = [stand_in(None, tensor) for tensor in outputs]
            recording = recorder.finish(outputs, structure)
        except RuntimeError as error:
            if "weakref associated" in str(error):
                raise recorder.refused_swap(error) from error
            if counter and "CUDAGeneratorImpl::" in str(error):
                raise _random_state_set(recorder.raised_at(error)) from error
            if recorder.refused is not None and not isinstance(error, NimbleError):
                raise recorder.refused from error  # TorchScript's interpreter makes another error of it
            raise
        finally:
            moved = recorder.put_memory_back()
            recorder.addresses.let_go()
        changed, drawn = guard.changed_attributes() | moved, guard.draws.drawn()
        seeds = recorder.draws_nothing() and guard.draws.seed_set()
        carried = recorder.carried(changed, model)
    if carried and any(call.phase == "backward" for call in recording.program.calls):
        raise _refused_to_carry(carried)
    _require_kept(recording, changed)
    notes = tuple(_notes(changed, carried, drawn, seeds=seeds))
    program = replace(recording.program, notes=notes)
    recording = replace(recording, changed=tuple(changed), counters=tuple(_counters(changed)), program=program)
    return replace(recording, drawn=tuple(drawn))


def _counters(changed: Changes) -> dict[str, None]:
    """Attributes with other values, not only other objects, that are no tensors."""
    values = (int, float, complex, str)
    return {
        change.attribute: None
        for change in changed.values()
        if change.attribute
        and not isinstance(change.was, torch.Tensor)
        and not isinstance(change.now, torch.Tensor)
        and not (isinstance(change.was, values) and isinstance(change.now, values) and change.was == change.now)
    }


@contextmanager
def _escapes_seen(recorder: _Recorder) -> Iterator[None]:
    with exports_seen(recorder.exported), readings_seen(recorder.read):
        yield


def _random_state_set(where: str) -> NotStaticError:
    return NotStaticError(
        "the forward sets random state, or puts it back, which a replay does not repeat",
        where=where,
        fix="set it outside of the model, or draw outside and pass the numbers in",
    )


def _notes(changed: Changes, carried: Mapping[str, _Carried], drawn: Sequence[str], *, seeds: bool) -> Iterator[str]:
    """What the forward does in Python that replays do not, in words."""
    if seeds:
        yield "the forward sets torch's random state, which a replay does not repeat"
    if drawn:
        yield (
            f"the forward draws from {' and '.join(drawn)}: what was drawn in preparation is frozen in every replay, "
            "with the branch that it led to; draw outside of the model and pass it in, or use torch's random operators"
        )
    for one in carried.values():
        yield f"{one.what} is read and then replaced, and replays go on reading what it holds now; {one.fix}"
    rest = dict.fromkeys(change.attribute for name, change in changed.items() if name not in carried)
    rest.pop("", None)
    if rest:
        yield f"the forward changes attributes, which a replay does not repeat: {', '.join(rest)}"


def _require_kept(recording: Recording, changed: Changes) -> None:
    """Refuse a run that read a tensor on the host and put another one in its place."""
    reads = {storage_address(tensor): one for one in recording.held for _, tensor in one.sources}
    for was, now, attribute, _ in changed.values():
        read = reads.get(storage_address(was)) if isinstance(was, torch.Tensor) and has_memory(was) else None
        host = read is not None and isinstance(now, torch.Tensor) and now.device.type == "cpu"
        if read is not None and not (host and torch.equal(was, now)):
            raise NotStaticError(
                f"the forward reads {read.names} on the host, and replaces {attribute}: a replay would go on with the "
                "value that was read",
                where=read.where,
                fix=read.fix,
            )


def _refused_to_carry(carried: Mapping[str, _Carried]) -> NotStaticError:
    first, *others = carried.values()
    more = f" (and so are {len(others)} more)" if others else ""
    return NotStaticError(
        f"the model is not static: {first.what} is read and then replaced{more}, so that the next step reads another "
        "tensor, and a replay the same one again",
        where=first.where,
        fix=first.fix,
    )


_recording: set[int] = set()
"""Threads that record."""


def recording_here() -> bool:
    """Whether this thread is recording a model: what was prepared before has to be seen call by call."""
    return bool(_recording) and threading.get_ident() in _recording


@contextmanager
def _said_to_record() -> Iterator[None]:
    thread = threading.get_ident()
    inside = thread in _recording
    _recording.add(thread)
    try:
        yield
    finally:
        if not inside:
            _recording.discard(thread)


# One at a time: threads that took turns at random would put back each other's word.
_ANNOUNCING = free_after_fork(threading.RLock())


@contextmanager
def announced(capturing: bool) -> Iterator[None]:
    """Tell libraries that ask on this thread whether a capture is under way, whatever is true.

    Hugging Face's masks do: in a capture they are built in full, where eager looks at their values and often needs
    none. Told that there is none, a model takes eager's branch, which a recording can keep unless it reads values back.
    """
    with _ANNOUNCING:
        real, thread = torch.cuda.is_current_stream_capturing, threading.get_ident()
        with IS_CAPTURING.replaced_by(lambda: capturing if threading.get_ident() == thread else real()):
            yield


_expected: ContextVar[Recording | None] = ContextVar("expected", default=None)


@contextmanager
def expecting(recording: Recording) -> Iterator[None]:
    """Inside, recordings take over those calls of this one, of the same model, that their own equal in all but origins.

    A recording that is only made to be compared need not make them again.
    """
    token = _expected.set(recording)
    try:
        yield
    finally:
        _expected.reset(token)


_noting: ContextVar[Callable[[NimbleError, FrameType], None] | None] = ContextVar("noting", default=None)


@contextmanager
def noting_refusals(note: Callable[[NimbleError, FrameType], None]) -> Iterator[None]:
    """Tell ``note`` of each refused call and its frame, and go on with eager's values: for a diagnosis alone."""
    token = _noting.set(note)
    try:
        yield
    finally:
        _noting.reset(token)


@contextmanager
def _casts_forgotten() -> Iterator[None]:
    """Let autocast cast weights anew: what it has kept of an earlier run would be a constant of this one."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _tensors_lifted_first() -> Iterator[None]:
    """Let ``torch.tensor(..., device=...)`` make a host tensor and then copy it where the recorder sees the copy.

    By itself it copies out of sight of dispatch modes, which a capture does not allow.
    """
    before = lifts_host_tensors()
    set_lifts_host_tensors(True)
    try:
        yield
    finally:
        set_lifts_host_tensors(before)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _once(accesses: Sequence[Access]) -> tuple[Access, ...]:
    """Each access once. To compare them takes longer than to see that all are on different storages."""
    apart = len({access.ref.storage for access in accesses}) == len(accesses)
    return tuple(accesses if apart else dict.fromkeys(accesses))


@dataclass(frozen=True, slots=True)
class _Exported:
    """Memory that code outside of torch may write, and what it held when torch last did."""

    memory: torch.Tensor
    held: torch.Tensor
    where: str

    @classmethod
    def of(cls, tensor: torch.Tensor, where: str) -> _Exported:
        """All memory behind ``tensor``, as bytes."""
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return cls(memory, memory.clone(), where)

    def as_now(self) -> _Exported:
        """The same, holding what it does now."""
        return replace(self, held=self.memory.clone())

    def changed(self) -> bool:
        """Whether it holds something else by now."""
        return not torch.equal(self.memory, self.held)


@dataclass(frozen=True, slots=True)
class _Carried:
    """A tensor of the model's that a run reads and then replaces, so that the next run reads another one.

    Args:
        what: it, in words.
        where: the call that makes the other one, or reads this one.
        fix: what to do.
    """

    what: str
    where: str
    fix: str


class _Addresses:
    """While this lives, the address of a storage that it holds names no other storage. The memory may go.

    ``StorageWeakRef`` for thousands of them: one Python object, not one for each.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._let_go: Any = FREE_WEAK_STORAGE.require()  # torch's names are gone before the last objects are

    def hold(self, storage: torch.UntypedStorage) -> None:
        """From now on."""
        self._held.append(storage._weak_ref())

    def let_go(self) -> None:
        """Of all: takes milliseconds for thousands. An interrupt that came in ``__del__`` would be lost."""
        while self._held:
            self._let_go(self._held.pop())

    def __del__(self) -> None:
        self.let_go()


def _reads_nothing(call: Call) -> bool:
    """Whether the content of one of the tensors that a call takes may count for nothing."""
    never_added = any(name == "beta" and text in ("0", "0.0") for name, text in call.arguments)
    return (
        not call.reads
        or never_added
        or call.label.startswith(("new_", "masked_", "where"))
        or call.label.endswith("_like")
    )


class _Recorder(TorchDispatchMode):
    """The dispatch mode that writes everything down."""

    def __init__(
        self,
        model: Callable[..., Any],
        signature: Signature,
        counter: NodeCounter | None,
        stand_in: Callable[[Any, torch.Tensor], torch.Tensor] | None,
        rewritten: Rewritten | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.counter = counter
        self.stand_in = stand_in
        self._rewritten = rewritten
        self.refused: NimbleError | None = None
        """The first refusal of a call: it holds whether the model catches it or not."""
        self._caught = ""  # a call that failed on its values, after which the model may have gone on
        self._inside = 0
        self._runs = 0  # each is the label of its allocations
        self.device = signature.device
        self.before_write: Callable[[torch.Tensor], None] = lambda tensor: None
        self.before_draw: Callable[[torch.Generator | None], None] = lambda generator: None
        self._modules = module_paths(model)
        self._storages: list[Storage] = []
        self._storage_ids: dict[int, int] = {}
        self.addresses = _Addresses()
        # By the id of the tensor, which is only that tensor's while the reference is alive.
        self._slots: dict[int, tuple[weakref.ref[torch.Tensor], int, Shown]] = {}
        self._storage_of: list[int] = []
        self._ref_of: list[TensorRef] = []
        self._made: set[int] = set()  # storages that operators made
        self._slot_of_window: dict[Shown, int] = {}
        self._given: dict[int, torch.Tensor] = {}
        self._owners: dict[int, torch.Tensor] = {}
        self._host_slots: set[int] = set()  # of given tensors on the host, where the device is another
        self._host_reads: dict[int, set[int]] = {}  # those of them that calls have read, by storage
        self._steps: list[Step] = []
        self._calls: list[Call] = []
        expected = None if rewritten else _expected.get()
        self._expected = (
            [(step, expected.program.calls[step.call]) for step in expected.steps if step.call is not None]
            if expected
            else []
        )
        self._expected_refs = expected.refs if expected else ()
        self._windows: list[Window] = []
        self._first_values: dict[int, torch.Tensor] = {}  # of those that are written: as they were before
        self._fresh: dict[
            int, torch.Tensor
        ] = {}  # storages of constants that each run makes anew, as torch.tensor does
        self._constant: set[int] = set()  # storages whose values depend on no inputs
        self._held: list[Held] = []  # reads of such values
        self._written: set[int] = set()
        self._generator: int | None = None
        live = counter is None and stand_in is None
        self._states = RandomStates(expected.generators) if expected and live and TORCH in expected.draws else None
        self._live = live
        self._nodes = counter.nodes() if counter else 0
        self._next_node = sequence_number()
        self._forward_of_node: dict[int, Origin] = {}  # by the sequence number of the backward's node
        self._unseen = 0
        self._unseen_where = ""
        self._unset: set[int] = set()
        self._elsewhere = ""  # what ran last and may reach memory that no argument of it shows
        self._exported: dict[int, _Exported] = {}
        self._handed_out = ""
        self._names: dict[int, tuple[Role, str]] = {}
        self._before: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # name, tensor, alias
        for role, name, tensor in chain(owned_tensors(model), rewritten.owned if rewritten else ()):
            self._names.setdefault(storage_address(tensor), (role, name))
            self._before.append((name, tensor, tensor.detach()))
        self.inputs = tuple(
            self._give(tensor, "input", path) for tensor, path in zip(signature.tensors, signature.paths, strict=True)
        )
        self._before += [
            (path, tensor, self._given[slot])
            for path, tensor, slot in zip(signature.paths, signature.tensors, self.inputs, strict=True)
        ]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else a torch.compile'd submodule first called inside the mode runs eager and is never compiled afterwards.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = sys._getframe(1)
        try:
            return self._dispatched(func, args, kwargs or {}, frame)
        except NimbleError as error:
            if _noting.get() is None:
                self.refused = self.refused or error
            self._raise_or_note(error, frame)
            return func(*args, **(kwargs or {}))

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        if (parts := parts_of(func)) is not None:
            with self:
                return parts(*args, **kwargs)
        if self.stand_in:
            if func is torch.ops.prim.device.default:  # fake tensors say where they are through dispatch
                return func(*args, **kwargs)
            args, kwargs = pytree.tree_map_only(torch.Tensor, partial(self.stand_in, func), (args, kwargs))
        if func is _AS_STRIDED and (args[3:] or "storage_offset" in kwargs):
            beyond = self._beyond(args[0], args[3] if args[3:] else kwargs["storage_offset"])
            if beyond is not None:
                with self:
                    return relative_window(args[0], args[1], args[2], beyond)
        traits = traits_of(func)
        if torch.is_grad_enabled():
            self._remember_node(traits.text, frame)
        if traits.puts and self.device.type != "cpu" and (write := written_where_true(func, args)) is not None:
            with self:
                return write()
        if traits.doubtful or "device" in kwargs:
            try:
                if traits.name in INDEXED and (indices := self._places_for_masks(func, args, frame)):
                    with self:
                        return func(args[0], indices, *args[2:], **kwargs)
                if self._refuse_dynamic(func, traits, args, kwargs, frame):
                    return self._run_outside()
            except CaptureError as error:
                self._raise_or_note(error, frame)
        if "generator" in kwargs or (traits.seeded and draws_numbers(func, args, kwargs)):
            self.before_draw(kwargs.get("generator"))
        if self.counter:
            if self._is_host_work(args, kwargs):
                return self._run_on_host(func, args, kwargs, frame)
            if traits.name in _COPIES_HOST_ARGUMENTS or (traits.puts and not fills_where_true(func, args)):
                args = tuple(self._on_device(arg) for arg in args)
            self._notice_unseen(frame)
        written = written_tensors(func, args, kwargs)
        for tensor in written:
            self.before_write(tensor)
            self._keep_first_value(tensor)
        if traits.seeded and current_phase() == "backward" and draws_numbers(func, args, kwargs):
            raise CaptureError(
                f"{func} draws random numbers in the backward, where a forward is computed again: they would be others",
                where=self._where(traits.text, frame),
                fix="leave what is computed again (torch.utils.checkpoint) without dropout, or keep its results",
            )
        reads: list[int] = []
        template = tuple(self._templates(args, reads))
        named = tuple([(name, self._template(arg, reads)) for name, arg in kwargs.items()]) if kwargs else ()
        if self._exported:
            self._notice_changes({self._storage_of[slot] for slot in reads}, f"before {func}", frame)
        if traits.changes_view:
            return self._inplace_view(func, args, kwargs, template, frame)
        # Calls that draw random numbers keep their order: on the host each changes the generator, and in a capture each
        # is given the place in the stream of numbers that those issued before it left. Attention without dropout draws
        # none.
        generator = kwargs.get("generator")
        state = state_of(generator) if traits.seeded and not (self.counter or self.stand_in) else None
        result = self._run(func, args, kwargs, frame)
        if state is None:
            draws = traits.seeded and draws_numbers(func, args, kwargs)
        else:
            moved = not torch.equal(state, state_of(generator))
            draws = generator is not None or moved
            if moved and self._states and not self._states.follow(generator, state):
                raise _random_state_set(self._where(traits.text, frame))
        writes = [self._written_ref(tensor) for tensor in written] if written else []
        for ref in writes:
            if ref.storage in self._exported:
                self._exported[ref.storage] = self._exported[ref.storage].as_now()
        returned = flat_tensors(result)
        known = len(self._storages)
        self._refuse_sparse(func, returned, frame)
        outputs = tuple([-1 if self._slot_of(tensor) is not None else self._new_slot(tensor) for tensor in returned])
        made = range(known, len(self._storages))
        self._made.update(made)
        fresh = [slot >= 0 and self._storage_of[slot] in made for slot in outputs]
        if traits.seeded and not draws:
            self._unset.update(
                slot for tensor in seeds_among(func, result) if (slot := self._slot_of(tensor)) is not None
            )
        reached = self._reaches_device(traits, reads, written, list(compress(returned, fresh)))
        if reached:
            call = self._call(func, traits, template, named, reads, written, writes, returned, outputs, frame, draws)
            self._calls.append(call)
            if self.counter and not self.stand_in:
                new = compress(zip(returned, outputs, strict=True), fresh)
                homes = {tensor.untyped_storage().data_ptr(): self._storage_of[slot] for tensor, slot in new}
                self._windows.append(Window(str(self._runs), homes))
            self._step(func, template, named, outputs, places_of(result), reads, len(self._calls) - 1)
        elif not written and returned and all(fresh):
            # Memory without content (empty, empty_like, results of no elements): made from its layout alone, since
            # what it is modelled on may not be there yet.
            for tensor, slot in zip(returned, outputs, strict=True):
                layout = (tuple(tensor.shape), tensor.stride())
                options = (("dtype", tensor.dtype), ("device", tensor.device))
                self._step(_EMPTY_STRIDED, layout, options, (slot,), ((),), (), None)
        else:
            self._step(func, template, named, outputs, places_of(result), reads, None)
            if func is _LIFT_FRESH:
                self._fresh.update((self._storage(tensor), tensor.detach()) for tensor in returned)
        return result

    @staticmethod
    def _beyond(tensor: torch.Tensor, offset: int | None) -> int | None:
        """How far behind the start of ``tensor`` an absolute offset is: a replay may have its memory elsewhere."""
        beyond = 0 if offset is None else offset - int(tensor.storage_offset())
        return beyond if beyond >= 0 else None

    def _step(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        outputs: tuple[int, ...],
        places: tuple[tuple[int, ...], ...],
        reads: Sequence[int],
        call: int | None,
    ) -> None:
        if func is _RNN and torch.is_grad_enabled():
            func = _rnn_with_workspace
        for slot in self._host_slots.intersection(reads) if self._host_slots else ():
            self._host_reads.setdefault(self._storage_of[slot], set()).add(slot)
        self._steps.append(Step(func, args, kwargs, outputs, tuple(dict.fromkeys(reads)), call, places))

    def finish(self, outputs: Sequence[torch.Tensor], structure: Any) -> Recording:
        """The recording, once the model has returned ``outputs``."""
        if self.refused is not None:
            raise self.refused
        if self._caught:
            raise NotStaticError(
                "the model caught the error of a call that fails on some values, and went on: a replay would always",
                where=self._caught,
                fix="compute without it, or leave that part out of what is prepared",
            )
        if self.counter:
            self._notice_unseen(None)
        self._notice_changes(self._exported, "before the end", None)
        if self._states and self._generator is not None and not self._states.settled():
            raise _random_state_set("after the last draw of random numbers")
        for tensor in outputs:
            if tensor.device != self.device:
                raise CaptureError(
                    f"an output is on {tensor.device}, the inputs are on {self.device}: copying it makes the host wait",
                    fix="return device tensors and copy them outside the model",
                )
        outputs = self._renew_constants(outputs)
        slots = tuple(self._slot(tensor) for tensor in outputs)
        if not (self._unseen or self.counter or self.stand_in or self._rewritten):
            self._unseen_where = self._filled_elsewhere({self._storage_of[slot] for slot in slots})
            self._unseen += bool(self._unseen_where)
        program = Program(
            calls=tuple(self._calls),
            storages=tuple(self._storages),
            inputs=tuple(self._ref_of[slot] for slot in self.inputs),
            outputs=tuple(self._ref_of[slot] for slot in slots),
            host_steps=sum(step.call is None for step in self._steps),
            device=self.device.type,
            fuse=self._rewritten.fuse if self._rewritten else "none",
        )
        written = tuple(
            position for position, slot in enumerate(self.inputs) if self._storage_of[slot] in self._written
        )
        homes = [self._storage_of[self.inputs[position]] for position in written]
        if len(set(homes)) < len(homes):
            names = [self._storages[home].name for home in homes if homes.count(home) > 1]
            raise CaptureError(
                f"inputs share memory that the model writes ({names[0]} and another)",
                fix="pass a clone of one of them",
            )
        return Recording(
            program=program,
            steps=tuple(self._steps),
            slots=len(self._storage_of),
            storage_of=tuple(self._storage_of),
            given={slot: self._counted(slot) for slot in self._given if slot not in self.inputs},
            inputs=self.inputs,
            outputs=slots,
            output_structure=structure,
            written_inputs=written,
            unseen=self._unseen,
            unseen_where=self._unseen_where,
            asks=self.counter.asks(self._windows) if self.counter else (),
            unset=frozenset(self._unset),
            handed_out=self._handed_out,
            refs=tuple(self._ref_of),
            held=tuple(self._holds()),
        )

    def _filled_elsewhere(self, outputs: Set[int]) -> str:
        """Where memory is read that no call has written: what a C++ extension has filled past the dispatcher.

        Empty if nowhere. Not where only its layout counts, or none of its content need: templates, what is added zero
        times, what a mask leaves out.
        """
        blank = {
            self._storage_of[step.outputs[0]]
            for step in self._steps
            if step.func is _EMPTY_STRIDED and 0 not in step.args[0]
        }
        for call in self._calls if blank else ():
            written = {ref.storage for ref in call.writes}
            if blank & {ref.storage for ref in call.reads} - written and not _reads_nothing(call):
                return f"before {call}: it reads memory that no call has filled"
            blank -= written
        return "an output is memory that no call has filled" if blank & outputs else ""

    def _counted(self, slot: int) -> torch.Tensor:
        """The given tensor as an alias that shares its version counter: none that was made inside the mode does."""
        tensor, alias = self._given[slot], self._owners[slot].detach()
        if self.stand_in:
            return tensor
        same = (alias.data_ptr(), alias.shape, alias.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
        return alias if same else tensor

    def refused_swap(self, error: RuntimeError) -> CaptureError:
        """For torch's refusal to swap tensors that are known here."""
        frame = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_globals.get("__name__") != _SWAPS][-1]
        return CaptureError(
            "torch.utils.swap_tensors exchanges tensors that recorded calls have used",
            where=self._where("torch.utils.swap_tensors", frame),
            fix="exchange names (a, b = b, a), or copy values",
        )

    def draws_nothing(self) -> bool:
        """Whether this was a live run, in which no call drew random numbers."""
        return self._live and self._generator is None

    def raised_at(self, error: BaseException) -> str:
        """Where the model was when torch raised ``error``, in words."""
        *_, (frame, _) = walk_tb(error.__traceback__)
        return self._where(f"torch's {frame.f_code.co_name}", frame)

    def put_memory_back(self) -> Changes:
        """Let the tensors that were there before the run show what they did; what it gave other memory, by name."""
        moved = [
            (name, tensor, alias, tensor.detach())
            for name, tensor, alias in self._before
            if shown_by(tensor) != shown_by(alias)
        ]
        for _, tensor, alias, _ in moved:
            tensor.data = alias
        return {
            f"{name}.data": Change(alias, now, f"{name}.data", name.rpartition(".")[2]) for name, _, alias, now in moved
        }

    def carried(self, changed: Changes, model: Callable[..., Any]) -> dict[str, _Carried]:
        """Tensors in attributes, or where these lead to, that would be other ones for the next run, which reads them.

        Not what no call reads, such as weights that are computed anew; nor what is replaced by a copy, as by
        ``.to(dtype)``, or on the host by the same values made from nothing; nor memory that the model still has under a
        name that did not change, which is read there.
        """
        tensors = {
            name: change
            for name, change in changed.items()
            if all(isinstance(one, torch.Tensor) and has_memory(one) for one in (change.was, change.now))
        }
        if not tensors:
            return {}
        stays = {
            self._storage_ids.get(storage_address(one))
            for _, name, one in owned_tensors(model)
            if name not in changed and f"{name}.data" not in changed
        }
        first_reads: dict[int, Call] = {}
        for call in self._calls:
            for ref in call.reads:
                first_reads.setdefault(ref.storage, call)
        found = {}
        for name, (was, now, _, place) in tensors.items():
            old, new = (self._storage_ids.get(storage_address(one)) for one in (was, now))
            if old == new or old in stays or old not in first_reads or self._storages[old].role == "input":
                continue
            makers = [] if new is None else self._makers(self._ref(now))
            if makers and all(self._copies(call, old) for call in makers):
                continue
            if self._made_alike(was, now, makers):
                continue
            role, path = self._storages[old].role, name.removesuffix(".data")
            found[name] = _Carried(
                f"{'attribute' if role == 'constant' else role} {path}",
                str(makers[-1] if makers else first_reads[old]),
                f"write it in place: self.{place}.copy_(...), or self.{place}.mul_(...).add_(...)",
            )
        return found

    def _made_alike(self, was: torch.Tensor, now: torch.Tensor, makers: Sequence[Call]) -> bool:
        """Whether each run makes anew what was there, from nothing: known on the host alone, where values are."""
        if self.counter or self.stand_in or (was.shape, was.dtype) != (now.shape, now.dtype):
            return False
        return all(map(_reads_nothing, makers)) and torch.equal(was, now)

    def _makers(self, shown: TensorRef) -> list[Call]:
        """Calls that write some of a window."""
        start, end = shown.span
        return [
            call
            for call in self._calls
            if any(one.storage == shown.storage and one.span[0] < end and start < one.span[1] for one in call.writes)
        ]

    @staticmethod
    def _copies(call: Call, storage: int) -> bool:
        """Whether a call copies this storage and does nothing else."""
        return call.operator in _COPIES and any(ref.storage == storage for ref in call.reads)

    def _keep_first_value(self, tensor: torch.Tensor) -> None:
        storage = self._storage(tensor)
        if storage in self._fresh and storage not in self._first_values:
            with self.counter.outside() if self.counter else nullcontext():
                self._first_values[storage] = self._fresh[storage].clone()

    def _renew_constants(self, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Constants that the model makes on each run and then writes: written back after their last use."""
        renewed = {storage: self._fresh[storage] for storage in self._first_values}
        if not renewed:
            return outputs
        with torch.no_grad(), self:
            outputs = [tensor.clone() if self._storage(tensor) in renewed else tensor for tensor in outputs]
            for storage, tensor in renewed.items():
                tensor.copy_(self._first_values[storage])
        return outputs

    def exported(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """The memory of ``tensor`` is handed out: what is written there then is no call."""
        if tensor.device.type != "cpu" or not has_memory(tensor):
            return
        with modes_off(), torch.no_grad():
            home = self._storage(tensor)
            if home not in self._made:
                self.before_write(tensor)
            where = self._where("memory handed out", frame)
            if home not in self._exported:
                self._exported[home] = _Exported.of(tensor, where)
            if home in self._constant:
                self._hold(_ALIAS, (tensor,), {}, where, _LOOKS[1])  # numbers may be read of it
            else:
                self._hand_out(where, frame)

    def read(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """Numbers of ``tensor`` are read: what is made of them is no call."""
        if self.knows(tensor):
            with modes_off():
                self._hold(_ALIAS, (tensor,), {}, self._where("tolist", frame), _LOOKS[1])
        elif has_memory(tensor):
            self._hand_out(self._where("tolist", frame), frame)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether every run finds the values that ``tensor`` has now."""
        with modes_off():
            return self.stand_in is None and self._is_constant(tensor)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if has_memory(tensor) and storage_address(tensor) not in self._storage_ids:
            self._slot(tensor)  # it is the model's, and seen for the first time
        return has_memory(tensor) and self._storage(tensor) in self._constant

    def copied_to_host(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """Refuse a copy of what is on the device."""
        if self._storage(tensor) not in self._constant:
            raise CaptureError(
                f"the model {_TO_HOST[0]}: {_WAITS}",
                where=self._where("a copy", frame),
                fix=_TO_HOST[1],
            )

    def _notice_changes(self, storages: Iterable[int], when: str, frame: FrameType | None) -> None:
        """Find out whether memory that was handed out has been written since."""
        for storage in self._exported.keys() & set(storages):
            one = self._exported[storage]
            if not self._unseen and one.changed():
                self._unseen += 1
                at = f" at {':'.join(map(str, place_of(frame, self._modules)[1:]))}" if frame else ""
                self._unseen_where = f"{one.where}: written {when}{at}"

    def inside_operator(self) -> bool:
        """Whether an operator is running, whose launches are part of its call."""
        return self._inside > 0

    def reached_elsewhere(self, kernel: str) -> None:
        """What is running launched a kernel that may reach other memory than that of the tensors it was given."""
        self._elsewhere = kernel

    def launched(self, launch: Launch, frame: FrameType) -> Any:
        """A kernel was launched past the dispatcher: launch it, and write it down as a call."""
        if self.stand_in:
            raise CaptureError(
                f"kernel {launch.name} cannot be planned without launching it",
                where=self._where(launch.name, frame),
                fix="wrap it with torch.library.triton_op, or measure with compare(...)",
            )
        if self.counter:
            self._notice_unseen(frame)
        with modes_off():
            return self._launched(launch, frame)

    def _launched(self, launch: Launch, frame: FrameType) -> Any:
        named = [*zip(launch.names, launch.args, strict=False), *launch.kwargs.items()]
        accesses: list[Access] = []
        for name, tensor in named:
            if isinstance(tensor, torch.Tensor):
                reads, writes = launch.roles.get(name, (True, True))
                accesses += [Access(self._ref(tensor), write=False)] * reads + [
                    Access(self._ref(tensor), True)
                ] * writes
                if writes:
                    self.before_write(tensor)
                    self._keep_first_value(tensor)
        slots: list[int] = []
        template = tuple([self._template(arg, slots) for arg in launch.args])
        keywords = tuple([(name, self._template(value, slots)) for name, value in launch.kwargs.items()])
        unseen = self._unseen
        result = self._run(launch.launch, launch.args, dict(launch.kwargs), frame)
        if self.counter:
            nodes, self._nodes = self._nodes, self.counter.nodes()
            if self._nodes == nodes:
                return result  # a grid of nothing
        if self._unseen > unseen:
            return result  # as if its launcher were not known: addresses among its arguments are others in each run
        for access in accesses:
            if access.write:
                self._written.add(access.ref.storage)
                self._constant.discard(access.ref.storage)
        origins, eager = self._provenance(launch.name, frame)
        texts = tuple(
            (name, f"%{self._storage(value)}" if isinstance(value, torch.Tensor) else repr(value))
            for name, value in named
        )
        call = len(self._calls)
        made = tuple(dict.fromkeys(accesses))
        self._calls.append(Call(call, launch.name, texts, made, current_phase(), origins=origins, eager=eager))
        self._windows.append(Window(str(self._runs), {}))
        self._step(launch.launch, template, keywords, (), (), slots, call)
        return result

    def _provenance(self, operator: str, frame: FrameType) -> tuple[tuple[Origin, ...], tuple[int, ...]]:
        if self._rewritten:
            return self._rewritten.provenance(operator, frame)
        return (self._origin(operator, frame),), ()

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        self._inside += 1
        if self.counter:
            self._runs += 1
            self.counter.begin(str(self._runs))
        try:
            result = func(*args, **kwargs)
            elsewhere, self._elsewhere = self._elsewhere, ""
            if elsewhere and isinstance(func, Relaunch):  # what an operator launches, its schema declares
                self._notice_elsewhere(elsewhere, frame)
            return result
        except (RuntimeError, IndexError) as error:
            if not self._caught and checks_values(str(func)):
                self._caught = f"{self._where(func, frame)}: {type(error).__name__}: {first_line(error)}"
            if self.stand_in and (isinstance(error, _NEEDS_VALUES) or "fake impl" in str(error)):
                raise CaptureError(
                    f"{func} cannot be planned without running it: {str(error).splitlines()[0] or 'it needs values'}",
                    where=self._where(func, frame),
                    fix="give a custom operator its shapes (torch.library.register_fake), or measure with compare(...)",
                ) from error
            # CUDA's own refusal, or torch's word that it would be refused; an error of the model itself passes.
            if not self.counter or not (isinstance(error, torch.AcceleratorError) or "graph capture" in str(error)):
                raise
            raise CaptureError(
                f"{func} cannot be captured: {str(error).splitlines()[0]}",
                where=self._where(func, frame),
                fix="keep that operator out of the prepared module, or use a form that does not synchronise",
            ) from error
        finally:
            if self.counter:
                self.counter.end()
            self._inside -= 1

    # -- tensors -----------------------------------------------------------------------------------------------

    def _storage(self, tensor: torch.Tensor, address: int | None = None) -> int:
        if address is None:
            address = storage_address(tensor)
        index = self._storage_ids.get(address)
        if index is None:
            storage = tensor.untyped_storage()
            role, name = self._names.get(address, ("intermediate", ""))
            index = self._add_storage(Storage(storage.nbytes(), role, name))
            if role != "intermediate":
                self._constant.add(index)
            self._storage_ids[address] = index
            self.addresses.hold(storage)
        return index

    def _add_storage(self, storage: Storage) -> int:
        self._storages.append(storage)
        return len(self._storages) - 1

    def _new_slot(self, tensor: torch.Tensor, window: Shown | None = None) -> int:
        slot, window = len(self._storage_of), window or shown_by(tensor)
        ref = self._ref(tensor, window, self._expected_refs[slot] if slot < len(self._expected_refs) else None)
        self._storage_of.append(ref.storage)
        self._ref_of.append(ref)
        self._slots[id(tensor)] = weakref.ref(tensor), slot, window
        self._slot_of_window[window] = slot
        return slot

    def _know(self, tensor: torch.Tensor, slot: int) -> int:
        self._slots[id(tensor)] = weakref.ref(tensor), slot, shown_by(tensor)
        return slot

    def _written_ref(self, tensor: torch.Tensor) -> TensorRef:
        """Window of what was written. What a call fills with its result may have been resized, in a replay as well."""
        known = self._slots.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return self._ref(tensor)
        reference, slot, before = known
        window = shown_by(tensor)
        if window != before:
            if self._slot_of_window.get(before) == slot:
                del self._slot_of_window[before]
            self._slots[id(tensor)] = reference, slot, window
            self._slot_of_window[window] = slot
            self._ref_of[slot] = self._ref(tensor, window)
        return self._ref_of[slot]

    def _slot_of(self, tensor: torch.Tensor) -> int | None:
        """Slot of this very tensor, if it has one."""
        known = self._slots.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _slot(self, tensor: torch.Tensor) -> int:
        """Slot of a tensor; one that no call made is a parameter, a buffer or a constant, and is kept."""
        known = self._slots.get(id(tensor))
        if known is not None:
            reference, slot, (home, offset, shape, stride, dtype, conjugate, _) = known
            # ``y.data = z`` makes y show what z does, out of sight of dispatch modes. Piece by piece: the arguments of
            # all calls come by here.
            if (
                tensor.untyped_storage()._cdata == home
                and tensor.storage_offset() == offset
                and tensor.shape == shape
                and tensor.stride() == stride
                and tensor.dtype is dtype
                and (conjugate is None or tensor.is_conj() is conjugate)
                and reference() is tensor
            ):
                return slot
        # Autograd, too, hands what it saved to the backward as another tensor on the same memory.
        window = shown_by(tensor)
        shown = self._slot_of_window.get(window)
        return self._give(tensor, window=window) if shown is None else self._know(tensor, shown)

    def _give(self, tensor: torch.Tensor, role: Role | None = None, name: str = "", window: Shown | None = None) -> int:
        window = window or shown_by(tensor)
        home = self._storage_ids.get(window[0])
        known, made = home is not None, home in self._made
        slot = self._new_slot(tensor, window)
        storage = self._storage_of[slot]
        if made:
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} came about out of sight, on memory of a recorded call",
                fix="report this model",
            )
        if role == "input":
            self._constant.discard(storage)
        if role and not known:
            self._storages[storage] = Storage(self._storages[storage].nbytes, role, name)
        elif self._storages[storage].role == "intermediate":  # also if it is known: a launch looks at its memory first
            self._storages[storage] = Storage(self._storages[storage].nbytes, "constant", name)
            self._constant.add(storage)
        self._given[slot] = tensor.detach()
        self._owners[slot] = tensor  # a strong reference: the slot is found by the tensor's identity
        if self.counter and tensor.device.type == "cpu":
            self._host_slots.add(slot)
        return slot

    def _ref(self, tensor: torch.Tensor, window: Shown | None = None, like: TensorRef | None = None) -> TensorRef:
        home, offset, shape, stride, dtype, _, _ = window or shown_by(tensor)
        storage, itemsize = self._storage(tensor, home), dtype.itemsize
        if (
            like is not None
            and like.storage == storage
            and like.sizes == shape
            and like.strides == stride
            and like.offset == offset * itemsize
            and like.dtype == _dtype_name(dtype)
        ):
            return like
        return TensorRef(storage, offset * itemsize, tuple(shape), stride, _dtype_name(dtype), itemsize)

    def _template(self, arg: Any, reads: list[int]) -> Any:
        """``arg`` with slots for its tensors, which are added to ``reads``."""
        if isinstance(arg, torch.Tensor):
            slot = self._slot(arg)
            reads.append(slot)
            return Slot(slot)
        if isinstance(arg, (list, tuple)):
            kind = type(arg)
            return kind(self._templates(arg, reads)) if kind in (list, tuple) else list(arg)
        return arg

    def _templates(self, args: Iterable[Any], reads: list[int]) -> list[Any]:
        return [arg if type(arg) in TOLD_BY_VALUE else self._template(arg, reads) for arg in args]

    # -- calls -------------------------------------------------------------------------------------------------

    def _call(
        self,
        func: Any,
        traits: Traits,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        reads: list[int],
        written: list[torch.Tensor],
        writes: list[TensorRef],
        returned: list[torch.Tensor],
        outputs: tuple[int, ...],
        frame: FrameType,
        draws: bool,
    ) -> Call:
        read = [self._ref_of[slot] for slot in reads]
        wrote = [*writes]
        for tensor, slot in zip(returned, outputs, strict=True):
            # A result on memory that was there before is written too, marked by the schema or not.
            if not written or not any(tensor is other for other in written):
                wrote.append(self._ref_of[slot] if slot >= 0 else self._ref(tensor))
        storage_of = self._storage_of
        inputs_constant = self._constant.issuperset([storage_of[slot] for slot in reads])
        if inputs_constant and not traits.seeded:
            self._constant.update([self._storage(tensor) for tensor in returned])
        for ref in writes:
            self._written.add(ref.storage)
            if traits.seeded or not inputs_constant:
                self._constant.discard(ref.storage)
        phase = current_phase()
        if not traits.seeded:
            expected = self._expected_call(func, phase, args, kwargs, outputs, read + wrote)
            if expected is not None:
                return expected
        accesses = [*[Access(ref, False) for ref in read], *[Access(ref, True) for ref in wrote]]
        if draws:
            accesses += self._generator_accesses()
        origins, eager = self._provenance(traits.text, frame)
        if phase == "optimizer":
            origins = self._owners_of(traits.text, accesses) or origins
        return Call(
            index=len(self._calls),
            phase=phase,
            operator=traits.text,
            arguments=argument_texts(traits.arguments, args, kwargs, storage_of),
            accesses=_once(accesses),
            origins=origins,
            eager=eager,
        )

    def _expected_call(
        self,
        func: Any,
        phase: Phase,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        outputs: tuple[int, ...],
        touched: list[TensorRef],
    ) -> Call | None:
        """The call that is expected here, where this one, which draws no random numbers, is certainly the same."""
        if len(self._calls) >= len(self._expected):
            return None
        step, call = self._expected[len(self._calls)]
        same = (
            step.func is func
            and step.outputs == outputs
            and call.phase == phase
            and [access.ref for access in call.accesses] == touched
            and same_arguments(step.args, args)
            and same_arguments(step.kwargs, kwargs)
        )
        return call if same else None

    def _origin(self, operator: str, frame: FrameType) -> Origin:
        if current_phase() == "backward":
            node: Any = current_node()
            forward = self._forward_of_node.get(node._sequence_nr()) if node is not None else None
            if forward is None and node is None:  # the gradient of the loss itself, sums of gradients
                forward = self._calls[-1].origins[0] if self._calls else None
            if forward is not None:
                return replace(forward, operator=operator)
        module, file, line = place_of(frame, self._modules)
        return Origin(operator, module, file, line)

    def _where(self, func: Any, frame: FrameType) -> str:
        """Where what is refused runs, in words."""
        origin, now = self._origin(str(func), frame), current_phase()
        file, line = line_inside(frame) if now == "backward" else ("", 0)
        return (replace(origin, file=file, line=line) if file else origin).during(now)

    def _remember_node(self, operator: str, frame: FrameType) -> None:
        """Nodes that autograd has made since the last operator are those of the operator that runs now."""
        following = sequence_number()
        if following > self._next_node and current_phase() != "backward":
            origin = self._origin(operator, frame)
            self._forward_of_node.update(dict.fromkeys(range(self._next_node, following), origin))
        self._next_node = following

    def _owners_of(self, operator: str, accesses: Sequence[Access]) -> tuple[Origin, ...]:
        """Modules whose parameters, or what an optimizer keeps for them, are written."""
        names = [self._storages[access.ref.storage].name for access in accesses if access.write]
        modules = dict.fromkeys(name.split(" ")[0].rpartition(".")[0] for name in names if name)
        return tuple(Origin(operator, module) for module in modules)

    def _generator_accesses(self) -> list[Access]:
        if self._generator is None:
            self._generator = self._add_storage(Storage(0, "generator", "default generator"))
        ref = TensorRef(self._generator, 0, (1,), (1,), "uint8", 1)
        return [Access(ref, write=False), Access(ref, write=True)]

    def _reaches_device(
        self, traits: Traits, reads: list[int], written: list[torch.Tensor], fresh: list[torch.Tensor]
    ) -> bool:
        if self.counter:
            before, self._nodes = self._nodes, self.counter.nodes()
            return self._nodes > before
        if written:
            return any(tensor.numel() for tensor in written)
        if traits.checks:
            return bool(reads)
        return not traits.memory_only and any(tensor.numel() for tensor in fresh)

    def _inplace_view(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], template: tuple[Any, ...], frame: FrameType
    ) -> Any:
        """``squeeze_`` and its like change a tensor's shape, not its memory: recorded as a new view of it."""
        tensor, before = args[0], args[0].detach()
        nbytes, home = tensor.untyped_storage().nbytes(), storage_address(tensor)
        result = func(*args, **kwargs)
        moved, beyond = storage_address(tensor) != home, tensor.storage_offset() - before.storage_offset()
        shown = self._slot_of_window.get(shown_by(tensor)) if moved or beyond else None
        if shown is not None:
            self._know(tensor, shown)  # set_: it shows now what another tensor does
            return result
        if moved and storage_address(tensor) in self._names:
            self._give(tensor)  # set_ onto the model's own weights, as cuDNN's recurrent layers do
            return result
        if moved or beyond < 0 or tensor.untyped_storage().nbytes() != nbytes:
            raise CaptureError(
                f"{func} gave a tensor other memory: that cannot be re-issued",
                where=self._where(func, frame),
                fix="allocate the tensor with its final size, or take a view of the other memory under a new name",
            )
        if beyond:
            self._know(before, template[0].index)
            with self:
                self._know(tensor, self._slot(relative_window(before, tensor.shape, tensor.stride(), beyond)))
            return result
        slot = self._new_slot(tensor)
        view = view_form(func)
        if view is None or view is _AS_STRIDED:
            view, template = _AS_STRIDED, (template[0], tuple(tensor.shape), tensor.stride())
        self._step(view, template, (), (slot,), ((),), (template[0].index,), None)
        return result

    # -- refusals ----------------------------------------------------------------------------------------------

    @staticmethod
    def _raise_or_note(error: NimbleError, frame: FrameType) -> None:
        note = _noting.get()
        if note is None:
            raise error
        note(error, frame)

    def _hand_out(self, where: str, frame: FrameType) -> None:
        self._handed_out = self._handed_out or where
        if _noting.get():
            self._raise_or_note(CaptureError("values of a tensor are read outside of torch", where=where), frame)

    def _refuse_dynamic(
        self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> bool:
        """Refuse a call that the host would wait for, unless every run finds the values that it waits for.

        Returns:
            Whether it has to run outside of the capture, since the host needs its result.
        """
        tensors = flat_tensors([*args, *kwargs.values()])
        if traits.looks or (self.device.type != "cpu" and traits.name == "aten::_linalg_check_errors"):
            why, fix = _LOOKS
            if isinstance(args[0], torch.Tensor) and args[0].dtype is torch.bool:
                fix = _CHOOSES  # `if condition:`, or x[condition] = value where the condition has no dimension
            fix = next((other for file, other in _FIXES.items() if issued_in(frame, file)), fix)
        elif shape_depends_on_data(func, args, kwargs):
            if traits.puts and self.device.type == "cpu":
                return False  # its result has a known shape, and nobody waits
            why, fix = _PUTS_WHERE_TRUE if traits.puts else _SHAPE_BY_DATA
        elif self.device.type != "cpu" and copies_to_host(func, tensors, args, kwargs):
            why, fix = _TO_HOST
        else:
            return False
        away = any(tensor.device.type != "cpu" for tensor in tensors)
        known = all(map(self._is_constant, tensors))
        if known and away and self.stand_in:
            fix = "measure with compare(...): a plan has no values, where a recording finds the same in each run"
        module = running_module(frame)
        if hasattr(module, "_apply_gate") and getattr(module.config, "_experts_implementation", "") == "eager":
            fix = _EXPERTS
        if not known or (away and (self.stand_in is not None or written_tensors(func, args, kwargs))):
            raise CaptureError(f"{func} {why}: {_WAITS}", where=self._where(func, frame), fix=fix)
        self._hold(func, args, kwargs, self._where(func, frame), fix)
        return away

    # -- reads of values that every run finds ------------------------------------------------------------------

    def _hold(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: str, fix: str) -> None:
        """Remember a read of values that every run finds: the steps that lead to it, and what they start from."""
        reads: list[int] = []
        template = tuple(self._templates(args, reads))
        named = tuple([(name, self._template(arg, reads)) for name, arg in kwargs.items()])
        steps = [Step(func, template, named, (), tuple(reads), None)]
        wanted = {self._storage_of[slot] for slot in reads}
        for step in reversed(self._steps):
            made = {self._storage_of[slot] for slot in step.outputs if slot >= 0}
            if step.call is not None:
                made.update(ref.storage for ref in self._calls[step.call].writes)
            if made & wanted:
                steps.append(step)
                wanted.update(self._storage_of[slot] for slot in step.reads)
        given = {slot: tensor for slot, tensor in self._given.items() if self._storage_of[slot] in wanted}
        self._held.append(Held(tuple(reversed(steps)), given, where, fix))

    def _again(self, read: Held) -> tuple[Any, str]:
        """What ``read`` returns, also as text, computed anew outside of a capture."""
        trained = any(call.phase == "backward" for call in self._calls)
        for slot in read.given:
            storage = self._storages[self._storage_of[slot]]
            grown = trained and storage.role == "parameter" and self._owners[slot].requires_grad
            if grown or self._storage_of[slot] in self._written:
                raise CaptureError(
                    f"{storage.role} {storage.name} is {'trained' if grown else 'written by the model'}, and read on "
                    "the host: a replay would go on with the value that was read",
                    where=read.where,
                    fix=read.fix,
                )
        with self.counter.outside() if self.counter else nullcontext(), issuing(self.device.type):
            return read.again()

    def _places_for_masks(self, func: Any, args: tuple[Any, ...], frame: FrameType) -> list[Any]:
        """The indices of ``x[mask]`` with places for masks that every run finds; empty if there are others, or none."""
        masks = masks_among(args[1])
        if self.stand_in or not all(mask.dim() and self._is_constant(mask) for mask in masks):
            return []
        if not masks or (traits_of(func).puts and (self.device.type == "cpu" or fills_where_true(func, args))):
            return []
        indices: list[Any] = []
        for one in args[1]:
            if any(one is mask for mask in masks):
                self._hold(_NONZERO, (one,), {}, self._where(func, frame), _SHAPE_BY_DATA[1])
                indices += self._run_outside().unbind(1)
            else:
                indices.append(one)
        return indices

    def _run_outside(self) -> Any:
        """Run the call that was held last outside of the capture, in which nothing has values: its result is given."""
        return self._made_outside(self._again(self._held[-1])[0])

    def _holds(self) -> Iterator[Held]:
        """Reads whose values come from tensors that were there before the run."""
        for read in self._held if self.stand_in is None else ():
            own = [slot for slot in read.given if self._storage_of[slot] not in self._fresh]
            if own:
                live = replace(read, given={slot: self._counted(slot) for slot in read.given})
                sources = tuple((self._storages[self._storage_of[slot]].name, live.given[slot]) for slot in own)
                yield replace(live, found=self._again(live)[1], sources=sources)

    def _refuse_sparse(self, func: Any, returned: Sequence[torch.Tensor], frame: FrameType) -> None:
        for tensor in returned:
            if tensor.layout is not torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else str(tensor.layout)
                raise CaptureError(
                    f"{func} makes a {kind} tensor: only dense tensors can be re-issued",
                    where=self._where(func, frame),
                    fix="nn.TransformerEncoder(..., enable_nested_tensor=False)"
                    if tensor.is_nested
                    else "convert it with .to_dense() in the model, or leave that part out of the prepared module",
                )

    def _notice_elsewhere(self, kernel: str, frame: FrameType) -> None:
        """Count a kernel whose reads and writes cannot be known as one that was not seen."""
        where = self._where(kernel, frame)
        self._unseen_where = self._unseen_where or f"{where}, which may reach other memory than its tensors'"
        self._unseen += 1

    def _notice_unseen(self, frame: FrameType | None) -> None:
        assert self.counter
        now = self.counter.nodes()
        if now > self._nodes:
            self._unseen += now - self._nodes
            if not self._unseen_where:
                before = str(self._calls[-1]) if self._calls else "the first call"
                module, file, line = place_of(frame, self._modules) if frame else ("", "", 0)
                here = f", before {file}:{line} in {module or 'the model'}" if file else ", before the end"
                self._unseen_where = f"after {before}{here}"
            self._nodes = now

    # -- host constants in a device program --------------------------------------------------------------------

    def _is_host_work(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Work on host tensors alone: their values are constants, since every input is on the device."""
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type != "cpu":
            return False  # most calls
        tensors = flat_tensors([*args, *kwargs.values()])
        if tensors:
            return all(tensor.device.type == "cpu" for tensor in tensors)
        device = kwargs.get("device")
        return device is None or torch.device(device).type == "cpu"

    def _on_device(self, arg: Any) -> Any:
        """``arg`` with host tensors, which are constants, copied to the device now."""
        if isinstance(arg, (list, tuple)):
            return [self._on_device(item) for item in arg]
        if not isinstance(arg, torch.Tensor) or arg.device.type != "cpu":
            return arg
        assert self.counter
        with self.counter.outside():
            copied = arg.to(self.device)
        self._constant.add(self._storage_of[self._give(copied, "constant")])
        return copied

    def _leave_as_read(self, func: Any, tensor: torch.Tensor, frame: FrameType) -> None:
        """Before a host tensor is written: calls that have read it keep a copy, and it is another one from now on."""
        home = self._storage_ids.get(storage_address(tensor))
        if home is None or home not in self._host_reads:
            return
        if home not in self._fresh:
            raise CaptureError(
                f"{func} writes a tensor on the host that a call on the device has read: a replay would not",
                where=self._where(func, frame),
                fix="keep that tensor on the device",
            )
        del self._storage_ids[storage_address(tensor)]
        slots = {slot for slot in self._host_slots if self._storage_of[slot] == home}
        self._slot_of_window = {window: slot for window, slot in self._slot_of_window.items() if slot not in slots}
        self._slots = {one: known for one, known in self._slots.items() if known[1] not in slots}
        for slot in self._host_reads.pop(home):
            self._given[slot] = self._owners[slot] = self._given[slot].clone()

    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Run it now: its result is a constant, kept if a later call reads it."""
        assert self.counter
        for tensor in written_tensors(func, args, kwargs) if self._host_reads else ():
            self._leave_as_read(func, tensor, frame)
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            result = func(*args, **kwargs)
        else:
            with self.counter.outside():
                result = func(*args, **kwargs)
        return self._made_outside(result)

    def _made_outside(self, result: Any) -> Any:
        """``result``, whose tensors are constants from now on."""
        known = len(self._storages)
        for tensor in flat_tensors(result):
            if self._slot_of(tensor) is None:
                storage = self._storage_of[self._give(tensor, "constant")]
                self._constant.add(storage)
                if storage >= known:
                    self._fresh[storage] = tensor.detach()
        return result
