"""Whole steps: what a prepared step leaves behind is what eager training would, and nothing else is touched."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nimble_core import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.saved_plan import Plan, load_plan
from nimble_core.tracing.provenance import label_of
from nimble_core.tracing.pytree import flatten
from nimble_core.training.optimizer import CapturedOptimizer
from nimble_core.training.whole_step import WholeStep
from nimble_core.utils.errors import CaptureError, DeviceError, InputError, NimbleError, NimbleWarning, NotStaticError
from nimble_viz import compare

QUICK = Options(tune="off", policy="single")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The same random numbers in each test; tensors this small gain nothing from more threads."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- what is trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A model, its loss, and data as ``draw()`` makes it: inputs and targets."""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor]
    draw: Callable[[], tuple[Any, Any]]


PROBLEMS: dict[str, Callable[[], Problem]] = {}


def problem(factory: Callable[[], Problem]) -> Callable[[], Problem]:
    """Register ``factory`` under its own name."""
    PROBLEMS[factory.__name__] = factory
    return factory


def made(name: str, device: str = "cpu") -> Problem:
    """The problem called ``name``, with the same weights every time, on ``device``."""
    torch.manual_seed(7)
    found = PROBLEMS[name]()

    def draw() -> tuple[Any, Any]:
        return tuple(moved(one, device) for one in found.draw())

    return Problem(found.model.to(device), found.loss_fn, draw)


def moved(value: Any, device: str) -> Any:
    """``value`` with its tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(one, device) for one in value)
    return value


class Residual(nn.Module):
    """Convolutions and batch norm around a sum."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        x = torch.relu(self.norm2(self.second(x)) + x)
        return self.head(x.mean((2, 3)))


class Inverted(nn.Module):
    """Depthwise convolutions between pointwise ones, as in MobileNetV2."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels))
        wide = 4 * channels
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
                nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide),
                nn.ReLU6(inplace=True), nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
            ) for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu6(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """Embedding, self-attention and feed-forward layers over tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 8), torch.randint(0, 4, (6,))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 13, (4, 6)), torch.randint(0, 10, (4,))


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


@problem
def resnet() -> Problem:
    return Problem(Residual(), nn.CrossEntropyLoss(), images)


@problem
def mobilenet() -> Problem:
    return Problem(Inverted(), F.cross_entropy, images)


@problem
def channels_last() -> Problem:
    model = Residual().to(memory_format=torch.channels_last)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        x, y = images()
        return x.to(memory_format=torch.channels_last), y

    return Problem(model, F.cross_entropy, draw)


@problem
def mlp() -> Problem:
    return Problem(perceptron(), F.cross_entropy, vectors)


@problem
def transformer() -> Problem:
    return Problem(Encoder(), F.cross_entropy, tokens)


@problem
def dropout() -> Problem:
    return Problem(Encoder(dropout=0.3), F.cross_entropy, tokens)


@problem
def recurrent() -> Problem:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(x)[0][:, -1])

    return Problem(Last(), F.cross_entropy, lambda: (torch.randn(3, 5, 8), torch.randint(0, 4, (3,))))


class Tied(nn.Module):
    """One weight in three places, one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.twice(self.embedding(tokens)))
        return self.head(torch.tanh(self.twice(x)) + self.embedding.weight.mean(0))


@problem
def shared() -> Problem:
    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    return Problem(Tied(), loss, lambda: (torch.randint(0, 13, (2, 5)), torch.randint(0, 13, (2, 5))))


@problem
def frozen() -> Problem:
    model = perceptron()
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return Problem(model, F.cross_entropy, vectors)


class Idle(nn.Module):
    """Two parameters that no output depends on, one of them in use without an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)
        self.loose = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.idle(x)


@problem
def unused() -> Problem:
    return Problem(Idle(), lambda output, targets: F.cross_entropy(output[0], targets), vectors)


@dataclass
class Two:
    """What a model may return."""

    logits: torch.Tensor
    extra: dict[str, Any]


class Nested(nn.Module):
    """Outputs in a dataclass, a dict and a tuple; one carries no gradient, one is an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Two:
        h = torch.tanh(self.body(x))
        h = h if scale is None else h * scale
        a = self.a(h)
        return Two(a, {"pair": (self.b(h), h.detach()), "best": a.argmax(1), "none": None, "name": "two"})


@problem
def nested() -> Problem:
    def loss(output: Two, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits, targets) + output.extra["pair"][0].square().mean()

    return Problem(Nested(), loss, vectors)


@problem
def keywords() -> Problem:
    def draw() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        x, y = vectors()
        return {"x": x, "scale": torch.rand(8)}, {"labels": y, "weight": torch.rand(4)}

    def loss(output: Two, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output.logits, targets["labels"], targets["weight"])

    return Problem(Nested(), loss, draw)


@problem
def no_targets() -> Problem:
    return Problem(perceptron(), lambda output: output.square().mean(), lambda: (vectors()[0], None))


class Aliases(nn.Module):
    """Parameters whose gradients are one tensor, are expanded from one element, or are windows of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))
        self.c, self.d = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 4))
        self.e, self.f = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x[:4] @ self.e.t(), self.d]) + self.a + self.b
        return y * self.f.t() + self.c.sum()


@problem
def aliases() -> Problem:
    return Problem(Aliases(), F.cross_entropy, lambda: (torch.randn(6, 4), torch.randint(0, 4, (6,))))


# -- eager training, to compare with ---------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # Fused, as the captured ones are: then results agree bit for bit.
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, fused=True),
}


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def twin(model: nn.Module) -> nn.Module:
    """A copy of its own memory; that of cuDNN's recurrent layers in one piece, as in the original."""
    found = copy.deepcopy(model)
    for module in found.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return found


class Eager:
    """Eager training of a copy of ``model``, step by step as a user writes it."""

    def __init__(
        self,
        given: Problem,
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> None:
        self.model, self.loss_fn = twin(given.model), given.loss_fn
        self.optimizer = optimizer(self.model.parameters())
        self.autocast, self.scaler, self.clip, self.accumulate = autocast, scaler, clip, accumulate
        self.done = 0
        self.output: Any = None
        self.gradients: dict[str, torch.Tensor] = {}

    def __call__(self, inputs: Any, targets: Any) -> torch.Tensor:
        if self.done % self.accumulate == 0:
            self.optimizer.zero_grad()
        kind = next(self.model.parameters()).device.type
        casting = torch.autocast(kind, dtype=self.autocast) if self.autocast else nullcontext()
        with casting:
            if isinstance(inputs, dict):
                self.output = self.model(**inputs)
            else:
                self.output = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
            loss = self.loss_fn(self.output) if targets is None else self.loss_fn(self.output, targets)
        share = loss / self.accumulate if self.accumulate > 1 else loss
        (self.scaler.scale(share) if self.scaler else share).backward()
        self.done += 1
        if self.done % self.accumulate == 0:
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        self.gradients = {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}
        return loss.detach()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> list[Any]:
    """Everything that training changes: names, and the tensors or numbers behind them."""
    kept: list[Any] = [(name, one) for name, one in model.state_dict().items()]
    if optimizer is not None:
        saved = optimizer.state_dict()
        for index, entry in sorted(saved["state"].items()):
            kept += [(f"{index} {key}", value) for key, value in sorted(entry.items())]
        kept += [(f"lr {at}", float(group["lr"])) for at, group in enumerate(saved["param_groups"])]
    if scaler is not None:
        kept += sorted(scaler.state_dict().items())
    return kept


def assert_same(a: Sequence[tuple[str, Any]], b: Sequence[tuple[str, Any]], *, rtol: float = 0.0) -> None:
    """The same names with the same values; bit for bit if ``rtol`` is 0."""
    assert [name for name, _ in a] == [name for name, _ in b]
    for (name, mine), (_, theirs) in zip(a, b, strict=True):
        if isinstance(mine, torch.Tensor) or isinstance(theirs, torch.Tensor):
            mine, theirs = torch.as_tensor(mine), torch.as_tensor(theirs)
            mine, theirs = mine.detach().cpu(), theirs.detach().cpu()
            assert mine.shape == theirs.shape, name
            torch.testing.assert_close(
                mine, theirs, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert mine == pytest.approx(theirs, rel=rtol or None, abs=rtol or None), name


def assert_values(a: Any, b: Any, *, rtol: float = 0.0) -> None:
    """Equal tensors in equal structures."""
    (mine, _), (theirs, _) = flatten(a), flatten(b)
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=rtol, atol=rtol, equal_nan=True)


def both(
    name: str,
    optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZERS["momentum"],
    *,
    options: Options = QUICK,
    autocast: torch.dtype | None = None,
    scaler: Callable[[], torch.amp.GradScaler] | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    device: str = "cpu",
) -> tuple[Problem, TrainStep, Eager]:
    """A problem with a prepared step and its eager twin."""
    given = made(name, device)
    scalers = (scaler(), scaler()) if scaler else (None, None)
    eager = Eager(given, optimizer, autocast=autocast, scaler=scalers[0], clip=clip, accumulate=accumulate)
    step = TrainStep(
        given.model,
        given.loss_fn,
        optimizer(given.model.parameters()),
        options=options,
        autocast=autocast,
        scaler=scalers[1],
        clip_grad_norm=clip,
        accumulate=accumulate,
    ).prepare(*given.draw())
    return given, step, eager


def train_both(given: Problem, step: TrainStep, eager: Eager, count: int = 4, *, rtol: float = 0.0) -> None:
    """Train both on the same data and random numbers; compare after each step."""
    for seed in range(count):
        inputs, targets = given.draw()
        theirs = copy.deepcopy((inputs, targets))
        torch.manual_seed(seed)
        loss = step(inputs, targets)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = eager(*theirs)
        assert torch.equal(after, torch.get_rng_state())
        assert_values(loss, expected, rtol=rtol)
        assert_values(step.outputs, eager.output, rtol=rtol)
        assert step.gradients.keys() == eager.gradients.keys()
        assert_values(step.gradients, {name: eager.gradients[name] for name in step.gradients}, rtol=rtol)
        assert_same(
            state_of(given.model, step.optimizer, step.scaler),
            state_of(eager.model, eager.optimizer, eager.scaler),
            rtol=rtol,
        )


# -- equal to eager --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_steps_equal_eager(name: str) -> None:
    given, step, eager = both(name)
    train_both(given, step, eager)
    assert all(one.grad is None for one in given.model.parameters())
    step.close()


ROUNDED = 1e-5
"""Relative: Adam's learning rate is a float32 tensor in a captured step, a double in eager."""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_eager(optimizer: str) -> None:
    given, step, eager = both("mlp", OPTIMIZERS[optimizer])
    train_both(given, step, eager, rtol=ROUNDED if optimizer.startswith("adam") else 0.0)
    step.close()


def test_expanded_and_transposed_gradients_equal_eager() -> None:
    given, step, eager = both("aliases", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    train_both(given, step, eager)
    step.close()


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adam])
def test_other_forms_of_an_optimizer_agree_closely(kind: type[torch.optim.Optimizer]) -> None:
    given, step, eager = both("mlp", lambda parameters: kind(parameters, lr=0.01))
    train_both(given, step, eager, rtol=2e-5)
    step.close()


