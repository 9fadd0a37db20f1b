"""Match the calls of two programs. Calls have no names, so each is known by what it does and where it stands.

They are aligned by operator, module path and source line; what is left in between without the line, then by operator
and shapes alone (an insertion renumbers the modules of a ``Sequential``). At last, calls that only changed places are
paired.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nimble_core.algorithms.alignment import align
from nimble_core.ir.program import Call

__all__ = ["match_calls"]

_NUMBERED = re.compile(r"(triton_\w+?)_\d+")

_Key = tuple[Any, ...]
_Keys = tuple[list[_Key], list[_Key]]
"""Of the old and the new calls."""


def match_calls(old: Sequence[Call], new: Sequence[Call]) -> list[tuple[int, int]]:
    """Pair the positions ``(in old, in new)`` of calls that are the same call, each at most once, sorted."""
    levels = [([key(call) for call in old], [key(call) for call in new]) for key in (_exact, _placed, _shaped)]
    pairs = _in_order(levels, range(len(old)), range(len(new)))
    gone, come = {u for u, _ in pairs}, {v for _, v in pairs}
    by_place_old, by_place_new = levels[1]
    left: dict[_Key, list[int]] = defaultdict(list)
    for v in reversed(range(len(new))):
        if v not in come:
            left[by_place_new[v]].append(v)
    for u, key in enumerate(by_place_old):
        if u not in gone and left[key]:
            pairs.append((u, left[key].pop()))
    return sorted(pairs)


def _exact(call: Call) -> _Key:
    return (_name(call), *((one.operator, one.module, one.file, one.line) for one in call.origins))


def _placed(call: Call) -> _Key:
    return (_name(call), *((one.operator, one.module) for one in call.origins))


def _shaped(call: Call) -> _Key:
    return (_name(call), *((access.write, access.ref.sizes, access.ref.dtype) for access in call.accesses))


def _name(call: Call) -> str:
    """Return the operator; a compiled kernel's without its number, which counts the kernels before it."""
    numbered = _NUMBERED.fullmatch(call.operator)
    return numbered[1] if numbered else call.operator


def _in_order(levels: Sequence[_Keys], old: range, new: range) -> list[tuple[int, int]]:
    """Align by the keys of the first level, and what is left between two pairs by those of the next."""
    if not levels or not old or not new:
        return []
    olds, news = [levels[0][0][u] for u in old], [levels[0][1][v] for v in new]
    # ``align`` breaks ties by the side: swapping the reports must give the same pairs.
    found = [(u, v) for v, u in align(news, olds)] if news < olds else align(olds, news)
    pairs: list[tuple[int, int]] = []
    after_u = after_v = 0
    for u, v in [*found, (len(old), len(new))]:
        pairs += _in_order(levels[1:], old[after_u:u], new[after_v:v])
        after_u, after_v = u + 1, v + 1
    return pairs + [(old[u], new[v]) for u, v in found]
