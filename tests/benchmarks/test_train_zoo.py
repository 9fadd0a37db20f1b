"""What the training benchmark trains: tasks that learn, copies that stand alone, and CycleGAN's step as published."""

from __future__ import annotations

import doctest
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import train_zoo
from benchmarks.train_zoo import BATCHES, TASKS, CycleGAN, Task, load

CPU = torch.device("cpu")


def trained(task: Task, steps: int) -> list[float]:
    optimizer = task.make_optimizer(fused=True)
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = task.loss(*task.batches[i % len(task.batches)])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def small(name: str) -> Task:
    """Of the same make, but small."""
    torch.manual_seed(0)
    if name == "CycleGAN":
        return train_zoo._cyclegan(1, CPU, size=32, width=8, blocks=1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return train_zoo._bert(4, CPU, tokens=16, **sizes, vocab_size=1100)


def test_sizes_are_the_published_ones() -> None:
    assert doctest.testmod(train_zoo) == (0, 2)
    assert set(BATCHES) == set(TASKS)
    assert {name for name in TASKS if name.endswith("CIFAR")} == {n for n, sizes in BATCHES.items() if len(sizes) == 3}


@pytest.mark.parametrize("name", ["CycleGAN", "BERT"])
def test_tasks_learn_their_batches(name: str) -> None:
    losses = trained(small(name), 12)
    assert sum(losses[-2:]) < sum(losses[:2])


def test_a_copy_starts_from_the_same_values_and_goes_its_own_way() -> None:
    task = small("CycleGAN")
    before = {name: one.clone() for name, one in task.model.state_dict().items()}
    first, second = trained(task.copied(), 3), trained(task.copied(), 3)
    assert first == second
    assert all(torch.equal(one, before[name]) for name, one in task.model.state_dict().items())


def test_float64_is_the_same_task_with_less_rounding() -> None:
    task = small("CycleGAN")
    wide = task.in_float64()
    assert {one.dtype for one in wide.model.parameters()} == {torch.float64}
    narrow, exact = trained(task.copied(), 3), trained(wide, 3)
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=1e-4)


def test_words_stay_whole_numbers_in_float64_and_only_masked_ones_count() -> None:
    (words,), labels = small("BERT").in_float64().batches[0]
    assert words.dtype == torch.int64
    assert labels is not None
    assert torch.equal(labels != -100, words == 103)
    assert 0 < int((labels != -100).sum()) < labels.numel()


def test_autocast_is_for_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(batch: int, device: torch.device) -> Task:
        data = ((torch.randn(batch, 8),), torch.randint(4, (batch,)))
        return Task(nn.Linear(8, 4), (data,), functional.cross_entropy, partial(torch.optim.SGD, lr=0.1))

    monkeypatch.setitem(TASKS, "linear", linear)
    for dtype, seen in (("float32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)):
        task = load("linear", dtype, 2, "cpu")
        with task.casting():
            assert task.model(*task.batches[0][0]).dtype == seen


def test_the_sum_has_the_gradients_of_updates_in_turn() -> None:
    """As the authors' code takes them: generators against judges that need no gradient, then these on fixed fakes."""
    torch.manual_seed(0)
    gan = CycleGAN(width=8, blocks=1).double()
    judges = [*gan.judge_a.parameters(), *gan.judge_b.parameters()]
    a, b = (torch.rand(1, 3, 32, 32, dtype=torch.float64) * 2 - 1 for _ in range(2))
    gan(a, b).sum().backward()
    found = {name: one.grad.clone() for name, one in gan.named_parameters() if one.grad is not None}
    assert len(found) == len(list(gan.parameters()))

    gan.zero_grad()
    for one in judges:
        one.requires_grad_(False)
    fake_b, fake_a = gan.to_b(a), gan.to_a(b)
    ones = partial(torch.full_like, fill_value=1.0)
    adversarial = 0.0
    for judge, fake in ((gan.judge_b, fake_b), (gan.judge_a, fake_a)):
        judged = judge(fake)
        adversarial = adversarial + functional.mse_loss(judged, ones(judged))
    cycles = functional.l1_loss(gan.to_a(fake_b), a) + functional.l1_loss(gan.to_b(fake_a), b)
    same = functional.l1_loss(gan.to_b(b), b) + functional.l1_loss(gan.to_a(a), a)
    (adversarial + 10 * cycles + 5 * same).backward()
    for one in judges:
        one.requires_grad_(True)
    for judge, real, fake in ((gan.judge_a, a, fake_a.detach()), (gan.judge_b, b, fake_b.detach())):
        right, wrong = judge(real), judge(fake)
        whole = functional.mse_loss(right, ones(right)) + functional.mse_loss(wrong, torch.zeros_like(wrong))
        (whole * 0.5).backward()
    for name, one in gan.named_parameters():
        torch.testing.assert_close(found[name], one.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", [name for name in TASKS if name.endswith("CIFAR")])
def test_images_of_cifars_shape(name: str) -> None:
    pytest.importorskip("torchvision", reason="torchvision's models need it")
    task = load(name, "float32", 4, "cpu")
    assert task.model.training
    (images,), labels = task.batches[0]
    assert labels is not None
    assert (tuple(images.shape), tuple(labels.shape)) == ((4, 3, 32, 32), (4,))
    assert task.model(images).shape == (4, 10)
