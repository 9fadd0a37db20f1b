"""The README does what it says: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    """Fenced code blocks of ``text`` in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str = README) -> list[str]:
    """Shell commands of ``text``, comments taken off."""
    lines = [line.partition("  #")[0].strip() for block in blocks("sh", text) for line in block.splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in lines if line and not line.startswith("#")]


def make_targets() -> set[str]:
    """Phony targets of the Makefile."""
    found = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return set(found[1].split()) if found else set()


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    found = blocks("python")
    assert len(found) >= 4
    for number, source in enumerate(found):
        exec(compile(source, f"README.md block {number}", "exec"), namespace)
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert (tmp_path / "model.nimble").stat().st_size > 100


def test_architecture_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "architecture"}
    found = blocks("python", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert len(found) == 5
    for number, source in enumerate(found):
        exec(compile(source, f"docs/architecture.md block {number}", "exec"), namespace)


def test_architecture_names_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+)`", page))
    for package in ("nimble_core", "nimble_viz"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "__init__.py":
                module = path.relative_to(ROOT / package).with_suffix("").as_posix()
                assert module in named or f"{path.parent.name}/" in named, f"{package}/{module} is not described"


def test_make_targets_exist() -> None:
    named = {word for line in commands() if line.startswith("make ") for word in line.split()[1:2]}
    assert {"demo", "test"} <= named <= make_targets()


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


def test_factories_that_are_named_exist() -> None:
    from examples import models

    named = re.findall(r"examples[./]models(?:\.py)?:(\w+)", README)
    assert named
    assert set(named) <= set(models.__all__)


def test_extras_that_are_named_exist() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = set(re.findall(r"\.?\[(cuda\w*|demo|test)\]", README))
    assert {"cuda", "cuda12", "cuda13"} <= named <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/dependencies.md", "docs/kernels.md"]
)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name} links to {target}"


def test_a_missing_command_would_be_noticed() -> None:
    assert commands("```sh\nmake nothing   # a comment\n```\n") == ["make nothing"]
    assert "nothing" not in make_targets()


def test_the_inference_results_are_those_of_the_committed_file() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "inference-h200.json").read_text(encoding="utf-8"))["rows"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme[readme.index("<!-- inference results -->") : readme.index("<!-- end -->")]
    rows = {cells[1].strip(): [one.strip() for one in cells[2:-1]] for line in shown.splitlines() if "x |" in line
            for cells in [line.split("|")]}  # fmt: skip
    assert rows.keys() == {row["model"] for row in found.values()}
    for row in found.values():
        times, speed = row["times"], row["speed"]["copies"]
        eager, reduced, best, ours, over_reduced, over_best = rows[row["model"]]
        name, took = best.rsplit(", ", 1)
        peers = {one: times[one]["median us"] for one in speed}
        assert name == min(peers, key=lambda one: peers[one])
        assert (eager, reduced, took, ours) == tuple(
            f"{times[one]['median us']:.0f}" for one in ("eager", "compile:reduce-overhead", name, "ours")
        )
        assert (over_reduced, over_best) == tuple(
            f"{speed[one]['value']:.2f}x" for one in ("compile:reduce-overhead", name)
        )


def test_the_results_are_those_of_the_committed_file() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "cuda-h200.json").read_text(encoding="utf-8"))["models"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in readme.splitlines())
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
