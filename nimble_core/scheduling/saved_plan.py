"""A plan is a value: a schedule, what it was made for, and where. It is kept as JSON and used again without tuning.

What it was made for is a fingerprint of the Program: the same on every machine and in every process, and blind to what
a schedule does not depend on (source lines, parameter names, strides, addresses, the device's number).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from nimble_core.ir.call_graph import CallGraph
from nimble_core.ir.program import Call, Fuse, KernelChoice, Program, TensorRef
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.utils.errors import InputError, ReportFileError
from nimble_core.utils.files import write_file

__all__ = [
    "MAX_BYTES",
    "PLAN_VERSION",
    "KernelChoice",
    "Plan",
    "fingerprint",
    "load_plan",
    "make_plan",
    "plan_notes",
    "require_match",
    "schedule_of",
]

PLAN_VERSION = 2

MAX_BYTES = 64 << 20
"""A longer text is refused unread: plans of 100,000 calls take a tenth of it."""

_HEX = re.compile(r"[0-9a-f]*")
_STORAGE = re.compile(r"%(\d+)")
# Where an object lies and which of several devices it means are not what a call does.
_HERE = re.compile(r" at 0x[0-9a-fA-F]+|, index=\d+(?=\))|(?<=cuda):\d+")
_NOT_A_NUMBER = 1 << 53


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule that can be kept, and all that is needed to refuse another program.

    Args:
        schedule: streams, order and waits; what a capture emitted is not part of it.
        fingerprint: of the program it was made for, see :func:`fingerprint`.
        device: kind of device: ``"cuda"``, ``"cpu"``.
        device_name: where it was made, e.g. ``"NVIDIA H200"``; another model of the same kind may use the plan.
        torch: version it was made with; another one may use it.
        inputs: the model's tensor inputs as text, e.g. ``"float32[8, 64]"``.
        operators: name of each call's operator.
        fuse: whose kernels the program runs (``Program.fuse``), and
        kernels: what was chosen while it was rewritten (``Program.choices``).
        shown: in the cache of choices, a digest of the kernels whose outputs were shown to be right; empty elsewhere.
        schema_version: of the JSON.
    """

    schedule: Schedule
    fingerprint: str
    device: str
    device_name: str
    torch: str
    inputs: tuple[str, ...]
    operators: tuple[str, ...]
    fuse: Fuse = "none"
    kernels: tuple[KernelChoice, ...] = ()
    shown: str = ""
    schema_version: int = PLAN_VERSION

    @property
    def policy(self) -> str:
        """Name of the policy that made the schedule."""
        return self.schedule.policy

    def to_json(self) -> str:
        """Return this plan as JSON, the same text each time; about 40 bytes for each call."""
        import msgspec

        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read the plan in ``text``: return a consistent plan or raise, whatever the text holds. No code from it runs.

        Raises:
            ReportFileError: not a plan, damaged, or of another format; ``where`` names the field.
        """
        import msgspec

        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        if len(data) > MAX_BYTES:
            raise ReportFileError(f"the plan is longer than {MAX_BYTES:,} bytes", fix="make the plan again")
        try:
            version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema_version", msgspec.Raw(b"0"))
            number = msgspec.json.decode(version, type=int)
            if number != PLAN_VERSION:
                raise ReportFileError(
                    f"the plan has format {number}, this version reads format {PLAN_VERSION}",
                    where="schema_version",
                    fix="make the plan again",
                )
            plan = msgspec.json.decode(data, type=cls)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at ")
            raise ReportFileError(
                f"not a plan, or damaged: {what}", where=place.strip("`"), fix="make the plan again"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ReportFileError(f"not a plan: the text is not JSON ({error})", fix="make the plan again") from error
        return _checked(plan)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write this plan to ``path``, all of it or nothing. Raises OSError if it cannot be written."""
        return write_file(path, self.to_json().encode())


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that ``Plan.save`` wrote.

    Raises:
        ReportFileError: not a plan, damaged, or of another format.
        OSError: the file cannot be read.
    """
    with open(os.fspath(path), "rb") as file:  # a number would be what is open under it
        data = file.read(MAX_BYTES + 1)
    try:
        return Plan.from_json(data)
    except ReportFileError as error:
        place = f"{os.fspath(path)}, {error.where}" if error.where else os.fspath(path)
        raise ReportFileError(error.what, where=place, fix=error.fix) from error


def fingerprint(program: Program, graph: CallGraph) -> str:
    """Digest what a schedule of ``program`` depends on: a SHA-256 in hexadecimal.

    In it: the kind of device; shapes and types of inputs; of every call the operator, its arguments, which tensors it
    reads and writes, their shapes and types; the hazards. Tensors are numbered in the order of their first use.

    Complexity:
        Linear in accesses and hazards.

    >>> from nimble_core.ir.call_graph import build_graph
    >>> empty = Program((), (), (), ())
    >>> fingerprint(empty, build_graph(empty))[:8]
    'cbf6da3f'
    """
    inputs, calls, edges = _inputs(program), program.calls, graph.edges
    head = f"nimble plan {PLAN_VERSION}\n{program.device}\n{len(inputs)} {len(calls)} {len(edges)}\n"
    digest = sha256(head.encode())
    for text in inputs:
        digest.update(f"{text}\n".encode())
    number = _numbered(program)
    for call in calls:
        text = "\n".join((call.operator, *_tensor_lines(call, number), *_argument_lines(call, number)))
        digest.update(f"{len(text)} {text}\n".encode())
    for u, v in edges:
        digest.update(f"{u} {v}\n".encode())
    return digest.hexdigest()


def make_plan(
    program: Program,
    graph: CallGraph,
    schedule: Schedule,
    *,
    device_name: str = "",
    torch: str = "",
) -> Plan:
    """Keep ``schedule`` with what is needed to use it again for the same program.

    Args:
        program: what it schedules.
        graph: the hazards of ``program``.
        schedule: checked already, or to be checked where it is used.
        device_name: where it was made.
        torch: version it was made with.

    Raises:
        InputError: program, graph and schedule are not of one size.
    """
    size = len(program.calls)
    if graph.size != size or len(schedule.stream) != size:
        raise InputError(
            f"a graph of {graph.size} and a schedule of {len(schedule.stream)} calls for a program of {size}",
            fix="pass values made from one program",
        )
    counts = schedule.counts
    return Plan(
        schedule=replace(schedule, counts=SyncCounts(counts.full, counts.meg, counts.planned)),
        fingerprint=fingerprint(program, graph),
        device=program.device,
        device_name=device_name,
        torch=torch,
        inputs=_inputs(program),
        operators=tuple(call.operator for call in program.calls),
        fuse=program.fuse,
        kernels=program.choices,
    )


def require_match(plan: Plan, program: Program, graph: CallGraph) -> None:
    """Raise InputError unless ``plan`` was made for this program; the message names the first difference.

    The model of the device and the version of torch may differ: the schedule stays correct (see :func:`plan_notes`).
    """
    if plan.fingerprint == fingerprint(program, graph):
        return
    what, where = _difference(plan, program)
    raise InputError(
        f"the plan was made for another program: {what}",
        where=where,
        fix="make the plan again for this model, these inputs and this kind of device (compare(...).plan)",
    )


def schedule_of(plan: Plan, program: Program, graph: CallGraph) -> Schedule:
    """Return the schedule of ``plan``, proved safe for this program.

    Raises:
        InputError: the plan was made for another program; names the first difference.
        ScheduleError: the schedule in it would race, deadlock or break its promises.
    """
    require_match(plan, program, graph)
    return check_schedule(graph, plan.schedule, program)


def plan_notes(plan: Plan, *, device_name: str = "", torch: str = "") -> tuple[str, ...]:
    """Note what the user of a plan should know: it was made on another model of the device, or with another torch.

    Args:
        plan: about to be used.
        device_name: where; empty if unknown.
        torch: version it is used with; empty if unknown.
    """
    notes = []
    if device_name and plan.device_name and device_name != plan.device_name:
        notes.append(
            f"the plan was made on {plan.device_name} and runs on {device_name}: it is correct there, "
            "but another one may be faster"
        )
    if torch and plan.torch and torch != plan.torch:
        notes.append(f"the plan was made with torch {plan.torch} and runs with {torch}")
    return tuple(notes)


def _numbered(program: Program) -> dict[int, int]:
    """Number storages in the order of their first use."""
    number: dict[int, int] = {}
    for ref in program.inputs:
        number.setdefault(ref.storage, len(number))
    for call in program.calls:
        for access in call.accesses:
            if access.ref.numel:  # a result of no elements may be missing where shapes are worked out without running
                number.setdefault(access.ref.storage, len(number))
    return number


def _tensor_lines(call: Call, number: dict[int, int]) -> Iterator[str]:
    for access in call.accesses:
        if access.ref.numel:
            yield f"{'w' if access.write else 'r'} %{number[access.ref.storage]} {_tensor(access.ref)}"


def _argument_lines(call: Call, number: dict[int, int]) -> Iterator[str]:
    def renumbered(match: re.Match[str]) -> str:
        storage = int(match[1])
        return f"%{number[storage]}" if storage in number else "%"

    for name, text in call.arguments:
        yield f"{name}={_HERE.sub('', _STORAGE.sub(renumbered, text))}"


def _inputs(program: Program) -> tuple[str, ...]:
    return tuple(_tensor(ref) for ref in program.inputs)


def _tensor(ref: TensorRef) -> str:
    return f"{ref.dtype}{list(ref.sizes)}"


def _difference(plan: Plan, program: Program) -> tuple[str, str]:
    """Describe the first difference, and say where it is."""
    inputs, calls = _inputs(program), program.calls
    if plan.device != program.device:
        return f"one for {plan.device}, this one runs on {program.device}", ""
    if len(plan.inputs) != len(inputs):
        return f"one with {len(plan.inputs)} tensor inputs, this one has {len(inputs)}", ""
    for ref, here, there in zip(program.inputs, inputs, plan.inputs, strict=True):
        if here != there:
            name = program.storages[ref.storage].name or "an input"
            return f"{name} is {here} where the plan has {there}", ""
    sizes = ""
    if len(calls) != len(plan.operators):
        sizes = f"it has {len(calls)} calls, the plan {len(plan.operators)}; "
    for call, operator in zip(calls, plan.operators, strict=False):
        if call.operator != operator:
            return f"{sizes}call {call.index} is {call.operator} where the plan has {operator}", str(call)
    if sizes:
        return f"{sizes}up to the end of the shorter one they are the same", ""
    return "the same operators with other tensors, arguments or hazards, or the plan was changed after it was made", ""


def _checked(plan: Plan) -> Plan:
    """Return ``plan`` if it is consistent in itself; else raise ReportFileError."""
    schedule, size = plan.schedule, len(plan.operators)
    _require(len(plan.fingerprint) == 64 and bool(_HEX.fullmatch(plan.fingerprint)), "fingerprint", "not a SHA-256")
    _require(len(schedule.stream) == size, "schedule.stream", f"{len(schedule.stream)} streams for {size} calls")
    _require(set(schedule.stream) == set(range(len(set(schedule.stream)))), "schedule.stream", "streams have gaps")
    _require(sorted(schedule.order) == list(range(size)), "schedule.order", "it does not name every call once")
    _require(len(schedule.priority) in (0, size), "schedule.priority", "one priority for each call, or none")
    _within((abs(priority) for priority in schedule.priority), _NOT_A_NUMBER, "schedule.priority")
    for name, pairs in (("syncs", schedule.syncs), ("added_order", schedule.added_order)):
        _within((call for pair in pairs for call in pair), size, f"schedule.{name}")
    _within((choice.call for choice in plan.kernels), _NOT_A_NUMBER, "kernels")
    counts = schedule.counts
    amounts = (counts.full, counts.meg, counts.planned, schedule.meg_edges, schedule.matched)
    _within(amounts, _NOT_A_NUMBER, "schedule.counts")
    return plan


def _within(values: Iterable[int], end: int, where: str) -> None:
    for value in values:
        _require(0 <= value < end, where, f"{value} is not between 0 and {end - 1}")


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ReportFileError(f"the plan is damaged: {what}", where=where, fix="make the plan again")
