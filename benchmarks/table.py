"""Write what the runner's stores say into README and docs, by one template.

    python -m benchmarks.table          # reads benchmarks/results/h200.jsonl.gz
    python -m benchmarks.table --check  # writes nothing; exit status 1 where a page says something else

A table lies between two equal marks: ``<!-- inference -->``, ``<!-- training -->``, or the README's short
``<!-- speed -->``. For each measure the best peer of a row is the fastest right one, graphs captured by hand included.
Ratios are of processes: they are bold where the interval (``nimble_core.ir.measurement.across``) lies beyond the 5% by
which two processes may differ.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean

from benchmarks import training_ways
from benchmarks import ways as inference_ways
from benchmarks.common import ROOT, filled, markdown, publish
from benchmarks.models import ROWS
from benchmarks.store import OURS, Record, over, read
from nimble_core.ir.measurement import Ratio

STORES = tuple(ROOT / "benchmarks" / "results" / f"{gpu}.jsonl.gz" for gpu in ("h200",))
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
NOTHING = "Not measured yet."
MEASURES = {"latency_us": "latency", "throughput_us": "throughput", "device_us": "device time"}
DTYPES = {"float32": "float32", "strict": "float32", "tf32": "TF32", "float16": "float16", "bfloat16": "bfloat16"}
NAMES = {
    "graph": "eager by hand",
    "fr-graph": "Inductor by hand",
    "compile-graph": "compiled by hand",
    "step-graph": "compiled step by hand",
    "ro": "reduce-overhead",
    "fr": "reduce-overhead with freezing",
    "ro-skip": "reduce-overhead without guards",
    "fr-skip": "reduce-overhead with freezing and without guards",
}


def best(records: Iterable[Record], measure: str) -> Record | None:
    """Return the fastest right peer, by this measure; device times of what runs partly in eager do not count."""
    peers = [
        one
        for one in records
        if one.way not in OURS and one.rel_err is not None and not one.wrong and not one.error
        if measure in one.medians
        if measure != "device_us" or one.whole
    ]
    return min(peers, key=lambda one: one.medians[measure], default=None)


def cell(found: Ratio) -> str:
    """Format a ratio with its interval, and no more digits than it supports.

    >>> cell(Ratio("ours", "peer", 1.3, 1.28, 1.31, 1.05)), cell(Ratio("ours", "peer", 1.3, 0.9, 1.4, 1.05))
    ('**1.30x** [1.28, 1.31]', '1.30x [0.90, 1.40], undecided')
    """
    if not math.isfinite(found.high) or not found.low:
        return "too few samples"
    said = f"[{found.low:.2f}, {found.high:.2f}]"
    if found.verdict in ("faster", "slower"):
        return f"**{found.value:.2f}x** {said}"
    return f"{found.value:.2f}x {said}" + ", undecided" * (not found.decided)


def rows_of(records: Iterable[Record], *, training: bool) -> dict[str, dict[str, Record]]:
    """Ways by row, alone in their processes, in the order of the suite; rows without ours are left out."""
    found: dict[str, dict[str, Record]] = {}
    for one in records:
        if one.training == training and not one.together:
            found.setdefault(one.row, {})[one.way] = one
    order = {name: index for index, name in enumerate(ROWS)}
    for row, ways in found.items():  # of one machine and its versions
        found[row] = {way: one for way, one in ways.items() if "ours" in ways and one.place == ways["ours"].place}
    kept = {row: ways for row, ways in found.items() if "ours" in ways and best(ways.values(), "latency_us")}
    return dict(sorted(kept.items(), key=lambda item: order.get(item[0], len(order))))


def complete(ways: Mapping[str, Record], *, training: bool) -> bool:
    """Whether a row has what it takes to speak of the best peer: kernels of a compiler, captured by hand."""
    anchor = ways.get((training_ways if training else inference_ways).ANCHOR)
    return anchor is not None and not anchor.error


def table(records: Sequence[Record], *, training: bool) -> str:
    """Write one kind of rows as Markdown: a sentence, a table, and notes."""
    measured = rows_of(records, training=training)
    rows = {name: ways for name, ways in measured.items() if complete(ways, training=training)}
    if not rows:
        return NOTHING
    means: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    shown = []
    for ways in rows.values():
        ours, peers = ways["ours"], {measure: best(ways.values(), measure) for measure in MEASURES}
        speeds = {measure: over(ours, peer).get(measure) for measure, peer in peers.items()}
        for measure, found in speeds.items():
            means[measure] += [found.value] if found else []
        eager = ways["eager"].medians.get("latency_us") if "eager" in ways else None
        about = f"{ours.title}, {DTYPES[ours.dtype]}" + f", batch {ours.batch}" * (ours.batch != 1)
        cells = [about, ours.date[:10], f"{eager:.0f}" if eager else "–", _peer_cell(peers)]
        cells += [
            _times(ours.medians) + ", WRONG" * ours.wrong,
            *(cell(one) if one else "–" for one in speeds.values()),
        ]
        shown.append(cells)
    said = ", ".join(
        f"{MEASURES[name]} {geometric_mean(values):.2f}x ({min(values):.2f}x to {max(values):.2f}x)"
        for name, values in means.items()
        if len(values) > 1
    )
    text = f"{_where(rows)}; µs, {'steps' if training else 'batch 1 unless said'}: latency / throughput / device time."
    text += f" Peers: {_peers(rows)}."
    if said:
        text += " Over the best peer of each row, geometric means of all rows, undecided ones included, and the rows'"
        text += f" extremes: {said}."
    if missing := [ways["ours"].title for name, ways in measured.items() if name not in rows]:
        text += f" Left out, since the compiled peer has not been measured yet: {', '.join(missing)}."
    heads = ("model", "ours measured", "eager", "best peer", "ours", *MEASURES.values())
    return f"{text}\n\n{markdown(heads, shown)}"


def tables(stores: Iterable[Sequence[Record]], *, training: bool) -> str:
    """Write the tables of several GPUs, one after the other; those without a row are left out."""
    found = dict.fromkeys(table(records, training=training) for records in stores)
    return "\n\n".join([text for text in found if text != NOTHING] or [NOTHING])


def speed(stores: Iterable[Sequence[Record]]) -> str:
    """Write the first store's inference rows in short: geometric means of ours over others, best and worst."""
    for records in stores:
        rows = {
            name: ways
            for name, ways in rows_of(records, training=False).items()
            if complete(ways, training=False) and not ways["ours"].wrong
        }
        if rows:
            break
    else:
        return NOTHING
    peers: dict[str, Callable[[Mapping[str, Record], str], Record | None]] = {
        "eager PyTorch": lambda ways, _: ways.get("eager"),
        '`torch.compile(mode="reduce-overhead")`': lambda ways, _: ways.get("ro"),
        "the fastest peer": lambda ways, measure: best(ways.values(), measure),
    }
    shown = []
    for name, peer in peers.items():
        values: list[dict[str, float]] = []
        for measure in MEASURES:
            found = {row: over(ways["ours"], peer(ways, measure)) for row, ways in rows.items()}
            values.append({row: one[measure].value for row, one in found.items() if measure in one})
        cells = [f"{geometric_mean(one.values()):.2f}x" if one else "–" for one in values]
        shown.append([f"{name}, mean", str(max(map(len, values))), *cells])
    for what, choose in (("best", max), ("worst", min)):
        cells = [f"{choose(one.values()):.2f}x" if one else "–" for one in values]
        shown.append([f"{name}, {what}", "any row", *cells])
    dates = sorted(ways["ours"].date[:10] for ways in rows.values())
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    about = f"{_where(rows).partition(' (')[0]}, each row by the engine of its day, {days}; hosts differ:"
    return f"{about}\n\n{markdown(('ours over', 'models', *MEASURES.values()), shown)}"


