"""Inductor as a maker of kernels: a graph goes in, a function that launches compiled kernels comes out.

The function is run under the recorder like any model; where each of its kernels comes from is read off the comments
that Inductor writes above every launch, which name the nodes of the graph that went in.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from hashlib import sha256
from threading import Lock
from types import FrameType
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.rerecord import provenance_of
from nimble_core.compiler.to_fx import calls_of
from nimble_core.ir.program import Origin, Program
from nimble_core.torch_compat.compiler import (
    CODE_COMMENT,
    FX_CACHE_SHAPES,
    INDUCTOR_COMPILE,
    INDUCTOR_CONFIG,
    KERNEL_METADATA,
    KERNEL_WRITERS,
    VIRTUALIZED,
)
from nimble_core.tracing.kernel_launches import generated_modules
from nimble_core.utils.errors import CaptureError, first_line
from nimble_core.utils.locks import free_after_fork

__all__ = ["compile_graph", "provenance_in_code", "source_nodes"]

_SOURCES = re.compile(r"#.*Source Nodes: \[(.*?)\]")
_WORK = re.compile(r"\.run\(|extern_kernels\.|torch\.ops\.|^\s*(\w+ = )?cpp_\w+\(")
_OPTIONS: Mapping[str, Any] = {
    # Buffers that are used again, or in place, are hazards that the model does not have.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "memory_planning": False,
    "triton.cudagraphs": False,
    "fallback_random": True,  # eager's kernels draw what could not be drawn ahead
    "comment_origin": True,  # which nodes each launch stands for, however Inductor is set up otherwise
}

_WRITTEN = "kernels wait first"
"""Names the way in which Inductor's code is written, in keys of what is kept on disk."""
_WRITING = free_after_fork(Lock())
"""Held while Inductor is changed, for everybody who compiles."""


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], *, thorough: bool = False
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a graph for inputs like these.

    Args:
        module: from input tensors to a tuple of tensors; its attributes stay live.
        inputs: examples.
        thorough: let Inductor time several kernels for each product and convolution; takes minutes.

    Raises:
        CaptureError: Inductor could not compile it; says why.
    """
    options = {name: value for name, value in _OPTIONS.items() if _known(name)}
    owner = module.graph.owning_module
    if thorough:
        options |= {"max_autotune": True, "coordinate_descent_tuning": True}
    try:
        with (
            _WRITING,
            torch.no_grad(),
            _host_kernels_explained(),
            _kernels_that_wait() as waiting,
            _kept_on_disk(module),
            warnings.catch_warnings(),
        ):
            # torch's notices about its own code, and advice on settings, which are the user's.
            warnings.filterwarnings("ignore", module=r"torch(\.|$)")
            module.graph.owning_module = module  # passes look for it, see ``graph_module``
            compiled: Callable[..., Sequence[torch.Tensor]]
            compiled = INDUCTOR_COMPILE.require()(module, list(inputs), options={**options, **waiting})
            return compiled
    except Exception as error:  # a compiler's errors have no common root
        raise CaptureError(
            f"Inductor could not compile the model: {type(error).__name__}: {first_line(error)}",
            fix='Options(fuse="library") or "none"',
        ) from error
    finally:
        module.graph.owning_module = owner


@contextmanager
def _kept_on_disk(module: fx.GraphModule) -> Iterator[None]:
    """Inside, Inductor keeps what it compiles on disk: it does so only where shapes might vary, and here none does.

    Its key knows what a graph computes, not what its nodes are called, which the comments in its code tell, nor how we
    have its code written.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    names = sha256(" ".join((_WRITTEN, *(node.name for node in module.graph.nodes))).encode()).hexdigest()
    config: Any = torch.compiler.config
    without_guards = ShapeEnv()
    with (
        FX_CACHE_SHAPES.replaced_by(staticmethod(lambda: without_guards)),
        config.patch(cache_key_tag=f"{config.cache_key_tag}{names}"),
    ):
        yield


