"""Which eager calls each compiled kernel stands for: a compiler's own words, corrected by who writes what.

Inductor names, for a kernel, all that went into what it fused and into what it reads: the convolution that a pointwise
kernel finishes, but also that of the kernel before. Here an eager call belongs to the first kernel that does it, and
to a later one only if that continues the work of a library call it reads from (a bias, left out of a convolution).
"""

from __future__ import annotations

from dataclasses import replace

from nimble_core.program import Call, Origin, Program

__all__ = ["attributed", "unmapped"]


def attributed(program: Program, eager: Program) -> Program:
    """``program`` with eager calls, and origins, only where they belong.

    Args:
        program: recorded from compiled code, with the compiler's word in ``Call.eager``.
        eager: the calls it stands for.

    Complexity:
        Linear in the accesses and in the eager calls that the compiler names.
    """
    claimed: set[int] = set()
    library: dict[int, frozenset[int]] = {}
    calls = []
    for call in program.calls:
        named = set(call.eager)
        fresh = named - claimed
        compiled = "." not in call.operator
        continued: set[int] = set()
        if compiled:
            for ref in call.reads:
                continued |= named & library.get(ref.storage, frozenset())
        own = fresh | continued if fresh else (continued or named)
        claimed |= own
        for ref in call.writes:
            library[ref.storage] = frozenset() if compiled else frozenset(own)
        calls.append(_standing_for(call, tuple(sorted(own)), eager))
    return replace(program, calls=tuple(calls))


def _standing_for(call: Call, own: tuple[int, ...], eager: Program) -> Call:
    if own == call.eager:
        return call
    origins = dict.fromkeys(origin for index in own for origin in eager.calls[index].origins)
    return replace(call, eager=own, origins=tuple(origins) or (Origin(call.operator),))


def unmapped(program: Program) -> int:
    """Calls that no eager call explains: changes of layout, copies that a compiler added."""
    return sum(not call.eager for call in program.calls)
