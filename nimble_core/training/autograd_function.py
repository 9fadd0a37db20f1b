"""Training as in eager: a prepared forward whose outputs carry a prepared backward.

``out = net(x); loss_fn(out, y).backward(); optimizer.step()``: forward and backward are replays of their own, made by
``prepare_training`` and joined here by an autograd function. What the forward saves stays where it is until the
backward has read it: on CUDA in the forward's own memory, so that there the next forward overwrites it.

Under ``backward()`` gradients of parameters without hooks go into ``.grad`` past autograd's accumulation, which would
copy or keep each of them singly. Everything else gets copies through autograd's graph: parameters with hooks, inputs,
and what ``torch.autograd.grad`` or ``backward(inputs=...)`` ask for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, cast, runtime_checkable

import torch

from nimble_core.autotune.autotune import Tuned
from nimble_core.runtime.device import Executable
from nimble_core.torch_compat.autograd import batched_or_wrapped, graph_is_kept, queue_callback, will_execute
from nimble_core.torch_compat.cuda import current_stream
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.recorded import Recorded
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.recording_contexts import autocast_name, autocast_type
from nimble_core.tracing.strides import copied, restrided
from nimble_core.training.gradient_accumulation import ACCUMULATING, accumulate, set_aside
from nimble_core.training.partial_backward import calls_only_for, draws_attention_masks, issued
from nimble_core.utils.errors import InputError

__all__ = ["Backward", "Fixed"]

_trained = attrgetter("requires_grad")
_hooks = attrgetter("_backward_hooks")
_state = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_DETACH = "detach outputs that are not trained on in the forward, or do not return them"
Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@runtime_checkable
class Fixed(Protocol):
    """An executable whose inputs and outputs always are at the same place."""

    buffers: list[torch.Tensor]
    outputs: list[torch.Tensor]

    @property
    def arena(self) -> torch.Tensor | None:
        """The memory of its calls, bytes; None if they have none of their own."""
        ...


@dataclass(slots=True, weakref_slot=True)
class _Pending:
    """A forward whose backward may still come."""

    done: bool = False


@dataclass(slots=True, weakref_slot=True)
class Backward:
    """What follows a prepared forward: replays its backward, and hands out the gradients.

    Args:
        tuned: what was found for it.
        plain: the same in eager's kernels.
        parameters: that get gradients, in the order of the backward's outputs; inputs follow.
        flags: every parameter, its name, and whether it required a gradient when it was prepared.
        leaves: positions of the inputs that may require gradients.
        leaves_present: those of them that get one.
        layouts: of each output of the model the strides that its copies have, as copies of eager's would.
        differentiable: which of them carry gradients.
        templates: tensors like these.
        reached: for each of these the gradients, by position, that it has a part in.
        functions: for each of these the outputs of autograd functions written in Python that it comes from, as numbers
            of the function and the output.
        saved_inputs: positions of inputs that the backward reads.
        fixed: whether what was saved lies in the forward's memory (CUDA), which the next forward overwrites.
        borrowed: positions of gradients that lie in memory of something else: copied before they are handed out.
        separately: captures the backward again, in memory of its own, for graphs that are kept; None where ``tuned``
            leaves what was saved alone anyway.
        repeated: outputs, by position, that share memory with an earlier one: on the host, too, they are copied, since
            in autograd's graph each output stands for itself.
        read: what the backward reads and others may write before it, by name: parameters, trained or not, buffers,
            constants.
        using_memory: held while the forward's memory is written, or read for a backward, so that no other thread's
            forward comes between a run and what belongs to it. On the host each forward has memory of its own, and
            nothing is held.
    """

    tuned: Tuned
    plain: Recording
    parameters: tuple[torch.Tensor, ...]
    flags: tuple[tuple[torch.Tensor, str, bool], ...]
    leaves: frozenset[int]
    leaves_present: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]
    differentiable: tuple[int, ...]
    templates: tuple[torch.Tensor, ...]
    reached: tuple[frozenset[int], ...]
    functions: tuple[frozenset[tuple[int, int]], ...]
    saved_inputs: tuple[int, ...]
    fixed: bool
    borrowed: tuple[int, ...]
    separately: Callable[[], Executable] | None = None
    repeated: frozenset[int] = frozenset()
    read: tuple[tuple[str, torch.Tensor], ...] = ()
    using_memory: AbstractContextManager[Any] = field(init=False)
    _names: tuple[str, ...] = field(init=False)
    _flagged: list[torch.Tensor] = field(init=False)
    _required: list[bool] = field(init=False)
    _separate: Executable | None = None
    _anchor: torch.Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    _anchor_node: torch.autograd.graph.Node | None = None
    _wanted_by: dict[tuple[bool, ...], frozenset[int]] = field(default_factory=dict)
    _zeros: dict[int, torch.Tensor] = field(default_factory=dict)
    _left_out: dict[frozenset[int], frozenset[int]] = field(default_factory=dict)
    _latest: weakref.ref[_Pending] | None = None
    _round: int = 0
    _closed: bool = False
    warned_of_casts: bool = False

    def __post_init__(self) -> None:
        self.using_memory = threading.RLock() if self.fixed else nullcontext()
        self._flagged = [parameter for parameter, _, _ in self.flags]
        self._required = [flag for _, _, flag in self.flags]
        names = {id(parameter): name for parameter, name, _ in self.flags}
        self._names = tuple(names[id(parameter)] for parameter in self.parameters)

    @property
    def outputs(self) -> int:
        """How many outputs the model has."""
        return len(self.layouts)

    @property
    def executable(self) -> Executable:
        """What it replays."""
        return self.tuned.best

    @property
    def recorded(self) -> Recorded:
        """The calls of that."""
        return self.tuned.recorded

    @property
    def device_type(self) -> str:
        """Where it runs."""
        return self.templates[0].device.type

    # -- the forward ---------------------------------------------------------------------------------------------------

    def unlike(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> str:
        """Say which tensor requires a gradient now and did not at preparation, or the reverse; empty if none."""
        if list(map(_trained, self._flagged)) != self._required:
            changed = (one for one in self.flags if one[0].requires_grad is not one[2])
            _, name, flag = next(changed)
            return f"parameter {name} was {'trained' if flag else 'frozen'} then, and is not now"
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad and position not in self.leaves:
                return (
                    f"{names[position]} required no gradient then, and does now; prepared with one that requires a "
                    "gradient (x.detach().requires_grad_()), it takes both"
                )
        return ""

    @property
    def pending(self) -> bool:
        """Whether the memory holds what a backward that may still come needs."""
        latest = self._latest() if self._latest is not None else None
        return latest is not None and not latest.done

    def attach(self, run: Run, tensors: Sequence[torch.Tensor], owner: object) -> list[torch.Tensor]:
        """Run the forward on ``tensors``; its outputs carry the backward, and keep ``owner``, which would close it."""
        # torch's own ``apply`` looks through all arguments for those of a transform that is over.
        apply = super(torch.autograd.Function, _Replay).apply
        with self.using_memory:
            return list(apply(self, run, owner, self._anchor, len(tensors), *tensors, *self.parameters))  # type: ignore[no-untyped-call]  # torch's has no types

    def own(self, made: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Take the model's outputs from what the forward makes, as tensors that belong to the caller."""
        outputs = made[: self.outputs]
        if not self.fixed:
            return tuple(one.clone() if at in self.repeated else one for at, one in enumerate(outputs))
        # The forward may have made them in other strides than eager's: the copy is where they are put right.
        return tuple(map(copied, outputs, self.layouts))

    def versions(self) -> list[int]:
        """Return version counters of what the backward reads; fused optimizers and ``.data`` raise none."""
        return [tensor._version for _, tensor in self.read]

    def overwrite(self) -> None:
        """Use the forward's memory for something else: no earlier backward may follow."""
        with self.using_memory:
            self._round += 1

    def begin(self) -> tuple[_Pending, int]:
        """Note that a forward was run: its backward may come, until the next forward."""
        pending = _Pending()
        self._latest = weakref.ref(pending)
        self._round += 1
        return pending, self._round

    def close(self) -> None:
        """Free what replays."""
        self._closed = True
        self.executable.close()
        self.separately = None
        if self._separate is not None:
            self._separate.close()
            self._separate = None

    # -- the backward --------------------------------------------------------------------------------------------------

    def end(self, pending: _Pending, number: int) -> None:
        """Note that the backward of a forward comes.

        Raises:
            InputError: what it needs is gone: another forward has overwritten it, or the engine was closed.
        """
        if self._closed:
            raise InputError(
                "the backward of a forward whose engine was closed since: by close(), or by prepare() for such inputs",
                fix="call backward() before that, or the forward again after it",
            )
        if self.fixed and number != self._round:
            raise InputError(
                "the backward of an earlier forward: a later one has overwritten what it needs, or a first try of it",
                fix="call backward() before the next forward, or run one of the two on the model itself",
            )
        pending.done = True

    def require_unwritten(self, before: list[int]) -> None:
        """Raise InputError for a write in place since the versions were ``before``."""
        versions = self.versions()
        if versions != before:
            name = next(name for (name, _), was, now in zip(self.read, before, versions, strict=True) if was != now)
            raise InputError(
                f"{name} was written between the forward and its backward, which reads it",
                fix="call backward() before optimizer.step(), and before other writes in place",
            )

    def replay(
        self, given: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Replay on gradients of the outputs; return gradients of parameters and inputs for autograd to hand on.

        Under ``backward()`` those of parameters without hooks go into ``.grad`` instead. With ``keep``, another
        backward of the same forward may follow.
        """
        inputs = [one if one is not None else self._zero(at) for at, one in enumerate(given)]
        wanted = self._wanted(given)
        alone = self._trained_alone()
        without = self._calls_left_out(given, wanted)
        executable = None if without else self._replaying(keep)
        # On CUDA gradients always are the same memory: what is in use there would be overwritten.
        mine = cast(Fixed, executable).outputs if self.fixed and executable is not None else ()
        with torch.no_grad(), ACCUMULATING if mine else nullcontext():
            aside: dict[int, torch.Tensor] = {}
            if executable is None:
                laid = (restrided(one, at.stride()) for one, at in zip(inputs, self.templates, strict=True))
                found = issued(self.plain, [*laid, *saved], self.device_type, without)
            else:
                if mine:
                    aside = set_aside(self.parameters, executable, mine)
                if executable is not self._separate and self.separately is not None:
                    self._round += 1  # what was saved is gone: no other try of this backward may follow
                found = list(executable.run([*inputs, *saved], static=True))
            # What follows is the host's, while the device is busy.
            for at in self.borrowed:
                found[at] = found[at].clone()
            taken = wanted & alone if self._everything_is_wanted() else frozenset[int]()
            with ACCUMULATING:
                accumulate(self.parameters, found, taken, aside)
        return [
            None if at in taken or at not in wanted else gradient.clone() if self.fixed else gradient
            for at, gradient in enumerate(found)
        ]

    def _replaying(self, keep: bool) -> Executable:
        """Return what replays; with ``keep`` one that leaves what was saved alone, which is made on first use."""
        if self.separately is None or not keep:
            return self.executable
        if self._separate is None:
            self._separate = self.separately()
        return self._separate

    def _wanted(self, given: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Gradients, by position, that these gradients of the outputs reach."""
        present = tuple(one is not None for one in given)
        if present not in self._wanted_by:
            reached = (one for one, there in zip(self.reached, present, strict=True) if there)
            self._wanted_by[present] = frozenset[int]().union(*reached)
        return self._wanted_by[present]

    def _trained_alone(self) -> frozenset[int]:
        """Parameters, by position, that require gradients, and have no hook that waits for them."""
        states = map(_state, self.parameters)
        return frozenset(at for at, (trained, early, late) in enumerate(states) if trained and not (early or late))

    def _everything_is_wanted(self) -> bool:
        """Whether this is ``backward()``, not a search for the gradients of some tensors."""
        if self._anchor_node is None:
            self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        return bool(will_execute(self._anchor_node))

    def _calls_left_out(self, given: Sequence[torch.Tensor | None], wanted: Collection[int]) -> frozenset[int]:
        """Find the calls that lead only to outputs without a gradient: eager does not run them.

        Where there is none, a replay does with zeros in place of these gradients what eager does without them.

        Raises:
            InputError: what eager would do is not known.
        """
        absent = frozenset(at for at, one in enumerate(given) if one is None)
        if not absent:
            return absent
        names = ", ".join(str(self.differentiable[at]) for at in sorted(absent))
        told = f"no gradient came for output {names}"
        for at, hooks in enumerate(map(_hooks, self.parameters)):
            if hooks and at not in wanted:
                raise InputError(
                    f"{told}, and {self._names[at]}, which only leads there, has a hook that would be called with None",
                    fix=f"{_DETACH}; or remove the hook",
                )
        if absent not in self._left_out:
            self._left_out[absent] = self._judged(absent, told)
        return self._left_out[absent]

    def _judged(self, absent: frozenset[int], told: str) -> frozenset[int]:
        present = frozenset(range(len(self.differentiable))) - absent
        led, other = (frozenset().union(*(self.functions[at] for at in some)) for some in (absent, present))
        if led - other:
            raise InputError(
                f"{told}, which an autograd function written in Python leads to: what its backward adds without a "
                "gradient is not known",
                fix=_DETACH,
            )
        found = calls_only_for(self.plain.program, len(self.templates), absent)
        if found and self.fixed and any(map(draws_attention_masks, self.plain.program.calls)):
            raise InputError(
                f"{told}, and this backward cannot run without what leads there: its attention with dropout keeps its "
                "seed in the replayed forward",
                fix=_DETACH,
            )
        if found:
            warn(f"{told}: this backward runs call by call, without what leads there alone. To replay it: {_DETACH}")
        return found

    def _zero(self, at: int) -> torch.Tensor:
        if at not in self._zeros:
            self._zeros[at] = torch.zeros_like(self.templates[at])
        return self._zeros[at]


def _warn_of_casts(half: Backward, casts: torch.dtype) -> None:
    """Warn, once, that a backward was called under autocast, which a replay is not."""
    if not half.warned_of_casts:
        half.warned_of_casts = True
        warn(
            f"backward() was called under torch.autocast to {autocast_name(casts)}: replayed, it casts nothing, as "
            "outside of it, where eager's would cast products that the forward left in float32. Call it after the with "
            "block"
        )


def _callers_stream_follows(device: torch.device) -> None:
    """Let the stream on which this backward was asked for wait, when it ends, for what was issued on this thread's.

    Autograd does so for gradients that it hands on itself.
    """
    stream_id, index, kind = current_stream(device.index)

    def follow() -> None:
        if current_stream(index)[0] != stream_id:
            issued = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)
            torch.cuda.current_stream(device).wait_stream(issued)

    queue_callback(follow)


