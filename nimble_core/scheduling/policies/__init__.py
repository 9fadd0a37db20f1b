"""Policies: pure functions that decide which call runs on which stream.

A new one is a function ``(graph, costs, *, max_streams=None) -> Schedule`` and a line in ``POLICIES``;
:func:`plan_streams` does all but choosing the streams.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.costs import Costs
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.policies.base import Policy, plan_streams
from nimble_core.scheduling.policies.contention import contention
from nimble_core.scheduling.policies.critical_path import critical_path
from nimble_core.scheduling.policies.nimble import nimble
from nimble_core.scheduling.policies.opara import opara
from nimble_core.scheduling.policies.single import single
from nimble_core.scheduling.policies.torchsched import torchsched
from nimble_core.utils.errors import InputError

__all__ = [
    "POLICIES",
    "Policy",
    "contention",
    "critical_path",
    "nimble",
    "opara",
    "plan_streams",
    "resolve_policy",
    "single",
    "torchsched",
]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "single": single,
        "nimble": nimble,
        "critical_path": critical_path,
        "opara": opara,
        "torchsched": torchsched,
        "contention": contention,
    }
)


def resolve_policy(policy: str | Callable[..., Any]) -> Policy:
    """Return the policy of that name, or the given function.

    A function that takes no ``max_streams`` is not told about the cap.

    Raises:
        InputError: no such policy (the message names the choices), or not a function.

    >>> resolve_policy("single") is single
    True
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InputError(f"there is no policy {policy!r}", fix=f"auto, {', '.join(POLICIES)}, or a function")
        return POLICIES[policy]
    if not callable(policy):
        raise InputError(f"{policy!r} is not a policy", fix=f"one of {', '.join(POLICIES)}, or a function")
    taken = inspect.signature(policy).parameters
    if "max_streams" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return cast(Policy, policy)
    function = policy

    def without_cap(graph: CallGraph, costs: Costs, *, max_streams: int | None = None) -> Schedule:
        return cast(Schedule, function(graph, costs))

    return without_cap
