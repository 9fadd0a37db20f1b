"""Outputs against eager and float64: honest rounding passes, mistakes fail, and what shows nothing is void."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from nimble_core.ir.candidates import EqualityCheck
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import other_values
from nimble_core.validation.bounds import BOUNDS, lowest_precision
from nimble_core.validation.distances import relative_error
from nimble_core.validation.equality import check_equality
from nimble_core.validation.float64_reference import reference_outputs

Replay = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

A, B = torch.linspace(1, 2, 5), torch.linspace(-3, 1, 5)
FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8"))
NUMBERS8 = tuple(dtype for dtype in FLOAT8 if dtype is not torch.float8_e8m0fnu)


def double(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[0] * 2]


def cases_of(model: Replay) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    return [([x], model([x.clone()])) for x in (A, B)]


CASES = cases_of(double)
SEVERAL = cases_of(lambda i: [i[0], (i[0] * 10).long(), i[0].sum()])


class WrongLater:
    """A replay that is right for the first three runs."""

    runs = 0

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.runs += 1
        return [inputs[0] * (2 if self.runs < 4 else 3)]


def overwriting() -> Replay:
    buffer = torch.empty(5)
    return lambda inputs: [torch.mul(inputs[0], 2, out=buffer)]


@pytest.mark.parametrize(
    ("replay", "cases", "right"),
    [
        (double, CASES, True),
        (lambda i: [i[0].mul_(2)], CASES, True),  # the next replay gets other inputs
        (lambda i: [i[0] * math.nan], CASES, False),
        (lambda i: [i[0] * math.inf], CASES, False),
        (lambda i: [A * 2], CASES, False),
        (WrongLater(), CASES, False),
        (overwriting(), CASES, False),
        (lambda i: [(i[0] * 2)[:1]], CASES, False),
        (lambda i: [i[0] * 2, i[0]], CASES, False),
        (lambda i: [i[0], (i[0] * 10).long(), i[0].sum()], SEVERAL, True),
        (lambda i: [i[0], (i[0] * 10).long(), i[0].sum() + 1], SEVERAL, False),
        (lambda i: [i[0], (i[0] * 10).long() + 1, i[0].sum()], SEVERAL, False),
        (lambda i: [i[0] * 1.1, (i[0] * 10).long(), i[0].sum()], SEVERAL, False),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_a_replay_passes_if_every_output_of_every_run_is_right(
    replay: Replay, cases: Any, right: bool, exact: bool
) -> None:
    kept = A.clone()
    references = [[one.double() if one.is_floating_point() else one for one in outputs] for _, outputs in cases]
    check = check_equality("nimble", copy.copy(replay), cases, references=references if exact else None)
    assert check.name == "nimble"
    assert check.passed == right
    assert check.differs != right
    assert bool(check.reason) != right
    assert not right or (check.relative_error == 0 and check.input_effect > 10 * check.tolerance)
    assert all(map(math.isfinite, (check.relative_error, check.reference_error, check.tolerance, check.input_effect)))
    assert torch.equal(A, kept)


@given(st.floats(1e-8, 1.0))
def test_an_error_is_measured_relative_and_judged_by_the_tolerance(size: float) -> None:
    check = check_equality("nimble", lambda inputs: [inputs[0].double() * 2 * (1 + size)], CASES)
    assert check.relative_error == pytest.approx(size, rel=1e-3, abs=1e-9)
    assert check.passed == (check.relative_error <= BOUNDS["float32"].tolerance)


# What shows nothing.

HARDLY = [([x], [1000 + x.double() * 1e-3]) for x in (A, B)]
"""Outputs that move by less than the tolerance between inputs."""


@pytest.mark.parametrize(
    ("replay", "cases"),
    [
        (lambda i: [torch.ones(3)], [([x], [torch.ones(3)]) for x in (A, B)]),
        (lambda i: [torch.tensor([1, 2])], [([x], [torch.tensor([1, 2])]) for x in (A, B)]),
        (lambda i: [], [([x], []) for x in (A, B)]),
        (lambda i: HARDLY[0][1], HARDLY),
        (lambda i: HARDLY[1][1], HARDLY),
        (lambda i: [i[0] * math.nan], cases_of(lambda i: [i[0] * math.nan])),
        (lambda i: [i[0] * complex(math.inf, 0)], cases_of(lambda i: [i[0] * complex(math.inf, 0)])),
        (double, [([x], [x * math.nan]) for x in (A, B)]),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_outputs_that_cannot_show_a_mistake_are_void(replay: Replay, cases: Any, exact: bool) -> None:
    references = [double([x.double()]) for x in (A, B)] if exact else None
    check = check_equality("nimble", replay, cases, lowest="float32", references=references)
    assert check.void, check
    assert not check.passed
    assert check.input_effect < max(10 * check.tolerance, 1e-12)
    assert all(map(math.isfinite, (check.relative_error, check.input_effect)))


@given(st.floats(0.0, 1.0))
def test_outputs_that_hardly_move_show_a_replay_that_is_nearer_than_a_tenth_of_that(share: float) -> None:
    check = check_equality("nimble", lambda i: [1000 + i[0].double() * 1e-3 * (1 + share)], HARDLY, lowest="float32")
    assert check.relative_error <= check.tolerance
    assert check.passed == (10 * check.relative_error <= check.input_effect)
    assert check.passed or check.void
    assert check.passed or share > 0.01


def test_of_a_training_step_outputs_that_hardly_move_show_nothing() -> None:
    moved = [outputs for _, outputs in HARDLY]
    replay = lambda i: [1000 + i[0].double() * 1e-3]  # noqa: E731
    assert check_equality("nimble", replay, HARDLY, lowest="float32", perturbed=moved).void


# What is infinite, and float8.


def masked(inputs: Sequence[torch.Tensor], fill: float = -math.inf, factor: float = 2.0) -> list[torch.Tensor]:
    """As logits of tokens that must not be: the first and the last, in whatever order."""
    logits = inputs[0] * factor
    logits[[0, -1]] = fill
    return [logits, inputs[0].argmax()]


@pytest.mark.parametrize("by", ["eager", "float64", "noise"])
def test_what_eager_has_infinite_has_to_be_so_and_the_rest_is_compared(by: str) -> None:
    cases = cases_of(masked)
    more: dict[str, Any] = {
        "eager": {},
        "float64": {"references": [masked([x.double()]) for x in (A, B)]},
        "noise": {"perturbed": [[a * (1 + 1e-7), b] for _, (a, b) in cases]},
    }[by]
    found = check_equality("n", masked, cases, **more)
    assert (found.passed, found.reason, found.relative_error) == (True, "", 0.0)
    assert found.reference == ("float64" if by == "float64" else "eager")
    for wrong in (math.inf, 0.0, -1e38, math.nan):
        found = check_equality("n", partial(masked, fill=wrong), cases, **more)
        assert found.differs, wrong
        assert "which numbers are infinite" in found.reason
    assert check_equality("n", partial(masked, factor=2.1), cases, **more).differs
    more_infinite = lambda i: [masked(i)[0] * i[0].new_tensor([1, math.inf, 1, 1, 1]), masked(i)[1]]  # noqa: E731
    assert check_equality("n", more_infinite, cases, **more).differs


def test_in_float16_what_overflows_is_a_matter_of_rounding() -> None:
    cases = [([x], [masked([x])[0].half()]) for x in (A, B)]
    assert check_equality("n", lambda i: [masked(i, -65504.0)[0].half()], cases).void
    assert check_equality("n", lambda i: [masked(i)[0].half()], cases).passed


@given(st.sampled_from(NUMBERS8), st.floats(-0.01, 0.01), st.integers(0, 99), st.booleans())
def test_float8_that_only_rounds_elsewhere_passes_and_mistakes_do_not(
    dtype: torch.dtype, moved: float, seed: int, exact: bool
) -> None:
    torch.manual_seed(seed)

    def run(given: Sequence[torch.Tensor], factor: float = 1.0) -> list[torch.Tensor]:
        out = (given[0] * factor).to(dtype)
        return [out, out.float()]

    inputs = [torch.randn(500, dtype=torch.float64) for _ in range(2)]
    cases = [([x], run([x])) for x in inputs]
    judge = partial(check_equality, "n", cases=cases, references=[run([x]) for x in inputs] if exact else None)
    assert judge(replay=partial(run, factor=1 + moved)).passed
    for wrong in (0.0, 0.25, 4.0):
        assert not judge(replay=partial(run, factor=wrong)).passed, wrong
    assert judge(replay=lambda _: cases[0][1]).differs


# Other kernels, judged by a float64 reference: real models, honest roundings and real mistakes.

Model = Callable[[torch.Tensor], torch.Tensor]
FLOATING = (torch.float32, torch.float16, torch.bfloat16)


def convolutions(dtype: torch.dtype) -> tuple[nn.Sequential, torch.Tensor]:
    """Convolutions with BatchNorms whose statistics are those of their inputs."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for read, made in ((3, 24), (24, 24), (24, 32)):
        layers += [nn.Conv2d(read, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for norm in model[1::3]:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, 0, 0.3)
        for _ in range(10):
            model(torch.randn(4, 3, 12, 12))
    return model.eval().to(dtype), torch.randn(1, 3, 12, 12).to(dtype)


def judged(model: Model, replay: Model, x: torch.Tensor, *, referenced: bool = True, lowest: str = "") -> EqualityCheck:
    cases, references = [], []
    for seed in (1, 2):
        inputs = other_values([x], seed)
        with torch.no_grad():
            cases.append((inputs, [model(*inputs)]))
        found = reference_outputs(model, inputs, {})
        assert found.outputs is not None
        references.append(found.outputs)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [replay(*inputs)]

    return check_equality("replay", run, cases, references=references if referenced else None, lowest=lowest)


def folded(model: nn.Sequential) -> nn.Sequential:
    layers: list[nn.Module] = []
    for conv, norm, act in zip(model[::3], model[1::3], model[2::3], strict=True):
        layers += [fuse_conv_bn_eval(conv, norm), act]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("dtype", FLOATING)
def test_other_kernels_that_only_round_elsewhere_pass(dtype: torch.dtype) -> None:
    model, x = convolutions(dtype)
    wide = copy.deepcopy(model).float()
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    for replay in (folded(model), lambda x: wide(x.float()).to(dtype), last, model):
        check = judged(model, replay, x)
        assert check.passed, check
        assert check.reference == "float64"
        assert check.eager_error > 0
        assert check.error == check.reference_error <= check.tolerance


def no_bias(model: nn.Sequential) -> nn.Sequential:
    model = folded(model)
    nn.init.zeros_(model[2].bias)
    return model


def no_relu(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*model[:5], *model[6:])


def stale(model: nn.Sequential) -> nn.Sequential:
    """Folded before the weights last changed: by 1%."""
    torch.manual_seed(11)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for conv in model[::3]:
            conv.weight.mul_(1 + 0.01 * torch.randn(conv.weight.shape).to(conv.weight.dtype))
    return folded(model)


def other_statistics(model: nn.Sequential) -> nn.Sequential:
    model = copy.deepcopy(model)
    for norm in model[1::3]:
        norm.running_var.mul_(0.97)
    return folded(model)


LARGE, SMALL = (no_bias, no_relu), (stale, other_statistics)
"""Small ones are as large as bfloat16's own rounding of folded weights."""


@pytest.mark.parametrize(
    ("mistake", "dtype"), [*product(LARGE, FLOATING), *product(SMALL, (torch.float32, torch.float16))]
)
def test_mistakes_fail(dtype: torch.dtype, mistake: Callable[[nn.Sequential], nn.Sequential]) -> None:
    model, x = convolutions(dtype)
    check = judged(model, mistake(model), x)
    assert check.differs, check
    assert "float64" in check.reason
    assert check.error > check.tolerance


@pytest.mark.parametrize("referenced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_wrong_element_among_many(dtype: torch.dtype, referenced: bool) -> None:
    truth = [torch.randn(1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(at)) for at in (0, 1)]
    eager = [one.to(dtype) for one in truth]

    def replay(inputs: Sequence[torch.Tensor], *, right: bool) -> list[torch.Tensor]:
        out = eager[int(inputs[0])].clone()
        if not right:
            out[(out.double().abs() - 2.5).abs().argmin()] = 0
        return [out]

    cases = [([torch.tensor(at)], [one]) for at, one in enumerate(eager)]
    references = [[one] for one in truth] if referenced else None
    for right in (False, True):
        check = check_equality("found", partial(replay, right=right), cases, references=references)
        assert check.passed == right
        assert ("at one element" in check.reason) != right


def test_the_reference_finds_a_mistake_that_the_tolerance_of_half_precision_hides() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).half()
    wrong, x = copy.deepcopy(model), torch.randn(8, 64).half()
    with torch.no_grad():
        wrong[0].weight.mul_(1.005)
    assert judged(model, wrong, x, referenced=False).passed
    assert judged(model, wrong, x).differs


def test_honest_rounding_of_a_deep_model_passes_by_the_reference_only() -> None:
    """Thirty products in half precision: eager itself is further from the truth than the tolerance."""
    torch.manual_seed(5)
    layers = [part for _ in range(30) for part in (nn.Linear(64, 64, bias=False), nn.Tanh())]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in model[::2]:
            nn.init.orthogonal_(layer.weight, gain=2.0)
    model, x = model.half(), torch.randn(8, 64).half()
    wide = copy.deepcopy(model).float()
    check = judged(model, lambda x: wide(x.float()).half(), x)
    assert check.passed, check
    assert check.relative_error > BOUNDS["float16"].tolerance
    assert check.reference_error <= check.tolerance
    assert not judged(model, lambda x: wide(x.float()).half(), x, referenced=False).passed
    assert not judged(model, lambda x: wide(1.2 * x.float()).half(), x).passed


def test_under_autocast_the_tolerance_is_that_of_the_products() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(4, 64)

    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return body(x).float()

    lowest = lowest_precision(record(model, Signature((x,), {}), args=(x,), kwargs={}).program)
    assert lowest == "bfloat16"
    fused = copy.deepcopy(body)
    for referenced in (False, True):
        assert judged(model, fused, x, referenced=referenced, lowest=lowest).passed
        wrong = copy.deepcopy(body)
        nn.init.zeros_(wrong[0].bias)
        assert judged(model, wrong, x, referenced=referenced, lowest=lowest).differs
    assert not judged(model, fused, x, referenced=False).passed  # as a model of float32 products it would not be right


def cancelling(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1).sum(-1) - 1


def test_an_output_of_pure_rounding_neither_fails_nor_lets_everything_pass() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 50)
    cases = [([one], [cancelling(one), one * 2]) for one in other_values([x], 1) + other_values([x], 2)]
    references = [[cancelling(inputs[0].double()), inputs[0].double() * 2] for inputs, _ in cases]

    def check(*outputs: Model) -> EqualityCheck:
        return check_equality("n", lambda inputs: [one(inputs[0]) for one in outputs], cases, references=references)

    def other(x: torch.Tensor) -> torch.Tensor:
        return (torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)).flip(-1).sum(-1) - 1

    assert check(other, lambda x: x + x).passed
    assert check(other, lambda x: x + x).relative_error > 0.1
    assert check(lambda x: other(x) + 1e-3, lambda x: x + x).differs
    assert check(other, lambda x: x * 2.001).differs
    # Alone it shows nothing: a replay that ignores its inputs would pass as well.
    alone = [(inputs, outputs[:1]) for inputs, outputs in cases]
    assert check_equality("n", lambda i: [other(i[0])], alone, references=[one[:1] for one in references]).void


