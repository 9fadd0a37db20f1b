"""``python -m nimble_viz doctor``: what works on this machine, tried out, and what to do about what does not."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nimble_core import __version__
from nimble_core.utils.errors import DeviceError, first_line
from nimble_core.utils.files import cache_directory

if TYPE_CHECKING:
    from nimble_core.torch_compat.private import Private

__all__ = ["Diagnosis", "Finding", "examine"]

State = Literal["works", "fallback", "off", "broken"]
_Answer = tuple[State, str, str]
"""State, why, and what to do."""

_TIMEOUT_S = 10
_INTERNALS = "Torch's internals"
_INSTALL = 'pip install --upgrade nimble-viz; on a GPU "nimble-viz[cuda13]" (or [cuda12])'
"""What to do about a feature whose check raised."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Feature; ``"fallback"``: something else is done, ``"off"``: not there, ``"broken"``: needed, but not working."""

    group: str
    feature: str
    state: State
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings on one machine, and one for each private name of torch that is used."""

    findings: tuple[Finding, ...]
    internals: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return 1 if something that is needed is broken, else 0."""
        return int(any(one.state == "broken" for one in (*self.findings, *self.internals)))

    @property
    def verdict(self) -> str:
        """Sum up in one sentence."""
        counts = Counter(one.state for one in self.findings)
        broken = ", ".join(one.feature for one in (*self.findings, *self.internals) if one.state == "broken")
        rest = f"{counts['works']} features work, {counts['fallback']} with a fallback, {counts['off']} off"
        return f"Broken: {broken}; {rest}." if broken else f"Ready: {rest}."

    def to_json(self) -> str:
        """Return all of it as JSON, with a line break at the end."""
        found = {
            "nimble_viz": __version__,
            "python": platform.python_version(),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "findings": [asdict(one) for one in self.findings],
            "internals": [asdict(one) for one in self.internals],
        }
        return json.dumps(found, indent=2) + "\n"

    def to_text(self) -> str:
        """Return lines of text: of torch's internals those that are missing, and one line for all others."""
        lines = [self.verdict]
        fine = sum(one.state == "works" for one in self.internals)
        missing = [one for one in self.internals if one.state in ("fallback", "broken")]
        counted = [Finding(_INTERNALS, "private names", "works", f"{fine} found; --json lists them")] * bool(fine)
        shown = (*self.findings, *counted, *missing)
        for group in dict.fromkeys(one.group for one in shown):
            lines += ["", group]
            for one in shown:
                if one.group == group:
                    lines.append(f"  {one.state:<8}  {one.feature}: {one.why}")
                    lines += [f"            -> {one.fix}"] * bool(one.fix)
        return "\n".join(lines) + "\n"


class _Machine:
    """Hold what several checks look at; each part is made when a check first asks for it."""

    @cached_property
    def torch(self) -> Any:
        """Import torch."""
        return import_module("torch")

    @cached_property
    def prepared(self) -> tuple[Any, Any, Any]:
        """Prepare a model of two branches, on the GPU if there is one; return it, the model and an input."""
        from nimble_core.api.nimble import Nimble
        from nimble_core.scheduling.options import Options

        torch = self.torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        weights = [torch.full((8, 8), value, device=device) for value in (0.1, -0.2, 0.3)]

        def branches(x: Any) -> Any:
            x = torch.relu(x @ weights[0])
            return torch.sigmoid(x @ weights[1]) + torch.tanh(x @ weights[2])

        x = torch.linspace(-1.0, 1.0, 32, device=device).reshape(4, 8)
        return Nimble(branches, Options(policy="nimble", tune="off", fuse="none")).prepare(x), branches, x

    @cached_property
    def observed(self) -> Any:
        """Watch a few of its replays."""
        from nimble_core.autotune.capture_pipeline import device_for, observe

        net, _, x = self.prepared
        engine = net.engines[0]
        return observe(device_for(x.device), engine.recorded, engine.executable, seconds=0.05)

    def close(self) -> None:
        """Free the prepared model, if a check made it."""
        made = self.__dict__.get("prepared")
        if made is not None:
            made[0].close()


def _works(why: str) -> _Answer:
    return "works", why, ""


def _torch(on: _Machine) -> _Answer:
    cuda = f"CUDA {on.torch.version.cuda}" if on.torch.version.cuda else "without CUDA"
    return _works(f"{on.torch.__version__}, {cuda}")


