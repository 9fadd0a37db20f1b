"""The models that every way of the benchmark runs, and what a way of running them computes.

Weights are random, sizes are those published, inputs are random numbers made on the device. Batch normalisation is
calibrated (:func:`calibrated`), except where a row is about a model as its package makes it.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count, shape_wrapper

from benchmarks import cells
from benchmarks.diffusion import DiT, UNet
from benchmarks.llama import Size, llama

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Inference:
    """A model in evaluation mode, on its device, and new random inputs for it each time."""

    model: nn.Module
    fresh: Callable[[], Inputs]


@dataclass(frozen=True, slots=True)
class Training:
    """What a training step is made of.

    Args:
        make: a new copy of the same weights, in training mode, on the device.
        loss_fn: of output and targets.
        optimizer: of parameters; fused on CUDA.
        batch: new random inputs and targets each time.
    """

    make: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Row:
    """One model, dtype and batch that every way runs.

    Args:
        title: the model's name in tables.
        dtype: ``"float16"``, ``"bfloat16"``, ``"float32"`` (TF32 in convolutions alone), ``"tf32"``, or ``"strict"``
            (float32 without TF32).
        build: the model in float32, from the device and whether to be small; ``load`` casts it.
        extra: costly ways also measured on this row: ``"max-autotune"``, ``"aoti"``, ``"xla"``.
    """

    name: str
    title: str
    dtype: str
    batch: int
    build: Callable[[str, bool], Inference | Training]
    training: bool = False
    extra: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        """The name that bounds have."""
        return "float32" if self.dtype == "strict" else self.dtype


Build = Callable[[int, str, bool], Inference | Training]
"""What a row runs, from the batch, the device, and whether to be small."""


def load(row: Row, device: str, tiny: bool = False) -> Inference | Training:
    """Make what a row runs, seeded, in its dtype; images channels last in half precision. Sets TF32 for the process.

    Raises:
        ImportError: a package that the model comes from is not installed.
    """
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = row.dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = row.dtype != "strict"
    try:
        built = row.build(device, tiny)
    except ModuleNotFoundError as error:
        raise ImportError(f"{row.title} needs a package: {error}", name=error.name) from error
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(row.dtype)
    if isinstance(built, Training) or dtype is None or (tiny and device == "cpu" and row.dtype == "float16"):
        return built  # float16 is slow on a CPU
    model = built.model.to(dtype)
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's types
    return Inference(model, partial(_cast, built.fresh, dtype))


def _cast(fresh: Callable[[], Inputs], dtype: torch.dtype) -> Inputs:
    def fit(value: Tensor) -> Tensor:
        value = value.to(dtype) if value.is_floating_point() else value
        return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value

    args, kwargs = fresh()
    return tuple(map(fit, args)), {name: fit(value) for name, value in kwargs.items()}


def calibrated(model: nn.Module, images: Callable[[int], Tensor]) -> nn.Module:
    """Put the model into evaluation mode, with batch normalisation's statistics taken from so many random images.

    Every normalisation shifts by 1, so that most of what it passes on is above ReLU's kink. Without that, deep random
    networks are chaotic (Yang et al., "A Mean Field Theory of Batch Normalization", 2019) and no check in float16 means
    anything: rounding moves ResNet-101's outputs by 9% of their norm and another input by 24%; so by 0.05% and 8%.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        nn.init.ones_(norm.bias)
        norm.momentum = None
        norm.reset_running_stats()
    if norms:
        model.train()
        with torch.no_grad():
            for _ in range(3):
                model(images(2))
    return model.eval()


def _classifier(name: str, side: int, **options: Any) -> Any:
    """For images so many pixels wide; without torchvision, the examples' ResNets stand for its own."""
    package, name = name.split(".")
    if package == "cells":
        return getattr(cells, name)()
    if package == "timm":
        return importlib.import_module("timm").create_model(name)
    try:
        models = importlib.import_module("torchvision").models
    except ModuleNotFoundError:
        if name not in ("resnet18", "resnet50"):
            raise
        return getattr(importlib.import_module("examples.models"), name)()[0]
    sized = {"image_size": side} if name.startswith("vit") else {}
    return getattr(models, name)(weights=None, **sized, **options)


