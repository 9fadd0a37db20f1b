"""The viewer's files, and its ES modules joined into one: there is nothing to build, and nothing to install."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

__all__ = ["asset", "joined"]

_IMPORT = re.compile(r'^import \{ [\w, ]+ \} from "\./([\w.]+)";\n', re.MULTILINE)


def asset(name: str) -> str:
    """Return the text of one of the viewer's files."""
    return (resources.files("nimble_viz.render.viewer") / name).read_text(encoding="utf-8")


@cache
def joined(entry: str) -> str:
    """Return a module and all that it imports as one module without imports.

    A page that is opened from a file cannot import others, and a widget's code is one string. So the modules stand one
    after the other, each after those that it imports, without ``import`` lines and without the word ``export``. For
    that their top-level names differ, and an import is one line that names things of a file beside it.

    Args:
        entry: a file's name, ``"page.js"``.
    """
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in texts:
            return
        text = asset(name)
        for needed in _IMPORT.findall(text):
            add(needed)
        texts[name] = re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)

    add(entry)
    return "".join(texts.values())
