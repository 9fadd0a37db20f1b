"""Recording a model twice: what is checked before, what is refused, and what may change from run to run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options
from nimble_core.runtime.fake import FakeDevice
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from nimble_core.utils.errors import CaptureError, InputError, NotStaticError
from tests.support.models import Wide

Forward = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A layer, and attributes for ``run`` to change."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.n, self.ready, self.table = 0, False, torch.zeros(0)
        self.state = {"n": 0}
        self.kept: list[torch.Tensor] = []
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def counted(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.n += 1
    return net.layer(x) * net.n


def counted_in_a_dict(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.state["n"] += 1
    return net.layer(x) * net.state["n"]


def set_up_by_the_first_input(net: Net, x: torch.Tensor) -> torch.Tensor:
    if not net.ready:
        net.ready = True
        net.mean.copy_(-x.mean(0))
    return net.layer(x + net.mean)


def grows(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.kept = [*net.kept, x.mean()]
    return net.layer(x) + torch.stack(net.kept).sum()


def only_counts(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.n += 1
    return net.layer(x)


def made_when_first_needed(net: Net, x: torch.Tensor) -> torch.Tensor:
    if net.n < len(x):
        net.n, net.table = len(x), torch.arange(float(len(x)))
    return net.layer(x) + net.table[:, None]


def made_beside_an_average(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.mean.mul_(0.9).add_(x.mean(0))
    return made_when_first_needed(net, x) + net.mean


REFUSED: dict[Forward, str] = {
    counted: "n",
    counted_in_a_dict: "state",
    set_up_by_the_first_input: "ready",
    grows: "kept",
}
TAKEN = (only_counts, made_when_first_needed, made_beside_an_average)


def unchanged(net: Net) -> Callable[[], bool]:
    """Asks whether the attributes of ``net`` are the same, and hold the same, as now."""
    attributes, values = dict(vars(net)), {name: value.clone() for name, value in net.state_dict().items()}
    return lambda: (
        all(vars(net)[name] is value for name, value in attributes.items())
        and all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
        and net.state == {"n": 0}
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("run", REFUSED)
def test_a_counter_that_the_next_run_depends_on_is_refused_by_name(run: Forward, training: bool) -> None:
    net = Net(run).train(training)
    same = unchanged(net)
    with pytest.raises(NotStaticError, match=rf"a run changes {REFUSED[run]}\b") as caught:
        Nimble(net, Options(fuse="none", tune="off")).prepare(torch.randn(5, 4), training=training)
    assert "test_recorded.py:" in caught.value.where
    assert f"register_buffer('{REFUSED[run]}'" in caught.value.fix
    assert same()


@pytest.mark.filterwarnings("ignore:the forward changes attributes")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("run", TAKEN)
def test_what_only_the_first_run_makes_may_be_made_by_each_replay(run: Forward, training: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(run).train(training), torch.randn(5, 4)
    replayed = Nimble(net, Options(fuse="none", tune="off")).prepare(x, training=training)
    eager = copy.deepcopy(net)
    for _ in range(3):
        x = torch.randn(5, 4)
        with torch.no_grad():
            assert torch.equal(replayed(x), eager(x))
    assert torch.equal(net.mean, eager.mean)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:the forward changes attributes")
def test_counters_on_a_gpu() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, device="cuda")
    for run, name in REFUSED.items():
        with pytest.raises(NotStaticError, match=rf"a run changes {name}\b"):
            Nimble(Net(run).eval().cuda(), Options(fuse="none", tune="off")).prepare(x)
    net = Net(only_counts).eval().cuda()
    with torch.no_grad():
        torch.testing.assert_close(Nimble(net, Options(fuse="none", tune="off")).prepare(x)(x), net(x))


def recorded(model: Any, *args: Any, device: FakeDevice | None = None, strict: bool = False, **kwargs: Any) -> Any:
    signature = check_inputs(model, args, kwargs)
    return record_static(device or FakeDevice(), model, signature, strict=strict, step=Stopwatch())


def test_inputs_are_checked() -> None:
    x = torch.randn(2, 16)
    assert check_inputs(Wide(), (x,), {}).paths == ["args[0]"]
    with pytest.raises(InputError, match="Wide itself"):
        check_inputs(Wide, (x,), {})
    with pytest.raises(InputError, match=r"kwargs\['x'\] is a Other, a class of its own"):
        check_inputs(Wide(), (), {"x": x.as_subclass(type("Other", (torch.Tensor,), {}))})
    with pytest.raises(InputError, match=r"parameter branches.0.weight is on meta, args\[0\] on cpu"):
        check_inputs(Wide().to("meta"), (x,), {})


@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())])
def test_a_branch_on_random_numbers_of_the_host_is_not_static(draw: Callable[[], float]) -> None:
    states = random.getstate(), numpy.random.get_state()[1].copy()
    with pytest.raises(NotStaticError):
        recorded(lambda x: x * draw(), torch.randn(3))
    assert random.getstate() == states[0]
    assert (numpy.random.get_state()[1] == states[1]).all()


def test_values_made_out_of_sight() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy() * 2)

    found = recorded(forward, torch.randn(3))
    assert found.whole
    assert "aten.add" in found.recording.unseen_where
    with pytest.raises(CaptureError, match="outside of torch") as caught:
        recorded(forward, torch.randn(3), strict=True)
    assert "aten.add" in caught.value.where

    class Cuda(FakeDevice):
        kind = "cuda"

    with pytest.raises(NotStaticError, match="outside of torch"):
        recorded(forward, torch.randn(3), device=Cuda())


def masked(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's masks do: a look at the values in eager, none in a capture."""
    if not torch.cuda.is_current_stream_capturing() and (x > 0).all():
        return x + 1
    return torch.where(x > 0, x, -x) + 1


def unmasked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.cuda.is_current_stream_capturing() else x + 1


def test_eagers_branch_is_recorded_where_it_can_be() -> None:
    program = recorded(unmasked, torch.ones(3)).recording.program
    assert [call.label for call in program.calls] == ["add"]
    assert program.notes == ()


def test_else_the_branch_that_the_model_keeps_for_captures() -> None:
    program = recorded(masked, torch.ones(3)).recording.program
    assert "where" in [call.label for call in program.calls]
    (note,) = program.notes
    assert "_local_scalar_dense" in note
    assert "test_recorded.py" in note
