"""A cell's body: what is shown, where its lines are, and which module calls are seen in it."""

from __future__ import annotations

import pytest
import torch

from nimble_core.utils.errors import InputError
from nimble_viz.cli.magics import Calls, compile_body


@pytest.mark.parametrize(("cell", "shown"), [("1\n2", 2), ("1\n2;", None), ("1\nx = 2", None), ("# nothing", None)])
def test_an_expression_at_the_end_is_shown(shell, cell, shown) -> None:
    assert compile_body(shell, cell).run(shell.user_ns, shell.user_ns, Calls()) == shown


def test_magics_and_assignments_work_in_a_body(shell) -> None:
    body = compile_body(shell, "y = %pwd\nz = [i for i in range(3) if i != len(y)]")
    body.run(shell.user_global_ns, shell.user_ns, Calls())
    assert isinstance(shell.user_ns["y"], str)
    assert shell.user_ns["z"] == [0, 1, 2]


def test_lines_are_counted_from_the_magic(shell) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        compile_body(shell, "x = 1\nx / 0").run(shell.user_ns, shell.user_ns, Calls())
    assert raised.traceback[-1].lineno == 2  # from 0: the third line of the cell, whose first is the magic


@pytest.mark.parametrize("cell", ["x = 1\ny = = 2", "x = 1\nreturn x", "x = 1\n  y = 2"])
def test_a_syntax_error_says_where_before_anything_runs(shell, cell) -> None:
    with pytest.raises(InputError, match="line 3") as raised:
        compile_body(shell, cell)
    assert "nothing of the cell was run" in str(raised.value)
    assert "x" not in shell.user_ns


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        if scale < 0:
            raise ValueError("negative")
        return self.inner(x) * scale


def watched(shell, cell: str, **names: object) -> Calls:
    shell.user_ns.update(names)
    calls = Calls()
    compile_body(shell, cell).run(shell.user_ns, shell.user_ns, calls)
    return calls


def test_one_call_with_its_inputs_and_line(shell) -> None:
    model, x = Outer(), torch.ones(2, 4)
    calls = watched(shell, "a = 1\ny = model(x, scale=2.0).sum()", model=model, x=x)
    assert calls.module is model
    assert calls.args[0] is x
    assert dict(calls.kwargs) == {"scale": 2.0}
    assert str(calls) == "Outer, line 3"
    assert calls.seconds > 0
    assert not calls.more


def test_a_forward_that_raises_is_no_call(shell) -> None:
    cell = "try:\n    model(x, scale=-1.0)\nexcept ValueError:\n    y = model(x)"
    calls = watched(shell, cell, model=Outer(), x=torch.ones(2, 4))
    assert calls.line == 5
    assert not calls.more


def test_what_runs_after_the_cell_runs_as_it_was_written(shell) -> None:
    cell = (
        "def f(x):\n    return model(x)\ng = lambda x: model(x)\nh = (model(x) for _ in range(1))\n"
        "class A:\n    def own(self):\n        return super().__repr__()\nnames = sorted(locals())"
    )
    before = set(shell.user_ns)
    calls = watched(shell, cell, model=Outer(), x=torch.ones(2, 4))
    assert calls.module is None
    assert set(shell.user_ns) - before == {"model", "x", "f", "g", "h", "A", "names"}
    assert "model" in shell.user_ns["names"]
    assert shell.user_ns["f"](shell.user_ns["x"]).shape == (2, 4)
    assert shell.user_ns["g"](shell.user_ns["x"]).shape == next(shell.user_ns["h"]).shape
    assert "A object" in shell.user_ns["A"]().own()
