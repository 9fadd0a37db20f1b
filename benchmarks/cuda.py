"""CUDA benchmark: eager kernels from one Program, one stream against many, in one run.

    python -m benchmarks.cuda --out benchmarks/results/cuda-h200.json

For every model and dtype: wall time of eager, of one-stream and multi-stream calls and of bare replays, interleaved,
each after an untimed run of the same, with quartiles; synchronisations full, MEG, planned, emitted; critical path;
preparation by step; equality with eager on fresh inputs. Then what a call costs beyond replay and copies. Results are
written after each model, and a model that the file holds already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo import CASES, ZOO, load
from nimble_core.algorithms.critical_path import critical_path
from nimble_core.api.nimble import Nimble
from nimble_core.autotune.capture_pipeline import capture, device_for, observe, schedule_by
from nimble_core.ir.call_graph import predecessors
from nimble_core.ir.measurement import Measurement, interleave, quantile, ratio
from nimble_core.profiling.machine import environment, finish
from nimble_core.scheduling.options import Options
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorded import Stopwatch, check_inputs, record_static, state_kept
from nimble_core.tracing.static_check import other_values
from nimble_core.validation.equality import check_equality

TARGETS = {"NASNet-A large": 2.0, "HRNet-W18": 2.2, "GoogLeNet": 1.8, "Inception-v3": 1.5}
CALL_BUDGET_US = 10.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(ZOO), choices=list(ZOO), metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time for each model and dtype")
    given = parser.parse_args(argv)
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    stamp = environment("cuda")
    results.setdefault("models", {})
    for name in given.models:
        for dtype in CASES:
            key = f"{name}, {dtype}"
            if key not in results["models"]:
                results["models"][key] = one_model(name, dtype, given.seconds)
                print(row(key, results["models"][key]), flush=True)
                write(given.out, results, stamp)
    if "call cost" not in results:
        results["call cost"] = call_cost()
        write(given.out, results, stamp)
    for line in results["call cost"]:
        print(f"call of {line['case']}: {line['extra_us']:+.1f} µs beyond replay and copies")


def write(path: Path, results: dict[str, Any], stamp: Any) -> None:
    """Write the results with their environment."""
    results["environment"] = asdict(finish(stamp))
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def options_of_rows(about: str | None, models: Sequence[str]) -> argparse.ArgumentParser:
    """Options of what measures each row in a process of its own, which is called with ``--child``."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(models), metavar="MODEL")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def rows_held(path: Path) -> dict[str, Any]:
    """Results that the file holds; none where there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    return found


def fill_rows(
    path: Path, module: str, wanted: Mapping[str, Sequence[str]], line: Callable[[str, dict[str, Any]], str]
) -> None:
    """Measure the rows that the file lacks, by key ``module``'s options for each; print a line for every one."""
    results, stamp = rows_held(path), environment("cuda")
    for key, options in wanted.items():
        if key not in results["rows"]:
            results["rows"][key] = in_a_process(module, *options)
            write(path, results, stamp)
        print(line(key, results["rows"][key]), flush=True)


