"""Run a model in eager, as one of the runs that ``compare`` measures, and leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.tracing.recording import rewinding
from nimble_core.tracing.side_effects import Guard, preserved
from nimble_viz.collect.compare_training import mark_phase

if TYPE_CHECKING:
    from nimble_viz.collect.compare_training import Training

__all__ = ["EagerRuns"]


class EagerRuns:
    """The model and its inputs, ready to run.

    Args:
        model: what is compared; a whole step, if it trains.
        args: positional inputs.
        kwargs: keyword inputs.
        training: the step that ``model`` is; None for inference.

    Attributes:
        recorded: the model as it was recorded; to be set before anything is kept.
        without_autograd: mode that eager and peers run in.
    """

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
        """Leave attributes, tensors and random state as they were, whatever runs inside, eager or replayed.

        Args:
            watched: how many eager runs are watched first; 0 if none follow.
        """
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
