"""Plans that earlier processes chose, kept on disk: the next one makes the same kernels and need not measure.

One small JSON file for each program, GPU, version of torch and set of options, in ``NIMBLE_CACHE_DIR`` or the user's
cache directory. What is read is checked like any plan; a file that does not fit, or is a link or a pipe, is as good as
none, and is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from nimble_core.scheduling.saved_plan import MAX_BYTES, Plan
from nimble_core.utils.errors import NimbleError
from nimble_core.utils.files import cache_directory, read_own, replace_file

__all__ = ["choice_key", "recall", "remember"]


def choice_key(fingerprint: str, conditions: Mapping[str, object]) -> str:
    """Return what a choice depends on, as one name.

    Args:
        fingerprint: of the eager program.
        conditions: device, versions, options: all that another choice may be best under.

    >>> choice_key("ab", {"torch": "2.11"}) == choice_key("ab", {"torch": "2.12"})
    False
    """
    text = "\n".join([fingerprint, *(f"{name}={value!r}" for name, value in sorted(conditions.items()))])
    return sha256(text.encode()).hexdigest()[:32]


def recall(key: str) -> Plan | None:
    """Return the plan that was kept under ``key``; None if there is none that can be read."""
    try:
        return Plan.from_json(read_own(cache_directory() / f"{key}.json", MAX_BYTES + 1))
    except (OSError, RuntimeError, NimbleError):
        return None


def remember(key: str, plan: Plan) -> None:
    """Keep ``plan`` under ``key``; does nothing where the directory cannot be written."""
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / f"{key}.json", plan.to_json().encode())
    except (OSError, RuntimeError):  # a cache is no reason to fail; Path.home() raises RuntimeError without one
        return
