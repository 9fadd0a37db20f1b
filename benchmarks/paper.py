"""What the claims of the paper (Nimble, NeurIPS 2020) come to here: writes the tables of docs/paper.md.

    make paper                          # on a CUDA GPU: measures what is missing, then writes
    python -m benchmarks.paper          # writes the tables of benchmarks/results/paper-h200.jsonl.gz
    python -m benchmarks.paper --check  # writes nothing; exit status 1 where the page says something else

``ways.STEPS`` are its techniques, one more at a time; what was published is of its text, of its authors' answer to
reviewers and of its repository, on a V100. Verdicts follow from figures by the rule of ``verdict``, never by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, mean
from typing import NamedTuple

from scipy.stats import spearmanr

from benchmarks import store
from benchmarks.common import ROOT, filled, markdown, publish
from benchmarks.paper_rows import BASELINES, LARGE, PREPARE_MEAN_S, PREPARE_MOST_S, PUBLISHED, ROWS, STREAMS_ALONE
from benchmarks.store import Record, read
from benchmarks.table import NOTHING
from nimble_core.ir.measurement import ACROSS, Ratio, quantile

STORE = ROOT / "benchmarks" / "results" / "paper-h200.jsonl.gz"
PAGE = ROOT / "docs" / "paper.md"
INFERENCE = ("eager", "torchscript", "compile", "graph", "one-stream", "fused", "selected", "several")
DROP_IN = ("drop-in-one-stream", "drop-in-several")
STEP = ("eager", "compile", "graph", "one-stream", "streams", "selected", "several", *DROP_IN)
NAMES = {
    "torchscript": "TorchScript", "compile": "torch.compile", "graph": "graph by hand", "one-stream": "replay",
    "fused": "+ fusion", "selected": "+ selection", "several": "+ streams", "streams": "streams alone",
    "drop-in-one-stream": "drop-in, replay", "drop-in-several": "drop-in, all",
}  # fmt: skip
HOSTS_US = (2, 5, 10, 20)
WIDE = 1.2  # an interval whose ends are further apart is shown
PREPARED = ("record", "hazards", "schedule", "capture")  # steps that the paper's preparation has
Ways = Mapping[str, Record]
Rows = Mapping[str, Ways]


def rows_of(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    """Ways by row, in the table's order, of the machine that was measured last."""
    alone = [one for one in records if not one.together and one.row in ROWS]
    place = max(alone, key=lambda one: one.date).place if alone else ()
    found: dict[str, dict[str, Record]] = {name: {} for name in ROWS}
    for one in alone:
        if one.place == place:
            found[one.row][one.way] = one
    return {name: _fairly_bound(ways) for name, ways in found.items() if ways}


def _fairly_bound(ways: Ways) -> dict[str, Record]:
    """Allow every way twice what two runs of eager differ by: batch norms on few pixels amplify rounding."""
    own = 2 * (ways["eager"].rel_err or 0.0) if "eager" in ways else 0.0
    return {name: replace(one, bound=max(one.bound or 0.0, own)) for name, one in ways.items()}


def counts(one: Record | None) -> bool:
    """Whether a way was measured, and computes what eager does."""
    return one is not None and not one.error and not one.wrong and bool(one.latency_us)


def over(ways: Ways, new: str, old: str = "eager", measure: str = "latency_us") -> Ratio | None:
    """Speed of one way over another; None where either does not count.

    Where it is uncertain over eager, since the host changes its speed while it runs, the ends are those of most calls:
    from the fastest tenth to the slowest.
    """
    found = store.over(ways.get(new), ways.get(old)).get(measure)
    if found is None or old != "eager" or found.high <= WIDE * found.low:
        return found
    fast, slow = ({way: quantile(getattr(ways[way], measure), at) for way in (new, old)} for at in (0.1, 0.9))
    return replace(found, low=fast[old] / slow[new], high=slow[old] / fast[new])


def speed(ways: Ways, new: str, old: str = "eager", measure: str = "latency_us", *, ends: bool = False) -> str:
    """Format a speed; as an interval where it is not decided or wide, or its ``ends`` are asked for."""
    if (found := over(ways, new, old, measure)) is None:
        one = ways.get(new)
        return "–" if one is None else "wrong" if one.wrong else "failed" if one.error else "–"
    ends = ends or not found.decided or found.high > WIDE * found.low
    return f"{found.value:.2f}x" if not ends else f"{found.low:.2f} to {found.high:.2f}x"


