"""A model that is no longer the one that was prepared is noticed, and told from one whose values changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from nimble_core import InputError, Nimble, Options, TrainStep
from nimble_core.guards.module_guard import Watch, modules_behind, same_objects
from nimble_core.tracing.step_wrapper import Around
from tests.support.interrupts import interrupted


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()


def replace_parameter(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(torch.zeros(4, 4))


def replace_data(net: nn.Sequential) -> None:
    net[0].weight.data = torch.zeros(4, 4)


def replace_module(net: nn.Sequential) -> None:
    net[0] = nn.Linear(4, 4)


def assign_state(net: nn.Sequential) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def train_a_part(net: nn.Sequential) -> None:
    net[2].train()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (replace_parameter, "0.weight is another tensor"),
        (replace_data, "0.weight has other memory"),
        (replace_module, "0 is another module"),
        (assign_state, "another tensor"),
        (train_a_part, "2 is in training mode"),
        (nn.Module.double, "other memory"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_what_a_replay_cannot_follow_is_refused(
    change: Callable[[nn.Sequential], object], word: str, first: bool
) -> None:
    net, x = model(), torch.randn(2, 4)
    watch = Watch(net)
    replayed = Nimble(net, Options(tune="off")).prepare(x)
    # Not first: asked while the device is busy, as on a GPU.
    object.__setattr__(replayed, "_engines", (replace(replayed.engines[0], check_first=first),))
    assert watch.change() == ""
    change(net)
    assert word in watch.change()
    with pytest.raises(InputError, match="prepare") as caught:
        replayed(x)
    assert word in str(caught.value)


@torch.no_grad()
def test_values_may_change() -> None:
    net, x = model(), torch.randn(2, 4)
    replayed = Nimble(net, Options(tune="off")).prepare(x)
    net[0].weight.mul_(2)
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    assert torch.equal(replayed(x), net(x))


def test_a_function_without_modules_has_nothing_to_watch() -> None:
    assert Watch(lambda x: x).change() == ""
    assert Watch(torch.relu).change() == ""


NAMED = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()


class Pipeline:
    """A plain object that holds a module."""

    def __init__(self, net: nn.Module) -> None:
        self.unet = net

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.unet(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.unet(x)


def with_default(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor, through: nn.Module = net) -> torch.Tensor:
        return through(x)

    return run


def wrapped(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    @torch.no_grad()
    def run(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    return run


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda net: lambda x: net(x), "net."),
        (lambda net: net.forward, ""),
        (lambda net: Pipeline(net).decode, "unet."),
        (Pipeline, "unet."),
        (lambda net: partial(torch.func.functional_call, net, {}), "args[0]."),
        (lambda net: partial(lambda x, through: through(x), through=net), "through."),
        (with_default, "through."),
        (wrapped, "net."),
    ],
)
@pytest.mark.parametrize(
    ("change", "word"), [(assign_state, "0.weight is another tensor"), (nn.Module.train, "2 is in training mode")]
)
def test_modules_that_a_function_names_are_watched(
    make: Callable[[nn.Module], Callable[..., Any]],
    name: str,
    change: Callable[[nn.Module], object],
    word: str,
) -> None:
    net, x = model(), torch.randn(2, 4)
    function = make(net)
    watch = Watch(function)
    replayed = Nimble(function, Options(tune="off")).prepare(x)
    assert watch.change() == ""
    torch.testing.assert_close(replayed(x), net(x))
    change(net)
    assert watch.change().startswith(name)
    assert word.split(" ", 1)[1] in watch.change()
    with pytest.raises(InputError, match="not the one that was prepared"):
        replayed(x)


def test_globals_that_a_function_names_are_watched() -> None:
    watch = Watch(lambda x: NAMED(x))
    NAMED[1].train()
    try:
        assert watch.change() == "NAMED.1 is in training mode now"
    finally:
        NAMED[1].eval()


class Trainer:
    """An object with a module that only some of its methods use."""

    def __init__(self) -> None:
        self.teacher, self.student = model(), model()

    def teach(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        self.teacher.eval()
        return self.teacher(x)


class Coder(nn.Module):
    """A module of which one method uses one part."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = model(), model()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def test_modules_that_a_function_names_and_does_not_use_may_change() -> None:
    x, trainer, coder = torch.randn(2, 4), Trainer(), Coder().eval()
    teach = Nimble(trainer.teach, Options(tune="off")).prepare(x)
    trainer.student.train()
    trainer.student[0] = nn.Linear(4, 4)
    torch.testing.assert_close(teach(x), trainer.teacher(x))
    predict = Nimble(trainer.predict, Options(tune="off")).prepare(x)
    trainer.teacher.train()
    torch.testing.assert_close(predict(x), trainer.predict(x))
    encode = Nimble(coder.encode, Options(tune="off")).prepare(x)
    coder.decoder = nn.Identity()
    torch.testing.assert_close(encode(x), coder.encode(x))
    coder.encoder[0] = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"encoder\.0 is another module"):
        encode(x)


