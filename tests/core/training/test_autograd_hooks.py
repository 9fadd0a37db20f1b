"""Searches for gradients of parameters that autograd's graph does not lead to."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_core import InputError, Nimble, NimbleError, Options
from nimble_core.training import autograd_hooks
from nimble_core.training.autograd_hooks import Behind, current_search, searches_are_answered

OPTIONS = Options(fuse="none", policy="single", tune="off")


def node_count(loss: torch.Tensor) -> int:
    """Nodes of the graph behind a loss."""
    seen: set[Any] = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [one for one, _ in node.next_functions]
    return len(seen)


class Two(nn.Module):
    """Shared by its two halves: a gradient comes by two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Two, Nimble]]:
    torch.manual_seed(0)
    eager = Two()
    net = Nimble(copy.deepcopy(eager), OPTIONS).prepare(torch.randn(3, 4, requires_grad=True), training=True)
    yield eager, net
    net.close()


def loss_of(model: nn.Module, x: torch.Tensor, *, around: bool) -> torch.Tensor:
    """Of what the model makes; ``around``: its parameters are in the loss by themselves too."""
    loss = model(x).sin().sum()
    return loss + sum((one**3).sum() for one in model.parameters()) if around else loss


def test_the_graph_ends_at_the_replay(pair: tuple[Two, Nimble]) -> None:
    _, net = pair
    assert searches_are_answered()
    assert node_count(net(torch.randn(3, 4)).sum()) == 3, "sum, replay and its anchor"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_found_is_what_eager_finds(pair: tuple[Two, Nimble], data: st.DataObject) -> None:
    eager, net = pair
    names = [name for name, _ in eager.named_parameters()]
    sought = data.draw(st.lists(st.sampled_from([*names, "x"]), min_size=1, max_size=6))
    around, edges = data.draw(st.booleans()), data.draw(st.booleans())
    x = torch.randn(3, 4)
    found = []
    for model in (eager, net):
        given = x.clone().requires_grad_("x" in sought)
        known: dict[str, Any] = {**dict(model.named_parameters()), "x": given}
        wanted = [known[name] for name in sought]
        if edges:
            wanted = [torch.autograd.graph.get_gradient_edge(one) for one in wanted]
        found.append(torch.autograd.grad(loss_of(model, given, around=around), wanted))
        assert all(one.grad is None for one in known.values())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("around", [False, True])
