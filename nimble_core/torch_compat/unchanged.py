"""What each call asks and does, in one pass each: compiled where the machine has a C++ compiler, else in Python.

Are all parameters and modules what they were? Are the inputs like those that were prepared, and where do they lie?
Loops in C over Python's own functions (``map``) take 0.03 to 0.07 µs for each tensor, most of it for integers that are
made and thrown away; ``unchanged.cpp`` makes none, and takes a fraction. It is compiled once, in half a second, and
kept in the user's cache directory; it needs Python's headers, none of torch's.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter, getitem
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from nimble_core.torch_compat.dispatch import ANY_KEY, keys_excluded, no_torch_function
from nimble_core.torch_compat.members import DATA_OF, VERSION
from nimble_core.utils.files import cache_directory

__all__ = ["NOWHERE", "OFF", "PLAIN", "InPython", "compiled", "passes", "same_objects"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes without operators of their own, which a replay would not run. Buffers are of the first class."""
Kinds = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]

OFF, NOWHERE = 0, 1
"""No addresses: of a copy that is off, and of one whose source is not known."""
_CALLED = (torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.is_neg, torch.is_grad_enabled)
_forward_of, _version = attrgetter("forward"), attrgetter("_version")
_SOURCE = Path(__file__).with_suffix(".cpp")
_PATIENCE_S = 60.0
_CHANGE = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)


