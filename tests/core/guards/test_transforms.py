from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from nimble_core.api.nimble import Nimble
from nimble_core.guards.transforms import transforming
from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import InputError

X = torch.linspace(-1, 1, 8).view(2, 4)


def dual(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(X, X))).tangent
        assert tangent is not None
        return tangent


TRANSFORMS: list[Any] = [
    lambda f: torch.func.grad(lambda z: (f(z) ** 2).sum())(X),
    lambda f: torch.func.jacrev(f)(X),
    lambda f: torch.func.jacfwd(f)(X),
    lambda f: torch.func.hessian(lambda z: (f(z) ** 2).sum())(X),
    lambda f: torch.func.jvp(f, (X,), (X,))[1],
    lambda f: torch.func.vjp(f, X)[1](X)[0],
    lambda f: torch.func.vmap(f)(X[None]),
    dual,
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("training", [False, True])
def test_a_prepared_module_cannot_be_transformed(transform: Any, training: bool) -> None:
    net = Nimble(model().train(training), Options(tune="off", fuse="none")).prepare(X, training=training)
    with pytest.raises(InputError, match=r"cannot be transformed by (torch\.func|forward)[\s\S]*the model itself"):
        transform(net)
    assert not transforming()
    torch.testing.assert_close(net(X), net._model(X))
    net.close()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_eager_answers_transforms_where_it_may(transform: Any) -> None:
    eager = model().eval()
    net = Nimble(eager, Options(tune="off", fuse="none", on_new_shape="eager")).prepare(X)
    torch.testing.assert_close(transform(net), transform(eager))
    net.close()


def test_what_is_no_part_of_a_transform_is_replayed_inside() -> None:
    eager = model().eval()
    net = Nimble(eager, Options(tune="off", fuse="none")).prepare(X)
    torch.testing.assert_close(
        torch.func.grad(lambda z: (z * net(X)).sum())(X), torch.func.grad(lambda z: (z * eager(X)).sum())(X)
    )
    with forward_ad.dual_level():
        torch.testing.assert_close(net(X), eager(X))
    net.close()


def test_replaced_parameters_are_noticed_under_a_transform() -> None:
    net = Nimble(model().eval(), Options(tune="off", fuse="none")).prepare(X)
    with pytest.raises(InputError, match="not the one that was prepared"):
        torch.func.grad(lambda one: torch.func.functional_call(net, one, (X,)).sum())(dict(net.named_parameters()))
    net.close()
