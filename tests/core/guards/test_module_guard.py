"""A model that is no longer the one that was prepared is noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from nimble_core import InputError, Nimble, Options, TrainStep
from nimble_core.guards.module_guard import Watch
from nimble_core.tracing.step_wrapper import Around

QUICK = Options(tune="off")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()


# -- parameters, buffers, submodules, modes ------------------------------------------------------------------------


def replace_parameter(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.zeros(4, 4))


def replace_data(net: Any) -> None:
    net[0].weight.data = torch.zeros(4, 4)


def train_a_part(net: Any) -> None:
    net[2].train()


def count_anew(net: Any) -> None:
    net[1].num_batches_tracked = net[1].num_batches_tracked.clone()  # another tensor of equal value


def swap_names(net: Any) -> None:
    scale, shift = net[1].weight, net[1].bias
    del net[1].weight, net[1].bias
    net[1].bias, net[1].weight = scale, shift  # the same tensors in the same order


def delete_table(net: Any) -> None:
    del net[0]._parameters


def swap_tensors(net: Any) -> None:
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(torch.zeros(4, 4)))  # the same object, another tensor in it


@torch.no_grad()
def set_memory(net: Any) -> None:
    net[1].running_mean.set_(torch.zeros(4))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "parameter": (replace_parameter, "0.weight is another tensor"),
    "parameter set to None": (lambda net: setattr(net[1], "bias", None), "1.bias is another tensor"),
    "parameter more": (
        lambda net: net[0].register_parameter("scale", nn.Parameter(torch.ones(4))),
        "0.scale was not there",
    ),
    "names swapped": (swap_names, "1.weight is another tensor"),
    "table gone": (delete_table, "0.weight is another tensor"),
    "buffer": (count_anew, "1.num_batches_tracked is another tensor"),
    "memory": (replace_data, "0.weight has other memory"),
    "memory swapped": (swap_tensors, "0.weight has other memory"),
    "memory of a buffer": (set_memory, "1.running_mean has other memory"),
    "submodule": (lambda net: net.__setitem__(0, nn.Linear(4, 4)), "0 is another module"),
    "submodule gone": (lambda net: net.__delitem__(2), "2 is another module"),
    "submodule more": (lambda net: net.append(nn.ReLU()), "3 was not there"),
    "mode": (train_a_part, "2 is in training mode"),
}


@pytest.mark.parametrize("way", CHANGES)
def test_what_a_replay_cannot_follow_is_noticed(way: str) -> None:
    net, (change, words) = model(), CHANGES[way]
    watch = Watch(net)
    assert watch.change() == watch.looked_through() == ""
    change(net)
    for _ in range(2):
        assert words in watch.change()
        assert words in watch.looked_through()


@pytest.mark.parametrize("way", ["parameter", "memory", "submodule", "submodule more", "mode"])
@pytest.mark.parametrize("first", [True, False])
def test_calls_refuse_what_they_cannot_follow(way: str, first: bool) -> None:
    net, x, (change, words) = model(), torch.randn(2, 4), CHANGES[way]
    replayed = Nimble(net, QUICK).prepare(x)
    # Not first: asked while the device is busy, as on a GPU.
    object.__setattr__(replayed, "_engines", (replace(replayed.engines[0], check_first=first),))
    change(net)
    for _ in range(2):
        with pytest.raises(InputError, match=words) as caught:
            replayed(x)
        assert "call prepare(...) again" in caught.value.fix


@torch.no_grad()
def test_values_may_change_and_buffers_may_come() -> None:
    net, x = model(), torch.randn(2, 4)
    replayed, watch = Nimble(net, QUICK).prepare(x), Watch(net)
    net[0].weight.mul_(2)
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    net[1].register_buffer("later", torch.ones(1))
    net[0].register_parameter("none", None)
    assert torch.equal(replayed(x), net(x))
    assert watch.change() == ""
    net[1].later = torch.zeros(1)
    net[1].weight = None
    assert "1.weight is another tensor" in watch.change(), "what was added hides no change"


def transpose(net: Any) -> None:
    net[0].weight.data = net[0].weight.data.t()


def shorten(net: Any) -> None:
    net[0].weight.data = net[0].weight.data[:2]


@pytest.mark.parametrize("change", [transpose, shorten])
@pytest.mark.parametrize("fuse", ["none", "library"])
def test_refresh_refuses_another_layout_of_the_same_memory(change: Callable[[Any], object], fuse: Any) -> None:
    net, x = model(), torch.randn(2, 4)
    replayed = Nimble(net, Options(tune="off", fuse=fuse)).prepare(x)
    change(net)
    with pytest.raises(InputError, match=r"0\.weight has another shape or other strides than it had"):
        replayed.refresh()


class Scaled(nn.Module):
    """Numbers among the attributes, one of which each run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scaling, self.runs = nn.BatchNorm1d(4), {"default": 2.0}, 0
        self.limit, self.names = float("nan"), ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.norm(x) * self.scaling["default"]


