"""Training as in eager: a prepared forward whose outputs carry a prepared backward.

``out = net(x); loss_fn(out, y).backward(); optimizer.step()``: forward and backward are replays of their own, made by
``prepare_training`` and joined here by an autograd function. What the forward saves stays where it is until the
backward has read it: on CUDA in the forward's own memory, so that there the next forward overwrites it.

Gradients of parameters go into ``.grad`` past autograd's accumulation, which would copy or keep each of them singly:
where there is none yet the engine's own tensor becomes ``.grad``, and another one is added to. In autograd's graph are
only those with hooks, which get copies; ``autograd_hooks`` answers searches (``torch.autograd.grad``) for others.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.hooks import RemovableHandle

from nimble_core.autotune.autotune import Tuned
from nimble_core.ir.program import Call
from nimble_core.runtime.device import Executable
from nimble_core.torch_compat.autograd import (
    batched_or_wrapped,
    graph_is_kept,
    graph_task,
    queue_callback,
    will_execute,
)
from nimble_core.torch_compat.dispatch import foreach_add_
from nimble_core.tracing.autocast import autocast_name, autocast_type
from nimble_core.tracing.provenance import warn
from nimble_core.tracing.recorded import Recorded
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.strides import copied
from nimble_core.training.autograd_hooks import ACCUMULATING as _ACCUMULATING
from nimble_core.training.autograd_hooks import Behind, current_search, searches_are_answered
from nimble_core.training.missing_gradients import any_number, branch_of, issued_without, vanishing
from nimble_core.utils.errors import InputError

__all__ = ["Backward", "Fixed"]


_version = attrgetter("_version")
_gradient = attrgetter("grad")
_trained = attrgetter("requires_grad")
_hooks = attrgetter("_backward_hooks")
_late_hooks = attrgetter("_post_accumulate_grad_hooks")
_kind = attrgetter("dtype", "device", "shape")
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


class _Spared:
    """Stands in for a hook while backwards run that may hand it None: where no gradient comes, eager calls none.

    A gradient may still come from elsewhere in the same graph: that one it gets.
    """

    __slots__ = ("backwards", "hook")

    def __init__(self, hook: Callable[[torch.Tensor | None], Any]) -> None:
        self.hook = hook
        self.backwards = 0

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        if gradient is not None:
            return self.hook(gradient)
        gathered = _gathered(self.hook)
        if gathered is not None:
            queue_callback(partial(_tell_of_none, self.hook, gathered))
        return None


class _Sparing:
    """Hooks that are spared None until one backward ends.

    The engine calls this where the backward succeeds; where it fails, it lets go of it, which does the same. Another
    backward may spare the same hooks meanwhile, on any thread: who is last puts them back.
    """

    __slots__ = ("_held",)

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._held: list[tuple[dict[int, Any], int, _Spared]] = []
        with _ACCUMULATING:
            for table in filter(None, map(_hooks, parameters)):
                for key, hook in list(table.items()):
                    spared = hook if isinstance(hook, _Spared) else _Spared(hook)
                    spared.backwards += 1
                    table[key] = spared
                    self._held.append((table, key, spared))

    def __bool__(self) -> bool:
        return bool(self._held)

    def __call__(self) -> None:
        with _ACCUMULATING:
            while self._held:
                table, key, spared = self._held.pop()
                spared.backwards -= 1
                if not spared.backwards and table.get(key) is spared:
                    table[key] = spared.hook

    def __del__(self) -> None:
        self()


def _spare_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Until this backward ends, keep None from hooks of these."""
    sparing = _Sparing(parameters)
    if sparing:
        queue_callback(sparing)


def _callers_stream_follows(device: torch.device) -> None:
    """Let the stream on which this backward was asked for wait, when it ends, for what was issued on this thread's.

    Autograd does so for gradients that it hands on itself.
    """
    issued = torch.cuda.current_stream(device)

    def follow() -> None:
        callers = torch.cuda.current_stream(device)
        if callers != issued:
            callers.wait_stream(issued)

    queue_callback(follow)


