"""``compare``: from a model and its inputs to a Report; a training step is one module of inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Never

import torch

from nimble_core.api.call_mistakes import mistakes_explained
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.runtime.device import Device
from nimble_core.scheduling.options import Options, require_flag, require_options
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.recorded import check_inputs, preparing
from nimble_core.tracing.side_effects import requirements_kept
from nimble_core.utils.errors import InputError
from nimble_core.utils.tracebacks import short_traceback
from nimble_viz.collect.compare_training import Training
from nimble_viz.collect.comparison import Comparison
from nimble_viz.collect.peers import Peer, resolve_peers
from nimble_viz.collect.progress import Progress, default_progress
from nimble_viz.collect.runs import EagerRuns
from nimble_viz.collect.sources import pass_over_machinery
from nimble_viz.collect.suggestions import keyword_inputs, original, refuse_unknown
from nimble_viz.render.report import Report

__all__ = ["compare"]


@short_traceback
def compare(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_grad_norm: float | None = None,
    against: str | Iterable[str | Peer] = (),
    options: Options | None = None,
    training: bool = False,
    progress: Progress | None = None,
    device: Device | None = None,
    **unknown: Never,
) -> Report:
    """Measure ``model`` on these inputs: eager, one-stream replay, multi-stream replay, and peers.

    With ``training`` all of them run whole training steps from the same parameters, replays as ``TrainStep`` does.
    Model, gradients, optimizer, scaler and random state are left as they were, bit for bit. Interrupted (Ctrl-C) once
    something was measured, it warns and returns what there is, marked incomplete.

    Args:
        model: module or function of tensors, on one device, in training mode to train; a Nimble is its model.
        args: positional inputs.
        kwargs: keyword inputs.
        target: what the loss is told besides the model's output; None: nothing.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` if the target is None; a scalar.
        optimizer: of parameters of the model; None: a step is forward, loss and backward.
        autocast: type for ``torch.autocast`` around forward and loss, ``torch.bfloat16`` or ``torch.float16``.
        scaler: scales the loss and skips updates by infinite gradients; the optimizer needs a fused form.
        clip_grad_norm: largest norm of the gradients of all the optimizer's parameters together.
        against: peers to measure in the same rounds: names (``peers.peer_names``) and ``Peer`` objects.
        options: how to prepare; defaults to ``Options()``.
        training: compare training steps, as the arguments from ``target`` to ``clip_grad_norm`` say.
        progress: a ``Progress`` that is told what is going on; by default a line where someone can see it.
        device: a ``Device`` that runs it; by default that of the inputs.
        unknown: refused, with a word on what to write instead.

    Raises:
        InputError: a wrong argument, or mixed devices. NotStaticError: two runs of the model differ.
        CaptureError: a call that cannot be captured. DeviceError: out of memory.
    """
    refuse_unknown(compare, unknown)
    pass_over_machinery()  # a model without code of its own comes from the line that compares
    step = {"target": target, "loss_fn": loss_fn, "optimizer": optimizer, "autocast": autocast}
    step |= {"scaler": scaler, "clip_grad_norm": clip_grad_norm}
    _require_training(training, step)
    _require_device(device)
    peers = resolve_peers(against) if against else ()
    options = Options() if options is None else options
    require_options(options)
    model, named = original(model), keyword_inputs(kwargs)
    stepping: Training | None = None
    given = ", ".join(["*args" if len(args) > 1 else "x"] * bool(args) + ["**kwargs"] * bool(named))
    if training:
        check_inputs(model, args, named)
        stepping = Training(model, args, named, **step)
        model, args, named = stepping.whole, stepping.arguments, {}
    with mistakes_explained(args, named):
        signature = check_inputs(model, args, named)
    eager = EagerRuns(model, args, named, stepping)
    device = device or device_for(signature.device)
    return _measured(Comparison(eager, signature, device, options, peers, given), progress)


def _measured(run: Comparison, progress: Progress | None) -> Report:
    """Measure with everything left as it was, and report what is known."""
    eager, found = run.eager, run.findings
    gradients = eager.training.gradients_kept() if eager.training else nullcontext()
    told = progress or default_progress()
    with preparing(eager.model), requirements_kept(eager.args, eager.kwargs), gradients, told:
        try:
            run.measure(told)
        except KeyboardInterrupt:
            if not found.measurements:
                raise
            found.interrupted = True
        finally:
            run.close()
    if found.interrupted:
        rounds = min(len(taken.samples_ns) for taken in found.measurements.values())
        warn(f"compare was interrupted: the report rests on {rounds} rounds of timing and is incomplete")
    return found.report()


def _require_training(training: bool, step: Mapping[str, Any]) -> None:
    require_flag(training, f"training={training!r}")
    given = [name for name, value in step.items() if value is not None]
    if given and not training:
        what = f"{', '.join(given)} {'are' if len(given) > 1 else 'is'} for training"
        raise InputError(what, fix=f"training=True, or leave {'them' if len(given) > 1 else 'it'} out")


def _require_device(device: Any) -> None:
    if device is not None and (isinstance(device, type) or not callable(getattr(device, "record", None))):
        raise InputError(
            f"device is a {type(device).__name__}, not a Device",
            fix="leave it out: a model runs where its inputs are, model.to('cuda') and x.to('cuda'), say; else an "
            "instance of a Device, as nimble_core.runtime.host.device.HostDevice()",
        )
