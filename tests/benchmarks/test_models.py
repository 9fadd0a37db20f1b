"""The benchmark's models build, in their dtype and layout, and every way of running them does the same.

Everything is small and on the host. Rows whose packages are not installed are skipped.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks import kernel_times, models, policies, revisions
from benchmarks.models import FIRST, LOST, ROWS, SIX, Inference, Row, Training, Work, example, load, work
from nimble_core import Nimble, Options


@pytest.fixture(autouse=True)
def tf32_as_it_was() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


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


def test_rows_are_named_and_few_have_costly_ways() -> None:
    assert set(FIRST) == {*SIX, *LOST} <= set(ROWS)
    assert all(row.name == name for name, row in ROWS.items())
    assert {row.dtype for row in ROWS.values()} <= {"float16", "bfloat16", "float32", "tf32"}
    assert Counter(way for row in ROWS.values() for way in row.extra) == {"max-autotune": 6, "aoti": 3, "xla": 1}


def test_what_scripts_measure_are_rows() -> None:
    named = {*policies.MODELS, *kernel_times.MODELS, *(name for name, _, kind in revisions.ROWS if kind == "inference")}
    assert named <= {row.title for row in ROWS.values() if row.batch == 1 and not row.training}
    trained = {name for name, _, kind in revisions.ROWS if kind != "inference"}
    assert trained <= {row.title for row in ROWS.values() if row.training}


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


def test_a_row_is_seeded_and_sets_tf32_of_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    first, second = case_of("llama-decode"), case_of("llama-decode")
    assert not torch.backends.cuda.matmul.allow_tf32
    for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    built(ROWS["train-resnet18"])
    assert torch.backends.cuda.matmul.allow_tf32


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"DLA-34 needs a package: .*timm"):
        load(ROWS["dla34"], "cpu", tiny=True)


def test_an_example_is_a_row_in_any_dtype() -> None:
    model, args, kwargs = example("DARTS", "float32", device="cpu")
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert (args[0].shape, kwargs) == ((1, 3, 224, 224), {})


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


@pytest.mark.slow
def test_the_count_tells_masks_that_only_tracing_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted as transformers 5.17 decides, so that this holds whatever the installed one does."""
    masking = pytest.importorskip("transformers.masking_utils", reason="needs transformers: make test installs it")

    def as_in_5_17(padding_mask: Any, *sizes: Any) -> bool:
        return padding_mask is None and not torch.compiler.is_compiling()

    case = case_of("bert")  # which calls same_masks
    monkeypatch.setattr(masking, "_ignore_bidirectional_mask_sdpa", as_in_5_17)
    found = of_every_way(case)
    assert [found[way][2] for way in ("eager", "ours", "compile", "export")] == [0, 0, 2, 2]
    models.same_masks()
    assert {one[2] for one in of_every_way(case).values()} == {0}


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
