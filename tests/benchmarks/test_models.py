"""The benchmark's models build, in their dtype and layout, and every way of running them does the same.

Everything is small and on the host. Rows whose packages are not installed are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks import models
from benchmarks.models import LOST, ROWS, SIX, Inference, Row, Training, Work, load, work
from nimble_core import Nimble, Options


@pytest.fixture(autouse=True)
def tf32_as_it_was() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def built(row: Row) -> Inference | Training:
    try:
        return load(row, "cpu", tiny=True)
    except ImportError as error:
        pytest.skip(str(error))


def case_of(name: str, **changes: Any) -> Inference:
    case = built(replace(ROWS[name], **changes))
    assert isinstance(case, Inference)
    return case


def outputs(case: Inference) -> list[torch.Tensor]:
    args, kwargs = case.fresh()
    with torch.inference_mode():
        leaves = pytree.tree_leaves(case.model(*args, **kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


FIRST = SIX + LOST
LATER = [pytest.param(name, marks=pytest.mark.slow) for name in ROWS if name not in FIRST]


@pytest.mark.parametrize("name", [*FIRST, *LATER])
def test_a_row_builds_and_its_outputs_move_with_its_inputs(name: str) -> None:
    case = built(ROWS[name])
    if isinstance(case, Training):
        assert case.make().training
        return
    assert (ROWS[name].training, case.model.training) == (False, False)
    first, second = outputs(case), outputs(case)
    for one, other in zip(first, second, strict=True):
        assert one.isfinite().all()
        # As packages initialise them, outputs hardly move: LOST is about that; torchvision's ViTs have a head of zeros.
        assert name in (*LOST, "vit-l-b64") or not torch.equal(one, other)


def test_half_precision_is_float32_rounded_and_channels_last_with_convolutions() -> None:
    single, half = case_of("resnet50", dtype="float32"), case_of("resnet50", dtype="bfloat16")
    for one, other in zip(half.model.state_dict().values(), single.model.state_dict().values(), strict=True):
        assert torch.equal(one, other.bfloat16() if other.is_floating_point() else other)
        assert one.dim() != 4 or one.is_contiguous(memory_format=torch.channels_last)
    (image,), _ = half.fresh()
    assert image.dtype == torch.bfloat16
    assert image.is_contiguous(memory_format=torch.channels_last)
    (image,), _ = single.fresh()
    assert (image.dtype, image.is_contiguous()) == (torch.float32, True)


def test_a_row_is_seeded_and_sets_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    first, second = case_of("llama-decode"), case_of("llama-decode")
    assert not torch.backends.cuda.matmul.allow_tf32
    for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    built(ROWS["train-resnet18"])
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
    strict = replace(ROWS["llama-decode"], dtype="strict")
    assert {one.dtype for one in case_of("llama-decode", dtype="strict").model.parameters()} == {torch.float32}
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert strict.precision == "float32"


def test_training_starts_anew_with_every_copy_and_learns_its_batch() -> None:
    case = built(ROWS["train-resnet18"])
    assert isinstance(case, Training)
    images, labels = case.batch()
    assert not torch.equal(images, case.batch()[0])

    def losses() -> list[float]:
        model, found = case.make(), []
        optimizer = case.optimizer(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss = case.loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    first = losses()
    assert first[2] < first[0]
    assert losses() == pytest.approx(first)


# -- the same work for all -----------------------------------------------------------------------------------------


def of_every_way(case: Inference) -> dict[str, tuple[int, int, int]]:
    """Operations, attention calls and masked ones of each way."""
    args, kwargs = case.fresh()
    with torch.inference_mode():
        found = {"eager": work(lambda: case.model(*args, **kwargs))}
    found["compile"] = models.work_of_compiled(case.model, args, kwargs)
    found["export"] = models.work_of_export(case.model, args, kwargs)
    with closing(Nimble(case.model, Options(fuse="none", tune="off")).prepare(*args, **kwargs)) as net:
        found["ours"] = models.work_of_recording(net.engines[0].recorded.recording)
    return {way: (one.flops, one.attention, one.masked) for way, one in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "masked"), [("bert", 0), ("vit-tf32", 0), ("llama-decode", 2), ("gpt2", 0)])
def test_every_way_does_the_same_work(name: str, masked: int) -> None:
    found = of_every_way(case_of(name))
    assert len(set(found.values())) == 1, found
    assert found["eager"][0] > 0
    assert found["eager"][1:] == (2, masked)


def test_work_of_products_convolutions_and_attention() -> None:
    x, weight, image, kernel = (torch.ones(*shape) for shape in ((2, 3), (3, 4), (1, 2, 4, 4), (3, 2, 1, 1)))
    assert work(lambda: torch.relu(x @ weight)) == Work(flops=2 * 2 * 3 * 4, calls=2)
    assert work(lambda: torch.conv2d(image, kernel)).flops == 2 * 3 * 2 * 16
    assert work(lambda: None) == Work()
    q = torch.ones(1, 2, 4, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    plain = work(lambda: attention(q, q, q))
    masked = work(lambda: attention(q, q, q, attn_mask=torch.ones(4, 4).bool()))
    assert plain.flops == masked.flops == 2 * 2 * 2 * 4 * 4 * 8
    assert [(one.attention, one.masked) for one in (plain, masked)] == [(1, 0), (1, 1)]
    encoder, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.ones(1, 4, 8)
    with torch.no_grad():
        whole = work(lambda: encoder(x, x, x, need_weights=False))
    assert whole == Work(2 * 4 * 4 * 8 * 8 + 2 * 2 * 4 * 4 * 8, 1, 0, whole.calls)  # four products, and attention


def test_masks_of_cudas_attention_are_seen() -> None:
    q, aten, counted = torch.ones(1, 2, 4, 8), torch.ops.aten, models._counted
    assert counted(aten._scaled_dot_product_efficient_attention.default, (q, q, q, q, False), {}).masked == 1
    assert counted(aten._scaled_dot_product_cudnn_attention.default, (q, q, q, None, False), {}).masked == 0
    assert counted(aten._scaled_dot_product_flash_attention.default, (q, q, q), {}) == Work(0, 1, 0, 1)
    assert counted(aten._scaled_dot_product_flash_attention_backward.default, (), {}) == Work(calls=1)
