"""Writes calls and host steps of a run into its log: what each reads and writes, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from nimble_core.ir.allocations import Window
from nimble_core.ir.program import Access, Call, Origin, Storage, TensorRef
from nimble_core.tracing.kernel_launches import Launch
from nimble_core.tracing.operator_traits import Traits, argument_texts
from nimble_core.tracing.phase import current_phase
from nimble_core.tracing.recording import Step
from nimble_core.tracing.rewritten import Rewritten
from nimble_core.tracing.run_log import RunLog

__all__ = ["CallWriter", "Operation"]

_RNN = torch.ops.aten.mkldnn_rnn_layer.default


def _rnn_with_workspace(*args: Any, **kwargs: Any) -> Any:
    """Run oneDNN's recurrent layer as in training: only then it makes what its backward reads."""
    with torch.enable_grad():
        return _RNN(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator as it was called.

    Args:
        func: the operator.
        traits: its own.
        args: templates over slots.
        kwargs: likewise.
        reads: slots among the arguments.
        written: tensors that it writes.
        frame: that calls it.
    """

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
        rewritten: what runs in the model's place, which knows its calls' provenance; None for the model itself.

    Attributes:
        generator: storage that stands for torch's random state; None if no call draws from it.
        windows: which allocations are each call's, under a capture.
    """

    def __init__(self, log: RunLog, rewritten: Rewritten | None) -> None:
        self._log, self._table, self._rewritten = log, log.table, rewritten
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
        """Add the call of an operator; returns its index.

        Args:
            operation: as it was called.
            writes: windows of what it wrote.
            returned: its results.
            outputs: their slots, -1 for an argument that is returned.
            draws: whether it drew random numbers.
        """
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