def _gathered(hook: Callable[..., Any]) -> Mapping[int, object] | None:
    """What a hook of several tensors (``register_multi_grad_hook``) has gathered, by backward; None of other hooks."""
    if not inspect.isfunction(hook) or hook.__module__ != "torch.autograd.graph":
        return None
    return inspect.getclosurevars(hook).nonlocals.get("buffer")


def _tell_of_none(hook: Callable[[torch.Tensor | None], Any], gathered: Mapping[int, object]) -> None:
    """It waits for all tensors that autograd's graph leads to, a gradient or not; eager's leads to none of these."""
    if graph_task() in gathered:  # else no gradient came at all
        hook(None)


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
        saved_inputs: positions of inputs that the backward reads.
        fixed: whether what was saved lies in the forward's memory (CUDA), which the next forward overwrites.
        borrowed: positions of gradients that lie in memory of something else: copied before they are handed out.
        sparing: makes what replays without overwriting what was saved; None if ``tuned`` does not overwrite it either.
        shown: the outputs, by position, that are given out as they lie in the forward's memory; others are copied.
        guarded: positions of those whose memory the backward reads.
        repeated: outputs, by position, that share memory with an earlier one: on the host, too, they are copied, since
            in autograd's graph each output stands for itself.
        read: tensors that exist before the forward and that the backward reads, by name: parameters, trained or not,
            buffers and constants.
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
    saved_inputs: tuple[int, ...]
    fixed: bool
    borrowed: tuple[int, ...]
    sparing: Callable[[], Executable] | None = None
    shown: Mapping[int, torch.Tensor] = field(default_factory=dict)
    guarded: tuple[int, ...] = ()
    repeated: frozenset[int] = frozenset()
    read: tuple[tuple[str, torch.Tensor], ...] = ()
    _spare: Executable | None = None
    _anchor: torch.Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    _zeros: dict[int, torch.Tensor] = field(default_factory=dict)
    _latest: weakref.ref[_Pending] | None = None
    _round: int = 0
    _closed: bool = False
    _said: bool = False
    _node: Any = None
    _without: dict[frozenset[int], tuple[frozenset[int], bool]] = field(default_factory=dict)
    _hooked: tuple[frozenset[int], int] = (frozenset(), -1)
    using_memory: AbstractContextManager[Any] = field(init=False)
    _flagged: list[torch.Tensor] = field(init=False)
    _read: list[torch.Tensor] = field(init=False)
    _required: list[bool] = field(init=False)
    _all: frozenset[int] = field(init=False)
    _numbered: dict[int, torch.Tensor] = field(init=False)
    _memory: list[int] = field(init=False)
    _kinds: list[tuple[object, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.using_memory = threading.RLock() if self.fixed else nullcontext()
        self._flagged = [parameter for parameter, _, _ in self.flags]
        self._required = [flag for _, _, flag in self.flags]
        self._read = [tensor for _, tensor in self.read]
        self._all = frozenset[int]().union(*self.reached)
        self._numbered = dict(enumerate(self.parameters))
        self._memory = list(map(torch.Tensor.data_ptr, self.parameters))
        self._kinds = list(map(_kind, self.parameters))
        Behind.expect(self, self.parameters)

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

    def unlike(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> str:
        """What wants a gradient other than when this was prepared; empty if nothing."""
        if list(map(_trained, self._flagged)) != self._required:
            changed = (one for one in self.flags if one[0].requires_grad is not one[2])
            _, name, flag = next(changed)
            return f"parameter {name} was {'trained' if flag else 'frozen'} then, and is not now"
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad and position not in self.leaves:
                return f"{names[position]} required no gradient then, and does now"
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
        # Reducers of processes that train together look for parameters in the graph itself.
        alone = not _distributed() and searches_are_answered()
        linked = sorted(self.hooked()) if alone else range(len(self.parameters))
        reached = [self.parameters[at] for at in linked]
        with self.using_memory:
            self.renew()
            return list(apply(self, run, owner, self._anchor, linked, len(tensors), *tensors, *reached))  # type: ignore[no-untyped-call]  # torch's has no types

    def hooked(self) -> frozenset[int]:
        """Parameters, by position, with a hook that waits for their gradient."""
        registered = RemovableHandle.next_id  # read before hooks are: who registers meanwhile is noticed
        hooked, seen = self._hooked
        if hooked or registered != seen:
            waiting = zip(map(_hooks, self.parameters), map(_late_hooks, self.parameters), strict=True)
            hooked = frozenset(at for at, (early, late) in enumerate(waiting) if early or late)
            self._hooked = hooked, registered  # in one write, as several threads may look at once
        return hooked

    def behind(self, linked: Collection[int]) -> Behind | None:
        """Parameters that the graph does not lead to; None if it leads to all."""
        if len(linked) == len(self.parameters):
            return None
        tensors = {at: one for at, one in self._numbered.items() if at not in linked} if linked else self._numbered
        return Behind(tensors, self._anchor)

    def own(self, made: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The model's outputs among what the forward makes, as the caller's."""
        outputs = made[: self.outputs]
        if not self.fixed:
            return tuple(one.clone() if at in self.repeated else one for at, one in enumerate(outputs))
        # The forward may have made them in other strides than eager's: the copy is where they are put right.
        return tuple(
            one.detach() if at in self.shown else copied(one, self.layouts[at]) for at, one in enumerate(outputs)
        )

    def renew(self) -> None:
        """The forward is about to write what it has shown: who kept that for a backward is told so by autograd."""
        if self.shown:
            torch.autograd.graph.increment_version(list(self.shown.values()))

    def close(self) -> None:
        """Free what replays."""
        self._closed = True
        self.executable.close()
        self.sparing = None
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _replaying(self, keep: bool) -> Executable:
        """What replays, and leaves what was saved as it is if that is to be kept: made when it is first asked for."""
        if self.sparing is None or not keep:
            return self.executable
        if self._spare is None:
            self._spare = self.sparing()
        return self._spare

    def replay(
        self,
        given: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
        *,
        accumulate: bool,
        hooked: Collection[int],
        keep: bool,
    ) -> list[torch.Tensor | None]:
        """Replay on gradients of the outputs; gradients of inputs and parameters that are autograd's to hand on.

        With ``accumulate``, those of parameters that are not ``hooked`` go into ``.grad``. With ``keep``, another
        backward of the same forward may follow.
        """
        inputs = [one if one is not None else self._zero(at) for at, one in enumerate(given)]
        without = self._left_out(given, saved)
        executable = None if without else self._replaying(keep)
        # On CUDA gradients always are the same memory: what is in use there would be overwritten.
        mine = cast(Fixed, executable).outputs if self.fixed and executable is not None else ()
        with torch.no_grad(), _ACCUMULATING if mine else nullcontext():
            used = (
                [at for at, one in enumerate(map(_gradient, self.parameters)) if _same(one, mine[at])] if mine else []
            )
            # The last run, and what was added to its results, may be under way on another stream.
            with executable.paused() if executable is not None and used else nullcontext():
                before = [mine[at].clone() for at in used]
            if executable is None:
                found = issued_without(self.plain, [*inputs, *saved], without, self.templates[0].device.type)
            else:
                if executable is not self._spare and self.sparing is not None:
                    self._round += 1  # what was saved is gone: no other try of this backward may follow
                found = list(executable.run([*inputs, *saved], static=True))
            # What follows is the host's, while the device is busy.
            for at in self.borrowed:
                found[at] = found[at].clone()
            wanted = self.wanted(given)
            taken = self._taken(wanted, hooked) if accumulate else frozenset[int]()
            with _ACCUMULATING:
                self._keep(dict(zip(used, before, strict=True)), found, taken)
                self._accumulate(found, taken.difference(used))
        return [
            None if at in taken or at not in wanted else self._handed(gradient) for at, gradient in enumerate(found)
        ]

    def _left_out(self, given: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor]) -> frozenset[int]:
        """Calls that must not run on zeros for the gradients that there are not: see ``missing_gradients``.

        Raises:
            InputError: what is left would still add something of its own.
        """
        absent = frozenset(at for at, one in enumerate(given) if one is None)
        if not absent:
            return absent
        wanted = self.wanted(given)
        if absent not in self._without:
            self._without[absent] = self._judged(absent, wanted, saved)
        calls, sure = self._without[absent]
        if not sure:
            self._require_nothing_added(absent, wanted, saved, calls)
        return calls

    def _judged(
        self, absent: frozenset[int], wanted: frozenset[int], saved: Sequence[torch.Tensor]
    ) -> tuple[frozenset[int], bool]:
        """Calls to leave out, and whether what is left adds nothing whatever the values are: else these decide."""
        names = self._listed(absent)
        branch = branch_of(self.plain.program, len(self.templates), absent)
        if self.fixed and any(map(_drops, self.plain.program.calls)):
            # Such a call reads its seed on the host unless it is captured: a replay keeps it on the device.
            if branch.harmful:
                warn(f"no gradient came for output {names}: {_ZEROS}, and gradients may be NaN where eager's are not")
            return frozenset(), True
        harmful = branch.harmful or not self._vanish(frozenset(), wanted)
        # What writes cannot be run to see.
        if not harmful and (branch.writes or not self._adds(frozenset(), wanted, saved)):
            return frozenset(), True
        sure = branch.writes or self._vanish(branch.calls, wanted)
        if not branch.writes:
            self._require_nothing_added(absent, wanted, saved, branch.calls)
        if branch.calls:
            warn(
                f"no gradient came for output {names}: {_ZEROS}, so this backward runs call by call, without what "
                "leads there alone. To replay it: detach outputs that are not trained on in the forward, or do not "
                "return them"
            )
        return branch.calls, sure

    def _listed(self, absent: Iterable[int]) -> str:
        return ", ".join(str(self.differentiable[at]) for at in sorted(absent))

    def _require_nothing_added(
        self,
        absent: frozenset[int],
        wanted: frozenset[int],
        saved: Sequence[torch.Tensor],
        without: frozenset[int],
    ) -> None:
        if self._adds(without, wanted, saved):
            raise InputError(
                f"no gradient came for output {self._listed(absent)}, and this backward adds something of its own "
                "whatever gradients it is given, which a replay cannot tell apart",
                fix="detach outputs that are not trained on in the forward, or do not return them",
            )

    def _vanish(self, without: frozenset[int], wanted: frozenset[int]) -> bool:
        """Whether gradients that are wanted are zeros where those of all outputs are, whatever was saved."""
        return wanted <= vanishing(self.plain, len(self.templates), without)

    def _adds(self, without: frozenset[int], wanted: frozenset[int], saved: Sequence[torch.Tensor]) -> bool:
        """Whether gradients that are wanted have a value of their own, where those of all outputs are zeros."""
        zeros = [self._zero(at) for at in range(len(self.templates))]
        with torch.no_grad():
            found = issued_without(self.plain, [*zeros, *saved], without, zeros[0].device.type)
            return any_number(found[at] for at in wanted)

    def wanted(self, given: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Gradients, by position, that these gradients of the outputs reach."""
        if all(one is not None for one in given):
            return self._all
        return frozenset[int]().union(*(self.reached[at] for at, one in enumerate(given) if one is not None))

    def _taken(self, wanted: frozenset[int], hooked: Collection[int]) -> frozenset[int]:
        """Parameters whose gradients go into ``.grad`` without autograd: those that no hook waits for."""
        trained = list(map(_trained, self.parameters))
        wanted = wanted.intersection(self._numbered).difference(hooked)
        return wanted if all(trained) else frozenset(at for at in wanted if trained[at])

    def _keep(self, before: Mapping[int, torch.Tensor], found: Sequence[torch.Tensor], taken: frozenset[int]) -> None:
        """Where ``.grad`` was the memory that the replay has written anew: add what was there, or put it elsewhere."""
        sums = [at for at in before if at in taken]
        if sums:
            foreach_add_([found[at] for at in sums], [before[at] for at in sums])
        for at in before.keys() - taken:
            self.parameters[at].grad = before[at]

    def _accumulate(self, found: Sequence[torch.Tensor], taken: Iterable[int]) -> None:
        sums, new = [], []
        for at in taken:
            gradient = self.parameters[at].grad
            if gradient is None:
                self.parameters[at].grad = found[at]
            elif gradient.layout is not torch.strided:  # takes no dense one in place
                self.parameters[at].grad = found[at] + gradient
            else:
                sums.append(gradient)
                new.append(found[at])
        if sums:
            foreach_add_(sums, new)

    def _handed(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone() if self.fixed else gradient

    def _zero(self, at: int) -> torch.Tensor:
        if at not in self._zeros:
            self._zeros[at] = torch.zeros_like(self.templates[at])
        return self._zeros[at]

    def overwrite(self) -> None:
        """The forward's memory is about to be used for something else: no earlier backward may follow."""
        with self.using_memory:
            self._round += 1
            self.renew()

    def say_of_casts(self, casts: torch.dtype) -> None:
        """Warn, once, that a backward was called under autocast, which a replay is not."""
        if not self._said:
            self._said = True
            warn(
                f"backward() was called under torch.autocast to {autocast_name(casts)}: replayed, it casts nothing, as "
                "outside of it, where eager's would cast products that the forward left in float32. Call it after the "
                "with block"
            )

    def begin(self) -> tuple[_Pending, int]:
        """A forward was run: its backward may come, until the next forward."""
        pending = _Pending()
        self._latest = weakref.ref(pending)
        self._round += 1
        return pending, self._round

    def end(self, pending: _Pending, number: int) -> None:
        """The backward of a forward comes.

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

    def name(self, at: int) -> str:
        """Of a parameter."""
        return next(name for parameter, name, _ in self.flags if parameter is self.parameters[at])

    def versions(self) -> list[int]:
        """How often each of ``read`` was written, as far as that shows (fused optimizers do not count)."""
        return list(map(_version, self._read))

    def moved(self) -> str:
        """Which parameter has another type, device or shape than in the forward, whose gradient it could not take;
        empty if none.

        These are compared where memory is another one, which takes 0.07 µs a parameter to see: a forward runs on what
        was prepared, and recordings hold that, so that nothing else comes to lie there.
        """
        if list(map(torch.Tensor.data_ptr, self.parameters)) != self._memory:
            for at, (parameter, was) in enumerate(zip(self.parameters, self._kinds, strict=True)):
                now = _kind(parameter)
                if now != was:
                    return f"{self.name(at)} was {_described(was)} in the forward, and is {_described(now)}"
        return ""

    def everything_is_wanted(self) -> bool:
        """Whether this is ``backward()``, not a search for the gradients of some tensors."""
        if self._node is None:
            self._node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        return bool(will_execute(self._node))


_ZEROS = "zeros in its place may not make zeros"


def _drops(call: Call) -> bool:
    """Whether it is attention with dropout."""
    given = dict(call.arguments)
    return "attention" in call.operator and given.get("dropout_p", "0.0") not in ("0", "0.0")


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether ``one`` is ``other``, or another view of it."""
    if one is None or one is other:
        return one is other
    return type(one) is torch.Tensor and one.layout is torch.strided and one.data_ptr() == other.data_ptr()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _described(kind: tuple[Any, ...]) -> str:
    dtype, device, shape = kind
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _in_batch(gradient: torch.Tensor | None) -> bool:
    """Whether this stands for several gradients, each of which is to be handed on by itself."""
    return gradient is not None and batched_or_wrapped(gradient)


class _Replay(torch.autograd.Function):
    """Joins the two replays in autograd's graph, in which only ``linked`` ones of the parameters are."""

    @staticmethod
    def forward(
        ctx: Any,
        half: Backward,
        run: Run,
        owner: object,
        anchor: torch.Tensor,
        linked: Sequence[int],
        count: int,
        *rest: torch.Tensor,
    ) -> Any:
        tensors = rest[:count]
        made = run(tensors)
        ctx.half, ctx.owner, ctx.count, ctx.linked = half, owner, count, linked
        ctx.behind = half.behind(linked)
        ctx.pending, ctx.round = half.begin()
        ctx.versions = half.versions()
        ctx.guards = [(half.shown[at], half.shown[at]._version) for at in half.guarded]
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
        if any(map(_in_batch, gradients)):
            raise InputError(
                "gradients come in a batch (is_grads_batched=True, vectorize=True, vmap): a replayed backward takes "
                "one at a time",
                fix="jacobian(vectorize=False), or one backward after the other with retain_graph=True; or run this "
                "forward on the model itself",
            )
        casts = autocast_type(half.templates[0].device.type)
        if casts is not None:
            half.say_of_casts(casts)
        saved = () if half.fixed and ctx.saved_tensors else ctx.saved_tensors
        with half.using_memory:
            return _Replay.follow(ctx, gradients, saved)

    @staticmethod
    def follow(ctx: Any, gradients: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor]) -> Any:
        """The backward, where nothing stands against it, while no other thread's forward overwrites what it reads."""
        half: Backward = ctx.half
        behind: Behind | None = ctx.behind
        half.end(ctx.pending, ctx.round)
        versions = half.versions()
        if ctx.versions != versions:
            at = next(at for at, (was, now) in enumerate(zip(ctx.versions, versions, strict=True)) if was != now)
            raise InputError(
                f"{half.read[at][0]} was written between the forward and its backward, which reads it",
                fix="call backward() before optimizer.step(), and before other writes in place",
            )
        if any(one._version != version for one, version in ctx.guards):
            raise InputError(
                "an output was written between the forward and its backward, which reads it",
                fix='write a copy of it, or prepare with Options(outputs="copy")',
            )
        moved = half.moved()
        if moved:
            raise InputError(
                f"{moved}: a gradient of that forward does not fit it",
                fix="call backward() before moving or converting the model, or the forward again after it",
            )
        hooked = half.hooked()
        late = hooked.difference(ctx.linked)
        if late:
            raise InputError(
                f"{half.name(min(late))} got a hook between the forward and its backward, which would pass it by",
                fix="register hooks before the forward",
            )
        given = [gradients[at] for at in half.differentiable]
        search = current_search()
        keep = graph_is_kept()
        # A search runs this node for what it seeks, or, where it is not asked itself, for what lies ahead of it.
        accumulate = search is None and half.everything_is_wanted()
        found = half.replay(given, saved, accumulate=accumulate, hooked=hooked, keep=keep)
        if half.templates[0].is_cuda:
            _callers_stream_follows(half.templates[0].device)
        if not keep:
            ctx.owner = None  # it may hold a result of this graph, which Python's collector does not see through
        if behind is not None and search is not None and behind in search:
            search[behind] = {at: one for at in behind.tensors if (one := found[at]) is not None}
        if any(one is None for one in given):
            wanted = half.wanted(given)
            _spare_hooks(one for at, one in enumerate(half.parameters) if at not in wanted)
        leaves = dict(zip(half.leaves_present, found[len(half.parameters) :], strict=True))
        ahead = (None,) * 6
        return *ahead, *(leaves.get(at) for at in range(ctx.count)), *(found[at] for at in ctx.linked)
