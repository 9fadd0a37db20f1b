"""Whole training steps compared: what is measured, what stays as it was, and what the report says by phase."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nimble_viz
from nimble_core.ir.program import Phase
from nimble_core.runtime.host.device import HostDevice
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError, NimbleError
from nimble_viz.analysis.dag_boxes import nest
from nimble_viz.analysis.payload import unpack, view_data
from nimble_viz.analysis.phases import PHASES, phase_syncs, phases, span_phases
from nimble_viz.analysis.summary import verdict
from nimble_viz.collect.compare import compare
from nimble_viz.collect.compare_training import Training, TrainingRun
from nimble_viz.collect.peers import resolve_peers
from nimble_viz.collect.progress import Progress
from nimble_viz.render.report import Report
from nimble_viz.render.text import plain_text
from nimble_viz.report.data import HostSync
from tests.core.api.test_train_step import Island

TRAINED = get_args(Phase)
FAST = Options(fuse="none", budget_s=0.05)
ONE = Options(fuse="none", policy="single", tune="off", budget_s=0.05)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor, *, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.left(x) + self.right(x)) * scale
        return self.head(self.drop(x).mean((2, 3))) * self.frozen


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=1e-3)


def begun(net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer in the midst of training, with a scheduler, and gradients that are somebody's."""
    optimizer = torch.optim.Adam([{"params": net.head.parameters(), "lr": 0.01}, {"params": net.conv.parameters()}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(2):
        net(torch.randn(4, 3, 6, 6)).sum().backward()
        optimizer.step()
        scheduler.step()
    return optimizer


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,))


def trained(
    net: nn.Module, *args: Any, options: Options = FAST, progress: Progress | None = None, **more: Any
) -> Report:
    given = {"loss_fn": nn.CrossEntropyLoss(), **more}
    return compare(net, *args, training=True, options=options, progress=progress or Progress(), **given)


def scaling(used: bool = True, **more: Any) -> torch.amp.GradScaler:
    """A scaler of the host, in the midst of training if ``used``."""
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 256.0, "growth_interval": 3, **more})
    if used:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def scale_of(scaler: torch.amp.GradScaler | None) -> Any:
    """Its state, and whether its tensors are the ones they were."""
    if scaler is None:
        return None
    held = (scaler._scale, scaler._growth_tracker)
    return scaler.state_dict(), [None if one is None else (id(one), one._version) for one in held], vars(scaler).keys()


def everything(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[list[int], list[torch.Tensor], Any]:
    """Who is who, all values, and the rest of the state."""
    tensors = [*net.parameters(), *net.buffers()]
    tensors += [one.grad for one in net.parameters() if one.grad is not None]
    rest: list[Any] = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [one.grad is None for one in net.parameters()],
    ]
    if optimizer is not None:
        for kept in optimizer.state.values():
            tensors += kept.values()
        rest += [len(optimizer.state), [{**group, "params": len(group["params"])} for group in optimizer.param_groups]]
        rest += [sorted(vars(optimizer))]
    rest += [sorted(vars(module)) for module in net.modules()]
    return [id(one) for one in tensors], [one.detach().clone() for one in tensors], copy.deepcopy(rest)


def unchanged(before: Any, after: Any) -> None:
    assert before[0] == after[0]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert before[2] == after[2]


