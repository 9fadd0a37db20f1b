"""``MODULE:FACTORY``: what is found, what it may give, and what is said otherwise."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from nimble_core.utils.errors import InputError
from nimble_viz.cli.factory import TRAINING, load_factory, made_by
from nimble_viz.collect.compare import compare


@pytest.mark.parametrize(
    ("name", "training", "inputs"),
    [
        ("two", False, ((5,), {}, {})),
        ("three", False, ((1, 2), {"scale": 3}, {})),
        ("one", False, ((5,), {}, {})),
        ("named", False, ((), {"scale": 3}, {})),
        ("step", False, ((1,), {"scale": 2}, {})),
        ("step", True, ((1,), {"scale": 2}, {"target": 3, "loss_fn": max, "clip_grad_norm": 0.5})),
    ],
)
def test_what_a_factory_gives(factory: str, name: str, training: bool, inputs: tuple[Any, ...]) -> None:
    model, *given = made_by(f"{factory}:{name}", training)
    assert model.__name__ == "model"
    assert tuple(given) == inputs


def test_a_module_by_name(factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(factory).parent))
    assert load_factory("factories_for_tests:two").__name__ == "two"


@pytest.mark.parametrize(
    ("spec", "training", "message"),
    [
        ("nothing", False, "does not name a factory"),
        ("json:", False, "does not name a factory"),
        ("no_such_module_here:f", False, "there is no module 'no_such_module_here'"),
        ("no_such_file.py:f", False, "there is no file"),
        ("json:nothing", False, "json has no function 'nothing'"),
        ("FILE:number", False, "has no function 'number'"),
        ("FILE:wrong", False, "gave function, not (model, x)"),
        ("FILE:two", True, "gave tuple, which does not say how to train"),
        ("FILE:trained", False, "gave dict of model, args, kwargs, target, loss_fn, clip_grad_norm, training, not"),
        ("FILE:misspelt", True, "gave dict of model, args, loss, which does not say how to train"),
        ("FILE:thre", False, "it has three, trained"),
    ],
)
def test_what_is_refused_and_what_is_said(factory: str, spec: str, training: bool, message: str) -> None:
    with pytest.raises(InputError) as refused:
        made_by(spec.replace("FILE", factory), training)
    assert message in str(refused.value)
    assert refused.value.fix


def test_every_keyword_of_training_may_be_in_the_dict() -> None:
    known = set(inspect.signature(compare).parameters)
    others = {"model", "args", "kwargs", "against", "options", "training", "progress", "device", "unknown"}
    assert known - set(TRAINING) == others
    assert set(TRAINING) <= known


def test_an_import_error_inside_the_users_module_is_theirs(factory: str) -> None:
    Path(factory).write_text("import no_such_module_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load_factory(f"{factory}:f")
