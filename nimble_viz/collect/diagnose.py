"""``diagnose``: find everything that keeps a model from being prepared, at once.

The model runs live, twice, and goes on with eager's values where a preparation would stop. Only if neither run found
anything is it recorded as a preparation records it.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, Never

import torch
from torch.overrides import TorchFunctionMode

from nimble_core.api.call_mistakes import mistakes_explained
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.scheduling.options import Options, require_options
from nimble_core.tracing.provenance import label_of, module_paths
from nimble_core.tracing.recorded import check_inputs, preparing, record_static, require_callable, whole_note
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.recording_contexts import announced, noting_refusals
from nimble_core.tracing.rng_state import random_state_kept
from nimble_core.tracing.side_effects import requirements_kept, run_preserved
from nimble_core.tracing.signature import Signature, require_plain
from nimble_core.tracing.static_check import on_other_values
from nimble_core.utils.errors import InputError, NimbleError, NotStaticError, first_line
from nimble_core.utils.tracebacks import short_traceback
from nimble_viz.collect.sources import pass_over_machinery, text_of
from nimble_viz.collect.suggestions import keyword_inputs, original, refuse_unknown
from nimble_viz.render.diagnosis import Blocker, Diagnosis

__all__ = ["diagnose"]

_TORCH = (f"{Path(torch.__file__).parent}/", "<frozen ")
_OURS = tuple(f"{Path(str(sys.modules[name].__file__)).parent}/" for name in ("nimble_core", "nimble_viz"))
_LIBRARIES = (*_TORCH, *(f"{place}/" for place in map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))), *_OURS)
_RUNS = record.__code__, run_preserved.__code__

_READ, _BRANCH, _LIST, _SHAPE = "values-read-with-item", "branch-on-a-tensor", "lists-and-numpy", "data-dependent-shape"
_COPY = "copy-to-the-host"
_KINDS = {
    _READ: (
        "reads the value of a tensor into Python, where a replay would keep that of the run that was recorded",
        "keep it a tensor (torch computes with 0-dimensional ones), or pass a size or a setting in as a Python number",
    ),
    _BRANCH: (
        "lets Python decide by the value of a tensor, where a replay would always take the branch that was recorded",
        "compute both and choose: torch.where(condition, a, b)",
    ),
    _LIST: (
        "takes the values of a tensor out of torch, where a replay would keep those of the run that was recorded",
        "compute it with torch, or before the model, and pass the result in",
    ),
    _SHAPE: (
        "makes a tensor whose shape depends on values, where a replay has fixed shapes",
        "use a form with a fixed shape: torch.where, a mask, a size argument",
    ),
    _COPY: (
        "copies a tensor from the device to the host, and the host would have to wait for it",
        "keep the tensor on the device, or copy it outside of the model",
    ),
}
"""By section of docs/troubleshooting.md: what such a call does, and what to do instead."""
_NAMES = {
    "__bool__": ("if tensor:", _BRANCH, ""),
    "is_nonzero": ("if tensor:", _BRANCH, ""),
    "__contains__": ("value in tensor", _BRANCH, "(tensor == value).any(), kept a tensor"),
    "equal": ("torch.equal()", _BRANCH, "(a == b).all(), kept a tensor"),
    "allclose": ("torch.allclose()", _BRANCH, "torch.isclose(a, b).all(), kept a tensor"),
    "__float__": ("float(tensor)", _READ, ""),
    "__int__": ("int(tensor)", _READ, ""),
    "__index__": ("a tensor as a Python number", _READ, ""),
    "__array__": ("numpy.asarray(tensor)", _LIST, ""),
    "tolist": (".tolist()", _LIST, ""),
    "numpy": (".numpy()", _LIST, ""),
    "__getitem__": ("tensor[mask]", _SHAPE, "keep the shape: torch.where(mask, x, 0), or x.masked_fill(~mask, 0)"),
    "__setitem__": ("tensor[mask] = values", _SHAPE, "x = torch.where(mask, values, x), with values of x's shape"),
    "masked_select": ("", _SHAPE, "keep the shape: x.masked_fill(~mask, 0)"),
    "nonzero": ("", _SHAPE, "use the mask itself, or torch.nonzero_static(x, size=n)"),
    "where": ("torch.where(mask)", _SHAPE, "torch.where(mask, a, b), or torch.nonzero_static(mask, size=n)"),
    "repeat_interleave": ("", _SHAPE, "give output_size=n, how many there are in all"),
    "bincount": ("", _SHAPE, "torch.zeros(n).index_add_(0, x, ones), n being the number of bins"),
    "unique": ("", _SHAPE, "compute it before the model, and pass it in"),
}
"""By function of torch: what users write (empty: its name), its kind, and what to do if not the usual."""
_GENERAL = (
    "keep it a tensor (torch.where instead of if), or pass it as an input",
    "compute both and choose: torch.where(condition, a, b)",
    "keep the tensor on the device, or copy it outside the model",
    "use a form with a fixed shape (torch.where, a mask, a size argument)",
    "use torch.where(mask, values of x's shape, x), or one value, with the mask on the device",
)
"""Remedies that a recording gives for any such call. Its other remedies are better than the tables above."""


@short_traceback
def diagnose(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
    **unknown: Never,
) -> Diagnosis:
    """Find everything that keeps ``model``, which is left as it was, from being prepared for these inputs.

    Args:
        model: module or function of tensors.
        args: positional inputs.
        kwargs: keyword inputs.
        options: how it would be prepared; only ``strict`` counts.
        unknown: refused, with a word on what to write instead.

    Returns:
        A Diagnosis: without blockers the model can be prepared.

    Raises:
        InputError: no model, or a keyword that there is not.
    """
    refuse_unknown(diagnose, unknown)
    pass_over_machinery()
    require_callable(model := original(model))
    require_options(options or Options())
    named, name = keyword_inputs(kwargs), getattr(model, "__name__", type(model).__name__)
    if refused := _refused_inputs(model, args, named):
        return Diagnosis(name, tuple(_of_error(error, "inputs") for error in refused))
    with preparing(model), requirements_kept(args, named):
        blockers, notes = _Found(model, check_inputs(model, args, named)).run((options or Options()).strict)
    return Diagnosis(name, tuple(blockers), tuple(dict.fromkeys(notes)))


def _refused_inputs(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[InputError]:
    """Return an error for each input that is refused; else what is wrong with all of them together."""
    found = []
    paths = (*(f"args[{position}]" for position in range(len(args))), *(f"kwargs[{name!r}]" for name in kwargs))
    for path, one in zip(paths, (*args, *kwargs.values()), strict=True):
        try:
            signature = Signature((torch.ones(1), one), {}, ("", path))
            for tensor, place in zip(signature.tensors, signature.paths, strict=True):
                require_plain(tensor, place)
        except InputError as error:
            found += [error] * ("mixed devices" not in error.what)
    try:
        with mistakes_explained(args, kwargs):
            check_inputs(model, args, kwargs)
    except InputError as error:
        return found or [error]
    return []


class _Running(TorchFunctionMode):
    """Knows which function of torch the model is in, and who called it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, FrameType]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, sys._getframe(1)))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.calls.pop()