def in_a_process(module: str, *options: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``python -m module --child --out FILE`` and ``options`` writes, with further environment variables.

    Raises CalledProcessError where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, "-m", module, "--child", "--out", str(out), *options]
        try:
            environ = {**os.environ, **(variables or {})}
            subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def one_model(name: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Everything about one model in one dtype, batch 1."""
    model, args, kwargs = load(name, dtype)
    with torch.inference_mode():
        model(*args, **kwargs)
    signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)

    start = time.perf_counter()
    net = Nimble(model, Options(tune="off")).prepare(*args, **kwargs)
    prepare_s = time.perf_counter() - start
    prepare_steps = dict(net.engines[0].seconds)
    net.close()

    recorded = record_static(device, model, signature, strict=True, step=Stopwatch())
    with state_kept(recorded):
        single = capture(device, recorded, schedule_by(recorded, "single", None, 1))
        costs = observe(device, recorded, single).costs
        multi = capture(device, recorded, schedule_by(recorded, "nimble", costs, None))
        build = builder(recorded.recording.output_structure)

        def eager() -> object:
            with torch.inference_mode():
                return model(*args, **kwargs)

        taken = interleave(
            {
                "eager": eager,
                "single call": lambda: build(single.run(signature.tensors)),
                "multi call": lambda: build(multi.run(signature.tensors)),
                "single replay": single.replay,
                "multi replay": multi.replay,
            },
            clock_ns=device.clock_ns,
            synchronize=device.synchronize,
            rounds=200,
            budget_s=seconds,
            rehearse=True,
        )
        cases = []
        for seed in (1, 2):
            inputs = other_values(signature.tensors, seed)
            again, named = builder(signature.structure)(inputs)
            with torch.no_grad():
                cases.append((inputs, [out.clone() for out in flatten(model(*again, **named))[0]]))
        checks = [check_equality(one.schedule.policy, one.run, cases) for one in (single, multi)]
        path_ns, _ = critical_path(predecessors(recorded.graph, meg=True), costs.ns)
        result = {
            "calls": recorded.graph.size,
            "nodes": len(multi.raw.nodes),
            "edges": len(recorded.graph.edges),
            "meg edges": len(recorded.graph.meg),
            "streams": multi.schedule.streams,
            "syncs": asdict(multi.counts),
            "kernels seen": costs.seen,
            "kernels expected": costs.expected,
            "sum of kernels us": costs.total_ns / 1e3,
            "critical path us": path_ns / 1e3,
            "distance to critical path": taken["multi replay"].median_ns / path_ns if path_ns else None,
            "memory bytes": {"single": single.nbytes, "multi": multi.nbytes},
            "times": {key: figures(one) for key, one in taken.items()},
            "ratios": {
                "multi over single, replay": asdict(ratio(taken["multi replay"], taken["single replay"])),
                "multi over single, call": asdict(ratio(taken["multi call"], taken["single call"])),
                "single over eager, call": asdict(ratio(taken["single call"], taken["eager"])),
                "multi over eager, call": asdict(ratio(taken["multi call"], taken["eager"])),
            },
            "equality": [asdict(check) for check in checks],
            "prepare s": prepare_s,
            "prepare steps s": prepare_steps,
        }
        single.close()
        multi.close()
    return result


def figures(one: Measurement) -> dict[str, Any]:
    """Median and quartiles in µs, number of samples, and why to doubt them."""
    return {
        "median us": one.median_ns / 1e3,
        "quartiles us": [quantile(one.samples_ns, 0.25) / 1e3, quantile(one.samples_ns, 0.75) / 1e3],
        "samples": len(one.samples_ns),
        "warnings": list(one.warnings),
    }


def row(key: str, result: dict[str, Any]) -> str:
    """One line for the terminal."""
    times, ratios = result["times"], result["ratios"]
    target = TARGETS.get(key.split(", ")[0])
    speed = ratios["multi over single, replay"]["value"]
    wanted = f" (wanted {target}x: {'met' if speed >= target else 'missed'})" if target else ""
    return (
        f"{key:26} eager {times['eager']['median us']:8.0f}  single {times['single replay']['median us']:7.0f}  "
        f"multi {times['multi replay']['median us']:7.0f} µs  multi/single {speed:.2f}x{wanted}  "
        f"multi/eager {ratios['multi over eager, call']['value']:.2f}x  streams {result['streams']}  "
        f"syncs {result['syncs']['planned']} planned {result['syncs']['emitted']} emitted  "
        f"prepare {result['prepare s']:.2f} s  equal {all(check['passed'] for check in result['equality'])}"
    )


def call_cost(rounds: int = 400) -> list[dict[str, Any]]:
    """What a call costs beyond bare replay and copies, for one to four inputs and outputs, interleaved."""
    lines = []
    for count in (1, 2, 4):
        tensors = [torch.randn(1, 64, device="cuda") for _ in range(count)]

        def several(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(one * 2 + 1 for one in given)

        lines.append(_extra(f"{count} tensors in, {count} out", several, tuple(tensors), {}, rounds))
    model, args, kwargs = load("BERT-base 128", "float16")
    lines.append(_extra("BERT-base 128, float16 (Hugging Face output)", model, args, kwargs, rounds))
    model, args, kwargs = load("ResNet-50", "float16")
    lines.append(_extra("ResNet-50, float16", model, args, kwargs, rounds))
    return lines


def _extra(case: str, model: Any, args: Any, kwargs: Any, rounds: int) -> dict[str, Any]:
    net = Nimble(model, Options(policy="single", tune="off")).prepare(*args, **kwargs)
    executable: Any = net.engines[0].executable
    given = net.engines[0].signature.tensors
    buffers, outputs, graph = executable.buffers, executable.outputs, executable.graph

    def bare() -> object:
        torch._foreach_copy_(buffers, given)
        graph.replay()
        return [output.clone() for output in outputs]

    with torch.no_grad():
        taken = interleave(
            {"call": lambda: net(*args, **kwargs), "bare": bare},
            clock_ns=time.perf_counter_ns,
            synchronize=torch.cuda.synchronize,
            warmup=20,
            rounds=rounds,
        )
    net.close()
    extra = (taken["call"].median_ns - taken["bare"].median_ns) / 1e3
    return {
        "case": case,
        "extra_us": extra,
        "call": figures(taken["call"]),
        "bare": figures(taken["bare"]),
        "within budget": extra <= CALL_BUDGET_US,
    }


if __name__ == "__main__":
    main()
