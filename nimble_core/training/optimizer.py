"""A user's optimizer as device work alone: recorded, captured and replayed, and left as it is.

What an optimizer of torch does in ``step`` is decided on the host: learning rates are Python numbers, step counters may
be host tensors, state is made when first needed. ``CapturedOptimizer`` runs the same ``step`` on a twin that shares the
user's parameters and state: learning rates are tensors on the device, counters too, and torch's fused or capturable
form is chosen, none of which reads the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from operator import attrgetter, is_
from typing import Any

import torch

from nimble_core.guards.module_guard import same_objects
from nimble_core.torch_compat.dispatch import foreach_copy_, foreach_kernels, fused_kernels
from nimble_core.torch_compat.members import ALL_POST_HOOKS, ALL_PRE_HOOKS
from nimble_core.tracing.rng_state import SHARED, random_state_kept
from nimble_core.tracing.strides import dense, with_strides_of
from nimble_core.training.optimizer_trial import (
    PLAIN,
    led_to,
    name_of,
    names_in_step,
    plain_attributes,
    run_step,
    step_explained,
    tensors_among,
    trial_step,
    twin_of,
)
from nimble_core.utils.errors import InputError

__all__ = ["CapturedOptimizer"]

_FORMS = ("foreach", "fused", "capturable")
"""Flags that choose among an optimizer's implementations of the same step."""
_FOLLOWED = ("params", "lr")
"""Entries of a group that every step looks at."""
_FORM_NAMES = {"fused": "fused", "foreach": "for-each", "": "parameter-by-parameter"}
_FUSED_TYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_PREPARE = "prepare again, with a new TrainStep"
_DENSE = "make it of a copy without gaps, nn.Parameter(view.contiguous())"
_OWN_HOOKS = ("nimble_core", "torch")
"""Whose hooks of all optimizers only watch: torch's profiler, and what notices here that weights were written."""
_CYCLES = "; for a scheduler such as OneCycleLR, cycle_momentum=False"

_requires_grad = attrgetter("requires_grad")

Pending = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]
"""What the user's optimizer keeps for a parameter, a name in it, the tensor that belongs there, the one that is."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A parameter group as it was.

    Args:
        members: all its parameters.
        trained: which of them require gradients.
        positions: of these, among those of all groups.
        options: what ``step`` is to see, but for ``params`` and ``lr``.
        settings: hyperparameters, and other plain values that ``step`` may read, that may not change.
        fused: whether the fused form is used; the capturable one otherwise.
    """

    members: tuple[torch.Tensor, ...]
    trained: tuple[bool, ...]
    positions: tuple[int, ...]
    options: dict[str, Any]
    settings: tuple[tuple[str, Any], ...]
    fused: bool


