"""Recording without running: the same Program as a real recording gives, and no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from examples import models as examples
from nimble_core.ir.call_graph import build_graph
from nimble_core.ir.program import Program
from nimble_core.scheduling.saved_plan import fingerprint
from nimble_core.tracing.fake_run import dry_run
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording_contexts import announced
from nimble_core.tracing.signature import Signature
from nimble_core.utils.errors import CaptureError
from tests.support.models import CASES, Busy, Wide, make

HOST, CUDA = torch.device("cpu"), torch.device("cuda")


def dry(model: Callable[..., Any], *args: Any, device: torch.device = HOST, **kwargs: Any) -> Program:
    return dry_run(model, args, kwargs, device)[0].program


def real(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    with announced(False):
        return record(model, Signature(args, kwargs), args=args, kwargs=kwargs).program


def calls_of(program: Program) -> list[Any]:
    """All of each call, results of no elements left out: their number is not known without running."""
    return [
        (call.operator, call.module, [access for access in call.accesses if access.ref.numel]) for call in program.calls
    ]


def same(first: Program, second: Program) -> bool:
    a, b = build_graph(first), build_graph(second)
    return (
        [call.operator for call in first.calls] == [call.operator for call in second.calls]
        and (a.edges, a.kinds, a.meg) == (b.edges, b.kinds, b.meg)
        and fingerprint(first, a) == fingerprint(second, b)
    )


# ---------------------------------------------------------------- the same as a real recording


@pytest.mark.parametrize("name", [name for name in CASES if name != "custom_operators"])
def test_hazards_are_those_of_a_real_recording(name: str) -> None:
    model, args, kwargs = make(name)
    recorded = real(model, *args, **kwargs)
    planned = dry(model, *args, **kwargs)
    assert same(recorded, planned)
    assert recorded.host_steps == planned.host_steps
    if name != "lstm":  # there fake weights are first seen in another order
        assert calls_of(recorded) == calls_of(planned)


def test_the_branch_without_values_is_taken_where_the_other_looks_at_them() -> None:
    model, _, kwargs = examples.bert_small(length=8)
    words, mask = kwargs["input_ids"].cpu(), torch.ones(1, 8, dtype=torch.long)
    model = model.to("cpu")
    planned = dry(model, input_ids=words, attention_mask=mask)
    assert any("keeps for captures" in note for note in planned.notes)
    with announced(True):
        signature = Signature((), {"input_ids": words, "attention_mask": mask})
        recorded = record(model, signature, args=(), kwargs={"input_ids": words, "attention_mask": mask}).program
    assert same(recorded, planned)


@pytest.mark.parametrize(
    ("value", "last"),
    [
        (lambda x: torch.tensor(2.0), ["aten.index_put_.default"]),  # which torch takes as masked_fill_
        (lambda x: x.mean(), ["aten.mean.default", "aten.where.self", "aten.copy_.default"]),
    ],
    ids=["number", "computed"],
)
def test_one_value_where_a_mask_is_true_waits_for_nothing_on_a_gpu(value: Any, last: list[str]) -> None:
    """``x[mask] = value`` as an operator: torch without CUDA does not index what says that it lies there."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.clone().index_put_((x > 0,), value(x))

    operators = [call.operator for call in dry(model, torch.randn(3), device=CUDA).calls]
    assert operators == ["aten.clone.default", "aten.gt.Scalar", *last]


def test_many_values_where_a_mask_is_true_are_refused_for_a_gpu() -> None:
    with pytest.raises(CaptureError, match="writes where a mask is true"):
        dry(lambda x: x.clone().index_put_((x > 0,), x.flatten()), torch.randn(3, 3), device=CUDA)


@pytest.mark.parametrize("name", ["wide", "convolutions", "writes_input", "foreach"])
def test_a_device_that_is_not_there(name: str) -> None:
    model, args, kwargs = make(name)
    host, cuda = real(model, *args, **kwargs), dry(model, *args, device=CUDA, **kwargs)
    # A torch that was built with CUDA plans cuDNN's own batch norm for it.
    operators = [call.operator.replace("cudnn_batch_norm", "native_batch_norm") for call in cuda.calls]
    assert operators == [call.operator for call in host.calls]
    assert build_graph(cuda) == build_graph(host)
    assert cuda.device == "cuda"


@pytest.mark.gpu
def test_a_device_that_is_there() -> None:
    from nimble_core.runtime.cuda.device import CudaDevice

    model, x = Wide().cuda(), torch.randn(2, 16, device="cuda")
    device = CudaDevice(x.device)
    device.warm_up(model, (x,), {})  # a library's handle is not made during a capture
    recording = device.record(model, Signature((x,), {}), (x,), {})
    assert same(recording.program, dry(Wide(), x.cpu(), device=CUDA))


# ---------------------------------------------------------------- no trace, no memory, no kernel


@pytest.mark.parametrize("error", [None, ValueError("stop")])
def test_the_model_is_left_as_it_was(error: BaseException | None) -> None:
    model, x = Busy(error), torch.randn(4, 3)
    before = copy.deepcopy({name: value for name, value in model.__dict__.items() if name != "error"})
    owned = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    given, state, known = x.clone(), torch.get_rng_state(), torch._subclasses.FakeTensor
    if error is None:
        dry(model, x)
    else:
        with pytest.raises(ValueError, match="stop"):
            dry(model, x)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is owned[name][0]
        assert torch.equal(tensor, owned[name][1])
    assert (model.history, model.table, model.number, model.gone) == tuple(
        before[name] for name in ("history", "table", "number", "gone")
    )
    assert not isinstance(model.tensor, FakeTensor)
    assert torch.equal(model.tensor, torch.zeros(2))
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._subclasses.FakeTensor is known


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(50_000, 50_000) for _ in range(4)))
    planned = dry(model, torch.empty(1, 50_000, device="meta"))
    assert [call.label for call in planned.calls] == ["addmm"] * 4
    assert sum(storage.nbytes for storage in planned.storages) > 40e9
    assert all(parameter.is_meta for parameter in model.parameters())


# ---------------------------------------------------------------- refusals


def test_values_are_not_there() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="gives the host a tensor") as caught:
        dry(branch, torch.randn(3))
    assert "test_fake_run.py" in caught.value.where
    with pytest.raises(CaptureError, match="shape depends on data") as caught:
        dry(lambda x: x.nonzero(), torch.randn(3))
    assert "test_fake_run.py" in caught.value.where
    with pytest.raises(CaptureError, match="memory that a plan does not have") as caught:
        dry(lambda x: x + torch.from_numpy(x.detach().numpy() * 2), torch.randn(3))
    assert "test_fake_run.py" in caught.value.where


def test_an_operator_without_shapes_is_named() -> None:
    model, args, kwargs = make("custom_operators")
    with pytest.raises(CaptureError, match=r"scaled_add.* cannot be planned without running it") as caught:
        dry(model, *args, **kwargs)
    assert "models.py" in caught.value.where
    assert "register_fake" in caught.value.fix
