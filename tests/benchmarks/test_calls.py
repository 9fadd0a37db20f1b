"""Calls are timed without their replay, and still made: outputs are right."""

from __future__ import annotations

import pytest
import torch

from benchmarks import calls
from nimble_core import Nimble, Options


@pytest.mark.parametrize("name", [name for name in calls.ROWS if name != "ModelOutput"])
def test_calls(name: str) -> None:
    model, inputs, fuse = calls.ROWS[name]()
    net = Nimble(model, Options(fuse=fuse, policy="single")).prepare(*inputs.values())
    engine = calls.at_once(net)
    with torch.no_grad():
        torch.testing.assert_close(net(*inputs.values()), model(*inputs.values()))
    row = calls.measured(engine, lambda: net(*inputs.values()), 0.0)
    assert row["tensors"] == len([*model.parameters(), *model.buffers()])
    assert row["modules"] == len([*model.modules()])
    assert row["folded"] == (row["tensors"] if name == "folded" else 0)
    assert min(row["warm_us"], row["cold_us"], row["launch_us"]) > 0
