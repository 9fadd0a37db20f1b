"""Kernel names as people read them."""

from __future__ import annotations

import ctypes
import re
from functools import cache

__all__ = ["demangle", "short_kernel_name"]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        library.__cxa_demangle.restype = ctypes.c_void_p
        library.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        ctypes.CDLL(None).free.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library


@cache
def demangle(name: str) -> str:
    """C++ name of a mangled symbol; ``name`` itself if it is not one or the C++ runtime is not there."""
    library = _library() if name.startswith("_Z") else None
    if library is None:
        return name
    status = ctypes.c_int()
    pointer = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not pointer:
        return name
    text = ctypes.string_at(pointer).decode(errors="replace")
    ctypes.CDLL(None).free(pointer)
    return text


@cache
def short_kernel_name(name: str) -> str:
    """The function's own name, without return type, namespaces, template and call arguments.

    >>> short_kernel_name("void at::native::vectorized_kernel<4, at::Op>(int, at::Op)")
    'vectorized_kernel'
    """
    text = demangle(name).replace("(anonymous namespace)", "_")
    while True:
        shorter = re.sub(r"<[^<>]*>", "", text)
        if shorter == text:
            break
        text = shorter
    text = text.split("(", 1)[0].strip()
    return text.split(" ")[-1].rpartition("::")[2] or name
