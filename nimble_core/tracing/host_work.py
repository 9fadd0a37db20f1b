"""Work on the host while a device is recorded, and constants that each run makes anew."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import TorchDispatchMode
from nimble_core.tracing.operator_traits import written_tensors
from nimble_core.tracing.recording import flat_tensors
from nimble_core.tracing.run_log import RunLog
from nimble_core.utils.errors import CaptureError

__all__ = ["FreshConstants", "HostWork"]


class FreshConstants:
    """Constants that each run makes anew, as ``torch.tensor`` does. One that is written has to start anew in replays.

    Args:
        log: of the run.
    """

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
    """Operators on host tensors alone while a device is recorded. Every input is on the device: results are constants.

    Args:
        log: of the run.
        fresh: where constants go that were made here.
    """

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
