"""See kernels that bypass torch's dispatcher, where they are launched.

Three launchers are known: Inductor's for its Triton kernels (``CachingAutotuner.run``), Triton's own for kernels that
users write (``JITFunction.run``), and the functions that Inductor compiles for the host. Buffers and views that
Inductor's code makes past the dispatcher go through it here, so that they are seen as well. A launcher that is not
known shows on CUDA as graph nodes that come from no call. A kernel of the user's that may reach memory beside that of
the tensors it is given is told of: there is nothing to find its hazards by.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType, ModuleType
from typing import Any

import torch

from nimble_core.torch_compat.compiler import AUTOTUNER_RUN, GENERATED, GENERATED_CACHE, TRITON_ANALYSIS, TRITON_RUN
from nimble_core.torch_compat.cuda import current_raw_stream
from nimble_core.torch_compat.dispatch import pytree

__all__ = [
    "BOTH",
    "Launch",
    "Relaunch",
    "Role",
    "generated_modules",
    "kernel_roles",
    "launches_seen",
    "reaches_elsewhere",
    "relative_window",
    "waits_first",
]

Role = tuple[bool, bool]
"""Whether a kernel reads a tensor, and whether it writes it."""

BOTH: Role = (True, True)
_ANYWHERE = ("tt.int_to_ptr", "pure = false")
"""What leads to any memory: numbers that are taken for addresses, inline assembly that does more than compute."""
_ONLY_WAITS = re.compile(r'inline_asm "griddepcontrol\.\w+;( //[^;"\\]*)?"')
"""Assembly that waits for other kernels, or lets others be launched."""
_HEAD = re.compile(r"def \w+\(.*\):\n")
_WAIT = "tl.extra.cuda.gdc_wait()"
_NAMED = re.compile(r"\s*\w+(: tl\.constexpr)? = [\w.]+\s*")
"""A line that gives a name to a number or to something that has one: it touches no memory."""


def kernel_roles(names: Sequence[str], mutated: Sequence[str]) -> dict[str, Role]:
    """Return roles of the arguments of a kernel that Inductor wrote, by the way it names them.

    >>> kernel_roles(["in_ptr0", "out_ptr0", "in_out_ptr0", "arg_A", "whatever"], ["in_out_ptr0"])
    {'in_ptr0': (True, False), 'out_ptr0': (False, True), 'in_out_ptr0': (True, True), 'arg_A': (True, False)}
    """
    roles: dict[str, Role] = {}
    for name in names:
        if name in mutated or name.startswith("in_out_ptr"):
            roles[name] = BOTH
        elif name.startswith("out_ptr"):
            roles[name] = (False, True)
        elif name.startswith(("in_ptr", "arg_")):
            roles[name] = (True, False)
    return roles


def reaches_elsewhere(code: str, tensors: int) -> bool:
    r"""Return whether a Triton kernel may reach other memory than that of the tensors it is given.

    Args:
        code: its intermediate code (TTIR); empty if it is not known.
        tensors: how many tensors it is given. Pointers beyond these come out of something else (descriptors, tuples).

    >>> reaches_elsewhere("tt.func public @copy(%x: !tt.ptr<f32>, %out: !tt.ptr<f32>) {", 2)
    False
    >>> waits = 'tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" {constraints = "=r", pure = false}'
    >>> reaches_elsewhere(f"tt.func public @copy(%x: !tt.ptr<f32>) {{\n{waits}", 1)
    False
    >>> reaches_elsewhere("tt.func public @fill(%address: i64) { %out = tt.int_to_ptr %address", 0)
    True
    """
    signature = code.partition("tt.func public")[2].partition("\n")[0]
    pointers = signature.count("!tt.ptr<") + signature.count("tensordesc<")
    lines = (line for line in code.splitlines() if not _ONLY_WAITS.search(line))
    return not signature or pointers > tensors or any(one in line for line in lines for one in _ANYWHERE)


def waits_first(source: str) -> bool:
    r"""Return whether a Triton kernel first waits for the kernels that it may have been launched ahead of.

    >>> waits_first("def kernel(p):\n    xnumel = 8\n    tl.extra.cuda.gdc_wait()\n    x = tl.load(p)")
    True
    >>> waits_first("def kernel(p):\n    x = tl.load(p)\n    tl.extra.cuda.gdc_wait()")
    False
    """
    head = _HEAD.match(source)
    for line in source[head.end() :].splitlines() if head else ():
        if line.strip() == _WAIT:
            return True
        if not _NAMED.fullmatch(line):
            return False
    return False


_HOST_KERNEL = re.compile(r"^(cpp_\w+) = async_compile\.cpp_pybinding\(\[(.*?)\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, ready to be done again on whatever stream is current.

    Args:
        name: of the kernel.
        launch: launches it; takes ``args`` and ``kwargs``.
        args: positional arguments of the kernel.
        kwargs: keyword arguments.
        names: what the kernel calls its positional arguments.
        roles: what it does to each tensor, by argument name; tensors that are not listed are read and written.
    """

    name: str
    launch: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    roles: Mapping[str, Role]


