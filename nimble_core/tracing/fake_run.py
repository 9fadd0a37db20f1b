"""Record without running: the model sees fake tensors, which have shapes, types and a device, but no memory.

The device need not be there, and models that would not fit it, or were built on ``meta``, are recorded as well. Views,
writes in place and tied weights show as in a real recording: each real storage has one fake storage.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from traceback import walk_tb
from typing import Any

import torch

from nimble_core.ir.allocations import Ask, Window
from nimble_core.torch_compat.dispatch import (
    FAKE_TENSOR,
    FakeTensor,
    FakeTensorMode,
    Mode,
    conjugated,
    modes_off,
    negated,
)
from nimble_core.tracing.operator_traits import makes_memory_only, parts_of, storage_address, written_tensors
from nimble_core.tracing.provenance import module_paths, place_of
from nimble_core.tracing.pytree import builder
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Recording, flat_tensors
from nimble_core.tracing.recording_contexts import announced
from nimble_core.tracing.signature import Signature, require_plain, take_apart
from nimble_core.utils.errors import CaptureError, InputError

__all__ = ["dry_run"]

_TORCH_ROOT = f"{torch.__path__[0]}/"
_NO_VALUES = ("FakeTensor", "data pointer", "tensor subclass")  # in what torch says of .numpy(), .data_ptr() and others
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


def dry_run(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> tuple[Recording, Signature]:
    """Return what ``record`` would write down if model and inputs were on ``device``; no kernel runs.

    Tensors that exist before (parameters, buffers, inputs, others that the model reads) count as moved to ``device``.
    The model is left as it was. The recording is for its Program: its tensors have no memory, and cannot be re-issued.

    Args:
        model: module or function, on any device, ``meta`` too.
        args: example positional inputs, likewise.
        kwargs: example keyword inputs.
        device: planned for; need not be there.

    Raises:
        InputError: no tensor among the inputs, tensors that are not dense, a device torch does not know.
        CaptureError: a call whose result depends on values; one whose shapes torch does not know without running it.
    """
    try:
        with announced(False):
            return _record(model, args, kwargs, device)
    except CaptureError as error:
        refused = error
    try:
        with announced(True):  # libraries keep another branch for captures, which looks at no values
            recording, signature = _record(model, args, kwargs, device)
    except CaptureError as error:
        raise refused from error
    note = f"this is the branch that the model keeps for captures: in eager {refused.what} ({refused.where})"
    program = replace(recording.program, notes=(*recording.program.notes, note))
    return replace(recording, program=program), signature


def _record(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[Recording, Signature]:
    fakes = _StandIns(device)
    tensors, structure, paths = take_apart(args, kwargs)
    for tensor, path in zip(tensors, paths, strict=True):
        require_plain(tensor, path)
    with ExitStack() as stack:
        stack.enter_context(fakes.mode)  # which also lets torch do without a driver
        args, kwargs = builder(structure)([fakes(None, tensor) for tensor in tensors])
        signature = Signature(args, kwargs)
        work = None if device.type == "cpu" else stack.enter_context(_DeviceWork())
        stack.enter_context(_in_place_of_parameters(model, fakes))
        stack.enter_context(_fakes_unnoticed())
        try:
            found = record(model, signature, args=args, kwargs=kwargs, counter=work, stand_in=fakes)
            return found, signature
        except RuntimeError as error:
            if isinstance(error, CaptureError) or not any(words in str(error) for words in _NO_VALUES):
                raise
            raise CaptureError(
                f"the model looks at memory that a plan does not have: {str(error).splitlines()[0]}",
                where=_where(model, error),
                fix="compute with torch what is computed in numpy or by address, or measure with compare(...)",
            ) from error


def _where(model: Callable[..., Any], error: BaseException) -> str:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    module, file, line = place_of(frames[-1] if frames else None, module_paths(model))
    return f"{module or 'the model'} at {file}:{line}"


class _StandIns:
    """Fake tensors on ``device`` for real ones: the same one each time, and one storage for each real storage."""

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_fallback_kernels=False)
        self._device = device
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the real one, whose id stays its own
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._tensors:
            device = tensor.device if func in _LIFTS else self._device  # torch.tensor(...) makes real ones on the host
            with modes_off():
                self._tensors[id(tensor)] = (tensor, self._made(tensor, device))
        return self._tensors[id(tensor)][1]

    def _made(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise InputError(f"a {tensor.layout} tensor cannot be planned", fix="convert it with .to_dense()")
        home = storage_address(tensor)
        if home not in self._storages:
            self._storages[home] = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
        shape = torch.empty(0, dtype=tensor.dtype, device="meta")
        with torch.no_grad():
            shape.set_(self._storages[home], tensor.storage_offset(), tensor.shape, tensor.stride())
            shape = conjugated(shape) if tensor.is_conj() else shape
            shape = negated(shape) if tensor.is_neg() else shape
        fake: torch.Tensor = FakeTensor(self.mode, shape, device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def _in_place_of_parameters(model: Callable[..., Any], fakes: _StandIns) -> Iterator[None]:
    """Replace parameters and buffers by fake ones inside: code that asks for their device gets the planned one."""
    taken: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:
                        taken.append((table, name, tensor))
                        table[name] = fakes(None, tensor)
        yield
    finally:
        for table, name, tensor in taken:
            table[name] = tensor


class _Unnoticed(type):
    """Answers ``isinstance(x, FakeTensor)`` truly to torch and to other threads, and with False to all else."""

    thread = 0

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeTensor) and cls._answered(sys._getframe(1).f_code.co_filename)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, FakeTensor) and cls._answered(sys._getframe(1).f_code.co_filename)

    def _answered(cls, file: str) -> bool:
        return threading.get_ident() != cls.thread or file.startswith(_TORCH_ROOT)


@contextmanager
def _fakes_unnoticed() -> Iterator[None]:
    """Hide from libraries that tensors are fake: Hugging Face's masks keep another branch for those, as for captures.

    Only inside ``announced``, which lets one thread at a time through.
    """
    with FAKE_TENSOR.replaced_by(_Unnoticed("FakeTensor", (), {"thread": threading.get_ident()})):
        yield


class _DeviceWork(Mode):
    """Counts the calls that would add a node to a capture: those that write, or make, memory on the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._nodes = 0
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (parts := parts_of(func)) is not None:
            with self:
                return parts(*args, **kwargs)
        given = {storage_address(tensor) for tensor in flat_tensors([*args, *kwargs.values()])}
        written = [tensor for tensor in written_tensors(func, args, kwargs) if isinstance(tensor, torch.Tensor)]
        result = func(*args, **kwargs)
        if self._paused:
            return result
        made = [
            tensor
            for tensor in flat_tensors(result)
            if tensor.layout is torch.strided and storage_address(tensor) not in given and tensor.device.type != "cpu"
        ]
        works = written if written or makes_memory_only(func) else made
        self._nodes += any(tensor.numel() and tensor.device.type != "cpu" for tensor in works)
        return result

    def nodes(self) -> int:
        """Return how many calls reached the device so far."""
        return self._nodes

    def begin(self, label: str) -> None:
        """Do nothing: allocations are not known here."""

    def end(self) -> None:
        """Do nothing."""

    def asks(self, windows: Sequence[Window]) -> tuple[tuple[Ask, ...], ...]:
        """Return nothing: not known."""
        return ()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Count nothing inside."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
