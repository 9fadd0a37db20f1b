"""Products of odd sizes, in rows and columns that libraries' fast routines can load.

A vocabulary of 30,522 words is no multiple of what a matrix unit takes at a time, and products with it, three for each
training step, run two to three times as long as with six words more. Those words are zeros here: operands are padded,
and of the result the rest is not looked at. A gradient that compiled kernels make anyway is made with its padding; one
that is copied anyway is copied into a buffer with padding. Where a weight would have to be copied to be padded, and the
words are the terms of long sums, the last few of them are a product of their own, added to that of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.channels_last import keep_strides, speaks_of_strides
from nimble_core.compiler.passes.decisions import Decisions, Timer
from nimble_core.compiler.to_fx import drop_unused, is_view, pinned, reference_of, use_calls
from nimble_core.torch_compat.dispatch import OpOverload
from nimble_core.tracing.strides import copy_rows, corner, laid_out, restrided, row_by_row

__all__ = ["pad_products"]

_aten = torch.ops.aten
_ALIGNED_BYTES = 16
_LEAST_SIZE, _LEAST_WORK = 128, 1 << 30
"""Below so many rows, and so many multiplications, a product takes no time worth padding for."""
_WORTH = 1.05
_TERMS_TO_ROWS = 2
_LIBRARY_CALLS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default}
)
"""What a compiler leaves to libraries: their results are padded by a copy, all others as they are made."""
_ONLY_SIZES = frozenset({_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default})
"""Views that show the same elements in the same order."""
_ELEMENTWISE = frozenset(getattr(torch.Tag, name) for name in ("pointwise", "reduction") if hasattr(torch.Tag, name))
_STRIDED = frozenset(
    getattr(_aten, name)
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "sum", "mean", "amax", "argmax", "max", "_to_copy", "clone", "copy", "cat",
        "index", "gather", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
        "native_layer_norm", "native_layer_norm_backward", "hardswish_backward", "leaky_relu_backward", "elu_backward",
        "constant_pad_nd",
    )
)  # fmt: skip
"""Operators that follow the strides of what they read, or copy it where they want it otherwise."""


@dataclass(frozen=True, slots=True)
class _Operand:
    """A matrix as it lies in memory, and whether it is read transposed."""

    base: fx.Node
    turned: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of ``base``."""
        recorded = reference_of(self.base)
        assert recorded is not None
        return recorded.sizes[0], recorded.sizes[1]


