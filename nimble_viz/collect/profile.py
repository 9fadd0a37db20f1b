"""``profile``: where the time goes in code that nobody wrapped: a function, a block, a script.

A long loop is sampled: a few iterations to warm up, a few timed without a profiler, a few profiled, one more to learn
source lines; then everything that watched is taken off again. What an iteration is, is found out: a batch of the data
loader, a step of the optimizer, or a call of the outermost module; or said, by ``step()``.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import isasyncgen, iscoroutine, isgenerator
from pathlib import Path
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from nimble_core.ir.measurement import summarize
from nimble_core.ir.program import Origin
from nimble_core.profiling.machine import environment, finish
from nimble_core.tracing.side_effects import only_watches
from nimble_core.utils.errors import InputError, ReportFileError
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_core.utils.units import format_ns
from nimble_viz.collect.from_trace import make_report
from nimble_viz.collect.iterations import LOADER, TICK
from nimble_viz.collect.sources import pass_over_machinery, read_sources
from nimble_viz.render.report import Report
from nimble_viz.traces.chrome import read_trace
from nimble_viz.traces.profiler import (
    PRINT,
    RUN,
    Running,
    calibrate,
    watched_prints,
)

if TYPE_CHECKING:
    from nimble_viz.traces.chrome import Recording

__all__ = ["Profiling", "Sampler", "profile"]

Kind = Literal["step", "loader", "optimizer", "module"]
Do = Literal["", "watch no more", "tick first", "stop first", "profile", "tick", "stop", "forget"]

_WORDS: dict[Kind, str] = {
    "step": "what lies between two calls of step()",
    "loader": "one batch of the data loader",
    "optimizer": "one step of the optimizer",
    "module": "one call of the outermost module",
}
_Batch = TypeVar("_Batch")
_TELLING, _PATIENCE = 3, 30
_ACCUMULATED = 66  # twice 32 batches, and then some
_WARM_PROFILED = 1
_FIRST = 2
"""So many are profiled as soon as it is known what one is, to be shown if the loop ends early: the very first makes
what is made once, as an optimizer's state."""
_ELSEWHERE = "what calls modules, loaders or optimizers ran in other threads"
_THERE = "enter profile() in the thread that runs the loop"