class Failing(Progress):
    """Raises when the step called ``at`` is about to end; remembers the steps."""

    def __init__(self, at: str, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error
        self.names: list[str] = []

    @contextmanager
    def step(self, name: str) -> Iterator[Any]:
        self.names.append(name)
        with super().step(name) as step:
            yield step
            if name == self.at:
                raise self.error


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    net, (x, y) = Net(), batch()
    return trained(net, x, target=y, optimizer=sgd(net), options=replace(FAST, policy="nimble"))


# -- nothing is trained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, adam, begun, None])
def test_all_stays_as_it_was(make: Callable[[nn.Module], torch.optim.Optimizer] | None) -> None:
    net, (x, y) = Net(dropout=0.2), batch()
    optimizer = make(net) if make else None
    before = everything(net, optimizer)
    found = trained(net, x, target=y, optimizer=optimizer, against=["torchscript"])
    unchanged(before, everything(net, optimizer))
    assert found.complete
    assert found.measurement("eager") is not None
    assert not any(check.reason.startswith("the update") for check in found.checks)


STEPS = ["warm-up", "record again", "capture single", "measure", "check updates", "watch replays", "profile eager"]


@pytest.mark.parametrize("at", STEPS)
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupted"])
@pytest.mark.filterwarnings("ignore:compare was interrupted")
def test_all_stays_as_it_was_after_an_error(at: str, error: BaseException) -> None:
    net, (x, y) = Net(dropout=0.2), batch()
    optimizer, spy = begun(net), Failing(at, error)
    before = everything(net, optimizer)
    try:
        found = trained(net, x, target=y, optimizer=optimizer, progress=spy)
        assert not found.complete
    except (RuntimeError, KeyboardInterrupt) as raised:
        assert raised is error  # noqa: PT017  # or the run ends in a report of what there was
    assert at in spy.names
    unchanged(before, everything(net, optimizer))


def test_a_loss_that_fails_leaves_all_as_it_was() -> None:
    net, (x, y) = Net(), batch()
    optimizer = begun(net)
    before = everything(net, optimizer)
    with pytest.raises(NimbleError, match="loss is not a scalar"):
        trained(net, x, target=y, optimizer=optimizer, loss_fn=lambda output, target: output)
    unchanged(before, everything(net, optimizer))


# -- what is measured ------------------------------------------------------------------------------------------------


def test_the_report_of_a_step(report: Report) -> None:
    assert (report.model, report.dtype, report.batch) == ("Net", "float32", 4)
    calls = report.program.calls
    assert [phase for phase in PHASES if any(call.phase == phase for call in calls)] == list(TRAINED)
    assert {taken.name for taken in report.measurements} == {"eager", "single", "nimble"}
    assert any(call.module == "head" and call.phase == "backward" for call in calls)
    assert any(call.label == "_fused_sgd_" for call in calls if call.phase == "optimizer")
    assert report.ratio("single").value > 0
    assert next(check for check in report.checks if check.name == "single").passed
    assert "training" in verdict(report)
    assert report.overhead is not None
    assert not any("found in the profile" in text for text in report.overhead.warnings)


def test_eager_is_the_step_as_users_write_it() -> None:
    net, (x, y) = Net(), batch()
    twin = copy.deepcopy(net)
    optimizer, other = sgd(net), sgd(twin)
    step = Training(net, (x,), {}, target=y, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer)
    for _ in range(3):
        with step.gradients_kept():
            loss, _ = step.eager.step(*step.arguments)
        other.zero_grad()
        expected = nn.functional.cross_entropy(twin(x), y)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True))
    assert not optimizer.state
    assert all(one.grad is None for one in net.parameters())


def test_rounds_begin_with_the_same_parameters_and_state() -> None:
    net, (x, y) = Net(), batch()
    step = Training(net, (x,), {}, target=y, loss_fn=nn.CrossEntropyLoss(), optimizer=adam(net))
    rewind, before = step.rewinding(), copy.deepcopy(net.state_dict())
    held = {name: one.clone() for name, one in step.whole.named_buffers()}
    step.whole(*step.arguments)
    assert not torch.equal(net.conv.weight, before["conv.weight"])
    rewind()
    assert all(torch.equal(one, before[name]) for name, one in net.state_dict().items())
    assert all(torch.equal(one, held[name]) for name, one in step.whole.named_buffers())
    assert any("exp_avg" in name for name in held)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_in_other_strides_are_judged_by_fused_optimizers(device: str) -> None:
    net, (x, y) = Net().to(device), (one.to(device) for one in batch())
    fused = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=1e-3, fused=True)
    step = Training(net, (x,), {}, target=y, loss_fn=nn.CrossEntropyLoss(), optimizer=fused)

    def channels_last() -> Any:
        loss, output, gradients = step.whole(*step.arguments)
        moved = gradients["conv.weight"].contiguous(memory_format=torch.channels_last)
        return loss, output, {**gradients, "conv.weight": moved}

    assert net.conv.weight.is_contiguous()
    assert step.wrong_update(channels_last) == ""