@contextmanager
def _host_kernels_explained() -> Iterator[None]:
    """Inside, Inductor writes above host kernels as well which nodes they stand for; by itself it does not."""
    written, metadata, virtualized = (one.find() for one in (CODE_COMMENT, KERNEL_METADATA, VIRTUALIZED))
    if None in (written, metadata, virtualized):  # attributed by what they write alone
        yield
        return

    def explained(self: Any, nodes: Any, kernel_name: str | None = None) -> None:
        wrapper = virtualized.graph.wrapper_code
        sources, _ = metadata(nodes, wrapper)
        if sources:
            wrapper.make_comment(sources)
        written(self, nodes, kernel_name)

    with CODE_COMMENT.replaced_by(explained):
        yield


@contextmanager
def _kernels_that_wait() -> Iterator[Mapping[str, Any]]:
    """Inside, Inductor's Triton kernels wait before all else until what they may be launched ahead of has ended.

    By itself Inductor has them wait only for what its own order puts right before them, and before the access that
    needs it: a schedule has another order, other memory, and several streams. It would also launch them so itself, by a
    launcher compiled for each; here the captured graph's edges say which are. Kernels of several bodies wait in each of
    them. Yields the options that go with it.

    Source:
        CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
    """
    option = "triton.enable_pdl"
    before_access, keep_last_trigger, meta = (one.find() for one in KERNEL_WRITERS)
    if not _known(option) or None in (before_access, keep_last_trigger, meta):  # a torch that does it in another way
        yield {option: False} if _known(option) else {}
        return

    def wait_first(self: Any, code: Any) -> None:
        if not self._enable_pdl_codegen():
            return
        wait = self.GDC_WAIT
        code._lines = [line for line in code._lines if not (isinstance(line, str) and line.strip() == wait)]
        keep_last_trigger(self, code)
        code._lines.insert(0, wait)

    ours = (
        lambda *args, **kwargs: None,
        wait_first,
        classmethod(lambda cls: {**meta.__func__(cls), "launch_pdl": False}),
    )
    with ExitStack() as undo:
        for entry, value in zip(KERNEL_WRITERS, ours, strict=True):
            undo.enter_context(entry.replaced_by(value))
        yield {option: True}


def _known(name: str) -> bool:
    """Whether this torch has the option."""
    config: Any = INDUCTOR_CONFIG.require()
    try:
        for part in name.split("."):
            config = getattr(config, part)
    except AttributeError:
        return False
    return True


def source_nodes(file: str, line: int) -> tuple[str, ...]:
    """Names of the graph nodes that the launch in this line of generated code stands for; empty if it does not say.

    Args:
        file: generated by Inductor.
        line: of the launch, counted from 1.
    """
    lines = _lines(file)
    for place in range(min(line - 2, len(lines) - 1), -1, -1):
        found = _SOURCES.search(lines[place])
        if found:
            return tuple(name.strip() for name in found[1].split(",") if name.strip())
        if _WORK.search(lines[place]) or "def call" in lines[place]:
            return ()
    return ()


@cache
def _lines(file: str) -> tuple[str, ...]:
    try:
        with open(file, encoding="utf-8") as source:
            return tuple(source.read().splitlines())
    except FileNotFoundError:  # Inductor was told to forget it: its kernels come from nowhere
        return ()


def provenance_in_code(
    module: fx.GraphModule, program: Program
) -> Callable[[Any, FrameType], tuple[tuple[Origin, ...], tuple[int, ...]]]:
    """Which eager calls a launch stands for, from the frame that issues it."""
    calls = {node.name: calls_of(node) for node in module.graph.nodes}
    files = {one.__file__ for one in generated_modules() if one.__file__}

    def provenance(func: Any, frame: FrameType) -> tuple[tuple[Origin, ...], tuple[int, ...]]:
        found: tuple[int, ...] = ()
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_filename in files:
                names = source_nodes(at.f_code.co_filename, at.f_lineno)
                found = tuple(sorted({call for name in names for call in calls.get(name, ())}))
                break
            at = at.f_back
        return provenance_of(program, found, str(func))

    return provenance
