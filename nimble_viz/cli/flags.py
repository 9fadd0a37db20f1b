"""Make flags of a command line from a frozen dataclass and its docstring.

>>> parser = argparse.ArgumentParser(prog="demo")
>>> add_options(parser)
>>> parser.parse_args(["--max-streams", "4"]).max_streams
4
"""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Callable
from dataclasses import fields
from inspect import cleandoc
from typing import Any

from nimble_core.scheduling.options import Options

__all__ = ["add_options", "argument_help", "option_values"]


def add_options(group: Any, kind: type[Any] = Options) -> None:
    """Add a flag for each field of the dataclass ``kind``, with its name, type, choices, default and help."""
    hints = typing.get_type_hints(kind)
    helps = argument_help(kind.__doc__ or "")
    for field in fields(kind):
        hint = hints[field.name]
        flag = "--" + field.name.replace("_", "-")
        text = f"{helps[field.name].rstrip('.')} (default: {field.default})".replace("%", "%%")
        members = typing.get_args(hint)
        if hint is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=field.default, help=text)
        elif typing.get_origin(hint) is typing.Literal:
            group.add_argument(flag, choices=members, default=field.default, help=text)
        elif type(None) in members:
            parse = _optional(next(one for one in members if one is not type(None)))
            group.add_argument(flag, type=parse, default=field.default, help=text, metavar="N")
        else:
            parse = hint if hint in (int, float) else str
            metavar = "X" if hint in (int, float) else "NAME"
            group.add_argument(flag, type=parse, default=field.default, help=text, metavar=metavar)


def option_values(given: argparse.Namespace, kind: type[Any] = Options) -> dict[str, Any]:
    """Return what was given for the fields of ``kind``, by name."""
    return {field.name: getattr(given, field.name) for field in fields(kind)}


def _optional(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    return number


def argument_help(doc: str) -> dict[str, str]:
    """Return ``{argument: text}`` from the ``Args:`` section of a docstring."""
    section = re.split(r"^(?=\S)", cleandoc(doc).partition("Args:\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^    (\w+): (.+?)(?=^    \w+: |\Z)", section, re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()) for name, text in found}
