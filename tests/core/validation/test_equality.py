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
from nimble_core.ir.program import Access, Call, Program, TensorRef
from nimble_core.tracing.recorder import record
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import other_values
from nimble_core.validation.equality import TOLERANCE, check_equality, lowest_precision, relative_error, tolerance_for
from nimble_core.validation.float64_reference import reference_outputs

A, B = torch.linspace(1, 2, 5), torch.linspace(-3, 1, 5)


def double(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[0] * 2]


CASES = [([A], [A * 2]), ([B], [B * 2])]


def test_an_equal_replay_passes() -> None:
    check = check_equality("nimble", double, CASES)
    assert (check.name, check.passed, check.reason, check.relative_error) == ("nimble", True, "", 0.0)
    assert check.input_effect > 10 * check.tolerance


@given(st.floats(1e-8, 1.0))
def test_an_error_is_measured_relative_and_judged_by_the_tolerance(size: float) -> None:
    check = check_equality("nimble", lambda inputs: [inputs[0].double() * 2 * (1 + size)], CASES)
    assert check.relative_error == pytest.approx(size, rel=1e-3, abs=1e-9)
    assert check.passed == (check.relative_error <= TOLERANCE["float32"])
    assert bool(check.reason) != check.passed


def test_an_output_that_ignores_the_input_makes_the_check_void() -> None:
    constant = [torch.ones(3)]
    check = check_equality("nimble", lambda inputs: constant, [([A], constant), ([B], constant)])
    assert not check.passed
    assert "void" in check.reason
    assert check.input_effect == 0


HARDLY = [([x], [1000 + x.double() * 1e-3]) for x in (A, B)]
"""Outputs that move by less than the tolerance between inputs."""


@pytest.mark.parametrize("stale", [0, 1])
def test_a_replay_that_ignores_its_input_is_not_shown_where_outputs_hardly_move(stale: int) -> None:
    check = check_equality("nimble", lambda inputs: HARDLY[stale][1], HARDLY, lowest="float32")
    assert check.input_effect < 10 * check.tolerance
    assert not check.passed
    assert "void" in check.reason


@given(st.floats(0.0, 1.0))
def test_outputs_that_hardly_move_show_a_replay_that_is_nearer_than_a_tenth_of_that(share: float) -> None:
    check = check_equality("nimble", lambda i: [1000 + i[0].double() * 1e-3 * (1 + share)], HARDLY, lowest="float32")
    assert check.relative_error <= check.tolerance
    assert check.passed == (10 * check.relative_error <= check.input_effect)
    assert check.passed or check.void
    assert check.passed or share > 0.01


def test_of_a_training_step_outputs_that_hardly_move_show_nothing() -> None:
    outputs = [outputs for _, outputs in HARDLY]
    check = check_equality(
        "nimble", lambda i: [1000 + i[0].double() * 1e-3], HARDLY, lowest="float32", perturbed=outputs
    )
    assert check.void


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_eager_outputs_that_are_not_finite_make_the_check_void(bad: float) -> None:
    cases = [([A], [A * bad]), ([B], [B * bad])]
    check = check_equality("nimble", lambda inputs: [inputs[0] * bad], cases)
    assert not check.passed
    assert "not finite" in check.reason
    assert math.isfinite(check.relative_error)
    assert math.isfinite(check.input_effect)


def masked(inputs: Sequence[torch.Tensor], fill: float = -math.inf, factor: float = 2.0) -> list[torch.Tensor]:
    """As logits of tokens that must not be: the first and the last, in whatever order."""
    logits = inputs[0] * factor
    logits[[0, -1]] = fill
    return [logits, inputs[0].argmax()]