@dataclass
class Sampler:
    """Which iteration is timed, profiled, or let go by: told of each tick, it says what to do.

    A kind of tick is chosen once one has come three times: the most telling that came more than once, and if a more
    telling one came once only, it is waited for, up to 30 ticks; where gradients accumulate, an optimizer is waited for
    up to 66, even if it has not come yet. Pure: times are given.

    Args:
        warmup: iterations before the first that is timed.
        timed: iterations timed without the profiler.
        profiled: iterations profiled after that; one more goes before, for the profiler to warm up.
        trains: a backward ran between two calls of the outermost module.
    """

    warmup: int
    timed: int
    profiled: int
    chosen: tuple[Kind, int] | None = None
    seen: int = 0
    times_ns: list[float] = field(default_factory=list)
    waits_ns: list[float] = field(default_factory=list)
    counts: Counter[tuple[Kind, int]] = field(default_factory=Counter)
    trains: bool = False
    _found_at: int = 0
    _ticks: int = 0
    _last_ns: int = 0
    _waited_ns: int = 0

    def tick(self, kind: Kind, who: int, now_ns: int) -> Do:
        """An iteration of ``kind`` begins. ``who`` tells loaders and optimizers apart."""
        if self.chosen is None:
            self.counts[kind, who] += 1
            self.chosen = self._choice()
            if self.chosen is None:
                return ""
            self.seen = self._found_at = self.counts[self.chosen]
            self._last_ns, self._waited_ns = now_ns, 0
            return "watch no more"
        if (kind, who) != self.chosen:
            return ""
        self.seen += 1
        self._ticks += 1
        at = self._ticks
        if self.warmup < at <= self.warmup + self.timed:
            self.times_ns.append(float(now_ns - self._last_ns))
            self.waits_ns.append(float(self._waited_ns))
        self._last_ns, self._waited_ns = now_ns, 0
        if at <= self.first:
            return "tick first" if at < self.first else "stop first"
        profiling = at - self._before
        if profiling == 0:
            return "profile"
        if profiling == _WARM_PROFILED + self.profiled:
            return "stop"
        if profiling == _WARM_PROFILED + self.profiled + 1:
            return "forget"
        return "tick" if _WARM_PROFILED <= profiling < _WARM_PROFILED + self.profiled else ""

    def waited(self, ns: int) -> None:
        """The data loader took so long."""
        self._waited_ns += ns

    @property
    def first(self) -> int:
        """Iterations profiled at once: before the last to warm up, so that what is timed comes after one without it."""
        return max(0, min(_FIRST, self.warmup - 1))

    @property
    def enough(self) -> int:
        """How many iterations a loop needs for one to be profiled warm; 0 while it is not known what one is."""
        return self._found_at + self._before + _WARM_PROFILED + 1 if self.chosen else 0

    @property
    def done(self) -> bool:
        """Whether all was sampled that should be."""
        return self._ticks > self._before + _WARM_PROFILED + self.profiled

    @property
    def _before(self) -> int:
        """Iterations before the profiler starts: at least the one in which all other hooks are taken off."""
        return max(1, self.warmup + self.timed)

    def _choice(self) -> tuple[Kind, int] | None:
        kinds: tuple[Kind, ...] = ("step", "loader", "optimizer", "module")
        most = max(self.counts.values())
        if any(kind == "step" for kind, _ in self.counts):
            return next(one for one in self.counts if one[0] == "step")
        if most < _TELLING:
            return None
        for kind in kinds:
            own = [(count, one) for one, count in self.counts.items() if one[0] == kind]
            accumulates = kind == "optimizer" and self.trains
            if not own and not accumulates:
                continue
            count, one = max(own, key=lambda pair: pair[0], default=(0, (kind, 0)))
            if count > 1:
                return one
            if most < (_ACCUMULATED if accumulates else _PATIENCE):
                return None
        return None


