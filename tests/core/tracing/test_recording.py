from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nimble_core import Nimble, Options
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, issuing, rewinding
from nimble_core.tracing.signature import Signature
from tests.support.models import Wide


def recorded(model: Any, *args: Any) -> Recording:
    return record(model, Signature(args, {}), args=args, kwargs={})


def test_storages_that_are_let_go_are_gone_and_the_outputs_stay() -> None:
    model, x = Wide(), torch.randn(2, 16)
    recording = recorded(model, x)
    issuer = Issuer(recording, [x])
    kept = {recording.storage_of[slot] for slot in recording.outputs}
    last: dict[int, int] = {}
    for call in recording.program.calls:
        for access in call.accesses:
            last[access.ref.storage] = call.index
    with issuing("cpu"):
        for call in recording.program.calls:
            issuer.issue(call.index)
            for storage, at in last.items():
                if at == call.index and storage not in kept:
                    issuer.release(storage)
    held = {recording.storage_of[slot] for slot, tensor in enumerate(issuer.tensors) if tensor is not None}
    assert held == kept
    assert torch.equal(issuer.outputs()[0], model(x))


def test_an_issuer_uses_its_own_inputs_and_the_models_weights() -> None:
    model, x = Wide(), torch.randn(2, 16)
    recording = recorded(model, x)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for tensor in recording.given.values()} == weights
    y = torch.randn(2, 16)
    first, second = Issuer(recording, [x]), Issuer(recording, [y])
    with issuing("cpu"):
        for call in recording.program.calls:
            first.issue(call.index)
            second.issue(call.index)
    assert torch.equal(first.outputs()[0], model(x))
    assert torch.equal(second.outputs()[0], model(y))


class Counts(nn.Module):
    """Writes each input behind the last one, at a position of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(0, self.position, self.norm(x)[:1])
        self.position.add_(1)
        return self.rows.sum(0)


def counts(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    position.add_(1)
    return x[position]


def test_only_counters_are_put_back() -> None:
    net = Counts()
    x, position = torch.ones(4, 3), torch.zeros(1, dtype=torch.int64)
    net(x)
    recording = recorded(net, x)
    rewind = rewinding(recording, [x])
    assert rewind is not None
    net(x)
    rewind()
    assert (net.position.item(), net.norm.num_batches_tracked.item()) == (1, 2)  # normalisation is none
    recording = recorded(counts, x, position)
    rewind = rewinding(recording, [x, position])
    assert rewind is not None
    counts(x, position)
    rewind()
    assert position.item() == 0
    recording = recorded(nn.Linear(3, 3), x)
    assert rewinding(recording, [x]) is None


@torch.no_grad()
def test_many_replays_do_not_count_out_of_range() -> None:
    net, eager, x = Counts(), Counts(), torch.rand(4, 3)
    prepared = Nimble(net, Options(fuse="none", budget_s=0.1)).prepare(x)
    for _ in range(3):
        torch.testing.assert_close(prepared(x), eager(x))
    assert net.position.item() == 3
