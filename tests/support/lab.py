"""A real Jupyter server without a network, and a browser on its notebooks: JupyterLab and Notebook 7."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
"""Chromium as root, without a GPU and without calls home."""


@contextmanager
def chromium() -> Iterator[Any]:
    """The installed Chromium, driven by Playwright; skips where either is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for found in map(shutil.which, names) if found), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the PATH")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield launched
        launched.close()


@dataclass(frozen=True)
class Server:
    """A Jupyter server that serves JupyterLab under ``/lab`` and Notebook 7 under ``/notebooks``."""

    folder: Path
    url: str
    token: str
    log: Path

    def address(self, name: str, *, classic: bool = False) -> str:
        """Where the notebook ``name`` is shown, in JupyterLab or Notebook 7."""
        place = f"notebooks/{name}" if classic else f"doc/tree/{name}"
        return f"{self.url}/{place}?token={self.token}"

    def write(self, name: str, cells: list[str]) -> None:
        """A notebook of code cells."""
        import nbformat

        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(made, self.folder / name)


@contextmanager
def jupyter_server(root: Path) -> Iterator[Server]:
    """Start JupyterLab's server on a free port, with nothing of the user's configuration, and end it.

    Args:
        root: an empty folder for notebooks, settings and the log.
    """
    pytest.importorskip("jupyterlab", reason="needs jupyterlab: make test installs it")
    pytest.importorskip("notebook", reason="needs notebook: make test installs it")
    folder, token = root / "notebooks", secrets.token_hex(16)
    folder.mkdir(parents=True)
    own = {f"JUPYTER_{name.upper()}_DIR": str(root / name) for name in ("config", "data", "runtime")}
    own |= {"IPYTHONDIR": str(root / "ipython"), "JUPYTER_TOKEN": token, "NIMBLE_CACHE_DIR": str(root / "cache")}
    repository = str(Path(__file__).parents[2])
    environment = os.environ | own | {"PYTHONPATH": repository}
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    flags = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": str(port),
        "ServerApp.port_retries": "0",
        "ServerApp.open_browser": "False",
        "ServerApp.allow_root": "True",
        "ServerApp.root_dir": str(folder),
        "LabApp.news_url": "",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "LabApp.extension_manager": "readonly",
        "LabApp.user_settings_dir": str(root / "settings"),
        "LabApp.workspaces_dir": str(root / "workspaces"),
    }
    own_settings = root / "settings" / "@jupyterlab" / "apputils-extension"
    own_settings.mkdir(parents=True)
    (own_settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in flags.items())]
    log = root / "server.log"
    with log.open("w") as written:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=written, stderr=written)
    server = Server(folder, f"http://127.0.0.1:{port}", token, log)
    try:
        _wait(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/api", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"no Jupyter server after 60 s:\n{server.log.read_text()[-3000:]}")


@dataclass
class Notebook:
    """A notebook that is open in a page.

    Attributes:
        troubles: errors and warnings on the page's console, and requests that left the machine.
        sent: bytes that came from the kernel.
    """

    page: Any
    troubles: list[str] = field(default_factory=list)
    sent: int = 0

    def watch(self, address: str) -> None:
        """Note what goes wrong on a page of this address, from now on."""
        home = "/".join(address.split("/")[:3])
        self.page.on("console", self._said)
        self.page.on("pageerror", self._raised)
        self.page.on("websocket", lambda one: one.on("framereceived", self._received))
        self.page.on("request", lambda request: self._asked(request.url, home))

    def complaints(self, *others: str) -> list[str]:
        """Troubles that match none of these patterns, which are somebody else's."""
        return [one for one in self.troubles if not any(re.search(pattern, one) for pattern in others)]

    def cell(self, at: int) -> Any:
        """The cell at this place, counted from 0."""
        return self.page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{at}']")

    def start(self, at: int) -> Any:
        """Run a cell and do not wait for it; the cell."""
        cell = self.cell(at)
        cell.locator(".jp-InputArea-editor .cm-content").click(position={"x": 4, "y": 4})
        self.page.keyboard.press("Control+Enter")
        return cell

    def run(self, at: int, timeout_s: float = 60) -> Any:
        """Run a cell to its end; its outputs."""
        cell = self.start(at)
        self.ended(at, timeout_s)
        return cell.locator(".jp-Cell-outputArea")

    def ended(self, at: int, timeout_s: float = 60) -> bool:
        """Wait until a cell has run."""
        prompt = self.cell(at).locator(".jp-InputPrompt", has_text=re.compile(r"\[\d+\]"))
        prompt.wait_for(state="attached", timeout=timeout_s * 1e3)
        return True

    def interrupt(self) -> None:
        """Press the toolbar's button that interrupts the kernel."""
        self.page.locator("[data-command='notebook:interrupt-kernel'], [data-jp-item-name='interrupt']").first.click()

    def theme(self, name: str) -> None:
        """Choose a theme in JupyterLab's menu."""
        for entry in ("Settings", "Theme", name):
            self.page.locator(".lm-MenuBar-itemLabel, .lm-Menu-itemLabel").get_by_text(entry, exact=True).click()

    def saved(self, path: Path) -> dict[str, Any]:
        """Save the notebook by keyboard and read its file."""
        before = path.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        ends = time.monotonic() + 20
        while path.stat().st_mtime_ns == before and time.monotonic() < ends:
            self.page.wait_for_timeout(100)
        while not (text := path.read_text(encoding="utf-8")).endswith("}\n") and time.monotonic() < ends:
            self.page.wait_for_timeout(100)  # it is being written
        read: dict[str, Any] = json.loads(text)
        return read

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(f"{message.type}: {message.text} ({message.location['url']})")

    def _raised(self, error: Any) -> None:
        where = re.search(r"\w+://[^\s)]+", error.stack or "")
        self.troubles.append(f"uncaught: {error.message} ({where[0] if where else 'nowhere'})")

    def _asked(self, url: str, home: str) -> None:
        if not url.startswith((home, home.replace("http", "ws", 1), "blob:", "data:", "about:")):
            self.troubles.append(f"request: {url}")

    def _received(self, frame: str | bytes) -> None:
        self.sent += len(frame)


@contextmanager
def opened(browser: Any, server: Server, name: str, *, classic: bool = False) -> Iterator[Notebook]:
    """Open a notebook in a page of its own, its kernel ready."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    notebook = Notebook(context.new_page())
    notebook.page.set_default_timeout(20_000)
    address = server.address(name, classic=classic)
    notebook.watch(address)
    with notebook.page.expect_websocket(lambda one: one.url.split("?")[0].endswith("/channels")) as connected:
        notebook.page.goto(address)
    connected.value.wait_for_event("framereceived")
    notebook.page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    try:
        yield notebook
    finally:
        context.close()