class CapturedOptimizer:
    """Takes a user's optimizer as it is, and runs its steps so that they can be recorded and replayed.

    A training step uses it so::

        captured = CapturedOptimizer(optimizer, device)
        # recording or capture, any number of times:
        captured.refresh()                          # state and rates as they are now; the optimizer's stay its own
        captured.update(gradients)                  # calls on the device alone
        # each step, on the stream that the replay is ordered after:
        if captured.fresh:                          # no momentum, no counters yet
            optimizer.step()                        # eager, with .grad set: makes the state
        else:
            captured.sync()                         # learning rates, state
            replay()

    With a scaler, for half precision: ``require_scaling()`` first, then ``update(..., found_inf=...)``, a tensor on the
    device that holds 1 if a gradient is not finite, in which case that update leaves parameters, state and counters as
    they are. Give ``grad_scale`` too where gradients are still scaled; the fused kernels unscale them (in place, on
    CUDA). A fresh optimizer's step goes through ``scaler.step``; one that is left out leaves the optimizer fresh.

    The user's groups and flags are never written; ``.grad`` is during ``update``, and put back. ``optimizer.state``
    holds the tensors that replays write from the first ``sync`` on that finds it filled; until then it is as it was,
    bit for bit. So ``state_dict``, ``load_state_dict``, eager steps and schedulers of the learning rate go on as
    before. A counter of steps that sat on the host is on the device then. What the optimizer keeps in attributes
    (numbers, containers, plain objects) each update works with copies of.

    Supported: SGD, Adam, AdamW and Adagrad in their fused forms; Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop and
    Rprop in their capturable ones; subclasses and others with either, as long as a trial step reads nothing back from
    the device, changes nothing on the host, in private attributes either, and writes no tensors kept beside ``state``
    (updates may be of some of the parameters alone). Not seen are counters outside of the optimizer (globals, closures,
    iterators), and in objects of its own that hold locks. The capturable forms of NAdam, RAdam, ASGD and Adamax compute
    with their counters of steps (corrections such as 1 - beta^step) in the counters' type: float32, which moves float64
    parameters by 1e-9 to 1e-4 from eager's, unless torch's default type is float64 when this is made; RAdam's loses
    digits in its first steps. Adagrad is refused with torch 2.11, whose fused form takes Python rates only, and SGD on
    the host for half-precision parameters, which its fused form leaves unchanged there.

    Hooks of the optimizer are refused, not called around replays: they expect gradients in ``.grad``. Hooks of all
    optimizers (``register_optimizer_step_post_hook``) see eager steps only.

    Args:
        optimizer: with parameters on ``device``, fresh or in the midst of training.
        device: where the updates run.

    Attributes:
        optimizer: the user's.
        parameters: those it updates, in the order of its groups: frozen ones are left out.
        state: what the optimizer keeps for each of ``parameters``, as ``update`` reads and writes it: the user's own
            tensors where these fit, copies on the device where not, tensors of the same form where there are none yet.
        rates: each group's learning rate, scalars on the device: float32, which CUDA's fused kernels take; float64 on
            the host, whose kernels read them as Python's numbers, so that float64 parameters are updated as in eager.

    Raises:
        InputError: an optimizer that cannot be captured; says why.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
        device = torch.empty(0, device=device).device  # with its index
        _require_capturable(optimizer, device)
        self.optimizer = optimizer
        self.device = device
        self._names = names_in_step(type(optimizer))
        self._groups = tuple(_described(optimizer, device, self._names))
        self._plain = tuple(plain_attributes(optimizer, self._names).items())
        trained = [
            (f"{_place(at)}['params'][{member}]", one)
            for at, group in enumerate(optimizer.param_groups)
            for member, one in enumerate(group["params"])
            if one.requires_grad
        ]
        self._places = [place for place, _ in trained]
        self.parameters: tuple[torch.Tensor, ...] = tuple(one for _, one in trained)
        self._layouts = [_layout(one) for one in self.parameters]
        kind = torch.float64 if device.type == "cpu" else torch.float32
        self.rates = tuple(torch.empty((), dtype=kind, device=device) for _ in self._groups)
        self._numbers: list[float | None] = [None] * len(self._groups)
        self._fill(self._changed_rates())
        with step_explained(optimizer):
            held = led_to(optimizer)
        # Trial steps may draw noise; the user's next is as if there had been none.
        with random_state_kept(device, [one for one in held if isinstance(one, torch.Generator)], SHARED):
            self.state = tuple(self._made(tensors_among(held)))
        self._stateful = frozenset(position for position, kept in enumerate(self.state) if kept)
        self._used = self._stateful
        self._held = frozenset[int]()  # positions whose state the user's had when it was last in step with ours
        self._updated = False
        # What optimizer.state held when it was last in step with ours: itself, its entries, copies of these.
        self._synced: tuple[Any, list[dict[str, Any]], list[dict[str, Any]]] | None = None

    def _made(self, beside: Set[int]) -> Iterator[dict[str, torch.Tensor]]:
        """Each parameter's state: the user's tensors where they fit, others with their values where they do not."""
        twins: dict[tuple[int, torch.dtype], torch.optim.Optimizer] = {}
        for at, group in enumerate(self._groups):
            for position in group.positions:
                parameter, layout = self.parameters[position], (at, self.parameters[position].dtype)
                rate = None if layout in twins else self.rates[at]
                if rate is not None:
                    # One for all alike: attributes to copy may be many, and steps have been seen to leave them alone.
                    with step_explained(self.optimizer):
                        only = {at: {**group.options, "lr": 1.0, "params": [parameter]}}
                        twins[layout] = twin_of(self.optimizer, only, {})
                made = trial_step(self.optimizer, twins[layout], at, group.options, parameter, beside, rate)
                _take_over(made, _differing(self.optimizer.state.get(parameter), made, self._places[position]))
                yield made

    @property
    def scales(self) -> bool:
        """Whether ``update`` can be told of a loss scale: all groups have fused forms."""
        return all(group.fused for group in self._groups)

    @property
    def other_form(self) -> str:
        """How ``update`` differs from what the optimizer's own ``step`` runs, in words; empty where it does not.

        Both make the same step, by other kernels: a difference in time that no capture or schedule has made.
        """
        name = name_of(self.optimizer)
        for group, given in zip(self._groups, self.optimizer.param_groups, strict=True):
            if not group.positions or "foreach" not in given:
                continue
            ours, eager = "fused" if group.fused else "foreach", _eager_form(given, self.device)
            if ours != eager:
                return (
                    f"updates are made by torch's {_FORM_NAMES[ours]} {name}, while its step() runs the "
                    f"{_FORM_NAMES[eager]} form: part of the difference in time is that ({name}(..., {ours}=True) to "
                    "compare without)"
                )
        return ""

    def require_scaling(self) -> None:
        """Raises InputError if a step of this optimizer cannot be left out by the device: see ``scales``."""
        if not self.scales:
            raise InputError(
                f"{name_of(self.optimizer)} cannot leave out a step on the device, as a gradient scaler needs",
                fix="train in bfloat16 without a scaler, or use SGD, Adam or AdamW on real floating-point parameters"
                " without gaps in their memory",
            )

    @property
    def fresh(self) -> bool:
        """Whether the next step has to be an eager one: it makes state that is not there yet.

        Asked of the parameters that have been updated, or of all before the first ``update``. O(parameters).
        """
        return self.fresh_for(self._used)

    def fresh_for(self, positions: Set[int]) -> bool:
        """The same of an update of these of ``parameters`` alone."""
        held, needed = self.optimizer.state, positions & self._stateful
        if self._synced is not None and held is self._synced[0]:
            kept = self._synced[1]
            if len(held) == len(kept) and all(map(is_, held.values(), kept)) and all(kept):
                return not needed <= self._held
        return not all(_present(held.get(self.parameters[position])) for position in needed)

    def named_state(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """All of ``state``: position of the parameter, name, tensor."""
        for position, kept in enumerate(self.state):
            for key, tensor in kept.items():
                yield position, key, tensor

    # -- on the device -------------------------------------------------------------------------------------------------

    def update(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        buckets: Sequence[Sequence[int]] | None = None,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """One step with these gradients: calls on the device alone, which read rates and state when they run.

        Args:
            gradients: one for each of ``parameters``, in its shape and type; None: that parameter stays as it is.
            buckets: positions in ``parameters``, each in one bucket at most: an update of its own for each bucket, so
                that it can run as soon as its gradients are there. None: all in one.
            grad_scale: what gradients were multiplied with, one number on the device; by default what a
                ``torch.amp.GradScaler`` in its ``step`` has set on the optimizer.
            found_inf: one number on the device: 1 if this update is to be left out; defaults likewise.

        Raises:
            InputError: gradients or buckets that do not fit, a scale where ``scales`` is False, or a parameter in
                another form than it had. Nothing was updated then.
        """
        grad_scale = getattr(self.optimizer, "grad_scale", None) if grad_scale is None else grad_scale
        found_inf = getattr(self.optimizer, "found_inf", None) if found_inf is None else found_inf
        self._check_scaling(grad_scale=grad_scale, found_inf=found_inf)
        self._check_gradients(gradients)
        given = {position for position, gradient in enumerate(gradients) if gradient is not None}
        parts = [given] if buckets is None else self._parts(buckets, given)
        before = [one.grad for one in self.parameters]
        try:
            with torch.no_grad():
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    parameter.grad = None if gradient is None else with_strides_of(parameter, gradient)
            for part in filter(None, parts):
                self._step_on(part, grad_scale=grad_scale, found_inf=found_inf)
        finally:
            for parameter, kept in zip(self.parameters, before, strict=True):
                parameter.grad = kept
        needed = self._stateful & given
        self._used = self._used | needed if self._updated else needed
        self._updated, self._synced = True, None

    def _step_on(self, part: Set[int], **scaling: torch.Tensor | None) -> None:
        groups = {}
        for at, (group, rate) in enumerate(zip(self._groups, self.rates, strict=True)):
            members = [self.parameters[position] for position in group.positions if position in part]
            groups[at] = {**group.options, "lr": rate, "params": members}
        state = {self.parameters[position]: dict(self.state[position]) for position in part if self.state[position]}
        run_step(twin_of(self.optimizer, groups, state, **scaling), self.device)

    def _check_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if len(gradients) != len(self.parameters):
            raise InputError(
                f"{len(gradients)} gradients for {len(self.parameters)} parameters",
                fix="one for each of parameters, None where there is none",
            )
        for position, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if _layout(parameter) != self._layouts[position]:
                raise InputError("a parameter was moved or converted", where=self._places[position], fix=_PREPARE)
            if gradient is not None:
                _require_fitting(gradient, parameter, self._places[position])

    def _check_scaling(self, **given: torch.Tensor | None) -> None:
        for name, one in given.items():
            if one is not None:
                self.require_scaling()
                if one.numel() != 1 or one.device != self.device:
                    what = f"{name} has {one.numel()} elements on {one.device}"
                    raise InputError(what, fix=f"one number, on {self.device}")

    def _parts(self, buckets: Sequence[Sequence[int]], given: set[int]) -> list[set[int]]:
        named = [position for bucket in buckets for position in bucket]
        if len(set(named)) != len(named):
            raise InputError("a position is in two buckets: it would be updated twice", fix="put each in one")
        missing, unknown = sorted(given - set(named)), sorted(set(named) - set(range(len(self.parameters))))
        if missing or unknown:
            what = f"position {missing[0]} is in no bucket" if missing else f"there is no position {unknown[0]}"
            raise InputError(what, fix="put the positions of all parameters with gradients in buckets")
        return [given.intersection(bucket) for bucket in buckets]

    # -- on the host ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """To be called before each recording: like ``sync``, but the optimizer stays as it is, bit for bit.

        Where ``optimizer.state`` holds other tensors than ``state`` does, ``state`` takes them over where they fit, or
        their values; once there was an ``update``, which may have been recorded with ``state``'s tensors, their values
        alone. The next ``sync`` puts ``state``'s tensors in their place.

        Raises:
            InputError: as ``sync``.
        """
        _require_no_hooks(self.optimizer)
        self._check_groups()
        self._check_attributes()
        rates = self._changed_rates()
        if not self._in_step():
            for kept, pending in zip(self.state, self._pending(), strict=True):
                if self._updated:
                    _copy(pending)
                else:
                    _take_over(kept, pending)
        self._fill(rates)

    def sync(self) -> None:
        """To be called before each replay: follow what was done to the optimizer since, without waiting for the device.

        Learning rates that changed are written to ``rates``; one that is itself a tensor on a device is copied at each
        call. Where ``optimizer.state`` holds other tensors than ``state`` does (made by an eager step, loaded), their
        values are copied, and ``state``'s tensors put in their place. Writes go to the current stream. Parameters that
        have no state are left for an eager step: see ``fresh``.

        O(parameters), about 20 µs for 160 of them with three tensors each where nothing changed; asynchronous.

        Raises:
            InputError: other parameters, groups, hooks or hyperparameters than the learning rate, other plain values in
                groups or attributes, a learning rate that is no number, or state that does not fit. Nothing was changed
                then.
        """
        optimizer = self.optimizer
        _require_no_hooks(optimizer)
        self._check_groups()
        self._check_attributes()
        rates = self._changed_rates()
        if not self._in_step():
            self._install()
        self._fill(rates)
        if "step" in vars(optimizer) and not getattr(optimizer, "_opt_called", False) and not self._untrained():
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler asks: was a step taken?

    def _untrained(self) -> bool:
        """Whether no step has made state yet."""
        held = self.optimizer.state
        return bool(self._used) and not any(_present(held.get(self.parameters[position])) for position in self._used)

    def _check_groups(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(self._groups):
            what = f"the optimizer has {len(groups)} parameter groups; it had {len(self._groups)}"
            raise InputError(what, fix=_PREPARE)
        for at, (group, was) in enumerate(zip(groups, self._groups, strict=True)):
            members = group["params"]
            if len(members) != len(was.members) or not all(map(is_, members, was.members)):
                raise InputError("the optimizer has other parameters than it had", where=_place(at), fix=_PREPARE)
            if tuple(map(_requires_grad, members)) != was.trained:
                raise InputError("a parameter was frozen or unfrozen", where=_place(at), fix=_PREPARE)
            for key, value in was.settings:
                now = group.get(key)
                if now is not value and (_has_tensor(now) or now != value):
                    raise InputError(
                        f"{key} was {value!r} and is {now!r} now: only learning rates are read before each step",
                        where=_place(at),
                        fix=_PREPARE + _CYCLES * (key in ("momentum", "betas")),
                    )
            if len(group) > len(was.options) + len(_FOLLOWED):
                for key, now in group.items():
                    if (
                        key not in was.options
                        and key not in _FOLLOWED
                        and _is_setting(self.optimizer, self._names, key, now)
                    ):
                        raise InputError(
                            f"{key} is {now!r} now, and was not there: only learning rates are read before each step",
                            where=_place(at),
                            fix=_PREPARE,
                        )

    def _check_attributes(self) -> None:
        for name, value in self._plain:
            now = getattr(self.optimizer, name, None)
            if now is not value and (_has_tensor(now) or now != value):
                raise InputError(
                    f"{name} was {value!r} and is {now!r} now: a replay repeats what its step read",
                    where=f"{name_of(self.optimizer)}.{name}",
                    fix=_PREPARE,
                )

    def _changed_rates(self) -> list[tuple[int, float | torch.Tensor]]:
        """Groups whose rates have to be written, and with what."""
        changed: list[tuple[int, float | torch.Tensor]] = []
        for at, group in enumerate(self.optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                if rate.numel() != 1:
                    raise InputError(f"lr has {rate.numel()} elements", where=_place(at), fix="one number")
                if rate.device.type != "cpu":
                    changed.append((at, rate))
                    continue
                rate = rate.item()
            if rate != self._numbers[at]:
                if not isinstance(rate, Real):
                    raise InputError(f"lr is {rate!r}, which is no number", where=_place(at), fix="a float")
                changed.append((at, float(rate)))
        return changed

    def _fill(self, rates: Sequence[tuple[int, float | torch.Tensor]]) -> None:
        for at, rate in rates:
            with torch.no_grad():
                if isinstance(rate, torch.Tensor):
                    self.rates[at].copy_(rate.reshape(()))
                    self._numbers[at] = None
                else:
                    self.rates[at].fill_(rate)
                    self._numbers[at] = rate

    def _in_step(self) -> bool:
        """Whether the user's state holds what it held after the last ``_install``."""
        if self._synced is None or self._synced[0] is not self.optimizer.state:
            return False
        held, _, before = self._synced
        return same_objects(list(held.values()), before)

    def _pending(self) -> list[list[Pending]]:
        """For each parameter, where the user's state holds other tensors than ours."""
        held = self.optimizer.state
        return [
            _differing(held.get(parameter), kept, place) if kept else []
            for parameter, kept, place in zip(self.parameters, self.state, self._places, strict=True)
        ]

    def _install(self) -> None:
        held = self.optimizer.state
        pending = list(chain.from_iterable(self._pending()))
        _copy(pending)
        for entry, key, ours, _ in pending:
            entry[key] = ours
        entries = list(held.values())
        self._synced = None
        if all(type(entry) is dict for entry in entries):
            self._synced = held, entries, list(map(dict, entries))
            parameters = enumerate(self.parameters)
            self._held = frozenset(position for position, one in parameters if _present(held.get(one)))


