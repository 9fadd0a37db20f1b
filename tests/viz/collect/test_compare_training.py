"""Whole training steps compared: what is measured, what stays as it was, and what is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import nn

from nimble_core.ir.program import Phase
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.dag_layout import nest
from nimble_viz.analysis.live_memory import memory
from nimble_viz.analysis.phases import PHASES, phases
from nimble_viz.analysis.tiles import verdict
from nimble_viz.collect.compare import compare
from nimble_viz.collect.compare_training import Training, TrainingRun
from nimble_viz.render.report import Report
from nimble_viz.render.text import plain_text
from tests.support.compared_steps import (
    FAST,
    HOW,
    ONE,
    Net,
    Spy,
    adam,
    batch,
    begun,
    everything,
    scaling,
    sgd,
    trained,
    unchanged,
)
from tests.support.tables import shown
from tests.support.training_problems import Island

Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def step_of(net: nn.Module, make: Make, **more: Any) -> Training:
    x, y = batch()
    given = {"target": y, "loss_fn": nn.CrossEntropyLoss(), "optimizer": make(net), **more}
    return Training(net, (x,), {}, **given)


# -- nothing is trained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "how"), [(sgd, "plain"), (adam, "plain"), (None, "plain"), *((begun, how) for how in HOW)]
)
def test_all_stays_as_it_was_and_the_report_says_how_steps_ran(make: Make | None, how: str) -> None:
    net, (x, y) = Net(dropout=0.2), batch()
    optimizer, given = make(net) if make else None, HOW[how]()
    before = everything(net, optimizer, given.get("scaler"))
    found = trained(net, x, target=y, optimizer=optimizer, **given)
    unchanged(before, everything(net, optimizer, given.get("scaler")))
    assert found.complete
    assert all(check.passed for check in found.checks), found.checks
    text = " ".join(plain_text(found, 200, full=True).split())
    assert ("under bfloat16 autocast" in text) == ("under autocast to bfloat16" in text) == ("autocast" in given)
    assert ("clipped to a norm of 0.01" in text) == ("clip_grad_norm" in given)
    assert ("scaled by 256" in text) == ("scaler" in given)
    assert ("no optimizer was given" in text) == (make is None)
    assert not any("not finite" in one for one in found.warnings)


STEPS = ["warm-up", "record again", "capture single", "measure", "check equality", "watch replays", "profile eager"]


@pytest.mark.parametrize("at", STEPS)
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupted"])
@pytest.mark.filterwarnings("ignore:compare was interrupted")
def test_all_stays_as_it_was_after_an_error(at: str, error: BaseException) -> None:
    net, (x, y) = Net(dropout=0.2), batch()
    optimizer, scaler, spy = begun(net), scaling(), Spy(at, error, late=True)
    before = everything(net, optimizer, scaler)
    try:
        found = trained(net, x, target=y, optimizer=optimizer, scaler=scaler, clip_grad_norm=1.0, progress=spy)
        assert not found.complete
    except (RuntimeError, KeyboardInterrupt) as raised:
        assert raised is error  # noqa: PT017  # or the run ends in a report of what there was
    assert at in spy.names
    unchanged(before, everything(net, optimizer, scaler))


def test_inputs_of_somebodys_graph_are_left_alone() -> None:
    net, (x, y) = Net(), batch()
    leaf = x.clone().requires_grad_()
    above = leaf * 2
    trained(net, above, target=y, optimizer=sgd(net), options=ONE)
    assert leaf.grad is None
    above.sum().backward()  # its graph is still there
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2.0))


# -- what is measured ------------------------------------------------------------------------------------------------


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
def test_eager_is_the_step_as_users_write_it(how: str, make: Make) -> None:
    net, data = Net(), batch()
    given, optimizer = HOW[how](), make(net)
    twin, theirs = copy.deepcopy((net, optimizer))
    own = {**given, "scaler": copy.deepcopy(given.get("scaler"))}
    step = Training(net, data[:1], {}, target=data[1], loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, **given)
    for _ in range(3):
        with step.gradients_kept():
            loss, _ = step.eager.step(*step.arguments)
        assert torch.equal(loss.detach(), as_users_write_it(twin, theirs, data, **own))
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True))
    if own["scaler"] is not None:
        assert step.eager.scaler.state_dict() == own["scaler"].state_dict()


@pytest.mark.parametrize("how", HOW)
def test_rounds_begin_with_the_same_parameters_state_and_scale(how: str) -> None:
    step = step_of(Net(), begun, **HOW[how]())
    rewind = step.rewinding()
    held = [one.detach().clone() for one in (*step.whole.parameters(), *step.whole.buffers())]
    expected = step.whole(*step.arguments)
    rewind()
    assert all(map(torch.equal, held, (*step.whole.parameters(), *step.whole.buffers())))
    with step.gradients_kept():
        found = step.eager(*step.arguments)
    torch.testing.assert_close(found, tuple(expected))
    if step.whole.scaler is not None:  # one scale for all, rewound with the parameters
        changed = step.whole.scaler.state_dict()
        rewind()
        assert step.whole.scaler.state_dict() != changed
        assert step.eager.scaler.get_scale() == step.whole.scaler.get_scale()


def test_losses_of_the_output_alone_and_keyword_inputs() -> None:
    net, (x, _) = Net(), batch()
    inputs = ((x,), {}), ((x,), {"scale": torch.ones(())}), ((), {"x": x, "scale": torch.ones(())})
    for args, kwargs in inputs:
        found = trained(net, *args, kwargs=kwargs, loss_fn=lambda output: output.square().mean(), options=ONE)
        assert found.checks[0].passed, found.checks
        assert {call.phase for call in found.program.calls} == {"forward", "loss", "backward"}
        assert "no optimizer was given" in " ".join(found.warnings)


def test_inputs_go_by_the_names_of_the_call() -> None:
    net, (x, y) = Net(), batch()
    for more, names in (((), ["args[0]", "target"]), (("scale",), ["kwargs['x']", "kwargs['scale']", "target"])):
        found = trained(net, x, kwargs={name: torch.ones(()) for name in more}, target=y, options=ONE).program
        assert [found.storages[ref.storage].name for ref in found.inputs] == names


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


def test_a_disabled_scaler_is_none() -> None:
    net, (x, y) = Net(), batch()
    rms = torch.optim.RMSprop([one for one in net.parameters() if one.requires_grad])
    off = torch.amp.GradScaler("cpu", enabled=False)
    found = trained(net, x, target=y, optimizer=rms, scaler=off, options=ONE)
    assert found.checks[0].passed
    assert not any("scale" in text for text in found.warnings)


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


# -- the report ------------------------------------------------------------------------------------------------------

TRAINED = get_args(Phase)


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    net, (x, y) = Net(), batch()
    return trained(net, x, target=y, optimizer=sgd(net), options=replace(FAST, policy="nimble"))


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
    rows = shown(phases(report))
    assert list(rows) == list(TRAINED)
    assert sum(int(row["Calls"]) for row in rows.values()) == len(report.program.calls)
    shares = [row["cells"][3]["under"] for row in phases(report)["rows"]]
    assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=0.5)
    assert all(row["one-stream replay"] and row["nimble replay"] for row in rows.values())
    plan = report.schedule("nimble")
    assert plan.syncs


def test_loss_and_update_stand_under_the_users_lines(report: Report) -> None:
    for call in report.program.calls:
        for origin in call.origins:
            assert "nimble_viz" not in origin.file, call
        if call.phase == "loss":
            assert any(origin.file.endswith("compared_steps.py") for origin in call.origins), call


def test_memory_is_held_against_eagers_peak(report: Report) -> None:
    held = dict(report.memory.engines)["single"]
    known = replace(report, memory=replace(report.memory, eager_peak=2 * held))
    on_host = memory(known)
    assert (
        "Of eager's peak" not in shown(on_host["engines"])["one-stream replay"]
    )  # how much a process grows is another measure
    assert on_host["facts"][0][0] == "Growth of the process in an eager run"
    assert "Of eager's peak" not in plain_text(known, 120, full=True)
    known = replace(known, environment=replace(known.environment, device="cuda"))
    on_gpu = memory(known)
    assert shown(on_gpu["engines"])["one-stream replay"]["Of eager's peak"] == "0.50x"
    assert on_gpu["facts"][0][0] == "Eager's peak above model and optimizer state"
    assert "Of eager's peak: what is held" in plain_text(known, 120, full=True)


def test_phases_are_the_outermost_groups_of_the_graph() -> None:
    boxes = nest(["0.a", "0.a", "0.a", "0.a"], ["forward", "forward", "backward", "backward"])
    assert boxes.name == ("forward", "backward")
    boxes = nest(["0", "1", "1", "1", "0"], ["forward"] * 3 + ["backward"] * 2)
    assert boxes.name == ("forward", "backward", "1")


# -- refusals --------------------------------------------------------------------------------------------------------


def amid(net: nn.Module) -> torch.amp.GradScaler:
    """A scaler between ``unscale_`` and ``update``."""
    scaler = scaling()
    scaler.scale(net(batch()[0]).sum()).backward()
    scaler.unscale_(sgd(net))
    return scaler


REFUSED: list[tuple[Callable[[Net], dict[str, Any]], str]] = [
    (lambda net: {"model": torch.relu}, r"not a torch\.nn\.Module"),
    (lambda net: {"model": Net}, "given type Net itself"),
    (lambda net: {"model": Net().requires_grad_(False)}, "requires a gradient"),
    (lambda net: {"model": Net().eval()}, "Net is in evaluation mode"),
    (lambda net: {"loss_fn": None}, "training needs a loss"),
    (lambda net: {"loss_fn": nn.functional.mse_loss, "target": None}, "model's output alone"),
    (lambda net: {"optimizer": "sgd"}, "optimizer is a str"),
    (lambda net: {"optimizer": sgd(Net())}, "SGD holds no parameter of the model"),
    (lambda net: {"autocast": torch.float64}, "no type to compute in"),
    (lambda net: {"scaler": 2.0}, "scaler is a float"),
    (lambda net: {"scaler": amid(net)}, "scaler cannot be copied"),
    (lambda net: {"scaler": scaling(), "optimizer": torch.optim.RMSprop(net.head.parameters())}, "cannot leave out"),
    (lambda net: {"clip_grad_norm": 0.0}, "not positive"),
    (lambda net: {"clip_grad_norm": 1.0, "optimizer": None}, "there is no optimizer"),
    (lambda net: {"target": batch()[1].to("meta")}, r"args\[0\] is on cpu, target on meta"),
]


@pytest.mark.parametrize(("wrong", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_trained(wrong: Callable[[Net], dict[str, Any]], said: str) -> None:
    net, (x, y) = Net(), batch()
    given = {"model": net, "target": y, "optimizer": sgd(net), **wrong(net)}
    with pytest.raises(InputError, match=said):
        trained(given.pop("model"), x, **given)


@pytest.mark.parametrize(
    "more",
    [
        {"loss_fn": nn.MSELoss()},
        {"optimizer": object(), "clip_grad_norm": 1.0},
    ],
)
def test_what_is_for_training_alone(more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="training=True"):
        compare(nn.Linear(2, 2), torch.ones(2), **more)
