"""Read the code that calls come from where it ran, so that a report shows it elsewhere.

Only functions that calls name are read, never whole files, and files have the names that origins give them. If a file
was edited since it was imported, lines are off, as in Python's own tracebacks.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from nimble_core.ir.program import Call
from nimble_core.tracing.provenance import label_of, pass_over
from nimble_viz.report.data import SourceLines

__all__ = ["MAX_CHARACTERS", "code_around", "pass_over_machinery", "read_sources", "text_of"]

MAX_CHARACTERS = 200_000
"""Most text that a report carries; functions with the most calls come first."""

_AROUND = 3
_CELL_MAGIC = "get_ipython().run_cell_magic("
_MACHINERY = (
    "nimble_viz", "IPython", "ipykernel", "ipykernel_launcher", "ipywidgets", "traitlets", "tornado", "asyncio",
    "concurrent.futures", "threading",
)  # fmt: skip


def pass_over_machinery() -> None:
    """From now on, skip the frames of this package, and of what runs cells, when attributing calls."""
    for module in filter(None, map(sys.modules.get, _MACHINERY)):
        # A module that is frozen into a program has neither a path nor a file.
        for place in getattr(module, "__path__", (getattr(module, "__file__", None),)):
            if place:
                pass_over(place)


def read_sources(calls: Iterable[Call], most: int = MAX_CHARACTERS) -> tuple[SourceLines, ...]:
    """Read the functions that ``calls`` come from, by file and line.

    Args:
        calls: of a run in this process.
        most: characters in all. A function beyond that, or one that cannot be read, has no lines, and a note why.
    """
    used: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for call in calls:
        for origin in call.origins:
            if origin.file and origin.line > 0:
                used[origin.file][origin.line] += 1
    weighed = [(piece, weight) for file, lines in used.items() for piece, weight in _of_file(file, lines)]
    left, kept = most, []
    for piece, _ in sorted(weighed, key=lambda pair: -pair[1]):
        size = sum(len(line) + 1 for line in piece.lines)
        if size > left:
            piece = replace(piece, lines=(), note=f"left out: a report carries {most:,} characters of code")
            size = 0
        left -= size
        kept.append(piece)
    return tuple(sorted(kept, key=lambda piece: (piece.file, piece.first)))


def code_around(text: str, lines: Iterable[int]) -> list[tuple[int, int, str]]:
    r"""Return ``(first line, last line, qualified name)`` of the innermost functions around ``lines``.

    A line outside of functions gets its statement, and an empty name. Such statements are joined if no more than a few
    lines lie between them. What lies inside another is part of it. O(nodes + lines · functions).

    Raises:
        SyntaxError: ``text`` is no Python.

    >>> code_around("class A:\n  def f(self):\n    return 1\nx = (1 +\n  2)\n", [3, 5])
    [(2, 3, 'A.f'), (4, 5, '')]
    """
    tree = ast.parse(text)
    functions = list(_functions(tree))
    statements = [(node.lineno, node.end_lineno or node.lineno) for node in tree.body]
    found: set[tuple[int, int, str]] = set()
    for line in lines:
        around = [one for one in functions if one[0] <= line <= one[1]]
        around = around or [(first, last, "") for first, last in statements if first <= line <= last]
        found.add(min(around, key=lambda one: one[1] - one[0], default=(line, line, "")))
    joined: list[tuple[int, int, str]] = []
    for first, last, name in sorted(found, key=lambda one: (one[0], -one[1])):
        before = joined[-1] if joined else (0, -_AROUND, "outside")
        if last <= before[1]:
            continue
        if name == before[2] == "" and first - before[1] <= _AROUND:
            joined[-1] = (before[0], last, "")
        else:
            joined.append((first, last, name))
    return joined


def _of_file(file: str, used: Counter[int]) -> Iterator[tuple[SourceLines, int]]:
    """Yield pieces of one file, each with the number of its calls."""
    text = text_of(file)
    note = "not found where it ran" if text is None else ""
    if text is not None and max(used) > len(text):
        note = "the file is shorter than it was when it was imported"
    pieces: list[tuple[int, int, str]] = []
    if text is not None and not note:
        try:
            pieces = code_around("".join(text), used)
        except (SyntaxError, ValueError, RecursionError):
            note = "no Python code"
    if text is None or note:
        yield SourceLines(file, min(used), "", (), note), used.total()
        return
    for first, last, name in pieces:
        lines = tuple(line.rstrip("\r\n").expandtabs(4) for line in text[first - 1 : last])
        calls = sum(count for line, count in used.items() if first <= line <= last)
        yield SourceLines(file, first, name, lines, ""), calls


def text_of(file: str) -> Sequence[str] | None:
    """Return the lines of what origins call ``file``; None if there is none, or more than one."""
    # Through vars: a module may make attributes when asked, and import others for it.
    modules = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    likely = [file, *modules, *list(linecache.cache), *(str(Path(root) / file) for root in sys.path if root)]
    cell = file.startswith("In[")  # whose path says nothing of its number
    named = dict.fromkeys(path for path in likely if isinstance(path, str) and (cell or path.endswith(file)))
    found: set[tuple[str, ...]] = set()
    for path in named:
        # A bare name would be looked for in the working directory, which need not be where the code came from.
        if (Path(path).is_absolute() or path.startswith("<")) and label_of(path) == file:
            lines = linecache.getlines(path)
            if lines:
                found.add(tuple(lines))
    if cell:  # below a magic it has two texts: the call of the magic, and what the magic ran
        found = {text for text in found if not text[0].startswith(_CELL_MAGIC)} or found
    return found.pop() if len(found) == 1 else None


def _functions(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, around = pending.pop()
        inside = around
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{around}{node.name}"
            inside = f"{name}."
            if not isinstance(node, ast.ClassDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                yield first, node.end_lineno or node.lineno, name
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))