def verdict(here: float, published: float, least: float = ACROSS) -> str:
    """Return the one rule for what should be large: as much as published, less but above ``least``, or neither."""
    return "holds" if here >= published else "holds less" if here > least else "does not hold"


def judged(gain: Ratio, published: float, least: float = ACROSS) -> str:
    """Return that rule's verdict on a measured speed: undecided where the ends of its interval disagree.

    Over eager they are those of a host at its fastest and slowest: a gain may be as large as published on one of them.
    """
    said = {verdict(one, published, least) for one in (gain.low, gain.high)}
    if len(said) == 1:
        return said.pop()
    return "depends on the host" if gain.baseline == "eager" and "does not hold" not in said else "undecided"


def median_of(ways: Ways, way: str, measure: str) -> float | None:
    """Median in µs; None where it was not measured."""
    return ways[way].medians.get(measure) if counts(ways.get(way)) else None


def idle(ways: Ways) -> float | None:
    """Share of eager's latency in which the GPU idles: what eager's kernels do not take when replayed on one stream."""
    device, eager = median_of(ways, "one-stream", "device_us"), median_of(ways, "eager", "latency_us")
    return max(0.0, 1 - device / eager) if device and eager else None


def host(ways: Ways) -> tuple[float, int] | None:
    """Return eager's host time, µs a call, and its calls."""
    spent, calls = median_of(ways, "eager", "host_us"), ways["eager"].work.get("calls") if "eager" in ways else None
    return (spent / calls, calls) if spent and calls else None


def ratio_at(ways: Ways, way: str, us: float) -> float | None:
    """Speed over eager of a host that takes so many µs a call: eager waits for the host or for the device."""
    taken, device, calls = median_of(ways, way, "latency_us"), median_of(ways, "one-stream", "device_us"), host(ways)
    return max(us * calls[1], device) / taken if taken and device and calls else None


