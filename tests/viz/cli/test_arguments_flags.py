"""Flags made of a dataclass and its docstring."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from nimble_core.scheduling.options import Options
from nimble_viz.analysis.gate import Rules
from nimble_viz.cli.arguments import add_options, argument_help


@pytest.mark.parametrize("kind", [Options, Rules])
def test_every_field_is_a_flag_with_its_default_and_its_help(kind: type[Options] | type[Rules]) -> None:
    parser = argparse.ArgumentParser(prog="test")
    add_options(parser, kind)
    given = vars(parser.parse_args([]))
    assert given == {field.name: field.default for field in fields(kind)}
    shown = parser.format_help()
    helps = argument_help(kind.__doc__ or "")
    assert helps.keys() == given.keys()
    for name, text in helps.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert text.split()[0] in shown


def test_flags_take_what_the_fields_do() -> None:
    parser = argparse.ArgumentParser(prog="test")
    add_options(parser)
    given = parser.parse_args(["--fuse", "library", "--max-streams", "4", "--memory-limit", "none", "--strict"])
    assert (given.fuse, given.max_streams, given.memory_limit, given.strict) == ("library", 4, None, True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--fuse", "everything"])
