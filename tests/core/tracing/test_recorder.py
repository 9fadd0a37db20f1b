"""What is recorded gives what eager gives, marks all that it writes, and leaves nothing behind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.ir.call_graph import build_graph
from nimble_core.scheduling.options import Options
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.tracing.side_effects import run_preserved
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import check_static, other_values
from nimble_core.utils.errors import CaptureError, NimbleError
from tests.support.models import CASES, Busy, Deep, Wide, make
from tests.support.recordings import any_order, assert_clean, owned, put, recorded, reissued, same


def recorded_on_others(model: Callable[..., Any], signature: Signature, seed: int = 0) -> Recording:
    args, kwargs = builder(signature.structure)(other_values(signature.tensors, seed))
    return record(model, Signature(args, kwargs), args=args, kwargs=kwargs)


@pytest.mark.parametrize("name", CASES)
def test_reissue_equals_eager_in_any_order_that_the_hazards_allow(name: str) -> None:
    model, args, kwargs = make(name)
    signature = Signature(args, kwargs)
    recording = record(model, signature, args=args, kwargs=kwargs)
    check_static(recording, recorded_on_others(model, signature))
    graph = build_graph(recording.program)
    rng = random.Random(name)
    start = [tensor.detach().clone() for tensor in owned(model)]
    for turn in range(5):
        order = list(range(graph.size)) if turn == 0 else any_order(graph, rng)
        eager_inputs = other_values(signature.tensors, seed=turn + 5)
        inputs = other_values(signature.tensors, seed=turn + 5)
        eager_args, eager_kwargs = builder(signature.structure)(eager_inputs)
        torch.manual_seed(turn)
        with torch.no_grad():
            expected, _ = flatten(model(*eager_args, **eager_kwargs))
        expected_state = [tensor.detach().clone() for tensor in owned(model)]
        # An output may alias a buffer of the model that the re-issue is about to write.
        expected = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in expected]
        put(owned(model), start)
        torch.manual_seed(turn)
        outputs = reissued(recording, inputs, order)
        assert same(outputs, expected), f"outputs of turn {turn}"
        assert same(owned(model), expected_state), f"state after turn {turn}"
        assert same(inputs, eager_inputs), f"inputs after turn {turn}"
        put(owned(model), start)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_written_that_the_accesses_do_not_mark(name: str) -> None:
    model, args, kwargs = make(name)
    recording = recorded(model, *args, **kwargs)
    storages = recording.program.storages
    issuer = Issuer(recording, [tensor.clone() for tensor in Signature(args, kwargs).tensors])

    def contents() -> dict[int, bytes]:
        seen: dict[int, bytes] = {}
        for slot, tensor in enumerate(issuer.tensors):
            if tensor is not None and recording.storage_of[slot] not in seen:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                seen[recording.storage_of[slot]] = whole.numpy().tobytes()
        return seen

    torch.manual_seed(0)
    with issuing("cpu"):
        for call in recording.program.calls:
            before = contents()
            issuer.issue(call.index)
            after = contents()
            marked = {ref.storage for ref in call.writes}
            changed = {storage for storage, value in before.items() if after[storage] != value}
            # Memory that a host step has just made holds anything: only what was there before counts.
            assert changed <= marked, f"{call} wrote {[storages[s] for s in changed - marked]}"


@pytest.mark.parametrize("way", ["record", "warm-up"])
@pytest.mark.parametrize("error", [None, KeyError("the model's own"), KeyboardInterrupt()])
def test_a_run_leaves_model_inputs_and_random_state_as_they_were(way: str, error: BaseException | None) -> None:
    model = Busy(error).train()
    x = torch.randn(4, 3)
    before = copy.deepcopy({k: v for k, v in model.__dict__.items() if k != "error"})
    tensors = [*owned(model), model.tensor, x]
    values = [tensor.detach().clone() for tensor in tensors]
    identities = [id(tensor) for tensor in owned(model)]
    python, host = random.getstate(), torch.get_rng_state()
    run = (lambda: recorded(model, x)) if way == "record" else (lambda: run_preserved(model, (x,), {}))
    if error is None:
        run()
    else:
        with pytest.raises(type(error)) as caught:
            run()
        assert caught.value is error
    assert same(tensors, values)
    assert [id(tensor) for tensor in owned(model)] == identities
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), host)
    assert model.history == before["history"]
    assert model.table == before["table"]
    assert (model.number, model.gone, model.absent) == (1, "here", None)
    assert not hasattr(model, "fresh")
    assert model.__dict__.keys() == before.keys() | {"error"}
    assert_clean()
    assert recorded(Deep(), torch.randn(1, 8)).program.calls


@pytest.mark.parametrize("way", ["record", "warm-up"])
def test_hooks_that_a_library_installs_at_its_first_call_are_not_installed_twice(way: str) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "_installed"):
                self.inner.register_forward_hook(lambda *_: self.seen.append(1))
                self._installed = True
            self.seen.clear()
            return self.inner(x) * (len(self.seen) or 1)

    model, x = Lazy(), torch.ones(1, 2)
    for _ in range(3):
        _ = recorded(model, x) if way == "record" else run_preserved(model, (x,), {})
    assert not model.inner._forward_hooks
    model(x)
    assert len(model.inner._forward_hooks) == 1
    assert model.seen == [1]


def test_operators_that_take_functions_are_refused_and_leave_the_model_usable() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda one: one + 1, lambda one: one - 1, (x,))

    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"cond takes functions"):
        run_preserved(branch, (x,), {})
    with torch.no_grad():
        assert torch.equal(branch(x), x + 1)


def test_checks_are_calls_of_their_own() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > -100).all())
        return torch.linalg.inv(x) + 1

    good = torch.eye(3) + 0.1
    with torch.no_grad():
        program = recorded(checked, good).program
        names = [call.operator for call in program.calls]
        assert "aten._assert_async.default" in names
        assert "aten._linalg_check_errors.default" in names
        assert not any(call.writes for call in program.calls if "_assert" in call.operator)
        for policy in ("single", "nimble"):
            net = Nimble(checked, Options(fuse="none", policy=policy, tune="off")).prepare(good)
            torch.testing.assert_close(net(good), checked(good))
            with pytest.raises(NimbleError, match="got zero"):
                net(torch.eye(3) - 200)
            with pytest.raises(NimbleError, match=r"linalg\.inv"):
                net(torch.zeros(3, 3))
            torch.testing.assert_close(net(good), checked(good))


@pytest.mark.parametrize("branches", [1, 5])
def test_independent_branches_have_no_edge(branches: int) -> None:
    program = recorded(Wide(branches), torch.randn(1, 16)).program
    graph = build_graph(program)
    labels = [call.label for call in program.calls]
    assert labels.count("relu") == branches
    reach = {(u, v) for u, v in graph.edges}
    linears = [index for index, label in enumerate(labels) if label == "addmm"]
    assert not [(u, v) for u in linears for v in linears if (u, v) in reach]
