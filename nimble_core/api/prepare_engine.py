"""From a model and example inputs to an engine: record, choose, capture, check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nimble_core.api.call_mistakes import mistakes_explained
from nimble_core.api.engine import Engine
from nimble_core.autotune.autotune import tune
from nimble_core.autotune.capture_pipeline import capture, device_for
from nimble_core.compiler.pipeline import follow
from nimble_core.guards.module_guard import Watch
from nimble_core.guards.reached_modules import hooks_of_users
from nimble_core.ir.candidates import Candidate
from nimble_core.ir.costs import Costs
from nimble_core.ir.program import KernelChoice
from nimble_core.runtime.device import Device, Executable
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.saved_plan import Plan, make_plan, plan_notes, schedule_of
from nimble_core.tracing.folded_weights import Folded, with_held
from nimble_core.tracing.input_memory import Apart
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.pytree import builder, passed_on
from nimble_core.tracing.recorded import (
    Recorded,
    Stopwatch,
    check_inputs,
    record_static,
    require_local,
    state_kept,
    whole_note,
)
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.recording_contexts import Autocast
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.step_wrapper import Around, require_training_mode
from nimble_core.training.prepare_training import make_trainable
from nimble_core.utils.errors import CaptureError, InputError
from nimble_core.validation.judge import Judge

__all__ = ["prepare_inference", "prepare_training"]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What an engine will run. The fields are those of ``Engine``.

    ``wrong`` says how its outputs differ from eager's; empty if they do not.
    """

    executable: Executable
    recorded: Recorded
    notes: tuple[str, ...]
    costs: Costs | None = None
    candidates: tuple[Candidate, ...] = ()
    wrong: str = ""


def prepare_inference(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    plan: Plan | None,
    compiled: Collection[KernelChoice] | None = None,
) -> Engine:
    """Make the engine of a forward; raises as ``Nimble.prepare``.

    Args:
        model: module or function.
        args: example positional inputs.
        kwargs: example keyword inputs.
        options: how.
        plan: to follow; None: tune.
        compiled: as of ``tune``.
    """
    watch = Stopwatch()
    with mistakes_explained(args, kwargs):
        signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    with watch("warm-up"), mistakes_explained(args, kwargs):
        device.warm_up(model, *signature.arguments())
    recorded = record_static(device, model, signature, strict=options.strict, step=watch)
    _warn_of_python(model, recorded)
    chosen = _choose(device, recorded, options, plan, compiled, watch)
    try:
        if chosen.wrong:
            warn(chosen.wrong)
        engine = _inference_engine(device, signature, recorded, chosen, watch)
        engine.check()  # what changed during the preparation is folded as well
    except BaseException:
        chosen.executable.close()
        raise
    return engine


def _choose(
    device: Device,
    recorded: Recorded,
    options: Options,
    plan: Plan | None,
    compiled: Collection[KernelChoice] | None,
    watch: Stopwatch,
) -> _Chosen:
    """Follow the plan if there is one, else tune; take the model as a whole where neither is right."""
    if recorded.whole:
        if plan is not None:
            raise InputError(
                f"the plan cannot be followed: {whole_note(device, recorded)}", fix="prepare without a plan"
            )
        return _as_a_whole(device, recorded, watch)
    if plan is not None:
        return _follow(device, recorded, options, plan, watch)
    with state_kept(recorded):
        tuned = tune(device, recorded, options, step=watch, compiled=compiled)
    notes = (*recorded.recording.program.notes, *tuned.notes)
    if tuned.wrong and device.kind == "cpu":  # whatever the reason is: the module itself is never wrong
        tuned.close()
        unlike = replace(recorded.recording, unseen=1, unseen_where=tuned.wrong)
        found = _as_a_whole(device, replace(recorded, recording=unlike), watch)
        return replace(found, notes=(*notes, found.notes[-1]))
    tuned.close(keep=tuned.best)
    return _Chosen(tuned.best, tuned.recorded, notes, tuned.costs, tuned.candidates, tuned.wrong)


def _as_a_whole(device: Device, recorded: Recorded, watch: Stopwatch) -> _Chosen:
    with watch("capture"):
        executable = device.capture_whole(recorded.model, recorded.recording, recorded.signature)
    note = whole_note(device, recorded)
    warn(note)
    return _Chosen(executable, recorded, (*recorded.recording.program.notes, note))


def _follow(device: Device, recorded: Recorded, options: Options, plan: Plan, watch: Stopwatch) -> _Chosen:
    notes = recorded.recording.program.notes
    notes = (*notes, *plan_notes(plan, device_name=device.name, torch=str(torch.__version__)))
    recorded = follow(device, recorded, plan, thorough=options.tune == "full", step=watch)
    schedule = schedule_of(plan, recorded.recording.program, recorded.graph)
    with state_kept(recorded), watch("capture"):
        executable = capture(device, recorded, schedule, memory_limit=options.memory_limit)
        wrong = ""
        if recorded.eager is not None:
            judge = Judge(device, recorded.eager)
            check = judge.judged("plan", recorded, executable)
            notes = (*notes, *judge.notes)
            wrong = f"the plan's kernels are not right here: {check.reason}" if check.differs else ""
    return _Chosen(executable, recorded, notes, wrong=wrong)


