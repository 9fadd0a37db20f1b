"""README and docs do what they say: their Python runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    """Fenced code blocks of ``text`` in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str = README) -> list[str]:
    """Shell commands of ``text``, comments taken off."""
    lines = [line.partition("  #")[0].strip() for block in blocks("sh", text) for line in block.splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in lines if line and not line.startswith("#")]


def run_blocks(page: str, text: str) -> None:
    """Run the Python of a page from top to bottom, in one namespace."""
    namespace: dict[str, object] = {"__name__": page}
    for number, source in enumerate(blocks("python", text)):
        exec(compile(source, f"{page} block {number}", "exec"), namespace)


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks("README.md", README)
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert re.fullmatch(r"nimble_viz: .+\nnow .+(?s:.+)\nprepared .+(?s:.+)\nnext .+(?s:.+)", capsys.readouterr().out)


def test_the_output_that_the_readme_shows_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import nimble_viz

    (load,) = re.findall(r"nimble_viz\.load\(\"([^\"]+)\"\)", README)
    recorded = nimble_viz.load(ROOT / load)
    monkeypatch.setattr(nimble_viz, "compare", lambda *_: recorded)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    exec(compile(blocks("python")[0], "README.md", "exec"), {})
    assert [capsys.readouterr().out] == blocks("text")


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(blocks("python", GUIDE)) >= 10
    run_blocks("docs/guide.md", GUIDE)
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert (tmp_path / "model.nimble").stat().st_size > 100


def words(page: str) -> int:
    """Words of a page, without what scripts write between two equal marks."""
    return len(re.sub(r"<!-- (\w+) -->\n.*?<!-- \1 -->", "", page, flags=re.DOTALL).split())


def test_the_readme_and_the_docs_are_short() -> None:
    assert len(README.split()) <= 900  # its tables counted
    # One is made by a script, the other is the page of the package index, which repeats this README.
    written = [path for path in (ROOT / "docs").glob("*.md") if path.name not in ("troubleshooting.md", "pypi.md")]
    assert sum(words(path.read_text(encoding="utf-8")) for path in written) <= 25_000
    assert words("two words <!-- table -->\n| a | b |\n<!-- table -->") == 2


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("nimble_core", "nimble_viz")


def test_architecture_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(blocks("python", ARCHITECTURE)) == 5
    run_blocks("docs/architecture.md", ARCHITECTURE)


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
    lines = [line for line in commands(README + GUIDE) if line.startswith("python -m nimble_viz ")]
    assert len(lines) >= 10
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
    named = set(re.findall(r"\[(cuda\w*|demo|docs|export|test)\]", README + INSTALL))
    assert {"cuda", "cuda12", "cuda13"} <= named <= set(project["optional-dependencies"])


def anchors(page: str) -> set[str]:
    """Those of a page's headings, as hosts of repositories and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), f"{name} links to {target}"
            assert not anchor or anchor in anchors(there.read_text(encoding="utf-8")), f"{name}: {target}#{anchor}"