class _Replay(torch.autograd.Function):
    """Joins the two replays in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, half: Backward, run: Run, owner: object, anchor: torch.Tensor, count: int, *rest: torch.Tensor
    ) -> Any:
        tensors = rest[:count]
        made = run(tensors)
        ctx.half, ctx.owner, ctx.count = half, owner, count
        ctx.pending, ctx.round = half.begin()
        ctx.before = half.versions()
        ctx.set_materialize_grads(False)
        outputs = half.own(made)
        # Autograd looks after what it saves: freed by the backward, refused if written meanwhile.
        saved = (anchor,) if half.fixed else (*made[half.outputs :], *(tensors[at] for at in half.saved_inputs))
        ctx.save_for_backward(*saved)
        still = [one for at, one in enumerate(outputs) if at not in half.differentiable]
        ctx.mark_non_differentiable(*still)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        half: Backward = ctx.half
        if torch.is_grad_enabled():
            raise InputError(
                "a replayed backward cannot be differentiated itself (create_graph=True)",
                fix="run this forward on the model itself",
            )
        if any(one is not None and batched_or_wrapped(one) for one in gradients):
            raise InputError(
                "gradients come in a batch (is_grads_batched=True, vectorize=True, vmap): a replayed backward takes "
                "one at a time",
                fix="jacobian(vectorize=False), or one backward after the other with retain_graph=True; or run this "
                "forward on the model itself",
            )
        casts = autocast_type(half.device_type)
        if casts is not None:
            _warn_of_casts(half, casts)
        saved = () if half.fixed and ctx.saved_tensors else ctx.saved_tensors
        keep = graph_is_kept()
        with half.using_memory:  # no other thread's forward may overwrite what this reads
            half.end(ctx.pending, ctx.round)
            half.require_unwritten(ctx.before)
            found = half.replay([gradients[at] for at in half.differentiable], saved, keep=keep)
        if half.device_type == "cuda":
            _callers_stream_follows(half.templates[0].device)
        if not keep:
            ctx.owner = None  # it may hold a result of this graph, which Python's collector does not see through
        parameters = len(half.parameters)
        leaves = dict(zip(half.leaves_present, found[parameters:], strict=True))
        ahead = (None,) * 5
        return *ahead, *(leaves.get(at) for at in range(ctx.count)), *found[:parameters]
