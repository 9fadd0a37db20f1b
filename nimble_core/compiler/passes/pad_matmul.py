"""Large products of odd sizes, padded to sizes that libraries' fast routines can load.

A vocabulary of 30,522 words is no multiple of what a matrix unit takes at a time. Products with it, three for each
training step, run two to three times as long as with six words more. Those words are zeros here: operands are padded,
and the rest of the result is ignored. A gradient that compiled kernels make anyway is made with its padding; one that
is copied anyway is copied into a buffer with padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from nimble_core.compiler.passes.channels_last import takes_windows
from nimble_core.compiler.passes.decisions import Decisions, example
from nimble_core.compiler.to_fx import drop_unused, pinned, reference_of, use_calls
from nimble_core.torch_compat.dispatch import OpOverload
from nimble_core.tracing.operator_traits import is_view
from nimble_core.tracing.strides import corner, laid_out, restrided, row_by_row

__all__ = ["pad_products"]

_aten = torch.ops.aten
_ALIGNED_BYTES = 16
_LEAST_SIZE, _LEAST_WORK = 128, 1 << 30
"""Below so many rows, and so many multiplications, a product takes no time worth padding for."""
_WORTH = 1.05
"""How many times as fast padded products have to be."""
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
        rows, columns = _sizes(self.base)
        return rows, columns


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


@dataclass(frozen=True, slots=True)
class _Padding:
    """How products with one odd size are padded.

    Args:
        products: those that have it.
        size: the odd size.
        more: zeros behind it.
        widened: of matrices that show all of an input which is asked for with padding, that input.
        copied: matrices that are padded by a copy, as often as they are.
    """

    products: Sequence[_Product]
    size: int
    more: int
    widened: Mapping[fx.Node, fx.Node]
    copied: Sequence[fx.Node]

    def padded(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Sizes with the padding."""
        return tuple(length + self.more * (length == self.size) for length in sizes)

    def amounts(self, sizes: Sequence[int]) -> list[int]:
        """Zeros before and after, the last dimension first."""
        return [amount for length in reversed(sizes) for amount in (0, self.more * (length == self.size))]


def pad_products(
    module: fx.GraphModule,
    device: torch.device,
    decisions: Decisions,
    *,
    compiled: bool,
    constant: bool,
    copied_in: int = 0,
) -> int:
    """Pad the odd size of large products where that is faster.

    Args:
        module: changed in place. The tensors it returns may get other strides, see ``keep_strides``.
        device: where it runs.
        decisions: if nothing is measured, nothing is padded.
        compiled: whether a compiler makes kernels of the rest, and so pads what it computes at no cost.
        constant: whether weights are constant, and so are padded once.
        copied_in: how many inputs, from the first on, are copied before each run, and may be asked for with padding.

    Returns:
        How many products are padded.
    """
    if takes_windows(module):
        return 0
    groups: dict[tuple[int, torch.dtype], list[fx.Node]] = {}
    for node in module.graph.nodes:
        product = _product(node)
        if product is not None and (size := _odd_size(product)):
            groups.setdefault((size, _dtype(node)), []).append(node)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"][:copied_in]
    count = 0
    for (size, _), nodes in groups.items():
        # Padding of earlier groups may have changed what these read.
        products = [product for node in nodes if (product := _product(node)) is not None]
        padding = _plan(products, size, inputs, compiled=compiled, constant=constant)
        wanted = _pays(padding, device, decisions)
        if decisions.take(products[0].node, f"padded to {size + padding.more}", wanted=wanted):
            _pad(module.graph, padding)
            count += len(products)
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
    if len(_sizes(node)) != 2 or (pinned(node) and node.op != "get_attr"):
        return None
    return _Operand(node, turned)


def _sizes(node: fx.Node) -> tuple[int, ...]:
    recorded = reference_of(node)
    return recorded.sizes if recorded is not None else ()


def _dtype(node: fx.Node) -> torch.dtype:
    recorded = reference_of(node)
    assert recorded is not None
    found: torch.dtype = getattr(torch, recorded.dtype)
    return found


def _multiple(node: fx.Node) -> int:
    """Return how many elements are loaded at a time."""
    return _ALIGNED_BYTES // _dtype(node).itemsize


def _odd_size(product: _Product) -> int:
    """Find the largest size of a large product that is no multiple of what is loaded at once, or 0."""
    rows, terms, columns = product.sizes
    if rows * terms * columns < _LEAST_WORK:
        return 0
    multiple = _multiple(product.node)
    found = max((size for size in (rows, terms, columns) if size >= _LEAST_SIZE and size % multiple), default=0)
    # Some of the columns are not row after row in memory, as in-place writes and foreign operators may need it.
    rigid = pinned(product.node) or not all(map(_takes_any_strides, product.node.users))
    return 0 if rigid and found == columns else found


