"""Flags made from the API's own declarations, and the parsers of ``%nimble`` and ``%%nimble``."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import typing
from collections.abc import Callable, Collection
from dataclasses import fields
from keyword import iskeyword
from typing import Any, NoReturn

from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError

__all__ = [
    "Expression", "Parser", "add_options", "argument_help", "comparing", "keywords", "option_values", "profiling",
    "split",
]  # fmt: skip

_BRACKETS = {")": "(", "]": "[", "}": "{"}
_ELSEWHERE = {"kwargs", "options"}
_CELL_ONLY = {"against"}


class Expression(str):
    """Python, to be evaluated where the magic runs."""

    __slots__ = ()


class Parser(argparse.ArgumentParser):
    """Raise InputError for bad usage, and never end the process."""

    def error(self, message: str) -> NoReturn:
        """Raise InputError with ``message``."""
        raise InputError(message, fix=f"{self.prog} -h says what there is")


def split(line: str) -> list[str]:
    r"""Split ``line`` into arguments; one that is a quoted string, or ``NAME=`` one, loses its quotes.

    Raises:
        InputError: a bracket or a quote without its other half.

    >>> split('model torch.randn(1, 3) mask=m["a b"] --fuse none')
    ['model', 'torch.randn(1, 3)', 'mask=m["a b"]', '--fuse', 'none']
    >>> split('model "torch.randn(1, 3)" mask="a > 0"')
    ['model', 'torch.randn(1, 3)', 'mask=a > 0']
    """
    found: list[str] = []
    opened: list[str] = []
    current, quote, escaped = "", "", False
    for sign in line:
        if quote:
            quote = "" if sign == quote and not escaped else quote
            escaped = sign == "\\" and not escaped
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            opened.append(sign)
        elif sign in _BRACKETS:
            if not opened or opened.pop() != _BRACKETS[sign]:
                raise InputError(f"{sign!r} closes nothing in {line.strip()!r}", fix="check the brackets")
        elif sign.isspace() and not opened:
            found, current = [*found, current], ""
            continue
        current += sign
    if quote or opened:
        raise InputError(
            f"{quote or opened[-1]!r} is never closed in {line.strip()!r}", fix="check brackets and quotes"
        )
    return [_unquoted(one) for one in [*found, current] if one]


def _unquoted(text: str) -> str:
    found = re.fullmatch(r"((?:--)?[\w-]+=(?!=))?(.*)", text, re.DOTALL)
    assert found is not None  # any text matches
    head, value = found.groups(default="")
    try:
        inner = ast.literal_eval(value) if value[:1] in ("'", '"') else None
    except (SyntaxError, ValueError):  # more than one string
        inner = None
    if not isinstance(inner, str):
        return text
    return f"{head}({inner})" if inner.startswith("-") else head + inner


def comparing() -> Parser:
    """Make the parser of ``%nimble``."""
    from nimble_viz.collect.compare import compare

    parser = Parser(
        prog="%nimble",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        description="Measure a model on these inputs: eager, one-stream replay, multi-stream replay. The value is the "
        "report.",
        epilog="examples:\n  %nimble model x\n  %nimble model torch.randn(1, 3, 224, 224) mask=m -o report\n"
        "  %nimble model **batch --fuse none --against compile\n"
        "  %nimble model x --training --loss-fn loss --target y --optimizer optimizer\n\n"
        "A semicolon at the end keeps the report from being shown. %%nimble -h: of a whole cell.",
    )
    parser.add_argument("model", metavar="MODEL", type=Expression, help="module or function of tensors")
    parser.add_argument(
        "inputs", metavar="INPUT", nargs="+", help="Python, as in a call: x, mask=m, *args, **batch; quotes optional"
    )
    _add_common(parser)
    add_options(parser.add_argument_group("keywords of compare"), compare, leave=_ELSEWHERE)
    add_options(parser.add_argument_group("options of the preparation"))
    return parser


def profiling() -> Parser:
    """Make the parser of ``%%nimble``."""
    from nimble_viz.collect.compare import compare
    from nimble_viz.collect.sampler import Counts

    parser = Parser(
        prog="%%nimble",
        add_help=False,
        description="Run the cell once and say where its time goes. If all it runs is one call of a module, that call "
        "is captured and compared with its replays, and the value is that report; else it is the profile. Assignments "
        "stay, as in any cell.",
    )
    _add_common(parser)
    parser.add_argument(
        "--capture",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="capture the call if it can be (default: True)",
    )
    add_options(parser.add_argument_group("iterations of a loop"), Counts)
    group = parser.add_argument_group("for what is captured")
    add_options(group, compare, only=_CELL_ONLY)
    add_options(group)
    return parser


def keywords(given: argparse.Namespace, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the part of ``given`` that ``function`` takes by keyword alone."""
    known = inspect.signature(function).parameters.values()
    return {one.name: getattr(given, one.name) for one in known if one.kind is one.KEYWORD_ONLY and one.name in given}


def _add_common(parser: Parser) -> None:
    parser.add_argument("-h", "--help", action="store_true", help="show this")
    parser.add_argument("-o", "--out", metavar="NAME", type=_name, help="also bind the report to NAME")
    parser.add_argument("--traceback", action="store_true", help="show errors with their whole traceback")


def _name(text: str) -> str:
    if not text.isidentifier() or iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


# Flags of a dataclass.


def add_options(
    group: Any, declared: Callable[..., Any] = Options, *, leave: Collection[str] = (), only: Collection[str] = ()
) -> None:
    """Add a flag for each field of a dataclass, or keyword of a function, with type, choices, default and help.

    What a keyword is given is Python that the magic evaluates, unless its default is a bool.

    >>> parser = argparse.ArgumentParser(prog="demo")
    >>> add_options(parser)
    >>> parser.parse_args(["--max-streams", "4"]).max_streams
    4
    """
    is_class = isinstance(declared, type)
    hints = typing.get_type_hints(declared) if is_class else {}
    helps = argument_help(declared.__doc__ or "")
    for name, one in inspect.signature(declared).parameters.items():
        if name in leave or (only and name not in only) or not (is_class or one.kind is one.KEYWORD_ONLY):
            continue
        hint = hints.get(name, bool if isinstance(one.default, bool) else Expression)
        members = typing.get_args(hint)
        how: dict[str, Any] = {"metavar": "NAME", "type": str}
        if hint is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif hint is Expression:
            how = {"metavar": "EXPR", "type": Expression}
        elif typing.get_origin(hint) is typing.Literal:
            how = {"choices": members}
        elif type(None) in members:
            how = {"metavar": "N", "type": _optional(next(kind for kind in members if kind is not type(None)))}
        elif hint in (int, float):
            how = {"metavar": "X", "type": hint}
        text = helps[name].rstrip(".") + ("" if hint is Expression else f" (default: {one.default})")
        group.add_argument("--" + name.replace("_", "-"), default=one.default, help=text.replace("%", "%%"), **how)


def option_values(given: argparse.Namespace, kind: type[Any] = Options) -> dict[str, Any]:
    """Return what was given for the fields of ``kind``, by name."""
    return {field.name: getattr(given, field.name) for field in fields(kind)}


def _optional(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    return number


def argument_help(doc: str) -> dict[str, str]:
    """Return ``{argument: text}`` from the ``Args:`` section of a docstring."""
    section = re.split(r"^(?=\S)", inspect.cleandoc(doc).partition("Args:\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^    (\w+): (.+?)(?=^    \w+: |\Z)", section, re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()) for name, text in found}
