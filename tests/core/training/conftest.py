"""Fixtures of all tests of training: the same random numbers, on one thread; and each place to train."""

from __future__ import annotations

from tests.support.drop_in import exact, on
from tests.support.training_steps import one_thread

__all__ = ["exact", "on", "one_thread"]