def test_an_update_that_is_not_the_optimizers_is_found() -> None:
    net, (x, y) = Net(), batch()
    step = Training(net, (x,), {}, target=y, loss_fn=nn.CrossEntropyLoss(), optimizer=begun(net))
    rewind = step.rewinding()
    assert step.wrong_update(lambda: step.whole(*step.arguments)) == ""
    rewind()

    def twice() -> Any:
        step.whole(*step.arguments)
        return step.whole(*step.arguments)

    assert "is not what the optimizer makes" in step.wrong_update(twice)
    rewind()

    def frozen() -> Any:
        found = step.whole(*step.arguments)
        rewind()
        return found

    assert "is not what the optimizer makes" in step.wrong_update(frozen)


def test_losses_of_the_output_alone_and_keyword_inputs() -> None:
    net, (x, _) = Net(), batch()
    inputs = ((x,), {}), ((x,), {"scale": torch.ones(())}), ((), {"x": x, "scale": torch.ones(())})
    for args, kwargs in inputs:
        found = trained(net, *args, kwargs=kwargs, loss_fn=lambda output: output.square().mean(), options=ONE)
        assert found.checks[0].passed, found.checks
        assert {call.phase for call in found.program.calls} == {"forward", "loss", "backward"}
        assert "no optimizer was given" in " ".join(found.warnings)


def test_inputs_of_somebodys_graph_are_left_alone() -> None:
    net, (x, y) = Net(), batch()
    leaf = x.clone().requires_grad_()
    above = leaf * 2
    trained(net, above, target=y, optimizer=sgd(net), options=ONE)
    assert leaf.grad is None
    above.sum().backward()  # its graph is still there
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2.0))


def test_a_model_in_evaluation_mode_is_refused() -> None:
    net, (x, y) = Net().eval(), batch()
    with pytest.raises(InputError, match="Net is in evaluation mode"):
        trained(net, x, target=y, optimizer=sgd(net), options=ONE)
    assert not net.training


def test_inputs_go_by_the_names_of_the_call() -> None:
    net, (x, y) = Net(), batch()
    for more, names in (((), ["args[0]", "target"]), (("scale",), ["kwargs['x']", "kwargs['scale']", "target"])):
        found = trained(net, x, kwargs={name: torch.ones(()) for name in more}, target=y, options=ONE).program
        assert [found.storages[ref.storage].name for ref in found.inputs] == names
    with pytest.raises(InputError, match=r"args\[0\] is on cpu, target on meta"):
        trained(net, x, target=y.to("meta"))


# -- half precision and clipping -------------------------------------------------------------------------------------


HOW: dict[str, Callable[[], dict[str, Any]]] = {
    "autocast": lambda: {"autocast": torch.bfloat16},
    "clipped": lambda: {"clip_grad_norm": 0.01},
    "scaled": lambda: {"scaler": scaling()},
    "scaled anew": lambda: {"scaler": scaling(used=False)},
    "all": lambda: {"autocast": torch.bfloat16, "clip_grad_norm": 0.01, "scaler": scaling()},
}


def as_users_write_it(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_grad_norm: float | None = None,
) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = nn.functional.cross_entropy(net(data[0]), data[1])
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss).backward()
    if clip_grad_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make", [sgd, adam, begun])
