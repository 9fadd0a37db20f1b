"""What is handed out: light imports, requirements, distributions, and the command line without a package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from nimble_viz import __version__
from nimble_viz.cli.command import _NEEDED, _parser
from tests.support.hidden import hiding

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECORDING = "examples/recordings/clip-h200.nimble"


def requirements() -> list[str]:
    """Requirements of the project and of all its extras."""
    return [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]


def version(text: str) -> tuple[int, ...]:
    """``"3.6.1"`` as numbers."""
    return tuple(int(part) for part in text.split("."))


def within(have: str, requirement: str) -> bool:
    """Whether version ``have`` satisfies the bounds of ``requirement`` (``>=`` and ``<`` only)."""
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    return all(version(have) >= version(to) if sign == ">=" else version(have) < version(to) for sign, to in bounds)


def said(line: list[str], cwd: Path) -> str:
    """What Python prints with these arguments."""
    done = subprocess.run([sys.executable, *line], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout.strip()


def test_torch_has_a_lower_bound_only() -> None:
    named = [one for one in requirements() if re.match(r"torch\b", one)]
    assert named == ["torch>=2.11"]


def test_extras_agree_with_what_torch_requires() -> None:
    # Builds of torch 2.11 for CUDA 12 require cuda-bindings>=12.9.4,<13, those for CUDA 13 >=13.0.3,<14.
    extras = PROJECT["optional-dependencies"]
    bindings = {name: next(one for one in extras[name] if "cuda-bindings" in one) for name in ("cuda12", "cuda13")}
    assert within("12.9.4", bindings["cuda12"])
    assert not within("13.0.3", bindings["cuda12"])
    assert within("13.0.3", bindings["cuda13"])
    assert not within("12.9.4", bindings["cuda13"])
    assert not any("cupti-python" in one for one in extras["cuda12"])


# -- distributions ----------------------------------------------------------------------------------------------------

JUNK = (
    "benchmarks/results/new.svg",
    "nimble_core/__pycache__/old.cpython-311.pyc",
    "notebooks/.ipynb_checkpoints/quickstart-checkpoint.ipynb",
    "report.html",
    "tests/__pycache__/old.cpython-311.pyc",
)
"""What running things leaves in the tree."""

BUILD = """
import sys
from setuptools import build_meta
build_meta.build_sdist(sys.argv[1])
"""


def in_git(*which: str) -> list[str]:
    """Files of the project as git lists them; none where there is no git, as in an unpacked source distribution."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return []
    listed = subprocess.run(["git", "ls-files", "-z", *which], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree to build in: building leaves files behind, and others may be at work in the tree."""
    listed = ROOT / "nimble_viz.egg-info" / "SOURCES.txt"  # a source distribution says itself what is in it
    names = in_git("--cached", "--others", "--exclude-standard")
    if not names and not listed.exists():
        pytest.skip("neither git nor a source distribution says which files are the project's")
    copy = tmp_path_factory.mktemp("clean")
    for name in names or listed.read_text(encoding="utf-8").splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built where neither package can be imported: its version is read, not run."""
    for name in JUNK:
        (clean / name).parent.mkdir(exist_ok=True)
        (clean / name).write_text("junk")
    out = tmp_path_factory.mktemp("sdist")
    said(["-c", hiding(["nimble_core", "nimble_viz", "torch"]) + BUILD, str(out)], clean)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel, built from the source distribution."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "."]
    said(["-m", "pip", "wheel", *options, str(sdist)], sdist.parent)
    return next(sdist.parent.glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        name = next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(opened.read(name))


def held(sdist: Path) -> set[str]:
    """Files in a source distribution, but what setuptools adds."""
    with tarfile.open(sdist) as opened:
        names = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    return {name for name in names if name not in ("PKG-INFO", "setup.cfg") and ".egg-info/" not in name}


def test_the_source_distribution_holds_every_file_and_no_junk(sdist: Path) -> None:
    tracked = set(in_git())
    if not tracked:
        pytest.skip("no git to say which files are the project's")
    names = held(sdist)
    assert tracked <= names <= {*in_git("--cached", "--others", "--exclude-standard")}
    assert names & set(JUNK) == set()
    assert sdist.stat().st_size < 8_000_000


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name for name in names if not re.match(r"nimble_viz-[\d.]+\.dist-info/", name)}
    suffixes = {".py", ".cpp", ".js", ".css", ".html", ".typed"}
    sources = {path for one in ("nimble_core", "nimble_viz") for path in (ROOT / one).rglob("*")}
    assert packages == {path.relative_to(ROOT).as_posix() for path in sources if path.suffix in suffixes}
    assert {"nimble_core/py.typed", "nimble_viz/py.typed"} <= packages
    assert any(name.endswith(".js") for name in packages)
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_wheel_runs_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    said(["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)], tmp_path)
    assert Path(said(["-c", "import nimble_viz; print(nimble_viz.__file__)"], target)).is_relative_to(target)
    assert said(["-m", "nimble_viz", "--version"], target) == f"nimble_viz {__version__}"
    assert "CLIP" in said(["-m", "nimble_viz", "show", str(ROOT / RECORDING)], target)


# -- the description that an index shows ------------------------------------------------------------------------------


def targets(page: str) -> list[str]:
    """Where a page's links and pictures lead, in Markdown and in HTML; those in its code are none."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(\s*([^)\s]+)|^\s*\[[^\]]+\]:\s*(\S+)|(?:src|href)=[\"']?([^\"'\s>]+)", prose, re.MULTILINE)
    return [next(filter(None, groups)) for groups in found]


def test_the_description_leads_nowhere_that_an_index_does_not_show(metadata: Message) -> None:
    assert metadata["Version"] == __version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    described = metadata.get_payload()
    assert isinstance(described, str)
    assert described.startswith("# nimble_viz")
    assert [target for target in targets(described) if not target.startswith("https://")] == []


def test_the_description_agrees_with_the_guide() -> None:
    page, guide = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/pypi.md", "docs/guide.md"))
    examples = re.findall(r"^```python\n.*?^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    for example in examples:  # the guide's are run
        assert example in guide
    commands = re.findall(r"^python -m nimble_viz ([^#\n]*)", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        _parser().parse_args(command.split())
    assert set(re.findall(r"nimble-viz\[(\w+)\]", page)) <= set(PROJECT["optional-dependencies"])


# -- the command line without a package -------------------------------------------------------------------------------


def without(names: list[str], *line: str) -> subprocess.CompletedProcess[str]:
    """``python -m nimble_viz`` where the packages ``names`` are not installed."""
    code = "import runpy\nrunpy.run_module('nimble_viz', run_name='__main__', alter_sys=True)\n"
    command = [sys.executable, "-c", hiding(names) + code, *line]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def message(name: str) -> str:
    """The one line about a package that is missing."""
    return f"error: {name} is not installed, and nimble_viz needs it: pip install {name}\n"


def test_all_that_is_required_is_known_to_the_command_line() -> None:
    assert sorted(_NEEDED) == sorted(re.split(r"[<>=]", one)[0] for one in PROJECT["dependencies"])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("msgspec", f"show {RECORDING}"),
        ("graphviz", f"export {RECORDING} graph.gv"),
        ("torch", "compare examples/models.py:bert_small"),
    ],
)
def test_commands_name_what_they_miss(name: str, line: str) -> None:
    ended = without([name], *line.split())
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", message(name))


def test_without_any_package_there_is_help() -> None:
    for line in ("--version", "--help", "compare --help", "gate --help"):
        ended = without([*_NEEDED], *line.split())
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "nimble_viz" in ended.stdout


def test_other_modules_that_are_missing_keep_their_traceback(tmp_path: Path) -> None:
    module = tmp_path / "wants_more.py"
    for wanted in ("no_such_module_at_all", "msgspec.no_such_part"):
        module.write_text(f"import {wanted}\n")
        ended = without([], "compare", f"{module}:factory")
        assert ended.returncode == 1
        assert "Traceback" in ended.stderr
    ended = without(["msgspec"], "show", RECORDING, "--traceback")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
