"""Real data: scikit-learn's handwritten digits are learned as well by a prepared step as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nimble_core.api.train_step import TrainStep
from nimble_core.scheduling.options import Options

EPOCHS, BATCH = 4, 64


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_digits_are_learned_as_in_eager(device: str) -> None:
    data = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn: make test installs it").load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64, device=device)
    torch.manual_seed(0)
    order = torch.randperm(len(labels)).to(device)
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    # The last batch of an epoch is short: ours prepares for it on the way.
    batches = [train[torch.randperm(len(train)).to(device)].split(BATCH) for _ in range(EPOCHS)]
    assert {len(part) for part in batches[0]} == {BATCH, len(train) % BATCH}
    start = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    ).to(device)  # fmt: skip

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[Tensor, Tensor], Tensor]) -> float:
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
        for epoch in batches:
            for part in epoch:
                step(images[part], labels[part])
            rates.step()
        model.eval()
        with torch.no_grad():
            return float((model(images[test]).argmax(1) == labels[test]).double().mean())

    def ingredients() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(start)
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    model, optimizer = ingredients()

    def eager(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    accuracy = trained(model, optimizer, eager)
    ours, its_optimizer = ingredients()
    first = batches[0][0]
    prepared = TrainStep(ours, functional.cross_entropy, its_optimizer, options=Options(on_new_shape="prepare"))
    with closing(prepared.prepare(images[first], labels[first])) as step:
        assert trained(ours, its_optimizer, step) == pytest.approx(accuracy, abs=0.01)
    assert accuracy > 0.9
