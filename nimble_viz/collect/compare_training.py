"""The training step that ``compare`` measures, as users write it, as peers run it, and as one module.

Every run trains for real: the caller puts parameters (``state_kept``) and gradients (``gradients_kept``) back.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nimble_core.api.train_step import require_arguments
from nimble_core.ir.program import Phase
from nimble_core.scheduling.options import Options
from nimble_core.torch_compat.dispatch import foreach_copy_
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.tracing.recording_contexts import no_autocast
from nimble_core.tracing.side_effects import preserved
from nimble_core.tracing.signature import take_apart
from nimble_core.tracing.step_wrapper import require_training_mode
from nimble_core.training.loss_checks import require_no_target
from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.training.whole_step import WholeStep
from nimble_core.utils.errors import InputError
from nimble_viz.collect.peers import Peer, Run, twin_of
from nimble_viz.traces.events import PHASE

__all__ = ["Training", "TrainingRun", "mark_phase"]

Mark = Callable[[Phase], AbstractContextManager[Any]]


def mark_phase(name: Phase) -> AbstractContextManager[Any]:
    """Tell the profiler that phase ``name`` runs inside."""
    return torch.profiler.record_function(f"{PHASE}{name}")


@dataclass(eq=False, slots=True)
class TrainingRun:
    """One training step as users write it: zeroed gradients, forward, loss, backward, update.

    ``forward`` is the model, or what a peer made of it, and ``trained`` are the parameters that it reads. The optimizer
    is the run's own, and so is the scaler, around a scale that runs may share.
    """

    forward: Run
    loss_fn: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    trained: Mapping[str, torch.Tensor]
    casting: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: torch.amp.GradScaler | None = None
    clip_grad_norm: float | None = None

    @property
    def note(self) -> str:
        """What readers of a peer's times should know."""
        return str(getattr(self.forward, "note", ""))

    def step(
        self, inputs: Any, targets: Any = None, mark: Mark = nullcontext, *, unscaled: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Train one step; return loss and output, which the device may still be computing."""
        with torch.enable_grad():
            with mark("optimizer"):
                if self.optimizer is None:
                    for parameter in self.trained.values():
                        parameter.grad = None
                else:
                    self.optimizer.zero_grad()
            with self.casting():
                with mark("forward"):
                    output = self.forward(**inputs) if isinstance(inputs, Mapping) else self.forward(*inputs)
                with mark("loss"):
                    loss = self.loss_fn(output) if targets is None else self.loss_fn(output, targets)
                    scaled = loss if self.scaler is None else self.scaler.scale(loss)
            with mark("backward"), no_autocast(loss.device.type):
                scaled.backward()
            if self.optimizer is not None:
                with mark("optimizer"):
                    self._update(self.optimizer, unscaled=unscaled)
        return loss, output

    def _update(self, optimizer: torch.optim.Optimizer, *, unscaled: bool) -> None:
        if self.scaler is not None and (unscaled or self.clip_grad_norm is not None):
            self.scaler.unscale_(optimizer)  # fused optimizers do it themselves otherwise
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self.clip_grad_norm)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def __call__(self, inputs: Any, targets: Any = None) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
        """Train one step; return what ``WholeStep`` does."""
        loss, output = self.step(inputs, targets, unscaled=True)
        gradients = {name: one.grad for name, one in self.trained.items() if one.grad is not None}
        tensors, structure = flatten(output, what="output")
        return loss.detach(), builder(structure)([tensor.detach() for tensor in tensors]), gradients

    def close(self) -> None:
        """Free what a peer holds, and the gradients."""
        for parameter in self.trained.values():
            parameter.grad = None
        getattr(self.forward, "close", lambda: None)()


class Training:
    """A training step to compare; arguments are those of ``compare``.

    Optimizer and scaler are the user's and never written: runs work on copies. A disabled scaler counts as None. Inputs
    that require gradients are detached.

    Attributes:
        whole: the step as one module of ``(inputs, targets)``, with a copy of the optimizer.
        arguments: ``(inputs, targets)``.

    Raises:
        InputError: what cannot be trained ahead of time; says why.
    """

    def __init__(
        self,
        model: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        target: Any,
        loss_fn: Any,
        optimizer: Any,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip_grad_norm: float | None = None,
    ) -> None:
        if loss_fn is None:
            raise InputError(
                "training needs a loss",
                fix="loss_fn=a function or module of (output, target); a model that returns its loss: "
                "loss_fn=lambda output: output.loss",
            )
        require_arguments(model, loss_fn, Options(), autocast, scaler, clip_grad_norm, 1)
        require_training_mode(model)
        if target is None:
            require_no_target(loss_fn, "target=...")
        if not any(one.requires_grad for one in model.parameters()):
            raise InputError("no parameter of the model requires a gradient", fix="unfreeze some, or training=False")
        _require_step_options(model, optimizer, scaler, clip_grad_norm)
        device = next(model.parameters()).device
        self.model, self.loss_fn = model, loss_fn
        self.autocast, self.clip_grad_norm = autocast, clip_grad_norm
        self.casting: Callable[[], AbstractContextManager[Any]] = (
            nullcontext if autocast is None else partial(torch.autocast, device.type, dtype=autocast)
        )
        self.arguments: tuple[Any, Any] = _without_gradients((_as_inputs(model, args, kwargs), target))
        self._captured: CapturedOptimizer | None = None
        if optimizer is not None:
            twin = _copied(optimizer)
            self._captured = CapturedOptimizer(twin, device)
            for parameter, kept in zip(self._captured.parameters, self._captured.state, strict=True):
                if kept:  # as after a first step, so that replays look for changes as they do in training
                    twin.state[parameter] = dict(kept)
        self.whole = WholeStep(
            model,
            loss_fn,
            self._captured,
            autocast=autocast,
            scaler=None if scaler is None else _copied_scaler(scaler),
            clip_grad_norm=clip_grad_norm,
        )
        self.whole.input_names = "kwargs" if isinstance(self.arguments[0], Mapping) else "args", "target"
        own = None if optimizer is None else _copied(optimizer)
        self.eager = self._run(model, own, self.whole.trained())

    def _run(
        self, forward: Run, optimizer: torch.optim.Optimizer | None, trained: Mapping[str, torch.Tensor]
    ) -> TrainingRun:
        """Make a run with the step's settings. It shares the scale of ``whole``, and is rewound with it."""
        scaler = None
        if self.whole.scaler is not None:
            scaler = _copied_scaler(self.whole.scaler)
            scaler._scale, scaler._growth_tracker = self.whole.scaler._scale, self.whole.scaler._growth_tracker
        return TrainingRun(forward, self.loss_fn, optimizer, trained, self.casting, scaler, self.clip_grad_norm)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know."""
        found = []
        if self._captured is None:
            found.append("no optimizer was given: a step is forward, loss and backward")
        elif self._captured.other_form:
            found.append(self._captured.other_form)
        if self.autocast is not None:
            found.append(f"forward and loss run under autocast to {str(self.autocast).removeprefix('torch.')}")
        if self.whole.scaler is not None:
            found.append(f"the loss is scaled by {self.whole.scaler.get_scale():,g}, by a copy of the gradient scaler")
        if self.clip_grad_norm is not None:
            found.append(f"gradients are clipped to a norm of {self.clip_grad_norm:g} together")
        return tuple(found)

    def left_out(self, recorded: Recorded) -> str:
        """Say that the scaler skips the step at its present scale; return nothing if it does not."""
        if self.whole.scaler is None:
            return ""
        with preserved(self.whole, draws=()), state_kept(recorded):
            gradients = self.whole(*self.arguments)[2]
        infinite = next((name for name, one in gradients.items() if not one.isfinite().all()), "")
        if not infinite:
            return ""
        return (
            f"at this loss scale the gradient of {infinite} is not finite: eager and replays leave the update out; "
            "pass a scaler that has made a few steps"
        )

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Put all gradients aside, and give each parameter its own back at the end."""
        parameters = dict.fromkeys([*self.whole.parameters(), *self.whole.trained().values()])
        if isinstance(self.loss_fn, torch.nn.Module):
            parameters |= dict.fromkeys(self.loss_fn.parameters())
        before = {one: one.grad for one in parameters}
        try:
            for one in before:
                one.grad = None
            yield
        finally:
            for one, gradient in before.items():
                one.grad = gradient

    def rewinding(self) -> Callable[[], None]:
        """Return a function that puts parameters, buffers and optimizer state back to what they are now."""
        live = [one.detach() for one in (*self.whole.parameters(), *self.whole.buffers())]
        values = [one.clone() for one in live]

        def rewind() -> None:
            with torch.no_grad():
                foreach_copy_(live, values)

        return rewind

    def replay(self, run: Callable[[], Sequence[Any]]) -> Callable[[], torch.Tensor]:
        """Wrap a replay as ``TrainStep`` does: the host's part before it, and a loss of the caller's own."""
        captured = self._captured

        def once() -> torch.Tensor:
            if captured is not None:
                captured.sync()
            loss: torch.Tensor = run()[0]
            return loss.clone()

        return once

    def peer(self, one: Peer) -> TrainingRun:
        """Make the step with forward and backward of peer ``one``, and a copy of the user's optimizer.

        Raises:
            InputError: it cannot train.
        """
        prepare = getattr(one, "prepare_training", None)
        if prepare is None:
            raise InputError(f"{one.name} is for inference: it has no prepare_training")
        twin = twin_of(self.model)
        assert isinstance(twin, torch.nn.Module)
        swap: dict[torch.Tensor, torch.Tensor] = dict(zip(self.model.parameters(), twin.parameters(), strict=True))
        inputs = self.arguments[0]
        with torch.enable_grad(), self.casting():
            run = prepare(
                twin, () if isinstance(inputs, Mapping) else inputs, inputs if isinstance(inputs, Mapping) else {}
            )
        trained = {name: swap.get(parameter, parameter) for name, parameter in self.whole.trained().items()}
        optimizer = self.eager.optimizer
        return self._run(run, None if optimizer is None else _copied(optimizer, swap), trained)


def _require_step_options(model: torch.nn.Module, optimizer: Any, scaler: Any, clip_grad_norm: Any) -> None:
    held = [id(one) for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]
    if held and {id(one) for one in model.parameters()}.isdisjoint(held):
        raise InputError(
            f"{type(optimizer).__name__} holds no parameter of the model",
            fix="make it of this model's parameters(), not of a copy's",
        )
    if optimizer is None and (scaler is not None or clip_grad_norm is not None):
        raise InputError("scaler and clip_grad_norm are for updates, and there is no optimizer", fix="pass one")


def _as_inputs(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a tuple of positional or a dict of keyword inputs; both together by name."""
    if not kwargs:
        return tuple(args)
    if not args:
        return dict(kwargs)
    positional = list(inspect.signature(model.forward).parameters.values())[: len(args)]
    if len(positional) < len(args) or any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in positional):
        raise InputError(
            "positional inputs without names, and keyword inputs beside", fix="pass all by name, in kwargs"
        )
    return {one.name: value for one, value in zip(positional, args, strict=True)} | dict(kwargs)


def _without_gradients(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    """Detach the tensors from any graph of the caller's, which a backward would run through."""
    tensors, structure, _ = take_apart(arguments, {}, ("inputs", "target"))
    if not any(tensor.requires_grad for tensor in tensors):
        return arguments
    (inputs, target), _ = builder(structure)([tensor.detach() for tensor in tensors])
    return inputs, target


def _copied(
    optimizer: torch.optim.Optimizer, swap: Mapping[torch.Tensor, torch.Tensor] | None = None
) -> torch.optim.Optimizer:
    """Copy the optimizer, state and groups, for the same parameters or for those they are swapped for."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"the optimizer is a {type(optimizer).__name__}", fix="pass a torch.optim.Optimizer")
    members = [one for group in optimizer.param_groups for one in group["params"]]
    swap = swap or {}
    memo: dict[int, Any] = {id(one): swap.get(one, one) for one in members}
    held = vars(optimizer)
    if hasattr(held.get("step"), "_wrapped_by_lr_sched"):  # a scheduler's counter, bound to the original
        held = {key: value for key, value in held.items() if key != "step"}
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(copy.deepcopy(held, memo))
    return twin


def _copied_scaler(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Copy a scaler: settings, scale and count of steps."""
    try:
        return copy.deepcopy(scaler)
    except (AssertionError, RuntimeError) as error:  # torch's refusal in the midst of a step
        raise InputError(f"the scaler cannot be copied: {error}", fix="call scaler.update() first") from error
