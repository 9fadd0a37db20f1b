"""Which eager calls each kernel stands for: what the compiler says, corrected by who writes what.

Inductor names, for a kernel, all that went into what it fused and into what it reads: the convolution that a pointwise
kernel finishes, but also that of the kernel before. Here an eager call belongs to the first kernel that does it, and
to a later one only if that continues the work of a library call it reads from (a bias, left out of a convolution).
A kernel does nothing that needs a library call which is still to come: such a name means a change of layout. The
exception is the gradient of a convolution's bias: a sum, fused into the kernel that computes what is summed.
Inductor names nothing for what it replaced by a pattern (an attention): such a call stands for the eager calls that no
other claims and that lie between those of its producers and those of its readers. A pattern may also keep one name of
several (a division before a softmax): what is left then belongs to the kernels that do its readers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from nimble_core.ir.program import Call, Origin, Phase, Program

__all__ = ["attributed", "unmapped"]


def attributed(program: Program, eager: Program) -> Program:
    """Return ``program`` with eager calls, and origins, only where they belong.

    Args:
        program: recorded from compiled code; ``Call.eager`` is what the compiler says.
        eager: the calls it stands for.

    Complexity:
        Linear in the accesses, calls times eager calls in bits.
    """
    claimed: set[int] = set()
    library: dict[int, frozenset[int]] = {}
    calls = []
    before = _ancestors(eager)
    last_named = {index: place for place, call in enumerate(program.calls) for index in call.eager}
    done_at = _library_calls(program, eager, before)
    for place, call in enumerate(program.calls):
        compiled = "." not in call.operator
        named = set(call.eager)
        continued: set[int] = set()
        if compiled:
            # What needs the result of a library call that is still to come is not done here: a change of layout.
            to_come = _mask([[index for index, at in done_at.items() if at > place]])
            needs = {one: before[one] | (0 if _sums_bias(eager.calls[one]) else 1 << one) for one in named}
            named = {one for one in named if last_named[one] == place or not needs[one] & to_come}
            continued = {one for ref in call.reads for one in named & library.get(ref.storage, frozenset())}
        fresh = named - claimed
        own = fresh | continued if fresh else (continued or named)
        claimed |= own
        for ref in call.writes:
            library[ref.storage] = frozenset() if compiled else frozenset(own)
        calls.append(_standing_for(call, tuple(sorted(own)), eager))
    unclaimed = set(range(len(eager.calls))) - claimed
    if not all(call.eager for call in calls):
        calls = _between(calls, before, eager, unclaimed)
    if unclaimed:
        calls = _with_their_readers(calls, before, eager, unclaimed)
    return replace(program, calls=tuple(_in_phases(calls, eager)))


def _in_phases(calls: Sequence[Call], eager: Program) -> Iterator[Call]:
    """Put calls in the phase of the last eager call they stand for, or else of the call before."""
    phase: Phase = "forward"
    for call in calls:
        if call.eager:
            phase = eager.calls[call.eager[-1]].phase
        yield replace(call, phase=phase)


def _library_calls(program: Program, eager: Program, before: Sequence[int]) -> dict[int, int]:
    """Find eager calls that a call of the same operator does, and where: convolutions, products.

    Of those that it names, some may have led to what it reads.
    """
    found: dict[int, int] = {}
    for place, call in enumerate(program.calls):
        if "." in call.operator:
            alike = [index for index in call.eager if eager.calls[index].label == call.label]
            led_to = 0
            for index in alike:
                led_to |= before[index]
            for index in alike:
                if not led_to >> index & 1:
                    found.setdefault(index, place)
    return found


def _sums_bias(call: Call) -> bool:
    """Return whether a call also computes the gradient of a convolution's bias."""
    return call.label == "convolution_backward" and any(len(ref.sizes) == 1 for ref in call.writes)


def _between(calls: list[Call], before: list[int], eager: Program, unclaimed: set[int]) -> list[Call]:
    """Give calls that name nothing the unclaimed eager calls between what they read and their readers."""
    done = list(calls)
    made_by: dict[int, Call] = {}
    for place, call in enumerate(calls):
        if not call.eager and call.writes:
            written = {ref.storage for ref in call.writes}
            readers = [one for one in done[place + 1 :] if any(ref.storage in written for ref in one.reads)]
            read = {ref.storage for ref in call.reads}
            roots = _mask(made_by[storage].eager for storage in read if storage in made_by)
            after = 0
            for reader in readers:
                for index in reader.eager:
                    after |= before[index]
            found = [one for one in sorted(unclaimed) if after >> one & 1 and (before[one] & roots or not roots)]
            unclaimed.difference_update(found)
            done[place] = _standing_for(call, tuple(found), eager)
        for ref in call.writes:
            made_by[ref.storage] = done[place]
    return done


def _with_their_readers(
    calls: list[Call], before: Sequence[int], eager: Program, unclaimed: Collection[int]
) -> list[Call]:
    """Give unclaimed eager calls to the calls that do the first eager call which needs them."""
    doers: dict[int, list[int]] = {}
    for place, call in enumerate(calls):
        for index in call.eager:
            doers.setdefault(index, []).append(place)
    more: dict[int, set[int]] = {}
    for one in sorted(unclaimed, reverse=True):
        reader = next((later for later in range(one + 1, len(before)) if before[later] >> one & 1), None)
        doers[one] = doers.get(reader, []) if reader is not None else []
        for place in doers[one]:
            more.setdefault(place, set()).add(one)
    return [
        _standing_for(call, tuple(sorted({*call.eager, *more[place]})), eager) if place in more else call
        for place, call in enumerate(calls)
    ]


def _mask(groups: Iterable[Sequence[int]]) -> int:
    mask = 0
    for group in groups:
        for index in group:
            mask |= 1 << index
    return mask


def _ancestors(program: Program) -> list[int]:
    """Find, for each call, the calls that what it reads is computed from, as bits."""
    last: dict[int, int] = {}
    masks: list[int] = []
    for call in program.calls:
        mask = 0
        for ref in call.reads:
            maker = last.get(ref.storage)
            if maker is not None:
                mask |= masks[maker] | 1 << maker
        masks.append(mask)
        for ref in call.writes:
            last[ref.storage] = call.index
    return masks


def _standing_for(call: Call, own: tuple[int, ...], eager: Program) -> Call:
    if own == call.eager:
        return call
    origins = dict.fromkeys(origin for index in own for origin in eager.calls[index].origins)
    return replace(call, eager=own, origins=tuple(origins) or (Origin(call.operator),))


def unmapped(program: Program) -> int:
    """Count the calls that no eager call explains: changes of layout, copies that a compiler added."""
    return sum(not call.eager for call in program.calls)
