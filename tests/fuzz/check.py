"""Is what a case prepares eager's twin? Outputs, gradients, state, inputs, random numbers and kept outputs compared."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core import InputError, Nimble, NimbleError, NimbleWarning, TrainStep
from nimble_core.validation.bounds import tolerance_for
from nimble_core.validation.rounding_noise import perturbed
from tests.fuzz.generator import Case, loss_of, tensors_of

__all__ = ["Result", "check"]

CALLS = 4
_ROOM = 100.0  # times what moving each result of eager's by its last place moves one, rounding may do


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case.

    ``outcome`` is ``"equal"``; ``"refused"``, by an error that says what to do; ``"warned"`` where a model that is not
    static was said to be frozen and is; ``"eager fails"`` where the model itself raises on this device; ``"wrong"``
    where something differs without a word, or ``"crash"``.
    """

    seed: int
    outcome: str
    why: str = ""
    mode: str = ""
    static: bool = True

    @property
    def failed(self) -> bool:
        """Whether this must not happen."""
        return self.outcome in ("wrong", "crash")


class _Differs(Exception):
    """Something is not eager's."""


def check(case: Case, device: str = "cpu") -> Result:
    """Prepare the model of a case, and call it beside eager on fresh inputs."""
    result = partial(Result, case.seed, mode=case.mode, static=case.static)
    with warnings.catch_warnings(record=True) as said, torch.random.fork_rng(devices=[]):
        warnings.simplefilter("always")
        try:
            {"step": _check_step}.get(case.mode, _check_module)(case, device)
        except _Differs as error:
            told = [str(one.message) for one in said if issubclass(one.category, NimbleWarning)]
            if told and not case.static:
                return result("warned", f"{error}; {told[0]}")
            return result("wrong", str(error))
        except Exception as error:
            outcome = "refused" if isinstance(error, NimbleError) else "crash"
            if outcome == "crash" and _eager_raises(type(error), case, device):
                outcome = "eager fails"
            return result(outcome, f"{type(error).__name__}: {error}")
    return result("equal")


def _eager_raises(kind: type[Exception], case: Case, device: str) -> bool:
    """Whether the model itself raises such an error: not all that a host computes does a GPU compute as well."""
    twins = _Twins(case, device)
    try:
        if case.mode == "step":
            _eager_step(twins, twins.models[0], _optimizer(case, twins.models[0]), 100, {"accumulate": 1})
            _eager_steps(twins, 2 * CALLS - 1, {"accumulate": 1})
        else:
            _call(twins, twins.models[0], 100)
            _calls(twins, CALLS - 1)
    except kind:
        return True
    return False