class InPython:
    """The passes without a compiler. Each says whether all are the same; False is not certain, but of versions."""

    @staticmethod
    def same_objects(now: object, before: object, /) -> bool:
        """Whether lists and dicts, nested or not, hold the same objects. About 0.01 µs for each entry."""
        # ``==`` of containers asks for identity first, and for equality only of what is not identical: for tensors that
        # fails here. Both guards are C's, which no interrupt can enter without leaving.
        try:
            with no_torch_function(), keys_excluded(ANY_KEY):
                return bool(now == before)
        except Exception:  # so is an object whose comparison fails the same as itself alone
            return False

    @staticmethod
    def same_state(owners: list[dict[str, Any]], names: list[str], roots: list[Any], before: list[Any], /) -> bool:
        """Whether ``before`` holds what ``owners`` have under ``names``, then the ``forward`` of each of ``roots``."""
        try:
            now = [*map(getitem, owners, names), *map(_forward_of, roots)]
        except (AttributeError, KeyError):  # a module without one of its tables, or its forward
            return False
        return InPython.same_objects(now, before)  # in C: to Dynamo two methods are never equal

    @staticmethod
    def same_memory(tensors: list[torch.Tensor], addresses: list[int], /) -> bool:
        """Whether each tensor's first element is at its address. About 0.06 µs for each."""
        with no_torch_function():  # else each look at a tensor goes through the caller's modes
            return list(map(torch.Tensor.data_ptr, tensors)) == addresses

    @staticmethod
    def same_versions(tensors: list[torch.Tensor], versions: list[int], /) -> bool:
        """Whether no tensor was written in place; ask without modes. About 0.06 µs for each."""
        return list(map(_version, tensors)) == versions

    @staticmethod
    def inputs_like(
        kinds: Kinds, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> list[torch.Tensor] | None:
        """Return the inputs of a call, those named so last, if they are dense tensors of these kinds; else None.

        Each without operators of its own. Shapes, dtypes and devices are compared.
        """
        if not (isinstance(args, tuple) and isinstance(kwargs, dict)):
            raise TypeError("a tuple and a dict")
        if (
            len(args) + len(names) != len(kinds)
            or len(kwargs) != len(names)
            or any(name not in kwargs for name in names)
        ):
            return None
        tensors = [*args, *(kwargs[name] for name in names)]
        try:
            for tensor, (shape, dtype, device) in zip(tensors, kinds, strict=True):
                if not (
                    type(tensor) in PLAIN
                    and tensor.layout is torch.strided
                    and tensor.shape == shape
                    and tensor.dtype is dtype
                    and tensor.device == device
                ):
                    return None
        except RuntimeError:  # of nested tensors, which have no shape
            return None
        return tensors

    @staticmethod
    def read_from(
        change: int,
        copies: tuple[tuple[int, int, int], ...],
        graph: int,
        context: int,
        strides: tuple[tuple[int, ...] | None, ...],
        reading: list[int],
        inputs: Sequence[torch.Tensor],
        /,
    ) -> bool:
        """Have a graph's copies read ``inputs``; False if one is laid out otherwise, or could not be changed.

        Args:
            change: address of the driver's ``cuGraphExecMemcpyNodeSetParams``.
            copies: node, address of its parameters, and address of the source among those.
            graph: instance of the graph.
            context: CUDA context.
            strides: that inputs have to have; None for whatever is contiguous.
            reading: where the copies read now, updated; ``OFF`` or ``NOWHERE`` for one that reads nothing yet.
            inputs: what each copy shall read.
        """
        if not all(reading):
            return False
        for given, laid_out in zip(inputs, strides, strict=True):
            same = given.is_contiguous() if laid_out is None else given.stride() == laid_out
            if not same or given.is_neg():
                return False
        for position, ((node, params, source), given) in enumerate(zip(copies, inputs, strict=True)):
            now = given.data_ptr()
            if not now:  # a tensor without memory
                return False
            if now != reading[position]:
                ctypes.c_void_p.from_address(source).value = now
                reading[position] = NOWHERE  # until it is done
                if _CHANGE(change)(graph, node, params, context) != 0:
                    return False
                reading[position] = now
        return True

    @staticmethod
    def ready(
        asked: tuple[Callable[[], Any], ...],
        answers: tuple[Any, ...],
        bind: Callable[[tuple[Any, ...], dict[str, Any]], list[torch.Tensor] | None],
        read: Callable[[list[torch.Tensor]], bool],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        /,
    ) -> bool:
        """Bind a call's inputs and have them read, if all that is ``asked`` gives its usual answer; False if not.

        Nor if autograd would follow one of the inputs.
        """
        if any(ask() != answer for ask, answer in zip(asked, answers, strict=True)):
            return False
        inputs = bind(args, kwargs)
        if inputs is None or (torch.is_grad_enabled() and any(one.requires_grad for one in inputs)):
            return False
        return read(inputs)


Passes = type[InPython]  # or a compiled module with the same functions
_found: list[Passes] = []  # once for the process; not by functools.cache, of which Dynamo warns


def same_objects(now: object, before: object) -> bool:
    """Whether lists and dicts, nested or not, hold the same objects; no tensor is computed with to find out.

    What is neither a tensor nor such a container counts as the same if it is equal.
    """
    return passes().same_objects(now, before) or InPython.same_objects(now, before)


def passes() -> Passes:
    """Return the passes as this machine can run them."""
    if not _found:
        _found.append(compiled() or InPython)
    return _found[0]


def compiled() -> Passes | None:
    """Compile the passes, or find them in the cache directory; None where that is not possible."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or ""]
    address = DATA_OF.find()
    if not (compiler[0] and address) or sys.platform != "linux" or sys.implementation.name != "cpython":
        return None
    try:
        key = sha256(b"\n".join([_SOURCE.read_bytes(), sys.version.encode(), *map(os.fsencode, compiler)])).hexdigest()
        made = cache_directory() / "compiled" / f"{key[:32]}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if not made.exists():
            made.parent.parent.mkdir(parents=True, exist_ok=True)
            made.parent.mkdir(mode=0o700, exist_ok=True)
            _compile(compiler, made)
        for path in (made.parent, made):  # it is to be run: no other user may have put it there
            found = path.lstat()
            if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or path.is_symlink():
                return None
        spec = spec_from_file_location("unchanged", made, loader=ExtensionFileLoader("unchanged", str(made)))
        module = module_from_spec(cast(Any, spec))
        of = torch.Tensor
        getters = (of.layout, of.shape, of.dtype, of.device, of.requires_grad)
        module.use(address, VERSION.require(), *getters, torch.strided, *PLAIN, *_CALLED)
    except (OSError, RuntimeError, subprocess.SubprocessError, ImportError, TypeError):
        return None  # slower, and right
    return cast(Passes, module)


def _compile(compiler: list[str], made: Path) -> None:
    with TemporaryDirectory(dir=made.parent) as scratch:
        out = Path(scratch, made.name)
        flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}"]
        subprocess.run([*compiler, *flags, _SOURCE, "-o", out], check=True, capture_output=True, timeout=_PATIENCE_S)
        out.chmod(0o700)
        out.replace(made)
