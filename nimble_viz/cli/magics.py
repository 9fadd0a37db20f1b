"""``%load_ext nimble_viz``: ``%nimble MODEL INPUT`` compares a model, ``%%nimble`` profiles a cell."""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from types import CodeType, TracebackType
from typing import Any, TypeVar, cast

import IPython
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import needs_local_scope, no_var_expand

import nimble_core
import nimble_viz
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import POLICIES
from nimble_core.utils.errors import InputError, NimbleError
from nimble_core.utils.interrupts import interrupts_postponed
from nimble_core.utils.tracebacks import full_tracebacks
from nimble_core.utils.units import format_percent
from nimble_viz.analysis.tiles import verdict
from nimble_viz.cli.arguments import Expression, comparing, keywords, option_values, profiling, split
from nimble_viz.collect.progress import default_progress
from nimble_viz.collect.sampler import Counts
from nimble_viz.render.report import Report
from nimble_viz.report.data import ReportData

__all__ = ["Calls", "compile_body", "load", "unload"]

_NAME = "nimble"
_TYPED = "<%nimble>"
_COLLECT = "__nimble_inputs__"
_FOLDERS = tuple(
    f"{Path(path).parent}{os.sep}" for path in (nimble_viz.__file__, nimble_core.__file__, IPython.__file__)
)
_FILES = (_TYPED, contextlib.__file__)
_BETWEEN = tuple(
    str(Path("torch", *path)) for path in (("nn", "modules", "module.py"), ("_dynamo", "eval_frame.py"), ("_ops.py",))
)


def load(shell: InteractiveShell) -> None:
    """Register the magics with ``shell``; doing it again changes nothing."""
    unload(shell)
    register: Any = shell.register_magic_function  # its types take it for unbound
    register(_Magic(shell).nimble, "line_cell", _NAME)