LAZY = nn.LazyLinear(4)


def test_what_functions_name_is_looked_at_with_care() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x if x.ndim else LAZY(x)

    run.__wrapped__ = run  # type: ignore[attr-defined]
    run.__signature__ = "none"  # type: ignore[attr-defined]
    x = torch.randn(2, 4)
    assert torch.equal(Nimble(run, Options(tune="off")).prepare(x)(x), x)


def test_a_function_with_a_variable_that_has_no_value_yet() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return later(x)

    assert Watch(run).change() == ""
    later = model()
    assert Watch(run).change() == ""
    assert next(iter(modules_behind(run))) == "later"


def transpose(net: nn.Sequential) -> None:
    net[0].weight.data = net[0].weight.data.t()


def shorten(net: nn.Sequential) -> None:
    net[0].weight.data = net[0].weight.data[:2]


@pytest.mark.parametrize("change", [transpose, shorten])
@pytest.mark.parametrize("fuse", ["none", "library"])
def test_another_layout_of_the_same_memory_is_found_when_asked_thoroughly(
    change: Callable[[nn.Sequential], object], fuse: str
) -> None:
    net, x = model(), torch.randn(2, 4)
    replayed = Nimble(net, Options(tune="off", fuse=fuse)).prepare(x)
    watch = Watch(net)
    change(net)
    assert watch.looked_through() == "0.weight has another shape or other strides than it had"
    with pytest.raises(InputError, match=r"0\.weight has another shape or other strides"):
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


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: net.append(nn.ReLU()), "3"),
        (lambda net: setattr(net[3], "bias", nn.Parameter(torch.ones(4))), "3.bias"),
        (lambda net: net[0].register_parameter("scale", nn.Parameter(torch.ones(4))), "0.scale"),
    ],
)
def test_a_module_or_parameter_more_is_a_change(change: Callable[[nn.Sequential], object], name: str) -> None:
    net, x = model(), torch.randn(2, 4)
    if name.startswith("3."):
        net.append(nn.Linear(4, 4, bias=False))
    replayed = Nimble(net, Options(tune="off")).prepare(x)
    change(net)
    for _ in range(2):
        with pytest.raises(InputError, match=rf"{name} was not there"):
            replayed(x)


def test_a_submodule_or_tensor_more_or_less() -> None:
    net = model()
    watch = Watch(net)
    net.register_buffer("later", torch.ones(1))
    net[0].register_parameter("none", None)
    assert watch.change() == ""
    net[0].weight.data = torch.zeros(4, 4)
    assert "0.weight has other memory" in watch.change()
    watch = Watch(net)
    del net[0].bias
    assert "0.bias is another tensor" in watch.change()
    watch = Watch(net)
    del net[2]
    assert "2 is another module" in watch.change()


def rename(net: nn.Module) -> None:
    prune.identity(net[0], "weight")  # the same parameter under another name


def count_anew(net: nn.Module) -> None:
    net[1].num_batches_tracked = net[1].num_batches_tracked.clone()  # another tensor of equal value


def swap_names(net: nn.Module) -> None:
    scale, shift = net[1].weight, net[1].bias
    del net[1].weight, net[1].bias
    net[1].bias, net[1].weight = scale, shift  # the same tensors in the same order


def replace_table(net: nn.Module) -> None:
    net[0]._parameters = {name: nn.Parameter(value.detach()) for name, value in net[0]._parameters.items()}


def swap_tensors(net: nn.Module) -> None:
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(torch.zeros(4, 4)))  # the same object, another tensor in it


