"""What a prepared engine accepts: structure, classes, shapes, dtypes and device of the inputs of each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from nimble_core.torch_compat.unchanged import PLAIN, passes
from nimble_core.tracing.pytree import (
    Leaf,
    Node,
    Structure,
    builder,
    cache_paths,
    flatten,
    leaf_paths,
    reader,
    structure_difference,
)
from nimble_core.utils.errors import CaptureError, InputError

__all__ = ["Signature", "require_initialised", "require_plain", "require_unchanged", "take_apart"]

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Bind = Callable[[tuple[Any, ...], dict[str, Any]], list[torch.Tensor] | None]

_SHOWN = 8
"""The most tensors that a message names of one signature: a cache has hundreds."""
_IN_PLACE = "return what it adds, or write tensors in place"
_STATIC_CACHE = (
    "pass a StaticCache of the greatest length that is needed, after the model itself has run on it once; or no cache, "
    "with use_cache=False. Layers with a sliding window count in Python: make it from a copy of the config with "
    "sliding_window=None and each of layer_types 'full_attention'"
)


class Signature:
    """The inputs at preparation, to compare those of calls with.

    ``bind`` is on the path of each call: it returns the input tensors of a call that fits and None for any other.
    ``explain`` says what was expected, and what was given, for a call that does not fit.

    Args:
        args: example positional inputs.
        kwargs: example keyword inputs.
        called: names of the positional inputs; those without a name are ``args[0]``, ….

    Raises:
        InputError: no tensor among the inputs, or tensors on more than one device, or not dense.
    """

    def __init__(self, args: Args, kwargs: Kwargs, called: Sequence[str] = ()) -> None:
        self.names, self._called = tuple(kwargs), tuple(called)
        self.tensors, self.structure, self.paths = take_apart(args, kwargs, called)
        if not self.tensors:
            raise InputError("no tensor among the inputs", fix="pass at least one example tensor to prepare or compare")
        self.device = _one_device(
            self.tensors, self.paths, [_in_words(path, called) for path in cache_paths(self.structure)]
        )
        for tensor, path in zip(self.tensors, self.paths, strict=True):
            _require_dense(tensor, path)
        # A tensor given twice was recorded as one: calls have to do the same.
        first = {id(tensor): position for position, tensor in reversed(list(enumerate(self.tensors)))}
        self.twins = tuple((first[id(t)], i) for i, t in enumerate(self.tensors) if first[id(t)] != i)
        self.metas = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in self.tensors)
        # Calls that read the memory of a complex tensor do not see that it is to be conjugated.
        self.conjugate = tuple((i, t.is_conj()) for i, t in enumerate(self.tensors) if t.is_complex())
        self._build = builder(self.structure)
        self.bind: Bind = self._compile()

    def arguments(self, tensors: Sequence[torch.Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword inputs around ``tensors``, by default the example's, in new containers.

        A model may change the lists and dicts that it is given: those of the caller stay as they are.
        """
        args, kwargs = self._build(self.tensors if tensors is None else tensors)
        return args, kwargs

    def require_unchanged(self, args: Args, kwargs: Kwargs) -> None:
        """Raise CaptureError if a run changed ``arguments()``, which it was given, other than by writing tensors."""
        require_unchanged(self.structure, self.tensors, (tuple(args), dict(kwargs)), self._called)

    def _compile(self) -> Bind:
        assert isinstance(self.structure, Node)
        positional, keyword = self.structure.children
        assert isinstance(positional, Node)
        assert isinstance(keyword, Node)
        names, twins, conjugate = self.names, self.twins, self.conjugate
        flat = all(isinstance(child, Leaf) for child in (*positional.children, *keyword.children))
        count, named, read = len(positional.children), len(names), reader(self.structure)
        bind_plain = partial(passes().inputs_like, self.metas, names if flat else ())
        if flat and not (twins or conjugate):
            return bind_plain  # one function in C

        def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
            if not flat:
                if len(args) != count or len(kwargs) != named or any(name not in kwargs for name in names):
                    return None
                found = read((args, {name: kwargs[name] for name in names}))
                if found is None:
                    return None
                args, kwargs = tuple(found), {}
            tensors = bind_plain(args, kwargs)
            if tensors is None or any(tensors[i].is_conj() != bit for i, bit in conjugate):
                return None
            return tensors if all(tensors[a] is tensors[b] for a, b in twins) else None

        return bind

    def explain(self, args: Args, kwargs: Kwargs) -> str:
        """Return the first difference from the prepared inputs, as ``"args[0]: expected …, given …"``.

        Raises:
            InputError: an object of an unknown type that holds tensors, or a container that contains itself.
        """
        assert isinstance(self.structure, Node)
        count = len(self.structure.children[0].children)  # type: ignore[union-attr]
        if len(args) != count:
            beside = [repr(name) for name in kwargs if name not in self.names]
            with_them = f" and keyword{'s' * (len(beside) > 1)} {', '.join(beside)}" if beside else ""
            return f"expected {count} positional input{'s' * (count != 1)}, given {len(args)}{with_them}"
        missing = [name for name in self.names if name not in kwargs]
        extra = [name for name in kwargs if name not in self.names]
        if missing or extra:
            words = [f"expected keyword {name!r}, not given" for name in missing]
            words += [f"keyword {name!r} given, not expected" for name in extra]
            return "; ".join(words)
        tensors, given, _ = take_apart(args, {name: kwargs[name] for name in self.names}, self._called)
        if found := structure_difference(self.structure, given):
            return f"{_in_words(found.path, self._called)}: expected {found.was}, given {found.now}"
        for tensor, (shape, dtype, device), path in zip(tensors, self.metas, self.paths, strict=True):
            if tensor.is_nested or tensor.layout is not torch.strided:
                kind = "a nested" if tensor.is_nested else f"a {tensor.layout}".replace("torch.", "", 1)
                return f"{path}: expected a dense tensor, {_describe(shape, dtype, device)}, given {kind} one"
            if type(tensor) not in PLAIN:
                kind = type(tensor).__qualname__
                return f"{path}: expected a torch.Tensor, given a {kind}: pass {_plain_instead(tensor)}"
            if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
                return (
                    f"{path}: expected {_describe(shape, dtype, device)}, "
                    f"given {_describe(tensor.shape, tensor.dtype, tensor.device)}"
                )
        for i, conjugate in self.conjugate:
            if tensors[i].is_conj() != conjugate:
                view = "a conjugate view" if conjugate else "no conjugate view: pass .resolve_conj() of it"
                return f"{self.paths[i]}: expected {view}"
        for a, b in self.twins:
            if tensors[a] is not tensors[b]:
                return f"{self.paths[b]}: expected the same tensor as {self.paths[a]}, given another"
        return "no difference found"

    def __str__(self) -> str:
        shown = [f"{path}: {_describe(*meta)}" for path, meta in zip(self.paths, self.metas, strict=True)]
        more = [f"and {len(shown) - _SHOWN} more tensors"] if len(shown) > _SHOWN + 1 else []
        return ", ".join([*shown[:_SHOWN], *more] if more else shown)


