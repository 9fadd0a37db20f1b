"""Fused calls and the eager calls they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_core.ir.program import Access, Call, TensorRef
from nimble_viz.analysis.provenance import became, is_layout_copy, provenance
from nimble_viz.analysis.summary import summary
from tests.support.sample_reports import fused_report


def test_every_eager_call_knows_what_it_became_and_back():
    report = fused_report()
    stand = became(report)
    assert len(stand) == 60
    assert all(index in report.program.calls[call].eager for index, calls in enumerate(stand) for call in calls)
    assert sum(map(len, stand)) == sum(len(call.eager) for call in report.program.calls)
    assert dict(provenance(report))["Eager calls that left no call (folded, not needed)"] == "1"
    assert stand[-1] == ()
    assert dict(summary(report)["facts"])["Unmapped (no eager call explains it)"].startswith("1 call: 2.3% of calls")


@pytest.mark.parametrize(
    ("operator", "read", "copies"),
    [
        ("aten.clone.default", (6,), True),
        ("aten._to_copy.default", (2, 3), True),
        ("aten.relu.default", (6,), False),
        ("triton_poi_fused__to_copy_permute_view_12", (6,), True),
        ("triton_poi_fused_convolution_28", (6,), True),
        ("triton_tem_fused_convolution_28", (6,), False),
        ("triton_poi_fused_permute_relu_view_8", (6,), False),
        ("triton_poi_fused_clone_1", (4,), False),
    ],
)
def test_copies_to_another_layout_are_told_by_operator_and_size(operator, read, copies):
    source, made = (
        TensorRef(at, 0, sizes, tuple(1 for _ in sizes), "float32", 4) for at, sizes in enumerate((read, (6,)))
    )
    call = Call(0, operator, (), (Access(source, False), Access(made, True)))
    assert is_layout_copy(call) == copies
    assert not is_layout_copy(replace(call, eager=(3,)))
    bias = Access(TensorRef(2, 0, (2,), (1,), "float32", 4), False)
    assert not is_layout_copy(replace(call, accesses=(bias, *call.accesses)))


def test_layout_copies_are_counted_apart_from_what_nobody_explains():
    report = fused_report()
    source = Access(report.program.outputs[0], False)
    copy = replace(
        report.program.calls[0], operator="triton_poi_fused_clone_0", accesses=(source, replace(source, write=True))
    )
    other = replace(report, program=replace(report.program, calls=(copy, *report.program.calls[1:])))
    facts = dict(summary(other)["facts"])
    assert facts["Layout copies (another layout, no eager call)"].startswith("1 call: 2.3% of calls")
    assert facts["Unmapped (no eager call explains it)"].startswith("0 calls")