class _Watching(TorchDispatchMode):
    """Changes nothing, but torch takes other kernels under a mode.

    ``matmul`` folds its batch then, and autocast does not reach into operators that call others, on the host.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Twins:
    """The model three times, on a device: for eager, for eager under a dispatch mode, and to be prepared."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.made = case.namespace()
        self.options = self.made["options"]
        self.models = [self.fresh() for _ in range(3)]
        self.exact = device == "cpu" and self.options.fuse == "none" and case.mode == "inference"

    def fresh(self) -> Any:
        """The model as it starts."""
        torch.manual_seed(self.case.seed)
        return self.made["Model"]().to(self.device).train(self.case.train)

    def inputs(self, turn: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh ones, the same for the same turn."""
        moved: tuple[tuple[Any, ...], dict[str, Any]] = _map_tensors(
            lambda one: one.detach().to(self.device).requires_grad_(one.requires_grad), self.made["inputs"](turn)
        )
        return moved

    def cast(self) -> Any:
        """The autocast that the case runs under."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.case.autocast)


def _check_module(case: Case, device: str) -> None:
    twins = _Twins(case, device)
    eager, watched, mine = twins.models
    training = case.mode == "training"
    args, kwargs = twins.inputs(100)
    before = _copied((_state(mine), (args, kwargs)))
    with twins.cast(), _nothing_drawn(device), torch.set_grad_enabled(training):
        net = Nimble(mine, twins.options).prepare(*args, training=training, **kwargs)
    _same("a buffer after prepare", _state(mine), before[0])
    _same("an input after prepare", (args, kwargs), before[1])
    kept: list[tuple[Any, Any]] = []
    for turn in range(CALLS):
        called = mine if turn == 1 else net  # the model itself may be used between replays
        theirs = _call(twins, eager, turn)
        with _Watching() if called is net else nullcontext():
            seen = _call(twins, watched, turn)
        ours = _call(twins, called, turn)
        _compare(twins, f"call {turn}", ours, (theirs, seen), _Noise(partial(_calls, twins, turn)))
        if turn == 2 and twins.options.outputs == "copy":
            for one in tensors_of(ours["output"]):
                one.detach().zero_()  # the caller's own
        elif turn != 1 and (twins.options.outputs == "copy" or device == "cpu"):
            kept += [(run["output"], _copied(run["output"])) for run in (ours, theirs)]
    for (output, then), (theirs, before_it) in zip(kept[::2], kept[1::2], strict=True):
        pairs = [*zip(*map(tensors_of, (output, then, theirs, before_it)), strict=True)]
        # Static outputs may be the model's own buffers, as eager's are.
        lasting = [pair for pair in pairs if twins.options.outputs == "copy" or bool(_alike(*pair[2:]).all())]
        _same("an output kept from an earlier call", [one[0] for one in lasting], [one[1] for one in lasting])
    args, kwargs = _map_tensors(lambda one: torch.cat([one, one[:1]]) if one.dim() else one, twins.inputs(0))
    with suppress(InputError), twins.cast():
        net(*args, **kwargs)
        raise _Differs("inputs of another shape were not refused")
    net.close()


def _call(twins: _Twins, model: Any, turn: int) -> dict[str, Any]:
    """One call, from a seed of its own: all that it makes and changes, gradients included."""
    args, kwargs = twins.inputs(turn)
    torch.manual_seed(turn)
    random.seed(turn)
    training = twins.case.mode == "training"
    if turn == CALLS - 1:  # weights are read live
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(0.75)
    with twins.cast(), torch.set_grad_enabled(training):
        output = model(*args, **kwargs)
    found: dict[str, Any] = {"output": output}
    if training:
        model.zero_grad()
        loss_of([*tensors_of(output)]).backward()
        found["gradient"] = {name: one.grad for name, one in model.named_parameters()}
        leaves = [one for one in tensors_of((args, kwargs)) if one.is_leaf and one.requires_grad]
        found["gradient of input"] = [one.grad for one in leaves]
    found |= {"state": _state(model), "input": (args, kwargs), "random state": _random_state(twins.device)}
    return found


def _calls(twins: _Twins, turn: int) -> dict[str, Any]:
    """What eager makes of a call and of those before it."""
    model = twins.fresh()
    return [_call(twins, model, one) for one in range(turn + 1)][-1]


class _Noise:
    """What moving each result by about its last place makes of eager's run."""

    def __init__(self, run: Callable[[], dict[str, Any]]) -> None:
        self.run = run
        self.runs: list[dict[str, Any]] = []

    def of(self, part: str, index: int) -> float:
        """The largest such move of a tensor."""
        if not self.runs:
            for seed in (None, 1, 2):
                with perturbed(seed) if seed else nullcontext():
                    self.runs.append(_copied(self.run()))
        still, *moved = ([*tensors_of(run[part])][index] for run in self.runs)
        return max(_apart(one, still) for one in moved)


def _compare(twins: _Twins, when: str, ours: Any, wanted: Sequence[Any], noise: _Noise) -> None:
    """Raise _Differs where a part of what is ours is neither what eager gives nor what it gives under a mode."""
    for part in ours:
        said = [_differs(twins, f"{part} of {when}", ours[part], one[part], partial(noise.of, part)) for one in wanted]
        if all(said):
            raise _Differs(said[0])


def _differs(twins: _Twins, where: str, ours: Any, theirs: Any, noise: Callable[[int], float]) -> str:
    """Whether both differ in a bit, or by more than rounding makes of it, and where; empty if they do not."""
    try:
        if twins.exact or "random" in where:
            _same(where, ours, theirs)
        _same_structure(where, ours, theirs)
    except _Differs as error:
        return str(error)
    wanted = [*tensors_of(theirs)]
    bound = max(tolerance_for(wanted, "bfloat16" if twins.case.autocast else "float32"), 1e-4)
    for index, pair in enumerate(zip(tensors_of(ours), wanted, strict=True)):
        apart = _apart(*pair)
        if apart > bound and apart > _ROOM * noise(index):
            return f"{where}, tensor {index}: off by {apart:.1e}, where rounding makes {noise(index):.1e}"
    return ""


def _check_step(case: Case, device: str) -> None:
    twins = _Twins(case, device)
    draw = random.Random(case.seed)
    more = {"clip_grad_norm": draw.choice((None, 1.0)), "accumulate": draw.choice((1, 1, 2))}
    cast = torch.bfloat16 if case.autocast else None
    eager, watched, mine = twins.models
    optimizers = [_optimizer(case, model) for model in twins.models]
    before = _copied(_state(mine))
    with _nothing_drawn(device):
        step = TrainStep(mine, _loss, optimizers[2], options=twins.options, autocast=cast, **more)
        step.prepare(*_data(twins, 100))
    _same("a buffer after prepare", _state(mine), before)
    for turn in range(2 * CALLS):
        theirs = _eager_step(twins, eager, optimizers[0], turn, more)
        with _Watching():
            seen = _eager_step(twins, watched, optimizers[1], turn, more)
        torch.manual_seed(turn)
        loss = step(*_data(twins, turn))
        ours = {"loss": loss, "state": _state(mine), "random state": _random_state(device)}
        _compare(twins, f"step {turn}", ours, (theirs, seen), _Noise(partial(_eager_steps, twins, turn, more)))
    step.close()


def _eager_steps(twins: _Twins, turn: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """What eager makes of a step and of those before it."""
    model = twins.fresh()
    optimizer = _optimizer(twins.case, model)
    return [_eager_step(twins, model, optimizer, one, more) for one in range(turn + 1)][-1]


def _optimizer(case: Case, model: Any) -> Any:
    return eval(f"torch.optim.{case.optimizer}", {"torch": torch, "p": [*model.parameters()]})


def _data(twins: _Twins, turn: int) -> tuple[Any, torch.Tensor]:
    args, kwargs = twins.inputs(turn)
    drawn = torch.rand((), generator=torch.Generator().manual_seed(turn))
    return kwargs or args, drawn.to(twins.device)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


def _eager_step(twins: _Twins, model: Any, optimizer: Any, turn: int, more: Mapping[str, Any]) -> dict[str, Any]:
    share = more["accumulate"]
    given, target = _data(twins, turn)
    torch.manual_seed(turn)
    if turn % share == 0:
        optimizer.zero_grad()
    with twins.cast():
        loss = _loss(model(**given) if isinstance(given, dict) else model(*given), target)
    (loss / share).backward()
    if turn % share == share - 1:
        if more.get("clip_grad_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), more["clip_grad_norm"])
        optimizer.step()
    return {"loss": loss.detach(), "state": _state(model), "random state": _random_state(twins.device)}


@contextmanager
def _nothing_drawn(device: str) -> Iterator[None]:
    """Raise _Differs where random states are not afterwards what they were."""

    def states() -> tuple[list[int], list[int], Any]:
        return torch.get_rng_state().tolist(), _random_state(device).tolist(), random.getstate()

    before = states()
    yield
    if states() != before:
        raise _Differs("prepare changed the random state")


def _random_state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def _state(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, live."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def _map_tensors(function: Callable[[torch.Tensor], Any], tree: Any, seen: dict[int, Any] | None = None) -> Any:
    """The same containers with ``function`` of each tensor; of one that is there twice, once."""
    seen = {} if seen is None else seen
    if isinstance(tree, torch.Tensor):
        if id(tree) not in seen:
            seen[id(tree)] = function(tree)
        return seen[id(tree)]
    if isinstance(tree, dict):
        return {name: _map_tensors(function, one, seen) for name, one in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_tensors(function, one, seen) for one in tree)
    return tree


def _copied(tree: Any) -> Any:
    return _map_tensors(lambda one: one.detach().clone(), tree)


def _same_structure(where: str, ours: Any, theirs: Any) -> None:
    shapes = [_map_tensors(lambda one: (str(one.dtype), tuple(one.shape)), tree) for tree in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise _Differs(f"{where} is {shapes[0]}, not {shapes[1]}")


def _same(where: str, ours: Any, theirs: Any) -> None:
    """Raise _Differs unless both are equal in structure and in each bit, NaN being NaN."""
    _same_structure(where, ours, theirs)
    for index, (a, b) in enumerate(zip(tensors_of(ours), tensors_of(theirs), strict=True)):
        if not bool(_alike(a, b).all()):
            raise _Differs(f"{where}, tensor {index}: {int((a != b).sum())} of {a.numel()} elements differ")


def _alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where both are the same number, or NaN."""
    return (a == b) | ((a != a) & (b != b))


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over that of ``b``; 0 where both are not finite alike."""
    if not b.numel():
        return 0.0
    a, b = (one.detach().double() for one in (a, b))
    gap = torch.where(_alike(a, b), torch.zeros_like(a), a - b).norm()
    return float(gap / torch.nan_to_num(b).norm().clamp_min(1e-6)) if bool(torch.isfinite(gap)) else float("inf")