def _gpu(on: _Machine) -> _Answer:
    from nimble_core.profiling.machine import cpu_name, gpu_facts

    torch = on.torch
    facts = gpu_facts()
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        more = f", the first of {count}" if count > 1 else ""
        share = torch.cuda.get_device_properties(0).total_memory / 2**30
        return _works(f"{torch.cuda.get_device_name(0)}, {share:.0f} GiB, driver {facts.driver or 'unknown'}{more}")
    host = f"models run on the host, {cpu_name()}"
    if torch.version.cuda is None and facts.driver:
        fix = "a build of torch for CUDA: https://pytorch.org/get-started/locally"
        return "fallback", f"there is a GPU, but this torch was built without CUDA: {host}", fix
    if torch.version.cuda is None:
        return "fallback", f"no NVIDIA driver was found: {host}", ""
    try:
        torch.cuda.init()
    except Exception as error:
        return "fallback", f"{first_line(error)}: {host}", "a driver as new as this torch's CUDA; see nvidia-smi"
    return "fallback", f"torch sees no GPU: {host}", "CUDA_VISIBLE_DEVICES, if it is set"


def _replay(on: _Machine) -> _Answer:
    """Prepare a small model of two branches, replay it and compare it with eager."""
    net, model, x = on.prepared
    with on.torch.no_grad():
        if not on.torch.allclose(net(x), model(x), atol=1e-3):
            return "off", "the replay of a small model is not what eager computes", "please report this"
    engine = net.engines[0]
    where = "on the GPU, as a CUDA graph" if x.is_cuda else "on the host, call by call"
    streams = engine.schedule.streams
    of = f"{streams} streams" if streams > 1 else "one stream"
    return _works(f"a model was prepared and replayed {where}, on {of}: equal to eager")


def _checks(on: _Machine) -> _Answer:
    from nimble_core.torch_compat import unchanged

    if unchanged.passes() is not unchanged.InPython:
        return _works("each call looks through parameters and modules in a compiled pass")
    why = "each call looks through parameters and modules in Python, which takes up to three times as long"
    return "fallback", why, "apt install g++ python3-dev"


def _profiler(on: _Machine) -> _Answer:
    from nimble_viz.collect.iterations import profile_eager

    torch = on.torch
    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(2, device=device)
    try:
        trace = profile_eager(x.sum, device=device, synchronize=getattr(torch, device).synchronize)
    except DeviceError as error:
        return "fallback", f"{error.what}: overhead per call is not measured beside it", error.fix
    if not any(event.name == "aten::sum" for event in trace.operators):
        return "off", "the profiler saw nothing: overhead per call is not measured", "an official build of torch"
    if device == "cuda" and not trace.kernels:
        return "fallback", "the profiler sees the host alone, no kernels", "a build of torch with CUPTI"
    return _works(f"torch.profiler, events of the host{' and the GPU' * (device == 'cuda')}")


def _timeline(on: _Machine) -> _Answer:
    if not on.torch.cuda.is_available():
        seen = on.observed
        return _works(f"{len(seen.timeline.spans)} of {seen.costs.expected} calls timed by the host clock")
    from nimble_core.profiling import cupti

    if cupti.attached_tool():
        return "fallback", f"{cupti.unavailable()}: replayed kernels have no times", "run this without the tool"
    try:
        import_module("cupti.cupti")
    except Exception as error:
        older = str(on.torch.version.cuda).startswith("12")
        fix = 'pip install "nimble-viz[cuda13]"' if not older else "see docs/dependencies.md, cuda12"
        why = f"cupti-python: {first_line(error)}: replayed kernels have no times, plans are chosen by whole replays"
        return "fallback", why, fix
    seen = on.observed
    found = f"CUPTI saw {seen.costs.seen} of {seen.costs.expected} replayed nodes, call by call"
    if seen.timeline.reliable:
        return _works(found)
    return "fallback", f"{found}: {seen.timeline.note}", "no other profiler in the same process"


def _graphs(on: _Machine) -> _Answer:
    if not on.torch.cuda.is_available():
        return "off", "no GPU: a host replay has no graph to read", ""
    import_module("cuda.bindings.driver")
    counts = on.prepared[0].engines[0].executable.counts
    return _works(f"{_named('cuda-bindings')}; a captured graph was read: {counts.emitted} waits in it")


def _stamp(on: _Machine) -> _Answer:
    from nimble_core.profiling.machine import read_nvml

    if not on.torch.cuda.is_available():
        return _works("processor, cores and load of the host")
    try:
        read_nvml("")
    except Exception as error:
        why = f"NVML: {first_line(error)}: no clocks, throttling and driver in reports"
        return "off", why, "pip install nvidia-ml-py"
    return _works("clocks, throttling and processes from NVML")


