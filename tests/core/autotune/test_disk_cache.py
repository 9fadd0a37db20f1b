"""Plans on disk: found again under the same conditions, and never a reason to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.autotune.disk_cache import choice_key, recall, remember
from nimble_core.scheduling.saved_plan import KernelChoice, Plan, load_plan
from nimble_core.utils.files import cache_directory
from tests.support.sample_reports import sample_report

KEY = choice_key("ab" * 32, {"torch": "2.13"})
TEXTS = st.text(max_size=8)
VALUES = st.one_of(TEXTS, st.integers(), st.booleans(), st.none())


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a cache of its own."""
    monkeypatch.setenv("NIMBLE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plan() -> Plan:
    made = sample_report(20).plan
    return replace(made, fuse="inductor", kernels=(KernelChoice(3, "cudnn fused"), KernelChoice(0, "merged siblings")))


def test_what_was_remembered_is_recalled(directory: Path) -> None:
    assert recall(KEY) is None
    remember(KEY, plan())
    assert recall(KEY) == plan()
    assert recall(choice_key("ab" * 32, {"torch": "2.14"})) is None
    other = replace(plan(), fuse="library")
    remember(KEY, other)
    assert recall(KEY) == other
    assert [path.name for path in directory.iterdir()] == [f"{KEY}.json"], "nothing else is left behind"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("kind", ["pipe", "link", "link to nothing", "folder"])
def test_only_files_of_its_own_are_read_and_written(directory: Path, tmp_path: Path, kind: str) -> None:
    other, place = tmp_path / "other.json", directory / f"{KEY}.json"
    directory.mkdir()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(other)
        if kind == "link":
            plan().save(other)
    assert recall(KEY) is None
    remember(KEY, replace(plan(), fuse="library"))
    assert (recall(KEY) is None) == (kind == "folder")
    assert other.exists() == (kind == "link")
    if kind == "link":
        assert load_plan(other) == plan(), "a link is replaced, not followed"
    assert [path.name for path in directory.iterdir()] == [f"{KEY}.json"], "nothing else is left behind"


@given(TEXTS, st.dictionaries(TEXTS, VALUES, max_size=4), st.data())
def test_a_key_depends_on_everything_and_on_nothing_else(
    fingerprint: str, conditions: dict[str, Any], data: st.DataObject
) -> None:
    key = choice_key(fingerprint, conditions)
    assert choice_key(fingerprint, dict(reversed(conditions.items()))) == key
    assert key.isalnum()
    assert len(key) == 32
    name, value = data.draw(TEXTS), data.draw(VALUES)
    changed = {**conditions, name: value}
    same = name in conditions and repr(conditions[name]) == repr(value)
    if "\n" not in name + fingerprint and "=" not in name:
        assert (choice_key(fingerprint, changed) == key) == same
    assert choice_key(fingerprint + "x", conditions) != key


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema_version": 999}',
        b'{"schema_version": 1e400}',
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b'"inductor"', b'"magic"'),
        lambda data: data.replace(b'"order":[0,', b'"order":[7,'),
        lambda data: data.replace(b'"call":3', b'"call":-3'),
    ],
)
def test_a_damaged_file_is_as_good_as_none(damage: Any, directory: Path) -> None:
    remember(KEY, plan())
    file = directory / f"{KEY}.json"
    data = file.read_bytes()
    damaged = damage(data) if callable(damage) else damage
    assert damaged != data
    file.write_bytes(damaged)
    assert recall(KEY) is None
    remember(KEY, plan())
    assert recall(KEY) == plan()


def test_a_directory_that_cannot_be_made(directory: Path) -> None:
    directory.write_text("a file is in the way")
    remember(KEY, plan())
    assert recall(KEY) is None
    assert directory.read_text() == "a file is in the way"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    remember(KEY, plan())
    assert recall(KEY) is None


@pytest.mark.parametrize(
    ("named", "place"),
    [
        ({"NIMBLE_CACHE_DIR": "mine"}, "mine"),
        ({"NIMBLE_CACHE_DIR": "", "XDG_CACHE_HOME": "xdg"}, "xdg/nimble"),
        ({"HOME": "home"}, "home/.cache/nimble"),
    ],
)
def test_where_plans_are_kept(
    named: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("NIMBLE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value and str(tmp_path / value))
    assert cache_directory() == tmp_path / place


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NIMBLE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    remember(KEY, plan())
    assert recall(KEY) is None


def test_choosing_needs_no_torch() -> None:
    code = "import sys, nimble_core.autotune.disk_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
