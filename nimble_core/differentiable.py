"""Training as in eager: a prepared forward whose outputs carry a prepared backward.

``out = net(x); loss_fn(out, y).backward(); optimizer.step()``: forward and backward are recorded together, cut in two
(``halves``), scheduled each by itself, and joined again by an autograd function. What the forward saves stays where it
is until the backward has read it: on CUDA in the forward's own memory, so that there the next forward overwrites it.

Gradients of parameters go into ``.grad`` past autograd's accumulation, which would copy or keep each of them singly:
where there is none yet the engine's own tensor becomes ``.grad``, and another one is added to. In autograd's graph are
only those with hooks, which get copies; searches (``torch.autograd.grad``) for others are answered by ``searches``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.hooks import RemovableHandle

from nimble_core.accumulators import require_no_node_hooks
from nimble_core.around import Around
from nimble_core.candidates import EqualityCheck
from nimble_core.devices.base import Device, Executable
from nimble_core.equality import check_equality
from nimble_core.errors import CaptureError, InputError
from nimble_core.graph import build_graph
from nimble_core.halves import Halves, halve
from nimble_core.judging import Cases, doubted, eager_cases
from nimble_core.lift import lift
from nimble_core.operators import overlaps_itself, storage_address
from nimble_core.options import Options
from nimble_core.phases import phase
from nimble_core.pipeline import (
    Lender,
    Recorded,
    capture,
    may_be_spoilt,
    preparing,
    record_static,
    state_kept,
)
from nimble_core.program import Fuse, Program, TensorRef
from nimble_core.recording import Issuer, Recording, issuing
from nimble_core.searches import Behind, searches_are_answered
from nimble_core.signature import Signature
from nimble_core.static import check_outputs
from nimble_core.strides import copied, extent, strides_of_copy, with_strides_of
from nimble_core.structure import Structure, builder, flatten
from nimble_core.tuning import Tuned, eager_peak, tune

__all__ = ["Backward", "ForwardBackward", "Trainable", "make_trainable"]

_PATIENCE_S = 60.0
_WORTH = 1.2
"""How many times as fast a backward has to be that makes the step hold much more than eager's: more than elsewhere,
since what the forward saved is there beside it, and memory decides what can be trained at all."""
_KNOWN_WHETHER_KEPT = hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph")

_version = attrgetter("_version")
_gradient = attrgetter("grad")
_trained = attrgetter("requires_grad")
_hooks = attrgetter("_backward_hooks")
_late_hooks = attrgetter("_post_accumulate_grad_hooks")
_kind = attrgetter("dtype", "device", "shape")
# Private names of torch: without them batches end in an error of torch's.
_of_vmap: tuple[Callable[[torch.Tensor], bool], ...] = tuple(
    getattr(torch._C._functorch, name)
    for name in ("is_legacy_batchedtensor", "is_functorch_wrapped_tensor")
    if hasattr(torch._C._functorch, name)
)

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Step = Callable[[str], AbstractContextManager[Any]]


@runtime_checkable
class _Fixed(Protocol):
    """An executable whose inputs and outputs always are at the same place."""

    buffers: list[torch.Tensor]
    outputs: list[torch.Tensor]

    @property
    def arena(self) -> torch.Tensor | None:
        """The memory of its calls, bytes; None if they have none of their own."""
        ...


class ForwardBackward(Around):
    """A module's forward and backward as one: ``(args, kwargs, output gradients) -> (outputs, gradients)``.

    Args:
        model: the module.
        leaves: positions of the input tensors whose gradients are wanted.
        turned: names of weights that the module is given channels last, and all images with them: the same
            computation, in which convolutions and all between them run in that layout.
    """

    input_names = ("args", "kwargs", "gradients of outputs")

    def __init__(self, model: torch.nn.Module, leaves: Sequence[int], turned: Collection[str] = ()) -> None:
        super().__init__(model)
        self.leaves = tuple(leaves)
        self.turned = frozenset(turned)
        # What the last run found:
        self.structure: Structure | None = None
        self.outputs = 0
        self.differentiable: tuple[int, ...] = ()
        self.templates: tuple[torch.Tensor, ...] = ()
        self.present: tuple[str, ...] = ()
        self.reached: tuple[frozenset[int], ...] = ()
        self.leaves_present: tuple[int, ...] = ()

    def forward(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], gradients: Sequence[torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs, then gradients of the parameters in ``present`` and of the inputs in ``leaves_present``."""
        tensors, around = flatten((tuple(args), dict(kwargs)), what="input")
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            with phase("forward"):
                tensors = [tensor.detach() for tensor in tensors]
                for position in self.leaves:
                    tensors[position].requires_grad_()
                if self.turned:
                    args, kwargs = builder(around)([_channels_last(one) for one in tensors])
                    owned = self.model.named_parameters()
                    weights = {name: _channels_last(one) for name, one in owned if name in self.turned}
                    result = torch.func.functional_call(self.model, weights, tuple(args), dict(kwargs))
                else:
                    args, kwargs = builder(around)(tensors)
                    result = self.model(*args, **kwargs)
                outputs, self.structure = flatten(result, what="output")
            self.differentiable = tuple(at for at, one in enumerate(outputs) if one.requires_grad)
            if not self.differentiable:
                raise InputError(
                    "no output depends on a parameter or input that requires a gradient",
                    fix="prepare(..., training=False), or unfreeze parameters",
                )
            wanted = [outputs[at] for at in self.differentiable]
            self.outputs = len(outputs)
            if gradients is None:
                gradients = self.templates = tuple(torch.ones_like(one.detach()) for one in wanted)
            named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
            leaves = [tensors[position] for position in self.leaves]
            reached = [_reached(one, [*named.values(), *leaves]) for one in wanted]
            with phase("backward"), _hooks_silent(named.values()):
                found = torch.autograd.grad(wanted, [*named.values(), *leaves], list(gradients), allow_unused=True)
                _require_dense(found, [*named, *(f"input {position}" for position in self.leaves)])
                gradients_made = _standing_alone(
                    found, [*named.values(), *leaves], [*tensors, *gradients, *self.model.parameters()]
                )
        self.present = tuple(name for name, one in zip(named, found, strict=False) if one is not None)
        kept = [at for at, one in enumerate(found) if one is not None]
        self.reached = tuple(frozenset(kept.index(at) for at in one if at in kept) for one in reached)
        self.leaves_present = tuple(
            position for position, one in zip(self.leaves, found[len(named) :], strict=True) if one is not None
        )
        return [one.detach() for one in outputs], gradients_made


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


