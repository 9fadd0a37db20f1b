"""A rewritten graph, run again under the recorder: its calls can be issued, and stand for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from torch import fx, nn

from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.rerecord import provenance_of, tracked
from nimble_core.compiler.to_fx import calls_of, lift
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.program import Origin
from nimble_core.runtime.host.device import HostDevice
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, Rewritten, issuing
from tests.core.compiler.passes.test_every_pass import SEQUENCES, rewrite_all
from tests.support.rewrite_models import (
    Drawn,
    claimed,
    drawn_models,
    eager_effects,
    effects,
    fake_timer,
    lifted,
    recorded,
    same,
)


def run_again(one: Any, module: fx.GraphModule) -> Recording:
    run, provenance = tracked(module, one.recording.program)
    again = Rewritten("library", run, provenance)
    return record(one.model, one.signature, args=(), kwargs={}, rewritten=again)


@settings(max_examples=20)
@given(drawn_models(), SEQUENCES)
def test_a_rewritten_program_can_be_issued_and_knows_its_calls(
    made: tuple[Drawn, tuple[torch.Tensor, ...]], names: list[str]
) -> None:
    model, inputs = made
    one = recorded(model, *inputs)
    wanted = eager_effects(one)
    module = lift(one.recording)
    rewrite_all(module, names, Decisions(fake_timer([1.0, 1.5])))
    again = run_again(one, module)
    assert again.program.fuse == "library"
    assert not again.unseen
    build_graph(again.program)
    nodes = {calls_of(node) for node in module.graph.nodes}
    eager = one.recording.program
    for call in again.program.calls:
        assert call.eager in nodes
        assert set(call.origins) >= {origin for index in call.eager for origin in eager.calls[index].origins}
    said = {index for call in again.program.calls for index in call.eager}
    # What was a call in eager and is none now has an empty result, or became a view.
    assert said <= claimed(module)

    def issue(*tensors: torch.Tensor) -> list[torch.Tensor]:
        issuer = Issuer(again, tensors)
        with issuing("cpu"):
            for index in range(len(again.program.calls)):
                issuer.issue(index)
            return issuer.outputs()

    assert same(effects(issue, one), wanted, 1e-10)


def test_each_call_says_what_it_stands_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    one = recorded(model, torch.randn(1, 3, 5, 5))
    module = lift(one.recording)
    rewrite_all(module, ["norms apart", "forms"], Decisions())
    split_constants(module, {})
    calls = run_again(one, module).program.calls  # oneDNN's, and the ReLU in place
    assert len(calls) == 2
    for call in calls:
        assert call.eager == (0, 1, 2)
        assert [origin.module for origin in call.origins] == ["0", "1", "2"]


def test_provenance() -> None:
    one, _ = lifted(lambda x: (x + 1) * 2, torch.randn(3))
    program = one.recording.program
    assert provenance_of(program, (), "aten.clone.default") == ((Origin("aten.clone.default"),), ())
    origins, calls = provenance_of(program, (0, 1, 0), "any")
    assert calls == (0, 1, 0)
    assert origins == (*program.calls[0].origins, *program.calls[1].origins)


def test_the_host_records_what_was_rewritten() -> None:
    one, module = lifted(lambda x: x + 1, torch.randn(3))
    run, provenance = tracked(module, one.recording.program)
    again = HostDevice().record(one.model, one.signature, (), {}, Rewritten("library", run, provenance))
    assert [call.eager for call in again.program.calls] == [(0,)]
