"""Tensors that leave torch's sight."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core.tracing.tensor_escapes import exports_seen, readings_seen

numpy = pytest.importorskip("numpy", reason="needs numpy: make test installs it")


def test_every_way_is_seen_once_with_the_line_that_asks() -> None:
    found: list[tuple[torch.Tensor, FrameType]] = []
    x = torch.randn(3)
    with exports_seen(lambda tensor, frame: found.append((tensor, frame))):
        x.numpy()
        numpy.asarray(x)
        numpy.from_dlpack(x)
        torch.from_dlpack(x)
        torch.nn.Parameter(x).detach().numpy(force=True)
        assert x.sum().item() == pytest.approx(float(x.numpy().sum()))
    assert len(found) >= 6
    assert found[0][0] is x
    assert found[0][1].f_code.co_filename == __file__


def test_other_threads_are_not_told_of() -> None:
    found: list[torch.Tensor] = []
    with exports_seen(lambda tensor, frame: found.append(tensor)):
        worker = threading.Thread(target=lambda: torch.ones(1).numpy())
        worker.start()
        worker.join()
    assert not found


def test_numbers_are_read_where_a_mode_is_active_and_not_to_print_them() -> None:
    found: list[torch.Tensor] = []
    x = torch.ones(3)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with readings_seen(lambda tensor, frame: found.append(tensor)):
        assert x.tolist() == [1.0, 1.0, 1.0]
        assert not found
        with Mode():
            assert "1." in repr(x)
            assert not found
            x.tolist()
    assert len(found) == 1
    assert found[0] is x
