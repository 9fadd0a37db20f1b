"""A module's forward and backward, made ready to train in place of it.

They are recorded together (``joint_function``), cut in two (``partition``), scheduled each by itself (``autotune``),
the backward in what the forward leaves (``saved_tensors``), and held against eager; ``autograd_function`` joins them
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nimble_core.autotune.autotune import Tuned, eager_peak, tune
from nimble_core.autotune.capture_pipeline import capture
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.candidates import EqualityCheck
from nimble_core.ir.program import Fuse
from nimble_core.runtime.device import Device, Executable
from nimble_core.scheduling.options import Options
from nimble_core.torch_compat.autograd import KNOWN_WHETHER_KEPT
from nimble_core.tracing.grad_accumulators import require_no_node_hooks
from nimble_core.tracing.pytree import Structure
from nimble_core.tracing.recorded import Lender, Recorded, preparing, record_static, state_kept
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import check_outputs
from nimble_core.tracing.strides import share_bytes, strides_of_copy
from nimble_core.training.autograd_function import Backward, Fixed
from nimble_core.training.joint_function import ForwardBackward, in_better_layout
from nimble_core.training.partial_backward import issued
from nimble_core.training.partition import Halves, halve
from nimble_core.training.saved_tensors import leading, lent
from nimble_core.utils.errors import CaptureError
from nimble_core.validation.eager_cases import Cases, eager_cases
from nimble_core.validation.equality import check_equality

__all__ = ["Trainable", "make_trainable"]

_PATIENCE_S = 60.0
_WORTH = 1.2
"""How many times as fast a backward has to be that makes the step hold much more than eager's: more than elsewhere,
since what the forward saved is there beside it, and memory decides what can be trained at all."""

Step = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Trainable:
    """A module prepared for training.

    Args:
        forward: what was found for the forward; its recording makes the outputs, then what is saved.
        backward: what follows.
        structure: what is around the model's outputs.
        joint: both, as they were recorded.
        notes: what the user should know.
        wrong: how the replays differ from eager; empty if they do not.
    """

    forward: Tuned
    backward: Backward
    structure: Structure
    joint: Recorded
    notes: tuple[str, ...]
    wrong: str

    @property
    def other_kernels(self) -> tuple[Fuse, ...]:
        """Kinds of kernels that forward and backward take instead of eager's."""
        kinds = (one.recorded.recording.program.fuse for one in (self.forward, self.backward.tuned))
        return tuple(dict.fromkeys(kind for kind in kinds if kind != "none"))

    def close(self) -> None:
        """Free what replays."""
        self.forward.best.close()
        self.backward.close()


def make_trainable(
    device: Device,
    model: torch.nn.Module,
    signature: Signature,
    options: Options,
    *,
    step: Step,
) -> Trainable:
    """Record forward and backward together, cut, tune each; nothing of the model is changed.

    Raises:
        InputError: nothing to differentiate, or hooks that no replay would call.
        NotStaticError, CaptureError, DeviceError: as ``record_static`` and ``tune``.
    """
    joint = _recorded_jointly(device, model, signature, options, step)
    first = joint.forward_recorded(device)
    with state_kept(first):
        forward = tune(device, first, options, step=step)
    made: list[Executable] = [forward.best]
    try:
        forward.close(keep=forward.best)
        left = _left_by_forward(joint, first, forward.best)
        plain, second = joint.backward_recorded(left)
        eager_nbytes = eager_peak(device, joint.cut)
        with state_kept(second):
            behind = tune(
                device,
                replace(second, lender=left.lender),
                options,
                step=step,
                eager_nbytes=eager_nbytes,
                beside_nbytes=forward.best.nbytes,
                worth=_WORTH,
            )
        made.append(behind.best)
        behind.close(keep=behind.best)
        backward = _backward(device, joint, left, plain, behind, options)
        with step("check equality"):
            wrong = _unlike_eager(joint.recorded, forward.best, backward, len(joint.inputs))
    except BaseException:
        for one in made:
            one.close()
        raise
    if isinstance(behind.best, Fixed):
        # From here on they are examples of shapes only, and outputs may be large: one memory is enough.
        for template, buffer in zip(joint.templates, behind.best.buffers, strict=False):
            template.set_(buffer.untyped_storage(), buffer.storage_offset(), buffer.shape, buffer.stride())
    notes = (*forward.notes, *behind.notes)
    return Trainable(forward, backward, joint.structure, joint.recorded, notes, wrong)