@dataclass(frozen=True, slots=True)
class _Product:
    """``left @ right``."""

    node: fx.Node
    left: _Operand
    right: _Operand

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, terms of each sum, columns."""
        rows, terms = self.left.sizes[:: -1 if self.left.turned else 1]
        return rows, terms, self.right.sizes[0 if self.right.turned else 1]


def pad_products(
    module: fx.GraphModule,
    device: torch.device,
    decisions: Decisions,
    *,
    compiled: bool,
    constant: bool,
    free: int = 0,
    copied_in: int = 0,
) -> int:
    """Pad the odd size of large products where that is faster; how many are.

    Args:
        module: changed in place.
        device: where it runs.
        decisions: where nothing is measured, nothing is padded.
        compiled: whether a compiler makes kernels of the rest, and so pads what it computes for nothing.
        constant: whether weights are, so that they are padded once.
        free: results, the first so many, that may have any strides.
        copied_in: inputs, the first so many, that the graph may ask for with padding: they are copied anyway.
    """
    if speaks_of_strides(module):
        return 0
    groups: dict[tuple[int, str], list[fx.Node]] = {}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"][:copied_in]
    for node in module.graph.nodes:
        product = _product(node)
        recorded = reference_of(node)
        if product is not None and recorded is not None and (size := _odd_size(product)):
            groups.setdefault((size, recorded.dtype), []).append(node)
    count = 0
    for (size, _), nodes in groups.items():
        products = [one for node in nodes if (one := _product(node)) is not None]
        more = -size % _multiple(products[0].node)
        apart = {one.node for one in products if _terms_come_apart(one, size, compiled, constant)}
        bases = _bases(products, size, apart)
        widened = {one: source for one in bases if (source := _source(one)) in inputs and _may_widen(one, source, size)}
        copied = [one for one in bases if one not in widened and not _padded_for_nothing(one, compiled, constant)]
        wanted = False
        if decisions.timer is not None:
            with suppress(RuntimeError):  # out of memory, most likely: examples are as large as what is padded
                wanted = _pays(products, apart, copied, {*widened.values()}, size, more, device, decisions.timer)
        if decisions.take(products[0].node, f"padded to {size + more}", wanted=wanted):
            parts = {one: _widen(module.graph, one, size, more) for one in dict.fromkeys(widened.values())}
            matrices = {parts.get(base, base): source for base, source in widened.items()}
            _pad(module.graph, nodes, size, more, matrices, apart)
            count += len(nodes)
    if count:
        keep_strides(module, exactly=not constant, free=free)
    drop_unused(module)
    return count


def _product(node: fx.Node) -> _Product | None:
    if node.target is not _aten.mm.default or reference_of(node) is None:
        return None
    left, right = (_operand(one) for one in node.args[:2])
    return _Product(node, left, right) if left is not None and right is not None else None


def _operand(node: Any) -> _Operand | None:
    turned = False
    while node.target is _aten.t.default:
        node, turned = node.args[0], not turned
    recorded = reference_of(node)
    if recorded is None or len(recorded.sizes) != 2 or (pinned(node) and node.op != "get_attr"):
        return None
    return _Operand(node, turned)


def _multiple(node: fx.Node) -> int:
    recorded = reference_of(node)
    assert recorded is not None
    return max(1, _ALIGNED_BYTES * recorded.numel // max(recorded.nbytes, 1))


def _odd_size(product: _Product) -> int:
    """The largest size of a large product that is no multiple of what is loaded at a time; 0 if there is none."""
    rows, terms, columns = product.sizes
    if rows * terms * columns < _LEAST_WORK:
        return 0
    multiple = _multiple(product.node)
    found = max((size for size in (rows, terms, columns) if size >= _LEAST_SIZE and size % multiple), default=0)
    # A part of the columns is not row after row in memory, as who writes it in place may ask, and foreign operators.
    rigid = pinned(product.node) or not all(map(_takes_any_strides, product.node.users))
    return 0 if rigid and found == columns else found


def _takes_any_strides(reader: fx.Node) -> bool:
    """Whether an operator, and who reads its views, computes the same of a tensor that is not row after row in memory.

    Not all of torch's do: of some, autograd's formulas give kernels what is contiguous already, and these do not look.
    """
    if reader.op == "output" or reader.target in (restrided, laid_out, _in_parts):
        return True
    if not isinstance(reader.target, OpOverload) or pinned(reader):
        return False
    if is_view(reader.target) or reader.target is _aten.reshape.default:
        return all(map(_takes_any_strides, reader.users))
    if reader.target.namespace != "aten":
        return False
    return not _ELEMENTWISE.isdisjoint(reader.target.tags) or reader.target.overloadpacket in _STRIDED


def _sizes(node: fx.Node) -> tuple[int, ...]:
    recorded = reference_of(node)
    assert recorded is not None
    return recorded.sizes


def _terms_come_apart(product: _Product, size: int, compiled: bool, constant: bool) -> bool:
    """Whether to add the last terms of the sums by a product of their own: the right matrix stays as it is then.

    Its rows are the terms, so that all but the last few of them are a part of it that lies as it does. To pad it is to
    read and write all of it, to add is to read and write the result.
    """
    rows, terms, columns = product.sizes
    right, left = product.right, product.left
    if terms != size or size in (rows, columns) or right.turned or left.turned:
        return False
    return not _padded_for_nothing(right.base, compiled, constant) and terms > _TERMS_TO_ROWS * rows


def _bases(products: Sequence[_Product], size: int, apart: Collection[fx.Node]) -> list[fx.Node]:
    """Matrices that are to be padded: once each, and the model's own for each product that reads them."""
    operands = (
        one for product in products for one in (product.left, *([] if product.node in apart else [product.right]))
    )
    bases = [one.base for one in operands if size in one.sizes]
    return [one for at, one in enumerate(bases) if one.op == "get_attr" or one not in bases[:at]]


