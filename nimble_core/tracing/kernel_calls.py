"""Kernels that bypass the dispatcher, as calls of a recording."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from nimble_core.ir.program import Access
from nimble_core.torch_compat.dispatch import modes_off
from nimble_core.tracing.call_runner import CallRunner
from nimble_core.tracing.call_writer import CallWriter
from nimble_core.tracing.kernel_launches import Launch
from nimble_core.tracing.run_log import RunLog
from nimble_core.utils.errors import CaptureError

__all__ = ["KernelCalls"]


class KernelCalls:
    """Launches kernels in the place of their launchers, and has them written down.

    Args:
        log: of the run.
        runner: runs them.
        writer: writes them down.
        before_write: told of each tensor that one may write.
    """

    def __init__(
        self, log: RunLog, runner: CallRunner, writer: CallWriter, before_write: Callable[[torch.Tensor], None]
    ) -> None:
        self._log, self._runner, self._writer, self._before_write = log, runner, writer, before_write

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
        call = self._writer.kernel(launch, accesses, frame)
        self._writer.window(self._runner.label, ())
        self._writer.step(launch.launch, template, keywords, (), (), slots, call)
        return result
