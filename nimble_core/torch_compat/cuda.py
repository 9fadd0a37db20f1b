"""CUDA: the allocator's pools and history, workspaces of cuBLAS, and streams asked for in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nimble_core.torch_compat.private import function, private

__all__ = [
    "PLACING",
    "allocate_to_pool",
    "clear_cublas_workspaces",
    "current_raw_stream",
    "current_stream",
    "custom_allocator",
    "end_allocate_to_pool",
    "has_context",
    "history_enabled",
    "memory_metadata",
    "memory_snapshot",
    "memory_stats",
    "record_memory_history",
    "release_pool",
    "set_memory_metadata",
    "storage_at",
]

_UNPLACED = "memory is not planned: each stream reuses its own"

clear_cublas_workspaces: Callable[[], None] = function(
    "torch._C:_cuda_clearCublasWorkspaces", "give replays workspaces of their own", needs="cuda"
)
current_stream: Callable[[int], tuple[int, int, int]] = function(
    "torch._C:_cuda_getCurrentStream", "ask for the caller's stream at each call, in C", needs="cuda"
)
current_raw_stream: Callable[[int], int] = function(
    "torch._C:_cuda_getCurrentRawStream", "launch Triton kernels on the caller's stream", needs="cuda"
)
has_context: Callable[[int], bool] = function(
    "torch._C:_cuda_hasPrimaryContext",
    "wait only for GPUs that are in use",
    "all GPUs are waited for",
    needs="cuda",
    fallback=lambda device: True,
)
memory_stats: Callable[[int], dict[str, Any]] = function(
    "torch._C:_cuda_memoryStats", "count what a call allocates while it is captured", needs="cuda"
)
storage_at: Callable[[int, torch.device, int], torch.UntypedStorage] = function(
    "torch._C:_construct_storage_from_data_pointer", "make tensors at planned addresses", needs="cuda"
)

# The allocator's history tells what each call allocates; its labels are of the thread that allocates.
history_enabled: Callable[[], bool] = function(
    "torch._C:_cuda_isHistoryEnabled", "leave the allocator's history to whoever records it", needs="cuda"
)
memory_metadata: Callable[[], str] = function(
    "torch._C:_cuda_getMemoryMetadata", "put a label of the user's back", needs="cuda"
)
set_memory_metadata: Callable[[str], None] = function(
    "torch._C:_cuda_setMemoryMetadata", "label allocations with the call that makes them", needs="cuda"
)
memory_snapshot: Callable[[], dict[str, Any]] = function(
    "torch.cuda.memory:_snapshot", "read the allocator's history", needs="cuda"
)
record_memory_history: Callable[..., None] = function(
    "torch.cuda.memory:_record_memory_history", "have the allocator keep its history", needs="cuda"
)

# A pool that serves exactly the planned blocks.
PLACING = tuple(
    private(f"torch._C:{name}", f"place memory: {purpose}", _UNPLACED, needs="cuda")
    for name, purpose in (
        ("_cuda_customAllocator", "an allocator of our own"),
        ("_cuda_beginAllocateCurrentThreadToPool", "this thread's allocations go to a pool"),
        ("_cuda_endAllocateToPool", "they do so no longer"),
        ("_cuda_releasePool", "the pool goes"),
    )
)
"""What placing memory takes, all of it."""
custom_allocator: Any = PLACING[0].find()
allocate_to_pool: Any = PLACING[1].find()
end_allocate_to_pool: Any = PLACING[2].find()
release_pool: Any = PLACING[3].find()