@contextmanager
def _hooks_silent(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, hooks of these tensors are not called: replays hand such gradients to autograd, which calls them."""
    tables = [(one._backward_hooks, dict(one._backward_hooks)) for one in parameters if one._backward_hooks]
    try:
        for table, _ in tables:
            table.clear()
        yield
    finally:
        for table, hooks in tables:
            table.update(hooks)


def _spare_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Until this backward ends, keep None from hooks of these: where no gradient comes, eager calls none.

    A gradient may still come from elsewhere in the same graph: that one they get.
    """
    tables = [(table, dict(table)) for one in parameters if (table := one._backward_hooks)]
    for table, hooks in tables:
        table.update({key: _unless_none(hook) for key, hook in hooks.items()})

    def restore() -> None:
        for table, hooks in tables:
            table.update({key: hook for key, hook in hooks.items() if key in table})

    if tables:
        torch.autograd.Variable._execution_engine.queue_callback(restore)


def _unless_none(hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor | None], Any]:
    return lambda gradient: None if gradient is None else hook(gradient)


def _require_dense(found: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
    """Raise InputError for a gradient that is sparse: how much memory it takes depends on data."""
    for one, name in zip(found, names, strict=True):
        if one is not None and one.layout is not torch.strided:
            raise InputError(
                "a gradient is sparse: only dense ones can be replayed",
                where=name,
                fix="make the embedding with sparse=False",
            )


def _standing_alone(
    found: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor], others: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients as autograd's accumulation gives them: each with memory of its own, laid out like what it belongs to.

    ``.grad`` is written in place, and fused optimizers take its layout to be the parameter's.
    """
    taken = {storage_address(one) for one in others}
    alone = []
    for one, source in zip(found, sources, strict=True):
        if one is not None:
            if not overlaps_itself(source):
                one = with_strides_of(source, one)
            if storage_address(one) in taken or overlaps_itself(one):
                one = one.clone()
            taken.add(storage_address(one))
            alone.append(one)
    return alone


def _reached(output: torch.Tensor, sources: Sequence[torch.Tensor]) -> frozenset[int]:
    """Positions of the ``sources``, leaves, that a gradient of ``output`` reaches."""
    nodes = {torch.autograd.graph.get_gradient_edge(one).node: at for at, one in enumerate(sources)}
    pending: list[Any] = [output.grad_fn or torch.autograd.graph.get_gradient_edge(output).node]
    seen: set[Any] = set()
    found: set[int] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in nodes:
            found.add(nodes[node])
        pending += [following for following, _ in node.next_functions]
    return frozenset(found)


@dataclass(slots=True, weakref_slot=True)
class _Pending:
    """A forward whose backward may still come."""

    done: bool = False


@dataclass(slots=True, weakref_slot=True)
class Backward:
    """What follows a prepared forward: replays its backward, and hands out the gradients.

    Args:
        tuned: what was found for it.
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
    """

    tuned: Tuned
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
    _node: Any = None
    _hooked: frozenset[int] = frozenset()
    _registered: int = -1
    _flagged: list[torch.Tensor] = field(init=False)
    _read: list[torch.Tensor] = field(init=False)
    _required: list[bool] = field(init=False)
    _all: frozenset[int] = field(init=False)
    _numbered: dict[int, torch.Tensor] = field(init=False)
    _memory: list[int] = field(init=False)
    _kinds: list[tuple[object, ...]] = field(init=False)

    def __post_init__(self) -> None:
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

    def attach(self, run: Run, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward on ``tensors``; its outputs carry the backward."""
        self.renew()
        # torch's own ``apply`` looks through all arguments for those of a transform that is over.
        apply = super(torch.autograd.Function, _Replay).apply
        # Reducers of processes that train together look for parameters in the graph itself.
        alone = not _distributed() and searches_are_answered()
        linked = sorted(self.hooked()) if alone else range(len(self.parameters))
        reached = [self.parameters[at] for at in linked]
        return list(apply(self, run, self._anchor, linked, len(tensors), *tensors, *reached))  # type: ignore[no-untyped-call]  # torch's has no types

    def hooked(self) -> frozenset[int]:
        """Parameters, by position, with a hook that waits for their gradient."""
        registered = RemovableHandle.next_id  # read before hooks are: who registers meanwhile is noticed
        if self._hooked or registered != self._registered:
            waiting = zip(map(_hooks, self.parameters), map(_late_hooks, self.parameters), strict=True)
            self._hooked = frozenset(at for at, (early, late) in enumerate(waiting) if early or late)
            self._registered = registered
        return self._hooked

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
        self, given: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], *, accumulate: bool, keep: bool
    ) -> list[torch.Tensor | None]:
        """Replay on gradients of the outputs; gradients of inputs and parameters that are autograd's to hand on.

        With ``accumulate``, those of parameters without hooks go into ``.grad``. With ``keep``, another backward of the
        same forward may follow.
        """
        executable = self._replaying(keep)
        inputs = [one if one is not None else self._zero(at) for at, one in enumerate(given)]
        with torch.no_grad():
            # On CUDA gradients always are the same memory: what is in use there would be overwritten.
            mine = cast(_Fixed, executable).outputs if self.fixed else ()
            held = list(map(_gradient, self.parameters))
            used = [at for at, one in enumerate(held) if one is not None and one is mine[at]] if mine else []
            before = [mine[at].clone() for at in used]
            if executable is not self._spare and self.sparing is not None:
                self._round += 1  # what was saved is gone: no other try of this backward may follow
            found = list(executable.run([*inputs, *saved], static=True))
            # What follows is the host's, while the device is busy.
            for at in self.borrowed:
                found[at] = found[at].clone()
            wanted = self.wanted(given)
            taken = self._taken(wanted) if accumulate else frozenset[int]()
            self._keep(dict(zip(used, before, strict=True)), found, taken)
            self._accumulate(held, found, taken.difference(used))
        return [
            None if at in taken or at not in wanted else self._handed(gradient) for at, gradient in enumerate(found)
        ]

    def wanted(self, given: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Gradients, by position, that these gradients of the outputs reach."""
        if all(one is not None for one in given):
            return self._all
        return frozenset[int]().union(*(self.reached[at] for at, one in enumerate(given) if one is not None))

    def _taken(self, wanted: frozenset[int]) -> frozenset[int]:
        """Parameters whose gradients go into ``.grad`` without autograd: those that no hook waits for."""
        trained = list(map(_trained, self.parameters))
        wanted = wanted.intersection(self._numbered) - self.hooked()
        return wanted if all(trained) else frozenset(at for at in wanted if trained[at])

    def _keep(self, before: Mapping[int, torch.Tensor], found: Sequence[torch.Tensor], taken: frozenset[int]) -> None:
        """Where ``.grad`` was the memory that the replay has written anew: add what was there, or put it elsewhere."""
        sums = [at for at in before if at in taken]
        if sums:
            torch._foreach_add_([found[at] for at in sums], [before[at] for at in sums])
        for at in before.keys() - taken:
            self.parameters[at].grad = before[at]

    def _accumulate(
        self, held: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor], taken: Iterable[int]
    ) -> None:
        sums, new = [], []
        for at in taken:
            gradient = held[at]
            if gradient is None:
                self.parameters[at].grad = found[at]
            elif gradient.layout is not torch.strided:  # takes no dense one in place
                self.parameters[at].grad = found[at] + gradient
            else:
                sums.append(gradient)
                new.append(found[at])
        if sums:
            torch._foreach_add_(sums, new)

    def _handed(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone() if self.fixed else gradient

    def _zero(self, at: int) -> torch.Tensor:
        if at not in self._zeros:
            self._zeros[at] = torch.zeros_like(self.templates[at])
        return self._zeros[at]

    def overwrite(self) -> None:
        """The forward's memory is about to be used for something else: no earlier backward may follow."""
        self._round += 1
        self.renew()

    def begin(self) -> tuple[_Pending, int]:
        """A forward was run: its backward may come, until the next forward."""
        pending = _Pending()
        self._latest = weakref.ref(pending)
        self._round += 1
        return pending, self._round

    def end(self, pending: _Pending, number: int) -> None:
        """The backward of a forward comes. Raises InputError if another forward has overwritten what it needs."""
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
        return bool(torch._C._will_engine_execute_node(self._node))


def _graph_is_kept() -> bool:
    """Whether another backward may follow the one that runs on this thread (``retain_graph=True``)."""
    return _KNOWN_WHETHER_KEPT and torch._C._autograd._get_current_graph_task_keep_graph()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _described(kind: tuple[Any, ...]) -> str:
    dtype, device, shape = kind
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _in_batch(gradient: torch.Tensor | None) -> bool:
    """Whether this stands for several gradients, each of which is to be handed on by itself."""
    return gradient is not None and any(asked(gradient) for asked in _of_vmap)


class _Replay(torch.autograd.Function):
    """Joins the two replays in autograd's graph, in which only ``linked`` ones of the parameters are."""

    @staticmethod
    def forward(
        ctx: Any, half: Backward, run: Run, anchor: torch.Tensor, linked: Sequence[int], count: int, *rest: torch.Tensor
    ) -> Any:
        tensors = rest[:count]
        made = run(tensors)
        ctx.half, ctx.count, ctx.linked = half, count, linked
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
        behind: Behind | None = ctx.behind
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
        saved = () if half.fixed and ctx.saved_tensors else ctx.saved_tensors
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
        late = half.hooked().difference(ctx.linked)
        if late:
            raise InputError(
                f"{half.name(min(late))} got a hook between the forward and its backward, which would pass it by",
                fix="register hooks before the forward",
            )
        given = [gradients[at] for at in half.differentiable]
        asked = behind is not None and behind.asked
        found = half.replay(given, saved, accumulate=not asked and half.everything_is_wanted(), keep=_graph_is_kept())
        if behind is not None and asked:
            behind.found = {at: one for at in behind.tensors if (one := found[at]) is not None}
        if any(one is None for one in given):
            wanted = half.wanted(given)
            _spare_hooks(one for at, one in enumerate(half.parameters) if at not in wanted)
        leaves = dict(zip(half.leaves_present, found[len(half.parameters) :], strict=True))
        ahead = (None,) * 5
        return *ahead, *(leaves.get(at) for at in range(ctx.count)), *(found[at] for at in ctx.linked)


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
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    *,
    step: Step,
) -> Trainable:
    """Record forward and backward together, cut, tune each; nothing of the model is changed.

    Raises:
        InputError: nothing to differentiate, or hooks that no replay would call.
        NotStaticError, CaptureError, DeviceError: as ``record_static`` and ``tune``.
    """
    require_no_node_hooks(model.named_parameters())
    leaves = [position for position, tensor in enumerate(signature.tensors) if tensor.requires_grad]
    whole = ForwardBackward(model, leaves)
    with step("warm-up"):
        device.warm_up(whole, (args, kwargs), {})
    structure, templates = whole.structure, whole.templates
    assert structure is not None
    example = (tuple(args), dict(kwargs), list(templates))
    both = Signature(example, {}, whole.input_names)
    joint = record_static(device, whole, both, example, {}, strict=options.strict, step=step)
    if joint.whole:
        what = "launch" if device.kind == "cuda" else "value"
        raise CaptureError(
            f"not every {what} of forward and backward was seen",
            where=joint.recording.unseen_where,
            fix="leave that part out of the prepared module",
        )
    if whole.structure is not None:  # of the last run, on other values
        check_outputs(structure, whole.structure)
    outputs = whole.outputs
    cut = _in_better_layout(device, whole, joint, options, step)
    halves = halve(cut.recording, len(signature.tensors), outputs)
    inputs = [tensor.detach() for tensor in signature.tensors]
    ahead = len(halves.forward.program.calls)
    together = replace(cut.recording, outputs=halves.forward.outputs)
    first = _recorded(halves.forward, inputs, _Issued(together, ahead, after=templates))
    if device.kind == "cuda" and options.outputs == "copy":
        first = replace(first, copied_out=outputs)
    with state_kept(first):
        forward = tune(device, first, options, step=step)
    try:
        forward.close(keep=forward.best)
        fixed = isinstance(forward.best, _Fixed)
        random = torch.cuda.get_rng_state(signature.device) if fixed else None
        with state_kept(first):
            made = [one.detach() for one in forward.best.run(inputs, static=True)]
        saved = made[outputs:]
        shown: dict[int, torch.Tensor] = {}
        guarded: tuple[int, ...] = ()
        lender: Lender | None = None
        if isinstance(forward.best, _Fixed):
            leading = _leading(halves.backward, len(saved) + len(halves.saved_inputs))
            if options.outputs == "static":
                shown = _of_their_own(made[:outputs], [*forward.best.buffers, *first.recording.given.values()])
                guarded = tuple(at for at, one in shown.items() if any(_share_bytes(one, other) for other in saved))
            saved, lender = _lent(forward.best.arena, saved, leading, list(shown.values()))
            saved += [forward.best.buffers[at] for at in halves.saved_inputs]
            # With the forward before it: eager and captures keep seeds in different places.
            whole_run = replace(cut.recording, outputs=cut.recording.outputs[outputs:])
            eager = _Issued(whole_run, len(cut.recording.program.calls), inputs, joint=cut, random=random)
            second = _recorded(halves.with_saved(saved), list(templates), eager)
        else:
            saved += [inputs[at] for at in halves.saved_inputs]
            eager = _Issued(halves.backward, len(halves.backward.program.calls))
            second = _recorded(halves.backward, [*templates, *saved], eager)
        whole_nbytes = eager_peak(device, cut)
        with state_kept(second):
            behind = tune(
                device,
                replace(second, lender=lender),
                options,
                step=step,
                eager_nbytes=whole_nbytes,
                beside_nbytes=forward.best.nbytes,
                worth=_WORTH,
            )
        behind.close(keep=behind.best)
    except BaseException:
        forward.best.close()
        raise
    named = dict(model.named_parameters())
    backward = Backward(
        tuned=behind,
        parameters=tuple(named[name] for name in whole.present),
        flags=tuple((one, name, one.requires_grad) for name, one in named.items()),
        leaves=frozenset(leaves),
        leaves_present=whole.leaves_present,
        layouts=tuple(strides_of_copy(ref.sizes, ref.strides) for ref in halves.forward.program.outputs[:outputs]),
        differentiable=whole.differentiable,
        templates=templates,
        reached=whole.reached,
        saved_inputs=halves.saved_inputs,
        fixed=fixed,
        borrowed=_borrowed(halves.backward),
        sparing=partial(_sparing, device, behind, options.memory_limit) if lender is not None else None,
        shown=shown,
        guarded=guarded,
        repeated=_repeated(made[:outputs]),
        read=_read(halves),
    )
    try:
        with step("check equality"):
            wrong = _unlike_eager(joint, forward.best, backward, len(inputs))
    except BaseException:
        forward.best.close()
        behind.best.close()
        raise
    if isinstance(behind.best, _Fixed):
        # From here on they are examples of shapes only, and outputs may be large: one memory is enough.
        for template, buffer in zip(templates, behind.best.buffers, strict=False):
            template.set_(buffer.untyped_storage(), buffer.storage_offset(), buffer.shape, buffer.stride())
    return Trainable(forward, backward, structure, joint, (*forward.notes, *behind.notes), wrong)


