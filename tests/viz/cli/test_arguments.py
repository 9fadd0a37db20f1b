"""Arguments of the magics: split where Python ends, made of the API's own declarations."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError
from nimble_viz.cli.arguments import Expression, comparing, keywords, option_values, profiling, split
from nimble_viz.collect.compare import compare
from nimble_viz.collect.sampler import Counts

words = st.text("abcxyz_.", min_size=1, max_size=6)
strings = st.text("abc xyz()[]{},=-", max_size=8)
expressions = st.recursive(
    words,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"f({', '.join(parts)})"),
        st.lists(inner, max_size=3).map(lambda parts: f"d[{', '.join(parts)}]"),
        strings.map(lambda text: f"g({text!r})"),
    ),
    max_leaves=6,
)


@given(st.lists(expressions, max_size=5), st.sampled_from([" ", "  ", "\t"]))
def test_expressions_need_no_quotes(parts: list[str], space: str) -> None:
    assert split(space.join(parts)) == parts
    assert split(" ".join(f'mask="{part}"' for part in parts)) == [f"mask={part}" for part in parts]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", []),
        ("model['a b'] x", ["model['a b']", "x"]),
        ("'a'+'b'", ["'a'+'b'"]),
        (r'"d[\"k\"]"', ['d["k"]']),
        ('"-x"', ["(-x)"]),
        ("--fuse='none' --loss-fn='lambda out: out.sum()'", ["--fuse=none", "--loss-fn=lambda out: out.sum()"]),
        ("a == 'b'", ["a", "==", "b"]),
    ],
)
def test_quotes_of_whole_arguments_are_taken_off(line: str, parts: list[str]) -> None:
    assert split(line) == parts


@pytest.mark.parametrize("line", ["model (x", "model x)", "model [x)", 'model "x'])
def test_what_is_not_closed_is_refused(line: str) -> None:
    with pytest.raises(InputError, match="clos"):
        split(line)


def test_defaults_are_those_of_the_api() -> None:
    given = comparing().parse_intermixed_args(["model", "x"])
    assert Options(**option_values(given)) == Options()
    declared = inspect.signature(compare).parameters
    found = keywords(given, compare)
    assert found == {name: declared[name].default for name in found}
    assert set(found) == {
        name for name, one in declared.items() if one.kind is one.KEYWORD_ONLY and name not in ("kwargs", "options")
    }
    cell = profiling().parse_intermixed_args([])
    assert Options(**option_values(cell)) == Options()
    assert Counts(**option_values(cell, Counts)) == Counts()


def test_options_may_stand_anywhere() -> None:
    given = comparing().parse_intermixed_args(
        split("--tune off model --loss-fn f x -o name y --no-strict k=1 --max-streams none")
    )
    assert (given.model, given.inputs, given.out) == ("model", ["x", "y", "k=1"], "name")
    assert isinstance(given.loss_fn, Expression)
    assert option_values(given)["max_streams"] is None


@pytest.mark.parametrize(
    "line", ["", "model", "model x --fuse all", "model x --nothing", "model x -o 3", "model x -o if", "model x --tune"]
)
def test_bad_usage_is_an_input_error(line: str) -> None:
    with pytest.raises(InputError, match="-h says"):
        comparing().parse_intermixed_args(split(line))
