"""The ways to compute a convolution with what follows it: a form for each library routine.

After folding, a convolution is followed by its bias, often by a sum and a ReLU. Libraries have single calls for that
(cuDNN on CUDA, oneDNN on the host), a 1x1 convolution is a matrix product, and a depthwise one has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Form", "Site", "forms_of", "padded_channels"]

_aten = torch.ops.aten

Routine = Callable[..., torch.Tensor]
"""``(x, weight, bias, addend) -> result``; bias and addend may be None."""

_TENSOR_CORE_CHANNELS = {"float16": 8, "bfloat16": 8, "float32": 4}
"""Tensor cores ask for channels in multiples of this."""


@dataclass(frozen=True, slots=True)
class Site:
    """A convolution and what follows it: all that decides which form is fastest.

    Args:
        sizes: of input and weight, ``((N, C, H, W), (O, C / groups, kH, kW))``.
        parameters: stride, padding, dilation, groups.
        dtype: e.g. ``"float16"``.
        channels_last: layout of input, weight and result.
        bias: whether there is one.
        add: whether a tensor of the result's shape is added.
        relu: whether a ReLU follows.
    """

    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    parameters: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
    dtype: str
    channels_last: bool
    bias: bool
    add: bool
    relu: bool

    @property
    def pointwise(self) -> bool:
        """Whether it is a matrix product: 1x1, unit stride, no padding, one group."""
        stride, padding, _, groups = self.parameters
        return self.sizes[1][2:] == (1, 1) and set(stride) == {1} and set(padding) == {0} and groups == 1

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.parameters[3] == self.sizes[0][1] == self.sizes[1][0] and self.parameters[3] > 1

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """Sizes of the result."""
        (batch, _, *image), (channels, _, *kernel) = self.sizes
        stride, padding, dilation, _ = self.parameters
        spatial = [
            (size + 2 * pad - dil * (kern - 1) - 1) // step + 1
            for size, kern, step, pad, dil in zip(image, kernel, stride, padding, dilation, strict=True)
        ]
        return (batch, channels, *spatial)


@dataclass(frozen=True, slots=True)
class Form:
    """A way to compute a site.

    Args:
        run: from input, weight, bias and addend to the result.
        weight: what the weight has to be made into, ahead of time; None: nothing.
        bare: the convolution alone, if all that follows is separate: a compiler fuses that with what comes next.
        zeros: channels of zeros that ``bare`` and ``weight`` expect behind those of the input, and make behind those of
            the result: a compiler writes and skips them in passing.
    """

    run: Routine
    weight: Callable[[torch.Tensor], torch.Tensor] | None = None
    bare: Routine | None = None
    zeros: tuple[int, int] = (0, 0)


def forms_of(site: Site, device: str) -> dict[str, Form]:
    """Ways to compute ``site``, by name; the first, ``"separate"``, is eager's own."""
    forms = {"separate": _separate(site, _plain(site))}
    if device == "cuda":
        forms |= _on_cuda(site)
    elif site.dtype == "float32" and (site.relu or site.add) and torch.backends.mkldnn.is_available():
        forms["onednn fused"] = _onednn(site)
    if site.pointwise and (site.channels_last or site.sizes[0][2:] == (1, 1)):
        forms["matrix product"] = _matrix_product(site, device)
    return forms


def _plain(site: Site) -> Routine:
    """Make the convolution of ``site`` as eager computes it."""
    stride, padding, dilation, groups = site.parameters
    return lambda x, weight, bias, addend: _aten.convolution.default(
        x, weight, bias, stride, padding, dilation, False, (0, 0), groups
    )


def _separate(site: Site, bare: Routine, *, adds_bias: bool = False) -> Form:
    """Make a convolution, then all that follows; one that ``adds_bias`` itself has no bare form."""

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        out = bare(x, weight, bias if adds_bias else None, None)
        if bias is not None and not adds_bias:
            out = _aten.add.Tensor(out, _aten.reshape.default(bias, [1, -1, 1, 1]))
        if addend is not None:
            out = _aten.add.Tensor(out, addend)
        return _aten.relu.default(out) if site.relu else out

    return Form(run, bare=None if adds_bias else bare)


