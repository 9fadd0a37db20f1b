"""Kernel names as people read them."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

__all__ = ["demangle", "short_kernel_name"]


@cache
def _runtime() -> tuple[Any, Any] | None:
    """Return ``(__cxa_demangle, free)`` of the C++ and C runtimes; None where they are missing."""
    try:
        demangler, free = ctypes.CDLL("libstdc++.so.6").__cxa_demangle, ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return None
    # Pointers are 64 bits wide: without these ctypes would pass them as int.
    demangler.restype = ctypes.c_void_p
    demangler.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    free.restype = None
    free.argtypes = [ctypes.c_void_p]
    return demangler, free


@cache
def demangle(name: str) -> str:
    """Return the C++ name of a mangled symbol; ``name`` itself where that is not possible."""
    runtime = _runtime() if name.startswith("_Z") else None
    if runtime is None:
        return name
    demangler, free = runtime
    status = ctypes.c_int()
    pointer = demangler(name.encode(), None, None, ctypes.byref(status))
    if not pointer:
        return name
    try:
        return ctypes.string_at(pointer).decode(errors="replace")
    finally:
        free(pointer)


@cache
def short_kernel_name(name: str) -> str:
    """Return the function's own name, without return type, namespaces, template and call arguments.

    >>> short_kernel_name("void at::native::vectorized_kernel<4, at::Op>(int, at::Op)")
    'vectorized_kernel'
    """
    if name.startswith(("Memcpy ", "Memset ")):
        return name.partition(" (")[0]
    text = demangle(name).replace("(anonymous namespace)", "_")
    while True:
        shorter = re.sub(r"<[^<>]*>", "", text)
        if shorter == text:
            break
        text = shorter
    text = text.split("(", 1)[0].strip()
    return text.split(" ")[-1].rpartition("::")[2] or name
