"""The runs that ``compare`` measures beside replays: the model in eager, and its peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.tracing.pytree import Structure, builder, flatten, leaf_paths, structure_difference
from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.tracing.recording import rewinding
from nimble_core.tracing.side_effects import Guard, preserved
from nimble_core.utils.errors import NimbleError, first_line
from nimble_core.validation.eager_cases import Cases
from nimble_core.validation.equality import check_equality
from nimble_viz.collect.compare_training import Training, mark_phase
from nimble_viz.collect.peers import Peer, Run, close
from nimble_viz.report.data import PeerResult

__all__ = ["EagerRuns", "PeerRuns", "dtype_name"]


class EagerRuns:
    """The model (of a training step: the whole step) and its inputs; ``record`` comes before anything is kept."""

    def __init__(
        self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], training: Training | None
    ) -> None:
        self.model, self.args, self.kwargs, self.training = model, args, kwargs, training
        self.recorded: Recorded | None = None
        self.without_autograd: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._rewind: Callable[[], None] | None = None
        self._guard: Guard

    def record(self, recorded: Recorded) -> None:
        """Note how the model was recorded, and how to put back the counters that it advances."""
        self.recorded = recorded
        self._rewind = rewinding(recorded.recording, recorded.signature.tensors)

    @contextmanager
    def kept(self, watched: int = 2) -> Iterator[None]:
        """Leave what runs inside change as it was; ``watched`` eager runs tell before what that is."""
        assert self.recorded is not None
        with preserved(self.model, draws=()) as self._guard, state_kept(self.recorded):
            # Timed runs are not watched: what they write, in whichever branch, has to be known before.
            for _ in range(0 if self.training else watched):
                with self._guard.watching(), torch.no_grad():
                    self.run()
            yield

    def watch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the model on other inputs, and note what it writes."""
        with self._guard.watching(), self.without_autograd():
            self.model(*args, **kwargs)

    def choose_mode(self) -> str:
        """Choose inference mode, the fastest, unless the model trains or cannot; return why it cannot."""
        if self.training:
            self.without_autograd = torch.enable_grad
            return ""
        self.without_autograd = torch.inference_mode
        try:
            with self.kept():
                self.run()
        except RuntimeError as error:
            self.without_autograd = torch.no_grad
            return f"eager runs under no_grad: inference_mode fails with {str(error).splitlines()[0]}"
        return ""

    def run(self) -> Any:
        """Run eager once."""
        if self._rewind:
            self._rewind()
        if self.training:
            return self.training.eager.step(*self.args)
        with self.without_autograd():
            return self.model(*self.args, **self.kwargs)

    def run_on_one_thread(self) -> Any:
        """Run eager with one thread: a replay gains nothing over what more threads alone would gain."""
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.run()
        finally:
            torch.set_num_threads(usual)

    def run_with_phases(self) -> Any:
        """Run eager for the profiler, which is told of the phases of a training step."""
        if self.training is None:
            return self.run()
        inputs, targets = self.args
        return self.training.eager.step(inputs, targets, mark_phase)

    def rewound(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return ``run`` with counters put back first: many runs would count a cache's positions out of range."""
        rewind = self._rewind
        if rewind is None:
            return run

        def once() -> object:
            rewind()
            return run()

        return once

    def forget_earlier_runs(self) -> None:
        """Drop gradients and cast weights that earlier runs left, which are no part of the next run's memory."""
        if self.training:
            self.training.eager.close()
        torch.clear_autocast_cache()


Outputs = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class PeerRuns:
    """The peers of one comparison; an error (no Ctrl-C) of one is said in its result, and leaves it out."""

    def __init__(self, eager: EagerRuns, *, synchronize: Callable[[], object], taken: Iterable[str] = ()) -> None:
        assert eager.recorded is not None
        self.recorded, self.training, self.without_autograd = eager.recorded, eager.training, eager.without_autograd
        self.args, self.kwargs = eager.args, eager.kwargs
        self.synchronize, self.taken = synchronize, frozenset(taken)
        self.failed: set[str] = set()
        self._results: dict[str, PeerResult] = {}
        self._runs: dict[str, Run] = {}

    @property
    def results(self) -> tuple[PeerResult, ...]:
        """What became of each, and why some were left out."""
        return tuple(self._results.values())

    def prepare(self, one: Peer, cases: Cases) -> None:
        """Prepare ``one``, time that, and judge its outputs on ``cases`` as ``check_equality`` does."""
        if one.name in self.taken:
            self._results[one.name] = PeerResult(one.name, note="left out: another run has this name")
            return
        result, run = PeerResult(one.name), None
        try:
            with state_kept(self.recorded), self.without_autograd():
                start = time.perf_counter()
                if self.training is None:
                    run = one.prepare(self.recorded.model, self.args, self.kwargs)
                else:
                    run = self.training.peer(one)
                first = run(*self.args, **self.kwargs)
                self.synchronize()
                result = replace(result, prepare_s=time.perf_counter() - start)
                tensors, structure = flatten(first, what="output")
                kind = self._other_kind(tensors, structure, cases)
            outputs = self._outputs(run)
            check = self._check(one.name, outputs, cases)
            if check.differs and self.training is None:
                # Stricter with ourselves: compilers fold weights in half precision, and that is what their users get.
                lenient = check_equality(one.name, outputs, cases.eager, lowest=cases.lowest)
                check = lenient if lenient.passed else check
            if kind and not check.differs:
                check = replace(check, passed=False, reason=kind)
            left_out = "left out: " if check.differs else ""
            notes = (left_out + check.reason, str(getattr(run, "note", "")))
            result = replace(result, check=check, note="; ".join(filter(None, notes)))
            if not check.differs:
                self._runs[one.name] = run
        except Exception as error:
            result = replace(result, note=f"left out: {_why(error)}")
        finally:
            self._results[one.name] = result
            if one.name not in self._runs:
                self._close(one.name, run)

    def leave_out(self, peers: Sequence[Peer], why: str) -> None:
        """Say of ``peers`` that they were left out."""
        self._results |= {one.name: PeerResult(one.name, note=f"left out: {why}") for one in peers}

    def _other_kind(self, tensors: Sequence[torch.Tensor], structure: Structure, cases: Cases) -> str:
        """Say how a peer's result is another kind of value than the model's; empty if it is not."""
        expected = self.recorded.recording.output_structure
        if found := structure_difference(expected, structure, "output"):
            return f"{found.path} is {found.now} where eager's is {found.was}"
        for path, ours, theirs in zip(leaf_paths(structure, "output"), cases.eager[0][1], tensors, strict=True):
            if theirs.dtype != ours.dtype:
                return f"{path} is {dtype_name(theirs.dtype)} where eager's is {dtype_name(ours.dtype)}"
        return ""

    def _check(self, name: str, outputs: Outputs, cases: Cases) -> EqualityCheck:
        check = check_equality(
            name,
            outputs,
            cases.eager,
            references=cases.truth,
            lowest=cases.lowest,
            perturbed=cases.moved,
            names=cases.names,
        )
        draws = self.training and any(one.role == "generator" for one in self.recorded.recording.program.storages)
        if check.differs and draws:
            return replace(check, reason="void: the step draws random numbers, which may be others in a peer")
        return check

    def _outputs(self, run: Run) -> Outputs:
        build = builder(self.recorded.signature.structure)

        def outputs(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            args, kwargs = build(inputs)
            with state_kept(self.recorded), self.without_autograd():
                # Clones: a peer may overwrite its outputs, and its users know.
                return [tensor.clone() for tensor in flatten(run(*args, **kwargs), what="output")[0]]

        return outputs

    def timed(self) -> dict[str, Callable[[], object]]:
        """Return one call of each right peer, by name; one that fails in it runs no more."""
        return {name: self._once(name, run) for name, run in self._runs.items()}

    def _once(self, name: str, run: Run) -> Callable[[], object]:
        timed = getattr(run, "step", run) if self.training else run

        def once() -> object:
            if name in self.failed:
                return None
            try:
                with self.without_autograd():
                    return timed(*self.args, **self.kwargs)
            except Exception as error:
                self.failed.add(name)
                self._results[name] = replace(self._results[name], note=f"left out: {_why(error)}")
                return None

        return once

    def close(self) -> None:
        """Free what they hold."""
        while self._runs:
            self._close(*self._runs.popitem())

    def _close(self, name: str, run: Run | None) -> None:
        try:
            close(run)
        except Exception as error:  # the peer's own: what was measured of it holds
            known = self._results[name]
            notes = filter(None, (known.note, f"its close() failed: {_why(error)}"))
            self._results[name] = replace(known, note="; ".join(notes))


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def _why(error: Exception) -> str:
    """Say what happened on one line: of the inner error, if there is one."""
    error = getattr(error, "inner_exception", error)
    return error.what if isinstance(error, NimbleError) else f"{type(error).__name__}: {first_line(error)}"
