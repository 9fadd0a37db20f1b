"""From a recording to straight-line Python that re-issues the calls.

What is done once, here, is not done again in a replay: results go to buffers that exist already, and views of such
buffers are made. What remains of one call is one line, such as ``f12(g40, g41, out=g7)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from types import FunctionType
from typing import Any

import torch

from nimble_core.runtime.host.prepared_steps import PreparedStep, PreparedSteps
from nimble_core.tracing.recording import Slot, Step, flat_tensors

__all__ = ["Code", "Lines"]


@dataclass(frozen=True, slots=True)
class Lines:
    """A function of the inputs that returns the outputs, and the call that each of its source lines belongs to."""

    function: FunctionType
    calls: dict[int, int]


class Code:
    """A recording compiled: its calls in program order.

    Args:
        prepared: its steps. The tensors that they read are globals of the generated functions.
    """

    def __init__(self, prepared: PreparedSteps) -> None:
        self.recording, self.memory, self.arena = prepared.recording, prepared.memory, prepared.arena
        storages, home = self.recording.program.storages, self.recording.storage_of
        outside = {storage for storage, kept in enumerate(storages) if kept.role != "intermediate"}
        self.copied = tuple(at for at, slot in enumerate(self.recording.outputs) if home[slot] in outside)
        """Positions of outputs that alias what the executable or its caller holds."""
        fixed = {f"g{slot}": tensor for slot, tensor in prepared.fixed.items()}
        self.namespace: dict[str, Any] = {"flat": flat_tensors} | fixed
        self.lines = _emit(prepared, self.namespace, timed=False)
        self._prepared = prepared
        self._timed: Lines | None = None

    def timed_lines(self) -> Lines:
        """Write the same, noting when each call begins and ends in the lists ``A`` and ``B`` of the namespace."""
        if self._timed is None:
            calls = len(self.recording.program.calls)
            self.namespace.update(A=[0] * calls, B=[0] * calls, now=perf_counter_ns)
            self._timed = _emit(self._prepared, self.namespace, timed=True)
        return self._timed


@dataclass(slots=True)
class _Line:
    text: str
    call: int | None
    names: tuple[str, ...] = ()
    """Local variables read or set."""


class _Writer:
    """Writes the function."""

    def __init__(self, prepared: PreparedSteps, namespace: dict[str, Any]) -> None:
        self.prepared = prepared
        self.namespace = namespace
        self.lines: list[_Line] = []
        self.local: set[int] = set()
        self.call: int | None = None
        self.inputs = {slot: f"i{position}" for position, slot in enumerate(prepared.recording.inputs)}
        self.add(", ".join(self.inputs.values()) + ", = I")

    def add(self, text: str, names: Sequence[str] = ()) -> None:
        self.lines.append(_Line(text, self.call, tuple(names)))

    def name(self, slot: int) -> str:
        if slot in self.prepared.fixed:
            return f"g{slot}"
        return self.inputs.get(slot, f"t{slot}")

    def need(self, slot: int) -> None:
        """Make ``slot`` a local variable, by the views that lead to it."""
        pending = [slot]
        while pending:
            now = pending[-1]
            if not self._is_missing(now):
                pending.pop()
                continue
            made = self.prepared.maker[now]
            missing = [read for read in made.step.reads if self._is_missing(read)]
            if missing:
                pending += missing
            else:
                self.run(made, made.step)
                pending.pop()

    def _is_missing(self, slot: int) -> bool:
        return slot not in self.prepared.fixed and slot not in self.inputs and slot not in self.local

    def allocate(self, slot: int) -> None:
        """Write the allocation of a tensor that calls fill in part."""
        ref = self.prepared.recording.refs[slot]
        empty, dtype = self.constant(torch.empty_strided), self.constant(getattr(torch, ref.dtype))
        self.local.add(slot)
        self.add(f"t{slot} = {empty}({ref.sizes}, {ref.strides}, dtype={dtype})", [f"t{slot}"])

    def issue(self, one: PreparedStep) -> None:
        """Write a call, after the views it needs; to its buffer where it has one."""
        for slot in one.step.reads:
            self.need(slot)
        into_buffer = one.filling is not None and one.step.outputs[0] in self.prepared.fixed
        self.run(one, one.filling if into_buffer and one.filling else one.step)

    def run(self, one: PreparedStep, step: Step) -> None:
        """Write ``step``, whose reads are there."""
        function = self.constant(step.func)
        words = [self.value(arg) for arg in step.args] + [f"{name}={self.value(arg)}" for name, arg in step.kwargs]
        text = f"{function}({', '.join(words)})"
        names = [self.name(slot) for slot in step.reads if slot in self.local]
        targets = [f"t{slot}" if slot >= 0 and slot not in self.prepared.fixed else "" for slot in step.outputs]
        self.local |= {slot for slot, target in zip(step.outputs, targets, strict=True) if target}
        made = [target for target in targets if target]
        if one.shape == "nested":
            text = f"flat({text})"
        if not made:
            self.add(text, names)
        elif one.shape == "tensor":
            self.add(f"{made[0]} = {text}", names + made)
        else:
            unpacked = ", ".join(target or "_" for target in targets)
            self.add(f"{unpacked}, = {text}" + ("; del _" if "" in targets else ""), names + made)

    def value(self, arg: Any) -> str:
        if type(arg) is Slot:
            return self.name(arg.index)
        if arg is None or type(arg) in (bool, int, str) or (type(arg) is float and math.isfinite(arg)):
            return repr(arg)
        if type(arg) is list:
            return f"[{', '.join(self.value(item) for item in arg)}]"
        if type(arg) is tuple:
            return f"({''.join(self.value(item) + ', ' for item in arg)})"
        return self.constant(arg)

    def constant(self, value: Any) -> str:
        name = f"k{id(value)}"  # the namespace keeps it alive, so that its id stays its own
        self.namespace[name] = value
        return name

    def function(self, name: str) -> Lines:
        """Compile. Each variable is deleted on the line of its last use, which frees its memory."""
        last = {used: index for index, line in enumerate(self.lines) for used in line.names}
        gone: dict[int, list[str]] = {}
        for used, index in last.items():
            gone.setdefault(index, []).append(used)
        source = [f"def {name}(I):"]
        calls = {}
        for index, line in enumerate(self.lines):
            drop = f"; del {', '.join(gone[index])}" if index in gone and not line.text.startswith("return") else ""
            source.append(f"    {line.text}{drop}")
            if line.call is not None:
                calls[len(source)] = line.call
        exec(compile("\n".join(source) + "\n", f"<host replay: {name}>", "exec"), self.namespace)
        function = self.namespace.pop(name)
        assert isinstance(function, FunctionType)
        return Lines(function, calls)


def _emit(prepared: PreparedSteps, namespace: dict[str, Any], *, timed: bool) -> Lines:
    """Write the allocations, every call with the views it needs, and the outputs."""
    writer = _Writer(prepared, namespace)
    for one in prepared.steps:
        for slot in one.step.outputs if one.allocates else ():
            if slot not in prepared.fixed:
                writer.allocate(slot)
    for one in prepared.steps:
        writer.call = call = one.step.call
        if call is None:
            continue
        if timed:
            writer.add(f"A[{call}] = now()")
        writer.issue(one)
        if timed:
            writer.add(f"B[{call}] = now()")
    writer.call = None
    outputs = prepared.recording.outputs
    for slot in outputs:
        writer.need(slot)
    names = [writer.name(slot) for slot in outputs]
    writer.add(f"return [{', '.join(names)}]", [writer.name(slot) for slot in outputs if slot in writer.local])
    return writer.function("replay" + "_timed" * timed)
