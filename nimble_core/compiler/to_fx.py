"""From a recording to an FX graph of pure operators, which rewrites can change.

In-place operators become their functional forms if nothing else looks at the memory they write. The others stay as they
are, in order, and everything on their memory is *pinned*: rewrites leave it alone. Every node knows which eager calls
it stands for, so that whatever becomes of it can be traced back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from nimble_core.ir.program import TensorRef
from nimble_core.torch_compat.dispatch import OpOverload
from nimble_core.tracing.operator_traits import draws_numbers, fills, is_view, makes_memory_only, written_arguments
from nimble_core.tracing.recording import Recording, Slot, Step, slots_in
from nimble_core.tracing.strides import laid_out, row_by_row

__all__ = [
    "CALL_PREFIX",
    "FIXED_PREFIX",
    "add_call",
    "arguments_of",
    "calls_of",
    "draws",
    "drop_unused",
    "graph_module",
    "lift",
    "made_of",
    "movable",
    "only_computes",
    "pinned",
    "recorded_ancestor",
    "reference_of",
    "use_calls",
    "written_slots",
]

CALL_PREFIX = "eager_call_"
"""Nodes are named after their eager call: a compiler's comments then tell where its kernels come from."""

FIXED_PREFIX = "fixed_"
"""Attributes with numbers that the model makes and that nothing changes: see ``fixed_memory``."""

_CALLS, _REF, _PINNED = "eager", "ref", "pinned"

_WINDOWS = {torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default}

_RESHAPES: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""Views that ask for strides which rewrites may change, unless memory is written through them."""

_SPLITS: dict[Any, Any] = {
    torch.ops.aten.unsafe_split.Tensor: torch.ops.aten.split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default: torch.ops.aten.split_with_sizes.default,
}
"""Views that do not declare it: a compiler would lose what is written through them."""

_TRUTHS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not"}
"""Operators whose functional form has a result of another type than what they write in place."""


def calls_of(node: fx.Node) -> tuple[int, ...]:
    """Return the eager calls that a node stands for, ascending; none for views and what rewrites added."""
    return tuple(node.meta.get(_CALLS, ()))


def use_calls(node: fx.Node, *sources: fx.Node) -> None:
    """Let ``node`` stand for the eager calls of ``sources`` as well."""
    node.meta[_CALLS] = tuple(sorted({*calls_of(node), *(call for source in sources for call in calls_of(source))}))


def reference_of(node: fx.Node) -> TensorRef | None:
    """Return a tensor's recorded shape, strides and type; None if a node makes several, or was added."""
    found = node.meta.get(_REF)
    return found if isinstance(found, TensorRef) else None


def pinned(node: fx.Node) -> bool:
    """Whether some operator writes the memory of this node in place: rewrites leave it alone."""
    return bool(node.meta.get(_PINNED))


def movable(node: fx.Node) -> bool:
    """Whether a node may run earlier or later: nothing that it reads or makes is written in place."""
    return not pinned(node) and not any(pinned(one) for one in node.all_input_nodes)