def _padded_for_nothing(base: fx.Node, compiled: bool, constant: bool) -> bool:
    source = _source(base)
    if source.op == "get_attr":
        return constant
    return compiled and source.op == "call_function" and source.target not in _LIBRARY_CALLS


def _source(node: fx.Node) -> fx.Node:
    """What a view looks at; the node itself if it is none."""
    views = _views(node)
    return views[-1].all_input_nodes[0] if views else node


def _views(node: fx.Node) -> list[fx.Node]:
    """The node and what it is a view of, as far as these are views."""
    found = []
    while node.op == "call_function" and (is_view(node.target) or node.target is _aten.reshape.default):
        found.append(node)
        node = node.all_input_nodes[0]
    return found


def _may_widen(base: fx.Node, source: fx.Node, size: int) -> bool:
    """Whether a matrix is all of an input, row after row, whose other readers take any strides."""
    matrix, given = reference_of(base), reference_of(source)
    if matrix is None or given is None or pinned(source) or given.sizes[-1:] != (size,) or size in matrix.sizes[:1]:
        return False
    whole = matrix.numel == given.numel and matrix.sizes[1] == size
    dense = all(row_by_row(one.sizes, one.strides) for one in (matrix, given))
    if not whole or not dense or not all(one.target in _ONLY_SIZES for one in _views(base)):
        return False
    returned = any(one.op == "output" for one in _readers(source))
    return not returned and all(map(_takes_any_strides, source.users))


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads it, views and who reads these among them."""
    found = list(node.users)
    for one in found:
        if is_view(one.target) or one.target is _aten.reshape.default:
            found += [reader for reader in one.users if reader not in found]
    return found


def _pays(
    products: Sequence[_Product],
    apart: Collection[fx.Node],
    copied: Sequence[fx.Node],
    widened: Collection[fx.Node],
    size: int,
    more: int,
    device: torch.device,
    timer: Timer,
) -> bool:
    recorded = reference_of(products[0].node)
    assert recorded is not None
    dtype = getattr(torch, recorded.dtype)

    @cache
    def made(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).uniform_(-0.1, 0.1)

    def example(sizes: tuple[int, int], turned: bool, more: int) -> torch.Tensor:
        one = made(*(length + more * (length == size) for length in sizes))
        return one.t() if turned else one

    def narrowed(left: torch.Tensor, right: torch.Tensor, columns: int) -> torch.Tensor:
        return torch.mm(left, right)[:, :columns].contiguous()

    before: list[tuple[int, Callable[[], object]]] = []
    after: list[tuple[int, Callable[[], object]]] = []
    alike = Counter(
        ((one.left.sizes, one.left.turned), (one.right.sizes, one.right.turned), one.node in apart) for one in products
    )
    for (left, right, by_parts), count in alike.items():
        columns = right[0][0 if right[1] else 1]
        before.append((count, partial(torch.mm, example(*left, 0), example(*right, 0))))
        if by_parts:
            after.append((count, partial(_in_parts, example(*left, more), example(*right, 0), size)))
        else:
            after.append((count, partial(narrowed, example(*left, more), example(*right, more), columns)))
    for sizes, count in Counter(map(_sizes, copied)).items():
        after.append((count, partial(_aten.constant_pad_nd.default, made(*sizes), _amounts(sizes, size, more))))
    for sizes, count in Counter(map(_sizes, widened)).items():
        given, wide = made(*sizes), made(*sizes[:-1], size + more)
        before.append((count, partial(copy_rows, torch.empty_like(given), given)))
        after.append((count, partial(copy_rows, corner(wide, sizes), given)))
    times = timer([call for _, call in (*before, *after)])
    if None in times:
        return False
    taken = [count * (ns or 0.0) for (count, _), ns in zip((*before, *after), times, strict=True)]
    return sum(taken[: len(before)]) > _WORTH * sum(taken[len(before) :])


def _amounts(sizes: Sequence[int], size: int, more: int) -> list[int]:
    """Zeros before and after, the last dimension first."""
    return [amount for length in reversed(sizes) for amount in (0, more * (length == size))]


def _widen(graph: fx.Graph, source: fx.Node, size: int, more: int) -> fx.Node:
    """Let an input have so many columns more, zeros; who reads it reads the part that this returns."""
    given = reference_of(source)
    assert given is not None
    with graph.inserting_before(next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))):
        part = graph.call_function(_aten.slice.Tensor, (source, len(given.sizes) - 1, 0, size))
    part.meta["ref"] = given
    source.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)
    sizes = (*given.sizes[:-1], size + more)
    source.meta["ref"] = replace(given, sizes=sizes, strides=torch.empty(sizes, device="meta").stride())
    return part


def _in_parts(left: torch.Tensor, right: torch.Tensor, terms: int) -> torch.Tensor:
    """``left[:, :terms] @ right``, where the rows of ``left`` are padded, and ``terms`` is odd."""
    even = terms - terms % (_ALIGNED_BYTES // left.element_size())
    # The small sum is the one that is rounded to the result's type before it is added.
    last = _aten.mm.default(_aten.slice.Tensor(left, 1, even, terms), _aten.slice.Tensor(right, 0, even, terms))
    others = _aten.slice.Tensor(left, 1, 0, even), _aten.slice.Tensor(right, 0, 0, even)
    found: torch.Tensor = _aten.addmm.default(last, *others)
    return found


def _pad(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    size: int,
    more: int,
    widened: Mapping[fx.Node, fx.Node],
    apart: Collection[fx.Node],
) -> None:
    """Pad products.

    Args:
        graph: changed in place.
        nodes: the products.
        size: what to pad.
        more: by how much.
        widened: of matrices that are a part of an input, that input, which is padded.
        apart: those whose last terms come by a product of their own.
    """
    padded: dict[fx.Node, fx.Node] = {}

    def of(operand: _Operand, node: fx.Node) -> fx.Node:
        found = operand.base
        if size in operand.sizes:
            if operand.base not in padded:
                if operand.base in widened:
                    found = part = _rows(graph, widened[operand.base], size + more, node)
                else:
                    found, part = _padded(graph, operand, node, size, more)
                if operand.base.op != "get_attr":  # an optimizer may write it: read when the product reads it
                    padded[operand.base] = padded[part] = found
            else:
                found = padded[operand.base]
        return graph.call_function(_aten.t.default, (found,)) if operand.turned else found

    for node in nodes:
        product = _product(node)
        assert product is not None
        with graph.inserting_before(node):
            if node in apart:
                result = graph.call_function(_in_parts, (of(product.left, node), product.right.base, size))
            else:
                result = graph.call_function(_aten.mm.default, (of(product.left, node), of(product.right, node)))
            use_calls(result, node)
            result.meta["pinned"] = pinned(node)
            for dim, length in ((0, product.sizes[0]), (1, product.sizes[2])):
                if length == size:
                    result = graph.call_function(_aten.slice.Tensor, (result, dim, 0, size))
        result.meta |= {"ref": node.meta["ref"], "pinned": pinned(node)}
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _rows(graph: fx.Graph, source: fx.Node, columns: int, product: fx.Node) -> fx.Node:
    """All of an input as a matrix."""
    with graph.inserting_before(product):
        return graph.call_function(_aten.reshape.default, (source, [-1, columns]))


def _padded(graph: fx.Graph, operand: _Operand, product: fx.Node, size: int, more: int) -> tuple[fx.Node, fx.Node]:
    """The matrix with zeros around it, and what others read now: of a computed matrix, a part of that."""
    base, sizes = operand.base, operand.sizes
    computed = base.op == "call_function" and not any(user.op == "output" for user in base.users)
    with graph.inserting_after(base) if computed else graph.inserting_before(product):
        made = graph.call_function(_aten.constant_pad_nd.default, (base, _amounts(sizes, size, more)))
    use_calls(made, _source(base) if computed else product)
    part = base
    if computed:
        part = made
        for dim, length in enumerate(sizes):
            if length == size:
                with graph.inserting_after(part):
                    part = graph.call_function(_aten.slice.Tensor, (part, dim, 0, size))
        part.meta["ref"] = base.meta["ref"]
        base.replace_all_uses_with(part, delete_user_cb=lambda user: user is not made and _takes_any_strides(user))
    return made, part