# -- what can be captured ----------------------------------------------------------------------------------------------


def _require_capturable(optimizer: Any, device: torch.device) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"the optimizer is a {type(optimizer).__name__}", fix="pass a torch.optim.Optimizer")
    name = name_of(optimizer)
    if not {"state", "param_groups", "defaults"} <= vars(optimizer).keys():
        raise InputError(f"{name} stands for another optimizer", fix="pass the one inside")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS evaluates the loss several times in a step, through a closure", fix="use SGD, Adam or AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InputError("SparseAdam takes sparse gradients, whose sizes depend on data", fix="use Adam, sparse=False")
    _require_no_hooks(optimizer)
    trained = 0
    for at, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise InputError("differentiable=True records the step for autograd", where=_place(at), fix="leave it out")
        for key, value in group.items():
            if key != "lr" and key in optimizer.defaults and _has_tensor(value):
                raise InputError(f"{key} is a tensor, which the step reads back", where=_place(at), fix="give numbers")
        for member, one in enumerate(group["params"]):
            where = f"{_place(at)}['params'][{member}]"
            if one.requires_grad and one.device != device:
                raise InputError(f"a parameter is on {one.device}, the model on {device}", where=where)
            if one.requires_grad and type(one) not in (torch.Tensor, torch.nn.Parameter):
                raise InputError(f"a parameter is a {type(one).__name__}", where=where, fix="use plain parameters")
            trained += one.requires_grad
    if not trained:
        raise InputError(f"{name} has no parameters that require gradients", fix="unfreeze some")


