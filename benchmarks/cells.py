"""Image classifiers found by architecture search, NASNet-A, AmoebaNet-A and DARTS, or wired at random, RandWire.

All are written from their papers. The first three are stacks of one cell that keeps the size and one that halves it.
A cell reads the outputs of the two cells before it, so that many of its operations can run at once: which ones it has
is data, a :class:`Genotype`. Training's auxiliary head, dropout and drop-path do nothing
in inference and are left out; published counts of parameters and multiply-adds leave the head out, too.

    Zoph, Vasudevan, Shlens, Le, "Learning Transferable Architectures for Scalable Image Recognition", CVPR 2018
    Real, Aggarwal, Huang, Le, "Regularized Evolution for Image Classifier Architecture Search", AAAI 2019
    Liu, Simonyan, Yang, "DARTS: Differentiable Architecture Search", ICLR 2019
    Xie, Kirillov, Girshick, He, "Exploring Randomly Wired Neural Networks for Image Recognition", ICCV 2019
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Genotype(NamedTuple):
    """What a cell computes: states, of which 0 and 1 are the outputs of the cell before the last and of the last one.

    Attributes:
        nodes: each makes the next state, the sum of two of :data:`OPERATIONS`, each on a state before its own.
        outputs: states whose channels, concatenated, are the cell's output.
    """

    nodes: tuple[tuple[tuple[str, int], ...], ...]
    outputs: tuple[int, ...]


def _genotype(outputs: tuple[int, ...], nodes: str) -> Genotype:
    """Read nodes from text: names of operations, each before the state that it reads."""
    pairs = ((part.strip().rpartition(" ") for part in node.split("+")) for node in nodes.split(";"))
    return Genotype(tuple(tuple((name, int(of)) for name, _, of in pair) for pair in pairs), outputs)


Search = tuple[Genotype, Genotype]
"""What a search found: the cell that keeps the size and the one that halves it."""

NASNET_A: Search = (
    _genotype((0, 2, 3, 4, 5, 6), """separable 5x5 1 + separable 3x3 0; separable 5x5 0 + separable 3x3 0;
        average 3x3 1 + identity 0; average 3x3 0 + average 3x3 0; separable 3x3 1 + identity 1"""),
    _genotype((3, 4, 5, 6), """separable 5x5 1 + separable 7x7 0; max 3x3 1 + separable 7x7 0;
        average 3x3 1 + separable 5x5 0; identity 3 + average 3x3 2; separable 3x3 2 + max 3x3 1"""),
)  # fmt: skip
"""Zoph et al., figure 4."""

AMOEBANET_A: Search = (
    _genotype((0, 3, 4, 6), """average 3x3 1 + max 3x3 1; separable 3x3 0 + identity 0; identity 1 + average 3x3 0;
        separable 3x3 1 + separable 5x5 2; average 3x3 5 + separable 3x3 1"""),
    _genotype((2, 3, 4, 5, 6), """separable 3x3 0 + average 3x3 1; max 3x3 1 + separable 7x7 2; max 3x3 0 + max 3x3 1;
        separable 3x3 4 + 1x7 7x1 1; average 3x3 0 + separable 7x7 1"""),
)  # fmt: skip
"""Real et al., figure 5. Published counts come out only if states that are read inside are outputs too, as here."""

DARTS_V2: Search = (
    _genotype((2, 3, 4, 5), """separable 3x3 0 + separable 3x3 1; separable 3x3 0 + separable 3x3 1;
        separable 3x3 1 + identity 0; identity 0 + dilated 3x3 2"""),
    _genotype((2, 3, 4, 5), """max 3x3 0 + max 3x3 1; identity 2 + max 3x3 1; max 3x3 0 + identity 2;
        identity 2 + max 3x3 1"""),
)  # fmt: skip
"""Liu et al., figures 4 and 5: the cells of the second order search."""

Operation = Callable[[int, int, int], nn.Module]
"""A module, from its numbers of channels in and out and its stride."""


def _conv_norm(inputs: int, outputs: int, kernel: Any = 1, stride: Any = 1) -> nn.Sequential:
    """ReLU, convolution, batch normalisation: the order of all three papers. Odd kernels keep the size."""
    pad = kernel // 2 if isinstance(kernel, int) else tuple(side // 2 for side in kernel)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, pad, bias=False), nn.BatchNorm2d(outputs)
    )


def _depthwise_norm(inputs: int, outputs: int, kernel: int, stride: int, dilation: int = 1) -> nn.Sequential:
    """ReLU, depthwise and pointwise convolution, batch normalisation."""
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, inputs, kernel, stride, kernel // 2 * dilation, dilation, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
    )


def _separable(kernel: int) -> Operation:
    """Apply a depthwise separable convolution twice; the first one strides."""
    return lambda inputs, outputs, stride: nn.Sequential(
        _depthwise_norm(inputs, outputs, kernel, stride), _depthwise_norm(outputs, outputs, kernel, 1)
    )


def _seven(inputs: int, outputs: int, stride: int) -> nn.Module:
    """1x7 and 7x1 convolutions in a bottleneck of a quarter of the channels."""
    inner = outputs // 4
    return nn.Sequential(
        _conv_norm(inputs, inner),
        _conv_norm(inner, inner, (1, 7), (1, stride)),
        _conv_norm(inner, inner, (7, 1), (stride, 1)),
        _conv_norm(inner, outputs),
    )


def _pool(make: Callable[[int], nn.Module]) -> Operation:
    """Pooling; where the number of channels must change, too, a pointwise convolution follows."""

    def operation(inputs: int, outputs: int, stride: int) -> nn.Module:
        if inputs == outputs:
            return make(stride)
        return nn.Sequential(make(stride), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    return operation


def _identity(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Identity() if inputs == outputs and stride == 1 else _conv_norm(inputs, outputs, stride=stride)


OPERATIONS: dict[str, Operation] = {
    "identity": _identity,
    "average 3x3": _pool(lambda stride: nn.AvgPool2d(3, stride, 1, count_include_pad=False)),
    "max 3x3": _pool(lambda stride: nn.MaxPool2d(3, stride, 1)),
    **{f"separable {side}x{side}": _separable(side) for side in (3, 5, 7)},
    "dilated 3x3": lambda inputs, outputs, stride: _depthwise_norm(inputs, outputs, 3, stride, dilation=2),
    "1x7 7x1": _seven,
}


class FactorizedReduction(nn.Module):
    """Halves height and width by two strided pointwise convolutions, the second on pixels that the first skips."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, outputs, ⌈h / 2⌉, ⌈w / 2⌉)."""
        x = F.relu(x)
        padded = F.pad(x, (0, 1, 0, 1)) if x.shape[2] % 2 or x.shape[3] % 2 else x
        halved: Tensor = self.norm(torch.cat((self.even(x), self.odd(padded[:, :, 1:, 1:])), 1))
        return halved