@torch.no_grad()
def set_memory(net: nn.Module) -> None:
    net[1].running_mean.set_(torch.zeros(4))


def parametrize(net: nn.Module) -> None:
    parametrizations.weight_norm(net[0])


def swap_modules(net: nn.Module) -> None:
    net[0], net[1] = net[1], net[0]


def delete_table(net: nn.Module) -> None:
    del net[0]._parameters


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (rename, "0.weight is another tensor"),
        (count_anew, "1.num_batches_tracked is another tensor"),
        (swap_names, "1.weight is another tensor"),
        (replace_table, "0.weight is another tensor"),
        (delete_table, "0.weight is another tensor"),
        (swap_tensors, "0.weight has other memory"),
        (set_memory, "1.running_mean has other memory"),
        (parametrize, "0.weight is another tensor"),
        (swap_modules, "0 is another module"),
        (lambda net: net.to_empty(device="cpu"), "0.weight has other memory"),
        (lambda net: setattr(net[1], "bias", None), "1.bias is another tensor"),
        (lambda net: vars(net[1]).update(training=True), "1 is in training mode"),
        (lambda net: net[0]._parameters.clear(), "0.weight is another tensor"),
        (lambda net: net._modules.clear(), "0 is another module"),
        (lambda net: net.share_memory(), "0.weight has other memory"),
        (lambda net: setattr(net[2], "training", True), "2 is in training mode"),
    ],
)
def test_what_looks_alike_is_told_apart(change: Callable[[nn.Sequential], object], word: str) -> None:
    net = model()
    watch = Watch(net)
    assert watch.change() == ""
    change(net)
    assert word in watch.change()
    assert word in watch.change()


def test_entries_added_hide_no_change() -> None:
    net = model()
    watch = Watch(net)
    net[1].register_buffer("later", torch.ones(1))
    assert watch.change() == ""
    net[1].later = torch.zeros(1)
    net[1].weight = None
    assert "1.weight is another tensor" in watch.change()


class Alike(nn.ReLU):
    """Equal to every other of its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    __hash__ = nn.ReLU.__hash__


def test_equal_modules_are_not_the_same() -> None:
    net = nn.Sequential(Alike())
    watch = Watch(net)
    assert watch.change() == ""
    net[0] = Alike()
    assert "0 is another module" in watch.change()


class Mode(nn.Linear):
    """Keeps its mode elsewhere than modules do."""

    mode = False

    @property
    def training(self) -> bool:
        return self.mode

    @training.setter
    def training(self, mode: bool) -> None:
        self.mode = mode


def without_mode() -> nn.Linear:
    layer = nn.Linear(4, 4)
    del layer.training
    return layer


@pytest.mark.parametrize("make", [lambda: Mode(4, 4), without_mode])
@pytest.mark.parametrize("nested", [False, True])
def test_modes_that_are_no_entries_of_the_instance(make: Callable[[], nn.Linear], nested: bool) -> None:
    layer = make()
    net = nn.Sequential(layer) if nested else layer
    watch, name = Watch(net), "0.weight" if nested else "weight"
    assert watch.change() == watch.change() == ""
    layer.weight.data = torch.zeros(4, 4)
    assert f"{name} has other memory" in watch.change()
    watch = Watch(net)
    layer.weight = nn.Parameter(torch.zeros(4, 4))
    assert f"{name} is another tensor" in watch.change()


def test_a_mode_that_is_a_property_is_followed() -> None:
    net = nn.Sequential(Mode(4, 4).train())
    watch = Watch(net)
    assert watch.change() == ""
    net[0].mode = False
    assert "0 is in evaluation mode" in watch.change()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(2, 4))])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (replace_data, "0.weight has other memory"),
        (replace_parameter, "0.weight is another tensor"),
        (train_a_part, "2 is in training mode"),
    ],
)
def test_modules_of_torchscript(
    make: Callable[[nn.Module], Any], nested: bool, change: Callable[[Any], object], word: str
) -> None:
    compiled = make(model())
    net = nn.Sequential(compiled) if nested else compiled
    watch = Watch(net, list(net.named_parameters()))
    assert watch.change() == watch.change() == ""
    parts = [getattr(compiled, str(at)) for at in range(3)]  # type: ignore[attr-defined]
    change(parts)
    assert f"0.{word}" in watch.change() if nested else word in watch.change()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([{"a": torch.ones(2)}], [{"a": torch.ones(2)}]),
        ([torch.ones(())], [torch.ones(())]),
        ([torch.ones(2)], [np.ones(2)]),
        ([np.ones(2)], [np.ones(2)]),
        ([{"a": 1}], [{"b": 1}]),
    ],
)
def test_same_objects_are_told_from_equal_ones(one: Any, other: Any) -> None:
    assert same_objects(one, copy.copy(one))
    assert not same_objects(one, other)
    with torch._C.DisableTorchFunction():
        assert not same_objects(one, other)


class Count(TorchFunctionMode):
    """Counts the calls that pass through it."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_disabled_by_the_caller_hide_no_change() -> None:
    net = model()
    watch = Watch(net)
    with torch._C.DisableTorchFunction():
        assert watch.change() == ""
        count_anew(net)
        assert "1.num_batches_tracked is another tensor" in watch.change()