def _require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InputError(
            "the optimizer has step hooks: they expect gradients in .grad, and a captured step would skip them",
            fix="remove them, and do after the step what they do",
        )
    for hook in chain(ALL_PRE_HOOKS.values(), ALL_POST_HOOKS.values()):
        if getattr(hook, "__module__", "").partition(".")[0] not in _OWN_HOOKS:
            called = getattr(hook, "__qualname__", type(hook).__name__)
            raise InputError(
                f"{called} is registered as a hook of all optimizers' steps, which a captured step would skip",
                fix="remove it, and do after the step what it does",
            )
    replaced = vars(optimizer).get("step")
    if replaced is not None:
        inside = getattr(replaced, "__wrapped__", None) if hasattr(replaced, "_wrapped_by_lr_sched") else None
        if inside is not type(optimizer).step:
            raise InputError(
                "the optimizer's step was replaced by another function, which a captured step would skip",
                fix="del optimizer.step",
            )


def _described(optimizer: torch.optim.Optimizer, device: torch.device, names: Set[str]) -> Iterator[_Group]:
    start = 0
    for at, group in enumerate(optimizer.param_groups):
        trained = [one for one in group["params"] if one.requires_grad]
        types = {one.dtype for one in trained}
        # Fused kernels go through memory from the first element on: what lies in gaps they would update instead.
        gaps = [f"['params'][{n}]" for n, one in enumerate(group["params"]) if one.requires_grad and not _is_dense(one)]
        if gaps and group.get("fused"):
            raise InputError(
                "fused=True writes what lies between the elements of a parameter that has gaps in its memory",
                where=_place(at) + gaps[0],
                fix=f"fused=False, or {_DENSE}",
            )
        fused = "fused" in group and not gaps and types.issubset(_fused_types(optimizer, device))
        if trained and not fused and "capturable" not in group:
            kinds = "a parameter with gaps in its memory" if gaps else ", ".join(sorted(map(str, types)))
            why = f"on {device.type} for {kinds}" if "fused" in group else "neither fused nor capturable"
            raise InputError(
                f"{name_of(optimizer)} has no form that stays on the device: {why}",
                where=_place(at) + (gaps[0] if gaps else ""),
                fix="use another optimizer, or step() in eager" + f"; or {_DENSE}" * bool(gaps),
            )
        forms = {"fused": fused, "foreach": not fused, "capturable": True}
        options = {key: forms.get(key, value) for key, value in group.items() if key not in _FOLLOWED}
        settings = tuple((key, copy(group[key])) for key in options if _is_setting(optimizer, names, key, group[key]))
        positions = tuple(range(start, start + len(trained)))
        start += len(trained)
        members = tuple(group["params"])
        yield _Group(members, tuple(map(_requires_grad, members)), positions, options, settings, fused)


