"""How many architectures are right as they come: each prepared with defaults and compared with eager on fresh inputs.

    python -m tests.coverage --out benchmarks/results/coverage-host.jsonl    # goes on where it stopped
    python -m tests.coverage --device cuda --out benchmarks/results/coverage-h200.jsonl
    python -m tests.coverage --names transformers:bert --group host               # one, printed
    python -m tests.coverage --group lowering --out benchmarks/results/lowering-host.jsonl  # what lowering.py says
    python -m tests.coverage --table                      # writes their tables into pages; --check: only looks

``list.json`` names the architectures of each group, as ``package:name``; one of transformers is a model type,
with its default configuration made small by one rule (``small``). Each has a process of its own, time and memory of
which are limited. A model counts as static where two eager runs on different values issue the same calls, or
``torch.export`` succeeds.
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import math
import multiprocessing
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from benchmarks.common import ROOT, filled, markdown, options, publish
from benchmarks.models import Noted
from nimble_core import Nimble, Options, TrainStep
from nimble_core.utils.errors import first_line
from nimble_core.validation.bounds import BOUNDS, tolerance_for
from nimble_core.validation.distances import relative_error
from tests.coverage import lowering

LIST = ROOT / "tests" / "coverage" / "list.json"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "coverage.md", ROOT / "docs" / "kernels.md", ROOT / "README.md")
# Time decides which plan is kept, not what is right: a second of it is enough on a host.
GROUPS = {
    "host": ("on the host, default options", Options(budget_s=1.0)),
    "training": ("training steps on the host", Options(tune="off")),
    "cuda": ('on a GPU, `tune="off"`', Options(tune="off")),
    "cuda-default": ("on a GPU, default options", Options()),
}
LOWERING = "lowering"  # no run of a model, but what its compiler gets
FRESH = 2
_LIMIT_S, _LIMIT_GB, _MOST = 120, 8, 400_000_000
_LAYERS = re.compile(r"(^|_)(layers?|num_blocks|depth)$")
_HEADS = re.compile(r"(^|_)(heads|n_head)$")
_WIDTHS = re.compile(r"(^|_)(hidden_size|d_model|n_embd|dim|hidden_dim|intermediate_size|ffn_dim|d_ff|n_inner)$")

Inputs = Callable[[int], dict[str, Any]]
Row = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def small(kind: type, level: str) -> Any:
    """Shrink a default configuration, and those that it holds.

    ``"small"``: two layers, sixteen experts, and widths and heads divided by one number, so that a head stays what it
    is; ``"shallow"``: two layers; ``"default"``: as it is.
    """
    default = kind()
    if level == "default":
        return default
    values = default.to_dict()
    numbers = {name: value for name, value in values.items() if type(value) is int and value}
    changed: dict[str, Any] = {name: 2 for name, value in numbers.items() if _LAYERS.search(name) and value > 2}
    if isinstance(values.get("depths"), (list, tuple)):
        changed["depths"] = [1 for _ in values["depths"]]
    if level == "small":
        changed |= {name: 16 for name, value in numbers.items() if name.endswith("experts") and value > 16}
        heads = {name: value for name, value in numbers.items() if _HEADS.search(name)}
        scaled = heads | {name: value for name, value in numbers.items() if _WIDTHS.search(name)}
        by = max(math.gcd(*heads.values()) // 2, 1)
        if all(value % by == 0 for value in scaled.values()):
            changed |= {name: value // by for name, value in scaled.items()}
    for name in kind.sub_configs:  # type: ignore[attr-defined]  # only some classes have it
        if (part := getattr(default, name, None)) is not None:
            changed[name] = small(type(part), level)
    return kind(**changed)


def made(name: str, device: str) -> tuple[torch.nn.Module, Inputs, str]:
    """Make the model that the list calls so; return it with inputs that it takes, and its size."""
    package, _, known = name.partition(":")
    return transformers_model(known, device) if package == "transformers" else vision_model(package, known, device)


def transformers_model(name: str, device: str) -> tuple[torch.nn.Module, Inputs, str]:
    """Make the base model of a model type; return it with the first inputs that eager takes, and its size."""
    import transformers

    kind = transformers.CONFIG_MAPPING[name]
    said = "no inputs"
    for level in ("small", "shallow", "default"):  # what does not fit odd ones: the next
        try:
            config = small(kind, level)
            with torch.device("meta"):
                size = sum(one.numel() for one in transformers.AutoModel.from_config(config).parameters())
            if size > _MOST:
                raise ValueError(f"{size} parameters")
            model = transformers.AutoModel.from_config(config).eval().to(device)
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            continue
        for shapes in _tries(model):
            inputs = _maker(shapes, device)
            try:
                with torch.no_grad():
                    model(**inputs(0))
                return model, inputs, level
            except Exception as error:  # not what it takes
                said = f"{type(error).__name__}: {first_line(error)}"
    raise ValueError(f"eager does not run: {said}")


def _tries(model: Any) -> Iterator[Shapes]:
    """Shapes of inputs: of the main one, with what the forward needs besides, then of all that is known here."""
    known = _shapes(model.config)
    taken = [name for name in inspect.signature(model.forward).parameters if name in known]
    main = model.main_input_name if isinstance(model.main_input_name, str) else model.main_input_name[0]
    needed = [name for name in taken if name in (main, "decoder_input_ids", "bbox")]
    for names, at in product(dict.fromkeys([(main,), tuple(needed), tuple(taken)]), range(4)):
        yield {name: known[name][at] for name in names}


def _shapes(config: Any) -> dict[str, Sequence[tuple[int, ...]]]:
    """Shapes to try by name of input."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]

    def first(names: Sequence[str], otherwise: Any) -> Any:
        """Return the first of these attributes, of the configuration or of one that it holds."""
        return next((value for one in parts for name in names if (value := getattr(one, name, None))), otherwise)

    size = first(["image_size"], 224)
    size = (size["height"], size["width"]) if isinstance(size, Mapping) else size
    size = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    channels, bins = first(["num_channels", "in_channels"], 3), first(["num_mel_bins", "feature_size"], 80)
    video = (1, first(["num_frames"], 8), channels, *size)
    images = [(2, channels, *size), video, (2, 3, 224, 224), (1, channels, 64, 64)]
    ids = [(2, 12), (1, 128), (1, 1024), (2, 12)]
    return {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "bbox": [(*one, 4) for one in ids],
        "pixel_values": images,
        "pixel_values_videos": [video] * 4,
        "input_values": [(2, 4000), (2, first(["max_length"], 1024), bins), (1, 1, 4000), (2, 16000)],
        "input_features": [(2, bins, 3000), (2, 100, bins), (2, 1, 1001, 64), (1, bins, 200)],
    }


