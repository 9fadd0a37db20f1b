"""The training step that ``compare`` measures: as its user writes it, as peers run it, and as one module to record.

Every run trains for real: on the user's own parameters, which the caller of the runs puts back (``state_kept``), with
copies of the user's optimizer. ``.grad`` is put aside by ``Training.gradients_kept``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from nimble_core.errors import InputError
from nimble_core.gradients import perturbed
from nimble_core.optimizers import CapturedOptimizer
from nimble_core.pipeline import state_kept
from nimble_core.preserve import preserved
from nimble_core.program import Phase
from nimble_core.structure import builder, flatten
from nimble_core.training import WholeStep
from nimble_viz.measure.profile import PHASE

if TYPE_CHECKING:
    from nimble_core.pipeline import Recorded
    from nimble_core.tuning import Cases
    from nimble_viz.peers import Peer, Run

__all__ = ["Training", "TrainingRun", "mark_phase"]

_UPDATE_TOLERANCE = 1e-3
_UPDATE_ROUNDINGS = 2

Mark = Callable[[Phase], AbstractContextManager[Any]]


def mark_phase(name: Phase) -> AbstractContextManager[Any]:
    """Tells the profiler that phase ``name`` runs inside."""
    return torch.profiler.record_function(f"{PHASE}{name}")


def _unmarked(_: Phase) -> AbstractContextManager[Any]:
    return nullcontext()


class TrainingRun:
    """One training step as users write it: zeroed gradients, forward, loss, backward, ``optimizer.step()``.

    Called with ``(inputs, targets)`` it returns what ``WholeStep`` does: loss, output, gradients by parameter name.

    Args:
        forward: the model, or what a peer made of it.
        loss_fn: of output and targets, of the output alone where there are none.
        optimizer: its own, of ``trained``; None: nothing is updated.
        trained: parameters that ``forward`` reads, by name.
    """

    def __init__(
        self,
        forward: Run,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        trained: Mapping[str, torch.Tensor],
    ) -> None:
        self.forward, self.loss_fn, self.optimizer, self.trained = forward, loss_fn, optimizer, dict(trained)

    @property
    def note(self) -> str:
        """What readers of a peer's times should know."""
        return str(getattr(self.forward, "note", ""))

    def step(self, inputs: Any, targets: Any = None, mark: Mark = _unmarked) -> tuple[torch.Tensor, Any]:
        """Train one step; loss and output, which may be under way on the device."""
        with torch.enable_grad():
            with mark("optimizer"):
                if self.optimizer is None:
                    for parameter in self.trained.values():
                        parameter.grad = None
                else:
                    self.optimizer.zero_grad()
            with mark("forward"):
                output = self.forward(**inputs) if isinstance(inputs, Mapping) else self.forward(*inputs)
            with mark("loss"):
                loss = self.loss_fn(output) if targets is None else self.loss_fn(output, targets)
            with mark("backward"):
                loss.backward()
            if self.optimizer is not None:
                with mark("optimizer"):
                    self.optimizer.step()
        return loss, output

    def __call__(self, inputs: Any, targets: Any = None) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
        """Train one step; what ``WholeStep`` returns."""
        loss, output = self.step(inputs, targets)
        gradients = {name: one.grad for name, one in self.trained.items() if one.grad is not None}
        tensors, structure = flatten(output, what="output")
        return loss.detach(), builder(structure)([tensor.detach() for tensor in tensors]), gradients

    def close(self) -> None:
        """Free what a peer holds, and the gradients."""
        for parameter in self.trained.values():
            parameter.grad = None
        getattr(self.forward, "close", lambda: None)()


