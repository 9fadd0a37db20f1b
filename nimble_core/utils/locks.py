"""What a process does one at a time on its GPUs. Who wants both locks takes ``capturing`` first."""

from __future__ import annotations

import threading

__all__ = ["capturing", "launching"]

capturing = threading.RLock()
"""Held by who captures a graph, or waits for a whole device: CUDA does not allow that while another thread captures."""

launching = threading.RLock()
"""Held by who launches a graph, and while CUPTI is in the process but not collecting (``profiling.cupti``)."""