def _maker(shapes: Shapes, device: str) -> Inputs:
    """Return a maker of inputs of these names and shapes, with other values for each turn."""

    def make(turn: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(turn)
        found = {}
        for name, shape in shapes.items():
            if name in ("input_ids", "decoder_input_ids", "bbox"):  # in order, as the corners of a box have to be
                found[name] = torch.randint(10, 90, shape, generator=drawn).sort(-1)[0].to(device)
            else:
                found[name] = torch.randn(shape, generator=drawn).to(device)
        return found

    return make


def vision_model(package: str, name: str, device: str) -> tuple[torch.nn.Module, Inputs, str]:
    """Make a model of torchvision or timm with random weights, and two images of 224 pixels, or as timm says."""
    if package == "torchvision":
        import torchvision

        model, size = torchvision.models.get_model(name, weights=None), 299 if name == "inception_v3" else 224
    else:
        import timm

        model = timm.create_model(name)
        size = model.default_cfg["input_size"][-1]
    return model.eval().to(device), _maker({"x": (2, 3, size, size)}, device), "default"


def _told(given: Any) -> str:
    """Tell calls apart by all but tensors' values and objects' addresses."""
    shown = tree_map_only(torch.Tensor, lambda one: f"{one.dtype}{list(one.shape)}", given)
    return re.sub(r" at 0x\w+", "", repr(shown))


def why_not_static(model: torch.nn.Module, inputs: Inputs) -> str:
    """Empty for a static model; else the first call that differs between two runs on other values."""
    runs: list[list[str]] = [[], []]
    for turn, seen in enumerate(runs):
        torch.manual_seed(turn)
        given = inputs(turn)
        with torch.no_grad(), Noted(lambda func, *given, seen=seen: seen.append(f"{func} {_told(given)}")):
            model(**given)
    if runs[0] == runs[1]:
        return ""
    with suppress(Exception):
        torch.export.export(model, (), inputs(0))
        return ""
    at = next((i for i, (a, b) in enumerate(zip(*runs, strict=False)) if a != b), min(map(len, runs)))
    return f"call {at} of two eager runs differs: {', '.join(f'{run[at : at + 1]}'[:80] for run in runs)}"


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors of nested containers and of caches, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for one in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_of(one)
    elif "Cache" in type(tree).__name__:
        yield from tensors_of(dict(sorted(vars(tree).items())))  # one put together again may hold them in another order


def compared(model: torch.nn.Module, inputs: Inputs, options: Options) -> Row:
    """Whether a prepared model gives eager's outputs, in eager's types, on fresh inputs."""
    net = Nimble(model, options).prepare(**inputs(100))
    worst, exact = 0.0, True
    for turn in range(FRESH):
        (kind, theirs), (mine, ours) = (_ran(one, inputs, turn) for one in (model, net))
        if kind is not mine or len(theirs) != len(ours):
            told = f"outputs are {mine.__name__} of {len(ours)}, not {kind.__name__} of {len(theirs)}"
            return {"passes": False, "error": told}
        worst = max(worst, relative_error(ours, theirs))
        exact = exact and all(map(torch.equal, ours, theirs))
    # torch's default on a GPU is TF32 in convolutions, so that eager itself is no nearer to float64.
    convolves = any(isinstance(one, torch.nn.modules.conv._ConvNd) for one in model.modules())
    right = worst <= (tolerance_for(theirs) if convolves else BOUNDS["float32"].tolerance)
    return {"passes": right, "exact": exact, "error": "" if right else f"outputs are off by {worst:.1e}"}


def _ran(model: Any, inputs: Inputs, turn: int) -> tuple[type, list[torch.Tensor]]:
    """Type of an output, and its tensors."""
    torch.manual_seed(turn)
    with torch.no_grad():
        output = model(**inputs(turn))
    return type(output), [tensor.clone() for tensor in tensors_of(output)]


def trained(model: torch.nn.Module, inputs: Inputs, options: Options) -> Row:
    """Whether three prepared steps give eager's losses and parameters."""
    models = [model, copy.deepcopy(model)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in models]
    step = TrainStep(models[1], loss_of, optimizers[1], options=options).prepare(inputs(100))
    worst = 0.0
    for turn in range(3):
        torch.manual_seed(turn)
        optimizers[0].zero_grad()
        loss = loss_of(models[0](**inputs(turn)))
        loss.backward()
        optimizers[0].step()
        torch.manual_seed(turn)
        worst = max(worst, relative_error([step(inputs(turn)).detach()], [loss.detach()]))
    apart = relative_error(*([one.detach() for one in model.parameters()] for model in models))
    right = worst <= BOUNDS["float32"].tolerance and apart <= 1e-3
    told = "" if right else f"losses are off by {worst:.1e}, parameters by {apart:.1e}"
    return {"passes": right, "exact": worst == apart == 0, "error": told}


def loss_of(output: Any) -> torch.Tensor:
    """Return the mean square of the first output that has a gradient."""
    first = next(one for one in tensors_of(output) if one.requires_grad and one.is_floating_point())
    return first.float().square().mean()


def measure(name: str, group: str) -> Row:
    """One row: what became of an architecture."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = prepared = time.monotonic()
    device = "cuda" if group.startswith("cuda") else "cpu"
    row: Row = {"name": name, "group": group, "static": None, "passes": False}
    try:
        model, inputs, row["size"] = made(name, device)
        if group == LOWERING:
            found = lowering.compared(model, inputs(0))
            return row | {"static": True, "passes": not (found["ours more"] or found["theirs more"]), **found}
        row["inputs"] = {key: list(one.shape) for key, one in inputs(0).items()}
        row["why"] = why_not_static(model.train(group == "training"), inputs)
        row["static"], prepared = not row["why"], time.monotonic()
        row |= (trained if group == "training" else compared)(model, inputs, GROUPS[group][1])
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    now = time.monotonic()
    return row | {"seconds": round(now - started, 1), "own_s": round(now - prepared, 1)}


def run(work: Sequence[tuple[str, str]], out: Path | None) -> Iterator[Row]:
    """Rows of ``(name, group)`` that the file lacks, each made in a process of its own; and kept there."""
    # Forked: what all need is imported once.
    import transformers.models.bert.modeling_bert  # noqa: F401  # what children then need not import

    gc.freeze()
    fork = multiprocessing.get_context("fork")
    held = map(json.loads, out.read_text().splitlines() if out and out.exists() else ())
    done = {(row["name"], row.get("group", LOWERING)) for row in held}
    for name, group in (one for one in work if one not in done):
        mine, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_child, args=(name, group, theirs))
        process.start()
        theirs.close()
        row: Row = {"name": name, "group": group, "static": None, "passes": False}
        try:
            row = mine.recv() if mine.poll(_LIMIT_S) else row | {"error": f"took over {_LIMIT_S} s"}
        except EOFError:
            row["error"] = "its process died: out of memory, or a crash"
        process.kill()
        process.join()
        if out:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def _child(name: str, group: str, pipe: Any) -> None:
    if not group.startswith("cuda"):  # which maps far more than it uses
        resource.setrlimit(resource.RLIMIT_DATA, (_LIMIT_GB << 30, _LIMIT_GB << 30))
    pipe.send(measure(name, group))


def table(rows: Sequence[Row]) -> str:
    """Write the results as Markdown: a line for each group, then each model that does not pass."""
    counted, failed = [], []
    for group, (what, _) in GROUPS.items():
        mine = [one for one in rows if one["group"] == group]
        static = [one for one in mine if one["static"]]
        passed = [one for one in static if one["passes"]]
        share = f" ({len(passed) / len(static):.1%})" if static else ", not measured yet"
        exact = sum(bool(one.get("exact")) for one in passed)
        counted.append([what, f"{len(mine)}", f"{len(static)}", f"{len(passed)}{share}", f"{exact}"])
        for one in (one for one in mine if not one["passes"]):
            said = re.sub(r"\s+", " ", one.get("error", "")).replace("|", "\\|").replace("<", "\\<")
            failed.append([group, f"`{one['name']}`", {True: "yes", False: "no"}.get(one["static"], "–"), said])
    text = markdown(["group", "architectures", "static", "of these pass", "bit for bit"], counted)
    heads = ["group", "architecture", "static", "what is said"]
    return f"{text}\n\n{markdown(heads, failed) if failed else 'All pass.'}"


def works(rows: Sequence[Row]) -> str:
    """Say in a sentence how many architectures are prepared with their packages' defaults."""
    static = [one for one in rows if one["group"] == "host" and one["static"]]
    passed = sum(bool(one["passes"]) for one in static)
    return (
        f"Of {len(static)} static architectures of `transformers`, {passed} are prepared as they come, and are right."
    )


def results(folder: Path) -> list[Row]:
    """Rows of all files of results, in the order of the list; of one architecture and group the last counts."""
    files = sorted(folder.glob("coverage-*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    found = {(one["group"], one["name"]): one for one in rows}
    return [
        found[group, name]
        for group, names in json.loads(LIST.read_text()).items()
        for name in names
        if (group, name) in found
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is due, or write the tables."""
    parser = options(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--group", action="append", choices=[*GROUPS, LOWERING], help="by default all of the device")
    parser.add_argument("--names", nargs="+", help="by default all of the list")
    parser.add_argument("--table", action="store_true", help="write the pages of what the results say")
    parser.add_argument("--check", action="store_true", help="exit status 1 where the pages say something else")
    given = parser.parse_args(arguments)
    if given.table or given.check:
        rows, graphs = results(RESULTS), (RESULTS / "lowering-host.jsonl").read_text().splitlines()
        parts = {"coverage": table(rows), "works": works(rows), LOWERING: lowering.table([*map(json.loads, graphs)])}
        texts = {page: filled(page.read_text(), parts) for page in PAGES}
        return publish(texts, "tests.coverage --table", check=given.check)
    groups = given.group or [group for group in GROUPS if group.startswith("cuda") == (given.device == "cuda")]
    listed: dict[str, list[str]] = json.loads(LIST.read_text())
    listed[LOWERING] = sorted({name for names in listed.values() for name in names})
    for row in run([(name, group) for group in groups for name in given.names or listed[group]], given.out):
        outcome = "pass" if row["passes"] else "FAIL" if row["static"] else "not static"
        print(outcome, row["group"], row["name"], row.get("error", ""), flush=True)
    return 0
