"""Is a model static? Two recordings on different input values, compared call by call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import gcd
from traceback import walk_tb
from typing import Any, Literal, TypeVar

import torch

from nimble_core.ir.program import Call, Program
from nimble_core.tracing.operator_traits import storage_address
from nimble_core.tracing.provenance import place_of
from nimble_core.tracing.pytree import Structure, same_structure, structure_difference
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.strides import elements_once, reach
from nimble_core.utils.errors import CaptureError, NimbleError, NotStaticError, first_line

__all__ = [
    "OF_VALUES",
    "changed_constant",
    "check_outputs",
    "check_static",
    "on_other_values",
    "other_values",
]

T = TypeVar("T")

OF_VALUES = (RuntimeError, IndexError)
"""What torch raises where it does not accept a value."""
How = Literal["", "scaled", "moved", "contrary"]
_WAYS: tuple[How, ...] = ("", "scaled", "moved")

_SHUFFLED = 1 << 16
"""Elements to be shuffled at most: with 5 million that would take 0.2 s. More are dealt out in a fixed stride."""


def on_other_values(
    run: Callable[[list[torch.Tensor]], T], tensors: Sequence[torch.Tensor], seed: int = 0
) -> tuple[list[torch.Tensor], T]:
    """Run on ``other_values``; where torch refuses those (a matrix that has no inverse), on more and more alike ones.

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
    """Other inputs of the same kind: the elements in another order, floating ones also scaled by 0.5 to 1.5.

    Every integer stays a value the model has already accepted (indices stay in range), and integers in ascending order
    (offsets, positions) stay as they are where another input changes. Numbers none of which is beyond 1 are scaled by
    a third to 1: they may be probabilities, of which on CUDA one out of range ends the process's use of the device.
    Strides stay, and tensors that share memory do so again.

    Args:
        tensors: inputs.
        seed: of order and scale.
        how: ``"scaled"``: floating ones are only scaled, by one factor for each: matrices that have an inverse keep it.
            ``"moved"``: elements have another order, and no other value. ``"contrary"``: what orders and scales leave
            alone changes, as signs, sums and extremes: floating ones are negated, flags flipped, integers halved, the
            last one first, and ones where all are zeros. A model need not take these.
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
    if flat.dtype is torch.bool:
        return ~flat
    if flat.is_floating_point() or flat.is_complex():
        return (-(flat.float() if flat.itemsize == 1 else flat)).to(flat.dtype)
    half = (flat.to(torch.int64) // 2).flip(0)
    return torch.where(flat.to(torch.int64).any(), half, half + 1).to(flat.dtype)


def _other(tensor: torch.Tensor, keep: bool, how: str, generator: torch.Generator) -> torch.Tensor:
    core = elements_once(tensor)  # an expanded dimension stays one
    other = core.reshape(-1)
    if not keep:
        other = other[_order(other.numel(), generator, core.device)]
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


def _order(count: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Positions below ``count``, each once, in an order in which neighbours do not stay neighbours."""
    host = torch.device("cpu")  # whatever the default device is
    if count <= _SHUFFLED:
        return torch.randperm(count, generator=generator, device=host).to(device)
    first, wanted = torch.randint(count // 2, (2,), generator=generator, device=host).tolist()
    step = next(one for one in range(count // 3 + wanted, 2 * count) if gcd(one, count) == 1)
    order: torch.Tensor = (torch.arange(count, device=device) * step + first) % count
    return order


def _ascending(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return False
    flat = tensor.detach().reshape(-1)
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch compares no others of these
        flat = flat.to(torch.int64)
    return bool((flat[1:] >= flat[:-1]).all())


def check_static(first: Program, second: Program) -> None:
    """Compare two recordings of one model on different input values.

    Raises:
        NotStaticError: naming the first call that differs, with its module path and source line.
        CaptureError: a call takes an object that cannot be compared.
    """
    for a, b in zip(first.calls, second.calls, strict=False):
        if a is b or (a.operator == b.operator and a.arguments == b.arguments and _shapes(a) == _shapes(b)):
            continue
        if a.operator != b.operator:
            how = f"{a.operator} in one run, {b.operator} in the other"
        else:
            changed = [f"{x[0]}={x[1]} / {y[1]}" for x, y in zip(a.arguments, b.arguments, strict=False) if x != y]
            how = f"{a.operator} with other arguments ({', '.join(changed)[:200] or 'shapes'})"
        packed = next((x[0] for x, y in zip(a.arguments, b.arguments, strict=False) if x != y and _PACKED in x[1]), "")
        if packed and a.operator == b.operator:
            raise CaptureError(
                f"{a.operator} takes an object of TorchScript ({packed}), such as packed weights: nothing tells "
                "whether it is the same in every run",
                where=str(a),
                fix="leave that part, such as modules of torch.ao.quantization, out of the prepared module",
            )
        fix = "remove the branch on data or random state, or prepare only the static part"
        given, held = _given_and_held(a, first, b, second)
        if given:
            how += f": it reads {given} in one run, {held} in the other"
            fix = f"if {given} is memory that the model itself holds, prepare with {given}.clone(); else {fix}"
        raise NotStaticError(
            f"the model is not static: on other input values call {a.index} is {how}", where=str(a), fix=fix
        )
    if len(first.calls) != len(second.calls):
        longer = max(first.calls, second.calls, key=len)
        extra = longer[min(len(first.calls), len(second.calls))]
        raise NotStaticError(
            f"the model is not static: {len(first.calls)} calls in one run, {len(second.calls)} on other input values",
            where=str(extra),
            fix="remove the branch on data or random state, or prepare only the static part",
        )


_PACKED = "<torch.ScriptObject object at "
_STORAGE = re.compile(r"(?<![^\[ ])%(\d+)(?![^,\]])")


def _given_and_held(a: Call, first: Program, b: Call, second: Program) -> tuple[str, str]:
    """The first input that a call reads where that of the other program reads memory of the model; empty if none.

    So it is where the inputs of the first recording were weights, or other tensors that the model reads by itself.
    """
    for (_, one), (_, other) in zip(a.arguments, b.arguments, strict=False):
        for was, now in zip(_STORAGE.findall(one), _STORAGE.findall(other), strict=False):
            given, held = first.storages[int(was)], second.storages[int(now)]
            if given.role == "input" and held.role in ("parameter", "buffer", "constant"):
                return given.name, f"{held.role} {held.name}".strip()
    return "", ""


def check_outputs(first: Structure, second: Structure) -> None:
    """Compare what is around the output tensors of two recordings of one model on different input values.

    Raises:
        NotStaticError: naming the first place that differs.
    """
    if not same_structure(first, second):
        found = structure_difference(first, second, "output")
        raise NotStaticError(
            f"the model is not static: on other input values {found.path} is {found.now}, not {found.was}",
            where=found.path,
            fix="return tensors: what Python computes from them is not computed again by a replay",
        )


def changed_constant(first: Recording, second: Recording) -> str:
    """Where the first constant is used that is another value in another recording; empty if there is none.

    A constant is a tensor that no seen call made. One that changes with the inputs was computed out of sight: in
    numpy, in Python numbers, in a compiled region.
    """
    for slot, tensor in first.given.items():
        storage = first.storage_of[slot]
        other = second.given.get(slot)
        if first.program.storages[storage].role != "constant" or other is None:
            continue
        if storage_address(tensor) != storage_address(other) and not _identical(tensor, other):
            users = [call for call in first.program.calls if any(a.ref.storage == storage for a in call.accesses)]
            return str(users[0]) if users else "an output"
    return ""


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if a.is_floating_point() else torch.equal(a, b)


def _shapes(call: Call) -> list[tuple[Any, ...]]:
    return [(access.ref.sizes, access.ref.strides, access.ref.dtype, access.write) for access in call.accesses]
