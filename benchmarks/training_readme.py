"""Writes the training suite's results into the README: ``python -m benchmarks.training_readme [RESULTS [PAGE]]``.

What stands between ``<!-- training results -->`` and ``<!-- end -->`` is replaced: tables and sentences, all from the
results. Where there are none, it says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean, median
from typing import Any

from benchmarks import readme
from benchmarks.readme import (
    NONE,
    ROOT,
    UNSTABLE,
    Rows,
    as_list,
    as_table,
    named_marks,
    not_measured,
    on_machines,
    times,
    wrapped,
    write_part,
)
from benchmarks.rows import BEST, Results, speed_of
from benchmarks.train_zoo import TASKS
from benchmarks.training import (
    DROP_IN,
    IN_A_ROW,
    MORE_WAYS,
    OURS,
    OVERHEAD,
    REPLAY,
    TUNED,
    WAYS,
    WHOLE_OVERHEAD,
    about_digits,
    best_peer,
    equal,
    selected,
    summary,
)
from nimble_viz.analysis.limit import EXPLAINED_ABOVE

__all__ = ["BEGIN", "IMAGE", "RESULTS", "main", "rendered", "replaced", "rows_table", "sentences", "targets_table"]

RESULTS = ROOT / "benchmarks" / "results" / "training-h200.json"
IMAGE = ROOT / "docs" / "images" / "training.svg"
BEGIN = "<!-- training results -->\n"

FIRST = "tf32"
"""Dtype of the table that is always open."""

OVERS = ("eager", TUNED, OVERHEAD, BEST)
HEADS = (
    "model", "dtype", "batch", "whole step", "drop-in", "eager", "tuned eager", "reduce-overhead", "best peer",
    "memory", "kernels, policy", "losses eager's",
)  # fmt: skip
EXPLAINED = 3
"""How many of the rows that miss a target are explained."""

NAMES = {"step": "whole step", "drop-in": "drop-in"}


def _pair(values: Iterable[str]) -> str:
    """What holds for the whole step and for the drop-in, once if it is the same word."""
    first, second = values
    return first if first == second and not first[:1].isdigit() else f"{first}, {second}"


def learns(row: Mapping[str, Any], way: str) -> str:
    """Whether one of ours has eager's losses: yes, no, or void where eager's own move too little to tell."""
    if equal(row, way):
        return "yes"
    found = row["losses"].get(WAYS[way])
    return NONE if found is None else "no" if found.get("differs", True) or found["passed"] else "void"


def cells(row: Mapping[str, Any], marked: Mapping[str, str]) -> list[str]:
    """One line of the table; no speed of one of ours that was not shown to be right."""

    def mine(way: str) -> str:
        if WAYS[way] not in row["times"]:
            return NONE
        took = f"{row['times'][WAYS[way]]['median us']:.0f}"
        return (f"**{took}**" if way == "step" else took) if equal(row, way) else f"~~{took}~~"

    def faster(way: str, name: str) -> str:
        value = speed_of(row, name, way) if equal(row, way) else None
        return NONE if value is None else times(value) + ("" if row["speed"][way][name]["stable"] else UNSTABLE)

    def peer(over: str) -> str:
        name = best_peer(row) if over == BEST else over
        if name not in row["times"]:
            return NONE
        took = f"{row['times'][name]['median us']:.0f}{marked[name] if over == BEST else ''}"
        values = [faster(way, name) for way in WAYS]
        return f"{took} ({', '.join(values)})" if set(values) != {NONE} else took

    def memory(way: str) -> str:
        value = row["memory"].get(WAYS[way], {}).get("over eager")
        return NONE if value is None else times(value)

    return [
        row["model"],
        row["dtype"],
        str(row["batch"]),
        *map(mine, WAYS),
        *map(peer, OVERS),
        _pair(map(memory, WAYS)),
        row["ours"].get("chosen", NONE),
        _pair(learns(row, way) for way in WAYS),
    ]


def means(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Geometric means of the rows of a group in which ours is right, in the columns of :func:`cells`."""

    def of(values: Iterable[float | None]) -> str:
        known = [value for value in values if value]
        return times(geometric_mean(known)) if known else NONE

    speeds = ([of(speed_of(row, over, way) for row in rows if equal(row, way)) for way in WAYS] for over in OVERS)
    held = [of(row["memory"].get(WAYS[way], {}).get("over eager") for row in rows if equal(row, way)) for way in WAYS]
    return [f"**geometric mean, {name}**", *[""] * 4, *map(_pair, speeds), _pair(held), "", ""]