def _nvtx(on: _Machine) -> _Answer:
    nvtx = import_module("nvtx")
    found = _named("nvtx")
    if os.environ.get("NIMBLE_NVTX") == "0":
        return "off", f"{found}; NIMBLE_NVTX=0", "unset NIMBLE_NVTX"
    if not nvtx.enabled():
        return "off", f"{found}; NVTX_DISABLE is set", "unset NVTX_DISABLE"
    from nimble_core.profiling.nvtx import listener

    if os.environ.get("NVTX_INJECTION64_PATH") and not listener():
        return "off", f"{found} does not hear the tool that is attached: no ranges", "Nsight Systems after 2024.2"
    heard = "a tool listens: ranges are drawn" if listener() else "no tool listens, so that ranges cost nothing"
    try:
        import_module("numpy")
    except ImportError:
        return "fallback", f"{found}; {heard}; without numpy a range holds its call alone", "pip install numpy"
    return _works(f"{found}; {heard}")


def _nsys(on: _Machine) -> _Answer:
    program = shutil.which("nsys")
    if program is None:
        return "off", "nsys is not on the PATH: ranges have no viewer here", "see docs/nsight.md"
    return _works(_said([program, "--version"]) or "nsys")


def _kernels(on: _Machine) -> _Answer:
    if not on.torch.cuda.is_available():
        compiler = _program(os.environ.get("CXX", ""), "g++", "clang++")
        if compiler:
            return _works(f"Inductor with {compiler}; on the host only if asked for: fuse='inductor'")
        return "off", "no C++ compiler; the host keeps eager's kernels unless asked otherwise", "apt install g++"
    compiler = _program(os.environ.get("CC", ""), "gcc", "clang")
    try:
        import_module("triton")
    except ImportError:
        return "fallback", "triton is not installed: fuse='library' at most", "pip install triton"
    if not compiler:
        return "fallback", "triton needs a C compiler to start kernels: fuse='library' at most", "apt install gcc g++"
    found = f"{_named('triton')} with {compiler}"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "fallback", f"{found}; Python.h is missing, which triton's launcher includes", "apt install python3-dev"
    return _works(found)


def _program(*names: str) -> str:
    """Return the first of these programs that is installed; empty if none is."""
    return next((Path(found).name for name in names if name and (found := shutil.which(name))), "")


def _memory(on: _Machine) -> _Answer:
    torch = on.torch
    if not torch.cuda.is_available():
        return _works("results lie in one arena, planned ahead")
    from nimble_core.runtime.cuda.memory import places_memory

    backend = torch.cuda.get_allocator_backend()
    if not places_memory():
        why = f"torch's allocator is {backend!r}, whose blocks cannot be placed: each stream reuses its own memory"
        return "fallback", why, "unset PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) backend"
    if torch._C._cuda_isHistoryEnabled():
        why = "the allocator's history is being recorded by someone else: workspaces are planned apart"
        return "fallback", why, "torch.cuda.memory._record_memory_history(enabled=None)"
    planned = on.prepared[0].engines[0].executable.memory
    if planned is None:
        return "fallback", "a small model's memory was not planned: each stream reuses its own", ""
    return _works("the allocator's history is read, and results lie in one arena, planned ahead")


def _plans(on: _Machine) -> _Answer:
    place = cache_directory()
    above = next((one for one in (place, *place.parents) if one.exists()), place)
    if above.is_dir() and os.access(above, os.W_OK):
        kept = sum(1 for _ in place.glob("*.json")) if place.is_dir() else 0
        return _works(f"{kept} plan{'' if kept == 1 else 's'} in {place}")
    return "off", f"{place} cannot be written: each process tunes anew", "set NIMBLE_CACHE_DIR to a folder of yours"


def _notebook(on: _Machine) -> _Answer:
    if find_spec("ipykernel") is None:
        return "off", "ipykernel is not installed: reports show in the terminal and as HTML", "pip install jupyterlab"
    return _works(f"reports show themselves: {_named('ipykernel')}")


def _dot(on: _Machine) -> _Answer:
    import_module("graphviz")
    program = shutil.which("dot")
    if program is None:
        why = "the program dot is not on the PATH: DOT text can be written but not drawn, the viewer lays out by itself"
        return "fallback", why, "apt install graphviz, or brew install graphviz"
    drawn = _said([program, "-Tsvg"], "digraph { a -> b }")
    if "</svg>" not in drawn:
        return "fallback", f"{program} drew nothing", f"{program} -c, or install graphviz again"
    return _works(f"{_named('graphviz')}, {program}")


