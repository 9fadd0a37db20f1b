"""Random state that a model sets is refused: replays draw on from where the last draw left off."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nimble_core import CaptureError, Nimble, NimbleWarning, NotStaticError, Options
from nimble_core.tracing import rng_state
from nimble_core.tracing.rng_state import RandomStates, seed_otherwise, state_of

QUICK = Options(tune="off")
REFUSED = "sets random state"
OWN = torch.Generator()


def seeds(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.randn_like(x)


def forks(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise = torch.randn_like(x)
    return x + noise


def repeats(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    noise = torch.randn_like(x)
    torch.set_rng_state(state)
    return x + noise


def seeds_as_it_was(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(torch.initial_seed())
    return x + torch.randn_like(x)


def seeds_its_own(x: torch.Tensor) -> torch.Tensor:
    OWN.manual_seed(7)
    return x + torch.randn(x.shape, generator=OWN)


SETTING = (seeds, seeds_as_it_was, forks, repeats, seeds_its_own)


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    own = OWN.get_state()
    with torch.random.fork_rng():
        yield
    OWN.set_state(own)


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("model", SETTING)
def test_random_state_that_a_model_sets_is_refused(
    model: Callable[[torch.Tensor], torch.Tensor], seed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rng_state, "alone", lambda: True)  # whatever other tests, or who runs them, have left
    if seed is not None:  # what the model sets is what there is already
        torch.manual_seed(seed)
        OWN.manual_seed(seed)
    before, own = torch.get_rng_state(), OWN.get_state()
    with pytest.raises(NotStaticError, match=REFUSED):
        Nimble(model, QUICK).prepare(torch.zeros(2, 4))
    assert torch.equal(before, torch.get_rng_state())
    # Which generators a model draws from is known when it does: what it was set to before is the state that is kept.
    now = OWN.get_state()
    assert torch.equal(now, OWN.manual_seed(7).get_state() if model is seeds_its_own else own)


def draws_of_all_kinds(x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.dropout(x, 0.5) + torch.randn(x.shape, generator=OWN)
    with torch.random.fork_rng():
        pass  # nothing is drawn inside
    y = y + torch.empty_like(x).normal_(generator=torch.default_generator) + torch.rand_like(x)
    return y * torch.bernoulli(torch.full_like(x, 0.5), generator=OWN)


def test_draws_alone_go_on_as_in_eager() -> None:
    x = torch.ones(3, 5)
    net = Nimble(draws_of_all_kinds, QUICK).prepare(x)
    before, own = torch.get_rng_state(), OWN.get_state()
    expected = [draws_of_all_kinds(x) for _ in range(3)]
    torch.set_rng_state(before)
    OWN.set_state(own)
    assert all(torch.equal(net(x), one) for one in expected)


def test_a_seed_that_nothing_is_drawn_from_is_noted() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return x + 1

    torch.manual_seed(1)
    with pytest.warns(NimbleWarning, match="sets torch's random state"):
        net = Nimble(model, QUICK).prepare(torch.ones(2))
    assert torch.equal(net(torch.ones(2)), torch.full((2,), 2.0))


STEPS = st.lists(st.sampled_from(["default", "first", "second", "elsewhere"]), max_size=8)


def followed(steps: list[str | Callable[[dict[str, torch.Generator]], object]]) -> bool:
    """Whether steps pass as draws: of torch's generator, of two of the user's, of another thread; or what is called."""
    own = {"first": torch.Generator(), "second": torch.Generator()}
    with torch.random.fork_rng():
        seed_otherwise(torch.device("cpu"), own.values(), ("torch",))
        states, known = RandomStates(list(own.values())), True
        for step in steps:
            if callable(step):
                step(own)
                continue
            if step != "elsewhere":
                known &= states.follow(own.get(step), state_of(own.get(step)))
            torch.rand(2, generator=own.get(step))
        return known and states.settled()


@given(STEPS)
def test_draws_in_any_order_are_followed(steps: list[Any]) -> None:
    assert followed(steps)


@pytest.mark.slow
@given(STEPS, STEPS, st.sampled_from(["default", "first", "second"]))
def test_a_seed_shows(before: list[Any], after: list[Any], which: str) -> None:
    def seed(own: dict[str, torch.Generator]) -> None:
        own.get(which, torch.default_generator).manual_seed(3)

    assert not followed([*before, seed, *after])


@contextmanager
def beside(*work: Callable[[], object], pause_s: float = 0.0002) -> Iterator[list[list[Any]]]:
    """Run threads that repeat ``work`` until the end; yield the list of what each has made."""
    stop, made = Event(), [list[Any]() for _ in work]

    def go_on(one: Callable[[], object], results: list[Any]) -> None:
        while not stop.wait(pause_s):
            results.append(one())

    others = [Thread(target=go_on, args=pair) for pair in zip(work, made, strict=True)]
    for other in others:
        other.start()
    try:
        yield made
    finally:
        stop.set()
        for other in others:
            other.join()


DRAWN_ELSEWHERE = (random.random, lambda: np.random.rand(), lambda: tuple(torch.rand(3).tolist()))
LAYERS = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def drops(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(LAYERS(x), 0.5) + torch.rand_like(x)


def branches_on_randoms(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if random.random() < 2 and np.random.rand() < 2 else x


@pytest.mark.parametrize("fuse", ["none", "library"])
def test_what_other_threads_draw_is_not_drawn_again_and_causes_no_warning(fuse: Any) -> None:
    with beside(*DRAWN_ELSEWHERE) as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            Nimble(LAYERS, Options(tune="off", fuse=fuse)).prepare(torch.ones(3, 4))
    assert [len(one) - len(set(one)) for one in made] == [0, 0, 0]
    assert all(made)


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("model", [drops, branches_on_randoms])
def test_what_a_model_draws_is_put_back(model: Callable[[torch.Tensor], torch.Tensor], idle: bool) -> None:
    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    with beside(lambda: None) if idle else nullcontext():
        before = states()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = Nimble(model, Options(tune="off", fuse="library")).prepare(torch.ones(3, 4))
            assert not net.engines[0].recorded.whole
        assert states() == before


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (random.random, "Python's random:"),
        (lambda: np.random.rand() + random.random(), "Python's random and numpy.random:"),
    ],
)
def test_a_model_that_draws_from_the_interpreters_generators_is_warned_of(
    draw: Callable[[], float], named: str, idle: bool
) -> None:
    with beside(lambda: None) if idle else nullcontext(), pytest.warns(NimbleWarning, match=f"draws from {named}"):
        Nimble(lambda x: x * 2 if draw() < 2 else x, QUICK).prepare(torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("idle", [False, True])
def test_what_a_model_draws_on_a_gpu_is_put_back(idle: bool) -> None:
    x, model = torch.ones(3, 4, device="cuda"), nn.Sequential(nn.Linear(4, 4), nn.Dropout()).cuda()
    with beside(lambda: None) if idle else nullcontext():
        before, host = torch.cuda.get_rng_state(), torch.get_rng_state()
        Nimble(model, QUICK).prepare(x, training=True)
        assert torch.equal(before, torch.cuda.get_rng_state())
        assert torch.equal(host, torch.get_rng_state())


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 99])
@pytest.mark.parametrize("model", [seeds, forks])
def test_random_state_that_a_model_sets_on_a_gpu(model: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
    before = torch.cuda.get_rng_state()
    try:
        torch.manual_seed(seed)
        with pytest.raises(CaptureError, match="random state"):
            Nimble(model, QUICK).prepare(torch.zeros(2, 4, device="cuda"))
        x = torch.zeros(2, 4, device="cuda")
        net = Nimble(lambda x: nn.functional.dropout(x + 1, 0.5), QUICK).prepare(x)
        torch.manual_seed(seed)
        first = net(x).clone()
        torch.manual_seed(seed)
        assert torch.equal(net(x), first)
    finally:
        torch.cuda.set_rng_state(before)
