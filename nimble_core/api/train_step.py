"""Training: a whole step (forward, loss, backward, optimizer) as one function of tensors, prepared like a model.

A step is recorded below autograd, so that its backward and its optimizer are calls like any others: they are scheduled
together with the forward, on as many streams. Parameters, buffers and optimizer state are the user's own tensors,
written in place by each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options, require_options
from nimble_core.scheduling.saved_plan import Plan
from nimble_core.tracing.grad_accumulators import require_no_node_hooks
from nimble_core.tracing.provenance import memory_explained
from nimble_core.tracing.recorded import require_local
from nimble_core.tracing.recording_contexts import autocast_name, autocast_type
from nimble_core.tracing.signature import require_initialised
from nimble_core.tracing.step_wrapper import require_gradients, require_training_mode
from nimble_core.training.gradients import require_no_tensor_hooks
from nimble_core.training.loss_checks import require_no_class, require_no_target
from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.training.whole_step import Result, Turn, WholeStep
from nimble_core.utils.errors import DeviceError, InputError
from nimble_core.utils.tracebacks import short_traceback

__all__ = ["TrainStep", "require_arguments"]


class _Present(NamedTuple):
    """Parameters that a step makes gradients of: their names, and positions among the optimizer's."""

    names: frozenset[str]
    positions: frozenset[int]


