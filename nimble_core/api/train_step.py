"""Training: a whole step (forward, loss, backward, optimizer) as one function of tensors, prepared like a model.

A step is recorded below autograd, so that its backward and its optimizer are calls like any others: they are scheduled
together with the forward, on as many streams. Parameters, buffers and optimizer state are the user's own tensors,
written in place by each replay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple, Self

import torch
from torch.utils.hooks import RemovableHandle

from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options, require_options
from nimble_core.scheduling.saved_plan import Plan
from nimble_core.torch_compat.dispatch import (
    foreach_add_,
    foreach_copy_,
    foreach_mul,
    foreach_zero_,
    scale_checked_,
    update_scale_,
)
from nimble_core.tracing.autocast import autocast_name, autocast_type, no_autocast
from nimble_core.tracing.grad_accumulators import require_no_node_hooks
from nimble_core.tracing.input_windows import require_same_windows, windows_of
from nimble_core.tracing.operator_traits import overlaps_itself, storage_address
from nimble_core.tracing.out_of_memory import memory_explained
from nimble_core.tracing.phase import phase
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.pytree import builder, flatten, leaf_paths
from nimble_core.tracing.recorded import require_local
from nimble_core.tracing.signature import require_initialised, require_unchanged
from nimble_core.tracing.step_wrapper import Around, require_gradients, require_training_mode
from nimble_core.tracing.strides import share_bytes, with_strides_of
from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.utils.errors import DeviceError, InputError

__all__ = ["TrainStep", "WholeStep", "require_no_class", "require_no_target"]

Turn = Literal["only", "first", "middle", "last"]
_MIDDLE: tuple[Turn, ...] = ("middle",)
_NO_LOSS = (
    "return loss.mean(), or unfreeze parameters; where the model itself differentiates, "
    "torch.autograd.grad(..., create_graph=True)"
)
_BUCKETS = 4
_BUCKETED_NBYTES = 4 << 20
"""From here on an update of all parameters takes longer than a few more launches: 5 µs, at an H200's bandwidth."""
Result = tuple[torch.Tensor, Any, dict[str, torch.Tensor]]