class _Found:
    """Runs one model, and gathers blockers by place and name."""

    def __init__(self, model: Callable[..., Any], signature: Signature) -> None:
        self.model, self.signature, self.device = model, signature, device_for(signature.device)
        self.met: dict[tuple[object, ...], Blocker] = {}
        self.reads: set[tuple[object, ...]] = set()
        """Which of them were read outside of torch: blockers only if the value matters."""
        self._paths, self._again, self._running = module_paths(model), False, _Running()
        self._parts = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
        codes = (getattr(getattr(one, "forward", one), "__code__", _RUNS[0]) for one in (model, *self._parts.values()))
        self._own = {code.co_filename for code in codes if not code.co_filename.startswith(_TORCH)}

    def run(self, strict: bool) -> tuple[list[Blocker], list[str]]:
        """Return blockers and notes."""
        args, kwargs = self.signature.arguments()
        try:
            with mistakes_explained(args, kwargs):
                self.device.warm_up(self.model, args, kwargs)
        except InputError as error:
            return [_of_error(error, "inputs")], []
        except NimbleError as error:
            self._add(_of_error(error))
        except Exception as error:
            what = f"the model itself fails on these inputs: {type(error).__name__}: {first_line(error)}"
            *_, (frame, _) = walk_tb(error.__traceback__)
            fix, place = "call the model by itself until it runs: model(*inputs)", self._place(frame)
            return [Blocker("error-in-eager", "", what, fix, **place)], []
        before, notes = dict(self.met), self._look(capturing=False)
        if len(self.met) > len(self.reads):  # libraries may keep a branch for captures, which reads no values
            self.met, self.reads, self._again = before, set(), False
            notes = self._look(capturing=True)
        blockers = list(self.met.values())
        if len(blockers) > len(self.reads):
            return blockers, notes
        try:
            recorded = record_static(
                self.device, self.model, self.signature, strict=strict, step=lambda name: nullcontext()
            )
        except NimbleError as error:
            return blockers or [_of_error(error)], notes
        notes = list(recorded.recording.program.notes)
        if not recorded.whole:
            return [], notes + [f"{one.name} at {one.where} {one.what}" for one in blockers]
        note = whole_note(self.device, recorded)
        if self.device.kind == "cpu" and not blockers:  # nothing is replayed
            return [Blocker(_LIST, "", note, _KINDS[_LIST][1])], notes
        return blockers, [*notes, note]

    def _look(self, *, capturing: bool) -> list[str]:
        """Run on the given values and on others, noting refusals; say what the forward changes."""
        notes: list[str] = []
        for run in (self._record, partial(on_other_values, self._record)):
            try:
                with (
                    random_state_kept(self.signature.device, draws=None),
                    announced(capturing),
                    noting_refusals(self._note),
                    self._running,
                ):
                    made = run(self.signature.tensors)
            except NimbleError as error:
                if not (self._again and self.met):  # else it may come of what was met
                    self._add(_of_error(error))
            except Exception:  # after a refusal, or on values that were not given
                pass
            else:
                if isinstance(made, Recording):
                    notes += made.program.notes
                    self._count(made.changed)
            self._again = True
        return notes

    def _record(self, tensors: Sequence[torch.Tensor]) -> Recording:
        """Run live, on a GPU as well: a capture would end at the first value that is read."""
        args, kwargs = self.signature.arguments(tensors)
        return record(self.model, Signature(args, kwargs), args=args, kwargs=kwargs)

    def _note(self, error: NimbleError, frame: FrameType) -> None:
        func, caller = self._running.calls[0] if self._running.calls else (None, frame)
        called = str(getattr(func, "__name__", ""))
        if not error.fix:  # read outside of torch, told before torch is asked
            if caller.f_code.co_name == "told":  # and once more by torch
                return
            called = "tolist" if "tolist" in error.where else called or "numpy"
        shown, kind, instead = _NAMES.get(called, ("", "", ""))
        if "to the host" in error.what:
            kind, instead = _COPY, ""
        elif not kind:
            kind = _SHAPE if "shape depends" in error.what else _READ if "gives the host" in error.what else ""
        place = self._place(caller)
        if not kind:
            return self._add(replace(_of_error(error), **place))
        what, usual = _KINDS[kind]
        instead = instead or usual
        if error.fix and error.fix not in _GENERAL:
            instead = error.fix
        elif place.get("inside"):
            instead = f"call that outside of what is prepared, or change it there: {instead}"
        self._add(Blocker(kind, shown or _called(func, called), what, instead, **place), read=not error.fix)

    def _add(self, one: Blocker, read: bool = False) -> None:
        key = (one.file, one.line, one.mark, one.name, one.inside)
        before = self.met.setdefault(key, one)
        if before is not one and not self._again:
            self.met[key] = replace(before, times=before.times + 1)
        if read:
            self.reads.add(key)

    def _count(self, changed: Sequence[str]) -> None:
        """Add a blocker for each number that the run changed, if there are others; else recording tries it."""
        for path in changed if len(self.met) > len(self.reads) else ():
            module, _, name = path.rpartition(".")
            part = self._parts.get(module)
            if isinstance(getattr(part, name, None), int | float):
                what = "is a Python number that the forward changes, where a replay would keep that of the recording"
                fix = f"self.register_buffer({name!r}, torch.tensor(0)), and self.{name}.add_(1) in place"
                self._add(Blocker("attribute-that-changes", f"self.{name}", what, fix, module, **_assigned(part, name)))

    def _place(self, frame: FrameType) -> dict[str, Any]:
        """Return module, file, line and code of the user's innermost line, and the library line it leads to."""
        around = (one for one, _ in walk_stack(frame))
        frames = [
            one
            for one in takewhile(lambda one: one.f_code not in _RUNS, around)
            if not one.f_code.co_filename.startswith(_OURS)
        ]
        outside = [one for one in frames if not one.f_code.co_filename.startswith(_TORCH)]
        own = [one for one in outside if not one.f_code.co_filename.startswith(_LIBRARIES)]
        own = own or [one for one in outside if one.f_code.co_filename in self._own] or outside
        own = own or [one for one in frames if id(one.f_locals.get("self")) in self._paths] or frames
        if not own:
            return {}
        at, inner = own[0], (outside or own)[0]
        modules = (one.f_locals.get("self") for one in frames[frames.index(at) :])
        code, mark = _line(at)
        return {
            "module": next((path for one in modules if (path := self._paths.get(id(one))) is not None), ""),
            "file": label_of(at.f_code.co_filename),
            "line": at.f_lineno,
            "code": code,
            "mark": mark,
            "inside": "" if inner is at else f"{label_of(inner.f_code.co_filename)}:{inner.f_lineno}",
        }