class TrainStep:
    """One training step, prepared ahead of time: zeroed gradients, forward, loss, backward, optimizer.

    Example::

        step = TrainStep(model, loss_fn, optimizer).prepare(x, y)
        for x, y in loader:
            loss = step(x, y)
            scheduler.step()

    Parameters, buffers and optimizer state are the user's own and hold after each step what they would in eager, so
    that ``state_dict``, checkpoints and eager steps in between just work. Learning rates are read before each step;
    other hyperparameters are those of the preparation, and refused when they change. ``.grad`` is left alone; see
    ``gradients``. An optimizer without state makes its first step in eager, which makes the state.

    Args:
        model: module in training mode; parts of it may be in evaluation mode.
        loss_fn: ``loss_fn(model(inputs), targets)``, or ``loss_fn(model(inputs))`` where targets are None; a scalar.
        optimizer: one of torch's (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop), of
            parameters of the model. NAdam, RAdam, ASGD and Adamax update float64 parameters with about the precision of
            float32, unless torch's default type is float64: see ``CapturedOptimizer``.
        options: how to prepare. Calls with other shapes follow ``on_new_shape``.
        autocast: type for ``torch.autocast`` around forward and loss, e.g. ``torch.bfloat16``.
        scaler: for float16: the loss is scaled, steps with gradients that are not finite are left out, and the scale is
            adapted, all on the device. Needs an optimizer with a fused form (SGD, Adam, AdamW, Adagrad). One that is
            disabled counts as None.
        clip_grad_norm: largest norm of all gradients together.
        accumulate: how many steps make one update; each counts for its share of the loss. They have to train the same
            parameters.

    Raises:
        InputError: what cannot be trained ahead of time; says why.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        options: Options = Options(),
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        require_gradients()
        require_arguments(model, loss_fn, options, autocast, scaler, clip_grad_norm, accumulate)
        device = next(model.parameters()).device
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.scaler, self.accumulate, self.options = scaler, accumulate, options
        self._captured = CapturedOptimizer(optimizer, device)
        _require_own(model, loss_fn, self._captured.parameters)
        self._done = 0
        self._closed = False
        self._scaling: tuple[float, ...] = ()
        self._autocast, self._device = autocast, device.type
        self._casts: torch.dtype | None = None
        self._handles_seen = -1
        self._last: Result | partial[Result] | None = None
        # Parameters that each engine, by its id, makes gradients of, and that the update at hand is of.
        self._present: dict[int, _Present] = {}
        self._accumulated: frozenset[str] = frozenset()

        middle: list[Turn] = ["middle"]
        self._turns: list[Turn] = ["only"] if accumulate == 1 else ["first", *middle * (accumulate - 2), "last"]
        trained = WholeStep(model, loss_fn, self._captured).trained() if accumulate > 1 else {}
        kept = {name: torch.zeros_like(one) for name, one in trained.items()}
        self._steps = {
            turn: WholeStep(
                model,
                loss_fn,
                self._captured,
                autocast=autocast,
                scaler=scaler,
                clip_grad_norm=clip_grad_norm,
                share=1.0 / accumulate,
                kept=kept,
                turn=turn,
            )
            for turn in dict.fromkeys(self._turns)
        }
        static = replace(options, outputs="static")
        self._nets = {turn: Nimble(step, static) for turn, step in self._steps.items()}

    @property
    def engine(self) -> Engine | None:
        """What was prepared last for the step that updates; None before ``prepare``."""
        engines = self._nets[self._turns[-1]].engines
        return engines[0] if engines else None

    @property
    def outputs(self) -> Any:
        """The model's output in the last step, in the engine's own buffers: the next step overwrites them."""
        last = self._result()
        return last[1] if last else None

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the last step by parameter name, clipped and unscaled; the next step overwrites them."""
        last = self._result()
        return last[2] if last else {}

    def _result(self) -> Result | None:
        """Of the last step, put together from the engine's tensors when first asked for."""
        if isinstance(self._last, partial):
            self._last = self._last()
        return self._last

    @short_traceback
    def prepare(self, inputs: Any, targets: Any = None, *, plan: Plan | None = None) -> TrainStep:
        """Record, schedule and capture the step for data like these; returns self.

        Nothing is trained: parameters, buffers, optimizer and scaler state, ``.grad`` and random state stay as they
        are, bit for bit.

        Args:
            inputs: a tensor, a tuple of positional or a dict of keyword arguments of the model.
            targets: what the loss is told; None: nothing.
            plan: of a step with this model, loss and optimizer, made before (``engine.plan``, or ``plan`` of the report
                of ``compare(..., training=True)``): the same schedule, without tuning. With ``accumulate`` it is of the
                step that updates; the others are prepared as without a plan.

        Raises:
            InputError, NotStaticError, CaptureError, DeviceError: as ``Nimble.prepare``. After a plan of another step,
                whose first difference is named, what was prepared before still holds.
        """
        require_training_mode(self.model)
        if targets is None:
            require_no_target(self.loss_fn, "targets: prepare(inputs, targets)")
        with memory_explained(self.model):
            self._captured.refresh()
        scaling, casts = _settings(self.scaler), self._casts_now()
        require_no_node_hooks(self._steps[self._turns[-1]].named_parameters())
        made: list[tuple[Turn, Engine]] = []
        try:
            for turn in sorted(self._nets, key=self._turns.index, reverse=True):  # the plan is that of the last
                made.append((turn, self._make(turn, inputs, targets, None if made else plan)))
        except BaseException:  # what was prepared before still holds, all of it
            for _, engine in made:
                engine.close()
            raise
        if (scaling, casts) != (self._scaling, self._casts):
            for net in self._nets.values():  # engines for other shapes, too, are of a step that is not this one
                net.close()
        self._scaling, self._casts = scaling, casts
        for turn, engine in made:
            self._nets[turn].adopt_engine(engine, (inputs, targets), {})
        return self

    def _require_no_hooks(self) -> None:
        """Raise InputError for a hook of a parameter; looked for only where a hook of any tensor has come since."""
        registered = RemovableHandle.next_id  # read before hooks are: who registers meanwhile is noticed
        if registered != self._handles_seen:
            require_no_tensor_hooks(self._steps[self._turns[-1]].named_tensors().items())
            self._handles_seen = registered

    def _casts_now(self) -> torch.dtype | None:
        """Return the type that forward and loss are cast to: the step's own, or that of the autocast around it."""
        return self._autocast or autocast_type(self._device)

    def _make(self, turn: Turn, inputs: Any, targets: Any, plan: Plan | None = None) -> Engine:
        engine = self._nets[turn].make_engine((inputs, targets), {}, plan=plan)
        step = self._steps[turn]
        positions = frozenset(at for at, name in enumerate(step.trained()) if name in step.present)
        self._present[id(engine)] = _Present(step.present, positions)
        return engine

    def __call__(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Train one step; returns its loss, a 0-dim tensor that belongs to the caller. Asynchronous on CUDA.

        Raises:
            InputError: prepared for other data, model or optimizer; nothing was trained then.
            DeviceError: closed, or a call failed.
        """
        turn = self._turns[self._done % self.accumulate]
        net, step = self._nets[turn], self._steps[turn]
        self._require_prepared(net)
        self._captured.sync()
        engine, tensors = net.bind((inputs, targets), {})
        if engine is None and self.options.on_new_shape == "prepare":
            net.adopt_engine(self._make(turn, inputs, targets), (inputs, targets), {})
            engine, tensors = net.bind((inputs, targets), {})
        earlier = None if turn in ("only", "first") else self._accumulated
        if engine is None and self.options.on_new_shape == "eager":
            # The optimizer's own step, not a captured one: these data may be the first to train a parameter.
            loss, present = self._eagerly(step, inputs, targets, earlier)
        elif engine is None:
            self._last = result = net(inputs, targets)  # says what differs
            loss, present = result[0], step.present
        else:
            require_no_tensor_hooks(zip(engine.signature.paths, tensors, strict=True))
            present, positions = self._present[id(engine)]
            if earlier is not None:
                step.require_same_parameters(present, earlier)
            if step.updates and self._captured.fresh_for(positions):
                engine.check()
                loss, present = self._eagerly(step, inputs, targets, earlier)
            else:
                found = engine.run(tensors, static=True)
                self._last, loss = partial(engine.build, found), found[0]
        self._accumulated = present
        self._done += 1
        return loss.clone()

    def _require_prepared(self, net: Nimble) -> None:
        """Raise InputError or DeviceError for a step that is not prepared, or was prepared for something else."""
        if not net.engines:
            if self._closed:
                raise DeviceError("the step was closed", fix="step.prepare(inputs, targets) again")
            raise InputError("the step is not prepared", fix="step.prepare(inputs, targets)")
        require_training_mode(self.model, preparing=False)
        if self._scaling and _settings(self.scaler) != self._scaling:
            raise InputError(
                "the scaler grows or backs off otherwise than when the step was prepared", fix="step.prepare(...) again"
            )
        casts = self._casts_now()
        if casts != self._casts:
            raise InputError(
                f"autocast was {autocast_name(self._casts)} around prepare(...), and is {autocast_name(casts)} now",
                fix="prepare and call the step under the same torch.autocast, or give it the type: "
                "TrainStep(..., autocast=...)",
            )
        self._require_no_hooks()

    def _eagerly(
        self, step: WholeStep, inputs: Any, targets: Any, earlier: frozenset[str] | None
    ) -> tuple[torch.Tensor, frozenset[str]]:
        """Make the step in eager; return its loss, and names of the parameters that got gradients."""
        self._last = result = step.eagerly(inputs, targets, earlier=earlier)
        return result[0], step.present

    def close(self) -> None:
        """Free what the engines hold; using the step afterwards raises. Model and optimizer stay as they are."""
        for net in self._nets.values():
            net.close()
        self._last, self._closed = None, True

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts unprepared, as one of a Nimble does: results lie in the memory of engines.
        return {**vars(self), "_last": None, "_present": {}}

    def __repr__(self) -> str:
        chosen = f", {self.engine.executable.schedule.policy}" if self.engine else ""
        return f"TrainStep({type(self.model).__name__}, {type(self.optimizer).__name__}{chosen})"


def require_arguments(
    model: Any, loss_fn: Any, options: Any, autocast: Any, scaler: Any, clip_grad_norm: Any, accumulate: Any
) -> None:
    """Raise InputError for arguments of a ``TrainStep`` that cannot be meant."""
    require_options(options)
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not a torch.nn.Module", fix="pass a module")
    require_local(model)
    if not callable(loss_fn):
        raise InputError(f"loss_fn is a {type(loss_fn).__name__}", fix="pass a function or module")
    require_no_class(loss_fn)
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise InputError(f"accumulate={accumulate!r} is not a number of steps", fix="1 or more")
    if clip_grad_norm is not None and not (isinstance(clip_grad_norm, Real) and float(clip_grad_norm) > 0):
        raise InputError(f"clip_grad_norm={clip_grad_norm!r} is not positive", fix="a positive number, or None")
    if next(model.parameters(), None) is None:
        raise InputError("the model has no parameters to train")
    _require_initialised(model, loss_fn)
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise InputError(f"autocast={autocast!r} is no type to compute in", fix="torch.bfloat16, torch.float16 or None")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler is a {type(scaler).__name__}", fix="pass a torch.amp.GradScaler, or None")


def _require_initialised(model: torch.nn.Module, loss_fn: object) -> None:
    """Raise InputError for a lazy module that never ran.

    What is frozen does not hinder an optimizer, and may yet be initialised before ``prepare``, which asks again.
    """
    named = [*model.named_parameters()]
    if isinstance(loss_fn, torch.nn.Module):
        named += loss_fn.named_parameters("loss_fn")
    for name, one in named:
        if one.requires_grad:
            require_initialised(name, one)


def _require_own(model: torch.nn.Module, loss_fn: object, parameters: Sequence[torch.Tensor]) -> None:
    """Raise InputError for an optimizer that trains nothing of model and loss."""
    modules = [model, *([loss_fn] if isinstance(loss_fn, torch.nn.Module) else [])]
    own = {id(one) for module in modules for one in module.parameters()}
    if own.isdisjoint(map(id, parameters)):
        raise InputError(
            "the optimizer has no parameter of the model: a step would train nothing",
            fix="make it of model.parameters(), after the model is where and of the type it is trained in",
        )


def _settings(scaler: torch.amp.GradScaler | None) -> tuple[float, ...]:
    """How the scale changes: written into what was captured; empty without a scaler."""
    if scaler is None or not scaler.is_enabled():
        return ()
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
