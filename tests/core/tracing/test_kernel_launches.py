"""Kernels launched past the dispatcher: seen, named, with the right roles, and everything put back afterwards."""

from __future__ import annotations

import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core import Nimble, Options
from nimble_core.runtime.fake import FakeDevice
from nimble_core.tracing.kernel_launches import (
    _SEEN,
    Launch,
    Relaunch,
    kernel_roles,
    launches_seen,
    reaches_elsewhere,
    waits_first,
)
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.utils.errors import CaptureError

# -- roles by name --------------------------------------------------------------------------------------------------

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


# -- Inductor's host kernels ----------------------------------------------------------------------------------------


class Compiled:
    """A function compiled by torch.compile, with what its generated module holds."""

    def __init__(self, function: Callable[..., Any], *args: torch.Tensor) -> None:
        from torch._inductor.codecache import PyCodeCache

        known = {id(module) for module in PyCodeCache.modules}
        torch._dynamo.reset()
        self.eager, self.args = function, args
        # "eager" elsewhere may be found in Inductor's own cache of graphs: then the module is loaded from there.
        with torch.no_grad():
            self.compiled = torch.compile(function)
            self.compiled(*args)
        fresh = [module for module in PyCodeCache.modules if id(module) not in known]
        self.modules: list[ModuleType] = fresh
        (self.module,) = fresh

    def run(self) -> Any:
        with torch.no_grad():
            return self.compiled(*self.args)

    def kernels(self) -> list[str]:
        return [name for name in vars(self.module) if name.startswith("cpp_")]


def work(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x + 1).softmax(-1)
    return (y @ weight).tanh() * 3


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(6, 6, generator=generator) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Compiled(work, x, weight)


class Doing:
    """Notes launches and does them."""

    def __init__(self) -> None:
        self.seen: list[Launch] = []
        self.files: list[str] = []
        self.launching = False

    def __call__(self, launch: Launch, frame: Any) -> Any:
        self.seen.append(launch)
        self.files.append(frame.f_code.co_filename)
        self.launching = True
        try:
            return launch.launch(*launch.args, **launch.kwargs)
        finally:
            self.launching = False

    def apart(self) -> bool:
        return self.launching


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
    with torch.no_grad():
        net = Nimble(run, Options(fuse="none", tune="off")).prepare(x)
        before = buffer.clone()
        net(2 * x)
    torch.testing.assert_close(buffer, before * 0.9 + 2 * x.mean(0))


def test_roles_are_true(compiled: Compiled) -> None:
    """What counts as read only keeps its bits."""
    doing = Doing()

    def on_launch(launch: Launch, frame: Any) -> Any:
        before = [one.clone() if isinstance(one, torch.Tensor) else one for one in launch.args]
        result = doing(launch, frame)
        for name, one, kept in zip(launch.names, launch.args, before, strict=True):
            if isinstance(one, torch.Tensor) and launch.roles.get(name) == (True, False):
                assert torch.equal(one, kept)
        return result

    with launches_seen(on_launch, doing.apart):
        compiled.run()
    assert doing.seen


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


def test_launches_inside_an_operator_are_its_own_affair(compiled: Compiled) -> None:
    doing = Doing()
    with launches_seen(doing, lambda: True):
        compiled.run()
    assert not doing.seen


def recording_of(model: Callable[..., Any], *args: torch.Tensor) -> Recording:
    return record_static(FakeDevice(), model, check_inputs(model, args, {}), strict=True, step=Stopwatch()).recording


def issued(recording: Recording, *inputs: torch.Tensor) -> list[torch.Tensor]:
    issuer = Issuer(recording, inputs)
    with issuing("cpu"):
        for call in range(len(recording.program.calls)):
            issuer.issue(call)
        return issuer.outputs()


