"""Run a model once and write down every call that reaches its device.

A ``TorchDispatchMode`` sees every ATen call below autograd, with all arguments. On CUDA the run happens under a
throwaway stream capture: nothing executes, libraries branch as they will in the real capture, and the captured nodes
tell calls from host steps and betray launches that the mode did not see. On the host the run is live.

Whatever the run changed (parameters, buffers, inputs, attributes, random state) is put back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch

from nimble_core.ir.program import Call, Program
from nimble_core.torch_compat.dispatch import Mode, issuer_of, pytree
from nimble_core.tracing import unread_values
from nimble_core.tracing.call_writer import CallRunner, CallWriter, Operation
from nimble_core.tracing.host_reads import FreshConstants, HandedOut, HostReads, HostWork
from nimble_core.tracing.input_memory import KeptWindows, require_same_windows, windows_of
from nimble_core.tracing.kernel_launches import launches_seen, relative_window
from nimble_core.tracing.operator_traits import (
    INDEXED,
    Traits,
    draws_numbers,
    fills_where_true,
    owned_tensors,
    parts_of,
    seeds_among,
    shown_by,
    storage_address,
    traits_of,
    view_form,
    written_tensors,
    written_where_true,
)
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recording import Recording, Rewritten, flat_tensors, places_of
from nimble_core.tracing.recording_contexts import (
    autocast_cache_cleared,
    current_phase,
    followed_states,
    raise_or_note,
    refusals_noted,
    tensors_lifted_first,
    thread_recording,
)
from nimble_core.tracing.rng_state import alone, state_of
from nimble_core.tracing.run_effects import (
    EMPTY_STRIDED,
    changed_values,
    not_carried_on,
    notes_of,
    require_reads_kept,
    unfilled_read,
)
from nimble_core.tracing.run_log import CallOrigins, NodeCounter, RunLog
from nimble_core.tracing.side_effects import Guard, preserved
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.tensor_escapes import exports_seen, readings_seen
from nimble_core.tracing.torchscript import operator_by_operator
from nimble_core.utils.errors import CaptureError, NimbleError, NotStaticError
from nimble_core.utils.gc_pause import collector_paused

__all__ = ["record"]

# Operators that copy host arguments to the device by themselves, which a capture does not allow. So do those that put,
# x[index] = 0.5, unless they fill.
_COPIES_HOST_ARGUMENTS = ("aten::copy_", "aten::index")

_AS_STRIDED = torch.ops.aten.as_strided.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default

StandIn = Callable[[Any, torch.Tensor], torch.Tensor]


def record(
    model: Callable[..., Any],
    signature: Signature,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    counter: NodeCounter | None = None,
    stand_in: StandIn | None = None,
    rewritten: Rewritten | None = None,
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

    Raises:
        CaptureError: a call whose result the host needs, or whose shape depends on data; names it, its module path
            and source line.
        NotStaticError: with a backward: a buffer, or another tensor of the model's, is read and then replaced.
        InputError: an output of an unknown type that holds tensors.
    """
    kept = preserved(model, live=counter is None, memory=False)  # the recorder restores memory: it knows the names
    with collector_paused(), autocast_cache_cleared(), kept as guard, torch.no_grad():
        recorder = _Recorder(model, signature, guard, counter, stand_in, rewritten)
        windows = windows_of(signature.tensors)
        try:
            with _errors_explained(recorder):
                with _watched(recorder):
                    result = rewritten.run(*signature.tensors) if rewritten else model(*args, **kwargs)
                require_same_windows(windows, signature.tensors, signature.paths)
                if not rewritten:
                    signature.require_unchanged(args, kwargs)
                outputs, structure = flatten(result, what="output", given=(args, kwargs))
                if stand_in:
                    outputs = [stand_in(None, one) for one in outputs]
                recording = recorder.finish(outputs, structure)
        finally:
            moved = recorder.kept_windows.restore()
            recorder.log.table.release_addresses()
        changes, drawn = guard.changed_attributes() | moved, tuple(guard.draws.drawn())
        seeds = recorder.draws_nothing() and guard.draws.seed_set()
        refused = not_carried_on(model, changes, recorder.log)
    if refused and any(call.phase == "backward" for call in recording.program.calls):
        raise refused
    require_reads_kept(recording.held, changes)
    return replace(
        recording,
        changed=tuple(changes),
        counters=changed_values(changes),
        not_carried_on=refused,
        drawn=drawn,
        program=replace(recording.program, notes=tuple(notes_of(changes, drawn, seeds=seeds))),
    )


