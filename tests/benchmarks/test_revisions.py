"""Two checkouts side by side: ratios, and a run on the host of this checkout against itself."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from benchmarks import revisions
from benchmarks.revisions import ROOT, main


def test_examples_in_the_code() -> None:
    assert doctest.testmod(revisions).failed == 0


@pytest.mark.slow
def test_a_checkout_against_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older = tmp_path / "older"
    older.symlink_to(ROOT)
    pytest.importorskip("transformers", reason="needs transformers: make test installs it")
    monkeypatch.setattr(revisions, "ROWS", (("T5-small 128+32", "float32", "inference"),))
    out = tmp_path / "results.json"
    assert main(["--older", str(ROOT), "--out", str(out), "--rounds", "2", "--rows", "no such"]) == 0
    assert not out.exists()
    main(["--older", str(older), "--out", str(out), "--rounds", "1"])  # times may differ by anything here
    if not out.exists():  # on a busy machine two processes may choose differently
        assert "not compared: one process prepared" in capsys.readouterr().out
        return
    (row,) = json.loads(out.read_text())["rows"].values()
    assert len(row["older"]) == len(row["newer"]) == 2
    assert set(row["ratios"]) == {"host_us", "throughput_us"}
    assert row["prepared"]["device"] == "cpu"


def test_what_moved_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    still = {"ratio": 1.01, "low": 0.9, "high": 1.1}
    rows = {f"{name}, {dtype}, {kind}": {"ratios": {"device_us": still}} for name, dtype, kind in revisions.ROWS}
    out.write_text(json.dumps({"rows": rows}))
    assert main(["--older", str(ROOT), "--out", str(out)]) == 0
    rows["ResNet-50, float16, inference"]["ratios"] = {"device_us": {**still, "ratio": 1.04}}
    out.write_text(json.dumps({"rows": rows}))
    assert main(["--older", str(ROOT), "--out", str(out)]) == 1
    assert capsys.readouterr().out.endswith("ResNet-50, float16, inference: device_us 1.040\n")
