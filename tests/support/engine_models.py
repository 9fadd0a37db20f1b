"""Small models of which many engines are prepared, and threads that use them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options
from tests.support.modules import Deep, Wide

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class InPlace(nn.Module):
    """Memory written by several calls, and a constant."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = torch.empty_like(x)
        made[:, :4] = x[:, :4].exp()
        made[:, 4:] = x[:, 4:].sin()
        made += torch.arange(8, device=x.device)
        return {"made": made * 2, "top": made.max(1).values}


MODELS: dict[str, Callable[[], nn.Module]] = {"branches": lambda: Wide(3, 8), "in place": InPlace, "deep": Deep}


OPTIONS = (
    Options(tune="off", policy="single"),
    Options(tune="off", policy="nimble"),
    Options(tune="off", policy="nimble", max_streams=2, outputs="static"),
)


def made(name: str, device: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]().to(device).eval()


def drawn(device: str, rows: int = 4) -> torch.Tensor:
    # On the host: torch's generator of a GPU refuses to draw while any thread captures.
    return torch.randn(rows, 8).to(device)


def check(net: Nimble, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x))


def in_threads(jobs: list[Callable[[], None]], timeout_s: float = 120.0) -> None:
    """Run all jobs at once; raise what the first one raised, or if one does not end."""
    failed: list[BaseException] = []
    together = threading.Barrier(len(jobs))

    def guarded(job: Callable[[], None]) -> None:
        try:
            together.wait()
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "deadlock"
