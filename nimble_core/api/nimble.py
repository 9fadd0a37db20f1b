"""``Nimble``: the user's entry point. Wrap a module, prepare it once, call it as before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Never

import torch

from nimble_core.api.call_mistakes import input_hint, mistakes_explained, refuse_options
from nimble_core.api.engine import Engine
from nimble_core.autotune.autotune import Tuned, tune
from nimble_core.autotune.capture_pipeline import capture, device_for
from nimble_core.compiler.pipeline import follow
from nimble_core.guards.module_guard import Watch, hooks_of_users
from nimble_core.guards.transforms import transform_of, transforming
from nimble_core.ir.candidates import Candidate
from nimble_core.ir.costs import Costs
from nimble_core.runtime.device import Executable
from nimble_core.scheduling.options import Options, option_like, require_flag, require_options
from nimble_core.scheduling.saved_plan import Plan, make_plan, plan_notes, schedule_of
from nimble_core.tracing.autocast import Autocast
from nimble_core.tracing.folded_weights import Folded, with_held
from nimble_core.tracing.input_aliasing import Apart
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.pytree import builder, flatten, passed_on
from nimble_core.tracing.recorded import (
    Recorded,
    Stopwatch,
    check_inputs,
    preparing,
    record_static,
    require_local,
    state_kept,
    whole_note,
)
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.recording_contexts import recording_here
from nimble_core.tracing.side_effects import requirements_kept
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.signature_mismatch import nearest
from nimble_core.tracing.step_wrapper import Around, require_training_mode
from nimble_core.training.autograd_function import Backward
from nimble_core.training.prepare_training import make_trainable
from nimble_core.utils.errors import CaptureError, DeviceError, InputError
from nimble_core.utils.gc_pause import collector_paused
from nimble_core.validation.judge import eager_cases

__all__ = ["Nimble"]

_requires_grad = attrgetter("requires_grad")


class Nimble(torch.nn.Module):
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
    """Of what was prepared, and closed since: whether it trained."""

    def __init__(self, model: Callable[..., Any], options: Options = Options(), **unknown: Never) -> None:
        super().__init__()
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
        # Beside the module system: registering the model would prefix every name in state_dict.
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "_engines", ())
        object.__setattr__(self, "_swapping", threading.Lock())
        object.__setattr__(self, "_said", set())
        if isinstance(model, torch.nn.Module):
            for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                object.__setattr__(self, table, getattr(model, table))
            object.__setattr__(self, "training", getattr(model, "training", False))

    @property
    def engines(self) -> tuple[Engine, ...]:
        """What was prepared, latest first."""
        return self._engines  # type: ignore[no-any-return]

    def prepare(self, *args: Any, training: bool = False, plan: Plan | None = None, **kwargs: Any) -> Nimble:
        """Record, schedule and capture the model for inputs like these; returns self.

        Preparing again for the same signature replaces its engine; other signatures stay prepared, as do those that
        were prepared under another ``torch.autocast``.

        Args:
            args: example positional inputs.
            training: prepare forward and backward: outputs then carry gradients, for parameters and for those inputs
                that require one here. The module has to be in training mode, parts of it need not be.
            plan: a plan made before for this model and inputs like these (``report.plan``, ``engine.plan``): the same
                schedule, without tuning.
            kwargs: example keyword inputs.

        Raises:
            InputError: no tensor among the inputs, mixed devices, nothing to train, or a plan for something else: the
                first difference is named.
            NotStaticError: the model does not do the same on every input.
            CaptureError: a call that cannot be captured.
            DeviceError: out of memory.
        """
        self.adopt_engine(self.make_engine(args, kwargs, training=training, plan=plan), args, kwargs)
        return self

    def make_engine(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool = False, plan: Plan | None = None
    ) -> Engine:
        """The engine that ``prepare`` would add; the caller's to close, or to have adopted. Raises as ``prepare``."""
        require_flag(training, f"training={training!r}")
        refuse_options(self._model, kwargs)
        if training and plan is not None:
            raise InputError(
                "a plan is one schedule; prepare(training=True) makes two, of forward and of backward",
                fix="prepare without a plan; a whole step can follow one: TrainStep(...).prepare(x, y, plan=plan)",
            )
        # What a preparation makes stays; only training and compilers leave garbage that is worth collecting meanwhile.
        unfused = self._options.fuse == "none" and not training
        paused = collector_paused() if unfused else nullcontext()
        with preparing(self._model), requirements_kept(args, kwargs), paused:
            if training:
                return _prepare_training(self._model, args, kwargs, self._options)
            return _prepare(self._model, args, kwargs, self._options, plan)

    def adopt_engine(self, engine: Engine, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Replay ``engine`` for inputs like these from now on; what was prepared for them before is closed."""
        with self._swapping:
            replaced = [
                one
                for one in self._engines
                if (one.mode, one.autocast) == (engine.mode, engine.autocast)
                and one.signature.bind(args, kwargs) is not None
            ]
            kept = (one for one in self._engines if not any(one is other for other in replaced))
            object.__setattr__(self, "_engines", (engine, *kept))
        for one in replaced:
            one.close()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the engine that was prepared for inputs like these, under the autocast that is in force.

        Inside of a model that is being recorded, the module itself is run: its calls become that one's.

        Raises:
            InputError: none was, and ``on_new_shape`` is ``"error"``: says what was expected and what was given. Or the
                inputs are part of a transform of ``torch.func`` or of forward-mode AD, and ``on_new_shape`` is not
                ``"eager"``; or share memory that the model writes.
        """
        if recording_here() or (transforming() and self._transformed(args, kwargs)):
            return self._model(*args, **kwargs)
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
        """Whether a transform is to run the model itself. Raises InputError where that was not asked for."""
        linked = torch.is_grad_enabled() and any(engine.backward is not None for engine in self._engines)
        transform = transform_of(flatten((tuple(args), dict(kwargs)))[0], linked=linked)
        if transform and self._options.on_new_shape != "eager":
            raise InputError(
                f"a prepared module cannot be transformed by {transform}: a replay computes values alone",
                fix="transform the model itself; for gradients: prepare(..., training=True), and loss.backward()",
            )
        return bool(transform)

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Engine, list[torch.Tensor]] | tuple[None, Sequence[torch.Tensor]]:
        """The engine that a call with these inputs replays, and its input tensors; None if none was prepared for them
        in this mode.
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
        """A forward that a backward may follow."""
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
            engine.watch.doubt()
            if engine.mode == mode:  # the others when they are called
                engine.check(thorough=True)

    def _unprepared(self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: bool) -> Any:
        answer = self._options.on_new_shape
        if answer == "eager":
            return self._model(*args, **kwargs)
        if answer == "prepare":
            training = mode and any((*(engine.backward is not None for engine in self._engines), *self._freed))
            return self.prepare(*args, training=training, **kwargs).forward(*args, **kwargs)
        if not self._engines:
            since = " any more: close(), or a move or conversion, freed what was" if self._freed else ""
            raise InputError(
                f"nothing is prepared in this Nimble of {_name(self._model)}{since}",
                fix=f"call prepare(*example_inputs) on it {'again' if since else 'first'}",
            )
        for engine in self._engines:
            if engine.mode == mode and engine.autocast and engine.signature.bind(args, kwargs) is not None:
                raise InputError(
                    f"no engine is prepared under this autocast: {engine.autocast.change()}",
                    where=f"prepared: {engine.signature}",
                    fix="call under the same torch.autocast as prepare(...), or prepare(...) under this one as well, "
                    'or use Options(on_new_shape="prepare" or "eager")',
                )
        prepared = [engine for engine in self._engines if engine.mode == mode]
        if prepared:
            called = self._model.input_names if isinstance(self._model, Around) else ()
            elsewhere = [one.autocast is not None and not one.autocast.holds() for one in prepared]
            near, listed = nearest([one.signature for one in prepared], elsewhere, args, kwargs, called)
            why = near.explain(args, kwargs)
            raise InputError(
                f"no engine is prepared for these inputs: {why}",
                where=f"prepared: {listed}",
                fix=(": expected a tensor, given" in why and input_hint(args, kwargs))
                or (not (args or kwargs) and "call it with the inputs: net(x)")
                or 'prepare(...) for them as well, or use Options(on_new_shape="prepare" or "eager")',
            )
        if any(engine.backward is not None for engine in self._engines):
            # Training evaluates in between.
            self._say(f"not prepared in {'training' if mode else 'evaluation'} mode: runs in eager")
            return self._model(*args, **kwargs)
        words = ("training", "evaluation") if mode else ("evaluation", "training")
        raise InputError(
            f"the model is in {words[0]} mode, the engines were prepared in {words[1]} mode",
            fix=f"model.{'eval' if mode else 'train'}(), or prepare again",
        )

    def _say(self, what: str) -> None:
        """Warn, once: Python's own filter would say it again at each line that calls, or each time."""
        if what not in self._said:
            self._said.add(what)
            warn(what)

    def close(self) -> None:
        """Free every engine."""
        with self._swapping:
            engines = self._engines
            object.__setattr__(self, "_engines", ())
            if engines:
                object.__setattr__(self, "_freed", tuple(engine.backward is not None for engine in engines))
        for engine in engines:
            engine.close()

    def train(self, mode: bool = True) -> Nimble:
        """Set the wrapped model's mode."""
        if isinstance(self._model, torch.nn.Module):
            self._model.train(mode)
        self.training = mode
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Nimble:
        # .to(), .half(), …: the parameters move, so what was captured no longer stands for the model.
        self.close()
        if isinstance(self._model, torch.nn.Module):
            self._model._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_model")
        mine = name in self.__dict__ or hasattr(type(self), name)
        if not mine and isinstance(model, torch.nn.Module) and hasattr(model, name):
            setattr(model, name, value)  # what is read from the model is written to it
        else:
            super().__setattr__(name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with what its hooks and ``get_extra_state`` add."""
        model = self._model
        if isinstance(model, torch.nn.Module):
            return model.state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the model; see ``torch.nn.Module.load_state_dict``."""
        model = self._model
        if isinstance(model, torch.nn.Module):
            return model.load_state_dict(*args, **kwargs)
        return super().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # where this is a part of what is loaded
        model = self._model
        if isinstance(model, torch.nn.Module):
            model._load_from_state_dict(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Graphs and workers cannot be copied: a copy starts unprepared.
        return Nimble, (self._model, self._options)

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def extra_repr(self) -> str:
        """Engines, one a line."""
        return "\n".join(
            f"prepared: {engine.signature}; {engine.schedule.policy}, {engine.schedule.streams} streams"
            for engine in self._engines
        )


def _repeatable(recording: Recording) -> bool:
    """Whether running it twice leaves the same behind as running it once."""
    program = recording.program
    random = (storage for storage, one in enumerate(program.storages) if one.role == "generator")
    outside = {recording.storage_of[slot] for slot in (*recording.given, *recording.inputs)} | set(random)
    return not any(ref.storage in outside for call in program.calls for ref in call.writes)


def _writes(recording: Recording) -> frozenset[int]:
    written = {ref.storage for call in recording.program.calls for ref in call.writes}
    given = ((recording.storage_of[slot], tensor) for slot, tensor in recording.given.items())
    return frozenset(tensor.untyped_storage().data_ptr() for storage, tensor in given if storage in written)


def _apart(signature: Signature, recording: Recording) -> Apart | None:
    written = recording.written_inputs
    return Apart(signature.tensors, written, signature.paths) if written else None


def _require_prepared_parts(model: Callable[..., Any]) -> None:
    """Refuse a module with a Nimble in it that cannot be called yet: it would stop the recording, and not say which."""
    for path, part in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(part, Nimble) and not part.engines and part._options.on_new_shape == "error":
            raise InputError(
                f"{path or 'the model'} is itself a Nimble, of a {_name(part._model)}, and nothing is prepared in it",
                fix="build the model of the modules themselves and wrap it once, or prepare that part first",
            )


def _name(model: Callable[..., Any]) -> str:
    return getattr(model, "__name__", type(model).__name__)


def _unlike(recorded: Recorded, executable: Executable) -> str:
    """How a replay of other kernels than eager's differs from eager; empty if it does not."""
    if recorded.eager is None:
        return ""
    check = eager_cases(recorded, truth=True).judged("plan", recorded, executable.run)
    return f"the plan's kernels are not right here: {check.reason}" if check.differs else ""


def _warn_of_python(model: Callable[..., Any], recorded: Recorded) -> None:
    """Of what the forward does in Python, which replays do not, once at preparation."""
    recording = recorded.recording
    trained = any(call.phase == "backward" for call in recording.program.calls)
    hooks = hooks_of_users(model, backward=trained, given=recording.given.values())
    if hooks:
        more = f" and {len(hooks) - 1} more" if len(hooks) > 1 else ""
        warn(
            f"{hooks[0]}{more}: what hooks compute is replayed, what they keep or print in Python is not; "
            "remove the hook, or return what it keeps as an output"
        )
    for one in recorded.said:
        warn(one)


def _fold_notes(folded: Folded, watch: Watch) -> Iterator[str]:
    read = dict.fromkeys(one.names for one in folded.held)
    if read:
        yield f"read on the host, and refused once they hold something else: {', '.join(read)}"
    count = len(folded.sources) - sum(len(one.sources) for one in folded.held)
    if count:
        what = "parameters and buffers are" if count > 1 else "parameter or buffer is"
        yield (
            f"{count} {what} folded into constants, which follow the values; "
            "after writes that torch does not count (.data, numpy, DLPack) call refresh()"
        )
    if watch.blind:
        yield f"made under inference_mode, so that only refresh() follows their values: {', '.join(watch.blind)}"


def _prepare(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, given: Plan | None
) -> Engine:
    if given is not None and not isinstance(given, Plan):
        raise InputError(f"plan is a {type(given).__name__}", fix="report.plan, or load_plan(path)")
    _require_prepared_parts(model)
    watch = Stopwatch()
    with mistakes_explained(args, kwargs):
        signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    with watch("warm-up"), mistakes_explained(args, kwargs):
        device.warm_up(model, *signature.arguments())
    recorded = record_static(device, model, signature, strict=options.strict, step=watch)
    notes = recorded.recording.program.notes
    _warn_of_python(model, recorded)
    program, graph = recorded.recording.program, recorded.graph
    structure, passed = passed_on(recorded.recording.output_structure, len(recorded.recording.outputs))
    build = builder(structure)
    candidates: tuple[Candidate, ...] = ()
    plan: Plan | None = None
    costs: Costs | None = None
    wrong = ""
    tuned: Tuned | None = None
    if given is None and not recorded.whole:
        with state_kept(recorded):
            tuned = tune(device, recorded, options, step=watch)
        if tuned.wrong and device.kind == "cpu":  # whatever the reason is: the module itself is never wrong
            tuned.close()
            notes = (*notes, *tuned.notes)
            recorded = replace(recorded, recording=replace(recorded.recording, unseen=1, unseen_where=tuned.wrong))
    if recorded.whole:
        if given is not None:
            raise InputError(
                f"the plan cannot be followed: {whole_note(device, recorded)}", fix="prepare without a plan"
            )
        with watch("capture"):
            executable = device.capture_whole(model, recorded.recording, signature)
        notes = (*notes, whole_note(device, recorded))
        warn(notes[-1])
    elif given is not None:
        recorded = follow(device, recorded, given, thorough=options.tune == "full", step=watch)
        program, graph = recorded.recording.program, recorded.graph
        schedule = schedule_of(given, program, graph)
        notes = (*notes, *plan_notes(given, device_name=device.name, torch=str(torch.__version__)))
        with state_kept(recorded), watch("capture"):
            executable = capture(device, recorded, schedule, memory_limit=options.memory_limit)
            wrong = _unlike(recorded, executable)
    else:
        assert tuned is not None
        executable, candidates, recorded, costs = tuned.best, tuned.candidates, tuned.recorded, tuned.costs
        program, graph = recorded.recording.program, recorded.graph
        tuned.close(keep=executable)
        wrong = tuned.wrong
        notes = (*notes, *tuned.notes)
    try:
        if wrong:
            warn(wrong)
        if not recorded.whole:
            plan = make_plan(
                program,
                graph,
                executable.schedule,
                device_name=device.name,
                torch=str(torch.__version__),
                max_streams=options.max_streams,
                memory_limit=options.memory_limit,
            )
        live = recorded.whole and device.kind == "cpu"  # then the model itself runs, and reads
        seen = (recorded.eager or recorded).recording
        folded = with_held(recorded.folded, () if live else seen.held)
        fresh = Watch(model, folded.sources if folded else (), seen.given.values(), seen.counters)
        engine = Engine(
            signature=signature,
            executable=executable,
            build=build,
            mode=bool(getattr(model, "training", False)),
            watch=fresh,
            # The host has nothing else to do meanwhile; and what writes its inputs or state cannot be run twice.
            check_first=device.kind == "cpu" or not _repeatable(recorded.recording),
            seconds=dict(watch.seconds),
            recorded=recorded,
            costs=costs,
            candidates=candidates,
            plan=plan,
            notes=(*notes, *_fold_notes(folded, fresh)) if folded else notes,
            folded=folded,
            writes=_writes(recorded.recording),
            apart=_apart(signature, recorded.recording),
            autocast=None if isinstance(model, Around) else Autocast.here(signature.device.type),
            passed_on=passed,
        )
        engine.check()  # what changed during the preparation is folded as well
    except BaseException:
        executable.close()
        raise
    return engine


def _prepare_training(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> Engine:
    if not isinstance(model, torch.nn.Module):
        raise InputError("prepare(training=True) takes a module, not a function", fix="wrap it in a torch.nn.Module")
    require_local(model)
    require_training_mode(model)
    _require_prepared_parts(model)
    watch = Stopwatch()
    signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    make = partial(make_trainable, device, model, signature, step=watch)
    made = make(options)
    if made.wrong and made.other_kernels and not options.strict:
        made.close()
        note = f"{' and '.join(made.other_kernels)}: left out: {made.wrong}"
        made = make(replace(options, fuse="none"))
        made = replace(made, notes=(note, *made.notes))
    forward = made.forward
    _warn_of_python(model, made.joint)
    if made.wrong:
        if options.strict:
            made.close()
            raise CaptureError(made.wrong, fix="report this model")
        warn(made.wrong)
    folded = with_held(None, made.joint.recording.held)
    fresh = Watch(model, folded.sources if folded else (), changing=made.joint.recording.counters)
    return Engine(
        signature=signature,
        executable=forward.best,
        build=builder(made.structure),
        mode=True,
        watch=fresh,
        check_first=True,
        seconds=dict(watch.seconds),
        recorded=forward.recorded,
        costs=forward.costs,
        candidates=forward.candidates,
        notes=(*made.notes, *(_fold_notes(folded, fresh) if folded else ())),
        folded=folded,
        writes=_writes(forward.recorded.recording),
        backward=made.backward,
        apart=_apart(signature, forward.recorded.recording),
        autocast=Autocast.here(signature.device.type),
    )
