"""Write docs/troubleshooting.md: common mistakes, each with the message that it raises when run here.

    python docs/troubleshooting.py > docs/troubleshooting.md

The corrected code runs as well, and has to work without a message.
"""

from __future__ import annotations

import linecache
import random
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from nimble_core import Nimble, Options
from nimble_core.utils.errors import NimbleError, NimbleWarning
from nimble_viz.collect.diagnose import diagnose

SETUP = """\
import random
import torch
from torch import nn
from nimble_core import Nimble, Options
import nimble_viz

model = nn.Linear(4, 4).eval()
x = torch.arange(8.0).reshape(2, 4) - 3
"""

_OPTIONS = Options(tune="off", fuse="none")


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        title: a heading, or empty where the section has one mistake.
        wrong: code; a class or function named ``Model`` or ``f`` in it is prepared for ``x``.
        right: code to write instead.
        words: why, and other advice.
    """

    title: str
    wrong: str
    right: str
    words: str = ""


def _forward(*lines: str, init: str = "", head: str = "self, x") -> str:
    start = [f"    def __init__(self):\n        super().__init__()\n        {init}\n"] if init else []
    body = "\n".join(f"        {line}" for line in lines)
    return "\n".join(["class Model(nn.Module):", *start, f"    def forward({head}):", body])


SECTIONS: dict[str, tuple[str, tuple[Mistake, ...]]] = {
    "Inputs": (
        "Pass inputs as in a call of the model: `net.prepare(x, mask=m)`, `compare(model, x, kwargs={...})`.",
        (
            Mistake("A list or tuple around the inputs", "Nimble(model).prepare([x])", "Nimble(model).prepare(x)"),
            Mistake(
                "A numpy array",
                "Nimble(model).prepare(x.numpy())",
                "Nimble(model).prepare(torch.from_numpy(x.numpy()))",
            ),
            Mistake(
                "A dict of inputs",
                'batch = {"input": x}\nNimble(model).prepare(batch)',
                'batch = {"input": x}\nNimble(model).prepare(**batch)\nnimble_viz.compare(model, kwargs=batch)',
                "A tokenizer returns such a dict.",
            ),
            Mistake("No inputs", "Nimble(model).prepare()", "Nimble(model).prepare(x)"),
            Mistake(
                "A call without inputs",
                "net = Nimble(model).prepare(x)\nnet()",
                "net = Nimble(model).prepare(x)\nnet(x)",
            ),
            Mistake(
                "A shape that was not prepared",
                "net = Nimble(model).prepare(x)\nnet(x[:1])",
                "net = Nimble(model).prepare(x)\nnet.prepare(x[:1])  # both shapes are prepared now\nnet(x[:1])",
                '`Options(on_new_shape="prepare")` prepares at the first call with a new shape, `"eager"` runs the '
                "model itself.",
            ),
        ),
    ),
    "Options and calls": (
        "",
        (
            Mistake("A misspelt option", "Options(max_stream=4)", "Options(max_streams=4)"),
            Mistake(
                "An option among the inputs",
                'Nimble(model).prepare(x, tune="off")',
                'Nimble(model, Options(tune="off")).prepare(x)',
            ),
            Mistake(
                "An option of compare",
                'nimble_viz.compare(model, x, tune="off")',
                'nimble_viz.compare(model, x, options=Options(tune="off"))',
            ),
            Mistake("Inputs in place of options", "Nimble(model, x)", "Nimble(model).prepare(x)"),
            Mistake("A class in place of a module", "Nimble(nn.ReLU).prepare(x)", "Nimble(nn.ReLU()).prepare(x)"),
            Mistake("A call before prepare", "net = Nimble(model)\nnet(x)", "net = Nimble(model).prepare(x)\nnet(x)"),
        ),
    ),
    "Values read with .item()": (
        "A replay does not run Python: a number that Python read from a tensor would stay that of the recording.",
        (
            Mistake(
                "",
                _forward("scale = x.abs().max().item()", "return x / scale"),
                _forward("scale = x.abs().max()", "return x / scale"),
                "The same goes for `float(tensor)`, `int(tensor)` and a tensor as an index or a size. Torch computes "
                "with 0-dim tensors as with numbers. Compute settings in `__init__`.",
            ),
        ),
    ),
    "Branch on a tensor": (
        "Python chooses a branch once, when the model is recorded.",
        (
            Mistake(
                "",
                _forward("if x.sum() > 0:", "    return x * 2", "return -x"),
                _forward("return torch.where(x.sum() > 0, x * 2, -x)"),
                "The same goes for `while`, `assert`, `and` and `or` of tensors, for `value in tensor`, `torch.equal` "
                "and `torch.allclose`.",
            ),
        ),
    ),
    "Lists and numpy": (
        "Values that leave torch come back as constants of the recording.",
        (
            Mistake(
                "",
                _forward(
                    "lengths = x[:, 0].abs().tolist()", "return torch.stack([row * n for row, n in zip(x, lengths)])"
                ),
                _forward("return x * x[:, :1].abs()"),
                "The same goes for `.numpy()` and `numpy.asarray(tensor)`.",
            ),
        ),
    ),
    "Data-dependent shape": (
        "A replay has the shapes of the recording.",
        (
            Mistake(
                "A boolean index",
                _forward("return x[x > 0].sum()"),
                _forward("return torch.where(x > 0, x, 0).sum()"),
            ),
            Mistake(
                "Positions of elements",
                _forward("rows = (x > 0).nonzero()[:, 0]", "return x[rows]"),
                _forward("rows = torch.nonzero_static(x > 0, size=4)[:, 0]", "return x[rows]"),
                "`torch.nonzero_static` pads with -1, or with `fill_value`.",
            ),
            Mistake(
                "A repeat for each element",
                _forward("return x.repeat_interleave(torch.tensor([1, 2]) + (x[:, 0] > 9), dim=0)"),
                _forward("return x.repeat_interleave(torch.tensor([1, 2]) + (x[:, 0] > 9), dim=0, output_size=3)"),
            ),
        ),
    ),
    "Copy to the host": (
        'On a GPU, `.cpu()`, `.to("cpu")` and `print(tensor)` inside the model make the host wait, which a replay '
        "cannot. Return the tensor, and copy it outside.",
        (),
    ),
    "Attribute that changes": (
        "A replay runs no Python, so it does not update attributes.",
        (
            Mistake(
                "A counter in Python",
                _forward("self.n += 1", "return x * self.n", init="self.n = 0"),
                _forward("self.n.add_(1)", "return x * self.n", init='self.register_buffer("n", torch.tensor(0))'),
                "Writing a buffer in place is a call, and is replayed.",
            ),
            Mistake(
                "A tensor that is replaced",
                _forward(
                    "self.state = self.state + x",
                    "return self.state",
                    init='self.register_buffer("state", torch.zeros(2, 4))',
                ),
                _forward(
                    "self.state.add_(x)",
                    "return self.state.clone()",
                    init='self.register_buffer("state", torch.zeros(2, 4))',
                ),
            ),
        ),
    ),
    "Two runs that differ": (
        "The model is recorded twice, with different input values. If the calls differ, Python has made a decision.",
        (
            Mistake(
                "Python's random numbers",
                _forward("return x * random.random()"),
                _forward("return x * torch.rand(())"),
                "Each replay draws torch's random numbers anew, for dropout as well.",
            ),
        ),
    ),
    "Error in eager": (
        "The model does not run on these inputs in eager. Call `model(x)` until it does.",
        (),
    ),
    "Other refusals": (
        "Only dense tensors of torch's own classes can be replayed.",
        (
            Mistake(
                "A sparse tensor",
                _forward("return torch.sparse.mm(x.to_sparse(), x.T)"),
                _forward("return x @ x.T"),
            ),
            Mistake(
                "Training in evaluation mode",
                "Nimble(model).prepare(x, training=True)",
                "Nimble(model.train()).prepare(x, training=True)",
            ),
        ),
    ),
}


def page() -> str:
    """Write the whole page."""
    parts = [
        "# Troubleshooting",
        "",
        "<!-- Written by docs/troubleshooting.py, which makes each mistake and keeps its message. -->",
        "",
        "Common mistakes, their messages, and what to write instead. To list all problems of a model:",
        "",
        "```sh",
        "python -m nimble_viz diagnose model.py:factory   # as compare takes it",
        "```",
        "",
        "In Python, `nimble_viz.diagnose(model, x)` returns the same. For this model",
        "",
        *_block(_EXAMPLE),
        "",
        "it prints:",
        "",
        *_block(_diagnosed(_EXAMPLE), "text"),
        "",
        "All examples on this page begin with",
        "",
        *_block(SETUP.rstrip()),
        "",
        "Where only a class is shown, `Nimble(Model().eval()).prepare(x)` follows. Messages show random numbers as an "
        "ellipsis.",
    ]
    for section, (words, mistakes) in SECTIONS.items():
        parts += ["", f"## {section}", *(["", words] if words else [])]
        for one in mistakes:
            parts += _shown(one)
    return "\n".join(parts) + "\n"


_EXAMPLE = _forward(
    "if x.mean() > 0:",
    "    x = x[x > 0]",
    "return x / x.max().item()",
)


def _diagnosed(code: str) -> str:
    names = _names(code)
    return str(diagnose(names["Model"]().eval(), names["x"]))


def _shown(one: Mistake) -> list[str]:
    said = re.sub(r"\d+\.\d{5,}", "…", _message(one.wrong))  # of random numbers
    assert said, f"nothing is said of {one.wrong}"
    if "compare" not in one.right:  # which measures for seconds
        assert not (wrong := _message(one.right)), f"{one.right}\nsays\n{wrong}"
    parts = ["", f"### {one.title}"] if one.title else []
    parts += [
        "",
        *_block(one.wrong),
        "",
        "The message:",
        "",
        *_block(said, "text"),
        "",
        "Write instead:",
        "",
        *_block(one.right),
    ]
    return parts + (["", one.words] if one.words else [])


def _block(code: str, language: str = "python") -> list[str]:
    return [f"```{language}", code, "```"]


def _names(code: str) -> dict[str, Any]:
    """Run ``code`` as a file ``model.py``, and return its names."""
    names: dict[str, Any] = {"__name__": "model"}
    exec(SETUP, names)
    names["Nimble"] = lambda model, options=_OPTIONS: Nimble(model, options)
    linecache.cache["model.py"] = (len(code), None, [f"{line}\n" for line in code.splitlines()], "model.py")
    exec(compile(code, "model.py", "exec"), names)
    return names


def _message(code: str) -> str:
    """Return the error or warning that ``code`` raises; empty if there is none."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        random.seed(0)
        try:
            names = _names(code)
            if "Model" in names:
                Nimble(names["Model"]().eval(), _OPTIONS).prepare(names["x"])
        except NimbleError as error:
            return f"{type(error).__name__}: {error}"
    said = [f"NimbleWarning: {one.message}" for one in found if issubclass(one.category, NimbleWarning)]
    return "\n".join(said)


if __name__ == "__main__":
    sys.stdout.write(page())