class WholeStep(Around):
    """Forward, loss, backward and optimizer as one module, ``(inputs, targets) -> (loss, output, gradients)``.

    Its parameters, buffers and submodules are those of ``model``, under the same names; the optimizer's state counts
    among the buffers. Gradients are returned by parameter name; ``.grad`` is neither read nor written.

    Args:
        model: what is trained.
        loss_fn: of the model's output and the targets; of the output alone where the targets are None.
        optimizer: takes gradients and updates parameters; None: nothing is updated.
        autocast: type that matrix products and convolutions of forward and loss are computed in; None: as they come.
        scaler: scales the loss of half-precision forwards; its scale is adapted on the device. One that is disabled
            counts as None.
        clip_grad_norm: largest norm of all gradients together; None: as they come.
        share: of the loss that counts, where several steps make one update.
        kept: gradients summed up over these steps, by parameter name; empty where each makes an update.
        turn: which of these steps it is.

    Attributes:
        present: names of the parameters that the last run, eager or recorded, got gradients of.
    """

    input_names = ("inputs", "targets")
    loss_fn: Callable[..., torch.Tensor]

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: CapturedOptimizer | None,
        *,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip_grad_norm: float | None = None,
        share: float = 1.0,
        kept: Mapping[str, torch.Tensor] | None = None,
        turn: Turn = "only",
    ) -> None:
        super().__init__(model)
        object.__setattr__(self, "loss_fn", loss_fn)  # beside the module system, like the model
        self.optimizer = optimizer
        self.autocast = autocast
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.scaler is not None:
            if optimizer is not None:
                optimizer.require_scaling()
            # Made now: a run that is undone would leave it a step ahead.
            _scale_of(self.scaler, next(model.parameters()).device)
        self.clip_grad_norm = clip_grad_norm
        self.share = share
        self.kept = dict(kept or {})
        self.turn = turn
        self.present: frozenset[str] = frozenset()

    def forward(self, inputs: Any, targets: Any = None) -> Result:
        """One step: loss (not scaled, of this step alone), the model's output, gradients."""
        return self._step(inputs, targets, self.optimizer.update if self.optimizer else None)

    def eagerly(self, inputs: Any, targets: Any = None, *, earlier: Collection[str] = ()) -> Result:
        """The same, updated by the optimizer's own ``step``, which makes the state that there is not yet.

        Updates also parameters that got gradients only in ``earlier`` steps of those that make one update.
        """
        return self._step(inputs, targets, self._update_eagerly, earlier)

    def trained(self) -> dict[str, torch.Tensor]:
        """Parameters that may get gradients, by name: the optimizer's, or all that require one."""
        if self.optimizer is None:
            return {name: one for name, one in self.named_parameters() if one.requires_grad}
        names = {id(one): name for name, one in self.named_parameters()}
        return {names.get(id(one), f"parameter {at}"): one for at, one in enumerate(self.optimizer.parameters)}

    @property
    def divides(self) -> bool:
        """Whether updates may depend on gradients' signs more than on their sizes, as Adam's do."""
        return self.optimizer is not None and not isinstance(self.optimizer.optimizer, torch.optim.SGD)

    @property
    def updates(self) -> bool:
        """Whether this step ends with an update."""
        return self.turn in ("only", "last")

    def _step(
        self, inputs: Any, targets: Any, update: Callable[..., None] | None, earlier: Collection[str] = ()
    ) -> Result:
        loss, output, gradients = self._gradients(inputs, targets)
        self.present = frozenset(gradients)
        with torch.no_grad(), phase("optimizer"):
            if self.kept:
                gradients = self._summed(gradients, earlier)
            if update is not None and self.updates and gradients:
                gradients = self._update(update, gradients)
        return loss, output, gradients

    def _gradients(self, inputs: Any, targets: Any) -> Result:
        trained = self.trained()
        waiting = next((name for name, one in trained.items() if getattr(one, "_post_accumulate_grad_hooks", None)), "")
        if waiting:
            raise InputError(
                f"{waiting} has a hook that waits for its accumulated gradient, which a whole step does not make",
                fix="remove it, or prepare(x, training=True), which calls it",
            )
        known = set(map(id, trained.values()))
        others = ((name, one) for name, one in self.named_parameters() if id(one) not in known)
        if beside := next((name for name, one in others if _waits(one)), ""):
            raise InputError(
                f"{beside} has a hook, and is no parameter of the optimizer: a whole step makes no gradient of it",
                fix="remove the hook, freeze the parameter, or prepare(x, training=True), which calls it",
            )
        data, around = flatten((inputs, targets), what="input")
        names = [self.input_names[int(path[1])] + path[3:] for path in leaf_paths(around)]
        _require_no_hooks(data, names)
        # On this thread: modes, phase and random state of a recording are bound to it.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            with phase("forward"), self._casting():
                inputs, targets = _without_history((inputs, targets))
                given, around = flatten(((inputs, targets), {}))
                windows = windows_of(given)
                output = _called(self.model, inputs)
                require_unchanged(around, given, ((inputs, targets), {}), self.input_names)
            with phase("loss"), self._casting():
                loss = self.loss_fn(output) if targets is None else self.loss_fn(output, targets)
                _require_loss(loss)
                require_same_windows(windows, given, names)
                scaled = loss if self.share == 1.0 else loss * self.share
                if self.scaler is not None:
                    scaled = scaled * _scale_of(self.scaler, loss.device)[0]
            with phase("backward"), no_autocast(loss.device.type):
                found = torch.autograd.grad(scaled, list(trained.values()), allow_unused=True)
                made = {name: one for name, one in zip(trained, found, strict=True) if one is not None}
                gradients = _apart(made, [*data, *trained.values(), *self.buffers()])
        return loss.detach(), _detached(output), gradients

    def _summed(self, gradients: Mapping[str, torch.Tensor], earlier: Collection[str]) -> dict[str, torch.Tensor]:
        sums, new = [self.kept[name] for name in gradients], list(gradients.values())
        if self.turn == "first":
            foreach_copy_(sums, new)
            absent = [one for name, one in self.kept.items() if name not in gradients]
            if absent:  # a later step may be the first that has a gradient of these
                foreach_zero_(absent)
        else:
            foreach_add_(sums, new)
        return {name: one for name, one in self.kept.items() if name in gradients or name in earlier}

    def _update(self, update: Callable[..., None], gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Never in place: these may be sums that are kept.
        scaler, present, found_inf = self.scaler, list(gradients.values()), None
        if scaler is not None:
            device = present[0].device
            scale, growth = _scale_of(scaler, device)
            found_inf, one = (torch.full((), value, dtype=torch.float32, device=device) for value in (0.0, 1.0))
            present = list(foreach_mul(present, scale.reciprocal()))
            scale_checked_(present, found_inf, one)
        if self.clip_grad_norm is not None:
            norm = torch.nn.utils.get_total_norm(present)
            present = list(foreach_mul(present, (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)))
        taken = dict(zip(gradients, present, strict=True))
        update([taken.get(name) for name in self.trained()], found_inf=found_inf, buckets=self._buckets())
        if scaler is not None and found_inf is not None:
            update_scale_(
                scale,
                growth,
                found_inf,
                scaler.get_growth_factor(),
                scaler.get_backoff_factor(),
                scaler.get_growth_interval(),
            )
        return taken

    def _buckets(self) -> list[list[int]] | None:
        """Parameters that are updated together, neighbours: their gradients are ready at about the same time.

        Then updates run beside the rest of the backward. None where all have to wait for all gradients, or where the
        updates take no time to speak of.
        """
        sizes = [one.nbytes for one in self.trained().values()]
        if self.scaler is not None or self.clip_grad_norm is not None or sum(sizes) < _BUCKETED_NBYTES:
            return None
        buckets: list[list[int]] = [[] for _ in range(_BUCKETS)]
        before = 0
        for position, size in enumerate(sizes):
            buckets[before * _BUCKETS // sum(sizes)].append(position)
            before += size
        return [bucket for bucket in buckets if bucket]

    def _update_eagerly(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        found_inf: torch.Tensor | None = None,
        buckets: Sequence[Sequence[int]] | None = None,
    ) -> None:
        assert self.optimizer is not None
        if found_inf is not None and found_inf.item():
            return
        made = dict(zip(map(id, self.optimizer.parameters), gradients, strict=True))
        # Frozen parameters, too: what ``.grad`` an earlier step left there, zero_grad would have taken.
        members = [one for group in self.optimizer.optimizer.param_groups for one in group["params"]]
        before = [one.grad for one in members]
        try:
            for one in members:
                gradient = made.get(id(one))
                # Fused optimizers take a gradient's layout to be the parameter's.
                one.grad = None if gradient is None else with_strides_of(one, gradient)
            self.optimizer.optimizer.step()
        finally:
            for one, gradient in zip(members, before, strict=True):
                one.grad = gradient

    def _casting(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        kind = next((one.device.type for one in self.model.parameters()), "cpu")
        return torch.autocast(kind, dtype=self.autocast)

    # -- the model's, under its names ------------------------------------------------------------------------------

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Those of the model, and of a loss that is a module."""
        memo = set() if memo is None else memo
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        if isinstance(self.loss_fn, torch.nn.Module):
            yield from self.loss_fn.named_modules(memo, f"{prefix}.loss_fn" if prefix else "loss_fn", remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of model and loss; kept gradients, and what the optimizer keeps, after the parameter's name."""
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        yield from ((f"{name} gradient", one) for name, one in self.kept.items())
        if self.optimizer is not None:
            names = list(self.trained())
            for position, key, tensor in self.optimizer.named_state():
                yield f"{names[position]} {key}", tensor
            yield from ((f"learning rate {group}", rate) for group, rate in enumerate(self.optimizer.rates))
        if self.scaler is not None:
            scale, growth = _scale_of(self.scaler, next(self.model.parameters()).device)
            yield "loss scale", scale
            yield "loss scale growth", growth

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        if isinstance(self.loss_fn, torch.nn.Module):
            self.loss_fn._apply(*args, **kwargs)
        return super()._apply(*args, **kwargs)


def _apart(gradients: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients that may be written in place, as some optimizers do: none shares bytes with another one, or with what
    else there is.
    """
    beside: dict[int, list[torch.Tensor]] = {}
    for one in others:
        beside.setdefault(storage_address(one), []).append(one)
    apart = {}
    for name, one in gradients.items():
        if one.layout is not torch.strided:  # which the update refuses
            apart[name] = one
            continue
        sharing = beside.setdefault(storage_address(one), [])
        if overlaps_itself(one) or any(share_bytes(one, other) for other in sharing):
            apart[name] = one.clone()
        else:
            apart[name] = one
            sharing.append(one)
    return apart


class _Present(NamedTuple):
    """Parameters that a step makes gradients of: their names, and positions among the optimizer's."""

    names: frozenset[str]
    positions: frozenset[int]


_NONE = _Present(frozenset(), frozenset())


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
        optimizer: of parameters of the model. NAdam, RAdam, ASGD and Adamax update float64 parameters with about the
            precision of float32, unless torch's default type is float64: see ``CapturedOptimizer``.
        options: how to prepare. Calls with other shapes follow ``on_new_shape``.
        autocast: type for ``torch.autocast`` around forward and loss, e.g. ``torch.bfloat16``.
        scaler: for float16: the loss is scaled, steps with gradients that are not finite are left out, and the scale is
            adapted, all on the device. Needs an optimizer with a fused form (SGD, Adam, AdamW, Adagrad). One that is
            disabled counts as None.
        clip_grad_norm: largest norm of all gradients together.
        accumulate: how many steps make one update; each counts for its share of the loss. An update whose last step
            has no gradient of a parameter that an earlier one had one of is made in eager, with a warning.

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
        require_options(options)
        require_gradients()
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"model is a {type(model).__name__}, not a torch.nn.Module", fix="pass a module")
        require_local(model)
        if not callable(loss_fn):
            raise InputError(f"loss_fn is a {type(loss_fn).__name__}", fix="pass a function or module")
        require_no_class(loss_fn)
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise InputError(f"accumulate={accumulate!r} is not a number of steps", fix="1 or more")
        number: object = clip_grad_norm
        if number is not None and not (isinstance(number, Real) and float(number) > 0):
            raise InputError(f"clip_grad_norm={clip_grad_norm!r} is not positive", fix="a positive number, or None")
        device = next((one.device for one in model.parameters()), None)
        if device is None:
            raise InputError("the model has no parameters to train")
        _require_initialised(model, loss_fn)
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise InputError(
                f"autocast={autocast!r} is no type to compute in", fix="torch.bfloat16, torch.float16 or None"
            )
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise InputError(f"scaler is a {type(scaler).__name__}", fix="pass a torch.amp.GradScaler, or None")
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.scaler, self.accumulate, self.options = scaler, accumulate, options
        self._captured = CapturedOptimizer(optimizer, device)
        _require_own(model, loss_fn, self._captured.parameters)
        self._done = 0
        self._closed = False
        self._scaling: tuple[float, ...] = ()
        self._autocast, self._device = autocast, device.type
        self._casts: torch.dtype | None = None
        self._last: Result | partial[Result] | None = None
        # Parameters that each engine, by its id, makes gradients of; names of those that the update at hand is of.
        self._present: dict[int, _Present] = {}
        self._waiting: frozenset[str] = frozenset()

        kept = {}
        if accumulate > 1:
            trained = WholeStep(model, loss_fn, self._captured).trained()
            kept = {name: torch.zeros_like(one) for name, one in trained.items()}

        def whole(turn: Turn) -> WholeStep:
            return WholeStep(
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

        self._turns: list[Turn] = ["only"] if accumulate == 1 else ["first", *_MIDDLE * (accumulate - 2), "last"]
        static = replace(options, outputs="static")
        self._steps = {turn: whole(turn) for turn in self._turns}
        self._nets = {turn: Nimble(step, static) for turn, step in self._steps.items()}
        self._hooks = self._hooks_now()

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
        scaling, hooks, casts = _settings(self.scaler), self._hooks_now(), self._casts_now()
        require_no_node_hooks(self._steps[self._turns[-1]].named_parameters())
        made: list[tuple[Turn, Engine]] = []
        try:
            for turn in sorted(self._nets, key=self._turns.index, reverse=True):  # the plan is that of the last
                made.append((turn, self._make(turn, inputs, targets, None if made else plan)))
        except BaseException:  # what was prepared before still holds, all of it
            for _, engine in made:
                engine.close()
            raise
        if (scaling, casts) != (self._scaling, self._casts) or not hooks.same_as(self._hooks):
            for net in self._nets.values():  # engines for other shapes, too, are of a step that is not this one
                net.close()
        self._scaling, self._hooks, self._casts = scaling, hooks, casts
        for turn, engine in made:
            self._nets[turn].adopt_engine(engine, (inputs, targets), {})
        return self

    def _hooks_now(self) -> _Hooks:
        """Of all parameters of model, loss and optimizer: eager calls those of any that gets a gradient."""
        found = (*self._steps[self._turns[-1]].parameters(), *self._captured.parameters)
        return _Hooks(list({id(one): one for one in found}.values()))

    def _casts_now(self) -> torch.dtype | None:
        """What forward and loss are cast to: the step's own type, or that of the autocast around it."""
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
        self._hooks.require_unchanged()
        self._captured.sync()
        engine, tensors = net.bind((inputs, targets), {})
        if engine is not None:
            _require_no_hooks(tensors, engine.signature.paths)
        elif self.options.on_new_shape == "prepare":
            net.adopt_engine(self._make(turn, inputs, targets), (inputs, targets), {})
            engine, tensors = net.bind((inputs, targets), {})
        waiting = frozenset[str]() if turn in ("only", "first") else self._waiting
        present, positions = _NONE if engine is None else self._present[id(engine)]
        eagerly = False
        if engine is None:
            # The optimizer's own step, not a captured one: these data may be the first to train a parameter.
            eagerly = step.updates and self.options.on_new_shape == "eager"
        elif step.updates:
            eagerly = self._captured.fresh_for(positions)
            if not eagerly and not waiting <= present:
                warn(
                    f"{min(waiting - present)} has a gradient of an earlier step, and none of the last one that the "
                    "update is of: it is made in eager"
                )
                eagerly = True
        result: Result
        if eagerly:
            if engine is not None:
                engine.check()
            self._last = result = step.eagerly(inputs, targets, earlier=waiting)
            loss, present = result[0], step.present
        elif engine is None:
            self._last = result = net(inputs, targets)
            loss, present = result[0], step.present
        else:
            found = engine.run(tensors, static=True)
            self._last, loss = partial(engine.build, found), found[0]
        if not step.updates:
            self._waiting = waiting | present
        self._done += 1
        return loss.clone()

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


def require_no_class(loss_fn: Callable[..., Any]) -> None:
    """Raise InputError for the class of a loss: called, it makes one."""
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise InputError(f"loss_fn is the class {name}", fix=f"pass an instance: loss_fn={name}()")


def require_no_target(loss_fn: Callable[..., Any], give: str) -> None:
    """Raise InputError for a loss that cannot be called with the output alone, as far as it tells what it takes.

    Args:
        loss_fn: the loss.
        give: how the caller would give it a target.
    """
    called = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        taken = inspect.signature(called)
    except (TypeError, ValueError):  # written in C
        return
    try:
        taken.bind(None)
    except TypeError as error:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise InputError(
            f"the loss {name} cannot be called with the model's output alone: {error}",
            fix=f"give {give}, or a loss_fn of the output alone",
        ) from error


class _Hooks:
    """Hooks of parameters as they were: a captured backward calls those that were recorded, and no others.

    Handles are numbered as hooks are registered: where none has come, and there were none, there is nothing to look at.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._registered = RemovableHandle.next_id  # read before hooks are: who registers meanwhile is noticed
        self._parameters = parameters
        self._before = self._now()
        self._some = any(any(hooks) for hooks in self._before)

    def _now(self) -> list[tuple[tuple[object, ...], ...]]:
        tables = ("_backward_hooks", "_post_accumulate_grad_hooks")
        return [tuple(tuple((getattr(one, table) or {}).values()) for table in tables) for one in self._parameters]

    def same_as(self, other: _Hooks) -> bool:
        """Whether these hooks were those of the same parameters."""
        return self._before == other._before and list(map(id, self._parameters)) == list(map(id, other._parameters))

    def require_unchanged(self) -> None:
        """Raise InputError if a hook has come or gone."""
        registered = RemovableHandle.next_id
        if registered == self._registered and not self._some:
            return
        if self._now() != self._before:
            raise InputError(
                "a parameter has other hooks than when the step was prepared, which a captured step would pass by",
                fix="prepare(...) again, or remove the hook",
            )
        self._registered = registered


def _waits(tensor: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of ``tensor``, and eager would call it."""
    return tensor.requires_grad and bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _require_no_hooks(data: Iterable[torch.Tensor], names: Iterable[str]) -> None:
    """Raise InputError for inputs or targets with hooks: a step makes gradients of parameters alone."""
    for one, name in zip(data, names, strict=True):
        if _waits(one):
            raise InputError(
                f"{name} has a hook that waits for its gradient, which a whole step does not make",
                fix="remove it, or prepare(x, training=True), which calls it",
            )


def _settings(scaler: torch.amp.GradScaler | None) -> tuple[float, ...]:
    """How the scale changes: written into what was captured; empty without a scaler."""
    if scaler is None or not scaler.is_enabled():
        return ()
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


def _called(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if type(inputs) in (tuple, list) else model(inputs)


def _without_history(given: Any) -> Any:
    """The same tensors as aliases: a forward that writes its input in place gives the caller's no history.

    Those that require a gradient are the caller's own. A tensor given twice is one alias.
    """
    tensors, structure = flatten(given, what="input")
    aliases = {id(tensor): tensor if tensor.requires_grad else tensor.detach() for tensor in tensors}
    return builder(structure)([aliases[id(tensor)] for tensor in tensors])


def _detached(output: Any) -> Any:
    tensors, structure = flatten(output, what="output")
    return builder(structure)([tensor.detach() for tensor in tensors])


def _require_loss(loss: object) -> None:
    if isinstance(loss, (bool, int, float)):
        raise InputError(
            f"the loss is not a scalar to differentiate: a Python {type(loss).__name__}, which carries no gradient",
            fix="drop .item() or float(...): return the tensor",
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shown = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        why = "no gradient" if isinstance(loss, torch.Tensor) and loss.numel() == 1 else shown
        raise InputError(f"the loss is not a scalar to differentiate: {why}", fix=_NO_LOSS)
    if loss.is_complex():
        raise InputError(
            f"the loss is not a scalar to differentiate: it is complex ({loss.dtype})",
            fix="return a real one: loss.abs(), or loss.real",
        )


def _scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the count of steps since it changed, on the device; made on first use, as the scaler does."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    assert scaler._scale is not None
    assert scaler._growth_tracker is not None
    return scaler._scale, scaler._growth_tracker