def rows_table(rows: Rows, every: Rows) -> list[str]:
    """One line a row, and one with the means of each group; marks are those of ``every`` row."""
    marked = _marks(every)
    models = list(TASKS)
    body = []
    for group in _summary(rows)["speed over"]:
        size, dtype = group.split(", ")
        members = [
            row
            for row in rows.values()
            if row["dtype"] == dtype and row["model"].endswith("CIFAR") == (size == "CIFAR")
        ]
        members.sort(key=lambda row: (_place(models, row["model"]), row["batch"]))
        body += [*(cells(row, marked) for row in members), means(group, members)]
    return as_table([HEADS, *body])


def _place(known: Sequence[str], name: str) -> tuple[int, str]:
    """To sort by: as known, the others after that by name."""
    return (known.index(name) if name in known else len(known)), name


def _marks(rows: Rows) -> dict[str, str]:
    return readme.marks(best_peer(row) for row in rows.values())


def key_to_marks(rows: Rows) -> str:
    """What the marks in the tables mean."""
    shaky = any(not one["stable"] for row in rows.values() for way in WAYS for one in row["speed"][way].values())
    unstable = f"; {UNSTABLE} unstable: samples spread or drift by more than 10%" if shaky else ""
    right = all(equal(row, way) for row in rows.values() for way in WAYS if WAYS[way] in row["times"])
    wrong = "" if right else "; struck out: ours was not shown to learn what eager does"
    return f"{named_marks(_marks(rows))}{unstable}{wrong}."


# -- targets -------------------------------------------------------------------------------------------------------


def targets_table(rows: Rows) -> list[str]:
    """What was asked for, and what both of our ways reached."""

    def cell(target: str, found: Mapping[str, Any]) -> str:
        if found["met"] is None:
            return "not measured"
        at = f" on {found['where']}" if found.get("where") else ""
        return f"{'met' if found['met'] else '**missed**'}: {_reached(target, found)}{at}"

    body = [
        [one["target"], *(cell(one["target"], one[way]) for way in WAYS)] for one in _summary(rows)["targets"]
    ]  # fmt: skip
    return as_table([("target", *NAMES.values()), *body])


def missed(rows: Rows) -> list[str]:
    """One sentence for each target that one of ours missed, with the rows that miss it.

    The worst come first, with what they know of why; the others, if there are many, with their values alone.
    """
    said = []
    for target in _summary(rows)["targets"]:
        what = target["target"]
        for way, name in NAMES.items():
            if target[way]["met"] is not False:
                continue
            if what.startswith("losses"):
                where = [f"{key} ({_unlearned(row, way)})" for key, row in rows.items() if not equal(row, way)]
            else:
                where = _where(rows, way, what, target[way].get("missed", {}))
            at = f", by {'; '.join(where)}" if where else f": {_reached(what, target[way])}"
            said.append(f"**Missed** by the {name}: {what}{at}.")
    return said


def _where(rows: Rows, way: str, target: str, values: Mapping[str, float]) -> list[str]:
    """Rows that miss a target, the worst first and explained; the rest by model and dtype."""
    memory = target.startswith("peak memory")
    over = "eager" if "eager" in target else BEST
    order = sorted(values, key=values.__getitem__, reverse=memory)
    told = [
        f"{key} ({(_filled(rows[key], way) if memory else _slow(rows[key], way, over))})" for key in order[:EXPLAINED]
    ]
    rest: dict[str, list[str]] = {}
    for key in order[EXPLAINED:]:
        row = rows[key]
        rest.setdefault(f"{row['model']}, {row['dtype']}", []).append(f"batch {row['batch']}: {_precise(values[key])}")
    return [*told, *(f"{of} ({', '.join(several)})" for of, several in rest.items())]


def _reached(target: str, found: Mapping[str, Any]) -> str:
    """The value of a verdict: how many rows of all, or a ratio."""
    if target.startswith("losses"):
        return f"{found['value'] * found['rows']:.0f} of {found['rows']} rows"
    return _precise(found["value"])


