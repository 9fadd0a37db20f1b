"""The environment stamp: asks the machine what it is. Best effort: what cannot be learnt stays empty.

GPU facts come from NVML, through ``nvidia-ml-py``. Importing this module does not import it.
"""

from __future__ import annotations

import importlib
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from nimble_core.ir.environment import Environment

__all__ = [
    "GpuFacts",
    "cpu_name",
    "environment",
    "finish",
    "gpu_facts",
    "interruptions",
    "others_running",
    "read_nvml",
    "throttle_reasons",
]

T = TypeVar("T")
D = TypeVar("D")

# Bits of nvmlClocksEventReasons that mean "slower than asked"; idling and clocks that the user fixed are left out.
_THROTTLE_BITS = (
    (0x04, "software power cap"),
    (0x08, "hardware slowdown"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "hardware power brake"),
)

_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_VARIABLES_PRESENCE = ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the driver says about one GPU now; fields are empty or None where it does not say."""

    driver: str = ""
    sm_clock_mhz: int | None = None
    throttling: tuple[str, ...] = ()
    processes: tuple[int, ...] | None = None


def environment(device: str) -> Environment:
    """Make the stamp for results measured on ``device`` (``"cuda"`` or ``"cpu"``), taken before measuring.

    Never raises. Without a GPU it takes a few milliseconds once torch is imported.
    """
    import torch

    cpu = cpu_name()
    on_gpu = device == "cuda"
    facts = gpu_facts(_uuid(torch)) if on_gpu else GpuFacts()
    return Environment(
        device=device,
        device_name=_attempt(lambda: str(torch.cuda.get_device_name()), "unknown GPU") if on_gpu else cpu,
        host_cpu=cpu,
        cores=_attempt(lambda: len(os.sched_getaffinity(0)), os.cpu_count() or 1),
        threads=_attempt(torch.get_num_threads, 0),
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        driver=facts.driver,
        cuda=str(torch.version.cuda or ""),
        sm_clock_mhz=() if facts.sm_clock_mhz is None else (facts.sm_clock_mhz,),
        throttling=facts.throttling,
        other_processes=_others(facts.processes, holds_context=_attempt(torch.cuda.is_initialized, False)),
        load=_attempt(lambda: round(os.getloadavg()[0], 2), -1.0),
        settings=_settings(torch, device),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def finish(before: Environment, running: Sequence[int] = ()) -> Environment:
    """Add to ``before`` what was seen while measuring: others that ran, GPU clock, throttling.

    Args:
        before: the stamp taken before.
        running: readings of ``others_running`` in between.

    Never raises.
    """
    if running:
        before = replace(before, others=round(sum(running) / len(running), 2))
    if before.device != "cuda":
        return before
    import torch

    facts = gpu_facts(_uuid(torch))
    after = () if facts.sm_clock_mhz is None else (facts.sm_clock_mhz,)
    return replace(
        before,
        sm_clock_mhz=(*before.sm_clock_mhz[:1], *after),
        throttling=tuple(dict.fromkeys((*before.throttling, *facts.throttling))),
    )


def interruptions() -> int:
    """Count how often another program took a core from this process; 0 where nobody counts."""
    try:
        import resource
    except ImportError:  # not on every system
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def others_running() -> int | None:
    """Count threads of other programs that run or wait for a core now; None where unknown."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        tasks = [Path(task.path, "stat").read_text() for task in os.scandir("/proc/self/task")]
    except (OSError, ValueError, IndexError):
        return None
    own = sum(task.rpartition(")")[2].split()[:1] == ["R"] for task in tasks)
    return max(running - own, 0)


def cpu_name(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return the model name of the host's CPU; its architecture where the system does not tell."""
    with suppress(OSError):
        for line in Path(cpuinfo).read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.machine() or "unknown CPU"


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Name those of NVML's clock event bits that slow the GPU down.

    >>> throttle_reasons(0x1 | 0x4 | 0x40)
    ('software power cap', 'hardware thermal slowdown')
    """
    return tuple(name for bit, name in _THROTTLE_BITS if bits & bit)


def gpu_facts(uuid: str = "") -> GpuFacts:
    """Return driver, SM clock, throttling and processes of a GPU, the first one if ``uuid`` is empty."""
    return _attempt(lambda: read_nvml(uuid), GpuFacts())


def read_nvml(uuid: str) -> GpuFacts:
    """Ask NVML. Raises whatever it raises where ``nvidia-ml-py`` or a driver is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else nvml.nvmlDeviceGetHandleByIndex(0)
        reasons = getattr(
            nvml, "nvmlDeviceGetCurrentClocksEventReasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )
        driver = nvml.nvmlSystemGetDriverVersion()
        return GpuFacts(
            driver=driver.decode() if isinstance(driver, bytes) else str(driver),
            sm_clock_mhz=_attempt(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), None),
            throttling=_attempt(lambda: throttle_reasons(int(reasons(handle))), ()),
            processes=_attempt(
                lambda: tuple(int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)), None
            ),
        )
    finally:
        nvml.nvmlShutdown()


def _others(processes: Iterable[int] | None, *, holds_context: bool) -> int | None:
    """Count the processes other than this one.

    In a container the driver's process ids are not ours, and the list may be empty though we are on the GPU: then it
    says nothing. Where ids do not match, one of them is taken to be this process.
    """
    if processes is None:
        return None
    listed = set(processes)
    if not holds_context:
        return len(listed - {os.getpid()})
    return len(listed) - 1 if listed else None


def _uuid(torch: Any) -> str:
    """Return the UUID of torch's current GPU: the driver may number devices otherwise."""
    return _attempt(lambda: f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}", "")


def _settings(torch: Any, device: str) -> tuple[tuple[str, str], ...]:
    asked: dict[str, Callable[[], object]] = {
        "autocast": lambda: (
            str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else False
        ),
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
        "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "grad_enabled": torch.is_grad_enabled,
        "matmul.allow_fp16_reduced_precision_reduction": lambda: (
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: str(value) for name, ask in asked.items() if (value := _attempt(ask, None)) is not None}
    found |= {f"env.{name}": os.environ[name] for name in _VARIABLES if name in os.environ}
    found |= {f"env.{name}": "set" for name in _VARIABLES_PRESENCE if name in os.environ}
    return tuple(sorted(found.items()))


def _attempt(ask: Callable[[], T], otherwise: D) -> T | D:
    """Return what ``ask`` returns, or ``otherwise`` if it raises: a stamp must not stop a measurement."""
    try:
        return ask()
    except Exception:
        return otherwise
