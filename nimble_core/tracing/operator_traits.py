"""What operators do to their arguments: which they write, which results they cannot know beforehand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from nimble_core.ir.program import Role
from nimble_core.torch_compat.dispatch import COMPOSITE, OpOverload, has_kernel
from nimble_core.tracing.kept_operators import eager_form
from nimble_core.tracing.recording import Slot, flat_tensors
from nimble_core.utils.errors import CaptureError

__all__ = [
    "INDEXED",
    "Shown",
    "Traits",
    "argument_texts",
    "copies_to_host",
    "draws_numbers",
    "fills",
    "fills_where_true",
    "has_memory",
    "is_view",
    "makes_memory_only",
    "masks_among",
    "only_metadata",
    "overlaps_itself",
    "owned_tensors",
    "parts_of",
    "shape_depends_on_data",
    "shown_by",
    "storage_address",
    "traits_of",
    "view_form",
    "written_arguments",
    "written_tensors",
    "written_where_true",
]


# Operators that write tensors their schema does not mark: (operator, arguments written, argument that says whether).
_SILENT_WRITES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "aten::native_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::cudnn_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::miopen_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::batch_norm_update_stats": (("running_mean", "running_var"), ""),
    "aten::batch_norm_gather_stats": (("running_mean", "running_var"), ""),
    "aten::batch_norm_gather_stats_with_counts": (("running_mean", "running_var"), ""),
}


_PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
INDEXED = ("aten::index", *_PUTS)
_COPIES = ("aten::copy_", "aten::_copy_from")
_CHECKS = "aten::_linalg_check_errors"
_OF_LAYOUT = ("aten::_assert_tensor_metadata", "aten::record_stream")
"""Return nothing, and would find in each replay what the recording found."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What schema and tags of an operator say about every call of it, kept since asking torch takes microseconds.

    Args:
        name: e.g. ``"aten::addmm"``.
        text: e.g. ``"aten.addmm.default"``.
        arguments: their names.
        seeded: whether it may draw random numbers.
        changes_view: whether it changes the shape of its argument, not the memory.
        looks: whether it gives the host a value computed on the device.
        memory_only: whether it makes memory without content.
        doubtful: whether a call of it may make the host wait. Only then, or with a ``device`` among its arguments, are
            the arguments worth a look.
        puts: whether it writes at indices: ``x[index] = value``.
        checks: whether it returns nothing: what it is called for, as a check that raises, shows in no tensor.
    """

    name: str
    text: str
    arguments: tuple[str, ...]
    seeded: bool
    changes_view: bool
    looks: bool
    memory_only: bool
    doubtful: bool
    puts: bool
    checks: bool


@cache
def traits_of(func: Any) -> Traits:
    """Return the traits of an operator."""
    name, tags = func._schema.name, func.tags
    looks = torch.Tag.data_dependent_output in tags
    return Traits(
        name=name,
        text=str(func),
        arguments=tuple(argument.name for argument in func._schema.arguments),
        seeded=torch.Tag.nondeterministic_seeded in tags,
        changes_view=torch.Tag.inplace_view in tags,
        looks=looks,
        memory_only=makes_memory_only(func),
        doubtful=looks or torch.Tag.dynamic_output_shape in tags or name in (*INDEXED, *_COPIES, _CHECKS),
        puts=name in _PUTS,
        checks=not func._schema.returns and name not in _OF_LAYOUT,
    )


def parts_of(func: Any) -> Callable[..., Any] | None:
    """Return what decomposes ``func`` where a dispatch mode sees a composite, or kept, operator whole; None elsewhere.

    Autograd decomposes ``linear`` or ``batch_norm`` before a mode sees them, but ``inference_mode`` leaves autograd
    out. A mode that calls this with itself entered sees the same operators in both.
    """
    return eager_form(func) or (_composite(func) if torch.is_inference_mode_enabled() else None)


@cache
def _composite(func: Any) -> Callable[..., Any] | None:
    if not isinstance(func, OpOverload):
        return None
    own = any(has_kernel(func.name(), backend) for backend in ("CPU", "CUDA"))
    return partial(func._op_dk, COMPOSITE) if has_kernel(func.name(), COMPOSITE) and not own else None


@dataclass(frozen=True, slots=True)
class _Written:
    """Which arguments an operator writes: ``(position, name)`` each.

    Args:
        marked: by its schema.
        silent: by the table of operators whose schema is silent, where
        condition: this argument is true; always where there is none.
    """

    marked: tuple[tuple[int, str], ...]
    silent: tuple[tuple[int, str], ...]
    condition: tuple[int, str]


@cache
def _written_by(func: Any) -> _Written:
    arguments = func._schema.arguments
    order = [argument.name for argument in arguments]
    silent, condition = _SILENT_WRITES.get(func._schema.name, ((), ""))
    return _Written(
        marked=tuple(
            (position, argument.name)
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        silent=tuple((order.index(name), name) for name in silent if name in order),
        condition=(order.index(condition) if condition in order else len(order), condition),
    )


@cache
def view_form(func: Any) -> Any:
    """Return the operator that makes a new view where ``func`` changes its argument: ``squeeze`` for ``squeeze_``."""
    packet = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::").removesuffix("_"), None)
    view = getattr(packet, func._overloadname, None)
    return view if view is not None and view._schema.returns[0].alias_info is not None else None


_LIKE = {"zeros_like", "ones_like", "full_like"}
_FILLS = {
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
}


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return tensors that this call writes, by its schema or by the table of operators whose schema is silent."""
    written = written_arguments(func, args, kwargs)
    return flat_tensors(written) if written else written


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments, lists among them, whose tensors this call of ``func`` writes."""
    written = _written_by(func)
    places = written.marked
    if written.silent and _argument(written.condition, args, kwargs, True):
        places += written.silent
    return [_argument(place, args, kwargs, None) for place in places]


def _argument(place: tuple[int, str], args: tuple[Any, ...], kwargs: Mapping[str, Any], default: Any) -> Any:
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name, default)


@cache
def is_view(func: Any) -> bool:
    """Whether an operator's result shares memory with an argument that it does not write."""
    returned = getattr(func, "_schema", None) and func._schema.returns
    shares = (one.alias_info is not None and not one.alias_info.is_write for one in returned or ())
    return func is operator.getitem or any(shares)


