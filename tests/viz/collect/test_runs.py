"""Peers in a comparison: measured in the same rounds, or left out with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.runtime.fake import FakeDevice
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError, NimbleWarning
from nimble_viz.collect.compare import compare
from nimble_viz.collect.compare_training import Training
from nimble_viz.collect.peers import resolve_peers
from nimble_viz.collect.progress import Progress
from nimble_viz.render.report import Report
from tests.support.compared_steps import HOW, ONE, Net, Spy, adam, batch, everything, sgd, trained, unchanged
from tests.support.models import Norms, Wide

FAST = Options(budget_s=0.05)
NIMBLE = Options(policy="nimble", budget_s=0.05)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def beside(*peers: Any, model: Any = None, x: torch.Tensor | None = None, **more: Any) -> Report:
    """Compare a model with these peers on a device with exact times."""
    given = {"options": FAST, "device": FakeDevice(), "progress": Progress(), **more}
    return compare(model or Wide(), torch.randn(2, 16) if x is None else x, against=peers, **given)


class Beside:
    """A peer that is the model itself, changed as a test wants it."""

    def __init__(self, name: str = "own", prepare: Any = None, run: Any = None) -> None:
        self.name, self.started, self.run, self.closed = name, prepare, run, 0

    def prepare(self, model: Any, args: Any, kwargs: Any) -> Any:
        assert torch.is_inference_mode_enabled()
        if self.started:
            self.started()
        self.model = model
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.model(*args, **kwargs)
        return self.run(out) if self.run else out

    def close(self) -> None:
        self.closed += 1


def test_peers_are_measured_beside_in_the_same_rounds() -> None:
    device = FakeDevice(1000.0)

    def slow(out: Any) -> Any:
        device.advance(50.0)
        return out

    own = Beside(run=slow)
    spy = Spy()
    report = compare(
        Wide(), torch.randn(2, 16), against=[own, "eager-tuned"], options=NIMBLE, device=device, progress=spy
    )
    assert [taken.name for taken in report.measurements] == ["eager", "single", "nimble", "own", "eager-tuned"]
    assert set(report.measurement("own").samples_ns) == {50.0}
    assert len({len(taken.samples_ns) + taken.dropped for taken in report.measurements}) == 1
    assert report.chosen == "nimble"  # a peer is faster, but no plan of ours
    assert [result.name for result in report.peers] == ["own", "eager-tuned"]
    for result in report.peers:
        assert result.check.passed
        assert result.prepare_s > 0
        assert result.note == ""
    assert {check.name for check in report.checks} == {"single", "nimble"}
    assert spy.names.index("peer own") < spy.names.index("peer eager-tuned") < spy.names.index("measure")
    assert not any(step.name.startswith("peer") for step in report.preparation)
    assert own.closed == 1
    assert report.ratio("nimble", "own").value == pytest.approx(50.0 / report.measurement("nimble").median_ns)


def test_built_in_peers_on_the_host() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()
    x = torch.randn(2, 3, 6, 6)
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    names = ["compile", "compile+freezing", "eager-tuned", "cuda-graph"]
    report = compare(model, x, against=names, options=FAST, progress=Progress())
    assert [result.name for result in report.peers] == names
    assert [taken.name for taken in report.measurements][-3:] == names[:-1]
    for result in report.peers[:-1]:
        assert result.check.passed, result
        assert report.ratio(report.chosen, result.name) is not None
    refused = report.peers[-1]
    assert (refused.check, refused.prepare_s) == (None, 0.0)
    assert "on CUDA only" in refused.note
    assert any("cuda-graph" in warning and "on CUDA only" in warning for warning in report.warnings)
    assert report.complete
    assert report.chosen in {plan.policy for plan in report.schedules}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_peer_for_a_model_that_writes_its_state() -> None:
    model, x = Norms().train(), torch.randn(4, 3, 6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = beside("compile", "eager-tuned", model=model, x=x)
    assert all(result.check.passed for result in report.peers), report.peers
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def boom() -> None:
    raise RuntimeError("boom\nand where\nand a trace")


class Open(Beside):
    def close(self) -> None:
        self.closed += 1
        boom()


def late() -> Callable[[Any], Any]:
    """A run that fails while it is timed."""
    calls: list[int] = []

    def run(out: Any) -> Any:
        calls.append(1)
        if len(calls) == 20:
            boom()
        return out

    return run


def overwritten() -> Callable[[torch.Tensor], torch.Tensor]:
    """A run that overwrites its outputs."""
    kept: list[torch.Tensor] = []

    def run(out: torch.Tensor) -> torch.Tensor:
        kept[1:] = []
        kept.append(out.clone())
        kept[0].copy_(out)
        return kept[0]

    return run


BOOM = "RuntimeError: boom"
PEERS: dict[str, tuple[Callable[[str], Any], str, bool]] = {
    "same": (Beside, "", True),
    "overwrites its outputs": (lambda name: Beside(name, run=overwritten()), "", True),
    "cannot be closed": (Open, f"its close() failed: {BOOM}", True),
    "fails at once": (lambda name: Beside(name, prepare=boom), f"left out: {BOOM}", False),
    "fails in its first run": (lambda name: Beside(name, run=lambda out: boom()), f"left out: {BOOM}", False),
    "fails while timed": (lambda name: Beside(name, run=late()), f"left out: {BOOM}", False),
    "is wrong": (lambda name: Beside(name, run=lambda out: out + 1), "left out: outputs differ", False),
    "gives fewer outputs": (lambda name: Beside(name, run=lambda out: []), "left out: outputs differ", False),
    "gives another type": (
        lambda name: Beside(name, run=lambda out: out.double()),
        "left out: output is float64 where eager's is float32",
        False,
    ),
    "gives a tuple": (
        lambda name: Beside(name, run=lambda out: (out,)),
        "left out: output is tuple where eager's is a tensor",
        False,
    ),
    "single": (Beside, "left out: another run has this name", False),
}
"""By name: the peer, what is said of it, and whether it is measured."""


def test_what_is_measured_and_what_is_said_of_each() -> None:
    made = {name: make(name) for name, (make, _, _) in PEERS.items()}
    report = beside(*made.values())
    assert [result.name for result in report.peers] == list(PEERS)
    for result in report.peers:
        _, said, measured = PEERS[result.name]
        assert result.note.startswith(said), result
        assert bool(result.note) == bool(said), result
        assert (report.measurement(result.name) is not None) == (measured or result.name == "single")
        assert any(result.name in warning for warning in report.warnings) == bool(said)
        assert made[result.name].closed == (result.name not in ("fails at once", "single"))
    assert report.complete
    assert all(check.passed for check in report.checks)
    assert {check.name for check in report.checks} == {plan.policy for plan in report.schedules}


def test_what_cannot_be_checked_is_measured_and_said() -> None:
    report = beside(Beside(), model=lambda x: (x * 0).sum() + torch.ones(3), x=torch.randn(4))
    assert report.peers[0].check.void
    assert "void" in report.peers[0].note
    assert report.measurement("own") is not None


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interruption_while_a_peer_is_prepared_measures_what_is_ready() -> None:
    device = FakeDevice()
    peers = [Beside("first"), Beside("second", prepare=interrupt), Beside("third")]
    with pytest.warns(NimbleWarning, match="compare was interrupted"):
        report = beside(*peers, model=device.eager(Wide()), options=NIMBLE, device=device)
    assert not report.complete
    assert [taken.name for taken in report.measurements] == ["eager", "single", "nimble", "first"]
    assert report.ratio("nimble").decided
    assert {one.name: one.note for one in report.peers} == {
        "first": "", "second": "left out: interrupted", "third": "left out: interrupted",
    }  # fmt: skip
    assert [one.closed for one in peers] == [1, 0, 0]


@pytest.mark.gpu
def test_built_in_peers_on_a_gpu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    model, x = model.eval().cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    names = ["compile:reduce-overhead", "compile:reduce-overhead+freezing", "cuda-graph", "eager-tuned"]
    report = compare(model, x, against=names, options=FAST, progress=Progress())
    assert [result.name for result in report.peers] == names
    assert all(result.check.passed for result in report.peers), report.peers
    assert [taken.name for taken in report.measurements][-4:] == names
    assert report.peers[0].note == ""  # its CUDA graphs are in use
    assert torch.backends.cudnn.benchmark is False


# -- training ---------------------------------------------------------------------------------------------------------


class Trains:
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
    own, wrong = Trains(), Trains("wrong", 1.5)
    before = everything(net, None)
    found = trained(
        net, x, target=y, optimizer=adam(net), against=[own, wrong, "eager-tuned", "cuda-graph"], options=ONE
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
    assert "eager-tuned is for inference" in results["eager-tuned"].note
    assert "CUDA only" in results["cuda-graph"].note
    assert {taken.name for taken in found.measurements} == {"eager", "single", "own"}


@pytest.mark.parametrize("how", HOW)
def test_peers_train_as_eager_does(how: str) -> None:
    net, (x, y) = Net(dropout=0.2), batch()
    found = trained(net, x, target=y, optimizer=sgd(net), against=[Trains()], options=ONE, **HOW[how]())
    assert found.peers[0].check.passed, found.peers
    assert found.measurement("own") is not None


def test_a_peer_that_draws_other_random_numbers_is_measured_and_said() -> None:
    net, (x, y) = Net(dropout=0.5), batch()

    class Drawing(Trains):
        def prepare_training(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                torch.rand(3)
                return model(*args, **kwargs)

            return run

    found = trained(net, x, target=y, optimizer=sgd(net), against=[Drawing()], options=ONE)
    assert "random numbers" in found.peers[0].check.reason
    assert found.measurement("own") is not None


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True], ids=["as it is", "cast, scaled and clipped"])
def test_peers_train_on_a_gpu(half: bool) -> None:
    net = Net().cuda()
    x, y = (one.cuda() for one in batch())
    names = ["cuda-graph", "compile:reduce-overhead"]
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0) if half else None
    how = {"autocast": torch.float16, "scaler": scaler, "clip_grad_norm": 1.0} if half else {}
    before = everything(net, optimizer, scaler)
    found = trained(net, x, target=y, optimizer=optimizer, against=names, **how)
    unchanged(before, everything(net, optimizer, scaler))
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
    for one in resolve_peers(["eager-tuned", "compile+freezing", "cuda-graph"]):
        with pytest.raises(InputError):
            step.peer(one)
