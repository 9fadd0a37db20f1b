"""A module's forward and backward as one function of tensors, in the layout in which both take less time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from nimble_core.compiler.pipeline import convolutions_of_step
from nimble_core.compiler.to_fx import lift
from nimble_core.ir.program import Program, TensorRef
from nimble_core.runtime.device import Device
from nimble_core.scheduling.options import Options
from nimble_core.tracing.input_memory import require_same_windows, windows_of
from nimble_core.tracing.pytree import Structure, builder, flatten
from nimble_core.tracing.recorded import Recorded, record_static, state_kept
from nimble_core.tracing.recording_contexts import no_autocast, phase
from nimble_core.tracing.signature import require_unchanged
from nimble_core.tracing.step_wrapper import Around
from nimble_core.training.gradients import gradients_of
from nimble_core.utils.errors import InputError

__all__ = ["ForwardBackward", "in_better_layout", "turnable"]

Step = Callable[[str], AbstractContextManager[Any]]


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
        self.functions: tuple[frozenset[tuple[int, int]], ...] = ()
        self.leaves_present: tuple[int, ...] = ()

    def forward(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], gradients: Sequence[torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return outputs, then gradients of the parameters in ``present`` and of the inputs in ``leaves_present``."""
        tensors, around = flatten((tuple(args), dict(kwargs)), what="input")
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            with phase("forward"):
                tensors = [tensor.detach() for tensor in tensors]
                for position in self.leaves:
                    tensors[position].requires_grad_()
                if self.turned:
                    given = [_channels_last(one) for one in tensors]
                    windows = windows_of(given)
                    args, kwargs = builder(around)(given)
                    owned = self.model.named_parameters()
                    weights = {name: _channels_last(one) for name, one in owned if name in self.turned}
                    result = torch.func.functional_call(self.model, weights, tuple(args), dict(kwargs))
                else:
                    given, windows = tensors, windows_of(tensors)
                    args, kwargs = builder(around)(given)
                    result = self.model(*args, **kwargs)
                require_same_windows(windows, given, [f"input {position}" for position in range(len(given))])
                require_unchanged(around, given, (args, kwargs), ())
                outputs, self.structure = flatten(result, what="output")
            self.differentiable = tuple(at for at, one in enumerate(outputs) if one.requires_grad)
            if not self.differentiable:
                raise InputError(
                    "no output depends on a parameter or input that requires a gradient",
                    fix="unfreeze parameters, or do not detach outputs; where the model itself differentiates, "
                    "torch.autograd.grad(..., create_graph=True); or prepare(..., training=False)",
                )
            wanted = [outputs[at] for at in self.differentiable]
            self.outputs = len(outputs)
            if gradients is None:
                gradients = self.templates = tuple(torch.ones_like(one.detach()) for one in wanted)
            named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
            leaves = {f"input {position}": tensors[position] for position in self.leaves}
            reached, self.functions = _reached(wanted, named | leaves)
            with phase("backward"), no_autocast(wanted[0].device.type), _hooks_silent(named.values()):
                others = [*tensors, *gradients, *self.model.parameters()]
                found = gradients_of(wanted, gradients, named | leaves, others)
        self.present = tuple(name for name in named if name in found)
        self.leaves_present = tuple(position for position in self.leaves if f"input {position}" in found)
        order = list(found)
        self.reached = tuple(frozenset(order.index(name) for name in one if name in found) for one in reached)
        return [one.detach() for one in outputs], list(found.values())


def in_better_layout(device: Device, whole: ForwardBackward, joint: Recorded, options: Options, step: Step) -> Recorded:
    """Forward and backward as they are, or with all their images channels last, whichever takes less time.

    What the forward saves is the backward's input: the layout is one for both, chosen before they are cut.
    """
    weights = turnable(joint.recording.program)
    if device.kind != "cuda" or options.fuse == "none" or options.tune == "off" or not weights:
        return joint
    turned = ForwardBackward(whole.model, whole.leaves, weights)

    def recorded() -> Recorded:
        with step("record channels last"):
            return record_static(device, turned, joint.signature, strict=True, step=step)

    try:
        other = recorded() if options.fuse == "library" else None
        with step("choose layout"), no_autocast(joint.signature.device.type), state_kept(joint):
            runs: list[Callable[[], object]]
            if other is not None:
                runs = [partial(lift(one.recording), *joint.signature.tensors) for one in (joint, other)]
            else:  # a compiler makes others of the operators between convolutions, which can decide which is faster
                runs = convolutions_of_step(joint)
            plain_ns, turned_ns = device.call_times_ns(runs) if runs else (None, None)
        if plain_ns is None or turned_ns is None or plain_ns <= turned_ns:
            return joint
        return other or recorded()
    except Exception:  # of the model, which may ask for a view of what is contiguous no more
        return joint


def turnable(program: Program) -> frozenset[str]:
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


def _reached(
    outputs: Sequence[torch.Tensor], sources: Mapping[str, torch.Tensor]
) -> tuple[list[frozenset[str]], tuple[frozenset[tuple[int, int]], ...]]:
    """Follow each output back through autograd's graph.

    Returns, for each output, the names of the ``sources``, leaves, that its gradient reaches; and which outputs of
    autograd functions written in Python it comes from, as numbers of the function, over all outputs, and the output.
    """
    names = {torch.autograd.graph.get_gradient_edge(one).node: name for name, one in sources.items()}
    numbers: dict[Any, int] = {}
    reached, functions = [], []
    for output in outputs:
        edge = torch.autograd.graph.get_gradient_edge(output)
        pending: list[tuple[Any, int]] = [(edge.node, edge.output_nr)]
        seen: set[Any] = set()
        own = set()
        while pending:
            node, at = pending.pop()
            if node is None:
                continue
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                own.add((numbers.setdefault(node, len(numbers)), at))
            if node not in seen:
                seen.add(node)
                pending += node.next_functions
        reached.append(frozenset(names[node] for node in seen if node in names))
        functions.append(frozenset(own))
    return reached, tuple(functions)