def _takes_any_strides(reader: fx.Node) -> bool:
    """Whether an operator, and who reads its views, computes the same of a tensor of any strides.

    Not all of torch's do: autograd's formulas give some kernels what is contiguous already, and these do not look.
    """
    if reader.op == "output" or reader.target in (restrided, laid_out):
        return True
    if not isinstance(reader.target, OpOverload) or pinned(reader):
        return False
    if is_view(reader.target) or reader.target is _aten.reshape.default:
        return all(map(_takes_any_strides, reader.users))
    if reader.target.namespace != "aten":
        return False
    return not _ELEMENTWISE.isdisjoint(reader.target.tags) or reader.target.overloadpacket in _STRIDED


def _plan(
    products: Sequence[_Product], size: int, inputs: Sequence[fx.Node], *, compiled: bool, constant: bool
) -> _Padding:
    """Decide how each matrix with the odd size gets its padding."""

    def is_free(base: fx.Node) -> bool:
        source = _source(base)
        if source.op == "get_attr":
            return constant
        return compiled and source.op == "call_function" and source.target not in _LIBRARY_CALLS

    operands = [operand for one in products for operand in (one.left, one.right)]
    bases = [one.base for one in operands if size in one.sizes]
    # A weight is padded for each product that reads it: an optimizer may write it in between.
    once = [one for at, one in enumerate(bases) if one.op == "get_attr" or one not in bases[:at]]
    widened = {one: source for one in once if (source := _source(one)) in inputs and _may_widen(one, source, size)}
    copied = [one for one in once if one not in widened and not is_free(one)]
    return _Padding(products, size, -size % _multiple(products[0].node), widened, copied)


def _source(node: fx.Node) -> fx.Node:
    """Return what a view looks at; the node itself if it is none."""
    views = _views(node)
    return views[-1].all_input_nodes[0] if views else node


def _views(node: fx.Node) -> list[fx.Node]:
    """Return the node and what it is a view of, as far as these are views."""
    found = []
    while node.op == "call_function" and (is_view(node.target) or node.target is _aten.reshape.default):
        found.append(node)
        node = node.all_input_nodes[0]
    return found


def _may_widen(base: fx.Node, source: fx.Node, size: int) -> bool:
    """Whether a matrix is all of an input whose readers take any strides and do not return it."""
    matrix, given = reference_of(base), reference_of(source)
    if matrix is None or given is None or pinned(source) or given.sizes[-1:] != (size,) or size in matrix.sizes[:1]:
        return False
    whole = matrix.numel == given.numel and matrix.sizes[1] == size
    if not whole or not all(row_by_row(one.sizes, one.strides) for one in (matrix, given)):
        return False
    if not all(one.target in _ONLY_SIZES for one in _views(base)):
        return False
    return all(one.op != "output" and _takes_any_strides(one) for one in source.users)


def _pays(padding: _Padding, device: torch.device, decisions: Decisions) -> bool:
    """Whether padded products, with the copies they need, take clearly less time than those as they are."""
    if decisions.timer is None:
        return False
    try:
        before, after = _alternatives(padding, device)
        times = decisions.timer([call for _, call in (*before, *after)])
    except RuntimeError:  # out of memory, most likely: examples are as large as what is padded
        return False
    if None in times:
        return False
    taken = [count * (ns or 0.0) for (count, _), ns in zip((*before, *after), times, strict=True)]
    return sum(taken[: len(before)]) > _WORTH * sum(taken[len(before) :])


_Counted = list[tuple[int, Callable[[], object]]]
"""Calls, each with how often it is made."""


