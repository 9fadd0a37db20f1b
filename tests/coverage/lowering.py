"""Does the compiler get from us the graph that it gets from ``torch.compile``?

We hand Inductor a recording of eager's calls, ``torch.compile`` what Dynamo reads in the model's Python. Both graphs
are compared as Inductor is about to make kernels of them, all operators taken apart: how many of each operator one
has more than the other. Views, copies and what only makes constants (ours are folded ahead of time) are not compared. A
model whose graphs agree gets the same kernels from both, before our rewrites. Nothing is compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from benchmarks.common import markdown
from nimble_core import Nimble, Options
from nimble_core.compiler.inductor import compile_graph
from nimble_core.compiler.to_fx import lift
from nimble_core.torch_compat.compiler import INDUCTOR_CONFIG
from nimble_core.tracing.operator_traits import is_view

Row = dict[str, Any]
_COPIES = {"aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.copy.default"}
_CONSTANTS = {"aten.full.default", "prims.iota.default", "aten.lift_fresh_copy.default", "aten.scalar_tensor.default"}


class _CaughtError(Exception):
    """Ends a compilation once its graph is known."""


def operators(compiled: Callable[[], object]) -> Counter[str]:
    """Count the operators of the first graph that Inductor is given while ``compiled`` runs, and which ends it.

    Raises:
        Exception: what it raises before.
    """
    found: list[Counter[str]] = []

    def catch(graph: fx.Graph) -> None:
        found.append(Counter(str(node.target) for node in graph.nodes if _computes(node)))
        raise _CaughtError

    try:
        with INDUCTOR_CONFIG.require().patch(post_grad_custom_pre_pass=catch), torch.no_grad():
            compiled()
    except Exception:
        if not found:
            raise
    return found[0]


def _computes(node: fx.Node) -> bool:
    """Whether a node is compared; not those computed from no input or weight."""
    if node.op != "call_function" or is_view(node.target) or str(node.target) in _COPIES | _CONSTANTS:
        return False
    pending, seen = list(node.all_input_nodes), set[fx.Node]()
    while pending:
        one = pending.pop()
        if one.op in ("placeholder", "get_attr"):
            return True
        if one not in seen:
            seen.add(one)
            pending += one.all_input_nodes
    return False


def compared(model: torch.nn.Module, inputs: dict[str, Any]) -> Row:
    """Compare what both give to Inductor: operators that one has more than the other, and how many both have."""
    recorded = Nimble(model, Options(tune="off")).prepare(**inputs).engines[0].recorded
    ours = operators(lambda: compile_graph(lift(recorded.recording), recorded.signature.tensors))
    theirs = operators(lambda: torch.compile(model, fullgraph=True, dynamic=False)(**inputs))
    return {"both": (ours & theirs).total(), "ours more": dict(ours - theirs), "theirs more": dict(theirs - ours)}


def table(rows: Sequence[Row]) -> str:
    """Say in Markdown how many agree, how the others differ, and which are not compared."""
    both = [row for row in rows if "both" in row]
    unlike = [row for row in both if row["ours more"] or row["theirs more"]]
    names = ", ".join(f"`{row['name']}`" for row in rows if row not in both)
    said = f"Of {len(rows)} architectures both graphs are made of {len(both)}; {len(both) - len(unlike)} of these have "
    heads = ("architecture", "ours has more", "`torch.compile`'s has more")
    more = ([f"`{row['name']}`", _told(row["ours more"]), _told(row["theirs more"])] for row in unlike)
    text = f"{said}the same operators. The others:\n\n{markdown(heads, more)}\n\n"
    return f"{text}Not compared, because one of the two refuses them: {names or 'none'}."


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "–"
