"""Training steps against every peer: models × precisions × batches, each row timed in one interleaved run.

    python -m benchmarks.training --out benchmarks/results/training-h200.json --cache .inductor
    python -m benchmarks.training --digits

A row is one task, precision and batch, measured in a process of its own. A step is zero_grad, forward, loss, backward
and optimizer on data that lie on the device; data are synthetic. Each way to take it has a model and an optimizer of
its own, from the same values: eager; ours, the whole step as one engine and as a drop-in for the model; and the peers,
each with the fastest optimizer that it can use. Samples go from the call to the finished result, each after an untimed
one of the same; others are of ten steps in a row that nothing waits for in between, as training does. Where there is a
GPU, tuned eager comes first, since cuDNN keeps one choice for each convolution.

Right is who learns what eager learns: the losses of the first 20 steps are held against eager's. Where nothing is drawn
at random, the bound is what rounding alone does: how far eager is from itself when each result is moved by about its
last place, on the mean over several starts; and losses in float64 are a second chance. Where dropout is, the mean over
seeds is compared. Of both as many as it takes.
Memory is the most that a way holds during its steps, with model, gradients and optimizer, all of its graphs' pools, and
workspaces of its own, as if it were alone in its process.

Rows are written as they finish, and a row that the file holds is not measured again; rows that failed are tried again
after the others. ``--warm-only`` compiles ahead of time into the directory of ``--cache``. Beside the results lies the
same as a table in Markdown. All speeds are ratios of medians of one row, above 1 where ours is faster.

``--digits`` trains a small network on scikit-learn's handwritten digits, in eager and by ours, with the same seeds and
batches, the last of which is short, and tells both accuracies.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from statistics import fmean, median
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from benchmarks.cuda import figures
from benchmarks.policies import extreme
from benchmarks.rows import (
    BEST,
    Job,
    Row,
    Settings,
    Suite,
    Told,
    TooSlowError,
    about_candidate,
    about_engine,
    ahead_said,
    aligned,
    as_markdown,
    as_ratio,
    as_us,
    cached_files,
    fastest,
    machines,
    mean,
    more_models,
    parser,
    read,
    run_suite,
    sentence,
    speed_of,
    unstable,
    verdict,
    why,
    within,
    write,
)
from benchmarks.train_zoo import BATCHES, PRECISIONS, TASKS, Task, load
from benchmarks.zoo import precision
from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.ir.measurement import Measurement, interleave, ratio
from nimble_core.profiling.machine import environment, finish
from nimble_core.runtime.device import Device
from nimble_core.scheduling.options import Options
from nimble_core.training.autograd_function import Backward
from nimble_core.validation.rounding_noise import perturbed

__all__ = [
    "PEERS",
    "Prepared",
    "about_digits",
    "digits",
    "judged",
    "main",
    "markdown",
    "measure",
    "selected",
    "summary",
    "table",
    "warm",
]

TUNED, GRAPHED, COMPILED = "eager-tuned", "graphed-callables", "compile"
OVERHEAD, WHOLE = "compile:reduce-overhead", "compile-step"
WHOLE_OVERHEAD = f"{WHOLE}:reduce-overhead"
PEERS = (TUNED, GRAPHED, COMPILED, OVERHEAD, WHOLE, WHOLE_OVERHEAD)

OURS, DROP_IN, REPLAY = "ours, whole step", "ours, drop-in", "ours, bare replay"
WITH_LOSS = "ours, drop-in with loss"
NOT_PEERS = (OURS, DROP_IN, WITH_LOSS, REPLAY)
WAYS = {"step": OURS, "drop-in": DROP_IN}
"""Ours runs the whole step, or forward and backward inside the user's own loop."""

MORE_WAYS = {"drop-in with loss": WITH_LOSS}
"""What counts in no target: the loss is part of the module, as it is part of what peers compile."""

PRODUCTS = ("BERT-base 128",)
"""Tasks made of matrix products, where plain float32 makes another row than TF32."""

LARGE_OUTPUTS = ("BERT-base 128",)
"""Tasks whose loss reads so much (a number for each of 30,522 words) that it matters who runs it."""

HEADLINE = "MobileNetV2 CIFAR"
STEPS = 20
ROUNDS = 201
IN_A_ROW = 10
"""Steps of a sample in which only the last is waited for."""
_SEEDS = 64
_WARM_UPS = 3

TOLERANCE = {"float32": 1e-3, "tf32": 5e-2, "bf16": 1e-1}
"""What is allowed of ``‖losses - eager's‖ / ‖eager's‖`` over the first steps, however little rounding does."""

_STILL = 0.02
"""Losses that move by less than this share of their size do not count as moving at all."""

# Steps amplify differences: on an H200, in TF32, two honest ways were 1e-1 from eager's losses of ResNet-18.
_STARTS, _MOST_STARTS, _ASIDE = 3, 12, 1e-2
"""Where nothing is random: from how many starts losses are averaged, at first and at most, and how far, relative to
each weight, the starts are from the first of them."""

_FACTOR = 3.0
"""How many times as far as moved results are expected to take eager's mean a way may be from it; how many times as far
from float64 as eager; and by how many bounds eager's losses have to move."""

Way = Callable[[Task, Settings], "Prepared"]


@dataclass(slots=True)
class Prepared:
    """One way to train, made ready.

    Args:
        step: one training step; returns the loss, which the next step may overwrite.
        task: with the model that it trains.
        optimizer: whose state it updates.
        note: what readers of its times should know.
        engine: ours; the drop-in's runs the forward, and knows what runs the backward.
        close: frees what it holds.
    """

    step: Callable[[tuple[Tensor, ...], Tensor | None], Tensor]
    task: Task
    optimizer: Optimizer
    note: str = ""
    engine: Engine | None = None
    close: Callable[[], object] = lambda: None

    def reset(self, values: Mapping[str, Tensor]) -> None:
        """Back to the start, in place, since captured graphs know addresses: values of the model, no momentum.

        For SGD without dampening, Adam and AdamW a state of zeros does what no state does.
        """
        with torch.no_grad():
            for name, tensor in self.task.model.state_dict().items():
                tensor.copy_(values[name])
            for state in self.optimizer.state.values():
                for kept in state.values():
                    if isinstance(kept, Tensor):
                        kept.zero_()

    def losses(self, values: Mapping[str, Tensor], seed: int, steps: int = STEPS) -> list[float]:
        """Losses of the first steps from ``values``, on the task's batches in turn."""
        self.reset(values)
        torch.manual_seed(seed)
        batches = self.task.batches
        taken = [self.step(*batches[i % len(batches)]).detach().clone() for i in range(steps)]
        return [float(one) for one in torch.stack(taken).double().tolist()]