def test_eager_casts_scales_and_clips_as_users_write_it(
    how: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    net, data = Net(), batch()
    given, optimizer = HOW[how](), make(net)
    twin, theirs = copy.deepcopy((net, optimizer))
    own = {**given, "scaler": copy.deepcopy(given.get("scaler"))}
    before = scale_of(given.get("scaler"))
    step = Training(net, data[:1], {}, target=data[1], loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, **given)
    for _ in range(3):
        with step.gradients_kept():
            loss, _ = step.eager.step(*step.arguments)
        assert torch.equal(loss.detach(), as_users_write_it(twin, theirs, data, **own))
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True))
    assert scale_of(given.get("scaler")) == before
    if own["scaler"] is not None:
        assert step.eager.scaler.state_dict() == own["scaler"].state_dict()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make", [sgd, begun])
def test_runs_and_the_recorded_step_do_the_same_work(
    how: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    net, (x, y) = Net(), batch()
    step = Training(
        net, (x,), {}, target=y, loss_fn=nn.CrossEntropyLoss(), optimizer=make(net), **HOW[how]()
    )  # fmt: skip
    rewind = step.rewinding()
    expected = step.whole(*step.arguments)
    after = [one.detach().clone() for one in (*step.whole.parameters(), *net.buffers())]
    scale = step.whole.scaler.state_dict() if step.whole.scaler else None
    rewind()
    with step.gradients_kept():
        loss, output, gradients = step.eager(*step.arguments)
        torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(output, expected[1])
        assert gradients.keys() == expected[2].keys()
        for name, one in gradients.items():
            torch.testing.assert_close(one, expected[2][name])
        norm = torch.stack([one.norm() for one in gradients.values()]).norm()
        assert (norm <= 0.0101) == (step.clip_grad_norm is not None)
    for mine, theirs in zip((*step.whole.parameters(), *net.buffers()), after, strict=True):
        torch.testing.assert_close(mine.detach(), theirs)
    if step.whole.scaler is not None:  # one scale for all, rewound with the parameters
        assert step.whole.scaler.state_dict() == scale
        rewind()
        assert step.whole.scaler.state_dict() != scale
        assert step.eager.scaler.get_scale() == step.whole.scaler.get_scale()


@pytest.mark.parametrize("how", HOW)
def test_all_stays_as_it_was_and_the_report_says_how_steps_ran(how: str) -> None:
    net, (x, y) = Net(dropout=0.2), batch()
    optimizer, given, own = begun(net), HOW[how](), Own()
    before, scale = everything(net, optimizer), scale_of(given.get("scaler"))
    found = trained(net, x, target=y, optimizer=optimizer, against=[own], **given)
    unchanged(before, everything(net, optimizer))
    assert scale_of(given.get("scaler")) == scale
    assert all(check.passed for check in found.checks), found.checks
    assert found.peers[0].check.passed, found.peers
    assert found.measurement("own") is not None
    text = " ".join(plain_text(found, 200).split())
    assert ("under bfloat16 autocast" in text) == ("under autocast to bfloat16" in text) == ("autocast" in given)
    assert ("clipped to a norm of 0.01" in text) == ("clip_grad_norm" in given)
    assert ("scaled by 256" in text) == ("scaler" in given)
    assert not any("not finite" in one for one in found.warnings)


@pytest.mark.parametrize("at", ["warm-up", "capture single", "measure", "check updates", "profile eager"])
def test_a_scaler_stays_as_it_was_after_an_error(at: str) -> None:
    net, (x, y) = Net(), batch()
    optimizer, scaler, error = begun(net), scaling(), RuntimeError("boom")
    before, scale = everything(net, optimizer), scale_of(scaler)
    spy = Failing(at, error)
    with pytest.raises(RuntimeError, match="boom"):
        trained(net, x, target=y, optimizer=optimizer, scaler=scaler, clip_grad_norm=1.0, progress=spy)
    unchanged(before, everything(net, optimizer))
    assert scale_of(scaler) == scale


def test_a_step_that_the_scaler_leaves_out_is_right_and_said() -> None:
    net, (x, y) = Net(), batch()
    optimizer, scaler = sgd(net), scaling(used=False, init_scale=3e38, backoff_factor=0.999)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 100 * nn.functional.cross_entropy(output, target)

    before = everything(net, optimizer)
    found = trained(net, x, target=y, optimizer=optimizer, scaler=scaler, loss_fn=loss_fn, options=ONE)
    unchanged(before, everything(net, optimizer))
    assert any("is not finite: eager and replays leave the update out" in text for text in found.warnings)
    assert not any(check.reason.startswith("the update") for check in found.checks)


def test_an_update_in_spite_of_a_gradient_that_is_not_finite_is_found() -> None:
    net, (x, y) = Net(), batch()
    step = Training(
        net, (x,), {}, target=y, loss_fn=nn.CrossEntropyLoss(), optimizer=begun(net), scaler=scaling()
    )  # fmt: skip

    def updated() -> Any:
        loss, output, gradients = step.whole(*step.arguments)
        return loss, output, {name: one * float("inf") for name, one in gradients.items()}

    assert "is not what the optimizer makes" in step.wrong_update(updated)


def test_a_disabled_scaler_is_none() -> None:
    net, (x, y) = Net(), batch()
    rms = torch.optim.RMSprop([one for one in net.parameters() if one.requires_grad])
    off = torch.amp.GradScaler("cpu", enabled=False)
    found = trained(net, x, target=y, optimizer=rms, scaler=off, options=ONE)
    assert found.checks[0].passed
    assert not any("scale" in text for text in found.warnings)


# -- peers -----------------------------------------------------------------------------------------------------------


class Own:
    """A peer that runs the model as it is, or ``times`` its output; only some train."""

    def __init__(self, name: str = "own", times: float = 1.0) -> None:
        self.name, self.times, self.closed = name, times, 0

    def prepare(self, model: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError("asked for inference")

    def prepare_training(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        self.model = model
        outer = self

        class Run:
            note = "as it is"

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return model(*args, **kwargs) * outer.times

            def close(self) -> None:
                outer.closed += 1

        return Run()


def test_peers_train_beside_on_modules_of_their_own() -> None:
    net, (x, y) = Net(), batch()
    own, wrong = Own(), Own("wrong", 1.5)
    before = everything(net, None)
    found = trained(
        net, x, target=y, optimizer=adam(net), against=[own, wrong, "torchscript", "cuda-graph"], options=ONE
    )
    unchanged(before, everything(net, None))
    results = {one.name: one for one in found.peers}
    assert results["own"].check.passed
    assert results["own"].note == "as it is"
    assert found.measurement("own") is not None
    assert own.model is not net
    assert own.model.conv.weight.data_ptr() == net.conv.weight.data_ptr()
    assert (own.closed, wrong.closed) == (1, 1)
    assert results["wrong"].check.differs
    assert "torchscript is for inference" in results["torchscript"].note
    assert "CUDA only" in results["cuda-graph"].note
    assert {taken.name for taken in found.measurements} == {"eager", "single", "own"}


def test_a_peer_that_draws_other_random_numbers_is_measured_and_said() -> None:
    net, (x, y) = Net(dropout=0.5), batch()

    class Drawing(Own):
        def prepare_training(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                torch.rand(3)
                return model(*args, **kwargs)

            return run

    found = trained(net, x, target=y, optimizer=sgd(net), against=[Drawing()], options=ONE)
    assert "random numbers" in found.peers[0].check.reason
    assert found.measurement("own") is not None


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, "all"])
def test_compile_trains(how: str | None) -> None:
    pytest.importorskip("torch._inductor")
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # torch's own: no compiler
        pytest.skip(f"no C++ compiler: {error}")
    net, (x, y) = Net(), batch()
    before = everything(net, None)
    peers, given = ["compile", "compile+freezing"], HOW[how]() if how else {}
    found = trained(net, x, target=y, optimizer=sgd(net), against=peers, options=ONE, **given)
    unchanged(before, everything(net, None))
    results = {one.name: one for one in found.peers}
    assert results["compile"].check.passed, results["compile"]
    assert found.measurement("compile") is not None
    assert "frozen weights" in results["compile+freezing"].note


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True], ids=["as it is", "cast, scaled and clipped"])
def test_peers_train_on_a_gpu(half: bool) -> None:
    net = Net().cuda()
    x, y = (one.cuda() for one in batch())
    names = ["cuda-graph", "compile:reduce-overhead"]
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0) if half else None
    how = {"autocast": torch.float16, "scaler": scaler, "clip_grad_norm": 1.0} if half else {}
    before, scale = everything(net, optimizer), scale_of(scaler)
    found = trained(net, x, target=y, optimizer=optimizer, against=names, **how)
    unchanged(before, everything(net, optimizer))
    assert scale_of(scaler) == scale
    assert {taken.name for taken in found.measurements} > {"eager", *names}, found.peers
    assert found.memory.eager_peak > 0


