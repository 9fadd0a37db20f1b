"""Peers: other ways to run a model, for ``compare(..., against=[...])`` and benchmarks.

The built-in ones leave nothing behind: they work on a copy of the modules around the same weights, compile under code
of their own, and change settings only while they run.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol, runtime_checkable

import torch

from nimble_core.torch_compat.compiler import (
    COUNTERS,
    INDUCTOR_CONFIG,
    INPUT_CODES,
    MARKED_STEPS,
    MODE_OPTIONS,
    RESET_CODE,
)
from nimble_core.torch_compat.cuda import clear_cublas_workspaces
from nimble_core.tracing.pytree import Structure, builder, flatten
from nimble_core.tracing.recording_contexts import no_autocast
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import InputError

__all__ = ["Peer", "Run", "close", "peer", "peer_names", "resolve_peers", "twin_of"]

Run = Callable[..., Any]
"""Called like the model, with inputs of the signature it was prepared for; returns what the model returns."""


_CAPTURE_WARM_UPS = 3


@runtime_checkable
class Peer(Protocol):
    """A way to run a model."""

    @property
    def name(self) -> str:
        """What reports call it."""

    def prepare(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
        """Make ``model`` ready for inputs like these.

        Called without autograd (``torch.inference_mode`` or ``torch.no_grad``), and so is what it returns. A run goes
        from the given inputs, on whatever memory they lie, to a result that may still be under way on the device and
        may be overwritten by the next run. Model and inputs are the user's own: neither may be changed. What is
        returned may have a ``close()`` that frees what it holds, and a ``note`` that says what readers of its times
        should know.

        A peer that also trains has ``prepare_training(model, args, kwargs)``. There ``model`` is a copy of the user's
        modules for this peer alone, with parameters of its own around the same memory. It is called with autograd, and
        under autocast where steps are, and so is what it returns, whose results autograd differentiates with respect to
        ``model.parameters()``. Forward and backward are to be made ready; loss and optimizer are the caller's.

        Raises:
            Exception: this model or machine is not for this peer; the message says why.
        """


def peer_names() -> tuple[str, ...]:
    """Return the names that ``peer`` knows, with every mode of ``torch.compile``."""
    compiled = ["compile" if mode == "default" else f"compile:{mode}" for mode in MODE_OPTIONS.require()()]
    return (*compiled, *(f"{name}+freezing" for name in compiled), "cuda-graph", "eager-tuned")


def peer(name: str) -> Peer:
    """Return the built-in peer called ``name``.

    ``compile``, ``compile:MODE``
        ``torch.compile``, shapes static; with ``+freezing`` weights are constants that Inductor may fold. Modes that
        use CUDA graphs overwrite their outputs with the next run.
    ``cuda-graph``
        One stream, captured as it is; inputs are copied in and outputs out. CUDA only.
    ``eager-tuned``
        Eager under ``cudnn.benchmark``; models that convolve images (parameters with four dimensions) in
        ``channels_last``, weights converted once and inputs on every run. cuDNN keeps one choice for each convolution
        and process, made by whoever meets it first: name this peer before others that use ``channels_last``.

    Of a training step ``compile`` and its modes compile forward and backward, and ``cuda-graph`` captures them
    (``torch.cuda.make_graphed_callables``); loss and optimizer run in eager. ``eager-tuned`` is for inference.

    Raises:
        InputError: there is none; lists those that exist.
    """
    if name in peer_names():
        others: dict[str, Peer] = {one.name: one for one in (_CudaGraph(), _EagerTuned())}
        return others.get(name) or _Compile(name)
    raise InputError(
        f"there is no peer called {name!r}", fix=f"one of {', '.join(peer_names())}; or a Peer of your own"
    )


def resolve_peers(against: str | Iterable[str | Peer]) -> tuple[Peer, ...]:
    """Return peers, given by name or as they are.

    Raises:
        InputError: an unknown name, a name given twice, or something that is no peer.
    """
    asked = (against,) if isinstance(against, str) else against
    if not isinstance(asked, Iterable):
        raise InputError(f"against is a {type(asked).__name__}", fix="a sequence of names and Peer objects")
    peers: dict[str, Peer] = {}
    for one in asked:
        found = peer(one) if isinstance(one, str) else one
        if isinstance(found, type) or not isinstance(found, Peer) or not isinstance(found.name, str):
            raise InputError(
                f"{found!r} is no peer", fix="a name, or an object with a name and a prepare(model, args, kwargs)"
            )
        if found.name in peers:
            raise InputError(f"two peers are called {found.name!r}", fix="give each a name of its own")
        peers[found.name] = found
    return tuple(peers.values())


def close(run: Run | None) -> None:
    """Free what a prepared peer holds, if it has a ``close``."""
    getattr(run, "close", lambda: None)()


def twin_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """Copy modules (no function) around the same memory, so that marks left on them and tensors go with the copy."""
    if not isinstance(model, torch.nn.Module):
        return model
    memo: dict[int, Any] = {}
    with torch.inference_mode(False):
        for module in model.modules():
            for held in (vars(module), module._buffers):
                memo |= {id(value): value.detach() for value in held.values() if isinstance(value, torch.Tensor)}
        for parameter in model.parameters():
            trained = parameter.requires_grad and not parameter.is_inference()
            memo[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=trained)
        return copy.deepcopy(model, memo)


def _bound(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    tensors = signature.bind(tuple(args), dict(kwargs))
    if tensors is None:
        raise InputError(f"not what this was prepared for: {signature.explain(args, kwargs)}", fix="prepare again")
    return tensors


# -- torch.compile -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Compile:
    name: str

    def prepare(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
        # Dynamo asks for freezing too, before the options reach Inductor.
        config, options = INDUCTOR_CONFIG.require(), self._options()
        with config.patch(freezing=options.get("freezing", config.freezing)):
            return _Compiled(twin_of(model), options, lambda run: run(*args, **kwargs))

    def prepare_training(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
        options = self._options()
        if "freezing" in options:
            raise InputError("frozen weights cannot be trained")

        def both(run: Run) -> None:
            # Not the forward alone: a second one before the first backward is captured, and attention then leaves
            # its dropout's seed on the device, where a backward that is not captured crashes the process.
            results = [one for one in flatten(run(*args, **kwargs), what="output")[0] if one.requires_grad]
            wanted = [one for one in model.parameters() if one.requires_grad]
            if results and wanted:
                with no_autocast(results[0].device.type):
                    torch.autograd.grad(results, wanted, list(map(torch.ones_like, results)), allow_unused=True)

        return _Compiled(model, options, both)

    def _options(self) -> dict[str, Any]:
        way, _, freezing = self.name.partition("+")
        options = dict(MODE_OPTIONS.require()(way.partition(":")[2] or "default"))
        return options | {"freezing": True} if freezing else options


class _Compiled:
    """A model compiled by Inductor under code of its own, which can be forgotten alone; ``use`` compiles it."""

    def __init__(self, model: Callable[..., Any], options: dict[str, Any], use: Callable[[Run], object]) -> None:
        input_codes, counters = INPUT_CODES.require(), COUNTERS.require()

        def call(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        self._known = set(input_codes.seen_ids)
        self._code = call.__code__ = call.__code__.replace(co_name="compiled")
        self._run: Run | None = torch.compile(call, options=options, dynamic=False)
        self.note = ""
        # A process that marks its steps once has to mark all of them, and then none may be left out here either.
        self._mark: Callable[[], None] | None = None
        if MARKED_STEPS.require():
            self._mark = torch.compiler.cudagraph_mark_step_begin
        try:
            breaks, skips = sum(counters["graph_break"].values()), counters["inductor"]["cudagraph_skips"]
            with warnings.catch_warnings():
                # torch's notices about its own code, and advice on settings, which are the user's.
                warnings.filterwarnings("ignore", module=r"torch(\.|$)")
                use(self)
            breaks = sum(counters["graph_break"].values()) - breaks
            skips = counters["inductor"]["cudagraph_skips"] - skips
        except BaseException:
            self.close()
            raise
        notes = [f"graph breaks: {breaks}"] * bool(breaks) + ["Inductor skipped CUDA graphs"] * bool(skips)
        self.note = ", ".join(notes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._mark is not None:
            self._mark()
        assert self._run is not None
        return self._run(*args, **kwargs)

    def close(self) -> None:
        """Forget what was compiled: here, and of frames that Dynamo had not seen before."""
        if self._run is None:
            return
        self._run = None
        codes: list[CodeType | None] = [self._code]
        codes += [code() for code in INPUT_CODES.require().seen if id(code()) not in self._known]
        for code in codes:
            if code is not None:
                RESET_CODE.require()(code)


# -- eager, captured and tuned -------------------------------------------------------------------------------------


class _Flat(torch.nn.Module):
    """The model from tensors to a tuple of tensors, so that it can be graphed, whatever its structures."""

    def __init__(self, model: Callable[..., Any], inputs: Structure, outputs: list[Structure]) -> None:
        super().__init__()
        self.model = model
        self._build = builder(inputs)
        self._outputs = outputs
        self.training = isinstance(model, torch.nn.Module) and any(module.training for module in model.modules())

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._build(tensors)
        results, structure = flatten(self.model(*args, **kwargs), what="output")
        self._outputs[:] = [structure]
        return tuple(results)


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    name: str = "cuda-graph"

    def prepare(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
        signature = Signature(args, kwargs)
        if signature.device.type != "cuda":
            raise InputError(f"CUDA graphs run on CUDA only, the inputs are on {signature.device}")
        with torch.inference_mode(False):
            held = [tensor.detach().clone() for tensor in signature.tensors]
        own_args, own_kwargs = builder(signature.structure)(held)
        graph = torch.cuda.CUDAGraph()
        cached = torch.is_autocast_cache_enabled()
        with torch.cuda.device(signature.device):
            caller, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(caller)
            try:
                # A cast kept from inside the capture would be read outside of it, where it was never computed.
                torch.set_autocast_cache_enabled(False)
                with torch.cuda.stream(side):
                    for _ in range(_CAPTURE_WARM_UPS):
                        model(*own_args, **own_kwargs)
                caller.wait_stream(side)
                # Workspaces of cuBLAS then lie in the graph's own memory, which is freed with the graph.
                clear_cublas_workspaces()
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    results, structure = flatten(model(*own_args, **own_kwargs), what="output")
            finally:
                clear_cublas_workspaces()
                torch.set_autocast_cache_enabled(cached)
        build = builder(structure)

        def run(*args: Any, **kwargs: Any) -> Any:
            for own, given in zip(held, _bound(signature, args, kwargs), strict=True):
                own.copy_(given)
            graph.replay()
            return build([result.clone() for result in results])

        return run

    def prepare_training(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
        signature, outputs = Signature(args, kwargs), list[Structure]()
        if signature.device.type != "cuda":
            raise InputError(f"CUDA graphs run on CUDA only, the inputs are on {signature.device}")
        flat = _Flat(model, signature.structure, outputs)
        samples = tuple(tensor.detach().clone() for tensor in signature.tensors)
        cached = torch.is_autocast_cache_enabled()
        with torch.cuda.device(signature.device), warnings.catch_warnings():
            # torch's, about streams of its own.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
            try:
                torch.set_autocast_cache_enabled(False)  # as torch asks for: casts belong into the graphs
                graphed: Any = torch.cuda.make_graphed_callables(
                    flat, samples, num_warmup_iters=_CAPTURE_WARM_UPS, allow_unused_input=True
                )
            finally:
                torch.set_autocast_cache_enabled(cached)
        build = builder(outputs[0])

        def run(*args: Any, **kwargs: Any) -> Any:
            return build(graphed(*_bound(signature, args, kwargs)))

        return run


@dataclass(frozen=True, slots=True)
class _EagerTuned:
    name: str = "eager-tuned"

    def prepare(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
        signature = Signature(args, kwargs)
        images = [position for position, tensor in enumerate(signature.tensors) if tensor.dim() == 4]
        convolves = isinstance(model, torch.nn.Module) and any(weight.dim() == 4 for weight in model.parameters())
        tuned = model
        if convolves:
            with torch.inference_mode(False), torch.no_grad():
                twin = twin_of(model)
                assert isinstance(twin, torch.nn.Module)
                tuned = twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stub
        build, cudnn = builder(signature.structure), torch.backends.cudnn

        def run(*args: Any, **kwargs: Any) -> Any:
            if convolves and images:
                tensors = list(_bound(signature, args, kwargs))
                for position in images:
                    tensors[position] = tensors[position].contiguous(memory_format=torch.channels_last)
                args, kwargs = build(tensors)
            before = cudnn.benchmark
            cudnn.benchmark = True
            try:
                return tuned(*args, **kwargs)
            finally:
                cudnn.benchmark = before

        return run
