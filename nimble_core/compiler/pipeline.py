"""Other kernels for the same model: lift, rewrite, split off constants, compile, record again.

What comes out is a ``Recorded`` like the eager one, whose calls stand for eager calls. Everything after it (hazards,
policies, memory, capture, checks) is the same.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.attribution import attributed
from nimble_core.compiler.fixed_memory import with_fixed_memory
from nimble_core.compiler.inductor import GeneratedCode, compile_graph
from nimble_core.compiler.passes.channels_last import (
    convolutions_alone,
    keep_strides,
    results_laid_out,
    takes_windows,
    to_channels_last,
)
from nimble_core.compiler.passes.conv_algorithms import choose_forms, contiguous_is_faster
from nimble_core.compiler.passes.crop_kernels import crop_kernels
from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.dropout_seeds import bring_seeds
from nimble_core.compiler.passes.fold_batchnorm import affine_norms, fold_affine
from nimble_core.compiler.passes.gemv import row_products_as_sums
from nimble_core.compiler.passes.merge_siblings import merge_siblings
from nimble_core.compiler.passes.pad_matmul import pad_products
from nimble_core.compiler.passes.partition import cut_before
from nimble_core.compiler.passes.pooling import choose_pools
from nimble_core.compiler.passes.rng import draws_apart
from nimble_core.compiler.passes.split_backward import split_backward
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.rerecord import tracked
from nimble_core.compiler.to_fx import calls_of, draws, lift, pinned, reference_of
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.program import EAGER_CALL, Fuse, KernelChoice, Origin, Program, Role
from nimble_core.runtime.device import Device
from nimble_core.scheduling.saved_plan import Plan, fingerprint
from nimble_core.torch_compat.dispatch import OpOverload
from nimble_core.tracing.folded_weights import Folded
from nimble_core.tracing.kept_operators import kept_form
from nimble_core.tracing.kernel_launches import Relaunch
from nimble_core.tracing.operator_traits import fills
from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.tracing.recording import Provenance, Recording, Rewritten
from nimble_core.tracing.recording_contexts import no_autocast
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.strides import widened
from nimble_core.utils.errors import CaptureError, NimbleError, first_line

__all__ = ["compile_ahead", "convolutions_of_step", "follow", "fuse"]

Step = Callable[[str], AbstractContextManager[Any]]
Run = Callable[..., Sequence[torch.Tensor]]


def fuse(
    device: Device,
    recorded: Recorded,
    kind: Fuse,
    *,
    measure: bool = True,
    measure_s: float = math.inf,
    thorough: bool = False,
    choices: Collection[KernelChoice] | None = None,
    step: Step,
) -> Recorded:
    """Make other kernels for the model of ``recorded``.

    Args:
        device: where it runs.
        recorded: the eager recording.
        kind: ``"library"``: calls of vendor libraries that do several eager calls at once; ``"inductor"``: compiled.
        measure: time alternatives; otherwise those that are usually fastest are taken.
        measure_s: for how long; then the same goes for what is left.
        thorough: let the compiler time kernels too.
        choices: made earlier for this program, to be repeated; None: measure.
        step: times the steps.

    Raises:
        CaptureError: it cannot be rewritten, compiled or run, or a launch was not seen; says why.
        DeviceError: out of memory.
    """
    decisions = Decisions(
        device.call_times_ns if measure and choices is None else None,
        None if choices is None else frozenset(choices),
        time.perf_counter() + measure_s,
    )
    try:
        # Casts were recorded as calls: around these, autocast would cast what its user computes in full precision.
        # And compiled kernels write running statistics where no dispatcher sees it.
        with no_autocast(recorded.signature.device.type), state_kept(recorded):
            return _fused(device, recorded, kind, decisions, thorough=thorough, step=step)
    except NimbleError:
        raise
    except Exception as error:  # of operators and compiled code, on calls that the model itself never makes
        raise CaptureError(
            f"the {kind} kernels do not run: {type(error).__name__}: {first_line(error)}", fix='Options(fuse="none")'
        ) from error


def compile_ahead(
    device: Device, recorded: Recorded, choices: Collection[KernelChoice] | None
) -> tuple[KernelChoice, ...]:
    """Compile what ``fuse`` will then find in Inductor's cache on disk, without running the model or measuring.

    Weights are read. For another thread than the one that calls the model.

    Args:
        device: where it runs.
        recorded: the eager recording; it draws no random numbers.
        choices: as of ``fuse``; None: take what is usually fastest.

    Returns:
        The choices to give ``fuse``.

    Raises:
        CaptureError: it cannot be rewritten or compiled.
    """
    decisions = Decisions(given=None if choices is None else frozenset(choices))
    with no_autocast(recorded.signature.device.type), torch.no_grad():
        module, _, signature = _lowered(device, recorded, decisions, compiled=True)
        _compiled(module, recorded, signature.tensors, GeneratedCode(), thorough=False)
    return tuple(decisions.made)


def follow(device: Device, recorded: Recorded, plan: Plan, *, thorough: bool = False, step: Step) -> Recorded:
    """Return the program that ``plan`` schedules: ``recorded``, or made of it as when the plan was made.

    Raises:
        CaptureError, DeviceError: as ``fuse``.
    """
    if plan.fuse == "none":
        return recorded
    return fuse(device, recorded, plan.fuse, thorough=thorough, choices=plan.kernels, step=step)


def _fused(
    device: Device, recorded: Recorded, kind: Fuse, decisions: Decisions, *, thorough: bool, step: Step
) -> Recorded:
    eager = recorded.recording
    with step(f"rewrite for {kind}"), device.libraries_tuned():
        module, folded, signature = _lowered(device, recorded, decisions, compiled=kind == "inductor")
    code = GeneratedCode()
    with step("compile" if kind == "inductor" else "warm up library calls"), device.libraries_tuned():
        if kind == "inductor":
            run, provenance = _compiled(module, recorded, signature.tensors, code, thorough=thorough)
        else:
            run, provenance = tracked(module, eager.program)
        device.warm_up(run, signature.tensors, {})
    constants: list[tuple[Role, str, torch.Tensor]] = [
        ("constant", f"folded {number}", one) for number, one in enumerate(folded.constants if folded else ())
    ]
    rewritten = Rewritten(kind, run, provenance, [*_owned(eager), *constants])
    with step(f"record {kind}"), device.libraries_tuned():
        recording = device.record(recorded.model, signature, (), {}, rewritten)
    _require_same_results(kind, recording, recorded)
    program = replace(attributed(recording.program, eager.program), choices=tuple(decisions.made))
    recording = replace(recording, program=program, output_structure=eager.output_structure)
    graph = build_graph(program)
    kernels = code.digest(fingerprint(program, graph))
    return replace(recorded, recording=recording, graph=graph, folded=folded, eager=recorded, kernels=kernels)


def _lowered(
    device: Device, recorded: Recorded, decisions: Decisions, *, compiled: bool
) -> tuple[fx.GraphModule, Folded | None, Signature]:
    """Return the rewritten graph, the constants that it reads, and its inputs."""
    module = _rewritten(device, recorded, decisions, compiled=compiled)
    folded = None if recorded.trained else split_constants(module, _given_names(recorded.recording))
    return module, folded, _widened(recorded.signature, module)


def _rewritten(device: Device, recorded: Recorded, decisions: Decisions, *, compiled: bool) -> fx.GraphModule:
    """Lift a recording and rewrite it, for a compiler or for libraries."""
    if recorded.trained:
        return _rewritten_step(device, recorded, decisions, compiled=compiled)
    where, on_cuda = recorded.signature.device, device.kind == "cuda"
    module = _lifted(recorded, decisions, compiled=compiled)
    crop_kernels(module)
    affine_norms(module)
    share_equal(module)
    channels_last = on_cuda and not contiguous_is_faster(module, where, decisions, compiled=compiled)
    channels_last = channels_last and to_channels_last(module) > 0
    if not takes_windows(module):  # siblings become slices of one result
        merge_siblings(module, where, decisions, convolutions=compiled)
    if on_cuda:
        pad_products(module, where, decisions, compiled=compiled, constant=True)
    if compiled:
        row_products_as_sums(module, where, decisions)
    elif channels_last:
        choose_pools(module, where, decisions)
    if on_cuda or not compiled:  # on the host the compiler knows no library calls
        choose_forms(module, where, decisions, channels_last=channels_last, compiled=compiled)
    if compiled:
        share_equal(module)  # inputs that several convolutions want padded
    else:
        fold_affine(module)
    keep_strides(module)
    return module


def _rewritten_step(device: Device, recorded: Recorded, decisions: Decisions, *, compiled: bool) -> fx.GraphModule:
    """Lift and rewrite a training step, or half of one, channels last if that is faster."""
    module, turned = (_lifted_step(recorded, decisions, compiled=compiled) for _ in range(2))
    where, inputs = recorded.signature.device, recorded.signature.tensors
    whole = any(call.phase == "backward" for call in recorded.recording.program.calls)

    def layouts() -> list[Callable[[], object]]:
        if not (compiled and whole):  # the forward alone converts what it keeps for a backward
            return [lambda: module(*inputs), lambda: turned(*inputs)]
        # The operators between convolutions can decide which layout is faster, and the compiler makes others of them.
        return _alone(module, turned, where)

    if to_channels_last(turned):
        turned.recompile()
        wanted = decisions.second_is_faster("step", layouts)
        first = next(node for node in turned.graph.nodes if node.target is torch.ops.aten.convolution.default)
        if decisions.take(first, "channels last", wanted=wanted):
            module = turned
    if device.kind == "cuda":
        pad_products(module, where, decisions, compiled=compiled, constant=False, copied_in=recorded.copied_in)
    return module


def convolutions_of_step(recorded: Recorded) -> list[Callable[[], object]]:
    """Make functions that run the convolutions of a training step alone: as they are, and channels last.

    Returns:
        Both, or nothing if the step cannot be rewritten channels last.
    """
    module, turned = (_lifted_step(recorded, Decisions(), compiled=False) for _ in range(2))
    return _alone(module, turned, recorded.signature.device) if to_channels_last(turned) else []


def _alone(module: fx.GraphModule, turned: fx.GraphModule, where: torch.device) -> list[Callable[[], object]]:
    return [convolutions_alone(one, where, channels_last=one is turned) for one in (module, turned)]


def _lifted_step(recorded: Recorded, decisions: Decisions, *, compiled: bool) -> fx.GraphModule:
    module = _lifted(recorded, decisions, compiled=compiled)
    bring_seeds(module)
    split_backward(module)
    crop_kernels(module)
    keep_strides(module, exactly=True, free=recorded.copied_out)
    module.recompile()
    return module


def _lifted(recorded: Recorded, decisions: Decisions, *, compiled: bool) -> fx.GraphModule:
    module = lift(with_fixed_memory(recorded.recording, recorded.signature.device))
    _keep_calls(module, decisions)
    if compiled:
        _refuse_opaque(module, recorded.recording.program)
    return module


def _keep_calls(module: fx.GraphModule, decisions: Decisions) -> None:
    """Put eager calls that were chosen to run as they are out of reach of rewrites and compilers."""
    for node in module.graph.nodes:
        may_be_kept = calls_of(node) and isinstance(node.target, OpOverload) and node.all_input_nodes
        if may_be_kept and not pinned(node) and decisions.take(node, EAGER_CALL, wanted=False):
            node.target = kept_form(node.target, node.args) or node.target


def _refuse_opaque(module: fx.GraphModule, program: Program) -> None:
    """Raise CaptureError for what Inductor cannot look into, or computes otherwise."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten._reshape_alias.default:
            raise CaptureError(
                "the model takes a window by its strides (as_strided), and Inductor chooses strides of its own",
                fix='slice and transpose instead, or Options(fuse="library")',
            )
        if isinstance(node.target, Relaunch):
            raise CaptureError(
                "the model launches kernels past torch's dispatcher, which Inductor cannot take into a graph",
                fix='Options(fuse="library"), or wrap them with torch.library.triton_op',
            )
        if node.target is torch.ops.aten.bernoulli.default:
            raise CaptureError(
                "the model draws with a probability for each element (torch.bernoulli), and Inductor draws otherwise",
                fix='torch.rand_like(p) < p, or Options(fuse="library")',
            )
        if _draws_into_part(node, program):
            raise CaptureError(
                "the model draws random numbers into a part of a tensor, which Inductor leaves out if nobody reads it",
                fix='draw a tensor of their own and copy it, or Options(fuse="library")',
            )