@contextmanager
def _watched(recorder: _Recorder) -> Iterator[None]:
    """Let the recorder see what the model does inside, by the dispatcher or past it."""
    handed_out, runner = recorder.handed_out, recorder.runner
    with ExitStack() as stack:
        stack.enter_context(readings_seen(handed_out.listed))
        if recorder.log.on_host:
            stack.enter_context(exports_seen(handed_out.exported))
        stack.enter_context(unread_values.values_unread(recorder.reads.knows))
        stack.enter_context(operator_by_operator())
        stack.enter_context(tensors_lifted_first())
        stack.enter_context(thread_recording())
        stack.enter_context(launches_seen(recorder.writer.launched, runner.running, runner.reached_elsewhere))
        stack.enter_context(recorder)
        yield


@contextmanager
def _errors_explained(recorder: _Recorder) -> Iterator[None]:
    """Raise what was refused in place of what others made of it, and say what CUDA's word on random state means."""
    try:
        yield
    except RuntimeError as error:
        if recorder.log.counter and "CUDAGeneratorImpl::" in str(error):
            *_, (frame, _) = walk_tb(error.__traceback__)
            raise _random_state_set(recorder.log.origins.where_raised(frame)) from error
        if recorder.refused is not None and not isinstance(error, NimbleError):
            raise recorder.refused from error  # TorchScript's interpreter makes another error of it
        raise


def _random_state_set(where: str) -> NotStaticError:
    return NotStaticError(
        "the forward sets random state, or puts it back, which a replay does not repeat",
        where=where,
        fix="set it outside of the model, or draw outside and pass the numbers in"
        + ("" if alone() else "; if another thread sets it, prepare while none does"),
    )


