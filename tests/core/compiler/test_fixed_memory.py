"""What the model writes in place, but never with anything that depends on inputs or weights, is computed once."""

import pytest
import torch
from torch import nn

from nimble_core import Nimble, Options
from tests.support.fused_models import DEVICES


def operators(net):
    (engine,) = net.engines
    return [call.operator for call in engine.recorded.recording.program.calls]


def windows(x):
    """Number the nine parts of a window, as Swin's shifted windows do, and mask between different ones."""
    mask, number = x.new_zeros((6, 6)), 0
    for rows in (slice(0, 3), slice(3, 5), slice(5, 6)):
        for columns in (slice(0, 3), slice(3, 5), slice(5, 6)):
            mask[rows, columns] = number
            number += 1
    mask = mask.view(3, 2, 3, 2).permute(0, 2, 1, 3).reshape(9, 4)
    mask = mask.unsqueeze(1) - mask.unsqueeze(2)
    return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


class Model(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.layer, self.masked = nn.Linear(4, 4), masked
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.masked(self, self.layer(x))


def causal(model, x):
    mask = torch.empty(4, 4, device=x.device).fill_(-100.0).triu_(1)
    return x + mask


def overwritten_later(model, x):
    counts = torch.zeros(4, device=x.device)
    early = x + counts  # reads what is written afterwards
    counts[1:3] = 2.0
    return early + counts


def of_a_buffer(model, x):
    mask = x.new_zeros(4)
    mask[1:] = model.scale
    return x + mask


def of_the_input(model, x):
    mask = torch.zeros_like(x)
    mask[:, 1:] = x[:, :3]
    return x + mask


def returned(model, x):
    mask = x.new_zeros(4)
    mask[1:] = 3.0
    return x, mask


def random(model, x):
    mask = x.new_zeros(4)
    mask[1:].bernoulli_(0.5)
    return x + mask * 0


FIXED = {"windows": lambda _, x: x + windows(x).sum(0), "causal": causal}
VARYING = {one.__name__: one for one in (overwritten_later, of_a_buffer, of_the_input, returned, random)}
KINDS = ["library", pytest.param("inductor", marks=(pytest.mark.slow, pytest.mark.compiler))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fuse", KINDS)
@pytest.mark.parametrize("name", [*FIXED, *VARYING])
def test_what_is_written_in_place_is_as_in_eager_and_follows_inputs_weights_and_callers(name, fuse, device):
    model = Model((FIXED | VARYING)[name]).eval().to(device)
    x, other = torch.randn(2, 4, 4, device=device)
    net = Nimble(model, Options(fuse=fuse, policy="single")).prepare(x)
    for given in (x, other, x):
        torch.testing.assert_close(net(given), model(given))
        with torch.no_grad():
            model.scale += 1
        found = net(given)
        torch.testing.assert_close(found, model(given))
        for result in found if isinstance(found, tuple) else ():
            result.fill_(7.0)  # it belongs to the caller: the next call must not see it
    net.close()


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_mask_costs_no_call(name):
    net = Nimble(Model(FIXED[name]).eval(), Options(fuse="library", policy="single")).prepare(torch.randn(4, 4))
    assert operators(net) == ["aten.addmm.default", "aten.add.Tensor"]
    assert not net.engines[0].notes, "nothing is watched that cannot change"


@pytest.mark.parametrize("name", ["of_a_buffer", "of_the_input"])
def test_other_masks_are_made_anew(name):
    net = Nimble(Model(VARYING[name]).eval(), Options(fuse="library", policy="single")).prepare(torch.randn(4, 4))
    assert len(operators(net)) > 2
