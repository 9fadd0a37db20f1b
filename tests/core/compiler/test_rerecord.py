"""Any sequence of rewrites computes what eager computes, and every eager call is still accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from nimble_core.compiler.passes.channels_last import to_channels_last
from nimble_core.compiler.passes.conv_algorithms import choose_forms
from nimble_core.compiler.passes.cse import share_equal
from nimble_core.compiler.passes.decisions import Decisions
from nimble_core.compiler.passes.fold_batchnorm import affine_norms, fold_affine
from nimble_core.compiler.passes.gemv import row_products_as_sums
from nimble_core.compiler.passes.merge_siblings import merge_siblings
from nimble_core.compiler.passes.pooling import choose_pools
from nimble_core.compiler.passes.split_constants import split_constants
from nimble_core.compiler.rerecord import provenance_of, tracked
from nimble_core.compiler.to_fx import calls_of, lift
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.program import Origin
from nimble_core.runtime.host.device import HostDevice
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.tracing.rewritten import Rewritten
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
)  # fmt: skip

HOST = torch.device("cpu")
REWRITES = [
    "affine", "affine", "affine", "fold", "share", "layout", "siblings", "convolutions", "rows", "pools", "forms",
    "compiled forms",
]  # fmt: skip


def rewrite(module: fx.GraphModule, names: Sequence[str], decisions: Decisions) -> None:
    """Several rewrites in any order."""
    layout = False
    for name in names:
        if name == "affine":
            affine_norms(module)
        elif name == "fold":
            fold_affine(module)
        elif name == "share":
            share_equal(module)
        elif name == "layout":
            layout = layout or to_channels_last(module) > 0
        elif name in ("siblings", "convolutions"):
            merge_siblings(module, HOST, decisions, channels_last=layout, compiled=name == "convolutions")
        elif name == "rows":
            row_products_as_sums(module)
        elif name == "pools":
            choose_pools(module, HOST, decisions)
        else:
            choose_forms(module, HOST, decisions, channels_last=layout, compiled=name != "forms")
        module.graph.lint()
    module.recompile()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_any_sequence_of_rewrites(dtype: torch.dtype, tolerance: float) -> None:
    @settings(max_examples=35)
    @given(
        drawn_models(dtype=dtype),
        st.lists(st.sampled_from(REWRITES), max_size=6),
        st.lists(st.floats(1.0, 2.0), min_size=1, max_size=5),
    )
    def check(made: tuple[Drawn, tuple[torch.Tensor, ...]], names: list[str], times: list[float]) -> None:
        model, inputs = made
        one = recorded(model, *inputs)
        wanted = eager_effects(one)
        module = lift(one.recording)
        before = claimed(module)
        rewrite(module, names, Decisions(fake_timer(times)))
        assert claimed(module) == before
        assert same(effects(module, one), wanted, tolerance)
        split_constants(module, {})
        module.recompile()
        for _ in range(2):
            assert same(effects(module, one), wanted, tolerance)

    check()


# -- run again under the recorder ------------------------------------------------------------------------------------


def run_again(one: Any, module: fx.GraphModule) -> Recording:
    run, provenance = tracked(module, one.recording.program)
    again = Rewritten("library", run, provenance)
    return record(one.model, one.signature, args=(), kwargs={}, rewritten=again)


@settings(max_examples=20)
@given(drawn_models(), st.lists(st.sampled_from(REWRITES), max_size=5))
def test_a_rewritten_program_can_be_issued_and_knows_its_calls(
    made: tuple[Drawn, tuple[torch.Tensor, ...]], names: list[str]
) -> None:
    model, inputs = made
    one = recorded(model, *inputs)
    wanted = eager_effects(one)
    module = lift(one.recording)
    rewrite(module, names, Decisions(fake_timer([1.0, 1.5])))
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
    rewrite(module, ["affine", "forms"], Decisions())
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
