"""What Inductor gets from us and from torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.coverage import lowering


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.last = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inner(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.last(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class _Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return F.interpolate(x, scale_factor=2, mode="bilinear") + F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2)


class _AsksWhoRunsIt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.compiler.is_compiling() else x.cos()


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(F.rms_norm(x, (8,))).chunk(2, -1)
        x = x + self.down(F.silu(gate) * value)
        kept = torch.arange(x.shape[1]) > 0
        return torch.where(kept[:, None], x, 0).softmax(-1).cumsum(1).sort(-1).values


@pytest.mark.parametrize(
    ("model", "sizes"), [(_Attention(), (2, 5, 16)), (_Resized(), (1, 3, 8, 8)), (_Gated(), (2, 3, 8))]
)
def test_the_compiler_gets_the_same_graph_from_both(model: nn.Module, sizes: tuple[int, ...]) -> None:
    row = lowering.compared(model.eval(), {"x": torch.randn(sizes)})
    assert row["both"] > 4
    assert (row["ours more"], row["theirs more"]) == ({}, {})


def test_layers_that_torch_compile_leaves_whole_are_taken_apart() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    row = lowering.compared(model, {"src": torch.randn(2, 5, 16)})
    assert row["theirs more"] == {"aten._transformer_encoder_layer_fwd.default": 2}
    assert row["ours more"]["aten.addmm.default"] == 2 * 4


def test_a_model_that_asks_whether_it_is_compiled_differs() -> None:
    row = lowering.compared(_AsksWhoRunsIt(), {"x": torch.randn(4)})
    assert (row["ours more"], row["theirs more"]) == ({"aten.cos.default": 1}, {"aten.sin.default": 1})


def test_the_table_names_what_differs() -> None:
    same = {"name": "a", "both": 3, "ours more": {}, "theirs more": {}}
    rows = [same, same | {"name": "b", "ours more": {"aten.cos.default": 2}}, {"name": "c", "error": "E: no"}]
    text = lowering.table(rows)
    assert "Of 3 architectures both graphs are made of 2; 1 of these have the same operators." in text
    assert "| `b` | 2 aten.cos.default | – |" in text
    assert text.endswith("Not compared, because one of the two refuses them: `c`.")
