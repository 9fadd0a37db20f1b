"""``python -m nimble_viz doctor``: what works on this machine, what does not, and what to do about it.

Features are tried out, not looked up: a model is prepared and replayed, the replays are watched, a dot is drawn.
Whatever is missing or broken becomes a finding; nothing here raises.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nimble_viz.cli.doctor_checks import CHECKS, Machine, State, first_line

if TYPE_CHECKING:
    from nimble_core.torch_compat.private import Private

__all__ = ["Diagnosis", "Finding", "examine"]

_INTERNALS = "Torch's internals"
_INSTALL = "pip install --upgrade nimble-viz"
_FIXES = {"torch": 'pip install "torch>=2.11"', "captured graph": 'pip install "nimble-viz[cuda13]" (or [cuda12])'}
"""What to do about a feature whose check raised; for all others, install again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about one feature.

    Args:
        group: what the feature is for: ``"Running"``, ``"Kernels and memory"``, ``"Measuring"``, ``"Seeing"``,
            ``"Handing on"`` or ``"Torch's internals"``.
        feature: its name.
        state: ``"works"``; ``"fallback"``: something else is done instead; ``"off"``: not there; ``"broken"``: needed,
            and does not work.
        why: what was seen.
        fix: what to do about it; empty if there is nothing to do.
    """

    group: str
    feature: str
    state: State
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings on one machine, in the order to read them in.

    Args:
        findings: one for each feature.
        internals: one for each private name of torch that is used; none if torch cannot be imported.
    """

    findings: tuple[Finding, ...]
    internals: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return 1 if something that is needed is broken, else 0."""
        return int(any(one.state == "broken" for one in (*self.findings, *self.internals)))

    @property
    def verdict(self) -> str:
        """Sum up in one sentence."""
        counts = Counter(one.state for one in self.findings)
        broken = ", ".join(one.feature for one in (*self.findings, *self.internals) if one.state == "broken")
        rest = f"{counts['works']} features work, {counts['fallback']} with a fallback, {counts['off']} off"
        return f"Broken: {broken}; {rest}." if broken else f"Ready: {rest}."

    def _shown(self) -> tuple[Finding, ...]:
        """Return what text shows: of torch's internals those that are missing, and one line for all others."""
        fine = sum(one.state == "works" for one in self.internals)
        missing = [one for one in self.internals if one.state in ("fallback", "broken")]
        counted = [Finding(_INTERNALS, "private names", "works", f"{fine} found; --json lists them")] * bool(fine)
        return (*self.findings, *counted, *missing)

    def to_json(self) -> str:
        """Return all of it as JSON, with a line break at the end."""
        from nimble_core import __version__

        found = {
            "nimble_viz": __version__,
            "python": platform.python_version(),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "findings": [asdict(one) for one in self.findings],
            "internals": [asdict(one) for one in self.internals],
        }
        return json.dumps(found, indent=2) + "\n"

    def to_text(self) -> str:
        """Return all of it as lines of text."""
        lines = [self.verdict]
        shown = self._shown()
        for group in dict.fromkeys(one.group for one in shown):
            lines += ["", group]
            for one in shown:
                if one.group == group:
                    lines.append(f"  {one.state:<8}  {one.feature}: {one.why}")
                    lines += [f"            -> {one.fix}"] * bool(one.fix)
        return "\n".join(lines) + "\n"


def examine() -> Diagnosis:
    """Try every feature out on this machine, which takes a few seconds, most of them torch's import.

    Never raises: an error that a check did not foresee is a finding too.
    """
    findings: list[Finding] = []
    machine = Machine()
    for group, feature, needed, check in CHECKS:
        fix = _FIXES.get(feature, _INSTALL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                state, why, fix = check(machine)
            except KeyboardInterrupt:
                raise
            except ModuleNotFoundError as error:
                package = (error.name or "?").partition(".")[0]
                state, why = "off", f"the package {package} is not installed"
            except BaseException as error:  # SystemExit too: a broken package may raise anything on import
                state, why = "off", f"{type(error).__name__}: {first_line(error)}"
        if needed and state == "off":
            state = "broken"
        findings.append(Finding(group, feature, state, why, fix))
    with suppress(Exception):
        machine.close()
    return Diagnosis(tuple(findings), _internals())


def _internals() -> tuple[Finding, ...]:
    """Look for each private name of torch that is used; return none if torch itself is broken."""
    try:
        from nimble_core.torch_compat.private import all_entries

        return tuple(_internal(entry) for entry in all_entries())
    except KeyboardInterrupt:
        raise
    except BaseException:  # a broken torch may raise anything on import
        return ()


def _internal(entry: Private) -> Finding:
    from nimble_core.torch_compat.private import REMEDY

    name = entry.name.replace(":", ".")
    try:
        found = entry.find()
    except Exception as error:  # a module of torch's that fails to import
        state: State = "broken" if entry.essential else "fallback"
        return Finding(_INTERNALS, name, state, f"{type(error).__name__}: {first_line(error)}", REMEDY)
    if found is not None:
        return Finding(_INTERNALS, name, "works", f"{entry.purpose}; checked on {', '.join(entry.checked)}")
    if not entry.expected:
        return Finding(_INTERNALS, name, "off", f"this torch has no {entry.needs}")
    if not entry.essential:
        return Finding(_INTERNALS, name, "fallback", f"missing: {entry.without}")
    return Finding(_INTERNALS, name, "broken", f"missing, needed to {entry.purpose}", REMEDY)
