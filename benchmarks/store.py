"""Records of measurements: one for each row, way and manner (alone or together), and what they say side by side.

A store is one file for each device: JSON lines, gzip, sorted, the same bytes for the same records. ``read`` gives
frozen values; ``pandas.DataFrame(map(asdict, read(path)))`` is a table of them.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import msgspec

from nimble_core.ir.measurement import Ratio, across, summarize
from nimble_core.utils.files import write_file

MEASURES = ("latency_us", "throughput_us", "device_us", "host_us", "launch_us")
SPEEDS = MEASURES[:3]  # by which ways are compared
LADDER = ("one-stream", "fused", "selected", "several", "streams", "drop-in-one-stream", "drop-in-several")
OURS = ("ours", "ours-static", "drop-in", *LADDER)
ANCHOR_BOUND = 0.05  # records whose anchors differ by more are marked


@dataclass(frozen=True, slots=True)
class Record:
    """One way to run one row, measured in one process; samples as in ``benchmarks.measure``.

    ``rel_err`` is how far it is from eager on other inputs than those it was prepared with, ``bound`` what that may be,
    and ``effect`` how far eager's outputs move between inputs. ``whole`` says whether its CUDA graphs do all that a
    call does: otherwise ``device_us`` is a part of it, and compared with nothing. ``compile_cache`` says how Inductor's
    cache served ("warm", "cold", "partly"), ``work_of`` whose work ``work`` is ("eager", "traced" by torch.compile,
    "exported", "recorded" by ours). ``counts`` is what a plan of ours holds, and the seconds of each step of making it
    (``ways.counts_of``). ``anchor`` holds medians of the row's anchor in the same run; empty if it was not measured.
    ``spent_s`` is the way's share of its process. ``error`` says why there are no samples.
    """

    row: str
    way: str
    together: bool
    run: str
    title: str = ""
    dtype: str = ""
    batch: int = 1
    training: bool = False
    latency_us: tuple[float, ...] = ()
    throughput_us: tuple[float, ...] = ()
    device_us: tuple[float, ...] = ()
    host_us: tuple[float, ...] = ()
    launch_us: tuple[float, ...] = ()
    graphs: int = 0
    whole: bool = True
    error: str = ""
    rel_err: float | None = None
    bound: float | None = None
    effect: float | None = None
    prepare_s: float | None = None
    compile_cache: str = ""
    work: Mapping[str, int] = field(default_factory=dict)
    work_of: str = ""
    chosen: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    anchor: Mapping[str, float] = field(default_factory=dict)
    spent_s: float = 0.0
    packages: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    date: str = ""

    @property
    def place(self) -> tuple[str, ...]:
        """What has to be the same for times to be compared: GPU, driver, torch, transformers."""
        machine = (str(self.environment.get(name, "")) for name in ("device_name", "driver"))
        return (*machine, *(self.packages.get(name, "") for name in ("torch", "transformers")))

    @property
    def key(self) -> tuple[str, str, bool, tuple[str, ...]]:
        """A store holds one record of each."""
        return self.row, self.way, self.together, self.place

    @property
    def where(self) -> str:
        """The machine that it was measured on, and torch's version."""
        about = f"One {self.environment.get('device_name')} (driver {self.environment.get('driver')})"
        host = f"host {self.environment.get('host_cpu')}, {self.environment.get('cores')} cores"
        return f"{about}, {host}; torch {self.packages.get('torch')}"

    @property
    def wrong(self) -> bool:
        """Whether its outputs are not eager's: it is named, and not counted."""
        return self.rel_err is not None and self.bound is not None and self.rel_err > self.bound

    @property
    def medians(self) -> Mapping[str, float]:
        """By measure, of those that were taken."""
        return {name: median(samples) for name in MEASURES if (samples := getattr(self, name))}

    def spread(self, measure: str) -> float:
        """Interquartile range over median; 0 of fewer than two samples."""
        samples = getattr(self, measure)
        low, middle, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (0.0, 1.0, 0.0)
        return (high - low) / middle


def read(path: Path) -> list[Record]:
    """Read the records of a store; none where there is no file. Raises ValueError for another or a truncated file."""
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=Record) for line in lines]
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is not a store of measurements: {error}") from error


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a store, all of it or nothing; of records with one key the last counts."""
    kept = {one.key: one for one in records}
    data = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=data, mtime=0) as packed:  # no name, no time: the same bytes
        packed.writelines(msgspec.json.encode(kept[key], order="sorted") + b"\n" for key in sorted(kept))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data.getvalue())


def moved(now: Mapping[str, float], then: Mapping[str, float]) -> float | None:
    """Return the largest relative change of an anchor's medians, signed; None where either is not known."""
    changes = [round(now[name] / then[name] - 1, 4) for name in SPEEDS if now.get(name) and then.get(name)]
    return max(changes, key=abs, default=None)