class _Recorder(Mode):
    """The dispatch mode that sees every call, refuses what a replay would freeze, and has the rest written down."""

    def __init__(
        self,
        model: Callable[..., Any],
        signature: Signature,
        guard: Guard,
        counter: NodeCounter | None,
        stand_in: StandIn | None,
        rewritten: Rewritten | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        calls: list[Call] = []
        self.log = RunLog(signature.device, counter, stand_in is None, CallOrigins(model, calls), calls)
        self.runner = CallRunner(self.log)
        fresh = self._fresh = FreshConstants(self.log)

        def before_write(tensor: torch.Tensor) -> None:
            guard.before_write(tensor)
            fresh.before_write(tensor)

        # No method of this object: a circle would keep its tensors until Python's collector runs.
        self._before_write = before_write
        self.writer = CallWriter(self.log, self.runner, rewritten, before_write)
        self._work = HostWork(self.log, self._fresh)
        self.reads = HostReads(self.log, self._fresh, self._work)
        self.handed_out = HandedOut(self.log, self.reads, guard.before_write)
        self._guard, self._stand_in, self._rewritten = guard, stand_in, rewritten
        self.refused: NimbleError | None = None
        """The first refusal of a call: it holds whether the model catches it or not."""
        self._unset: set[int] = set()
        self._states = followed_states() if self.log.on_host else None
        table, named = self.log.table, []
        for role, name, tensor in chain(owned_tensors(model), rewritten.owned if rewritten else ()):
            table.names.setdefault(storage_address(tensor), (role, name))
            named.append((name, tensor))
        inputs = list(zip(signature.paths, signature.tensors, strict=True))
        self.inputs = tuple(table.give(tensor, "input", path) for path, tensor in inputs)
        self.kept_windows = KeptWindows([*named, *inputs])

    def draws_nothing(self) -> bool:
        """Return whether this was a live run in which no call drew random numbers."""
        return self.log.on_host and self.writer.generator is None

    # -- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = issuer_of(sys._getframe(1))
        try:
            return self._dispatched(func, args, kwargs or {}, frame)
        except NimbleError as error:
            if not refusals_noted():
                self.refused = self.refused or error
            raise_or_note(error, frame)
            return func(*args, **(kwargs or {}))

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        if self._stand_in:
            if func is torch.ops.prim.device.default:  # fake tensors say where they are through dispatch
                return func(*args, **kwargs)
            args, kwargs = pytree.tree_map_only(torch.Tensor, partial(self._stand_in, func), (args, kwargs))
        instead = self._other_form(func, args, kwargs)
        if instead is not None:
            with self:
                return instead()
        traits = traits_of(func)
        self.log.origins.remember_nodes(traits.text, frame)
        if traits.doubtful or "device" in kwargs:
            try:
                if traits.name in INDEXED and (indices := self.reads.places(func, args, frame)):
                    with self:
                        return func(args[0], indices, *args[2:], **kwargs)
                if self.reads.waited_for(func, args, kwargs, frame):
                    return self.reads.again()
            except CaptureError as error:
                raise_or_note(error, frame)
        if "generator" in kwargs or (traits.seeded and draws_numbers(func, args, kwargs)):
            self._guard.before_draw(kwargs.get("generator"))
        if self.log.counter:
            if self._work.does(args, kwargs):
                return self._work.run(func, args, kwargs, frame)
            if traits.name in _COPIES_HOST_ARGUMENTS or (traits.puts and not fills_where_true(func, args)):
                args = tuple(self._work.on_device(arg) for arg in args)
            self.log.note_unseen_nodes(frame)
        return self._recorded(func, traits, args, kwargs, frame)

    def _other_form(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """Return what to run, and record, in place of this call; None for the call itself."""
        if (parts := parts_of(func)) is not None:
            return partial(parts, *args, **kwargs)
        if func is _AS_STRIDED and (args[3:] or "storage_offset" in kwargs):
            # The offset is absolute; a replay may have the memory elsewhere.
            offset = args[3] if args[3:] else kwargs["storage_offset"]
            beyond = 0 if offset is None else offset - int(args[0].storage_offset())
            return partial(relative_window, args[0], args[1], args[2], beyond) if beyond >= 0 else None
        if self.log.device.type != "cpu" and traits_of(func).puts:
            return written_where_true(func, args)
        return None

    def _recorded(
        self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Run a call and write it down."""
        table = self.log.table
        written = written_tensors(func, args, kwargs)
        for tensor in written:
            self._before_write(tensor)
        if traits.seeded and current_phase() == "backward" and draws_numbers(func, args, kwargs):
            raise CaptureError(
                f"{func} draws random numbers in the backward, where a forward is computed again: they would be others",
                where=self.log.origins.where(traits.text, frame),
                fix="leave what is computed again (torch.utils.checkpoint) without dropout, or keep its results",
            )
        reads: list[int] = []
        template = tuple(table.templates(args, reads))
        named = tuple([(name, table.template(arg, reads)) for name, arg in kwargs.items()]) if kwargs else ()
        operation = Operation(func, traits, template, named, reads, written, frame)
        self.handed_out.compare(reads, f"before {traits.text}", frame)
        if traits.changes_view:
            return self._inplace_view(operation, args, kwargs)
        result, draws = self._run(operation, args, kwargs)
        self._write_down(operation, result, draws)
        return result

    def _run(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Run a call; returns its result, and whether it drew random numbers.

        Calls that draw keep their order. On the host each changes the generator; in a capture each gets the place in
        the stream of numbers that those before it left. Attention without dropout draws none.
        """
        func, traits, frame = operation.func, operation.traits, operation.frame
        generator = kwargs.get("generator")
        state = state_of(generator) if traits.seeded and self.log.on_host else None
        result = self.runner.run(func, args, kwargs, frame)
        if state is None:
            return result, traits.seeded and draws_numbers(func, args, kwargs)
        moved = not torch.equal(state, state_of(generator))
        if moved and self._states and not self._states.follow(generator, state):
            raise _random_state_set(self.log.origins.where(traits.text, frame))
        return result, generator is not None or moved

    def _write_down(self, operation: Operation, result: Any, draws: bool) -> None:
        """Write down a call that has run, or a host step if it did not reach the device."""
        func, table = operation.func, self.log.table
        writes = [table.written_ref(tensor) for tensor in operation.written]
        for ref in writes:
            self.handed_out.written_by_torch(ref.storage)
        returned = flat_tensors(result)
        known = len(table.storages)
        if any(one.layout is not torch.strided or one.is_nested for one in returned):
            raise _not_dense(func, returned, self.log.origins.where(func, operation.frame))
        outputs = tuple([-1 if table.slot_of(one) is not None else table.new_slot(one) for one in returned])
        made = range(known, len(table.storages))
        table.made.update(made)
        fresh = [slot >= 0 and table.storage_of[slot] in made for slot in outputs]
        if operation.traits.seeded and not draws:
            slots = [table.slot_of(tensor) for tensor in seeds_among(func, result)]
            self._unset.update(slot for slot in slots if slot is not None)
        call = None
        if self._reaches_device(operation, list(compress(returned, fresh))):
            call = self.writer.operator(operation, writes, returned, outputs, draws)
            self.writer.window(self.runner.label, compress(zip(returned, outputs, strict=True), fresh))
        elif not operation.written and returned and all(fresh):
            # Memory without content (empty, empty_like, results of no elements): made from its layout alone, since
            # what it is modelled on may not be there yet.
            for tensor, slot in zip(returned, outputs, strict=True):
                layout = (tuple(tensor.shape), tensor.stride())
                options = (("dtype", tensor.dtype), ("device", tensor.device))
                self.writer.step(EMPTY_STRIDED, layout, options, (slot,), ((),), ())
            return
        elif func is _LIFT_FRESH:
            for tensor in returned:
                self._fresh.add(tensor)
        places = places_of(result)
        self.writer.step(func, operation.args, operation.kwargs, outputs, places, operation.reads, call)

    def _reaches_device(self, operation: Operation, fresh: Sequence[torch.Tensor]) -> bool:
        if self.log.counter:
            return self.log.new_nodes() > 0
        if operation.written:
            return any(tensor.numel() for tensor in operation.written)
        if operation.traits.checks:
            return bool(operation.reads)
        return not operation.traits.memory_only and any(tensor.numel() for tensor in fresh)

    def _inplace_view(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record ``squeeze_`` and its like, which change a tensor's shape, not its memory, as a new view of it."""
        func, table = operation.func, self.log.table
        tensor, before, own = args[0], args[0].detach(), operation.args[0].index
        nbytes, home = tensor.untyped_storage().nbytes(), storage_address(tensor)
        result = func(*args, **kwargs)
        moved, beyond = storage_address(tensor) != home, tensor.storage_offset() - before.storage_offset()
        shown = table.slot_showing(shown_by(tensor)) if moved or beyond else None
        if shown is not None:
            table.bind(tensor, shown)  # set_: it shows now what another tensor does
        elif moved and storage_address(tensor) in table.names:
            table.give(tensor)  # set_ onto the model's own weights, as cuDNN's recurrent layers do
        elif moved or beyond < 0 or tensor.untyped_storage().nbytes() != nbytes:
            raise CaptureError(
                f"{func} gave a tensor other memory: that cannot be re-issued",
                where=self.log.origins.where(func, operation.frame),
                fix="allocate the tensor with its final size, or take a view of the other memory under a new name",
            )
        elif beyond:
            table.bind(before, own)
            with self:
                table.bind(tensor, table.slot(relative_window(before, tensor.shape, tensor.stride(), beyond)))
        else:
            slot, view, template = table.new_slot(tensor), view_form(func), operation.args
            if view is None or view is _AS_STRIDED:
                view, template = _AS_STRIDED, (template[0], tuple(tensor.shape), tensor.stride())
            self.writer.step(view, template, (), (slot,), ((),), (own,))
        return result

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self, outputs: Sequence[torch.Tensor], structure: Any) -> Recording:
        """Return the recording, once the model has returned ``outputs``."""
        self._require_replayable(outputs)
        outputs = self._fresh.restore(outputs, self)
        log, table = self.log, self.log.table
        slots = tuple(table.slot(tensor) for tensor in outputs)
        if log.on_host and not (log.unseen.count or self._rewritten):
            where = unfilled_read(log, {table.storage_of[slot] for slot in slots})
            log.unseen.note(where, count=bool(where))
        program = Program(
            calls=tuple(log.calls),
            storages=tuple(table.storages),
            inputs=tuple(table.refs[slot] for slot in self.inputs),
            outputs=tuple(table.refs[slot] for slot in slots),
            host_steps=sum(step.call is None for step in log.steps),
            device=log.device.type,
            fuse=self._rewritten.fuse if self._rewritten else "none",
        )
        given = {slot: tensor for slot, tensor in table.given.items() if slot not in self.inputs}
        return Recording(
            program=program,
            steps=tuple(log.steps),
            slots=len(table.storage_of),
            storage_of=tuple(table.storage_of),
            given=given if self._stand_in else {slot: table.live(slot) for slot in given},
            inputs=self.inputs,
            outputs=slots,
            output_structure=structure,
            written_inputs=self._written_inputs(),
            unseen=log.unseen.count,
            unseen_where=log.unseen.where,
            asks=log.counter.asks(self.writer.windows) if log.counter else (),
            unset=frozenset(self._unset),
            handed_out=self.handed_out.where,
            refs=tuple(table.refs),
            held=tuple(self.reads.held()),
        )

    def _require_replayable(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise what was refused, and for what shows at the end of the run alone."""
        if self.refused is not None:
            raise self.refused
        self.runner.require_no_caught_error()
        self.log.note_unseen_nodes(None)
        self.handed_out.compare(None, "before the end", None)
        if self._states and self.writer.generator is not None and not self._states.settled():
            raise _random_state_set("after the last draw of random numbers")
        for tensor in outputs:
            if tensor.device != self.log.device:
                raise CaptureError(
                    f"an output is on {tensor.device}, the inputs are on {self.log.device}: copying it makes the host "
                    "wait",
                    fix="return device tensors and copy them outside the model",
                )

    def _written_inputs(self) -> tuple[int, ...]:
        """Return positions of inputs that the model writes. Raises CaptureError if two of them share memory."""
        table = self.log.table
        homes = {
            position: table.storage_of[slot]
            for position, slot in enumerate(self.inputs)
            if table.storage_of[slot] in table.written
        }
        shared = [home for home in homes.values() if list(homes.values()).count(home) > 1]
        if shared:
            raise CaptureError(
                f"inputs share memory that the model writes ({table.storages[shared[0]].name} and another)",
                fix="pass a clone of one of them",
            )
        return tuple(homes)


def _not_dense(func: Any, returned: Sequence[torch.Tensor], where: str) -> CaptureError:
    nested = any(tensor.is_nested for tensor in returned)
    kind = "nested" if nested else next(str(one.layout) for one in returned if one.layout is not torch.strided)
    return CaptureError(
        f"{func} makes a {kind} tensor: only dense tensors can be re-issued",
        where=where,
        fix="nn.TransformerEncoder(..., enable_nested_tensor=False), or use_nested_tensor = False on one that is there "
        "(of nn.Transformer: model.encoder)"
        if nested
        else "convert it with .to_dense() in the model, or leave that part out of the prepared module",
    )
