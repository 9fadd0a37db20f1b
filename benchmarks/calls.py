"""What a call of a prepared model takes on the host beyond its replay.

    python -m benchmarks.calls --out benchmarks/results/calls-host.json

The executable is replaced by one that returns outputs at once, so that what is timed is everything else: dispatch of
the module, finding the engine, checks of inputs, parameters, modules and optimizer, and making the output. Copies of
inputs and outputs belong to the replay. ``warm``: calls follow each other, the fastest block of ten. ``cold``: 64
MiB of other memory are read before each call; the median. Each row is measured with the compiled passes of
``torch_compat/unchanged.py``, where there are any, and with those in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter_ns
from typing import Any, cast

import torch
from torch import nn

from benchmarks.common import options, write
from nimble_core import Nimble, Options, TrainStep
from nimble_core.api.engine import Engine
from nimble_core.profiling.machine import environment
from nimble_core.torch_compat import unchanged

Call = Callable[[], Any]
BLOCK = 10
COLD_BYTES = 1 << 26


@dataclass(frozen=True)
class Row:
    """One row's figures, µs; ``tensors`` is how many parameters and buffers are looked at."""

    row: str
    passes: str
    tensors: int
    modules: int
    folded: int
    warm_us: float
    cold_us: float


class _AtOnce:
    """An executable whose results are there."""

    def __init__(self, executable: Any, outputs: Sequence[torch.Tensor]) -> None:
        self._executable, self._outputs = executable, outputs

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Return the outputs of preparation."""
        return list(self._outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)


class Several(nn.Module):
    """Four inputs, and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> dict[str, torch.Tensor]:
        """Use all of them."""
        return {"x": self.layer(a) + b, "y": c * d}


def mlp() -> tuple[Any, dict[str, Any], str]:
    """Four parameters."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), {"input": torch.randn(4, 8)}, "none"


def several() -> tuple[Any, dict[str, Any], str]:
    """Four inputs."""
    return Several().eval(), {name: torch.randn(4, 8) for name in "abcd"}, "none"


def folded() -> tuple[Any, dict[str, Any], str]:
    """Batch norms folded into convolutions: 1,100 parameters and running statistics that constants were made of."""
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)) for _ in range(220)]
    return nn.Sequential(*blocks).eval(), {"input": torch.randn(1, 4, 4, 4)}, "library"


def hugging_face() -> tuple[Any, dict[str, Any], str]:
    """A small BERT: three inputs, a ``ModelOutput``."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    ids = torch.ones(1, 8, dtype=torch.long)
    model = BertModel(BertConfig(num_hidden_layers=12, **sizes)).eval()
    return model, {"input_ids": ids, "attention_mask": ids.clone(), "token_type_ids": ids.clone()}, "none"


class Residual(nn.Module):
    """A block of a small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice convolved, and added."""
        return torch.relu(x + self.norms[1](self.second(torch.relu(self.norms[0](self.first(x))))))


ROWS = {"mlp": mlp, "four inputs": several, "ModelOutput": hugging_face, "folded": folded}


def main() -> None:
    """Measure, print a table, write the file."""
    given = options(__doc__).parse_args()
    stamp, results = environment("cpu"), []
    for name in (*ROWS, "training step"):
        for way in filter(None, (unchanged.compiled(), unchanged.InPython)):
            unchanged._found[:] = [way]
            row = inference(name, *ROWS[name]()) if name in ROWS else step()
            results.append(row)
            print(f"{row.row:<14}{row.passes:<10}{row.tensors:>6} tensors{row.modules:>5} modules", end="")
            print(f"{row.folded:>6} folded{row.warm_us:>8.1f} µs warm{row.cold_us:>8.1f} µs cold", flush=True)
    write(given.out, {"results": [asdict(row) for row in results]}, stamp)


def inference(name: str, model: nn.Module, inputs: dict[str, torch.Tensor], fuse: Any, seconds: float = 4.0) -> Row:
    """One call under ``no_grad``."""
    args = tuple(inputs.values())
    net = Nimble(model, Options(fuse=fuse, policy="single")).prepare(*args)
    with torch.no_grad():
        net(*args)
        return _row(name, _at_once(net), lambda: net(*args), seconds)


def step(seconds: float = 4.0) -> Row:
    """One step of a small ResNet, fused AdamW."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *(Residual() for _ in range(9)), *head)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trained = TrainStep(model, nn.functional.cross_entropy, optimizer, options=Options(fuse="none", policy="single"))
    x, y = torch.randn(2, 3, 6, 6), torch.zeros(2, dtype=torch.long)
    trained.prepare(x, y)
    for _ in range(2):  # the first makes the optimizer's state
        trained(x, y)
    (net,) = trained._nets.values()
    prepared = net.engines[0]
    engine = _at_once(net)
    trained._present[id(engine)] = trained._present[id(prepared)]
    return _row("training step", engine, lambda: trained(x, y), seconds)


def _at_once(net: Nimble) -> Engine:
    """Put an executable in place whose results are there; return the engine."""
    (engine,) = net.engines
    outputs = engine.executable.run(engine.signature.tensors, static=True)
    engine = replace(engine, executable=cast(Any, _AtOnce(engine.executable, outputs)))
    object.__setattr__(net, "_engines", (engine,))
    return engine


def _row(name: str, engine: Engine, call: Call, seconds: float) -> Row:
    watch = engine.watch
    modules = sum(attribute == "training" for attribute in watch._attributes)
    ways = _warm(call, seconds / 2), _cold(call, seconds / 2)
    passes = "Python" if watch._passes is unchanged.InPython else "compiled"
    return Row(name, passes, len(watch._watched), modules, len(watch.values._counted), *ways)


def _warm(call: Call, seconds: float) -> float:
    """Fastest block of calls, µs a call: what disturbs a host only adds time."""
    samples: list[float] = []
    end = perf_counter_ns() + int(seconds * 1e9)
    while len(samples) < 3 or perf_counter_ns() < end:
        start = perf_counter_ns()
        for _ in range(BLOCK):
            call()
        samples.append((perf_counter_ns() - start) / 1e3 / BLOCK)
    return min(samples)


def _cold(call: Call, seconds: float) -> float:
    """Median of single calls, each after other memory was read, µs."""
    other = torch.zeros(COLD_BYTES, dtype=torch.uint8)
    samples: list[float] = []
    end = perf_counter_ns() + int(seconds * 1e9)
    while len(samples) < 3 or perf_counter_ns() < end:
        other.sum()
        start = perf_counter_ns()
        call()
        samples.append((perf_counter_ns() - start) / 1e3)
    return median(samples)


if __name__ == "__main__":
    main()
