"""Our kernel times beside those of torch.profiler and of Nsight Compute (``ncu``), kernel by kernel.

    python -m benchmarks.kernel_times --out benchmarks/results/kernel-times-h200.json

Each model's eager kernels are captured on one stream, so that no two of them share the GPU, and the same graph is
watched three times: by our own observation (CUPTI, told by graph node id), by torch.profiler, and in a process of its
own under ``ncu`` (``gpu__time_duration``, clocks and caches left alone), which runs kernels one at a time. Kernels are
joined by their place in the graph, and names have to agree.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections.abc import Mapping, Sequence
from operator import truediv
from statistics import linear_regression, median, quantiles
from typing import Any

import torch

from benchmarks.common import held, options, write
from benchmarks.models import example
from benchmarks.policies import recorded_on
from nimble_core.autotune.capture_pipeline import capture, observe, schedule_by
from nimble_core.profiling.kernel_names import short_kernel_name
from nimble_core.profiling.machine import environment
from nimble_core.runtime.device import Device, Executable
from nimble_core.tracing.recorded import Recorded, state_kept

MODELS = ("GoogLeNet", "BERT-base 128", "MobileNetV2")
DTYPES = ("float32", "float16")
REPLAYS, NCU_REPLAYS = 11, 3
Timed = tuple[str, float]
"""A kernel's own name, without types, and its duration in nanoseconds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the results file lacks, and print one line for each pair of tools."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        replay_under_a_tool(given.models[0], given.dtypes[0])
        return
    results, stamp = held(given.out), environment("cuda")
    for name, dtype in ((name, dtype) for name in given.models for dtype in given.dtypes):
        key = f"{name}, {dtype}"
        if key not in results["models"]:
            results["models"][key] = one_model(name, dtype)
            write(given.out, results, stamp)
        print(*lines(key, results["models"][key]), sep="\n", flush=True)


def one_model(name: str, dtype: str) -> dict[str, Any]:
    """Compare the tools on one graph: medians of each kernel in ns, and how they agree."""
    device, recorded, executable = captured(name, dtype)
    with state_kept(recorded):
        tools = {"nimble": ours(device, recorded, executable), "torch.profiler": profiled(executable, REPLAYS)}
    executable.close()
    notes = []
    try:
        tools["ncu"] = under_ncu(name, dtype)
    except (OSError, ValueError, subprocess.SubprocessError) as why:  # it may not be on the PATH
        notes.append(f"ncu: {why}")
    return compared(tools) | {"notes": notes}


def captured(name: str, dtype: str) -> tuple[Device, Recorded, Executable]:
    """Capture the model's eager kernels as a graph on one stream."""
    model, args, kwargs = example(name, dtype)
    device, recorded = recorded_on(model, args, kwargs)
    with state_kept(recorded):
        executable = capture(device, recorded, schedule_by(recorded, "single", None, 1))
        executable.replay()
        device.synchronize()
    return device, recorded, executable


def ours(device: Device, recorded: Recorded, executable: Executable) -> list[Timed]:
    """Kernels as this package's own observation times them, in the graph's order."""
    kernels = observe(device, recorded, executable, seconds=1.0).costs.kernels
    return [(one.name, one.duration_ns) for one in kernels if one.name not in ("memcpy", "memset")]