@settings(max_examples=12)
@given(
    name=st.sampled_from(["mlp", "resnet", "dropout", "unused", "shared", "aliases"]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    clip=st.sampled_from([None, 0.05, 100.0]),
    accumulate=st.integers(1, 3),
    policy=st.sampled_from(["single", "nimble"]),
)
def test_any_combination_equals_eager(
    name: str, optimizer: str, clip: float | None, accumulate: int, policy: str
) -> None:
    options = Options(tune="off", policy=policy)
    given, step, eager = both(name, OPTIMIZERS[optimizer], clip=clip, accumulate=accumulate, options=options)
    for _ in range(2 * accumulate):
        inputs, targets = given.draw()
        random = torch.get_rng_state()
        loss = step(inputs, targets)
        torch.set_rng_state(random)
        assert_values(loss, eager(inputs, targets), rtol=1e-5)
        # Several workers split sums among threads as they like, and Adam takes a gradient of almost nothing for one.
        rtol = 1e-4 if policy == "single" else 3e-2
        assert_same(state_of(given.model, step.optimizer), state_of(eager.model, eager.optimizer), rtol=rtol)
    step.close()


def test_the_measured_choice_equals_eager() -> None:
    given, step, eager = both("resnet", options=Options(budget_s=1.0))
    assert step.engine is not None
    assert [one.name for one in step.engine.candidates if one.chosen] == [step.engine.schedule.policy]
    train_both(given, step, eager, rtol=1e-4)
    step.close()


def curves(
    name: str, steps: int, *, device: str = "cpu", rtol: float = 0.0, **how: Any
) -> tuple[list[float], list[float]]:
    """Losses of both over many steps on a few batches."""
    given, step, eager = both(name, device=device, **how)
    batches = [given.draw() for _ in range(4)]
    mine, theirs = [], []
    for at in range(steps):
        torch.manual_seed(at)
        mine.append(step(*batches[at % 4]))
        torch.manual_seed(at)
        theirs.append(eager(*batches[at % 4]))
    step.close()
    return torch.stack(mine).tolist(), torch.stack(theirs).tolist()


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "transformer", "dropout"])
def test_loss_curves_are_those_of_eager(name: str) -> None:
    mine, theirs = curves(name, 200)
    assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert sum(mine[-8:]) < 0.8 * sum(mine[:8])


class Gan:
    """A generator and a discriminator, as whole steps and eager."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).to(device)
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
        self.g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999), fused=True)
        self.d = torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.999), fused=True)

    def fools(self, fake: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.critic(fake)).mean()

    def tells(self, scores: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()


class Pair(nn.Module):
    """One network on real and made data."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, real: torch.Tensor, fake: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.critic(real), self.critic(fake)


def gan_data(count: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    angles = torch.rand(count, 16) * 6.3
    return [
        (torch.stack([one.cos(), one.sin()], 1).to(device), torch.randn(16, 4).to(device)) for one in angles.unbind()
    ]


def gan_curves(steps: int, device: str = "cpu", options: Options = QUICK) -> tuple[list[float], list[float]]:
    """Losses of discriminator and generator, one after the other, of prepared and eager training."""
    ours, theirs = Gan(device), Gan(device)
    data = gan_data(steps, device)
    real, noise = data[0]
    with torch.no_grad():
        example = torch.zeros_like(real)
    d_step = TrainStep(Pair(ours.critic), ours.tells, ours.d, options=options).prepare((real, example))
    g_step = TrainStep(ours.generator, ours.fools, ours.g, options=options).prepare(noise)
    mine, expected = [], []
    for real, noise in data:
        with torch.no_grad():
            fake = ours.generator(noise)
        mine += [d_step((real, fake)), g_step(noise)]
        with torch.no_grad():
            fake = theirs.generator(noise)
        theirs.d.zero_grad()
        loss = theirs.tells(Pair(theirs.critic)(real, fake))
        loss.backward()
        theirs.d.step()
        expected.append(loss.detach())
        theirs.g.zero_grad()
        loss = theirs.fools(theirs.generator(noise))
        loss.backward()
        theirs.g.step()
        expected.append(loss.detach())
    d_step.close()
    g_step.close()
    return torch.stack(mine).tolist(), torch.stack(expected).tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_of_probabilities_equal_eager(device: str) -> None:
    """One out of range is an error on the host, and on CUDA the end of all work on the device."""

    def problem() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12), nn.Sigmoid()).to(device)
        with torch.no_grad():
            net[2].bias += 30 * torch.tensor([1.0, 0.0, -1.0]).repeat(4).to(device)
        return net, torch.optim.Adam(net.parameters(), lr=1e-2)

    (net, optimizer), (twin, other) = problem(), problem()
    x, ones = torch.rand(16, 12, device=device), torch.ones(16, 12, device=device)
    assert twin(x).max() == 1, "a sigmoid is saturated"
    step = TrainStep(net, nn.BCELoss(), optimizer).prepare(x, x.clone())
    for target in (x.clone(), ones, x.round()):
        mine = step(x, target)
        other.zero_grad()
        theirs = nn.functional.binary_cross_entropy(twin(x), target)
        theirs.backward()
        other.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if device == "cuda":
        torch.cuda.synchronize()


def test_a_gan_of_two_steps_trains_as_in_eager() -> None:
    mine, theirs = gan_curves(200)
    assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert max(mine) > 1.05 * min(mine)


# -- random numbers --------------------------------------------------------------------------------------------------


def test_dropout_draws_fresh_masks_that_a_seed_brings_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25))
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    step = TrainStep(model, lambda out: out.mean() * 0, torch.optim.SGD(model.parameters(), lr=0.0), options=QUICK)
    x = torch.ones(500, 4)
    step.prepare(x)
    masks = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        step(x)
        masks.append(step.outputs != 0)
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert masks[0].float().mean().item() == pytest.approx(0.75, abs=0.04)
    step.close()


class Recomputed(nn.Module):
    """Computes its first part again in the backward, with the random numbers of the forward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.first, x, use_reentrant=False))


def test_recomputing_in_the_backward_equals_eager() -> None:
    given = Problem(Recomputed(0.0), F.cross_entropy, vectors)
    eager = Eager(given, OPTIMIZERS["momentum"])
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK).prepare(*given.draw())
    train_both(given, step, eager)
    step.close()


def test_large_models_are_updated_in_parts() -> None:
    """Neighbours together, everyone once; all at once where all wait for the norm of all."""
    wide = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 4))
    for clip, parts in ((None, 4), (1.0, 1)):
        given = Problem(copy.deepcopy(wide), F.cross_entropy, vectors)
        optimizer = torch.optim.SGD(given.model.parameters(), lr=0.1, momentum=0.9)
        step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK, clip_grad_norm=clip)
        engine = step.prepare(*given.draw()).engine
        assert engine is not None
        updates = [call for call in engine.recorded.recording.program.calls if call.label == "_fused_sgd_"]
        storages = engine.recorded.recording.program.storages
        written = [{storages[ref.storage].name for ref in call.writes} for call in updates]
        owned = [{name for name in names if name and " " not in name} for names in written]
        assert 1 < len(updates) <= parts or len(updates) == parts == 1
        assert sorted(name for names in owned for name in names) == sorted(dict(wide.named_parameters()))
        step.close()


def test_recomputing_what_draws_numbers_is_refused() -> None:
    """The state that is set back for it is no call: what is recomputed would draw other masks."""
    given = Problem(Recomputed(0.5), F.cross_entropy, vectors)
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK)
    with pytest.raises(CaptureError, match="draws random numbers in the backward"):
        step.prepare(*given.draw())


class Numpy(nn.Module):
    """Computes a factor out of torch's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.from_numpy(x.detach().numpy().mean(keepdims=True))


