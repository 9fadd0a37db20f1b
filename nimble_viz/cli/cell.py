"""Compile a notebook cell's body as IPython does, run it once, and note the module call in it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nimble_core.utils.errors import InputError
from nimble_viz.report.data import ReportData

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Body", "Calls", "ModuleCall", "cell_number", "compile_body", "why_not_captured"]

Result = TypeVar("Result")

_WATCH = "__nimble_watch__"
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class Body:
    """Compiled statements of a cell; ``last``: an expression at the end that is to be shown."""

    statements: CodeType
    last: CodeType | None
    file: str

    def run(self, globals_: dict[str, Any], locals_: dict[str, Any], calls: Calls) -> object:
        """Run all statements, tell ``calls``, and return the value to show; the user's errors propagate."""
        globals_[_WATCH] = calls.watch
        began = perf_counter()
        try:
            exec(self.statements, globals_, locals_)
            return eval(self.last, globals_, locals_) if self.last is not None else None
        finally:
            calls.seconds = perf_counter() - began
            globals_.pop(_WATCH, None)

    def call_at(self, line: int, function: Callable[[], Result]) -> Result:
        """Call ``function`` from this line of the cell, where a search for the user's line finds it."""
        code = compile("\n" * (line - 1) + "function()", self.file, "eval")
        return cast(Result, eval(code, {"function": function}))


def cell_number(shell: InteractiveShell) -> int:
    """Return the number of the cell that runs; IPython versions differ in when they count up."""
    return int(shell.displayhook.prompt_count)


def compile_body(shell: Any, cell: str) -> Body:
    """Compile the text below a cell magic, with the transformations of an ``InteractiveShell``.

    Lines count from the magic's own. An expression at the end is shown, unless a semicolon follows. Raise InputError
    for a syntax error; the message shows where.
    """
    try:
        code = "\n" + shell.transform_cell(cell)
        name = shell.compile.cache(code, cell_number(shell), raw_code=f"\n{cell}")
        tree = _Watched().visit(shell.transform_ast(shell.compile.ast_parse(code, name)))
        last = None
        silent = shell.displayhook.semicolon_at_end_of_expression(code)
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not silent:
            last = shell.compile(ast.Expression(tree.body.pop().value), name, "eval")
        return Body(shell.compile(tree, name, "exec"), last, name)
    except SyntaxError as error:
        text = (error.text or "").rstrip()
        pointer = f"\n  {text}\n  {' ' * (error.offset - 1)}^" if text and error.offset else ""
        line = f" in line {error.lineno}" if error.lineno else ""
        raise InputError(f"{error.msg}{line} of the cell{pointer}", fix="nothing of the cell was run") from None


class _Watched(ast.NodeTransformer):
    """Turn ``f(x)`` into ``watch(f, line)(x)`` where it runs with the cell; ``f`` sees the same caller."""

    def visit(self, node: ast.AST) -> Any:
        """Leave out what may run after the cell."""
        return node if isinstance(node, _LATER) else super().visit(node)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Wrap the function alone."""
        self.generic_visit(node)
        watch = ast.Call(ast.Name(_WATCH, ast.Load()), [node.func, ast.Constant(node.lineno)], [])
        node.func = ast.fix_missing_locations(ast.copy_location(watch, node.func))
        return node


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module, as it was made; ``line`` of the cell."""

    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    line: int
    seconds: float

    @property
    def text(self) -> str:
        """``Net, line 3``."""
        return f"{type(self.module).__name__}, line {self.line}"


class Calls:
    """Notes the first call of a module in a cell, and if there are more; models would notice hooks."""

    def __init__(self) -> None:
        self.first: ModuleCall | None = None
        self.more = False
        self.seconds = 0.0

    def watch(self, function: Any, line: int) -> Any:
        """Return ``function``, or for a module a function that calls it and takes notes."""
        import torch

        if not isinstance(function, torch.nn.Module):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            result = function(*args, **kwargs)
            self.more = self.first is not None
            if self.first is None:
                self.first = ModuleCall(function, args, kwargs, line, perf_counter() - began)
            return result

        return call


def why_not_captured(calls: Calls, profile: ReportData) -> str:
    """Say why a cell that was run and profiled is not one call that can be captured; empty if it is."""
    trained = {one.phase for one in profile.overhead.phases} if profile.overhead else set()
    if trained & {"backward", "optimizer"}:
        return (
            "a backward or an optimizer ran in it; %nimble MODEL INPUT --training --loss-fn LOSS --optimizer OPTIMIZER "
            "compares a whole step"
        )
    if calls.first is None:
        return "no module is called in its own lines; %nimble FUNCTION INPUT compares a function of tensors"
    if calls.more:
        return f"it calls modules more than once (first {calls.first.text}); %nimble MODEL INPUT compares one call"
    return ""
