"""Compiled functions, and stand-ins for Triton's launchers and their kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from nimble_core.tracing.kernel_launches import Launch


class Compiled:
    """A function compiled by torch.compile, with what its generated module holds."""

    def __init__(self, function: Callable[..., Any], *args: torch.Tensor) -> None:
        from torch._inductor.codecache import PyCodeCache

        known = {id(module) for module in PyCodeCache.modules}
        torch._dynamo.reset()
        self.eager, self.args = function, args
        # "eager" elsewhere may be found in Inductor's own cache of graphs: then the module is loaded from there.
        with torch.no_grad():
            self.compiled = torch.compile(function)
            self.compiled(*args)
        fresh = [module for module in PyCodeCache.modules if id(module) not in known]
        self.modules: list[ModuleType] = fresh
        (self.module,) = fresh

    def run(self) -> Any:
        with torch.no_grad():
            return self.compiled(*self.args)

    def kernels(self) -> list[str]:
        return [name for name in vars(self.module) if name.startswith("cpp_")]


def work(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x + 1).softmax(-1)
    return (y @ weight).tanh() * 3


class Doing:
    """Notes launches and does them."""

    def __init__(self) -> None:
        self.seen: list[Launch] = []
        self.files: list[str] = []
        self.launching = False

    def __call__(self, launch: Launch, frame: Any) -> Any:
        self.seen.append(launch)
        self.files.append(frame.f_code.co_filename)
        self.launching = True
        try:
            return launch.launch(*launch.args, **launch.kwargs)
        finally:
            self.launching = False

    def apart(self) -> bool:
        return self.launching


class InductorKernel:
    """As Inductor's CachingAutotuner is called by the code it generates."""

    def __init__(self, name: str, arg_names: list[str], mutated: list[str], code: str = "") -> None:
        self.fn = SimpleNamespace(arg_names=arg_names, __name__=name)
        self.inductor_meta = {"kernel_name": name}
        self.mutated_arg_names = mutated
        self.custom_kernel = bool(code)
        self.compile_results = [SimpleNamespace(kernel=SimpleNamespace(asm={"ttir": code}))]
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> str:
        self.runs.append((args, stream, benchmark_run, kwargs))
        return "ran"


class UserKernel:
    """As Triton's JITFunction is launched by ``kernel[grid](...)``."""

    def __init__(self, name: str, arg_names: list[str], code: str = "", does: Callable[..., Any] | None = None) -> None:
        self.fn = SimpleNamespace(__name__=name)
        self.arg_names = arg_names
        self.compiled = SimpleNamespace(asm={"ttir": code})
        self.does = does
        self.runs: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.runs.append((args, grid, warmup, kwargs))
        if self.does is not None:
            self.does(*args)
        return self.compiled


DOUBLE = """\
module {
  tt.func public @double(%source: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("source"(#loc)), %target: !tt.ptr<f32> \
loc("target"(#loc)), %count: i32 loc("count"(#loc))) attributes {noinline = false} {
    %2 = tt.splat %target : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %4 = tt.splat %source : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %6 = tt.extern_elementwise %4 {libname = "", libpath = "", pure = true, symbol = "__nv_asinf"} : (tensor<64xf32>)
    tt.store %3, %6, %1 : tensor<64x!tt.ptr<f32>>
"""


BY_ADDRESS = """\
module {
  tt.func public @by_address(%source: !tt.ptr<f32> loc("source"(#loc)), %address: i64 loc("address"(#loc))) {
    %target = tt.int_to_ptr %address : i64 -> !tt.ptr<f32> loc(#loc7)
    %2 = tt.splat %target : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
"""


BY_TABLE = """\
  tt.func public @by_table(%source: !tt.ptr<f32> loc("source"(#loc)), %table: !tt.ptr<i64> loc("table"(#loc))) {
    %target = tt.load %table : !tt.ptr<i64>
    %target_0 = tt.int_to_ptr %target : i64 -> !tt.ptr<f32>
"""