@dataclass(frozen=True, slots=True)
class _Joint:
    """Forward and backward as one recording, and cut in two.

    Args:
        whole: the function that was recorded.
        recorded: the recording, in eager's kernels and layout.
        cut: the recording that is cut: in the layout that takes less time.
        halves: its two parts.
        inputs: of the forward.
        structure: what is around the model's outputs.
        templates: gradients of outputs.
        outputs: how many outputs the model has.
    """

    whole: ForwardBackward
    recorded: Recorded
    cut: Recorded
    halves: Halves
    inputs: list[torch.Tensor]
    structure: Structure
    templates: tuple[torch.Tensor, ...]
    outputs: int

    def forward_recorded(self, device: Device) -> Recorded:
        """Make a recording of the forward alone."""
        together = replace(self.cut.recording, outputs=self.halves.forward.outputs)
        ahead = len(self.halves.forward.program.calls)
        first = _recorded(self.halves.forward, self.inputs, _Issued(together, ahead, after=self.templates))
        return replace(first, copied_out=self.outputs) if device.kind == "cuda" else first

    def backward_recorded(self, left: _Left) -> tuple[Recording, Recorded]:
        """Return the backward in eager's kernels, and with what is needed to tune it on what the forward has left."""
        if not left.fixed:
            plain = self.halves.backward
            eager = _Issued(plain, len(plain.program.calls))
            return plain, _recorded(plain, [*self.templates, *left.saved], eager)
        # With the forward before it: eager and captures keep seeds in different places.
        recording = self.cut.recording
        whole_run = replace(recording, outputs=recording.outputs[self.outputs :])
        calls = len(recording.program.calls)
        eager = _Issued(whole_run, calls, self.inputs, joint=self.cut, random=left.random)
        plain = self.halves.with_saved(left.saved)
        return plain, replace(_recorded(plain, list(self.templates), eager), copied_in=len(self.templates))


def _recorded_jointly(
    device: Device, model: torch.nn.Module, signature: Signature, options: Options, step: Step
) -> _Joint:
    """Record forward and backward as one function, choose its layout, and cut it."""
    require_no_node_hooks(model.named_parameters())
    leaves = [position for position, tensor in enumerate(signature.tensors) if tensor.requires_grad]
    whole = ForwardBackward(model, leaves)
    with step("warm-up"):
        device.warm_up(whole, signature.arguments(), {})
    structure, templates = whole.structure, whole.templates
    assert structure is not None
    both = Signature((*signature.arguments(), list(templates)), {}, whole.input_names)
    recorded = record_static(device, whole, both, strict=options.strict, step=step)
    if recorded.whole:
        what = "launch" if device.kind == "cuda" else "value"
        raise CaptureError(
            f"not every {what} of forward and backward was seen",
            where=recorded.recording.unseen_where,
            fix="leave that part out of the prepared module",
        )
    if whole.structure is not None:  # of the last run, on other values
        check_outputs(structure, whole.structure)
    cut = in_better_layout(device, whole, recorded, options, step)
    halves = halve(cut.recording, len(signature.tensors), whole.outputs)
    inputs = [tensor.detach() for tensor in signature.tensors]
    return _Joint(whole, recorded, cut, halves, inputs, structure, templates, whole.outputs)


@dataclass(frozen=True, slots=True)
class _Left:
    """What a run of the prepared forward leaves for its backward.

    Args:
        outputs: the model's.
        saved: what the backward reads.
        fixed: whether all of it always lies at the same place (CUDA).
        random: state of the device's random numbers before the run, where ``fixed``.
        lender: the forward's memory, for the backward to use up.
    """

    outputs: list[torch.Tensor]
    saved: list[torch.Tensor]
    fixed: bool
    random: torch.Tensor | None = None
    lender: Lender | None = None


def _left_by_forward(joint: _Joint, first: Recorded, forward: Executable) -> _Left:
    """Run the prepared forward once, with the model's state put back."""
    halves, count = joint.halves, joint.outputs
    fixed = isinstance(forward, Fixed)
    random = torch.cuda.get_rng_state(first.signature.device) if fixed else None
    with state_kept(first):
        made = [one.detach() for one in forward.run(joint.inputs, static=True)]
    outputs, saved = made[:count], made[count:]
    if not isinstance(forward, Fixed):
        return _Left(outputs, [*saved, *(joint.inputs[at] for at in halves.saved_inputs)], fixed)
    lender: Lender | None = None
    if KNOWN_WHETHER_KEPT:
        leads = leading(halves.backward, len(saved) + len(halves.saved_inputs))
        saved, lender = lent(forward.arena, saved, leads)
    return _Left(outputs, [*saved, *(forward.buffers[at] for at in halves.saved_inputs)], fixed, random, lender)


def _backward(
    device: Device, joint: _Joint, left: _Left, plain: Recording, behind: Tuned, options: Options
) -> Backward:
    """Make what replays the backward and hands out its gradients."""
    whole, halves = joint.whole, joint.halves
    named = dict(whole.model.named_parameters())
    refs = joint.recorded.recording.program.outputs[: joint.outputs]
    return Backward(
        tuned=behind,
        plain=plain,
        parameters=tuple(named[name] for name in whole.present),
        flags=tuple((one, name, one.requires_grad) for name, one in named.items()),
        leaves=frozenset(whole.leaves),
        leaves_present=whole.leaves_present,
        layouts=tuple(strides_of_copy(ref.sizes, ref.strides) for ref in refs),
        differentiable=whole.differentiable,
        templates=joint.templates,
        reached=whole.reached,
        functions=whole.functions,
        saved_inputs=halves.saved_inputs,
        fixed=left.fixed,
        borrowed=_borrowed(halves.backward),
        separately=partial(_captured_separately, device, behind, options.memory_limit)
        if left.lender is not None
        else None,
        repeated=_repeated(left.outputs),
        read=_read(halves),
    )