def images(name: str, size: int = 224, tiny_size: int = 64, calibrate: bool = True, **options: Any) -> Build:
    """Make a classifier of square images so many pixels wide."""

    def build(batch: int, device: str, tiny: bool) -> Inference:
        side, count = (tiny_size, 1) if tiny else (size, batch)
        model = _classifier(name, side, **options).to(device)

        def drawn(count: int) -> Tensor:
            return torch.randn(count, 3, side, side, device=device)

        return Inference(calibrated(model, drawn) if calibrate else model.eval(), lambda: ((drawn(count),), {}))

    return build


def trained(name: str, rate: float, size: int = 32, classes: int = 10, **options: Any) -> Build:
    """Make a classifier of images, of CIFAR-10's shape unless said, trained by SGD with momentum."""

    def build(batch: int, device: str, tiny: bool) -> Training:
        side, count = (32, 4) if tiny else (size, batch)
        model = _classifier(name, side, num_classes=classes, **options).to(device).train()

        def data() -> tuple[Tensor, Tensor]:
            return torch.randn(count, 3, side, side, device=device), torch.randint(classes, (count,), device=device)

        return Training(lambda: copy.deepcopy(model), functional.cross_entropy, sgd(rate, device), data)

    return build


def sgd(rate: float, device: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """SGD with momentum, of parameters; fused on CUDA."""
    how: dict[str, Any] = {"fused": True} if device.startswith("cuda") else {}
    return partial(SGD, lr=rate, momentum=0.9, weight_decay=5e-4, **how)


# -- transformers --------------------------------------------------------------------------------------------------


def same_masks() -> None:
    """Let transformers build an attention mask where a padding mask is given, and none elsewhere, in every way.

    By itself it looks at values, which it cannot while it is traced or captured, and builds masks there to be safe.
    """
    masking = importlib.import_module("transformers.masking_utils")

    def bidirectional(padding_mask: Any, kv_length: int, local: int | None = None) -> bool:
        return padding_mask is None and (local is None or kv_length < local)

    def causal(padding_mask: Any, q_length: int, kv_length: int, *rest: Any) -> bool:
        return q_length in (1, kv_length) and bidirectional(padding_mask, kv_length, rest[-1] if rest else None)

    vars(masking).update(_ignore_bidirectional_mask_sdpa=bidirectional, _ignore_causal_mask_sdpa=causal)
    vars(masking).update(find_packed_sequence_indices=lambda position_ids: None)


def _transformers(
    name: str, named: Mapping[str, int | tuple[int, ...]], small: Mapping[str, Any], part: str = "", **options: Any
) -> Build:
    """Make a model of transformers, or that part of it. ``named``: its arguments, as a number of tokens or a shape."""

    def build(batch: int, device: str, tiny: bool) -> Inference:
        kind = getattr(importlib.import_module("transformers"), name)
        same_masks()
        config = kind.config_class(**{**options, **(small if tiny else {})})

        def value(size: int | tuple[int, ...]) -> Tensor:
            if isinstance(size, tuple):
                return torch.randn(batch, *size, device=device)
            return torch.randint(config.get_text_config().vocab_size, (batch, size), device=device)

        model = kind(config).get_submodule(part).to(device).eval()
        return Inference(model, lambda: ((), {name: value(size) for name, size in named.items()}))

    return build


def _decode(batch: int, device: str, tiny: bool) -> Inference:
    size = Size(2, 64, 4, 2, 128, 32, 100) if tiny else Size()

    def fresh() -> Inputs:
        token = torch.randint(size.vocab, (1, 1), device=device)
        return (token, torch.randint(size.length // 2, size.length, (1,), device=device)), {}

    return Inference(llama(size, device), fresh)


def _encoder(batch: int, device: str, tiny: bool) -> Inference:
    """Make the encoder of "Attention Is All You Need" of torch's own modules, which have a fast path in evaluation."""
    width, heads, hidden, layers, length = (64, 2, 128, 2, 16) if tiny else (512, 8, 2048, 6, 128)
    layer = nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True, device=device)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    return Inference(model, lambda: ((torch.randn(batch, length, width, device=device),), {}))


def _dit(batch: int, device: str, tiny: bool) -> Inference:
    side, *sizes = (8, 64, 2, 2) if tiny else (32, 768, 12, 12)

    def fresh() -> Inputs:
        noisy = torch.randn(batch, 4, side, side, device=device)
        return (noisy, *(torch.randint(1000, (batch,), device=device) for _ in range(2))), {}

    return Inference(DiT(side, *sizes).to(device).eval(), fresh)


def _unet(batch: int, device: str, tiny: bool) -> Inference:
    model = UNet(32, (1, 2)) if tiny else UNet()
    side = 16 if tiny else 32

    def fresh() -> Inputs:
        return (torch.randn(batch, 3, side, side, device=device), torch.randint(1000, (batch,), device=device)), {}

    return Inference(model.to(device).eval(), fresh)


# -- rows ----------------------------------------------------------------------------------------------------------


def _row(name: str, title: str, build: Build, dtype: str = "float16", batch: int = 1, extra: str = "") -> Row:
    return Row(name, title, dtype, batch, partial(build, batch), name.startswith("train-"), tuple(extra.split()))


_IMAGE = {"pixel_values": (3, 224, 224)}
_SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
_LARGE: Any = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_SMALL_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2}
_SMALL_T5 = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128}
_SMALL_CLIP = {"text_config": _SMALL, "vision_config": _SMALL}
_SMALL_PAIR = {"encoder_layers": 1, "decoder_layers": 1}
_DETR: dict[str, Any] = {
    "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}, "backbone": None,
    "use_timm_backbone": False, "use_pretrained_backbone": False,
}  # fmt: skip
_GOOGLENET = partial(images, "torchvision.googlenet", init_weights=True, aux_logits=False)
_BERT = _transformers("BertModel", {"input_ids": 128}, _SMALL)
_SEGFORMER = partial(_transformers, "SegformerForSemanticSegmentation", small={"depths": [1] * 4}, depths=[3, 4, 6, 3])

