"""How often verdicts are wrong: simulated noise, sampled as ``compare`` does until something is said.

    python -m benchmarks.verdicts --out benchmarks/results/verdicts.json   # a minute; the table into docs/verdicts.md

Two ways whose speeds differ by a known factor are sampled from the same noise; whatever is said that contradicts the
factor is a fault. Beside it the same with plain 95% intervals of the mean, looked at every 32 rounds. Exit status 1
where more than five verdicts in a thousand are wrong.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy.signal import lfilter

from benchmarks.common import ROOT, filled, markdown, options, publish
from nimble_core.algorithms.median_interval import ERROR, FEWEST, FIRST_LOOK, median_interval
from nimble_core.ir.measurement import Ratio, Verdict

Noise = Callable[[np.random.Generator, int], Any]
"""Logarithms of times: of so many calls, one after the other."""

PAGE = ROOT / "docs" / "verdicts.md"
LONGEST = 2048


def white(spread: float, draw: np.random.Generator, count: int) -> Any:
    """Every call varies on its own."""
    return draw.normal(0, spread, count)


def autocorrelated(by: float, draw: np.random.Generator, count: int) -> Any:
    """Draw times of which each is close to the one before it."""
    steps = draw.normal(0, 0.05 * math.sqrt(1 - by * by), count)
    steps[0] = draw.normal(0, 0.05)
    return lfilter([1], [1, -by], steps)


def bimodal(share: float, draw: np.random.Generator, count: int) -> Any:
    """Draw times of which some are twice as long, whatever the one before them was."""
    return math.log(2) * (draw.random(count) < share) + draw.normal(0, 0.01, count)


def in_phases(calls: float, draw: np.random.Generator, count: int) -> Any:
    """So many calls in a row, on average, take 20% longer; then as many do not."""
    phase = (np.cumsum(draw.random(count) < 1 / calls) + draw.integers(2)) % 2
    return 0.2 * phase + draw.normal(0, 0.01, count)


def heavy_tailed(draw: np.random.Generator, count: int) -> Any:
    """Few calls take very long."""
    return 0.03 * np.abs(draw.standard_cauchy(count)).clip(0, 100)


def drifting(by: float, draw: np.random.Generator, count: int) -> Any:
    """Slow the machine down, for both ways alike."""
    return np.linspace(0, by, count) + draw.normal(0, 0.03, count)


NOISES: dict[str, Noise] = {
    **{f"white, {by:.0%}": partial(white, by) for by in (0.01, 0.05, 0.3)},
    "heavy-tailed": heavy_tailed,
    "drifting by 50%": partial(drifting, 0.5),
    **{f"bimodal, {by:.0%} of calls": partial(bimodal, by) for by in (0.1, 0.5)},
    **{f"in phases of {by} calls": partial(in_phases, by) for by in (2, 5)},
    **{f"autocorrelated, {by}": partial(autocorrelated, by) for by in (0.5, 0.8, 0.9, 0.95)},
}
SLOW = ("white, 5%", "bimodal, 50% of calls", "in phases of 2 calls", "autocorrelated, 0.8", "autocorrelated, 0.9")
"""For models so slow that few rounds fit in the time."""


def looks() -> Iterator[int]:
    """After how many rounds ``compare`` looks."""
    count = FIRST_LOOK
    while count <= LONGEST:
        yield count
        count *= 2


def said(logs: Any) -> Verdict:
    """Decide on these logarithms of paired ratios."""
    return _rule(*median_interval(logs))


def plain(logs: Any) -> Verdict:
    """Decide by a 95% interval of the mean."""
    middle, half = logs.mean(), 1.96 * logs.std(ddof=1) / math.sqrt(len(logs))
    return _rule(middle - half, middle, middle + half)


def _rule(low: float, middle: float, high: float) -> Verdict:
    return Ratio("new", "old", *map(math.exp, (middle, low, high))).verdict


def verdict(
    noise: Noise, draw: np.random.Generator, true: float, counts: Iterable[int], judge: Callable[[Any], Verdict] = said
) -> tuple[Verdict, int]:
    """Return the first verdict on two ways whose speeds differ by ``true``, and after how many rounds it came."""
    logs = noise(draw, LONGEST) + math.log(true) - noise(draw, LONGEST)
    found: tuple[Verdict, int] = "undecided", 0
    for count in counts:
        found = judge(logs[:count]), count
        if found[0] != "undecided":
            break
    return found


def faults(
    noise: Noise, true: float, trials: int, counts: Callable[[], Iterable[int]] = looks,
    judge: Callable[[Any], Verdict] = said,
) -> dict[str, Any]:  # fmt: skip
    """Share of wrong verdicts and of none, and the median of rounds."""
    draw = np.random.default_rng(7)
    found, rounds = zip(*(verdict(noise, draw, true, counts(), judge) for _ in range(trials)), strict=True)
    right, undecided = found.count("no difference" if true == 1 else "faster"), found.count("undecided")
    shares = {"wrong": (trials - right - undecided) / trials, "undecided": undecided / trials}
    return {**shares, "rounds": float(np.median(rounds))}


def measured(trials: int) -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    for true in (1.0, 1.1):
        for name, noise in NOISES.items():
            found = faults(noise, true, trials)
            often = faults(noise, true, trials // 4, lambda: range(32, 641, 32), plain)
            rows.append({"noise": name, "true": true, **found, "wrong by plain intervals": often["wrong"]})
    for count in (FEWEST, 24):
        for name in SLOW:
            found = faults(NOISES[name], 1.0, trials, partial(iter, (count,)))
            rows.append({"noise": f"{name}, {count} rounds", "true": 1.0, **found})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Write a row for each noise, as Markdown."""
    heads = ("noise of both ways", "true ratio", "wrong", "undecided", "rounds, median", "wrong by plain intervals")
    found = []
    for row in rows:
        beside = f"{row['wrong by plain intervals']:.0%}" if "wrong by plain intervals" in row else ""
        shares = [f"{row['wrong']:.2%}", f"{row['undecided']:.0%}", f"{row['rounds']:.0f}"]
        found.append([row["noise"], f"{row['true']:.2f}", *shares, beside])
    return markdown(heads, found)


def main() -> int:
    """Simulate, print and keep."""
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=4000, help="of each row")
    given = parser.parse_args()
    rows = measured(given.trials)
    print(table(rows))
    if given.out:
        given.out.write_text(json.dumps({"trials": given.trials, "rows": rows}, indent=1) + "\n")
        publish({PAGE: filled(PAGE.read_text(), {"simulated": table(rows)})}, "benchmarks.verdicts", check=False)
    return int(any(row["wrong"] > ERROR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
