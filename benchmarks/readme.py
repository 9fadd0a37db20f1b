"""What the suites' parts of the README have in common: cells, marks, lists, and how a part is put between its markers.

A part stands between its own marker and ``<!-- end -->`` and is made from a results file, so that no figure there is
typed by hand.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from benchmarks.rows import Results, Row, read

__all__ = [
    "END",
    "NONE",
    "ROOT",
    "UNSTABLE",
    "Rows",
    "as_list",
    "as_table",
    "marks",
    "named_marks",
    "not_measured",
    "on_machines",
    "replaced",
    "times",
    "wrapped",
    "write_part",
]

ROOT = Path(__file__).parents[1]
END = "<!-- end -->"
UNSTABLE, NONE = "†", "–"

Rows = Mapping[str, Mapping[str, Any]]


def times(value: float) -> str:
    """A speed; one below 1 never reads as 1.

    >>> times(1.524), times(18.73), times(0.996)
    ('1.52x', '18.7x', '0.996x')
    """
    return f"{value:.3f}x" if 0.995 <= value < 1 else f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x"


def marks(best: Iterable[str]) -> dict[str, str]:
    """The mark of each way that is the best peer of a row; the one that is it most often has none.

    >>> marks(["eager", "compile", "compile"])
    {'compile': '', 'eager': '¹'}
    """
    found = Counter(best)
    usual, *others = sorted(found, key=lambda name: (-found[name], name))
    return {usual: "", **dict(zip(sorted(others), "¹²³⁴⁵⁶⁷⁸⁹", strict=False))}


def named_marks(marked: Mapping[str, str]) -> str:
    """Who the marks stand for.

    >>> named_marks({"compile": "", "eager": "¹"})
    'The best peer is `compile`, ¹ `eager`'
    """
    (usual, _), *others = marked.items()
    return f"The best peer is `{usual}`{''.join(f', {mark} `{name}`' for name, mark in others)}"


def as_table(table: Sequence[Sequence[str]]) -> list[str]:
    """Head and body as Markdown; all columns but the first are aligned to the right."""
    head, *body = table
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(line)} |" for line in (head, ruler, *body)]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines that fit into the page."""
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def as_list(said: Iterable[str]) -> list[str]:
    """Sentences as a list in Markdown."""
    return [line for one in said for line in wrapped(f"- {one}", "  ")]


def on_machines(rows: Rows) -> str:
    """The machines that rows were measured on."""
    stamps = [row["environment"] for row in rows.values()]
    return "; ".join(sorted({f"{one['device_name']}, host {one['host_cpu']}, torch {one['torch']}" for one in stamps}))


def not_measured(rows: Rows, suite: Sequence[Row], peers: Set[str]) -> list[str]:
    """What a suite has and the rows do not: models, dtypes, batches and peers as a whole, else row by row.

    Args:
        rows: that were measured.
        suite: all there are to measure.
        peers: that any of the rows knows of.
    """
    models = {row["model"] for row in rows.values()}
    dtypes = {row["dtype"] for row in rows.values()}
    batches = {row["batch"] for row in rows.values()}
    whole = [
        *(row.model for row in suite if row.model not in models),
        *(f"`{row.dtype}`" for row in suite if row.dtype not in dtypes),
        *(f"batch {row.batch}" for row in suite if row.model in models and row.batch not in batches),
        *(f"`{name}`" for row in suite for name in row.peers if name not in peers),
    ]
    rest = [
        row.key
        for row in suite
        if row.key not in rows and row.model in models and row.dtype in dtypes and row.batch in batches
    ]
    return [*dict.fromkeys(whole), *rest]


def replaced(page: str, text: str, begin: str) -> str:
    """The page with ``text`` between the marker ``begin`` and the next ``END``.

    Raises:
        SystemExit: the markers are not there.
    """
    before, begun, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not begun or not end:
        raise SystemExit(f"the page has no {begin.strip()} followed by {END}")
    return before + begun + text + end + after


def write_part(
    about: str | None,
    results: Path,
    image: Path,
    begin: str,
    rendered: Callable[[Results, str, str], str],
    argv: Sequence[str] | None = None,
) -> None:
    """Write the committed results into the README, or others into another page.

    Args:
        about: what ``--help`` says.
        results: file, unless another is named.
        image: figure that the part links to.
        begin: marker.
        rendered: the part, from results (without rows if there is no file) and links to all rows and to the figure.
        argv: command line.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=results)
    parser.add_argument("page", type=Path, nargs="?", default=ROOT / "README.md")
    given = parser.parse_args(argv)

    def link(path: Path) -> str:
        return Path(os.path.relpath(path.resolve(), given.page.resolve().parent)).as_posix()

    text = rendered(read(given.results), link(given.results.with_suffix(".md")), link(image))
    given.page.write_text(replaced(given.page.read_text(encoding="utf-8"), text, begin), encoding="utf-8")
