"""Compare two models from ``transformers`` on whatever device there is, and write their reports.

``python -m examples.demo`` prints each report and writes ``report.html`` (CLIP, a wide graph) and
``report-bert.html`` (BERT, a narrow one) into the working directory, each beside its ``.nimble`` file.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console

from examples import models
from nimble_viz import Options, compare

DEMOS = {"report": models.clip, "report-bert": models.bert}
_ON_A_CPU = Options(budget_s=25)
"""Half the default: a call takes 0.1 s on two cores, and near ties stay undecided after 60 s as well."""


def main() -> int:
    """Run the demos; returns the exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # weights are random: there is nothing to fetch
    console = Console()
    complete = True
    for name, factory in DEMOS.items():
        model, args, kwargs = factory()
        on_a_gpu = next(model.parameters()).is_cuda
        report = compare(model, *args, kwargs=kwargs, options=None if on_a_gpu else _ON_A_CPU)
        complete &= report.complete
        console.print(report)
        report.to_html(f"{name}.html")
        report.save(f"{name}.nimble")
        console.print(f"Wrote {name}.html (open it in a browser) and {name}.nimble\n")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
