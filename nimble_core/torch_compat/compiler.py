"""Inductor, Dynamo, Triton and TorchScript: looked up on use, since importing them is slow."""

from __future__ import annotations

from nimble_core.torch_compat.private import private

__all__ = [
    "AUTOTUNER_BENCH",
    "AUTOTUNER_RUN",
    "BENCHMARKER",
    "CODE_COMMENT",
    "COUNTERS",
    "DECOMPOSED",
    "DECOMPOSITIONS",
    "FX_CACHE_SHAPES",
    "GENERATED",
    "GENERATED_CACHE",
    "INDUCTOR_COMPILE",
    "INDUCTOR_CONFIG",
    "INPUT_CODES",
    "JIT_STATE",
    "KERNEL_METADATA",
    "KERNEL_WRITERS",
    "MARKED_STEPS",
    "MODE_OPTIONS",
    "RESET_CODE",
    "TRITON_ANALYSIS",
    "TRITON_RUN",
    "VIRTUALIZED",
]

INDUCTOR_COMPILE = private("torch._inductor:compile", "compile kernels")
INDUCTOR_CONFIG = private("torch._inductor:config", "set options while kernels are compiled")
MODE_OPTIONS = private("torch._inductor:list_mode_options", "measure torch.compile's modes as peers")
_UNEXPLAINED = "host kernels of Inductor are attributed by what they write alone"
VIRTUALIZED = private("torch._inductor.virtualized:V", "write a comment into generated code", _UNEXPLAINED)
KERNEL_METADATA = private(
    "torch._inductor.utils:get_kernel_metadata", "know which nodes a host kernel of Inductor stands for", _UNEXPLAINED
)
CODE_COMMENT = private(
    "torch._inductor.codegen.cpp:CppScheduling.codegen_comment",
    "have Inductor write above host kernels which nodes they stand for",
    _UNEXPLAINED,
)
DECOMPOSITIONS = private(
    "torch._inductor.decomposition:decompositions",
    "take apart interpolation, which autograd hands on by another name than torch.compile sees",
    "interpolation runs in eager's kernels",
)
DECOMPOSED = private("torch._decomp:get_decompositions", "know what interpolation is made of", DECOMPOSITIONS.without)
FX_CACHE_SHAPES = private(
    "torch._inductor.codecache:FxGraphCache._get_shape_env",
    "have Inductor keep on disk what it compiles, though no shape varies",
    "Inductor compiles anew in each process",
)
_AHEAD = "have Triton kernels wait for what they may be launched ahead of"
_NOT_AHEAD = "kernels are not launched ahead of each other's end"
KERNEL_WRITERS = tuple(
    private(f"torch._inductor.codegen.triton:TritonKernel.{name}", _AHEAD, _NOT_AHEAD)
    for name in ("_handle_pdl_before_access", "_filter_pdl", "triton_meta_common")
)
"""What writes how kernels wait, in this order: before an access, after a kernel is written, and its options."""
AUTOTUNER_RUN = private(
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner.run",
    "see Inductor's Triton kernels where they are launched",
    needs="triton",
)
_FORMS = "choose between the forms of a Triton kernel by what they take in a replay"
AUTOTUNER_BENCH = private(
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner.bench",
    _FORMS,
    "Inductor chooses by single launches",
    needs="triton",
)
BENCHMARKER = private(
    "torch._inductor.runtime.triton_heuristics:benchmarker", _FORMS, AUTOTUNER_BENCH.without, needs="triton"
)
TRITON_RUN = private(
    "triton.runtime.jit:JITFunction.run",
    "see a user's Triton kernels where they are launched",
    needs="triton",
)
TRITON_ANALYSIS = private(
    "torch._higher_order_ops:triton_kernel_wrap",
    "know which arguments a Triton kernel writes",
    "each argument counts as read and written",
)
GENERATED_CACHE = private(
    "torch._inductor.codecache:PyCodeCache.modules", "find the modules that Inductor has generated"
)
GENERATED = "torch._inductor.runtime.compile_tasks."
"""What names of generated modules begin with."""

INPUT_CODES = private("torch._dynamo.convert_frame:input_codes", "forget what a peer compiled, and nothing else")
COUNTERS = private("torch._dynamo.utils:counters", "count a peer's graph breaks")
RESET_CODE = private("torch._C._dynamo.eval_frame:reset_code", "forget what a peer compiled, and nothing else")
MARKED_STEPS = private(
    "torch._inductor.cudagraph_trees:MarkStepBox.mark_step_counter", "mark a peer's steps where a process marks any"
)

JIT_STATE = private("torch.jit:_state", "find scripted functions, to have TorchScript optimise them anew")
