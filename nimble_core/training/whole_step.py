"""Forward, loss, backward and optimizer as one module, to be recorded below autograd like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self

import torch

from nimble_core.torch_compat.dispatch import foreach_add_, foreach_copy_, foreach_mul, scale_checked_, update_scale_
from nimble_core.tracing.input_memory import require_same_windows, windows_of
from nimble_core.tracing.pytree import builder, flatten, leaf_paths
from nimble_core.tracing.recording_contexts import no_autocast, phase
from nimble_core.tracing.signature import require_unchanged
from nimble_core.tracing.step_wrapper import Around
from nimble_core.tracing.strides import with_strides_of
from nimble_core.training.gradients import gradients_of, require_no_tensor_hooks
from nimble_core.training.loss_checks import require_scalar
from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.utils.errors import InputError, first_line

__all__ = ["Result", "Turn", "WholeStep"]

Turn = Literal["only", "first", "middle", "last"]
"""Which of the steps that make one update together a step is."""
Result = tuple[torch.Tensor, Any, dict[str, torch.Tensor]]
"""The loss, the model's output, and gradients by parameter name."""
_BUCKETS = 4
_BUCKETED_NBYTES = 4 << 20
"""From here on an update of all parameters takes longer than a few more launches: 5 µs, at an H200's bandwidth."""


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
        """Make one step: return its loss (not scaled, of this step alone), the model's output, gradients."""
        return self._step(inputs, targets, self.optimizer.update if self.optimizer else None)

    def eagerly(self, inputs: Any, targets: Any = None, *, earlier: frozenset[str] | None = None) -> Result:
        """Make the step in eager, with the optimizer's own ``step``, which makes the state that there is not yet.

        Args:
            inputs: as of ``forward``.
            targets: likewise.
            earlier: names of the parameters that got gradients in the earlier steps of the same update.
        """
        return self._step(inputs, targets, self._update_eagerly, earlier)

    def require_same_parameters(self, names: frozenset[str], earlier: frozenset[str]) -> None:
        """Raise InputError unless this step has gradients of what the ``earlier`` steps of the update had them of."""
        if names != earlier:
            raise InputError(
                f"{min(names ^ earlier)} got a gradient in some steps of this update only (accumulate)",
                fix="data that train the same parameters; or train in place of the model: prepare(x, training=True), "
                "and add up gradients in .grad",
            )

    def trained(self) -> dict[str, torch.Tensor]:
        """Return parameters that may get gradients, by name: the optimizer's, or all that require one."""
        if self.optimizer is None:
            return {name: one for name, one in self.named_parameters() if one.requires_grad}
        names = {id(one): name for name, one in self.named_parameters()}
        return {names.get(id(one), f"parameter {at}"): one for at, one in enumerate(self.optimizer.parameters)}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters of model, loss and optimizer, by name."""
        return {**dict(self.named_parameters()), **self.trained()}

    @property
    def divides(self) -> bool:
        """Whether updates may depend on gradients' signs more than on their sizes, as Adam's do."""
        return self.optimizer is not None and not isinstance(self.optimizer.optimizer, torch.optim.SGD)

    @property
    def updates(self) -> bool:
        """Whether this step ends with an update."""
        return self.turn in ("only", "last")

    def _step(
        self, inputs: Any, targets: Any, update: Callable[..., None] | None, earlier: frozenset[str] | None = None
    ) -> Result:
        loss, output, gradients = self._gradients(inputs, targets)
        self.present = frozenset(gradients)
        if earlier is not None:
            self.require_same_parameters(self.present, earlier)
        with torch.no_grad(), phase("optimizer"):
            if self.kept:
                gradients = self._summed(gradients)
            if update is not None and self.updates and gradients:
                gradients = self._update(update, gradients)
        return loss, output, gradients

    def _gradients(self, inputs: Any, targets: Any) -> Result:
        trained = self.trained()
        data, around = flatten((inputs, targets), what="input")
        require_no_tensor_hooks(self.named_tensors().items())
        names = [self.input_names[int(path[1])] + path[3:] for path in leaf_paths(around)]
        require_no_tensor_hooks(zip(names, data, strict=True))
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
                require_scalar(loss)
                require_same_windows(windows, given, names)
                scaled = loss if self.share == 1.0 else loss * self.share
                if self.scaler is not None:
                    scaled = scaled * _scale_of(self.scaler, loss.device)[0]
            with phase("backward"), no_autocast(loss.device.type):
                gradients = gradients_of([scaled], None, trained, [*data, *trained.values(), *self.buffers()])
        return loss.detach(), _detached(output), gradients

    def _summed(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sums = {name: self.kept[name] for name in gradients}
        add = foreach_copy_ if self.turn == "first" else foreach_add_
        add(list(sums.values()), list(gradients.values()))
        return sums

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
        """Group neighbouring parameters, whose gradients are ready at about the same time.

        Each group is updated beside the rest of the backward. None where all updates have to wait for all gradients
        (scaling, clipping), or where they are too small for it to pay.
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
        """Yield the modules of the model, and of a loss that is one."""
        memo = set() if memo is None else memo
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        if isinstance(self.loss_fn, torch.nn.Module):
            yield from self.loss_fn.named_modules(memo, f"{prefix}.loss_fn" if prefix else "loss_fn", remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers of model and loss, kept gradients, and the optimizer's state under the parameter's name."""
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


def _called(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        try:
            return model(**inputs)
        except TypeError as error:
            if "forward() got an unexpected keyword" not in str(error):
                raise
            what = f"a step passes what a dict holds by name: {first_line(error)}"
            raise InputError(what, fix="prepare((x,), y) passes the dict itself") from error
    return model(*inputs) if type(inputs) in (tuple, list) else model(inputs)


def _without_history(given: Any) -> Any:
    """Alias the tensors: a forward that writes its input in place must not give the caller's tensor a history.

    Those that require a gradient are the caller's own. A tensor given twice is one alias.
    """
    tensors, structure = flatten(given, what="input")
    aliases = {id(tensor): tensor if tensor.requires_grad else tensor.detach() for tensor in tensors}
    return builder(structure)([aliases[id(tensor)] for tensor in tensors])


def _detached(output: Any) -> Any:
    tensors, structure = flatten(output, what="output")
    return builder(structure)([tensor.detach() for tensor in tensors])


def _scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale, and the count of steps since it changed; made on first use, as the scaler does."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    assert scaler._scale is not None
    assert scaler._growth_tracker is not None
    return scaler._scale, scaler._growth_tracker