class Profiling:
    """Profiles what runs inside ``with``; afterwards ``report`` is there.

    Inside, ``step()`` says that an iteration begins, where neither data loader, optimizer nor module would.
    """

    def __init__(
        self, *, subject: str = "block", warmup: int = 3, timed: int = 10, profiled: int = 3, stop: bool = False
    ) -> None:
        for name, given, least in (("warmup", warmup, 0), ("timed", timed, 0), ("profiled", profiled, 1)):
            if not isinstance(given, int) or given < least:
                raise InputError(f"{name}={given!r}", fix=f"a whole number, {least} or more")
        self.subject = subject
        self.sampler = Sampler(warmup, timed, profiled)
        self._stop_when_done = stop
        self._whole: _Session | None = None
        self._session: _Session | None = None
        self._recording: Recording | None = None
        self._origins: _Origins | None = None
        self._listening: _Listening | None = None
        self._report: Report | None = None
        self._thread = 0
        self._elsewhere = False

    @property
    def report(self) -> Report:
        """What was found out.

        Raises:
            InputError: the block has not ended, or ran no operator.
        """
        if self._report is None:
            raise InputError("there is no report yet", fix="read it after the with block")
        return self._report

    @property
    def found(self) -> bool:
        """Whether there is a report."""
        return self._report is not None

    def step(self) -> None:
        """An iteration begins here (or one ends: only what lies between two calls counts)."""
        self._tick("step", 0)

    def loader(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """The same batches: making each counts as waiting for input, as a ``DataLoader``'s does by itself.

        For a generator, or a pipeline of another library's: nothing else tells their Python from the loop's own.
        """
        made, end = iter(batches), object()
        import torch

        def following() -> Any:
            with torch.profiler.record_function(f"{LOADER}{type(made).__name__}.__next__"):
                return next(made, end)

        while (batch := self._listening.timed(id(self), following) if self._listening else next(made, end)) is not end:
            yield cast(_Batch, batch)

    def __enter__(self) -> Profiling:
        if self._whole is not None:
            raise InputError("this profile() has been entered before", fix="call profile() anew for each block")
        self._thread = get_ident()
        try:
            with interrupts_postponed():
                self._whole = _Session()
                self._whole.start()
                self._listening = _Listening(self._tick, self.sampler)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            try:
                self._end()
            except KeyboardInterrupt:  # before it postponed interrupts, perhaps
                self._end()
                raise
            self._finish()
        except ReportFileError as nothing:
            if kind is None:
                what = f"nothing was profiled: {nothing.what}"
                if self._elsewhere:
                    raise InputError(f"{what} in this thread; {_ELSEWHERE}", fix=_THERE) from nothing
                raise InputError(what, fix=f"{nothing.fix}; what other threads do is not seen: {_THERE}") from nothing
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"what was profiled before cannot be shown: {type(failed).__name__}: {failed}")
        # An error of the block goes its way; what was profiled before it is in ``report``.

    def _tick(self, kind: Kind, who: int) -> None:
        if self._listening is None:
            return
        if get_ident() != self._thread:
            self._elsewhere = True
            return
        do = self.sampler.tick(kind, who, perf_counter_ns())
        if do:
            with interrupts_postponed():  # torch's profiler must not be left half started or half stopped
                self._do(do)

    def _do(self, do: Do) -> None:
        if do == "watch no more":
            assert self.sampler.chosen is not None
            assert self._listening is not None
            self._listening.only(self.sampler.chosen[0])
            if self._whole is not None:
                self._whole.tick()
                if not self.sampler.first:
                    self._whole.end()
        elif do in ("tick first", "stop first") and self._whole is not None:
            self._whole.tick()
            if do == "stop first":
                self._whole.end()
        elif do == "profile":
            self._session = _Session()
            self._session.start()
        elif do == "tick" and self._session is not None:
            self._session.tick()
        elif do == "stop" and self._session is not None:
            self._session.tick()
            self._session.end()
            self._origins = _Origins.begin()
        elif do == "forget":
            self._close()
            if self._stop_when_done:
                raise SystemExit(0)

    def _close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._origins is not None:
            self._origins.end()

    def _end(self) -> None:
        """Look no more and take off everything, if that has not been done."""
        with interrupts_postponed():
            self._close()
            for session in (self._whole, self._session):
                if session is not None:
                    session.end()

    def _finish(self) -> None:
        sampled = self._session if self._session is not None and self._session.ticks > 1 else None
        session = sampled or self._whole
        assert session is not None
        sampler = self.sampler
        doubts = []
        # The first iterations under the profiler and later ones without it are not the same work: never one verdict.
        samples = sampler.times_ns if sampled else []
        if sampled is None and sampler.chosen is not None:
            times = sampler.times_ns
            without = f"; {len(times)} later ones took {format_ns(median(times))} each without it" if times else ""
            doubts.append(
                f"the loop ended after {sampler.seen} iterations, before it was warm: shown is one of its first, under "
                f"the profiler{without}. {sampler.enough} are enough, fewer with a lower warmup and timed"
            )
        elif sampled is None:
            why = "gradients were made, but no optimizer stepped twice" if sampler.trains else "no loop was found"
            doubts.append(f"{why}, so all of it was profiled, once: times include what is done only once")
            if self._elsewhere:
                doubts.append(f"{_ELSEWHERE}, and is not in here: {_THERE}")
        if sampler.chosen is not None and sampler.chosen[0] == "module" and sampler.trains:
            doubts.append(
                f"gradients were made, but no optimizer stepped twice within {_ACCUMULATED} calls of a module: an "
                "iteration is one such call; call step() of the profile to say what else it is"
            )
        self._report = _report(
            session.recording(),
            subject=self.subject,
            iteration=_WORDS[sampler.chosen[0]] if sampler.chosen else "",
            seen=sampler.seen,
            samples_ns=samples,
            warmup=sampler.warmup,
            loader_ns=median(sampler.waits_ns) if samples and any(sampler.waits_ns) else -1.0,
            origins=self._origins.seen if self._origins is not None else [],
            warnings=[*doubts, *(self._origins.doubts() if self._origins is not None else ())],
        )


