"""What a run does that no replay can repeat: tensors it replaces, attributes it changes, memory it did not fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from nimble_core.ir.program import Call, TensorRef
from nimble_core.tracing.operator_traits import has_memory, owned_tensors, storage_address
from nimble_core.tracing.recording import Held
from nimble_core.tracing.run_log import RunLog
from nimble_core.tracing.side_effects import Change, Changes
from nimble_core.utils.errors import NotStaticError

__all__ = [
    "EMPTY_STRIDED",
    "changed_values",
    "not_carried_on",
    "notes_of",
    "reads_nothing",
    "require_reads_kept",
    "unfilled_read",
]

EMPTY_STRIDED = torch.ops.aten.empty_strided.default
"""The host step that makes all memory without content."""


def unfilled_read(log: RunLog, outputs: Set[int]) -> str:
    """Say where memory is read that no call has filled, as a C++ extension may have; empty if nowhere.

    Not where the content may not matter: templates, what is added zero times, what a mask leaves out.
    """
    storage_of = log.table.storage_of
    blank = {storage_of[step.outputs[0]] for step in log.steps if step.func is EMPTY_STRIDED and 0 not in step.args[0]}
    for call in log.calls if blank else ():
        written = {ref.storage for ref in call.writes}
        if blank & {ref.storage for ref in call.reads} - written and not reads_nothing(call):
            return f"before {call}: it reads memory that no call has filled"
        blank -= written
    return "an output is memory that no call has filled" if blank & outputs else ""


def reads_nothing(call: Call) -> bool:
    """Return whether the content of a tensor that a call takes may not matter."""
    never_added = any(name == "beta" and text in ("0", "0.0") for name, text in call.arguments)
    return (
        not call.reads
        or never_added
        or call.label.startswith(("new_", "masked_", "where"))
        or call.label.endswith("_like")
    )


_COPIES = (
    "aten._to_copy.default",
    "aten.clone.default",
    "aten.copy_.default",
    "aten._cudnn_rnn_flatten_weight.default",  # all weights of recurrent layers into one piece of memory
)


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A tensor of the model that a run reads and then replaces."""

    what: str
    where: str
    fix: str


def changed_values(changes: Changes) -> tuple[str, ...]:
    """Return attributes that hold another value than before, not only another object.

    Tensors count where there was none before, or is none now; ``not_carried_on`` finds those in place of others.
    """
    plain = (int, float, complex, str)
    found: dict[str, None] = {}
    for change in changes.values():
        tensors = isinstance(change.was, torch.Tensor) and isinstance(change.now, torch.Tensor)
        same = isinstance(change.was, plain) and isinstance(change.now, plain) and change.was == change.now
        if change.attribute and not tensors and not same:
            found[change.attribute] = None
    return tuple(found)


def require_reads_kept(held: Sequence[Held], changes: Changes) -> None:
    """Raise NotStaticError for a tensor that the run reads on the host and then replaces by another value."""
    reads = {storage_address(tensor): one for one in held for _, tensor in one.sources}
    for was, now, attribute, _ in changes.values():
        read = reads.get(storage_address(was)) if isinstance(was, torch.Tensor) and has_memory(was) else None
        host = read is not None and isinstance(now, torch.Tensor) and now.device.type == "cpu"
        if read is not None and not (host and torch.equal(was, now)):
            raise NotStaticError(
                f"the forward reads {read.names} on the host, and replaces {attribute}: a replay would go on with the "
                "value that was read",
                where=read.where,
                fix=read.fix,
            )


def not_carried_on(model: Callable[..., Any], changes: Changes, log: RunLog) -> NotStaticError | None:
    """Return an error that names the first tensor that the run reads and then replaces; None if there is none.

    A replay goes on reading the old one. Who calls the model itself in place of a replay may ignore the error.
    """
    replaced = _replaced_tensors(model, changes, log)
    if not replaced:
        return None
    first, *others = replaced
    more = f" (and so are {len(others)} more)" if others else ""
    return NotStaticError(
        f"the model is not static: {first.what} is read and then replaced{more}, so that the next run reads another "
        "tensor, and a replay the same one again",
        where=first.where,
        fix=first.fix,
    )


def _replaced_tensors(model: Callable[..., Any], changes: Changes, log: RunLog) -> list[_Replaced]:
    """Return tensors that calls read and that are other ones for the next run.

    Without those that no call reads, such as weights that are computed anew; those replaced by a copy, as by
    ``.to(dtype)``, or on the host by the same values made from nothing; and memory that the model still has under a
    name that did not change.
    """
    calls, table = log.calls, log.table
    tensors = {name: change for name, change in changes.items() if _are_tensors(change)}
    if not tensors:
        return []
    unchanged = {
        table.known_storage(one)
        for _, name, one in owned_tensors(model)
        if name not in changes and f"{name}.data" not in changes
    }
    first_reads: dict[int, Call] = {}
    for call in calls:
        for ref in call.reads:
            first_reads.setdefault(ref.storage, call)
    found = list[_Replaced]()
    for name, change in tensors.items():
        old, new = table.known_storage(change.was), table.known_storage(change.now)
        if old is None or old == new or old in unchanged or old not in first_reads:
            continue
        makers = [] if new is None else list(_writers(calls, table.ref(change.now)))
        copied = bool(makers) and all(_copies(call, old) for call in makers)
        if table.storages[old].role == "input" or copied or (log.on_host and _made_alike(change, makers)):
            continue
        role, path = table.storages[old].role, name.removesuffix(".data")
        what = f"{'attribute' if role == 'constant' else role} {path}"
        fix = f"write it in place: self.{change.name}.copy_(...), or self.{change.name}.mul_(...).add_(...)"
        found.append(_Replaced(what, str(makers[-1] if makers else first_reads[old]), fix))
    return found


def notes_of(changes: Changes, drawn: Sequence[str], *, seeds: bool) -> Iterator[str]:
    """Say what the forward does in Python that replays do not."""
    if seeds:
        yield "the forward sets torch's random state, which a replay does not repeat"
    if drawn:
        yield (
            f"the forward draws from {' and '.join(drawn)}: what was drawn in preparation is frozen in every replay, "
            "with the branch that it led to; draw outside of the model and pass it in, or use torch's random operators"
        )
    rest = dict.fromkeys(change.attribute for change in changes.values())
    rest.pop("", None)
    if rest:
        yield f"the forward changes attributes, which a replay does not repeat: {', '.join(rest)}"


def _are_tensors(change: Change) -> bool:
    return all(isinstance(one, torch.Tensor) and has_memory(one) for one in (change.was, change.now))


def _made_alike(change: Change, makers: Sequence[Call]) -> bool:
    """Whether each run makes the same values again from nothing."""
    was, now = change.was, change.now
    if (was.shape, was.dtype) != (now.shape, now.dtype):
        return False
    return all(map(reads_nothing, makers)) and torch.equal(was, now)


def _writers(calls: Sequence[Call], window: TensorRef) -> Iterator[Call]:
    """Yield calls that write some of a window."""
    start, end = window.span
    for call in calls:
        if any(one.storage == window.storage and one.span[0] < end and start < one.span[1] for one in call.writes):
            yield call


def _copies(call: Call, storage: int) -> bool:
    """Whether a call copies this storage and does nothing else."""
    return call.operator in _COPIES and any(ref.storage == storage for ref in call.reads)
