"""The Program: what one run of a model asked of its device, as plain frozen values.

``record`` makes a Program; ``build_graph`` reads its accesses; reports store it. Nothing here imports torch:
the twin that can re-issue the calls (``nimble_core.tracing.recording.Recording``) holds the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "EAGER_CALL",
    "Access",
    "Call",
    "Fuse",
    "KernelChoice",
    "Origin",
    "Phase",
    "Program",
    "Role",
    "Storage",
    "TensorRef",
]

Phase = Literal["forward", "loss", "backward", "optimizer"]
Fuse = Literal["none", "library", "inductor"]
EAGER_CALL = "eager's call"
"""What a ``KernelChoice`` names that keeps an eager call as it is."""
Role = Literal["input", "parameter", "buffer", "constant", "intermediate", "generator"]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided window on a storage.

    Args:
        storage: index into ``Program.storages``.
        offset: start of the window, bytes from the start of the storage.
        sizes: elements per dimension.
        strides: elements between neighbours, per dimension.
        dtype: e.g. ``"float32"``.
        itemsize: bytes per element.
    """

    storage: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves (not of the span they are strewn over)."""
        return self.numel * self.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """``(first byte, one past the last byte)`` in the storage; empty windows give ``(offset, offset)``."""
        if self.numel == 0:
            return self.offset, self.offset
        low = high = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            reach = (size - 1) * stride
            low += min(reach, 0)
            high += max(reach, 0)
        return self.offset + low * self.itemsize, self.offset + (high + 1) * self.itemsize


@dataclass(frozen=True, slots=True)
class Access:
    """One tensor touched by a call. A call that reads and writes the same tensor has two accesses."""

    ref: TensorRef
    write: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a call comes from. A fused kernel has many origins.

    Args:
        operator: the eager operator, e.g. ``"aten.convolution.default"``.
        module: path in the model, e.g. ``"encoder.layer.0.attention"``; empty for the root.
        file: source file of the innermost line of user or library model code; empty if unknown.
        line: line number in ``file``, 0 if unknown.
    """

    operator: str
    module: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return self.during("forward")

    def during(self, phase: Phase) -> str:
        """In words, what runs where in this phase.

        >>> Origin("aten.sum.default", "", "train.py", 7).during("loss")
        'aten.sum.default in the loss at train.py:7'
        >>> Origin("aten.mm.default", "head").during("backward")
        'aten.mm.default in the backward of head'
        """
        if phase == "forward":
            where = self.module or "the model"
        elif phase == "backward" and self.module:
            where = f"the backward of {self.module}"
        else:
            where = f"the {phase} ({self.module})" if self.module else f"the {phase}"
        place = f" at {self.file}:{self.line}" if self.file else ""
        return f"{self.operator} in {where}{place}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reaches the device.

    Args:
        index: position in ``Program.calls``.
        operator: e.g. ``"aten.addmm.default"``, or a kernel's name.
        arguments: ``(name, text)`` of every argument; tensors read ``%<storage>``, the rest is ``repr``.
        accesses: tensors read and written, in argument order, outputs last.
        phase: part of the step it belongs to.
        origins: where it comes from.
        eager: indices of the eager calls that it stands for, where the program was rewritten or compiled; empty in a
            program of eager calls, and for calls that no eager call explains (changes of layout).
    """

    index: int
    operator: str
    arguments: tuple[tuple[str, str], ...]
    accesses: tuple[Access, ...]
    phase: Phase = "forward"
    origins: tuple[Origin, ...] = ()
    eager: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        """Tensors read."""
        return tuple(access.ref for access in self.accesses if not access.write)

    @property
    def writes(self) -> tuple[TensorRef, ...]:
        """Tensors written."""
        return tuple(access.ref for access in self.accesses if access.write)

    @property
    def module(self) -> str:
        """Module path of the first origin; empty if unknown."""
        return self.origins[0].module if self.origins else ""

    @property
    def label(self) -> str:
        """Short operator name: ``"aten.addmm.default"`` reads ``"addmm"``."""
        parts = self.operator.split(".")
        return parts[1] if len(parts) > 1 else self.operator

    def __str__(self) -> str:
        where = self.origins[0].during(self.phase) if self.origins else self.operator
        return f"call {self.index}: {where}"


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory that tensors share.

    Args:
        nbytes: size in bytes.
        role: who owns it; ``intermediate`` is what the calls themselves make. ``generator`` is no memory at all:
            the state of a random generator, so that calls that draw from it keep their order.
        name: parameter or buffer name, input path (``"args[0]"``); empty otherwise.
    """

    nbytes: int
    role: Role
    name: str = ""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A way to run eager calls that was preferred to others.

    Args:
        call: index of the first eager call that it runs.
        kernel: what it is called, e.g. ``"cudnn fused"``.
    """

    call: int
    kernel: str


@dataclass(frozen=True, slots=True)
class Program:
    """Calls in program order, and what they touch.

    Args:
        calls: every call that reaches the device, in the order the model issued them.
        storages: every storage, by index; ``TensorRef.storage`` points here.
        inputs: the model's tensor inputs, in flattening order.
        outputs: the model's tensor outputs, in flattening order.
        host_steps: how many steps (views, ``empty``, no-op copies) were seen that never reach the device.
        device: ``"cuda"``, ``"cpu"``: where it was recorded.
        notes: what the reader should know (attributes that a forward changed, copies made constant, …).
        fuse: whose kernels these are: ``"none"`` (eager's own), ``"library"`` or ``"inductor"``.
        choices: what was chosen, by measurement, while they were made of eager calls.
    """

    calls: tuple[Call, ...]
    storages: tuple[Storage, ...]
    inputs: tuple[TensorRef, ...]
    outputs: tuple[TensorRef, ...]
    host_steps: int = 0
    device: str = "cpu"
    notes: tuple[str, ...] = field(default=())
    fuse: Fuse = "none"
    choices: tuple[KernelChoice, ...] = ()

    @property
    def kept(self) -> frozenset[int]:
        """Eager calls that run as they are among other kernels."""
        return frozenset(choice.call for choice in self.choices if choice.kernel == EAGER_CALL)
