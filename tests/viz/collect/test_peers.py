from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.utils.errors import InputError
from nimble_viz.collect.peers import Peer, close, peer, peer_names, resolve_peers

pytestmark = pytest.mark.compiler


class Small(nn.Module):
    """A convolution folded with its BatchNorm, a mark on the tensors, and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.linear = nn.Linear(4 * 16, 5)
        self.shift = torch.randn(5)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.norm(self.conv(x))).flatten(1)
        return {"out": self.linear(hidden) * scale + self.shift, "parts": (hidden, 3)}


def inputs(device: str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.randn(2, 3, 6, 6, device=device), {"scale": torch.rand(1, device=device)}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(device: str = "cpu") -> Small:
    model = Small().eval()
    nn.init.uniform_(model.norm.running_mean)
    model.shift = model.shift.to(device)
    return model.to(device)


def state(model: nn.Module) -> list[Any]:
    """Everything that a peer could leave behind: values, identities, marks, settings, random state."""
    import torch._inductor.config as inductor
    from torch._dynamo import config as dynamo

    tensors = [*model.parameters(), *model.buffers(), model.shift]
    return [
        [tensor.clone() for tensor in tensors],
        [(id(tensor), tensor.stride(), tensor.data_ptr(), dict(vars(tensor))) for tensor in tensors],
        [sorted(vars(module)) for module in model.modules()],
        [module.training for module in model.modules()],
        copy.deepcopy(inductor.get_config_copy()),
        copy.deepcopy(dynamo.get_config_copy()),
        (torch.backends.cudnn.benchmark, torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        (torch.is_autocast_cache_enabled(), torch.get_num_threads(), list(warnings.filters)),
        (torch.get_rng_state(), random.getstate()),
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def show(name: str, device: str = "cpu") -> None:
    """The peer does what eager does, on other inputs too, and leaves nothing behind."""
    model = small(device)
    before = state(model)
    x, more = inputs(device)
    torch.random.set_rng_state(before[-1][0])
    with torch.inference_mode():
        run = peer(name).prepare(model, [x], more)
    for _ in range(4):
        x, more = inputs(device)
        with torch.inference_mode():
            got, wanted = run(x, **more), model(x, **more)
        assert list(got) == ["out", "parts"]
        assert got["parts"][1] == 3
        torch.testing.assert_close(got["out"], wanted["out"], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(got["parts"][0], wanted["parts"][0], rtol=1e-2, atol=1e-2)
    close(run)
    torch.random.set_rng_state(before[-1][0])
    for kept, now in zip(before, state(model), strict=True):
        assert same(kept, now)


# -- names ---------------------------------------------------------------------------------------------------------


def test_names() -> None:
    names = peer_names()
    assert {"cuda-graph", "eager-tuned", "compile", "compile+freezing"} <= set(names)
    assert {"compile:reduce-overhead", "compile:max-autotune", "compile:max-autotune+freezing"} <= set(names)
    for name in names:
        assert peer(name).name == name
        assert isinstance(peer(name), Peer)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["", "compiled", "compile:", "compile:fast", "compile+", "eager-tuned+freezing"])
def test_an_unknown_name_lists_those_that_exist(name: str) -> None:
    with pytest.raises(InputError, match="no peer called") as caught:
        peer(name)
    for known in peer_names():
        assert known in caught.value.fix


def test_what_against_may_be() -> None:
    class Own:
        name = "own"

        def prepare(self, model: Any, args: Any, kwargs: Any) -> Any:
            return model

    own = Own()
    assert [one.name for one in resolve_peers("compile")] == ["compile"]
    assert resolve_peers([own, "cuda-graph"])[0] is own
    assert resolve_peers(()) == ()
    for wrong, message in (
        ([own, Own()], "two peers are called 'own'"),
        (["compile", "compile"], "two peers"),
        ([3], "3 is no peer"),
        ([Own], "is no peer"),
        (3, "against is a int"),
    ):
        with pytest.raises(InputError, match=message):
            resolve_peers(wrong)


# -- the same outputs, and nothing left behind ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager-tuned", "compile", "compile+freezing"])
def test_outputs_and_traces(name: str) -> None:
    show(name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "eager-tuned",
        "cuda-graph",
        "compile",
        "compile:reduce-overhead",
        "compile:reduce-overhead+freezing",
        "compile:max-autotune-no-cudagraphs+freezing",
    ],
)
def test_outputs_and_traces_on_a_gpu(name: str) -> None:
    show(name, "cuda")


def test_what_the_user_compiled_stays_compiled() -> None:
    from torch._dynamo.utils import counters

    def breaks(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    x, other = torch.randn(3), torch.randn(3)
    with torch.inference_mode():
        user = torch.compile(breaks, backend="eager")
        user(x)
        run = peer("compile").prepare(breaks, [x], {})
        graphs = counters["stats"]["unique_graphs"]
        run(other)
        close(run)
        torch.testing.assert_close(user(x), breaks(x))
        assert counters["stats"]["unique_graphs"] == graphs


def test_what_readers_of_its_times_should_know() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    x = torch.randn(3)
    with torch.inference_mode():
        assert peer("compile").prepare(torch.sin, [x], {}).note == ""
        assert peer("compile").prepare(breaks, [x], {}).note.startswith("graph breaks: ")
        assert peer("compile:reduce-overhead").prepare(torch.cos, [x], {}).note == "Inductor skipped CUDA graphs"


def test_a_model_made_in_inference_mode() -> None:
    x = torch.randn(2, 3, 6, 6)
    with torch.inference_mode():
        model = nn.Conv2d(3, 4, 3)
        for name in ("eager-tuned", "compile"):
            torch.testing.assert_close(peer(name).prepare(model, [x], {})(x), model(x))


def test_images_are_converted_for_convolutions_only() -> None:
    seen: list[list[bool]] = []

    class Seen(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append([tensor.is_contiguous() for tensor in (x, self.inner.weight)])
            return self.inner(x)

    x = torch.randn(2, 3, 6, 6)
    with torch.inference_mode():
        for inner, contiguous in ((nn.Conv2d(3, 4, 3), False), (nn.Linear(6, 6), True)):
            peer("eager-tuned").prepare(Seen(inner), [x], {})(x)
            assert seen.pop() == [contiguous, contiguous]
            assert x.is_contiguous()
            assert inner.weight.is_contiguous()


# -- refusals ------------------------------------------------------------------------------------------------------


def test_inputs_of_another_shape_are_refused() -> None:
    with torch.inference_mode():
        run = peer("eager-tuned").prepare(nn.Conv2d(3, 4, 3), [torch.randn(2, 3, 6, 6)], {})
        with pytest.raises(InputError, match=r"expected .*2.*given .*5"):
            run(torch.randn(5, 3, 6, 6))


@pytest.mark.gpu
def test_a_graph_leaves_its_outputs_to_the_caller() -> None:
    x = torch.randn(4, device="cuda")
    with torch.inference_mode():
        run = peer("cuda-graph").prepare(torch.sin, [x], {})
        first, second = run(x), run(x + 1)
    torch.testing.assert_close(first, torch.sin(x))
    torch.testing.assert_close(second, torch.sin(x + 1))