class Training:
    """What a training comparison is about.

    Args:
        model: the user's module.
        args: positional inputs, and
        kwargs: keyword inputs of the model. Inputs that require gradients are taken without.
        target: what the loss is told; None: nothing.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where the target is None; a scalar.
        optimizer: the user's, never written; None: forward, loss and backward alone.

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
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"model is a {type(model).__name__}, not a torch.nn.Module", fix="pass a module to train")
        if not callable(loss_fn):
            raise InputError(
                "training needs a loss" if loss_fn is None else f"loss_fn is a {type(loss_fn).__name__}",
                fix="loss_fn=a function or module of (output, target); a model that returns its loss: "
                "loss_fn=lambda output: output.loss",
            )
        if not any(one.requires_grad for one in model.parameters()):
            raise InputError("no parameter of the model requires a gradient", fix="unfreeze some, or training=False")
        self.model, self.loss_fn = model, loss_fn
        self.arguments: tuple[Any, Any] = _without_gradients((_as_inputs(model, args, kwargs), target))
        self._optimizer = None if optimizer is None else _copied(optimizer)
        captured = None
        if self._optimizer is not None:
            captured = CapturedOptimizer(self._optimizer, next(model.parameters()).device)
            for parameter, kept in zip(captured.parameters, captured.state, strict=True):
                if kept:
                    self._optimizer.state[parameter] = dict(kept)
        self._captured = captured
        self.whole = WholeStep(model, loss_fn, captured)
        trained = self.whole.trained()
        self.eager = TrainingRun(model, loss_fn, None if optimizer is None else _copied(optimizer), trained)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know."""
        found = []
        if not any(module.training for module in self.model.modules()):
            found.append("the model is in eval mode: batch norm and dropout do not train; model.train() changes that")
        if self._captured is None:
            found.append("no optimizer was given: a step is forward, loss and backward")
        return tuple(found)

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Inside, no parameter has a gradient at first; at the end each has its own again."""
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

    def rounded(self, recorded: Recorded, cases: Cases) -> tuple[list[list[torch.Tensor]], list[str]]:
        """For each case what eager makes of it where rounding differs, and what to call the outputs."""
        build = builder(recorded.signature.structure)
        moved, names = [], list[str]()
        for inputs, _ in cases.eager:
            args, _ = build([tensor.clone() for tensor in inputs])
            with preserved(self.whole), state_kept(recorded), torch.no_grad():
                with perturbed():
                    result = self.whole(*args)
                moved.append([tensor.detach().clone() for tensor in flatten(result, what="output")[0]])
                names = [f"gradient of {name}" for name in result[2]]
        outputs = len(moved[0]) - 1 - len(names)
        return moved, ["loss", *["output"] * outputs, *names]

    def rewinding(self) -> Callable[[], None]:
        """A function that puts parameters, buffers and optimizer state back to what they are now."""
        live = [one.detach() for one in (*self.whole.parameters(), *self.whole.buffers())]
        values = [one.clone() for one in live]

        def rewind() -> None:
            with torch.no_grad():
                torch._foreach_copy_(live, values)

        return rewind

    def replay(self, run: Callable[[], Sequence[Any]]) -> Callable[[], torch.Tensor]:
        """What a call of ``TrainStep`` does around ``run``, a replay: the host's part, and the caller's own loss."""
        captured = self._captured

        def once() -> torch.Tensor:
            if captured is not None:
                captured.sync()
            loss: torch.Tensor = run()[0]
            return loss.clone()

        return once

    def peer(self, one: Peer) -> TrainingRun:
        """The step as peer ``one`` runs forward and backward, with the user's optimizer.

        Raises:
            InputError: it cannot train.
        """
        from nimble_viz.peers import twin_of

        prepare = getattr(one, "prepare_training", None)
        if prepare is None:
            raise InputError(f"{one.name} is for inference: it has no prepare_training")
        twin = twin_of(self.model)
        assert isinstance(twin, torch.nn.Module)
        swap: dict[torch.Tensor, torch.Tensor] = dict(zip(self.model.parameters(), twin.parameters(), strict=True))
        inputs = self.arguments[0]
        with torch.enable_grad():
            run = prepare(
                twin, () if isinstance(inputs, Mapping) else inputs, inputs if isinstance(inputs, Mapping) else {}
            )
        trained = {name: swap.get(parameter, parameter) for name, parameter in self.whole.trained().items()}
        optimizer = self.eager.optimizer
        return TrainingRun(run, self.loss_fn, None if optimizer is None else _copied(optimizer, swap), trained)

    def wrong_update(self, run: Callable[[], tuple[Any, Any, Mapping[str, torch.Tensor]]]) -> str:
        """Whether a replay's update is what the optimizer makes of the replay's gradients: how it is not, or nothing.

        To be called where state is kept. The difference allowed is a thousandth of the update, and rounding.
        """
        if self._optimizer is None:
            return ""
        trained, own = self.whole.trained(), _copied(self._optimizer)
        before = {name: one.detach().clone() for name, one in trained.items()}
        gradients = {name: one.clone() for name, one in run()[2].items()}
        after = {name: one.detach().clone() for name, one in trained.items()}
        with torch.no_grad(), self.gradients_kept():
            for name, one in trained.items():
                one.copy_(before[name])
            for name, one in trained.items():
                one.grad = gradients.get(name)
            own.step()
        worst, where = 0.0, ""
        for name, one in trained.items():
            if not one.is_floating_point():
                continue
            expected, start = one.detach().double(), before[name].double()
            rounding = _UPDATE_ROUNDINGS * torch.finfo(one.dtype).eps * start.norm()
            allowed = _UPDATE_TOLERANCE * (expected - start).norm() + rounding
            off = float((after[name].double() - expected).norm() / allowed) if float(allowed) else 0.0
            if not off <= max(worst, 1.0):
                worst, where = off, name
        return f"the update of {where} is not what the optimizer makes of its gradient" if where else ""


def _as_inputs(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A tuple of positional or a dict of keyword inputs; both together by name."""
    if not kwargs:
        return tuple(args)
    if not args:
        return dict(kwargs)
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    if kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}:
        raise InputError(
            "positional inputs without names, and keyword inputs beside", fix="pass all by name, in kwargs"
        )
    more = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")
    named = dict(bound.arguments)
    return named | named.pop(more, {}) if more else named


def _without_gradients(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same tensors, cut off from any graph of the caller's, which a backward would run through."""
    tensors, structure = flatten(arguments, what="input")
    if not any(tensor.requires_grad for tensor in tensors):
        return arguments
    built: tuple[Any, Any] = builder(structure)([tensor.detach() for tensor in tensors])
    return built


def _copied(
    optimizer: torch.optim.Optimizer, swap: Mapping[torch.Tensor, torch.Tensor] | None = None
) -> torch.optim.Optimizer:
    """The optimizer with state and groups of its own, for the same parameters, or for those they are swapped for."""
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