# -- ways to train -------------------------------------------------------------------------------------------------


def _stepping(
    task: Task, optimizer: Optimizer, loss_of: Callable[[tuple[Tensor, ...], Tensor | None], Tensor]
) -> Callable[[tuple[Tensor, ...], Tensor | None], Tensor]:
    """The step as it is written everywhere."""

    def step(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _eager(task: Task, settings: Settings) -> Prepared:
    optimizer = task.make_optimizer(fused=True)
    return Prepared(_stepping(task, optimizer, task.loss), task, optimizer)


def _tuned(task: Task, settings: Settings) -> Prepared:
    """Eager in ``channels_last`` where there are convolutions, with cuDNN's benchmark."""
    convolves = any(weight.dim() == 4 for weight in task.model.parameters())
    if convolves:
        task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stub
    optimizer = task.make_optimizer(fused=True)
    plain = _stepping(task, optimizer, task.loss)

    def step(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        if convolves:
            inputs = tuple(
                one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one for one in inputs
            )
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            return plain(inputs, targets)
        finally:
            torch.backends.cudnn.benchmark = before

    return Prepared(step, task, optimizer)


def _graphed(task: Task, settings: Settings) -> Prepared:
    """Forward and backward of the model as CUDA graphs of torch's own."""
    if task.device.type != "cuda":
        raise ValueError(f"CUDA graphs run on CUDA only, the model is on {task.device}")
    optimizer = task.make_optimizer(fused=True)
    inputs = tuple(one.clone() for one in task.batches[0][0])
    with task.casting(cache=False):
        model: Any = torch.cuda.make_graphed_callables(task.model, inputs)

    def loss_of(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        with task.casting(cache=False):
            return task.loss_of(model(*inputs), targets)

    return Prepared(_stepping(task, optimizer, loss_of), task, optimizer)


def _compile(mode: str) -> Way:
    """Model and loss compiled, and the optimizer fused."""

    def way(task: Task, settings: Settings) -> Prepared:
        optimizer = task.make_optimizer(fused=True)

        def loss_of(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
            return task.loss(inputs, targets)

        compiled = torch.compile(_of_its_own(loss_of), mode=mode, dynamic=False)
        step = _marked(_stepping(task, optimizer, compiled), mode)
        with _breaks_counted() as counted:
            for _ in range(2):
                step(*task.batches[0])
        return Prepared(step, task, optimizer, counted())

    return way


def _compile_whole(mode: str) -> Way:
    """The whole step compiled, with its optimizer; backward traced with it where Dynamo can."""

    def way(task: Task, settings: Settings) -> Prepared:
        from torch._dynamo import config

        values = {name: one.clone() for name, one in task.model.state_dict().items()}
        notes = []
        for traced in (True, False) if hasattr(config, "trace_autograd_ops") else (False,):
            # Where steps are kept on the host no CUDA graph is made; SGD keeps none.
            capturable = task.device.type == "cuda"
            try:
                optimizer = task.make_optimizer(capturable=capturable)
            except TypeError:
                optimizer = task.make_optimizer()
            # State that the compiled step made itself would be memory of its CUDA graph, which the next one overwrites.
            _stepping(task, optimizer, task.loss)(*task.batches[0])

            def step(inputs: tuple[Tensor, ...], targets: Tensor | None, optimizer: Optimizer = optimizer) -> Tensor:
                loss = task.loss(inputs, targets)
                loss.backward()
                loss = loss.detach()
                optimizer.step()
                return loss

            compiled = torch.compile(_of_its_own(step), mode=mode, dynamic=False)
            run = _marked(_without_gradients(compiled, list(task.model.parameters())), mode)
            try:
                with _breaks_counted() as counted, config.patch(**({"trace_autograd_ops": True} if traced else {})):
                    for _ in range(2):
                        run(*task.batches[0])
                prepared = Prepared(run, task, optimizer)
                if not all(math.isfinite(loss) for loss in prepared.losses(values, 0, 2)):
                    raise ValueError("losses are not finite")
            except Exception as error:
                if not traced:
                    raise
                notes.append(f"backward not traced with the step: {why(error)}")
                continue
            prepared.note = "; ".join(filter(None, (*notes, counted())))
            return prepared
        raise AssertionError("the last way returns or raises")

    return way


def _of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same under code of its own: Dynamo keeps what it compiled by code, and only so many of each."""
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_name="compiled")
    return function


def _without_gradients(step: Callable[..., Tensor], weights: Sequence[Tensor]) -> Callable[..., Tensor]:
    """The step after zero_grad, which Dynamo does not trace."""

    def run(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        for weight in weights:
            weight.grad = None
        return step(inputs, targets)

    return run


def _marked(step: Callable[..., Tensor], mode: str) -> Callable[..., Tensor]:
    """Tell CUDA graphs of Inductor's where a step begins."""
    if mode != "reduce-overhead":
        return step

    def marking(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(inputs, targets)

    return marking


@contextmanager
def _breaks_counted() -> Iterator[Callable[[], str]]:
    """Yields what says, at the end, how often Dynamo broke graphs and whether Inductor skipped CUDA graphs."""
    from torch._dynamo.utils import counters

    def now() -> tuple[int, int]:
        return sum(counters["graph_break"].values()), counters["inductor"]["cudagraph_skips"]

    before = now()

    def said() -> str:
        breaks, skips = (after - one for one, after in zip(before, now(), strict=True))
        notes = [f"graph breaks: {breaks}"] * bool(breaks) + ["Inductor skipped CUDA graphs"] * bool(skips)
        return ", ".join(notes)

    yield said


def _options(settings: Settings) -> Options:
    return Options(fuse="auto", policy="auto", tune="fast", budget_s=settings.budget_s)


def _train_step(task: Task, optimizer: Optimizer, options: Options) -> TrainStep:
    return TrainStep(task.model, task.loss_fn, optimizer, options=options, autocast=task.autocast)


def _ours(task: Task, settings: Settings, options: Options | None = None) -> Prepared:
    """The whole step as one engine."""
    optimizer = task.make_optimizer(fused=True)
    step = _train_step(task, optimizer, options or _options(settings)).prepare(*task.batches[0])
    return Prepared(step, task, optimizer, engine=step.engine, close=step.close)


def _drop_in(task: Task, settings: Settings, options: Options | None = None) -> Prepared:
    """Forward and backward as engines, in the user's own loop."""
    net = Nimble(task.model, options or replace(_options(settings), outputs=task.outputs))
    return _around(net, task, task.batches[0][0], lambda inputs, targets: task.loss_of(net(*inputs), targets))


class _WithLoss(nn.Module):
    """Model and loss as one module."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.loss_of = task.model, task.loss_of

    def forward(self, inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        return self.loss_of(self.model(*inputs), targets)


def _drop_in_with_loss(task: Task, settings: Settings, options: Options | None = None) -> Prepared:
    """The same with the loss inside of the module: what it reads, and the gradient of that, need not be handed over."""
    net = Nimble(_WithLoss(task), options or replace(_options(settings), outputs="static"))
    return _around(net, task, task.batches[0], net)


def _around(
    net: Nimble, task: Task, given: tuple[Any, ...], loss_of: Callable[[tuple[Tensor, ...], Tensor | None], Tensor]
) -> Prepared:
    """The step with a drop-in in it, prepared for inputs like those given."""
    optimizer = task.make_optimizer(fused=True)
    with task.casting(cache=False):
        net.prepare(*given, training=True)

    def casting(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        with task.casting(cache=False):
            return loss_of(inputs, targets)

    return Prepared(_stepping(task, optimizer, casting), task, optimizer, engine=net.engines[0], close=net.close)


KINDS: dict[str, Way] = {
    "eager": _eager,
    OURS: _ours,
    DROP_IN: _drop_in,
    WITH_LOSS: _drop_in_with_loss,
    TUNED: _tuned,
    GRAPHED: _graphed,
    COMPILED: _compile("default"),
    OVERHEAD: _compile("reduce-overhead"),
    WHOLE: _compile_whole("default"),
    WHOLE_OVERHEAD: _compile_whole("reduce-overhead"),
}


# -- whether they learn the same -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lessons:
    """What eager learns, to hold others against.

    Args:
        eager: losses of the first steps, one list for each seed or start.
        bound: on the distance of the means.
        random: whether steps draw random numbers.
        moved: how far eager's losses move from those of the first time that it sees each batch.
        perturbed: how far they are from those with moved results, one distance for each start.
        truth: means of losses in float64; None where there is randomness, or no float64.
        why: why there are none; empty otherwise.
    """

    eager: tuple[list[float], ...]
    bound: float
    random: bool
    moved: float
    perturbed: tuple[float, ...] = ()
    truth: list[float] | None = None
    why: str = ""

    @property
    def telling(self) -> bool:
        """Whether who does not learn could not pass."""
        return self.moved >= _FACTOR * self.bound


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """``‖a - b‖ / ‖b‖``; inf if that is no number.

    >>> distance([3.0, 4.5], [3.0, 4.0])
    0.1
    """
    found = math.dist(a, b) / (math.hypot(*b) or 1.0)
    return found if math.isfinite(found) else math.inf


def means(curves: Sequence[Sequence[float]]) -> list[float]:
    """Step by step."""
    return [fmean(one) for one in zip(*curves, strict=True)]


def lessons(
    curves: Sequence[list[float]],
    dtype: str,
    batches: int,
    *,
    random: bool = False,
    moved: Sequence[Sequence[float]] = (),
) -> Lessons:
    """Eager's losses with several seeds, or from several starts, and how far from their mean is near enough.

    Who steps differently rounds differently, and each start makes of that what it will: means over n starts are nearer
    to each other by √n. The bound is the tolerance for the precision, or three times as far as moved results take the
    mean, if they take each curve as far as was seen and in directions that have nothing to do with each other. Where
    steps are random: the tolerance of how far losses move, which leaves room for chance: twice the distance that two
    means over as many seeds are expected to have from each other.

    Args:
        curves: one for each seed or start, two at least.
        dtype: a key of ``TOLERANCE``.
        batches: that were taken in turn.
        random: whether steps draw random numbers.
        moved: eager's losses under ``rounding_noise.perturbed``, from the same starts; empty: not known.
    """
    middle = means(curves)
    norm, count = math.hypot(*middle) or 1.0, len(curves)
    still = [middle[i % batches] for i in range(len(middle))]
    moves = distance(still, middle)
    bound = TOLERANCE[dtype]
    if random:
        bound *= min(max(moves, _STILL), 1.0)
        variance = math.fsum(math.dist(one, middle) ** 2 for one in curves) / (count - 1)
        bound += 2 * math.sqrt(2 * variance / count) / norm
    if moved:
        apart = math.hypot(*(math.dist(one, other) for one, other in zip(moved, curves, strict=True))) / count / norm
        bound = max(bound, _FACTOR * apart) if math.isfinite(apart) else math.inf
    perturbed = tuple(distance(one, other) for one, other in zip(moved, curves, strict=False))
    return Lessons(tuple(curves), bound, random, moves, perturbed)


def judged(curves: Sequence[list[float]], given: Lessons) -> dict[str, Any]:
    """Whether these are eager's losses.

    Near eager's is right; and, where there is truth, no more than three times as far from that as eager is, as long as
    eager's losses move by three times that. Losses that eager itself hardly changes show nothing.
    """
    mine, theirs = means(curves), means(given.eager)
    error = distance(mine, theirs)
    from_truth = own = None
    if given.truth is not None:
        from_truth, own = distance(mine, given.truth), distance(theirs, given.truth)
    right = error <= given.bound
    if from_truth is not None and own is not None and given.moved >= _FACTOR * (_FACTOR * own):
        right = right or from_truth <= _FACTOR * own
    reason = ""
    if not right:
        reason = f"losses differ from eager's by {error:.1e}, at most {given.bound:.1e} would pass"
        if from_truth is not None:
            reason += f"; from float64's by {from_truth:.1e}, eager's by {own:.1e}"
    elif not given.telling:
        reason = f"void: eager's losses move by only {given.moved:.1e}, too little for a bound of {given.bound:.1e}"
    return {
        "passed": not reason,
        "differs": not right,
        "reason": reason,
        "error": min(error, 1e300),
        "bound": given.bound,
        "moved": given.moved,
        "perturbed": list(given.perturbed),
        "error from float64": from_truth,
        "eager's from float64": own,
        "seeds": len(curves),
        "losses": mine,
    }


# -- one row -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """The ways of one row, each on a model of its own; one that fails is left out with the reason."""

    task: Task
    settings: Settings
    device: Device
    values: dict[str, Tensor]
    prepared: dict[str, Prepared] = field(default_factory=dict)
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def prepare(self, name: str) -> Prepared:
        """Make a way ready, take its first steps, and see what it holds.

        Raises:
            TooSlowError: a peer was not ready in its time.
            Exception: what goes wrong.
        """
        before = _Held.now(self.task.device)
        start = time.perf_counter()
        with within(self.settings.peer_s if name in PEERS else math.inf):
            one = KINDS[name](self.task.copied(), self.settings)
            self.prepared[name] = one
            one.step(*self.task.batches[0])
            self.device.synchronize()
        self.said[name] = {"measured": True, "prepare s": time.perf_counter() - start, "note": one.note}
        for _ in range(_WARM_UPS):
            one.step(*self.task.batches[0])
        self.memory[name] = before.most_during(lambda: one.step(*self.task.batches[0]))
        return one

    def attempt(self, name: str, given: Lessons) -> dict[str, Any] | None:
        """The same, and its losses judged. None if it is left out."""
        try:
            one = self.prepare(name)
            found = judged([self._curve(one, seed, given.random) for seed in range(len(given.eager))], given)
        except (Exception, TooSlowError) as error:
            traceback.print_exc()
            self.leave_out(name, why(error))
            return None
        if found["differs"]:
            self.leave_out(name, found["reason"])
        return found

    def leave_out(self, name: str, reason: str) -> None:
        """Say why, and free what it holds."""
        self.said[name] = {"prepare s": None, **self.said.get(name, {}), "measured": False, "note": reason}
        gone = self.prepared.pop(name, None)
        gc.unfreeze()
        if gone:
            with suppress(Exception):
                gone.close()

    def lessons(self, dtype: str) -> Lessons:
        """What eager learns, with as many seeds as it takes to tell; where nothing is random, from as many starts, also
        with moved results and in float64.
        """
        eager, batches = self.prepared["eager"], len(self.task.batches)
        random = self._draws(eager)
        count, most = (2, _SEEDS) if random else (_STARTS, _MOST_STARTS)
        curves: list[list[float]] = []
        moved: list[list[float]] = []
        while True:
            more = range(len(curves), count)
            curves += [self._curve(eager, seed, random) for seed in more]
            moved += [] if random else [self._moved(eager, seed) for seed in more]
            found = lessons(curves, dtype, batches, random=random, moved=moved)
            if found.telling or count >= most:
                break
            count *= 2
        if random:
            return replace(found, why="steps draw random numbers")
        try:
            wide = self.task.in_float64()
            optimizer = wide.make_optimizer()
            exact = Prepared(_stepping(wide, optimizer, wide.loss), wide, optimizer)
            return replace(found, truth=means([self._curve(exact, seed, random) for seed in range(count)]))
        except Exception as error:
            return replace(found, why=why(error))

    def _curve(self, one: Prepared, seed: int, random: bool) -> list[float]:
        """Losses with this seed; where nothing is random, from a start of its own."""
        return one.losses(self.values if random or not seed else self._start(seed), seed)

    def _start(self, seed: int) -> dict[str, Tensor]:
        """Values a little beside those of the task, the same for whoever asks."""
        torch.manual_seed(seed)
        trained = {name for name, _ in self.task.model.named_parameters()}
        return {
            name: one * (1 + _ASIDE * torch.randn(one.shape, device=one.device)) if name in trained else one
            for name, one in self.values.items()
        }

    def _draws(self, one: Prepared) -> bool:
        """Whether a step moves the random state, the host's or the GPU's."""
        before = _random_state(self.task.device)
        one.step(*self.task.batches[0])
        after = _random_state(self.task.device)
        return not all(map(torch.equal, before, after))

    def _moved(self, one: Prepared, seed: int) -> list[float]:
        """Losses with each result moved by about its last place; backward on this thread, where the mode is."""
        with torch.autograd.set_multithreading_enabled(False), perturbed(seed):
            return self._curve(one, seed, False)

    def timed(self, seconds: float, steps: int = 1) -> dict[str, Measurement]:
        """Every way in turn, on one batch, from the same start; beside them bare replays of ours.

        Args:
            seconds: to take at most.
            steps: that make a sample.
        """
        runs = {name: self._once(name, one) for name, one in self.prepared.items()}
        ours = self.prepared.get(OURS)
        if ours is not None and ours.engine is not None:
            runs[REPLAY] = ours.engine.executable.replay
        runs = {name: _repeated(run, steps) for name, run in runs.items()}
        for one in self.prepared.values():
            one.reset(self.values)
        times = interleave(
            runs,
            clock_ns=self.device.clock_ns,
            synchronize=self.device.synchronize,
            rounds=ROUNDS,
            budget_s=seconds,
            rehearse=True,
        )
        return {name: one for name, one in times.items() if self.said.get(name, {"measured": True})["measured"]}

    def _once(self, name: str, one: Prepared) -> Callable[[], object]:
        def once() -> object:
            if not self.said[name]["measured"]:
                return None
            try:
                return one.step(*self.task.batches[0])
            except Exception as error:
                self.said[name] |= {"measured": False, "note": why(error)}
                return None

        return once

    def close(self) -> None:
        """Free everything."""
        gc.unfreeze()
        while self.prepared:
            self.prepared.popitem()[1].close()


def _repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    def repeated() -> None:
        for _ in range(times):
            run()

    return run if times == 1 else repeated


def _compared(times: Mapping[str, Measurement]) -> dict[str, dict[str, Any]]:
    """How much faster each of our ways is than each other."""
    return {
        way: {
            name: asdict(ratio(times[mine], one))
            for name, one in times.items()
            if name not in NOT_PEERS and mine in times
        }
        for way, mine in {**WAYS, **MORE_WAYS}.items()
        if way in WAYS or mine in times
    }


def _of_one_step(one: Measurement) -> dict[str, Any]:
    found = figures(one)
    return found | {
        "median us": found["median us"] / IN_A_ROW,
        "quartiles us": [quartile / IN_A_ROW for quartile in found["quartiles us"]],
    }


def _random_state(device: torch.device) -> list[Tensor]:
    """Of all generators that a step on ``device`` draws from by default."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@dataclass(frozen=True, slots=True)
class _Held:
    """What lay on a device at one time: bytes allocated, and bytes of graphs' pools, allocated and in all."""

    device: torch.device
    allocated: int
    pools: int
    in_pools: int

    @classmethod
    def now(cls, device: torch.device) -> _Held:
        """Zeros on the host, which does not count.

        What is alive is not searched for garbage again until it is unfrozen: a compiler's half a million objects take
        the better part of a second, each time.
        """
        if device.type != "cuda":
            return cls(device, 0, 0, 0)
        gc.collect()
        gc.freeze()
        torch.cuda.synchronize(device)
        # Each way is charged its own, as if it were alone in its process: products ask for them again.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        pools = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
        return cls(
            device,
            torch.cuda.memory_allocated(device),
            sum(one["total_size"] for one in pools),
            sum(one["allocated_size"] for one in pools),
        )

    def most_during(self, step: Callable[[], object]) -> int:
        """Bytes that were added since, at the most during three steps; 0 on the host.

        Graphs run in memory that the allocator does not call allocated: their pools count as a whole.
        """
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(3):
            step()
        torch.cuda.synchronize(self.device)
        most, after = torch.cuda.max_memory_allocated(self.device), _Held.now(self.device)
        return most - self.allocated + (after.pools - self.pools) - (after.in_pools - self.in_pools)


def measure(row: Row, settings: Settings) -> dict[str, Any]:
    """Everything about one row, measured in this process.

    Raises:
        Exception: the task cannot be made, or not be trained in eager.
    """
    began = time.perf_counter()
    with precision(row.dtype), ExitStack() as stack:
        files = cached_files()
        task = _task(row, settings)
        stamp = environment(settings.device)
        device = device_for(task.device)
        values = {name: one.detach().clone() for name, one in task.model.state_dict().items()}
        run = _Run(task, settings, device, values)
        stack.callback(run.close)
        if TUNED in row.peers and settings.device == "cuda":
            KINDS[TUNED](task.copied(), settings).step(*task.batches[0])
        # What is kept for the process, such as handles of libraries, is nobody's.
        KINDS["eager"](task.copied(), settings).step(*task.batches[0])
        run.prepare("eager")
        watch = Told({"eager": time.perf_counter() - began})
        with watch("lessons"):
            given = run.lessons(_tolerance(row.dtype, settings.device))
        learned = {}
        for name in (*_ours_of(row), *row.peers):
            with watch(name):
                learned[name] = run.attempt(name, given)
        with watch("samples"):
            times = run.timed(settings.seconds)
            in_a_row = run.timed(settings.seconds, IN_A_ROW)
        engines = {name: one.engine for name, one in run.prepared.items()}
        with watch("limit"):
            ours = _about(row, stamp, engines.get(OURS), device, times.get(REPLAY))
        return {
            "model": row.model,
            "dtype": row.dtype,
            "batch": row.batch,
            "run": settings.run,
            "data": "synthetic",
            "environment": asdict(finish(stamp)),
            "times": {name: figures(one) for name, one in times.items()},
            "speed": _compared(times),
            "in a row": {
                "steps": IN_A_ROW,
                "times": {name: _of_one_step(one) for name, one in in_a_row.items()},
                "speed": _compared(in_a_row),
            },
            "losses": {
                "eager": {
                    "losses": means(given.eager),
                    "seeds": len(given.eager),
                    "perturbed": list(given.perturbed),
                    "float64": given.truth,
                    "float64 left out": given.why,
                },
                **{name: one for name, one in learned.items() if one},
            },
            "memory": {
                name: {"bytes": held, "over eager": held / run.memory["eager"] if run.memory["eager"] else None}
                for name, held in run.memory.items()
            },
            "ways": run.said,
            "compile cache files": [files, cached_files()],
            "ours": ours,
            "drop-in": _about(row, stamp, engines.get(DROP_IN), device, None),
            "spent s": watch.seconds,
            "wall s": time.perf_counter() - began,
        }


def _ours_of(row: Row) -> tuple[str, ...]:
    """Our ways to train what a row is of."""
    return (*WAYS.values(), *(MORE_WAYS.values() if row.model in LARGE_OUTPUTS else ()))


def _about(row: Row, stamp: Any, engine: Engine | None, device: Device, replay: Measurement | None) -> dict[str, Any]:
    """What an engine is, empty if there is none; ``replay``: its bare replays, if they are all of the step."""
    if engine is None:
        return {}
    return {
        **about_engine(row, stamp, engine, device, replay),
        "steps s": dict(engine.seconds),
        "memory bytes": engine.executable.nbytes,
        "backward": _about_backward(engine.backward) if engine.backward else None,
    }


def _about_backward(half: Backward) -> dict[str, Any]:
    """What a drop-in's backward runs and was chosen from."""
    return {
        "chosen": half.executable.schedule.policy,
        "calls": len(half.recorded.recording.program.calls),
        "candidates": [about_candidate(one) for one in half.tuned.candidates],
        "memory bytes": half.executable.nbytes,
    }


def _tolerance(dtype: str, device: str) -> str:
    """Key of ``TOLERANCE``: on CUDA convolutions in float32 are TF32's, on the host TF32 is float32."""
    if dtype == "bf16":
        return dtype
    return "tf32" if device == "cuda" else "float32"


def warm(row: Row, settings: Settings) -> dict[str, Any]:
    """Compile what ``measure`` would of the row's peers and ours among them, and throw it away: what stays are the
    caches on disk.
    """
    began = time.perf_counter()
    notes, watch = {}, Told()
    options = Options(fuse="inductor", policy="single", budget_s=settings.budget_s)
    ours: dict[str, Way] = {
        OURS: lambda task, settings: _ours(task, settings, options),
        DROP_IN: lambda task, settings: _drop_in(task, settings, options),
        WITH_LOSS: lambda task, settings: _drop_in_with_loss(task, settings, options),
    }
    with precision(row.dtype):
        task = _task(row, settings)
        if settings.device == "cuda" and not ours.keys().isdisjoint(row.peers):  # what cuDNN chose decides of layouts
            KINDS[TUNED](task.copied(), settings).step(*task.batches[0])
        for name in row.peers:
            try:
                with watch(name), within(settings.peer_s if name in PEERS else math.inf):
                    one = {**KINDS, **ours}[name](task.copied(), settings)
                    one.step(*task.batches[0])
                one.close()
            except (Exception, TooSlowError) as error:
                notes[name] = why(error)
    return {"wall s": time.perf_counter() - began, "ways s": watch.seconds, "notes": notes}


def compiled(row: Row) -> tuple[str, ...]:
    """Ways of a row that compile something; what takes longest first."""
    return (*(name for name in reversed(PEERS) if name in row.peers and name.startswith("compile")), *_ours_of(row))


def _task(row: Row, settings: Settings) -> Task:
    TASKS.update(more_models(settings.models_from))
    return load(row.model, row.dtype, row.batch, settings.device)


# -- which rows ----------------------------------------------------------------------------------------------------


def selected(
    models: Sequence[str],
    *,
    patterns: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    batches: Sequence[int] = (),
    peers: Sequence[str] | None = None,
) -> list[Row]:
    """Rows to measure: CIFAR-10's shapes in TF32 first, then what is large, then other precisions.

    Args:
        models: that there are.
        patterns: take only models that match one of these (``fnmatch``).
        dtypes: take these; by default TF32 and bfloat16, and float32 where that makes a difference.
        batches: take these; by default those of ``BATCHES``.
        peers: take these; by default ``PEERS``.

    >>> [row.key for row in selected(["BERT-base 128", "ResNet-18 CIFAR"], dtypes=["tf32"], batches=[32])]
    ['ResNet-18 CIFAR, tf32, batch 32', 'BERT-base 128, tf32, batch 32']
    """
    wanted = PEERS if peers is None else peers
    order = ("tf32", "float32", "bf16")
    rows = [
        # cuDNN's choices are made by whoever comes first.
        Row(model, dtype, batch, tuple(sorted(wanted, key=lambda name: name != TUNED)))
        for model in models
        if not patterns or any(fnmatchcase(model, pattern) for pattern in patterns)
        for dtype in dtypes or (one for one in order if one != "float32" or model in PRODUCTS)
        for batch in batches or BATCHES.get(model, (1,))
    ]
    return sorted(rows, key=lambda row: (order.index(row.dtype), not _small(row.model), row.batch))


def _small(model: str) -> bool:
    return model.endswith("CIFAR")


# -- the run -------------------------------------------------------------------------------------------------------

JOBS: dict[str, Job] = {"measure": measure, "warm": warm}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for; 1 if a row failed or the digits were not learned alike, else 0."""
    options = parser(__doc__ or "", dtypes=PRECISIONS, peers=PEERS, seconds=6.0, models="tasks")
    options.add_argument("--peer-s", type=float, default=300.0, help="leave out a peer that is not ready after this")
    options.add_argument("--digits", action="store_true", help="train on scikit-learn's digits instead")
    options.add_argument("--epochs", type=int, default=8, help="of --digits")
    given = options.parse_args(argv)
    suite = Suite(
        "benchmarks.training",
        TASKS,
        JOBS,
        selected,
        summary,
        line,
        table=lambda results: table(results["rows"], results.get("digits")),
        markdown=lambda results: markdown(results["rows"], results.get("digits")),
        compiled=compiled,
        figure="benchmarks.training_figure",
    )
    return _digits(suite, given) if given.digits and not given.show else run_suite(suite, given)


def _digits(suite: Suite, given: argparse.Namespace) -> int:
    """Train on digits, and keep what came of it if there is a file; exit status."""
    found = digits(given.device, epochs=given.epochs)
    if given.out:
        write(suite, given.out, {**read(given.out), "digits": found})
    print("\n".join(about_digits(found)))
    return int(not found["alike"])


# -- what it says --------------------------------------------------------------------------------------------------


def best_peer(row: Mapping[str, Any]) -> str:
    """Name of the fastest way that is not ours, eager among them."""
    return fastest(row, NOT_PEERS)


def equal(row: Mapping[str, Any], way: str) -> bool:
    """Whether one of ours was shown to learn what eager does."""
    found = row["losses"].get(WAYS[way])
    return bool(found and found["passed"] and row["ways"][WAYS[way]]["measured"])


def summary(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the rows say together: geometric means by size and precision, and targets."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        groups.setdefault(f"{'CIFAR' if _small(row['model']) else 'large'}, {row['dtype']}", []).append(row)

    def over_all(members: Sequence[dict[str, Any]], where: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> Any:
        def speed(over: str, way: str) -> Iterator[float | None]:
            known = ((row, where(row)) for row in members if equal(row, way))
            return (speed_of(found, over, way) for _, found in known if found)

        return {over: {way: mean(speed(over, way)) for way in WAYS} for over in (BEST, "eager", *PEERS)}

    distances = {key: limit for key, row in rows.items() if (limit := row["ours"].get("limit"))}
    return {
        "rows": len(rows),
        "speed over": {group: over_all(members, lambda row: row) for group, members in sorted(groups.items())},
        "speed in a row over": {
            group: over_all(members, lambda row: row.get("in a row")) for group, members in sorted(groups.items())
        },
        "targets": targets(rows),
        "distance to limit": {
            "median": median(one["distance"] for one in distances.values()) if distances else None,
            "by row": {key: one["distance"] for key, one in distances.items()},
            "explained": {key: one["why"] for key, one in distances.items() if one["why"]},
        },
        "not shown to learn as eager does": {
            f"{name} on {key}": found["reason"]
            for key, row in rows.items()
            for name, found in row["losses"].items()
            if not found.get("passed", True)
        },
        "left out": {
            f"{name} on {key}": one["note"]
            for key, row in rows.items()
            for name, one in row["ways"].items()
            if not one["measured"]
        },
        "unstable": unstable(rows),
    }


def targets(rows: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked for, what was reached, and whether that is enough (None: nothing was measured).

    All are given for both of our ways. A way that was not shown to be right on a row has no speed there.
    """

    def ends(
        what: str, of: Callable[[str, Mapping[str, Any], str], float | None], wanted: float, *, most: bool = False
    ) -> dict[str, Any]:
        """Every row has to reach it; ``most``: none may exceed it."""

        def enough(value: float) -> bool:
            return value <= wanted if most else value >= wanted

        def found(way: str) -> dict[str, Any]:
            known = [(key, of(key, row, way)) for key, row in rows.items() if equal(row, way)]
            missed = {key: value for key, value in known if value is not None and not enough(value)}
            return {**verdict(extreme(max if most else min, known), enough), "missed": missed}

        return {"target": what, **{way: found(way) for way in WAYS}}

    def means_(wanted: float) -> dict[str, Any]:
        def found(way: str) -> dict[str, Any]:
            small = (row for row in rows.values() if _small(row["model"]) and equal(row, way))
            return verdict(mean(speed_of(row, OVERHEAD, way) for row in small), lambda value: value >= wanted)

        what = f"geometric mean over {OVERHEAD} on CIFAR-10's shapes at least {wanted:g}x"
        return {"target": what, **{way: found(way) for way in WAYS}}

    def headline(way: str) -> dict[str, Any]:
        known = [
            (key, speed_of(row, "eager", way))
            for key, row in rows.items()
            if (row["model"], row["batch"]) == (HEADLINE, 32) and row["dtype"] != "bf16" and equal(row, way)
        ]
        hosts = sorted({rows[key]["environment"]["host_cpu"] for key, _ in known})
        return {**verdict(extreme(max, known), lambda value: value > 3.61), "host cpu": hosts}

    def shown(way: str) -> dict[str, Any]:
        right = [key for key, row in rows.items() if equal(row, way)]
        value = {"value": len(right) / len(rows), "rows": len(rows)} if rows else {}
        return verdict(value, lambda value: value == 1)

    return [
        {"target": "losses are eager's on every row", **{way: shown(way) for way in WAYS}},
        {"target": f"more than 3.61x over eager on {HEADLINE}, batch 32", **{way: headline(way) for way in WAYS}},
        ends("at least 0.98x of the best peer on every row", lambda _, row, way: speed_of(row, BEST, way), 0.98),
        means_(1.25),
        means_(1.5),
        ends(
            "large models never slower than eager",
            lambda _, row, way: None if _small(row["model"]) else speed_of(row, "eager", way),
            1.0,
        ),
        ends(
            "peak memory at most 1.25x of eager's",
            lambda _, row, way: row["memory"].get(WAYS[way], {}).get("over eager"),
            1.25,
            most=True,
        ),
    ]


def line(key: str, row: Mapping[str, Any]) -> str:
    """One line for the terminal when a row is done."""
    times, best = row["times"], best_peer(row)
    ours = []
    for way, name in WAYS.items():
        if name in times:
            over = f"{speed_of(row, BEST, way):.2f}x, {speed_of(row, 'eager', way):.2f}x over eager"
            ours.append(f"{way} {times[name]['median us']:.0f} µs, {over}, equal {equal(row, way)}")
        else:
            ours.append(f"{way} left out: {row['ways'][name]['note'][:80]}")
    limit = row["ours"].get("limit")
    far = f"  {limit['distance']:.2f} of limit" if limit else ""
    again = row.get("in a row")
    throughput = (
        [f"{way} {speed_of(again, BEST, way):.2f}x" for way, name in WAYS.items() if name in again["times"]]
        if again
        else []
    )
    return (
        f"{key:38} eager {times['eager']['median us']:8.0f}  {best} {times[best]['median us']:.0f}  "
        f"{'  '.join(ours)}{far}  in a row {', '.join(throughput) or '–'}  took {row['wall s']:.0f} s"
    )


HEADS = (
    "model", "dtype", "batch", "eager µs", "best peer", "its µs", "reduce-overhead µs", "whole step µs", "drop-in µs",
    "over eager", "over best", "over reduce-overhead", "memory", "chosen", "distance", "equal",
)  # fmt: skip


def _cells(rows: Mapping[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table's rows as text, under ``HEADS``; ratios are the whole step's, or else the drop-in's."""

    def over(row: Mapping[str, Any], name: str) -> str:
        return as_ratio(speed_of(row, name, _shown(row)))

    def memory(row: Mapping[str, Any]) -> str:
        return as_ratio(row["memory"].get(WAYS[_shown(row)], {}).get("over eager"))

    return [
        (
            row["model"],
            row["dtype"],
            str(row["batch"]),
            as_us(row, "eager"),
            best_peer(row),
            as_us(row, best_peer(row)),
            as_us(row, OVERHEAD),
            as_us(row, OURS),
            as_us(row, DROP_IN),
            over(row, "eager"),
            over(row, BEST),
            over(row, OVERHEAD),
            memory(row),
            row["ours"].get("chosen", "–"),
            f"{row['ours']['limit']['distance']:.2f}" if row["ours"].get("limit") else "–",
            ", ".join("yes" if equal(row, way) else "no" for way in WAYS),
        )
        for row in sorted(
            rows.values(), key=lambda row: (not _small(row["model"]), row["batch"], row["model"], row["dtype"])
        )
    ]


def _shown(row: Mapping[str, Any]) -> str:
    return next((way for way, name in WAYS.items() if name in row["times"]), "step")


def _said(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """The summary in sentences."""
    found = summary(rows)
    lines = []
    for key, how in (("speed over", ""), ("speed in a row over", f", {IN_A_ROW} steps in a row")):
        for group, means_ in found[key].items():
            for over, ways in means_.items():
                known = [f"{way} {one['value']:.3f}x ({one['rows']} rows)" for way, one in ways.items() if one["rows"]]
                if known:
                    lines.append(f"{group}{how}: geometric mean over {over}: {', '.join(known)}")
    for target in found["targets"]:
        for way in WAYS:
            one = target[way]
            missed = f"; missed by: {'; '.join(one['missed'])}" if one.get("missed") else ""
            lines.append(sentence(f"{target['target']} ({way})", one, missed))
    far = found["distance to limit"]
    if far["median"]:
        lines.append(f"distance to limit: median {far['median']:.3f} ({len(far['by row'])} rows)")
    lines += ahead_said(rows.values())
    lines += [f"{key}: {why}" for key, why in far["explained"].items()]
    lines += [f"not shown equal: {at}: {why}" for at, why in found["not shown to learn as eager does"].items()]
    lines += [f"left out: {at}: {why}" for at, why in found["left out"].items()]
    if found["unstable"]:
        lines.append(f"unstable: {len(found['unstable'])} times, {'; '.join(found['unstable'][:5])}")
    return lines


def table(rows: Mapping[str, dict[str, Any]], digits: Mapping[str, Any] | None = None) -> list[str]:
    """Everything for the terminal: machines, one line a row, means, targets, digits."""
    lines = aligned(HEADS, _cells(rows))
    return [*machines(rows), "", *lines, "", *_said(rows), *(about_digits(digits) if digits else ())]


def markdown(rows: Mapping[str, dict[str, Any]], digits: Mapping[str, Any] | None = None) -> list[str]:
    """The same as Markdown."""
    lines = as_markdown(HEADS, _cells(rows))
    said = [*_said(rows), *(about_digits(digits)[:1] if digits else ())]
    return ["# Training", "", "Data are synthetic.", *machines(rows), "", *lines, "", *(f"- {x}" for x in said)]


# -- digits --------------------------------------------------------------------------------------------------------


def _small_network() -> nn.Module:
    """For images of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def digits(device: str = "cpu", *, epochs: int = 8, batch: int = 64, seed: int = 0) -> dict[str, Any]:
    """Train on scikit-learn's digits in eager and by ours: same values, batches and learning rates.

    1797 images, a fifth of them for testing: the last batch of an epoch is short, which ours prepares for on the way.
    Ours trains the user's own model, so both are tested in the same way: in eager, in evaluation mode.

    Returns:
        Losses and test accuracies by epoch of both ways, seconds of each, and whether final accuracies are within 1%.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(found.target, dtype=torch.int64, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(device)
    held = len(order) // 5
    test, train = order[:held], order[held:]
    torch.manual_seed(seed)
    network = _small_network().to(device)

    def trained(ours: bool) -> dict[str, Any]:
        model = copy.deepcopy(network).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        shuffle = torch.Generator().manual_seed(seed)
        task = Task(
            model, (((images[train[:batch]],), labels[train[:batch]]),), functional.cross_entropy, torch.optim.SGD
        )
        closing_: Any = nullcontext()
        step = _stepping(task, optimizer, task.loss)
        start = time.perf_counter()
        if ours:
            made = _train_step(task, optimizer, Options(on_new_shape="prepare")).prepare(*task.batches[0])
            closing_, step = closing(made), made
        losses, accuracies, shapes = [], [], set()
        with closing_:
            for _ in range(epochs):
                total = torch.zeros((), device=device)
                for part in train[torch.randperm(len(train), generator=shuffle).to(device)].split(batch):
                    shapes.add(len(part))
                    total += step((images[part],), labels[part]) * len(part)
                rates.step()
                losses.append(float(total) / len(train))
                accuracies.append(_accuracy(model, images[test], labels[test]))
        return {
            "losses": losses,
            "accuracies": accuracies,
            "seconds": time.perf_counter() - start,
            "batches": sorted(shapes),
        }

    eager, ours = trained(False), trained(True)
    return {
        "device": device,
        "images": {"train": len(train), "test": len(test)},
        "eager": eager,
        "ours": ours,
        "alike": abs(eager["accuracies"][-1] - ours["accuracies"][-1]) <= 0.01,
    }


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images that are named right, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        right = float((model(images).argmax(1) == labels).double().mean())
    model.train()
    return right


def about_digits(found: Mapping[str, Any]) -> list[str]:
    """One sentence, then both ways side by side."""
    eager, ours = found["eager"], found["ours"]
    sizes = " and ".join(map(str, ours["batches"]))
    lines = [
        f"scikit-learn's digits on {found['device']}, {found['images']['train']} images in batches of {sizes}: "
        f"accuracy {eager['accuracies'][-1]:.4f} in eager, {ours['accuracies'][-1]:.4f} by ours "
        f"({'alike' if found['alike'] else 'NOT ALIKE'}); {eager['seconds']:.1f} s and {ours['seconds']:.1f} s",
        f"{'epoch':>5}  {'loss, eager':>11}  {'ours':>8}  {'accuracy, eager':>15}  {'ours':>6}",
    ]
    both = zip(eager["losses"], ours["losses"], eager["accuracies"], ours["accuracies"], strict=True)
    lines += [f"{i:>5}  {a:>11.5f}  {b:>8.5f}  {c:>15.4f}  {d:>6.4f}" for i, (a, b, c, d) in enumerate(both, 1)]
    return lines


if __name__ == "__main__":
    sys.exit(main())