def test_a_model_that_computes_out_of_sight_equals_eager() -> None:
    """On the host such a step runs as it is."""
    pytest.importorskip("numpy")
    given = Problem(Numpy(), F.cross_entropy, vectors)
    eager = Eager(given, OPTIMIZERS["momentum"])
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    with pytest.warns(NimbleWarning, match="called as it is") as caught:
        step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK).prepare(*given.draw())
    assert [one.filename for one in caught] == [__file__]
    train_both(given, step, eager)
    step.close()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_float64_is_trained_with_the_rates_of_eager(name: str) -> None:
    """0.01 in float32 is 2e-8 off: bit for bit shows it."""
    model = nn.Linear(8, 4).double()
    other = copy.deepcopy(model)
    rates = [OPTIMIZERS[name](one.parameters()) for one in (model, other)]
    step = TrainStep(model, lambda output: output.square().mean(), rates[0], options=QUICK)
    step.prepare(torch.randn(3, 8, dtype=torch.float64))
    for _ in range(3):
        x = torch.randn(3, 8, dtype=torch.float64)
        rates[1].zero_grad()
        other(x).square().mean().backward()
        rates[1].step()
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    step.close()


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adamax])
def test_float64_is_trained_as_closely_as_the_counters_of_steps(kind: type[torch.optim.Optimizer]) -> None:
    """Capturable forms compute corrections of moments in the type of their counters: that of torch's default."""

    def difference(default: torch.dtype) -> float:
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            torch.manual_seed(0)
            model = nn.Linear(8, 4, dtype=torch.float64)
            other = copy.deepcopy(model)
            optimizers = [kind(one.parameters()) for one in (model, other)]
            step = TrainStep(model, lambda output: output.square().mean(), optimizers[0], options=QUICK)
            x = torch.randn(3, 8, dtype=torch.float64)
            step.prepare(x)
            for _ in range(6):
                optimizers[1].zero_grad()
                other(x).square().mean().backward()
                optimizers[1].step()
                step(x)
            step.close()
        finally:
            torch.set_default_dtype(before)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)

    assert difference(torch.float64) < 1e-14 < difference(torch.float32) < 1e-5


# -- mixed precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_autocast_equals_eager(name: str) -> None:
    given, step, eager = both(name, autocast=torch.bfloat16)
    train_both(given, step, eager, 3)
    assert step.engine is not None
    dtypes = {ref.dtype for call in step.engine.recorded.recording.program.calls for ref in call.writes}
    assert "bfloat16" in dtypes
    step.close()


def test_a_step_prepared_inside_autocast_reads_weights_live() -> None:
    given = made("mlp")
    eager = Eager(given, OPTIMIZERS["momentum"], autocast=torch.bfloat16)
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK, autocast=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step.prepare(*given.draw())
    train_both(given, step, eager)


class Island(nn.Module):
    """A product in float32 in the midst of those that autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(hidden.float())


def test_the_backward_of_a_step_is_no_part_of_the_autocast_around_it() -> None:
    torch.manual_seed(0)
    model, x, y = Island().train(), torch.randn(4, 8), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x), y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK).prepare(x, y)
        step(x, y)
    for (name, found), one in zip(step.gradients.items(), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0.0, atol=0.0, msg=name)
    step.close()


def scaler_on_host() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaler_grows_and_leaves_steps_out_as_in_eager(clip: float | None) -> None:
    # Not fused in eager: there a step that is left out makes no state.
    given, step, eager = both(
        "mlp", lambda parameters: torch.optim.Adam(parameters, lr=0.01), scaler=scaler_on_host, clip=clip
    )
    scales = []
    for at in range(7):
        inputs, targets = given.draw()
        if at in (0, 3):  # the first step makes the optimizer's state: it is left out, and so makes none
            inputs[0, 0] = float("inf")
        before = copy.deepcopy(given.model.state_dict())
        step(inputs, targets)
        eager(inputs, targets)
        assert_same(
            state_of(given.model, step.optimizer, step.scaler),
            state_of(eager.model, eager.optimizer, eager.scaler),
            rtol=2e-5,
        )
        unchanged = all(torch.equal(one, before[name]) for name, one in given.model.state_dict().items())
        assert unchanged == (at in (0, 3))
        assert step.scaler is not None
        scales.append(step.scaler.get_scale())
    assert {128.0, 256.0} == set(scales)
    step.close()


def test_a_scaler_needs_a_fused_optimizer() -> None:
    model = perceptron()
    with pytest.raises(InputError, match="leave out a step"):
        TrainStep(model, F.cross_entropy, torch.optim.RMSprop(model.parameters()), scaler=scaler_on_host())


# -- a life of a training run ----------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.lists(st.sampled_from(["step", "eager", "lr", "load", "load weights", "evaluate"]), min_size=3, max_size=9))
def test_anything_may_happen_between_steps(actions: list[str]) -> None:
    """Eager steps, schedulers, checkpoints and evaluation in between: always what eager alone would have done."""
    given, step, eager = both("resnet")
    early = copy.deepcopy((given.model.state_dict(), step.optimizer.state_dict()))
    for action in [*actions, "step"]:
        inputs, targets = given.draw()
        if action == "step":
            assert_values(step(inputs, targets), eager(inputs, targets))
        elif action == "eager":
            step.optimizer.zero_grad()
            given.loss_fn(given.model(inputs), targets).backward()
            step.optimizer.step()
            step.optimizer.zero_grad()
            eager(inputs, targets)
        elif action == "lr":
            for optimizer in (step.optimizer, eager.optimizer):
                optimizer.param_groups[0]["lr"] *= 0.7
        elif action == "evaluate":
            for model in (given.model, eager.model):
                model.eval()
            with torch.no_grad():
                assert_values(given.model(inputs), eager.model(inputs))
            for model in (given.model, eager.model):
                model.train()
        else:
            weights, kept = copy.deepcopy(early)
            for model, optimizer in ((given.model, step.optimizer), (eager.model, eager.optimizer)):
                model.load_state_dict(weights)
                if action == "load":
                    optimizer.load_state_dict(copy.deepcopy(kept))
            early = copy.deepcopy((eager.model.state_dict(), eager.optimizer.state_dict()))
        assert_same(state_of(given.model, step.optimizer), state_of(eager.model, eager.optimizer))
    step.close()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_checkpoint_resumes_in_a_new_step_and_in_eager(optimizer: str) -> None:
    rtol = ROUNDED if optimizer == "adamw" else 0.0
    given, step, eager = both("mlp", OPTIMIZERS[optimizer])
    train_both(given, step, eager, 2, rtol=rtol)
    file = io.BytesIO()
    torch.save({"model": given.model.state_dict(), "optimizer": step.optimizer.state_dict()}, file)
    step.close()
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    again = made("mlp")
    again.model.load_state_dict(saved["model"])
    optimizer_again = OPTIMIZERS[optimizer](again.model.parameters())
    optimizer_again.load_state_dict(saved["optimizer"])
    step = TrainStep(again.model, again.loss_fn, optimizer_again, options=QUICK).prepare(*again.draw())
    train_both(again, step, eager, 2, rtol=rtol)
    step.close()

    # Closed: the user's own model and optimizer go on in eager.
    inputs, targets = again.draw()
    optimizer_again.zero_grad()
    again.loss_fn(again.model(inputs), targets).backward()
    optimizer_again.step()
    eager(inputs, targets)
    assert_same(state_of(again.model, optimizer_again), state_of(eager.model, eager.optimizer), rtol=rtol)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda one: torch.optim.lr_scheduler.StepLR(one, 2, 0.5),
        lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 6),
        lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=10, cycle_momentum=False),
        lambda one: torch.optim.lr_scheduler.LinearLR(one, 0.1, total_iters=3),
    ],
    ids=["steps", "cosine", "one cycle", "warm-up"],
)
def test_schedulers_of_the_learning_rate(schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    given = made("mlp")
    eager = Eager(given, OPTIMIZERS["adamw"])
    optimizer = OPTIMIZERS["adamw"](given.model.parameters())
    schedules = schedule(optimizer), schedule(eager.optimizer)
    step = TrainStep(given.model, given.loss_fn, optimizer, options=QUICK).prepare(*given.draw())
    rates = set()
    for _ in range(6):
        train_both(given, step, eager, 1, rtol=ROUNDED)
        for one in schedules:
            one.step()
        rates.add(optimizer.param_groups[0]["lr"])
    assert len(rates) > 2
    step.close()


def test_groups_have_rates_of_their_own() -> None:
    def optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        first, *rest = parameters
        groups = [{"params": [first], "lr": 0.5, "weight_decay": 0.1}, {"params": rest}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.5, fused=True)

    given, step, eager = both("mlp", optimizer)
    train_both(given, step, eager, 2)
    step.optimizer.param_groups[0]["lr"] = eager.optimizer.param_groups[0]["lr"] = 0.0
    train_both(given, step, eager, 2)
    step.close()


def test_a_loss_may_have_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output * self.temperature, targets)

    def run(prepared: bool) -> list[torch.Tensor]:
        given, loss_fn = made("mlp"), Scaled()
        optimizer = OPTIMIZERS["momentum"]([*given.model.parameters(), *loss_fn.parameters()])
        step = TrainStep(given.model, loss_fn, optimizer, options=QUICK)
        if prepared:
            step.prepare(*given.draw())
        torch.manual_seed(1)
        for _ in range(3):
            inputs, targets = given.draw()
            if prepared:
                step(inputs, targets)
            else:
                optimizer.zero_grad()
                loss_fn(given.model(inputs), targets).backward()
                optimizer.step()
        if prepared:
            assert "loss_fn.temperature" in step.gradients
        return [*given.model.state_dict().values(), loss_fn.temperature.detach()]

    assert_values(run(True), run(False))


def test_the_loss_is_the_callers_own() -> None:
    given, step, _ = both("mlp")
    first = step(*given.draw())
    kept = first.clone()
    step(*given.draw())
    assert first.shape == ()
    assert not first.requires_grad
    assert torch.equal(first, kept)
    step.close()


def test_gradients_of_the_users_own_are_left_alone() -> None:
    given, step, _ = both("mlp")
    grads = [torch.randn_like(one) for one in given.model.parameters()]
    for one, grad in zip(given.model.parameters(), grads, strict=True):
        one.grad = grad
    kept = [grad.clone() for grad in grads]
    step(*given.draw())
    step(*given.draw())
    assert all(one.grad is grad for one, grad in zip(given.model.parameters(), grads, strict=True))
    assert_values(grads, kept)
    step.close()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_lazy_module_is_refused_until_it_ran(accumulate: int) -> None:
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)), nn.LazyLinear(1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return loss(output).sum()  # type: ignore[no-any-return]

    def make(loss_fn: Any) -> TrainStep:
        return TrainStep(model, loss_fn, optimizer, options=QUICK, accumulate=accumulate)

    x = torch.randn(2, 4)
    with pytest.raises(InputError, match=r"parameter 1\.weight is not initialised") as caught:
        make(loss_fn)
    assert caught.value.fix == "run the model once on an example input first"
    with pytest.raises(InputError) as said:
        Nimble(model, QUICK).prepare(x)
    assert str(said.value) == str(caught.value)
    model(x)
    with pytest.raises(InputError, match=r"parameter loss_fn\.weight is not initialised"):
        make(loss)
    loss_fn(model(x))
    step = make(loss_fn).prepare(x)
    assert step(x).shape == ()
    step.close()


def test_inputs_and_targets_are_left_alone() -> None:
    given, step, _ = both("keywords")
    inputs, targets = given.draw()
    kept = copy.deepcopy((inputs, targets))
    for _ in range(3):
        step(inputs, targets)
    assert_values((inputs, targets), kept)
    step.close()


def test_a_short_last_batch_follows_on_new_shape() -> None:
    def short(batch: tuple[Any, Any]) -> tuple[Any, Any]:
        return batch[0][:3], batch[1][:3]

    given, step, eager = both("resnet")
    train_both(given, step, eager, 1)
    before = copy.deepcopy(state_of(given.model, step.optimizer))
    with pytest.raises(InputError, match="no engine is prepared for these inputs"):
        step(*short(given.draw()))
    assert_same(state_of(given.model, step.optimizer), before)
    for answer in ("eager", "prepare"):
        given, step, eager = both("resnet", options=Options(tune="off", policy="single", on_new_shape=answer))
        train_both(given, step, eager, 1)
        for _ in range(2):
            inputs, targets = short(given.draw())
            assert_values(step(inputs, targets), eager(inputs, targets))
        train_both(given, step, eager, 2)
        step.close()


@pytest.mark.parametrize("answer", ["eager", "prepare"])
def test_the_very_first_step_may_have_another_shape(answer: str) -> None:
    given, step, eager = both("resnet", options=Options(tune="off", policy="single", on_new_shape=answer))
    for size in (3, 4, 3, 4):
        inputs, targets = given.draw()
        assert_values(step(inputs[:size], targets[:size]), eager(inputs[:size], targets[:size]))
        assert_same(state_of(given.model, step.optimizer), state_of(eager.model, eager.optimizer))
    step.close()


class Heads(nn.Module):
    """One of several heads is used, and trained, at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