_TABLE = (
    _row("resnet50", "ResNet-50", images("torchvision.resnet50"), extra="max-autotune aoti xla"),
    _row("bert", "BERT-base 128", _BERT, extra="max-autotune aoti"),
    _row("googlenet", "GoogLeNet", _GOOGLENET(), extra="max-autotune"),
    _row("nasnet-mobile", "NASNet-A mobile", images("cells.nasnet_a_mobile")),
    _row("llama-decode", "Llama 1B decode step", _decode, "bfloat16", extra="max-autotune aoti"),
    _row("train-resnet18", "ResNet-18 CIFAR", trained("torchvision.resnet18", 0.004), "tf32", 32),
    _row("googlenet-default-init", "GoogLeNet as made", _GOOGLENET(calibrate=False)),
    _row("mobilenet-default-init", "MobileNetV2 as made", images("torchvision.mobilenet_v2", calibrate=False)),
    _row("randwire", "RandWire as made", images("cells.randwire", calibrate=False), "float32"),
    _row("segformer", "SegFormer", _SEGFORMER({"pixel_values": (3, 512, 512)})),
    _row("encoder", "torch.nn's encoder 128", _encoder),
    _row("dit-b", "DiT-B/2", _dit, "bfloat16", 2, extra="max-autotune"),
    _row("unet", "DDPM's U-Net", _unet),
    _row("bert-b8-tf32", "BERT-base 128", _BERT, "tf32", 8),
    _row("vit-tf32", "ViT-B/16", _transformers("ViTModel", _IMAGE, _SMALL), "tf32"),
    _row("vit-l-b64", "ViT-L/16", images("torchvision.vit_l_16"), "bfloat16", 64),
    _row("mobilenet", "MobileNetV2", images("torchvision.mobilenet_v2"), extra="max-autotune"),
    _row("efficientnet", "EfficientNet-B0", images("torchvision.efficientnet_b0"), extra="max-autotune"),
    _row("resnet50-b64", "ResNet-50", images("torchvision.resnet50"), batch=64),
    _row("vit-l", "ViT-L/16", _transformers("ViTModel", _IMAGE, _SMALL, **_LARGE), "bfloat16", extra="max-autotune"),
    _row("dla34", "DLA-34", images("timm.dla34")),
    _row("inception-v4", "Inception-v4", images("timm.inception_v4", 299, 160)),
    _row("densenet161", "DenseNet-161", images("torchvision.densenet161")),
    _row("swin-t", "Swin-T", images("torchvision.swin_t"), extra="max-autotune"),
    _row("detr", "DETR",
         _transformers("DetrForObjectDetection", {"pixel_values": (3, 480, 640)}, _SMALL_PAIR, **_DETR)),
    _row("whisper", "Whisper's encoder",
         _transformers("WhisperModel", {"input_features": (80, 3000)}, _SMALL_PAIR, "encoder"), extra="max-autotune"),
    _row("nasnet-large", "NASNet-A large", images("timm.nasnetalarge", 331)),
    _row("hrnet-w18", "HRNet-W18", images("timm.hrnet_w18")),
    _row("inception-v3", "Inception-v3", images("torchvision.inception_v3", 299, 299, init_weights=True)),
    _row("clip", "CLIP ViT-B/32", _transformers("CLIPModel", {"input_ids": 77, **_IMAGE}, _SMALL_CLIP)),
    _row("gpt2", "GPT-2 128", _transformers("GPT2Model", {"input_ids": 128}, _SMALL_GPT2, use_cache=False)),
    _row("t5-small", "T5-small 128+32",
         _transformers("T5Model", {"input_ids": 128, "decoder_input_ids": 32}, _SMALL_T5, use_cache=False)),
    _row("amoebanet", "AmoebaNet-A", images("cells.amoebanet_a", 331)),
    _row("darts", "DARTS", images("cells.darts")),
    _row("train-mobilenet", "MobileNetV2 CIFAR", trained("torchvision.mobilenet_v2", 0.01), "tf32", 32),
)  # fmt: skip

