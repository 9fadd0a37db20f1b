"""Options: one frozen value shared by the API, the magics and the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal

from nimble_core.scheduling.policies import resolve_policy
from nimble_core.utils.errors import InputError

__all__ = ["Options", "option_like", "require_flag", "require_options"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "fuse": ("auto", "none", "library", "inductor"),
    "tune": ("off", "fast", "full"),
    "outputs": ("copy", "static"),
    "on_new_shape": ("error", "eager", "prepare"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to prepare a model.

    Args:
        fuse: which kernels to use: ``"none"`` keeps eager's own; ``"library"`` folds weights, merges siblings and takes
            the fastest calls of cuDNN and cuBLAS (seconds); ``"inductor"`` compiles (seconds to minutes); ``"auto"``
            measures these on CUDA, as far as ``tune`` and ``budget_s`` allow, and takes the best whose outputs are
            right. On the host, and with ``tune="off"``, it means ``"none"``.
        policy: stream assignment: ``"auto"`` measures the candidates and takes the best, or a policy's name
            (``"single"``, ``"nimble"``, ``"critical_path"``, ``"opara"``, ``"torchsched"``, ``"contention"``), or any
            callable ``(graph, costs) -> Schedule``.
        tune: how much to measure while preparing: ``"off"`` nothing (``policy="auto"`` then means ``"nimble"`` on
            CUDA and ``"single"`` on the host), ``"fast"`` a few replays of each candidate, ``"full"`` many.
        budget_s: seconds that making and measuring candidates may take; a model that is expected to compile for longer
            than what is left is not compiled under ``fuse="auto"``.
        max_streams: cap on streams, None for no cap.
        memory_limit: bytes the engine may hold, None for no limit: where a plan needs more, order is added, and what
            does not fit even then is refused.
        outputs: ``"copy"`` gives each call its own outputs; ``"static"`` the engine's buffers on CUDA, overwritten by
            the next call, in training by the next forward (on the host every call makes its own).
        strict: refuse what would otherwise be captured as it is (launches that were not seen; on the host values made
            or changed outside of torch), and raise what goes wrong with other kernels than eager's, which are left out
            otherwise; that they cannot be made or captured, or do not fit, is no such thing.
        on_new_shape: what a call with an unprepared signature does: ``"error"``, ``"eager"`` or ``"prepare"``; under a
            transform of ``torch.func`` or forward-mode AD, for which nothing can be prepared, only ``"eager"`` does not
            raise.

    Raises:
        InputError: a value that is not among the choices, or out of range.
    """

    fuse: Literal["auto", "none", "library", "inductor"] = "auto"
    policy: str | Callable[..., Any] = "auto"
    tune: Literal["off", "fast", "full"] = "fast"
    budget_s: float = 60.0
    max_streams: int | None = 32
    memory_limit: int | None = None
    outputs: Literal["copy", "static"] = "copy"
    strict: bool = False
    on_new_shape: Literal["error", "eager", "prepare"] = "error"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise InputError(f"Options({name}={value!r}) is not a choice", fix=f"one of {', '.join(choices)}")
        for name, kind, fix in (
            ("budget_s", (int, float), "seconds, 0 or more"),
            ("max_streams", int, "how many, at least 1, or None"),
            ("memory_limit", int, "bytes, or None"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, kind) or (value is None and name != "budget_s")):
                number = "a whole number" if kind is int else "a number"
                raise InputError(f"Options({name}={value!r}) is not {number}", fix=fix)
        require_flag(self.strict, f"Options(strict={self.strict!r})")
        if self.policy != "auto":
            resolve_policy(self.policy)
        if self.max_streams is not None and self.max_streams < 1:
            raise InputError(f"Options(max_streams={self.max_streams}) is less than 1", fix="at least 1, or None")
        if not self.budget_s >= 0:
            what = "negative" if self.budget_s < 0 else "not a number"
            raise InputError(f"Options(budget_s={self.budget_s}) is {what}", fix="seconds, 0 or more")
        if self.memory_limit is not None and self.memory_limit < 0:
            raise InputError(f"Options(memory_limit={self.memory_limit}) is negative", fix="bytes, or None")


def option_like(name: str) -> str:
    """Return the option of this name or the most similar one, else "". ``"max_stream"`` gives ``"max_streams"``."""
    return next(iter(get_close_matches(name, [field.name for field in fields(Options)], 1, 0.75)), "")


_init = Options.__init__


@wraps(_init)
def _checked_init(self: Options, *args: Any, **given: Any) -> None:
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            like = option_like(name)
            fix = f"did you mean {like}?" if like else f"one of {', '.join(known)}"
            raise InputError(f"there is no option {name!r}", fix=fix)
    _init(self, *args, **given)


Options.__init__ = _checked_init  # type: ignore[method-assign]  # a dataclass has no other place for it


def require_flag(value: object, called: str) -> None:
    """Raise InputError unless ``value`` is True or False; ``called`` is what was written."""
    if not isinstance(value, bool):
        raise InputError(f"{called} is neither True nor False", fix="True or False")


def require_options(options: object) -> None:
    """Raise InputError unless ``options`` is an Options."""
    if not isinstance(options, Options):
        fix = "Options(max_streams=8), say; inputs go to prepare(*inputs)"
        raise InputError(f"options is a {type(options).__name__}, not an Options", fix=fix)
