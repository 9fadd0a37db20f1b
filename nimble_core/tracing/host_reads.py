"""Values that the host reads during a run, what it waits for, and its own work while a device is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import TorchDispatchMode, modes_off
from nimble_core.tracing import unread_values
from nimble_core.tracing.operator_traits import (
    copies_to_host,
    fills_where_true,
    has_memory,
    masks_among,
    shape_depends_on_data,
    traits_of,
    written_tensors,
)
from nimble_core.tracing.provenance import issued_in, running_module
from nimble_core.tracing.recording import Held, Step, flat_tensors, issuing
from nimble_core.tracing.recording_contexts import raise_or_note, refusals_noted
from nimble_core.tracing.run_log import RunLog
from nimble_core.utils.errors import CaptureError

__all__ = [
    "FIXED_SHAPE",
    "ON_DEVICE",
    "WAITS",
    "FreshConstants",
    "HandedOut",
    "HostReads",
    "HostWork",
    "experts_fix",
    "reason_to_wait",
]

WAITS = "the host would have to wait for the device, and a replay cannot"
ON_DEVICE = "keep it a tensor (torch.where instead of if), or pass it as an input"
_TO_PYTHON = "gives the host a tensor's value (.item(), bool(), int() and the like)"
FIXED_SHAPE = "use a form with a fixed shape (torch.where, a mask, a size argument)"
_TO_HOST = "copies from the device to the host", "keep the tensor on the device, or copy it outside the model"

_CHOOSE = "compute both and choose: torch.where(condition, a, b)"
_WRITES_WHERE_TRUE = (
    "writes where a mask is true, and counts these places",
    "use torch.where(mask, values of x's shape, x), or one value, with the mask on the device",
)
_EXPERTS = (
    'model.set_experts_implementation("batched_mm") before preparing, or from_pretrained(..., '
    'experts_implementation="batched_mm"): the host need not know which experts are chosen'
)
_FIX_BY_FILE = {
    torch.nn.modules.batchnorm.__file__: "give momentum a number: with None torch reads how many batches there were",
    torch.distributions.distribution.__file__: "give distributions validate_args=False: else torch looks at all values",
    torch.nn.modules.rnn.__file__: "packed sequences depend on data: pass the padded batch, and mask what comes out",
    unread_values.__file__: "give F.one_hot its number of classes: F.one_hot(x, num_classes=n)",
}
"""Remedies where a file of torch, whose lines users cannot change, asks for a value."""


def reason_to_wait(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, frame: FrameType
) -> tuple[str, str] | None:
    """Say why the host waits for this call, and what to do instead; None if it does not."""
    traits, away = traits_of(func), device != "cpu"
    if traits.looks or (away and traits.name == "aten::_linalg_check_errors"):
        condition = isinstance(args[0], torch.Tensor) and args[0].dtype is torch.bool
        fix = next((fix for file, fix in _FIX_BY_FILE.items() if issued_in(frame, file)), "")
        return _TO_PYTHON, fix or (_CHOOSE if condition else ON_DEVICE)
    if shape_depends_on_data(func, args, kwargs):
        if not traits.puts:
            return "has an output whose shape depends on data", FIXED_SHAPE
        return _WRITES_WHERE_TRUE if away else None  # on the host, nobody waits: the result's shape is known
    if away and copies_to_host(func, flat_tensors([*args, *kwargs.values()]), args, kwargs):
        return _TO_HOST
    return None


def experts_fix(frame: FrameType) -> str:
    """Return the remedy for a mixture of experts of Hugging Face whose host waits for what is chosen; else empty.

    ``"eager"`` loops over the chosen experts. ``"grouped_mm"`` does not, but where torch has no kernel for it (float32)
    it reads on the host how many were chosen.
    """
    module = running_module(frame)
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", "")
    return _EXPERTS if hasattr(module, "_apply_gate") and chosen != "batched_mm" else ""


class FreshConstants:
    """Constants that each run makes anew, as ``torch.tensor`` does; replays start one that is written anew."""

    def __init__(self, log: RunLog) -> None:
        self._log, self._table = log, log.table
        self._tensors: dict[int, torch.Tensor] = {}  # by storage, as aliases: the model may reshape its own in place
        self._first_values: dict[int, torch.Tensor] = {}

    def __contains__(self, storage: int) -> bool:
        return storage in self._tensors

    def add(self, tensor: torch.Tensor) -> None:
        """Add a constant that the run has made."""
        self._tensors[self._table.storage(tensor)] = tensor.detach()

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keep what a constant holds before its first write."""
        storage = self._table.storage(tensor)
        if storage in self._tensors and storage not in self._first_values:
            with self._log.outside():
                self._first_values[storage] = self._tensors[storage].clone()

    def restore(self, outputs: Sequence[torch.Tensor], mode: TorchDispatchMode) -> Sequence[torch.Tensor]:
        """Record, as last calls, copies that give written constants their first values again.

        Returns:
            The outputs; those on such constants as copies.
        """
        restored = {storage: self._tensors[storage] for storage in self._first_values}
        if not restored:
            return outputs
        with torch.no_grad(), mode:
            outputs = [one.clone() if self._table.storage(one) in restored else one for one in outputs]
            for storage, tensor in restored.items():
                tensor.copy_(self._first_values[storage])
        return outputs