def test_an_output_in_which_float64_takes_another_branch_is_compared_with_eager() -> None:
    """Sums of half precision decide which entry is the greatest: float64 often finds another."""
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (64, 400)).half() / 10
    cases, references = [], []
    for inputs in ([one] for one in other_values([x], 1) + other_values([x], 2)):
        cases.append((inputs, [inputs[0].cumsum(-1).argmax(-1)]))
        references.append([other_values([cases[-1][1][0]], 9)[0]])
    assert relative_error(cases[0][1], references[0]) > 0.5
    check = check_equality("n", lambda i: [i[0].cumsum(-1).argmax(-1)], cases, references=references)
    assert check.passed
    assert check.reference == "eager"
    assert not check_equality("n", lambda i: [i[0].argmax(-1)], cases, references=references).passed


@pytest.mark.parametrize("bad", ["nan", "none", "shape", "few"])
def test_a_reference_that_cannot_be_used_is_not(bad: str) -> None:
    references: list[list[torch.Tensor] | None] = [[A.double() * 2], [B.double() * 2]]
    if bad == "few":
        references.pop()
    else:
        references[1] = {"nan": [B.double() * math.nan], "none": None, "shape": []}[bad]
    check = check_equality("n", double, CASES, references=references)
    assert check.passed
    assert (check.reference, check.eager_error, check.reference_error) == ("eager", 0.0, 0.0)
    assert not check_equality("n", lambda i: [i[0] * 2.1], CASES, references=references).passed


@given(st.floats(1e-9, 1e-1), st.floats(1e-9, 1e-1), st.integers(0, 99))
def test_a_replay_passes_by_its_error_and_eagers(own: float, theirs: float, seed: int) -> None:
    """Errors of known size: what passes follows from the two alone."""
    generator = torch.Generator().manual_seed(seed)
    truth = [torch.randn(4000, generator=generator, dtype=torch.float64) for _ in range(2)]
    noise = torch.nn.functional.normalize(torch.randn(4000, generator=generator, dtype=torch.float64), dim=0)
    cases = [([one], [one + own * one.norm() * noise]) for one in truth]

    def replay(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0] - theirs * inputs[0].norm() * noise]

    check = check_equality("n", replay, cases, references=[[one] for one in truth])
    bound = 3 * (1 + 4 / 4000) * own
    assert check.tolerance == pytest.approx(bound, rel=1e-6)
    assert check.eager_error == pytest.approx(own, rel=1e-6)
    assert check.reference_error == pytest.approx(theirs, rel=1e-6)
    if abs(theirs / bound - 1) > 1e-6:
        assert check.differs == (theirs > bound)
        if theirs < bound:
            assert check.passed == (check.input_effect >= 10 * theirs)
