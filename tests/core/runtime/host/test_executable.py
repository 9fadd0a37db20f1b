"""A replay on the host gives what eager gives, and leaves what eager leaves."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies.base import plan_streams
from tests.support.host_models import CASES, Branches, Prepared, eager, same
from tests.support.models import make


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("streams", [1, 2, None])
def test_replays_equal_eager_bit_for_bit_on_fresh_inputs(name: str, streams: int | None) -> None:
    model, args, _ = make(name)
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


def test_an_empty_part_of_a_result_is_read_on_another_stream() -> None:
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


def test_nothing_is_held_after_close() -> None:
    made = Prepared(Branches().eval(), torch.randn(3, 8))
    executable = made.wide(2)
    executable.replay()
    arena = StorageWeakRef(executable.arena)
    executable.close()
    assert executable.arena is None
    assert arena.expired()


def test_a_model_called_as_it_is_keeps_its_buffers_to_itself_unless_static() -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Buffer(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.total.add_(torch.from_numpy(x.numpy() * 2))

    for outputs in ("copy", "static"):
        net = Nimble(Total(), Options(outputs=outputs))  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="called as it is"):
            net.prepare(torch.ones(3))
        first, second = net(torch.ones(3)), net(torch.ones(3))
        assert second.tolist() == [4.0] * 3
        assert first.tolist() == [2.0 if outputs == "copy" else 4.0] * 3


def _forked() -> None:
    torch.set_num_threads(1)  # OpenMP's own threads do not come along
    model, x = Branches().eval(), torch.randn(3, 8)
    executable, expected = Prepared(model, x).capture(), eager(model, [x])
    with executable.paused():  # as another thread's run does
        child = os.fork()
        if not child:
            signal.alarm(30)  # nobody waits for a child that hangs
            os._exit(0 if same(executable.run([x]), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same(executable.run([x]), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_an_executable_that_runs_at_a_fork_works_in_the_child() -> None:
    process = multiprocessing.get_context("spawn").Process(target=_forked)
    process.start()
    process.join(60)
    assert process.exitcode == 0
