"""The training suite's figure: what has a bar, where the marks are, and that it is drawn the same twice."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from benchmarks import bars
from benchmarks.training import OVERHEAD, PEERS, WAYS
from benchmarks.training_figure import MARKS, Bar, footnote, lines, main
from tests.support.training_rows import full, keyed, results, suite

TF32 = ("tf32", "float32")


def test_examples_in_the_code() -> None:
    assert doctest.testmod(bars) == (0, 1)


def test_bars_are_ours_and_marks_are_peers_over_eager() -> None:
    first, second = lines(keyed(full(RO=120.0), full("C", "float32", 8, eager=300.0, compile=95.0)), TF32)
    assert first.name == "A CIFAR, 32"
    assert first.bars == {
        "step": Bar(4.0, 0, 9, 1.2), "drop-in": Bar(pytest.approx(400 / 120), 0, 9, pytest.approx(1.0)),
    }  # fmt: skip
    assert first.peers == {OVERHEAD: pytest.approx(400 / 120)}
    assert second.name == "C, 8, float32"
    assert second.bars["step"].best == pytest.approx(0.95)
    assert second.peers == {"compile": pytest.approx(300 / 95)}
    assert Bar(1.2, 1.0, 1.3, 0.997, stable=False).labels == ("1.20×†", "0.997×")
    assert MARKS.keys() == set(PEERS)


def test_means_are_of_cifars_shapes_and_of_ours_that_are_right() -> None:
    rows = [full(ours=100.0), full("B CIFAR", ours=25.0), full("D CIFAR", passed=False, ours=1.0), full("C")]
    found = lines(keyed(*rows), TF32)
    assert [line.name for line in found] == ["A CIFAR, 32", "B CIFAR, 32", "D CIFAR, 32", "geometric mean", "C, 32"]
    assert found[2].bars == {}
    assert found[3].bars["step"].value == pytest.approx(8.0)
    assert lines(keyed(full(), full("C")), TF32)[-1].name == "C, 32"
    note = footnote(keyed(*rows), unstable=True)
    assert "Not shown to learn what eager does: ours, whole step on D CIFAR, tf32, batch 32; ours, drop-in" in note
    assert "unstable" in note
    assert "Not shown" not in footnote(keyed(full()), unstable=False)


@pytest.mark.parametrize("dtypes", [("tf32",), ("tf32", "float32", "bf16"), ("bf16",)])
def test_a_suite_is_drawn_the_same_twice(dtypes: tuple[str, ...], tmp_path: Path) -> None:
    file, out = tmp_path / "results.json", tmp_path / "out.svg"
    file.write_text(json.dumps(results(*suite(*dtypes).values())))
    main([str(file), str(out)])
    once = out.read_bytes()
    assert b"<svg" in once
    main([str(file), str(out)])
    assert out.read_bytes() == once


def test_a_row_without_any_of_ours_is_drawn(tmp_path: Path) -> None:
    file, out = tmp_path / "results.json", tmp_path / "out.svg"
    file.write_text(json.dumps(results(full(passed=False, RO=200.0))))
    main([str(file), str(out)])
    assert out.exists()
    assert set(WAYS) == {"step", "drop-in"}


def test_a_figure_of_nothing_is_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "results.json", tmp_path / "out.svg"
    with pytest.raises(SystemExit, match="measure it"):
        main([str(file), str(out)])
    file.write_text(json.dumps(results()))
    with pytest.raises(SystemExit, match="no row"):
        main([str(file), str(out)])
    assert not out.exists()