def require_unchanged(structure: Structure, tensors: Sequence[torch.Tensor], inputs: Any, names: Sequence[str]) -> None:
    """Raise CaptureError if a run changed its inputs other than by writing into tensors."""
    after, now = flatten(inputs, what="")
    if found := structure_difference(structure, now):
        path = found.path
    else:
        known = zip(tensors, after, leaf_paths(now), strict=True)
        path = next((path for one, other, path in known if one is not other), "")
    if path:
        raise CaptureError(
            f"the forward changes {_in_words(path, names)}, which it is given: a replay would not",
            fix=_STATIC_CACHE if path.startswith((*cache_paths(structure),)) else _IN_PLACE,
        )


def take_apart(
    args: Args, kwargs: Kwargs, called: Sequence[str] = ()
) -> tuple[list[torch.Tensor], Structure, list[str]]:
    """Return the tensors of inputs, the structure of ``(args, kwargs)`` around them, and the tensors' names.

    Raises:
        InputError: as :func:`nimble_core.tracing.pytree.flatten`, with these names.
    """
    try:
        tensors, structure = flatten((tuple(args), dict(kwargs)), what="")
    except InputError as error:
        what, where = (_in_words(text, called) for text in (error.what, error.where))
        raise InputError(what, where=where, fix=error.fix) from None
    return tensors, structure, [_in_words(path, called) for path in leaf_paths(structure)]


def _in_words(path: str, called: Sequence[str]) -> str:
    """Return a path from ``(args, kwargs)`` on in the user's words; it may begin a sentence."""
    for position, name in enumerate(called):
        if path.startswith(f"[0][{position}]"):
            return path.replace(f"[0][{position}]", name, 1)
    return path.replace("[0]", "args", 1) if path.startswith("[0]") else path.replace("[1]", "kwargs", 1)


def _describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def require_plain(tensor: torch.Tensor, path: str) -> None:
    """Raise InputError for a tensor of another class, whose Python code is in no call of a recording."""
    if type(tensor) not in PLAIN:
        raise InputError(
            f"{path} is a {type(tensor).__qualname__}, a class of its own, whose code a replay would pass by",
            fix=f"pass {_plain_instead(tensor)}",
        )


def require_initialised(name: str, parameter: torch.Tensor) -> None:
    """Raise InputError for a parameter of a lazy module that never ran."""
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        raise InputError(f"parameter {name} is not initialised", fix="run the model once on an example input first")


def _plain_instead(tensor: torch.Tensor) -> str:
    """Say what to pass in place of a tensor of another class."""
    # A class with a dispatch of its own has no numbers of its own: it stands for other tensors.
    stands_for_others = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return "the tensors that it is made of" if stands_for_others else ".as_subclass(torch.Tensor) of it"


def _require_dense(tensor: torch.Tensor, path: str) -> None:
    if tensor.is_nested:
        raise InputError(f"{path} is a nested tensor", fix="pad it: torch.nested.to_padded_tensor(x, 0.0)")
    if tensor.layout is not torch.strided:
        raise InputError(f"{path} is {tensor.layout}, not a dense tensor", fix="convert it with .to_dense()")
    if tensor.is_quantized:
        raise InputError(
            f"{path} is quantized ({tensor.dtype}), not a dense tensor of numbers",
            fix="convert it with .dequantize(), and quantize inside of the model",
        )


def _one_device(tensors: Sequence[torch.Tensor], paths: Sequence[str], caches: Sequence[str]) -> torch.device:
    device = tensors[0].device
    for tensor, path in zip(tensors, paths, strict=True):
        if tensor.device != device:
            raise InputError(
                f"inputs on mixed devices: {paths[0]} is on {device}, {path} on {tensor.device}",
                fix=_STATIC_CACHE if path.startswith((*caches,)) else f"move every input to {device}",
            )
    return device