def test_a_compiled_function_inside_a_model_is_recorded_kernel_by_kernel(compiled: Compiled) -> None:
    x, weight = compiled.args

    def model(x: torch.Tensor) -> torch.Tensor:
        return compiled.compiled(x * 2, weight) - 1

    model(x)
    recording = recording_of(model, x)
    names = [call.operator for call in recording.program.calls]
    assert [name for name in names if name.startswith("cpp_")] == compiled.kernels()
    assert "aten.mul.Tensor" in names
    assert "aten.sub.Tensor" in names
    assert not recording.unseen
    other = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(issued(recording, other)[0], work(other * 2, weight) - 1)
    net = Nimble(model, Options(fuse="none", tune="off")).prepare(x)
    with torch.no_grad():
        torch.testing.assert_close(net(other), work(other * 2, weight) - 1)


def test_a_compiled_function_inside_an_operator_is_recorded_once(compiled: Compiled) -> None:
    x, weight = compiled.args
    library = torch.library.Library("nimble_launcher_tests", "DEF")
    library.define("whole(Tensor x, Tensor weight) -> Tensor")
    library.impl("whole", lambda x, weight: compiled.compiled(x, weight), "CPU")
    operator = torch.ops.nimble_launcher_tests.whole
    recording = recording_of(lambda x: operator(x, weight) + 1, x)
    names = [call.operator for call in recording.program.calls]
    assert names == ["nimble_launcher_tests.whole.default", "aten.add.Tensor"]
    torch.testing.assert_close(issued(recording, x)[0], work(x, weight) + 1)


# -- memory that generated code makes and views ---------------------------------------------------------------------


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=3))
def test_a_reinterpreted_tensor_is_the_window_that_as_strided_gives(
    offset: int, dimensions: Sequence[tuple[int, int]]
) -> None:
    size, stride = [one for one, _ in dimensions], [step for _, step in dimensions]
    base = torch.arange(200.0)[7:]
    found = _SEEN["reinterpret_tensor"](base, size, stride, offset)
    expected = torch.as_strided(base, size, stride, 7 + offset)
    assert torch.equal(found, expected)
    assert (found.stride(), found.storage_offset()) == (expected.stride(), expected.storage_offset())
    assert found.data_ptr() == expected.data_ptr()


@given(st.integers(0, 3))
def test_an_empty_window(offset: int) -> None:
    assert _SEEN["reinterpret_tensor"](torch.arange(9.0), (0, 2), (2, 1), offset).shape == (0, 2)


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


# -- Triton's launchers, by classes like them -----------------------------------------------------------------------


class InductorKernel:
    """As Inductor's CachingAutotuner is called by the code it generates."""

    def __init__(self, name: str, arg_names: list[str], mutated: list[str], code: str = "") -> None:
        self.fn = SimpleNamespace(arg_names=arg_names, __name__=name)
        self.inductor_meta = {"kernel_name": name}
        self.mutated_arg_names = mutated
        self.custom_kernel = bool(code)
        self.compile_results = [SimpleNamespace(kernel=SimpleNamespace(asm={"ttir": code}))]
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> str:
        self.runs.append((args, stream, benchmark_run, kwargs))
        return "ran"


