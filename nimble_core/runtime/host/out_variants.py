"""Whether a call does in memory that it is given what it does in memory of its own.

Most of torch's variants that fill given tensors (``out=``) do; some leave a result unwritten where two of them share a
storage, or write beyond the tensor that they were given. So each is tried before it is trusted with an arena.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from nimble_core.scheduling.memory_planner import ALIGNMENT
from nimble_core.tracing.recording import Recording, Slot, Step, fill
from nimble_core.tracing.rng_state import alone
from nimble_core.tracing.strides import elements_once, extent

__all__ = ["Trial", "accept", "accepted", "refuse", "refused"]

_GUARD = 0xA5
_GUARD_NBYTES = 8 * ALIGNMENT
_NAN = 0xFF
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOOKED_AT = 1 << 20
_REMEMBERED = 10_000

_refused: set[Hashable] = set()
_accepted: set[Hashable] = set()


class _Told(torch.autograd.Function):
    """Calls a function inside of a binding of torch's that hands warnings to Python.

    Operators' own entry has none: torch would print them, whatever Python's filters are.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[], object]) -> None:
        """Call it."""
        run()


class Trial:
    """One call, tried between guards. Made before the call itself runs, which may change what it reads.

    Args:
        step: the call.
        tensors: what it reads, by slot.
        written: slots of ``step.reads`` that it is known to write, as batch norm its running statistics.
    """

    def __init__(self, step: Step, tensors: Mapping[int, torch.Tensor], written: Collection[int]) -> None:
        self.reads = {slot: tensors[slot] for slot in step.reads}
        self.was = {slot: _bits(self.reads[slot]).clone() for slot in written}
        self.kept = {slot: _looked_at(tensor).clone() for slot, tensor in self.reads.items() if slot not in self.was}
        own = dict(step.kwargs).get("generator")
        may_draw = torch.Tag.nondeterministic_seeded in step.func.tags if hasattr(step.func, "tags") else alone()
        self.void = may_draw and not alone()
        torchs = (torch.default_generator,) if may_draw else ()
        self.generators = (*torchs, *((own,) if own is not None else ()))
        self.states = [one.get_state() for one in self.generators]

    def passed(self, into: Step, made: Mapping[int, torch.Tensor]) -> bool:
        """Whether ``into`` leaves ``made`` in the memory it is given, bit for bit, and nothing else anywhere.

        Generators are left as the call itself left them, and so is what it reads, but for large tensors, of which only
        a part is looked at.

        Args:
            into: the call, with a slot for each tensor to fill.
            made: what the call itself has returned since, by slot.
        """
        if self.void:  # what other threads draw meanwhile would be drawn again
            return False
        before = {slot: _as_it_was(self.reads[slot], bits) for slot, bits in self.was.items()}
        memory, given = _guarded(made)
        places = [_place(tensor) for tensor in given.values()]
        tensors = self.reads | before | given
        after = [one.get_state() for one in self.generators]
        self._set(self.states)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a result is resized
                _Told.apply(  # type: ignore[no-untyped-call]  # torch's has no types
                    partial(
                        into.func,
                        *fill(list(into.args), tensors),
                        **{name: fill(one, tensors) for name, one in into.kwargs},
                    )
                )
        except Exception:  # of any kind: it does not do what the call itself did
            right = False
        else:
            right = (
                [_place(tensor) for tensor in given.values()] == places
                and _same([one.get_state() for one in self.generators], after)
                and _guards_hold(memory, given)
                and _same(map(_bits, given.values()), map(_bits, made.values()))
                and _same(map(_bits, before.values()), (_bits(self.reads[slot]) for slot in before))
            )
        finally:
            self._set(after)
        return self._reads_left() and right

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            if not torch.equal(state, generator.get_state()):
                generator.set_state(state)

    def _reads_left(self) -> bool:
        """Whether what the call only reads is as it was; it is from here on: it may be a parameter."""
        left = True
        for slot, kept in self.kept.items():
            bits = _looked_at(self.reads[slot])
            if not torch.equal(bits, kept):
                left = False
                once = elements_once(bits)
                once.copy_(kept[tuple(map(slice, once.shape))])
        return left


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, with one dimension more."""
    unit = min(tensor.itemsize, 8)
    units = tensor.itemsize // unit
    return torch.empty(0, dtype=_INTEGERS[unit]).set_(
        tensor.untyped_storage(),
        int(tensor.storage_offset()) * units,
        (*tensor.shape, units),
        (*(stride * units for stride in tensor.stride()), 1),
    )


def _looked_at(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, if they are many every so many rows of them: to look at all would take longer than most calls."""
    bits = _bits(tensor)
    step = -(-bits.numel() // _LOOKED_AT)
    if step <= 1:
        return bits
    sizes, strides = tuple(bits.shape), bits.stride()
    rows = max(range(len(sizes)), key=lambda dim: (sizes[dim] >= step, strides[dim]))
    return bits[(slice(None),) * rows + (slice(None, None, step),)]


def _as_it_was(tensor: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    _bits(made).copy_(bits)
    return made


def _window(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from its first element to its last."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (extent(tensor),), (1,))


def _guarded(made: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Memory of one storage, and a tensor in it for each of ``made``, with guards before, between and behind them.

    Every byte in them is another than it has to become; floating-point numbers are NaN: what adds to them shows. The
    storage ends with the last of them and cannot grow: an arena must not be resized.
    """
    windows = {slot: _window(tensor) for slot, tensor in made.items()}
    starts, end, last = {}, 0, 0
    for slot, window in windows.items():
        starts[slot] = end + _GUARD_NBYTES
        last = starts[slot] + len(window)
        end = starts[slot] + -(-len(window) // ALIGNMENT) * ALIGNMENT
    memory = torch.full((end + _GUARD_NBYTES,), _GUARD, dtype=torch.uint8)
    storage = _of_fixed_size(memory, last)
    given = {}
    for slot, tensor in made.items():
        own = memory[starts[slot] : starts[slot] + len(windows[slot])]
        torch.ne(windows[slot], _NAN, out=own.view(torch.bool))
        own.neg_()  # 1 becomes 0xFF
        given[slot] = torch.empty(0, dtype=tensor.dtype).set_(
            storage, starts[slot] // tensor.itemsize, tensor.shape, tensor.stride()
        )
    return memory, given


def _of_fixed_size(memory: torch.Tensor, nbytes: int) -> torch.UntypedStorage:
    """A storage of the first bytes of ``memory``, which has to outlive it."""
    return torch.frombuffer(
        (ctypes.c_uint8 * max(nbytes, 1)).from_address(memory.data_ptr()), dtype=torch.uint8
    ).untyped_storage()


def _guards_hold(memory: torch.Tensor, given: Mapping[int, torch.Tensor]) -> bool:
    end, untouched = 0, torch.full((_GUARD_NBYTES + ALIGNMENT,), _GUARD, dtype=torch.uint8)
    for tensor in given.values():
        start = int(tensor.storage_offset()) * tensor.itemsize
        if not torch.equal(memory[end:start], untouched[: start - end]):
            return False
        end = start + len(_window(tensor))
    return torch.equal(memory[end:], untouched[: len(memory) - end])


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), storage.data_ptr(), storage.nbytes()


def _same(some: Any, others: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# -- what is known by now ------------------------------------------------------------------------------------------


def refused(step: Step, recording: Recording) -> bool:
    """Whether a call like this one has failed a trial in this process."""
    return bool(_refused) and _kind(step, recording) in _refused


def refuse(step: Step, recording: Recording) -> None:
    """Note that it has failed one."""
    _refused.add(_kind(step, recording))


def accepted(step: Step, recording: Recording, tensors: Mapping[int, torch.Tensor]) -> bool:
    """Whether a call like this one has passed a trial in this process."""
    return (_kind(step, recording), _lazy(step, tensors)) in _accepted


def accept(step: Step, recording: Recording, tensors: Mapping[int, torch.Tensor]) -> None:
    """Note that it has passed one."""
    if len(_accepted) >= _REMEMBERED:
        _accepted.clear()
    _accepted.add((_kind(step, recording), _lazy(step, tensors)))


def _lazy(step: Step, tensors: Mapping[int, torch.Tensor]) -> tuple[tuple[bool, bool], ...]:
    """What torch only notes on tensors, and computes when they are read."""
    return tuple((tensors[slot].is_conj(), tensors[slot].is_neg()) for slot in step.reads)


def _kind(step: Step, recording: Recording) -> Hashable:
    """What calls of one operator have in common that fill memory in the same way."""
    places: dict[int, int] = {}
    told = partial(_told, recording=recording, places=places)
    return step.func, tuple(map(told, step.args)), tuple((name, told(arg)) for name, arg in step.kwargs)


def _told(arg: Any, recording: Recording, places: dict[int, int]) -> Hashable:
    if type(arg) is Slot:
        ref = recording.refs[arg.index]
        return places.setdefault(arg.index, len(places)), ref.dtype, ref.sizes, ref.strides
    if isinstance(arg, (list, tuple)):
        return tuple(_told(one, recording, places) for one in arg)
    return type(arg), repr(arg)