ROWS: Mapping[str, Row] = {row.name: row for row in _TABLE}
SIX = ("resnet50", "bert", "googlenet", "nasnet-mobile", "llama-decode", "train-resnet18")
"""What an independent harness measures as well."""
LOST = ("googlenet-default-init", "mobilenet-default-init", "randwire", "segformer")
"""Where ours was slower than a peer when others measured it; ``llama-decode`` was, too."""


def example(title: str, dtype: str, batch: int = 1, device: str = "cuda") -> tuple[nn.Module, *Inputs]:
    """Model and inputs of the row of that title and batch, in any dtype: for what measures parts of preparing."""
    row = next(row for row in _TABLE if (row.title, row.batch) == (title, batch))
    case = load(replace(row, dtype=dtype), device)
    assert isinstance(case, Inference)
    return case.model, *case.fresh()


# -- what calls compute --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of products, convolutions and attention; calls of attention, if it is one call, masked, of ATen."""

    flops: int = 0
    attention: int = 0
    masked: int = 0
    calls: int = 0


def _total(parts: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(*map(astuple, [Work(), *parts]), strict=True)))


def _counted(func: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Work:
    """One call, without its operations."""
    if not any(name in str(func) for name in ("scaled_dot_product", "multi_head")) or "backward" in str(func):
        return Work(calls=1)
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | dict(kwargs)
    masked = any(given.get(name) is not None for name in ("attn_mask", "attn_bias", "mask"))
    return Work(attention=1, masked=int(masked), calls=1)


def _encoder_flops(query: Any, key: Any, value: Any, width: int, heads: int, *_: Any, **__: Any) -> int:
    """Of one call in which torch's encoders project queries, keys, values and outputs, and attend."""
    split = (query[0], heads, query[1], width // heads)
    return int(8 * query[0] * query[1] * width * width + sdpa_flop_count(split, split, split))


_host_flops = shape_wrapper(lambda *qkv, **_: sdpa_flop_count(*qkv[:3]))
flop_registry.setdefault(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, _host_flops)
flop_registry.setdefault(torch.ops.aten._native_multi_head_attention, shape_wrapper(_encoder_flops))


class Noted(TorchDispatchMode):
    """Hands each call of an operator, with its arguments, to a function before it runs."""

    def __init__(self, note: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def work(call: Callable[[], Any]) -> Work:
    """List the operators of a call; none of what CUDA graphs replay or compiled kernels run, since these call none."""
    found: list[Work] = []
    with Noted(lambda *called: found.append(_counted(*called))), FlopCounterMode(display=False) as counter:  # type: ignore[no-untyped-call]  # torch's constructor
        call()
    return _total([Work(counter.get_total_flops()), *found])


def work_of_compiled(model: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> Work:
    """List the operators of the graphs that ``torch.compile`` traces."""
    found: list[Work] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            found.append(work(lambda: graph(*inputs)))
            return graph(*inputs)

        return run

    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(*args, **kwargs)
    return _total(found)


def work_of_export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """List the operators of the program that ``torch.export`` traces."""
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs).module()
        return work(lambda: program(*args, **kwargs))


def work_of_recording(recording: Any) -> Work:
    """List the operators of a recording of eager's calls."""
    from nimble_viz.collect.flops import call_flops

    flops = sum(count or 0 for count, product in call_flops(recording) if product)
    calls = (_counted(one.func, one.args, dict(one.kwargs)) for one in recording.steps if one.call is not None)
    return _total([Work(flops), *calls])
