from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.utils.units import format_bytes, format_ns, format_ratio

NS = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9}
BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (850, "850 ns"), (1230, "1.23 µs"), (45.6e6, "45.6 ms"), (3.21e9, "3.21 s"), (999.9, "1.00 µs"),
     (-1500, "-1.50 µs"), (999_600, "1.00 ms"), (12_345_000, "12.3 ms"), (123e9, "123 s")],
)  # fmt: skip
def test_times(ns: float, text: str) -> None:
    assert format_ns(ns) == text


def test_ratios_that_say_nothing_are_not_figures() -> None:
    assert [format_ratio(one) for one in (0.004, 0.01, 2.314, 999.0, 1e5)] == [
        "<0.01x",
        "0.01x",
        "2.31x",
        "999.00x",
        ">1000x",
    ]


@given(st.floats(1, 1e13))
def test_a_time_reads_back_within_half_a_per_cent(ns: float) -> None:
    number, unit = format_ns(ns).split()
    assert float(number) * NS[unit] == pytest.approx(ns, rel=0.006, abs=0.51)
    assert len(number.replace(".", "").lstrip("0")) <= 3 or unit == "s"


@given(st.floats(1, 1e13))
def test_a_size_reads_back_within_half_a_per_cent(nbytes: float) -> None:
    number, unit = format_bytes(nbytes).split()
    assert float(number) * BYTES[unit] == pytest.approx(nbytes, rel=0.006, abs=0.51)
