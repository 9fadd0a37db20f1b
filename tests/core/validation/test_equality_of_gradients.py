"""Gradients are held against what rounding does to them: honest kernels pass, wrong gradients fail by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.validation.equality import check_equality
from nimble_core.validation.rounding_noise import perturbed
from tests.support.noisy_steps import NETS, Convolutions, Step

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}


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
        otherwise = net.otherwise(self.step)
        self.other = [self.run(otherwise, one) for one in self.inputs]

    def run(self, step: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        autocast = torch.autocast("cpu", torch.bfloat16) if self.kind == "autocast" else nullcontext()
        before = copy.deepcopy(self.step.model.state_dict())
        with torch.no_grad(), autocast:
            outputs = [one.clone() for one in step(*inputs)]
        self.step.model.load_state_dict(before)
        return outputs

    def judged(self, change: Callable[[list[torch.Tensor]], Any] = lambda outputs: None) -> EqualityCheck:
        """Judge what other kernels make of the cases, changed."""

        def replay(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            case = next(at for at, one in enumerate(self.inputs) if torch.equal(one[0], inputs[0]))
            outputs = [one.clone() for one in self.other[case]]
            change(outputs)
            return outputs

        lowest = "bfloat16" if self.kind == "autocast" else ""
        return check_equality("replay", replay, self.cases, lowest=lowest, perturbed=self.moved, names=self.names)

    def at(self, name: str) -> int:
        return next(at for at, one in enumerate(self.names) if one.endswith(name))


@pytest.fixture(
    scope="module",
    params=[(net, kind) for net in NETS for kind in KINDS],
    ids=lambda p: "-".join(map(str, (p[0].__name__, p[1]))),
)
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(*request.param)


def test_a_step_of_other_kernels_passes(setup: Setup) -> None:
    check = setup.judged()
    assert check.passed, check
    assert check.reference == "eager"
    assert check.error <= check.tolerance


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zero": lambda one: one * 0,
    "negative": lambda one: -one,
    "reversed": lambda one: one.flip(0),
    "NaN": lambda one: one * math.nan,
    "infinite": lambda one: one / 0,
}


@pytest.mark.parametrize("how", ["scaled", *WRONG])
def test_a_wrong_gradient_fails_by_name(setup: Setup, how: str) -> None:
    wrong = WRONG.get(how, lambda one: one * (1.01 if setup.kind == "float32" else 3))
    for name in (setup.net.small, setup.names[-2].removeprefix("gradient of ")):
        at = setup.at(f"gradient of {name}")

        def change(outputs: list[torch.Tensor], at: int = at) -> None:
            outputs[at] = wrong(outputs[at])

        check = setup.judged(change)
        assert check.differs, (name, check)
        assert f"gradient of {name} differs" in check.reason


def test_a_gradient_of_rounding_only_may_be_tenfold_but_not_as_large_as_another() -> None:
    setup = Setup(Convolutions, "float32")
    at = setup.at("first.bias")

    def tenfold(outputs: list[torch.Tensor]) -> None:
        outputs[at] *= 10

    assert setup.judged(tenfold).passed
    replay = lambda inputs: [one * (10 if i == at else 1) for i, one in enumerate(setup.run(setup.step, inputs))]  # noqa: E731
    assert check_equality("n", replay, setup.cases).differs, "it takes the perturbed run to know"


def test_what_should_be_rounding_only_is_not_as_large_as_another_gradient(setup: Setup) -> None:
    zero = setup.net.zero[-1]

    def another(outputs: list[torch.Tensor]) -> None:
        outputs[setup.at(zero)] = outputs[setup.at("norm1.bias")]

    check = setup.judged(another)
    assert check.differs, check
    assert zero in check.reason


def test_a_stale_block_of_a_gradient_fails(setup: Setup) -> None:
    """What a missed wait leaves: some elements are those of the step before."""
    at = setup.at(f"gradient of {setup.net.last}")
    stale = [setup.cases[1][1][at].clone()]

    def change(outputs: list[torch.Tensor]) -> None:
        now = outputs[at].clone()
        outputs[at].view(-1)[16:32] = stale[0].view(-1)[16:32]
        stale[0] = now

    assert setup.judged(change).differs


def test_a_replay_that_ignores_its_inputs_fails(setup: Setup) -> None:
    def stale(outputs: list[torch.Tensor]) -> None:
        outputs[:] = setup.other[0]

    assert setup.judged(stale).differs


@pytest.mark.parametrize("stale", [0, 1])
def test_one_stale_element_among_a_million_fails_in_half_precision(stale: int) -> None:
    torch.manual_seed(0)

    def rounded(one: torch.Tensor, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [(one * (1 + 0.01 * torch.randn(one.shape, generator=generator, dtype=torch.float64))).bfloat16()]

    cases = [([one], rounded(one, 1)) for one in torch.randn(2, 1_000_000, dtype=torch.float64)]
    moved = [rounded(one, 2) for (one,), _ in cases]

    def replay(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = rounded(inputs[0], 3)
        found[0][:stale] = 5 * torch.sign(-found[0][:stale])
        return found

    check = check_equality("n", replay, cases, perturbed=moved, names=["gradient"])
    assert check.differs == (stale > 0)
    assert stale == 0 or "gradient differs from eager's at one element" in check.reason


def test_a_gradient_that_is_zero_must_be_zero() -> None:
    cases = [([x], [x * 2, torch.zeros(4)]) for x in (torch.rand(5), -torch.rand(5))]
    moved = [outputs for _, outputs in cases]
    assert check_equality("n", lambda i: [i[0] * 2, torch.zeros(4)], cases, perturbed=moved).passed
    assert check_equality("n", lambda i: [i[0] * 2, torch.full((4,), 1e-9)], cases, perturbed=moved).differs


@pytest.mark.parametrize("bad", ["nan", "shape", "few"])
def test_a_perturbed_run_that_cannot_be_used_is_not(bad: str) -> None:
    cases = [([x], [x * 2]) for x in (torch.rand(5), -torch.rand(5))]
    moved = {"nan": [[x * math.nan] for [x], _ in cases], "shape": [[], []], "few": [[cases[0][1][0]]]}[bad]
    assert check_equality("n", lambda i: [i[0] * 2], cases, perturbed=moved).passed
    assert check_equality("n", lambda i: [i[0] * 2.01], cases, perturbed=moved).differs
