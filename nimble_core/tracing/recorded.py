"""Turn a model and its inputs into a recording that is known to be static."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nimble_core.ir.call_graph import CallGraph, build_graph
from nimble_core.scheduling.memory_planner import ALIGNMENT, Lent
from nimble_core.scheduling.memory_requirements import SMALL_NBYTES
from nimble_core.torch_compat.cuda import clear_cublas_workspaces
from nimble_core.tracing.operator_traits import owned_tensors
from nimble_core.tracing.provenance import memory_explained
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recording_contexts import announced, following
from nimble_core.tracing.rng_state import TORCH, RandomStates, random_state_kept, seed_otherwise
from nimble_core.tracing.side_effects import Saved, after_a_run
from nimble_core.tracing.signature import Signature, require_initialised, require_plain
from nimble_core.tracing.static_check import (
    changed_constant,
    check_static,
    identical,
    on_other_values,
    other_values,
)
from nimble_core.tracing.step_wrapper import Around
from nimble_core.tracing.torchscript import forget_compiled
from nimble_core.utils.errors import CaptureError, DeviceError, InputError, NimbleError, NotStaticError
from nimble_core.utils.gc_pause import collector_paused
from nimble_core.utils.locks import free_after_fork

if TYPE_CHECKING:
    from nimble_core.ir.program import Program
    from nimble_core.tracing.folded_weights import Folded
    from nimble_core.tracing.recording import Recording, Rewritten


__all__ = [
    "MATERIALISE",
    "Lender",
    "Recorded",
    "Records",
    "Stopwatch",
    "check_inputs",
    "may_be_spoilt",
    "preparing",
    "record_static",
    "require_callable",
    "require_local",
    "state_kept",
    "whole_note",
    "written_or_returned",
]

_OUT_OF_SIGHT = "a value was computed or changed outside of torch (numpy, Python numbers, DLPack, C++)"


_PREPARING = free_after_fork(threading.RLock())


Step = Callable[[str], AbstractContextManager[Any]]


class Records(Protocol):
    """What recording a model needs of a ``Device``."""

    kind: str
    """``"cuda"``, ``"cpu"`` or ``"fake"``."""

    def record(
        self,
        model: Callable[..., Any],
        signature: Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rewritten: Rewritten | None = None,
        *,
        traced: bool = True,
    ) -> Recording:
        """One recording of the model, or of what was rewritten from it. Raises CaptureError.

        Not ``traced``, it does not say what the calls ask of the allocator (``Recording.asks``), and takes less time
        where that has to be asked after each call.
        """


@dataclass(slots=True)
class Stopwatch:
    """Times named steps, as ``with watch("record"):``; ``seconds`` keeps them in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside under ``name``; the same name adds up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Lender:
    """Memory that what runs next may overwrite. Tensors in it with storages of their own share memory with no others.

    Args:
        memory: bytes on the device, of an executable that stays open.
        kept: ``(offset, bytes)`` of what has to stay as it is.
    """

    memory: torch.Tensor
    kept: tuple[tuple[int, int], ...] = ()

    def to(self, recording: Recording) -> Lent:
        """Return what ``recording`` reads of it and may then overwrite: no positions, which lead elsewhere."""
        program, start = recording.program, self.memory.data_ptr()
        stays = written_or_returned(program)
        spans: set[tuple[int, tuple[int, int]]] = set()
        for slot, tensor in recording.given.items():
            home, memory = recording.storage_of[slot], tensor.untyped_storage()
            offset, nbytes = memory.data_ptr() - start, memory.nbytes()
            if nbytes and offset >= 0 and offset + nbytes <= self.memory.nbytes:
                spans.add((home, (offset, nbytes)))
                if not may_be_spoilt(tensor) or program.storages[home].nbytes != nbytes or offset % ALIGNMENT:
                    stays.add(home)
        return Lent(
            nbytes=self.memory.nbytes,
            homes=tuple(sorted((home, span[0]) for home, span in spans if home not in stays)),
            kept=tuple(sorted({*self.kept, *(span for home, span in spans if home in stays)})),
            least_nbytes=SMALL_NBYTES + 1,
        )


