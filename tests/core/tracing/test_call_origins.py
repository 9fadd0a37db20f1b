"""Calls say which module and line they come from."""

from __future__ import annotations

import torch

from tests.support.models import Deep
from tests.support.recordings import recorded


def test_origins_name_the_innermost_module_and_the_line() -> None:
    model = Deep(layers=2)
    program = recorded(model, torch.randn(1, 8)).program
    assert [call.module for call in program.calls] == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    for call in program.calls:
        (origin,) = call.origins
        assert origin.operator == call.operator
        assert origin.file.endswith("modules.py")
        assert not origin.file.startswith("/")
        assert origin.line > 0


def test_origins_of_a_function_are_its_own_lines() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * 2

    first = forward.__code__.co_firstlineno
    program = recorded(forward, torch.randn(2)).program
    assert [(call.module, call.origins[0].line - first) for call in program.calls] == [("", 1), ("", 2)]


def test_origins_in_a_library_are_relative_paths() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    program = recorded(BertModel(config).eval(), torch.randint(0, 50, (1, 4))).program
    files = {call.origins[0].file for call in program.calls}
    assert any(file.startswith("transformers/models/bert/") for file in files)
    assert not [file for file in files if file.startswith("/") or not file]
    assert any(call.module.startswith("encoder.layer.0.attention") for call in program.calls)
