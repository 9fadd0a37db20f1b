"""Members: what torch keeps in private attributes of tensors, modules, optimizers and other objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nimble_core.torch_compat.private import private

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _NormBase as AnyNorm
    from torch.nn.modules.dropout import _DropoutNd as AnyDropout
else:
    _MODE = "know layers that training mode changes"
    AnyNorm = private("torch.nn.modules.batchnorm:_NormBase", _MODE).require()
    AnyDropout = private("torch.nn.modules.dropout:_DropoutNd", _MODE).require()

__all__ = [
    "ALL_POST_HOOKS",
    "ALL_PRE_HOOKS",
    "CAPTURABLE_DEVICES",
    "DATA_LOADER",
    "DATA_OF",
    "FREE_WEAK_STORAGE",
    "PROFILER_RUNS",
    "TENSOR_TEXT",
    "VERSION",
    "AnyDropout",
    "AnyNorm",
]

for _name, _purpose in (
    ("torch:Tensor._backward_hooks", "hand gradients to hooks"),
    ("torch:Tensor._post_accumulate_grad_hooks", "notice such hooks"),
    ("torch:Tensor._base", "find what a view is of"),
    ("torch:ops.aten.add.Tensor._schema", "know what an operator writes"),
    ("torch.nn.modules.module:_global_forward_hooks", "notice hooks of all modules"),
):
    private(_name, _purpose)

VERSION = private("torch:Tensor._version", "notice writes in place")
DATA_OF = private(
    "torch._C._dynamo.guards:_torchinductor_pyobject_tensor_data_ptr",
    "look at the memory of many tensors in one pass: the address of a function that does so for one",
    "each tensor is asked from Python, which takes ten times as long",
)
FREE_WEAK_STORAGE = private("torch:UntypedStorage._free_weak_ref", "notice that a storage is gone")
PROFILER_RUNS = private(
    "torch.autograd.profiler:_is_profiler_enabled",
    "leave CUPTI to a profiler that runs",
    "only a profiler of this thread is noticed",
)
TENSOR_TEXT = private("torch._tensor_str:_str", "count what printing a tensor reads as one")
DATA_LOADER = private("torch.utils.data.dataloader:_BaseDataLoaderIter", "time the wait for a data loader")
CAPTURABLE_DEVICES = "_get_capturable_supported_devices"
"""What torch's optimizers ask; replaced in each module of theirs while one steps on the host."""
private(
    f"torch.optim.optimizer:{CAPTURABLE_DEVICES}",
    "run capturable forms of optimizers on the host",
    "on the host, optimizers without a fused form fail when a TrainStep is made",
)
ALL_PRE_HOOKS: dict[int, Any] = private(
    "torch.optim.optimizer:_global_optimizer_pre_hooks", "notice hooks of all optimizers"
).require()
ALL_POST_HOOKS: dict[int, Any] = private(
    "torch.optim.optimizer:_global_optimizer_post_hooks", "notice hooks of all optimizers"
).require()
