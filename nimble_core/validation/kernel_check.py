"""Does each kernel do what the eager calls do that it stands for? Shown one by one, on values that exercise them.

Three runs go side by side: the kernels, eager's calls, and eager's calls in float64. Whenever a kernel has written what
an eager call writes, the three are compared, with the bounds that eager's own error against float64 sets. Then they go
on from the same fresh numbers, so that each comparison is about the kernels since the last one, and no error, rounding
included, reaches the next. What a kernel writes need not be any eager call's (a convolution whose bias comes later): it
is shown by the kernels that read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

import torch

from nimble_core.ir.call_graph import predecessors
from nimble_core.ir.program import Call, Program, TensorRef
from nimble_core.tracing.kernel_launches import Relaunch
from nimble_core.tracing.operator_traits import storage_address
from nimble_core.tracing.recorded import Recorded, state_kept
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.tracing.strides import restrided
from nimble_core.utils.errors import NimbleError, first_line
from nimble_core.validation.bounds import BOUNDS, allowed_noise, lowest_precision, working_precision
from nimble_core.validation.distances import gaps
from nimble_core.validation.exercise import Copies, StandIns, fresh_like
from nimble_core.validation.float64_reference import in_float64, memory_limit, wide_bytes

__all__ = ["KernelCheck", "check_kernels"]

_TELLING = 10.0
"""How many times its bound a result has to vary for a comparison to show anything."""

_STATE = {"input", "parameter", "buffer"}  # roles of what outlives a run: weights, running statistics, moments
_PRODUCTS = {"convolution", "mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """What was shown of the kernels of a program.

    Args:
        calls: how many there are.
        shown: how many were shown to be right.
        wrong: the first that is not, in words; empty if none is.
        unshown: the first of which nothing could be shown, in words; empty if all are.
        faults: eager calls of those that are wrong or not shown, ascending; empty where none can be told apart.
        places: these kernels, in words.
    """

    calls: int
    shown: int
    wrong: str = ""
    unshown: str = ""
    faults: tuple[int, ...] = ()
    places: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every kernel was shown to be right."""
        return not self.wrong and not self.unshown


def check_kernels(variant: Recorded, inputs: Sequence[torch.Tensor]) -> KernelCheck:
    """Hold each call of a rewritten program against the eager calls that it stands for.

    The model, its state and random numbers are left as they were.

    Args:
        variant: the rewritten program; ``variant.eager`` is the model's own.
        inputs: for the model; not written.
    """
    assert variant.eager is not None
    calls = len(variant.recording.program.calls)
    if variant.recording.draws or variant.recording.generators:
        return KernelCheck(calls, 0, unshown="it draws random numbers, which a run beside it would move")
    try:
        with state_kept(variant), state_kept(variant.eager), issuing(variant.signature.device.type):
            found = _Walk(variant, variant.eager, inputs, StandIns(1)).checked()
            if found.passed:
                return found
            # What reads a wrong result is wrong as well: once more, where each goes on from what eager has.
            apart = _Walk(variant, variant.eager, inputs, StandIns(1), corrects=True).checked()
            return replace(found, faults=apart.faults, places=apart.places)
    except NimbleError as error:
        return KernelCheck(calls, 0, unshown=error.what)
    except RuntimeError as error:  # of operators, on numbers in float64 that the model never computes with
        return KernelCheck(calls, 0, unshown=f"{type(error).__name__}: {first_line(error)}")