class HostWork:
    """Operators on host tensors alone while a device is recorded: results are constants, since inputs lie there."""

    def __init__(self, log: RunLog, fresh: FreshConstants) -> None:
        self._log, self._table, self._fresh = log, log.table, fresh

    def does(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call with these arguments is such work."""
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type != "cpu":
            return False  # most calls
        tensors = flat_tensors([*args, *kwargs.values()])
        if tensors:
            return all(tensor.device.type == "cpu" for tensor in tensors)
        return _on_host(kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Run a call now. Its result is kept as a constant if a later call reads it."""
        if self._table.given:
            for tensor in written_tensors(func, args, kwargs):
                self._keep_what_was_read(func, tensor, frame)
        with nullcontext() if _on_host(kwargs) else self._log.outside():
            result = func(*args, **kwargs)
        return self.as_constants(result)

    def as_constants(self, result: Any) -> Any:
        """Return ``result``, whose tensors are constants from now on."""
        table = self._table
        known = len(table.storages)
        for tensor in flat_tensors(result):
            if table.slot_of(tensor) is None:
                storage = table.storage_of[table.give(tensor, "constant")]
                table.constant.add(storage)
                if storage >= known:
                    self._fresh.add(tensor)
        return result

    def on_device(self, arg: Any) -> Any:
        """Return ``arg`` with its host tensors, which are constants, copied to the device now."""
        if isinstance(arg, (list, tuple)):
            return [self.on_device(item) for item in arg]
        if not isinstance(arg, torch.Tensor) or arg.device.type != "cpu":
            return arg
        with self._log.outside():
            copied = arg.to(self._log.device)
        self._table.constant.add(self._table.storage_of[self._table.give(copied, "constant")])
        return copied

    def _keep_what_was_read(self, func: Any, tensor: torch.Tensor, frame: FrameType) -> None:
        """Before a host tensor is written: give the device's calls that have read it a copy, and count it as new."""
        table, home = self._table, self._table.known_storage(tensor)
        slots = {slot for slot in table.given if table.storage_of[slot] == home}
        read = {slot for step in self._log.steps for slot in step.reads if slot in slots} if slots else set()
        if home is None or not read:
            return
        if home not in self._fresh:
            raise CaptureError(
                f"{func} writes a tensor on the host that a call on the device has read: a replay would not",
                where=self._log.origins.where(func, frame),
                fix="keep that tensor on the device",
            )
        table.forget(home)
        for slot in read:
            table.given[slot] = table.owners[slot] = table.given[slot].clone()


def _on_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


_ALIAS = torch.ops.aten.alias.default
_NONZERO = torch.ops.aten.nonzero.default


class HostReads:
    """Reads on the host of values that every run finds, since they come from the model's own tensors and constants."""

    def __init__(self, log: RunLog, fresh: FreshConstants, work: HostWork) -> None:
        self._log, self._table, self._fresh, self._work = log, log.table, fresh, work
        self._held: list[Held] = []

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether every run finds the values that ``tensor`` has now."""
        with modes_off():
            return self._log.values and self._table.is_constant(tensor)

    def waited_for(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> bool:
        """Refuse a call that the host waits for, unless every run finds the same values; those are held.

        Returns:
            Whether the call has to run outside of the capture (``again``), since the host needs its result.
        """
        reason = reason_to_wait(func, args, kwargs, self._log.device.type, frame)
        if reason is None:
            return False
        why, fix = reason
        tensors = flat_tensors([*args, *kwargs.values()])
        away = any(tensor.device.type != "cpu" for tensor in tensors)
        known = all(map(self._table.is_constant, tensors))
        if known and away and not self._log.values:
            fix = "measure with compare(...): a plan has no values, where a recording finds the same in each run"
        fix = experts_fix(frame) or fix
        if not known or (away and (not self._log.values or written_tensors(func, args, kwargs))):
            raise CaptureError(f"{func} {why}: {WAITS}", where=self._log.origins.where(func, frame), fix=fix)
        self._hold(func, args, kwargs, self._log.origins.where(func, frame), fix)
        return away

    def places(self, func: Any, args: tuple[Any, ...], frame: FrameType) -> list[Any]:
        """Return the indices of ``x[mask]`` as integers where every run finds the same masks; else an empty list."""
        masks = masks_among(args[1])
        if not self._log.values or not all(mask.dim() and self._table.is_constant(mask) for mask in masks):
            return []
        if not masks or (traits_of(func).puts and (self._log.device.type == "cpu" or fills_where_true(func, args))):
            return []
        indices: list[Any] = []
        for one in args[1]:
            if any(one is mask for mask in masks):
                self._hold(_NONZERO, (one,), {}, self._log.origins.where(func, frame), FIXED_SHAPE)
                indices += self.again().unbind(1)
            else:
                indices.append(one)
        return indices

    def read(self, tensor: torch.Tensor, where: str) -> None:
        """Hold a read of all values of ``tensor``."""
        self._hold(_ALIAS, (tensor,), {}, where, ON_DEVICE)

    def again(self) -> Any:
        """Run the call that was held last outside of the capture, in which nothing has values."""
        return self._work.as_constants(self._again(self._held[-1])[0])

    def held(self) -> Iterator[Held]:
        """Yield, at the end of the run, the reads that start from tensors which were there before it."""
        table = self._table
        for read in self._held if self._log.values else ():
            own = [slot for slot in read.given if table.storage_of[slot] not in self._fresh]
            if own:
                live = replace(read, given={slot: table.live(slot) for slot in read.given})
                sources = tuple((table.storages[table.storage_of[slot]].name, live.given[slot]) for slot in own)
                yield replace(live, found=self._again(live)[1], sources=sources)

    def _hold(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: str, fix: str) -> None:
        """Remember a read: the steps that lead to it, and the tensors that they start from."""
        table = self._table
        reads: list[int] = []
        template = tuple(table.templates(args, reads))
        named = tuple((name, table.template(arg, reads)) for name, arg in kwargs.items())
        steps = [Step(func, template, named, (), tuple(reads), None)]
        wanted = {table.storage_of[slot] for slot in reads}
        for step in reversed(self._log.steps):
            made = {table.storage_of[slot] for slot in step.outputs if slot >= 0}
            if step.call is not None:
                made.update(ref.storage for ref in self._log.calls[step.call].writes)
            if made & wanted:
                steps.append(step)
                wanted.update(table.storage_of[slot] for slot in step.reads)
        given = {slot: tensor for slot, tensor in table.given.items() if table.storage_of[slot] in wanted}
        self._held.append(Held(tuple(reversed(steps)), given, where, fix))

    def _again(self, read: Held) -> tuple[Any, str]:
        """Return what ``read`` finds, also as text, computed anew outside of a capture."""
        table = self._table
        trained = any(call.phase == "backward" for call in self._log.calls)
        for slot in read.given:
            home = table.storage_of[slot]
            storage = table.storages[home]
            grown = trained and storage.role == "parameter" and table.owners[slot].requires_grad
            if grown or home in table.written:
                raise CaptureError(
                    f"{storage.role} {storage.name} is {'trained' if grown else 'written by the model'}, and read on "
                    "the host: a replay would go on with the value that was read",
                    where=read.where,
                    fix=read.fix,
                )
        with self._log.outside(), issuing(self._log.device.type):
            return read.again()


@dataclass(frozen=True, slots=True)
class _Exported:
    """Memory that code outside of torch may write, what it held after torch's last write, and who handed it out."""

    memory: torch.Tensor
    held: torch.Tensor
    where: str

    @classmethod
    def of(cls, tensor: torch.Tensor, where: str) -> _Exported:
        """Take all memory behind ``tensor``, as bytes."""
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return cls(memory, memory.clone(), where)


class HandedOut:
    """Memory of tensors that numpy and the like got to see, and numbers read as a list.

    Args:
        log: of the run, which is told of writes outside of torch as unseen.
        reads: told of tensors whose values every run finds.
        before_write: told of a tensor, not made by the run, that may be written from now on.

    Attributes:
        where: where memory or numbers that may follow the inputs were handed out first, in words.
    """

    def __init__(self, log: RunLog, reads: HostReads, before_write: Callable[[torch.Tensor], None]) -> None:
        self._log, self._table, self._reads, self._before_write = log, log.table, reads, before_write
        self._exported: dict[int, _Exported] = {}
        self.where = ""

    def exported(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """Note that the memory of ``tensor`` is handed out."""
        if tensor.device.type != "cpu" or not has_memory(tensor):
            return
        with modes_off(), torch.no_grad():
            home = self._table.storage(tensor)
            if home not in self._table.made:
                self._before_write(tensor)
            where = self._log.origins.where("memory handed out", frame)
            if home not in self._exported:
                self._exported[home] = _Exported.of(tensor, where)
            if home in self._table.constant:
                self._reads.read(tensor, where)
            else:
                self._note(where, frame)

    def listed(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """Note that the numbers of ``tensor`` become a list."""
        if tensor.device.type != "cpu":
            return  # copied to the host first, by a call
        where = self._log.origins.where("tolist", frame)
        if self._reads.knows(tensor):
            with modes_off():
                self._reads.read(tensor, where)
        elif has_memory(tensor) and self._log.on_host:
            self._note(where, frame)

    def written_by_torch(self, storage: int) -> None:
        """Note that a call has written a storage."""
        if storage in self._exported:
            one = self._exported[storage]
            self._exported[storage] = replace(one, held=one.memory.clone())

    def compare(self, slots: Sequence[int] | None, when: str, frame: FrameType | None) -> None:
        """Note as unseen a write outside of torch to the memory of one of these slots; None: to any."""
        if not self._exported or self._log.unseen.count:
            return
        storages = self._exported if slots is None else {self._table.storage_of[slot] for slot in slots}
        for storage, one in self._exported.items():
            if storage in storages and not torch.equal(one.memory, one.held):
                at = f" at {self._log.origins.line(frame)}" if frame else ""
                self._log.unseen.note(f"{one.where}: written {when}{at}")
                return

    def _note(self, where: str, frame: FrameType) -> None:
        self.where = self.where or where
        if refusals_noted():
            raise_or_note(CaptureError("values of a tensor are read outside of torch", where=where), frame)