@settings(max_examples=25)
@given(
    used=st.text("ab", min_size=2, max_size=10),
    answer=st.sampled_from(["eager", "prepare"]),
    accumulate=st.sampled_from([1, 2]),
    kind=st.sampled_from(["adam", "momentum", "sgd"]),
)
def test_parameters_that_other_data_are_the_first_to_train(used: str, answer: Any, accumulate: int, kind: str) -> None:
    torch.manual_seed(0)
    model = Heads()
    eager = copy.deepcopy(model)
    make: Any = {
        "adam": partial(torch.optim.Adam, lr=0.01),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2),
        "sgd": partial(torch.optim.SGD, lr=0.1),
    }[kind]
    mine, theirs = make(model.parameters()), make(eager.parameters())
    options = Options(tune="off", policy="single", on_new_shape=answer)
    step = TrainStep(model, F.mse_loss, mine, options=options, accumulate=accumulate)
    step.prepare({"x": torch.randn(8, 4), "head": "a"}, torch.randn(8, 2))
    for at, head in enumerate(one for one in used for _ in range(accumulate)):
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        step({"x": x, "head": head}, y)
        if at % accumulate == 0:
            theirs.zero_grad()
        (F.mse_loss(eager(x, head), y) / accumulate).backward()
        if at % accumulate == accumulate - 1:
            theirs.step()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.state[one].keys() == theirs.state[other].keys()
    step.close()


def test_a_step_is_replayed_though_another_one_trains_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Heads()
    eagerly, eager = WholeStep.eagerly, []
    monkeypatch.setattr(WholeStep, "eagerly", lambda *args, **kwargs: eager.append(1) or eagerly(*args, **kwargs))
    mine = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = TrainStep(model, F.mse_loss, mine, options=QUICK)
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    step.prepare({"x": x, "head": "b"}, y).prepare({"x": x, "head": "a"}, y)
    step({"x": x, "head": "a"}, y)  # makes the state of what it trains
    for _ in range(3):
        step({"x": x, "head": "a"}, y)
    assert len(eager) == 1
    step({"x": x, "head": "b"}, y)
    assert len(eager) == 2
    assert len(mine.state) == 6
    step.close()


@pytest.mark.parametrize("norm", [0, -1.0, "1", [1.0], 1j, float("nan")])
def test_what_is_no_norm_to_clip_to_is_refused(norm: Any) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"clip_grad_norm=.* is not positive"):
        TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=norm)


def test_a_loss_of_a_target_needs_one() -> None:
    model = nn.Linear(4, 4)
    step = TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=r"mse_loss cannot be called with the model's output alone.*target") as caught:
        step.prepare(torch.randn(2, 4))
    assert "prepare(inputs, targets)" in caught.value.fix


def test_two_shapes_may_be_prepared() -> None:
    given, step, eager = both("resnet")
    inputs, targets = given.draw()
    step.prepare(inputs[:2], targets[:2])
    for size in (4, 2, 4, 2):
        inputs, targets = given.draw()
        assert_values(step(inputs[:size], targets[:size]), eager(inputs[:size], targets[:size]))
    assert_same(state_of(given.model, step.optimizer), state_of(eager.model, eager.optimizer))
    step.close()


class Either(nn.Module):
    """One branch or the other, by the size of the batch; some parameters are in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many, self.idle = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.few if len(x) == 3 else self.many)(x)
        return found


@settings(max_examples=20)
@given(
    updates=st.lists(st.sampled_from([3, 5]), min_size=1, max_size=4),
    optimizer=st.sampled_from(["sgd", "adamw", "momentum"]),
    accumulate=st.integers(2, 3),
    clip=st.sampled_from([None, 0.05]),
    answer=st.sampled_from(["eager", "prepare", "error"]),
)
def test_updates_that_train_other_parameters_than_the_one_before(
    updates: list[int], optimizer: str, accumulate: int, clip: float | None, answer: Any
) -> None:
    """What earlier updates have summed up plays no part."""

    def draw(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 8), torch.randint(3, (size,))

    torch.manual_seed(0)
    given = Problem(Either(), F.cross_entropy, lambda: draw(5))
    eager = Eager(given, OPTIMIZERS[optimizer], clip=clip, accumulate=accumulate)
    step = TrainStep(
        given.model,
        given.loss_fn,
        OPTIMIZERS[optimizer](given.model.parameters()),
        options=Options(tune="off", policy="single", on_new_shape=answer),
        clip_grad_norm=clip,
        accumulate=accumulate,
    ).prepare(*draw(5))
    if answer == "error":  # both are prepared
        step.prepare(*draw(3))
    for size in [one for one in updates for _ in range(accumulate)]:
        inputs, targets = draw(size)
        assert_values(step(inputs, targets), eager(inputs, targets), rtol=1e-6)
        mine, theirs = state_of(given.model, step.optimizer), state_of(eager.model, eager.optimizer)
        assert_same(mine, theirs, rtol=1e-5)
        assert step.gradients.keys() == eager.gradients.keys()
    step.close()


@pytest.mark.parametrize("answer", ["eager", "error"])
def test_steps_of_one_update_that_train_other_parameters_are_refused(answer: Any) -> None:
    model = Either()
    options = Options(tune="off", policy="single", on_new_shape=answer)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), options=options, accumulate=2)
    batches = {size: (torch.randn(size, 8), torch.randint(3, (size,))) for size in (3, 5)}
    step.prepare(*batches[3])
    if answer == "error":
        step.prepare(*batches[5])
    step(*batches[3])
    before = copy.deepcopy(state_of(model))
    with pytest.raises(InputError, match=r"few\.bias got a gradient in some steps of this update only") as refused:
        step(*batches[5])
    assert "prepare(x, training=True)" in refused.value.fix
    assert_same(state_of(model), before)
    step(*batches[3])  # the update goes on
    assert not torch.equal(model.few.weight, before[0][1])
    step.close()


# -- preparing leaves no trace ---------------------------------------------------------------------------------------


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> list[Any]:
    """State, gradients, random state, by value; identities of the tensors."""
    held = [*model.parameters(), *model.buffers()]
    return [
        copy.deepcopy(state_of(model, optimizer, scaler)),
        [None if one.grad is None else (id(one.grad), one.grad.clone()) for one in model.parameters()],
        torch.get_rng_state(),
        [(id(one), one.data_ptr(), one.requires_grad, one._version) for one in held],
        [(key, value) for group in optimizer.param_groups for key, value in group.items() if key != "params"],
        model.training,
    ]


def assert_untouched(before: list[Any], after: list[Any]) -> None:
    assert_same(before[0], after[0])
    for a, b in zip(before[1], after[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a[0] == b[0]
            assert torch.equal(a[1], b[1])
    assert torch.equal(before[2], after[2])
    assert before[3:] == after[3:]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("filled", "scaled"),
    [(False, False), (True, False), (True, True)],
    ids=["fresh", "amid training", "amid training, scaled"],
)
@pytest.mark.parametrize("name", ["resnet", "dropout", "shared"])
def test_preparing_changes_nothing(name: str, filled: bool, scaled: bool, accumulate: int) -> None:
    given = made(name)
    optimizer = OPTIMIZERS["adamw"](given.model.parameters())
    if filled:
        given.loss_fn(given.model(given.draw()[0]), given.draw()[1]).backward()
        optimizer.step()  # .grad stays
    scaler = scaler_on_host() if scaled else None
    if scaler is not None and filled:
        scaler.scale(torch.ones(()))  # makes its tensors
    inputs, targets = given.draw()
    kept = copy.deepcopy((inputs, targets))
    before = everything(given.model, optimizer, scaler)
    step = TrainStep(
        given.model,
        given.loss_fn,
        optimizer,
        scaler=scaler,
        clip_grad_norm=1.0,
        accumulate=accumulate,
        options=Options(budget_s=0.5),
    )
    assert_untouched(before, everything(given.model, optimizer, scaler))
    step.prepare(inputs, targets)
    assert_untouched(before, everything(given.model, optimizer, scaler))
    assert_values((inputs, targets), kept)
    step.close()


def test_preparing_counts_no_step_of_a_fresh_scaler() -> None:
    given, scaler = made("mlp"), scaler_on_host()
    before = scaler.state_dict()
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    TrainStep(given.model, given.loss_fn, optimizer, scaler=scaler, options=QUICK).prepare(*given.draw()).close()
    assert scaler.state_dict() == before


class Fails(nn.Module):
    """Raises in its run of number ``at``."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.body, self.drop, self.left = Residual(), nn.Dropout(0.5), [at]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.body(x))
        RUNS[0] += 1
        if RUNS[0] == self.left[0]:
            raise ZeroDivisionError("in the middle")
        return x


