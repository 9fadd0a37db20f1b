from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.validation.equality import check_equality
from nimble_core.validation.float64_reference import reference_outputs
from nimble_core.validation.rounding_noise import Update, check_updates, perturbed


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm2(self.second(torch.relu(self.norm1(self.first(x))))) + x)


def convolutions() -> nn.Module:
    """Biases in front of BatchNorm have gradients that are zero in exact arithmetic."""
    body = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(*body, Residual(16), Residual(16), *head)


class Transformer(nn.Module):
    """The bias of the keys has a gradient that is zero in exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 10)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        heads = [one(self.norm1(y)).unflatten(-1, (4, 8)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        y = y + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return self.head((y + self.mlp(self.norm2(y))).mean(1))


class Step(nn.Module):
    """Loss, output and gradients; updates what the optimizer holds, if there is one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[Any, ...]:
        parameters = list(self.model.parameters())
        with torch.enable_grad():
            output = self.model(x)
            loss = F.cross_entropy(output, target)
            gradients = torch.autograd.grad(loss, parameters)
        if self.optimizer is not None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
        return loss.detach(), output.detach(), gradients


class Convolutions:
    make = staticmethod(convolutions)
    zero = ("0.bias", "first.bias", "second.bias")
    small = "1.weight"

    @staticmethod
    def case() -> list[torch.Tensor]:
        return [torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))]

    @staticmethod
    def otherwise(step: Step) -> Callable[..., Any]:
        step = copy.deepcopy(step)
        step.model.to(memory_format=torch.channels_last)
        return step


class Attention:
    make = Transformer
    zero = ("key.bias",)
    small = "norm2.weight"

    @staticmethod
    def case() -> list[torch.Tensor]:
        return [torch.randint(0, 50, (8, 12)), torch.randint(0, 10, (8,))]

    @staticmethod
    def otherwise(step: Step) -> Callable[..., Any]:
        step = copy.deepcopy(step)

        def run(*inputs: torch.Tensor) -> Any:
            with sdpa_kernel([SDPBackend.MATH]):
                return step(*inputs)

        return run


KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}
NETS = (Convolutions, Attention)


def flat(result: tuple[Any, ...]) -> list[torch.Tensor]:
    loss, output, gradients = result
    return [loss, output, *gradients]