@pytest.mark.compiler
def test_compile_is_made_ready_forward_and_backward() -> None:
    counters = pytest.importorskip("torch._dynamo.utils").counters["aot_autograd"]
    net, (x, y) = Net(), batch()
    step = Training(net, (x,), {}, target=y, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd(net))
    backwards: list[bool] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: backwards.append(True) or one):
        run = step.peer(resolve_peers("compile")[0])
        made = counters["total"]
        assert backwards, "no backward ran"
        assert all(one.grad is None for one in net.parameters())
        run(*step.arguments)
        assert counters["total"] == made
    run.close()


@pytest.mark.gpu
def test_compiled_attention_with_dropout_trains() -> None:
    """Its backward reads the dropout's seed where the forward left it: a crash of the process if they do not match."""
    net = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True).cuda()
    x = torch.randn(4, 16, 64, device="cuda")
    found = trained(net, x, loss_fn=torch.mean, optimizer=sgd(net), against="compile:reduce-overhead", options=ONE)
    assert found.measurement("compile:reduce-overhead") is not None, found.peers


def test_all_built_in_peers_train_or_say_why() -> None:
    step = Training(Net(), (batch()[0],), {}, target=batch()[1], loss_fn=nn.CrossEntropyLoss(), optimizer=None)
    for one in resolve_peers(["torchscript", "eager-tuned", "compile+freezing", "cuda-graph"]):
        with pytest.raises(InputError):
            step.peer(one)


