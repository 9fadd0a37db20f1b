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
