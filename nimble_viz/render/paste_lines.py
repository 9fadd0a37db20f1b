"""Code to paste: how to prepare a model with the plan that a report chose."""

from __future__ import annotations

import re

from nimble_viz.analysis.labels import trains
from nimble_viz.report.data import ReportData

__all__ = ["paste_lines"]

_LONGEST_NAME = 20

_INFERENCE = """# once: report.plan.save("{name}.plan.json")
from nimble_core import Nimble, load_plan

plan = load_plan("{name}.plan.json")
net = Nimble(model).prepare(*args, plan=plan, **kwargs)"""

_DROP_IN = """from nimble_core import Nimble

net = Nimble(model).prepare(*args, training=True)
loss_fn(net(*args), target).backward()"""

_STEP = """# once: report.plan.save("{name}.plan.json")
from nimble_core import TrainStep, load_plan

plan = load_plan("{name}.plan.json")
# add autocast=, scaler= and clip_grad_norm= as compared
step = TrainStep(model, loss_fn, optimizer)
step.prepare(inputs, targets, plan=plan)
loss = step(inputs, targets)"""


def paste_lines(report: ReportData) -> str:
    """Write Python lines that prepare with the chosen plan from a file.

    A comment says how to make the file. Without an optimizer the lines prepare the model in place, which takes no plan.
    Empty if no plan was chosen.
    """
    if report.schedule(report.chosen) is None:
        return ""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", report.model)[:_LONGEST_NAME].strip("_") or "model"
    if not trains(report):
        return _INFERENCE.format(name=name)
    return (_STEP if any(call.phase == "optimizer" for call in report.program.calls) else _DROP_IN).format(name=name)