RUNS = [0]


def prepare(way: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Prepare a whole step, or the module alone."""
    if way == "step":
        TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(x, y)
    else:
        Nimble(model, QUICK).prepare(x, training=True)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("way", ["step", "drop-in"])
def test_an_error_in_the_middle_changes_nothing(way: str, at: int) -> None:
    model = Fails(at)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    x, y = images()
    RUNS[0] = 0
    before = everything(model, optimizer)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        prepare(way, model, optimizer, x, y)
    assert_untouched(before, everything(model, optimizer))


class Branches(nn.Module):
    """Does something else where the data is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.norm(x))
        return x * 2 if x.sum() > 0 else torch.tanh(x)


@pytest.mark.parametrize("way", ["step", "drop-in"])
def test_a_model_that_is_not_static_is_refused_and_untouched(way: str) -> None:
    model = Branches()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    x, y = vectors()
    before = everything(model, optimizer)
    with pytest.raises(CaptureError, match="host a value computed on the device"):
        prepare(way, model, optimizer, x, y)
    assert_untouched(before, everything(model, optimizer))


@pytest.mark.filterwarnings("ignore:.*draws from Python's random:nimble_core.NimbleWarning")  # both took one branch
def test_a_random_branch_is_not_static() -> None:
    import random

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x * 2 if random.random() < 0.5 else torch.tanh(x)

    model = Random()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    before = everything(model, optimizer)
    for seed in range(8):  # until the two recordings take different branches
        random.seed(seed)
        state = random.getstate()
        try:
            TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(*vectors()).close()
        except NotStaticError:
            assert random.getstate() == state
            assert_same(before[0], state_of(model, optimizer))
            return
    pytest.fail("no seed showed the branch")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters), "cannot capture LBFGS"),
        (lambda parameters: torch.optim.SparseAdam(list(parameters)), "cannot capture SparseAdam"),
        (lambda parameters: torch.optim.Adam(parameters, differentiable=True), "differentiable"),
        (lambda parameters: "sgd", "optimizer is a str"),
    ],
    ids=["LBFGS", "SparseAdam", "differentiable", "no optimizer"],
)
def test_an_optimizer_that_cannot_be_captured_is_refused(make: Callable[..., Any], match: str) -> None:
    model = perceptron()
    optimizer = make(model.parameters())
    kept = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    with pytest.raises(InputError, match=match):
        TrainStep(model, F.cross_entropy, optimizer, options=QUICK)
    assert_values(model.state_dict(), kept)
    assert torch.equal(random, torch.get_rng_state())


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"model": torch.relu}, "not a torch.nn.Module"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"loss_fn": 3}, "loss_fn is a int"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn is the class MSELoss(.|\n)*loss_fn=MSELoss\(\)"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": True}, "accumulate=True"),
        ({"accumulate": 1.5}, "accumulate=1.5"),
        ({"clip_grad_norm": 0.0}, "not positive"),
        ({"clip_grad_norm": float("nan")}, "not positive"),
        ({"options": "fast"}, "not an Options"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_bad_arguments(bad: dict[str, Any], match: str) -> None:
    model = perceptron()
    good = {"model": model, "loss_fn": F.cross_entropy, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(InputError, match=match):
        TrainStep(**{**good, **bad})


# -- one rule for the mode ---------------------------------------------------------------------------------------------


def _by_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(*vectors())


def _by_drop_in(model: nn.Module) -> None:
    Nimble(model, QUICK).prepare(vectors()[0], training=True)


def _by_comparison(model: nn.Module) -> None:
    x, y = vectors()
    options = Options(tune="off", policy="single", fuse="none", budget_s=0.01)
    compare(model, x, training=True, loss_fn=F.cross_entropy, target=y, options=options)


WAYS = {"step": _by_step, "drop-in": _by_drop_in, "comparison": _by_comparison}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_trained_is_in_training_mode_and_parts_of_it_need_not_be(way: str) -> None:
    """The same words, whoever trains; and a frozen batch norm is fine."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model.eval()
    before = copy.deepcopy(state_of(model))
    with pytest.raises(InputError, match="Sequential is in evaluation mode") as refused:
        WAYS[way](model)
    assert "model.train()" in refused.value.fix
    model.train()
    model[1].eval()
    WAYS[way](model)
    assert_same(before, state_of(model))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_prepared_to_train_is_so_outside_of_modes_without_a_backward(way: str) -> None:
    """Said by name; the step refuses ``inference_mode`` when it is made, before it has tensors of that mode."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    before = copy.deepcopy(state_of(model))
    with torch.inference_mode(), pytest.raises(InputError, match=r"torch\.inference_mode is on"):
        WAYS[way](model)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.raises(InputError, match=r"torch\.autograd\.detect_anomaly is on") as refused,
    ):
        WAYS[way](model)
    assert "check_nan=False" in refused.value.fix
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly(check_nan=False):
        WAYS[way](model)
    assert_same(before, state_of(model))


def test_a_step_under_inference_mode_trains_nothing_and_under_anomaly_detection_what_it_did() -> None:
    model = perceptron()
    optimizer, (x, y) = OPTIMIZERS["momentum"](model.parameters()), vectors()
    step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(x, y)
    step(x, y)
    before = everything(model, optimizer)
    with torch.inference_mode():
        for use in (step, step.prepare):
            with pytest.raises(InputError, match="inference_mode is on"):
                use(x, y)
    assert_untouched(before, everything(model, optimizer))
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert step(x, y) > step(x, y)
    step.close()


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("way", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy], ids=["pickle", "copy"])
def test_a_copy_of_a_step_starts_unprepared_and_goes_on_alike(
    way: Callable[[TrainStep], TrainStep], steps: int
) -> None:
    model = perceptron()
    x, y = vectors()
    step = TrainStep(model, F.cross_entropy, OPTIMIZERS["momentum"](model.parameters()), options=QUICK).prepare(x, y)
    for _ in range(steps):
        step(x, y)
    other = way(step)
    assert other.outputs is None
    with pytest.raises(InputError, match="not prepared"):
        other(x, y)
    other.prepare(x, y)
    for _ in range(3):
        assert torch.equal(other(x, y), step(x, y))
    assert_same(state_of(other.model), state_of(model))
    assert other.optimizer.param_groups[0]["params"][0] is next(other.model.parameters())
    other.close()
    step.close()


@pytest.mark.parametrize("answer", ["error", "eager", "prepare"])
def test_a_step_in_evaluation_mode_trains_nothing_whatever_new_shapes_do(answer: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x, y = vectors()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    options = Options(tune="off", policy="single", on_new_shape=answer)
    step = TrainStep(model, F.cross_entropy, optimizer, options=options).prepare(x, y)
    model.eval()
    before = everything(model, optimizer)
    with pytest.raises(InputError, match="evaluation mode"):
        step(x, y)
    with pytest.raises(InputError, match="evaluation mode"):
        step.prepare(x, y)
    assert_untouched(before, everything(model, optimizer))
    model.train()
    step(x, y)
    step.close()


# -- words of the user's own -------------------------------------------------------------------------------------------


def test_a_step_calls_its_data_inputs_and_targets() -> None:
    given, step, _ = both("keywords")
    inputs, targets = given.draw()
    engine = step.engine
    assert engine is not None
    program = engine.recorded.recording.program
    names = [program.storages[ref.storage].name for ref in program.inputs]
    assert names == [f"{of}[{name!r}]" for of, one in (("inputs", inputs), ("targets", targets)) for name in one]
    step.close()

    model = perceptron()
    step = TrainStep(model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), options=QUICK)
    x, y = vectors()
    with pytest.raises(InputError, match="inputs is on cpu, targets on meta"):
        step.prepare(x, y.to("meta"))
    step.prepare(x, y)
    for bad, words in (
        ((x[:2], y), "inputs: expected"),
        ((x, y.double()), "targets: expected"),
        ((x, None), "targets:"),
    ):
        with pytest.raises(InputError, match=words) as refused:
            step(*bad)
        assert refused.value.where == f"prepared: {step.engine.signature}"  # type: ignore[union-attr]
        assert "args" not in str(refused.value)
    step.close()


# -- where what is refused runs ----------------------------------------------------------------------------------------


def _reading(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, target) * out.mean().item()  # read in the loss


def _shaped(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return out[out > 0].sum()  # shaped in the loss


class _Reading(nn.Module):
    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, target) * out.mean().item()  # read in a loss that is a module


