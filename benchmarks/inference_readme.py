"""Writes the inference suite's results into the README: ``python -m benchmarks.inference_readme [RESULTS [PAGE]]``.

What stands between ``<!-- inference results -->`` and ``<!-- end -->`` is replaced: tables and sentences, all from the
results, so that no figure there is typed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean, median
from typing import Any

from benchmarks import readme
from benchmarks.inference import AUTOTUNE, BEST, OURS, OVERHEAD, best_peer, equal, selected, speed, summary
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
from benchmarks.rows import Results
from benchmarks.zoo import CASES, DTYPES, SUITE
from nimble_viz.analysis.limit import EXPLAINED_ABOVE

RESULTS = ROOT / "benchmarks" / "results" / "inference-h200.json"
IMAGE = ROOT / "docs" / "images" / "inference.svg"
BEGIN = "<!-- inference results -->\n"

GROUPS = tuple(reversed(CASES))
"""Dtypes of the main table, which holds batch 1; all else is a line of the further one."""

OVERS = ("eager", OVERHEAD, BEST)
HEADS = ("ours", "eager", "reduce-overhead", "best peer")


def marks(rows: Rows) -> dict[str, str]:
    """The mark of each way that is the best peer of a row; the one that is it most often has none."""
    return readme.marks(best_peer(row) for row in rows.values())


def cells(row: Mapping[str, Any], marked: Mapping[str, str]) -> list[str]:
    """Ours, and each way with how many times faster ours is; no speed if ours was not shown to be right."""

    def cell(over: str) -> str:
        name = best_peer(row) if over == BEST else over
        if name not in row["times"]:
            return NONE
        took, mark = f"{row['times'][name]['median us']:.0f}", marked[name] if over == BEST else ""
        value = speed(row, over)
        if not equal(row) or value is None:
            return took + mark
        stable = row["speed"]["copies"][name]["stable"]
        return f"{took}{mark} ({times(value)}{'' if stable else UNSTABLE})"

    ours = f"{row['times'][OURS]['median us']:.0f}"
    return [f"**{ours}**" if equal(row) else f"~~{ours}~~", *(cell(over) for over in OVERS)]


def means(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Geometric means of the rows that are right, in the columns of :func:`cells`."""
    right = [row for row in rows if equal(row)]
    found = ([value for row in right if (value := speed(row, over)) is not None] for over in OVERS)
    return ["", *(f"**{times(geometric_mean(values))}**" if values else NONE for values in found)]


def _over(rows: Iterable[Mapping[str, Any]]) -> float:
    """Mean speed over reduce-overhead, to sort by; 0 where there is none."""
    values = [value for row in rows if equal(row) and (value := speed(row, OVERHEAD)) is not None]
    return geometric_mean(values) if values else 0.0


def main_table(rows: Rows) -> list[str]:
    """Batch 1: one line a model, one group of columns a dtype, from where ours gains most over reduce-overhead."""
    models: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows.values():
        if row["batch"] == 1 and row["dtype"] in GROUPS:
            models.setdefault(row["model"], {})[row["dtype"]] = row
    groups = [dtype for dtype in GROUPS if any(dtype in one for one in models.values())]
    marked = marks(rows)
    head = ["model", *(f"{dtype}: {name}" if name == OURS else name for dtype in groups for name in HEADS)]
    body = [
        [model, *(cell for dtype in groups for cell in (cells(one[dtype], marked) if dtype in one else [NONE] * 4))]
        for model, one in sorted(models.items(), key=lambda item: (-_over(item[1].values()), item[0]))
    ]
    last = [
        "**geometric mean**",
        *(cell for dtype in groups for cell in means(one[dtype] for one in models.values() if dtype in one)),
    ]
    return as_table([head, *body, last])


def further_table(rows: Rows) -> list[str]:
    """The rows that the main table does not hold, one line each; nothing if there are none."""
    further = [row for row in rows.values() if row["batch"] != 1 or row["dtype"] not in GROUPS]
    further.sort(key=lambda row: (row["batch"], DTYPES.index(row["dtype"]), -_over([row]), row["model"]))
    marked = marks(rows)
    body = [[f"{row['model']}, {row['dtype']}, batch {row['batch']}", *cells(row, marked)] for row in further]
    return as_table([["model, dtype, batch", *HEADS], *body]) if body else []


def key_to_marks(rows: Rows) -> str:
    """What the marks in the tables mean."""
    shaky = any(not one["stable"] for row in rows.values() for one in row["speed"]["copies"].values())
    unstable = f"; {UNSTABLE} unstable: samples spread or drift by more than 10%" if shaky else ""
    wrong = "; struck out: ours was not shown to be right" if not all(equal(row) for row in rows.values()) else ""
    return f"{named_marks(marks(rows))}{unstable}{wrong}."