def _in_better_layout(
    device: Device, whole: ForwardBackward, joint: Recorded, options: Options, step: Step
) -> Recorded:
    """Forward and backward as they are, or with all their images channels last, whichever takes less time.

    What the forward saves is the backward's input: the layout is one for both, chosen before they are cut. Outputs keep
    the layout that they have in eager: where one of them is an image, nothing is turned.
    """
    program = joint.recording.program
    weights, fixed = _turnable(program), any(len(ref.sizes) == 4 for ref in program.outputs[: whole.outputs])
    if device.kind != "cuda" or options.fuse == "none" or options.tune == "off" or not weights or fixed:
        return joint
    turned = ForwardBackward(whole.model, whole.leaves, weights)
    args, kwargs = builder(joint.signature.structure)(joint.signature.tensors)
    try:
        with step("record channels last"):
            other = record_static(device, turned, joint.signature, args, kwargs, strict=True, step=step)
        with step("choose layout"), state_kept(joint):
            modules = [lift(one.recording) for one in (joint, other)]
            runs = [partial(module, *joint.signature.tensors) for module in modules]
            plain_ns, turned_ns = device.call_times_ns(runs)
    except Exception:  # of the model, which may ask for a view of what is contiguous no more
        return joint
    faster = plain_ns is not None and turned_ns is not None and turned_ns < plain_ns
    return other if faster else joint