class Relaunch:
    """A kernel as a callable that goes through its launcher, so that a recorder sees it when it runs again.

    Args:
        name: of the kernel, which a graph that calls it shows.
    """

    waits = False
    """Whether it waits, before it touches any memory, for all that its node in a graph depends on."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name


class _InductorKernel(Relaunch):
    """Launches one of Inductor's Triton kernels on the current stream."""

    def __init__(self, name: str, kernel: Any) -> None:
        super().__init__(name)
        self._kernel = kernel
        self.waits = not kernel.custom_kernel and waits_first(getattr(kernel.fn, "src", ""))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream = current_raw_stream(torch.cuda.current_device())
        return self._kernel.run(*args, stream=stream, **kwargs)


class _TritonKernel(Relaunch):
    """Launches a Triton kernel of the user's on the current stream."""

    def __init__(self, name: str, kernel: Any, grid: Any) -> None:
        super().__init__(name)
        self._kernel, self._grid = kernel, grid

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel.run(*args, grid=self._grid, warmup=False, **kwargs)


class _HostKernel(Relaunch):
    """Calls one of Inductor's host kernels."""

    def __init__(self, name: str, module: ModuleType) -> None:
        super().__init__(name)
        self._module = module

    def __call__(self, *args: Any) -> Any:
        return getattr(self._module, self.__name__)(*args)


@contextmanager
def launches_seen(
    on_launch: Callable[[Launch, FrameType], Any],
    apart: Callable[[], bool],
    on_elsewhere: Callable[[str], Any] = lambda kernel: None,
) -> Iterator[None]:
    """Inside, launches of this thread go to ``on_launch`` instead, which has to do them.

    Args:
        on_launch: told of the launch and of the frame that asked for it; what it returns is the launch's result.
        apart: whether the thread is inside an operator, whose launches are its own affair, or is doing a launch.
        on_elsewhere: told by name, while ``apart``, of each Triton kernel of the user's that was launched and may reach
            other memory than that of the tensors it was given; within an operator, that may be what it declares.
    """
    thread = threading.get_ident()

    def watched() -> bool:
        return threading.get_ident() == thread and not apart()

    def launched(kernel: str, codes: Iterable[str], given: Iterable[Any]) -> None:
        tensors = sum(isinstance(one, torch.Tensor) for one in given)
        if threading.get_ident() == thread and any(reaches_elsewhere(code, tensors) for code in codes):
            on_elsewhere(kernel)

    with ExitStack() as undo:
        if AUTOTUNER_RUN.loaded:
            undo.enter_context(AUTOTUNER_RUN.replaced_by(_seen_by_inductor(on_launch, watched, launched)))
        if TRITON_RUN.loaded:
            undo.enter_context(TRITON_RUN.replaced_by(_seen_by_triton(on_launch, watched, launched)))
        for module in generated_modules():
            _watch_generated(module, on_launch, watched, undo)
        yield


def generated_modules() -> list[ModuleType]:
    """Return the modules that Inductor has generated, also those it was told to forget (``force_disable_caches``)."""
    known = list(GENERATED_CACHE.require()) if GENERATED_CACHE.loaded else []
    loaded = [one for name, one in list(sys.modules.items()) if name.startswith(GENERATED)]
    return list({id(one): one for one in (*known, *loaded)}.values())