def test_backward_for_some_adds_to_their_gradients(pair: tuple[Two, Nimble], around: bool) -> None:
    x, found = torch.randn(3, 4), []
    for model in pair:
        for _ in range(2):
            loss_of(model, x, around=around).backward(inputs=list(model.first.parameters()))
        assert model.second.weight.grad is None
        found.append([one.grad for one in model.first.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*found)


def test_several_forwards_in_one_loss(pair: tuple[Two, Nimble]) -> None:
    a, b, found = torch.randn(3, 4), torch.randn(3, 4), []
    for model in pair:
        loss = (model(a).sin() * model(b)).sum()
        found.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
        loss.backward()
        found[-1] += tuple(one.grad for one in model.parameters())
        model.zero_grad()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("adding", [False, True])
def test_a_hook_that_went_between_two_forwards_of_one_loss(pair: tuple[Two, Nimble], adding: bool) -> None:
    """The graph leads to the weight behind the first forward, and does not behind the second."""
    a, b, found = torch.randn(3, 4), torch.randn(3, 4), []
    for model in pair:
        weight = model.first.weight
        hook = weight.register_hook(lambda gradient: None)
        one = model(a).sin()
        hook.remove()
        loss = (one * model(b)).sum()
        if adding:
            loss.backward(inputs=[weight])
        found.append(weight.grad if adding else torch.autograd.grad(loss, [weight])[0])
        assert all(other.grad is None for other in model.parameters() if other is not weight)
        model.zero_grad()
    torch.testing.assert_close(*found)


# -- several searches at once -----------------------------------------------------------------------------------------


def run_together(jobs: Sequence[Callable[[], object]]) -> None:
    """Each on a thread of its own; raises what one of them raised."""
    failed: list[BaseException] = []
    together = threading.Barrier(len(jobs))

    def guarded(job: Callable[[], object]) -> None:
        try:
            together.wait(60)
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "deadlock"


def test_a_search_that_ends_leaves_that_of_another_thread_alone(pair: tuple[Two, Nimble]) -> None:
    """One search waits in the graph, right before the replay, until the other one has ended."""
    eager, net = pair
    x, parameters = torch.randn(3, 4), list(net.parameters())
    expected = torch.autograd.grad(loss_of(eager, x, around=False), list(eager.parameters()))
    out = net(x)
    loss = out.sin().sum()
    begun, ended = threading.Event(), threading.Event()
    waiting: list[int] = []

    def wait(gradient: torch.Tensor) -> None:
        if threading.get_ident() in waiting:
            begun.set()
            assert ended.wait(60)

    def search_slowly() -> None:
        waiting.append(threading.get_ident())
        torch.testing.assert_close(torch.autograd.grad(loss, parameters, retain_graph=True), expected)

    def search() -> None:
        assert begun.wait(60)
        try:
            torch.testing.assert_close(torch.autograd.grad(loss, parameters, retain_graph=True), expected)
        finally:
            ended.set()

    out.register_hook(wait)
    run_together([search_slowly, search])
    assert all(one.grad is None for one in parameters)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("adding", [False, True])
def test_threads_search_one_graph(pair: tuple[Two, Nimble], adding: bool) -> None:
    """``adding``: beside them, others run backwards of the same graph, which add to ``.grad``."""
    eager, net = pair
    x, parameters, rounds = torch.randn(3, 4), list(net.parameters()), 100
    expected = torch.autograd.grad(loss_of(eager, x, around=False), list(eager.parameters()))
    loss = loss_of(net, x, around=False)

    def search() -> None:
        for _ in range(rounds):
            torch.testing.assert_close(torch.autograd.grad(loss, parameters, retain_graph=True), expected)

    def add() -> None:
        for _ in range(rounds):
            loss.backward(retain_graph=True)

    run_together([search, search, *([add, add] if adding else [search, search])])
    for one, gradient in zip(parameters, expected, strict=True):
        if adding:
            torch.testing.assert_close(one.grad, 2 * rounds * gradient, rtol=1e-4, atol=1e-4)
        else:
            assert one.grad is None
    net.zero_grad()


# What a user may ask of a graph, and what comes of it.
RUNS: dict[str, Callable[[torch.Tensor, torch.Tensor, Two], Any]] = {
    "grad": lambda loss, x, model: torch.autograd.grad(loss, list(model.parameters()), retain_graph=True),
    "grad of the input": lambda loss, x, model: torch.autograd.grad(loss, [x], retain_graph=True),
    "backward": lambda loss, x, model: loss.backward(retain_graph=True),
    "backward for some": lambda loss, x, model: loss.backward(inputs=[model.first.weight], retain_graph=True),
}


def nested(model: Any, runs: Sequence[str], *, shared: bool, threads: set[int] | None = None) -> list[Any]:
    """Do the first of ``runs``, the next one in a hook of its graph, right before the replay, and so on; what each
    found, and what ``.grad`` is after it.

    Args:
        model: differentiated.
        runs: keys of ``RUNS``.
        shared: all are of one forward; else each is of its own.
        threads: gets those on which hooks ran.
    """
    pending, results, made = list(runs), [], []

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 12).view(3, 4).add_(len(pending)).requires_grad_()
        out = model(x)
        out.register_hook(following)
        return out.sin().sum(), x

    def following(gradient: torch.Tensor) -> None:
        if threads is not None:
            threads.add(threading.get_ident())
        if pending:
            run = RUNS[pending.pop(0)]
            with torch.enable_grad():
                if not (shared and made):
                    made.append(forward())
            loss, x = made[-1]
            found = run(loss, x, model)
            grads = [one.grad.clone() if one.grad is not None else None for one in (*model.parameters(), x)]
            results.append((found, grads))

    following(torch.zeros(()))
    model.zero_grad()
    assert len(results) == len(runs)
    return results


@settings(max_examples=60, deadline=None)
@given(runs=st.lists(st.sampled_from(sorted(RUNS)), min_size=2, max_size=4), shared=st.booleans())
def test_runs_nested_in_hooks_of_each_other(pair: tuple[Two, Nimble], runs: list[str], shared: bool) -> None:
    eager, net = pair
    torch.testing.assert_close(nested(net, runs, shared=shared), nested(eager, runs, shared=shared))
    assert current_search() is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_search_is_known_on_threads_that_the_engine_hands_it_to(pair: tuple[Two, Nimble], shared: bool) -> None:
    """It goes on on another thread where runs are nested too deeply, as it does where the device is a GPU."""
    eager, net = pair
    runs, threads = ["grad", "backward for some"] * 40, set[int]()
    found = nested(net, runs, shared=shared, threads=threads)
    assert len(threads) > 1
    torch.testing.assert_close(found, nested(eager, runs, shared=shared))


