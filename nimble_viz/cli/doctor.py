"""``python -m nimble_viz doctor``: what works on this machine, what is done instead where something does not, and why.

Each feature is tried out, not looked up: a model is prepared and replayed, the replays are watched, a dot is drawn.
Whatever is missing or broken becomes a finding; nothing here raises.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module, resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from nimble_core.torch_compat.private import Private

__all__ = ["Diagnosis", "Finding", "State", "examine"]

State = Literal["works", "fallback", "off", "broken"]

_INTERNALS = "Torch's internals"
_GROUPS = ("Running", "Kernels and memory", "Measuring", "Seeing", "Handing on", _INTERNALS)
_SIGNS: dict[State, tuple[str, str]] = {
    "works": ("✓", "green"),
    "fallback": ("~", "yellow"),
    "off": ("-", ""),
    "broken": ("✗", "bold red"),
}
_STATE_WIDTH = max(len(f"{sign} {state}") for state, (sign, _) in _SIGNS.items())
_INSTALL = "pip install --upgrade nimble-viz"
_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about one feature.

    Args:
        group: what it is for: ``"Running"``, ``"Kernels and memory"``, ``"Measuring"``, ``"Seeing"``, ``"Handing on"``
            or ``"Torch's internals"``.
        feature: what it is called.
        state: ``"works"``; ``"fallback"``: something else is done instead; ``"off"``: not there; ``"broken"``: needed,
            and does not work.
        why: what was seen.
        fix: what to do about it; empty if there is nothing to do.
    """

    group: str
    feature: str
    state: State
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings on one machine, in the order to read them in.

    Args:
        findings: one for each feature.
        internals: one for each private name of torch that is used; none where torch cannot be imported.
    """

    findings: tuple[Finding, ...]
    internals: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if something that is needed is broken, else 0."""
        return int(any(one.state == "broken" for one in (*self.findings, *self.internals)))

    @property
    def verdict(self) -> str:
        """One sentence."""
        counts = {state: sum(one.state == state for one in self.findings) for state in _SIGNS}
        broken = ", ".join(one.feature for one in (*self.findings, *self.internals) if one.state == "broken")
        rest = f"{counts['works']} features work, {counts['fallback']} with a fallback, {counts['off']} off"
        return f"Broken: {broken}; {rest}." if broken else f"Ready: {rest}."

    def _shown(self) -> tuple[Finding, ...]:
        """What a terminal shows: of torch's internals those that are missing, and one line for all others."""
        fine = sum(one.state == "works" for one in self.internals)
        missing = [one for one in self.internals if one.state in ("fallback", "broken")]
        counted = [Finding(_INTERNALS, "private names", "works", f"{fine} found; --json lists them")] * bool(fine)
        return (*self.findings, *counted, *missing)

    def to_json(self) -> str:
        """All of it as JSON, with a line break at the end."""
        from nimble_core import __version__

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
        """All of it as plain lines, for where rich is missing."""
        lines = [self.verdict]
        for group in _groups(self._shown()):
            lines += ["", group]
            for one in self._shown():
                if one.group == group:
                    lines.append(f"  {one.state:<8}  {one.feature}: {one.why}")
                    lines += [f"            -> {one.fix}"] * bool(one.fix)
        return "\n".join(lines) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.padding import Padding
        from rich.table import Table

        from nimble_viz.render.layout import words as _text

        yield _text("nimble_viz doctor", "bold")
        yield _text(self.verdict, "bold red" if self.exit_code else "bold green")
        shown = self._shown()
        widest = max(len(one.feature) for one in self.findings)
        for group in _groups(shown):
            table = Table.grid(padding=(0, 2))
            table.add_column(width=_STATE_WIDTH)
            table.add_column(width=widest)
            table.add_column(overflow="fold", ratio=1)
            for one in shown:
                if one.group == group:
                    sign, style = _SIGNS[one.state]
                    said = _text(one.why)
                    if one.fix:
                        said.append_text(_text(f"\n-> {one.fix}", "italic", lines=True))
                    table.add_row(_text(f"{sign} {one.state}", style), _text(one.feature), said)
            yield _text("")
            yield _text(group, "bold cyan")
            yield Padding(table, (0, 0, 0, 2))


