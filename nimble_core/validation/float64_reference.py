"""What the model computes in float64: the truth that eager and every replay are only rounded versions of.

Kernels other than eager's (folded, fused, merged, in TF32) round elsewhere, so they cannot give eager's bits. How far
they may be from eager is told by how far eager itself is from the same computation with next to no rounding.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

from nimble_core.torch_compat.dispatch import Mode, TorchDispatchMode, pytree
from nimble_core.tracing.operator_traits import draws_numbers, has_memory, owned_tensors, parts_of, storage_address
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recording import flat_tensors
from nimble_core.tracing.rng_state import random_state_kept
from nimble_core.utils.errors import InputError, NimbleError
from nimble_core.utils.units import format_bytes

__all__ = ["Reference", "in_float64", "memory_limit", "reference_outputs", "wide_bytes"]

_MEMORY_LIMITS = {"cpu": 8 << 30, "cuda": 32 << 30}

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

_ATEN = torch.ops.aten
_ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_flash_attention.default,
    }
)
_GRADIENTS_OF_ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_cudnn_attention_backward.default,
        _ATEN._scaled_dot_product_efficient_attention_backward.default,
        _ATEN._scaled_dot_product_flash_attention_backward.default,
    }
)
"""Kernels that have no float64; cuDNN's returns other numbers then, without an error."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The outcome of a run in float64.

    Args:
        outputs: output tensors in flattening order; None if the model cannot run in float64.
        reason: why not; empty otherwise.
    """

    outputs: tuple[torch.Tensor, ...] | None
    reason: str = ""


def reference_outputs(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    limit_bytes: int | None = None,
) -> Reference:
    """Run ``model(*args, **kwargs)`` in float64, on the same device, without autocast.

    A module runs as a copy of itself, a function on copies of the tensors it reaches; inputs are copies too. Casts
    written in the model (``x.float()``, ``softmax(dtype=float32)``, autocast regions) stay in float64. The model, its
    inputs and the random state are left as they were. What goes wrong is no error: it is the ``reason``; so are random
    numbers drawn, since in float64 others would be.

    Args:
        model: module or function.
        args: positional inputs.
        kwargs: keyword inputs.
        limit_bytes: do not try if parameters, buffers and inputs in float64 would take more; None: as ``memory_limit``
            says.
    """
    try:
        tensors, structure = flatten((tuple(args), dict(kwargs)), what="input")
        device = tensors[0].device if tensors else torch.device("cpu")
        limit_bytes = memory_limit(device) if limit_bytes is None else limit_bytes
        owned = [tensor for module in _modules_of(model).values() for _, _, tensor in owned_tensors(module)]
        needed = wide_bytes((*tensors, *owned))
        if needed > limit_bytes:
            return Reference(None, _too_large(needed, limit_bytes))
        copies: dict[int, Any] = {id(tensor): _widened(tensor) for tensor in tensors}
        again, named = builder(structure)([copies[id(tensor)] for tensor in tensors])
        twin = _twin(model, copies)
        mode = _InFloat64(copies.values(), limit_bytes - needed)
        with random_state_kept(device, draws=None), _nothing_compiled(), torch.no_grad():
            with torch.autocast(device.type, enabled=False, cache_enabled=False), mode:
                result = twin(*again, **named)
            outputs, _ = flatten(result, what="output")
            return Reference(tuple(mode.inside(tensor).detach().clone() for tensor in outputs))
    except NimbleError as error:
        return Reference(None, error.what)
    except Exception as error:  # whatever the user's model raises when its numbers are of another type
        lines = str(error).strip().splitlines()
        return Reference(None, f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": "))


def memory_limit(device: torch.device) -> int:
    """Return the most bytes that tensors may take in float64: on a GPU at most half of what it has free."""
    limit = _MEMORY_LIMITS.get(device.type, _MEMORY_LIMITS["cpu"])
    return min(limit, torch.cuda.mem_get_info(device)[0] // 2) if device.type == "cuda" else limit


def wide_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors take in float64, each counted once."""
    return sum({id(tensor): _wide_bytes(tensor) for tensor in tensors}.values())


def in_float64(own: Iterable[torch.Tensor], limit_bytes: int) -> TorchDispatchMode:
    """Return a mode under which every operator computes in float64, whatever it was given and asked for.

    Args:
        own: tensors that calls inside may write, in float64 already; of others each call gets a copy.
        limit_bytes: most bytes that those copies may take.
    """
    return _InFloat64(own, limit_bytes)


def _too_large(needed: int, limit_bytes: int) -> str:
    return f"tensors take {format_bytes(needed)} in float64, the limit is {format_bytes(limit_bytes)}"


def _wide_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * _dtype(tensor.dtype).itemsize


