"""What errors say."""

from __future__ import annotations

from nimble_core.utils.errors import InputError, first_line


def test_what_where_and_what_to_do() -> None:
    error = InputError("it is no tensor", where="args[0]", fix="pass a tensor")
    assert str(error).splitlines() == ["it is no tensor", "  where: args[0]", "  to do: pass a tensor"]
    assert str(InputError("it is no tensor")) == "it is no tensor"


def test_first_line() -> None:
    assert first_line(ValueError("\n\n  a\nb")) == "  a"
    assert first_line(ValueError()) == ""
    assert len(first_line(ValueError("y" * 500))) == 200


def test_nothing_that_a_terminal_would_obey() -> None:
    shown = str(InputError("no file \x1b[31m\x07a\x9b", where="\rb", fix="\x1b]0;title\x07"))
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r"}
    assert shown.count("\n") == 2
