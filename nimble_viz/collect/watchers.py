"""Watch code that nobody touched: where its operators come from, and when an iteration of its loop begins."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from threading import get_ident
from time import perf_counter_ns
from traceback import walk_stack
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from nimble_core.api.nimble import Nimble
from nimble_core.ir.program import Origin
from nimble_core.torch_compat.dispatch import TorchDispatchMode, current_mode
from nimble_core.torch_compat.members import DATA_LOADER
from nimble_core.tracing.provenance import module_paths, place_of
from nimble_core.tracing.side_effects import only_watches
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_viz.collect.sampler import Kind
from nimble_viz.collect.sources import pass_over_machinery
from nimble_viz.traces.events import PRINT
from nimble_viz.traces.profiler import watched_prints

__all__ = ["DispatchOrigins", "LoopHooks"]


class DispatchOrigins(TorchDispatchMode):
    """Watches from ``begin`` to ``end``: ``seen``, an origin for each operator; ``replayed``, if a replay ran one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.seen: list[Origin] = []
        self.replayed = False
        self._paths: dict[int, str] = {}
        self._roots: set[int] = set()
        self._watching = ExitStack()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled stay so."""
        return True

    def begin(self) -> None:
        """Start to watch; not under a mode of somebody else, who would leave ours in its place."""
        if current_mode() is not None:
            return
        pass_over_machinery()
        self._watching.enter_context(watched_prints(self._printed))
        self.__enter__()  # type: ignore[no-untyped-call]  # torch's has no types

    def end(self) -> None:
        """Stop, if it still watches. Under a mode that was entered since, it stays until that has been left."""
        with interrupts_postponed():
            self._watching.close()
            if current_mode() is self:
                self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note(str(func), sys._getframe().f_back)  # autograd's threads may have no frame
        return func(*args, **(kwargs or {}))

    def _note(self, operator: str, frame: FrameType | None) -> None:
        root = _outermost_module(frame) if frame is not None else None
        if root is not None and id(root) not in self._roots:
            self._roots.add(id(root))
            self._paths.update(module_paths(root))
        self.seen.append(Origin(operator, *place_of(frame, self._paths)))
        around = walk_stack(frame) if frame is not None and not self.replayed else ()
        self.replayed |= any(one.f_globals.get("__name__", "").startswith("nimble_core.runtime.") for one, _ in around)

    def _printed(self) -> nullcontext[None]:
        """Note one operator for a tensor that is printed: the reads that it makes run without a mode."""
        self._note(PRINT.replace("::", "."), sys._getframe())
        return nullcontext()


def _outermost_module(frame: FrameType) -> torch.nn.Module | None:
    calls = (one.f_locals.get("self") for one, _ in walk_stack(frame) if one.f_code.co_name == "_call_impl")
    modules = [one for one in calls if isinstance(one, torch.nn.Module)]
    return modules[-1] if modules else None


_Batch = TypeVar("_Batch")


class LoopHooks:
    """Tell ``tick`` of each batch, optimizer step and call of an outermost module, and ``waited`` a batch's ns."""

    def __init__(self, tick: Callable[[Kind, int], None], waited: Callable[[int], None]) -> None:
        self._tick, self._waited = tick, waited
        self._depth = self._loading = 0
        self._thread = get_ident()
        self._root: Any = None
        self.replayed = False  # whether one of the modules was prepared
        # torch.compile warns of hooks on all modules. Nobody else knows of ours, and it does not see them.
        warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)
        self._filter = warnings.filters[0]
        self._optimizers = register_optimizer_step_post_hook(lambda who, *_: tick("optimizer", id(who)))
        for hook in (self._enter_module, self._leave_module):  # else prepared modules would refuse to run
            only_watches(hook)
        self._modules = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._loader = DATA_LOADER.require()
        self._next = original = self._loader.__next__
        self._loader.__next__ = lambda loader: self.timed(id(loader._dataset), lambda: original(loader))

    def timed(self, who: int, following: Callable[[], _Batch]) -> _Batch:
        """Return the next batch of a loader. Where loaders are nested, only the outer one's time counts."""
        self._tick("loader", who)
        start, self._loading = perf_counter_ns(), self._loading + 1
        try:
            return following()
        finally:
            self._loading -= 1
            if not self._loading:
                self._waited(perf_counter_ns() - start)

    def only(self, kind: Kind) -> None:
        """Remove the hooks of the other kinds: hooks on every module would slow down what is timed."""
        root = self._root if kind == "module" else None
        if not isinstance(root, torch.jit.ScriptModule):  # which takes no hooks of its own
            self._remove_module_hooks()
            if root is not None:
                self._modules = [root.register_forward_pre_hook(lambda *_: self._tick("module", id(root)))]
        if kind != "optimizer":
            self._optimizers.remove()

    def close(self) -> None:
        """Remove all hooks."""
        self._remove_module_hooks()
        self._optimizers.remove()
        self._loader.__next__ = self._next

    def _remove_module_hooks(self) -> None:
        for hook in self._modules:
            hook.remove()
        self._modules = []
        if self._filter in warnings.filters:
            cast(list[Any], warnings.filters).remove(self._filter)

    def _enter_module(self, module: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != self._thread:  # what is compiled must not hold a hook
            return
        self._depth += 1
        self.replayed |= isinstance(module, Nimble) and bool(module.engines)
        if self._depth == 1:
            self._root = module
            self._tick("module", id(module))

    def _leave_module(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)
