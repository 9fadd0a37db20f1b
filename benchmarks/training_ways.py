"""Ways to take a training step: zero_grad, forward, loss, backward and optimizer, on data that lie on the device.

As in ``benchmarks.ways``, one function from a ``Case`` to a ``Ready``, which is called with a batch and returns the
loss. Each way has weights and an optimizer of its own, from the same values. What is captured or graphed runs in
channels_last, except in float32 without TF32; cuDNN has chosen by trial in both layouts before anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.models import Row, Training
from benchmarks.ways import STEPS, Case, Job, Ready, by_hand, judged, of_engine
from nimble_core.api.nimble import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.torch_compat.compiler import MODE_OPTIONS

ANCHOR = "compile-graph"
CUDA_ONLY = (ANCHOR, "graph", "ro", "step-graph", "graphed")
DEFAULT = (ANCHOR, "ours", "drop-in", "eager", "compile", *CUDA_ONLY[1:])
_BOUND = {"float32": 1e-4, "tf32": 3e-2}  # later updates are far off: batch norms on few pixels amplify rounding
_ROUNDING = {"float32": 2.0**-23, "tf32": 2.0**-11}
_OWN, _DRAWS = 2.0, 4  # allowed: so many times the furthest that eager gets from so many draws of such weights
Step = Callable[[Tensor, Tensor], Tensor]


def open_case(row: Row, given: Training, job: Job) -> Case:
    """Draw batches, and have cuDNN choose by trial what every way then finds."""
    case = Case(row, given, job, given.batch(), {}, (given.batch(), given.batch()))
    if job.device == "cuda":
        torch.backends.cudnn.benchmark = True
        for channels_last in (False, True):
            x = _laid_out(case) if channels_last else case.args[0]
            step = _step(case, *_model(case, channels_last=channels_last))
            for elsewhere in (True, False):  # choices are kept by thread; our backward runs in this one
                with torch.autograd.set_multithreading_enabled(elsewhere):
                    step(x, case.args[1])
        torch.backends.cudnn.benchmark = False
    return case


def check(case: Case, ready: Ready) -> dict[str, Any]:
    """How far the weights' first update is from eager's, relative to it: fields of a record."""

    def update(way: Ready) -> Tensor:
        weights = way.reset()
        before = [one.detach().to(torch.float64, copy=True) for one in weights]
        way.run(*case.others[0])
        return torch.cat([(one.detach() - was).flatten() for one, was in zip(weights, before, strict=True)])

    want, got = update(_stepped(case)), update(ready)
    size = float(want.norm())
    error, bound = float((got - want).norm()) / size, _BOUND[case.row.precision]
    if bound < error < math.inf:  # what eager itself is off by
        own = [float((update(_disturbed(case, seed)) - want).norm()) / size for seed in range(_DRAWS)]
        bound = max(bound, _OWN * max(own))
    return judged(error if math.isfinite(error) else math.inf, 1.0, bound)


def _disturbed(case: Case, seed: int) -> Ready:
    """Make eager's step from weights that are off by what its precision rounds."""
    model, optimizer = _model(case)
    draw = torch.Generator(case.job.device).manual_seed(seed)
    for one in model.parameters():
        noise = torch.randn(one.shape, generator=draw, device=one.device)
        one.data.mul_(1 + _ROUNDING[case.row.precision] * noise)
    return Ready(_step(case, model, optimizer), reset=lambda: list(model.parameters()))


def _model(case: Case, *, channels_last: bool = False) -> tuple[torch.nn.Module, Optimizer]:
    model = case.given.make()
    if channels_last and case.row.dtype != "strict":  # tensor cores want it
        model = model.to(memory_format=torch.channels_last)
    optimizer = case.given.optimizer(model.parameters())
    for group in optimizer.param_groups if channels_last else ():  # to be captured
        group.update({"capturable": True} if "capturable" in group else {})
    return model, optimizer


def _laid_out(case: Case) -> Tensor:
    """Copy the batch in the layout of what is captured."""
    x = case.args[0]
    turned = x.dim() == 4 and case.row.dtype != "strict"
    return x.clone(memory_format=torch.channels_last if turned else torch.preserve_format)  # type: ignore[no-any-return]  # torch's clone returns Any