def _turnable(program: Program) -> frozenset[str]:
    """Names of weights of convolutions that are not channels last yet.

    Not of those that see single pixels, whose strides tell no layout: libraries and compilers then disagree about it.
    """
    cast: dict[int, TensorRef] = {}
    wide: dict[int, TensorRef] = {}
    pixels: set[int] = set()
    for call in program.calls:
        images = [cast.get(ref.storage, ref) for ref in call.reads if len(ref.sizes) == 4]
        if call.operator == "aten.convolution.default" and len(images) == 2:
            image, weight = images
            wide[weight.storage] = weight
            if image.sizes[2:] == (1, 1):
                pixels.add(weight.storage)
        elif len(call.reads) == len(call.writes) == len(images) == 1 and call.writes[0].sizes == images[0].sizes:
            cast[call.writes[0].storage] = images[0]
    return frozenset(
        program.storages[home].name
        for home, ref in wide.items()
        if home not in pixels
        and program.storages[home].role == "parameter"
        and min(ref.sizes[1:]) > 1 != ref.strides[1]
    )


def _lent(
    memory: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    leading: Collection[int] = (),
    shown: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], Lender | None]:
    """What the forward saved, and its memory for the backward to use up: each part once it has been read.

    Eager's backward frees what it has read as well. Each saved tensor of numbers gets a storage of its own, by which it
    is known there; others, those at positions in ``leading``, and those that share bytes, stay as they are, and so does
    what is ``shown`` to the caller.
    """
    if memory is None or not _KNOWN_WHETHER_KEPT:
        return list(saved), None
    start, count = memory.data_ptr(), len(saved)
    spans = [(one.data_ptr() - start, extent(one)) for one in (*saved, *shown)]
    inside = [offset >= 0 and offset + nbytes <= memory.nbytes for offset, nbytes in spans]
    order = sorted((at for at in range(len(spans)) if inside[at] and spans[at][1]), key=spans.__getitem__)
    stays = [not may_be_spoilt(one) or one.is_conj() or one.is_neg() for one in saved] + [True] * len(shown)
    kept = {at for at in order if stays[at] or at in leading}
    until, last = 0, -1
    for at in order:
        offset, nbytes = spans[at]
        if offset < until:
            kept |= {at, last}
        if offset + nbytes > until:
            until, last = offset + nbytes, at
    found = list(saved)
    for at in order:
        if at < count and at not in kept:
            one = saved[at]
            storage = torch._C._construct_storage_from_data_pointer(one.data_ptr(), one.device, spans[at][1])
            found[at] = torch.empty(0, dtype=one.dtype, device=one.device)
            found[at].set_(storage, 0, one.shape, one.stride())
    return found, Lender(memory, tuple(sorted(spans[at] for at in kept)))


