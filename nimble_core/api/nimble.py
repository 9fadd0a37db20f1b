"""``Nimble``: the user's entry point. Wrap a module, prepare it once, call it as before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from operator import attrgetter
from typing import Any, Never

import torch

from nimble_core.api.background import Background, InBackground
from nimble_core.api.call_mistakes import model_name, refuse_options, unprepared_call
from nimble_core.api.engine import Engine
from nimble_core.api.prepare_engine import prepare_inference, prepare_training
from nimble_core.api.quick_call import LONG_WAY, quick_call
from nimble_core.api.wrapped_module import WrappedModule
from nimble_core.guards.transforms import transform_of, transforming
from nimble_core.ir.program import KernelChoice
from nimble_core.scheduling.options import Options, option_like, require_flag, require_options
from nimble_core.scheduling.saved_plan import Plan
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recorded import preparing
from nimble_core.tracing.recording_contexts import recording_here
from nimble_core.tracing.side_effects import requirements_kept
from nimble_core.training.autograd_function import Backward
from nimble_core.utils.errors import DeviceError, InputError
from nimble_core.utils.gc_pause import collector_paused
from nimble_core.utils.tracebacks import short_traceback

__all__ = ["Nimble"]

_requires_grad = attrgetter("requires_grad")


class Nimble(WrappedModule):
    """A module that replays ``model`` ahead-of-time scheduled.

    Parameters, buffers and ``state_dict`` are the model's own, with the same names; the model itself is left as it
    was and can be used beside this.

    Example::

        net = Nimble(model).prepare(x)
        y = net(x)

    Args:
        model: a module, or any function of tensors, on one device.
        options: how to prepare.
        unknown: refused, with a word on what to write instead.

    Raises:
        InputError: ``model`` is neither.
    """

    _freed: tuple[bool, ...] = ()
    """Whether each closed engine was a training engine."""

    def __init__(self, model: Callable[..., Any], options: Options = Options(), **unknown: Never) -> None:
        for name in unknown:
            like = option_like(name)
            fix = f"Nimble(model, Options({like}=...))" if like else "Nimble(model, options), then prepare(*inputs)"
            raise InputError(f"Nimble() has no keyword {name!r}", fix=fix)
        if not callable(model) or isinstance(model, type):
            raise InputError(
                f"Nimble takes a torch.nn.Module or a function, given {model!r}"[:200],
                fix="pass an instance: Nimble(Model())",
            )
        require_options(options)
        super().__init__(model)
        object.__setattr__(self, "_options", options)
        self._adopt(())
        object.__setattr__(self, "_swapping", threading.Lock())
        object.__setattr__(self, "_said", set())
        object.__setattr__(self, "_later", InBackground())

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The prepared engines, latest first."""
        return self._engines  # type: ignore[no-any-return]

    @property
    def background(self) -> tuple[Background, ...]:
        """What became of each ``prepare(..., background=True)``, in order."""
        return self._later.begun  # type: ignore[no-any-return]  # what a module's attributes are, types do not know

    @short_traceback
    def prepare(
        self, *args: Any, training: bool = False, plan: Plan | None = None, background: bool = False, **kwargs: Any
    ) -> Nimble:
        """Record, schedule and capture the model for inputs like these; returns self.

        Preparing again for the same signature replaces its engine; engines for other signatures, or under another
        ``torch.autocast``, stay.

        Args:
            args: example positional inputs.
            training: prepare forward and backward: outputs then carry gradients, for parameters and for those inputs
                that require one here. The module has to be in training mode, parts of it need not be.
            plan: a plan made before for this model and inputs like these (``report.plan``, ``engine.plan``): the same
                schedule, without tuning.
            background: return within seconds, with an engine without compiled kernels. A thread compiles; the first
                call after that prepares in full, which takes as long as with warm caches, and replays what is best.
                ``finish`` does so at a moment of yours. Which library routines compiled kernels use is not measured.
            kwargs: example keyword inputs.

        Raises:
            InputError: no tensor among the inputs, mixed devices, nothing to train, or a plan for something else: the
                first difference is named.
            NotStaticError: the model does not do the same on every input.
            CaptureError: a call that cannot be captured.
            DeviceError: out of memory.
        """
        require_flag(background, f"background={background!r}")
        if background and (training or plan is not None or self._options.tune == "full"):
            raise InputError(
                "what trains, has a plan or is tuned in full is not prepared in the background",
                fix="leave out background=True",
            )
        if background:
            self._later.begin(self, args, kwargs, self._options)
        else:
            self.adopt_engine(self.make_engine(args, kwargs, training=training, plan=plan), args, kwargs)
        return self

    def finish(self, timeout_s: float | None = None) -> Nimble:
        """Wait for what ``prepare(..., background=True)`` compiles, prepare the better engines now, and return self.

        Args:
            timeout_s: how long to wait for each; the first engine serves on where that is not enough.
        """
        self._later.finish(timeout_s)
        return self

    def make_engine(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        training: bool = False,
        plan: Plan | None = None,
        options: Options | None = None,
        compiled: Collection[KernelChoice] | None = None,
    ) -> Engine:
        """Make the engine that ``prepare`` would add, for the caller to close or adopt. Raises as ``prepare``.

        ``options`` are instead of the module's own; ``compiled`` is what was compiled in the background.
        """
        options = options or self._options
        require_flag(training, f"training={training!r}")
        refuse_options(self._model, kwargs)
        if plan is not None and not isinstance(plan, Plan):
            raise InputError(f"plan is a {type(plan).__name__}", fix="report.plan, or load_plan(path)")
        if training and plan is not None:
            raise InputError(
                "a plan is one schedule; prepare(training=True) makes two, of forward and of backward",
                fix="prepare without a plan; a whole step can follow one: TrainStep(...).prepare(x, y, plan=plan)",
            )
        _require_prepared_parts(self._model)
        # What a preparation makes stays; only training and compilers leave garbage that is worth collecting meanwhile.
        unfused = options.fuse == "none" and not training
        paused = collector_paused() if unfused else nullcontext()
        with preparing(self._model), requirements_kept(args, kwargs), paused:
            if training:
                return prepare_training(self._model, args, kwargs, options)
            return prepare_inference(self._model, args, kwargs, options, plan, compiled)

    def adopt_engine(self, engine: Engine, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Replay ``engine`` for inputs like these from now on; what was prepared for them before is closed."""
        with self._swapping:
            replaced = [
                one
                for one in self._engines
                if (one.mode, one.autocast) == (engine.mode, engine.autocast)
                and one.signature.bind(tuple(args), dict(kwargs)) is not None
            ]
            kept = (one for one in self._engines if not any(one is other for other in replaced))
            self._adopt((engine, *kept))
        for one in replaced:
            one.close()

    def _adopt(self, engines: tuple[Engine, ...]) -> None:
        static = self._options.outputs == "static"
        quick = [quick_call(engine, self._model, static=static) for engine in engines]
        object.__setattr__(self, "_quick", ())  # an interrupt leaves none of engines that are not there
        object.__setattr__(self, "_engines", engines)
        object.__setattr__(self, "_quick", tuple(filter(None, quick)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the engine that was prepared for inputs like these, under the autocast that is in force.

        Inside of a model that is being recorded, the module itself is run: its calls become that one's.

        Raises:
            InputError: none was, and ``on_new_shape`` is ``"error"``: says what was expected and what was given. Or the
                inputs are part of a transform of ``torch.func`` or of forward-mode AD, and ``on_new_shape`` is not
                ``"eager"``; or share memory that the model writes.
        """
        if not self._later.pending:
            for quick in self._quick:
                if (outputs := quick(args, kwargs)) is not LONG_WAY:
                    return outputs
        if recording_here() or (transforming() and self._transformed(args, kwargs)):
            return self._model(*args, **kwargs)
        if self._later.pending:
            self._later.step()
        while True:
            engine, tensors = self.bind(args, kwargs)
            if engine is None:
                return self._unprepared(args, kwargs, getattr(self._model, "training", False))
            if engine.backward is not None:
                return self._trained(engine, engine.backward, tensors, args, kwargs)
            if torch.is_grad_enabled() and (engine.mode or any(map(_requires_grad, tensors))):
                engine.say_unlinked(tensors, self.named_parameters())
            try:
                outputs = engine.run(tensors, static=self._options.outputs == "static")
            except DeviceError:
                if any(one is engine for one in self._engines):
                    raise
                continue  # another thread has prepared the model again meanwhile, and closed this engine
            if engine.passed_on:
                return engine.build([*outputs, *((args, kwargs)[which][at] for which, at in engine.passed_on)])
            return engine.build(outputs)

    def _transformed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a transform shall run the model itself. Raises InputError where it may not."""
        linked = torch.is_grad_enabled() and any(engine.backward is not None for engine in self._engines)
        transform = transform_of(flatten((tuple(args), dict(kwargs)))[0], linked=linked)
        if transform and self._options.on_new_shape != "eager":
            raise InputError(
                f"a prepared module cannot be transformed by {transform}: a replay computes values alone",
                fix="transform the model itself; for gradients: prepare(..., training=True), and loss.backward()",
            )
        return bool(transform)

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Engine, list[torch.Tensor]] | tuple[None, Sequence[torch.Tensor]]:
        """Return the engine that a call with these inputs replays, and its input tensors.

        None if none was prepared for them in this mode.
        """
        mode = getattr(self._model, "training", False)
        for engine in self._engines:
            if engine.mode == mode:
                tensors = engine.bind(args, kwargs)
                if tensors is not None:
                    return engine, tensors
        return None, ()

    def _trained(
        self,
        engine: Engine,
        backward: Backward,
        tensors: Sequence[torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a forward that a backward may follow."""
        run = partial(engine.run, static=backward.fixed)
        unlike = backward.unlike(tensors, engine.signature.paths) if torch.is_grad_enabled() else ""
        if unlike and self._options.on_new_shape != "eager":
            raise InputError(f"prepared for something else: {unlike}", fix="prepare(..., training=True) again")
        with backward.using_memory:  # where that is one for all forwards: no thread's may come in between
            pending = backward.fixed and backward.pending
            if not (unlike or pending):
                if torch.is_grad_enabled():
                    return engine.build(backward.attach(run, tensors, self))
                backward.overwrite()
                return engine.build(backward.own(run(tensors)))
        if pending:
            early = "a forward before the backward of the last one"
            self._say(f"{early} runs in eager: the replay's memory is still needed")
        return self._model(*args, **kwargs)

    def refresh(self) -> None:
        """Compute folded weights again from the parameters and buffers as they are now.

        Only needed after writes that torch does not count: through ``.data``, numpy, DLPack or a CUDA graph of yours,
        and to tensors made under ``inference_mode``. Other changes of values (optimizers, ``load_state_dict``, in-place
        operators) are noticed by the next call. Engines without folded weights read all of them live.

        What calls do not look for, this refuses: another shape or other strides on the same memory (``.data = ...``),
        and another number, flag or string among the attributes of modules (``bn.eps``, ``lora.scaling``), which replays
        keep as they were at preparation. Not those that the forward itself changes.

        Raises:
            InputError: the model is not the one that was prepared.
            DeviceError: out of memory.
        """
        mode = getattr(self._model, "training", False)
        for engine in self._engines:
            engine.watch.values.doubt()
            if engine.mode == mode:  # the others when they are called
                engine.check(thorough=True)

    def _unprepared(self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: bool) -> Any:
        """Do what ``on_new_shape`` says of inputs that nothing is prepared for."""
        answer, engines = self._options.on_new_shape, self._engines
        if answer == "eager":
            return self._model(*args, **kwargs)
        if answer == "prepare":
            training = mode and any((*(engine.backward is not None for engine in engines), *self._freed))
            return self.prepare(*args, training=training, **kwargs).forward(*args, **kwargs)
        other_mode = not any(engine.mode == mode for engine in engines)
        if other_mode and any(engine.backward is not None for engine in engines):
            # Training evaluates in between.
            self._say(f"not prepared in {'training' if mode else 'evaluation'} mode: runs in eager")
            return self._model(*args, **kwargs)
        raise unprepared_call(self._model, engines, args, kwargs, training=mode, freed=bool(self._freed))

    def _say(self, what: str) -> None:
        """Warn, once: Python's own filter would say it again at each line that calls, or each time."""
        if what not in self._said:
            self._said.add(what)
            warn(what)

    def close(self) -> None:
        """Free every engine."""
        self._later.cancel()
        with self._swapping:
            engines = self._engines
            self._adopt(())
            if engines:
                object.__setattr__(self, "_freed", tuple(engine.backward is not None for engine in engines))
        for engine in engines:
            engine.close()

    def _apply(self, *args: Any, **kwargs: Any) -> Nimble:
        # .to(), .half(), …: the parameters move, so what was captured no longer stands for the model.
        self.close()
        return super()._apply(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Graphs cannot be copied: a copy starts unprepared.
        return Nimble, (self._model, self._options)

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def extra_repr(self) -> str:
        """Engines, one a line."""
        return "\n".join(
            f"prepared: {engine.signature}; {engine.schedule.policy}, streams={engine.schedule.streams}"
            for engine in self._engines
        )


def _require_prepared_parts(model: Callable[..., Any]) -> None:
    """Refuse a module that has a part, itself a Nimble, in which nothing is prepared."""
    for path, part in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(part, Nimble) and not part.engines and part._options.on_new_shape == "error":
            name = model_name(part._model)
            raise InputError(
                f"{path or 'the model'} is itself a Nimble, of a {name}, and nothing is prepared in it",
                fix="build the model of the modules themselves and wrap it once, or prepare that part first",
            )