def test_a_look_passes_through_no_mode() -> None:
    net, watch = watched()
    with Count() as mode:
        assert watch.change() == ""
        assert not watch.stale()
        assert mode.calls == 0
        net[0].weight = nn.Parameter(torch.zeros(4, 4))
        made = mode.calls
        assert "0.weight is another tensor" in watch.change()
        assert mode.calls == made


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
    replayed = Nimble(net, Options(tune="off")).prepare(x)
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
    evaluated, trained = model(), model().train()
    frozen = Around(model())
    watches = [Watch(evaluated), Watch(trained), Watch(frozen)]
    with register(evaluated), register(trained), register(frozen.model):
        assert watches[0].change() == ""
        assert words in watches[1].change()
        assert words in watches[2].change()
    assert [watch.change() for watch in watches] == [""] * 3


def test_a_hook_registered_again_is_the_same() -> None:
    net, watched_method = model(), Alike().forward
    handles = [net[0].register_forward_hook(double), net[1].register_forward_hook(watched_method)]
    watch = Watch(net)
    for handle in handles:
        handle.remove()
    assert "0 has lost a forward hook" in watch.change()
    net[0].register_forward_hook(double)
    net[1].register_forward_hook(watched_method)
    assert watch.change() == watch.change() == ""
    net[0]._forward_hooks = {0: nothing}
    assert "0 has another forward hook" in watch.change()


def test_hooks_of_tensors_and_of_state_dicts_are_no_hooks_of_the_model() -> None:
    net = model()
    watch = Watch(net)
    net[0].weight.register_hook(nothing)
    net.register_state_dict_post_hook(nothing)
    net[1].register_load_state_dict_post_hook(nothing)
    assert watch.change() == ""


def test_a_table_of_hooks_replaced_while_it_was_empty() -> None:
    net = model()
    watch = Watch(net)
    net[0]._forward_hooks = OrderedDict()
    net[0].register_forward_hook(double)
    assert "0 has a forward hook" in watch.change()
    del net[0]._forward_hooks
    assert watch.change() == ""