MASKED = [([x], masked([x])) for x in (A, B)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_what_eager_has_infinite_has_to_be_so_and_the_rest_is_compared(exact: bool, noisy: bool) -> None:
    more: dict[str, Any] = {}
    if exact:
        more["references"] = [masked([x.double()]) for x in (A, B)]
    if noisy:
        more["perturbed"] = [[a * (1 + 1e-7), b] for _, (a, b) in MASKED]
    found = check_equality("n", masked, MASKED, **more)
    assert (found.passed, found.reason, found.relative_error) == (True, "", 0.0)
    assert found.reference == ("float64" if exact else "eager")
    for wrong in (math.inf, 0.0, -1e38, math.nan):
        found = check_equality("n", lambda i, wrong=wrong: masked(i, wrong), MASKED, **more)  # type: ignore[misc]
        assert found.differs, wrong
        assert "which numbers are infinite" in found.reason
    assert check_equality("n", lambda i: masked(i, factor=2.1), MASKED, **more).differs
    assert check_equality(
        "n", lambda i: [masked(i)[0] * i[0].new_tensor([1, math.inf, 1, 1, 1]), masked(i)[1]], MASKED
    ).differs


def test_in_float16_what_overflows_is_a_matter_of_rounding() -> None:
    cases = [([x], [one.half() for one in masked([x])[:1]]) for x in (A, B)]
    found = check_equality("n", lambda i: [masked(i, -65504.0)[0].half()], cases)
    assert not found.passed
    assert found.void
    assert check_equality("n", lambda i: [masked(i)[0].half()], cases).passed


@pytest.mark.parametrize("who", ["perturbed", "references"])
def test_where_rounding_decides_what_is_infinite_nothing_is_said(who: str) -> None:
    cases = [([x], [torch.log((x - 1).relu())]) for x in (A, B.flip(0) + 2)]

    def replay(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.log((inputs[0] - 1 + 1e-7).relu())]

    assert check_equality("n", replay, cases).differs
    others = [[torch.log((x - 1 + 2e-7).relu())] for (x,), _ in cases]
    assert check_equality("n", replay, cases, **{who: others}).void  # type: ignore[arg-type]
    assert check_equality("n", replay, cases, **{who: [out for _, out in cases]}).differs  # type: ignore[arg-type]


FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8"))


@given(st.sampled_from(FLOAT8), st.floats(-0.01, 0.01), st.integers(0, 99), st.booleans())
def test_float8_that_only_rounds_elsewhere_passes_and_mistakes_do_not(
    dtype: torch.dtype, moved: float, seed: int, exact: bool
) -> None:
    torch.manual_seed(seed)
    inputs = [torch.randn(500, dtype=torch.float64) for _ in range(2)]
    cases = [([x], [x.to(dtype), x.to(dtype).float()]) for x in inputs]
    more: dict[str, Any] = {"references": [[x.to(dtype), x.to(dtype).float()] for x in inputs]} if exact else {}

    def replay(factor: float) -> EqualityCheck:
        def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            out = (given[0] * factor).to(dtype)
            return [out, out.float()]

        return check_equality("n", run, cases, **more)

    honest = replay(1 + moved)
    # Of powers of two one rounding is a half: where many fall elsewhere, nothing is shown.
    assert honest.passed or (honest.void and 10 * honest.error > honest.input_effect)
    assert honest.passed or dtype is torch.float8_e8m0fnu
    assert replay(1.0).passed
    for wrong in (0.0, 0.25, 4.0):
        assert not replay(wrong).passed, wrong
    assert check_equality("n", lambda _: cases[0][1], cases, **more).differs


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_that_is_not_finite(dtype: torch.dtype) -> None:
    def broken(inputs: Sequence[torch.Tensor], factor: float = 1.0, fill: float = math.inf) -> list[torch.Tensor]:
        out = inputs[0].abs() * factor
        out[0] = fill
        return [out.to(dtype), inputs[0]]

    cases = [([x], broken([x])) for x in (A, B)]
    infinite = bool(cases[0][1][0].float().isinf().any())
    check = check_equality("n", broken, cases, references=[broken([x.double()]) for x in (A, B)])
    if not infinite:  # most have no infinity: a NaN, or the greatest number
        assert check.passed or "not finite" in check.reason
        return
    assert check.passed
    assert check_equality("n", partial(broken, factor=4.0), cases).differs
    # As in float16 rounding may decide what overflows.
    assert check_equality("n", partial(broken, fill=57344.0), cases).void
    fine = [([x], [x.to(dtype)]) for x in (A, B)]
    assert check_equality("n", lambda inputs: broken(inputs)[:1], fine).differs


def test_every_float8_has_a_tolerance() -> None:
    for dtype in FLOAT8:
        one = torch.ones(1).to(dtype)
        # More than half of what one rounding does at most.
        assert torch.finfo(dtype).eps / 2 < tolerance_for([one]) < 1
        assert tolerance_for([one, torch.ones(1)]) == tolerance_for([one])


def test_nan_and_infinite_complex_numbers_in_eager_stay_void() -> None:
    for bad in (torch.tensor(math.nan), torch.tensor(complex(math.inf, 0))):
        cases = [([x], [torch.cat([masked([x])[0], bad[None]])]) for x in (A, B)]
        assert check_equality("n", lambda i, bad=bad: [torch.cat([masked(i)[0], bad[None]])], cases).void  # type: ignore[misc]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_replay_that_is_not_finite_fails(bad: float) -> None:
    check = check_equality("nimble", lambda inputs: [inputs[0] * bad], CASES)
    assert not check.passed
    assert "differ" in check.reason


def test_a_buffer_overwritten_by_the_next_run_is_found() -> None:
    buffer = torch.empty(5)
    check = check_equality("nimble", lambda inputs: [torch.mul(inputs[0], 2, out=buffer)], CASES)
    assert not check.passed


def test_an_error_on_the_second_round_only_is_found() -> None:
    runs: list[int] = []

    def replay(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        runs.append(1)
        return [inputs[0] * (2 if len(runs) < 4 else 3)]

    assert not check_equality("nimble", replay, CASES).passed


def test_a_stale_replay_is_found() -> None:
    assert not check_equality("nimble", lambda inputs: [A * 2], CASES).passed


def test_one_wrong_output_among_several_fails() -> None:
    cases = [([x], [x, x * 2, x.sum()]) for x in (A, B)]
    assert check_equality("n", lambda i: [i[0], i[0] * 2, i[0].sum()], cases).passed
    assert not check_equality("n", lambda i: [i[0], i[0] * 2, i[0].sum() + 1], cases).passed
    assert not check_equality("n", lambda i: [i[0], i[0] * 2.1, i[0].sum()], cases).passed


def test_inputs_that_the_replay_writes_do_not_spoil_the_case() -> None:
    kept = A.clone()
    assert check_equality("n", lambda inputs: [inputs[0].mul_(2)], CASES).passed
    assert torch.equal(A, kept)


def test_relative_error_of_other_types() -> None:
    assert relative_error([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])]) == 0.25
    assert relative_error([torch.tensor([True])], [torch.tensor([True])]) == 0
    assert relative_error([torch.tensor([1 + 1j])], [torch.tensor([1 + 1j])]) == 0
    assert relative_error([torch.empty(0)], [torch.empty(0)]) == 0
    assert relative_error([torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]) == 0
    assert relative_error([torch.ones(2)], [torch.zeros(2)]) == pytest.approx(math.sqrt(2))
    big = torch.full((4,), 60000.0, dtype=torch.float16)
    assert relative_error([big], [big]) == 0