# -- by phase --------------------------------------------------------------------------------------------------------


def test_phases_add_up_to_the_profiled_step(report: Report) -> None:
    found = report.overhead.phases
    assert {one.phase for one in found} == set(TRAINED)
    for one in found:
        # On the host nothing waits: every nanosecond of a phase is overhead or work.
        assert one.overhead_ns + one.work_ns == pytest.approx(one.host_ns)
        assert one.host_ns > 0
    assert sum(one.host_ns for one in found) <= report.overhead.profiled_ns
    ends = sorted(span for one in found for span in one.spans)
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    by_calls = sum(row.work_ns for row in report.overhead.calls if report.program.calls[row.call].phase == "forward")
    assert next(one for one in found if one.phase == "forward").work_ns >= 0.9 * by_calls


def test_a_row_for_each_phase(report: Report) -> None:
    rows = phases(report)["rows"]
    assert [row["phase"] for row in rows] == list(TRAINED)
    assert sum(row["calls"] for row in rows) == len(report.program.calls)
    assert sum(row["cost_ns"] for row in rows) == pytest.approx(report.costs.total_ns)
    assert len(rows[0]["replays"]) == len(phases(report)["runs"]) == 2
    assert all(time for row in rows for time in row["replays"])
    plan = report.schedule("nimble")
    assert sum(one["count"] for one in phase_syncs(report, plan)) == len(plan.syncs) > 0


def test_loss_and_update_stand_under_the_users_lines(report: Report) -> None:
    for call in report.program.calls:
        for origin in call.origins:
            assert "nimble_viz" not in origin.file, call
        if call.phase == "loss":
            assert any(origin.file.endswith("test_compare_training.py") for origin in call.origins), call


