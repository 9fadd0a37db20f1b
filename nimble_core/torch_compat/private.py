"""Private names of torch: what each is for, where it was checked, what happens without it.

Nothing else in these packages spells out a private name of torch. Three ways to use one:

- ``function(...)`` for what is called: the function itself, so that calling it costs nothing more; in a torch without
  it the fallback, and where there is none a function that raises.
- ``private(...)`` for everything else: an entry whose value is looked up when it is needed.
- ``entry.replaced_by(value)`` puts a value of ours in its place, for the whole process, until the block ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, Literal

from nimble_core.utils.errors import DeviceError

__all__ = ["ENTRIES", "Needs", "Private", "all_entries", "function", "private"]

Needs = Literal["", "cuda", "triton"]
"""What a build of torch has to have for a name to be there: nothing, CUDA, or Triton beside it."""

CHECKED = ("2.11", "2.13", "2.15")
"""Releases of torch on which names that every build has were checked: 2.11 on a GPU, the others on the CPU."""

CHECKED_ON_GPU = ("2.11",)
"""Those on which names that need a GPU were."""

REMEDY = f"a torch from {CHECKED[0]} to {CHECKED[-1]}, or a newer nimble-viz"
"""What to install where an essential name is missing."""

ENTRIES: dict[str, Private] = {}
"""All entries by name; each module of this folder adds its own when it is imported."""

_ROOMS = ("autograd", "cuda", "dispatch", "compiler", "members", "public")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Private:
    """A private name of torch, or a public one that we replace.

    Args:
        name: ``"module:attribute.path"``.
        purpose: what we need it for.
        without: what happens in a torch that lacks it.
        needs: what a build must have for the name to be there.
        essential: whether there is no other way, so that using it without it raises.
        checked: releases of torch on which the tests passed.
    """

    name: str
    purpose: str
    without: str
    needs: Needs = ""
    essential: bool = False
    checked: tuple[str, ...] = CHECKED

    @property
    def expected(self) -> bool:
        """Return whether this build of torch should have it."""
        import torch

        if self.needs == "cuda":
            return torch.version.cuda is not None
        return self.needs == "" or _has_triton()

    def find(self) -> Any:
        """Import the module it is in, and return its value; None where this torch has none."""
        owner, attribute = self._place()
        found = getattr(owner, attribute, None)
        if found is None:
            with suppress(ImportError):
                found = import_module(self.name.replace(":", "."))
        return found

    def require(self) -> Any:
        """Return its value. Raises DeviceError where this torch has none."""
        found = self.find()
        if found is None:
            raise _missing(self)
        return found

    @property
    def loaded(self) -> bool:
        """Return whether the module it is in was imported: until then nothing can have called it."""
        return self.name.partition(":")[0] in sys.modules

    @contextmanager
    def replaced_by(self, value: object) -> Iterator[None]:
        """Put ``value`` in its place inside, for all threads; what was there is back afterwards.

        In a torch that has no such name, nothing is replaced.
        """
        if self.find() is None:
            yield
            return
        owner, attribute = self._place()
        own = vars(owner).get(attribute, _ABSENT)  # else a class above has it
        setattr(owner, attribute, value)
        try:
            yield
        finally:
            if own is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, own)

    def replace(self, value: object) -> None:
        """Put ``value`` in its place for good."""
        setattr(*self._place(), value)

    def _place(self) -> tuple[Any, str]:
        module, _, path = self.name.partition(":")
        *above, attribute = path.split(".")
        try:
            owner: Any = import_module(module)
        except ImportError:
            owner = None
        return reduce(lambda one, name: getattr(one, name, None), above, owner), attribute


def all_entries() -> tuple[Private, ...]:
    """Return all entries, those included that nothing has used yet."""
    for room in _ROOMS:
        import_module(f"{__package__}.{room}")
    return tuple(ENTRIES.values())


def private(
    name: str,
    purpose: str,
    without: str = "",
    *,
    needs: Needs = "",
    since: str = "",
) -> Private:
    """Add an entry; its value is looked up when it is used.

    Args:
        name: ``"module:attribute.path"``.
        purpose: what we need it for.
        without: what happens in a torch that lacks it.
        needs: what a build must have for the name to be there.
        since: the first checked release that has it, where that is not the oldest.
    """
    checked = CHECKED_ON_GPU if needs else CHECKED
    entry = Private(
        name,
        purpose,
        without or "what needs it raises, and names this torch",
        needs,
        not without,
        tuple(one for one in checked if not since or _number(one) >= _number(since)),
    )
    ENTRIES[name] = entry
    return entry


def function(
    name: str,
    purpose: str,
    without: str = "",
    *,
    needs: Needs = "",
    fallback: Callable[..., Any] | None = None,
    since: str = "",
) -> Callable[..., Any]:
    """Add an entry for something that is called, and return it.

    In a torch without it: the fallback, whose consequence ``without`` states; without a fallback a function that raises
    DeviceError.
    """
    entry = private(name, purpose, without, needs=needs, since=since)
    found = entry.find()
    if found is not None:
        return found  # type: ignore[no-any-return]  # torch's private names have no types

    def refuse(*args: object, **kwargs: object) -> Any:
        raise _missing(entry)

    return fallback or refuse


def _missing(entry: Private) -> DeviceError:
    import torch

    return DeviceError(
        f"torch {torch.__version__} has no {entry.name.replace(':', '.')}, needed to {entry.purpose}",
        fix=f"install {REMEDY}",
    )


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None