def _step(case: Case, model: Any, optimizer: Optimizer, mode: str = "", *, whole: bool = False) -> Step:
    """Make the step as it is written everywhere; model and loss compiled in a ``mode``, or the ``whole`` of it."""
    loss_fn = case.given.loss_fn

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model(x), y)  # type: ignore[no-any-return]  # as users write losses

    options = MODE_OPTIONS.require()(mode or "default")
    forward = torch.compile(loss_of, options=options, dynamic=False) if mode else loss_of

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    taken = torch.compile(step, dynamic=False) if whole else step

    def run(x: Tensor, y: Tensor) -> Tensor:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)  # Dynamo does not trace it
        return taken(x, y)

    return run


def _ready(case: Case, run: Step, model: torch.nn.Module, optimizer: Optimizer, **more: Any) -> Ready:
    """Make a way that trains ``model``, called three times."""
    for _ in range(3):
        run(*case.args)

    def reset() -> list[Tensor]:
        # In place: graphs know addresses. For SGD without dampening a momentum of zeros is as good as none.
        start = case.given.make().state_dict()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(start[name])
            for state in optimizer.state.values():
                for kept in filter(torch.is_tensor, state.values()):
                    kept.zero_()
        return list(model.parameters())

    return Ready(run, reset=reset, **{"work_of": "", **more})


def _captured(case: Case, step: Step) -> Step:
    """Capture the whole step as one CUDA graph: batches copied in, the loss overwritten by the next step."""
    torch.backends.cudnn.benchmark = True  # for layouts that compiled code makes up
    run = by_hand(Ready(step), (_laid_out(case), case.args[1]), {}, static=True).run
    torch.backends.cudnn.benchmark = False
    return run


def _stepped(case: Case, mode: str = "", *, captured: bool = False) -> Ready:
    """Make the step in eager; with a ``mode``, model and loss compiled; ``captured``: all of it, by hand."""
    model, optimizer = _model(case, channels_last=captured)
    run = _step(case, model, optimizer, mode)
    run = _captured(case, run) if captured else run
    kept = mode != "reduce-overhead"  # its graphs do without the optimizer, and need a call: labels are indices
    return _ready(case, run, model, optimizer, work_of="" if mode else "eager", whole=kept, alone=kept)


def _step_graph(case: Case) -> Ready:
    """Compile the whole step with its optimizer, and capture it; Dynamo breaks the graph at the backward."""
    model, optimizer = _model(case, channels_last=True)
    for group in optimizer.param_groups:  # Inductor fuses what is written out
        group.update(fused=False, foreach=True)
    _step(case, model, optimizer)(*case.args)  # makes the optimizer's state
    return _ready(case, _captured(case, _step(case, model, optimizer, whole=True)), model, optimizer)


def _graphed(case: Case) -> Ready:
    """Forward and backward of the model as CUDA graphs of torch's own."""
    model, optimizer = _model(case, channels_last=True)
    graphed: Any = torch.cuda.make_graphed_callables(model, (_laid_out(case),))
    return _ready(case, _step(case, graphed, optimizer), model, optimizer, whole=False)


def _ours(case: Case, *, drop_in: bool = False, given: Options | None = None) -> Ready:
    """Make the whole step one engine; or forward and backward inside the user's own loop, outputs static."""
    model, optimizer = _model(case)
    options = given or Options(budget_s=case.job.budget_s)
    if drop_in:
        net = Nimble(model, replace(options, outputs="static")).prepare(case.args[0], training=True)
        said = of_engine(_step(case, net, optimizer), net.engines[0])
    else:
        step = TrainStep(model, case.given.loss_fn, optimizer, options=options).prepare(*case.args)
        said = of_engine(step, step.engine)
    about = {name: getattr(said, name) for name in ("notes", "chosen", "counts")}
    return _ready(case, said.run, model, optimizer, whole=not drop_in, **about)


# Of the paper's; every weight gradient could have a stream of its own, so streams are capped.
_CAPPED = {name: replace(one, max_streams=32) for name, one in STEPS.items() if name != "fused"}

WAYS: Mapping[str, Callable[[Case], Ready]] = {
    "eager": _stepped,
    "graph": lambda case: _stepped(case, captured=True),
    "compile": lambda case: _stepped(case, "default"),
    "ro": lambda case: _stepped(case, "reduce-overhead"),
    ANCHOR: lambda case: _stepped(case, "default", captured=True),
    "step-graph": _step_graph,
    "graphed": _graphed,
    "ours": _ours,
    "drop-in": lambda case: _ours(case, drop_in=True),
    **{name: partial(_ours, given=one) for name, one in _CAPPED.items()},
    **{f"drop-in-{name}": partial(_ours, drop_in=True, given=_CAPPED[name]) for name in ("one-stream", "several")},
}
