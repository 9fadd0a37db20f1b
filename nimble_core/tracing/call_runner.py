"""Runs one operator or kernel of a recorded model, and says in whose words its error is refused."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from nimble_core.scheduling.failure_order import checks_values
from nimble_core.torch_compat.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from nimble_core.tracing.host_waits import experts_fix
from nimble_core.tracing.kernel_launches import Relaunch
from nimble_core.tracing.run_log import RunLog
from nimble_core.utils.errors import CaptureError, NotStaticError, first_line

__all__ = ["CallRunner"]

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class CallRunner:
    """Runs calls one by one and labels what they allocate.

    Args:
        log: of the run.
    """

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
        """Raise NotStaticError if the model went on after a call had failed on its values."""
        if self._caught:
            raise NotStaticError(
                "the model caught the error of a call that fails on some values, and went on: a replay would always",
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
        if not self._caught and checks_values(str(func)):
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