def test_integer_outputs() -> None:
    cases = [([x], [(x * 10).long()]) for x in (A, B)]
    assert check_equality("n", lambda i: [(i[0] * 10).long()], cases).passed
    assert not check_equality("n", lambda i: [(i[0] * 10).long() + 1], cases).passed


def test_integers_that_never_change_make_the_check_void() -> None:
    same = [torch.tensor([1, 2])]
    check = check_equality("n", lambda inputs: same, [([A], same), ([B], same)])
    assert not check.passed
    assert "void" in check.reason


def test_no_outputs_is_void() -> None:
    assert not check_equality("n", lambda inputs: [], [([A], []), ([B], [])]).passed


def test_another_shape_or_number_of_outputs_fails() -> None:
    assert not check_equality("n", lambda i: [(i[0] * 2)[:1]], CASES).passed
    assert not check_equality("n", lambda i: [i[0] * 2, i[0]], CASES).passed


def test_tolerances() -> None:
    assert tolerance_for([torch.ones(1)]) == TOLERANCE["float32"]
    assert tolerance_for([torch.ones(1), torch.ones(1).half()]) == TOLERANCE["float16"]
    assert tolerance_for([torch.ones(1).bfloat16()]) == TOLERANCE["bfloat16"]
    assert tolerance_for([torch.ones(1).long()]) == 0
    assert tolerance_for([]) == 0


