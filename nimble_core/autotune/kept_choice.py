"""What a choice is made among, what it depends on, and what of it can be compiled ahead."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from nimble_core.autotune.budget import Budget, compile_s
from nimble_core.autotune.disk_cache import choice_key, recall, remember
from nimble_core.compiler.pipeline import compile_ahead
from nimble_core.ir.program import Fuse, KernelChoice, Program
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.device import Device
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.saved_plan import Plan, fingerprint, make_plan
from nimble_core.tracing.recorded import Recorded
from nimble_core.utils.locks import capturing
from nimble_core.utils.version import __version__

__all__ = ["compile_for_tuning", "keep", "kept_plan", "kinds_of"]

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}
_ALIGNED = 8
"""Sizes that are multiples of this need no padding in any type."""


def kinds_of(device: Device, options: Options) -> tuple[Fuse, ...]:
    """Return whose kernels to try, in the order of what they cost to make."""
    if options.fuse != "auto":
        return (options.fuse,)
    # On the host eager's kernels are the libraries' already, and a compiler takes longer than it saves.
    return ("none", "library", "inductor") if device.kind == "cuda" and options.tune != "off" else ("none",)


def _key(device: Device, recorded: Recorded, options: Options) -> str:
    """Return what the choice depends on, for those who choose again."""
    cudnn: Any = torch.backends.cudnn
    names = ("fuse", "policy", "tune", "budget_s", "max_streams", "memory_limit")
    conditions = {name: getattr(options, name) for name in names}
    conditions |= {
        "device": device.name,
        "torch": str(torch.__version__),
        "nimble": __version__,
        "matmul": torch.get_float32_matmul_precision(),
        "copied out": recorded.copied_out,
        "copied in": recorded.copied_in,
        "convolution": (cudnn.conv.fp32_precision, cudnn.deterministic),
    }
    return choice_key(fingerprint(recorded.recording.program, recorded.graph), conditions)


def kept_plan(device: Device, recorded: Recorded, options: Options) -> Plan | None:
    """Return what an earlier process chose; None if none did, or if the options leave no choice."""
    return recall(_key(device, recorded, options)) if _chooses(options) else None


def keep(device: Device, recorded: Recorded, options: Options, chosen: Recorded, schedule: Schedule) -> None:
    """Keep a choice for later processes, if the options left one."""
    if _chooses(options):
        plan = make_plan(chosen.recording.program, chosen.graph, schedule)
        remember(_key(device, recorded, options), replace(plan, shown=chosen.kernels))


def _chooses(options: Options) -> bool:
    return options.policy == "auto" and options.tune != "off"


def compile_for_tuning(device: Device, recorded: Recorded, options: Options) -> tuple[KernelChoice, ...] | None:
    """Compile what ``tune`` would compile, for Inductor's cache on disk; runs no model and captures nothing.

    Not for ``tune="full"``, which has Inductor time each kernel.

    Returns:
        For ``tune``; None if it would compile nothing, or what draws random numbers.

    Raises:
        CaptureError: it cannot be rewritten or compiled.
    """
    if recorded.recording.draws or recorded.recording.generators:
        return None
    plan = kept_plan(device, recorded, options)
    budget, expected_s = Budget(options.budget_s), compile_s(recorded.recording.program)
    wanted = plan.fuse == "inductor" if plan else "inductor" in kinds_of(device, options)
    if not wanted or (plan is None and options.fuse == "auto" and expected_s > budget.left_s):
        return None
    # Timing waits for the device, which CUDA forbids while another thread captures.
    times = device.kind == "cuda" and _may_be_padded(recorded.recording.program)
    with capturing if times else nullcontext():
        return compile_ahead(device, recorded, plan.kernels if plan else None)


def _may_be_padded(program: Program) -> bool:
    """Return whether Inductor may time products while it compiles, as they are and padded: those of odd sizes."""
    products = (call for call in program.calls if call.label in _PRODUCTS)
    refs = (access.ref for call in products for access in call.accesses)
    return any(size > 1 and size % _ALIGNED for ref in refs for size in ref.sizes[-2:])