def _owner(model: Callable[..., Any]) -> Any:
    """Return ``model``, or the object whose method it is."""
    return getattr(model, "__self__", model)


def _closed_over(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _modules_of(model: Callable[..., Any]) -> dict[int, torch.nn.Module]:
    """Return the module that ``model`` is or belongs to, or those that a function closes over or names, by ``id``."""
    reached: list[Any] = [_owner(model)]
    if isinstance(model, FunctionType):
        reached = [*_closed_over(model), *(model.__globals__.get(name) for name in model.__code__.co_names)]
    return {id(one): one for one in reached if isinstance(one, torch.nn.Module)}


def _twin(model: Callable[..., Any], copies: dict[int, Any]) -> Callable[..., Any]:
    """Copy a module (or the module whose method ``model`` is) in float64; wrap a function around such copies.

    Args:
        model: module or function.
        copies: of tensors by their ``id``, for the copy to hold; those that it makes are added.
    """
    owner = _owner(model)
    if isinstance(model, FunctionType):
        twins = {id(module): _twin(module, copies) for module in _modules_of(model).values()}
        cells = tuple(CellType(twins.get(id(one), one)) for one in _closed_over(model))
        names = {name: twins.get(id(one), one) for name, one in model.__globals__.items()} if twins else {}
        around = FunctionType(model.__code__, names or model.__globals__, model.__name__, model.__defaults__, cells)
        around.__kwdefaults__ = model.__kwdefaults__
        return around if twins else model
    if not isinstance(owner, torch.nn.Module):
        return model
    for module in owner.modules():
        # Made here, not by deepcopy: never a copy in both types, and computed attributes cannot be deep-copied.
        for parameter in module.parameters(recurse=False):
            copies.setdefault(id(parameter), torch.nn.Parameter(_widened(parameter), requires_grad=False))
        for tensor in (*module.buffers(recurse=False), *vars(module).values()):
            if isinstance(tensor, torch.Tensor):
                copies.setdefault(id(tensor), _widened(tensor))
    twin: Callable[..., Any] = copy.deepcopy(model, dict(copies))
    for module in _owner(twin).modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()  # cuDNN warns of weights apart from each other, and copies them in each run
    return twin


def _dtype(dtype: torch.dtype) -> torch.dtype:
    return _WIDE.get(dtype, dtype)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, in float64 if it holds floating-point numbers."""
    return tensor.detach().to(_dtype(tensor.dtype), copy=True)


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Run compiled regions inside the model eagerly: nothing is compiled again for float64."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute fused attention from products; what it saves for a backward pass is what the kernel saves."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    with sdpa_kernel(SDPBackend.MATH):
        attended = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            given.get("attn_bias"),
            is_causal=given.get("is_causal", False),
            scale=given.get("scale"),
            enable_gqa=query.shape[-3] != key.shape[-3],
        )
    narrow = pytree.tree_map_only(torch.Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, args)
    _, *saved = func(*narrow, **kwargs)
    return (attended, *saved)


class _InFloat64(Mode):
    """Every call computes in float64, whatever it was given and asked for.

    Tensors from outside (closed over, computed before) are replaced by copies, one for each, so that nothing
    outside is written and what is written can be read again.
    """

    def __init__(self, own: Iterable[torch.Tensor], spare: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        # By memory, not by object: autograd hands what it saved, and views, to later calls as other objects.
        self._own: dict[int, StorageWeakRef] = {}  # while held, a storage's address names no other storage
        self._copies: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._limit = self._spare = spare
        self._keep(own)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (parts := parts_of(func)) is not None:
            with self:
                return parts(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.inside, (args, kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.dtype, _dtype, (args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags and draws_numbers(func, args, kwargs):
            raise InputError(f"it draws random numbers ({func}), which are others in float64")
        if func in _GRADIENTS_OF_ATTENTION:
            raise InputError(f"{func} has no float64")
        result = _attention(func, args, kwargs) if func in _ATTENTION else func(*args, **kwargs)
        self._keep(flat_tensors(result))
        return result

    def _keep(self, made: Iterable[torch.Tensor]) -> None:
        for tensor in made:
            if has_memory(tensor):
                self._own.setdefault(storage_address(tensor), StorageWeakRef(tensor.untyped_storage()))

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for ``tensor`` in this run: itself if the run made it, in float64."""
        if not has_memory(tensor):
            return _widened(tensor)
        if tensor.dtype not in _WIDE and storage_address(tensor) in self._own:
            return tensor
        key = (storage_address(tensor), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key not in self._copies:
            self._spare -= _wide_bytes(tensor)
            if self._spare < 0:
                raise InputError(_too_large(self._limit - self._spare, self._limit))
            # The original is held: its address must not come to name another tensor.
            self._copies[key] = tensor, _widened(tensor)
        return self._copies[key][1]