def makes_memory_only(func: Any) -> bool:
    """Whether ``func`` makes memory without content: ``empty`` and its like."""
    return bool(func._schema.name.startswith(("aten::empty", "aten::new_empty")))


@cache
def only_metadata(func: Any) -> bool:
    """Whether ``func`` asks its first argument for its form, never for its numbers: ``new_zeros``, ``ones_like``."""
    name = getattr(getattr(func, "_schema", None), "name", "").removeprefix("aten::")
    return name in _LIKE or name.startswith(("new_", "empty_like"))


@cache
def fills(func: Any) -> bool:
    """Whether ``func`` writes random numbers into its first argument, whatever that holds: ``normal_`` and its like."""
    name = func._schema.name.removeprefix("aten::")
    return func._overloadname != "Tensor" and name in _FILLS


def _only_mask(func: Any, args: tuple[Any, ...]) -> tuple[int, torch.Tensor] | None:
    """Return, of ``x[mask] = value`` with one mask and no other index, its dimension and the mask; else None."""
    if not traits_of(func).puts or any(args[3:]):  # the fourth: add to what is there
        return None
    found = [(at, one) for at, one in enumerate(args[1]) if one is not None]
    return found[0] if len(found) == 1 and found[0][1].dtype in (torch.bool, torch.uint8) else None


