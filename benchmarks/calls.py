"""What a call of a prepared model takes on the host beyond its replay.

    python -m benchmarks.calls --out benchmarks/results/calls-host.json

The executable is replaced by one that returns outputs at once, so that what is timed is everything else: dispatch of
the module, finding the engine, checks of inputs, parameters and modules, and making the output. Copies of inputs and
outputs belong to the replay. ``warm``: calls follow each other, the fastest block of ten. ``cold``: 64 MiB of other
memory are read before each call; the median. ``launch``: the part of a cold call before the replay. Each row is
measured with the compiled passes of ``torch_compat/unchanged.py``, where there are any, and with those in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn

from benchmarks.common import options, write
from benchmarks.measure import block
from nimble_core import Nimble, Options
from nimble_core.api.engine import Engine
from nimble_core.profiling.machine import environment
from nimble_core.runtime.device import Quick, Ready
from nimble_core.torch_compat import unchanged

Made = tuple[nn.Module, dict[str, Any], Any]
"""A model, its inputs, and what is fused."""
BLOCK = 10
COLD_BYTES = 1 << 26


class _AtOnce:
    """An executable whose results are there."""

    def __init__(self, executable: Any, outputs: Sequence[torch.Tensor]) -> None:
        self._executable, self._outputs = executable, outputs
        self.ran = 0.0

    def run(self, inputs: Sequence[torch.Tensor], *, static: bool = False) -> list[torch.Tensor]:
        """Return the outputs of preparation."""
        self.ran = perf_counter()
        return list(self._outputs)

    def quick(self, ready: Ready, *, static: bool) -> Quick:
        """Return the same, as a GPU's executable does."""
        return lambda args, kwargs: self.run(()) if ready(lambda inputs: True, args, kwargs) else None

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


def mlp() -> Made:
    """Four parameters."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), {"input": torch.randn(4, 8)}, "none"


def several() -> Made:
    """Four inputs."""
    return Several().eval(), {name: torch.randn(4, 8) for name in "abcd"}, "none"


def folded() -> Made:
    """Batch norms folded into convolutions: 1,100 parameters and running statistics that constants were made of."""
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)) for _ in range(220)]
    return nn.Sequential(*blocks).eval(), {"input": torch.randn(1, 4, 4, 4)}, "library"


def hugging_face() -> Made:
    """A small BERT: three inputs, a ``ModelOutput``."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    ids = torch.ones(1, 8, dtype=torch.long)
    model = BertModel(BertConfig(num_hidden_layers=12, **sizes)).eval()
    return model, {"input_ids": ids, "attention_mask": ids.clone(), "token_type_ids": ids.clone()}, "none"


ROWS = {"mlp": mlp, "four inputs": several, "ModelOutput": hugging_face, "folded": folded}


def main() -> None:
    """Measure, print a table, write the file."""
    given = options(__doc__).parse_args()
    stamp, results = environment("cpu"), []
    for name, make in ROWS.items():
        for way in filter(None, (unchanged.compiled(), unchanged.InPython)):
            unchanged._found[:] = [way]
            model, inputs, fuse = make()
            args = tuple(inputs.values())
            net = Nimble(model, Options(fuse=fuse, policy="single")).prepare(*args)
            with torch.no_grad():
                net(*args)
                row = {"row": name, **measured(at_once(net), lambda net=net, args=args: net(*args), 4.0)}
            results.append(row)
            print(
                ", ".join(
                    f"{what} {one if isinstance(one, (str, int)) else round(one, 1)}" for what, one in row.items()
                )
            )
    write(given.out, {"results": results}, stamp)


def at_once(net: Nimble) -> Engine:
    """Put an executable in place whose results are there; return the engine."""
    (engine,) = net.engines
    outputs = engine.executable.run(engine.signature.tensors, static=True)
    engine = replace(engine, executable=cast(Any, _AtOnce(engine.executable, outputs)), check_first=False)
    net._adopt((engine,))
    return engine


def measured(engine: Engine, call: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Figures of a call in µs; ``tensors`` is how many parameters and buffers are looked at."""
    watch, other = engine.watch, torch.zeros(COLD_BYTES, dtype=torch.uint8)

    def warm() -> float:
        return block(call, lambda: None, BLOCK)

    def cold() -> float:
        other.sum()
        return block(call, lambda: None, 1)

    def launch() -> float:
        other.sum()
        began = perf_counter()
        call()
        return (cast(Any, engine.executable).ran - began) * 1e6

    return {
        "passes": "Python" if watch._passes is unchanged.InPython else "compiled",
        "tensors": len(watch._watched),
        "modules": sum(attribute == "training" for attribute in watch._attributes),
        "folded": len(watch.values._counted),
        "warm_us": min(_samples(warm, seconds / 3)),  # what disturbs a host only adds time
        "cold_us": median(_samples(cold, seconds / 3)),
        "launch_us": median(_samples(launch, seconds / 3)),
    }


def _samples(take: Callable[[], float], seconds: float) -> list[float]:
    """Three at least, and as many as begin in the time."""
    found, began = list[float](), perf_counter()
    while len(found) < 3 or perf_counter() - began < seconds:
        found.append(take())
    return found


if __name__ == "__main__":
    main()
