from contextlib import closing
from dataclasses import replace

import pytest
import torch

from benchmarks import models, training_ways, ways
from benchmarks.runner import measured
from benchmarks.store import OURS
from benchmarks.ways import Job, judged
from nimble_core import Nimble, Options
from tests.benchmarks.small_rows import ROWS
from tests.support.models import Wide

COMPILED = [pytest.param(way, marks=(pytest.mark.slow, pytest.mark.compiler)) for way in ("compile", "aoti")]


def opened(module, row):
    return module.open_case(row, models.load(row, "cpu", True), Job("", device="cpu", tiny=True))


@pytest.fixture
def case():
    with torch.inference_mode():
        yield opened(ways, ROWS["mlp"])


def right(found):
    return found["rel_err"] <= found["bound"] < found["effect"] and not found["notes"]


@pytest.mark.parametrize("way", ["eager", "eager-tuned", "torchscript", "ours", "ours-static", *ways.STEPS, *COMPILED])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of its own code
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # and of what it calls deprecated
def test_a_way_computes_what_eager_does(case, way):
    ready = ways.WAYS[way](case)
    assert right(ways.check(case, ready))
    assert ways.work_done(case, ready)["flops"] == 2 * 2 * (8 * 16 + 16 * 4)
    assert bool(ready.chosen) == (way in OURS)
    assert bool(ready.counts) == (way in OURS)


def test_static_outputs_follow_the_plan_of_ours(case):
    first = case.made["ours"] = ways.WAYS["ours"](case)
    static = ways.WAYS["ours-static"](case)
    assert (static.engine.plan, static.engine is first.engine) == (first.engine.plan, False)


def test_a_wrong_way_is_found_out(case):
    wrong = ways.Ready(lambda x: case.given.model(x) * 1.01)
    assert not right(ways.check(case, wrong))
    assert ways.check(case, replace(wrong, work_of="")) == {}, "other weights are not compared"


def test_outputs_that_show_nothing_are_called_void():
    assert judged(0.0, 0.0, 1e-3)["notes"] == ("void: eager's outputs move by only 0e+00",)
    assert judged(5e-4, 1e-3, 1e-3)["notes"]
    assert judged(5e-4, 1e-1, 1e-3)["notes"] == ()
    assert judged(float("nan"), float("inf"), 1e-3) == {"notes": ("void: eager's own outputs are not finite",)}
    assert judged(float("inf"), 1.0, 1e-3)["rel_err"] == 1e300, "JSON knows no infinity"


def test_a_plan_is_counted(case):
    held = ways.WAYS["streams"](case).counts
    assert {name: held[name] for name in ("calls", "edges", "matched", "width", "streams", "planned")} == {
        "calls": 3, "edges": 2, "matched": 2, "width": 1, "streams": 1, "planned": 0,
    }  # fmt: skip
    assert held["record s"] > 0
    assert "emitted" not in held, "on the host there is no graph to read"


@pytest.mark.gpu
def test_waits_are_counted_in_the_captured_graph():
    net = Nimble(Wide(branches=4).eval().cuda(), Options(fuse="none", policy="nimble"))
    with closing(net.prepare(torch.randn(4, 16, device="cuda"))):
        held = ways.counts_of(net.engines[0])
    assert held["emitted"] == held["planned"] == held["edges"] - held["matched"] > 0


@pytest.mark.parametrize("way", ["eager", "ours", "drop-in", "several", "drop-in-several"])
def test_a_step_learns_what_eager_learns(way):
    trained = opened(training_ways, ROWS["trained"])
    ready = training_ways.WAYS[way](trained)
    assert right(training_ways.check(trained, ready))
    assert ready.whole != way.startswith("drop-in")
    model = trained.given.make()
    lazy = replace(ready, run=lambda x, y: trained.given.loss_fn(model(x), y).detach())
    assert not right(training_ways.check(trained, lazy)), "who does not learn is found out"


def test_a_step_may_be_as_far_from_eager_as_rounding_takes_eager(monkeypatch):
    monkeypatch.setattr(training_ways, "_BOUND", dict.fromkeys(training_ways._BOUND, 0.0))
    trained = opened(training_ways, ROWS["trained"])
    found = training_ways.check(trained, training_ways._disturbed(trained, seed=9))
    assert 0 < found["rel_err"] < found["bound"]
    model = trained.given.make()
    lazy = replace(training_ways.WAYS["eager"](trained), run=lambda x, y: trained.given.loss_fn(model(x), y).detach())
    assert not right(training_ways.check(trained, lazy))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's
@pytest.mark.parametrize("row", ["mlp", "trained"])
@pytest.mark.parametrize("together", [False, True])
def test_every_way_is_measured_on_a_gpu(row, together, monkeypatch, tmp_path):
    # The runner gives each its own process. Where one marked its steps, a peer that marks none records a graph a call.
    monkeypatch.setattr("torch._inductor.cudagraph_trees.MarkStepBox.mark_step_counter", 0)
    module = training_ways if ROWS[row].training else ways
    job = Job("", "tests.benchmarks.small_rows", tiny=True, row=row, ways=module.DEFAULT, together=together)
    found = {one.way: one for one in measured(job, tmp_path)}
    assert {way: one.error for way, one in found.items()} == dict.fromkeys(module.DEFAULT, "")
    assert not any(one.wrong for one in found.values())
    graphed = {way for way, one in found.items() if one.host_us and one.device_us and one.launch_us and one.graphs}
    asked = {"ro"} if ROWS[row].training else set()  # its graphs need their calls: labels are indices
    assert graphed == {*module.DEFAULT} - {"eager", "eager-tuned", "compile"} - asked