def _shown(value: float | None, form: str = ".0f", unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    found = list(rows)
    return markdown(heads, found) if found else NOTHING


def _of(rows: Rows, *, training: bool, way: str = "eager") -> Iterable[tuple[str, Ways]]:
    """Rows of one kind in which a way counts, with their titles."""
    for name, ways in rows.items():
        row = ROWS[name]
        if row.training == training and counts(ways.get(way)):
            yield f"{row.title}, batch {row.batch}" if training else row.title, ways


def ladder(rows: Rows, *, training: bool) -> str:
    """Speed over eager of each step, and what was published."""
    steps = STEP if training else INFERENCE
    found = (
        [
            title, _shown(median_of(ways, "eager", "latency_us")), *(speed(ways, way) for way in steps[1:]),
            _shown(PUBLISHED.get(ways["eager"].row), ".2f", "x"),
        ]
        for title, ways in _of(rows, training=training)
    )  # fmt: skip
    return _table(["model", "eager, µs", *(NAMES[way] for way in steps[1:]), "published (V100)"], found)


def streams(rows: Rows) -> str:
    """Write what several streams gain over one, both with eager's kernels, beside concurrency, MACs and waits."""
    heads = ["model", "streams / one", "degree of concurrency", "MACs, millions", "calls", "streams"]
    heads += ["waits on every hazard", "the fewest", "planned", "in the graph"]
    found = []
    for title, ways in _of(rows, training=False, way="streams"):
        held = ways["streams"].counts
        macs = f"{ways['eager'].work.get('flops', 0) / 2e6:.0f}" if counts(ways.get("eager")) else "–"
        fewest = held["edges"] - held["matched"]
        numbers = [held["calls"], held["streams"], held["full"], fewest, held["planned"], held.get("emitted")]
        gain = speed(ways, "streams", "one-stream", "throughput_us") if held["streams"] > 1 else "the same plan"
        found.append([title, gain, f"{held['width']:.0f}", macs, *map(_shown, numbers)])
    return _table(heads, found)


def prepared_s(one: Record) -> float:
    """Seconds of the steps that the paper's preparation has: without loading libraries, measuring and checking."""
    return sum(s for step, s in one.counts.items() if step.endswith(" s") and step.startswith(PREPARED))


def preparation(rows: Rows) -> str:
    """Seconds to prepare, and after how many calls they are won back."""
    heads = ["model", "record, schedule, capture, s", "all with eager's kernels, s", "all with chosen ones, s"]
    found = []
    for title, ways in _of(rows, training=False, way="streams"):
        saved = [median_of(ways, way, "latency_us") for way in ("eager", "several")]
        whole = ways["several"].prepare_s if counts(ways.get("several")) else None
        less_us = saved[0] - saved[1] if saved[0] and saved[1] else 0.0
        won = whole / less_us * 1e6 if whole and less_us > 0 else None
        own = ways["streams"]
        cells = [f"{prepared_s(own):.2f}", _shown(own.prepare_s, ".2f"), _shown(whole, ".2f"), _shown(won)]
        found.append([title, *cells])
    return _table([*heads, "calls until won back"], found)


def hosts(rows: Rows) -> str:
    """Idle share of eager, host time a call, and the speed over eager that hosts of other speeds would show."""
    heads = ["model", "host, µs a call", "calls", "host time, µs", "device time, µs", "GPU idle in eager", "measured"]
    found = []
    for training in (False, True):
        for title, ways in _of(rows, training=training):
            each = host(ways)
            cells = [f"{each[0]:.1f}", f"{each[1]}", f"{each[0] * each[1]:.0f}"] if each else ["–"] * 3
            cells += [_shown(median_of(ways, "one-stream", "device_us")), _shown(idle(ways), ".0%")]
            ratios = [_shown(ratio_at(ways, "several", us), ".2f", "x") for us in HOSTS_US]
            found.append([title, *cells, speed(ways, "several"), *ratios])
    return _table([*heads, *(f"at {us} µs" for us in HOSTS_US)], found)


def _reason(ways: Ways, way: str, here: float, published: float) -> str:
    """Say from figures why a speed is what it is."""
    share, each = idle(ways), host(ways)
    if share is None or each is None:
        return "not known: no device or host time"
    said = f"the GPU idles for {share:.0%} of eager's time, whose host takes {each[0]:.1f} µs a call"
    if here < published:
        taken = median_of(ways, way, "latency_us") or 0.0
        said += f"; what was published shows from {published * taken / each[1]:.1f} µs a call on"
    return said


class Gain(NamedTuple):
    """What streams alone gain a model (surely, where undecided), how many calls can run at once, and MACs."""

    speed: float
    width: float
    macs: float
    title: str


def gains(rows: Rows) -> list[Gain]:
    """Return what streams alone gain, by model: nothing where the plan is one of one stream."""
    found = []
    for title, ways in _of(rows, training=False, way="streams"):
        if counts(ways.get("eager")) and (gain := over(ways, "streams", "one-stream", "throughput_us")):
            held, macs = ways["streams"].counts, ways["eager"].work.get("flops", 0) / 2
            sure = 1.0 if held["streams"] == 1 else gain.value if gain.decided else gain.low
            found.append(Gain(sure, held["width"], macs, title))
    return found


def claims(rows: Rows) -> str:
    """Judge every claim: published, here, a verdict by rule, and why."""
    found: list[list[str]] = []
    for name, published in PUBLISHED.items():
        way, ways = "drop-in-several" if ROWS[name].training else "several", rows.get(name, {})
        if (gain := over(ways, way)) is not None:
            title = ROWS[name].title + f", training, batch {ROWS[name].batch}" * ROWS[name].training
            said, why = judged(gain, published), _reason(ways, way, gain.low, published)
            cells = [f"{published:.2f}x", speed(ways, way, ends=said != verdict(gain.value, published)), said, why]
            found.append([f"{title}: faster than eager", *cells])
    gpus = {str(one.environment.get("device_name")) for ways in rows.values() for one in ways.values()}
    heads = ["claim", "published (V100)", f"here ({', '.join(sorted(gpus))})", "verdict", "why"]
    return _table(heads, [*found, *_others(rows)])


def _others(rows: Rows) -> Iterable[list[str]]:
    """Claims about more than one row."""
    if found := gains(rows):
        most = max(one.speed for one in found)
        why = f"{sum(one.speed > ACROSS for one in found)} of {len(found)} models gain"
        yield ["streams alone gain", f"{STREAMS_ALONE}x at most", f"{most:.2f}x at most",
               verdict(most, STREAMS_ALONE), why]  # fmt: skip
    for at, what, sign in ((1, "more with concurrency", 1), (2, "less with MACs", -1)):
        if min(len({one[k] for one in found}) for k in (0, at)) > 1:  # what is all alike has no ranks
            rank = float(spearmanr([one.speed for one in found], [one[at] for one in found]).statistic)
            said, held = f"rank correlation {rank:.2f}", verdict(sign * rank, 0.5, 0.2)
            yield [f"streams gain {what}", "said, no figure", said, held, f"{len(found)} models"]
    if spent := [prepared_s(ways["streams"]) for _, ways in _of(rows, training=False, way="streams")]:
        for what, here, published in (("mean", mean(spent), PREPARE_MEAN_S), ("most", max(spent), PREPARE_MOST_S)):
            why = "record, schedule and capture; checks and measured choice come on top"
            yield [f"preparation, {what}", f"{published} s", f"{here:.2f} s", verdict(published / here, 1, 0.5), why]
    if plans := [ways["streams"].counts for _, ways in _of(rows, training=False, way="streams")]:
        more = sum(max(0, max(one["planned"], one.get("emitted", 0)) - one["edges"] + one["matched"]) for one in plans)
        saved = sum(one["full"] for one in plans) / max(1, sum(one["planned"] for one in plans))
        here = f"{more:.0f} more than the fewest; waits on every hazard: {saved:.2f} times as many"
        yield ["the fewest synchronisations", "proved", here, "holds" if more == 0 else "holds less",
               f"counted on the plans, and on {sum('emitted' in one for one in plans)} captured graphs"]  # fmt: skip
    small = [one.value for name, ways in rows.items() if name in PUBLISHED and (one := over(ways, "drop-in-several"))]
    for name in LARGE:
        if small and (gain := over(rows.get(name, {}), "drop-in-several")):
            few = name != "train-cyclegan"
            least = geometric_mean(small)
            less = "holds" if gain.high <= least else "does not hold" if gain.low > least else "undecided"
            said = less if few else judged(gain, ACROSS)
            what = "gains less than CIFAR-10 training" if few else "gains"
            here = speed(rows[name], "drop-in-several", ends=said == "undecided")
            yield [f"{ROWS[name].title}, batch {ROWS[name].batch}, {what}", "drawn, no figure", here, said,
                   _reason(rows[name], "", gain.value, 0)]  # fmt: skip
    if peers := [one.value for _, ways in _of(rows, training=False) if (one := over(ways, "several", "compile"))]:
        yield ["faster than a compiler", "TVM: 1.70x at most", f"torch.compile: {geometric_mean(peers):.2f}x, mean",
               verdict(geometric_mean(peers), ACROSS), f"{min(peers):.2f}x to {max(peers):.2f}x"]  # fmt: skip


def _where(rows: Rows) -> str:
    latest = max((one for ways in rows.values() for one in ways.values()), key=lambda one: one.date, default=None)
    return NOTHING if latest is None else f"{latest.where}; {latest.date[:10]}."


def parts(rows: Rows) -> dict[str, str]:
    """All tables of the page, by mark."""
    listed = _table(["system", "published (V100)", "here"], ([name, *said] for name, said in BASELINES.items()))
    ladders = {"ladder": ladder(rows, training=False), "training": ladder(rows, training=True)}
    others = {"streams": streams(rows), "preparation": preparation(rows), "hosts": hosts(rows), "claims": claims(rows)}
    return {"machine": _where(rows), "baselines": listed, **ladders, **others}


def main(arguments: Sequence[str] | None = None, page: Path = PAGE) -> int:
    """Fill the page, or say that it is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--store", type=Path, default=STORE)
    given = parser.parse_args(arguments)
    text = filled(page.read_text(encoding="utf-8"), parts(rows_of(read(given.store))))
    return publish({page: text}, "benchmarks.paper", check=given.check)


if __name__ == "__main__":
    sys.exit(main())