def _alternatives(padding: _Padding, device: torch.device) -> tuple[_Counted, _Counted]:
    """Make examples of all that runs without the padding, and of all that runs with it."""

    @cache
    def made(*sizes: int) -> torch.Tensor:
        return example(sizes, _dtype(padding.products[0].node), device)

    def operand(sizes: Sequence[int], turned: bool) -> torch.Tensor:
        return made(*sizes).t() if turned else made(*sizes)

    def narrowed(left: torch.Tensor, right: torch.Tensor, columns: int) -> torch.Tensor:
        return torch.mm(left, right)[:, :columns].contiguous()

    before: _Counted = []
    after: _Counted = []
    alike = Counter((one.left.sizes, one.left.turned, one.right.sizes, one.right.turned) for one in padding.products)
    for (left, left_turned, right, right_turned), count in alike.items():
        rows, columns = operand(left, left_turned), operand(right, right_turned)
        wide_rows, wide_columns = (
            operand(padding.padded(left), left_turned),
            operand(padding.padded(right), right_turned),
        )
        before.append((count, partial(torch.mm, rows, columns)))
        after.append((count, partial(narrowed, wide_rows, wide_columns, columns.shape[1])))
    for sizes, count in Counter(map(_sizes, padding.copied)).items():
        after.append((count, partial(_aten.constant_pad_nd.default, made(*sizes), padding.amounts(sizes))))
    for sizes, count in Counter(map(_sizes, set(padding.widened.values()))).items():
        given, wide = made(*sizes), made(*sizes[:-1], padding.size + padding.more)
        before.append((count, partial(torch.empty_like(given).copy_, given)))
        after.append((count, partial(corner(wide, sizes).copy_, given)))
    return before, after


def _pad(graph: fx.Graph, padding: _Padding) -> None:
    """Put padded products in the place of all products, and parts of their results in the place of theirs."""
    parts = {source: _widen(graph, source, padding) for source in dict.fromkeys(padding.widened.values())}
    # Matrices that were an input show the part of it that is no padding now.
    widened = {parts.get(base, base): source for base, source in padding.widened.items()}
    padded: dict[fx.Node, fx.Node] = {}

    def operand(one: _Operand, node: fx.Node) -> fx.Node:
        if padding.size not in one.sizes:
            found = one.base
        elif one.base in padded:
            found = padded[one.base]
        elif one.base in widened:
            found = padded[one.base] = _rows(graph, widened[one.base], padding.size + padding.more, node)
        else:
            found, part = _padded(graph, one, node, padding)
            if one.base.op != "get_attr":
                padded[one.base] = padded[part] = found
        return graph.call_function(_aten.t.default, (found,)) if one.turned else found

    for node in (one.node for one in padding.products):
        product = _product(node)
        assert product is not None
        with graph.inserting_before(node):
            matrices = operand(product.left, node), operand(product.right, node)
            result = graph.call_function(_aten.mm.default, matrices)
            use_calls(result, node)
            result.meta["pinned"] = pinned(node)
            for dim, length in ((0, product.sizes[0]), (1, product.sizes[2])):
                if length == padding.size:
                    result = graph.call_function(_aten.slice.Tensor, (result, dim, 0, padding.size))
        result.meta |= {"ref": node.meta["ref"], "pinned": pinned(node)}
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _widen(graph: fx.Graph, source: fx.Node, padding: _Padding) -> fx.Node:
    """Ask for an input with padding in its rows, and return the part that its readers read now."""
    given = reference_of(source)
    assert given is not None
    with graph.inserting_before(next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))):
        part = graph.call_function(_aten.slice.Tensor, (source, len(given.sizes) - 1, 0, padding.size))
    part.meta["ref"] = given
    source.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)
    sizes = (*given.sizes[:-1], padding.size + padding.more)
    source.meta["ref"] = replace(given, sizes=sizes, strides=torch.empty(sizes, device="meta").stride())
    return part


def _rows(graph: fx.Graph, source: fx.Node, columns: int, product: fx.Node) -> fx.Node:
    """Show all of an input as a matrix."""
    with graph.inserting_before(product):
        return graph.call_function(_aten.reshape.default, (source, [-1, columns]))


def _padded(graph: fx.Graph, operand: _Operand, product: fx.Node, padding: _Padding) -> tuple[fx.Node, fx.Node]:
    """Pad a matrix, and return it and what others read: of a computed one, a part of the padded one."""
    base, sizes = operand.base, operand.sizes
    computed = base.op == "call_function" and not any(user.op == "output" for user in base.users)
    with graph.inserting_after(base) if computed else graph.inserting_before(product):
        made = graph.call_function(_aten.constant_pad_nd.default, (base, padding.amounts(sizes)))
    use_calls(made, _source(base) if computed else product)
    part = base
    if computed:
        part = made
        for dim, length in enumerate(sizes):
            if length == padding.size:
                with graph.inserting_after(part):
                    part = graph.call_function(_aten.slice.Tensor, (part, dim, 0, padding.size))
        part.meta["ref"] = base.meta["ref"]
        base.replace_all_uses_with(part, delete_user_cb=lambda user: user is not made and _takes_any_strides(user))
    return made, part