# Other kernels, judged by a float64 reference: real models, honest roundings and real mistakes.

Model = Callable[[torch.Tensor], torch.Tensor]


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


class Branches(nn.Module):
    """Two branches of one input that meet in a product with its own order; ``swapped`` mistakes one for the other."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.swapped = nn.Linear(32, 32), nn.Linear(32, 32), swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x)
        if self.swapped:
            left, right = right, left
        return torch.relu(left) - torch.tanh(right)


def folded(model: nn.Sequential) -> nn.Sequential:
    layers: list[nn.Module] = []
    for conv, norm, act in zip(model[::3], model[1::3], model[2::3], strict=True):
        layers += [fuse_conv_bn_eval(conv, norm), act]
    return nn.Sequential(*layers).eval()


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


FLOATING = (torch.float32, torch.float16, torch.bfloat16)


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


@pytest.mark.parametrize("dtype", FLOATING)
def test_swapped_branches_fail(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    model, x = Branches().to(dtype), torch.randn(4, 32).to(dtype)
    wrong = Branches(swapped=True).to(dtype)
    wrong.load_state_dict(model.state_dict())
    assert judged(model, wrong, x).differs
    wrong.swapped = False
    assert judged(model, wrong, x).passed


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


def test_a_replay_as_far_from_eager_as_honest_rounding_of_a_deep_model_passes_by_the_reference_only() -> None:
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
    assert check.relative_error > TOLERANCE["float16"]
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


def test_tf32_passes_where_it_is_allowed() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)), torch.randn(4, 128)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return ((tensor.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    def tf32(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(nn.functional.linear(rounded(x), rounded(model[0].weight), model[0].bias))
        return nn.functional.linear(rounded(hidden), rounded(model[2].weight), model[2].bias)

    for referenced in (False, True):
        assert judged(model, tf32, x, referenced=referenced).differs
        assert judged(model, tf32, x, referenced=referenced, lowest="tf32").passed


def test_precision_of_float32_products_follows_the_users_switches() -> None:
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        for word, precision in (("tf32", "tf32"), ("bf16", "bfloat16"), ("ieee", "float32")):
            matmul.fp32_precision = word
            assert tolerance_for([torch.ones(1)]) == TOLERANCE[precision]
            assert tolerance_for([torch.ones(1).double()]) == TOLERANCE["float64"]
    finally:
        matmul.fp32_precision = before


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
    found = check_equality("n", lambda i: [other(i[0])], alone, references=[one[:1] for one in references])
    assert found.void
    assert not found.passed


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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_replay_that_is_not_finite_fails_against_a_reference(bad: float) -> None:
    references = [[A.double() * 2], [B.double() * 2]]
    check = check_equality("n", lambda i: [i[0] * bad], CASES, references=references)
    assert check.differs
    assert all(map(math.isfinite, (check.relative_error, check.reference_error, check.tolerance)))


def test_nan_in_eager_is_void_whatever_the_reference() -> None:
    cases = [([A], [A * math.nan]), ([B], [B * math.nan])]
    check = check_equality("n", double, cases, references=[[A.double() * 2], [B.double() * 2]])
    assert check.void
    assert not check.passed


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


def test_lowest_precision() -> None:
    def program(*dtypes: str) -> Program:
        accesses = tuple(Access(TensorRef(0, 0, (1,), (1,), dtype, 1), False) for dtype in dtypes)
        return Program((Call(0, "aten.mm.default", (), accesses),), (), (), ())

    assert lowest_precision(program()) == ""
    assert lowest_precision(program("int64", "bool")) == ""
    assert lowest_precision(program("float32", "float64", "int8")) == "float32"
    assert lowest_precision(program("float32", "float16")) == "float16"
    assert lowest_precision(program("bfloat16", "float16")) == "bfloat16"
    assert lowest_precision(program("complex64", "float64")) == "float32"
    assert lowest_precision(program("float32", "float8_e5m2", "float8_e4m3fn")) == "float8_e5m2"
    assert lowest_precision(program("bfloat16", "float8_e4m3fnuz", "float8_e8m0fnu")) == "float8_e4m3fnuz"  # a scale
    assert lowest_precision(program("float8_e8m0fnu")) == ""