class Cell(nn.Module):
    """One cell of a network.

    Args:
        genotype: what it computes.
        before: brings the output of the cell before the last to this cell's size, and to ``before_width`` channels.
        before_width: channels of state 0.
        last: channels of the last cell's output.
        width: channels of every other state.
        stride: 2 for a reduction: operations on states 0 and 1 stride.
    """

    def __init__(
        self, genotype: Genotype, before: nn.Module, before_width: int, last: int, width: int, stride: int
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.before = before
        self.last = _conv_norm(last, width)

        def operation(name: str, of: int) -> nn.Module:
            return OPERATIONS[name](before_width if of == 0 else width, width, stride if of < 2 else 1)

        self.lefts = nn.ModuleList(operation(*left) for left, _ in genotype.nodes)
        self.rights = nn.ModuleList(operation(*right) for _, right in genotype.nodes)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        """Return the output, of shape (batch, width · outputs, h / stride, w / stride)."""
        states = [self.before(before), self.last(last)]
        for ((_, one), (_, other)), left, right in zip(self.genotype.nodes, self.lefts, self.rights, strict=True):
            states.append(left(states[one]) + right(states[other]))
        return torch.cat([states[index] for index in self.genotype.outputs], 1)


Layer = tuple[Genotype, int, int]
"""One cell of a network: what it computes, how wide its states are, and its stride."""


class CellNetwork(nn.Module):
    """A stem, cells of which each reads the two outputs before it, and a linear head on pooled features.

    Args:
        stem: convolutions on the image.
        second: convolutions on the stem's output, of the same width and half its size, for the first cell to read
            beside it, without a ReLU after the last cell; ``None`` where the first cell reads the stem's output twice,
            the first time as it is.
        channels: of the stem's output.
        layers: the cells.
    """

    def __init__(self, stem: nn.Module, second: nn.Module | None, channels: int, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.stem = stem
        self.second = second if second is not None else nn.Identity()
        self.cells = nn.ModuleList()
        before, last, halved = channels, channels, second is not None
        for genotype, width, stride in layers:
            if second is None and not self.cells:
                cell = Cell(genotype, nn.Identity(), before, last, width, stride)
            else:
                bring = FactorizedReduction(before, width) if halved else _conv_norm(before, width)
                cell = Cell(genotype, bring, width, last, width, stride)
            self.cells.append(cell)
            before, last, halved = last, width * len(genotype.outputs), stride == 2
        activated = nn.ReLU() if second is None else nn.Identity()
        self.head = nn.Sequential(activated, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 1000))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, 1000) from images of shape (batch, 3, height, width)."""
        before = self.stem(x)
        last = self.second(before)
        for cell in self.cells:
            before, last = last, cell(before, last)
        logits: Tensor = self.head(last)
        return logits


def _stacks(search: Search, repeats: int, width: int) -> CellNetwork:
    """Three stacks of ``repeats`` normal cells, a reduction before the second and third, two more after the stem.

    Zoph et al., figure 2. The width doubles at every reduction; the first stack's is ``width``.
    """
    normal, reduction = search
    layers = [(reduction, width // 4, 2), (reduction, width // 2, 2)]
    for stack in range(3):
        layers += [(reduction, width << stack, 2)] * bool(stack) + [(normal, width << stack, 1)] * repeats
    return CellNetwork(nn.Sequential(nn.Conv2d(3, 32, 3, 2, bias=False), nn.BatchNorm2d(32)), None, 32, layers)


def nasnet_a_mobile() -> CellNetwork:
    """NASNet-A (4 @ 1056) for images of 224 px: 5.3M parameters and 564M multiply-adds, as published."""
    return _stacks(NASNET_A, repeats=4, width=44)


def amoebanet_a() -> CellNetwork:
    """AmoebaNet-A (N=6, F=190) for images of 331 px: 86.7M parameters and 23.1B multiply-adds, as published."""
    return _stacks(AMOEBANET_A, repeats=6, width=190)


def darts() -> CellNetwork:
    """Make the ImageNet network of DARTS for images of 224 px: 4.7M parameters, as published.

    It has 530M multiply-adds in its convolutions and linear layer. The paper says 574M, not how they were counted;
    others who counted the released network report 523M to 545M.
    """
    cells, width = 14, 48
    stem = nn.Sequential(
        nn.Conv2d(3, width // 2, 3, 2, 1, bias=False), nn.BatchNorm2d(width // 2), *_conv_norm(width // 2, width, 3, 2)
    )
    layers = []
    for index in range(cells):
        doublings = (index >= cells // 3) + (index >= 2 * cells // 3)
        reduces = index in (cells // 3, 2 * cells // 3)
        layers.append((DARTS_V2[reduces], width << doublings, 1 + reduces))
    return CellNetwork(stem, _conv_norm(width, width, 3, 2), width, layers)


class RandomStage(nn.Module):
    """Nodes wired by a random graph, each edge from the lower node to the higher one; height and width are halved.

    A node adds what it reads, weighted by sigmoids, and passes it through a depthwise separable convolution. Nodes that
    read no other read the input; the mean of those that no other reads is the output.

    Args:
        inputs: channels of the input.
        width: channels of every node.
        nodes: of a Watts-Strogatz graph, with four neighbours each, of which 75% are rewired.
        seed: of the graph.
    """

    def __init__(self, inputs: int, width: int, nodes: int, seed: int) -> None:
        from networkx import connected_watts_strogatz_graph

        super().__init__()
        graph = connected_watts_strogatz_graph(nodes, 4, 0.75, seed=seed)
        self.sources = tuple(tuple(sorted(other for other in graph[node] if other < node)) for node in range(nodes))
        self.read_by_none = tuple(node for node in range(nodes) if max(graph[node]) < node)
        self.weights = nn.ParameterList(torch.randn(len(sources)) for sources in self.sources)
        self.nodes = nn.ModuleList(
            _depthwise_norm(width, width, 3, 1) if sources else _depthwise_norm(inputs, width, 3, 2)
            for sources in self.sources
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, width, ⌈h / 2⌉, ⌈w / 2⌉)."""
        states: list[Tensor] = []
        for sources, weights, node in zip(self.sources, self.weights, self.nodes, strict=True):
            shares = weights.sigmoid()
            read = [states[index] * shares[place] for place, index in enumerate(sources)]
            states.append(node(sum(read[1:], read[0]) if read else x))
        ends = [states[index] for index in self.read_by_none]
        return sum(ends[1:], ends[0]) / len(ends)


def randwire() -> nn.Sequential:
    """RandWire-WS(4, 0.75), small regime, for images of 224 px: 5.6M parameters, 583M multiply-adds, as published."""
    width = 78
    stem = nn.Sequential(nn.Conv2d(3, width // 2, 3, 2, 1, bias=False), nn.BatchNorm2d(width // 2))
    stages = [RandomStage(width << max(stage - 1, 0), width << stage, 32, seed=stage) for stage in range(3)]
    last = nn.Sequential(*_conv_norm(width << 2, 1280), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, *_conv_norm(width // 2, width, 3, 2), *stages, last, nn.Linear(1280, 1000))