@overload
def profile(*, warmup: int = ..., timed: int = ..., profiled: int = ...) -> Profiling: ...
@overload
def profile(
    function: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = ...,
    warmup: int = ...,
    timed: int = ...,
    profiled: int = ...,
) -> Report: ...
def profile(
    function: Callable[..., Any] | None = None,
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    warmup: int = 3,
    timed: int = 10,
    profiled: int = 3,
) -> Report | Profiling:
    """Where the time goes in a function that is called here, or in a block of a ``with`` statement.

    The function is called ``warmup + timed + profiled + 2`` times, and the device is waited for after each call. The
    report of a block, ``with profile() as run:``, is ``run.report`` once it has ended. In it a loop is found by its
    data loader, optimizer or outermost module, or by ``run.step()``; as many of its iterations are looked at, the rest
    runs as if nothing were there. A block without a loop is profiled whole, once.

    Nothing is changed about the code, and nothing of it is captured: ``compare`` says what a replay would be worth.

    Args:
        function: what to profile; None: a block.
        args: of the function.
        kwargs: of the function.
        warmup: iterations before any is looked at.
        timed: iterations timed without the profiler.
        profiled: iterations profiled.

    Raises:
        DeviceError: another profiler is running in this process or, where there is a GPU, attached to it.
        InputError: not a function, a count below what is needed, or no operator ran.
    """
    if function is None:
        return Profiling(warmup=warmup, timed=timed, profiled=profiled)
    if not callable(function):
        raise InputError(f"a {type(function).__name__} cannot be profiled", fix="give a function, then its arguments")
    name = getattr(function, "__name__", type(function).__name__)
    checked = Profiling(subject=name, warmup=warmup, timed=timed, profiled=profiled).sampler
    named = dict(kwargs or {})
    import torch

    def call() -> None:
        made = function(*args, **named)
        if isgenerator(made) or iscoroutine(made) or isasyncgen(made):
            if not isasyncgen(made):
                made.close()
            raise InputError(
                f"{name} returned a {type(made).__name__}, and none of it ran",
                fix=f"profile a function that runs it: profile(lambda: list({name}()))",
            )

    def wait() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def run() -> None:
        with torch.profiler.record_function(RUN):
            call()
        wait()

    for _ in range(checked.warmup):
        run()
    samples = []
    for _ in range(checked.timed):
        start = perf_counter_ns()
        call()
        wait()
        samples.append(float(perf_counter_ns() - start))
    session = _Session()
    try:
        session.start()
        for at in range(_WARM_PROFILED + checked.profiled):
            if at >= _WARM_PROFILED:
                session.tick()
            run()
        session.tick()
    finally:
        session.end()
    origins = None
    try:
        with interrupts_postponed():
            origins = _Origins.begin()
        if origins is not None:
            run()
    finally:
        if origins is not None:
            origins.end()
    try:
        return _report(
            session.recording(),
            subject=name,
            iteration="one call of the function",
            seen=checked.warmup + checked.timed + checked.profiled + 2,
            samples_ns=samples,
            warmup=checked.warmup,
            loader_ns=-1.0,
            origins=origins.seen if origins is not None else [],
            warnings=[*origins.doubts()] if origins is not None else [],
        )
    except ReportFileError as nothing:
        raise InputError(f"nothing was profiled: {nothing.what}", fix=nothing.fix) from nothing


def _report(
    recording: Recording,
    *,
    subject: str,
    iteration: str,
    seen: int,
    samples_ns: list[float],
    warmup: int,
    loader_ns: float,
    origins: list[Origin],
    warnings: list[str],
) -> Report:
    made = make_report(
        recording,
        finish(environment(recording.device)),
        subject=subject,
        iteration=iteration,
        seen=seen,
        timed=summarize("eager", samples_ns, warmup) if samples_ns else None,
        loader_ns=loader_ns,
        origins=origins,
        warnings=warnings,
    )
    return replace(made, sources=read_sources(made.program.calls))