def fills_where_true(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether ``func`` is ``x[mask] = number``, which torch takes as ``masked_fill_``: it counts no places.

    It does where one mask is all that indexes, and the number lies on the host.
    """
    found = _only_mask(func, args)
    one = found is not None and args[2].numel() == 1 and args[2].device.type == "cpu"
    return found is not None and one and found[1].device == args[0].device


def written_where_true(func: Any, args: tuple[Any, ...]) -> Callable[[], torch.Tensor] | None:
    """Return what does ``x[mask] = value``, for one value at all places, without counting these; None otherwise.

    Torch itself counts the places, since there could be a value for each, and the host would wait for that.
    """
    found = _only_mask(func, args)
    if found is None:
        return None
    (before, mask), into, value = found, args[0], args[2]
    alike = value.dtype == into.dtype and value.device == into.device == mask.device
    behind = into.dim() - before - mask.dim()
    sizes = [1] * (before + 1 + behind - value.dim()) + list(value.shape)
    if not alike or mask.dtype != torch.bool or mask.shape != into.shape[before : before + mask.dim()]:
        return None
    if len(sizes) != before + 1 + behind or sizes[before] != 1:  # one value for each place
        return None
    sizes[before : before + 1] = [1] * mask.dim()
    if any(size not in (1, full) for size, full in zip(sizes, into.shape, strict=True)):
        return None

    def write() -> torch.Tensor:
        aten, inside = torch.ops.aten, mask
        for _ in range(behind):
            inside = aten.unsqueeze.default(inside, -1)
        target = into if func._schema.name.endswith("_") else aten.clone.default(into)
        spread = aten.reshape.default(value, sizes)
        made: torch.Tensor = aten.copy_.default(target, aten.where.self(inside, spread, into))
        return made

    return write


def masks_among(indices: Any) -> list[torch.Tensor]:
    """Return those of the indices that are masks."""
    return [index for index in flat_tensors(indices) if index.dtype in (torch.bool, torch.uint8)]


def shape_depends_on_data(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host would have to look at data to know the shape of this call's result."""
    name = func._schema.name
    if name in INDEXED:
        # Only a mask has to be counted; integer indices give a shape that is known.
        return bool(masks_among(args[1])) and not fills_where_true(func, args)
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None and torch.Tag.dynamic_output_shape in func.tags
    if func is torch.ops.aten._ctc_loss.default:  # lengths are given in numbers
        return False
    return torch.Tag.dynamic_output_shape in func.tags


def copies_to_host(
    func: Any, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether this call brings device data to the host."""
    if not any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    if func._schema.name in _COPIES:
        return isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu"
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


_SEEDS = ("philox_seed", "philox_offset", "rng_state", "unused")
"""Names of such results in torch's schemas."""


def draws_numbers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``func``, which may draw random numbers, does.

    Not outside training, nor without dropout, nor where it is given the state that its forward drew from.
    """
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    if not given.keys().isdisjoint(("philox_seed", "rng_state")):
        return False
    given |= dict(zip(given, args, strict=False)) | dict(kwargs)
    if any(given.get(name) is False for name in ("train", "training")):
        return False
    return not any(given.get(name, 1.0) == 0.0 for name in ("dropout_p", "dropout"))


def seeds_among(func: Any, result: Any) -> list[torch.Tensor]:
    """Return results that keep the seeds of attention's dropout for the backward."""
    values = result if isinstance(result, tuple) else (result,)
    pairs = zip(func._schema.returns, values, strict=False)
    return [value for one, value in pairs if one.name in _SEEDS and isinstance(value, torch.Tensor)]


def argument_texts(
    names: Sequence[str], args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], storage_of: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    """``(name, text)`` of every argument; tensors read ``%<storage>``."""

    def text(value: Any) -> str:
        if type(value) is Slot:
            return f"%{storage_of[value.index]}"
        if type(value) is list:
            quick = repr(value)
            if "(" not in quick:  # no slot and no tuple in it
                return quick
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join([text(item) for item in value]) + "]"
        return repr(value)

    return (
        *[(name, text(value)) for name, value in zip(names, args, strict=False)],
        *[(name, text(value)) for name, value in kwargs],
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain window on memory (sparse and nested ones are not)."""
    return tensor.layout is torch.strided and not tensor.is_nested


def storage_address(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor, while that memory is held. Raises CaptureError if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError) as error:
        raise CaptureError(
            f"a {type(tensor).__name__} with layout {tensor.layout} has no memory of its own",
            fix="use dense tensors in the prepared module",
        ) from error


Shown = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, bool | None, bool]
"""What a tensor shows: identity of the memory, offset in elements, sizes, strides, type, whether conjugate (None if not
complex), whether negative."""


def shown_by(tensor: torch.Tensor) -> Shown:
    """Return what ``tensor`` shows now. Raises CaptureError if it has no memory."""
    home, dtype = storage_address(tensor), tensor.dtype
    conjugate = tensor.is_conj() if dtype.is_complex else None
    return home, int(tensor.storage_offset()), tensor.shape, tensor.stride(), dtype, conjugate, tensor.is_neg()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements share memory, as those of an expanded tensor do: it cannot be written in place."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def owned_tensors(model: Callable[..., Any]) -> Iterator[tuple[Role, str, torch.Tensor]]:
    """``(role, name, tensor)`` of every parameter and buffer; nothing for a function."""
    if isinstance(model, torch.nn.Module):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield "parameter", name, parameter
        for name, buffer in model.named_buffers(remove_duplicate=False):
            yield "buffer", name, buffer
