"""Copies of inputs that are nodes of their graph: a call says where they read, and launches the graph alone.

A copy of its own costs a call 6 to 14 µs before the graph can begin (on an H200); changing what a node reads costs 2 to
9, and nothing where the caller's tensor is where the last one was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from nimble_core.runtime.cuda.graph_nodes import add_roots, cuda_driver, driver_library, links_change
from nimble_core.scheduling.verify_capture import RawGraph
from nimble_core.torch_compat.unchanged import NOWHERE, OFF, passes
from nimble_core.utils.errors import DeviceError

__all__ = ["InputCopies", "copied_by_nodes", "strides_of"]

_MOST = 4
"""Inputs up to which each has a node: more are copied by one launch for all."""


class _Source(ctypes.Structure):
    """The beginning of the driver's CUDA_MEMCPY3D."""

    _fields_ = (
        ("position", ctypes.c_size_t * 4),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
    )


class InputCopies:
    """Nodes of one graph that copy the inputs of a call into their buffers.

    They are off, and the graph reads what the buffers hold, until ``read`` turns them on.

    Args:
        buffers: what the nodes write.
        nodes: handle and parameters of each node.
        context: the CUDA context of all this memory.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], nodes: Sequence[tuple[int, Any]], context: int) -> None:
        self._nodes = tuple((node, at := int(params.getPtr()), at + _Source.device.offset) for node, params in nodes)
        self._params = [params for _, params in nodes]  # keeps alive what is pointed to
        self._strides = tuple(map(strides_of, buffers))
        self._set_source, self._set_enabled = _functions()
        self._context, self._instance = context, 0
        self._reading = [OFF] * len(nodes)
        self._known = False  # whether all nodes are on, or all off, as ``_reading`` says
        self.read_on: Callable[[Sequence[torch.Tensor]], bool] = lambda inputs: False
        """``read`` where nodes are on already; returns False, and leaves them as they are, where they are not."""

    def attach(self, instance: int) -> None:
        """Change this instance of the graph from now on, in which the nodes are off at first. Raises DeviceError."""
        self._instance = instance
        self.read_on = partial(
            passes().read_from, self._set_source, self._nodes, instance, self._context, self._strides, self._reading
        )
        self._enable(False)

    def read(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Have the next launches copy ``inputs``; return False, with the nodes off, where nodes cannot do that."""
        off, known = OFF in self._reading, self._known
        try:
            if off:
                self._reading[:] = [NOWHERE] * len(self._nodes)
            done = self.read_on(inputs)  # a conjugate view is no such input (``Signature``)
            if done and off:
                self._enable(True)
        except BaseException:  # some may be on, and none may count as that
            self._reading[:] = [OFF] * len(self._nodes)
            self._known = False
            raise
        if not done and off and known:
            self._reading[:] = [OFF] * len(self._nodes)
        elif not done:
            self._enable(False)
        return done

    def off(self) -> None:
        """Have the next launches read what the buffers hold."""
        if OFF not in self._reading or not self._known:
            self._enable(False)

    def _enable(self, on: bool) -> None:
        self._known = False
        if not on:
            self._reading[:] = [OFF] * len(self._nodes)
        for node, *_ in self._nodes:
            if (code := self._set_enabled(self._instance, node, on)) != 0:
                raise DeviceError(f"cuGraphNodeSetEnabled failed: error {code}", fix="prepare the model again")
        self._known = True


def copied_by_nodes(handle: int, raw: RawGraph, buffers: Sequence[torch.Tensor]) -> InputCopies | None:
    """Add a node for each buffer, which everything else waits for; None where that cannot be, or does not pay.

    Args:
        handle: of the graph that ``raw`` was read from, before it is instantiated.
        raw: as it is; the new nodes are not in it.
        buffers: that inputs of the same shapes are copied into.
    """
    dense = all(buffer.nbytes and torch.ops.aten.is_non_overlapping_and_dense.default(buffer) for buffer in buffers)
    if not (0 < len(buffers) <= _MOST and dense and raw.nodes and links_change(raw)):
        return None
    driver = cuda_driver()
    code, context = driver.cuCtxGetCurrent()
    if int(code) != 0:
        return None
    made = [_copy_onto_itself(driver, buffer) for buffer in buffers]
    adding = [lambda graph, one=one: driver.cuGraphAddMemcpyNode(graph, None, 0, one, context) for one in made]
    nodes = add_roots(handle, raw, adding)
    return InputCopies(buffers, list(zip(nodes, made, strict=True)), int(context)) if nodes else None


def _copy_onto_itself(driver: Any, buffer: torch.Tensor) -> Any:
    """Return the parameters of a node before its first call: it is off until then."""
    params = driver.CUDA_MEMCPY3D()
    params.srcMemoryType = params.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.srcDevice = params.dstDevice = driver.CUdeviceptr(buffer.data_ptr())
    params.WidthInBytes = params.srcPitch = params.dstPitch = buffer.nbytes
    params.Height = params.Depth = params.srcHeight = params.dstHeight = 1
    return params


def strides_of(buffer: torch.Tensor) -> tuple[int, ...] | None:
    """Return what strides another tensor of this shape and dtype has with the same bytes; None if any contiguous."""
    return None if buffer.is_contiguous() else buffer.stride()


@cache
def _functions() -> tuple[int, Callable[[int, int, bool], int]]:
    """Return the address of what changes a copy, and what turns one on or off: the latter by ctypes."""
    library = driver_library()
    set_enabled = library.cuGraphNodeSetEnabled
    set_enabled.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    return ctypes.cast(library.cuGraphExecMemcpyNodeSetParams, ctypes.c_void_p).value or 0, set_enabled