class Setup:
    """A net, two cases, and all that its steps are judged by."""

    def __init__(self, net: Any, kind: str) -> None:
        torch.manual_seed(0)
        self.net, self.kind = net, kind
        dtype = KINDS[kind]
        self.step = Step(net.make().to(dtype))
        self.names = ["loss", "output", *(f"gradient of {name}" for name, _ in self.step.model.named_parameters())]
        self.inputs = [[x.to(dtype) if x.is_floating_point() else x for x in net.case()] for _ in range(2)]
        self.cases = [(one, self.run(self.step, one)) for one in self.inputs]
        self.moved = []
        for seed, one in enumerate(self.inputs):
            with perturbed(seed):
                self.moved.append(self.run(self.step, one))
        found = [reference_outputs(self.step, one, {}) for one in self.inputs]
        assert not any(one.reason for one in found), found[0].reason
        self.truth = [one.outputs for one in found]

    def run(self, step: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        autocast = torch.autocast("cpu", torch.bfloat16) if self.kind == "autocast" else nullcontext()
        before = copy.deepcopy(self.step.model.state_dict())
        with torch.no_grad(), autocast:
            outputs = [one.clone() for one in flat(step(*inputs))]
        self.step.model.load_state_dict(before)
        return outputs

    def judged(
        self,
        change: Callable[[list[torch.Tensor]], Any] = lambda outputs: None,
        *,
        truth: bool = True,
        step: Callable[..., Any] | None = None,
    ) -> EqualityCheck:
        def replay(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            outputs = self.run(step or self.net.otherwise(self.step), inputs)
            change(outputs)
            return outputs

        return check_equality(
            "replay",
            replay,
            self.cases,
            references=self.truth if truth else None,
            lowest="bfloat16" if self.kind == "autocast" else "",
            perturbed=self.moved,
            names=self.names,
        )

    def recalled(self) -> Callable[..., Any]:
        """What other kernels make of the cases, run once."""
        step = self.net.otherwise(self.step)
        made = [self.run(step, one) for one in self.inputs]

        def run(*inputs: torch.Tensor) -> Any:
            outputs = next(
                one for one, given in zip(made, self.inputs, strict=True) if torch.equal(given[0], inputs[0])
            )
            return outputs[0], outputs[1], outputs[2:]

        return run

    def at(self, name: str) -> int:
        return self.names.index(f"gradient of {name}")


@pytest.fixture(
    scope="module",
    params=[(net, kind) for net in NETS for kind in KINDS],
    ids=lambda p: "-".join(map(str, (p[0].__name__, p[1]))),
)
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(*request.param)


@pytest.mark.parametrize("truth", [True, False])
def test_a_step_of_other_kernels_passes(setup: Setup, truth: bool) -> None:
    check = setup.judged(truth=truth)
    assert check.passed, check
    assert check.reference == ("float64" if truth else "eager")
    assert check.error <= check.tolerance


def test_without_a_perturbed_run_a_gradient_of_rounding_only_would_fail() -> None:
    """A tenfold nothing is as right as a nothing."""
    setup = Setup(Convolutions, "float32")
    at = setup.at("4.first.bias")

    def tenfold(outputs: list[torch.Tensor]) -> None:
        outputs[at] *= 10

    assert setup.judged(tenfold).passed
    assert setup.judged(tenfold, truth=False).passed
    replay = lambda inputs: [one * (10 if i == at else 1) for i, one in enumerate(setup.run(setup.step, inputs))]  # noqa: E731
    assert check_equality("n", replay, setup.cases, references=setup.truth).differs
    assert check_equality("n", replay, setup.cases).differs


@pytest.mark.parametrize("truth", [True, False])
def test_a_wrong_gradient_fails_by_name(setup: Setup, truth: bool) -> None:
    """Of one small parameter, of one that should be rounding only, of the last layer."""
    exact, right = setup.kind == "float32", setup.recalled()
    last = setup.names[-2].removeprefix("gradient of ")
    for name in (setup.net.small, last):
        at = setup.at(name)
        for wrong in (
            lambda one: one * (1.01 if exact else 3),
            lambda one: one * 0,
            lambda one: -one,
            lambda one: one.flip(0),
            lambda one: one * math.nan,
        ):

            def change(outputs: list[torch.Tensor], wrong: Any = wrong, at: int = at) -> None:
                outputs[at] = wrong(outputs[at])

            check = setup.judged(change, truth=truth, step=right)
            assert check.differs, (name, check)
            assert f"gradient of {name} differs" in check.reason

    zero = setup.net.zero[-1]
    at = next(i for i, name in enumerate(setup.names) if name.endswith(zero))

    def another(outputs: list[torch.Tensor]) -> None:
        norm = next(one for name, one in zip(setup.names, outputs, strict=True) if name.endswith("norm1.bias"))
        outputs[at] = norm

    check = setup.judged(another, truth=truth, step=right)
    assert check.differs, check
    assert zero in check.reason


@pytest.mark.parametrize("truth", [True, False])
def test_a_stale_block_of_a_gradient_fails(setup: Setup, truth: bool) -> None:
    """What a missed wait leaves: some elements are those of the step before."""
    name = "head.weight" if setup.net is Attention else "8.weight"
    at = setup.at(name)
    stale = [setup.cases[1][1][at].clone()]

    def change(outputs: list[torch.Tensor]) -> None:
        now = outputs[at].clone()
        outputs[at].view(-1)[16:32] = stale[0].view(-1)[16:32]
        stale[0] = now

    assert setup.judged(change, truth=truth).differs


def test_one_stale_element_among_a_million_fails_in_half_precision() -> None:
    torch.manual_seed(0)
    truth = [[torch.randn(1_000_000, dtype=torch.float64)] for _ in range(2)]

    def rounded(one: torch.Tensor, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [(one * (1 + 0.01 * torch.randn(one.shape, generator=generator, dtype=torch.float64))).bfloat16()]

    cases = [(one, rounded(one[0], 1)) for one in truth]
    moved = [rounded(one[0], 2) for one in truth]

    def check(stale: int) -> EqualityCheck:
        def replay(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            found = rounded(inputs[0], 3)
            found[0][:stale] = 3 * torch.sign(-found[0][:stale])
            return found

        return check_equality("n", replay, cases, references=truth, perturbed=moved, names=["gradient"])

    assert check(0).passed
    assert check(1).differs
    assert "gradient differs from float64's at one element" in check(1).reason


def test_a_replay_that_ignores_its_inputs_fails(setup: Setup) -> None:
    first = setup.cases[0][1]
    assert setup.judged(step=lambda *inputs: (first[0], first[1], first[2:])).differs


def test_names_must_be_as_many_as_outputs() -> None:
    cases = [([x], [x * 2]) for x in (torch.rand(5), torch.rand(5))]
    with pytest.raises(ValueError, match="argument"):
        check_equality("n", lambda i: [i[0] * 2], cases, names=["a", "b"])


@pytest.mark.parametrize("bad", ["nan", "shape", "few"])
def test_a_perturbed_run_that_cannot_be_used_is_not(bad: str) -> None:
    cases = [([x], [x * 2]) for x in (torch.rand(5), -torch.rand(5))]
    moved = {"nan": [[x * math.nan] for [x], _ in cases], "shape": [[], []], "few": [[cases[0][1][0]]]}[bad]
    assert check_equality("n", lambda i: [i[0] * 2], cases, perturbed=moved).passed
    assert check_equality("n", lambda i: [i[0] * 2.01], cases, perturbed=moved).differs


def test_a_gradient_that_is_zero_must_be_zero() -> None:
    cases = [([x], [x * 2, torch.zeros(4)]) for x in (torch.rand(5), -torch.rand(5))]
    moved = [outputs for _, outputs in cases]
    truth = [[one.double() for one in outputs] for _, outputs in cases]
    for references in (None, truth):
        good = check_equality("n", lambda i: [i[0] * 2, torch.zeros(4)], cases, references=references, perturbed=moved)
        assert good.passed
        bad = check_equality(
            "n", lambda i: [i[0] * 2, torch.full((4,), 1e-9)], cases, references=references, perturbed=moved
        )
        assert bad.differs


# Perturbed runs.


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]), st.integers(0, 9))
def test_results_move_by_their_last_places(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(50, 40).to(dtype)
    x[0] = 0
    with perturbed(seed):
        y, view, made, copied = x * 1, x.t(), torch.ones_like(x), x.clone().double()
    assert y.dtype is dtype
    assert torch.equal(view, x.t())
    assert torch.equal(copied, x.double())
    assert torch.equal(made, torch.ones(50, 40).to(dtype))
    assert not y[0].any()
    share = ((y - x).double().abs() / x.double().abs().clamp_min(1e-30)).max()
    assert 0 < share < 80 * torch.finfo(dtype).eps
    assert (y != x).double().mean() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_probabilities_stay_probabilities(dtype: torch.dtype) -> None:
    x = torch.randn(50, 40).to(dtype) * 20
    with perturbed():
        saturated, softened = torch.sigmoid(x), torch.tanh(x)
    assert (torch.sigmoid(x) == 1).any()
    assert not torch.equal(saturated, torch.sigmoid(x))
    assert saturated.min() >= 0
    assert saturated.max() <= 1
    assert softened.abs().max() <= 1


def test_random_numbers_layouts_and_integers_stay() -> None:
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    torch.manual_seed(3)
    plain = F.dropout(x, 0.5)
    torch.manual_seed(3)
    with perturbed():
        moved = F.dropout(x, 0.5)
        counted = torch.arange(5) + 1
        again = moved * 1
    assert torch.equal(moved == 0, plain == 0)
    assert again.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(counted, torch.arange(1, 6))
    assert torch.equal(torch.ones(3) * 2, torch.full((3,), 2.0))


def test_the_same_seed_moves_alike_and_gradients_move_too() -> None:
    torch.manual_seed(0)
    step, (x, target) = Step(Transformer()), Attention.case()
    runs = []
    for seed in (1, 1, 2):
        with perturbed(seed):
            runs.append(flat(step(x, target)))
    assert all(map(torch.equal, runs[0], runs[1]))
    assert not any(map(torch.equal, runs[0][1:], runs[2][1:]))
    plain = flat(step(x, target))
    assert not any(map(torch.equal, runs[0][1:], plain[1:]))


# Updates.

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda one, **how: torch.optim.SGD(one, lr=0.05, momentum=0.9, weight_decay=1e-4, **how),
    "adam": lambda one, **how: torch.optim.Adam(one, lr=1e-3, **how),
    "adamw": lambda one, **how: torch.optim.AdamW(one, lr=1e-3, **how),
}


def state_of(step: Step) -> dict[str, torch.Tensor]:
    assert step.optimizer is not None
    found = dict(step.model.state_dict())
    names = {id(one): name for name, one in step.model.named_parameters()}
    for parameter, kept in step.optimizer.state.items():
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                found[f"{key} of {names[id(parameter)]}"] = value
    return {name: one.detach().clone() for name, one in found.items()}


class Training:
    """Eager, perturbed and other steps from one state."""

    def __init__(self, net: Any, optimizer: str, dtype: torch.dtype, warm: int = 1) -> None:
        torch.manual_seed(0)
        self.net, self.optimizer, self.dtype = net, optimizer, dtype
        model = net.make().to(dtype)
        self.step = Step(model, OPTIMIZERS[optimizer](model.parameters(), foreach=True))
        for _ in range(warm):
            self.step(*self.inputs())
        self.given = self.inputs()
        self.before = state_of(self.step)
        self.eager = self.after(copy.deepcopy(self.step))
        again = copy.deepcopy(self.step)
        with perturbed():
            self.moved = self.after(again)

    def inputs(self) -> list[torch.Tensor]:
        return [one.to(self.dtype) if one.is_floating_point() else one for one in self.net.case()]

    def after(self, step: Step) -> dict[str, torch.Tensor]:
        run = step
        if step is not self.step:
            with torch.no_grad():
                run(*self.given)
        return state_of(step)

    def other(self) -> dict[str, torch.Tensor]:
        """By other kernels: another layout or attention, and optimizer updates one by one."""
        step = copy.deepcopy(self.step)
        for group in step.optimizer.param_groups:  # type: ignore[union-attr]
            group["foreach"] = False
        if self.net is Convolutions:
            self.given = [one.to(memory_format=torch.channels_last) if one.dim() == 4 else one for one in self.given]
            return self.after(step)
        with sdpa_kernel([SDPBackend.MATH]):
            return self.after(step)

    def judged(self, after: dict[str, torch.Tensor]) -> EqualityCheck:
        names = dict(self.step.model.named_parameters())
        jumps = self.optimizer != "sgd"
        updates = [
            Update(name, before, after[name], self.eager[name], self.moved[name], jumps and name in names)
            for name, before in self.before.items()
        ]
        return check_updates("replay", updates)


@pytest.fixture(
    scope="module",
    params=[(n, o, d) for n in NETS for o in OPTIMIZERS for d in (torch.float32, torch.bfloat16)],
    ids=lambda p: f"{p[0].__name__}-{p[1]}-{p[2]}",
)
def training(request: pytest.FixtureRequest) -> Training:
    return Training(*request.param)


def test_a_step_by_other_kernels_updates_alike(training: Training) -> None:
    check = training.judged(training.other())
    assert check.passed, check


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_the_first_step_too(net: Any, optimizer: str) -> None:
    """Adam's first updates have the learning rate's size, however small the gradient."""
    torch.manual_seed(0)
    first = Training(net, optimizer, torch.float32, warm=0)
    first.before = {name: first.before.get(name, torch.zeros_like(one)) for name, one in first.eager.items()}
    assert first.judged(first.other()).passed


def test_what_was_not_updated_fails_by_name(training: Training) -> None:
    other, seen = training.other(), 0
    for name, before in training.before.items():
        changed = int((before != training.eager[name]).sum())
        if name.endswith(training.net.zero) or changed < min(4, before.numel()):
            continue  # rounding only, or smaller than the last place of its type
        seen += 1
        check = training.judged(other | {name: before})
        assert check.differs, (name, check)
        assert name in check.reason
    assert seen > len(training.before) / 2


def test_wrong_updates_fail(training: Training) -> None:
    exact = training.dtype is torch.float32
    names = [name for name in training.before if training.before[name].is_floating_point() and "step" not in name]
    chosen = [
        name for name in names if name.endswith(("running_mean", "running_var", training.net.small, "out.weight"))
    ]
    assert len(chosen) > 1
    other = training.other()
    for name in chosen:
        before, eager = training.before[name].double(), training.eager[name].double()
        if not exact and float((eager - before).norm() / eager.norm()) < 0.05:
            continue  # within what rounding of the stored numbers may change
        for share in (-1.0, 0.0, 2.0):
            after = (before + share * (eager - before)).to(training.dtype)
            check = training.judged(other | {name: after})
            assert check.differs, (name, share, check)


def test_counters_must_be_equal() -> None:
    training = Training(Convolutions, "sgd", torch.float32)
    after = training.eager | {"1.num_batches_tracked": training.before["1.num_batches_tracked"]}
    check = training.judged(after)
    assert check.differs
    assert check.reason == "1.num_batches_tracked was not updated"
    assert training.judged(training.eager).passed


def updates_of(count: int, seed: int, *, jumps: bool, size: float = 1e-3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(count, generator=generator)
    step = torch.randn(count, generator=generator)
    return before, size * (torch.sign(step) if jumps else step)


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 99), st.booleans(), st.floats(0.0, 2.0))
def test_an_update_passes_by_its_error(count: int, seed: int, jumps: bool, error: float) -> None:
    before, step = updates_of(count, seed, jumps=jumps)
    eager = before + step
    check = check_updates("n", [Update("w", before, eager + error * step, eager, eager, jumps)])
    flips = min(4, count // 16) if jumps else 0
    stored = torch.finfo(torch.float32).eps * float(eager.double().norm())
    size = float((eager.double() - before.double()).norm())
    bound = 1e-4 * size + stored + 2 * float((eager - before).abs().max()) * math.sqrt(flips)
    assert check.tolerance == pytest.approx(min(bound, bound) / size, rel=1e-3)
    if abs(error * size - bound) > 3 * stored:
        assert check.differs == (error * size > bound)
    assert bool(check.reason) != check.passed


@settings(deadline=None)
@given(st.integers(16, 2000), st.integers(0, 99), st.integers(0, 40))
def test_a_few_signs_may_flip_where_updates_jump(count: int, seed: int, flipped: int) -> None:
    before, step = updates_of(count, seed, jumps=True)
    flipped = min(flipped, count)
    mine = step.clone()
    mine[:flipped] *= -1
    check = check_updates("n", [Update("w", before, before + mine, before + step, before + step, True)])
    allowed = min(4, count // 16)
    assert check.differs == (flipped > allowed)
    strict = check_updates("n", [Update("w", before, before + mine, before + step, before + step, False)])
    assert strict.differs == (flipped > 0)


@settings(deadline=None)
@given(st.integers(4, 400), st.integers(0, 99))
def test_signs_of_rounding_may_all_flip_but_not_grow(count: int, seed: int) -> None:
    before, step = updates_of(count, seed, jumps=True)
    eager, moved = before + step, before + step.flip(0) * torch.sign(torch.linspace(-1, 1.01, count))

    def check(factor: float) -> EqualityCheck:
        return check_updates("n", [Update("b", before, before + factor * step, eager, moved, True)])

    if float((moved - eager).norm()) >= float(step.norm()):
        assert not check(-1.0).differs
        assert not check(0.0).differs
    assert check(4.0).differs
    assert check(math.nan).differs


@settings(deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(16, 400), st.integers(0, 99))
def test_no_update_is_seen_even_where_it_is_smaller_than_the_last_place(
    dtype: torch.dtype, count: int, seed: int
) -> None:
    before, step = updates_of(count, seed, jumps=True, size=0.3 * torch.finfo(dtype).eps)
    before = before.to(dtype)
    eager = (before.double() + step.double()).to(dtype)
    check = check_updates("n", [Update("w", before, before, eager, eager)])
    assert check.differs != torch.equal(before, eager)
    if check.differs:
        assert check.reason == "w was not updated"


def test_void_and_odd_updates() -> None:
    one = torch.ones(20)
    assert check_updates("n", []).void
    assert check_updates("n", [Update("w", one, one, one, one)]).void
    bad = check_updates("n", [Update("w", one, one, one * math.nan, one)])
    assert bad.void
    assert all(map(math.isfinite, (bad.relative_error, bad.tolerance, bad.input_effect)))
    assert check_updates("n", [Update("w", one, one[:3], one * 2, one * 2)]).differs
    # Nothing passes because a perturbed run failed.
    assert check_updates("n", [Update("w", one, one * 1.5, one * 2, one * math.inf)]).differs
    empty = torch.empty(0)
    assert check_updates("n", [Update("w", one, one * 2, one * 2, one * 2), Update("e", *[empty] * 4)]).passed