class _ReadsBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * gradients[0].sum().item()  # read in the backward


class _Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ReadsBehind.apply(self.head(x))  # type: ignore[no-untyped-call,no-any-return]


class _Ahead(_Behind):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * x.mean().item()  # read in the forward


class _Hooked(_Behind):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(x)
        out.register_hook(
            lambda gradient: gradient * gradient.sum().item()  # read in a hook
        )
        return out  # type: ignore[no-any-return]


def _line(marked: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{label_of(__file__)}:{next(at for at, line in enumerate(lines, 1) if line.endswith('# ' + marked))}"


@pytest.mark.parametrize(
    ("model", "loss_fn", "where", "marked"),
    [
        (perceptron, _reading, "in the loss at", "read in the loss"),
        (perceptron, _shaped, "in the loss at", "shaped in the loss"),
        (perceptron, _Reading(), "in the loss (loss_fn) at", "read in a loss that is a module"),
        (_Behind, F.cross_entropy, "in the backward at", "read in the backward"),
        (_Hooked, F.cross_entropy, "in the backward of head at", "read in a hook"),
        (_Ahead, F.cross_entropy, "in the model at", "read in the forward"),
    ],
    ids=lambda one: one if isinstance(one, str) and one.count(" ") > 1 and not one.startswith("in ") else "",
)
def test_a_refusal_says_which_part_of_the_step_it_is_about(
    model: Callable[[], nn.Module], loss_fn: Any, where: str, marked: str
) -> None:
    net = model()
    with pytest.raises(NimbleError) as refused:
        TrainStep(
            net,
            loss_fn,
            torch.optim.SGD(net.parameters(), lr=0.1),
            options=QUICK,
        ).prepare(*vectors())
    assert refused.value.where.endswith(f"{where} {_line(marked)}".strip())


def test_a_loss_that_is_not_static_is_named_as_the_loss() -> None:
    runs: list[int] = []

    def changing(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        loss = F.cross_entropy(out, target)
        return loss.sin() if len(runs) % 2 else loss.cos()

    net = perceptron()
    with pytest.raises(NotStaticError) as refused:
        TrainStep(net, changing, OPTIMIZERS["sgd"](net.parameters()), options=QUICK).prepare(*vectors())
    assert " in the loss at tests/core/api/test_train_step.py:" in refused.value.where


@pytest.mark.parametrize(
    ("loss_fn", "match"),
    [
        (lambda out: out, "shape"),
        (lambda out: out.detach().sum(), "no gradient"),
        (lambda out: 0.5, "float"),
        (lambda out: None, "NoneType"),
        (lambda out: torch.complex(out.sum(), out.mean()), r"complex \(torch.complex64\)"),
    ],
    ids=["a vector", "detached", "a number", "nothing", "complex"],
)
def test_a_loss_that_cannot_be_differentiated(loss_fn: Callable[..., Any], match: str) -> None:
    model = perceptron()
    optimizer, x = OPTIMIZERS["momentum"](model.parameters()), vectors()[0]
    before = everything(model, optimizer)
    with pytest.raises(InputError, match=match):
        TrainStep(model, loss_fn, optimizer, options=QUICK).prepare(x)
    assert_untouched(before, everything(model, optimizer))


def _other_batch(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step(x[:2], y[:2])


def _other_dtype(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step(x.double(), y)


def _other_target(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step(x, y.int())


def _no_target(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step(x)


def _momentum(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.optimizer.param_groups[0]["momentum"] = 0.5
    step(x, y)


def _decay(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.optimizer.param_groups[0]["weight_decay"] = 0.5
    step(x, y)


def _new_group(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    step(x, y)


def _optimizer_hook(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.optimizer.register_step_post_hook(lambda *given: None)
    step(x, y)


def _replaced(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.model[0].weight = nn.Parameter(step.model[0].weight.detach().clone())
    step(x, y)


def _replaced_memory(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.model[0].weight.data = step.model[0].weight.detach().clone()
    step(x, y)


def _converted(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.model.double()
    step(x.double(), y)


def _evaluation(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.model.eval()
    step(x, y)


def _part_in_evaluation(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.model[1].eval()
    step(x, y)


def _freeze(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.model[0].weight.requires_grad_(False)
    step(x, y)


def _unfreeze(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.model[2].bias.requires_grad_(True)
    step(x, y)


def _closed(step: TrainStep, x: torch.Tensor, y: torch.Tensor) -> None:
    step.close()
    step(x, y)


CHANGES = [
    _other_batch, _other_dtype, _other_target, _no_target, _momentum, _decay, _new_group, _optimizer_hook, _replaced,
    _replaced_memory, _converted, _evaluation, _part_in_evaluation, _freeze, _unfreeze, _closed,
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "first"),
    [
        pytest.param(change, first, id=f"{change.__name__.strip('_')}, {'first step' if first else 'amid training'}")
        for change in CHANGES
        for first in (False, True)
    ],
)
def test_what_no_longer_fits_is_refused_before_anything_is_written(change: Callable[..., None], first: bool) -> None:
    """What changes in the model is put back by nobody: only values that a step would write are compared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[2].bias.requires_grad_(False)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    x, y = vectors()
    step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(x, y)
    if not first:
        step(x, y)
    values = copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(NimbleError) as error:
        change(step, x, y)
    assert error.value.fix
    assert_values({k: v.float() for k, v in model.state_dict().items()}, {k: v.float() for k, v in values.items()})
    assert_values([kept], [{key: optimizer.state_dict()["state"][key] for key in kept}])
    step.close()


def test_not_prepared() -> None:
    model = perceptron()
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
    assert step.engine is None
    assert step.outputs is None
    assert step.gradients == {}
    with pytest.raises(InputError, match="not prepared"):
        step(*vectors())


# -- provenance ------------------------------------------------------------------------------------------------------

ORDER = ["forward", "loss", "backward", "optimizer"]


@pytest.mark.parametrize("name", ["resnet", "transformer", "shared", "nested", "aliases"])
def test_phases_come_in_order_and_backward_calls_say_where_they_come_from(name: str) -> None:
    given, step, _ = both(name, OPTIMIZERS["adam"])
    assert step.engine is not None
    calls = step.engine.recorded.recording.program.calls
    at = [ORDER.index(call.phase) for call in calls]
    assert at == sorted(at)
    assert set(at) == {0, 1, 2, 3}
    modules = {path for path, _ in given.model.named_modules()} | {"loss_fn"}
    forward = {(call.module, call.origins[0].file, call.origins[0].line) for call in calls if call.phase == "forward"}
    loss = {(call.origins[0].file, call.origins[0].line) for call in calls if call.phase == "loss"}
    named = 0
    for call in calls:
        assert call.origins
        assert call.module in modules
        if call.phase == "backward":
            origin = call.origins[0]
            named += bool(origin.file)
            known = (origin.module, origin.file, origin.line) in forward or (origin.file, origin.line) in loss
            # Where the backward starts there is no node of autograd yet.
            assert known or call.operator == "aten.ones_like.default"
    assert named > 0.7 * sum(call.phase == "backward" for call in calls)
    step.close()


def test_a_convolutions_backward_is_its_modules() -> None:
    given, step, _ = both("resnet")
    assert step.engine is not None
    calls = step.engine.recorded.recording.program.calls
    assert [call.module for call in calls if call.operator == "aten.convolution_backward.default"] == [
        "second",
        "first",
    ]
    assert [call.module for call in calls if call.operator == "aten.native_batch_norm_backward.default"] == [
        "norm2",
        "norm1",
    ]
    assert given.model.second is not None
    step.close()


def test_updates_carry_the_modules_of_what_they_update() -> None:
    given, step, _ = both("resnet", OPTIMIZERS["adam"])
    assert step.engine is not None
    program = step.engine.recorded.recording.program
    owners = {name.rpartition(".")[0] for name, _ in given.model.named_parameters()}
    found: set[str] = set()
    for call in program.calls:
        if call.phase == "optimizer":
            names = {program.storages[ref.storage].name.split(" ")[0] for ref in call.writes}
            written = {name.rpartition(".")[0] for name in names if name}
            if written:
                assert {origin.module for origin in call.origins} == written
            found |= written
    assert found == owners
    step.close()


def test_state_is_named_after_parameters() -> None:
    given, step, _ = both("mlp", OPTIMIZERS["adam"])
    assert step.engine is not None
    storages = {one.name: one.role for one in step.engine.recorded.recording.program.storages if one.name}
    for name, _ in given.model.named_parameters():
        assert storages[name] == "parameter"
        assert storages[f"{name} exp_avg"] == "buffer"
        assert storages[f"{name} step"] == "buffer"
    assert storages["learning rate 0"] == "buffer"
    step.close()


# -- the module itself -----------------------------------------------------------------------------------------------


def test_a_whole_step_has_the_models_names() -> None:
    given = made("resnet")
    optimizer = OPTIMIZERS["momentum"](given.model.parameters())
    whole = WholeStep(given.model, given.loss_fn, CapturedOptimizer(optimizer, "cpu"))
    assert dict(whole.named_parameters()).keys() == dict(given.model.named_parameters()).keys()
    assert dict(whole.named_modules()).keys() >= dict(given.model.named_modules()).keys()
    assert dict(whole.named_buffers()).keys() >= dict(given.model.named_buffers()).keys()
    assert whole.training
    given.model.eval()
    assert not whole.training


def test_a_whole_step_without_an_optimizer_only_differentiates() -> None:
    given = made("mlp")
    kept = copy.deepcopy(given.model.state_dict())
    inputs, targets = given.draw()
    loss, output, gradients = WholeStep(given.model, given.loss_fn, None)(inputs, targets)
    expected = given.loss_fn(given.model(inputs), targets)
    assert_values((loss, output), (expected, given.model(inputs)))
    found = torch.autograd.grad(expected, list(given.model.parameters()))
    assert_values(list(gradients.values()), list(found))
    assert_values(given.model.state_dict(), kept)


# -- plans -----------------------------------------------------------------------------------------------------------


STREAMS = Options(fuse="none", policy="nimble", tune="off")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Of a step on several streams, as a file gives it back."""
    _, step, _ = both("resnet", options=STREAMS)
    assert step.engine is not None
    assert step.engine.plan is not None
    found = load_plan(step.engine.plan.save(tmp_path / "step.json"))
    step.close()
    return found


def stepping(given: Problem, optimizer: str = "momentum", **more: Any) -> TrainStep:
    """Not prepared, and on one stream if it is without a plan."""
    trained = OPTIMIZERS[optimizer](given.model.parameters())
    return TrainStep(given.model, given.loss_fn, trained, **{"options": QUICK, **more})


def test_a_plan_is_followed_and_trains_as_eager(plan: Plan) -> None:
    given = made("resnet")
    eager, step = Eager(given, OPTIMIZERS["momentum"]), stepping(given)
    inputs, targets = given.draw()
    before = everything(given.model, step.optimizer)
    assert step.prepare(inputs, targets, plan=plan) is step
    assert_untouched(before, everything(given.model, step.optimizer))
    assert step.engine is not None
    assert step.engine.plan == plan
    assert plan.policy == "nimble"
    assert step.engine.schedule.streams > 1
    assert step.engine.candidates == ()
    train_both(given, step, eager)
    step.close()


def test_the_plan_of_an_optimizer_amid_training_is_that_of_a_fresh_one(plan: Plan) -> None:
    given = made("resnet")
    step = stepping(given)
    given.loss_fn(given.model(given.draw()[0]), given.draw()[1]).backward()
    step.optimizer.step()
    step.prepare(*given.draw(), plan=plan)
    assert step.engine is not None
    assert step.engine.plan == plan


def _other_model(given: Problem) -> TrainStep:
    given.model.head = nn.Linear(8, 10, bias=False)
    return stepping(given)


def _other_loss(given: Problem) -> TrainStep:
    return stepping(Problem(given.model, nn.CrossEntropyLoss(label_smoothing=0.1), given.draw))


OTHERS: dict[str, tuple[Callable[[Problem], TrainStep], str]] = {
    "model": (_other_model, r"call \d+"),
    "loss": (_other_loss, r"call \d+"),
    "optimizer": (lambda given: stepping(given, "adamw"), r"call \d+"),
    "clipping": (lambda given: stepping(given, clip_grad_norm=1.0), r"call \d+"),
    "autocast": (lambda given: stepping(given, autocast=torch.bfloat16), r"call \d+"),
    "accumulation": (lambda given: stepping(given, accumulate=2), r"call \d+"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_of_another_step_is_refused_and_nothing_is_replaced(other: str, plan: Plan) -> None:
    given = made("resnet")
    make, match = OTHERS[other]
    step = make(given)
    data = given.draw()
    step.prepare(*data)
    prepared, before = step.engine, everything(given.model, step.optimizer)
    with pytest.raises(InputError, match=f"the plan was made for another program: .*{match}"):
        step.prepare(*data, plan=plan)
    assert_untouched(before, everything(given.model, step.optimizer))
    assert step.engine is prepared
    step(*data)
    step.close()


def test_a_plan_for_other_data_is_refused(plan: Plan) -> None:
    given = made("resnet")
    inputs, targets = given.draw()
    with pytest.raises(InputError, match="is float32"):
        stepping(given).prepare(inputs[:2], targets[:2], plan=plan)
    with pytest.raises(InputError, match="plan is a str"):
        stepping(given).prepare(inputs, targets, plan="step.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_with_accumulation_a_plan_is_of_the_step_that_updates(accumulate: int) -> None:
    _, first, _ = both("mlp", options=STREAMS, accumulate=accumulate)
    assert first.engine is not None
    plan = first.engine.plan
    given = made("mlp")
    eager = Eager(given, OPTIMIZERS["momentum"], accumulate=accumulate)
    step = stepping(given, accumulate=accumulate).prepare(*given.draw(), plan=plan)
    assert step.engine is not None
    assert step.engine.plan == plan
    train_both(given, step, eager, 2 * accumulate)
    with pytest.raises(InputError, match="another program"):
        stepping(made("mlp")).prepare(*given.draw(), plan=plan)


def test_the_plan_of_a_report_is_followed() -> None:
    from nimble_viz.collect.compare import compare

    given = made("resnet")
    inputs, targets = given.draw()
    step = stepping(given, autocast=torch.bfloat16, clip_grad_norm=1.0)
    report = compare(
        given.model,
        inputs,
        training=True,
        loss_fn=given.loss_fn,
        target=targets,
        optimizer=step.optimizer,
        autocast=torch.bfloat16,
        clip_grad_norm=1.0,
        options=Options(fuse="none", budget_s=0.05),
    )
    step.prepare(inputs, targets, plan=report.plan)
    assert step.engine is not None
    assert step.engine.plan is not None
    assert step.engine.plan.fingerprint == report.plan.fingerprint
    assert step.engine.schedule.stream == report.plan.schedule.stream


def test_forward_and_backward_in_place_of_the_model_follow_no_plan(plan: Plan) -> None:
    given = made("resnet")
    net = Nimble(given.model, QUICK)
    with pytest.raises(InputError, match=r"makes two(.|\n)*TrainStep"):
        net.prepare(given.draw()[0], training=True, plan=plan)
    assert net.engines == ()


# -- a scaler that is disabled ---------------------------------------------------------------------------------------


def test_a_disabled_scaler_is_none() -> None:
    def off() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", enabled=False)

    given, step, eager = both("mlp", lambda parameters: torch.optim.RMSprop(parameters, lr=0.01), scaler=off)
    train_both(given, step, eager, rtol=1e-5)
    assert step.scaler is not None
    assert step.scaler.state_dict() == {}
    whole = WholeStep(given.model, given.loss_fn, None, scaler=off())
    assert whole.scaler is None
    assert not any("loss scale" in name for name, _ in whole.named_buffers())


def test_a_disabled_scaler_leaves_updates_in_parts() -> None:
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    off, on = torch.amp.GradScaler("cpu", enabled=False), scaler_on_host()

    def updates(scaler: torch.amp.GradScaler | None) -> int:
        step = TrainStep(
            model, F.mse_loss, OPTIMIZERS["momentum"](model.parameters()), options=QUICK, scaler=scaler
        ).prepare(torch.randn(2, 600), torch.randn(2, 600))
        assert step.engine is not None
        calls = step.engine.recorded.recording.program.calls
        step.close()
        return sum(call.label == "_fused_sgd_" for call in calls)

    assert updates(off) == updates(None) > 1
    assert updates(on) == 1


def test_other_growth_settings_of_a_scaler_are_noticed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = perceptron()
    x, y = vectors()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK, scaler=scaler).prepare(x, y)
    step(x, y)
    before = copy.deepcopy(state_of(model))
    scaler.set_growth_interval(7)
    with pytest.raises(InputError, match="grows or backs off"):
        step(x, y)
    assert_same(state_of(model), before)
    step.prepare(x, y)
    step(x, y)
    scaler.set_growth_interval(2000)
    with pytest.raises(InputError, match="grows or backs off"):
        step(x, y)
    step.close()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_other_kernels_for_images_and_models_channels_last(layout: torch.memory_format) -> None:
    """Gradients of 1x1 convolutions come in strides of the images: those of no matter still are eager's."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=4), nn.Flatten(), nn.Linear(36, 5))
    model = model.double().to(memory_format=layout)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(2, 3, 5, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, 5, (2,))

    given = Problem(model, F.cross_entropy, draw)
    eager = Eager(given, OPTIMIZERS["momentum"])
    options = Options(fuse="library", tune="off", policy="single")
    step = TrainStep(model, F.cross_entropy, OPTIMIZERS["momentum"](model.parameters()), options=options).prepare(
        *draw()
    )
    assert step.engine is not None
    program = step.engine.recorded.recording.program
    assert program.fuse == "library", step.engine.notes
    train_both(given, step, eager, rtol=1e-7)  # learning rates are float32
    step.close()


def test_a_recurrent_layer_in_other_kernels() -> None:
    options = Options(fuse="library", tune="off", policy="single")
    given, step, eager = both("recurrent", options=options)
    assert step.engine is not None
    assert step.engine.recorded.recording.program.fuse == "library", step.engine.notes
    train_both(given, step, eager, rtol=1e-5)
    step.close()


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="would train nothing"):
        TrainStep(perceptron(), F.cross_entropy, torch.optim.SGD(perceptron().parameters(), lr=0.1))
    loss = nn.Sequential(nn.Linear(4, 1))
    TrainStep(perceptron(), loss, torch.optim.SGD(loss.parameters(), lr=0.1))  # a loss may have parameters


class Summed(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * F.cross_entropy(output, target)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(
    "name", ["4.weight", "0.weight", "loss_fn.scale"], ids=["trained", "not trained", "of the loss"]
)
def test_hooks_of_parameters_are_refused_whenever_they_come(name: str, kind: str) -> None:
    model, loss_fn = perceptron(), Summed()
    hooked = {**dict(model.named_parameters()), "loss_fn.scale": loss_fn.scale}[name]
    x, y = vectors()
    step = TrainStep(model, loss_fn, OPTIMIZERS["momentum"](model[4].parameters()), options=QUICK)
    handle = getattr(hooked, kind)(lambda *given: None)
    with pytest.raises(InputError, match=f"^{name} has a hook") as error:
        step.prepare(x, y)
    assert "prepare(x, training=True)" in error.value.fix
    handle.remove()
    step.prepare(x, y)
    step(x, y)
    nn.Linear(2, 2).register_forward_hook(lambda *given: None)  # of somebody else
    step(x, y)
    before = copy.deepcopy(state_of(model))
    handle = getattr(hooked, kind)(lambda *given: None)
    for _ in range(2):
        with pytest.raises(InputError, match=f"^{name} has a hook"):
            step(x, y)
    assert_same(state_of(model), before)
    handle.remove()
    step(x, y)
    step.close()


@pytest.mark.parametrize("nested", [False, True])
def test_hooks_of_inputs_are_refused(nested: bool) -> None:
    """Inputs that require a gradient may come; in eager their hooks would be called."""

    def given(hooked: bool) -> Any:
        x = torch.randn(6, 8, requires_grad=True)
        if hooked:
            x.register_hook(lambda gradient: None)
        return {"input": x} if nested else x

    model, (_, y) = perceptron(), vectors()
    step = TrainStep(model, F.cross_entropy, OPTIMIZERS["momentum"](model.parameters()), options=QUICK)
    name = r"inputs\['input'\]" if nested else "inputs"
    with pytest.raises(InputError, match=f"^{name} has a hook"):
        step.prepare(given(hooked=True), y)
    step.prepare(given(hooked=False), y)
    step(given(hooked=False), y)
    before = copy.deepcopy(state_of(model))
    with pytest.raises(InputError, match=f"^{name} has a hook"):
        step(given(hooked=True), y)
    assert_same(state_of(model), before)
    step.close()


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("then", [None, torch.bfloat16])
def test_another_autocast_than_around_the_preparation_is_refused(then: torch.dtype | None, warm: int) -> None:
    def casting(to: torch.dtype | None) -> torch.autocast:
        return torch.autocast("cpu", dtype=to or torch.bfloat16, enabled=to is not None)

    model, (x, y) = perceptron(), vectors()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with casting(then):
        step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK).prepare(x, y)
        for _ in range(warm):
            step(x, y)
    before = copy.deepcopy(state_of(model, optimizer))
    with casting(torch.float16 if then else torch.bfloat16), pytest.raises(InputError, match="autocast was") as error:
        step(x, y)
    assert "the same torch.autocast" in error.value.fix
    assert_same(state_of(model, optimizer), before)
    with casting(then):
        step(x, y)
        assert step.outputs.dtype is (then or torch.float32)
    step.close()


@pytest.mark.parametrize("autocast", [torch.int64, torch.float64, "bfloat16", True])
def test_types_that_autocast_does_not_compute_in_are_refused(autocast: Any) -> None:
    model = perceptron()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(InputError, match="no type to compute in"):
        TrainStep(model, F.cross_entropy, optimizer, autocast=autocast)
    with pytest.raises(InputError, match="scaler is a float"):
        TrainStep(model, F.cross_entropy, optimizer, scaler=2.0)  # type: ignore[arg-type]


def test_what_a_step_and_its_engine_are_called() -> None:
    model = perceptron()
    x, y = vectors()
    step = TrainStep(model, F.cross_entropy, OPTIMIZERS["momentum"](model.parameters()), options=QUICK)
    assert repr(step) == "TrainStep(Sequential, SGD)"
    step.prepare(x, y)
    assert repr(step) == "TrainStep(Sequential, SGD, single)"
    assert len(repr(step.engine)) < 200
    step.close()
    with pytest.raises(DeviceError, match="closed"):
        step(x, y)
    step.prepare(x, y)
    step(x, y)
    step.close()


def test_a_parameter_written_into_the_input_leaves_the_callers_tensor_without_history() -> None:
    """As a class token is: in eager the input carries the graph of that step from then on."""

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[:, 0] = self.token
            return self.head(x)

    torch.manual_seed(0)
    model = Token()
    other = copy.deepcopy(model)
    rates = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    example = torch.randn(2, 3, 4)
    kept = example.clone()
    step = TrainStep(model, lambda output: output.square().mean(), rates[0], options=Options(tune="off"))
    step.prepare(example)
    assert torch.equal(example, kept)
    assert not example.requires_grad
    for _ in range(3):
        x = torch.randn(2, 3, 4)
        rates[1].zero_grad()
        loss = other(x.clone()).square().mean()
        loss.backward()
        rates[1].step()
        given = x.clone()
        torch.testing.assert_close(step(given), loss.detach())
        assert torch.equal(given[:, 0].detach(), other_token(x, given))
        assert not given.requires_grad
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, expected)
    step.close()


def other_token(x: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """The row that every sample was given; the rest stays as it was."""
    assert torch.equal(written[:, 1:], x[:, 1:])
    return written[:1, 0].expand(x.shape[0], -1)


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_kernels_that_are_wrong_are_left_out_with_the_reason() -> None:
    """Inductor's backward of an unpooling before a layer norm has wrong gradients on the host (torch 2.13)."""

    class Unpooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.LayerNorm([4, 8, 8]), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            pooled, indices = F.max_pool2d(y, 2, return_indices=True)
            y = F.max_unpool2d(pooled, indices, 2, output_size=y.shape[-2:]) + y
            return self.head(torch.tanh(self.norm(y)).mean((2, 3)))

    torch.manual_seed(5)
    model, target = Unpooled(), torch.randint(0, 5, (2,))
    other = copy.deepcopy(model)
    rates = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    options = Options(fuse="inductor", tune="off")
    step = TrainStep(model, F.cross_entropy, rates[0], options=options).prepare(torch.randn(2, 3, 8, 8), target)
    if step.engine.recorded.recording.program.fuse == "none":
        (said,) = [note for note in step.engine.notes if note.startswith("inductor: left out")]
        assert "differs from eager's" in said
        assert [one.note for one in step.engine.candidates if one.name == "inductor, single"] != [""]
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8)
        rates[1].zero_grad()
        loss = F.cross_entropy(other(x), target)
        loss.backward()
        rates[1].step()
        torch.testing.assert_close(step(x, target), loss.detach())
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, expected)
    step.close()


def test_a_loss_that_is_a_number_of_python() -> None:
    model = nn.Linear(3, 1)
    step = TrainStep(model, lambda y: y.sum().item(), torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
    with pytest.raises(InputError, match="a Python float") as caught:
        step.prepare(torch.randn(2, 3))
    assert ".item()" in caught.value.fix


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_preparation_that_fails_late_replaces_nothing(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    model, x, y = perceptron(), torch.randn(6, 8), torch.randint(0, 4, (6,))
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, fused=True) for one in (model, eager)]
    step = TrainStep(model, F.cross_entropy, optimizers[0], options=QUICK, accumulate=3).prepare(x, y)
    make, calls = Nimble.make_engine, 0

    def fails(net: Nimble, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise DeviceError("out of memory")
        return make(net, *args, **kwargs)

    monkeypatch.setattr(Nimble, "make_engine", fails)
    with pytest.raises(DeviceError, match="out of memory"):
        step.prepare(x, y)
    for _ in range(2):
        for _ in range(3):
            step(x, y)
            (F.cross_entropy(eager(x), y) / 3).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for one, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, expected)
    step.close()


def test_engines_for_other_shapes_go_where_casts_are_others() -> None:
    model, target = perceptron(), torch.randint(0, 4, (6,))
    x = torch.randn(6, 8)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
    with torch.autocast("cpu", torch.bfloat16):
        step.prepare(x, target)
    step.prepare(x[:4], target[:4]).prepare(x[:2], target[:2])
    with pytest.raises(InputError):
        step(x, target)
    for size in (4, 2):  # these two are alike
        step(x[:size], target[:size])
    step.close()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_between_replacements_leaves_no_engine_of_before(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = perceptron(), torch.randn(6, 8), torch.randint(0, 4, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, F.cross_entropy, optimizer, options=QUICK, accumulate=3).prepare(x, y)
    adopt, calls = Nimble.adopt_engine, 0

    def interrupted(net: Nimble, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        adopt(net, *args)

    with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(Nimble, "adopt_engine", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.prepare(x, y)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="the step is not prepared"):
        step(x, y)
    step.prepare(x, y)
    step(x, y)
    step.close()


# -- gradients that are one memory, and gradients that nobody wants ---------------------------------------------------


class Twice(nn.Module):
    """Autograd hands one tensor out as the gradient of both parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.one + self.other)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True, foreach=True),
    ],
)
def test_gradients_that_are_one_memory_are_updated_apart(make: Callable[..., torch.optim.Optimizer]) -> None:
    model, eager = Twice(), Twice()
    ours, theirs = make(model.parameters()), make(eager.parameters())
    step = TrainStep(model, F.mse_loss, ours, options=QUICK).prepare(torch.randn(3, 4), torch.randn(3, 4))
    for _ in range(4):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        step(x, y)
        theirs.zero_grad()
        F.mse_loss(eager(x), y).backward()
        theirs.step()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    step.close()


def test_a_frozen_parameter_keeps_its_value_whatever_gradient_an_earlier_step_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    F.mse_loss(model(x), y).backward()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    weight, left = model[0].weight.clone(), model[0].weight.grad
    step = TrainStep(model, F.mse_loss, optimizer, options=QUICK).prepare(x, y)
    for _ in range(2):
        step(x, y)
    assert torch.equal(model[0].weight, weight)
    assert model[0].weight.grad is left
    step.close()


def test_a_scaler_works_whatever_torchs_default_type_is() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model, x, y = nn.Linear(4, 4), torch.randn(3, 4), torch.randn(3, 4)
        eager = copy.deepcopy(model)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, F.mse_loss, optimizer, options=QUICK, scaler=scaler).prepare(x, y)
        step(x, y)
        F.mse_loss(eager(x), y).backward()
        torch.optim.SGD(eager.parameters(), lr=0.1).step()
        torch.testing.assert_close(model.weight, eager.weight)
        step.close()
    finally:
        torch.set_default_dtype(before)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    step = TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), options=QUICK)
    with pytest.raises(InputError, match="a gradient is sparse"):
        step.prepare(torch.randint(0, 10, (3,)), torch.randn(3, 1))
