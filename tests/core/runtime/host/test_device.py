from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nimble_core.api.nimble import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.autotune.capture_pipeline import capture
from nimble_core.ir.call_graph import CallGraph, build_graph
from nimble_core.ir.costs import uniform_costs
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.device import PlacementError
from nimble_core.runtime.host import codegen, out_variants
from nimble_core.runtime.host.device import HostDevice, HostExecutable
from nimble_core.scheduling.memory_planner import MemoryPlan, check_memory, plan_memory
from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import nimble, resolve_policy, single
from nimble_core.scheduling.policies.base import plan_streams
from nimble_core.scheduling.simulator import EXACT
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.tracing.pytree import flatten
from nimble_core.tracing.recorded import Stopwatch, record_static, state_kept
from nimble_core.tracing.recording import Recording, Step
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import DeviceError, NimbleError, ScheduleError
from nimble_core.validation.eager_cases import eager_cases, from_same_state
from tests.support import models
from tests.support.interrupts import interrupted
from tests.support.memory_models import happens_before

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


class Prepared:
    """A model recorded on the host, ready to be captured under any schedule."""

    def __init__(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.model, self.device = model, HostDevice()
        self.signature = Signature(args, kwargs)
        self.recording: Recording = self.device.record(model, self.signature, args, kwargs)
        self.graph = build_graph(self.recording.program)
        self.costs = uniform_costs(self.graph.size)

    def layout(self, schedule: Schedule) -> Layout:
        return self.device.lay_out(self.recording, schedule)

    def plan(self, schedule: Schedule) -> MemoryPlan:
        return plan_memory(self.recording.program, schedule, place=self.layout(schedule).arena)

    def capture(self, schedule: Schedule | None = None) -> HostExecutable:
        schedule = schedule or single(self.graph, self.costs)
        check_schedule(self.graph, schedule, self.recording.program)
        return self.device.capture(self.recording, schedule, self.signature.tensors)

    def wide(self, streams: int | None = None) -> HostExecutable:
        return self.capture(nimble(self.graph, self.costs, max_streams=streams))


def eager(model: Callable[..., Any], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [tensor.clone() for tensor in flatten(model(*args), what="output")[0]]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


class Branches(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(width)
        )
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([branch(x).relu() for branch in self.branches], 0)
        return self.norm(joined.reshape(len(self.branches), -1, 8))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = nn.functional.max_pool2d(self.norm(self.conv(x)).relu_(), 2)
        top = self.head(y.mean((2, 3)))
        return {"scores": top.softmax(-1), "best": top.max(-1).indices, "map": y.transpose(1, 2)}


def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    y[0].add_(1)
    z = y.t().contiguous().view(-1)
    parts = torch.split(y, 1)
    return z[2:], parts[0] + parts[1], y.unsqueeze(0).squeeze_(0) + 0, torch.complex(x, y).conj() * y


def constants(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4, 4).tril() * 3
    hidden = torch.zeros(4, 4)
    hidden += x
    return x + mask.sum(0) + hidden + torch.arange(4, dtype=torch.float32)


def buffers(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(2, *x.shape)
    made[0] = x.exp()
    made[1] = x.sin()
    shown = torch.empty_like(x)
    shown.copy_(made.sum(0))
    return shown


CASES: dict[str, Callable[[], Case]] = {
    "branches": lambda: (Branches().eval(), (torch.randn(3, 8),)),
    "convolutions": lambda: (ConvNet().eval(), (torch.randn(2, 3, 8, 8),)),
    "attention": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True).train(False).requires_grad_(True),
        (torch.randn(2, 5, 16),),
    ),
    "views": lambda: (views, (torch.randn(2, 3),)),
    "constants": lambda: (constants, (torch.randn(4, 4),)),
    "buffers": lambda: (buffers, (torch.randn(3, 5),)),
    "two inputs": lambda: (lambda a, b: (a @ b, (a + 1, [b.half().float()])), (torch.randn(3, 3), torch.randn(3, 3))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("streams", [1, 2, None])
def test_replays_equal_eager_bit_for_bit_on_fresh_inputs(name: str, streams: int | None) -> None:
    torch.manual_seed(0)
    model, args = CASES[name]()
    made = Prepared(model, *args)
    executable = made.wide(streams)
    kept = []
    for _ in range(4):
        inputs = [torch.randn_like(tensor) for tensor in args]
        expected = eager(model, inputs)
        found = executable.run(inputs)
        assert same(found, expected)
        kept.append((found, expected))
    assert all(same(found, expected) for found, expected in kept), "an output was overwritten by a later run"
    assert not same(kept[0][0], kept[1][0]), "the check is void: outputs do not depend on inputs"
    executable.close()


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    steps = []
    for index in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(["add", "mm", "in place", "slice", "slice in place", "norm", "clone", "empty"]))
        steps.append((kind, draw(st.integers(0, index)), draw(st.integers(0, index)), draw(st.integers(0, 2))))
    return steps


def interpreted(steps: Sequence[tuple[str, int, int, int]]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    weight = torch.linspace(-1, 1, 4)

    def model(x: torch.Tensor) -> list[torch.Tensor]:
        made = [x * 1]
        for kind, i, j, k in steps:
            a, b = made[i], made[j]
            if kind == "add":
                made.append(a + b)
            elif kind == "mm":
                made.append((a @ b).tanh())
            elif kind == "in place":
                made.append(a.mul_(0.5).add_(b.clone()))
            elif kind == "slice":
                made.append(torch.cat([a[:2], b[2:]]))
            elif kind == "slice in place":
                a[k : k + 2].copy_(b[1:3].clone())
                made.append(a.t())
            elif kind == "norm":
                made.append(nn.functional.layer_norm(a, (4,), weight))
            elif kind == "clone":
                made.append(b.clone().t().contiguous())
            else:
                made.append(torch.empty(4, 4).copy_(a).sub_(b))
        return [made[-1], made[len(made) // 2]]

    return model


@settings(max_examples=60, deadline=None)
@given(programs(), st.data())
def test_any_program_on_any_streams_equals_eager(steps: list[tuple[str, int, int, int]], data: st.DataObject) -> None:
    model = interpreted(steps)
    made = Prepared(model, torch.randn(4, 4))
    draws = [data.draw(st.integers(0, 2)) for _ in range(made.graph.size)]
    names = {lane: index for index, lane in enumerate(dict.fromkeys(draws))}
    executable = made.capture(plan_streams(made.graph, [names[lane] for lane in draws], policy="drawn"))
    for _ in range(2):
        x = torch.randn(4, 4)
        assert same(executable.run([x]), eager(model, [x]))
    executable.close()


def drawn_streams(graph: CallGraph, draw: random.Random, lanes: int, order: Sequence[int] | None = None) -> Schedule:
    """A safe schedule that puts each call on any of ``lanes`` streams."""
    draws = [draw.randrange(lanes) for _ in range(graph.size)]
    names = {lane: index for index, lane in enumerate(dict.fromkeys(draws))}
    return plan_streams(graph, [names[lane] for lane in draws], policy="drawn", order=order)


def poison(executable: HostExecutable) -> None:
    assert executable.arena is not None
    executable.arena.fill_(0xFF)


@pytest.mark.parametrize("name", models.CASES)
def test_nothing_is_read_from_the_arena_that_the_run_did_not_write(name: str) -> None:
    model, args, kwargs = models.make(name)
    device, signature = HostDevice(), Signature(args, kwargs)
    recorded = record_static(device, model, signature, strict=False, step=Stopwatch())
    if recorded.whole:
        return
    draw = random.Random(name)
    with state_kept(recorded):
        for lanes in (1, 2, 4):
            executable = capture(device, recorded, drawn_streams(recorded.graph, draw, lanes))
            assert isinstance(executable, HostExecutable)
            run = from_same_state(recorded, executable.run)
            for inputs, expected in eager_cases(recorded).eager:
                poison(executable)
                torch.testing.assert_close(run([one.clone() for one in inputs]), list(expected), equal_nan=True)
            executable.close()


@settings(max_examples=60)
@given(programs(), st.randoms(use_true_random=False))
def test_memory_of_several_workers_holds_in_any_order_that_they_may_run_in(
    steps: list[tuple[str, int, int, int]], draw: random.Random
) -> None:
    model = interpreted(steps)
    made = Prepared(model, torch.randn(4, 4))
    several = drawn_streams(made.graph, draw, 3)
    memory = made.plan(several)
    ranks = [draw.random() for _ in range(made.graph.size)]
    order = list(networkx.lexicographical_topological_sort(happens_before(several), key=ranks.__getitem__))
    one = plan_streams(made.graph, [0] * made.graph.size, policy="one of the runs", order=order)
    executable = made.device.capture(made.recording, one, made.signature.tensors, made.layout(several), memory)
    x = torch.randn(4, 4)
    poison(executable)
    assert same(executable.run([x]), eager(model, [x]))
    executable.close()


def test_a_plan_that_gives_bytes_away_too_early_is_refused_and_would_be_wrong() -> None:
    model = Branches().eval()
    made = Prepared(model, torch.randn(3, 8))
    schedule, program = single(made.graph, made.costs), made.recording.program
    good = check_memory(program, schedule, made.plan(schedule))
    together = [{access.ref.storage for access in call.accesses} for call in program.calls]
    placed = sorted(made.layout(schedule).arena)
    uses = {s: [call for call in schedule.order if s in together[call]] for s in placed}
    overlapping = {
        frozenset((a, b))
        for a, b in itertools.combinations(placed, 2)
        if uses[a][0] <= uses[b][-1] and uses[b][0] <= uses[a][-1]
    }
    refused = 0
    for old, new in itertools.combinations(placed, 2):
        sizes = {program.storages[old].nbytes, program.storages[new].nbytes}
        if len(sizes) > 1 or any({old, new} <= touched for touched in together):
            continue  # torch itself refuses calls whose operands overlap in part
        offsets = list(good.offsets)
        offsets[old] = offsets[new] = good.nbytes
        plan = replace(good, offsets=tuple(offsets), nbytes=good.nbytes + 512)
        right = frozenset((old, new)) not in overlapping
        if not right:
            refused += 1
            with pytest.raises(ScheduleError, match="share bytes and nothing orders them"):
                check_memory(program, schedule, plan)
        executable = made.device.capture(made.recording, schedule, made.signature.tensors, memory=plan)
        x = torch.randn(3, 8)
        assert same(executable.run([x]), eager(model, [x])) is right
        executable.close()
    assert refused > 3


def test_the_arena_holds_what_calls_fill_and_neither_constants_nor_outputs() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        hidden = (x + torch.arange(128.0)).exp()
        made = torch.empty(2, 128)
        made[0] = hidden
        made[1] = x
        return made.sum(0) * 2

    made = Prepared(model, torch.randn(128))
    storages, program = made.recording.program.storages, made.recording.program
    layout = made.layout(single(made.graph, made.costs))
    assert sorted(storages[one].nbytes for one in layout.arena) == [512, 512, 512, 1024]
    assert not layout.arena.keys() & {ref.storage for ref in program.outputs}
    assert layout.kept_nbytes == 0
    assert layout.beside_nbytes == 512
    executable = made.capture()
    assert executable.memory is not None
    assert {s for s, offset in enumerate(executable.memory.offsets) if offset >= 0} == layout.arena.keys()
    assert executable.nbytes == executable.memory.nbytes + 512
    assert executable.memory.nbytes < 512 * 3 + 1024


def test_streams_that_allocate_between_calls_may_share_that_memory() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            made = torch.empty(2, 64)
            made[0] = x[0].exp()
            made[1] = x[1].sin()
            x = made * 0.5
        return x

    made = Prepared(model, torch.randn(2, 64))
    executable = made.wide(2)
    assert executable.memory is not None
    assert executable.memory.nbytes < 6 * 512
    for _ in range(20):
        x = torch.randn(2, 64)
        poison(executable)
        assert same(executable.run([x]), eager(model, [x]))
    executable.close()


class Stages(nn.Module):
    """Independent chains, whose results are small beside what they need on the way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([((x.repeat(8) + i).sin() * 2).exp().sum() for i in range(8)])


def test_a_memory_limit_adds_order_or_says_the_smallest_that_works() -> None:
    x = torch.randn(512)
    recorded = record_static(HostDevice(), Stages(), Signature([x], {}), strict=True, step=Stopwatch())
    device = HostDevice()
    device.model = EXACT  # type: ignore[misc]  # else one stream is the faster way to fit
    lanes = [call.index % 4 for call in recorded.recording.program.calls]
    schedule = plan_streams(recorded.graph, lanes, policy="four")
    free = capture(device, recorded, schedule)
    one = capture(device, recorded, single(recorded.graph, uniform_costs(recorded.graph.size)))
    limit = one.nbytes + x.nbytes + 1024
    assert limit < free.nbytes
    limited = capture(device, recorded, schedule, memory_limit=limit)
    assert limited.nbytes <= limit
    assert limited.schedule.stream == schedule.stream
    assert limited.schedule != schedule
    y = torch.randn(512)
    for executable in (free, one, limited):
        assert isinstance(executable, HostExecutable)
        poison(executable)
        assert same(executable.run([y]), eager(recorded.model, [y]))
        executable.close()
    with pytest.raises(DeviceError, match=r"memory_limit=.* is too little: .* the smallest has \d+"):
        capture(device, recorded, schedule, memory_limit=4096)


def test_nothing_is_held_after_close() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    executable = made.wide(2)
    executable.replay()
    arena = StorageWeakRef(executable.arena)
    executable.close()
    assert executable.arena is None
    assert arena.expired()


def test_small_results_share_memory_and_large_chains_need_two_buffers() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x.sin()
        return x

    made = Prepared(chain, torch.randn(1024))
    executable = made.capture()
    assert executable.nbytes == 2 * 4096
    assert same(executable.run([torch.ones(1024)]), eager(chain, [torch.ones(1024)]))


def test_constants_are_computed_once() -> None:
    made = Prepared(constants, torch.randn(4, 4))
    executable = made.capture()
    operators = {call.label for call in made.recording.program.calls}
    assert {"tril", "arange"} <= operators
    assert executable.folded >= 4
    timeline = made.device.observe(executable, made.recording, 1).timeline
    assert str(executable.folded) in timeline.note


def test_outputs_that_alias_inputs_or_parameters_are_copied_unless_static() -> None:
    model = nn.Linear(3, 3)
    made = Prepared(lambda x: (x.view(-1), model.weight, x + 1), torch.randn(2, 3))
    x = torch.randn(2, 3)
    executable = made.capture()
    view, weight, fresh = executable.run([x])
    assert view.data_ptr() != x.data_ptr()
    assert weight.data_ptr() != model.weight.data_ptr()
    shared, weight, other = executable.run([x], static=True)
    assert shared.data_ptr() == x.data_ptr()
    assert weight.data_ptr() == model.weight.data_ptr()
    assert other.data_ptr() != fresh.data_ptr()


def test_outputs_can_be_used_under_autograd() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    weight = torch.randn(8, requires_grad=True)
    for executable in (made.capture(), made.wide(2)):
        (executable.run([torch.randn(3, 8)])[0] * weight).sum().backward()
        assert weight.grad is not None
        executable.close()


@pytest.mark.parametrize("streams", [1, 2])
def test_runs_in_inference_mode_and_out_of_it(streams: int) -> None:
    model = Branches().eval()
    made = Prepared(model, torch.randn(3, 8))
    with torch.inference_mode():
        executable = made.wide(streams)
        x = torch.randn(3, 8)
        inside = executable.run([x])
    y = x.clone()
    assert same(executable.run([y]), inside)
    executable.close()


def test_inputs_written_in_place_are_the_callers_and_preparing_leaves_them() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    example = torch.zeros(3)
    made = Prepared(write, example)
    executable = made.capture()
    executable.replay()
    assert torch.equal(example, torch.zeros(3))
    x = torch.zeros(3)
    assert torch.equal(executable.run([x])[0], torch.full((3,), 2.0))
    assert torch.equal(x, torch.ones(3))


def test_running_statistics_follow_eager() -> None:
    torch.manual_seed(0)
    model, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    made = Prepared(model, torch.randn(8, 4))
    executable = made.capture()
    assert torch.equal(model.running_mean, torch.zeros(4)), "preparing left a trace"  # type: ignore[arg-type]
    for _ in range(3):
        x = torch.randn(8, 4)
        assert same(executable.run([x]), eager(twin, [x]))
    assert torch.equal(model.running_mean, twin.running_mean)  # type: ignore[arg-type]
    assert int(model.num_batches_tracked) == 3  # type: ignore[arg-type]


def test_weights_are_live() -> None:
    model = nn.Linear(3, 3)
    made = Prepared(model, torch.randn(2, 3))
    executable = made.capture()
    with torch.no_grad():
        model.weight.mul_(3)
    x = torch.randn(2, 3)
    assert same(executable.run([x]), eager(model, [x]))


@pytest.mark.parametrize("streams", [1, 2])
def test_random_calls_draw_what_eager_draws(streams: int) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + nn.functional.dropout(x * 2, 0.5) + torch.rand(64)

    x = torch.randn(64)
    state = torch.get_rng_state()
    made = Prepared(noisy, x)
    executable = made.wide(streams)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(3)
    expected = eager(noisy, [x]) + eager(noisy, [x])
    torch.manual_seed(3)
    assert same(executable.run([x]) + executable.run([x]), expected)
    executable.close()


def lookup(indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.exp() @ table.sin().index_select(0, indices).t()


@pytest.mark.parametrize("worker", [0, 1])
def test_an_error_names_the_call_and_leaves_the_executable_usable(worker: int) -> None:
    good, table = torch.tensor([0, 1]), torch.randn(4, 4)
    made = Prepared(lookup, good, table)
    assert [call.label for call in made.recording.program.calls] == ["exp", "sin", "index_select", "mm"]
    other = 1 - worker
    executable = made.capture(plan_streams(made.graph, [other, worker, worker, other], policy="mine"))
    expected = eager(lookup, [good, table])
    for _ in range(3):
        assert same(executable.run([good, table]), expected)
        with pytest.raises(DeviceError) as caught:
            executable.run([torch.tensor([0, 9]), table])
        assert "index_select" in caught.value.where
        assert __file__.rpartition("/")[2] in caught.value.where
        assert isinstance(caught.value.__cause__, IndexError)
    assert same(executable.run([good, table]), expected)
    executable.close()


class Counting(nn.Module):
    """Looks rows up, and changes what stays on the way: in program order some before, some after."""

    def __init__(self, steps: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.norm = nn.BatchNorm1d(4)
        self.counts = nn.ParameterList(nn.Parameter(torch.zeros(4), requires_grad=False) for _ in range(3))

    def forward(
        self, table: torch.Tensor, written: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> list[torch.Tensor]:
        found = []
        for kind, which in self.steps:
            if kind == "look up":
                found.append((table * which).index_select(0, (first, second)[which % 2]))
            elif kind == "count":
                self.counts[which].add_(1)
            elif kind == "normalise":
                found.append(self.norm(table))
            elif kind == "draw":
                found.append(torch.rand(2) + which)
            elif kind == "write":
                written[which].mul_(2)
            else:
                found.append((table @ table.t()).exp())
        return [*found, table.sum()]

    def state(self, written: torch.Tensor) -> list[torch.Tensor]:
        return [one.clone() for one in (*self.state_dict().values(), written, torch.get_rng_state())]


counting = st.lists(
    st.tuples(
        st.sampled_from(["look up", "look up", "count", "count", "normalise", "draw", "write", "compute"]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(counting, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_a_call_that_fails_leaves_what_stays_as_eager_leaves_it(
    steps: list[tuple[str, int]], draw: random.Random, one_fails: bool, in_turn: bool
) -> None:
    good, bad, table = torch.tensor([0, 1]), torch.tensor([0, 9]), torch.randn(4, 4)
    args = (table, torch.ones(4, 3).t() if draw.random() < 0.5 else torch.ones(3, 4), good, good.clone())
    model = Counting(steps)
    made = Prepared(model, *args)
    order = None
    if not in_turn:
        ranks = [draw.random() for _ in range(made.graph.size)]
        order = list(networkx.lexicographical_topological_sort(made.graph.to_networkx(), key=ranks.__getitem__))
    executable = made.capture(drawn_streams(made.graph, draw, draw.randint(1, 3), order))
    begin = copy.deepcopy(model.state_dict())
    for indices in ((good, good), (bad, good) if one_fails else (bad, bad), (good, bad), (good, good)):
        left = []
        for run in (model, lambda *given: executable.run(given)):
            model.load_state_dict(begin)
            torch.manual_seed(3)
            written = torch.ones(3, 4)  # in other strides than the recorded ones, or not
            with torch.no_grad():
                try:
                    run(table, written, *indices)
                    failed = False
                except (IndexError, DeviceError):
                    failed = True
            left.append((failed, model.state(written)))
        (eager_failed, expected), (failed, found) = left
        assert failed == eager_failed
        assert all(map(torch.equal, found, expected))
    executable.close()


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.c = nn.Buffer(torch.zeros(()))

    def forward(self, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        e = self.embedding(i)
        self.c += 1
        return e + self.bn(x)


POLICIES = ["single", "nimble", "critical_path", "opara", "torchsched", "contention"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_an_embedding_that_fails_leaves_buffers_alone(policy: str, streams: int) -> None:
    model, good, x = Embedded(), torch.tensor([1, 2, 3]), torch.randn(3, 4)
    made = Prepared(model, good, x)
    executable = made.capture(resolve_policy(policy)(made.graph, made.costs, max_streams=streams))
    for _ in range(3):
        with pytest.raises(DeviceError, match="out of range"):
            executable.run([torch.tensor([1, 9, 3]), x])
    assert int(model.c) == int(model.bn.num_batches_tracked) == 0
    assert not model.bn.running_mean.any()  # type: ignore[union-attr]
    executable.run([good, x])
    assert int(model.c) == int(model.bn.num_batches_tracked) == 1
    executable.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_a_training_step_whose_loss_fails_changes_what_eager_changes(policy: str, streams: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    x, good = torch.randn(4, 4), torch.tensor([0, 1, 2, 3])
    options = Options(fuse="none", policy=policy, max_streams=streams)
    step = TrainStep(model, nn.CrossEntropyLoss(), optimizer, options=options).prepare(x, good)
    before = copy.deepcopy(model.state_dict())
    step(x, good)
    after = copy.deepcopy(model.state_dict())
    for count in (2, 3, 4):
        with pytest.raises(NimbleError, match="out of bounds"):
            step(x, torch.tensor([9, 1, 2, 3]))
        assert int(model[1].num_batches_tracked) == count  # the forward came to that
    assert [int(kept["step"]) for kept in optimizer.state.values()] == [1] * 4
    assert all(torch.equal(one, after[name]) for name, one in model.named_parameters())
    assert not any(torch.equal(one, before[name]) for name, one in model.named_parameters())
    step(x, good)
    assert [int(kept["step"]) for kept in optimizer.state.values()] == [2] * 4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_programs_without_calls_that_fail_get_no_more_waits(name: str, policy: str) -> None:
    model, args = CASES[name]()
    made = Prepared(model, *args)
    executable = made.capture(resolve_policy(policy)(made.graph, made.costs, max_streams=3))
    assert executable.issued is executable.schedule
    executable.close()


def test_waits_for_calls_that_may_fail_are_not_the_schedules() -> None:
    made = Prepared(Embedded(), torch.tensor([1, 2, 3]), torch.randn(3, 4))
    schedule = nimble(made.graph, made.costs)
    executable = made.capture(schedule)
    assert executable.schedule is schedule
    assert executable.counts is schedule.counts
    assert len(executable.issued.syncs) > len(schedule.syncs)
    check_schedule(made.graph, executable.issued, made.recording.program)
    executable.close()


def test_threads_take_turns() -> None:
    model = Branches().eval()
    made = Prepared(model, torch.randn(3, 8))
    executable = made.wide(2)
    inputs = [torch.randn(3, 8) for _ in range(4)]
    expected = [eager(model, [x]) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not same(executable.run([inputs[index]]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    executable.close()


def test_the_callers_modes_and_threads_are_put_back() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    executable = made.wide(2)
    before = torch.get_num_threads()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = executable.run([torch.randn(3, 8)])
        assert torch.is_autocast_enabled("cpu")
    assert out[0].dtype == torch.float32, "casts were recorded: autocast must not add any"
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == before
    executable.close()


def test_runs_from_new_threads_leave_the_process_its_number_of_threads() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    usual = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        executables = [made.wide(2) for _ in range(4)]
        together = threading.Barrier(len(executables))
        seen: list[int] = []

        def work(executable: HostExecutable) -> None:
            together.wait()
            for _ in range(10):
                executable.replay()
            seen.append(torch.get_num_threads())

        def in_threads(work: Callable[..., None], args: Sequence[Any]) -> None:
            threads = [threading.Thread(target=work, args=(arg,)) for arg in args]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        in_threads(work, executables)
        in_threads(lambda _: seen.append(torch.get_num_threads()), [None])
        assert seen == [5] * 5
        assert torch.get_num_threads() == 5
        for executable in executables:
            executable.close()
    finally:
        torch.set_num_threads(usual)


def test_observing_sees_every_call_once() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    for executable in (made.capture(), made.wide(2)):
        seen = made.device.observe(executable, made.recording, 3)
        spans = seen.timeline.spans
        assert {span.call for span in spans} == set(range(made.graph.size))
        assert len(spans) == made.graph.size
        assert all(span.end_ns >= span.start_ns for span in spans)
        assert [span.start_ns for span in spans] == sorted(span.start_ns for span in spans)
        ends = {span.call: span.end_ns for span in spans}
        starts = {span.call: span.start_ns for span in spans}
        assert all(ends[u] <= starts[v] for u, v in made.graph.edges)
        assert seen.timeline.source == "measured"
        assert seen.timeline.profiled_ns > 0
        assert seen.timeline.unprofiled_ns > 0
        assert len(seen.costs.ns) == len(seen.costs.spread_ns) == made.graph.size
        assert seen.costs.reliable
        executable.close()


def test_rounds_in_which_the_cores_were_taken_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    executable = made.capture()
    calls = range(made.graph.size)
    lasting = iter([8e6] * 4 + [7e6] * 4 + [1e3, 3e3, 2e3])

    def timed_replay() -> tuple[float, list[int], list[int]]:
        ns = int(next(lasting))
        return ns * len(calls), [ns * call for call in calls], [ns * (call + 1) for call in calls]

    monkeypatch.setattr(executable, "timed_replay", timed_replay)
    seen = made.device.observe(executable, made.recording, 11)
    assert seen.costs.ns == (2e3,) * len(calls)
    assert seen.costs.observed == 11
    assert min(seen.costs.spread_ns) > 1e6
    assert seen.timeline.profiled_ns == 2e3 * len(calls)
    assert seen.timeline.spans[-1].end_ns == 2e3 * len(calls)
    executable.close()


def test_closing_ends_the_workers_and_using_it_afterwards_raises() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    others = threading.active_count()
    executable = made.wide(2)
    executable.replay()
    assert threading.active_count() == others + 1
    executable.close()
    executable.close()
    with pytest.raises(DeviceError, match="closed"):
        executable.run([torch.randn(3, 8)])
    with pytest.raises(DeviceError, match="closed"):
        made.device.observe(executable, made.recording, 1)
    _until(lambda: threading.active_count() == others)


def test_an_executable_that_nobody_uses_is_collected_with_its_workers() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    others = threading.active_count()
    executable = made.wide(2)
    executable.replay()
    gone = weakref.ref(executable)
    del executable
    gc.collect()
    assert gone() is None
    _until(lambda: threading.active_count() == others)


def test_the_whole_model_runs_without_a_schedule() -> None:
    model = ConvNet().eval()
    made = Prepared(model, torch.randn(2, 3, 8, 8))
    executable = made.device.capture_whole(model, made.recording, made.signature)
    x = torch.randn(2, 3, 8, 8)
    assert same(executable.run([x]), eager(model, [x]))
    executable.replay()
    with pytest.raises(DeviceError, match="cannot be observed"):
        made.device.observe(executable, made.recording, 1)
    executable.close()
    with pytest.raises(DeviceError, match="closed"):
        executable.run([x])


def test_streams_are_capped_at_the_cores() -> None:
    device = HostDevice()
    cores = device.stream_cap(None)
    assert cores is not None
    assert cores >= 1
    assert device.stream_cap(1) == 1
    assert device.stream_cap(10_000) == cores


def _until(reached: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(500):
        if reached():
            return
        waited.wait(0.01)
    raise AssertionError("not reached within five seconds")


class Strided(nn.Module):
    """Batch norms on windows of larger results, which are read by nobody else."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.how(x * 2)) + 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        lambda x: x[:, :4],
        lambda x: x[::2, 4:],
        lambda x: x.t().contiguous().t()[:, :4],
        lambda x: x.view(-1, 4, 2)[..., 1],
        lambda x: x.view(-1, 2, 4).transpose(1, 2),
        lambda x: x[:, 1:5].contiguous(),
    ],
    ids=["columns", "rows and columns", "transposed", "pairs", "batched", "contiguous"],
)
def test_batch_norm_of_what_is_not_contiguous(how: Callable[[torch.Tensor], torch.Tensor], training: bool) -> None:
    """torch's variant that fills given tensors computes there only what is contiguous."""
    torch.manual_seed(0)
    model = Strided(how).train(training)
    made = Prepared(model, torch.randn(6, 8))
    executable, x = made.capture(), torch.randn(6, 8)
    statistics = [one.clone() for one in (model.norm.running_mean, model.norm.running_var)]
    replayed = executable.run([x])[0]
    after = [one.clone() for one in (model.norm.running_mean, model.norm.running_var)]
    for one, value in zip((model.norm.running_mean, model.norm.running_var), statistics, strict=True):
        one.copy_(value)
    with torch.no_grad():
        assert torch.equal(replayed, model(x))
    assert torch.equal(after[0], model.norm.running_mean)
    assert torch.equal(after[1], model.norm.running_var)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no call was tried yet."""
    monkeypatch.setattr(out_variants, "_refused", set())
    monkeypatch.setattr(out_variants, "_accepted", set())


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("measure", [nn.functional.binary_cross_entropy, nn.functional.huber_loss])
def test_losses_leave_their_neighbours_in_the_arena_alone(measure: Callable[..., torch.Tensor], reduction: str) -> None:
    """torch's variants that fill a scalar write a loss for each element first, from that scalar on."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        p, total = x.sigmoid(), x.square().sum()
        found = measure(p, (x > 0).float(), reduction=reduction)
        rest = x.cos().sum()
        return found * 2 + total + rest * p.sum()

    made = Prepared(loss, torch.randn(40, 50))
    executable = made.capture()
    for _ in range(3):
        x = torch.randn(40, 50)
        assert torch.equal(executable.run([x])[0], loss(x))
    refused = any("binary" in str(kind) or "huber" in str(kind) for kind in out_variants._refused)
    assert refused is (reduction != "none")


def qr(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(x.exp())[1] * 2


@pytest.mark.usefixtures("untried")
def test_results_that_are_left_unwritten_where_they_share_a_storage() -> None:
    made = Prepared(qr, torch.randn(4, 4))
    executable = made.capture()
    for _ in range(3):
        x = torch.randn(4, 4)
        poison(executable)
        assert same(executable.run([x]), eager(qr, [x]))


@pytest.mark.usefixtures("untried")
def test_memory_that_a_call_does_not_fill_is_planned_once_only() -> None:
    made = Prepared(qr, torch.randn(4, 4))
    schedule = single(made.graph, made.costs)
    memory, storages = made.plan(schedule), len(made.layout(schedule).arena)
    with pytest.raises(PlacementError, match="linalg_qr"):
        made.device.capture(made.recording, schedule, made.signature.tensors, memory=memory)
    assert len(made.layout(schedule).arena) == storages - 2
    executable = made.device.capture(made.recording, schedule, made.signature.tensors, memory=made.plan(schedule))
    assert executable.memory is not None
    assert sum(offset >= 0 for offset in executable.memory.offsets) == storages - 2
    another = Prepared(qr, torch.randn(4, 4))
    assert len(another.layout(schedule).arena) == storages - 2


@pytest.mark.usefixtures("untried")
def test_calls_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Counted(out_variants.Trial):
        def __init__(self, step: Step, *args: Any) -> None:
            tried.append(str(step.func))
            super().__init__(step, *args)

    monkeypatch.setattr(codegen, "Trial", Counted)

    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = (x * 2).sin()
        return (x * 3)[1:].sin() + 1

    for _ in range(2):
        made = Prepared(model, torch.randn(4, 4))
        executable, x = made.capture(), torch.randn(4, 4)
        assert same(executable.run([x]), eager(model, [x]))
    assert sorted(tried) == ["aten.mul.Tensor"] * 2 + ["aten.sin.default"] * 2


def in_a_process(work: Callable[[], None], seconds: float) -> None:
    """Where it may hang, and interrupts reach nobody else."""
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join(seconds)
    hangs = process.is_alive()
    if hangs:
        process.kill()
        process.join()
    assert not hangs, "it hangs"
    assert process.exitcode == 0


def _interrupted_everywhere() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model, x = Branches(2).eval(), torch.randn(3, 8)
    executable = Prepared(model, x).wide(2)
    (expected,), threads = eager(model, [x]), threading.active_count()
    for again in (0, 1, 2, 5):
        with torch.autocast("cpu", enabled=False):
            for _ in interrupted(lambda: executable.run([x]), again):
                assert torch.is_grad_enabled()
                assert torch.get_num_threads() == 2
                assert torch.equal(executable.run([x])[0], expected)
                assert threading.active_count() == threads + 1
    executable.close()
    assert threading.active_count() == threads


def test_an_interrupt_at_any_moment_leaves_an_executable_on_several_workers_usable() -> None:
    in_a_process(_interrupted_everywhere, 120)


def _interrupted_at_random() -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    model, x = Branches(6).eval(), torch.randn(3, 8)
    executable = Prepared(model, x).wide(3)
    (expected,), came = eager(model, [x]), 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    for _ in range(150):
        begun = threading.Event()

        def interrupt(begun: threading.Event, waits: Sequence[float]) -> None:
            begun.wait()
            for wait in waits:
                time.sleep(wait)
                signal.raise_signal(signal.SIGINT)

        waits = (draw.random() * 0.004, draw.random() * 0.0004)
        thread = threading.Thread(target=interrupt, args=(begun, waits))
        thread.start()
        try:
            begun.set()
            while thread.is_alive():
                executable.run([x])
        except KeyboardInterrupt:
            came += 1
        while True:
            try:
                thread.join()
                break
            except KeyboardInterrupt:
                continue
        assert torch.equal(executable.run([x])[0], expected)
    assert came > 100
    executable.close()


def test_interrupts_at_random_moments_leave_an_executable_on_several_workers_usable() -> None:
    in_a_process(_interrupted_at_random, 120)


_reached: list[Callable[[], object]] = []
"""What a call of ``_reach`` does."""


@torch.library.custom_op("nimble_tests::reach", mutates_args=())
def _reach(x: torch.Tensor) -> torch.Tensor:
    for act in _reached:
        act()
    return x + 1


def _fork() -> int:
    child = os.fork()
    if not child:
        signal.alarm(30)  # nobody waits for a child that hangs
    return child


def _in_a_child(work: Callable[[], None], child: int | None = None) -> None:
    """In a child alone, which is forked here if it was not yet, do ``work`` and end."""
    child = _fork() if child is None else child
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the child failed, or hung"


class Reaching(Branches):
    """Calls ``_reach`` between branches that workers run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_reach(super().forward(x)[0]))


def _forked(moment: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # OpenMP's own threads do not come along either
    model, x = Reaching(3).eval(), torch.randn(3, 8)
    executable = Prepared(model, x).wide(2)
    assert executable.schedule.streams == 2
    expected, used = eager(model, [x]), torch.get_num_threads()

    def works() -> None:
        _reached.clear()
        for _ in range(3):
            assert same(executable.run([x]), expected)
        assert torch.get_num_threads() == used

    if moment == "between runs":
        executable.run([x])
        _in_a_child(works)
    elif moment == "before the first run":
        _in_a_child(works)
    elif moment == "in a run of another thread":
        inside, go_on = threading.Event(), threading.Event()
        _reached[:] = [inside.set, lambda: go_on.wait(60)]
        thread = threading.Thread(target=executable.run, args=([x],))
        thread.start()
        assert inside.wait(60)
        try:
            _in_a_child(works)
        finally:
            go_on.set()
            thread.join()
    else:
        children: list[int] = []
        _reached[:] = [lambda: children.append(_fork())]
        failed = ""
        try:
            executable.run([x])
        except DeviceError as error:
            failed = str(error)

        def failed_and_works() -> None:
            assert "forked in the middle of this run" in failed
            works()

        _in_a_child(failed_and_works, *children)
        assert not failed
    works()
    executable.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize(
    "moment", ["between runs", "before the first run", "in a run of another thread", "in a run of its own"]
)
def test_an_executable_on_several_workers_works_in_a_forked_process(moment: str) -> None:
    in_a_process(partial(_forked, moment), 120)


def test_an_interrupt_at_any_moment_while_an_entry_is_sought_leaves_no_mode_in_force() -> None:
    x = torch.randn(3)
    result = x * 2

    def sought() -> Callable[..., Any]:
        return codegen._entry(torch.ops.aten.mul.Tensor, [x, 2], {}, result)

    assert sought() is torch._C._VariableFunctions.mul  # the first mode of a process imports much
    for _ in interrupted(sought):
        assert not _get_current_dispatch_mode_stack()
    assert sought() is torch._C._VariableFunctions.mul


def test_calls_on_nothing() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._foreach_add_([y[:0], y[3:]], 1.0)
        return y + 1

    made, x = Prepared(forward, torch.randn(3, 2)), torch.randn(3, 2)
    assert torch.equal(made.capture().run([x])[0], x * 2 + 1)


def test_workers_do_not_wait_for_an_empty_part_of_a_result() -> None:
    """It has no bytes, so that nothing orders its reader after the call that makes the rest."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for _ in range(20):
            y = torch.linalg.matrix_exp(y * 0.1)
        return y, y[3:].sum()

    made = Prepared(forward, torch.randn(3, 3))
    graph = made.graph
    executable = made.capture(plan_streams(graph, [*[0] * (graph.size - 1), 1], policy="two"))
    x = torch.randn(3, 3)
    got = executable.run([x])
    assert all(torch.equal(a, b) for a, b in zip(got, forward(x), strict=True))
    executable.close()


def test_calls_are_timed_alone_but_not_side_by_side() -> None:
    calls: list[str] = []

    def fails() -> None:
        raise RuntimeError("no routine")

    alone, broken, beside = HostDevice().call_times_ns(
        [lambda: calls.append("alone"), fails, (lambda: calls.append("beside"), fails)]
    )
    assert alone is not None
    assert alone > 0
    assert broken is beside is None
    assert set(calls) == {"alone"}


class ReadAfterTaking(nn.Module):
    """A result is read by several calls, between what may fail and what changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(8, 8))
        self.register_buffer("second", torch.zeros(8, 8))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(x)
        b = a.exp()
        self.first.add_(a)
        c = x.index_select(0, index)
        self.second.add_(c)
        d = a.sin()
        return b.cos().sinh() + d


def in_any_order(seed: int) -> Callable[[CallGraph, Any], Schedule]:
    """A policy that puts calls on two streams, in an order of its own."""

    def policy(graph: CallGraph, costs: Any) -> Schedule:
        draw, ranks = random.Random(seed), list(range(graph.size))
        draw.shuffle(ranks)
        order = list(networkx.lexicographical_topological_sort(graph.to_networkx(), key=ranks.__getitem__))
        return drawn_streams(graph, draw, 2, order)

    return policy


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 300, 50)], ids=str)
def test_calls_that_move_within_their_stream_leave_reuse_of_memory_in_order(seeds: range) -> None:
    x, index = torch.randn(8, 8), torch.arange(8)
    for seed in seeds:
        model = ReadAfterTaking()
        eager = copy.deepcopy(model)
        net = Nimble(model, Options(fuse="none", tune="off", policy=in_any_order(seed))).prepare(x, index)
        torch.testing.assert_close(net(x, index), eager(x, index))
        with pytest.raises(NimbleError):
            net(x, index + 1)
        with pytest.raises(IndexError):
            eager(x, index + 1)
        torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))
        net.close()