def unload(shell: InteractiveShell) -> None:
    """Remove all that ``load`` registered, if anything."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop(_NAME, None)
    vars(shell.magics_manager.user_magics).pop(_NAME, None)


class _Magic:
    """Bound to one shell, whose namespace it evaluates in and binds to."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell: Any = shell  # its methods have no types

    @no_var_expand
    @needs_local_scope
    def nimble(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """See what ahead-of-time scheduling changes about a model, or where a cell's time goes.

        ``%nimble MODEL INPUT [INPUT ...]``
            Measures eager, one-stream replay and multi-stream replay on these inputs; the value is the report.
        ``%%nimble``
            Runs the cell once and profiles it; if all it runs is one call of a module, that call is captured and
            compared with its replays. The value is the report. Assignments stay.

        Both take ``-o NAME``, which binds the report, and the fields of ``nimble_viz.Options`` as flags; ``%nimble -h``
        and ``%%nimble -h`` list all. A semicolon at the end of the line keeps the report from being shown.

        Examples::

            %nimble model x
            %nimble model torch.randn(1, 3, 224, 224) mask=m --fuse none -o report
        """
        with _presented(self.shell):
            silent = line.rstrip().endswith(";")
            given = split(line.rstrip()[:-1] if silent else line)
            parser = comparing() if cell is None else profiling()
            if "-h" in given or "--help" in given:
                print(parser.format_help())
                return None
            parsed = parser.parse_intermixed_args(given)
        with _presented(self.shell, whole=parsed.traceback):
            report: Report | None
            if cell is None:
                report = self._compare(parsed, local_ns or self.shell.user_ns)
            else:
                report = self._profile(parsed, cell)
            if parsed.out and report is not None:
                self.shell.push({parsed.out: report})
        return None if silent else report

    def _compare(self, given: argparse.Namespace, namespace: dict[str, Any]) -> Report:
        from nimble_viz.collect.compare import compare

        model = self._value(given.model, namespace)
        args, named = self._inputs(given.inputs, namespace)
        return compare(model, *args, kwargs=named, **self._keywords(given, compare, namespace))

    def _profile(self, given: argparse.Namespace, cell: str) -> Report | None:
        """Run the cell's body and report on it; say why and return None if it ran no operator."""
        from nimble_viz.collect.compare import compare
        from nimble_viz.collect.profile import Profiling

        shell = self.shell
        how = self._keywords(given, compare, shell.user_ns)
        counts = Counts(**option_values(given, Counts))
        run = Profiling(counts, subject=f"In[{cell_number(shell)}]")
        body, calls = compile_body(shell, cell), Calls()
        shown: object = None
        try:
            with ExitStack() as profiled:
                with interrupts_postponed():
                    profiled.enter_context(run)
                began = perf_counter()
                with _presented(shell, whole=given.traceback, by_user=True):
                    shown = body.run(shell.user_global_ns, shell.user_ns, calls)
                took = perf_counter() - began
                with default_progress() as told, told.step("read the profile"):
                    try:
                        profiled.close()
                    except InputError as nothing:
                        if run.found:
                            raise
                        print(nothing)
                        return None
        finally:
            sys.displayhook(shown)
        why = why_not_captured(calls, run.report) if given.capture else "--no-capture"
        if not why:
            try:
                run_again = partial(compare, calls.module, *calls.args, kwargs=calls.kwargs, **how)
                report = body.call_at(calls.line, run_again)
            except Exception as error:
                if given.traceback:
                    raise
                why = str(error) if isinstance(error, NimbleError) else f"{type(error).__name__}: {error}"
            else:
                share = format_percent(calls.seconds / took)
                print(f"The cell: {verdict(run.report)}")
                print(f"Captured: the call of {calls}, {share} of the cell's time. The report is of this call:")
                return report
        if given.capture:
            print(f"Not captured: {why}")
        return run.report

    # -- what was typed --------------------------------------------------------------------------------------------

    def _value(self, text: str, namespace: dict[str, Any], wrong: str = "not a Python expression") -> Any:
        try:
            code = compile(text.strip(), _TYPED, "eval")
        except SyntaxError as error:
            shown = text.removeprefix(_COLLECT)
            raise InputError(f"{shown!r} is {wrong}: {error.msg}", fix="see %nimble -h") from None
        return eval(code, self.shell.user_global_ns, namespace)

    def _inputs(self, texts: list[str], namespace: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Evaluate the arguments of a call, by Python's own rules."""

        def collect(*args: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, named

        call, known = f"{_COLLECT}({', '.join(texts)})", {**namespace, _COLLECT: collect}
        return cast(tuple[tuple[Any, ...], dict[str, Any]], self._value(call, known, "no arguments of a call"))

    def _keywords(
        self, given: argparse.Namespace, function: Callable[..., Any], namespace: dict[str, Any]
    ) -> dict[str, Any]:
        """Return keywords of ``compare``: the options, and the values of what was typed as Python."""
        chosen = option_values(given)
        if chosen["policy"] not in ("auto", *POLICIES):
            chosen["policy"] = namespace.get(chosen["policy"], chosen["policy"])
        made = keywords(given, function)
        if isinstance(made["against"], Expression):
            made["against"] = self._peers(made["against"], namespace)
        for name, value in made.items():
            if isinstance(value, Expression):
                made[name] = self._value(value, namespace)
        return {**made, "options": Options(**chosen)}

    def _peers(self, text: Expression, namespace: dict[str, Any]) -> Any:
        """Return peers by comma-separated names, built in or the user's own; else the value of the Python."""
        from nimble_viz.collect.peers import Peer, peer_names

        names = text.split(",")
        if not all(re.fullmatch(r"[\w:+-]+", name) for name in names):
            value = self._value(text, namespace)
            return [value] if isinstance(value, Peer) else value
        known = peer_names()
        return [name if name in known else namespace.get(name, name) for name in names]


@contextmanager
def _presented(shell: InteractiveShell, *, whole: bool = False, by_user: bool = False) -> Iterator[None]:
    """Show errors without our frames, ours as their message unless ``by_user``: the user's code runs inside."""
    try:
        with full_tracebacks() if whole else nullcontext():
            yield
    except (Exception, KeyboardInterrupt) as error:
        if not whole and not hasattr(error, "_render_traceback_"):
            message_only = isinstance(error, NimbleError) and not by_user
            frames = [] if message_only else list(_frames(error.__traceback__))
            expected = by_user or isinstance(error, NimbleError | KeyboardInterrupt)
            if expected or not frames[-1].tb_frame.f_code.co_filename.startswith(_FOLDERS):
                _draw_instead(shell, error, [one for one in frames if not _is_machinery(one)])
        raise


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_machinery(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_code.co_filename
    return name in _FILES or name.startswith(_FOLDERS) or name.endswith(_BETWEEN)


def _draw_instead(shell: Any, error: BaseException, frames: list[TracebackType]) -> None:
    """Have the shell draw ``error`` with these frames, through the method that IPython looks for."""
    chain = None
    for one in reversed(frames):
        chain = TracebackType(chain, one.tb_frame, one.tb_lasti, one.tb_lineno)

    def render() -> list[str]:
        drawn = shell.InteractiveTB
        if chain is None:
            return [line.rstrip("\n") for line in drawn.get_exception_only(type(error), error)]
        return list(drawn.structured_traceback(type(error), error, chain, tb_offset=0))

    error._render_traceback_ = render  # type: ignore[attr-defined]  # IPython asks errors for it


# The body of a cell, and the call of a module in it.

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
        try:
            exec(self.statements, globals_, locals_)
            return eval(self.last, globals_, locals_) if self.last is not None else None
        finally:
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


@dataclass(slots=True)
class Calls:
    """The first call of a module in a cell, as it was made, and if there are ``more``; models would notice hooks."""

    module: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0
    seconds: float = 0.0
    more: bool = False

    def __str__(self) -> str:
        return f"{type(self.module).__name__}, line {self.line}"

    def watch(self, function: Any, line: int) -> Any:
        """Return ``function``, or for a module a function that calls it and takes notes."""
        import torch

        if not isinstance(function, torch.nn.Module):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            result = function(*args, **kwargs)
            self.more = self.module is not None
            if not self.more:
                self.module, self.args, self.kwargs, self.line = function, args, kwargs, line
                self.seconds = perf_counter() - began
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
    if calls.module is None:
        return "no module is called in its own lines; %nimble FUNCTION INPUT compares a function of tensors"
    if calls.more:
        return f"it calls modules more than once (first {calls}); %nimble MODEL INPUT compares one call"
    return ""
