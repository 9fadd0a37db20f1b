"""Measure a small branching model on this machine, and show a report that was recorded on an H200 beside it.

``python -m examples.demo`` writes ``report.html``, ``report.nimble`` and ``report-h200.html`` into the working
directory. It takes well under a minute on two cores and prints at most 40 lines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from nimble_viz import Report

RECORDED = Path(__file__).parent / "recordings" / "googlenet-h200.nimble"


def main() -> int:
    """Run the demo; returns the exit status."""
    console = Console()
    console.print("[bold]1. This machine:[/] a model of six blocks, each with four branches. Loading torch …")
    import torch  # takes seconds: the line above comes first

    from examples import models
    from nimble_viz import Options, compare, load

    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # calls this small gain nothing from more threads, and eager with one is the fair peer
        console.print("   No GPU here: calls are replayed on the host, on one thread, like eager's.")
    console.print("   Measuring eager and replays in turn: about 10 seconds …")
    model, args, kwargs = models.branches()
    report = compare(model, *args, kwargs=kwargs, options=Options(budget_s=10))
    report.save("report.nimble")
    show(report, "report.html", console)
    console.print()
    console.print("[bold]2. An NVIDIA H200:[/] GoogLeNet, recorded there and opened here.")
    show(load(RECORDED), "report-h200.html", console)
    console.print()
    console.print("Open both pages in a browser. Next, yours; a factory is a function that returns (model, x):")
    for command in ("compare yours.py:factory --html yours.html", "profile --html train.html train.py", "doctor"):
        console.print(f"   python -m nimble_viz {command}", highlight=False, soft_wrap=True)
    return 0 if report.complete else 1


def show(report: Report, page: str, console: Console) -> None:
    """Print the first screen of ``report``, and write its page."""
    console.print(report)
    report.to_html(page)
    console.print(f"Page: {Path(page).absolute()}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
