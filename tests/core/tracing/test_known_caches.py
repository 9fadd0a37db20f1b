"""Caches of Hugging Face models, in and out: replays give what eager gives, of the same types."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from nimble_core import CaptureError, InputError, Nimble, Options
from nimble_core.tracing.structure import is_cache

WORDS = 64
DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "keys and values": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "windows in between": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**DECODER, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "states": ("MambaConfig", "MambaForCausalLM", {**DECODER, "hidden_size": 16, "state_size": 4}),
    "states and keys": ("Lfm2Config", "Lfm2ForCausalLM", {**DECODER, "layer_types": ["conv", "full_attention"]}),
    "two caches": ("BartConfig", "BartForConditionalGeneration", ENCODER_DECODER),
}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(name: str, device: str = "cpu") -> Any:
    config, model, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval().to(device)


def given(model: Any, seed: int, words: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = {"input_ids": torch.randint(3, WORDS, (2, words), generator=generator)}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = torch.randint(3, WORDS, (2, 3), generator=generator)
    return {name: one.to(model.device) for name, one in ids.items()}


def parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in an output, by path: tensors, types of caches and of their layers, and what else they hold."""
    if isinstance(value, Mapping):
        for key in value:
            yield from parts(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for at, part in enumerate(value):
            yield from parts(part, f"{path}[{at}]")
    elif is_cache(value):
        yield path, type(value)
        for name in sorted(vars(value)):
            yield from parts(vars(value)[name], f"{path}.{name}")
    else:
        yield path, value


def assert_same(one: Any, other: Any) -> None:
    found, expected = dict(parts(one)), dict(parts(other))
    assert found.keys() == expected.keys()
    for path, part in expected.items():
        if isinstance(part, torch.Tensor):
            torch.testing.assert_close(found[path], part, rtol=0, atol=0, equal_nan=True, msg=path)
        else:
            assert found[path] == part, path
    paths = [path for path, part in expected.items() if isinstance(part, torch.Tensor)]
    assert len({id(found[path]) for path in paths}) == len({id(expected[path]) for path in paths})


def prepared(model: Any, *args: Any, **kwargs: Any) -> Nimble:
    return Nimble(model, Options(fuse="none", tune="off")).prepare(*args, **kwargs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_default_configuration_returns_what_eager_returns(name: str, device: str) -> None:
    model = made(name, device)
    net = prepared(model, **given(model, 0))
    first = net(**given(model, 1))
    kept = copy.deepcopy(first)
    assert is_cache(first.get("past_key_values", first.get("cache_params")))
    assert_same(first, model(**given(model, 1)))
    second = net(**given(model, 2))
    assert_same(second, model(**given(model, 2)))
    assert_same(first, kept)


@torch.no_grad()
def test_a_returned_cache_can_be_used() -> None:
    model = made("windows in between")
    net = prepared(model, **given(model, 0))
    cache, expected = net(**given(model, 1)).past_key_values, model(**given(model, 1)).past_key_values
    again = net(**given(model, 1)).past_key_values
    assert cache.get_seq_length() == expected.get_seq_length() == 6
    step = given(model, 3, words=1)
    assert_same(model(**step, past_key_values=cache), model(**step, past_key_values=expected))
    assert cache.get_seq_length() == 7
    assert again.get_seq_length() == 6


@pytest.mark.parametrize("name", ["keys and values", "states and keys"])
@torch.no_grad()
def test_a_static_cache_is_written_in_place(name: str) -> None:
    model = made(name)
    ours, eager, other = (StaticCache(config=model.config, max_cache_len=12) for _ in range(3))
    for cache in (ours, eager, other):
        model(**given(model, 0), past_key_values=cache)
    before = copy.deepcopy(ours)
    step = given(model, 1, words=1)
    net = prepared(model, **step, past_key_values=ours)
    assert_same(ours, before)
    for _ in range(4):
        found, expected = (run(**step, past_key_values=one) for run, one in ((net, ours), (model, eager)))
        assert found.past_key_values is ours
        assert_same(found, expected)
        step = {"input_ids": found.logits[:, -1:].argmax(-1)}
    assert ours.get_seq_length() == 10
    assert_same(net(**step, past_key_values=other), model(**step, past_key_values=before))
    assert_same(other, before)


@torch.no_grad()
def test_the_remedy_for_windows_gives_the_same_words() -> None:
    model = made("windows in between")
    config = copy.deepcopy(model.config)
    config.sliding_window, config.layer_types = None, ["full_attention"] * 2
    ours, eager = StaticCache(config=config, max_cache_len=12), DynamicCache(config=model.config)
    for cache in (ours, eager):
        model(**given(model, 0), past_key_values=cache)
    step = given(model, 1, words=1)
    net = prepared(model, **step, past_key_values=ours)
    for _ in range(4):
        found, expected = (run(**step, past_key_values=one).logits for run, one in ((net, ours), (model, eager)))
        torch.testing.assert_close(found, expected)
        step = {"input_ids": found[:, -1:].argmax(-1)}


def growing(model: Any) -> Any:
    return model(**given(model, 0)).past_key_values


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("keys and values", growing),
        ("two caches", growing),
        ("keys and values", lambda model: StaticCache(config=model.config, max_cache_len=8)),
        ("windows in between", lambda model: StaticCache(config=model.config, max_cache_len=8)),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_cache_that_changes_in_python_is_refused(name: str, make: Any, training: bool) -> None:
    model = made(name).train(training)
    with torch.no_grad():
        cache = make(model)
    before = copy.deepcopy(cache)
    with pytest.raises(CaptureError, match=r"changes .*past_key_values.*, which it is given") as caught:
        prepared(model, **given(model, 1), past_key_values=cache, training=training)
    assert "StaticCache" in caught.value.fix
    assert "use_cache=False" in caught.value.fix
    assert_same(cache, before)


def test_training_goes_on_beside_a_cache() -> None:
    model = made("keys and values").train()
    net = prepared(model, **given(model, 0), training=True)
    gradients = []
    for run in (net, model):
        output = run(**given(model, 1))
        assert output.past_key_values.layers[1].keys.requires_grad
        gradients.append(torch.autograd.grad(output.logits.square().sum(), [*model.parameters()]))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_a_static_cache_of_another_state_is_refused_at_the_call() -> None:
    model = made("keys and values")
    cache, longer, empty = (StaticCache(config=model.config, max_cache_len=length) for length in (8, 9, 8))
    for one in (cache, longer):
        model(**given(model, 0), past_key_values=one)
    step = given(model, 1, words=1)
    net = prepared(model, **step, past_key_values=cache)
    for other in (longer, empty):
        with pytest.raises(InputError, match=r"past_key_values'\]\.layers\[0\]") as caught:
            net(**step, past_key_values=other)
    assert len(str(caught.value)) < 1500


@pytest.mark.gpu
@torch.no_grad()
def test_a_static_cache_on_a_gpu() -> None:
    model = made("keys and values", "cuda")
    ours, eager = (StaticCache(config=model.config, max_cache_len=12) for _ in range(2))
    for cache in (ours, eager):
        model(**given(model, 0), past_key_values=cache)
    step = given(model, 1, words=1)["input_ids"]
    net = Nimble(model, Options(fuse="none", budget_s=1.0)).prepare(step, past_key_values=ours)
    for _ in range(4):
        found, expected = (run(step, past_key_values=one) for run, one in ((net, ours), (model, eager)))
        assert found.past_key_values is ours
        assert_same(found, expected)
        step = found.logits[:, -1:].argmax(-1)
    unfilled = StaticCache(config=model.config, max_cache_len=12)
    with pytest.raises(InputError, match="mixed devices") as caught:
        prepared(model, step, past_key_values=unfilled)
    assert "StaticCache" in caught.value.fix
