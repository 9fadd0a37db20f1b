"""``annotated``: draw an eager run's calls as NVTX ranges, with the call indices of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nimble_core.api.nimble import Nimble
from nimble_core.ir.program import Call
from nimble_core.profiling.nvtx import Range, call_bytes, call_range, listener, make_range
from nimble_core.torch_compat.autograd import current_node
from nimble_core.torch_compat.dispatch import OpOverload, TorchDispatchMode
from nimble_core.tracing.operator_traits import makes_memory_only, parts_of
from nimble_core.tracing.recording import flat_tensors
from nimble_core.tracing.recording_contexts import current_phase
from nimble_core.utils.errors import InputError
from nimble_viz.report.data import ReportData

__all__ = ["annotated"]

_AHEAD = 64
"""How many calls ahead to look for an operator that is not the next call's."""


@contextmanager
def annotated(of: ReportData | Nimble | None = None, name: str = "eager") -> Iterator[None]:
    """Draw each call of an eager run under its name, in Nsight Systems or another NVTX tool.

    The ranges lie in the domain ``nimble``, inside one called ``name``. Each is named after its operator and module,
    and has its phase as category, the colour of its stream, and a payload of its call index and the bytes it reads and
    writes. Without a tool nothing happens. Captures and replays have ranges without ``annotated``.

    Enter it once for each run of the model::

        for x in loader:
            with annotated(report):
                model(x)

    Args:
        of: whose call indices to use: a report of this model, or a prepared ``Nimble``. Operators that it does not
            know, in this order, have index -1. None: operators are counted in order, without views and ``empty``, and
            bytes are those of their inputs.
        name: name of the range around all of them.

    Raises:
        InputError: ``of`` is nothing that has calls.
    """
    calls = _calls(of)
    domain = listener()
    if domain is None:
        yield
        return
    nbytes = sum(map(call_bytes, calls))
    with make_range(domain, name, "eager", call=len(calls), nbytes=nbytes), _EagerRanges(domain, calls):
        yield


def _calls(of: ReportData | Nimble | None) -> Sequence[Call]:
    match of:
        case None:
            return ()
        case ReportData():
            return of.eager_calls
        case Nimble() if of.engines:
            recorded = of.engines[0].recorded
            return (recorded.eager or recorded).recording.program.calls
    given = "a Nimble that is not prepared" if isinstance(of, Nimble) else f"a {type(of).__name__}"
    raise InputError(f"annotated(...) was given {given}", fix="a Report, a prepared Nimble, or nothing")


class _EagerRanges(TorchDispatchMode):
    """Pushes a range around every operator that may reach the device."""

    def __init__(self, domain: Any, calls: Sequence[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._domain = domain
        self._calls = calls
        self._next = 0
        self._streams: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else a torch.compile'd submodule would run eager inside.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or _stays_on_host(func):
            return func(*args, **kwargs)
        index = self._find(str(func))
        if index < 0 and (parts := parts_of(func)) is not None:
            with self:
                return parts(*args, **kwargs)
        with self._range(func, index, [*flat_tensors(args), *flat_tensors(list(kwargs.values()))]):
            return func(*args, **kwargs)

    def _range(self, func: Any, index: int, tensors: Sequence[torch.Tensor]) -> Range:
        stream = self._stream(tensors)
        if self._calls and index >= 0:
            return call_range(self._domain, self._calls[index], stream)
        phase = "backward" if current_node() is not None else current_phase()
        label = str(func).split(".")[1]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return make_range(self._domain, label, phase, call=index, nbytes=nbytes, stream=stream)

    def _find(self, operator: str) -> int:
        """Return the next call of this operator, or -1. Calls before it were skipped or reordered."""
        if not self._calls:
            self._next += 1
            return self._next - 1
        for index in range(self._next, min(self._next + _AHEAD, len(self._calls))):
            if self._calls[index].operator == operator:
                self._next = index + 1
                return index
        return -1

    def _stream(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the number of a stream, in order of appearance; the host counts as the first."""
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if device is None:
            return 0
        return self._streams.setdefault(torch.cuda.current_stream(device).cuda_stream, len(self._streams))


def _stays_on_host(func: Any) -> bool:
    """Say whether ``func`` only gives memory another shape, or makes some without content."""
    reshapes = func.is_view or func is torch.ops.aten._unsafe_view.default or torch.Tag.inplace_view in func.tags
    return reshapes or makes_memory_only(func)
