"""Record the example reports on the GPU at hand: they open on any machine, and feed the notebooks and tests.

    python -m examples.record examples/recordings [NAME ...]

writes ``NAME-GPU.nimble`` for each: models that are wide (GoogLeNet, NASNet-A mobile, and CLIP, of two towers), one
that is narrow (BERT-base), and a training step. Needs ``torchvision`` for GoogLeNet and ``transformers`` for CLIP and
BERT. A report that exists is recorded again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.models import example
from examples import models
from nimble_core import Options
from nimble_viz import Report, compare
from nimble_viz.analysis.tiles import verdict

PEERS = ("cuda-graph", "compile:reduce-overhead")


def main() -> None:
    """Record what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECORDED)}; default: all")
    given = parser.parse_args()
    unknown = set(given.names) - set(RECORDED)
    if unknown:
        parser.error(f"no recording is called {', '.join(sorted(unknown))}: there are {', '.join(RECORDED)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # weights are random: there is nothing to fetch
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names or RECORDED:
        report = RECORDED[name]()
        path = given.folder / f"{name}-{gpu()}.nimble"
        report.save(path)
        print(f"{path}: {path.stat().st_size >> 10} KiB; {verdict(report)}", flush=True)


def gpu() -> str:
    """Short name of the GPU: ``"h200"`` of an NVIDIA H200; ``"cpu"`` where there is none."""
    return torch.cuda.get_device_name().split()[-1].lower() if torch.cuda.is_available() else "cpu"


def of_suite(name: str, dtype: str = "float32", against: Sequence[str] = ()) -> Callable[[], Report]:
    """Make a model of the benchmark, batch 1."""

    def recorded() -> Report:
        model, args, kwargs = example(name, dtype, device="cuda" if torch.cuda.is_available() else "cpu")
        return compare(model, *args, kwargs=kwargs, against=against, options=Options(budget_s=120.0))

    return recorded


def clip() -> Report:
    """CLIP in half precision."""
    model, args, kwargs = models.clip()
    halved = {name: one.half() if one.is_floating_point() else one for name, one in kwargs.items()}
    return compare(model.half(), *args, kwargs=halved, options=Options(budget_s=120.0))


def training() -> Report:
    """Make a training step of ResNet-18 on images of CIFAR-10's shape: SGD, batch 32, TF32 in convolutions."""
    torch.manual_seed(0)
    model, _, _ = models.resnet18(image=32)
    model.train()
    device = next(model.parameters()).device
    images, labels = torch.randn(32, 3, 32, 32, device=device), torch.randint(0, 10, (32,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    how = {"training": True, "loss_fn": nn.functional.cross_entropy, "target": labels, "optimizer": optimizer}
    return compare(model, images, **how, options=Options(budget_s=120.0))


RECORDED: Mapping[str, Callable[[], Report]] = {
    "googlenet": of_suite("GoogLeNet", against=PEERS),
    "bert": of_suite("BERT-base 128", "float16", PEERS),
    "resnet18-training": training,
    "nasnet-a-mobile": of_suite("NASNet-A mobile"),
    "clip": clip,
}

if __name__ == "__main__":
    main()
