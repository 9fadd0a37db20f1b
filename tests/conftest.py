"""What the machine lacks is said, test by test; everything that is random draws the same on every run."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings

# What tests choose is not for the user's own processes, nor theirs for the tests.
os.environ["NIMBLE_CACHE_DIR"] = tempfile.mkdtemp(prefix="nimble-choices-")

# Tensors of tests are small: torch's threads wait for each other longer than they compute, most of all on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most verdicts of tests are of no interest: no patience where the machine is too noisy for one.
vars(import_module("nimble_core.autotune.autotune"))["_PATIENCE_S"].update(fast=0.0, full=0.0)
vars(import_module("nimble_viz.collect.comparison"))["_PATIENCE_S"] = 0.0


@pytest.fixture(autouse=True)
def nothing_chosen() -> None:
    """Forget what other tests chose."""
    for choice in Path(os.environ["NIMBLE_CACHE_DIR"]).glob("*.json"):
        choice.unlink(missing_ok=True)


settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_chromium() -> bool:
    return any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Pages and texts of the largest sample report take seconds each; its views are tested always.
        if "[ten thousand" in item.name and "analysis" not in item.path.parts:
            item.add_marker(pytest.mark.slow)
    for marker, present, reason in (
        ("gpu", _has_cuda, "needs a CUDA GPU"),
        ("browser", _has_chromium, "needs chromium"),
        ("compiler", _has_compiler, "needs a C++ compiler"),
    ):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not present():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