def examine() -> Diagnosis:
    """Try every feature out on this machine; a few seconds, most of them torch's import.

    Never raises: a check that fails in a way that nobody thought of is a finding too.
    """
    findings: list[Finding] = []
    machine = _Machine()
    for group, feature, needed, check in _CHECKS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                state, why, fix = check(machine)
            except KeyboardInterrupt:
                raise
            except ModuleNotFoundError as error:
                state, why, fix = "off", f"the package {_package(error)} is not installed", _fix(feature)
            except BaseException as error:  # SystemExit too: what a broken package raises on import is up to it
                state, why, fix = "off", f"{type(error).__name__}: {_first_line(error)}", _fix(feature)
        if needed and state == "off":
            state = "broken"
        findings.append(Finding(group, feature, state, why, fix))
    with suppress(Exception):
        machine.close()
    return Diagnosis(tuple(findings), _internals())


Answer = tuple[State, str, str]
"""State, why, and what to do."""


class _Machine:
    """What several checks look at, made when the first of them does."""

    @cached_property
    def torch(self) -> Any:
        return import_module("torch")

    @cached_property
    def prepared(self) -> tuple[Any, Any, Any]:
        """A prepared model of two branches, the model and an input; on the GPU if there is one."""
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
        """What was seen of its replays."""
        from nimble_core.autotune.capture_pipeline import device_for, observe

        net, _, x = self.prepared
        engine = net.engines[0]
        return observe(device_for(x.device), engine.recorded, engine.executable, seconds=0.05)

    def close(self) -> None:
        made = self.__dict__.get("prepared")
        if made is not None:
            made[0].close()


def _works(why: str) -> Answer:
    return "works", why, ""


# -- running ---------------------------------------------------------------------------------------------------------


def _python(on: _Machine) -> Answer:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return _works(found) if sys.version_info >= (3, 11) else ("off", found, "Python 3.11 or newer")


def _torch(on: _Machine) -> Answer:
    torch = on.torch
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = f"{torch.__version__}, {cuda}"
    if float(torch.ones(2).sum()) != 2.0:
        return "off", f"{found}: adds wrongly", ""
    if tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2]) < (2, 11):
        return "off", f"{found} is older than 2.11", 'pip install --upgrade "torch>=2.11"'
    return _works(found)


def _gpu(on: _Machine) -> Answer:
    from nimble_core.profiling.machine import cpu_name, gpu_facts

    torch = on.torch
    facts = gpu_facts()
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        more = f", the first of {count}" if count > 1 else ""
        share = torch.cuda.get_device_properties(0).total_memory / 2**30
        return _works(f"{torch.cuda.get_device_name(0)}, {share:.0f} GiB, driver {facts.driver or 'unknown'}{more}")
    host = f"models run on the host, {cpu_name()}"
    if torch.version.cuda is None:
        if facts.driver or shutil.which("nvidia-smi"):
            fix = "a build of torch for CUDA: https://pytorch.org/get-started/locally"
            return "fallback", f"there is a GPU, but this torch was built without CUDA: {host}", fix
        return "fallback", f"no NVIDIA driver was found: {host}", ""
    try:
        torch.cuda.init()
    except Exception as error:
        return "fallback", f"{_first_line(error)}: {host}", "a driver as new as this torch's CUDA; see nvidia-smi"
    return "fallback", f"torch sees no GPU: {host}", "CUDA_VISIBLE_DEVICES, if it is set"


def _replay(on: _Machine) -> Answer:
    """A small model of two branches, prepared, replayed and compared with eager."""
    net, model, x = on.prepared
    torch = on.torch
    with torch.no_grad():
        if not torch.allclose(net(x), model(x), atol=1e-3):
            return "off", "the replay of a small model is not what eager computes", "please report this"
    engine = net.engines[0]
    where = "on the GPU, as a CUDA graph" if x.is_cuda else "on the host, by worker threads"
    streams = engine.schedule.streams
    of = f"{streams} streams" if streams > 1 else "one stream"
    return _works(f"a model was prepared and replayed {where}, on {of}: equal to eager")


def _files(on: _Machine) -> Answer:
    import_module("msgspec")
    import_module("nimble_viz.report.file")
    return _works(f"{_named('msgspec')}: *.nimble is written, and read without torch")


def _terminal(on: _Machine) -> Answer:
    import_module("rich")
    kind = f"{shutil.get_terminal_size().columns} columns" if sys.stdout.isatty() else "not a terminal: plain text"
    return _works(f"{_named('rich')}; {kind}")


# -- measuring -------------------------------------------------------------------------------------------------------


