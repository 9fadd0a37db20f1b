"""Constants of generated code: calls on them run once, and every replay finds what eager finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_core import Nimble, Options
from nimble_core.runtime.host.device import HostExecutable

STEPS = ("clone", "add in place", "view", "write a part", "add", "use", "scale by the input", "return")
Steps = list[tuple[str, int]]


def program(steps: Steps) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """A function that makes constants and does ``steps`` to them: what, and to which of those there are."""

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        known, outputs = [torch.zeros(4), torch.arange(4.0)], [x + 1]
        for turn, (what, which) in enumerate(steps, 1):
            one = known[which % len(known)]
            if what == "clone":
                known.append(one.clone())
            elif what == "add in place":
                one += turn
            elif what == "view":
                known.append(one.flip(0) if one.numel() < 4 else one[1:])
            elif what == "write a part":
                one[:2].fill_(float(turn))
            elif what == "add":
                known.append(one + turn)
            elif what == "use":
                outputs.append(x[: one.numel()] * one)
            elif what == "scale by the input":
                one.mul_(x[: one.numel()])
            else:
                outputs.append(one)
        return outputs

    return forward


@settings(max_examples=30)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=9),
    fuse=st.sampled_from(["none", "none", "library"]),
    policy=st.sampled_from(["single", "nimble"]),
)
def test_constants_hold_at_each_call_what_they_hold_in_eager(steps: Steps, fuse: str, policy: str) -> None:
    forward = program(steps)
    net = Nimble(forward, Options(fuse=fuse, policy=policy, tune="off")).prepare(torch.randn(4))  # type: ignore[arg-type]
    for _ in range(2):
        x = torch.randn(4)
        for mine, theirs in zip(net(x), forward(x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    net.close()


def written_in_a_loop(x: torch.Tensor) -> list[torch.Tensor]:
    steps, one = [], torch.ones(3)
    for _ in range(3):
        steps.append(x * one)
        one += 1
    return steps


@pytest.mark.parametrize(("model", "folded"), [(written_in_a_loop, 0), (lambda x: x * (torch.ones(3) + 1), 2)])
def test_a_constant_is_computed_once_unless_it_changes_between_calls(
    model: Callable[..., list[torch.Tensor]], folded: int
) -> None:
    x = torch.randn(3)
    net = Nimble(model, Options(fuse="none", tune="off")).prepare(x)
    assert all(map(torch.equal, net(x), model(x)))
    executable = net.engines[0].executable
    assert isinstance(executable, HostExecutable)
    assert executable.folded == folded