def written_or_returned(program: Program) -> set[int]:
    """Return storages that calls write or that are outputs: the program must not overwrite them otherwise."""
    written = {ref.storage for call in program.calls for ref in call.writes}
    return written | {ref.storage for ref in program.outputs}


def may_be_spoilt(tensor: torch.Tensor) -> bool:
    """Return whether arbitrary values in it keep calls within their memory: it holds no positions."""
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """A model on example inputs: its recording and hazards.

    Args:
        model: the user's.
        signature: of the inputs.
        recording: of the model, or of what was rewritten from it.
        graph: hazards between its calls.
        folded: constants that the recording reads and that depend on the model's weights; None if there are none.
        eager: the recording of the model itself, where this is one of what was rewritten from it.
        trained: whether parameters change from run to run: constants made of them would be stale at once.
        lender: memory of an executable that always runs in between, which runs of this may use up.
        copied_out: results, the first so many, that are copied before anyone sees them: they may have any strides.
        copied_in: inputs, the first so many, that are copied into buffers which nothing else reads: what is made of the
            recording may ask for more than they are, zeros, so that they lie in the corner of their buffers.
        said: what the model does in Python that replays do not, in words.
        kernels: digest of the program and of the code of its kernels; empty for eager's, and where that is not known.
    """

    model: Callable[..., Any]
    signature: Signature
    recording: Recording
    graph: CallGraph
    folded: Folded | None = None
    eager: Recorded | None = None
    trained: bool = False
    lender: Lender | None = None
    copied_out: int = 0
    copied_in: int = 0
    said: tuple[str, ...] = ()
    kernels: str = ""

    @property
    def whole(self) -> bool:
        """Whether the Program is incomplete, so that only the module as a whole can be captured."""
        return self.recording.unseen > 0


@contextmanager
def preparing(model: Callable[..., Any], timeout_s: float = -1.0) -> Iterator[None]:
    """Let one preparation run at a time: it restores the process's random state, and captures exclude each other.

    At the end cuBLAS's workspaces are freed, 32 MiB a stream on a large GPU: replays have their own. So are autocast's
    casts of weights, which the user's region around this would go on using after a write that it does not notice.

    Args:
        model: what is prepared.
        timeout_s: how long to wait for others; below 0: until they are done.

    Raises:
        DeviceError: others took longer, or memory ran out.
    """
    if not _PREPARING.acquire(timeout=timeout_s):
        raise DeviceError(
            f"another thread was preparing or comparing a model for over {timeout_s:g} s", fix="try again after it"
        )
    try:
        with memory_explained(model):
            yield
    finally:
        if torch.cuda.is_initialized():
            clear_cublas_workspaces()
        torch.clear_autocast_cache()
        _PREPARING.release()


MATERIALISE = "tensors on meta hold no values: model.to_empty(device='cpu'), load its weights, and make inputs there"


def require_callable(model: object) -> None:
    """Raise InputError unless ``model`` is a module or another callable (a class does not count)."""
    if not callable(model) or isinstance(model, type):
        raise InputError(
            f"expected a torch.nn.Module or a function, given {type(model).__name__}"
            + (f" {model.__name__} itself" if isinstance(model, type) else ""),
            fix="pass an instance: model = Model(); prepare or compare that",
        )


def require_local(model: object) -> None:
    """Raise InputError for a module that shares its gradients with other processes or devices, through hooks."""
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise InputError(
            f"{type(model).__name__} shares gradients in hooks, which a replay passes by",
            fix="wrap the prepared module: DistributedDataParallel(Nimble(model).prepare(x, training=True))",
        )


