"""A first engine serves at once, and a better one takes its place between calls; results are always eager's."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nimble_core import InputError, Nimble, NimbleWarning, Options
from nimble_core.api import background
from nimble_core.torch_compat.compiler import INDUCTOR_CONFIG

COMPILES = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
COMPILED = Options(fuse="inductor", budget_s=0.5)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()


def held_up(monkeypatch: pytest.MonkeyPatch, compiles: Callable[..., Any] | None = None) -> threading.Event:
    """Let the compiler begin when the returned event is set."""
    go, found = threading.Event(), compiles or background.compile_for_tuning

    def later(*args: Any) -> Any:
        assert go.wait(60)
        return found(*args)

    monkeypatch.setattr(background, "compile_for_tuning", later)
    return go


@pytest.mark.compiler
@COMPILES
def test_results_are_eagers_while_engines_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    go, model = held_up(monkeypatch), perceptron()
    net = Nimble(model, COMPILED).prepare(torch.randn(3, 8), background=True)
    (begun,) = net.background
    (first,) = net.engines
    assert first.recorded.recording.program.fuse == "none"
    wrong: list[str] = []
    over = threading.Event()

    def calls(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            while not over.wait(0.005):
                x = torch.randn(3, 8, generator=generator)
                if not torch.allclose(net(x), model(x), rtol=1e-5, atol=1e-6):
                    wrong.append(begun.state)

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(3)]
    for one in threads:
        one.start()
    try:
        assert begun.state == "compiling"
        go.set()
        assert begun.wait(120)
        for _ in range(600):
            if begun.state not in ("compiling", "compiled") or over.wait(0.1):
                break
    finally:
        over.set()
        for one in threads:
            one.join()
    assert not wrong
    assert begun.state == "done", begun
    (better,) = net.engines
    assert better is not first
    assert better.recorded.recording.program.fuse == "inductor"


@pytest.mark.compiler
@COMPILES
@pytest.mark.parametrize("said", [{}, {"max_fusion_size": 63}], ids=["torch's settings", "a user's"])
def test_what_the_thread_compiled_is_not_compiled_again(
    said: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or what an earlier process compiled is found
    for thread in threading.enumerate():
        if thread.name == "nimble-compile":  # of another test: what it compiles would count
            thread.join(120)
    with INDUCTOR_CONFIG.require().patch(said):
        net = Nimble(perceptron(), COMPILED).prepare(torch.randn(3, 8), background=True)
        assert net.background[0].wait(120)
        hits = torch._dynamo.utils.counters["inductor"]
        before = hits["fxgraph_cache_miss"]
        net.finish()
    assert net.background[0].state == "done", net.background
    assert hits["fxgraph_cache_miss"] == before, dict(hits)
    assert hits["fxgraph_cache_hit"] >= 1


def test_on_the_host_there_is_nothing_to_compile_and_the_next_call_prepares_in_full() -> None:
    x, model = torch.randn(3, 8), perceptron()
    net = Nimble(model, Options(budget_s=0.1)).prepare(x, background=True)
    (first,) = net.engines
    assert net.background[0].wait(60)
    with torch.no_grad():
        assert torch.equal(net(x), model(x))
    assert net.background[0].state == "done"
    assert net.engines[0] is not first
    assert net.finish() is net


@pytest.mark.parametrize("where", ["compiling", "capturing"])
def test_what_goes_wrong_is_warned_of_once_and_the_first_engine_serves_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no space left")

    x, model = torch.randn(3, 8), perceptron()
    go = held_up(monkeypatch, fails if where == "compiling" else None)
    net = Nimble(model).prepare(x, background=True)
    engines, (begun,) = net.engines, net.background
    if where == "capturing":
        monkeypatch.setattr(Nimble, "make_engine", fails)
    go.set()
    assert begun.wait(60)
    with torch.no_grad():
        with pytest.warns(NimbleWarning, match="background failed.*no space left"):
            assert torch.equal(net(x), model(x))
        assert torch.equal(net(x), model(x))
    assert net.engines == engines
    assert begun.state == "failed"
    assert str(begun.error) == "no space left"
    assert "no space left" in repr(begun)


def test_nothing_is_swapped_where_the_model_would_be_prepared_in_another_way() -> None:
    x, model = torch.randn(3, 8), perceptron()
    net = Nimble(model, Options(on_new_shape="eager", budget_s=0.1)).prepare(x, background=True)
    (begun,) = net.background
    assert begun.wait(60)
    with torch.autocast("cpu", torch.bfloat16):
        net(x)
    model.train()
    net(x)
    model.eval()
    with TorchDispatchMode():  # type: ignore[no-untyped-call]  # torch's has no types
        begun.step()
    assert begun.state == "compiled"
    with torch.inference_mode():
        assert torch.equal(net(x), model(x))
    assert begun.state == "done"


@pytest.mark.parametrize("act", ["close", "half", "prepare"])
def test_what_replaces_the_first_engine_holds(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go, x = held_up(monkeypatch), torch.randn(3, 8)
    net = Nimble(perceptron(), Options(tune="off")).prepare(x, background=True)
    (begun,) = net.background
    {"close": net.close, "half": net.double, "prepare": lambda: net.prepare(x)}[act]()
    engines = net.engines
    go.set()
    assert begun.wait(60)
    net.finish()
    assert net.engines == engines
    assert begun.state == ("done" if act == "prepare" else "cancelled")


def test_training_and_plans_are_not_prepared_in_the_background() -> None:
    net = Nimble(perceptron().train())
    with pytest.raises(InputError, match="what trains"):
        net.prepare(torch.randn(3, 8), training=True, background=True)
    with pytest.raises(InputError, match="tuned in full"):
        Nimble(perceptron(), Options(tune="full")).prepare(torch.randn(3, 8), background=True)
    with pytest.raises(InputError, match="background=1"):
        net.prepare(torch.randn(3, 8), background=1)  # type: ignore[arg-type]


_EXITS = """
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from nimble_core import Nimble, Options
model = nn.Sequential(*(layer for size in range(8, 16) for layer in (nn.Linear(size, size + 1), nn.GELU()))).eval()
net = Nimble(model, Options(fuse="inductor")).prepare(torch.randn(3, 8), background=True)
{meanwhile}
assert net.background[0].state == "compiling", net.background
print("serves", tuple(net(torch.randn(3, 8)).shape))
"""


@pytest.mark.compiler
@pytest.mark.parametrize("meanwhile", ["", "import time; time.sleep(4)"], ids=["at once", "later"])
def test_an_interpreter_that_exits_while_it_compiles_does_not_hang(meanwhile: str, tmp_path: Any) -> None:
    import os

    own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "NIMBLE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", _EXITS.format(meanwhile=meanwhile)]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)
    assert done.stdout == "serves (3, 16)\n", done.stderr
    assert done.returncode == 0, done.stderr