class _Session:
    """One run of ``torch.profiler``, from ``start`` until ``end``."""

    def __init__(self) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.ticks = 0
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._running = Running()
        self._started = False

    def start(self) -> None:
        """Start. Raises DeviceError if another profiler runs or is attached."""
        import torch

        with interrupts_postponed():
            self._running.start(self._profiler, cuda=torch.cuda.is_available())
            self._started = True

    def tick(self) -> None:
        """Mark that an iteration begins."""
        import torch

        self.ticks += 1
        with torch.profiler.record_function(TICK):
            pass

    def end(self) -> None:
        """Stop, if it runs."""
        import torch

        with interrupts_postponed():
            if not self._started:
                return
            self._started = False
            try:
                calibrate(torch, torch.profiler.record_function)
            finally:
                self._running.stop()

    def recording(self) -> Recording:
        """What was recorded. Raises ReportFileError if nothing was."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return read_trace(path)


class _Listening:
    """Hooks that tell of iterations, where neither model nor loop was touched."""

    def __init__(self, tick: Callable[[Kind, int], None], sampler: Sampler) -> None:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from nimble_core.torch_compat.members import DATA_LOADER

        self._tick, self._sampler = tick, sampler
        self._gradients: dict[int, set[tuple[int, int]]] = {}
        self._depth = self._loading = 0
        self._thread = get_ident()
        self._root: Any = None
        # torch.compile warns of hooks on all modules: of ours, which nobody else knows of, and which it does not see.
        warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)
        self._filter = warnings.filters[0]
        self._optimizers = register_optimizer_step_post_hook(lambda who, *_: tick("optimizer", id(who)))
        for hook in (self._enter_module, self._leave_module):  # else prepared modules would refuse to run
            only_watches(hook)
        self._modules = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._loader = DATA_LOADER.require()
        self._next = original = self._loader.__next__

        self._loader.__next__ = lambda loader: self.timed(id(loader._dataset), lambda: original(loader))

    def timed(self, who: int, following: Callable[[], Any]) -> Any:
        """The next batch of a loader; where one takes its batches from another, only the outer one's time counts."""
        self._tick("loader", who)
        start, self._loading = perf_counter_ns(), self._loading + 1
        try:
            return following()
        finally:
            self._loading -= 1
            if not self._loading:
                self._sampler.waited(perf_counter_ns() - start)

    def only(self, kind: Kind) -> None:
        """Take off what the other kinds need: hooks of every module would slow down what is timed."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._take_off_modules()
        if kind == "module" and self._root is not None:
            root = self._root
            try:
                self._modules = [root.register_forward_pre_hook(lambda *_: self._tick("module", id(root)))]
            except RuntimeError:  # TorchScript takes none of its own

                def enter(module: Any, *_: Any) -> None:
                    if module is root:
                        self._tick("module", id(root))

                only_watches(enter)
                self._modules = [register_module_forward_pre_hook(enter)]
        if kind != "optimizer":
            self._optimizers.remove()

    def close(self) -> None:
        """Take off everything."""
        self._take_off_modules()
        self._optimizers.remove()
        self._loader.__next__ = self._next

    def _take_off_modules(self) -> None:
        for hook in self._modules:
            hook.remove()
        self._modules = []
        if self._filter in warnings.filters:
            cast(list[Any], warnings.filters).remove(self._filter)

    def _enter_module(self, module: Any, *_: Any) -> None:
        import torch

        # While a compiler looks on there is no hook: what it makes must not hold one.
        if torch.compiler.is_compiling():
            return
        if get_ident() != self._thread:
            self._tick("module", id(module))
            return
        self._depth += 1
        if self._depth == 1:
            self._root = module
            self._look_for_gradients(module)
            self._tick("module", id(module))

    def _look_for_gradients(self, module: Any) -> None:
        """Whether a backward ran since ``module`` was called before: it makes gradients or adds to them in place."""
        if self._sampler.trains:
            return
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        now = {(id(grad), grad._version) for grad in grads if not grad.is_inference()}
        self._sampler.trains = not now <= self._gradients.setdefault(id(module), now)
        self._gradients[id(module)] = now

    def _leave_module(self, *_: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)


class _Origins:
    """Where each operator that is dispatched comes from, in order."""

    def __init__(self, mode: Any, seen: list[Origin], watching: ExitStack) -> None:
        self.seen = seen
        self.meta = 0
        self._mode = mode
        self._watching = watching
        self._entered = True

    @staticmethod
    def begin() -> _Origins | None:
        """From here on, until ``end``; None under a mode of somebody else's, who would leave ours in its place."""
        if _current_mode() is not None:
            return None
        import torch

        from nimble_core.torch_compat.dispatch import TorchDispatchMode
        from nimble_core.tracing.provenance import module_paths, place_of

        pass_over_machinery()
        seen: list[Origin] = []
        paths: dict[int, str] = {}
        roots: set[int] = set()

        class Mode(TorchDispatchMode):
            @classmethod
            def ignore_compile_internals(cls) -> bool:
                return True

            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                note(str(func), sys._getframe().f_back)  # autograd's threads may have none
                made = func(*args, **(kwargs or {}))
                found.meta += isinstance(made, torch.Tensor) and made.is_meta
                return made

        def note(operator: str, frame: Any) -> None:
            root = _outermost_module(frame)
            if root is not None and id(root) not in roots:
                roots.add(id(root))
                paths.update(module_paths(root))
            seen.append(Origin(operator, *place_of(frame, paths)))

        def printed() -> nullcontext[None]:  # without a mode: what it dispatches is not seen
            note(PRINT.replace("::", "."), sys._getframe())
            return nullcontext()

        watching = ExitStack()
        watching.enter_context(watched_prints(printed))
        mode = cast(Any, Mode)()
        mode.__enter__()
        found = _Origins(mode, seen, watching)
        return found

    def doubts(self) -> Iterator[str]:
        """What should be known about what was seen."""
        if self.meta:
            yield (
                f"{self.meta} of {len(self.seen)} operators made tensors on meta, which hold no values: what is shown "
                "as their computing is shapes and dispatch. Profile on the device that is to compute"
            )

    def end(self) -> None:
        """Look no more, if it still does. Under a mode that was entered since it stays until that has been left."""
        with interrupts_postponed():
            self._watching.close()
            if self._entered and _current_mode() is self._mode:
                self._entered = False
                self._mode.__exit__(None, None, None)


