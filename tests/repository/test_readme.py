"""The README does what it says: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    """Fenced code blocks of ``text`` in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str = README) -> list[str]:
    """Shell commands of ``text``, comments taken off."""
    lines = [line.partition("  #")[0].strip() for block in blocks("sh", text) for line in block.splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in lines if line and not line.startswith("#")]


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    found = blocks("python")
    assert len(found) >= 4
    for number, source in enumerate(found):
        exec(compile(source, f"README.md block {number}", "exec"), namespace)
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert (tmp_path / "model.nimble").stat().st_size > 100


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("nimble_core", "nimble_viz")


def test_architecture_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "architecture"}
    found = blocks("python", ARCHITECTURE)
    assert len(found) == 5
    for number, source in enumerate(found):
        exec(compile(source, f"docs/architecture.md block {number}", "exec"), namespace)


def modules_of(package: str) -> dict[str, set[str]]:
    """Names of the modules in each folder of ``package``; those beside its ``__init__`` are under ``"."``."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        folder = path.parent.relative_to(ROOT / package).as_posix()
        found.setdefault(folder, set()).update({path.stem} - {"__init__"})
    return found


def described(package: str, page: str) -> dict[str, set[str]]:
    """Folders of ``package`` in the order of the page, each with the names that its entry gives to modules."""
    _, _, rest = page.partition(f"## The folders of `{package}`\n")
    _, *parts = re.split(r"^- \*\*`([\w/]+)/`\*\*", rest.partition("\n## ")[0], flags=re.MULTILINE)
    return {
        folder: set(re.findall(r"`([a-z_\d]+)/?`", text)) for folder, text in zip(parts[::2], parts[1::2], strict=True)
    }


def misdescribed(package: str, page: str) -> list[str]:
    """Folders and modules of ``package`` that the page does not describe, and those it describes that are not there."""
    found, there = described(package, page), modules_of(package)
    alone = there.pop(".")  # modules beside __init__ may be named in any entry
    wrong = sorted({folder for folder in there if there[folder]} ^ found.keys())
    for folder, named in found.items():
        inner = {one.removeprefix(f"{folder}/") for one in there if one.startswith(f"{folder}/")}
        here = there.get(folder, set())
        wrong += [f"{folder}/{name}" for name in sorted((here - named) | (named - here - inner - alone))]
    return wrong + sorted(alone - set().union(*found.values()))


@pytest.mark.parametrize("package", PACKAGES)
def test_architecture_describes_every_folder_and_module(package: str) -> None:
    assert misdescribed(package, ARCHITECTURE) == []


def test_a_module_that_is_not_described_would_be_noticed() -> None:
    assert misdescribed("nimble_core", ARCHITECTURE.replace("`matching`", "matching")) == ["algorithms/matching"]
    assert misdescribed("nimble_core", ARCHITECTURE.replace("`matching`", "`matchmaking`")) == [
        "algorithms/matching",
        "algorithms/matchmaking",
    ]
    assert misdescribed("nimble_viz", ARCHITECTURE.replace("**`traces/`**", "traces"))[0] == "traces"


def not_there(page: str) -> list[str]:
    """Names such as ```ir/costs.py:Costs``` that lead to nothing."""
    import ast

    wrong = []
    for file, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", page):
        paths = [path for package in PACKAGES if (path := ROOT / package / file).exists()]
        body: list[ast.stmt] = ast.parse(paths[0].read_text(encoding="utf-8")).body if len(paths) == 1 else []
        for part in name.split("."):
            named = [one for one in body if getattr(one, "name", "") == part]
            body = getattr(named[0], "body", []) if named else []
        if not body:
            wrong.append(f"{file}:{name}")
    return wrong


def test_functions_that_architecture_names_exist() -> None:
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", ARCHITECTURE)) > 40
    assert not_there(ARCHITECTURE) == []
    assert not_there("`ir/costs.py:Costs.total_ns` `ir/costs.py:Cost` `ir/cost.py:Costs`") == [
        "ir/costs.py:Cost",
        "ir/cost.py:Costs",
    ]


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_files_and_modules_that_are_named_exist(name: str) -> None:
    from pkgutil import resolve_name

    page = (ROOT / name).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:nimble_core|nimble_viz|tests|benchmarks|examples|docs)/[\w./-]*)`", page):
        assert (ROOT / path).exists(), f"{name} names {path}"
    for dotted in re.findall(r"`((?:nimble_core|nimble_viz)(?:\.\w+)+)(?:\(\))?`", page):
        resolve_name(dotted)


def test_command_line_exists() -> None:
    lines = [line for line in commands() if line.startswith("python -m nimble_viz ")]
    assert lines
    for line in lines:
        command, *rest = line.split()[3:]
        shown = subprocess.run(
            [sys.executable, "-m", "nimble_viz", command, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert shown.returncode == 0, shown.stderr
        for word in rest:
            if word.startswith("--"):
                assert word.partition("=")[0] in shown.stdout


def test_extras_that_are_named_exist() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = set(re.findall(r"\.?\[(cuda\w*|demo|test)\]", README))
    assert {"cuda", "cuda12", "cuda13"} <= named <= set(project["optional-dependencies"])


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name} links to {target}"


def test_the_results_of_eagers_kernels_are_those_of_the_committed_file() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "cuda-h200.json").read_text(encoding="utf-8"))["models"]
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in README.splitlines())
        if len(cells) == 10 and "float" in cells[1]
    }
    assert rows.keys() == found.keys()
    for name, model in found.items():
        times, ratios = model["times"], model["ratios"]
        assert rows[name] == [
            f"{times['eager']['median us']:.0f}",
            f"{times['single replay']['median us']:.0f}",
            f"{times['multi replay']['median us']:.0f}",
            f"{ratios['multi over single, replay']['value']:.2f}x",
            f"{ratios['multi over eager, call']['value']:.2f}x",
            f"{model['streams']}, {model['syncs']['planned']}",
            f"{model['distance to critical path']:.2f}x",
        ]
        assert model["syncs"]["planned"] == model["syncs"]["emitted"]
        assert all(check["passed"] for check in model["equality"])
