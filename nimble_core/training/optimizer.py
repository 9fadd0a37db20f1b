"""A user's optimizer as device work alone: recorded, captured and replayed, and left as it is.

What an optimizer of torch does in ``step`` is decided on the host: learning rates are Python numbers, step counters may
be host tensors, state is made when first needed. ``CapturedOptimizer`` runs the same ``step`` in torch's fused or
capturable form, with learning rates and counters as tensors on the device: neither form reads the device back.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from operator import attrgetter, is_
from typing import Any

import torch

from nimble_core.torch_compat.members import CAPTURABLE_DEVICES
from nimble_core.torch_compat.unchanged import same_objects
from nimble_core.tracing.strides import with_strides_of
from nimble_core.training.optimizer_forms import (
    group_place,
    groups_of,
    other_form,
    require_no_hooks,
    require_stock,
)
from nimble_core.training.optimizer_state import LearningRates, OptimizerState, layout_of
from nimble_core.utils.errors import InputError
from nimble_core.utils.locks import free_after_fork

__all__ = ["CapturedOptimizer"]

_PREPARE = "prepare again, with a new TrainStep"
_CYCLES = "; for a scheduler such as OneCycleLR, cycle_momentum=False"

_requires_grad = attrgetter("requires_grad")
_patching = free_after_fork(threading.RLock())


class CapturedOptimizer:
    """Takes a user's optimizer as it is, and runs its steps so that they can be recorded and replayed.

    A training step uses it so::

        captured = CapturedOptimizer(optimizer, device)
        # recording or capture, any number of times:
        captured.refresh()                          # state and rates as they are now; the optimizer's stay its own
        captured.update(gradients)                  # calls on the device alone
        # each step, on the stream that the replay is ordered after:
        captured.sync()                             # learning rates, state
        if captured.fresh_for(positions):           # no momentum, no counters yet
            optimizer.step()                        # eager, with .grad set: makes the state
        else:
            replay()

    The user's groups and flags are never written; ``.grad`` is during ``update``, and put back. ``optimizer.state``
    holds the tensors that replays write from the first ``sync`` on that finds it filled; until then it is as it was,
    bit for bit. So ``state_dict``, ``load_state_dict``, eager steps and schedulers of the learning rate go on as
    before. A counter of steps that sat on the host is on the device then.

    Supported, each compared with eager by a test: SGD, Adam, AdamW and Adagrad in their fused forms (Adagrad from torch
    2.13 on); Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop and Rprop in their capturable ones, and so are Adam and
    AdamW for types that the fused kernels do not take. NAdam, RAdam, ASGD and Adamax compute corrections such as
    1 - beta^step in the type of their counters: float32, which moves float64 parameters by 1e-9 to 1e-4 from eager's,
    unless torch's default type is float64 when this is made.

    Args:
        optimizer: with parameters on ``device``, fresh or in the midst of training.
        device: where the updates run.

    Attributes:
        optimizer: the user's.
        parameters: those it updates, in the order of its groups; frozen ones are left out.

    Raises:
        InputError: an optimizer that cannot be captured; says why.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        require_stock(optimizer)
        require_no_hooks(optimizer)
        self.optimizer = optimizer
        self._groups = tuple(groups_of(optimizer, self.device))
        trained = {
            f"{group_place(at)}['params'][{member}]": one
            for at, group in enumerate(self._groups)
            for member, one in enumerate(group.members)
            if one.requires_grad
        }
        self._places = tuple(trained)
        self.parameters = tuple(trained.values())
        self._layouts = tuple(map(layout_of, self.parameters))
        self._rates = LearningRates(optimizer, self.device)
        made = (
            _state_after_a_step(optimizer, {**group.options, "lr": 1.0}, self.parameters[position])
            for group in self._groups
            for position in group.positions
        )
        self._state = OptimizerState(optimizer, self.parameters, self._places, made)

    @property
    def rates(self) -> tuple[torch.Tensor, ...]:
        """Each group's learning rate, a scalar on the device."""
        return self._rates.tensors

    @property
    def state(self) -> tuple[dict[str, torch.Tensor], ...]:
        """The state of each of ``parameters`` as ``update`` reads and writes it.

        These are the user's own tensors where they fit, and tensors on the device where not.
        """
        return self._state.tensors

    def named_state(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """All of ``state``: position of the parameter, name, tensor."""
        for position, kept in enumerate(self.state):
            for key, tensor in kept.items():
                yield position, key, tensor

    @property
    def other_form(self) -> str:
        """How the captured form differs from the one that ``step`` runs, in words; empty if it does not."""
        return other_form(self.optimizer, self._groups, self.device)

    def require_scaling(self) -> None:
        """Raise InputError unless all groups have fused forms: only these can leave out a step on the device."""
        if not all(group.fused for group in self._groups):
            raise InputError(
                f"{type(self.optimizer).__name__} cannot leave out a step on the device, as a gradient scaler needs",
                fix="train in bfloat16 without a scaler, or use SGD, Adam or AdamW on real floating-point parameters",
            )

    def fresh_for(self, positions: Set[int]) -> bool:
        """Whether an update of these parameters has to be an eager one, which makes their state. As of ``sync``."""
        return not self._state.missing.isdisjoint(positions)

    # -- on the device -------------------------------------------------------------------------------------------------

    def update(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        buckets: Sequence[Sequence[int]] | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Make one step with these gradients: calls on the device alone, which read rates and state when they run.

        Args:
            gradients: a dense one for each of ``parameters``, in its shape and type; None: it stays as it is.
            buckets: positions in ``parameters``, each in one bucket: every bucket is updated by itself, so that it can
                run as soon as its gradients are there. None: all in one.
            found_inf: one number on the device: 1 if this update is to be left out. Needs ``require_scaling``.

        Raises:
            InputError: a parameter was moved or converted. Nothing was updated then.
        """
        self._require_layouts()
        before = [one.grad for one in self.parameters]
        try:
            with torch.no_grad():
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    parameter.grad = None if gradient is None else with_strides_of(parameter, gradient)
            for bucket in buckets or [range(len(self.parameters))]:
                part = {position for position in bucket if gradients[position] is not None}
                if part:
                    self._step_on(part, found_inf)
        finally:
            for parameter, kept in zip(self.parameters, before, strict=True):
                parameter.grad = kept
        self._state.recorded = True

    def _step_on(self, part: Set[int], found_inf: torch.Tensor | None) -> None:
        groups = []
        for group, rate in zip(self._groups, self.rates, strict=True):
            members = [self.parameters[position] for position in group.positions if position in part]
            groups.append({**group.options, "lr": rate, "params": members})
        state = {self.parameters[position]: dict(self.state[position]) for position in part if self.state[position]}
        _run_step(self.optimizer, groups, state, found_inf)

    def _require_layouts(self) -> None:
        for parameter, layout, place in zip(self.parameters, self._layouts, self._places, strict=True):
            if layout_of(parameter) != layout:
                raise InputError("a parameter was moved or converted", where=place, fix=_PREPARE)

    # -- on the host ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take over state and rates before a recording; the optimizer stays as it is, bit for bit.

        Raises:
            InputError: as ``sync``.
        """
        rates = self._checked()
        self._state.follow()
        self._rates.write(rates)

    def sync(self) -> None:
        """Follow what was done to the optimizer since the last step, without waiting for the device.

        Learning rates that changed are written to ``rates``; one that is itself a tensor on a device is copied at each
        call. Where ``optimizer.state`` holds other tensors than ``state`` does (made by an eager step, loaded), their
        values are copied, and ``state``'s tensors put in their place. Writes go to the current stream. Parameters that
        have no state are left for an eager step: see ``fresh_for``.

        O(parameters), about 20 µs for 160 of them with three tensors each where nothing changed; asynchronous.

        Raises:
            InputError: other parameters, groups, hooks or hyperparameters than the learning rate, a learning rate that
                is no number, or state that does not fit. Nothing was changed then.
        """
        rates = self._checked()
        self._state.install()
        self._rates.write(rates)
        if "step" in vars(self.optimizer):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler asks: was a step taken?

    def _checked(self) -> list[tuple[int, float | torch.Tensor]]:
        """Refuse what replays would not follow; return the learning rates that changed."""
        require_no_hooks(self.optimizer)
        groups = self.optimizer.param_groups
        if len(groups) != len(self._groups):
            what = f"the optimizer has {len(groups)} parameter groups; it had {len(self._groups)}"
            raise InputError(what, fix=_PREPARE)
        for at, (group, was) in enumerate(zip(groups, self._groups, strict=True)):
            members = group["params"]
            if len(members) != len(was.members) or not all(map(is_, members, was.members)):
                raise InputError("the optimizer has other parameters than it had", where=group_place(at), fix=_PREPARE)
            if tuple(map(_requires_grad, members)) != was.trained:
                raise InputError("a parameter was frozen or unfrozen", where=group_place(at), fix=_PREPARE)
            for key, value in was.settings.items():
                now = group.get(key)
                if now is not value and not same_objects(now, value):
                    raise InputError(
                        f"{key} was {value!r} and is {now!r} now: only learning rates are read before each step",
                        where=group_place(at),
                        fix=_PREPARE + _CYCLES * (key in ("momentum", "betas")),
                    )
        return self._rates.changed()


def _run_step(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    state: Mapping[torch.Tensor, dict[str, torch.Tensor]],
    found_inf: torch.Tensor | None = None,
) -> Mapping[torch.Tensor, dict[str, Any]]:
    """Run torch's step, without hooks, on other groups and state than the user's; return the state that it leaves.

    The user's optimizer stays as it is: a shadow optimizer steps, which shares its other attributes.

    Args:
        optimizer: the user's.
        groups: parameter groups of the shadow, whose parameters hold their gradients in ``.grad``.
        state: for parameters of these groups; its tensors are written in place.
        found_inf: one number on the device: 1 if this step is to be left out (fused forms only).
    """
    kind = type(optimizer)
    shadow: torch.optim.Optimizer = object.__new__(kind)
    own = {
        "param_groups": [group for group in groups if group["params"]],
        "state": defaultdict(dict, state),
        "grad_scale": None,
        "found_inf": found_inf,
        "_warned_capturable_if_run_uncaptured": True,
        "_need_device_dtype_check_for_fused": False,  # the form was chosen by devices and types
    }
    vars(shadow).update({**vars(optimizer), **own})
    step: Callable[..., Any] = kind.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # functools.wraps sets it
    device = next(one.device for group in groups for one in group["params"])
    with _capturable_on_the_host(kind) if device.type == "cpu" else nullcontext():
        step(shadow)
    return shadow.state


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the state that a first step with zero gradients makes for a parameter like this one."""
    stand_in = like.detach().clone()
    stand_in.grad = torch.zeros_like(stand_in)
    return dict(_run_step(optimizer, [{**group, "params": [stand_in]}], {}).get(stand_in, {}))


@contextmanager
def _capturable_on_the_host(kind: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Let capturable forms run on the host: torch asserts that they run on accelerators, their formulas do not."""
    name = CAPTURABLE_DEVICES
    modules = dict.fromkeys(sys.modules[one.__module__] for one in kind.__mro__)
    with _patching:
        before = [(module, getattr(module, name)) for module in modules if hasattr(module, name)]
        try:
            for module, supported in before:
                setattr(module, name, lambda *args, _of=supported, **kwargs: [*_of(*args, **kwargs), "cpu"])
            yield
        finally:
            for module, supported in before:
                setattr(module, name, supported)
