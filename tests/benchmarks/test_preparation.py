"""Cold and warm starts in processes of their own, and the table of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import preparation
from nimble_core import Nimble


def test_a_warm_start_finds_what_the_cold_one_has_kept() -> None:
    cold, warm = preparation.both_starts("mlp", "ours", "cpu")
    assert (cold["start"], warm["start"]) == preparation.STARTS
    assert (cold["recalled"], warm["recalled"]) == (False, True)
    assert "measure calls" in cold["phases"]
    assert "measure calls" not in warm["phases"]
    assert cold["compiler_cache"] == warm["compiler_cache"] == {}


def test_what_fails_is_said() -> None:
    for sample in preparation.both_starts("mlp", "nobody's", "nowhere"):
        assert "invalid choice" in sample["error"]


@pytest.mark.parametrize("row", ["mlp", "branches", "llama-decode"])
def test_the_rows_that_are_small_on_the_host(row: str) -> None:
    model, (args, kwargs) = preparation.case(row, "cpu")
    with torch.no_grad():
        assert torch.equal(Nimble(model).prepare(*args, **kwargs)(*args, **kwargs), model(*args, **kwargs))


def test_the_table_compares_with_torch_compile() -> None:
    def taken(way: str, start: str, cpu_s: float) -> dict[str, Any]:
        return {"row": "mlp", "way": way, "start": start, "wall_s": 2 * cpu_s, "cpu_s": cpu_s}

    samples = [taken("ours", start, 3.0) for start in preparation.STARTS]
    samples += [taken("torch.compile", start, 2.0) for start in preparation.STARTS]
    samples.append({"row": "mlp", "way": "ours", "start": "cold", "error": "died"})
    *_, warm = preparation.table(samples).splitlines()
    assert warm == "| mlp | warm | 6.0 s, 3.0 s CPU (1.50x) | 4.0 s, 2.0 s CPU (1.00x) |"
