"""Hear of a loop's iterations through hooks, where neither the model nor the loop was touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any, TypeVar, cast

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from nimble_core.torch_compat.members import DATA_LOADER
from nimble_core.tracing.side_effects import only_watches
from nimble_viz.collect.sampler import Kind

__all__ = ["LoopHooks"]

_Batch = TypeVar("_Batch")


class LoopHooks:
    """Call ``tick`` at each batch of a data loader, step of an optimizer and call of an outermost module.

    Args:
        tick: told what kind of iteration begins, and of which loader, optimizer or module.
        waited: told how many nanoseconds a batch took.
    """

    def __init__(self, tick: Callable[[Kind, int], None], waited: Callable[[int], None]) -> None:
        self._tick, self._waited = tick, waited
        self._depth = self._loading = 0
        self._thread = get_ident()
        self._root: Any = None
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
        self._remove_module_hooks()
        if kind == "module" and self._root is not None:
            root = self._root
            try:
                self._modules = [root.register_forward_pre_hook(lambda *_: self._tick("module", id(root)))]
            except RuntimeError:  # TorchScript takes none of its own

                def enter(module: Any, *_: Any) -> None:
                    if module is root:
                        self._tick("module", id(root))

                only_watches(enter)
                self._modules = [register_module_forward_pre_hook(enter)]
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
        if torch.compiler.is_compiling():  # what the compiler makes must not hold a hook
            return
        if get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth == 1:
            self._root = module
            self._tick("module", id(module))

    def _leave_module(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)
