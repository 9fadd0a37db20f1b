"""Files for users: written whole or not at all, where they were asked for, as the file that is there."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from nimble_core.utils.errors import InputError

__all__ = ["cache_directory", "file_path", "read_own", "replace_file", "write_file"]


def cache_directory() -> Path:
    """Return where plans and compiled passes are kept: ``$NIMBLE_CACHE_DIR``, or the user's cache directory."""
    named = os.environ.get("NIMBLE_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nimble"


def file_path(path: str | os.PathLike[str]) -> Path:
    """``path``; raises InputError for an empty one, which ``Path`` takes for the folder one is in."""
    if not os.fspath(path):
        raise InputError("the path to write to is empty", fix="name a file")
    return Path(path)


def write_file(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write ``data`` to ``path``, all of it or nothing, and return the path: how every file for a user is written.

    It is written beside and put in place once it is whole. Links are followed and stay, a file that is there keeps its
    mode and owner, and what is no regular file (a device, a pipe) is written to, not replaced.

    Raises:
        InputError: the path is empty.
        OSError: it cannot be written, which names ``path``; a file that was there before is left as it was.
    """
    target = file_path(path)
    try:
        _write(target, data)
    except OSError as error:  # it may name the file beside, which nobody asked for, or none
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    return target


def _write(target: Path, data: bytes) -> None:
    try:
        before = target.stat()
    except FileNotFoundError:
        before = None
    place = Path(os.path.realpath(target))
    # A file that is open, as /dev/stdout may be, need not have a name any more that another could take.
    if before and not (stat.S_ISREG(before.st_mode) and place.exists()):
        target.write_bytes(data)
        return
    if before:
        os.close(os.open(place, os.O_WRONLY))  # who may not write a file may not replace it
    elif not place.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no directory {place.parent}")
    replace_file(place, data, before)


def replace_file(place: Path, data: bytes, before: os.stat_result | None = None) -> None:
    """Put a new file in the place of whatever is there, a link too, all of it or nothing.

    Args:
        place: its path.
        data: what it holds.
        before: owner and mode that it is given.
    """
    beside = place.with_name(f".nimble.{os.getpid()}.{os.urandom(4).hex()}")  # any name may be too long with more to it
    try:
        with beside.open("xb") as file:
            if before:
                if hasattr(os, "chown"):  # Windows has none
                    with suppress(PermissionError):
                        os.chown(beside, before.st_uid, before.st_gid)
                beside.chmod(stat.S_IMODE(before.st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def read_own(path: Path, limit: int) -> bytes:
    """Read at most ``limit`` bytes of a regular file. Raises OSError for a link, and for what may block, as a pipe."""
    flags = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))
    with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
        return file.read(limit)