def _profiler(on: _Machine) -> Answer:
    torch = on.torch
    from torch.profiler import ProfilerActivity, supported_activities

    if not torch.profiler.kineto_available():
        return "off", "torch was built without Kineto: overhead per call is not measured", "an official build of torch"
    if torch.cuda.is_available() and ProfilerActivity.CUDA not in supported_activities():
        return "fallback", "the profiler sees the host alone, no kernels", "a build of torch with CUPTI"
    from nimble_core.profiling.cupti import attached_tool

    tool = attached_tool() if torch.cuda.is_available() else ""
    if tool:
        return "fallback", f"{tool} is attached: eager runs on the GPU are not profiled", "run this without the tool"
    from nimble_core.utils.errors import DeviceError
    from nimble_viz.traces.profiler import claim_profiler, quiet_kineto, release_profiler

    try:
        claim_profiler(torch, cuda=False)
    except DeviceError as error:
        return "fallback", f"{error.what}: overhead per call is not measured beside it", error.fix
    try:
        with quiet_kineto(), torch.profiler.profile(activities=[ProfilerActivity.CPU]) as taken:
            torch.ones(2).sum()
    finally:
        release_profiler()
    seen = sum(1 for one in taken.events() if one.name == "aten::sum")
    if not seen:
        return "off", "the profiler ran and saw nothing", "an official build of torch"
    return _works(f"torch.profiler, events of the host{' and the GPU' * torch.cuda.is_available()}")


def _timeline(on: _Machine) -> Answer:
    torch = on.torch
    if not torch.cuda.is_available():
        seen = on.observed
        return _works(f"{len(seen.timeline.spans)} of {seen.costs.expected} calls timed by the host clock")
    from nimble_core.profiling import cupti

    if cupti.attached_tool():
        return "fallback", f"{cupti.unavailable()}: replayed kernels have no times", "run this without the tool"
    cuda = str(torch.version.cuda)
    try:
        import_module("cupti.cupti")
    except Exception as error:
        fix = 'pip install "nimble-viz[cuda13]"' if not cuda.startswith("12") else "see docs/dependencies.md, cuda12"
        why = f"cupti-python: {_first_line(error)}: replayed kernels have no times, plans are chosen by whole replays"
        return "fallback", why, fix
    seen = on.observed
    found = f"CUPTI saw {seen.costs.seen} of {seen.costs.expected} replayed nodes, call by call"
    if seen.timeline.reliable:
        return _works(found)
    return "fallback", f"{found}: {seen.timeline.note}", "no other profiler in the same process"


def _graphs(on: _Machine) -> Answer:
    torch = on.torch
    if not torch.cuda.is_available():
        return "off", "no GPU: a host replay has no graph to read", ""
    import_module("cuda.bindings.driver")
    net, _, _ = on.prepared
    counts = net.engines[0].executable.counts
    return _works(f"{_named('cuda-bindings')}; a captured graph was read: {counts.emitted} waits in it")


def _stamp(on: _Machine) -> Answer:
    from nimble_core.profiling.machine import _from_nvml, gpu_facts

    torch = on.torch
    if not torch.cuda.is_available():
        return _works("processor, cores and load of the host")
    try:
        _from_nvml("")
    except Exception as error:
        why = f"NVML: {_first_line(error)}"
        if gpu_facts().driver:
            return "fallback", f"{why}: asked nvidia-smi, which is slower", "pip install nvidia-ml-py"
        return "off", f"{why}: no clocks, throttling and driver in reports", "pip install nvidia-ml-py"
    return _works("clocks, throttling and processes from NVML")


def _nvtx(on: _Machine) -> Answer:
    nvtx = import_module("nvtx")
    found = f"{_named('nvtx')}"
    if os.environ.get("NIMBLE_NVTX") == "0":
        return "off", f"{found}; NIMBLE_NVTX=0", "unset NIMBLE_NVTX"
    if not nvtx.enabled():
        return "off", f"{found}; NVTX_DISABLE is set", "unset NVTX_DISABLE"
    from nimble_core.profiling.nvtx import listener

    heard = "a tool listens: ranges are drawn" if listener() else "no tool listens, so that ranges cost nothing"
    try:
        import_module("numpy")
    except ImportError:
        return "fallback", f"{found}; {heard}; without numpy a range holds its call alone", "pip install numpy"
    return _works(f"{found}; {heard}")