class UserKernel:
    """As Triton's JITFunction is launched by ``kernel[grid](...)``."""

    def __init__(self, name: str, arg_names: list[str], code: str = "", does: Callable[..., Any] | None = None) -> None:
        self.fn = SimpleNamespace(__name__=name)
        self.arg_names = arg_names
        self.compiled = SimpleNamespace(asm={"ttir": code})
        self.does = does
        self.runs: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.runs.append((args, grid, warmup, kwargs))
        if self.does is not None:
            self.does(*args)
        return self.compiled


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both launchers where ``launches_seen`` looks for them."""
    heuristics: Any = ModuleType("torch._inductor.runtime.triton_heuristics")
    heuristics.CachingAutotuner = InductorKernel
    jit: Any = ModuleType("triton.runtime.jit")
    jit.JITFunction = UserKernel
    monkeypatch.setitem(sys.modules, heuristics.__name__, heuristics)
    monkeypatch.setitem(sys.modules, jit.__name__, jit)
    run, launch = InductorKernel.run, UserKernel.run
    yield
    assert InductorKernel.run is run
    assert UserKernel.run is launch


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
def test_triton_launches_elsewhere_are_left_alone() -> None:
    kernel, inductors = UserKernel("double", ["x"]), InductorKernel("triton_poi_0", ["in_ptr0"], [])
    doing = Doing()

    def launch() -> None:
        kernel[(1,)](torch.ones(1))
        inductors.run(torch.ones(1), stream=3)

    with launches_seen(doing, never):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    with launches_seen(doing, lambda: True):
        launch()
    with pytest.raises(ValueError, match="mine"), launches_seen(doing, never):
        raise ValueError("mine")
    launch()
    assert not doing.seen
    assert len(kernel.runs) == len(inductors.runs) == 3


# -- kernels that reach other memory than that of their tensors --------------------------------------------------------

DOUBLE = """\
module {
  tt.func public @double(%source: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("source"(#loc)), %target: !tt.ptr<f32> \
loc("target"(#loc)), %count: i32 loc("count"(#loc))) attributes {noinline = false} {
    %2 = tt.splat %target : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %4 = tt.splat %source : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %6 = tt.extern_elementwise %4 {libname = "", libpath = "", pure = true, symbol = "__nv_asinf"} : (tensor<64xf32>)
    tt.store %3, %6, %1 : tensor<64x!tt.ptr<f32>>
"""
BY_ADDRESS = """\
module {
  tt.func public @by_address(%source: !tt.ptr<f32> loc("source"(#loc)), %address: i64 loc("address"(#loc))) {
    %target = tt.int_to_ptr %address : i64 -> !tt.ptr<f32> loc(#loc7)
    %2 = tt.splat %target : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
"""
BY_TABLE = """\
  tt.func public @by_table(%source: !tt.ptr<f32> loc("source"(#loc)), %table: !tt.ptr<i64> loc("table"(#loc))) {
    %target = tt.load %table : !tt.ptr<i64>
    %target_0 = tt.int_to_ptr %target : i64 -> !tt.ptr<f32>
"""
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


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_with_such_a_kernel_is_not_taken_apart(inside: bool) -> None:
    """On the host, with a kernel that writes where a number says; within an operator, the operator's schema counts."""
    memory: dict[int, torch.Tensor] = {}

    def write(source: torch.Tensor, address: int) -> None:
        memory[address].copy_(source * 2)

    kernel = UserKernel("by_address", ["source", "address"], BY_ADDRESS, does=write)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        memory[out.data_ptr()] = out
        kernel[(1,)](x, out.data_ptr())
        return out

    run = doubled
    if inside:
        library = torch.library.Library("nimble_address_tests", "DEF")
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", doubled, "CPU")
        run = torch.ops.nimble_address_tests.doubled

    def model(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, x * 5
        return (run(y) - 1) * z

    told = pytest.warns(
        UserWarning, match=r"by_address in the model at .*test_kernel_launches\.py:\d+, which may reach other"
    )
    with nullcontext() if inside else told:
        net = Nimble(model, Options(policy="nimble", tune="off")).prepare(torch.randn(8))
    assert ("doubled" in {call.label for call in net.engines[0].recorded.recording.program.calls}) is inside
    for _ in range(3):
        x = torch.randn(8)
        torch.testing.assert_close(net(x), (2 * (x + 1) - 1) * (x * 5))
    if not inside:
        with pytest.raises(CaptureError, match="by_address in the model"):
            Nimble(model, Options(strict=True)).prepare(x)


# -- operators written in C++ ---------------------------------------------------------------------------------------

SOURCE = """
#include <ATen/ATen.h>
#include <torch/library.h>
at::Tensor twice(const at::Tensor& x) { return x * 2; }
void add_to(at::Tensor& x, const at::Tensor& y) { x.add_(y); }
TORCH_LIBRARY(nimble_cpp_tests, m) {
  m.def("twice(Tensor x) -> Tensor");
  m.def("add_to(Tensor(a!) x, Tensor y) -> ()");
}
TORCH_LIBRARY_IMPL(nimble_cpp_tests, CPU, m) {
  m.impl("twice", twice);
  m.impl("add_to", add_to);
}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fuse", ["none", "library", "inductor"])
def test_an_operator_in_cpp_is_one_call_with_the_writes_of_its_schema(fuse: Any) -> None:
    missing = [name for name in ("ninja", "g++") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} to build an operator")
    if not hasattr(torch.ops.nimble_cpp_tests, "twice"):
        from torch.utils.cpp_extension import load_inline

        load_inline(
            "nimble_cpp_tests",
            cpp_sources=[SOURCE],
            is_python_module=False,
            no_implicit_headers=True,
            extra_cflags=["-O0"],
        )
        torch.library.register_fake("nimble_cpp_tests::twice", torch.empty_like)
        torch.library.register_fake("nimble_cpp_tests::add_to", lambda x, y: None)
    operators = torch.ops.nimble_cpp_tests

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        operators.add_to(y, x)
        return operators.twice(y).relu() - y

    x = torch.randn(5, 5)
    net = Nimble(model, Options(fuse=fuse, tune="off")).prepare(x)
    program = net.engines[0].recorded.recording.program
    assert program.fuse == fuse, net.engines[0].notes
    (call,) = [call for call in program.calls if call.operator.startswith("nimble_cpp_tests.add_to")]
    assert len(call.writes) == 1
    assert sum(call.operator.startswith("nimble_cpp_tests.twice") for call in program.calls) == 1
    other = torch.randn(5, 5)
    torch.testing.assert_close(net(other), model(other))


@pytest.mark.parametrize("fuse", ["library", "inductor"])
def test_a_compiled_function_inside_a_model_stays_when_the_rest_is_rewritten(compiled: Compiled, fuse: Any) -> None:
    x, weight = compiled.args
    layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3)).eval()

    def model(x: torch.Tensor) -> torch.Tensor:
        a, b, c = (layer(x) for layer in layers)
        return compiled.compiled(a * 2, weight) - b + c

    with torch.no_grad():
        model(x)
    net = Nimble(model, Options(fuse=fuse, tune="off")).prepare(x)
    engine = net.engines[0]
    program = engine.recorded.recording.program
    if fuse == "inductor":
        assert program.fuse == "none"
        assert any("past torch's dispatcher" in note for note in engine.notes)
    else:
        assert program.fuse == "library", engine.notes
        assert sum(call.label == "addmm" for call in program.calls) == 1
        kernels = [call for call in program.calls if call.operator in compiled.kernels()]
        assert [call.operator for call in kernels] == compiled.kernels()
        assert all(len(call.eager) == 1 for call in kernels)
    other = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(net(other), model(other), rtol=1e-4, atol=1e-5)


class _CompiledBehind(torch.autograd.Function):
    """Twice its input; its gradient is what a compiled function makes of one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, behind: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.behind = behind
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.behind(gradients[0]), None


@pytest.mark.compiler
def test_kernels_launched_in_the_backward_belong_to_it(compiled: Compiled) -> None:
    weight = compiled.args[1]

    class Behind(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return _CompiledBehind.apply(y, lambda g: compiled.compiled(g, weight))  # type: ignore[no-untyped-call,no-any-return]

    model, x = Behind(6, 6), compiled.args[0]
    net = Nimble(model, Options(fuse="none", tune="off", policy="single")).prepare(x, training=True)
    (engine,) = net.engines
    assert engine.backward is not None
    calls = engine.backward.recorded.recording.program.calls
    assert [call.operator for call in calls if call.operator.startswith("cpp_")] == compiled.kernels()
    assert {call.phase for call in calls} == {"backward"}
    found = []
    for one in (net, model):
        one(x).sin().sum().backward()
        found.append(model.weight.grad)
        model.weight.grad = None
    torch.testing.assert_close(*found)
    net.close()
