"""Draw which folders import which, from the imports themselves: those inside functions and for types are counted too.

    python docs/draw_imports.py . docs/images/imports.svg   # this checkout
    python docs/draw_imports.py DIRECTORY other.svg         # another one

An arrow's width is the number of importing modules. Modules that lie in no folder are drawn one by one; red arrows are
part of a circle.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import graphviz
import grimp
import networkx

PACKAGES = ("nimble_core", "nimble_viz")


def rooms(checkout: Path) -> networkx.DiGraph:
    """Folders of both packages, and modules outside of folders, with how many modules of one import the other."""
    sys.path.insert(0, str(checkout.resolve()))
    imports = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    counts: Counter[tuple[str, str]] = Counter()
    found = networkx.DiGraph()
    for module in imports.modules - set(PACKAGES):
        found.add_node(_room(module))
        targets = {_room(one) for one in imports.find_modules_directly_imported_by(module) if one not in PACKAGES}
        counts.update((_room(module), target) for target in targets - {_room(module)})
    found.add_edges_from((one, other, {"modules": count}) for (one, other), count in counts.items())
    return found


def drawn(graph: networkx.DiGraph) -> str:
    """SVG of the graph, a cluster for each package, circles in red."""
    circle = {room: at for at, some in enumerate(networkx.strongly_connected_components(graph)) for room in some}
    lines = "line" if len(graph) > 50 else "true"
    picture = graphviz.Digraph(
        graph_attr={"rankdir": "TB", "nodesep": "0.2", "ranksep": "0.6", "fontname": "sans-serif", "splines": lines},
        node_attr={"shape": "box", "style": "rounded", "fontname": "sans-serif", "fontsize": "12"},
        edge_attr={"color": "#55667788", "arrowsize": "0.6"},
    )
    for package in PACKAGES:
        with picture.subgraph(name=f"cluster {package}") as cluster:
            cluster.attr(label=package, color="#99aabb", style="rounded")
            for room in sorted(graph):
                if room.startswith(package):
                    cluster.node(room, room.removeprefix(f"{package}."))
    for one, other, modules in sorted(graph.edges(data="modules")):
        back = circle[one] == circle[other]
        width = str(min(0.5 + modules / 4, 5))
        picture.edge(one, other, penwidth=width, **({"color": "#cc3311"} if back else {}))
    return str(picture.pipe("svg", encoding="utf-8"))


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


if __name__ == "__main__":
    graph = rooms(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(drawn(graph), encoding="utf-8")
    circles = [some for some in networkx.strongly_connected_components(graph) if len(some) > 1]
    print(f"{len(graph)} rooms, {graph.number_of_edges()} arrows, circles of {sorted(map(len, circles))} rooms")