def _nsys(on: _Machine) -> Answer:
    program = shutil.which("nsys")
    said = _said([program, "--version"]) if program else ""
    try:
        import_module("nsys_writer")
        writer = "the package nsys_writer"
    except ImportError:
        backend = os.environ.get("NSYS_WRITER_BACKEND", "")
        writer = backend if backend and Path(backend).exists() else ""
    if program and writer:
        return _works(f"{said or 'nsys'}; *.nsys-rep is written through {writer}")
    missing = "" if program else "nsys is not on the PATH"
    if writer:
        return "fallback", f"{missing}; *.nsys-rep is written through {writer}", "see docs/nsight.md"
    if program:
        return "fallback", f"{said or 'nsys'} profiles, but *.nsys-rep cannot be written", "see docs/nsight.md"
    return "off", f"{missing}: ranges have no viewer here", "see docs/nsight.md"


# -- kernels and memory -----------------------------------------------------------------------------------------------


def _kernels(on: _Machine) -> Answer:
    torch = on.torch
    if not torch.cuda.is_available():
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
    """The first of these programs that there is; empty if none."""
    return next((Path(found).name for name in names if name and (found := shutil.which(name))), "")


def _libraries(on: _Machine) -> Answer:
    torch = on.torch
    if torch.cuda.is_available():
        number = torch.backends.cudnn.version()
        if number and torch.backends.cudnn.enabled:
            return _works(f"cuDNN {number // 10000}.{number % 10000 // 100}.{number % 100}")
        return "off", "this torch has no cuDNN, or it is switched off", "torch.backends.cudnn.enabled = True"
    if torch.backends.mkldnn.is_available():
        return _works("oneDNN")
    return "fallback", "this torch has no oneDNN: its own kernels are used", "an official build of torch"


def _memory(on: _Machine) -> Answer:
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


def _plans(on: _Machine) -> Answer:
    from nimble_core.autotune.disk_cache import cache_directory

    place = cache_directory()
    above = next((one for one in (place, *place.parents) if one.exists()), place)
    if above.is_dir() and os.access(above, os.W_OK):
        kept = sum(1 for _ in place.glob("*.json")) if place.is_dir() else 0
        return _works(f"{kept} plan{'' if kept == 1 else 's'} in {place}")
    return "off", f"{place} cannot be written: each process tunes anew", "set NIMBLE_CACHE_DIR to a folder of yours"


# -- torch's internals -------------------------------------------------------------------------------------------------


def _internals() -> tuple[Finding, ...]:
    """One finding for each private name of torch that is used; none where torch's own finding says why."""
    try:
        from nimble_core.torch_compat.private import all_entries

        return tuple(_internal(entry) for entry in all_entries())
    except KeyboardInterrupt:
        raise
    except BaseException:  # what a broken torch raises on import is up to it
        return ()


def _internal(entry: Private) -> Finding:
    from nimble_core.torch_compat.private import REMEDY

    name = entry.name.replace(":", ".")
    try:
        found = entry.find()
    except Exception as error:  # a module of torch's that fails to import
        state: State = "broken" if entry.essential else "fallback"
        return Finding(_INTERNALS, name, state, f"{type(error).__name__}: {_first_line(error)}", REMEDY)
    if found is not None:
        return Finding(_INTERNALS, name, "works", f"{entry.purpose}; checked on {', '.join(entry.checked)}")
    if not entry.expected:
        return Finding(_INTERNALS, name, "off", f"this torch has no {entry.needs}")
    if not entry.essential:
        return Finding(_INTERNALS, name, "fallback", f"missing: {entry.without}")
    return Finding(_INTERNALS, name, "broken", f"missing, needed to {entry.purpose}", REMEDY)


# -- seeing ----------------------------------------------------------------------------------------------------------


def _page(on: _Machine) -> Answer:
    parts = [one.name for one in resources.files("nimble_viz.render.viewer").iterdir() if one.is_file()]
    if not {".js", ".css"} <= {Path(name).suffix for name in parts}:
        return "off", "the viewer's script or style sheet is missing from the installation", _INSTALL
    return _works("report.to_html(): one file, no network")


def _notebook(on: _Machine) -> Answer:
    known = {"VSCODE_PID": "VS Code", "COLAB_RELEASE_TAG": "Colab", "JPY_PARENT_PID": "Jupyter"}
    fronts = [name for variable, name in known.items() if os.environ.get(variable)]
    fronts += [_named(name) for name in ("jupyterlab", "notebook") if _there(name)]
    if not _there("ipykernel"):
        why = "ipykernel is not installed: reports are shown in the terminal and as HTML"
        return "off", why, "pip install jupyterlab"
    if not fronts:
        why = f"{_named('ipykernel')}, but no front end was found in this environment"
        return "fallback", why, "pip install jupyterlab; VS Code and a server of yours need nothing here"
    return _works(f"reports show themselves in {', '.join(fronts)}")