def _seen_by_inductor(on_launch: Any, watched: Callable[[], bool], launched: Callable[..., None]) -> Callable[..., Any]:
    run = AUTOTUNER_RUN.require()

    def seen(kernel: Any, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> Any:
        users = kernel.custom_kernel  # taken into a compiled graph as it is: its names promise nothing
        name = kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__
        if benchmark_run or not watched():
            result = run(kernel, *args, stream=stream, benchmark_run=benchmark_run, **kwargs)
            if users and not benchmark_run:
                codes = [_code(compiled.kernel) for compiled in kernel.compile_results]
                launched(name, codes, (*args, *kwargs.values()))
            return result
        names = tuple(kernel.fn.arg_names[: len(args)])
        roles = {} if users else kernel_roles(names, kernel.mutated_arg_names)
        return on_launch(Launch(name, _InductorKernel(name, kernel), args, kwargs, names, roles), sys._getframe(1))

    return seen


def _seen_by_triton(on_launch: Any, watched: Callable[[], bool], launched: Callable[..., None]) -> Callable[..., Any]:
    run = TRITON_RUN.require()

    def seen(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or not watched():
            compiled = run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            if not warmup:
                launched(kernel.fn.__name__, [_code(compiled)], (*args, *kwargs.values()))
            return compiled
        names = tuple(kernel.arg_names[: len(args)])
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        roles = _analysed(kernel, named)
        launch = _TritonKernel(kernel.fn.__name__, kernel, grid)
        return on_launch(
            Launch(kernel.fn.__name__, launch, args, kwargs, names, roles), _outside_triton(sys._getframe(1))
        )

    return seen


def _code(compiled: Any) -> str:
    """Return the intermediate code of a compiled kernel (of Gluon's the first stage); empty if it has none."""
    kept = getattr(compiled, "asm", {})
    return kept.get("ttir") or kept.get("ttgir") or ""


def _outside_triton(frame: FrameType) -> FrameType:
    """Return the frame that launches: ``kernel[grid](...)`` and tuners run through Triton's own code."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("triton."):
        frame = frame.f_back
    return frame


def _analysed(kernel: Any, named: Mapping[str, Any]) -> dict[str, Role]:
    """Roles from the kernel's intermediate code; none (all tensors read and written) where that fails."""
    tensors = [name for name, value in named.items() if isinstance(value, torch.Tensor)]
    inside = pytree.tree_leaves([value for value in named.values() if isinstance(value, (tuple, list))])
    if any(isinstance(one, torch.Tensor) for one in inside):
        return {}  # torch's analysis trips over them, and what it does then ends a capture
    try:
        wrap = TRITON_ANALYSIS.require()
        known = {name: value for name, value in named.items() if name in kernel.arg_names}
        if hasattr(wrap, "identify_accessed_tensors"):
            mutated = {dep.name for dep in wrap.identify_accessed_tensors(kernel, known, {}).read_writes.writes}
        else:
            mutated = set(wrap.identify_mutated_tensors(kernel, known, {}))  # torch 2.11
    except Exception:  # an analysis of another library's intermediate code: whatever it trips over, both is safe
        return {}
    return {name: BOTH if name in mutated else (True, False) for name in tensors}


def _watch_generated(module: ModuleType, on_launch: Any, watched: Callable[[], bool], undo: ExitStack) -> None:
    """Let what a module of Inductor's makes past the dispatcher go through it, and see its host kernels."""
    for name, seen in _SEEN.items():
        if name in module.__dict__:
            undo.callback(setattr, module, name, module.__dict__[name])
            setattr(module, name, seen)
    for name, types in _host_kernels(module).items():
        kernel = module.__dict__.get(name)
        if kernel is None:
            continue
        reads = (f"arg{place}" for place, kind in enumerate(types) if kind.startswith("const "))
        roles: Mapping[str, Role] = dict.fromkeys(reads, (True, False))

        def launch(*args: Any, _kernel: Any = kernel, _name: str = name, _roles: Mapping[str, Role] = roles) -> Any:
            if not watched():
                return _kernel(*args)
            names = tuple(f"arg{place}" for place in range(len(args)))
            return on_launch(Launch(_name, _HostKernel(_name, module), args, {}, names, _roles), sys._getframe(1))

        undo.callback(setattr, module, name, kernel)
        setattr(module, name, launch)


@cache
def _host_kernels(module: ModuleType) -> dict[str, tuple[str, ...]]:
    """Host kernels of a generated module, with the C types of their arguments; none of these where its file is gone."""
    file = getattr(module, "__file__", None)
    if not file or "reinterpret_tensor" not in module.__dict__:
        return {}
    try:
        with open(file, encoding="utf-8") as source:
            text = source.read()
    except FileNotFoundError:
        return {name: () for name, one in module.__dict__.items() if name.startswith("cpp_") and callable(one)}
    return {
        name: tuple(one.strip().strip("'\"") for one in types.split(",") if one.strip())
        for name, types in _HOST_KERNEL.findall(text)
    }


def _empty_strided(device: str) -> Callable[..., torch.Tensor]:
    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        return torch.empty_strided(size, stride, dtype=dtype, device=where)

    return empty_strided


def relative_window(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Return a window that starts ``offset`` elements after ``tensor`` does.

    Its operators keep that relation wherever a replay has the memory; ``as_strided`` counts from the memory's start.
    """
    alias: Callable[..., torch.Tensor] = torch.ops.aten._reshape_alias.default
    if offset:
        reach = sum((one - 1) * step for one, step in zip(size, stride, strict=True)) + 1 if 0 not in size else 0
        tensor = torch.ops.aten.slice.Tensor(alias(tensor, [offset + reach], [1]), 0, offset, offset + reach)
    return alias(tensor, size, stride)


_SEEN: dict[str, Callable[..., Any]] = {
    "empty_strided_cuda": _empty_strided("cuda"),
    "empty_strided_cpu": _empty_strided("cpu"),
    "reinterpret_tensor": relative_window,
}