def profiled(executable: Executable, replays: int) -> list[Timed]:
    """Kernels as torch.profiler times them: medians over ``replays``, in the order in which they ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        for _ in range(replays):
            executable.replay()
            torch.cuda.synchronize()
    seen = [
        (event.start_ns(), short_kernel_name(event.name()), float(event.duration_ns()))
        for event in watched.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith(("Memcpy", "Memset"))
    ]
    return medians([(name, ns) for _, name, ns in sorted(seen)], replays)


def under_ncu(name: str, dtype: str) -> list[Timed]:
    """Kernels as Nsight Compute times them in a process of its own, each alone on the GPU.

    Raises:
        ValueError: what it printed holds no kernels, or not the same ones in each replay.
        subprocess.SubprocessError: it failed, or took more than five minutes.
    """
    options = ["--csv", "--print-units", "base", "--graph-profiling", "node", "--profile-from-start", "off"]
    leave = ["--cache-control", "none", "--clock-control", "none", "--metrics", "gpu__time_duration.sum"]
    child = [sys.executable, "-m", "benchmarks.kernel_times", "--child", "--models", name, "--dtypes", dtype]
    done = subprocess.run(["ncu", *options, *leave, *child], check=True, capture_output=True, text=True, timeout=300)
    return medians(durations(done.stdout), NCU_REPLAYS)


def replay_under_a_tool(name: str, dtype: str) -> None:
    """Run under ``ncu``: replays between the marks that it listens to."""
    _, _, executable = captured(name, dtype)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for _ in range(NCU_REPLAYS):
        executable.replay()
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    executable.close()


def durations(printed: str) -> list[Timed]:
    r"""Kernels in what ``ncu --csv`` printed between other lines, in the order in which they ran.

    >>> durations('==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    ...           '"0","void gemm<float>(int)","gpu__time_duration.sum","ns","1,234"\n')
    [('gemm', 1234.0)]
    """
    start = printed.find('"ID"')
    rows = csv.DictReader(io.StringIO(printed[start:])) if start >= 0 else ()
    scale = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}
    times = [row for row in rows if row.get("Metric Name") == "gpu__time_duration.sum"]
    values = (float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]] for row in times)
    return list(zip((short_kernel_name(row["Kernel Name"]) for row in times), values, strict=True))


def medians(seen: Sequence[Timed], replays: int) -> list[Timed]:
    """Each kernel's median over replays that ran one after the other.

    Raises:
        ValueError: the replays did not run the same kernels.

    >>> medians([("a", 1.0), ("b", 5.0), ("a", 3.0), ("b", 5.0)], 2)
    [('a', 2.0), ('b', 5.0)]
    """
    size, rest = divmod(len(seen), replays)
    parts = [seen[at * size : (at + 1) * size] for at in range(replays)]
    if not size or rest or any([name for name, _ in part] != [name for name, _ in parts[0]] for part in parts):
        raise ValueError(f"{len(seen)} kernels were seen, which are not {replays} times the same ones")
    return [(parts[0][at][0], median(part[at][1] for part in parts)) for at in range(size)]


def compared(tools: Mapping[str, Sequence[Timed]]) -> dict[str, Any]:
    """Each kernel with its times, and for every other tool how ours stand to its."""
    mine, against = tools["nimble"], dict[str, Any]()
    kernels: list[dict[str, Any]] = [{"name": name, "nimble": ns} for name, ns in mine]
    for tool, theirs in tools.items():
        if tool == "nimble":
            continue
        against[tool] = {"kernels": len(theirs), "joined": 0}
        if [name for name, _ in mine] == [name for name, _ in theirs]:
            ours_ns, theirs_ns = ([ns for _, ns in of] for of in (mine, theirs))
            line = linear_regression(ours_ns, theirs_ns)
            against[tool] |= {
                "joined": len(mine),
                "sum": sum(ours_ns) / sum(theirs_ns),
                "quartiles": quantiles(map(truediv, ours_ns, theirs_ns), n=4),
                # A tool that waits around each kernel adds a constant.
                "theirs of ours": {"slope": line.slope, "added_ns": line.intercept},
            }
            for kernel, ns in zip(kernels, theirs_ns, strict=True):
                kernel[tool] = ns
    return {"kernels": kernels, "ours over": against}


def lines(key: str, result: Mapping[str, Any]) -> list[str]:
    """Write a line for each other tool, and the notes."""
    said = []
    for tool, found in result["ours over"].items():
        if not found["joined"]:
            said.append(f"{key}: {tool} saw {found['kernels']} kernels, other ones than ours")
            continue
        (low, middle, high), fit = found["quartiles"], found["theirs of ours"]
        each = f"kernel by kernel {middle:.3f} ({low:.3f} to {high:.3f}), {found['joined']} kernels"
        line = f"theirs = {fit['slope']:.3f} ours {fit['added_ns']:+.0f} ns"
        said.append(f"{key}: ours over {tool}: sum {found['sum']:.3f}, {each}; {line}")
    return [*said, *(f"{key}: {note}" for note in result["notes"])]


if __name__ == "__main__":
    main()