def _on_cuda(site: Site) -> dict[str, Form]:
    forms: dict[str, Form] = {}
    groups = site.parameters[3]
    half = site.dtype in ("float16", "bfloat16")
    if half and not torch.backends.cudnn.deterministic and not site.pointwise:  # products have one good routine
        # cuDNN keeps, for the whole process, the routine with which a convolution first ran, whether it was chosen by
        # trial or by rule. What float32 may be rounded to does not matter here, but makes it another convolution.
        forms["cudnn timed"] = _separate(site, _cudnn(site, tuned=True, other=True))
    multiple = _TENSOR_CORE_CHANNELS.get(site.dtype, 1)
    zeros = (-site.sizes[0][1] % multiple, -site.sizes[1][0] % multiple)
    if any(zeros) and site.channels_last and groups == 1:
        forms["padded channels"] = _padded(site, zeros)
    no_dilation = set(site.parameters[2]) == {1}
    if site.dtype == "float32" and not site.channels_last and groups == 1 and not site.pointwise and no_dilation:
        forms["im2col"] = _separate(site, _unfolded(site))
    if site.relu and site.bias and site.dtype in _TENSOR_CORE_CHANNELS:
        forms["cudnn fused"] = Form(_cudnn_fused(site))
    if site.depthwise and site.dtype != "bfloat16":
        forms["depthwise native"] = _separate(site, _native_depthwise(site), adds_bias=True)
        forms["depthwise cudnn"] = _separate(site, _cudnn(site, tuned=False, other=False))
    return forms


def _cudnn(site: Site, *, tuned: bool, other: bool) -> Routine:
    """Make cuDNN's convolution, ``tuned`` by trial or not, and to cuDNN ``other`` than eager's."""
    stride, padding, dilation, groups = site.parameters

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        trial, tf32 = tuned or torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 != other
        return _aten.cudnn_convolution.default(x, weight, padding, stride, dilation, groups, trial, False, tf32)

    return run


def _cudnn_fused(site: Site) -> Routine:
    """Make cuDNN's single call for convolution, bias, sum and ReLU."""
    stride, padding, dilation, groups = site.parameters

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        if addend is None:
            return _aten.cudnn_convolution_relu.default(x, weight, bias, stride, padding, dilation, groups)
        return _aten.cudnn_convolution_add_relu.default(x, weight, addend, 1.0, bias, stride, padding, dilation, groups)

    return run


def _unfolded(site: Site) -> Routine:
    """Make a matrix product over unfolded patches of the image."""
    stride, padding, _, _ = site.parameters
    return lambda x, weight, bias, addend: _aten._slow_conv2d_forward.default(
        x, weight, site.sizes[1][2:], bias, stride, padding
    )


def _native_depthwise(site: Site) -> Routine:
    """Make torch's own kernel, whose results are contiguous."""
    stride, padding, dilation, _ = site.parameters

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        out = _aten._conv_depthwise2d.default(x, weight, site.sizes[1][2:], bias, stride, padding, dilation)
        return out.contiguous(memory_format=torch.channels_last) if site.channels_last else out

    return run


def padded_channels(weight: torch.Tensor) -> torch.Tensor:
    """Pad a weight with zeros to the next multiples of channels, in and out, that tensor cores ask for."""
    multiple = _TENSOR_CORE_CHANNELS[str(weight.dtype).removeprefix("torch.")]
    missing = [-size % multiple for size in weight.shape[:2]]
    padded = torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, missing[1], 0, missing[0]))
    return padded.to(memory_format=torch.channels_last)


def _padded(site: Site, zeros: tuple[int, int]) -> Form:
    """Make a convolution of padded channels, with its weight padded for good.

    cuDNN pads by itself, in each convolution anew, with up to five more kernels.
    """
    plain, features = _plain(site), site.sizes[1][0]

    def padded(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        x = _aten.constant_pad_nd.default(x, [0, 0, 0, 0, 0, zeros[0]]) if zeros[0] else x
        return _aten.slice.Tensor(plain(x, weight, None, None), 1, 0, features)

    return Form(_separate(site, padded).run, padded_channels, plain, zeros)


def _onednn(site: Site) -> Form:
    """Make oneDNN's call with bias and sum; the ReLU is separate, since oneDNN's makes 0 of NaN."""
    stride, padding, dilation, groups = site.parameters
    mkldnn = torch.ops.mkldnn

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        if addend is None:
            out = mkldnn._convolution_pointwise(x, weight, bias, padding, stride, dilation, groups, "none", [], "")
        else:
            out = mkldnn._convolution_pointwise.binary(
                x, addend, weight, bias, padding, stride, dilation, groups, "add", 1.0, None, [], ""
            )
        return _aten.relu_.default(out) if site.relu else out

    return Form(run)


def _matrix_product(site: Site, device: str) -> Form:
    """Make a product whose rows are the pixels; on CUDA bias and ReLU are part of it."""

    def run(x: Any, weight: Any, bias: Any, addend: Any) -> Any:
        batch, channels, height, width = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(-1, channels)
        columns = weight.reshape(weight.shape[0], channels).t()
        with_relu = site.relu and bias is not None and addend is None and device == "cuda"
        if with_relu:
            out = _aten._addmm_activation.default(bias, rows, columns)
        elif bias is not None:
            out = _aten.addmm.default(bias, rows, columns)
        else:
            out = _aten.mm.default(rows, columns)
        out = out.view(batch, height, width, -1).permute(0, 3, 1, 2)
        if addend is not None:
            out = _aten.add.Tensor(out, addend)
        return _aten.relu.default(out) if site.relu and not with_relu else out

    return Form(run)
