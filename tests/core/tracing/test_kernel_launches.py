"""Kernels launched past the dispatcher: seen, named, with the right roles, and everything put back afterwards."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core import Nimble, Options
from nimble_core.tracing.kernel_launches import (
    _SEEN,
    Launch,
    Relaunch,
    kernel_roles,
    launches_seen,
    reaches_elsewhere,
    waits_first,
)
from tests.support.launched_kernels import (
    BY_ADDRESS,
    BY_TABLE,
    DOUBLE,
    Compiled,
    Doing,
    InductorKernel,
    UserKernel,
    work,
)


def never() -> bool:
    return False


def test_host_kernels_are_seen_with_names_and_roles(compiled: Compiled) -> None:
    doing = Doing()
    with launches_seen(doing, doing.apart):
        result = compiled.run()
    seen = doing.seen
    torch.testing.assert_close(result, work(*compiled.args))
    assert [launch.name for launch in seen] == compiled.kernels()
    assert set(doing.files) == {compiled.module.__file__}
    text = Path(str(compiled.module.__file__)).read_text(encoding="utf-8")
    for launch in seen:
        assert len(launch.names) == len(launch.args)
        signature = text.split(f"{launch.name} = async_compile.cpp_pybinding([")[1].split("]")[0]
        kinds = [kind.strip().strip("'") for kind in signature.split(",")]
        for name, kind in zip(launch.names, kinds, strict=True):
            assert (launch.roles.get(name) == (True, False)) == kind.startswith("const ")
        tensors = [one for one in launch.args if isinstance(one, torch.Tensor)]
        assert any(launch.roles.get(name) != (True, False) for name in launch.names), "a kernel writes something"
        assert tensors


def test_host_kernels_are_seen_where_inductor_was_told_to_forget_them() -> None:
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.utils import fresh_cache

    others = list(PyCodeCache.modules)
    buffer, x = torch.zeros(6), torch.randn(5, 6)

    def state(x: torch.Tensor) -> torch.Tensor:
        buffer.mul_(0.9).add_(x.mean(0))
        return x + 1

    with warnings.catch_warnings(), fresh_cache():
        warnings.simplefilter("ignore")
        run = torch.compile(state)
        run(x)
    PyCodeCache.modules[:] = others  # of other tests
    doing = Doing()
    before = buffer.clone()
    with launches_seen(doing, doing.apart):
        run(x)
    assert doing.seen
    assert not any(launch.roles for launch in doing.seen), "files are gone: both read and written"
    torch.testing.assert_close(buffer, before * 0.9 + x.mean(0))


@pytest.mark.parametrize("error", [None, KeyError("in the middle"), KeyboardInterrupt()])
def test_generated_modules_are_as_they_were(compiled: Compiled, error: BaseException | None) -> None:
    before = dict(vars(compiled.module))
    changed: set[str] = set()
    doing = Doing()

    def on_launch(launch: Launch, frame: Any) -> Any:
        changed.update(name for name, value in vars(compiled.module).items() if value is not before[name])
        if error is not None:
            raise error
        return doing(launch, frame)

    if error is None:
        with launches_seen(on_launch, doing.apart):
            compiled.run()
    else:
        with pytest.raises(type(error)), launches_seen(on_launch, doing.apart):
            compiled.run()
    assert {*compiled.kernels(), *(name for name in _SEEN if name in before)} == changed
    after = vars(compiled.module)
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


def test_launches_of_other_threads_are_left_alone(compiled: Compiled) -> None:
    doing = Doing()
    results: list[torch.Tensor] = []
    with launches_seen(doing, never):
        thread = threading.Thread(target=lambda: results.append(compiled.run()))
        thread.start()
        thread.join()
    assert not doing.seen
    torch.testing.assert_close(results[0], work(*compiled.args))


@pytest.mark.parametrize("policy", ["single", "nimble"])
def test_a_window_is_found_wherever_the_replay_has_the_memory(policy: str) -> None:
    """In an arena, and in an input, a tensor does not start where it did while recording."""

    def model(x: torch.Tensor) -> torch.Tensor:
        turned = _SEEN["reinterpret_tensor"](x * 2, (3, 4), (1, 3), 0)
        return _SEEN["reinterpret_tensor"](turned + 1, (2, 2), (4, 1), 3) * _SEEN["reinterpret_tensor"](
            x, (2, 2), (4, 1), 5
        )

    whole = torch.randn(40)
    example, other = whole[8:20], whole[21:33]
    net = Nimble(model, Options(fuse="none", policy=policy, tune="off")).prepare(example)
    for x in (example, other, other.clone()):
        assert torch.equal(net(x), model(x))


@pytest.mark.usefixtures("triton")
def test_inductors_triton_kernels_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out, count = torch.ones(4), torch.empty(4), torch.zeros(4)
    kernel = InductorKernel("triton_poi_0", ["in_ptr0", "out_ptr0", "in_ptr1", "xnumel", "XBLOCK"], ["in_ptr1"])
    seen: list[Launch] = []
    with launches_seen(lambda launch, frame: seen.append(launch), never):
        kernel.run(x, out, count, 4, stream=7)
        assert not kernel.runs, "who is told has to launch"
        kernel.run(x, out, count, 4, stream=7, benchmark_run=True)
    (launch,) = seen
    assert (launch.name, launch.names) == ("triton_poi_0", ("in_ptr0", "out_ptr0", "in_ptr1", "xnumel"))
    assert launch.roles == {"in_ptr0": (True, False), "out_ptr0": (False, True), "in_ptr1": (True, True)}
    assert [run[2] for run in kernel.runs] == [True], "trials of a compiler are not the model's launches"
    # Launched again on the stream that is current then, not on the one that it was recorded on.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("nimble_core.tracing.kernel_launches.current_raw_stream", lambda device: 99)
    assert isinstance(launch.launch, Relaunch)
    assert launch.launch(*launch.args, **launch.kwargs) == "ran"
    assert kernel.runs[-1] == ((x, out, count, 4), 99, False, {})


@pytest.mark.usefixtures("triton")
def test_triton_kernels_of_the_users_are_seen() -> None:
    x, out = torch.ones(4), torch.empty(4)
    kernel = UserKernel("double", ["source", "target", "count", "BLOCK"])
    seen: list[Launch] = []
    with launches_seen(lambda launch, frame: seen.append(launch), never):
        kernel[(2,)](x, out, 4, BLOCK=64)
        kernel.run(x, out, 4, grid=(2,), warmup=True, BLOCK=64)
    (launch,) = seen
    assert (launch.name, launch.names, launch.kwargs) == ("double", ("source", "target", "count"), {"BLOCK": 64})
    assert set(launch.roles.values()) <= {(True, True)}, "a kernel that cannot be analysed reads and writes everything"
    assert [run[2] for run in kernel.runs] == [True]
    launch.launch(*launch.args, **launch.kwargs)
    assert kernel.runs[-1] == ((x, out, 4), (2,), False, {"BLOCK": 64})


@pytest.mark.usefixtures("triton")
def test_kernels_that_may_reach_other_memory_are_told_of() -> None:
    x, told, launching = torch.ones(4), list[str](), Doing()
    kernels = [
        UserKernel("double", ["source", "target"], DOUBLE),
        UserKernel("by_address", ["source", "address"], BY_ADDRESS),
        UserKernel("no_code", ["source"]),
    ]
    inductors = [
        InductorKernel("triton_poi_0", ["in_ptr0", "out_ptr0"], []),
        InductorKernel("double_0", ["in_ptr0", "out_ptr0"], [], DOUBLE),
        InductorKernel("by_table_0", ["in_ptr0", "out_ptr0"], [], BY_TABLE),
    ]
    for apart in (launching.apart, lambda: True):  # launched by the model, or by an operator
        told.clear()
        with launches_seen(launching, apart, told.append), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr("nimble_core.tracing.kernel_launches.current_raw_stream", lambda device: 3)
            for kernel in kernels:
                kernel[(1,)](x, *[x if kernel.fn.__name__ == "double" else x.data_ptr()])
            for one in inductors:
                one.run(x, x, stream=3)
            kernels[1].run(x, 7, grid=(1,), warmup=True)
            thread = threading.Thread(target=lambda: kernels[1][(1,)](x, 7))
            thread.start()
            thread.join()
        assert told == ["by_address", "no_code", "by_table_0"]
    roles = {launch.name: launch.roles for launch in launching.seen}
    assert roles["triton_poi_0"] == {"in_ptr0": (True, False), "out_ptr0": (False, True)}
    assert roles["double_0"] == {}, "what a user calls an argument says nothing"


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
