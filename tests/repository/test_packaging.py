"""What is installed: the wheel's contents, light imports, requirements that never push a torch out."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = ("torch", "plotly", "IPython", "ipywidgets", "networkx", "rich", "transformers")


def pins() -> dict[str, str]:
    """``{name: version}`` of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def requirements() -> list[str]:
    """Requirements of the project and of all its extras."""
    return [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]


def key(name: str) -> str:
    """A distribution's name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version(text: str) -> tuple[int, ...]:
    """``"3.6.1"`` as numbers."""
    return tuple(int(part) for part in text.split("."))


def within(have: str, requirement: str) -> bool:
    """Whether version ``have`` satisfies the bounds of ``requirement`` (``>=`` and ``<`` only)."""
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    return all(version(have) >= version(to) if sign == ">=" else version(have) < version(to) for sign, to in bounds)


def fresh(code: str) -> str:
    """What ``code`` prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", ["nimble_core", "nimble_viz"])
def test_import_is_light(package: str) -> None:
    assert fresh(f"import sys, {package}; print([n for n in {HEAVY!r} if n in sys.modules])") == "[]"


@pytest.mark.parametrize("package", ["nimble_core", "nimble_viz"])
def test_every_public_name_is_there(package: str) -> None:
    listed = fresh(f"import {package}; print(all(getattr({package}, n) is not None for n in {package}.__all__))")
    assert listed == "True"


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


def test_pins_satisfy_the_requirements() -> None:
    pinned = {key(name): value for name, value in pins().items()}
    checked = 0
    for requirement in requirements():
        name = key(re.split(r"[\[<>=]", requirement)[0])
        if name in pinned:
            assert within(pinned[name], requirement), requirement
            checked += 1
    assert checked >= 20


def test_pins_name_no_build() -> None:
    assert all("+" not in value for value in pins().values())
    assert "cuda-bindings" not in pins()  # torch's own build decides


def test_bounds_are_checked() -> None:
    assert not within("1.9", "x>=1.10")
    assert not within("13.1.0", "x>=13.0,<13.1")


def test_wheel_holds_types_and_viewer(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        + ["--wheel-dir", str(tmp_path), str(_copy(tmp_path / "source"))],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {"nimble_core/py.typed", "nimble_viz/py.typed"} <= names
    for package in ("nimble_core", "nimble_viz"):
        sources = [path for path in (ROOT / package).rglob("*") if path.suffix in {".py", ".js", ".css", ".html"}]
        assert {path.relative_to(ROOT).as_posix() for path in sources} <= names
    assert any(name.endswith(".js") for name in names)
    assert not any(name.startswith(("tests", "examples", "benchmarks")) for name in names)


def _copy(target: Path) -> Path:
    """The files a build reads: building in the tree would leave a build directory behind."""
    import shutil

    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for package in ("nimble_core", "nimble_viz"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    return target
