"""Random models as readable Python source: each case is a pure function of its seed.

Statements are drawn from the tables below and executed as they are written, so that shapes are known and what eager
refuses is left out. What is kept is a module, its inputs and its options as text, to be pasted anywhere.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from textwrap import indent
from typing import Any

import torch

__all__ = ["MODES", "Case", "generate", "loss_of", "tensors_of"]

MODES = ("inference", "training", "step")  # prepare(x), prepare(x, training=True), TrainStep

_HEADER = """\
import random

import torch
import torch.nn.functional as F
from torch import nn

from nimble_core import Nimble, Options, TrainStep
from nimble_core.scheduling.policies.base import plan_streams
"""

_SCATTERED = """

def scattered(graph, costs, *, max_streams=None):
    draw = random.Random(graph.size)
    drawn = [draw.randrange(min(max_streams or 4, 4)) for _ in range(graph.size)]
    number = {stream: index for index, stream in enumerate(dict.fromkeys(drawn))}
    return plan_streams(graph, [number[stream] for stream in drawn], policy="scattered")
"""

# Fields: {a} a tensor, {b} one that broadcasts with it, {p} a boolean and {m} an integer one, {d} and {e} dimensions of
# {a}, {i}:{j} a window of dimension {d}, {w} its size, {t} slices up to it, {s} a number, {k} a small whole number,
# {last} the last size of {a}, {shape} its shape, {h} a name for a module or buffer, {n} for the result.
_SMOOTH = """\
{a}.tanh() | {a}.sigmoid() | F.gelu({a}) | F.silu({a}) | {a} * {s} | {a} + {s} | {s} - {a} | torch.exp(-{a}.abs())
{a}.sin() | {a}.clamp(-1.0, 1.0) | ({a}.abs() + 0.1).sqrt() | (1 + {a} * {a}).log() | F.softmax({a}, {d})
F.leaky_relu({a}, 0.1) | {a}.relu() | F.layer_norm({a}, ({last},)) | {a} / (1 + {b}.abs()) | {a}.cumsum({d})
{a}.flip({d}) | {a}.roll(1, {d}) | {a}.clone() | {a}.contiguous() | {a}.detach() | torch.lerp({a}, {b}, 0.3)
torch.addcmul({a}, {b}, {b}, value={s}) | {a} + {b} | {a} * {b} | {a} - {b} | torch.maximum({a}, {b})
torch.where({p}, {a}, {b}) | {a}.masked_fill({p}, {s}) | torch.stack([{a}, {a}], {d}) | torch.cat([{a}, {b}], {d})
{a} @ {b}.transpose(-1, -2) | {a} @ {a}.mT | torch.einsum("...i,...i->...", {a}, {b}) | torch.outer({a}, {b})
{a}.sum({d}) | {a}.mean({d}, keepdim=True) | {a}.amax({d}) | {a}.var({d}, unbiased=False) | {a}.logsumexp({d})
{a}.mean() | {a}.sum() | torch.linalg.vector_norm({a}, dim={d}) | F.normalize({a}, dim={d}) | {a}.double() | {a}.float()
F.scaled_dot_product_attention({a}, {a}, {b}) | F.pad({a}, (1, 2)) | {a}.repeat_interleave(2, {d})
sum([{a} * {k}, {b}, {a}]) | {a}.tril() | torch.utils.checkpoint.checkpoint(torch.tanh, {a}, use_reentrant=False)"""
_ROUGH = """\
{a}.sign() | {a}.round() | {a}.argmax({d}) | {a}.topk(1, {d})[0] | {a}.sort({d})[0] | {a} > {b} | {a}.floor()
{a}.to(torch.bfloat16) | {a}.long() | ({a} > 0).any({d}) | F.one_hot({m} % 5, 5) | {a}.max({d})[1] | {m} + {k}
torch.bucketize({a}, torch.tensor([-1.0, 0.0, 1.0], device={a}.device)) | ~{p} | {p} & ({a} > 0) | {a}.gather({d}, {m})
{a}.cumsum({d}).to(torch.int32) | {a}.index_select({d}, {m}.flatten() % {w}) | {a}[{m} % len({a})] | {a}.frac()
{a}.view(torch.int32) | {a}.to(torch.float16)"""
_VIEWS = """\
{a}[{t}{i}:{j}] | {a}[{t}{i}:{j}] | {a}[{t}::2] | {a}.transpose({d}, {e}) | {a}.unsqueeze({d}) | {a}.squeeze()
{a}.expand(2, *{a}.shape) | {a}.unfold({d}, 2, 1) | {a}.reshape(-1) | {a}.flatten({d}) | {a}.select({d}, {i})
{a}[None] | {a}.narrow({d}, {i}, {j} - {i}) | {a}.diagonal() | {a}.chunk(2, {d})[-1] | {a}.unbind({d})[0] | {a}.mT
{a}.view({shape}) | {a}.movedim({d}, -1) | {a}.as_strided((2, 2), (2, 1), 1) | {a}.split({k}, {d})[0] | {a}[..., {i}]"""
_WRITES = """\
{a}.add_({b}) | {a}.mul_({s}) | {a} += {b} | {a} *= {s} | {a}.copy_({b}) | {a}[{t}{i}:{j}] = {s} | {a}.tanh_()
{a}[{t}{i}:{j}] = {b} | {a}[{t}{i}] += {s} | {a}.relu_() | {a}.zero_() | {a}.fill_({s}) | {a}.masked_fill_({p}, {s})
{a}.index_fill_({d}, torch.tensor([{i}], device={a}.device), {s}) | {a}[{p}] = {s} | {a}[{t}::2] = {a}[{t}::2] * {s}
{a}.index_add_({d}, torch.tensor([{i}], device={a}.device), {b}) | {a}.clamp_(-1.0, 1.0) | {a}.mT.mul_({s})
{a}.data.mul_({s}) | torch.add({a}, {b}, out={a}) | {a}.diagonal().add_({s}) | {a}.swapaxes_({d}, {e}).mul_({s})
{a}.index_copy_({d}, torch.tensor([{i}], device={a}.device), {b}) | {a}.lerp_({b}, 0.5) | {a}.sub_({a}.mean())
{a}.unsqueeze_({d}) | {a}.squeeze_() | {a}.set_({b})"""
_MAKES = """\
torch.zeros({shape}, device=x0.device) | torch.ones({k}, device=x0.device) | torch.arange({last}, device=x0.device) / 9
torch.full({shape}, {s}, device=x0.device) | torch.tensor([{s}, 1.0], device=x0.device) | torch.zeros_like({a})
{a}.new_ones({shape}) | torch.eye({last}, device=x0.device) | torch.linspace(0, 1, {last}, device=x0.device)
torch.ones({shape}, device=x0.device).triu() | torch.empty_like({a}).fill_({s}) | torch.tensor({s}, device=x0.device)"""
_DRAWS = """\
torch.rand_like({a}) | torch.randn({shape}, device=x0.device) | F.dropout({a}, 0.5, True)
torch.bernoulli({a}.sigmoid().detach()) | F.dropout({a}, 0.3, self.training) | torch.zeros_like({a}).uniform_()
torch.randint(0, 9, {shape}, device=x0.device) | {a} + torch.randn_like({a}) * {s} | torch.empty_like({a}).normal_()"""
_MODULES = """\
nn.Linear({last}, {k}) | nn.Linear({last}, {last}) | nn.LayerNorm({last}) | nn.BatchNorm1d({second}) | nn.Dropout(0.4)
nn.BatchNorm2d({second}) | nn.Conv1d({second}, {k}, 2) | nn.Conv2d({second}, {k}, 3, padding=1) | nn.MaxPool1d(2)
nn.Conv2d({second}, {second}, 3, groups={second}) | nn.GroupNorm(1, {second}) | nn.AdaptiveAvgPool2d(2)
nn.AvgPool2d(2) | nn.Sequential(nn.Linear({last}, 6), nn.ReLU(inplace=True), nn.Linear(6, {k})) | nn.PReLU()
nn.Sequential(nn.Conv2d({second}, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) | nn.InstanceNorm1d({second})
nn.TransformerEncoderLayer({last}, 1, 8, batch_first=True) | nn.Sequential(nn.Dropout(0.2), nn.Hardtanh(inplace=True))
nn.utils.parametrizations.weight_norm(nn.Linear({last}, 3)) | nn.Bilinear({last}, {last}, 2) | nn.RMSNorm({last})"""
_STATE = (  # what a module keeps, and what a forward does with it
    ("torch.zeros(())", "self.{h} += 1\n{n} = {a} * self.{h}"),
    ("torch.zeros({shape})", "self.{h}.mul_(0.9).add_({a}.detach(), alpha=0.1)\n{n} = {a} - self.{h}"),
    ("torch.zeros({shape})", "{n} = {a} + self.{h}\nself.{h}.copy_({a}.detach())"),
    ("torch.zeros({k}, {last})", "self.{h}[1:].copy_(self.{h}[:-1].clone())\nself.{h}[0] = {s}\n{n} = self.{h} * 1"),
    ("torch.zeros(9, *{shape})", "self.{h}.index_copy_(0, {m}.flatten()[:1] % 9, {a}[None])\n{n} = self.{h} * 1"),
    ("torch.ones({shape})", "{n} = self.{h}[...]\n{n}.add_({a}.detach())"),
    ("torch.arange({last})", "{n} = self.{h}.roll({k})\nself.{h}.copy_({n})"),
    ("torch.zeros({shape})", "torch.add(self.{h}, {a}.detach(), out=self.{h})\n{n} = self.{h}[...]"),
)
_BLOCKS = (
    "{n} = {a}\nfor _ in range({k}):\n    {n} = {n} * 0.5 + {b}",
    "with torch.no_grad():\n    {n} = {a} * {b}",
    "with torch.autocast(x0.device.type, torch.bfloat16):\n    {n} = {a}.flatten(1) @ {a}.flatten(1).mT",
    "{n} = torch.zeros_like({a})\nfor i in range(len({a})):\n    {n}[i] = {a}[i] * i",
    "{n} = [one * i for i, one in enumerate({a}.unbind({d}))]\n{n} = torch.stack({n})",
    "{n} = {a} if {a}.is_contiguous() else {a} * {s}",
    "{n}, _ = torch.max({a}, {d})",
)
_IDIOMS = (  # not static: to be refused, or right
    "{n} = {a} * 2 if {a}.sum() > 0 else {a} * 3",
    "{n} = {a}\nfor one in {a}.flatten()[:2].tolist():\n    {n} = {n} + one",
    "self.{h} = getattr(self, '{h}', 0) + 1\n{n} = {a} * self.{h}",
    "{n} = {a} * (1 if float({a}.mean()) > -1e9 else 2)",
    "{n} = {a} * random.random()",
    "{n} = torch.as_tensor({a}.detach().cpu().numpy() * 2).to(x0.device)",
    "self.{h} = {a}.detach() if getattr(self, '{h}', None) is None else self.{h}\n{n} = {a} + self.{h}",
    "self.{h} = [*getattr(self, '{h}', []), {a}.detach()]\n{n} = sum(self.{h})",
    "{n} = {a}[..., int({a}.abs().sum()) % {last}]",
    "p = int({a}.abs().sum()) % {last}\n{n} = torch.zeros_like({a})\n{n}[..., p : p + 1] = 1.0",
    "{n} = {a}.nonzero().shape[0] * {a}",
    "before = getattr(self, '{h}', 0.0)\nself.{h} = {a}.detach().mean()\n{n} = {a} + before",
    "{n} = {a} * 2 if {a}.detach().cpu().numpy().mean() > 0 else {a} * 2 + 0",
)
_POLICIES = ("auto", "single", "nimble", "critical_path", "contention", "opara", "torchsched", "scattered", "scattered")
_OPTIMIZERS = ("SGD(p, lr=0.05)", "SGD(p, lr=0.05, momentum=0.9)", "AdamW(p, lr=0.01)", "Adam(p, lr=0.01)")
_SHAPES = ((4, 6), (4, 6), (8, 8), (2, 3, 8), (2, 3, 8), (2, 4, 6, 6), (5,), (1, 6), (2, 1, 4, 4))
_LAYOUTS = ("{}", "{}", "{}", "{}", "{}.mT.contiguous().mT", "{}.repeat_interleave(2, -1)[..., ::2]")


@dataclass(frozen=True, slots=True)
class Case:
    """One model, its inputs, its options, and how it is to be prepared.

    ``source`` defines ``Model``, ``inputs(seed)`` and ``options``; what is ``static`` is to be equal, not only refused.
    """

    seed: int
    source: str
    mode: str
    train: bool
    static: bool
    autocast: bool
    optimizer: str = ""

    def program(self) -> str:
        """The case as a program that prepares the model: what follows is up to who reads it."""
        lines = [f"torch.manual_seed({self.seed})", f"model = Model().train({self.train})"]
        if self.mode == "step":
            lines += [
                f"optimizer = torch.optim.{self.optimizer.replace('(p', '(model.parameters()')}",
                "loss = lambda output, target: (output.float() - target).square().mean()",
                "step = TrainStep(model, loss, optimizer, options=options)",
            ]
        lines += ["args, kwargs = inputs(100)", f"with torch.autocast('cpu', torch.bfloat16, {self.autocast}):"]
        prepared = f"net = Nimble(model, options).prepare(*args, **kwargs, training={self.mode == 'training'})"
        lines.append(f"    {'step.prepare(kwargs or args, torch.rand(()))' if self.mode == 'step' else prepared}")
        return "\n".join([self.source, *lines])

    def namespace(self) -> dict[str, Any]:
        """The names that the source defines."""
        found: dict[str, Any] = {}
        exec(compile(self.source, f"<case {self.seed}>", "exec"), found)
        return found


def generate(seed: int, mode: str = "", fuse: str = "") -> Case:
    """The case of a seed; the mode and the kernels are drawn, too, unless given.

    A model that eager refuses is drawn again.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for attempt in count():
            case = _Writer(random.Random(f"{seed}/{attempt}"), seed, mode, fuse).case()
            if _runs(case):
                return case
    raise AssertionError


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar of all outputs that have a gradient."""
    return torch.stack([one.float().square().mean() for one in outputs if one.requires_grad]).sum()


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors of nested containers, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for one in tree.values():
            yield from tensors_of(one)
    elif isinstance(tree, (tuple, list)):
        for one in tree:
            yield from tensors_of(one)


def _runs(case: Case) -> bool:
    """Whether eager runs it, backward included where there is one, and an output is finite and no constant."""
    try:
        made = case.namespace()
        torch.manual_seed(case.seed)
        model = made["Model"]().train(case.train)
        found = []
        for turn in range(2):
            args, kwargs = made["inputs"](turn)
            cast = torch.autocast("cpu", torch.bfloat16, enabled=case.autocast)
            with torch.set_grad_enabled(case.mode != "inference"), cast:
                outputs = [*tensors_of(model(*args, **kwargs))]
            if case.mode != "inference":
                loss_of(outputs).backward()
            found.append([one.detach().clone() for one in outputs])
    except Exception:  # whatever torch has against it
        return False
    return all(_tame(one, 1e4) for run in found for one in run) and any(
        a.shape != b.shape or not torch.equal(a, b) for a, b in zip(*found, strict=False)
    )


class _Writer:
    """Writes one case: what is drawn depends on ``draw`` alone."""

    def __init__(self, draw: random.Random, seed: int, mode: str, fuse: str) -> None:
        self.draw, self.seed = draw, seed
        self.mode = mode or draw.choices(MODES, (6, 2, 1))[0]
        self.fuse = fuse or draw.choices(("none", "library"), (4, 1))[0]
        self.smooth = self.fuse != "none" or draw.random() < 0.3
        self.train = self.mode != "inference" or draw.random() < 0.3
        self.static = draw.random() > 0.15
        self.autocast = draw.random() < 0.06
        self.names = count()
        self.init, self.body, self.held, self.told = (list[str]() for _ in range(4))
        self.model = torch.nn.Module().train(self.train)
        self.live: dict[str, Any] = {"self": self.model}
        exec(_HEADER, self.live)
        self.hidden = {*self.live}
        writes = 3 if self.mode == "inference" else 1  # they often leave autograd without what it saved
        tables = ((10, _SMOOTH), (0 if self.smooth else 3, _ROUGH), (4, _VIEWS), (2, _MAKES), (1, _DRAWS))
        self.tables = [(weight, _lines(table), "{n} = ") for weight, table in tables]
        self.tables += [(writes, _lines(_WRITES), ""), (2, _BLOCKS, "")]

    def case(self) -> Case:
        signature, inputs = self._inputs()
        torch.manual_seed(self.seed)
        size = self.draw.choice((3, 6, 10, 16))
        idiom = self.draw.randrange(size) if not self.static else -1
        with torch.set_grad_enabled(self.mode != "inference"):
            for at in range(size):
                self._step(_IDIOMS if at == idiom else None)
        body = indent("\n".join([*self.body, f"return {self._output()}"]), " " * 8)
        init = indent("\n".join(["super().__init__()", *self.init]), " " * 8)
        options = self._options()
        source = (
            f"{_HEADER}\n\nclass Model(nn.Module):\n    def __init__(self):\n{init}\n\n"
            f"    def forward(self, {signature}):\n{body}\n\n\n"
            f"def inputs(seed):\n    g = torch.Generator().manual_seed(seed)\n    return {inputs}\n"
            f"{_SCATTERED if 'scattered' in options else ''}\n\noptions = {options}\n"
        )
        optimizer = self.draw.choice(_OPTIMIZERS) if self.mode == "step" else ""
        return Case(self.seed, source, self.mode, self.train, self.static, self.autocast, optimizer)

    def _inputs(self) -> tuple[str, str]:
        """The signature of the forward, and the expression that makes inputs; they are live afterwards."""
        shape = self.draw.choice(_SHAPES)
        dtype = self.draw.choices(("", ", dtype=torch.float64"), (9, 1))[0]
        layout = self.draw.choice(_LAYOUTS) if len(shape) > 1 else "{}"
        made = {"x0": layout.format(f"torch.randn({shape}, generator=g{dtype})")}
        if self.mode == "training" and self.draw.random() < 0.4:
            made["x0"] += ".requires_grad_()"
        if self.draw.random() < 0.05 and self.mode == "inference":  # two names for one memory
            made["x0"] = f"(same := {made['x0']})"
            made["x1"] = self.draw.choice(("same", "same[:1]", "same[..., :1]"))
        elif self.draw.random() < 0.6:
            other = self.draw.choice((shape, shape[-1:], (1, *shape[1:])))
            made["x1"] = f"torch.randn({other}, generator=g)"
        named = {}
        if self.draw.random() < 0.3:
            named["ids"] = f"torch.randint(0, 9, {shape[:2]}, generator=g)"
        if self.draw.random() < 0.3:
            named["mask"] = f"torch.rand({shape}, generator=g) > 0.4"
        if self.draw.random() < 0.2:
            named["pair"] = f"{{'p': torch.randn({shape}, generator=g), 'q': (torch.rand((), generator=g), 0.5)}}"
        if self.mode == "step":  # a dictionary or a tuple of inputs
            made, named = (made, {}) if self.draw.random() < 0.7 else ({}, made | named)
        keyed = ", ".join(f"{key!r}: {value}" for key, value in named.items())
        inputs = f"({''.join(f'{value}, ' for value in made.values())}), {{{keyed}}}"
        exec(f"g = torch.Generator().manual_seed({self.seed})\nargs, kwargs = {inputs}", self.live)
        self.live |= {**dict(zip(made, self.live["args"], strict=True)), **self.live["kwargs"]}
        self.hidden |= {"g", "args", "kwargs", "same"}
        if "pair" in named:
            self._accept("p = pair['p']\nq = pair['q'][0]")
        if "ids" in named:
            self._accept("words = self.embedding(ids)", "self.embedding = nn.Embedding(9, 6)")
        return ", ".join([*made, *(["*"] if named and made else []), *named]), inputs

    def _step(self, table: Sequence[str] | None) -> None:
        """Add one statement that eager accepts, after at most twenty tries."""
        for _ in range(20):
            kind, fields = self.draw.random(), self._fields()
            if table is None and kind < 0.2:
                done = self._module(fields)
            elif table is None and kind < 0.28:
                done = self._state(fields)
            else:
                chosen, prefix = table, ""
                if chosen is None:
                    weights = [weight for weight, _, _ in self.tables]
                    _, chosen, prefix = self.draw.choices(self.tables, weights)[0]
                done = self._accept((prefix + self.draw.choice(chosen)).format_map(fields))
            if done:
                self.told += [fields["n"]] if table else []
                return

    def _fields(self) -> Mapping[str, Any]:
        a = self._pick(lambda one: one.is_floating_point() and one.numel())
        shape = tuple(self.live[a].shape)
        d = self.draw.randrange(max(len(shape), 1))
        w = shape[d] if shape else 1
        i = self.draw.randrange(w)
        b = self._pick(lambda one: one.is_floating_point() and _broadcasts(one.shape, shape), a)
        p = self._pick(lambda one: one.dtype == torch.bool and _broadcasts(one.shape, shape), f"({b} > 0)")
        m = self._pick(lambda one: one.dtype == torch.int64 and one.numel(), "")
        name = next(self.names)
        return {
            "a": a, "b": b, "p": p, "d": d, "i": i, "w": w, "shape": shape, "n": f"v{name}", "h": f"h{name}",
            "m": m or f"{a}.argmax({d})", "e": self.draw.randrange(max(len(shape), 1)),
            "j": i + 1 + self.draw.randrange(w - i), "t": ":, " * d, "s": self.draw.choice((0.5, -0.5, 0.25, 1.5, 2)),
            "k": self.draw.randint(2, 4), "last": shape[-1] if shape else 1, "second": shape[1] if shape[1:] else 1,
        }  # fmt: skip

    def _pick(self, wanted: Any, otherwise: str = "") -> str:
        """A live tensor, later ones more often."""
        names = [name for name in self._tensors() if wanted(self.live[name])]
        if otherwise and (not names or self.draw.random() < 0.3):
            return otherwise
        return self.draw.choices(names, range(1, len(names) + 1))[0] if names else "x0"

    def _tensors(self) -> list[str]:
        """Names of live tensors, in the order in which they were made."""
        return [n for n, one in self.live.items() if isinstance(one, torch.Tensor) and n not in self.hidden]

    def _module(self, fields: Mapping[str, Any]) -> bool:
        if self.held and self.draw.random() < 0.2:  # one that ran before
            return self._accept(f"{fields['n']} = self.{self.draw.choice(self.held)}({fields['a']})")
        line = self.draw.choice(_lines(_MODULES)).format_map(fields)
        two = f", {fields['a']}" if "Bilinear" in line else ""
        done = self._accept(f"{fields['n']} = self.{fields['h']}({fields['a']}{two})", f"self.{fields['h']} = {line}")
        self.held += [fields["h"]] if done and not two else []
        return done

    def _state(self, fields: Mapping[str, Any]) -> bool:
        kept, line = (one.format_map(fields) for one in self.draw.choice(_STATE))
        return self._accept(line, f"self.register_buffer('{fields['h']}', {kept})")

    def _accept(self, lines: str, init: str = "") -> bool:
        """Run lines, and keep them if eager does and what they make is neither large nor wild."""
        before = dict(self.live)
        kept = {*self.model._modules, *self.model._buffers}
        try:
            if init:
                exec(init, self.live)
                self.model.train(self.train)
            exec(lines, self.live)
            made = [v for k, v in self.live.items() if before.get(k) is not v and isinstance(v, torch.Tensor)]
            fine = all(one.numel() <= 4096 and one.dim() <= 5 and _tame(one, 1e3) for one in made)
        except Exception:  # whatever torch has against it
            fine = False
        if not fine:
            self.live.clear()
            self.live.update(before)
            for name in {*self.model._modules, *self.model._buffers} - kept:
                delattr(self.model, name)
            return False
        self.hidden |= {"i", "one", "_"}
        self.init += [init] if init else []
        self.body += lines.splitlines()
        return True

    def _output(self) -> str:
        """What the forward returns: one tensor of a whole step, nested containers otherwise."""
        tensors = self._tensors()
        linked = [name for name in tensors if self.live[name].requires_grad]
        if self.mode == "step":
            return linked[-1] if linked else "x0"
        chosen = self.draw.sample(tensors, min(len(tensors), self.draw.randint(1, 5)))
        chosen = [*dict.fromkeys([*chosen, (linked or tensors)[-1], *(one for one in self.told if one in tensors)])]
        buffers = [name for name, _ in self.model.named_buffers() if "." not in name]
        if buffers and self.draw.random() < 0.2:
            chosen.append(f"self.{self.draw.choice(buffers)}")
        if self.draw.random() < 0.15:
            chosen.append(self.draw.choice((chosen[0], f"{chosen[0]}[..., :1]", "None", "3", "'name'")))
        listed, first = ", ".join(chosen), chosen[0]
        nested = f"{{'all': [{listed}], 'first': ({first}, {{'again': {first}}})}}"
        keyed = "{" + ", ".join(f"'o{i}': {name}" for i, name in enumerate(chosen)) + "}"
        single = keyed if self.told else first
        return self.draw.choice((f"({listed},)", f"({listed},)", f"[{listed}]", keyed, nested, single))

    def _options(self) -> str:
        drawn: dict[str, Any] = {
            "fuse": self.fuse,
            "tune": "off",
            "policy": self.draw.choice(_POLICIES),
            "max_streams": self.draw.choice((32, None, 1, 2, 3)),
            "memory_limit": self.draw.choice((None, None, None, 1 << 30, 1 << 14)),
            "outputs": self.draw.choice(("copy", "copy", "static")),
            "strict": self.draw.random() < 0.4,
        }
        written = ", ".join(f"{name}={value!r}" for name, value in drawn.items())
        return f"Options({written.replace(repr('scattered'), 'scattered')})"


def _lines(table: str) -> tuple[str, ...]:
    return tuple(one.strip() for line in table.splitlines() for one in line.split(" | "))


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` can be written into one of shape ``to``."""
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in aligned)


def _tame(tensor: torch.Tensor, most: float) -> bool:
    """Whether all numbers are finite and below ``most``; whole numbers always are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return not tensor.numel() or bool(torch.isfinite(tensor).all() and tensor.detach().abs().amax() < most)
