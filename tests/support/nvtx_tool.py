"""Compiles the tool of ``nvtx_tool.cpp``, runs programs that it listens to, and reads what it wrote down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Heard:
    """One range of the domain ``nimble``, and the ranges inside it."""

    message: str
    category: str
    color: int
    payload: Any
    inside: tuple[Heard, ...]


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a program printed as its last line, as JSON, and what the tool heard of it."""

    said: Any
    events: list[dict[str, Any]]

    @property
    def ranges(self) -> list[Heard]:
        """Outermost ranges, by thread, in order."""
        return ranges(self.events)


@cache
def built() -> Path:
    """The tool as a shared library, compiled once."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "marked 'compiler', so that one is there"
    made = Path(mkdtemp(prefix="nvtx-tool-")) / "tool.so"
    source = Path(__file__).with_name("nvtx_tool.cpp")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run([compiler, *flags, str(source), "-o", str(made)], check=True)
    return made


def events(log: Path) -> list[dict[str, Any]]:
    """What the tool wrote down."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def ranges(heard: list[dict[str, Any]]) -> list[Heard]:
    """Ranges of the domain ``nimble`` as trees, threads one after the other. Each push must have its pop."""
    roots: list[Heard] = []
    for thread in dict.fromkeys(one["thread"] for one in heard):
        open_: list[tuple[dict[str, Any], list[Heard]]] = []
        done: list[Heard] = []
        for one in heard:
            if one["thread"] != thread or one.get("domain") != "nimble":
                continue
            if one["event"] == "push":
                open_.append((one, []))
            elif one["event"] == "pop":
                begun, inside = open_.pop()
                made = Heard(begun["message"], begun["category"], begun["color"], begun["payload"], tuple(inside))
                (open_[-1][1] if open_ else done).append(made)
        assert not open_, f"never popped: {[one['message'] for one, _ in open_]}"
        roots += done
    return roots


def listened(code: str, folder: Path, *, attached: bool = True, **environment: str) -> Spoken:
    """Run ``code`` in a new interpreter with the tool attached; its last printed line is JSON.

    It imports what this one can: packages may lie on a ``PYTHONPATH``.
    """
    log = folder / "heard.jsonl"
    log.unlink(missing_ok=True)
    given = os.environ.get("PYTHONPATH", "")
    place = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), given))),
        "NVTX_TOOL_LOG": str(log),
        "NIMBLE_CACHE_DIR": str(folder / "choices"),
    }
    injected = {"NVTX_INJECTION64_PATH": str(built())} if attached else {}
    inherited = {name: value for name, value in os.environ.items() if name != "NVTX_INJECTION64_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **place, **injected, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return Spoken(json.loads(done.stdout.splitlines()[-1]), events(log))