def _inference_engine(
    device: Device, signature: Signature, eager: Recorded, chosen: _Chosen, watch: Stopwatch
) -> Engine:
    """Put an engine together.

    Args:
        device: where it runs.
        signature: inputs it takes.
        eager: the recording of the model itself.
        chosen: what it runs.
        watch: what preparation took.
    """
    recorded, model = chosen.recorded, eager.model
    structure, passed = passed_on(eager.recording.output_structure, len(eager.recording.outputs))
    seen = (recorded.eager or recorded).recording
    live = recorded.whole and device.kind == "cpu"  # then the model itself runs, and reads
    folded = with_held(recorded.folded, () if live else seen.held)
    guard = Watch(model, folded.sources if folded else (), seen.given.values(), seen.counters)
    plan = None
    if not recorded.whole:
        plan = make_plan(
            recorded.recording.program,
            recorded.graph,
            chosen.executable.schedule,
            device_name=device.name,
            torch=str(torch.__version__),
        )
    return Engine(
        signature=signature,
        executable=chosen.executable,
        build=builder(structure),
        mode=bool(getattr(model, "training", False)),
        watch=guard,
        # The host has nothing else to do meanwhile; and what writes its inputs or state cannot be run twice.
        check_first=device.kind == "cpu" or not _repeatable(recorded.recording),
        seconds=dict(watch.seconds),
        recorded=recorded,
        costs=chosen.costs,
        candidates=chosen.candidates,
        plan=plan,
        notes=(*chosen.notes, *_fold_notes(folded, guard)),
        folded=folded,
        writes=_written_addresses(recorded.recording),
        apart=_apart(signature, recorded.recording),
        autocast=None if isinstance(model, Around) else Autocast.here(signature.device.type),
        passed_on=passed,
    )


def prepare_training(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> Engine:
    """Make the engine of a forward that a backward follows; raises as ``Nimble.prepare``."""
    if not isinstance(model, torch.nn.Module):
        raise InputError("prepare(training=True) takes a module, not a function", fix="wrap it in a torch.nn.Module")
    require_local(model)
    require_training_mode(model)
    watch = Stopwatch()
    signature = check_inputs(model, args, kwargs)
    make = partial(make_trainable, device_for(signature.device), model, signature, step=watch)
    made = make(options)
    if made.wrong and made.other_kernels and not options.strict:
        made.close()
        note = f"{' and '.join(made.other_kernels)}: left out: {made.wrong}"
        made = make(replace(options, fuse="none"))
        made = replace(made, notes=(note, *made.notes))
    _warn_of_python(model, made.joint)
    if made.wrong:
        if options.strict:
            made.close()
            raise CaptureError(made.wrong, fix="report this model")
        warn(made.wrong)
    forward, joint = made.forward, made.joint.recording
    folded = with_held(None, joint.held)
    guard = Watch(model, folded.sources if folded else (), changing=joint.counters)
    return Engine(
        signature=signature,
        executable=forward.best,
        build=builder(made.structure),
        mode=True,
        watch=guard,
        check_first=True,
        seconds=dict(watch.seconds),
        recorded=forward.recorded,
        costs=forward.costs,
        candidates=forward.candidates,
        notes=(*made.notes, *_fold_notes(folded, guard)),
        folded=folded,
        writes=_written_addresses(forward.recorded.recording),
        backward=made.backward,
        apart=_apart(signature, forward.recorded.recording),
        autocast=Autocast.here(signature.device.type),
    )


def _repeatable(recording: Recording) -> bool:
    """Return whether running it twice leaves the same behind as running it once."""
    program = recording.program
    random = (storage for storage, one in enumerate(program.storages) if one.role == "generator")
    outside = {recording.storage_of[slot] for slot in (*recording.given, *recording.inputs)} | set(random)
    return not any(ref.storage in outside for call in program.calls for ref in call.writes)


def _written_addresses(recording: Recording) -> frozenset[int]:
    """Return the addresses of the model's own storages that calls write."""
    written = {ref.storage for call in recording.program.calls for ref in call.writes}
    given = ((recording.storage_of[slot], tensor) for slot, tensor in recording.given.items())
    return frozenset(tensor.untyped_storage().data_ptr() for storage, tensor in given if storage in written)


def _apart(signature: Signature, recording: Recording) -> Apart | None:
    written = recording.written_inputs
    return Apart(signature.tensors, written, signature.paths) if written else None


def _warn_of_python(model: Callable[..., Any], recorded: Recorded) -> None:
    """Warn of what the forward does in Python, once, at preparation: replays do not repeat it."""
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


def _fold_notes(folded: Folded | None, guard: Watch) -> Iterator[str]:
    """Say what an engine with folded weights notices of changed values, and what it does not."""
    if folded is None:
        return
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
    if guard.values.blind:
        yield f"made under inference_mode, so that only refresh() follows their values: {', '.join(guard.values.blind)}"