def sentences(rows: Rows) -> list[str]:
    """Means, the worst row, what was missed, left out or not measured: a list in Markdown."""
    found = summary({key: dict(row) for key, row in rows.items()})
    said = []
    for batch, over in found["speed over"].items():
        named = {OVERHEAD: f"`{OVERHEAD}`", AUTOTUNE: f"`{AUTOTUNE}`", BEST: "the best peer", "eager": "eager"}
        named = {name: text for name, text in named.items() if name in over}
        count = over["eager"]["copies"]["rows"]
        values = [
            f"{times(mean['copies']['value'])} over {text} ({times(mean['static']['value'])})"
            + (f" on {mean['copies']['rows']}" if mean["copies"]["rows"] < count else "")
            for name, text in named.items()
            if (mean := over[name])["copies"]["rows"]
        ]
        said.append(
            f"**Geometric means**, {batch}, {count} row{'s' * (count > 1)} (with static outputs): {', '.join(values)}."
        )
    least = min(
        ((value, key) for key, row in rows.items() if equal(row) and (value := speed(row, BEST)) is not None),
        default=None,
    )
    if least:
        said.append(f"**Worst row**: {times(least[0])} of the best peer's speed, on {least[1]}.")
    missed = [_missed(target, found["distance to limit"]) for target in found["targets"]]
    if any(missed):
        said.append(f"**What we were after and missed**: {'; '.join(one for one in missed if one)}.")
    said.append(_preparation(rows))
    if far := found["distance to limit"]["explained"]:
        said.append(
            f"**Far from the limit**: {len(far)} of {found['distance to limit']['known']} rows are above "
            f"{EXPLAINED_ABOVE:g} times theirs; why is said for each beside all rows."
        )
    if left := found["peers left out"]:
        said.append(f"**Peers left out**, with the reason beside all rows: {'; '.join(left)}.")
    peers = {name for row in rows.values() for name in row["peers"]}
    if missing := not_measured(rows, selected(tuple(SUITE)), peers):
        said.append(f"**Not measured**: {'; '.join(missing)}.")
    return as_list(said)


def _preparation(rows: Rows) -> str:
    """Seconds until ours is ready, and until the usual best peer is, on the rows that have it."""
    usual = next(iter(marks(rows)))
    both = [row for row in rows.values() if row["peers"].get(usual, {}).get("measured")] or list(rows.values())
    ways = {
        "ours": [row["preparation"][OURS]["s"] for row in both],
        f"`{usual}`": [row["peers"][usual]["prepare s"] for row in both if usual in row["peers"]],
    }
    said = [
        f"{name} {median(seconds):.1f} s in the median, {min(seconds):.1f} to {max(seconds):.1f} s"
        for name, seconds in ways.items()
        if seconds
    ]
    return f"**Preparation**, with what the compile caches held: {'; '.join(said)}."


def _missed(target: Mapping[str, Any], limit: Mapping[str, Any]) -> str:
    """A target that was not reached, and what was; empty for others."""
    ways = {way: target[way] for way in ("all", "copies", "static") if way in target}
    if all(one["met"] is not False for one in ways.values()):
        return ""
    values = [f"{one['value']:.4g}{' with static outputs' * (way == 'static')}" for way, one in ways.items()]
    if target["target"].startswith("distance") and limit["median, back to back"]:
        values.append(f"{limit['median, back to back']:.4g} by the GPU's clock and replays in a row")
    where = next((f" on {one['where']}" for one in ways.values() if one.get("where")), "")
    further = f" ({', '.join(values[1:])})" if values[1:] else ""
    return f"{target['target']}: {values[0]}{further}{where}"


def rendered(rows: Rows, beside: str, image: str) -> str:
    """All that stands between the markers.

    Args:
        rows: of a results file.
        beside: link to all rows.
        image: link to the figure.

    Raises:
        SystemExit: there are no rows.
    """
    if not rows:
        raise SystemExit("the results hold no row")
    intro = (
        f"{on_machines(rows)}; batch 1, float32 with TF32 in convolutions only. Medians in µs, outputs copied out; "
        f"in brackets, how many times as fast ours is ([all rows, and how far each is from its limit]({beside}))."
    )
    further = further_table(rows)
    if further:
        further = ["", "<details><summary>Other dtypes and batches</summary>", "", *further, "", "</details>"]
    lines = [
        f"![Speed over torch.compile in reduce-overhead mode and over the best peer, by model and dtype]({image})",
        "",
        *wrapped(intro),
        "",
        *main_table(rows),
        *further,
        "",
        *wrapped(key_to_marks(rows)),
        "",
        *sentences(rows),
    ]
    return "\n".join(lines) + "\n"


replaced = partial(readme.replaced, begin=BEGIN)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the committed results into the README, or others into another page."""

    def text(results: Results, beside: str, image: str) -> str:
        return rendered(results["rows"], beside, image)

    write_part(__doc__, RESULTS, IMAGE, BEGIN, text, argv)


if __name__ == "__main__":
    main()