def _is_setting(optimizer: torch.optim.Optimizer, names: Set[str], key: str, value: object) -> bool:
    """Whether ``step`` may read this entry of a group, and a replay would go on with what it was."""
    return key not in _FORMS and (key in optimizer.defaults or (key in names and isinstance(value, PLAIN)))


def _eager_form(group: Mapping[str, Any], device: torch.device) -> str:
    """The flag of the form that ``step`` takes for a group; empty: a loop over its parameters."""
    if group.get("fused"):
        return "fused"
    foreach = group["foreach"]
    if foreach is None and group.get("fused") is None:
        rate_read = isinstance(group["lr"], torch.Tensor) and group.get("capturable") is False
        foreach = device.type in foreach_kernels() and not rate_read
    return "foreach" if foreach else ""


def _fused_types(optimizer: torch.optim.Optimizer, device: torch.device) -> Set[torch.dtype]:
    if device.type not in fused_kernels():
        return frozenset()
    if device.type == "cpu" and isinstance(optimizer, torch.optim.SGD):
        return _FUSED_TYPES - {torch.float16, torch.bfloat16}  # left unchanged: pytorch issue 191763, torch <= 2.13
    return _FUSED_TYPES


# -- tensors -----------------------------------------------------------------------------------------------------------


def _differing(held: dict[str, Any] | None, kept: Mapping[str, torch.Tensor], where: str) -> list[Pending]:
    """Where ``held`` has other tensors than ``kept``; nothing if it has no state yet."""
    if held is None or not _present(held):
        return []
    pending = []
    for key, ours in kept.items():
        theirs = held.get(key)
        if theirs is ours:
            continue
        if isinstance(theirs, (int, float)):
            theirs = torch.tensor(theirs, dtype=ours.dtype)
        if not isinstance(theirs, torch.Tensor):
            raise InputError(f"the optimizer's state has no {key}", where=where, fix="load a state that is complete")
        if theirs.shape != ours.shape:
            what = f"{key} in the optimizer's state has shape {list(theirs.shape)}, not {list(ours.shape)}"
            raise InputError(what, where=where, fix="load the state of this model")
        pending.append((held, key, ours, theirs))
    return pending