SETTINGS: dict[str, Callable[[Scaled], object]] = {
    "norm.eps is 0.5, and was 1e-05": lambda net: setattr(net.norm, "eps", 0.5),
    "scaling is {'default': 1.0}, and was {'default': 2.0}": lambda net: net.scaling.update(default=1.0),
    "names is ['a', 'b'], and was ['a']": lambda net: net.names.append("b"),
    "limit is None, and was nan": lambda net: setattr(net, "limit", None),
}


@pytest.mark.filterwarnings("ignore:the forward changes attributes")
@pytest.mark.parametrize("said", SETTINGS)
@pytest.mark.parametrize("training", [False, True])
def test_refresh_refuses_another_number_among_the_attributes(said: str, training: bool) -> None:
    net, x = Scaled().train(training), torch.randn(3, 4)
    replayed = Nimble(net, Options(tune="off", fuse="none")).prepare(x, training=training)
    net(x)  # counts on
    replayed.refresh()
    SETTINGS[said](net)
    with pytest.raises(InputError) as caught:
        replayed.refresh()
    assert said in caught.value.what
    assert "prepare(...) again" in caught.value.fix


def without_mode() -> nn.Linear:
    layer = nn.Linear(4, 4)
    del layer.training
    return layer


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.jit.script(net),
        lambda net: torch.jit.trace(net, torch.ones(2, 4)),
        lambda net: net.append(without_mode()),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", ["memory", "parameter", "mode"])
def test_modules_that_keep_mode_or_tables_elsewhere(make: Callable[[Any], Any], nested: bool, way: str) -> None:
    made, (change, words) = make(model()), CHANGES[way]
    net = nn.Sequential(made) if nested else made
    watch = Watch(net, list(net.named_parameters()))
    assert watch.change() == watch.change() == ""
    change([getattr(made, str(at)) for at in range(3)])
    assert f"0.{words}" in watch.change() if nested else words in watch.change()


# -- asked from anywhere -------------------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_code_finds_the_same_forward() -> None:
    """To Dynamo no two methods are equal."""
    watch = Watch(nn.Linear(2, 2))
    asked = torch.compile(lambda watch, x: (x + 1, watch.change(), watch.looked_through()), backend="eager")
    assert asked(watch, torch.ones(1))[1:] == ("", "")


# -- hooks ---------------------------------------------------------------------------------------------------------


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def nothing(*args: object) -> None:
    return None


REGISTERED = [
    (lambda net: net[0].register_forward_hook(double), "0 has a forward hook that it had not"),
    (lambda net: net[2].register_forward_pre_hook(nothing), "2 has a forward pre-hook that it had not"),
    (lambda net: net.register_forward_hook(double), "the model has a forward hook that it had not"),
    (lambda net: nn.modules.module.register_module_forward_hook(nothing), "Module has a forward hook that it had not"),
    (
        lambda net: nn.modules.module.register_module_forward_pre_hook(nothing),
        "Module has a forward pre-hook that it had not",
    ),
]
OF_THE_BACKWARD = [
    (lambda net: net[0].register_full_backward_hook(nothing), "0 has a backward hook that it had not"),
    (lambda net: net[0].register_full_backward_pre_hook(nothing), "0 has a backward pre-hook that it had not"),
    (
        lambda net: nn.modules.module.register_module_full_backward_hook(nothing),
        "Module has a backward hook that it had not",
    ),
]


@pytest.mark.parametrize(("register", "words"), REGISTERED)
def test_hooks_registered_since(register: Callable[[nn.Sequential], Any], words: str) -> None:
    net, x = model(), torch.randn(2, 4)
    replayed = Nimble(net, QUICK).prepare(x)
    with register(net), pytest.raises(InputError, match=words):
        replayed(x)
    replayed(x)  # it was removed


