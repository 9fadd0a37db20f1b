"""The DAG as the page draws it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import nimble_viz
from nimble_viz.analysis.advice import best_run
from nimble_viz.analysis.dag import dag

EXAMPLES = Path(__file__).parents[3] / "examples" / "recordings"


def test_parts_of_a_module_that_others_come_between_are_told_apart():
    report = nimble_viz.load(EXAMPLES / "nasnet-a-mobile-h200.nimble")
    columns = dag(report)["columns"]
    whole = Counter(columns["name"][group] for group in range(len(columns["name"])) if columns["parts"][group] > 1)
    assert whole["cells.0"] == 2
    for name, many in whole.items():
        own = [group for group, other in enumerate(columns["name"]) if other == name]
        assert [(columns["part"][group], columns["parts"][group]) for group in own] == [
            (k + 1, many) for k in range(many)
        ]
    assert "cells" not in columns["name"]
    clip = dag(nimble_viz.load(EXAMPLES / "clip-h200.nimble"))["columns"]
    assert "encoder.layers.0" in clip["name"]


def test_the_graph_opens_on_the_plan_that_the_verdict_is_about() -> None:
    training = nimble_viz.load(EXAMPLES / "resnet18-training-h200.nimble")
    opens = dag(training)["opens"]
    assert training.schedules[opens].policy == "inductor, contention" == best_run(training)
    assert opens < len(training.schedules) - 1
    for plan in training.schedules:
        chosen = replace(training, chosen=plan.policy, checks=())
        assert training.schedules[dag(chosen)["opens"]] == plan
    bert = nimble_viz.load(EXAMPLES / "bert-h200.nimble")
    assert dag(replace(bert, measurements=()))["opens"] == len(bert.schedules) - 1
    assert dag(replace(bert, schedules=()))["opens"] == -1