def _draws_into_part(node: fx.Node, program: Program) -> bool:
    """Whether a node fills memory with random numbers of which the graph also holds other parts."""
    if not draws(node) or not pinned(node) or not fills(node.target):
        return False
    filled = reference_of(node.all_input_nodes[0])
    return filled is not None and program.storages[filled.storage].role == "intermediate"


def _widened(signature: Signature, module: fx.GraphModule) -> Signature:
    """Give inputs the padding that the graph asks for."""
    wanted = [reference_of(node) for node in module.graph.nodes if node.op == "placeholder"]
    tensors = [
        one if ref is None else widened(one, ref.sizes) for one, ref in zip(signature.tensors, wanted, strict=True)
    ]
    same = all(map(operator.is_, tensors, signature.tensors))
    return signature if same else Signature(tuple(tensors), {})


def _compiled(
    module: fx.GraphModule, recorded: Recorded, inputs: Sequence[torch.Tensor], code: GeneratedCode, *, thorough: bool
) -> tuple[Run, Provenance]:
    """Compile a graph to ``code``; calls that draw random numbers, and an optimizer's, stay as they are."""
    program = recorded.recording.program
    ahead, module = draws_apart(module, recorded.signature.device)
    updates = None
    last = next((node for node in module.graph.nodes if _updates(node, program)), None)
    if last is not None:
        module, updates = cut_before(module, last)
        keep_strides(module, exactly=True)
    stages = []
    if ahead is not None:
        stages.append(tracked(ahead, program))
        with torch.no_grad():
            inputs = ahead(*inputs)
    stages.append((compile_graph(module, inputs, thorough=thorough), code.provenance(module, program)))
    if recorded.trained:
        stages.append(tracked(results_laid_out(module, free=recorded.copied_out), program))
    if updates is not None:
        stages.append(tracked(updates, program))
    return _in_turn(stages)


