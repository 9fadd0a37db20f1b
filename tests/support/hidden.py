"""Modules that are installed here, for a child process not to find."""

from __future__ import annotations

from collections.abc import Sequence

_FINDER = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r} or name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def hiding(names: Sequence[str]) -> str:
    """Code after which none of the modules ``names``, nor what is in them, can be imported."""
    return _FINDER.format(names=tuple(names))