def _times(medians: Mapping[str, float]) -> str:
    return " / ".join(f"{medians[name]:.0f}" if name in medians else "–" for name in MEASURES)


def _peer_cell(peers: Mapping[str, Record | None]) -> str:
    """Format the times of the best peers, and their names: one name where one is best at all."""
    times = " / ".join(f"{one.medians[name]:.0f}" if one else "–" for name, one in peers.items())
    names = dict.fromkeys(NAMES.get(one.way, one.way) for one in peers.values() if one)
    return f"{times} ({'; '.join(names)})"


def _peers(rows: Mapping[str, Mapping[str, Record]]) -> str:
    """Who was measured on how many rows, and who failed on which."""
    found: dict[str, list[Record]] = {}
    for ways in rows.values():
        for one in ways.values():
            if one.way not in OURS:
                found.setdefault(NAMES.get(one.way, one.way), []).append(one)
    rare = [f"{name} ({len(records)})" for name, records in found.items() if len(records) < len(rows)]
    said = ", ".join(found) + f"; of {len(rows)} rows not all: {', '.join(rare)}" * bool(rare)
    for what in ("error", "wrong"):
        failed = [f"{name} on {one.title}" for name, records in found.items() for one in records if getattr(one, what)]
        said += f"; {'failed' if what == 'error' else 'wrong'}: {', '.join(failed)}" * bool(failed)
    return said


def _where(rows: Mapping[str, Mapping[str, Record]]) -> str:
    """Machine and versions of the latest record of ours."""
    one = max((ways["ours"] for ways in rows.values()), key=lambda one: one.date)
    return f"{one.where}, transformers {one.packages.get('transformers')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the pages, or say which are not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    stores = [read(path) for path in STORES]
    parts = {
        "inference": tables(stores, training=False),
        "training": tables(stores, training=True),
        "speed": speed(stores),
    }
    return publish({path: filled(path.read_text(), parts) for path in PAGES}, "benchmarks.table", check=given.check)


if __name__ == "__main__":
    sys.exit(main())