def test_a_search_that_fails_is_over(pair: tuple[Two, Nimble]) -> None:
    eager, net = pair
    x, parameters = torch.randn(3, 4), list(net.parameters())
    out = net(x)
    failing = True

    def fail(gradient: torch.Tensor) -> None:
        if failing:
            with torch.enable_grad():
                other = net(x).sum()
            for _ in range(2):
                with pytest.raises(RuntimeError, match="not have been used"):
                    torch.autograd.grad(other, [*parameters, torch.zeros(1, requires_grad=True)], retain_graph=True)
            raise KeyError("in a hook")

    out.register_hook(fail)
    loss = out.sin().sum()
    with pytest.raises(KeyError, match="in a hook"):
        torch.autograd.grad(loss, parameters, retain_graph=True)
    assert current_search() is None
    failing = False
    loss.backward()
    expected = torch.autograd.grad(loss_of(eager, x, around=False), list(eager.parameters()))
    torch.testing.assert_close(tuple(one.grad for one in parameters), expected)
    net.zero_grad()


def test_what_a_search_found_is_not_kept(pair: tuple[Two, Nimble]) -> None:
    _, net = pair
    loss = net(torch.randn(3, 4)).sum()
    gone = [weakref.ref(one) for one in torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)]
    assert [one() for one in gone] == [None] * 4


