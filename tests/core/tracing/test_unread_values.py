"""Texts, checks and encodings that read no values inside a recording."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core import Nimble, NotStaticError, Options
from nimble_core.tracing.unread_values import values_unread
from nimble_core.utils.errors import DeviceError

OPTIONS = Options(fuse="none", tune="off", strict=True)


class Reads(TorchDispatchMode):
    """Counts values that the host asks for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_texts_of_numbers_read_none_and_are_all_different() -> None:
    x = torch.ones(())
    with values_unread(lambda tensor: False), Reads() as reads:
        texts = {f"{x}", f"{x:.3f}", f"{x:>10}"}
    assert len(texts) == 3
    assert reads.found == 0


def test_known_values_are_read_and_so_are_all_where_no_mode_is_in_force() -> None:
    x, known = torch.ones(()), torch.full((), 2.0)
    with values_unread(lambda tensor: tensor is known):
        assert f"{x:.1f}" == "1.0"
        with Reads():
            assert f"{known:.1f}" == "2.0"


def test_torch_is_as_it_was_afterwards_and_other_threads_see_no_difference() -> None:
    before = torch.Tensor.__format__, torch._check_tensor_all_with, functional.one_hot
    texts: list[str] = []

    def elsewhere() -> None:
        with Reads():
            texts.append(f"{torch.ones(()):.1f}")

    worker = threading.Thread(target=elsewhere)
    with values_unread(lambda tensor: False), Reads():
        worker.start()
        worker.join()
    assert texts == ["1.0"]
    with pytest.raises(KeyError), values_unread(lambda tensor: False):
        raise KeyError
    assert (torch.Tensor.__format__, torch._check_tensor_all_with, functional.one_hot) == before


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_one_hot_is_what_torch_makes(shape: tuple[int, ...]) -> None:
    x = torch.randint(5, shape)
    expected = functional.one_hot(x, 5)
    with values_unread(lambda tensor: False), Reads() as reads:
        found = functional.one_hot(x, num_classes=5)
    assert reads.found == 0
    assert torch.equal(found, expected)


def test_a_check_and_classes_out_of_range_still_raise_in_replays() -> None:
    def forward(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all_with(ValueError, x > 0, lambda: f"not above 0: {x.min().item()}")
        return x * functional.one_hot(classes, 3)

    net = Nimble(forward, OPTIONS).prepare(torch.rand(2, 3) + 1, torch.tensor([0, 2]))
    x = torch.rand(2, 3) + 2
    assert torch.equal(net(x, torch.tensor([1, 1])), forward(x, torch.tensor([1, 1])))
    with pytest.raises(DeviceError, match="a check of the model fails, which raises ValueError"):
        net(-x, torch.tensor([1, 1]))
    for classes in ([0, 3], [-1, 0]):
        with pytest.raises(DeviceError, match="out of bounds"):
            net(x, torch.tensor(classes))


def test_a_text_that_the_model_returns_is_refused_even_where_other_values_give_the_same() -> None:
    with pytest.raises(NotStaticError, match=r"output\[1\]"):
        Nimble(lambda x: (x * 2, f"{x.sum():.0f}"), OPTIONS).prepare(torch.zeros(3))


@pytest.mark.gpu
def test_prints_and_checks_do_not_wait_for_a_gpu() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all_with(ValueError, x > -100, lambda: "too small")
        str(x)
        return x * len(f"{x} {x.sum():.3f}"[:1])

    x = torch.randn(3, device="cuda")
    assert torch.equal(Nimble(forward, OPTIONS).prepare(x)(x), forward(x))
