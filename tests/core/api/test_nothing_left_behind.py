"""Engines that were prepared, replayed and closed leave no memory, threads or files behind."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options
from nimble_core.api.train_step import TrainStep
from tests.support.engine_models import DEVICES, OPTIONS, drawn, made


def come_and_go(device: str, rounds: int) -> None:
    """Prepare, replay and destroy; every other engine is dropped instead of closed."""
    model = made("branches", device)
    for turn in range(rounds):
        x = drawn(device)
        net = Nimble(model, OPTIONS[1 + turn % 2]).prepare(x)
        net(x)
        if turn % 2:
            net.close()


@pytest.fixture
def settled() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


def _workers() -> int:
    """Threads of engines: other libraries start some whenever they like."""
    return sum(thread.name.startswith("nimble") for thread in threading.enumerate())


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _tensors() -> int:
    return len(_all_tensors())


def _all_tensors() -> list[torch.Tensor]:
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


class Classifier(nn.Module):
    """Norms that are folded into weights, and products beside each other that are merged."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.heads = nn.ModuleList(nn.Linear(8 * 36, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.heads[0](x) * self.heads[1](x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fuse", ["none", "library", "inductor"])
@pytest.mark.parametrize("how", ["inference", "training", "whole step"])
def test_what_is_closed_frees_its_tensors_without_pythons_collector(how: str, fuse: Any, device: str) -> None:
    """Which knows nothing of a GPU's memory, and may come long after that has run out."""
    x, y = torch.randn(4, 3, 8, 8, device=device), torch.randn(4, 16, device=device)
    options = Options(fuse=fuse, tune="off")

    def come_and_go() -> None:
        model = Classifier().to(device).train(how != "inference")
        if how == "whole step":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            step = TrainStep(model, nn.functional.mse_loss, optimizer, options=options).prepare(x, y)
            step(x, y)
            step.close()
        else:
            net = Nimble(model, options).prepare(x, training=how == "training")
            out = net(x)
            if how == "training":
                out.sum().backward()
            net.close()

    come_and_go()  # what is made once in a process stays
    gc.collect()
    known = _all_tensors()
    gc.disable()
    try:
        come_and_go()
        left = _all_tensors()
    finally:
        gc.enable()
    kept = {id(one) for one in known}
    new = [one for one in left if id(one) not in kept and type(one) in (torch.Tensor, nn.Parameter)]
    assert [tuple(one.shape) for one in new if one.numel() and not one.is_meta] == []


def _used_on_gpu_nbytes() -> int:
    """By this process, what the driver keeps for it included; by all where the driver does not tell them apart."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    if shutil.which(query[0]):
        listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            pid, _, mebibytes = line.partition(",")
            if pid.strip() == str(os.getpid()) and mebibytes.strip().isdecimal():
                return int(mebibytes) << 20
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.gpu
@pytest.mark.usefixtures("settled")
def test_a_thousand_rounds_on_a_gpu_leave_nothing_behind() -> None:
    from nimble_core.runtime.cuda import capturing

    def held() -> dict[str, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "streams": sum(len(pool) for pool in capturing._STREAMS.values()),
            "tensors": _tensors(),
            "threads": _workers(),
            "descriptors": _descriptors(),
            "used": _used_on_gpu_nbytes(),
        }

    come_and_go("cuda", 50)
    seen = [held()]
    for _ in range(4):
        come_and_go("cuda", 250)
        seen.append(held())
    used = [one.pop("used") for one in seen]
    before, after = seen[0], seen[-1]
    assert {name: after[name] - before[name] for name in before if after[name] > before[name]} == {}
    # Whatever leaks in each round (an event, a graph, a pool) takes more than 16 KiB. What counts is that it goes on:
    # the driver's own heaps grow by 2 MiB at a time.
    growth = min(later - earlier for earlier, later in itertools.pairwise(used))
    assert growth <= 4 << 20, f"{growth} bytes of the GPU are gone in every 250 rounds: {used}"
