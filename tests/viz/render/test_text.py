"""Terminal text: every case at every width, plain in a pipe, hostile names harmless."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from nimble_core.ir.program import Origin
from nimble_viz.analysis.tiles import tiles
from nimble_viz.render.layout import FILLS
from nimble_viz.render.text import plain_text, report_text
from nimble_viz.report.data import EqualityCheck
from tests.support.sample_reports import RENDERED, busy_report, old_report, plan_report, sample_report, timed


def words(text: str) -> str:
    """``text`` without its line breaks and indents."""
    return " ".join(text.split())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("case", RENDERED)
def test_fits_its_width_without_control_codes(case: str, width: int, full: bool) -> None:
    text = plain_text(RENDERED[case](), width, full=full)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("case", RENDERED)
def test_the_first_screen_is_three_tiles_on_twelve_lines(case: str, width: int) -> None:
    report = replace(RENDERED[case](), model="Net")
    lines = plain_text(report, width).splitlines()
    assert len(lines) <= 12
    assert lines[0].startswith("nimble_viz: Net, ")
    assert [line.split()[0] for line in lines[1:] if line[0] != " "] == ["now", "prepared", "next", "more"]
    found = tiles(report)
    assert found["prepared"]["figure"] in words(" ".join(lines))
    assert words(found["next"]["code"]) in words(" ".join(lines))
    assert words(found["next"]["figure"])[:60] in words(" ".join(lines))


def test_bars_are_on_one_scale() -> None:
    report = timed(sample_report(24), {"eager": 4e5, "single": 2e5, "nimble": 1e5}, noise=0.01)
    now, prepared = (
        sum(map(line.count, FILLS)) for line in plain_text(report, 80).splitlines() if any(map(line.count, FILLS))
    )
    assert now == 4 * prepared


def test_what_is_undecided_is_neither_bold_nor_green() -> None:
    for report, told in ((busy_report(), "undecided"), (sample_report(), "faster")):
        screen = io.StringIO()
        Console(file=screen, width=100, force_terminal=True, color_system="standard").print(report)
        (line,) = (one for one in screen.getvalue().splitlines() if told in one and "eager" in one and "(" in one)
        assert ("\x1b[1;32m" in line) is (told == "faster")


def test_all_sections_of_a_full_report() -> None:
    text = plain_text(sample_report(60, stable=False), 100, full=True)
    assert "(unstable)" in text
    for title in (
        "Speed (float16, batch 1, NVIDIA H200)",
        "Equality with eager",
        "Plans that were tried",
        "Streams and synchronisations",
        "Limits",
        "Framework overhead of the eager run",
        "Host synchronisations",
        "Hottest lines",
        "Preparation (130 ms)",
        "Device memory",
        "Results that hold the peak",
        "Environment",
        "Warnings",
    ):
        assert f"\n\n{title}" in text


@pytest.mark.parametrize("width", [60, 100])
def test_a_candidate_with_wrong_outputs_is_marked(width: int) -> None:
    text = plain_text(sample_report(), width, full=True).split("Plans that were tried")[1].split("Streams and")[0]
    assert re.findall(r"^  (nimble|opara|one)", text, re.M) == ["nimble", "opara", "one"]
    assert text.count("(outputs") == 1
    assert "Plans that were tried" not in plain_text(old_report(), width, full=True)


def test_a_plan_claims_nothing_that_would_need_a_run() -> None:
    text = plain_text(plan_report(), 100, full=True)
    for title in ("Speed", "Equality with", "Plans that were tried", "Device memory"):
        assert f"\n{title}" not in text
    assert "in flight:" not in text


def test_ratios_carry_their_interval() -> None:
    ratio = sample_report().ratio("nimble")
    assert ratio is not None
    text = plain_text(sample_report(), 120, full=True)
    assert f"{ratio.value:.2f}x" in text
    assert f"[{ratio.low:.2f}, {ratio.high:.2f}]" in text


def test_a_check_that_failed_is_not_called_equal() -> None:
    check = EqualityCheck("nimble", 1e300, 1e-3, 0.5, False, "outputs are not finite")
    text = plain_text(replace(sample_report(), checks=(check,)), 100, full=True)
    assert re.search(r"nimble replay +DIFFERS +not finite", text)
    assert "outputs are not finite" in text


def test_markup_and_escapes_in_names_are_only_text() -> None:
    report = sample_report(6)
    origin = (Origin("aten.add", "[red]layer[/nothing]\x1b[2J\u202e"),)
    calls = tuple(replace(call, origins=origin) for call in report.program.calls)
    report = replace(report, model="[bold]Net[/]\x1b]0;title\x07", program=replace(report.program, calls=calls))
    screen = io.StringIO()
    Console(file=screen, width=100, force_terminal=True).print(report_text(report, full=True))
    assert "[bold]Net[/]\N{REPLACEMENT CHARACTER}]0;title" in screen.getvalue()
    assert "[red]layer[/nothing]\N{REPLACEMENT CHARACTER}[2J" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


def test_colours_only_on_a_terminal() -> None:
    colour, pipe = io.StringIO(), io.StringIO()
    Console(file=colour, force_terminal=True, color_system="standard", width=80).print(sample_report())
    Console(file=pipe, force_terminal=False, width=80, _environ={}).print(sample_report())
    assert "\x1b[" in colour.getvalue()
    assert "\x1b[" not in pipe.getvalue()