def test_where_torch_cannot_remove_what_a_thread_keeps(
    pair: tuple[Two, Nimble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nimble_core.torch_compat.autograd._remove", None)
    eager, net = pair
    for runs in (["grad", "backward", "grad"], ["backward"], ["backward for some", "grad"]):
        torch.testing.assert_close(nested(net, runs, shared=True), nested(eager, runs, shared=True))
        assert current_search() is None


def test_what_is_not_used_is_an_error_or_none(pair: tuple[Two, Nimble]) -> None:
    for model in pair:
        weight, other = model.first.weight, torch.zeros(2, requires_grad=True)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(model(torch.randn(3, 4)).sum(), [weight, other])
        found = torch.autograd.grad(model(torch.randn(3, 4)).sum(), [weight, other], allow_unused=True)
        assert [one is None for one in found] == [False, True]


def test_searches_of_others_pass_by(pair: tuple[Two, Nimble]) -> None:
    _, net = pair
    x = torch.randn(3, 4, requires_grad=True)
    out = net(x)
    (behind,) = [node.behind for node, _ in out.sum().grad_fn.next_functions]
    assert isinstance(behind, Behind)
    (found,) = torch.autograd.grad(out.sum(), [x])
    assert found.shape == x.shape
    assert current_search() is None
    weight = net.first.weight
    (penalty,) = torch.autograd.grad((weight**2).sum(), [weight])
    torch.testing.assert_close(penalty, 2 * weight)


def test_graphs_are_looked_through_only_for_tensors_that_lie_behind(
    pair: tuple[Two, Nimble], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    monkeypatch.setattr("nimble_core.training.autograd_hooks._behind", lambda outputs: looked.append(outputs) or [])
    eager, net = pair
    x = torch.randn(3, 4, requires_grad=True)
    torch.autograd.grad(eager(x).sum(), [x, eager.first.weight])
    assert not looked
    torch.autograd.grad((net.first.weight**2).sum(), [net.first.weight])
    assert len(looked) == 1


def test_parameters_with_hooks_are_in_the_graph(pair: tuple[Two, Nimble]) -> None:
    seen: list[list[torch.Tensor]] = []
    x = torch.randn(3, 4)
    for model in pair:
        mine: list[torch.Tensor] = []
        early = model.first.weight.register_hook(lambda one, mine=mine: mine.append(one) or one * 2)
        late = model.second.bias.register_post_accumulate_grad_hook(lambda one, mine=mine: mine.append(one.grad))
        loss_of(model, x, around=False).backward()
        mine += [one.grad for one in model.parameters()]
        early.remove()
        late.remove()
        model.zero_grad()
        seen.append(mine)
    torch.testing.assert_close(*map(list, (sorted(one, key=lambda t: float(t.sum())) for one in seen)))
    assert node_count(pair[1](x).sum()) == 3, "removed hooks need no edge"


def test_a_hook_that_comes_after_the_forward_is_refused(pair: tuple[Two, Nimble]) -> None:
    _, net = pair
    out = net(torch.randn(3, 4)).sum()
    hook = net.first.bias.register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match=r"first\.bias got a hook"):
        out.backward()
    hook.remove()
    assert net.first.bias.grad is None
    out.backward()
    net.zero_grad()


@pytest.mark.parametrize("closed", [False, True])
def test_parameters_can_be_swapped(closed: bool) -> None:
    """As ``.to()`` does where modules are set to: torch refuses tensors that have weak references."""
    model, other = Two(), nn.Parameter(torch.ones(4, 4))
    net = Nimble(model, OPTIONS).prepare(torch.randn(3, 4), training=True)
    net(torch.randn(3, 4)).sum().backward()
    if closed:
        net.close()
    weight = model.first.weight
    torch.utils.swap_tensors(weight, other)
    assert model.first.weight is weight
    assert torch.equal(weight, torch.ones(4, 4))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert weight.dtype is torch.float64
    net.close()


def test_what_is_gone_is_expected_no_more() -> None:
    gc.collect()
    before = dict(autograd_hooks._expected)
    net = Nimble(Two(), OPTIONS).prepare(torch.randn(3, 4), training=True)
    assert len(autograd_hooks._expected) == len(before) + 1
    net.close()
    del net
    gc.collect()
    assert autograd_hooks._expected == before


def test_a_search_behind_what_was_closed_is_no_search_that_finds_nothing() -> None:
    net = Nimble(Two(), OPTIONS).prepare(torch.randn(3, 4), training=True)
    loss, weight = net(torch.randn(3, 4)).sum(), net.first.weight
    net.close()
    del net
    gc.collect()
    with pytest.raises(NimbleError):
        torch.autograd.grad(loss, [weight], allow_unused=True)


def test_reducers_find_all_parameters_in_the_graph(pair: tuple[Two, Nimble], monkeypatch: pytest.MonkeyPatch) -> None:
    _, net = pair
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert node_count(net(torch.randn(3, 4)).sum()) == 3 + 4


def test_without_a_way_to_answer_all_parameters_are_in_the_graph(
    pair: tuple[Two, Nimble], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, net = pair
    monkeypatch.setattr("nimble_core.training.autograd_function.searches_are_answered", lambda: False)
    out = net(torch.randn(3, 4)).sum()
    assert node_count(out) == 3 + 4
    assert all(one is not None for one in torch.autograd.grad(out, list(net.parameters())))


def test_where_torch_keeps_nothing_for_a_thread_searches_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_hooks, "STASHES", False)
    run = torch.autograd._engine_run_backward
    assert not searches_are_answered()
    assert torch.autograd._engine_run_backward is run


def test_what_puts_torchs_own_run_back_is_noticed(pair: tuple[Two, Nimble]) -> None:
    model, net = pair
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    net(x)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # as torch's patches for a while do
    found = torch.autograd.grad(net(x).sum(), list(net.parameters()), allow_unused=True)
    torch.testing.assert_close(found, expected)
    ours = torch.autograd._engine_run_backward
    net(x)
    assert torch.autograd._engine_run_backward is ours, "it is not wrapped again"


WRAPPED_BEFORE = """
from functools import wraps
import torch
run = torch.autograd._engine_run_backward
torch.autograd._engine_run_backward = wraps(run)(lambda *args, **kwargs: run(*args, **kwargs))  # some tool's

from nimble_core import Nimble, Options
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
x = torch.randn(2, 4)
net = Nimble(model, Options(tune="off")).prepare(x, training=True)
expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
for _ in range(2):
    torch.testing.assert_close(torch.autograd.grad(net(x).sum(), list(net.parameters())), expected)
"""


def test_a_run_that_somebody_wrapped_before_is_wrapped_too() -> None:
    done = subprocess.run([sys.executable, "-c", WRAPPED_BEFORE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


COMPILED = """
import torch
from torch._dynamo.utils import counters
from nimble_core.training.autograd_hooks import searches_are_answered

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)

def step(x):
    loss = (weight * x).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()

for _ in range(2):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        compiled(torch.ones(3))
    print(sum(counters["graph_break"].values()))
    searches_are_answered()
"""


@pytest.mark.slow
def test_code_that_is_compiled_around_a_backward_breaks_no_more_often() -> None:
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=120, check=True)
    before, after = map(int, run.stdout.split())
    assert before == after
    assert before > 0, "else nothing is traced around it"
