"""The model's code and what holds the peak of memory, as rows of HTML that are picked from.

Pure. Rows are buttons with a ``data-key``: ``line 12`` and ``call 3`` say what is picked, ``sort host`` how to sort.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nimble_core.utils.units import format_count, format_ns, format_percent
from nimble_viz.analysis.labels import plural
from nimble_viz.analysis.source import hottest
from nimble_viz.render.dashboard_views import Views, facts_html

__all__ = ["MOST_HOT", "STYLE", "code_html", "holders_html", "hottest_html", "sortable"]

MOST_HOT = 12
"""Lines in the list of the hottest."""

_AROUND = 3
_OPEN_LINES = 160

STYLE = """
.nimble-rows { font-size: 12.5px; font-variant-numeric: tabular-nums; }
.nimble-rows .nimble-code { max-height: 620px; overflow: auto; }
.nimble-row { display: grid; grid-template-columns: var(--columns) 52px 44px minmax(200px, 1fr); gap: 0 10px;
  width: 100%; box-sizing: border-box; padding: 1px 6px; border: 0; border-left: 3px solid transparent;
  background: none;  color: inherit; font: inherit; text-align: left; line-height: 1.5; align-items: baseline; }
button.nimble-row { cursor: pointer; background: rgba(232, 119, 34, calc(var(--heat, 0) * .32)); }
button.nimble-row:hover { box-shadow: inset 0 0 0 1px rgba(128, 128, 128, .6); }
.nimble-row.nimble-on { border-left-color: #d6336c; box-shadow: inset 0 0 0 1.5px #d6336c; }
.nimble-row.nimble-on > code::before { content: "▶ "; }
.nimble-row > span { text-align: right; white-space: nowrap; }
.nimble-row > code { background: none; color: inherit; padding: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.nimble-row small { display: block; opacity: .75; font-size: 11px; line-height: 1.3; }
.nimble-row.nimble-head { border-bottom: 1px solid rgba(128, 128, 128, .5); font-size: 12px; }
.nimble-head button { border: 0; background: none; padding: 0; color: inherit; font: inherit; cursor: pointer; }
.nimble-head button[aria-pressed=true] { font-weight: 700; }
.nimble-rows summary { cursor: pointer; padding: 4px 0; overflow-wrap: anywhere; }
.nimble-rows details details summary { opacity: .7; font-size: 11.5px; padding: 0 0 0 14px; }
"""


def sortable(views: Views) -> list[tuple[str, str]]:
    """Key and name of the times that lines have; ``calls`` where no time is known."""
    return [(key, name) for key, name, _ in views.code["figures"]] or [("calls", "Calls")] if views.code else []


def hottest_html(views: Views, by: str) -> str:
    """The lines with most of ``by``, most first, below heads that sort."""
    code = views.code
    if not code:
        return ""
    heads = [
        f'<span><button type="button" data-key="sort {key}" aria-pressed="{str(key == by).lower()}">'
        f"{_text(name)}{' ↓' if key == by else ''}</button></span>"
        for key, name in sortable(views)
    ]
    found, rows = hottest(code, by, MOST_HOT), []
    for row in found:
        at = views.row_of_line[row["file"], row["line"]]
        place = f"{row['file']}:{row['line']}" + (f", {row['name']}" if row["name"] else "")
        rows.append(_row(views, at, by, found[0]["value"], row["text"] or "(no text)", place))
    return _rows(views, f"{_head(heads)}{''.join(rows)}")


def code_html(views: Views) -> str:
    """Functions with most time first, each line with what it costs; lines far from calls are folded."""
    code = views.code
    if not code:
        return "<p>No call of this report knows its source line.</p>"
    heat, lines = code["heat"], code["lines"]
    rows_of: list[dict[int, int]] = [{} for _ in code["functions"]]
    for row, (function, line) in enumerate(zip(lines["function"], lines["line"], strict=True)):
        rows_of[function][line] = row
    total, made, opened = _total(views, heat), [], 0
    top = max((_sum(lines, heat, row) for row in range(len(lines["line"]))), default=0)
    for one, rows in zip(code["functions"], rows_of, strict=True):
        spent = sum(_sum(lines, heat, row) for row in rows.values())
        share = f", {format_percent(spent / total)}" if total else ""
        place = _text(f"{one['file']}:{one['first']}")
        head = f"<b>{_text(one['name'] or one['file'])}</b> {place}, {_value(heat, spent)}{share}"
        note = f"<p>{_text(one['note'])}</p>" if one["note"] else ""
        is_open = opened < _OPEN_LINES
        opened += min(len(one["text"]), _OPEN_LINES) or 1
        body = "".join(_function(views, one, rows, heat, top))
        made.append(f"<details{' open' if is_open else ''}><summary>{head}</summary>{note}{body}</details>")
    heads = [f"<span>{_text(name)}</span>" for _, name in sortable(views)]
    elsewhere = code["elsewhere"]
    notes = [*code["notes"], *(["bwd: of a time above, the part in the backward."] if len(code["sides"]) > 1 else [])]
    if elsewhere and _both(elsewhere, "calls"):
        count = plural(_both(elsewhere, "calls"), "call")
        notes.append(f"{count} of no line of Python: {_value(heat, _both(elsewhere, heat))}.")
    told = facts_html((name, meaning) for _, name, meaning in code["figures"])
    said = "".join(f"<p>{_text(note)}</p>" for note in notes)
    return _rows(views, f'{_head(heads)}<div class="nimble-code">{"".join(made)}</div>{told}{said}')


def holders_html(run: Mapping[str, Any]) -> str:
    """What is alive at the peak of a ``live_memory`` run, largest first; a row is picked by the call that made it."""
    rows = [
        f'<button type="button" class="nimble-row" data-key="call {row["call"]}" '
        f'style="--heat:{row["bytes"] / run["peak"]:.3f}">'
        f"<span>{_text(row['size'])}</span><span>{_text(row['share'])}</span><span></span>"
        f"<code>{_text(row['text'])}</code></button>"
        for row in run["holders"]
    ]
    more = f"<p>{plural(run['more'], 'more result')} at the peak.</p>" if run["more"] else ""
    return f'<div style="--columns:76px">{"".join(rows)}</div>{more}{facts_html(run["facts"])}'


def _function(views: Views, one: Mapping[str, Any], rows: Mapping[int, int], heat: str, top: float) -> Iterable[str]:
    """Lines of a function; without its text, those that have calls."""
    numbers = range(one["first"], one["first"] + len(one["text"])) if one["text"] else sorted(rows)
    near = {number + by for number in rows for by in range(-_AROUND, _AROUND + 1)} | {one["first"]}
    far: list[str] = []

    def flush() -> Iterable[str]:
        if len(far) > _AROUND:
            count = format_count(len(far))
            yield f"<details><summary>⋯ {count} lines without calls</summary>{''.join(far)}</details>"
        else:
            yield from far
        far.clear()

    empty = "<span></span>" * (len(sortable(views)) + 1)
    for number in numbers:
        text = one["text"][number - one["first"]] if one["text"] else ""
        if number in rows:
            yield from flush()
            yield _row(views, rows[number], heat, top, text, "", number)
            continue
        plain = f'<div class="nimble-row">{empty}<span>{number}</span><code>{_text(text)}</code></div>'
        if number in near:
            yield from flush()
            yield plain
        else:
            far.append(plain)
    yield from flush()


def _row(views: Views, row: int, heat: str, top: float, text: str, place: str, number: int | None = None) -> str:
    """A line as a button: its times, its share of ``heat`` (the colour: of ``top``), its code, what waits there."""
    lines = views.code["lines"] if views.code else {}
    total = _total(views, heat)
    spent = _sum(lines, heat, row)
    share, warmth = spent / total if total else 0.0, spent / top if top else 0.0
    cells = []
    for key, _ in sortable(views):
        value, back = _sum(lines, key, row), lines.get(f"{key}_backward", ())
        small = f"<small>bwd {_value(key, back[row])}</small>" if len(back) and back[row] else ""
        cells.append(f"<span>{_value(key, value) if value else ''}{small}</span>")
    waits = [
        " ".join([plural(lines[count][row], what), *after]) + (f", {format_ns(lines[ns][row])}" if ns else "")
        for count, ns, what, *after in (
            ("waits", "wait", "host wait"),
            ("after", "after_wait", "host wait", "after it"),
            ("planned", "", "wait", "for another stream, planned"),
        )
        if lines[count][row]
    ]
    told = [place, *waits] if place else waits
    under = f"<small>{_text('; '.join(told))}</small>" if told else ""
    return (
        f'<button type="button" class="nimble-row" data-key="line {row}" style="--heat:{warmth:.3f}">{"".join(cells)}'
        f"<span>{format_percent(share) if share else ''}</span><span>{'' if number is None else number}</span>"
        f"<code>{_text(text)}{under}</code></button>"
    )


def _rows(views: Views, body: str) -> str:
    return f'<div style="--columns:{" ".join(["92px"] * len(sortable(views)))}">{body}</div>'


def _head(cells: Sequence[str]) -> str:
    return f'<div class="nimble-row nimble-head">{"".join(cells)}<span>Share</span><span></span><b>Line</b></div>'


def _value(key: str, value: float) -> str:
    return plural(round(value), "call") if key == "calls" else format_ns(value)


def _sum(lines: Mapping[str, Sequence[int]], key: str, row: int) -> int:
    """Forward and backward together."""
    return lines[key][row] + (lines[f"{key}_backward"][row] if f"{key}_backward" in lines else 0)


def _both(row: Mapping[str, int], key: str) -> int:
    return row[key] + row.get(f"{key}_backward", 0)


def _total(views: Views, key: str) -> int:
    return _both(views.code["totals"], key) if views.code else 0


def _text(text: object) -> str:
    return html.escape(str(text))
