"""Peers that train beside the user's step, on modules of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.utils.errors import InputError
from nimble_viz.collect.compare_training import Training
from nimble_viz.collect.peers import resolve_peers
from tests.support.compared_steps import HOW, ONE, Net, adam, batch, everything, sgd, trained, unchanged


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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


@pytest.mark.parametrize("how", HOW)
def test_peers_train_as_eager_does(how: str) -> None:
    net, (x, y) = Net(dropout=0.2), batch()
    found = trained(net, x, target=y, optimizer=sgd(net), against=[Own()], options=ONE, **HOW[how]())
    assert found.peers[0].check.passed, found.peers
    assert found.measurement("own") is not None


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
@pytest.mark.parametrize("how", ["plain", "all"])
def test_compile_trains(how: str) -> None:
    pytest.importorskip("torch._inductor")
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # torch's own: no compiler
        pytest.skip(f"no C++ compiler: {error}")
    net, (x, y) = Net(), batch()
    before = everything(net, None)
    peers, given = ["compile", "compile+freezing"], HOW[how]()
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
    for one in resolve_peers(["torchscript", "eager-tuned", "compile+freezing", "cuda-graph"]):
        with pytest.raises(InputError):
            step.peer(one)