def _assigned(part: object, name: str) -> dict[str, Any]:
    """Find where a method of ``part`` assigns this attribute; empty if that is not found."""
    for method in vars(type(part)).values():
        with suppress(OSError, TypeError, AttributeError):  # no function, or no source
            lines, first = inspect.getsourcelines(method) if method.__name__ != "__init__" else ([], 0)
            for number, code in enumerate(map(str.strip, lines), first):
                if found := re.search(rf"\bself\.{re.escape(name)}\b\s*[-+*/]*=(?!=)", code):
                    file, mark = label_of(method.__code__.co_filename), (found.start(), len(code))
                    return {"file": file, "line": number, "code": code, "mark": mark}
    return {}


def _called(func: Any, name: str) -> str:
    """Name a function of torch as users write it."""
    if func is None:
        return "TorchScript or C++ code"
    return f".{name}()" if getattr(torch.Tensor, name, None) is func else f"torch.{name}()"


def _line(frame: FrameType) -> tuple[str, tuple[int, int]]:
    """Return the line of code that runs, and the columns of the call in it."""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).rstrip()
    code = text.strip()
    first, last, start, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if first != frame.f_lineno or start is None or end is None or not code:
        return code, (0, 0)
    raw, cut = text.encode(), len(text) - len(text.lstrip())
    columns = [len(raw[:at].decode(errors="ignore")) - cut for at in (start, end if last == first else len(raw))]
    return code, (max(columns[0], 0), min(columns[1], len(code)))


def _of_error(error: NimbleError, kind: str = "") -> Blocker:
    if error.what.partition(": ")[2].startswith("a run changes"):
        kind = "attribute-that-changes"
    kind = kind or ("two-runs-that-differ" if isinstance(error, NotStaticError) else "other-refusals")
    place = re.search(r"(\S+\.py|<\S+>|In\[\d+\]):(\d+)", error.where)
    file, line = (place[1], int(place[2])) if place else ("", 0)
    code = "".join((text_of(file) or ())[line - 1 : line]).strip() if place else ""
    return Blocker(kind, "", error.what, error.fix, error.where if not place else "", file, line, code)