def _widgets(on: _Machine) -> Answer:
    import_module("ipywidgets")
    return _works(_named("ipywidgets"))


def _statistics(on: _Machine) -> Answer:
    import_module("plotly.graph_objects")
    return _works(f"report.figure(): {_named('plotly')}")


def _dot(on: _Machine) -> Answer:
    import_module("graphviz")
    program = shutil.which("dot")
    if program is None:
        why = "the program dot is not on the PATH: DOT text can be written but not drawn, the viewer lays out by itself"
        return "fallback", why, "apt install graphviz, or brew install graphviz"
    drawn = _said([program, "-Tsvg"], "digraph { a -> b }")
    if "</svg>" not in drawn:
        return "fallback", f"{program} drew nothing", f"{program} -c, or install graphviz again"
    return _works(f"{_named('graphviz')}, {program}")


def _networks(on: _Machine) -> Answer:
    import_module("networkx")
    return _works(f"report.graph.to_networkx(): {_named('networkx')}")


# -- handing on ------------------------------------------------------------------------------------------------------


def _perfetto(on: _Machine) -> Answer:
    try:
        import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except ImportError:
        why = "the package perfetto is not there: export Chrome JSON, which ui.perfetto.dev opens as well"
        return "fallback", why, 'pip install "nimble-viz[export]"'
    return _works(f"report.export('run.pftrace'): {_named('perfetto')}")


def _frames(on: _Machine) -> Answer:
    try:
        import_module("pandas")
    except ImportError:
        why = "the package pandas is not there: export tables as CSV"
        return "fallback", why, 'pip install "nimble-viz[export]"'
    return _works(f"report.to_dataframe(): {_named('pandas')}")


_CHECKS: tuple[tuple[str, str, bool, Callable[[_Machine], Answer]], ...] = (
    ("Running", "Python", True, _python),
    ("Running", "torch", True, _torch),
    ("Running", "GPU and driver", False, _gpu),
    ("Running", "replay", True, _replay),
    ("Running", "report files", True, _files),
    ("Running", "terminal", True, _terminal),
    ("Measuring", "eager profile", False, _profiler),
    ("Measuring", "replay timeline", False, _timeline),
    ("Measuring", "captured graph", False, _graphs),
    ("Measuring", "environment stamp", False, _stamp),
    ("Measuring", "NVTX ranges", False, _nvtx),
    ("Measuring", "Nsight Systems", False, _nsys),
    ("Kernels and memory", "compiled kernels", False, _kernels),
    ("Kernels and memory", "library kernels", False, _libraries),
    ("Kernels and memory", "planned memory", False, _memory),
    ("Kernels and memory", "kept plans", False, _plans),
    ("Seeing", "HTML page", False, _page),
    ("Seeing", "notebook", False, _notebook),
    ("Seeing", "widgets", False, _widgets),
    ("Seeing", "statistics", False, _statistics),
    ("Seeing", "graphviz dot", False, _dot),
    ("Handing on", "Perfetto", False, _perfetto),
    ("Handing on", "data frames", False, _frames),
    ("Handing on", "networkx", False, _networks),
)
"""Group, feature, whether nothing goes without it, and how to find out."""

_FIXES = {"torch": 'pip install "torch>=2.11"', "captured graph": 'pip install "nimble-viz[cuda13]" (or [cuda12])'}


def _fix(feature: str) -> str:
    """What to do where a check did not say."""
    return _FIXES.get(feature, _INSTALL)


def _groups(findings: Iterable[Finding]) -> list[str]:
    present = {one.group for one in findings}
    return [group for group in _GROUPS if group in present]


def _named(distribution: str) -> str:
    """``"rich 14.0.0"``; the name alone where no version is known."""
    try:
        return f"{distribution} {version(distribution)}"
    except Exception:
        return distribution


def _there(name: str) -> bool:
    """Whether a module is installed; it is not imported."""
    try:
        return find_spec(name) is not None
    except Exception:
        return False


def _said(command: Sequence[str], given: str = "") -> str:
    """What a program prints; empty if it fails."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or "?").partition(".")[0]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