@pytest.mark.parametrize(("register", "words"), REGISTERED + OF_THE_BACKWARD)
@pytest.mark.parametrize("holds_others", [False, True])
def test_hooks_removed_since(register: Callable[[nn.Sequential], Any], words: str, holds_others: bool) -> None:
    net = model().train()
    with register(net) if holds_others else nullcontext():  # a second one of the same function stays
        with register(net):
            watch = Watch(net)
            assert watch.change() == ""
        assert watch.change().endswith(words.replace("has a", "has lost a").removesuffix(" that it had not"))


@pytest.mark.parametrize(("register", "words"), OF_THE_BACKWARD)
def test_hooks_of_a_backward_matter_where_there_is_one(register: Callable[[nn.Sequential], Any], words: str) -> None:
    evaluated, training = model(), model().train()
    frozen = Around(model())
    watches = [Watch(evaluated), Watch(training), Watch(frozen)]
    with register(evaluated), register(training), register(frozen.model):
        assert watches[0].change() == ""
        assert words in watches[1].change()
        assert words in watches[2].change()
    assert [watch.change() for watch in watches] == [""] * 3


def test_a_hook_in_place_of_another_is_noticed() -> None:
    net = model()
    handle = net[0].register_forward_hook(double)
    watch = Watch(net)
    handle.remove()
    net[0].register_forward_hook(double)  # under another number
    assert watch.change() == watch.change() == ""
    net[0]._forward_hooks = {0: nothing}
    assert "0 has another forward hook" in watch.change()


class Installs(nn.Sequential):
    """Installs a hook when it first runs, as libraries do that collect hidden states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self[0]._forward_hooks:
            self[0].register_forward_hook(partial(lambda factor, module, args, output: output * factor, 2))
        return super().forward(x)


@torch.no_grad()
def test_hooks_that_the_model_installs_itself() -> None:
    net, x = Installs(*model()).eval(), torch.randn(2, 4)
    replayed = Nimble(net, QUICK).prepare(x)
    assert not net[0]._forward_hooks
    assert torch.equal(net(x), replayed(x))
    assert net[0]._forward_hooks
    assert torch.equal(net(x), replayed(x))
    with net[1].register_forward_hook(partial(lambda factor, module, args, output: output, 2)):
        assert "1 has a forward hook" in replayed.engines[0].watch.change()
    net[0]._forward_hooks.clear()
    assert torch.equal(net(x), replayed(x))


@pytest.mark.filterwarnings("ignore:the forward changes attributes")
@pytest.mark.parametrize(
    "part",
    [
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
        lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 2),
        lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
    ],
)
@torch.no_grad()
def test_what_has_hooks_or_makes_some_is_no_alarm(part: Callable[[], nn.Module]) -> None:
    net, x = nn.Sequential(part(), nn.ReLU()).eval(), torch.randn(2, 4)
    replayed = Nimble(net, Options(tune="off", strict=False)).prepare(x)
    for _ in range(2):
        torch.testing.assert_close(replayed(x), net(x))


# -- the model's own forward ---------------------------------------------------------------------------------------


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("owner", [lambda net: net, type], ids=["instance", "class"])
@pytest.mark.parametrize("training", [False, True])
def test_another_forward_is_noticed(owner: Callable[[Any], Any], training: bool) -> None:
    net, x = Twice(4, 4).train(training), torch.randn(2, 4)
    replayed = Nimble(net, QUICK).prepare(x, training=training)
    expected = net(x)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(owner(net), "forward", lambda *args: args[-1])
        for ask in (partial(replayed, x), replayed.refresh):
            with pytest.raises(InputError, match="forward is another function than it was"):
                ask()
    torch.testing.assert_close(replayed(x), expected)


def test_a_whole_step_notices_as_well() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    step = TrainStep(net, torch.Tensor.mean, torch.optim.SGD(net.parameters(), 0.1), options=QUICK)
    step.prepare(torch.randn(2, 4))(torch.randn(2, 4))
    net[0].register_full_backward_hook(nothing)
    with pytest.raises(InputError, match="0 has a backward hook that it had not"):
        step(torch.randn(2, 4))
