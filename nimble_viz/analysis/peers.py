"""Other ways to run the model, measured beside ours: who is faster, by how much, and what they cost to prepare."""

from __future__ import annotations

from typing import Any

from nimble_core.ir.measurement import Ratio, not_slower
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.labels import error_text, ratio_cell, ratio_sentence
from nimble_viz.report.data import PeerResult, ReportData

__all__ = ["best_peers", "peers", "unshown"]


def peers(report: ReportData, ours: str) -> list[dict[str, Any]]:
    """Describe each peer: the fastest first, then those whose outputs differ, then absent ones."""
    return sorted((_row(report, peer, ours) for peer in report.peers), key=lambda row: (row["rank"], row["median_ns"]))


def best_peers(report: ReportData) -> list[str]:
    """Name the fastest peer whose outputs are not wrong, and those that are not decidedly slower."""
    right = (peer.name for peer in report.peers if not (peer.check and peer.check.differs))
    return not_slower({name: taken for name in right if (taken := report.measurement(name))})


def unshown(report: ReportData, name: str) -> str:
    """Return what to add to the name of a peer whose outputs were not shown to be eager's; else empty."""
    doubtful = any(peer.name == name and not (peer.check and peer.check.passed) for peer in report.peers)
    return ", whose outputs were not shown to be eager's" if doubtful else ""


def _row(report: ReportData, peer: PeerResult, ours: str) -> dict[str, Any]:
    taken = report.measurement(peer.name)
    wrong = peer.check is not None and peer.check.differs
    over = report.ratio(ours, peer.name) if taken and ours else None
    return {
        "name": peer.name,
        "median": format_ns(taken.median_ns) if taken else "",
        "median_ns": taken.median_ns if taken else 0.0,
        "stable": taken is None or taken.stable,
        "ratio": None if wrong else ratio_cell(report, over),
        "prepare": format_ns(peer.prepare_s * 1e9) if peer.prepare_s else "",
        "outputs": _outputs(peer),
        "equal": peer.check is not None and peer.check.passed,
        "wrong": wrong,
        "outcome": _outcome(peer, over, measured=taken is not None),
        "note": peer.note,
        "rank": 2 if taken is None else int(wrong),
    }


def _outputs(peer: PeerResult) -> str:
    if peer.check is None:
        return "not compared"
    error = error_text(peer.check.error)
    return f"equal ({error})" if peer.check.passed else f"DIFFER ({error})" if peer.check.differs else "not shown"


def _outcome(peer: PeerResult, over: Ratio | None, *, measured: bool) -> str:
    if not measured:
        return peer.note or "not measured"
    if peer.check is not None and peer.check.differs:
        return "its outputs differ from eager's: its time does not count"
    if over is None:
        return "nothing of ours to compare with"
    return ratio_sentence("ours", over, "it")