def test_spans_have_the_phase_of_their_call(report: Report) -> None:
    for line in report.timelines:
        found = span_phases(report, line)
        for span, phase in zip(line.spans, found, strict=True):
            if span.call is not None:
                assert PHASES[phase] == report.program.calls[span.call].phase
        assert {PHASES[phase] for phase in found if phase >= 0} == set(TRAINED)


def test_text_page_and_file(report: Report, tmp_path: Path) -> None:
    text = plain_text(report, 100)
    assert "The training step by phase" in text
    assert "TrainStep(model, loss_fn, optimizer)" in text
    assert "waits: " in text
    page = view_data(report)
    assert json.loads(json.dumps(page))["summary"]["phases"]["rows"][0]["phase"] == "forward"
    named = [page["phases"][phase] for phase in unpack(page["timelines"][-1]["columns"]["phase"], page["strings"])]
    assert set(named) == set(TRAINED)
    assert nimble_viz.load(report.save(tmp_path / "step.nimble")) == report
    assert report.to_html(tmp_path / "step.html").stat().st_size > 10_000


def test_damaged_phases_are_refused(report: Report, tmp_path: Path) -> None:
    first, *rest = report.overhead.phases
    for wrong in (replace(first, spans=((5.0, 2.0),)), replace(first, work_ns=-1.0)):
        told = replace(report, overhead=replace(report.overhead, phases=(wrong, *rest)))
        with pytest.raises(NimbleError, match="cannot be saved"):
            told.save(tmp_path / "wrong.nimble")


def test_host_synchronisations_name_their_phase(report: Report) -> None:
    waits = (HostSync("aten::item", 3, 900.0, "net.py:4", "optimizer"),)
    told = replace(report, overhead=replace(report.overhead, host_syncs=waits))
    assert view_data(told)["host_syncs"][0]["phase"] == "optimizer"
    assert "aten::item (optimizer)" in plain_text(told, 120)


def test_memory_is_held_against_eagers_peak(report: Report) -> None:
    from nimble_viz.analysis.memory import memory

    held = dict(report.memory.engines)["single"]
    known = replace(report, memory=replace(report.memory, eager_peak=2 * held))
    on_host = memory(known)
    assert not any(row["against"] for row in on_host["engines"])  # how much a process grows is another measure
    assert on_host["facts"][0][0] == "Growth of the process in an eager run"
    assert "of eager's peak" not in plain_text(known, 120)
    known = replace(known, environment=replace(known.environment, device="cuda"))
    on_gpu = memory(known)
    assert next(row for row in on_gpu["engines"] if row["chosen"] or row["held"])["against"] == "0.50x"
    assert on_gpu["facts"][0][0] == "Eager's peak above model and optimizer state"
    assert "of eager's peak: what is held" in plain_text(known, 120)


class _Casting(HostDevice):
    """The host, telling how many tensors the run whose memory is asked for last has cast."""

    def memory_peak(self, run: Callable[[], object]) -> int:
        with _Casts() as casts:
            run()
        return casts.count


class _Casts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_weights_cast_in_a_region_around_the_comparison_belong_to_eagers_peak() -> None:
    """An engine holds what eager casts: that another run has left eager's in a cache is no saving."""
    net, (x, y) = Net(), batch()
    found = []
    for region in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with region:
            report = trained(net, x, target=y, options=ONE, device=_Casting(), autocast=torch.bfloat16)
        found.append(report.memory.eager_peak)
    assert found[0] == found[1] > 4


