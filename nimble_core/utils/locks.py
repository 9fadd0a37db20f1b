"""Locks of the whole process. Take ``capturing`` before ``launching`` where both are needed."""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar

__all__ = ["capturing", "free_after_fork", "launching"]

Lock = TypeVar("Lock")


def free_after_fork(lock: Lock) -> Lock:
    """Return ``lock``, which a forked child finds free even if another thread held it at the fork."""
    held: Any = lock

    def free() -> None:
        if held.acquire(blocking=False):
            held.release()
        else:
            held._at_fork_reinit()  # as Python's own modules do

    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=free)
    return lock


capturing = free_after_fork(threading.RLock())
"""Held by who captures a graph, or waits for a whole device: CUDA does not allow that while another thread captures."""

launching = free_after_fork(threading.RLock())
"""Held by who launches a graph, and while CUPTI is in the process but not collecting (``profiling.cupti``)."""