def summary(records: Sequence[Record]) -> Iterator[str]:
    """Lines for the terminal: each row's ways, ours over each of them, and geometric means; place by place."""
    for place in dict.fromkeys(one.place for one in records):
        here = [one for one in records if one.place == place]
        latest, minutes = max(here, key=lambda one: one.date), sum(one.spent_s for one in here) / 60
        about = (latest.packages.get("nimble", ""), latest.environment.get("host_cpu", ""), latest.date[:10])
        yield f"== {', '.join(filter(None, (*place, *about)))}; {minutes:.1f} minutes of it"
        if latest.environment.get("device") != "cuda":
            yield "no GPU: latency and throughput of the host alone"
        for row, together in dict.fromkeys((one.row, one.together) for one in here):
            yield from _row([one for one in here if (one.row, one.together) == (row, together)], here)
        for mine, training in ((mine, training) for training in (False, True) for mine in OURS):
            yield from _means(mine, [one for one in here if one.training == training and not one.together])


def _row(records: Sequence[Record], here: Sequence[Record]) -> Iterator[str]:
    """Print the ways of one row in one manner, fastest first."""
    first, ours = records[0], next((one for one in records if one.way == "ours"), None)
    alone = {one.way: one.medians for one in here if one.row == first.row and not one.together}
    manner = "in one process, in turn" if first.together else "each in a process of its own"
    yield f"\n{first.row} ({first.title}, {first.dtype}, batch {first.batch}), {manner}: medians in µs ± quartiles"
    heads = "".join(f"{name.removesuffix('_us'):>15}" for name in MEASURES)
    yield f"  {'way':14}{heads}  rel_err  prepare   ours over it: latency, throughput, device"
    for one in sorted(records, key=lambda one: one.medians.get("throughput_us", math.inf)):
        held, far = one.medians, "–" if one.rel_err is None else f"{one.rel_err:.1e}"
        cells = (f"{held[name]:10.1f} ±{one.spread(name):3.0%}" if name in held else f"{'–':>15}" for name in MEASURES)
        said = [one.error, "WRONG, not counted" * one.wrong, _apart(ours, one), one.chosen, *one.notes]
        if "device_us" in held and not one.whole:
            said.insert(0, "device time without what runs in eager")
        if one.way in OURS and "launch_us" in held:
            said.insert(0, f"host beyond the launch {held['host_us'] - held['launch_us']:.1f}")
        if first.together and (change := moved(held, alone.get(one.way, {}))) is not None:
            said.insert(0, f"{change:+.0%} from alone")
        ratios = " ".join(map(_told, over(ours, one).values()))
        line = f"  {one.way:14}{''.join(cells)}{far:>9}{one.prepare_s or 0:7.1f} s   {ratios}"
        yield f"{line}  {'; '.join(filter(None, said))}".rstrip()


def losses(records: Sequence[Record], floor: float) -> list[str]:
    """Name the rows on which ours is decidedly slower than ``floor`` times a peer of the same place, by any measure."""
    alone = [one for one in records if not one.together]
    said = []
    for ours in (one for one in alone if one.way == "ours"):
        for peer in (one for one in alone if (one.row, one.place) == (ours.row, ours.place) and one.way not in OURS):
            said += [
                f"{ours.row}: {_told(found)} of {peer.way} in {name.removesuffix('_us')}"
                for name, found in over(ours, peer).items()
                if found.high < floor
            ]
    return said


def ratio(ours: Record, peer: Record, measure: str) -> Ratio:
    """Speed of ours over a peer's, of samples taken in two processes."""
    new, old = (summarize(one.way, [us * 1e3 for us in getattr(one, measure)]) for one in (ours, peer))
    return across(new, old)


def _told(found: Ratio) -> str:
    if not (found.low and math.isfinite(found.high)):
        return "(too few samples)"
    return f"{found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]"


def over(ours: Record | None, peer: Record | None) -> dict[str, Ratio]:
    """Speed of ours over a peer's, by measure; nothing where either is missing, wrong or failed."""
    if ours is None or peer is None or any(one.wrong or one.error for one in (ours, peer)):
        return {}
    shared = SPEEDS if ours.whole and peer.whole else SPEEDS[:2]
    return {name: ratio(ours, peer, name) for name in shared if name in ours.medians and name in peer.medians}


def _apart(ours: Record | None, peer: Record) -> str:
    """Note that two ways were not measured beside each other, where the anchor says that it matters."""
    if ours is None or peer.run == ours.run:
        return ""
    change = moved(ours.anchor, peer.anchor)
    if change is None:
        return "other run, no anchor beside it"
    return f"other run, anchor moved {change:+.1%}" if abs(change) > ANCHOR_BOUND else ""


def _means(mine: str, records: Sequence[Record]) -> Iterator[str]:
    """Geometric means of one of ours over the best peer of each row, by each measure."""
    speeds: dict[str, list[float]] = {}
    for ours in (one for one in records if one.way == mine):
        found = [over(ours, one) for one in records if one.row == ours.row and one.way not in OURS]
        for name in SPEEDS:
            if known := [one[name].value for one in found if name in one]:
                speeds.setdefault(name.removesuffix("_us"), []).append(min(known))
    if speeds:
        means = (
            f"{name} {geometric_mean(values):.2f}x ({min(values):.2f}x to {max(values):.2f}x of {len(values)})"
            for name, values in speeds.items()
        )
        kind = "training" if records[0].training else "inference"
        yield f"\n{kind}: {mine} over the best peer of each row, geometric means: {', '.join(means)}"
