"""The dispatcher: modes, operators and their kernels, fake tensors, and trees of tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from nimble_core.torch_compat.private import function, private

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as modes_off
else:
    OpOverload = private("torch._ops:OpOverload", "tell operators of the dispatcher from other callables").require()
    HigherOrderOperator = private("torch._ops:HigherOrderOperator", "refuse operators that run functions").require()
    TorchDispatchMode = private(
        "torch.utils._python_dispatch:TorchDispatchMode", "see each operator that a model calls"
    ).require()
    modes_off = private(
        "torch.utils._python_dispatch:_disable_current_modes", "run operators of our own out of a mode's sight"
    ).require()
    pytree = private("torch.utils:_pytree", "walk nested inputs and outputs as torch does").require()
    _FAKE = "torch._subclasses.fake_tensor"
    FakeTensor = private(f"{_FAKE}:FakeTensor", "plan without running: tensors without memory").require()
    FakeTensorMode = private(f"{_FAKE}:FakeTensorMode", "make such tensors").require()
    _SHAPES = "name an operator whose result depends on values"
    DataDependentOutputException = private(f"{_FAKE}:DataDependentOutputException", _SHAPES).require()
    DynamicOutputShapeException = private(f"{_FAKE}:DynamicOutputShapeException", _SHAPES).require()
    UnsupportedFakeTensorException = private(f"{_FAKE}:UnsupportedFakeTensorException", _SHAPES).require()
    UnsupportedOperatorException = private(f"{_FAKE}:UnsupportedOperatorException", _SHAPES).require()

__all__ = [
    "ANY_KEY",
    "COMPOSITE",
    "FAKE_TENSOR",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "Mode",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "conjugated",
    "current_mode",
    "foreach_add_",
    "foreach_copy_",
    "foreach_kernels",
    "foreach_mul",
    "foreach_zero_",
    "fused_kernels",
    "has_kernel",
    "issuer_of",
    "keys_excluded",
    "lifts_host_tensors",
    "modes_off",
    "negated",
    "no_torch_function",
    "pytree",
    "scale_checked_",
    "set_lifts_host_tensors",
    "update_scale_",
]

_dispatch = "torch.utils._python_dispatch"
current_mode: Callable[[], Any] = function(f"{_dispatch}:_get_current_dispatch_mode", "know the mode in force")
no_torch_function: Callable[[], AbstractContextManager[None]] = function(
    "torch._C:DisableTorchFunction", "look at tensors past __torch_function__ and the caller's modes"
)
keys_excluded: Callable[[Any], AbstractContextManager[None]] = function(
    "torch._C:_ExcludeDispatchKeyGuard", "compare containers of tensors by identity, in C"
)
ANY_KEY: Any = function("torch._C:_dispatch_keyset_full", "the same: every kernel of the dispatcher")()
has_kernel: Callable[..., bool] = function(
    "torch._C:_dispatch_has_kernel_for_dispatch_key", "know whether an operator has a kernel of its own"
)
COMPOSITE: Any = private(
    "torch._C:DispatchKey.CompositeImplicitAutograd", "take an operator apart that inference mode keeps whole"
).require()
lifts_host_tensors: Callable[[], bool] = function(
    "torch._C:_only_lift_cpu_tensors",
    "put that setting back",
    "torch.tensor(..., device=...) is refused in captures",
    fallback=lambda: False,
)
set_lifts_host_tensors: Callable[[bool], None] = function(
    "torch._C:_set_only_lift_cpu_tensors",
    "see the copy of torch.tensor(..., device=...)",
    "torch.tensor(..., device=...) is refused in captures",
    fallback=lambda on: None,
)
FAKE_TENSOR = private(
    "torch._subclasses:FakeTensor",
    "hide from libraries that tensors are fake: they keep another branch for those",
    "masks of Hugging Face's models are planned as they are for captures",
)
conjugated: Callable[[Any], Any] = function("torch:_conj", "make lazy views again")
negated: Callable[[Any], Any] = function("torch:_neg_view", "make lazy views again")

_MANY = "handle many tensors in one call"
foreach_add_: Callable[..., Any] = function("torch:_foreach_add_", _MANY)
foreach_copy_: Callable[..., Any] = function("torch:_foreach_copy_", _MANY)
foreach_mul: Callable[..., Any] = function("torch:_foreach_mul", _MANY)
foreach_zero_: Callable[..., Any] = function("torch:_foreach_zero_", _MANY)
scale_checked_: Callable[..., Any] = function(
    "torch:_amp_foreach_non_finite_check_and_unscale_", "unscale gradients inside of a step, as GradScaler does"
)
update_scale_: Callable[..., Any] = function("torch:_amp_update_scale_", "update the scale as GradScaler does")
foreach_kernels: Callable[[], list[str]] = function(
    "torch.utils._foreach_utils:_get_foreach_kernels_supported_devices", "choose the optimizer's form as torch does"
)
fused_kernels: Callable[[], list[str]] = function(
    "torch.utils._foreach_utils:_get_fused_kernels_supported_devices", "choose the optimizer's form as torch does"
)


class Mode(TorchDispatchMode):
    """A mode that neither Dynamo nor what it compiles looks into.

    By itself torch hides a mode from Dynamo by importing Dynamo, which takes a second. Here that is done only where
    Dynamo is in the process.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # torch's has no types
        if "__torch_dispatch__" in vars(cls):
            cls.__torch_dispatch__ = _hidden_from_dynamo(vars(cls)["__torch_dispatch__"])  # type: ignore[method-assign]  # as torch does

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: else a ``torch.compile``d submodule first called inside runs eager from then on."""
        return True


def _hidden_from_dynamo(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    @cache
    def hidden() -> Callable[..., Any]:
        found: Callable[..., Any] = torch.compiler.disable(dispatch)
        return found

    @wraps(dispatch)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        return (hidden() if "torch._dynamo" in sys.modules else dispatch)(*args, **kwargs)

    return dispatched


_WRAPPER = _hidden_from_dynamo(print).__code__


def issuer_of(frame: FrameType) -> FrameType:
    """Return the frame that issued a call, from the one that called ``__torch_dispatch__`` of a ``Mode``."""
    while frame.f_code is not _WRAPPER and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_back or frame