def _take_over(kept: dict[str, torch.Tensor], pending: Sequence[Pending]) -> None:
    """Make the user's tensors ours where they fit, copies of them where not."""
    for _, key, ours, theirs in pending:
        kept[key] = theirs if _layout(ours) == _layout(theirs) else torch.empty_like(ours).copy_(theirs)


def _copy(pending: Sequence[Pending]) -> None:
    """The values of the user's tensors into ours."""
    if pending:
        with torch.no_grad():
            foreach_copy_([ours for _, _, ours, _ in pending], [theirs for _, _, _, theirs in pending])


def _present(held: Mapping[str, Any] | None) -> bool:
    return held is not None and any(value is not None for value in held.values())


def _require_fitting(gradient: torch.Tensor, parameter: torch.Tensor, where: str) -> None:
    if gradient.layout is not torch.strided:
        raise InputError("a gradient is sparse", where=where, fix="make the embedding with sparse=False")
    for what, mine, other in (
        ("shape", list(gradient.shape), list(parameter.shape)),
        ("type", gradient.dtype, parameter.dtype),
        ("device", gradient.device, parameter.device),
    ):
        if mine != other:
            raise InputError(f"a gradient has {what} {mine}, its parameter {other}", where=where)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory, in any order, each in a place of its own."""
    strides = tensor.stride()
    return not tensor.numel() or dense(tensor.shape, strides, sorted(range(tensor.dim()), key=strides.__getitem__))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _has_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(_has_tensor, value)))


def _place(group: int) -> str:
    return f"param_groups[{group}]"
