"""Rows that take a moment, and rows that go wrong, for tests of the runner."""

import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.models import Inference, Row, Training

PID = "SMALL_ROWS_PID"  # names the file in which the row that never ends says which process builds it


class OnItsInput(nn.Module):
    def forward(self, x):  # reads a number of its input on the host: eager can, ours refuses
        return x * 2 if x.sum().item() > 0 else x


def inference(model):
    return lambda device, tiny: Inference(model.to(device).eval(), lambda: ((torch.randn(2, 8, device=device),), {}))


def training(device, tiny):
    def make():
        torch.manual_seed(1)
        return mlp().to(device)

    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=device == "cuda")
    batch = lambda: (torch.randn(4, 8, device=device), torch.randn(4, 4, device=device))  # noqa: E731
    return Training(make, nn.functional.mse_loss, optimizer, batch)


def broken(device, tiny):
    raise ValueError("cannot be made")


def endless(device, tiny):
    Path(os.environ.get(PID, os.devnull)).write_text(str(os.getpid()))
    time.sleep(600)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


BUILDS = {
    "mlp": inference(mlp()),
    "on-its-input": inference(OnItsInput()),
    "broken": broken,
    "endless": endless,
    "trained": training,
}
ROWS = {name: Row(name, name.upper(), "float32", 2, build, name == "trained") for name, build in BUILDS.items()}
