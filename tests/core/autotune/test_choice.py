"""The choice among measured candidates: simple before fast by nothing, and memory has to be worth it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.autotune.choice import MemoryPrice, choose
from nimble_core.ir.candidates import Candidate, simplicity
from nimble_core.ir.measurement import SAME, Measurement

MB = 1 << 20
FREE = MemoryPrice(100 * MB, 0, 0, 1.1)


def candidate(name: str, ns: float, nbytes: int = 0, *, noise: float = 0.0) -> Candidate:
    """Name and streams as in ``"inductor, nimble, 4 streams"``; ``noise`` is the greatest factor on a sample."""
    fuse = name.partition(",")[0] if name.startswith(("inductor", "library")) else "none"
    streams = 1 if name.endswith("single") else int(name.split()[-2]) if name.endswith("streams") else 5
    draw = random.Random(name)
    samples = tuple(ns * (1 + noise) ** draw.uniform(-1, 1) for _ in range(64))
    taken = Measurement(name, samples, 0, sorted(samples)[32], 0.0, 0.0, rounds=tuple(range(64)))
    return Candidate(name, streams, streams - 1, measurement=taken, nbytes=nbytes, fuse=fuse)


def found(*candidates: Candidate) -> dict[str, Candidate]:
    return {one.name: one for one in candidates}


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"single": 100, "nimble": 80}, "nimble"),
        ({"single": 80, "nimble": 100}, "single"),
        ({"single": 100, "nimble": 99}, "single"),
        ({"nimble, 4 streams": 100, "nimble": 100, "opara": 150}, "nimble, 4 streams"),
        ({"inductor, nimble": 100, "inductor, single": 100, "single": 100}, "single"),
        ({"inductor, nimble": 100, "inductor, single": 100, "nimble": 100}, "inductor, single"),
        ({"inductor, nimble, 4 streams": 100, "nimble": 100, "library, nimble": 100}, "inductor, nimble, 4 streams"),
        ({"inductor, nimble": 100, "library, nimble, 2 streams": 100}, "library, nimble, 2 streams"),
    ],
)
def test_the_simplest_of_the_fastest_wins(times: dict[str, float], best: str) -> None:
    tried = found(*(candidate(name, ns) for name, ns in times.items()))
    assert choose(tried, {}, FREE).name == best
    assert choose(tried, {}, FREE).decided
    close = [one for one in tried.values() if times[one.name] <= SAME * min(times.values())]
    assert min(close, key=simplicity).name == best


@pytest.mark.parametrize(
    ("kept", "compiled", "best"),
    [
        ("nimble", True, "nimble"),
        ("opara", True, "inductor, single"),
        ("", True, "inductor, single"),
        ("", False, "single"),
    ],
)
def test_where_nothing_is_decided_what_was_kept_runs_on(kept: str, compiled: bool, best: str) -> None:
    names = ("single", "nimble", "library, single", "inductor, single", "inductor, nimble")
    tried = found(*(candidate(name, 100, noise=100.0) for name in names))
    choice = choose(tried, {}, FREE, kept=lambda: kept, on_cuda=compiled)
    assert choice.name == best
    assert not choice.decided


@pytest.mark.parametrize(
    ("expected", "on_cuda", "best"),
    [
        ({"library, single": 112, "inductor, single": 98}, True, "inductor, single"),
        ({"library, single": 112, "inductor, single": 98}, False, "library, single"),
        ({"library, single": 100, "inductor, single": 98}, True, "library, single"),
        ({"inductor, single": 98}, True, "library, single"),  # of the other nothing is known
        ({}, True, "library, single"),
    ],
)
def test_what_a_noisy_clock_cannot_tell_apart_kernels_may(expected: dict[str, float], on_cuda: bool, best: str) -> None:
    tried = [
        candidate("single", 1000),
        *(candidate(f"{kind}, single", 100, noise=1.0) for kind in ("library", "inductor")),
    ]
    tried = [replace(one, simulated_ns=expected.get(one.name, 0.0)) for one in tried]
    assert choose(found(*tried), {}, FREE, on_cuda=on_cuda).name == best


def test_what_is_measured_alike_is_alike_whatever_is_expected() -> None:
    single, several = candidate("single", 100), candidate("nimble", 100)
    tried = found(replace(single, simulated_ns=120.0), replace(several, simulated_ns=90.0))
    assert choose(tried, {}, FREE, on_cuda=True).name == "single"


@pytest.mark.parametrize(
    ("nbytes", "speed", "worth", "heavier"),
    [
        (122, 1.03, 1.1, True),  # little more than eager is free
        (200, 1.03, 1.1, False),
        (200, 1.09, 1.1, False),
        (200, 1.12, 1.1, True),
        (400, 1.12, 1.1, True),  # never more than that
        (400, 1.90, 2.0, False),
        (400, 2.10, 2.0, True),
        (400, 1.03, 1.0, True),  # no price
        (132, 1.15, 2.0, False),  # 10% too much has to be worth 30%
        (132, 1.35, 2.0, True),
    ],
)
def test_how_much_faster_what_holds_more_has_to_be(nbytes: int, speed: float, worth: float, heavier: bool) -> None:
    tried = found(candidate("single", 100 * speed, 100 * MB), candidate("nimble", 100, nbytes * MB))
    price = MemoryPrice(100 * MB, 0, 0, worth)
    assert choose(tried, {"none": 100 * MB}, price).name == ("nimble" if heavier else "single")
    assert choose(tried, {"none": 100 * MB}, None).name == "nimble"
    assert choose(tried, {}, price).name == "nimble", "nothing to compare it with"


@given(st.integers(0, 1 << 34), st.integers(0, 1 << 34), st.integers(1, 1 << 34), st.floats(1.03, 10.0))
def test_more_memory_never_has_to_be_worth_less(nbytes: int, than: int, single: int, worth: float) -> None:
    price = MemoryPrice(single // 2, single // 3, single // 5, worth)
    required = price.required(nbytes, than, single)
    assert SAME <= required <= worth
    assert required <= price.required(nbytes + MB, than, single)
    assert price.required(than, than, single) == SAME
