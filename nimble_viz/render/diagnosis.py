"""What keeps a model from being prepared, as a value that shows itself: everything at once, in the user's words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table

from nimble_viz.analysis.labels import plural
from nimble_viz.render.layout import plain, words

__all__ = ["PAGE", "Blocker", "Diagnosis"]

PAGE = "docs/troubleshooting.md"
"""The page that explains each kind, in a section of that name."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """One thing that keeps a model from being prepared.

    Args:
        kind: section of ``docs/troubleshooting.md`` that explains it.
        name: what was written, in Python's words: ``.item()``.
        what: what it does, one sentence.
        instead: what to write instead.
        module: path of the module whose code it is; empty for the model itself.
        file: of the user's code; empty if not known.
        line: in that file.
        code: that line, without its indentation.
        mark: where in ``code`` it stands, first column and the one behind the last.
        inside: place in a library that the line leads to; empty if the line itself does it.
        times: how often one run gets there.
    """

    kind: str
    name: str
    what: str
    instead: str
    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""
    mark: tuple[int, int] = (0, 0)
    inside: str = ""
    times: int = 1

    @property
    def link(self) -> str:
        """Section of the documentation, relative to the project's root."""
        return f"{PAGE}#{self.kind}"

    @property
    def where(self) -> str:
        """``"encoder.layer.0, model.py:12 (5 times), in transformers/masking_utils.py:80"``."""
        place = f"{self.file}:{self.line}" if self.file else ""
        times = f"{place} ({self.times} times)" if self.times > 1 else place
        inside = f"in {self.inside}" if self.inside else ""
        return ", ".join(part for part in (self.module, times, inside) if part)


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """All blockers of a model, in the order in which a run meets them.

    Args:
        model: its name.
        blockers: none if it can be prepared.
        notes: what a replay would do otherwise than eager, and what it would keep of the run that was recorded.
    """

    model: str
    blockers: tuple[Blocker, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the model can be prepared."""
        return not self.blockers

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.ok:
            return f"{self.model} can be prepared{', with these notes' if self.notes else ''}."
        return f"{self.model} cannot be prepared: {plural(len(self.blockers), 'blocker')}."

    def to_text(self, width: int | None = None) -> str:
        """Return plain text, ``width`` columns wide (60 to 200; None: the terminal's)."""
        return plain(self, width)

    def to_json(self) -> str:
        """Return all of it as JSON, with a line break at the end."""
        found = [{**asdict(one), "link": one.link} for one in self.blockers]
        whole = {"model": self.model, "ok": self.ok, "blockers": found, "notes": self.notes}
        return json.dumps(whole, indent=2) + "\n"

    def __str__(self) -> str:
        return self.to_text(100).rstrip("\n")

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield words(f"nimble_viz diagnose: {self.model}", "bold")
        yield words(self.verdict, "bold green" if self.ok else "bold red")
        for number, one in enumerate(self.blockers, 1):
            yield words("")
            head = words(f"{number}. ")
            head.append_text(words(one.name, "bold yellow")).append_text(words(f"{' ' * bool(one.name)}{one.what}"))
            yield head
            if one.code:
                cut = max(one.mark[0] - 20, 0) if len(one.code) > 80 else 0
                marked = f"\n{' ' * (one.mark[0] - cut)}{'^' * (one.mark[1] - one.mark[0])}"
                code = words(f"{one.code[cut:]}{marked.rstrip()}", "cyan", lines=True)
                code.no_wrap, code.overflow = True, "ellipsis"
                yield Padding(code, (0, 0, 0, 7))
            rows = Table.grid(padding=(0, 2))
            rows.add_column(width=7)
            rows.add_column(overflow="fold", ratio=1)
            for label, value in (("where", one.where), ("instead", one.instead), ("more", one.link)):
                if value:
                    rows.add_row(words(label, "dim"), words(value))
            yield Padding(rows, (0, 0, 0, 3))
        for note in self.notes:
            yield words("")
            yield words(f"note: {note}", "italic")