def _current_mode() -> Any:
    from nimble_core.torch_compat.dispatch import current_mode

    return current_mode()


def _outermost_module(frame: Any) -> Any:
    import torch

    root = None
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            found = frame.f_locals.get("self")
            root = found if isinstance(found, torch.nn.Module) else root
        frame = frame.f_back
    return root


@contextmanager
def script_arguments(path: Path, arguments: list[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as a script finds them that is run by itself; put back afterwards."""
    argv, first = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path[:1] = [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, first


def profile_script(
    path: Path, arguments: list[str], *, warmup: int = 3, timed: int = 10, profiled: int = 3, stop: bool = False
) -> tuple[Report, int | Exception]:
    """Run a script under ``profile``; a Report, and the script's exit code or the error that ended it.

    Args:
        path: of the script; it runs as ``__main__``.
        arguments: its ``sys.argv[1:]``.
        warmup: iterations before any is looked at.
        timed: iterations timed without the profiler.
        profiled: iterations profiled.
        stop: end the script once that is done.

    Raises:
        InputError: no such script, no Python, or it ran no operator. Errors of a script that ran none propagate.
        SystemExit: it ran no operator, and ended with an exit code of its own.
    """
    import runpy

    if not path.is_file():
        raise InputError(f"there is no file {path}", fix="give the path of a Python script, then its arguments")
    with path.open("rb") as file:
        if b"\0" in file.read(4096):
            raise InputError(f"{path} is no Python script", fix=f"if it is a report: python -m nimble_viz show {path}")
    code, complete = 0, True
    run = Profiling(subject=path.name, warmup=warmup, timed=timed, profiled=profiled, stop=stop)
    try:
        with script_arguments(path, arguments), run:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
                if isinstance(ended.code, str):
                    print(ended.code, file=sys.stderr)
            except KeyboardInterrupt:
                code, complete = 130, False
    except Exception as error:
        if run.found:
            return run.report, error
        if code:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(code) from error
        raise
    return replace(run.report, complete=complete), code
