"""The signature that a refused call is explained by."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.tracing.signature import Signature
from nimble_core.tracing.signature_mismatch import nearest


class Held:
    """An object that is told by what it holds."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


ANYTHING = st.recursive(
    st.one_of(
        st.builds(torch.zeros, st.lists(st.integers(0, 3), max_size=2).map(tuple)),
        st.sampled_from([None, 1, 2.0, "a"]),
        st.builds(Held, st.integers(0, 2)),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.fixed_dictionaries({}, optional={"a": inner, "b": inner}),
    max_leaves=4,
)
CALLS = st.tuples(st.lists(ANYTHING, max_size=2), st.dictionaries(st.sampled_from("kl"), ANYTHING, max_size=2))
FIRST = torch.zeros(7)
"""A tensor there has to be."""


@given(st.lists(CALLS, min_size=1, max_size=5), CALLS)
def test_the_nearest_signature_is_the_one_that_fits_if_one_does(
    prepared: list[tuple[list[Any], dict[str, Any]]], call: tuple[list[Any], dict[str, Any]]
) -> None:
    known = [Signature((FIRST, *args), kwargs) for args, kwargs in prepared]
    args, kwargs = (FIRST, *call[0]), call[1]
    found, listed = nearest(known, [False] * len(known), args, kwargs)
    assert any(found is one for one in known)
    assert listed.startswith(str(found))
    assert len(listed.split("; ")) <= 4
    if any(one.bind(args, kwargs) is not None for one in known):
        assert found.bind(args, kwargs) is not None
    again = [*known, Signature(args, kwargs)]
    assert nearest(again, [False] * len(again), args, kwargs)[0].bind(args, kwargs) is not None


def test_what_would_not_do_for_another_reason_comes_later() -> None:
    alike = [Signature((torch.zeros(2),), {}) for _ in range(2)]
    for elsewhere in ([True, False], [False, True]):
        found, listed = nearest(alike, elsewhere, (torch.zeros(3),), {})
        assert found is alike[elsewhere.index(False)]
        assert listed == str(found), "the same inputs are listed once"


def test_positional_inputs_are_named_as_users_call_them() -> None:
    known = [Signature((torch.zeros(2), 1), {}, ("x", "scale"))]
    _, listed = nearest(known, [False], (torch.zeros(2), 2), {}, ("x", "scale"))
    assert "scale: 1" in listed