class Installs(nn.Sequential):
    """Installs a hook when it first runs, as libraries do that collect hidden states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self[0]._forward_hooks:
            self[0].register_forward_hook(partial(lambda factor, module, args, output: output * factor, 2))
        return super().forward(x)


@torch.no_grad()
def test_hooks_that_the_model_installs_itself() -> None:
    net, x = Installs(*model()).eval(), torch.randn(2, 4)
    replayed = Nimble(net, Options(tune="off")).prepare(x)
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


@torch.no_grad()
def test_a_whole_step_notices_hooks() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    step = TrainStep(net, torch.Tensor.mean, torch.optim.SGD(net.parameters(), 0.1), options=Options(tune="off"))
    step.prepare(torch.randn(2, 4))(torch.randn(2, 4))
    with net[1].register_full_backward_hook(nothing), pytest.raises(InputError, match="1 has a backward hook"):
        step(torch.randn(2, 4))


# -- the model's own forward ---------------------------------------------------------------------------------------


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def of_the_instance(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "forward", lambda x: x)


def of_the_class(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(net), "forward", lambda self, x: x)


@pytest.mark.parametrize("change", [of_the_instance, of_the_class])
@pytest.mark.parametrize("training", [False, True])
def test_another_forward_is_noticed(change: Callable[..., None], training: bool) -> None:
    net, x = Twice(4, 4).train(training), torch.randn(2, 4)
    replayed = Nimble(net, Options(tune="off")).prepare(x, training=training)
    expected = net(x)
    with pytest.MonkeyPatch.context() as monkeypatch:
        change(net, monkeypatch)
        for ask in (partial(replayed, x), replayed.refresh):
            with pytest.raises(InputError, match="forward is another function than it was"):
                ask()
    torch.testing.assert_close(replayed(x), expected)


def test_a_whole_step_notices_another_forward() -> None:
    net = Twice(4, 4)
    step = TrainStep(net, torch.Tensor.mean, torch.optim.SGD(net.parameters(), 0.1), options=Options(tune="off"))
    step.prepare(torch.randn(2, 4))(torch.randn(2, 4))
    net.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(InputError, match="forward is another function than it was"):
        step(torch.randn(2, 4))


def test_the_same_forward_bound_again_is_the_same() -> None:
    net = Twice(4, 4)
    watch = Watch(net)
    net.forward = net.forward  # type: ignore[method-assign]
    assert watch.change() == watch.looked_through() == ""
    watch = Watch(net)
    del net.forward
    assert watch.change() == watch.looked_through() == ""


def test_a_forward_that_is_made_each_time_anew_is_no_alarm() -> None:
    net = type("Made", (Twice,), {"forward": property(lambda self: partial(Twice.forward, self))})(4, 4)
    watch = Watch(net)
    assert watch.change() == watch.looked_through() == ""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        torch.jit.script,
        lambda net: torch.jit.freeze(torch.jit.script(net)),
        lambda net: torch.jit.trace(net, torch.ones(2, 4)),
        lambda net: torch.compile(net, backend="eager"),
        torch.fx.symbolic_trace,
    ],
)
def test_a_forward_that_a_compiler_made_is_watched_too(make: Callable[[nn.Module], Any]) -> None:
    net = make(model())
    watch = Watch(net)
    net(torch.randn(2, 4))
    assert watch.change() == watch.looked_through() == ""
    net.forward = lambda x: x
    assert watch.change() == watch.looked_through() == "forward is another function than it was"


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_code_finds_the_same_forward() -> None:
    """To Dynamo no two methods are equal."""
    watch = Watch(nn.Linear(2, 2))
    asked = torch.compile(lambda watch, x: (x + 1, watch.change(), watch.looked_through()), backend="eager")
    assert asked(watch, torch.ones(1))[1:] == ("", "")


@pytest.mark.parametrize("same", [True, False])
def test_interrupts_leave_no_guard_in_force(same: bool) -> None:
    net = model()
    watch, moments = Watch(net), 0
    if not same:
        net[0].weight = nn.Parameter(torch.ones_like(net[0].weight))
    for _ in interrupted(watch.change):
        moments += 1
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
        assert torch.ones(()) == torch.ones(())
    assert moments > 1
    assert bool(watch.change()) is not same


# -- values of what was folded -------------------------------------------------------------------------------------


def sources(net: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*net.named_parameters(), ("1.running_mean", net[1].running_mean), ("1.running_var", net[1].running_var)]


def watched() -> tuple[nn.Sequential, Watch]:
    net = model()
    watch = Watch(net, sources(net))
    watch.folding()
    return net, watch


def step(net: nn.Module, made: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
    parameters = list(net.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in parameters]
    made(parameters).step()
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def train_once(net: nn.Sequential) -> None:
    net[1].train()(torch.randn(3, 4) + 2)
    net[1].eval()


def write_under_inference_mode(net: nn.Sequential) -> None:
    with torch.inference_mode():
        net[0].weight.mul_(2)


@torch.no_grad()
def write_a_view(net: nn.Sequential) -> None:
    net[0].weight.t()[0].zero_()


@torch.no_grad()
def average(net: nn.Sequential) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(net)
    for name, value in averaged.module.state_dict().items():
        net.state_dict()[name].copy_(value)


CHANGES = [
    lambda net: net.load_state_dict(net.state_dict()),
    lambda net: nn.init.normal_(net[0].weight),
    lambda net: net[1].running_mean.add_(1),
    lambda net: net[1].reset_running_stats(),
    train_once,
    write_under_inference_mode,
    write_a_view,
    average,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_values_are_noticed(change: Callable[[nn.Sequential], object]) -> None:
    net, watch = watched()
    assert not watch.stale()
    change(net)
    assert watch.stale()
    assert watch.change() == ""
    watch.folding()
    assert not watch.stale()


OPTIMIZERS = [
    (name, way)
    for name in torch.optim.__all__
    if isinstance(kind := getattr(torch.optim, name, None), type) and issubclass(kind, torch.optim.Optimizer)
    for way in (None, "foreach", "fused")
    if name not in ("Optimizer", "LBFGS", "Muon", "SparseAdam")  # these take a closure, matrices, sparse gradients
    and (way is None or way in kind.__init__.__annotations__)
]


def test_the_fused_optimizers_are_among_those_tested() -> None:
    assert {("SGD", "fused"), ("AdamW", "fused"), ("Adam", "fused"), ("RMSprop", "foreach")} <= set(OPTIMIZERS)


@pytest.mark.parametrize(("name", "way"), OPTIMIZERS)
def test_every_optimizer_is_noticed(name: str, way: str | None) -> None:
    net, watch = watched()
    step(net, lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1, **({way: True} if way else {})))
    assert watch.stale()


def test_fused_steps_show_in_no_version() -> None:
    net, _ = watched()
    versions = [parameter._version for parameter in net.parameters()]
    step(net, lambda parameters: torch.optim.AdamW(parameters, fused=True))
    assert [parameter._version for parameter in net.parameters()] == versions


def test_other_models_optimizers_do_not_matter() -> None:
    _, watch = watched()
    step(model(), lambda parameters: torch.optim.AdamW(parameters, fused=True))
    assert not watch.stale()


def test_an_optimizer_that_holds_the_memory_as_another_tensor() -> None:
    flat = torch.zeros(20, requires_grad=True)
    net = model()
    net[0].weight.data = flat.detach()[4:].view(4, 4)
    watch = Watch(net, [("0.weight", net[0].weight)])
    watch.folding()
    flat.grad = torch.ones(20)
    torch.optim.SGD([flat], lr=0.1, fused=True).step()
    assert net[0].weight[0, 0] != 0
    assert watch.stale()


@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda tensor: tensor.data])
def test_aliases_of_the_models_tensors_as_sources(alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net = model()
    watch = Watch(net, [(name, alias(tensor)) for name, tensor in sources(net)])
    for change in (*CHANGES, lambda net: step(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True))):
        watch.folding()
        assert not watch.stale()
        change(net)
        assert watch.stale()


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.detach().numpy().fill(7),
        lambda weight: torch.from_dlpack(weight.detach()).mul_(2),
    ],
)
def test_what_does_not_show_can_be_told(write: Callable[[torch.Tensor], Any]) -> None:
    net, watch = watched()
    write(net[0].weight)
    assert not watch.stale()
    watch.doubt()
    assert watch.stale()


def test_tensors_without_a_version_counter_are_named() -> None:
    with torch.inference_mode():
        net = model()
    watch = Watch(net, sources(net))
    assert set(watch.blind) == {name for name, _ in sources(net)}
    watch.folding()
    assert not watch.stale()
    watch.doubt()
    assert watch.stale()


def test_stale_until_folded_first() -> None:
    net = model()
    watch = Watch(net, sources(net))
    assert watch.stale()
    assert watch.folds == 0
    watch.folding()
    assert not watch.stale()
    assert watch.folds == 1


def test_where_nothing_is_folded_nothing_is_stale() -> None:
    net = model()
    watch = Watch(net)
    watch.doubt()
    step(net, lambda parameters: torch.optim.AdamW(parameters))
    assert not watch.stale()


def test_one_hook_for_all_and_no_watch_kept_alive() -> None:
    watches = [watched()[1] for _ in range(3)]
    ours = [hook for hook in optimizers._global_optimizer_post_hooks.values() if hook.__module__ == Watch.__module__]
    assert len(ours) == 1
    dead = weakref.ref(watches.pop())
    gc.collect()
    assert dead() is None
    assert not any(watch.stale() for watch in watches)


def test_sources_that_are_not_the_models() -> None:
    outside = torch.ones(3)
    watch = Watch(lambda x: x * outside, [("outside", outside.detach())])
    watch.folding()
    assert not watch.stale()
    outside.add_(1)
    assert watch.stale()
