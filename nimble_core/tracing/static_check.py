"""Is a model static? Compare two recordings on different input values call by call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from traceback import walk_tb
from typing import Literal, TypeVar

import torch

from nimble_core.ir.program import Call, Program, Storage, TensorRef
from nimble_core.tracing.operator_traits import storage_address
from nimble_core.tracing.provenance import place_of
from nimble_core.tracing.pytree import Structure, leaf_paths, structure_difference
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.strides import elements_once, reach
from nimble_core.utils.errors import CaptureError, NimbleError, NotStaticError, first_line

__all__ = [
    "OF_VALUES",
    "changed_constant",
    "check_outputs",
    "check_static",
    "identical",
    "on_other_values",
    "other_values",
]

T = TypeVar("T")

OF_VALUES = (RuntimeError, IndexError)
"""What torch raises where it does not accept a value."""
How = Literal["", "scaled", "moved", "contrary"]
_WAYS: tuple[How, ...] = ("", "scaled", "moved")


def on_other_values(
    run: Callable[[list[torch.Tensor]], T], tensors: Sequence[torch.Tensor], seed: int = 0
) -> tuple[list[torch.Tensor], T]:
    """Run on ``other_values``, or where torch refuses those, as a matrix without an inverse, on more similar ones.

    Args:
        run: the model, which it leaves as it was where it raises.
        tensors: inputs that it has already run on.
        seed: of the values.

    Returns:
        The values, and what ``run`` made of them.

    Raises:
        NotStaticError: torch refuses all.
        Exception: any other of ``run``.
    """
    refused: Exception | None = None
    for how in _WAYS:
        values = other_values(tensors, seed, how)
        try:
            return values, run(values)
        except (NimbleError, torch.OutOfMemoryError):
            raise
        except OF_VALUES as error:
            refused = refused or error
    assert refused is not None
    raise NotStaticError(
        "the model runs on the given values, but not on the same in another order or scaled, as it is tried on: "
        f"{type(refused).__name__}: {first_line(refused)}",
        where=_raised_at(refused),
        fix="leave what takes only some values outside of what is prepared",
    ) from refused


def other_values(tensors: Sequence[torch.Tensor], seed: int = 0, how: How = "") -> list[torch.Tensor]:
    """Return other inputs of the same kind: elements in another order, floating ones also scaled by 0.5 to 1.5.

    Integers stay values that the model has already accepted (indices stay in range); those in ascending order, such as
    offsets, stay as they are where another input changes. Numbers up to 1 are scaled by a third to 1: they may be
    probabilities, and on CUDA one out of range ends the process's use of the device. Strides stay, and tensors that
    share memory do so again.

    Args:
        tensors: inputs.
        seed: of order and scale.
        how: ``"scaled"``: floating ones are only scaled, by one factor for each: matrices that have an inverse keep it.
            ``"moved"``: elements have another order, and no other value. ``"contrary"``: what orders and scales leave
            alone changes, as signs, sums and extremes, and every element: floating ones are negated, flags flipped,
            integers halved, mostly the last one first; zeros become ones. A model need not take these.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    kept = [_ascending(tensor) for tensor in tensors]
    sharing: dict[tuple[int, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        sharing.setdefault((storage_address(tensor), tensor.dtype), []).append(position)
    made = list(tensors)
    for positions in sharing.values():
        shared = [tensors[position].detach() for position in positions]
        keep = how in ("scaled", "contrary") or (not all(kept) and all(kept[position] for position in positions))
        if len({(one.storage_offset(), one.shape, one.stride()) for one in shared}) == 1:
            others = [_other(shared[0], keep, how, generator)] * len(shared)
        else:
            low = min(one.storage_offset() for one in shared)
            high = max(one.storage_offset() + reach(one) for one in shared)
            base = _other(shared[0].as_strided((high - low,), (1,), low), keep, how, generator)
            others = [base.as_strided(one.shape, one.stride(), one.storage_offset() - low) for one in shared]
        for position, other in zip(positions, others, strict=True):
            made[position] = other
    return made


def _contrary(flat: torch.Tensor) -> torch.Tensor:
    """Change every element, so that a number that the host reads anywhere shows."""
    if flat.dtype is torch.bool:
        return ~flat
    if flat.is_floating_point() or flat.is_complex():
        wide = flat.float() if flat.itemsize == 1 else flat
        return torch.where(wide == 0, torch.ones_like(wide), -wide).to(flat.dtype)
    whole = flat.to(torch.int64)
    half = whole.div(2, rounding_mode="trunc")
    other = half.flip(0)
    return torch.where(other == whole, torch.where(whole == 0, 1, half), other).to(flat.dtype)


def _other(tensor: torch.Tensor, keep: bool, how: str, generator: torch.Generator) -> torch.Tensor:
    core = elements_once(tensor)  # an expanded dimension stays one
    other = core.reshape(-1)
    if not keep:
        other = other[torch.randperm(other.numel(), generator=generator, device="cpu").to(core.device)]
    other = (_contrary(other) if how == "contrary" else other).reshape(core.shape)
    if how in ("", "scaled") and (core.is_floating_point() or core.is_complex()):
        shape = () if how == "scaled" else core.shape
        wide = other.float() if other.itemsize == 1 else other  # torch does not multiply numbers of eight bits
        scale = torch.rand(shape, generator=generator, device="cpu").to(core.device) + 0.5
        scale = torch.where((wide.abs() <= 1).all(), scale / 1.5, scale)  # as far apart, relative to their mean
        other = (wide * scale).to(core.dtype)
    made = torch.empty_strided(core.shape, core.stride(), dtype=core.dtype, device=core.device).copy_(other)
    return made.expand(tensor.shape)


def _raised_at(error: Exception) -> str:
    *_, (frame, _) = walk_tb(error.__traceback__)
    _, file, line = place_of(frame, {})
    return f"{file}:{line}"


def _ascending(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return False
    flat = tensor.detach().reshape(-1)
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch compares no others of these
        flat = flat.to(torch.int64)
    return bool((flat[1:] >= flat[:-1]).all())


def check_static(first: Recording, second: Recording) -> None:
    """Compare two recordings of one model on different input values, in full.

    Calls, their arguments, and what they return have to be the same windows on the same memory. Where an input is a
    part of larger memory, windows on it are compared relative to its start: that may lie elsewhere in each run.

    Raises:
        NotStaticError: naming the first call that differs, with its module path and source line, or the first output.
        CaptureError: a call takes an object that cannot be compared.
    """
    one, other = first.program, second.program
    shown, shown_then = _windows(one), _windows(other)
    known = list(map(_owner, one.storages)) == list(map(_owner, other.storages))
    seen = f"; numbers were read on the host: {first.handed_out}" if first.handed_out else ""
    for a, b in zip(one.calls, other.calls, strict=False):
        if known and a is b:
            continue
        same = a.operator == b.operator and a.arguments == b.arguments
        if not same or [(shown(x.ref), x.write) for x in a.accesses] != [
            (shown_then(x.ref), x.write) for x in b.accesses
        ]:
            raise _differing_call(a, one, b, other, seen)
    if len(one.calls) != len(other.calls):
        longer = max(one.calls, other.calls, key=len)
        extra = longer[min(len(one.calls), len(other.calls))]
        raise NotStaticError(
            f"the model is not static: {len(one.calls)} calls in one run, {len(other.calls)} on other input values"
            + seen,
            where=str(extra),
            fix=_BRANCH,
        )
    check_outputs(first.output_structure, second.output_structure)
    paths = leaf_paths(first.output_structure, "output")
    for path, ref, then in zip(paths, one.outputs, other.outputs, strict=True):
        if shown(ref) != shown_then(then):
            makers = [call for call in one.calls if any(write.storage == ref.storage for write in call.writes)]
            sized = ref.sizes != then.sizes
            what = f"of shape {list(ref.sizes)} / {list(then.sizes)}" if sized else _moved(ref, one, then, other)
            raise NotStaticError(
                f"the model is not static: on other input values {path} is {what}{seen}",
                where=f"{path}, of {makers[-1]}" if makers else path,
                fix="return it whole, and its length as a tensor" if sized else _POSITION,
            )
    if _lazy_steps(first) != _lazy_steps(second):
        raise NotStaticError(
            f"the model is not static: other tensors are conjugated or negated on other input values{seen}", fix=_BRANCH
        )


_BRANCH = "remove what differs: a branch on data, numbers drawn by Python or numpy; or prepare only the static part"
_POSITION = (
    "index with a tensor (index_select, gather, index_copy_), or choose with torch.where, instead of by a number or a "
    "branch that Python takes from data"
)
_STORAGE = re.compile(r"(?<![^\[ ])%(\d+)(?![^,\]])")
_PACKED = "<torch.ScriptObject object at "
_LAZY = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)


def _windows(program: Program) -> Callable[[TensorRef], tuple[object, ...]]:
    """Return what is comparable of a window between runs: its offset counts from the inputs that share its memory."""
    starts: dict[int, int] = {}
    for ref in program.inputs:
        starts[ref.storage] = min(starts.get(ref.storage, ref.offset), ref.offset)

    def window(ref: TensorRef) -> tuple[object, ...]:
        home, start = program.storages[ref.storage], starts.get(ref.storage, 0)
        return ref.storage, _owner(home), ref.offset - start, ref.sizes, ref.strides, ref.dtype

    return window


def _owner(home: Storage) -> tuple[str, str]:
    """Return role and name; inputs are known by their order, and may go by other names."""
    return home.role, "" if home.role == "input" else home.name


def _lazy_steps(recording: Recording) -> list[tuple[object, ...]]:
    """Return views that conjugate or negate, which shows in no window."""
    return [(step.func, step.args) for step in recording.steps if step.call is None and step.func in _LAZY]


def _moved(ref: TensorRef, first: Program, then: TensorRef, second: Program) -> str:
    """Say how two windows of the same shape differ."""
    was, now = first.storages[ref.storage], second.storages[then.storage]
    names = [f"{home.role} {home.name}".strip() for home in (was, now)]
    if _owner(was) != _owner(now):
        return f"{names[0]} in one run, {names[1]} in the other"
    if ref.storage != then.storage:
        return "another tensor"
    if (ref.strides, ref.dtype) != (then.strides, then.dtype):
        return "laid out otherwise"
    return f"another part of {names[0] if was.name else 'a tensor'}, which begins elsewhere"


def _differing_call(a: Call, first: Program, b: Call, second: Program, seen: str) -> NimbleError:
    changed = [(x, y) for x, y in zip(a.arguments, b.arguments, strict=False) if x != y]
    packed = next((x[0] for x, _ in changed if _PACKED in x[1]), "")
    if packed and a.operator == b.operator:
        return CaptureError(
            f"{a.operator} takes an object of TorchScript ({packed}), such as packed weights: nothing tells "
            "whether it is the same in every run",
            where=str(a),
            fix="leave that part, such as modules of torch.ao.quantization, out of the prepared module",
        )
    fix, shown, shown_then = _BRANCH, _windows(first), _windows(second)
    pairs = [(x.ref, y.ref) for x, y in zip(a.accesses, b.accesses, strict=False) if shown(x.ref) != shown_then(y.ref)]
    if a.operator != b.operator:
        how = f"{a.operator} in one run, {b.operator} in the other"
    elif changed or any(x.sizes != y.sizes for x, y in pairs) or not pairs:
        texts = ", ".join(f"{x[0]}={x[1]} / {y[1]}" for x, y in changed)
        how = f"{a.operator} with other arguments ({texts[:200] or 'shapes'})"
    else:
        how, fix = f"{a.operator} on {_moved(pairs[0][0], first, pairs[0][1], second)}", _POSITION
    read = [zip(_STORAGE.findall(x[1]), _STORAGE.findall(y[1]), strict=False) for x, y in changed]
    for was, now in (*chain.from_iterable(read), *((x.storage, y.storage) for x, y in pairs)):
        given, held = first.storages[int(was)], second.storages[int(now)]
        if given.role == "input" and held.role in ("parameter", "buffer", "constant"):
            # The inputs of the first recording were weights, or other tensors that the model reads by itself.
            how += f": it reads {given.name} in one run, {f'{held.role} {held.name}'.strip()} in the other"
            fix = (
                f"if {given.name} is memory that the model itself holds, prepare with {given.name}.clone(); else {fix}"
            )
            break
    return NotStaticError(
        f"the model is not static: on other input values call {a.index} is {how}{seen}", where=str(a), fix=fix
    )


def check_outputs(first: Structure, second: Structure) -> None:
    """Compare the structures around the outputs of two recordings of one model on different input values.

    Raises:
        NotStaticError: naming the first place that differs.
    """
    if found := structure_difference(first, second, "output"):
        raise NotStaticError(
            f"the model is not static: on other input values {found.path} is {found.now}, not {found.was}",
            where=found.path,
            fix="return tensors: what Python computes from them is not computed again by a replay",
        )


def changed_constant(first: Recording, second: Recording) -> str:
    """Say where the first constant is used that has another value in the other recording; empty if there is none.

    A constant is a tensor that no recorded call made. One that changes with the inputs was computed outside of torch:
    in numpy, in Python numbers, in a compiled region.
    """
    for slot, tensor in first.given.items():
        storage = first.storage_of[slot]
        other = second.given.get(slot)
        if first.program.storages[storage].role != "constant" or other is None:
            continue
        if storage_address(tensor) != storage_address(other) and not identical(tensor, other):
            users = [call for call in first.program.calls if any(a.ref.storage == storage for a in call.accesses)]
            return str(users[0]) if users else "an output"
    return ""


_ORDER, _MOST = 64.0, 0.01
"""How far sums in another order may be apart: so many roundings of the greatest number, and at most this part of it."""


def identical(a: torch.Tensor, b: torch.Tensor, *, any_order: bool = False) -> bool:
    """Return whether two tensors hold the same numbers; nan counts as equal to nan.

    Args:
        a: one.
        b: the other.
        any_order: whether they may differ as sums do whose terms were added in another order.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b) or not a.is_floating_point():
        return torch.equal(a, b)
    bound = 0.0
    if any_order and a.numel():
        bound = min(_ORDER * torch.finfo(a.dtype).eps, _MOST) * float(a.nan_to_num().abs().max())
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=bound, equal_nan=True)