def _in_turn(stages: Sequence[tuple[Run, Provenance]]) -> tuple[Run, Provenance]:
    """Run one stage after another, each on what the one before returned."""
    now = stages[0][1]

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        nonlocal now
        found: Sequence[torch.Tensor] = tensors
        for stage, of_stage in stages:
            now = of_stage
            found = stage(*found)
        return found

    def provenance(func: Any, frame: FrameType) -> tuple[tuple[Origin, ...], tuple[int, ...]]:
        return now(func, frame)

    return run, provenance


def _updates(node: fx.Node, program: Program) -> bool:
    """Whether a node belongs to the optimizer."""
    return any(program.calls[call].phase == "optimizer" for call in calls_of(node))


def _owned(recording: Recording) -> list[tuple[Role, str, torch.Tensor]]:
    """List parameters and buffers by role and name; half of a step does not know which are its module's."""
    homes = [(recording.program.storages[recording.storage_of[slot]], one) for slot, one in recording.given.items()]
    return [(home.role, home.name, one) for home, one in homes if home.role in ("parameter", "buffer")]


def _given_names(recording: Recording) -> dict[str, str]:
    """Names of the given tensors in the model, by their attribute in the lifted graph."""
    storages = recording.program.storages
    return {
        f"given_{slot}": storages[recording.storage_of[slot]].name or f"constant {slot}" for slot in recording.given
    }


def _require_same_results(kind: str, made: Recording, recorded: Recorded) -> None:
    """Raise CaptureError for unseen launches, and for results of other types or strides than eager's.

    Fused optimizers refuse gradients of other strides.
    """
    if made.unseen:
        raise CaptureError(
            f"{made.unseen} launches of the {kind} kernels come from no call that was seen",
            where=made.unseen_where,
            fix='Options(fuse="none")',
        )
    for at, (mine, theirs) in enumerate(zip(made.program.outputs, recorded.recording.program.outputs, strict=True)):
        different = ""
        if mine.dtype != theirs.dtype:
            different = f"is {mine.dtype}, eager's is {theirs.dtype}"
        elif recorded.trained and at >= recorded.copied_out and mine.strides != theirs.strides:
            different = f"has strides {mine.strides}, eager's has {theirs.strides}"
        if different:
            raise CaptureError(
                f"result {at} of the {kind} kernels {different}", fix='Options(fuse="none"), and report this model'
            )