def _precise(value: float) -> str:
    """So that what is missed by little does not read as met."""
    return f"{value:.3f}x"


def _unlearned(row: Mapping[str, Any], way: str) -> str:
    """Why one of ours was not shown to learn what eager does."""
    name = WAYS[way]
    return row["losses"].get(name, {}).get("reason") or row["ways"].get(name, {}).get("note") or "not measured"


def _slow(row: Mapping[str, Any], way: str, over: str) -> str:
    """A speed that is too low, over whom, and where the time of the whole step goes, as far as the row knows."""
    said = [f"{_precise(speed_of(row, over, way) or 0.0)} of {f'`{best_peer(row)}`' if over == BEST else over}"]
    took, limit = row["times"], row["ours"].get("limit")
    if way == "step" and limit and REPLAY in took:
        step, replay = took[OURS]["median us"], took[REPLAY]["median us"]
        parts = limit.get("parts us", {})
        most = f", most of it {max(parts, key=parts.__getitem__)}" if parts else ""
        said.append(
            f"{step:.0f} µs: limit {limit['us']:.0f}, replay above it {replay - limit['us']:.0f}{most}, "
            f"outside the replay {step - replay:.0f}"
        )
    if way == "drop-in":
        if (inside := _with_loss(row)) and (speed := speed_of(row, over, inside)):
            said.append(f"with the loss inside of the module {_precise(speed)}")
        if equal(row, "step") and (whole := speed_of(row, over, "step")):
            said.append(f"the whole step {times(whole)}")
    return "; ".join(said)


def _with_loss(row: Mapping[str, Any]) -> str:
    """The way that has the loss inside, if it was measured and learns what eager does; else empty."""
    right = (way for way, name in MORE_WAYS.items() if row["losses"].get(name, {}).get("passed"))
    return next((way for way in right if way in row["speed"]), "")


def _filled(row: Mapping[str, Any], way: str) -> str:
    """Memory over eager's, and how much of it the engine plans."""
    held, plan = row["memory"][WAYS[way]], row["ours" if way == "step" else "drop-in"].get("memory bytes")
    engine = "engine" if way == "step" else "forward's engine"
    said = f"{_precise(held['over eager'])}: {held['bytes'] / 1e6:.0f} MB"
    said += f", {plan / 1e6:.0f} of them the {engine}'s" if plan else ""
    if way == "drop-in" and (inside := _with_loss(row)):
        said += f"; with the loss inside of the module {_precise(row['memory'][MORE_WAYS[inside]]['over eager'])}"
    return said


# -- sentences -----------------------------------------------------------------------------------------------------


def sentences(results: Results) -> list[str]:
    """Means, what was missed, left out, failed or not measured: a list in Markdown."""
    rows: Rows = results["rows"]
    found = _summary(rows)
    said = []
    heads = {
        "speed over": "Geometric means**",
        "speed in a row over": f"{IN_A_ROW} steps in a row**, of which only the last is waited for",
    }
    for group in found["speed over"]:
        for what, head in heads.items():
            over = found[what][group]
            if values := _quoted(over):
                count = over["eager"]["step"]["rows"]
                rows_of = f"{group}, {count} row{'s' * (count != 1)}, whole step (drop-in)"
                said.append(f"**{head}, {rows_of}: {', '.join(values)}.")
    if least := _least_in_a_row(rows):
        said.append(f"**Least of the best peer, {IN_A_ROW} steps in a row**: {least}.")
    said += missed(rows)
    said.append(_preparation(rows))
    if far := found["distance to limit"]["explained"]:
        said.append(
            f"**Far from the limit**: {len(far)} of {len(found['distance to limit']['by row'])} rows are above "
            f"{EXPLAINED_ABOVE:g} times theirs; why is said for each beside all rows."
        )
    if broken := _breaks(rows):
        said.append(f"**Graph breaks** of Dynamo: {'; '.join(broken)}.")
    if left := found["left out"]:
        said.append(f"**Left out**, with the reason beside all rows: {'; '.join(left)}.")
    if failed := results.get("failed"):
        reasons = [f"{key} ({one['reason']})" for key, one in sorted(failed.items())]
        said.append(f"**Failed**: {'; '.join(reasons)}.")
    peers = {name for row in rows.values() for name in row["ways"]}
    if missing := not_measured(rows, selected(tuple(TASKS)), peers):
        said.append(f"**Not measured**: {'; '.join(missing)}.")
    if digits := results.get("digits"):
        said.append(f"**A real data set**: {about_digits(digits)[0]}.")
    return as_list(said)


