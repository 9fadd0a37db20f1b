"""Mistakes that were mended: one row each. A model is right over fresh inputs, or refused in words that help."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from nimble_core import Nimble, NimbleError, Options
from tests.core.tracing.test_static_check import Cache, last_of_each

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """One mended mistake.

    Args:
        name: what was wrong.
        model: makes the model; seeded.
        inputs: positional and keyword inputs, by seed.
        options: how to prepare.
        refused: a pattern of the error's text; empty if replays are to equal eager, state included.
    """

    name: str
    model: Callable[[], Any]
    inputs: Inputs
    options: Options = field(default_factory=lambda: Options(fuse="none", tune="off"))
    refused: str = ""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Tensors of an output, in order; those of a Hugging Face cache as well."""
    leaves = _pytree.tree_leaves(vars(value) if hasattr(value, "layers") else value)
    found: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif type(leaf).__module__.startswith("transformers."):
            found += tensors_of(vars(leaf))
    return found


def state_of(model: Any) -> list[torch.Tensor]:
    return [*model.state_dict().values()] if isinstance(model, nn.Module) else []


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def ids(seed: int) -> torch.Tensor:
    return torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(seed))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


def empty_cache(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from transformers import DynamicCache

    return (ids(seed),), {"past_key_values": DynamicCache()}


def llava() -> Any:
    from transformers import LlavaConfig, LlavaModel

    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**text, "model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
    text = {**text, "model_type": "llama", "vocab_size": 64}
    model = LlavaModel(LlavaConfig(vision_config=vision, text_config=text, image_token_id=1)).eval()
    args, kwargs = words_and_image(0)
    model(*args, **kwargs)  # a first run notes in attributes which hooks it has installed
    return model


def words_and_image(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    words = ids(seed)
    words[:, 1:5] = 1
    return (words, torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(seed))), {"use_cache": False}


def encodec() -> Any:
    from transformers import EncodecConfig, EncodecModel

    sizes = {"hidden_size": 8, "codebook_size": 16, "codebook_dim": 8, "target_bandwidths": [1.5]}
    return EncodecModel(EncodecConfig(num_filters=2, num_lstm_layers=1, **sizes)).eval()


def sound(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(1, 1, 700, generator=torch.Generator().manual_seed(seed)),), {}


def mixtral(experts: str) -> Callable[[], Any]:
    def model() -> Any:
        from transformers import MixtralConfig, MixtralModel

        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        found = MixtralModel(MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **sizes)).eval()
        found.set_experts_implementation(experts)
        return found

    return model


def without_cache(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (ids(seed),), {"use_cache": False}


def numbers(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)),), {}


def says_what_it_does(x: torch.Tensor) -> torch.Tensor:
    text = f"the mean is {x.mean():.3f}"
    return x * 2 if text else x


def writes_where_true(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x > 1] = 0.5
    y[x < -1] = x.mean()
    y[x[:, 0] > 0] = x[1]
    return y


class CountsInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * int(self.count)


