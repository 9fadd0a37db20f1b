"""One prepared signature of a model: what replays it, and what is known about that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from nimble_core.guards.folded_values import announce
from nimble_core.guards.module_guard import Watch
from nimble_core.ir.candidates import Candidate
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.device import Executable
from nimble_core.scheduling.saved_plan import Plan
from nimble_core.tracing.folded_weights import Folded
from nimble_core.tracing.input_memory import Apart
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.recorded import Recorded
from nimble_core.tracing.recording_contexts import Autocast
from nimble_core.tracing.signature import Signature
from nimble_core.training.autograd_function import Backward
from nimble_core.utils.errors import InputError

__all__ = ["Engine"]


@dataclass(frozen=True, slots=True)
class Engine:
    """One prepared signature.

    Args:
        signature: inputs it takes.
        executable: what it replays.
        build: makes the model's output of output tensors.
        mode: whether the module was in training mode when it was prepared.
        watch: notices that the model was changed in a way that a replay cannot follow, and folded weights.
        check_first: whether it is asked before a run. Otherwise it is asked while the device is busy with the run,
            which then is repeated on weights that were folded anew.
        seconds: preparation time by step; ``"warm-up"`` holds library loading and autotuning.
        candidates: the plans that were tried before this one was chosen.
        plan: what it runs, as a value to keep and to prepare with again; None if the module was captured as a whole.
        notes: what the user should know.
        recorded: the calls that it replays.
        costs: isolated time of each, None if nothing was measured.
        folded: constants that it reads in place of weights; None if it reads all weights live.
        writes: addresses of the storages outside of it, inputs not counted, that a run writes.
        backward: what follows a forward that was prepared for training; None for inference.
        apart: asks whether inputs share memory; None if a run writes none of them.
        autocast: what it was prepared under; None for a step, which casts by itself or asks by itself.
        passed_on: caches among the inputs that the output holds, as ``(0, position)`` or ``(1, keyword)``; ``build``
            takes them behind the output tensors.
        unlinked: set once it was said that outputs carry no gradient to an input or a parameter that requires one.
    """

    signature: Signature
    executable: Executable
    build: Callable[[Sequence[torch.Tensor]], Any]
    mode: bool
    watch: Watch
    check_first: bool
    seconds: Mapping[str, float]
    recorded: Recorded
    costs: Costs | None = None
    candidates: tuple[Candidate, ...] = ()
    plan: Plan | None = None
    notes: tuple[str, ...] = ()
    folded: Folded | None = None
    writes: frozenset[int] = frozenset()
    backward: Backward | None = None
    apart: Apart | None = None
    autocast: Autocast | None = None
    passed_on: tuple[tuple[int, Any], ...] = ()
    unlinked: threading.Event = field(default_factory=threading.Event)

    @property
    def schedule(self) -> Schedule:
        """The schedule it replays."""
        return self.executable.schedule

    def __repr__(self) -> str:
        return (
            f"Engine({self.signature}; {self.executable.schedule.policy}, {len(self.executable.schedule.stream)} calls)"
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Return the input tensors of a call; None if it has other inputs, or is under another autocast."""
        tensors = self.signature.bind(args, kwargs)
        return None if tensors is None or (self.autocast is not None and not self.autocast.holds()) else tensors

    def run(self, tensors: Sequence[torch.Tensor], *, static: bool) -> list[torch.Tensor]:
        """Run on ``tensors`` and on the weights as they are now; see ``Executable.run``.

        Raises:
            InputError: the model is not the one that was prepared, or inputs share memory that a run writes.
            DeviceError: closed, or a call failed.
        """
        if self.apart is not None:
            self.apart.require(tensors)
        if self.check_first:
            self.check()
            outputs = self.executable.run(tensors, static=static)
        else:
            folds = self.watch.values.folds
            outputs = self.executable.run(tensors, static=static)
            self.check()
            if self.watch.values.folds != folds:
                outputs = self.executable.run(tensors, static=static)
        if self.writes:
            announce(self.writes, by=self.watch.values)  # a replayed graph raises no version counter
        return outputs

    def say_unlinked(self, tensors: Sequence[torch.Tensor], parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Warn once, before a run under autograd, that outputs carry no gradient to inputs that require one.

        In training mode the same goes for ``parameters``: in evaluation mode few ask for gradients of them.
        """
        if self.unlinked.is_set():
            return
        inputs = zip(self.signature.paths, tensors, strict=True)
        named = chain(
            inputs, ((f"the model is in training mode, {name}", one) for name, one in parameters if self.mode)
        )
        wanted = next((name for name, tensor in named if tensor.requires_grad), "")
        if wanted:
            self.unlinked.set()
            warn(
                f"{wanted} requires a gradient, but outputs of what was prepared for inference carry none; "
                "prepare(..., training=True) for gradients, or call under torch.no_grad()"
                + (" or after eval()" if self.mode else "")
            )

    def close(self) -> None:
        """Free what it holds."""
        self.executable.close()
        if self.backward is not None:
            self.backward.close()

    def check(self, *, thorough: bool = False) -> None:
        """Refuse a model that a replay cannot follow; fold again what has changed."""
        change = self.watch.looked_through() or self.watch.setting() if thorough else self.watch.change()
        if change:
            raise InputError(f"the model is not the one that was prepared: {change}", fix="call prepare(...) again")
        if self.folded is not None and self.watch.values.stale():
            with self.executable.paused():
                if self.watch.values.stale():  # no other thread was faster
                    self.watch.values.folding()
                    try:
                        self.folded.refresh()
                    except BaseException:
                        self.watch.values.doubt()
                        raise