def _captured_separately(device: Device, behind: Tuned, memory_limit: int | None) -> Executable:
    """Capture the backward that was chosen once more, in memory of its own.

    Its calls run once before they are captured: autograd's own thread is another one, and what libraries know of a
    routine they may know by thread.

    Raises:
        DeviceError: no memory for it, or another thread prepares a model.
        CaptureError: as ``capture``.
    """
    recorded = replace(behind.recorded, lender=None)
    tuned = device.libraries_tuned() if recorded.recording.program.fuse != "none" else nullcontext()
    with preparing(recorded.model, _PATIENCE_S), state_kept(recorded):
        with tuned:
            issued(recorded.recording, recorded.signature.tensors, recorded.signature.device.type)
        return capture(device, recorded, behind.best.schedule, memory_limit=memory_limit, costs=behind.costs)


def _borrowed(backward: Recording) -> tuple[int, ...]:
    """Find gradients, by position, in memory of something saved or of the model, as a custom backward may return."""
    homes = {backward.storage_of[slot] for slot in (*backward.inputs, *backward.given)}
    return tuple(at for at, slot in enumerate(backward.outputs) if backward.storage_of[slot] in homes)


def _repeated(outputs: Sequence[torch.Tensor]) -> frozenset[int]:
    """Find outputs, by position, that share memory with an earlier one."""
    return frozenset(at for at, one in enumerate(outputs) if any(share_bytes(one, earlier) for earlier in outputs[:at]))


def _read(halves: Halves) -> tuple[tuple[str, torch.Tensor], ...]:
    """Find tensors that exist before the forward and that the backward reads.

    Returns their names, and aliases that share their version counters.

    Not those that the forward writes without saying so, as batch norm its running statistics: eager counts no version
    of these either. Nor those that the backward itself writes, where it computes a forward again; nor those without a
    counter, made under ``inference_mode``.
    """
    forward, backward = halves.forward, halves.backward
    reads = {access.ref.storage for call in backward.program.calls for access in call.accesses if not access.write}
    reads |= {backward.storage_of[slot] for slot in backward.outputs}
    uncounted = {
        ref.storage
        for step in forward.steps
        if step.call is not None and not getattr(getattr(step.func, "_schema", None), "is_mutable", False)
        for ref in forward.program.calls[step.call].writes
    }
    written = {ref.storage for call in backward.program.calls for ref in call.writes}
    return tuple(
        (backward.program.storages[home].name or "a tensor beside the model", tensor)
        for slot, tensor in backward.given.items()
        if (home := backward.storage_of[slot]) in reads - written
        and forward.storage_of[slot] not in uncounted
        and not tensor.is_inference()
    )


def _recorded(recording: Recording, inputs: Sequence[torch.Tensor], model: _Issued) -> Recorded:
    """Make a ``Recorded`` of one half."""
    signature = Signature(tuple(inputs), {})
    return Recorded(model, signature, recording, build_graph(recording.program), trained=True)


@dataclass(frozen=True, slots=True)
class _Issued:
    """What a half computes: calls of a recording, issued in program order, as the model would.

    Args:
        recording: its outputs are those of the half.
        calls: how many of its calls, from the first.
        before: inputs that precede those of the half.
        after: inputs that follow them.
        joint: whose state such a run leaves as it was; None: the caller looks after it.
        random: state of the device's random numbers from which to start; None: as it is.
    """

    recording: Recording
    calls: int
    before: Sequence[torch.Tensor] = ()
    after: Sequence[torch.Tensor] = ()
    joint: Recorded | None = None
    random: torch.Tensor | None = None

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        device = (*self.before, *inputs)[0].device
        issuer = Issuer(self.recording, [*self.before, *inputs, *self.after])
        with state_kept(self.joint) if self.joint else nullcontext(), issuing(device.type):
            if self.random is not None:
                torch.cuda.set_rng_state(self.random, device)
            for call in range(self.calls):
                issuer.issue(call)
            # In eager some operators keep on the host what a capture keeps on the device: seeds of dropout masks.
            return [one.to(device) for one in issuer.outputs()]


def _unlike_eager(joint: Recorded, forward: Executable, backward: Backward, count: int) -> str:
    """Say how forward and backward replays together differ from eager; empty if they do not."""
    cases = eager_cases(joint)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with state_kept(joint), torch.no_grad():
            made = forward.run(inputs[:count], static=True)
            outputs = [one.clone() for one in made[: backward.outputs]]
            saved = () if backward.fixed else (*made[backward.outputs :], *(inputs[at] for at in backward.saved_inputs))
            found = backward.executable.run([*inputs[count:], *saved], static=True)
            return [*outputs, *(one.clone() for one in found)]

    def judged(cases: Cases) -> EqualityCheck:
        return check_equality(
            "forward and backward", run, cases.eager, lowest=cases.lowest, perturbed=cases.moved, names=cases.names
        )

    check = judged(cases)
    if check.differs:
        check = judged(eager_cases(joint, thorough=True))
    return f"replays of forward and backward are not what eager computes: {check.reason}" if check.differs else ""