class CountsForNumpy(CountsInABuffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * torch.as_tensor(self.count.numpy() * 2)


def constant_copied_then_written(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.zeros(4)
    copied = one.clone()
    one += 1
    return copied, x


def shaped_in_place(call: str) -> Callable[[], Any]:
    """A forward that calls ``x.<call>`` on its input."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        eval(f"x.{call}")
        return doubled

    return lambda: forward


def array_shaped_in_place(x: torch.Tensor) -> torch.Tensor:
    doubled = torch.as_tensor(x.numpy() * 2)
    doubled.swapaxes_(0, 1)
    return doubled @ x


def fills_where_a_scalar_is_positive(x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    total[total > 0] = -0.5
    return total


class OneHotOfAWrittenBuffer(CountsInABuffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1).remainder_(4)
        return nn.functional.one_hot(self.count, 4) * x


def rows_of_four(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)),), {}


def key_and_position(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(2, 1, 3), torch.tensor([seed])), {}


def rows_and_lengths(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(3, 8, 4), torch.full((3,), 5)), {}


class WritesByStrides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_contiguous():
            self.seen.add_(1)
        return self.layer(x).relu()


def rows_apart(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))[:, ::2],), {}


def asks_for_too_much(x: torch.Tensor) -> torch.Tensor:
    return x + torch.empty(2**50)[:1]


class CountsInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.n = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.layer(x) * self.n


class ReadsOneOfTwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.a if x.numpy().mean() > 0 else self.b)


ROWS = [
    Row("a copy of a constant held what was written to that later", lambda: constant_copied_then_written, numbers),
    Row(
        "a position read on the host was frozen",
        Cache,
        key_and_position,
        refused="another part of buffer cache, which begins elsewhere.*numbers were read on the host.*index_copy_",
    ),
    Row(
        "lengths read on the host were frozen where all are alike",
        lambda: last_of_each,
        rows_and_lengths,
        refused="which begins elsewhere.*numbers were read on the host.*gather",
    ),
    Row(
        "a length read on the host was frozen in the shape of an output",
        lambda: lambda y, lengths: y[:, : max(lengths.tolist())],
        rows_and_lengths,
        refused=r"output is of shape \[3, 5, 4\] / .*numbers were read on the host",
    ),
    Row(
        "which output is returned was frozen",
        lambda: lambda x: [x * 2, x * 3][int(x.numpy().mean() > 0)],
        numbers,
        refused="output is another tensor.*torch.where",
    ),
    Row(
        "which weight is read was frozen",
        ReadsOneOfTwoWeights,
        numbers,
        refused="parameter [ab] in one run, parameter [ab] in the other",
    ),
    *(
        Row(
            f"a branch on strides that no call takes wrote a buffer while {fuse} kernels were judged",
            WritesByStrides,
            rows_apart,
            Options(fuse=fuse, tune="off"),
        )
        for fuse in ("none", "library")
    ),
    Row(
        "out of memory was a raw error",
        lambda: asks_for_too_much,
        numbers,
        refused="out of memory on the host, .* GiB more.*test_regressions.py:.*a smaller batch",
    ),
    Row("a counter in Python was frozen", CountsInPython, numbers, refused="a run changes n, .*register_buffer"),
    Row("a check of values and its text were refused (llava)", llava, words_and_image),
    Row("padding computed from buffers was refused (encodec)", encodec, sound),
    Row("a mixture of experts without a loop", mixtral("batched_mm"), without_cache),
    Row(
        "a loop over experts was refused without its remedy",
        mixtral("eager"),
        without_cache,
        refused=r"set_experts_implementation\(\"batched_mm\"\)",
    ),
    Row("a text that only says something was refused", lambda: says_what_it_does, numbers),
    Row("writing where a mask is true", lambda: writes_where_true, numbers),
    Row(
        "one_hot with its number of classes was refused",
        lambda: lambda x: nn.functional.one_hot(x.argsort(), num_classes=4) * 2,
        numbers,
    ),
    Row("a counter that is read and written was frozen", CountsInABuffer, numbers, refused="buffer count is written"),
    Row(
        "numpy's view of a buffer that is written was frozen",
        CountsForNumpy,
        numbers,
        refused="buffer count is written",
    ),
    Row("a returned cache of Hugging Face was refused", llama, lambda seed: ((ids(seed),), {})),
    Row(
        "a cache that grows was refused without its remedy",
        llama,
        empty_cache,
        refused=r"past_key_values.*StaticCache.*use_cache=False",
    ),
    *(
        Row(
            f"x.{call} left the caller's tensor as it was",
            shaped_in_place(call),
            numbers,
            refused=r"changes the shape or the memory of args\[0\] in place.*x\.t\(\) instead of x\.t_\(\)",
        )
        for call in (
            "t_()",
            "unsqueeze_(0)",
            "unsqueeze_(0).squeeze_(1).swapaxes_(0, 1)",
            "set_(doubled)",
            "resize_(2)",
        )
    ),
    Row(
        "an array whose shape changes in place was a raw error",
        lambda: array_shaped_in_place,
        rows_of_four,
        Options(fuse="none", tune="off", strict=True),
        refused="a value was computed or changed outside of torch",
    ),
    Row("one_hot of a buffer that is written was refused", OneHotOfAWrittenBuffer, numbers),
    Row(
        "a branch on a scalar was refused without naming torch.where",
        lambda: fills_where_a_scalar_is_positive,
        numbers,
        refused=r"torch\.where\(condition, a, b\)",
    ),
    Row(
        "a list around the inputs was an error of the model's inside",
        lambda: nn.Linear(4, 4).eval(),
        lambda seed: (([torch.ones(2, 4)],), {}),
        refused=r"pass inputs separately: prepare\(\*inputs\)",
    ),
    Row(
        "an array was refused without its remedy",
        lambda: nn.Linear(4, 4).eval(),
        lambda seed: ((torch.ones(2, 4).numpy(),), {}),
        refused=r"torch\.from_numpy\(x\)",
    ),
    Row(
        "an option among the inputs was an error of the model's inside",
        lambda: nn.Linear(4, 4).eval(),
        lambda seed: ((torch.ones(2, 4),), {"max_stream": 4}),
        refused=r"Options\(max_streams=",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_was_mended_stays_mended(row: Row) -> None:
    torch.manual_seed(0)
    model = row.model()
    eager = copy.deepcopy(model)
    with torch.no_grad():
        args, kwargs = row.inputs(0)
        if row.refused:
            with pytest.raises(NimbleError) as caught:
                Nimble(model, row.options).prepare(*args, **kwargs)
            assert re.search(row.refused, str(caught.value), re.DOTALL)
            return
        net = Nimble(model, row.options).prepare(*args, **kwargs)
        kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for seed in (1, 2, 3):
            given, same = row.inputs(seed), row.inputs(seed)
            found, expected = tensors_of(net(*given[0], **given[1])), tensors_of(eager(*same[0], **same[1]))
            kept.append((found, expected))
            assert_equal(tensors_of(given), tensors_of(same))
            assert_equal(state_of(model), state_of(eager))
        for found, expected in kept:  # what a call returned is no other call's
            assert_equal(found, expected)
