"""Runs calls of a recorded model and writes them down: operators, host steps, kernels that bypass the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from nimble_core.ir.allocations import Window
from nimble_core.ir.program import Access, Call, Origin, Storage, TensorRef
from nimble_core.torch_compat.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    modes_off,
)
from nimble_core.tracing.host_reads import experts_fix
from nimble_core.tracing.kernel_launches import Launch, Relaunch
from nimble_core.tracing.operator_traits import Traits, argument_texts, is_view
from nimble_core.tracing.recording import Rewritten, Step
from nimble_core.tracing.recording_contexts import current_phase
from nimble_core.tracing.run_log import RunLog
from nimble_core.utils.errors import CaptureError, NotStaticError, first_line

__all__ = ["CallRunner", "CallWriter", "Operation"]

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class CallRunner:
    """Runs calls one by one and labels what they allocate."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._running = 0
        self._runs = 0
        self._elsewhere = ""  # a kernel of the call that runs, which may reach memory that no argument of it shows
        self._caught = ""

    @property
    def label(self) -> str:
        """Label of the allocations of the last call."""
        return str(self._runs)

    def running(self) -> bool:
        """Return whether an operator is running, whose launches are part of its call."""
        return self._running > 0

    def reached_elsewhere(self, kernel: str) -> None:
        """Note that what is running launched a kernel that may reach memory beside its tensors'."""
        self._elsewhere = kernel

    def require_no_caught_error(self) -> None:
        """Raise NotStaticError if the model went on after a call had failed: that may depend on its values."""
        if self._caught:
            raise NotStaticError(
                "the model caught the error of a call, which may depend on values, and went on: a replay always would",
                where=self._caught,
                fix="compute without it, or leave that part out of what is prepared",
            )

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Run a call. Raises CaptureError where a capture, or a run without values, does not allow it."""
        counter = self._log.counter
        self._running += 1
        if counter:
            self._runs += 1
            counter.begin(self.label)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            self._refuse(func, error, frame)
            raise
        finally:
            if counter:
                counter.end()
            self._running -= 1
        elsewhere, self._elsewhere = self._elsewhere, ""
        if elsewhere and isinstance(func, Relaunch):  # what an operator launches, its schema declares
            where = self._log.origins.where(elsewhere, frame)
            self._log.unseen.note(f"{where}, which may reach other memory than its tensors'")
        return result

    def _refuse(self, func: Any, error: Exception, frame: FrameType) -> None:
        """Raise CaptureError for an error that is about recording; one of the model itself passes."""
        where = self._log.origins.where(func, frame)
        if not self._caught and not is_view(func):
            self._caught = f"{where}: {type(error).__name__}: {first_line(error)}"
        first = str(error).partition("\n")[0]
        if not self._log.values and (isinstance(error, _NEEDS_VALUES) or "fake impl" in str(error)):
            raise CaptureError(
                f"{func} cannot be planned without running it: {first or 'it needs values'}",
                where=where,
                fix="give a custom operator its shapes (torch.library.register_fake), or measure with compare(...)",
            ) from error
        # CUDA's own refusal, or torch's word that it would be refused.
        if self._log.counter and (isinstance(error, torch.AcceleratorError) or "graph capture" in str(error)):
            raise CaptureError(
                f"{func} cannot be captured: {first}",
                where=where,
                fix=experts_fix(frame)
                or "keep that operator out of the prepared module, or use a form that does not synchronise",
            ) from error


_RNN = torch.ops.aten.mkldnn_rnn_layer.default


def _rnn_with_workspace(*args: Any, **kwargs: Any) -> Any:
    """Run oneDNN's recurrent layer as in training: only then it makes what its backward reads."""
    with torch.enable_grad():
        return _RNN(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator as it was called."""

    func: Any
    traits: Traits
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    reads: list[int]
    written: list[torch.Tensor]
    frame: FrameType


class CallWriter:
    """Writes calls and host steps.

    Args:
        log: where.
        runner: runs kernels that bypass the dispatcher.
        rewritten: what runs in the model's place, which knows its calls' provenance; None for the model itself.
        before_write: told of each tensor that such a kernel may write.

    Attributes:
        generator: storage that stands for torch's random state; None if no call draws from it.
        windows: which allocations are each call's, under a capture.
    """

    def __init__(
        self,
        log: RunLog,
        runner: CallRunner,
        rewritten: Rewritten | None,
        before_write: Callable[[torch.Tensor], None],
    ) -> None:
        self._log, self._table, self._rewritten = log, log.table, rewritten
        self._runner, self._before_write = runner, before_write
        self.generator: int | None = None
        self.windows: list[Window] = []

    def step(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        outputs: tuple[int, ...],
        places: tuple[tuple[int, ...], ...],
        reads: Sequence[int],
        call: int | None = None,
    ) -> None:
        """Add a step: that of a call, or a host step."""
        if func is _RNN and torch.is_grad_enabled():
            func = _rnn_with_workspace
        self._log.steps.append(Step(func, args, kwargs, outputs, tuple(dict.fromkeys(reads)), call, places))

    def operator(
        self,
        operation: Operation,
        writes: list[TensorRef],
        returned: Sequence[torch.Tensor],
        outputs: tuple[int, ...],
        draws: bool,
    ) -> int:
        """Add the call of an operator; returns its index."""
        table, traits = self._table, operation.traits
        read = [table.refs[slot] for slot in operation.reads]
        wrote = list(writes)
        for tensor, slot in zip(returned, outputs, strict=True):
            # A result on memory that was there before is written too, whether the schema marks it or not.
            if not operation.written or not any(tensor is other for other in operation.written):
                wrote.append(table.refs[slot] if slot >= 0 else table.ref(tensor))
        self._follow_constants(operation, writes, returned)
        accesses = [*[Access(ref, False) for ref in read], *[Access(ref, True) for ref in wrote]]
        if draws:
            accesses += self._generator_accesses()
        origins, eager = self._provenance(traits.text, operation.frame)
        if current_phase() == "optimizer":
            names = [table.storages[access.ref.storage].name for access in accesses if access.write]
            origins = self._log.origins.owners(traits.text, names) or origins
        texts = argument_texts(traits.arguments, operation.args, operation.kwargs, table.storage_of)
        return self._add(traits.text, texts, accesses, origins, eager)

    def launched(self, launch: Launch, frame: FrameType) -> Any:
        """Do a launch and write it down; returns its result. Raises CaptureError where tensors have no values."""
        if not self._log.values:
            raise CaptureError(
                f"kernel {launch.name} cannot be planned without launching it",
                where=self._log.origins.where(launch.name, frame),
                fix="wrap it with torch.library.triton_op, or measure with compare(...)",
            )
        self._log.note_unseen_nodes(frame)
        with modes_off():
            return self._launched(launch, frame)

    def _launched(self, launch: Launch, frame: FrameType) -> Any:
        table, accesses = self._log.table, list[Access]()
        for name, tensor in (*zip(launch.names, launch.args, strict=False), *launch.kwargs.items()):
            if isinstance(tensor, torch.Tensor):
                reads, writes = launch.roles.get(name, (True, True))
                if reads:
                    accesses.append(Access(table.ref(tensor), write=False))
                if writes:
                    accesses.append(Access(table.ref(tensor), write=True))
                    self._before_write(tensor)
        slots: list[int] = []
        template = tuple(table.templates(launch.args, slots))
        keywords = tuple((name, table.template(value, slots)) for name, value in launch.kwargs.items())
        unseen = self._log.unseen.count
        result = self._runner.run(launch.launch, launch.args, dict(launch.kwargs), frame)
        if self._log.counter and not self._log.new_nodes():
            return result  # a grid of nothing
        if self._log.unseen.count > unseen:
            return result  # as if its launcher were not known: addresses among its arguments are others in each run
        call = self.kernel(launch, accesses, frame)
        self.window(self._runner.label, ())
        self.step(launch.launch, template, keywords, (), (), slots, call)
        return result

    def kernel(self, launch: Launch, accesses: Sequence[Access], frame: FrameType) -> int:
        """Add the call of a kernel that bypasses the dispatcher; returns its index."""
        table = self._table
        for access in accesses:
            if access.write:
                table.written.add(access.ref.storage)
                table.constant.discard(access.ref.storage)
        origins, eager = self._provenance(launch.name, frame)
        named = [*zip(launch.names, launch.args, strict=False), *launch.kwargs.items()]
        texts = tuple(
            (name, f"%{table.storage(value)}" if isinstance(value, torch.Tensor) else repr(value))
            for name, value in named
        )
        return self._add(launch.name, texts, accesses, origins, eager)

    def window(self, label: str, made: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Note under which label the last call allocated, and the tensors with new memory that it returned."""
        if self._log.counter and self._log.values:
            homes = {tensor.untyped_storage().data_ptr(): self._table.storage_of[slot] for tensor, slot in made}
            self.windows.append(Window(label, homes))

    def _add(
        self,
        operator: str,
        texts: tuple[tuple[str, str], ...],
        accesses: Sequence[Access],
        origins: tuple[Origin, ...],
        eager: tuple[int, ...],
    ) -> int:
        index = len(self._log.calls)
        # Comparing accesses takes longer than seeing that all are on different storages.
        apart = len({access.ref.storage for access in accesses}) == len(accesses)
        once = tuple(accesses if apart else dict.fromkeys(accesses))
        self._log.calls.append(Call(index, operator, texts, once, current_phase(), origins=origins, eager=eager))
        return index

    def _follow_constants(
        self, operation: Operation, writes: Sequence[TensorRef], returned: Sequence[torch.Tensor]
    ) -> None:
        """Note what is written, and whether it still depends on no inputs."""
        table, seeded = self._table, operation.traits.seeded
        constant = not seeded and table.constant.issuperset([table.storage_of[slot] for slot in operation.reads])
        if constant:
            table.constant.update([table.storage(tensor) for tensor in returned])
        for ref in writes:
            table.written.add(ref.storage)
            if not constant:
                table.constant.discard(ref.storage)

    def _provenance(self, operator: str, frame: FrameType) -> tuple[tuple[Origin, ...], tuple[int, ...]]:
        if self._rewritten:
            return self._rewritten.provenance(operator, frame)
        return (self._log.origins.origin(operator, frame),), ()

    def _generator_accesses(self) -> list[Access]:
        if self.generator is None:
            self.generator = self._table.add_storage(Storage(0, "generator", "default generator"))
        ref = TensorRef(self.generator, 0, (1,), (1,), "uint8", 1)
        return [Access(ref, write=False), Access(ref, write=True)]
