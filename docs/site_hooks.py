"""What `mkdocs build` does besides: README.md as the first page, links that leave docs/, and colours of code.

A site holds docs/ alone, and a clone has no address of its own. So links to other files of the repository become their
paths.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)\.\./([^)#\s]+)[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as ``index.md``, its links as seen from docs/, and the styles of code."""
    files.append(File.generated(config, "index.md", content=as_seen_from_docs((ROOT / "README.md").read_text("utf-8"))))
    files.append(File.generated(config, "code.css", content=styles()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside docs/ by their paths."""
    return OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2]}`)", markdown)


def as_seen_from_docs(readme: str) -> str:
    """Rewrite relative links of a page in the repository's root.

    >>> as_seen_from_docs("[a](docs/a.md#b) [c](c/d.md) [e](https://e)")
    '[a](a.md#b) [c](../c/d.md) [e](https://e)'
    """
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda link: "](" if link[1] else "](../", readme)


def styles() -> str:
    """CSS of highlighted code, for light and dark."""
    light, dark = (HtmlFormatter(style=name).get_style_defs(".codehilite") for name in ("default", "github-dark"))
    dark = re.sub(r"^\.codehilite", '[data-bs-theme="dark"] .codehilite', dark, flags=re.MULTILINE)
    return f"{light}\n{dark}\n.codehilite, .codehilite pre {{ background: none; overflow-x: auto }}\n"