class _Run:
    """One of the three runs: a recording on values of its own; in float64 within ``wide_limit`` bytes."""

    def __init__(
        self,
        recording: Recording,
        given: dict[int, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        wide_limit: int | None = None,
    ) -> None:
        copy = Copies(None if wide_limit is None else torch.float64)
        given = {slot: copy(one) for slot, one in given.items()}
        inputs = [copy(one) for one in inputs]
        self.issuer = Issuer(replace(recording, given=given), inputs)
        own = [*given.values(), *inputs]
        self._around = nullcontext() if wide_limit is None else in_float64(own, wide_limit)

    def issue(self, call: int) -> None:
        with self._around:
            self.issuer.issue(call)

    def written(self, call: int) -> Iterator[tuple[TensorRef, torch.Tensor]]:
        """Yield the windows that a call writes, as they are now."""
        recording = self.issuer.recording
        step = self.issuer.steps[call]
        refs = recording.program.calls[call].writes
        for ref in refs:
            slots = (slot for slot in (*step.outputs, *step.reads) if slot >= 0 and recording.refs[slot] == ref)
            tensor = next((one for slot in slots if (one := self.issuer.tensors[slot]) is not None), None)
            if tensor is not None:
                yield ref, tensor


@dataclass(slots=True)
class _Pair:
    """A result of a kernel, and what eager's call makes of the same."""

    mine: torch.Tensor
    theirs: torch.Tensor
    truth: torch.Tensor
    ref: TensorRef
    eager: TensorRef
    telling: bool


@dataclass(frozen=True, slots=True)
class _Unlike:
    """A kernel whose results are not those of the eager calls that it should have finished."""

    call: Call
    written: Mapping[TensorRef, torch.Tensor]
    results: Collection[int]


class _Walk:
    """Goes through the kernels in order, with eager's calls beside them.

    With ``corrects``, eager's results take the place of wrong ones, so that those who read them can be right.
    """

    def __init__(
        self,
        variant: Recorded,
        eager: Recorded,
        inputs: Sequence[torch.Tensor],
        stand_ins: StandIns,
        *,
        corrects: bool = False,
    ) -> None:
        folded: dict[int, torch.Tensor] = {}
        if variant.folded is not None and variant.folded.constants:
            made = variant.folded.compute(stand_ins.of)
            pairs = zip(variant.folded.constants, made, strict=True)
            folded = {storage_address(was): restrided(now, was.stride()) for was, now in pairs}
        given = stand_ins.given(eager.recording, {})
        self._mine = _Run(variant.recording, stand_ins.given(variant.recording, folded), inputs)
        self._theirs = _Run(eager.recording, given, inputs)
        limit = memory_limit(eager.signature.device)
        fits = wide_bytes([*given.values(), *inputs]) <= limit
        self._truth = _Run(eager.recording, given, inputs, wide_limit=limit) if fits else None
        self._stand_ins = stand_ins
        self._kernels = variant.recording.program.calls
        self._calls = eager.recording.program.calls
        self._needed = predecessors(eager.graph)
        self._lowest = lowest_precision(eager.recording.program)
        self._owners = _owners(self._kernels)
        self._readers, self._read_by = _users(self._calls, "reads"), _users(self._kernels, "reads")
        self._written_by = _users(self._kernels, "writes")
        self._kept = variant.recording.program.kept
        self._corrects = corrects
        self._corrected: set[int] = set()
        self._doubtful: dict[int, _Unlike] = {}
        self._wanted = _last_wanted(variant.recording.program)
        self._done: set[int] = set()
        self._exact: set[int] = set()  # eager calls whose results are there in float64, too
        self._unchanged: dict[int, set[TensorRef]] = {}  # what other calls declare as written, but leave as it was
        self._shown: set[int] = set()
        self._dull: set[int] = set()
        self._spoilt: set[int] = set()  # what they leave in the model's state is not what eager does

    def checked(self) -> KernelCheck:
        """Go through all of them."""
        for call in self._kernels:
            self._mine.issue(call.index)
            self._compare(call)
        for index in range(len(self._calls)):
            self._catch_up(index)
        return self._summed_up()

    # -- one kernel --

    def _compare(self, call: Call) -> None:
        written = dict(self._mine.written(call.index))
        # Libraries' attention also writes results for a backward that there is not, and leaves some uninitialised.
        wanted = {ref: one for ref, one in written.items() if self._wanted.get(ref.storage, -1) > call.index}
        written = wanted or written
        found: dict[TensorRef, list[_Pair]] = {ref: [] for ref in written}
        results = self._results_of(call)
        for index in call.eager:
            self._catch_up(index)
            for result in self._eager_results(index):
                for ref, mine in written.items():
                    pair = self._pair(ref, mine, result)
                    if pair is not None:
                        found[ref].append(pair)
                        results.discard(index)
            if not results and all(found.values()):
                break
        if self._spoils_state(call, [ref for ref, pairs in found.items() if not pairs]):
            self._spoilt.add(call.index)
        if results:
            if self._corrects:
                self._correct(_Unlike(call, written, results))
            return
        if all(found.values()):  # what is no eager call's is shown by who reads it
            telling = any(one.telling for pairs in found.values() for one in pairs)
            (self._shown if telling or self._is_eagers(call) else self._dull).add(call.index)
        for pairs in found.values():
            if len(pairs) == 1 and pairs[0].telling and self._read_alike(call, pairs[0]):
                self._refresh(pairs[0])

    def _spoils_state(self, call: Call, unlike: Sequence[TensorRef]) -> bool:
        """Whether results ``unlike`` eager's lie where its calls leave something that outlives a run."""
        mine, theirs = (run.issuer.recording.program.storages for run in (self._mine, self._theirs))
        left = (theirs[ref.storage] for index in call.eager for ref in self._calls[index].writes)
        state = {one.name for one in left if one.name and one.role in _STATE}
        return any(mine[ref.storage].name in state for ref in unlike)

    def _is_eagers(self, call: Call) -> bool:
        """Whether a kernel is an eager call that was kept: where it varies too little, there is nothing to show."""
        kept = len(call.eager) == 1 and call.eager[0] in self._kept
        return kept and call.operator == self._calls[call.eager[0]].operator

    def _correct(self, wrong: _Unlike) -> None:
        """Let those who read what a kernel made find eager's results.

        A product may leave the last of its work, a bias, to who reads it: it is wrong if that is wrong, too.
        """
        before = [self._doubtful.pop(ref.storage) for ref in wrong.call.reads if ref.storage in self._doubtful]
        if wrong.call.label in _PRODUCTS and not before:
            self._doubtful |= {ref.storage: wrong for ref in wrong.written}
            return
        for one in (*before, wrong):
            self._corrected.add(one.call.index)
            for theirs in (theirs for index in sorted(one.results) for _, theirs, _ in self._eager_results(index)):
                shaped = (_as_shape(mine, theirs.shape) for mine in one.written.values())
                alike = [mine for mine in shaped if mine is not None and mine.dtype == theirs.dtype]
                if len(alike) == 1:  # else shapes do not tell which is which
                    alike[0].copy_(theirs)

    def _results_of(self, call: Call) -> set[int]:
        """Return the eager calls that this kernel finishes: no later one has a part in them, and it uses them no more.

        One that leaves out the last of its calls writes what an eager call writes as well.
        """
        found, read = set[int](), set[int]()
        for index in reversed(call.eager):
            eager = self._calls[index]
            if self._owners[index][-1] == call.index and not any(ref.storage in read for ref in eager.writes):
                found.add(index)
            read |= {ref.storage for ref in eager.reads}
        return found

    def _catch_up(self, index: int) -> None:
        """Issue an eager call, after those that it needs."""
        pending = [index]
        while pending:
            one = pending[-1]
            missing = [need for need in self._needed[one] if need not in self._done] if one not in self._done else []
            if missing:
                pending += missing
                continue
            pending.pop()
            if one not in self._done:
                self._done.add(one)
                self._issue_in_float64(one)
                self._issue_as_eager(one)

    def _issue_in_float64(self, index: int) -> None:
        """Issue a call; where it has no float64 the run ends, and of what comes later eager alone decides."""
        run, ended = self._truth, len(self._exact) + 1 < len(self._done)
        # Compiled for one type, a kernel of the user's own would read other numbers, without an error.
        if run is not None and not ended and not isinstance(run.issuer.steps[index].func, Relaunch):
            with suppress(NimbleError, RuntimeError):
                run.issue(index)
                self._exact.add(index)

    def _issue_as_eager(self, index: int) -> None:
        """Issue a call; where it has no float64, note what it declares as written, but leaves as it was.

        Fused optimizers do so with gradients: those in float64 are still what eager's should be.
        """
        inexact = self._truth is not None and index not in self._exact
        self._theirs.issuer.ready(index)
        before = {ref: one.clone() for ref, one in self._theirs.written(index)} if inexact else {}
        self._theirs.issue(index)
        after = list(self._theirs.written(index)) if before else []
        unchanged = {ref for ref, one in after if ref in before and torch.equal(before[ref], one)}
        if len(unchanged) < len(after):  # a call that changes nothing, zeros over zeros, has made its results
            self._unchanged[index] = unchanged

    def _truth_of(self, index: int) -> _Run:
        """Return the run to hold an eager call's results against: in float64 if it came so far, else eager's own."""
        return self._truth if self._truth is not None and index in self._exact else self._theirs

    def _eager_results(self, index: int) -> Iterator[tuple[TensorRef, torch.Tensor, torch.Tensor]]:
        results = zip(self._theirs.written(index), self._truth_of(index).written(index), strict=True)
        unchanged = self._unchanged.get(index, ())
        return ((ref, theirs, truth) for (ref, theirs), (_, truth) in results if ref not in unchanged)

    def _pair(
        self, ref: TensorRef, mine: torch.Tensor, result: tuple[TensorRef, torch.Tensor, torch.Tensor]
    ) -> _Pair | None:
        """Pair a kernel's result with an eager one; None if they are not the same."""
        eager, theirs, truth = result
        shaped = _as_shape(mine, theirs.shape)
        if shaped is None or _kind(mine) != _kind(theirs):
            return None
        telling = self._right(shaped, theirs, truth)
        return None if telling is None else _Pair(shaped, theirs, truth, ref, eager, telling)

    def _right(self, mine: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> bool | None:
        """Whether a result is right, and varies enough to show it; None if it is not.

        Where there is nothing in float64, ``truth`` is ``theirs``.
        """
        if not (mine.is_floating_point() or mine.is_complex()):
            return bool(mine.numel() == 1 or (mine != mine.flatten()[:1]).any()) if torch.equal(mine, theirs) else None
        (error,), (own,), (size,) = gaps([mine], [truth]), gaps([theirs], [truth]), gaps([truth])
        if not (isfinite(error.norm) and isfinite(own.norm)):
            return False if torch.equal(mine.nan_to_num(), theirs.nan_to_num()) else None
        precision = working_precision([theirs], self._lowest)
        least = BOUNDS[precision].tolerance if truth is theirs else BOUNDS[precision].floor
        # Of a sum that is zero in exact arithmetic (a gradient of a bias before batch norm) eager has no digit right.
        allowed = max(allowed_noise(own.norm, mine.numel(), size.norm, precision), least * (size.norm or 1.0))
        if error.norm > allowed:
            return None
        (spread,) = gaps([truth - truth.mean()])
        return spread.norm > _TELLING * allowed or mine.numel() == 1

    # -- going on from fresh numbers --

    def _read_alike(self, call: Call, pair: _Pair) -> bool:
        """Whether all that kernels have yet to make of this result, eager makes later as well, and they of itself.

        A kernel may compute it once more from what it was made of.
        """
        readers = set(self._readers.get(pair.eager.storage, ()))
        for reader in readers:
            owners = [self._kernels[at] for at in self._owners.get(reader, ()) if at > call.index]
            alike = [any(ref.storage == pair.ref.storage for ref in one.reads) for one in owners]
            if bool(owners) == (reader in self._done) or not all(alike):
                return False
        # Of a sum that eager hands out, a kernel may make the rest of what eager has done inside of the same call.
        ends = self._written_by[pair.ref.storage]
        until = min((at for at in ends if at > call.index), default=len(self._kernels))
        later = [self._kernels[at] for at in self._read_by.get(pair.ref.storage, ()) if call.index < at <= until]
        return all(readers.intersection(one.eager) for one in later if one.eager)

    def _refresh(self, pair: _Pair) -> None:
        if not pair.theirs.is_floating_point() or pair.theirs.dtype.itemsize == 1:
            return
        fresh = fresh_like(pair.theirs, self._stand_ins.generator(pair.theirs.device))
        if fresh is not None:
            for one in (pair.mine, pair.theirs, pair.truth):
                one.copy_(fresh)

    # -- all of them --

    def _outputs_right(self) -> Iterator[bool | None]:
        """Compare each output, as ``_right`` does."""
        issuer, maker = self._theirs.issuer, dict[int, int]()
        for call in self._calls:
            unchanged = self._unchanged.get(call.index, ())
            maker |= {ref.storage: call.index for ref in call.writes if ref not in unchanged}
        beside = zip(issuer.recording.outputs, self._mine.issuer.outputs(), issuer.outputs(), strict=True)
        for slot, mine, theirs in beside:
            run = self._truth_of(maker.get(issuer.recording.storage_of[slot], -1))
            truth = run.issuer.output(slot)
            yield None if truth is None or mine.shape != theirs.shape else self._right(mine, theirs, truth)

    def _summed_up(self) -> KernelCheck:
        recording, shown = self._mine.issuer.recording, set(self._shown)
        rights = list(self._outputs_right())
        made_of = [recording.storage_of[slot] for slot in recording.outputs]
        handed_out = {storage for storage, right in zip(made_of, rights, strict=True) if right}
        broken = {storage for storage, right in zip(made_of, rights, strict=True) if right is None}
        for call in reversed(self._kernels):
            if call.index in self._corrected:
                continue
            made = {ref.storage for ref in call.writes}
            read = {storage: {at for at in self._read_by.get(storage, ()) if at > call.index} for storage in made}
            told = [storage in handed_out or after <= shown for storage, after in read.items() if after]
            # An optimizer that reads a gradient shows little of it, since its step is small.
            if call.index in self._spoilt or any(self._written_by[one][0] == call.index for one in made & broken):
                shown.discard(call.index)
            elif all(told) and (told or made & handed_out):
                shown.add(call.index)
        missing = [call for call in self._kernels if call.index not in shown]
        # A change of layout stands for no eager call: nothing is compared until it is read.
        suspects = [call for call in missing if call.eager and call.index not in self._dull] or missing
        wrong = None in rights or bool(self._spoilt)
        return KernelCheck(
            len(self._kernels),
            len(shown),
            wrong=(_described(suspects[0]) if suspects else "what makes an output") if wrong else "",
            unshown=_described(missing[0]) if missing and not wrong else "",
            faults=tuple(sorted({index for call in missing for index in call.eager})),
            places=tuple(_described(call) for call in missing if call.eager),
        )


def _owners(calls: Sequence[Call]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for call in calls:
        for index in call.eager:
            found.setdefault(index, []).append(call.index)
    return found


def _users(calls: Sequence[Call], how: Literal["reads", "writes"]) -> dict[int, list[int]]:
    """Find the calls that read, or write, each storage, in their order."""
    found: dict[int, list[int]] = {}
    for call in calls:
        for storage in {ref.storage for ref in getattr(call, how)}:
            found.setdefault(storage, []).append(call.index)
    return found


def _last_wanted(program: Program) -> dict[int, int]:
    """Find the last call that reads each storage; beyond the last for what is handed out, or outlives a run."""
    found = {ref.storage: call.index for call in program.calls for ref in call.reads}
    kept = {at for at, storage in enumerate(program.storages) if storage.role != "intermediate"}
    return found | dict.fromkeys(kept | {ref.storage for ref in program.outputs}, len(program.calls))


def _as_shape(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """Return a view in another shape with the same elements in the same order; None if there is none."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    if tensor.numel() != torch.Size(shape).numel():
        return None
    try:
        return tensor.view(tuple(shape))
    except RuntimeError:
        return None


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _described(call: Call) -> str:
    origin = next((one for one in call.origins if one.file), None)
    where = f" in {origin.module or 'the model'} at {origin.file}:{origin.line}" if origin else ""
    return f"{call.label}{where}"