def _quoted(over: Mapping[str, Any]) -> list[str]:
    """Geometric means over those that are quoted, of the whole step and of the drop-in."""
    named = {OVERHEAD: f"`{OVERHEAD}`", BEST: "the best peer", "eager": "eager"}
    return [
        f"{_mean(over[name]['step'])} over {text} ({_mean(over[name]['drop-in'])})"
        for name, text in named.items()
        if over[name]["step"]["rows"] or over[name]["drop-in"]["rows"]
    ]


def _least_in_a_row(rows: Rows) -> str:
    """The row in which each of ours gains least on its best peer, where the host may run ahead."""
    said = []
    for way, name in NAMES.items():
        speeds = {
            key: value
            for key, row in rows.items()
            if equal(row, way) and "in a row" in row and (value := speed_of(row["in a row"], BEST, way))
        }
        if speeds:
            key = min(speeds, key=speeds.__getitem__)
            said.append(f"{name} {_precise(speeds[key])} on {key}")
    return ", ".join(said)


def _breaks(rows: Rows) -> list[str]:
    """Where a compiler left some of the step to Python: how often, whose, on how many rows."""
    found = Counter(
        (name, note)
        for row in rows.values()
        for name, one in row["ways"].items()
        for note in (one.get("note") or "").split("; ")
        if note.startswith("graph breaks")
    )
    return [
        f"{note.removeprefix('graph breaks: ')} in `{name}` on {count} rows" for (name, note), count in found.items()
    ]


def _summary(rows: Rows) -> dict[str, Any]:
    return summary({key: dict(row) for key, row in rows.items()})


def _mean(found: Mapping[str, Any]) -> str:
    return times(found["value"]) if found["rows"] else NONE


def _preparation(rows: Rows) -> str:
    """Seconds until ours are ready, and until compiled peers are."""
    ways = {
        name: [
            row["ways"][name]["prepare s"]
            for row in rows.values()
            if row["ways"].get(name, {}).get("measured") and row["ways"][name]["prepare s"] is not None
        ]
        for name in (OURS, DROP_IN, OVERHEAD, WHOLE_OVERHEAD)
    }
    said = [
        f"{name if name in WAYS.values() else f'`{name}`'} {median(seconds):.1f} s in the median, "
        f"{min(seconds):.1f} to {max(seconds):.1f} s"
        for name, seconds in ways.items()
        if seconds
    ]
    return f"**Preparation**, with what the compile caches held: {'; '.join(said)}."


# -- the part ------------------------------------------------------------------------------------------------------


def rendered(results: Results, beside: str, image: str) -> str:
    """All that stands between the markers.

    Args:
        results: of a file; without rows if nothing was measured.
        beside: link to all rows.
        image: link to the figure.
    """
    rows: Rows = results["rows"]
    if not rows:
        return "\n".join(wrapped(f"Not measured yet: `{RESULTS.relative_to(ROOT)}` holds no row.")) + "\n"
    first = {key: row for key, row in rows.items() if row["dtype"] == FIRST}
    further = {key: row for key, row in rows.items() if key not in first}
    intro = (
        f"{on_machines(rows)}; synthetic data. Medians of a step in µs; in brackets, how many times as fast the whole "
        f"step and the drop-in are; memory and losses of both, memory over eager's ([all rows, and how far each is "
        f"from its limit]({beside}))."
    )
    lines = [
        f"![Speed of a training step over eager, by model, batch and precision, of ours and of every peer]({image})",
        "",
        *wrapped(intro),
        "",
        *(rows_table(first, rows) if first else ()),
    ]
    if further:
        body = ["<details><summary>Other precisions</summary>", "", *rows_table(further, rows), "", "</details>"]
        lines += ["", *body] if first else body
    lines += ["", *wrapped(key_to_marks(rows)), "", *targets_table(rows), "", *sentences(results)]
    return "\n".join(lines) + "\n"


replaced = partial(readme.replaced, begin=BEGIN)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the committed results into the README, or others into another page."""
    write_part(__doc__, RESULTS, IMAGE, BEGIN, rendered, argv)


if __name__ == "__main__":
    main()