def add_call(graph: fx.Graph, target: Any, args: Sequence[Any], sources: Sequence[fx.Node], **kwargs: Any) -> fx.Node:
    """Add a node that stands for the eager calls of ``sources``; its recorded shape is that of the last."""
    node = graph.call_function(target, tuple(args), kwargs)
    use_calls(node, *sources)
    if sources and _REF in sources[-1].meta:
        node.meta[_REF] = sources[-1].meta[_REF]
    return node


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator's node by name, defaults included."""
    given: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args):
            given[argument.name] = node.args[position]
        else:
            given[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return given


def only_computes(func: Any) -> bool:
    """Whether an operator, a view for one, gives the same for the same arguments and does nothing else."""
    if is_view(func):
        return True
    if not isinstance(func, OpOverload) or func._schema.is_mutable or makes_memory_only(func):
        return False
    return torch.Tag.nondeterministic_seeded not in func.tags


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return draws_numbers(node.target, node.args, node.kwargs)


def made_of(nodes: Iterable[fx.Node], graph: fx.Graph) -> list[fx.Node]:
    """Find the nodes that ``nodes`` are computed from, and themselves, in graph order."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return [node for node in graph.nodes if node in found]


def recorded_ancestor(node: fx.Node) -> fx.Node:
    """Return the node if it was recorded, else the one that rewrites made it of: a weight, mostly."""
    while reference_of(node) is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


@dataclass(slots=True)
class _Lifting:
    """A graph in the making.

    Args:
        recording: what is lifted.
        graph: its nodes so far.
        exact: slots whose strides count even where they address nothing.
        last_read: for each slot the last step that reads it.
        pinned: storages that operators write in place.
        value: the node that holds each slot now.
    """

    recording: Recording
    graph: fx.Graph
    exact: frozenset[int]
    last_read: Mapping[int, int]
    pinned: set[int]
    value: dict[int, fx.Node] = field(default_factory=dict)

    def step(self, step: Step, position: int) -> None:
        """Add the node of a step."""
        if step.func in _WINDOWS and step.reads:
            if self._is_same_window(step):
                self._take_window(step.outputs[0], self.value[step.reads[0]])
                return
            step = self._reshaped(step)
        written = written_slots(step)
        schema = getattr(step.func, "_schema", None)
        functional = self._functional(step, written, position) if schema else None
        args = tuple(self.filled(arg) for arg in step.args)
        named = {name: self.filled(value) for name, value in step.kwargs}
        for argument in schema.arguments[len(args) :] if schema else ():
            if argument.kwarg_only or argument.name not in named:
                break
            args = (*args, named.pop(argument.name))
        if functional and fills(step.func):
            args = (self._unfilled(args[0]), *args[1:])
        name = f"{CALL_PREFIX}{step.call}" if step.call is not None else None
        target = functional or _RESHAPES.get(step.func) or _SPLITS.get(step.func, step.func)
        node = self.graph.create_node("call_function", target, args, named, name=name)
        if step.call is not None:
            node.meta[_CALLS] = (step.call,)
        if functional:
            self.take(written[0], node)
            return
        node.meta[_PINNED] = bool(written)
        self.pinned |= {self.recording.storage_of[slot] for slot in written}
        for slot, value in self.value.items() if written else ():
            if self.recording.storage_of[slot] in self.pinned:
                _pin(value)
        self._take_all(step, node)

    def _is_same_window(self, step: Step) -> bool:
        """Whether ``as_strided`` shows a tensor again, but for strides that do not matter, as pools do."""
        before, after = self.recording.refs[step.reads[0]], self.recording.refs[step.outputs[0]]
        if (before.offset, before.sizes, before.dtype) != (after.offset, after.sizes, after.dtype):
            return False
        strides = zip(before.sizes, before.strides, after.strides, strict=True)
        return all(size == 1 or a == b for size, a, b in strides)

    def _reshaped(self, step: Step) -> Step:
        """Make a view of a window on all of a tensor, row by row as it is; autograd takes such windows."""
        before, after = self.recording.refs[step.reads[0]], self.recording.refs[step.outputs[0]]
        whole = (before.offset, before.numel, before.dtype) == (after.offset, after.numel, after.dtype)
        if not (whole and row_by_row(before.sizes, before.strides) and row_by_row(after.sizes, after.strides)):
            return step
        return replace(step, func=torch.ops.aten.view.default, args=(step.args[0], list(after.sizes)), kwargs=())

    def _take_window(self, slot: int, node: fx.Node) -> None:
        """Let a slot show ``node`` again, with strides of its own only if they count."""
        recorded = self.recording.refs[slot]
        if slot not in self.exact or recorded == reference_of(node):
            self.value[slot] = node
            return
        self.take(slot, add_call(self.graph, laid_out, (node, recorded.strides), (node,)))

    def _functional(self, step: Step, written: Sequence[int], position: int) -> Any:
        """Find the operator without its write in place, or itself if it fills memory; None if others see that."""
        if len(written) != 1 or written[0] not in self.value:
            return None
        slot, recording = written[0], self.recording
        home = recording.storage_of[slot]
        storage = recording.program.storages[home]
        if storage.role != "intermediate" or recording.refs[slot].nbytes != storage.nbytes:
            return None
        others = [other for other in self.value if recording.storage_of[other] == home and other != slot]
        if any(self.last_read.get(other, -1) > position for other in others):
            return None
        if pinned(self.value[slot]) or len({recording.refs[read].dtype for read in step.reads}) > 1:
            return None  # of mixed types the functional form may give another one
        return step.func if fills(step.func) else _without_write(step.func)

    def _unfilled(self, node: fx.Node) -> fx.Node:
        """Return memory like that of ``node`` which nobody has read, to be filled with random numbers."""
        if node.target is torch.ops.aten.empty_strided.default and not node.users:
            return node
        made = self.graph.call_function(torch.ops.aten.empty_like.default, (node,))
        made.meta[_REF] = node.meta[_REF]
        return made

    def _take_all(self, step: Step, node: fx.Node) -> None:
        """Let all results of a step be the value of their slots."""
        for slot, place in zip(step.outputs, step.places, strict=True):
            if slot < 0:
                continue
            item = node
            for at in place:
                item = self.graph.call_function(operator.getitem, (item, at))
                item.meta[_CALLS] = node.meta.get(_CALLS, ())
                item.meta[_PINNED] = node.meta.get(_PINNED)
            self.take(slot, item)

    def take(self, slot: int, node: fx.Node) -> None:
        """Let ``node`` be the value of a slot."""
        if self.recording.refs[slot].numel or _REF not in node.meta:
            node.meta[_REF] = self.recording.refs[slot]
        if self.recording.storage_of[slot] in self.pinned:
            _pin(node)
        self.value[slot] = node

    def filled(self, arg: Any) -> Any:
        """Put nodes in the place of slots."""
        if type(arg) is Slot:
            return self.value[arg.index]
        if type(arg) in (list, tuple):
            return type(arg)(self.filled(item) for item in arg)
        return arg


def lift(recording: Recording) -> fx.GraphModule:
    """Make a GraphModule of a recording, from its input tensors to the tuple of its output tensors.

    Given tensors (parameters, buffers, constants) are attributes ``given_<slot>`` of the module: the very tensors, so
    that the graph reads live weights. What the model itself makes, and ``fixed_memory`` computed, is ``fixed_<slot>``.

    Raises:
        CaptureError: a result that cannot be told by its place.
    """
    graph, module = fx.Graph(), torch.nn.Module()
    last_read: dict[int, int] = {}
    for position, step in enumerate(recording.steps):
        last_read.update(dict.fromkeys(step.reads, position))
    last_read.update(dict.fromkeys(recording.outputs, len(recording.steps)))
    written = {recording.storage_of[slot] for step in recording.steps for slot in written_slots(step)}
    given = {recording.storage_of[slot] for slot in recording.given}
    lifting = _Lifting(recording, graph, _exact(recording), last_read, written & given)
    for position, slot in enumerate(recording.inputs):
        lifting.take(slot, graph.placeholder(f"input_{position}"))
    for slot, tensor in recording.given.items():
        made = recording.program.storages[recording.storage_of[slot]].role == "intermediate"
        name = f"{FIXED_PREFIX if made else 'given_'}{slot}"
        module.register_buffer(name, tensor)
        lifting.take(slot, graph.get_attr(name))
    for position, step in enumerate(recording.steps):
        lifting.step(step, position)
    graph.output(tuple(lifting.filled(Slot(slot)) for slot in recording.outputs))
    for node in graph.nodes:
        if pinned(node) and node.target is torch.ops.aten.reshape.default:  # a copy would not be written
            node.target = torch.ops.aten.view.default
    lifted = graph_module(module, graph)
    drop_unused(lifted)
    return lifted


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Make a GraphModule whose tensors are freed with the last reference to it.

    A graph that knew its module in turn, as in ``torch.fx``, would keep weights until Python's collector runs.
    """
    module = fx.GraphModule(root, graph)
    graph.owning_module = None
    return module


def _exact(recording: Recording) -> frozenset[int]:
    """Find slots whose strides count even for sizes of 1: results, and what fused optimizers compare."""
    calls = recording.program.calls
    updates = (step for step in recording.steps if step.call is not None and calls[step.call].phase == "optimizer")
    return frozenset(recording.outputs).union(*(step.reads for step in updates))


def _pin(node: fx.Node) -> None:
    """Pin a node, and what makes it where that makes several."""
    node.meta[_PINNED] = True
    if node.target is operator.getitem:
        _pin(node.args[0])  # type: ignore[arg-type]


def drop_unused(module: fx.GraphModule) -> None:
    """Remove nodes whose result nobody reads, unless they write in place, draw random numbers or check."""
    for node in reversed(module.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not _matters(node):
            module.graph.erase_node(node)


def _matters(node: fx.Node) -> bool:
    """Whether a node does more than make its result."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if pinned(node) or schema is None:
        return pinned(node)
    return schema.is_mutable or not schema.returns or draws(node)


def written_slots(step: Step) -> tuple[int, ...]:
    """Find the slots that a step writes; without a schema, all that it is given."""
    if getattr(step.func, "_schema", None) is None:
        return step.reads
    return tuple(slots_in(written_arguments(step.func, step.args, dict(step.kwargs))))


@cache
def _without_write(func: Any) -> Any:
    """Find ``relu`` for ``relu_``: the operator with a new result; None if none has the same arguments."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if not name.endswith("_") or name.startswith("_") or name.removesuffix("_") in _TRUTHS:
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    found = getattr(packet, func._overloadname, None)
    if found is None or found._schema.is_mutable:
        return None
    same = [one.name for one in found._schema.arguments] == [one.name for one in schema.arguments]
    return found if same and len(found._schema.returns) == 1 else None