def _leading(backward: Recording, count: int) -> frozenset[int]:
    """Which of the last ``count`` inputs lead to positions in memory: backwards are measured on whatever is there.

    From them come integers, or what operators read that are not torch's own and may take a number for a position
    (``torchvision.ops.roi_align`` does).
    """
    program = backward.program
    leads: set[int] = set()
    for call in reversed(program.calls):
        foreign = not call.operator.startswith("aten.")
        if foreign or any(ref.storage in leads or ref.dtype.startswith(("int", "uint")) for ref in call.writes):
            leads.update(ref.storage for ref in call.reads)
    slots = backward.inputs[len(backward.inputs) - count :]
    return frozenset(at for at, slot in enumerate(slots) if backward.storage_of[slot] in leads)


def _repeated(outputs: Sequence[torch.Tensor]) -> frozenset[int]:
    """Outputs, by position, that share memory with an earlier one."""
    return frozenset(
        at for at, one in enumerate(outputs) if any(_share_bytes(one, earlier) for earlier in outputs[:at])
    )


def _read(halves: Halves) -> tuple[tuple[str, torch.Tensor], ...]:
    """Tensors that exist before the forward and that the backward reads: their names, and aliases that share their
    version counters.

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


def _of_their_own(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Outputs, by position, that share memory with no other one and with nothing that was given: writing to one of them
    in place is nobody else's business.
    """
    found = {}
    for at, one in enumerate(outputs):
        rest = (*outputs[:at], *outputs[at + 1 :], *others)
        if not any(_share_bytes(one, other) for other in rest):
            found[at] = one
    return found