def test_phases_are_the_outermost_groups_of_the_graph() -> None:
    boxes = nest(["0.a", "0.a", "0.a", "0.a"], ["forward", "forward", "backward", "backward"])
    assert boxes.name == ("forward", "backward")
    boxes = nest(["0", "1", "1", "1", "0"], ["forward"] * 3 + ["backward"] * 2)
    assert boxes.name == ("forward", "backward", "1")


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_trained() -> None:
    net, (x, y) = Net(), batch()
    with pytest.raises(InputError, match=r"not a torch\.nn\.Module"):
        trained(torch.relu, x, target=y)
    with pytest.raises(InputError, match="training needs a loss"):
        trained(net, x, target=y, loss_fn=None)
    with pytest.raises(InputError, match="optimizer is a str"):
        trained(net, x, target=y, optimizer="sgd")
    with pytest.raises(InputError, match="LBFGS"):
        trained(net, x, target=y, optimizer=torch.optim.LBFGS(net.head.parameters()))
    with pytest.raises(InputError, match="SGD holds no parameter of the model"):
        trained(net, x, target=y, optimizer=sgd(Net()))
    hooked = sgd(net)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(InputError, match="hooks"):
        trained(net, x, target=y, optimizer=hooked)
    with pytest.raises(InputError, match="requires a gradient"):
        trained(Net().requires_grad_(False), x, target=y)
    with pytest.raises(InputError, match="given type Net itself"):
        trained(Net, x, target=y)


class Told(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()


@pytest.mark.parametrize("loss_fn", [nn.functional.mse_loss, Told(), partial(nn.functional.mse_loss, reduction="sum")])
def test_a_loss_of_a_target_needs_one(loss_fn: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(InputError, match=r"cannot be called with the model's output alone: .*'target'") as caught:
        trained(Net(), batch()[0], loss_fn=loss_fn)
    assert "target=" in caught.value.fix


def test_a_loss_of_the_output_alone_needs_none() -> None:
    net, x = Net(), batch()[0]
    for loss_fn in (torch.Tensor.mean, lambda output, target=None: output.mean(), lambda *given: given[0].mean()):
        assert trained(net, x, loss_fn=loss_fn, options=ONE).measurements


def test_an_error_of_the_loss_is_its_own() -> None:
    def broken(output: torch.Tensor) -> torch.Tensor:
        raise TypeError("its own")

    net, x = Net(), batch()[0]
    with pytest.raises(TypeError, match="its own"):
        trained(net, x, loss_fn=broken)


def test_what_cannot_be_cast_scaled_or_clipped() -> None:
    net, (x, y) = Net(), batch()
    optimizer = sgd(net)
    for given, match in (
        ({"autocast": torch.float64}, "no type to cast to"),
        ({"autocast": "bfloat16"}, "no type to cast to"),
        ({"scaler": 2.0}, "scaler is a float"),
        ({"clip_grad_norm": 0.0}, "not a positive number"),
        ({"clip_grad_norm": "1"}, "not a positive number"),
        ({"accumulate": 4}, "accumulate=4: compare measures steps that update"),
        ({"clip_grad_norm": 1.0, "optimizer": None}, "there is no optimizer"),
        ({"scaler": scaling(), "optimizer": torch.optim.RMSprop(net.head.parameters())}, "cannot leave out a step"),
    ):
        with pytest.raises(InputError, match=match):
            trained(net, x, target=y, **{"optimizer": optimizer, **given})
    half = Net().half()
    with pytest.raises(InputError, match="is float16"):
        trained(half, x.half(), target=y, optimizer=sgd(half), scaler=scaling())
    amid = scaling()
    amid.scale(net(x).sum()).backward()
    amid.unscale_(optimizer)
    with pytest.raises(InputError, match="scaler cannot be copied"):
        trained(net, x, target=y, optimizer=optimizer, scaler=amid)


@pytest.mark.parametrize(
    "more",
    [
        {"target": torch.ones(2)},
        {"loss_fn": nn.MSELoss()},
        {"optimizer": object()},
        {"autocast": torch.bfloat16},
        {"clip_grad_norm": 1.0},
    ],
)
def test_what_is_for_training_alone(more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="training=True"):
        compare(nn.Linear(2, 2), torch.ones(2), **more)


def test_eagers_backward_is_no_part_of_the_autocast_around_a_comparison() -> None:
    torch.manual_seed(0)
    model, x, y = Island().train(), torch.randn(4, 8), torch.randn(4, 8)
    loss_fn = nn.functional.mse_loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, _, found = TrainingRun(model, loss_fn, None, dict(model.named_parameters()))((x,), y)
    assert all(map(torch.equal, found.values(), expected))