def _package(module: str, use: str, on: _Machine, *, without: str = "") -> _Answer:
    """Import a module and say its ``use``, or what is done ``without`` it until the extra ``export`` installs it."""
    name = module.partition(".")[0]
    try:
        import_module(module)
    except ImportError:
        if not without:
            raise
        return "fallback", f"the package {name} is not there: {without}", 'pip install "nimble-viz[export]"'
    return _works(f"{use}: {_named(name)}")


CHECKS: tuple[tuple[str, str, bool, Callable[[_Machine], _Answer]], ...] = (
    ("Running", "torch", True, _torch),
    ("Running", "GPU and driver", False, _gpu),
    ("Running", "replay", True, _replay),
    ("Running", "checks of calls", False, _checks),
    ("Running", "report files", True, partial(_package, "msgspec", "*.nimble is written, and read without torch")),
    ("Running", "terminal", True, partial(_package, "rich", "reports as text")),
    ("Measuring", "eager profile", False, _profiler),
    ("Measuring", "replay timeline", False, _timeline),
    ("Measuring", "captured graph", False, _graphs),
    ("Measuring", "environment stamp", False, _stamp),
    ("Measuring", "NVTX ranges", False, _nvtx),
    ("Measuring", "Nsight Systems", False, _nsys),
    ("Kernels and memory", "compiled kernels", False, _kernels),
    ("Kernels and memory", "planned memory", False, _memory),
    ("Kernels and memory", "kept plans", False, _plans),
    ("Seeing", "notebook", False, _notebook),
    ("Seeing", "widgets", False, partial(_package, "anywidget", "report.dashboard()")),
    ("Seeing", "statistics", False, partial(_package, "plotly.graph_objects", "report.figure()")),
    ("Seeing", "graphviz dot", False, _dot),
    ("Handing on", "data frames", False, partial(_package, "pandas", "report.to_dataframe()", without="export CSV")),
    ("Handing on", "networkx", False, partial(_package, "networkx", "report.graph.to_networkx()")),
)
"""Group, feature, whether nothing works without it, and how to find out."""


def _named(distribution: str) -> str:
    """Return ``"rich 14.0.0"``, or the name alone if no version is known."""
    try:
        return f"{distribution} {version(distribution)}"
    except Exception:
        return distribution


def _said(command: Sequence[str], given: str = "") -> str:
    """Return what a program prints; empty if it fails."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def examine() -> Diagnosis:
    """Try every feature out, which takes seconds, most of them torch's import; never raises."""
    findings: list[Finding] = []
    machine = _Machine()
    for group, feature, needed, check in CHECKS:
        fix = _INSTALL
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                state, why, fix = check(machine)
            except KeyboardInterrupt:
                raise
            except ModuleNotFoundError as error:
                package = (error.name or "?").partition(".")[0]
                state, why = "off", f"the package {package} is not installed"
            except BaseException as error:  # SystemExit too: a broken package may raise anything on import
                state, why = "off", f"{type(error).__name__}: {first_line(error)}"
        if needed and state == "off":
            state = "broken"
        findings.append(Finding(group, feature, state, why, fix))
    with suppress(Exception):
        machine.close()
    return Diagnosis(tuple(findings), _internals())


def _internals() -> tuple[Finding, ...]:
    """Look for each private name of torch that is used; return none if torch itself is broken."""
    try:
        from nimble_core.torch_compat.private import all_entries

        return tuple(_internal(entry) for entry in all_entries())
    except KeyboardInterrupt:
        raise
    except BaseException:  # a broken torch may raise anything on import
        return ()


def _internal(entry: Private) -> Finding:
    from nimble_core.torch_compat.private import REMEDY

    name = entry.name.replace(":", ".")
    why = f"missing, needed to {entry.purpose}" if entry.essential else f"missing: {entry.without}"
    try:
        if entry.find() is not None:
            return Finding(_INTERNALS, name, "works", f"{entry.purpose}; checked on {', '.join(entry.checked)}")
    except Exception as error:  # a module of torch's that fails to import
        why = f"{type(error).__name__}: {first_line(error)}"
    else:
        if not entry.expected:
            return Finding(_INTERNALS, name, "off", f"this torch has no {entry.needs}")
    return Finding(_INTERNALS, name, "broken" if entry.essential else "fallback", why, REMEDY * entry.essential)
