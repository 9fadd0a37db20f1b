"""What is read off a Triton kernel's code promises no less than what the kernel does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.tracing.kernel_launches import kernel_roles, reaches_elsewhere, waits_first
from tests.support.launched_kernels import (
    BY_ADDRESS,
    BY_TABLE,
    DOUBLE,
)

NAMES = st.one_of(
    st.builds("{}{}".format, st.sampled_from(["in_ptr", "out_ptr", "in_out_ptr", "arg_"]), st.integers(0, 9)),
    st.sampled_from(["xnumel", "r0_numel", "ws_ptr", "load_seed_offset", "source", "target"]),
)


@given(st.lists(NAMES, unique=True), st.data())
def test_no_role_promises_less_than_what_a_kernel_does(names: list[str], data: st.DataObject) -> None:
    mutated = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    roles = kernel_roles(names, mutated)
    assert roles.keys() <= set(names)
    for name in names:
        reads, writes = roles.get(name, (True, True))  # what is not listed counts as read and written
        assert reads or writes
        if name in mutated or name.startswith("in_out_ptr"):
            assert reads
            assert writes
        elif name.startswith("in_ptr"):
            assert not writes
        elif name.startswith("out_ptr"):
            assert not reads


NAMING = ["    xnumel = 512", "    r0_numel: tl.constexpr = 64", "    out_ptr0 = in_out_ptr0", "    RBLOCK = 1.5"]


DOING = [
    "    x = tl.load(p)",
    "    for at in range(3):",
    "    if xnumel:",
    "    x0 = tl.program_id(0)",
    "    f(p)",
    "    # p",
]


@given(st.lists(st.sampled_from(NAMING)), st.lists(st.sampled_from([*NAMING, *DOING])), st.sampled_from(DOING))
def test_only_names_are_given_before_a_kernel_that_waits_first_does(
    before: list[str], after: list[str], done: str
) -> None:
    head, wait = (
        "def triton_poi_fused_softmax_0(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):",
        "    tl.extra.cuda.gdc_wait()",
    )
    assert waits_first("\n".join([head, *before, wait, *after, ""]))
    assert not waits_first("\n".join([head, *before, done, wait, *after, ""]))
    assert not waits_first("\n".join([head, *before, *after, ""]))
    assert not waits_first("\n".join([head, *before, f"    if xnumel: {wait.strip()}", *after, ""]))


BY_ASSEMBLY = """\
  tt.func public @by_assembly(%source: !tt.ptr<f32> loc("source"(#loc)), %address: i64 loc("address"(#loc))) {
    %v_4 = tt.elementwise_inline_asm "ld.global.f32 $0, [$1];" {constraints = "=f,l", pure = false} %v_3
"""


BY_DESCRIPTOR = """\
  tt.func public @load(%d: !tt.tensordesc<tensor<64xf32>> loc("d"(#loc)), %d_0: i32, %d_1: i64, %out: !tt.ptr<f32>) {
    %2 = tt.descriptor_load %d[%c0_i32] : !tt.tensordesc<tensor<64xf32>> -> tensor<64xf32>
"""


DESCRIPTOR_OF_A_TENSOR = """\
  tt.func public @load(%source: !tt.ptr<f32> loc("source"(#loc)), %out: !tt.ptr<f32> loc("out"(#loc))) {
    %d_1 = tt.make_tensor_descriptor %source, [%d], [%d_0] : <f32>, <tensor<64xf32>>
    %2 = tt.descriptor_load %d_1[%c0_i32] : !tt.tensordesc<tensor<64xf32>> -> tensor<64xf32>
"""


@pytest.mark.parametrize(
    ("code", "tensors", "elsewhere"),
    [
        (DOUBLE, 2, False),
        (DESCRIPTOR_OF_A_TENSOR, 2, False),
        (BY_ADDRESS, 1, True),
        (BY_TABLE, 2, True),
        (BY_ASSEMBLY, 1, True),
        (BY_DESCRIPTOR, 1, True),
        (DOUBLE, 0, True),  # both in a tuple
        ("", 2, True),
    ],
)
def test_whether_a_kernel_may_reach_other_memory_shows_in_its_code(code: str, tensors: int, elsewhere: bool) -> None:
    assert reaches_elsewhere(code, tensors) is elsewhere