def check_inputs(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Signature of the inputs. Raises InputError for no model, no inputs, mixed devices, tensors of other classes."""
    require_callable(model)
    signature = Signature(args, kwargs, model.input_names if isinstance(model, Around) else ())
    for tensor, path in zip(signature.tensors, signature.paths, strict=True):
        require_plain(tensor, path)
        for kind, lazy in (("conj", tensor.is_conj()), ("neg", tensor.is_neg())):
            if lazy:
                raise InputError(
                    f"{path} is a lazy view of another tensor (.is_{kind}() is True)",
                    fix=f"pass .resolve_{kind}() of it",
                )
    for name, parameter in getattr(model, "named_parameters", lambda: ())():
        require_initialised(name, parameter)
        if parameter.device != signature.device:
            raise InputError(
                f"mixed devices: parameter {name} is on {parameter.device}, {signature.paths[0]} on {signature.device}",
                fix=MATERIALISE
                if parameter.is_meta or signature.device.type == "meta"
                else f"model.to({str(signature.device)!r}), or move the inputs to {parameter.device}",
            )
    return signature


def record_static(
    device: Records,
    model: Callable[..., Any],
    signature: Signature,
    *,
    strict: bool,
    step: Step,
) -> Recorded:
    """Record twice, on other input values the second time, and build the hazards.

    Raises:
        NotStaticError: the recordings differ.
        CaptureError: a call that cannot be captured; under ``strict`` also launches that were not seen.
    """
    with collector_paused():  # no decorator, whose frame would be taken for the user's
        with step("record"):
            recording, refused = _record_as_eager(device, model, signature)
            if recording.unseen and forget_compiled(model):  # kernels of TorchScript's own may be what was not seen
                recording, refused = _record_as_eager(device, model, signature)
        with step("record again"):

            def again(values: Sequence[torch.Tensor]) -> Recording:
                other_args, other_kwargs = signature.arguments(values)
                generators, draws = recording.generators, recording.draws
                with random_state_kept(signature.device, generators, draws), announced(refused is not None):
                    seed_otherwise(signature.device, generators, draws)
                    with following(RandomStates(generators) if TORCH in draws else None):
                        return device.record(model, Signature(other_args, other_kwargs), other_args, other_kwargs)

            others, second = on_other_values(again, signature.tensors)
            check_static(recording, second)
            recording = _hold_to_seen(device, recording, second)
            if recording.handed_out and not recording.unseen:
                recording = _hold_to_contrary(device, recording, again, signature.tensors)
            if not (recording.unseen and device.kind != "cuda"):  # else the model itself is called
                _hold_to_next(recording, model, signature, again, others)
            # Of the second alone: the first run may have asked for what libraries keep from then on.
            recording = replace(recording, asks=second.asks)
        if recording.unseen and strict:
            if device.kind == "cuda":
                what = f"{recording.unseen} launches come from no call that was seen"
                done = "captures the module as a whole, on one stream"
            else:
                what = f"{_OUT_OF_SIGHT}, which a replay does not repeat"
                done = "calls the module as it is; or compute it with torch"
            raise CaptureError(what, where=recording.unseen_where, fix=f"Options(strict=False) {done}")
        # The model that is called as it is does in Python what it always does.
        said = () if recording.unseen and device.kind != "cuda" else recording.program.notes
        branch = (
            (f"a replay takes the branch that the model keeps for captures: in eager {refused.what} ({refused.where})",)
            if refused
            else ()
        )
        recording = replace(recording, program=replace(recording.program, notes=(*said, *branch)))
        with step("hazards"):
            graph = build_graph(recording.program)
        trained = any(call.phase == "backward" for call in recording.program.calls)
        return Recorded(model, signature, recording, graph, trained=trained, said=said)


def _record_as_eager(
    device: Records, model: Callable[..., Any], signature: Signature
) -> tuple[Recording, CaptureError | None]:
    """Record eager's branch if it can be captured, else the one that libraries keep for captures; untraced.

    Returns:
        The recording, and why eager's branch was refused; None if it was not.
    """
    try:
        with announced(False):
            return device.record(model, signature, *signature.arguments(), traced=False), None
    except CaptureError as error:
        refused = error
    with announced(True):
        return device.record(model, signature, *signature.arguments(), traced=False), refused


def _hold_to_seen(device: Records, recording: Recording, second: Recording) -> Recording:
    """Refuse, or on the host mark as incomplete, a recording with a value computed outside of torch."""
    where = "" if recording.unseen else changed_constant(recording, second)
    if not where:
        return recording
    if device.kind == "cuda":
        raise NotStaticError(
            "a value that was computed outside of torch changes from run to run",
            where=where,
            fix="compute it with torch on the device, or pass it as an input",
        )
    return replace(recording, unseen=1, unseen_where=f"before {where}")


def _hold_to_contrary(
    device: Records,
    recording: Recording,
    again: Callable[[Sequence[torch.Tensor]], Recording],
    tensors: Sequence[torch.Tensor],
) -> Recording:
    """Record a model that hands memory out once more, on contrary values: similar ones may hide what is read there."""
    try:
        third = again(other_values(tensors, how="contrary"))
    except NimbleError:
        raise
    except Exception:  # which says nothing about values that the model takes
        return replace(recording, unseen=1, unseen_where=recording.handed_out)
    check_static(recording, third)
    return _hold_to_seen(device, recording, third)


def _hold_to_next(
    recording: Recording,
    model: Callable[..., Any],
    signature: Signature,
    again: Callable[[Sequence[torch.Tensor]], Recording],
    others: Sequence[torch.Tensor],
) -> None:
    """Refuse a model whose next run computes something else because of an attribute that this one changed.

    What a model makes in its first run and finds there later (a cache of masks, say) may be made by each replay.
    """
    if recording.not_carried_on:
        raise recording.not_carried_on
    if not recording.counters:
        return
    with after_a_run(model, *signature.arguments()):
        later = again(others)
    if later.not_carried_on:
        raise later.not_carried_on
    try:
        check_static(recording, later)
    except NimbleError as error:
        if _first_run_goes_for_all(recording, model, signature, others):
            return
        name = recording.counters[0].rpartition(".")[2]
        raise NotStaticError(
            f"the model is not static: a run changes {', '.join(recording.counters[:3])}, and the next one computes "
            "something else because of that; replays would go on with the first value",
            where=error.where,
            fix=f"keep it in a buffer that is written in place (register_buffer({name!r}, torch.tensor(0)), "
            f"self.{name}.add_(1)), or pass it as an input",
        ) from error


def _first_run_goes_for_all(
    recording: Recording, model: Callable[..., Any], signature: Signature, others: Sequence[torch.Tensor]
) -> bool:
    """Whether a second run computes the same with the attributes that the first found, as a replay does."""
    program = recording.program
    written = {program.storages[ref.storage].name for call in program.calls for ref in call.writes}

    def second(*, attributes: bool) -> list[torch.Tensor]:
        with (
            random_state_kept(signature.device, recording.generators, recording.draws),
            after_a_run(model, *signature.arguments(), attributes=attributes),
            after_a_run(model, *signature.arguments(others)) as result,
        ):
            state = [tensor for _, name, tensor in owned_tensors(model) if name in written]
            return [tensor.detach().clone() for tensor in (*flatten(result)[0], *state)]

    same = partial(identical, any_order=signature.device.type != "cpu")
    eager, replayed = second(attributes=True), second(attributes=False)
    return len(eager) == len(replayed) and all(map(same, eager, replayed))


def whole_note(device: Records, recorded: Recorded) -> str:
    """Say why the model is not replayed call by call, and what is done instead."""
    recording = recorded.recording
    if device.kind == "cuda":
        done, why = "captured as a whole, on one stream", f"{recording.unseen} launches come from no call that was seen"
    else:
        done, why = "called as it is", _OUT_OF_SIGHT
    return f"the model is {done}: {why} ({recording.unseen_where})"


@contextmanager
def state_kept(recorded: Recorded) -> Iterator[None]:
    """Restore what replays inside write: parameters, buffers, example inputs, lent memory, random state.

    Replays run on the model's own tensors: BatchNorm in training mode updates its statistics.
    """
    recording = recorded.recording
    written = {ref.storage for call in recording.program.calls for ref in call.writes}
    live = [tensor for slot, tensor in recording.given.items() if recording.storage_of[slot] in written]
    live += [recorded.signature.tensors[position] for position in recording.written_inputs]
    live += [recorded.lender.memory] if recorded.lender else []
    saved = [Saved.of(tensor) for tensor in live]
    with random_state_kept(recorded.signature.device, recording.generators, recording.draws):
        try:
            yield
        finally:
            for one in saved:
                one.restore()
