"""Whole training steps compared: what is measured, what stays as it was, and what is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core.runtime.host.device import HostDevice
from nimble_core.utils.errors import InputError, NimbleError
from nimble_viz.collect.compare import compare
from nimble_viz.collect.compare_training import Training, TrainingRun
from nimble_viz.collect.progress import Progress
from nimble_viz.render.text import plain_text
from tests.support.compared_steps import (
    HOW,
    ONE,
    Net,
    adam,
    batch,
    begun,
    everything,
    scaling,
    sgd,
    trained,
    unchanged,
)
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
    text = " ".join(plain_text(found, 200).split())
    assert ("under bfloat16 autocast" in text) == ("under autocast to bfloat16" in text) == ("autocast" in given)
    assert ("clipped to a norm of 0.01" in text) == ("clip_grad_norm" in given)
    assert ("scaled by 256" in text) == ("scaler" in given)
    assert ("no optimizer was given" in text) == (make is None)
    assert not any("not finite" in one for one in found.warnings)


STEPS = ["warm-up", "record again", "capture single", "measure", "check updates", "watch replays", "profile eager"]


@pytest.mark.parametrize("at", STEPS)
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupted"])
@pytest.mark.filterwarnings("ignore:compare was interrupted")
def test_all_stays_as_it_was_after_an_error(at: str, error: BaseException) -> None:
    net, (x, y) = Net(dropout=0.2), batch()
    optimizer, scaler, spy = begun(net), scaling(), Failing(at, error)
    before = everything(net, optimizer, scaler)
    try:
        found = trained(net, x, target=y, optimizer=optimizer, scaler=scaler, clip_grad_norm=1.0, progress=spy)
        assert not found.complete
    except (RuntimeError, KeyboardInterrupt) as raised:
        assert raised is error  # noqa: PT017  # or the run ends in a report of what there was
    assert at in spy.names
    unchanged(before, everything(net, optimizer, scaler))


def test_a_loss_that_fails_leaves_all_as_it_was() -> None:
    net, (x, y) = Net(), batch()
    optimizer = begun(net)
    before = everything(net, optimizer)
    with pytest.raises(NimbleError, match="loss is not a scalar"):
        trained(net, x, target=y, optimizer=optimizer, loss_fn=lambda output, target: output)
    unchanged(before, everything(net, optimizer))


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
@pytest.mark.parametrize("make", [sgd, begun])
def test_eager_and_the_recorded_step_do_the_same_work(how: str, make: Make) -> None:
    net = Net()
    step = step_of(net, make, **HOW[how]())
    rewind = step.rewinding()
    expected = step.whole(*step.arguments)
    after = [one.detach().clone() for one in (*step.whole.parameters(), *net.buffers())]
    scale = step.whole.scaler.state_dict() if step.whole.scaler else None
    rewind()
    with step.gradients_kept():
        loss, output, gradients = step.eager(*step.arguments)
        torch.testing.assert_close((loss, output, gradients), tuple(expected))
        norm = torch.stack([one.norm() for one in gradients.values()]).norm()
        assert (norm <= 0.0101) == (step.clip_grad_norm is not None)
    for mine, theirs in zip((*step.whole.parameters(), *net.buffers()), after, strict=True):
        torch.testing.assert_close(mine.detach(), theirs)
    if step.whole.scaler is not None:  # one scale for all, rewound with the parameters
        assert step.whole.scaler.state_dict() == scale
        rewind()
        assert step.whole.scaler.state_dict() != scale
        assert step.eager.scaler.get_scale() == step.whole.scaler.get_scale()


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


@pytest.mark.parametrize("wrong", ["", "twice", "never", "in spite of infinite gradients"])
def test_an_update_that_is_not_the_optimizers_is_found(wrong: str) -> None:
    step = step_of(Net(), begun, **({"scaler": scaling()} if "infinite" in wrong else {}))
    rewind = step.rewinding()

    def replay() -> Any:
        loss, output, gradients = step.whole(*step.arguments)
        if wrong == "twice":
            return step.whole(*step.arguments)
        if wrong == "never":
            rewind()
        if "infinite" in wrong:
            gradients = {name: one * float("inf") for name, one in gradients.items()}
        return loss, output, gradients

    assert ("is not what the optimizer makes" in step.wrong_update(replay)) == bool(wrong)


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


# -- refusals --------------------------------------------------------------------------------------------------------


def hooked(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(net)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


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
    (lambda net: {"optimizer": "sgd"}, "optimizer is a str"),
    (lambda net: {"optimizer": torch.optim.LBFGS(net.head.parameters())}, "LBFGS"),
    (lambda net: {"optimizer": sgd(Net())}, "SGD holds no parameter of the model"),
    (lambda net: {"optimizer": hooked(net)}, "hooks"),
    (lambda net: {"autocast": torch.float64}, "no type to cast to"),
    (lambda net: {"autocast": "bfloat16"}, "no type to cast to"),
    (lambda net: {"scaler": 2.0}, "scaler is a float"),
    (lambda net: {"scaler": amid(net)}, "scaler cannot be copied"),
    (lambda net: {"scaler": scaling(), "optimizer": torch.optim.RMSprop(net.head.parameters())}, "cannot leave out"),
    (lambda net: {"clip_grad_norm": 0.0}, "not a positive number"),
    (lambda net: {"clip_grad_norm": "1"}, "not a positive number"),
    (lambda net: {"clip_grad_norm": 1.0, "optimizer": None}, "there is no optimizer"),
    (lambda net: {"accumulate": 4}, "accumulate=4: compare measures steps that update"),
    (lambda net: {"target": batch()[1].to("meta")}, r"args\[0\] is on cpu, target on meta"),
]


@pytest.mark.parametrize(("wrong", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_trained(wrong: Callable[[Net], dict[str, Any]], said: str) -> None:
    net, (x, y) = Net(), batch()
    given = {"model": net, "target": y, "optimizer": sgd(net), **wrong(net)}
    with pytest.raises(InputError, match=said):
        trained(given.pop("model"), x, **given)


def test_a_scaler_does_not_unscale_half_weights() -> None:
    half, (x, y) = Net().half(), batch()
    with pytest.raises(InputError, match="is float16"):
        trained(half, x.half(), target=y, optimizer=sgd(half), scaler=scaling())


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
