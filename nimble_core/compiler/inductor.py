"""Inductor as a maker of kernels: from a graph to a function that launches compiled kernels.

The function is run under the recorder like any model. Inductor writes a comment above every launch that names the nodes
of the graph it stands for; from it one learns where each kernel comes from.
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

from nimble_core.compiler.decompositions import taken_apart
from nimble_core.compiler.rerecord import provenance_of
from nimble_core.compiler.to_fx import calls_of
from nimble_core.ir.program import Origin, Program
from nimble_core.torch_compat.compiler import (
    CODE_COMMENT,
    FX_CACHE_SHAPES,
    INDUCTOR_COMPILE,
    KERNEL_METADATA,
    KERNEL_WRITERS,
    VIRTUALIZED,
)
from nimble_core.tracing.kernel_launches import generated_modules
from nimble_core.tracing.recording import Provenance
from nimble_core.utils.errors import CaptureError, first_line
from nimble_core.utils.locks import free_after_fork

__all__ = ["GeneratedCode", "compile_graph", "source_nodes"]

_SOURCES = re.compile(r"#.*Source Nodes: \[(.*?)\]")
_WORK = re.compile(r"\.run\(|extern_kernels\.|torch\.ops\.|^\s*(\w+ = )?cpp_\w+\(")
_OPTIONS: Mapping[str, Any] = {
    # A buffer that is used again, or in place, is a hazard that the model does not have.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "memory_planning": False,
    "triton.cudagraphs": False,
    "fallback_random": True,  # eager's kernels draw what could not be drawn ahead
    "comment_origin": True,  # which nodes each launch stands for
}

_CODE_VERSION = "kernels wait first"
"""Part of the keys of Inductor's cache on disk: the way in which we have its code written."""
_patching = free_after_fork(Lock())
"""Held while Inductor is patched, which everybody who compiles would see."""


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
    options = dict(_OPTIONS)
    if thorough:
        options |= {"max_autotune": True, "coordinate_descent_tuning": True}
    owner = module.graph.owning_module
    try:
        with (
            _patching,
            torch.no_grad(),
            _host_kernels_commented(),
            taken_apart(),
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
    """Let Inductor keep on disk what it compiles inside.

    By itself it does so only where shapes might vary, and here none does.
    Its keys tell what a graph computes. Ours also tell how its nodes are called, which comments in the code repeat, and
    how we have code written.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    names = sha256(" ".join((_CODE_VERSION, *(node.name for node in module.graph.nodes))).encode()).hexdigest()
    config: Any = torch.compiler.config
    without_guards = ShapeEnv()
    with (
        FX_CACHE_SHAPES.replaced_by(staticmethod(lambda: without_guards)),
        config.patch(cache_key_tag=f"{config.cache_key_tag}{names}"),
    ):
        yield


@contextmanager
def _host_kernels_commented() -> Iterator[None]:
    """Let Inductor write above host kernels as well which nodes they stand for; by itself it does not."""
    written, metadata, virtualized = (one.find() for one in (CODE_COMMENT, KERNEL_METADATA, VIRTUALIZED))
    if None in (written, metadata, virtualized):  # attributed by what they write alone
        yield
        return

    def commented(self: Any, nodes: Any, kernel_name: str | None = None) -> None:
        wrapper = virtualized.graph.wrapper_code
        sources, _ = metadata(nodes, wrapper)
        if sources:
            wrapper.make_comment(sources)
        written(self, nodes, kernel_name)

    with CODE_COMMENT.replaced_by(commented):
        yield


@contextmanager
def _kernels_that_wait() -> Iterator[Mapping[str, Any]]:
    """Let Inductor's Triton kernels first wait for the end of what they may be launched ahead of.

    By itself Inductor has them wait for what precedes them in its own order, and before the access that needs it. A
    schedule has another order, other memory and several streams. Inductor would also launch them ahead itself; here the
    edges of the captured graph say which kernels are. Kernels of several bodies wait in each of them.

    Yields:
        The options that go with it.

    Source:
        CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
    """
    before_access, keep_last_trigger, meta = (one.find() for one in KERNEL_WRITERS)
    if None in (before_access, keep_last_trigger, meta):  # a torch that writes such kernels in another way
        yield {"triton.enable_pdl": False}
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
        yield {"triton.enable_pdl": True}


def source_nodes(file: str, line: int) -> tuple[str, ...]:
    """Read which graph nodes the launch in a line of generated code stands for.

    Args:
        file: generated by Inductor.
        line: of the launch, counted from 1.

    Returns:
        Names of the nodes; empty if the code does not say.
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


class GeneratedCode:
    """The files of generated code that issue the launches of one recording."""

    def __init__(self) -> None:
        self._files: set[str] = set()

    def provenance(self, module: fx.GraphModule, program: Program) -> Provenance:
        """Return what tells, from the frame that issues a launch, which eager calls it stands for."""
        calls = {node.name: calls_of(node) for node in module.graph.nodes}
        files = {one.__file__ for one in generated_modules() if one.__file__}

        def provenance(func: Any, frame: FrameType) -> tuple[tuple[Origin, ...], tuple[int, ...]]:
            at: FrameType | None = frame
            while at is not None and at.f_code.co_filename not in files:
                at = at.f_back
            names: tuple[str, ...] = ()
            if at is not None:
                self._files.add(at.f_code.co_filename)
                names = source_nodes(at.f_code.co_filename, at.f_lineno)
            found = sorted({call for name in names for call in calls.get(name, ())})
            return provenance_of(program, found, str(func))

        return provenance

    def digest(self, fingerprint: str) -> str:
        """Digest a recording with this fingerprint and the code of its kernels; empty if the code is not known."""
        texts = sorted("\n".join(_lines(file)) for file in self._files)
        return sha256("\0".join([fingerprint, *texts]).encode()).hexdigest() if all(texts) else ""
