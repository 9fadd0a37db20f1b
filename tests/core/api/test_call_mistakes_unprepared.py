"""Calls that nothing is prepared for: what is said of other inputs, modes and classes of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nimble_core.api.nimble import Nimble
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import DeviceError, InputError
from tests.support.models import Deep, Wide
from tests.support.values import close

QUICK = Options(tune="off")


def test_several_signatures() -> None:
    model = Wide()
    net = Nimble(model, QUICK)
    for batch in (1, 2, 3):
        assert net.prepare(torch.randn(batch, 16)) is net
    assert len(net.engines) == 3
    for batch in (3, 1, 2, 2):
        x = torch.randn(batch, 16)
        close(net(x), model(x))
    net.prepare(torch.randn(2, 16))
    assert len(net.engines) == 3
    with pytest.raises(InputError, match=r"args\[0\]: expected float32\[2, 16\].*given float32\[4, 16\]") as caught:
        net(torch.randn(4, 16))
    assert "prepared: args[0]" in caught.value.where
    with pytest.raises(InputError, match="positional"):
        net()
    net.close()


def test_a_call_is_held_against_the_nearest_signature() -> None:
    net = Nimble(nn.Linear(4, 4), QUICK)
    for batch in (2, 8):
        net.prepare(torch.randn(batch, 4))
    both = "prepared: args[0]: float32[{}, 4] on cpu; args[0]: float32[{}, 4] on cpu"
    for x, nearest, other in (
        (torch.randn(3, 4), 8, 2),  # as near to each: the latest
        (torch.randn(2, 5), 2, 8),  # one of two dimensions is right
        (torch.randn(2, 4).double(), 2, 8),
        (torch.randn(8, 4).double(), 8, 2),
    ):
        with pytest.raises(InputError) as caught:
            net(x)
        dtype = str(x.dtype).removeprefix("torch.")
        assert caught.value.what == (
            f"no engine is prepared for these inputs: args[0]: expected float32[{nearest}, 4] on cpu, "
            f"given {dtype}{list(x.shape)} on cpu"
        )
        assert caught.value.where == both.format(nearest, other)
    net.eval()
    for batch in range(10, 15):
        net.prepare(torch.randn(batch, 4))
    with pytest.raises(InputError, match=r"expected float32\[14, 4\]") as caught:  # the others are of training mode
        net(torch.randn(2, 4))
    assert caught.value.where.endswith("args[0]: float32[12, 4] on cpu; and 2 more")
    assert "[8, 4]" not in caught.value.where
    net.close()


@pytest.mark.parametrize("answer", ["eager", "prepare"])
def test_other_shapes(answer: Any) -> None:
    model = Wide()
    net = Nimble(model, Options(tune="off", on_new_shape=answer)).prepare(torch.randn(1, 16))
    x = torch.randn(5, 16)
    close(net(x), model(x))
    assert len(net.engines) == (2 if answer == "prepare" else 1)
    close(net(x), model(x))
    net.close()
    assert net.engines == ()
    close(net(x), model(x))
    net.close()


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_lazy_views_are_refused_as_inputs(kind: str) -> None:
    z = torch.randn(3, dtype=torch.cfloat)
    with pytest.raises(InputError, match=r"args\[0\] is a lazy view") as caught:
        Nimble(lambda x: x * 2, QUICK).prepare(z.conj() if kind == "conj" else z.conj().imag)
    assert f".resolve_{kind}()" in caught.value.fix
    net = Nimble(lambda x: x.real + 1, QUICK).prepare(z)
    with pytest.raises(InputError, match="no conjugate view"):
        net(z.conj())
    close(net(z.conj().resolve_conj()), z.real + 1)
    net.close()


def test_a_part_in_which_nothing_is_prepared_is_named() -> None:
    x = torch.randn(2, 4)
    inner = Nimble(nn.Linear(4, 4), QUICK)
    model = nn.Sequential(nn.ReLU(), inner)
    for training in (False, True):
        with pytest.raises(InputError, match="1 is itself a Nimble, of a Linear, and nothing is prepared in it"):
            Nimble(model, QUICK).prepare(x, training=training)
    with pytest.raises(InputError, match="nothing is prepared in this Nimble of Linear"):
        model(x)
    model.eval()
    inner.prepare(x)
    net = Nimble(model, QUICK).prepare(x)
    close(net(x), inner._model(x.relu()))
    net.close()
    inner.close()


def test_what_was_freed_says_so() -> None:
    net = Nimble(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"nothing is prepared in this Nimble of Linear\n"):
        net(torch.ones(1, 2))
    net.prepare(torch.ones(1, 2)).double()
    with pytest.raises(InputError, match=r"any more: close\(\), or a move or conversion"):
        net(torch.ones(1, 2).double())


def test_closing() -> None:
    net = Nimble(Deep(), QUICK)
    x = torch.randn(2, 8)
    with pytest.raises(InputError, match="nothing is prepared"):
        net(x)
    net.close()
    net.prepare(x)
    (engine,) = net.engines
    net.close()
    net.close()
    with pytest.raises(InputError, match="nothing is prepared"):
        net(x)
    with pytest.raises(DeviceError, match="closed"):
        engine.executable.run([x])
    engine.executable.close()