def _share_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory that two tensors reach over overlaps."""
    return a.data_ptr() < b.data_ptr() + extent(b) and b.data_ptr() < a.data_ptr() + extent(a)


def _sparing(device: Device, behind: Tuned, memory_limit: int | None) -> Executable:
    """The backward that was chosen, in memory of its own.

    Its calls run once before they are captured: autograd's own thread is another one, and what libraries know of a
    routine they may know by thread.

    Raises:
        DeviceError: no memory for it, or another thread prepares a model.
        CaptureError: as ``capture``.
    """
    recorded = replace(behind.recorded, lender=None)
    last: dict[int, int] = {}
    for call in recorded.recording.program.calls:
        last |= dict.fromkeys((access.ref.storage for access in call.accesses), call.index)
    tuned = device.libraries_tuned() if recorded.recording.program.fuse != "none" else nullcontext()
    with preparing(_PATIENCE_S), state_kept(recorded):
        with issuing(recorded.signature.device.type), tuned:
            issuer = Issuer(recorded.recording, recorded.signature.tensors)
            for call in recorded.recording.program.calls:
                issuer.issue(call.index)
                for storage in {one.ref.storage for one in call.accesses if last[one.ref.storage] == call.index}:
                    issuer.release(storage)
            del issuer
        return capture(device, recorded, behind.best.schedule, memory_limit=memory_limit, costs=behind.costs)


def _borrowed(backward: Recording) -> tuple[int, ...]:
    """Positions of gradients that are memory of something saved, or of the model's, as a custom backward may return."""
    homes = {backward.storage_of[slot] for slot in (*backward.inputs, *backward.given)}
    return tuple(at for at, slot in enumerate(backward.outputs) if backward.storage_of[slot] in homes)


def _recorded(recording: Recording, inputs: Sequence[torch.Tensor], model: _Issued) -> Recorded:
    """One half as a recording of its own."""
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
    """How forward and backward replays together differ from eager; empty if they do not."""
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
        check = judged(doubted(joint, cases))
    return f"replays of forward and backward are not what eager computes: {check.reason}" if check.differs else ""
