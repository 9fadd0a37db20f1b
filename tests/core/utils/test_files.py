"""Every file that is written for a user: whole or not at all, and what is at its path is respected."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import graphviz
import pytest
import torch

from nimble_core.utils.errors import InputError
from nimble_core.utils.files import write_file
from nimble_viz.cli.command import main
from nimble_viz.collect.annotate import annotate
from nimble_viz.collect.compare import compare
from tests.support.nsys_exports import profile_of, write_export
from tests.support.sample_reports import sample_report

REPORT = sample_report(12)
EXISTING = b"what was there before"

Write = Callable[[Path], object]


def svg(path: Path) -> None:
    """A picture, by a ``dot`` that need not be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphviz.Digraph, "pipe", lambda *_, **__: b"<svg/>")
        REPORT.export(path, "svg")


def by_gate(flag: str) -> Write:
    """What ``gate`` writes beside what it says, of the report that lies beside."""

    def write(path: Path) -> None:
        if main(["gate", str(path.with_name("saved.nimble")), flag, str(path)]) == 2:
            raise OSError("the command said so")

    return write


def rows(path: Path) -> None:
    """The rows of an annotation, of the profile that lies beside."""
    annotate(path.with_name("profile.sqlite"), REPORT).to_csv(path)


WRITERS: dict[str, Write] = {
    "report": REPORT.save,
    "plan": REPORT.plan.save,
    "page": REPORT.to_html,
    "view": REPORT.pane("dag").to_html,
    "chrome": lambda path: REPORT.export(path, "chrome"),
    "table": lambda path: REPORT.export(path, "csv"),
    "tables": lambda path: REPORT.export(path.parent, "csv"),
    "dot": lambda path: REPORT.export(path, "dot"),
    "svg": svg,
    "annotation": rows,
    "markdown": by_gate("--markdown"),
    "junit": by_gate("--junit"),
}
"""All are told to write ``calls.csv``, which is the name of a table."""


@contextmanager
def no_file_longer_than(nbytes: int) -> Iterator[None]:
    """What a full disk does, and a quota: a write fails after some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mode(path: Path) -> int:
    """Permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_written_whole_or_not_at_all(name: str, tmp_path: Path) -> None:
    REPORT.save(tmp_path / "saved.nimble")
    write_export(tmp_path / "profile.sqlite", profile_of(REPORT, REPORT.chosen, 2))
    (tmp_path / "elsewhere").mkdir()
    real, path = tmp_path / "elsewhere" / "real", tmp_path / "calls.csv"
    real.write_bytes(EXISTING)
    real.chmod(0o640)
    path.symlink_to(Path("elsewhere/real"))
    before = sorted(tmp_path.rglob("*"))
    with no_file_longer_than(3), pytest.raises(OSError, match=r"too large|the command"):
        WRITERS[name](path)
    assert real.read_bytes() == EXISTING
    assert sorted(tmp_path.rglob("*")) == before
    WRITERS[name](path)
    assert path.is_symlink()
    assert mode(real) == 0o640
    written = real.read_bytes()
    assert written != EXISTING
    path.unlink()
    WRITERS[name](path)
    assert path.read_bytes() == written


@pytest.mark.parametrize("kept", [0o600, 0o666, 0o755])
def test_a_file_keeps_its_mode_and_owner(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.touch()
    path.chmod(kept)
    if os.geteuid() == 0:
        os.chown(path, 12, 34)
    before = path.stat()
    write_file(path, b"new")
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert path.read_bytes() == b"new"


def test_a_file_that_may_not_be_written_is_not_replaced() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, user = Path(folder) / "r", os.geteuid()
        os.chmod(folder, 0o777)
        path.write_bytes(EXISTING)
        path.chmod(0o444)
        if user == 0:
            os.seteuid(65534)  # root may write anything
        try:
            with pytest.raises(PermissionError, match=re.escape(f"'{path}'")):
                write_file(path, b"new")
        finally:
            os.seteuid(user)
        assert path.read_bytes() == EXISTING
        assert os.listdir(folder) == ["r"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    REPORT.save(pipe)
    reader.join(timeout=30)
    assert read == [REPORT.save(tmp_path / "r.nimble").read_bytes()]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_errors_name_what_was_asked_for(tmp_path: Path) -> None:
    missing, loop, folder = tmp_path / "no" / "p", tmp_path / "loop", tmp_path / "folder"
    loop.symlink_to(loop)
    folder.mkdir()
    found: dict[Path, OSError] = {}
    for path in (missing, loop, folder, Path("/proc/p")):
        with pytest.raises(OSError, match=re.escape(f": '{path}'")) as caught:
            write_file(path, b"new")
        found[path] = caught.value
        assert ".nimble." not in str(caught.value)
    assert f"there is no directory {missing.parent}" in str(found[missing])
    assert found[loop].errno == errno.ELOOP
    assert isinstance(found[folder], IsADirectoryError)
    assert isinstance(found[missing], FileNotFoundError)


@pytest.mark.parametrize("write", [REPORT.save, REPORT.plan.save, REPORT.to_html, REPORT.export])
def test_an_empty_path_is_refused(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="path to write to is empty"):
        write("")
    assert os.listdir(tmp_path) == []


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(InputError, match=r"device is a str, not a Device\n(.|\n)*where its inputs are"):
        compare(torch.nn.Linear(4, 4).eval(), torch.randn(2, 4), device="cpu")  # type: ignore[arg-type]
