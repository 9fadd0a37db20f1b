from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import is_
from typing import Any

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from nimble_core.api.nimble import Nimble
from nimble_core.api.train_step import TrainStep
from nimble_core.ir.allocations import Ask, Window
from nimble_core.ir.call_graph import CallGraph, build_graph, successors
from nimble_core.scheduling.options import Options
from nimble_core.tracing.operator_traits import makes_memory_only, storage_address, written_tensors
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorder import record
from nimble_core.tracing.recording import Issuer, Recording, issuing
from nimble_core.tracing.recording_contexts import announced
from nimble_core.tracing.side_effects import run_preserved
from nimble_core.tracing.signature import Signature
from nimble_core.tracing.static_check import changed_constant, check_static, on_other_values, other_values
from nimble_core.utils.errors import CaptureError, InputError, NimbleError, NimbleWarning, NotStaticError
from tests.support.models import CASES, Busy, Deep, Norms, Wide, make

CAPTURING = torch.cuda.is_current_stream_capturing


def recorded(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Recording:
    return record(model, Signature(args, kwargs), args=args, kwargs=kwargs)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int8", "bool", "float8_e5m2", "float8_e4m3fn"])
def test_other_values_of_any_type(dtype: str) -> None:
    ascending = torch.arange(6).to(getattr(torch, dtype))
    other = other_values([ascending], 1)[0]
    assert (other.dtype, other.shape) == (ascending.dtype, ascending.shape)
    if "int" in dtype:
        assert sorted(other.tolist()) == ascending.tolist(), "none is out of range"
    elif "float" in dtype:
        assert not torch.equal(other.float(), ascending.float())


def recorded_on_others(model: Callable[..., Any], signature: Signature, seed: int = 0) -> Recording:
    args, kwargs = builder(signature.structure)(other_values(signature.tensors, seed))
    return record(model, Signature(args, kwargs), args=args, kwargs=kwargs)


def any_order(graph: CallGraph, rng: random.Random) -> list[int]:
    """One topological order of the hazards, drawn at random."""
    after = successors(graph, meg=True)
    waiting = [0] * graph.size
    for targets in after:
        for call in targets:
            waiting[call] += 1
    ready = [call for call in range(graph.size) if not waiting[call]]
    order = []
    while ready:
        call = ready.pop(rng.randrange(len(ready)))
        order.append(call)
        for target in after[call]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return order


def reissued(recording: Recording, inputs: Sequence[torch.Tensor], order: Sequence[int] | None = None) -> list[Any]:
    issuer = Issuer(recording, inputs)
    with issuing("cpu"):
        for call in range(len(recording.program.calls)) if order is None else order:
            issuer.issue(call)
        return issuer.outputs()


def owned(model: Callable[..., Any]) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Equal to the last bit, NaN included."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride() and torch.equal(bits(x), bits(y))
        for x, y in zip(a, b, strict=True)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def put(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


# -- what was recorded gives what eager gives ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_reissue_equals_eager_in_any_order_that_the_hazards_allow(name: str) -> None:
    model, args, kwargs = make(name)
    signature = Signature(args, kwargs)
    recording = record(model, signature, args=args, kwargs=kwargs)
    check_static(recording, recorded_on_others(model, signature))
    graph = build_graph(recording.program)
    rng = random.Random(name)
    start = [tensor.detach().clone() for tensor in owned(model)]
    for turn in range(5):
        order = list(range(graph.size)) if turn == 0 else any_order(graph, rng)
        eager_inputs = other_values(signature.tensors, seed=turn + 5)
        inputs = other_values(signature.tensors, seed=turn + 5)
        eager_args, eager_kwargs = builder(signature.structure)(eager_inputs)
        torch.manual_seed(turn)
        with torch.no_grad():
            expected, _ = flatten(model(*eager_args, **eager_kwargs))
        expected_state = [tensor.detach().clone() for tensor in owned(model)]
        # An output may alias a buffer of the model that the re-issue is about to write.
        expected = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in expected]
        put(owned(model), start)
        torch.manual_seed(turn)
        outputs = reissued(recording, inputs, order)
        assert same(outputs, expected), f"outputs of turn {turn}"
        assert same(owned(model), expected_state), f"state after turn {turn}"
        assert same(inputs, eager_inputs), f"inputs after turn {turn}"
        put(owned(model), start)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_written_that_the_accesses_do_not_mark(name: str) -> None:
    model, args, kwargs = make(name)
    recording = recorded(model, *args, **kwargs)
    storages = recording.program.storages
    issuer = Issuer(recording, [tensor.clone() for tensor in Signature(args, kwargs).tensors])

    def contents() -> dict[int, bytes]:
        seen: dict[int, bytes] = {}
        for slot, tensor in enumerate(issuer.tensors):
            if tensor is not None and recording.storage_of[slot] not in seen:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                seen[recording.storage_of[slot]] = whole.numpy().tobytes()
        return seen

    torch.manual_seed(0)
    with issuing("cpu"):
        for call in recording.program.calls:
            before = contents()
            issuer.issue(call.index)
            after = contents()
            marked = {ref.storage for ref in call.writes}
            changed = {storage for storage, value in before.items() if after[storage] != value}
            # Memory that a host step has just made holds anything: only what was there before counts.
            assert changed <= marked, f"{call} wrote {[storages[s] for s in changed - marked]}"


def test_the_audit_sees_a_write_that_is_not_marked() -> None:
    model = Norms().train()
    x = torch.randn(2, 3, 4, 4)
    recording = recorded(model, x)
    norm = next(call for call in recording.program.calls if call.label == "native_batch_norm")
    names = {recording.program.storages[ref.storage].name for ref in norm.writes}
    assert {"norm.running_mean", "norm.running_var"} <= names
    before = model.norm.running_mean.clone()
    reissued(recording, [x])
    assert not torch.equal(before, model.norm.running_mean)


def test_batch_norm_in_evaluation_mode_writes_no_statistics() -> None:
    program = recorded(Norms().eval(), torch.randn(2, 3, 4, 4)).program
    assert not [s for call in program.calls for s in call.writes if program.storages[s.storage].role == "buffer"]


# -- the Program ---------------------------------------------------------------------------------------------------


def test_roles_and_names() -> None:
    model, args, kwargs = make("shared")
    program = recorded(model, *args, **kwargs).program
    roles = {(storage.role, storage.name) for storage in program.storages if storage.role != "intermediate"}
    assert roles == {("input", "args[0]"), ("parameter", "embedding.weight"), ("buffer", "scale")}
    model, args, kwargs = make("nested_inputs")
    program = recorded(model, *args, **kwargs).program
    assert [storage.name for storage in program.storages if storage.role == "input"] == [
        "args[0]['x']",
        "args[0]['inner']['y']",
        "args[1][0]",
        "args[1][1][0]",
        "kwargs['bias']",
    ]
    model, args, kwargs = make("attributes")
    assert sum(s.role == "constant" for s in recorded(model, *args, **kwargs).program.storages) == 3


def test_views_and_empty_are_host_steps() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(2, 2).copy_(x.t()).view(4)

    program = recorded(forward, torch.randn(2, 2)).program
    assert [call.label for call in program.calls] == ["copy_"]
    assert program.host_steps == 3
    (call,) = program.calls
    assert program.storages[call.reads[0].storage].role == "intermediate"
    assert {program.storages[ref.storage].role for ref in call.reads} == {"input", "intermediate"}
    (written,) = call.writes
    assert program.storages[written.storage].nbytes == 16


def test_all_arguments_are_kept() -> None:
    program = recorded(lambda x: torch.softmax(x * 2.5, dim=-1), torch.randn(2, 2)).program
    mul, softmax = program.calls
    assert mul.arguments == (("self", "%0"), ("other", "2.5"))
    assert softmax.arguments == (("self", "%1"), ("dim", "-1"), ("half_to_float", "False"))


def test_random_calls_keep_their_order_through_the_generator() -> None:
    model, args, kwargs = make("dropout")
    program = recorded(model, *args, **kwargs).program
    drawn = [
        call.index
        for call in program.calls
        if any(program.storages[access.ref.storage].role == "generator" for access in call.accesses)
    ]
    assert len(drawn) == 2
    edges = set(build_graph(program).edges)
    assert tuple(drawn) in edges


def test_tied_weights_are_one_storage_and_parameters_stay_the_models_own() -> None:
    model, args, kwargs = make("shared")
    recording = recorded(model, *args, **kwargs)
    with torch.no_grad():
        model.head.weight.mul_(3)
        expected = model(*args)
    assert torch.equal(reissued(recording, list(args))[0], expected)


def test_a_constant_that_the_model_writes_starts_anew_on_every_run() -> None:
    model, args, kwargs = make("constant_written")
    recording = recorded(model, *args, **kwargs)
    first = [tensor.clone() for tensor in reissued(recording, list(args))]
    assert same(reissued(recording, list(args)), first)
    assert same(list(model(*args)), first)


def test_the_same_tensor_given_twice() -> None:
    x = torch.randn(3)
    recording = recorded(lambda a, b: a * 2 + b, x, x)
    assert torch.equal(reissued(recording, [x + 1, x + 1])[0], (x + 1) * 3)


def test_inputs_that_share_memory_may_be_read_but_not_written() -> None:
    base = torch.randn(5)
    with pytest.raises(CaptureError, match="share memory"):
        recorded(lambda a, b: a.mul_(2) + b, base[:4], base[1:])
    with pytest.raises(CaptureError, match="share memory"):
        recorded(lambda a, b: a.add_(b), base, base)


def test_outputs_keep_their_structure() -> None:
    model, args, kwargs = make("returns_input")
    recording = recorded(model, *args, **kwargs)
    out = builder(recording.output_structure)(reissued(recording, list(args)))
    expected = model(*args)
    assert out.keys() == expected.keys()
    assert out["none"] is None
    assert out["n"] == 3
    assert torch.equal(out["list"][1][0], expected["list"][1][0])
    assert out["list"][1][1] == "text"


# -- origins -------------------------------------------------------------------------------------------------------


def test_origins_name_the_innermost_module_and_the_line() -> None:
    model = Deep(layers=2)
    program = recorded(model, torch.randn(1, 8)).program
    assert [call.module for call in program.calls] == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    for call in program.calls:
        (origin,) = call.origins
        assert origin.operator == call.operator
        assert origin.file.endswith("models.py")
        assert not origin.file.startswith("/")
        assert origin.line > 0


def test_origins_of_a_function_are_its_own_lines() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * 2

    first = forward.__code__.co_firstlineno
    program = recorded(forward, torch.randn(2)).program
    assert [(call.module, call.origins[0].line - first) for call in program.calls] == [("", 1), ("", 2)]


def test_origins_in_a_library_are_relative_paths() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    program = recorded(BertModel(config).eval(), torch.randint(0, 50, (1, 4))).program
    files = {call.origins[0].file for call in program.calls}
    assert any(file.startswith("transformers/models/bert/") for file in files)
    assert not [file for file in files if file.startswith("/") or not file]
    assert any(call.module.startswith("encoder.layer.0.attention") for call in program.calls)


# -- refusals ------------------------------------------------------------------------------------------------------


def _compare(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return x * 2


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense"),
    "bool": (_compare, "_local_scalar_dense|is_nonzero"),
    "float": (lambda x: x * float(x[0]), "_local_scalar_dense"),
    "int": (lambda x: x * int(x[0]), "_local_scalar_dense"),
    "index": (lambda x: x[: x.argmax()], "_local_scalar_dense"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where": (lambda x: torch.where(x > 0), "nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "mask": (lambda x: x[x > 0], "aten.index"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "repeat": (lambda x: torch.repeat_interleave(x, (x > 0).long()), "repeat_interleave"),
    "equal": (lambda x: x if torch.equal(x, x + 1) else x * 2, "equal"),
    "allclose": (lambda x: x if torch.allclose(x, x + 1) else x * 2, "allclose|_local_scalar|equal|nonzero"),
    "one_hot": (lambda x: torch.nn.functional.one_hot(x.abs().long()), "_local_scalar_dense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_need_the_host_are_refused(name: str) -> None:
    forward, operator = REFUSED[name]

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return forward(x)

    model = nn.Sequential(nn.Identity(), Inner())
    with pytest.raises(CaptureError, match=operator) as caught:
        recorded(model, torch.randn(5))
    assert "in 1 at" in caught.value.where
    assert f"test_recorder.py:{forward.__code__.co_firstlineno}"[:-1] in caught.value.where
    assert caught.value.fix
    assert_clean()
    assert recorded(Deep(), torch.randn(1, 8)).program.calls


def test_batch_norm_that_counts_on_the_host_is_refused() -> None:
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        recorded(nn.BatchNorm1d(4, momentum=None).train(), torch.randn(8, 4))


def test_reading_a_constant_on_the_host_is_allowed() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(3).item() + float(torch.arange(4).sum())

    x = torch.randn(2)
    assert torch.equal(reissued(recorded(forward, x), [x])[0], x * 3 + 6)


@pytest.mark.parametrize(
    ("forward", "operator"),
    [
        (lambda x: x.clone().resize_(9), "resize_"),
        (lambda x: x.clone().set_(torch.ones(7).untyped_storage(), 1, (2,), (3,)), "set_"),
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: x.to_sparse_csr(), "sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_memory_that_changes_under_a_tensor_and_sparse_tensors_are_refused(
    forward: Callable[[torch.Tensor], Any], operator: str
) -> None:
    with pytest.raises(CaptureError, match=operator) as caught:
        recorded(forward, torch.randn(2, 2))
    assert "test_recorder.py" in caught.value.where
    assert_clean()


STEPS = {
    "new": lambda seen, y, z: seen.append(y * 2 + 1),
    "join": lambda seen, y, z: seen.append(y.sum() + z),
    "row": lambda seen, y, z: seen.append(z[-1:]),
    "turned": lambda seen, y, z: seen.append(z.t()),
    "write": lambda seen, y, z: y.add_(z.mean()),
    "turn": lambda seen, y, z: y.t_(),
    "data": lambda seen, y, z: setattr(y, "data", z),
    "data of data": lambda seen, y, z: setattr(y, "data", z.data.neg_().data),
    "constant": lambda seen, y, z: setattr(y, "data", torch.full((2, 3), 5.0)),
    "set": lambda seen, y, z: y.set_(z),
    "set to all": lambda seen, y, z: y.set_(z.clone().untyped_storage()).unsqueeze_(0),
    "further": lambda seen, y, z: y.set_(y.untyped_storage(), 1, (1, 2), (3, 2)),
}
"""What a forward may do with two of the tensors that it has."""


def steps_taken(steps: Sequence[tuple[str, int, int]]) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = [x + 1, x * 2]
        for name, y, z in steps:
            STEPS[name](seen, seen[y % len(seen)], seen[z % len(seen)])
        return tuple(seen)

    return forward


@settings(max_examples=200)
@example([("data", 0, 1), ("new", 0, 0)], 0)
@example([("data", 0, 1), ("write", 0, 0)], 0)
@example([("row", 0, 0), ("data", 0, 1), ("join", 2, 0)], 0)
@example([("turned", 0, 0), ("data", 0, 2), ("turn", 0, 0)], 0)
@example([("set", 0, 1), ("write", 1, 0), ("join", 0, 0)], 0)
@example([("further", 0, 0), ("new", 0, 0)], 0)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), *[st.integers(0, 9)] * 2), max_size=9), st.integers(0, 99))
def test_tensors_that_are_given_other_memory_are_what_they_show(steps: list[tuple[str, int, int]], seed: int) -> None:
    forward = steps_taken(steps)
    try:
        with torch.no_grad():
            forward(torch.ones(2, 3))
    except RuntimeError:  # such as a memory too small for what is set
        reject()
    recording = None
    # A window on memory that no recorded tensor shows in that way, nor starts before, is refused.
    with suppress(CaptureError) if {name for name, *_ in steps} & {"further", "set to all"} else nullcontext():
        recording = recorded(forward, torch.ones(2, 3))
    if recording is None:
        return
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        right = forward(x.clone())
    order = any_order(build_graph(recording.program), random.Random(seed))
    assert same(reissued(recording, [x.clone()], order), right)


@pytest.mark.parametrize("complex_", [False, True])
def test_bits_and_types_given_to_a_tensor(complex_: bool) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.data = y.conj() if complex_ else y.view(torch.int32)
        return y + 1

    x = torch.randn(4, dtype=torch.complex64 if complex_ else torch.float32)
    assert same(reissued(recorded(forward, x), [x * 3]), [forward(x * 3)])


class Binary(nn.Module):
    """As in binary networks: what it multiplies by is put in the weight's place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.kept.sign()
        self.last.data = x * self.weight
        return self.last + 1


@pytest.mark.parametrize("error", [None, KeyError("the model's own")])
def test_memory_given_to_the_models_own_tensors_is_put_back_and_noted(error: Exception | None) -> None:
    model, x = Binary(), torch.randn(3)
    before, was = [tensor.detach() for tensor in owned(model)], [tensor.detach().clone() for tensor in owned(model)]
    right = x * 2 * model.kept.sign() + 1

    def fails(*args: Any) -> None:
        if error:
            raise error

    model.register_forward_hook(fails)
    with pytest.raises(KeyError) if error else nullcontext():
        recording = recorded(model, x)
    assert all(now.is_set_to(then) for now, then in zip(owned(model), before, strict=True))
    assert same(owned(model), was)
    if not error:
        assert recording.changed == ("weight.data", "last.data")
        assert same(reissued(recording, [x * 2]), [right])
        assert same(owned(model), was)


def test_memory_given_to_an_input_is_refused_and_put_back() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x.data = x * 2
        return x + 1

    x = torch.ones(3)
    with pytest.raises(NotStaticError, match=r"the shape or the memory of args\[0\] in place"):
        recorded(forward, x)
    assert x.tolist() == [1, 1, 1]


def test_an_output_argument_that_is_resized() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x, out=torch.empty(0)) + 1

    x = torch.randn(2, 2)
    recording = recorded(forward, x)
    assert torch.equal(reissued(recording, [x + 1])[0], forward(x + 1))
    assert recording.program.calls[1].reads[0] == recording.program.calls[0].writes[0]
    assert build_graph(recording.program).edges == ((0, 1),)


class Allocations(TorchDispatchMode):
    """Counts as in a capture, on a device without memory, and tells the labels under which memory was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.label = ""
        self.made: list[str] = []
        self.windows: Sequence[Window] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new = {storage_address(result)} - {storage_address(arg) for arg in args if isinstance(arg, torch.Tensor)}
        self.made += [self.label] * len(new)
        self.calls += not makes_memory_only(func) and (bool(new) or bool(written_tensors(func, args, kwargs or {})))
        return result

    def nodes(self) -> int:
        return self.calls

    def begin(self, label: str) -> None:
        assert not self.label
        self.label = label

    def end(self) -> None:
        self.label = ""

    def asks(self, windows: Sequence[Window]) -> tuple[tuple[Ask, ...], ...]:
        self.windows = windows
        return ()

    def outside(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_each_calls_allocations_have_its_label() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a = x.relu().view(-1).view(4, 4)
        b = torch.empty_like(a).copy_(a)
        return b.t().neg()

    x = torch.zeros(2, 8, device="meta")
    with Allocations() as counter:
        recording = record(forward, Signature((x,), {}), args=(x,), kwargs={}, counter=counter)
    assert [call.label for call in recording.program.calls] == ["relu", "copy_", "neg"]
    labels = [window.label for window in counter.windows]
    assert len(set(labels)) == 3
    # The memory that only copy_ fills was made before it, and is not what copy_ asked for.
    assert [counter.made.count(label) for label in labels] == [1, 0, 1]
    assert len(counter.made) == 3
    assert all(counter.made)
    assert len(recording.steps) == 7
    assert counter.label == ""


def test_memory_that_is_freed_gives_its_address_to_no_other() -> None:
    freed: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            before = torch._C._WeakTensorRef(x)
            x = x + 1
            freed.append(before.expired())
        return x

    program = recorded(forward, torch.ones(3)).program
    assert len({call.writes[0].storage for call in program.calls}) == 50
    assert sum(freed) >= 49, "a recording does not hold what the model lets go of"


def test_a_branch_on_values_is_not_static() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Through a path that torch does not show: the list is read from memory.
            return torch.relu(x) if sum(x.detach().numpy().tolist()) > 0 else torch.tanh(x)

    model = nn.Sequential(Branch())
    first = recorded(model, torch.ones(3))
    second = recorded(model, -torch.ones(3))
    with pytest.raises(NotStaticError, match=r"relu.*tanh") as caught:
        check_static(first, second)
    assert "in 0 at" in caught.value.where
    assert "test_recorder.py" in caught.value.where


def test_another_number_of_calls_is_not_static() -> None:
    def times(count: int) -> Recording:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for _ in range(count):
                x = x + 1
            return x

        return recorded(forward, torch.ones(3))

    with pytest.raises(NotStaticError, match="2 calls in one run, 3"):
        check_static(times(2), times(3))
    with pytest.raises(NotStaticError, match="3 calls in one run, 2"):
        check_static(times(3), times(2))
    check_static(times(3), times(3))


def test_another_argument_is_not_static() -> None:
    x = torch.ones(3)
    with pytest.raises(NotStaticError, match="other=1 / 2"):
        check_static(recorded(lambda x: x + 1, x), recorded(lambda x: x + 2, x))
    with pytest.raises(NotStaticError, match="shapes"):
        check_static(recorded(lambda x: x + 1, x), recorded(lambda x: x + 1, torch.ones(4)))


def test_values_computed_out_of_sight_are_found() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy() * 2)

    where = changed_constant(recorded(forward, torch.ones(3)), recorded(forward, torch.zeros(3)))
    assert "aten.add.Tensor" in where
    assert changed_constant(recorded(forward, torch.ones(3)), recorded(forward, torch.ones(3))) == ""
    model, args, _ = make("attributes")
    assert changed_constant(recorded(model, *args), recorded(model, *args)) == ""


def test_python_lists_made_from_a_tensor_are_found() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(x.tolist())

    first, second = recorded(forward, torch.ones(3)), recorded(forward, torch.zeros(3))
    assert "aten.mul.Tensor" in changed_constant(first, second)


# -- nothing is left behind ----------------------------------------------------------------------------------------


def assert_clean() -> None:
    assert torch.cuda.is_current_stream_capturing is CAPTURING
    assert _get_current_dispatch_mode() is None
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("way", ["record", "warm-up"])
@pytest.mark.parametrize("error", [None, KeyError("the model's own"), KeyboardInterrupt()])
def test_a_run_leaves_model_inputs_and_random_state_as_they_were(way: str, error: BaseException | None) -> None:
    model = Busy(error).train()
    x = torch.randn(4, 3)
    before = copy.deepcopy({k: v for k, v in model.__dict__.items() if k != "error"})
    tensors = [*owned(model), model.tensor, x]
    values = [tensor.detach().clone() for tensor in tensors]
    identities = [id(tensor) for tensor in owned(model)]
    python, host = random.getstate(), torch.get_rng_state()
    run = (lambda: recorded(model, x)) if way == "record" else (lambda: run_preserved(model, (x,), {}))
    if error is None:
        run()
    else:
        with pytest.raises(type(error)) as caught:
            run()
        assert caught.value is error
    assert same(tensors, values)
    assert [id(tensor) for tensor in owned(model)] == identities
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), host)
    assert model.history == before["history"]
    assert model.table == before["table"]
    assert (model.number, model.gone, model.absent) == (1, "here", None)
    assert not hasattr(model, "fresh")
    assert model.__dict__.keys() == before.keys() | {"error"}
    assert_clean()
    assert recorded(Deep(), torch.randn(1, 8)).program.calls


@pytest.mark.parametrize("way", ["record", "warm-up"])
def test_hooks_that_a_library_installs_at_its_first_call_are_not_installed_twice(way: str) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "_installed"):
                self.inner.register_forward_hook(lambda *_: self.seen.append(1))
                self._installed = True
            self.seen.clear()
            return self.inner(x) * (len(self.seen) or 1)

    model, x = Lazy(), torch.ones(1, 2)
    for _ in range(3):
        _ = recorded(model, x) if way == "record" else run_preserved(model, (x,), {})
    assert not model.inner._forward_hooks
    model(x)
    assert len(model.inner._forward_hooks) == 1
    assert model.seen == [1]


def test_hidden_states_of_hugging_face_models_are_not_doubled() -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=8
    )
    model, x = ViTModel(config).eval(), torch.randn(1, 3, 8, 8)
    run_preserved(model, (x,), {"output_hidden_states": True})
    recording = recorded(model, x, output_hidden_states=True)
    assert len(recording.outputs) == len(flatten(model(x, output_hidden_states=True))[0]) == 5


def test_operators_that_take_functions_are_refused_and_leave_the_model_usable() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda one: one + 1, lambda one: one - 1, (x,))

    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"cond takes functions"):
        run_preserved(branch, (x,), {})
    with torch.no_grad():
        assert torch.equal(branch(x), x + 1)


def test_what_a_forward_changed_is_in_the_notes() -> None:
    drawn, carried, note = recorded(Busy().train(), torch.randn(4, 3)).program.notes
    assert "draws from Python's random:" in drawn
    assert "buffer count is read and then replaced" in carried
    for name in ("history", "table", "number", "gone", "fresh", "absent"):
        assert name in note
    assert "count" not in note
    assert recorded(Deep(), torch.randn(1, 8)).program.notes == ()


class Replacing(nn.Module):
    """Replaces a buffer and a plain tensor, as ``replace`` does."""

    def __init__(self, replace: Callable[[Replacing, torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.state = torch.zeros(4)
        self.replace = replace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.replace(self, y.detach().mean(0))
        return y + self.average + self.state


def swap(net: Replacing, new: torch.Tensor) -> None:
    net.average, net.other = net.other + new, net.average * 2


def flatten_weights(net: Replacing, new: torch.Tensor) -> None:
    """As cuDNN's recurrent layers do: one piece of memory for several tensors."""
    flat = torch.empty(8)
    for at, one in enumerate((net.average, net.other)):
        part = flat[4 * at : 4 * at + 4]
        part.copy_(one)
        one.data = part


CARRIED: dict[str, tuple[Callable[[Replacing, torch.Tensor], object], str]] = {
    "another": (lambda net, new: setattr(net, "average", net.average * 0.9 + new), "buffer average"),
    "other memory": (lambda net, new: setattr(net.average, "data", net.average * 0.9 + new), "buffer average"),
    "by way of a copy": (lambda net, new: setattr(net, "average", net.average.clone() + new), "buffer average"),
    "counted": (lambda net, new: setattr(net, "average", net.average + 1), "buffer average"),
    "exchanged": (swap, "buffer average"),
    "reset to another": (
        lambda net, new: (net.average + new, setattr(net, "average", torch.ones_like(new))),
        "buffer average",
    ),
    "zeros by chance": (lambda net, new: setattr(net, "average", net.average * 0.9), "buffer average"),
    "plain": (lambda net, new: setattr(net, "state", net.state * 0.9 + new), "attribute state"),
    "from numpy": (
        lambda net, new: setattr(net, "average", net.average * torch.from_numpy(net.other.numpy())),
        "buffer average",
    ),
}
NOT_CARRIED: dict[str, tuple[Callable[[Replacing, torch.Tensor], object], str]] = {
    "in place": (lambda net, new: net.average.mul_(0.9).add_(new), ""),
    "never read": (lambda net, new: setattr(net, "average", new), "average"),
    "converted": (lambda net, new: setattr(net, "average", net.average.double()), "average"),
    "a view of itself": (lambda net, new: setattr(net, "average", net.average.view(1, 4)), "average"),
    "moved together": (flatten_weights, "average.data, other.data"),
    "first made": (lambda net, new: setattr(net, "later", new), "later"),
    "reset": (lambda net, new: (net.average + new, setattr(net, "average", torch.zeros_like(new))), "average"),
    "made again": (lambda net, new: (net.average + new, setattr(net, "average", torch.zeros(4))), "average"),
}


@pytest.mark.parametrize("way", CARRIED)
def test_what_the_next_run_reads_elsewhere_is_said_and_refused_in_training(way: str) -> None:
    replace, named = CARRIED[way]
    net, x = Replacing(replace), torch.randn(3, 4)
    said, fix = f"{named} is read and then replaced", f"self.{named.split()[1]}.copy_(...)"
    assert any(said in note and fix in note for note in recorded(net, x).program.notes)
    before = [net.average, net.other, net.state, net.average.data_ptr()]
    with pytest.raises(NotStaticError, match=said) as in_place_of_the_model:
        Nimble(net, Options(tune="off")).prepare(x, training=True)
    step = TrainStep(net, torch.Tensor.sum, torch.optim.SGD(net.parameters(), lr=0.1), options=Options(tune="off"))
    with pytest.raises(NotStaticError, match=said) as whole:
        step.prepare(x)
    for caught in (in_place_of_the_model, whole):
        assert "test_recorder.py" in caught.value.where
        assert fix in caught.value.fix
    assert all(map(is_, before[:3], [net.average, net.other, net.state]))
    assert net.average.data_ptr() == before[3]


def test_a_buffer_that_is_replaced_is_said_once_to_who_prepares() -> None:
    net, x = Replacing(CARRIED["another"][0]).eval(), torch.randn(3, 4)
    with pytest.warns(NimbleWarning) as given:
        Nimble(net, Options(tune="off")).prepare(x).close()
    (warning,) = given
    assert "buffer average is read and then replaced, and replays go on reading" in str(warning.message)


@pytest.mark.parametrize("way", NOT_CARRIED)
def test_what_the_next_run_reads_as_this_one_does_is_no_error(way: str) -> None:
    replace, named = NOT_CARRIED[way]
    net, x = Replacing(replace), torch.randn(3, 4)
    said = (f"the forward changes attributes, which a replay does not repeat: {named}",) if named else ()
    assert recorded(net, x).program.notes == said
    with pytest.warns(NimbleWarning, match=named) if named else nullcontext():
        Nimble(net, Options(tune="off")).prepare(x, training=True).close()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "normed",
    [
        lambda part: prune.l1_unstructured(part, "weight", 2),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,  # whose weight at first is the memory of the parameter that it is computed of
    ],
)
def test_weights_that_are_computed_anew_are_not_carried(normed: Callable[[nn.Module], nn.Module]) -> None:
    (note,) = recorded(nn.Sequential(normed(nn.Linear(4, 4))), torch.randn(3, 4)).program.notes
    assert note == "the forward changes attributes, which a replay does not repeat: 0.weight"


@pytest.mark.parametrize("capturing", [True, False])
def test_a_capture_is_announced_or_denied_on_this_thread_only(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: not capturing)
    seen: list[bool] = []

    def ask() -> None:
        seen.append(torch.cuda.is_current_stream_capturing())

    with announced(capturing):
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    ask()
    assert seen == [capturing, not capturing, not capturing]


def test_garbage_collection_is_on_again() -> None:
    seen: list[bool] = []
    recorded(lambda x: (seen.append(gc.isenabled()), x + 1)[1], torch.ones(2))
    assert seen == [False]
    assert gc.isenabled()


def test_outputs_that_hide_tensors_are_refused() -> None:
    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    with pytest.raises(NimbleError, match="Box"):
        recorded(lambda x: {"box": Box(x + 1)}, torch.ones(2))
    assert_clean()


# -- other values --------------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64]),
    turned=st.booleans(),
    seed=st.integers(0, 5),
)
def test_other_values_are_of_the_same_kind(shape: list[int], dtype: torch.dtype, turned: bool, seed: int) -> None:
    tensor = (torch.randn(shape) * 5).abs().to(dtype)
    tensor = tensor.transpose(0, -1) if turned and tensor.dim() else tensor
    kept = tensor.clone()
    (other,) = other_values([tensor], seed)
    assert (other.shape, other.dtype, other.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    assert torch.equal(tensor, kept)
    if not (dtype.is_floating_point or dtype.is_complex):
        assert sorted(other.reshape(-1).tolist()) == sorted(tensor.reshape(-1).tolist())
    assert torch.equal(other_values([tensor], seed)[0], other)


@pytest.mark.parametrize("count", [1 << 16, (1 << 16) + 1, 200_003])
def test_every_element_of_a_large_tensor_has_another_place(count: int) -> None:
    numbers = torch.arange(count).flip(0)
    (other,) = other_values([numbers])
    assert torch.equal(other.sort().values, torch.arange(count))
    assert (other == numbers).sum() < 10
    assert len((other.diff() + 1).nonzero()) > 30_000  # and few of its neighbours
    scaled = other_values([torch.ones(count)])[0]
    assert 0.33 < scaled.min() < 0.34
    assert 0.99 < scaled.max() <= 1.0
    assert len(scaled.unique()) > 30_000


@pytest.mark.parametrize(
    ("tensor", "looks"),
    [
        (torch.randn(65_536, 8), lambda x: (x.argmax(1) == 0).sum()),
        (torch.randn(60_000, 8), lambda x: (x.argmax(1) == 0).sum()),
        (torch.randn(131_072, 4), lambda x: (x > 0).all(1).sum()),
        (torch.randint(0, 20, (65_536, 4)), lambda x: (x == 0).any(1).sum()),
        (torch.arange(262_144.0), lambda x: (x.diff() > 0).sum()),
    ],
)
def test_what_is_seen_within_rows_of_large_tensors_is_another(tensor: torch.Tensor, looks: Callable[..., Any]) -> None:
    found = [int(looks(other_values([tensor, torch.ones(1)], seed)[0])) for seed in range(8)]
    assert found.count(int(looks(tensor))) < 3


@given(
    numbers=st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    how=st.sampled_from(["", "scaled", "moved"]),
    seed=st.integers(0, 5),
)
def test_probabilities_stay_probabilities(numbers: list[float], dtype: torch.dtype, how: Any, seed: int) -> None:
    for tensor in (torch.tensor(numbers, dtype=dtype), torch.tensor(numbers, dtype=dtype).abs()):
        (other,) = other_values([tensor], seed, how)
        assert other.abs().max() <= tensor.abs().max()
        assert not (tensor >= 0).all() or (other >= 0).all()


def test_what_has_an_inverse_keeps_it_where_that_is_asked_for() -> None:
    matrix = torch.eye(4)
    seen: list[torch.Tensor] = []

    def factored(given: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.append(given[0])
        return torch.linalg.cholesky(given[0])

    values, factor = on_other_values(factored, [matrix])
    assert len(seen) == 2, "values in another order have no such factor"
    assert torch.equal(values[0], seen[1])
    torch.testing.assert_close(factor @ factor.T, values[0])
    assert not torch.equal(values[0], matrix)
    assert torch.equal(values[0], matrix * values[0][0, 0])


def test_a_model_that_takes_no_other_values_is_refused() -> None:
    def only(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x[0] == 0.25)
        return x * 2

    with pytest.raises(
        NotStaticError, match=r"not on the same in another order or scaled.*: RuntimeError: E"
    ) as caught:
        Nimble(only).prepare(torch.tensor([0.25, 0.75]))
    assert caught.value.where.startswith("tests/core/tracing/test_recorder.py:")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_errors_that_are_not_about_values_pass_through() -> None:
    for error in (ZeroDivisionError("x"), CaptureError("x"), torch.OutOfMemoryError("x"), KeyboardInterrupt("x")):
        runs: list[int] = []

        def fail(given: object, error: BaseException = error, runs: list[int] = runs) -> None:
            runs.append(1)
            raise error

        with pytest.raises(type(error)):
            on_other_values(fail, [torch.ones(2)])
        assert len(runs) == 1


def test_checks_are_calls_of_their_own() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > -100).all())
        return torch.linalg.inv(x) + 1

    good = torch.eye(3) + 0.1
    with torch.no_grad():
        program = recorded(checked, good).program
        names = [call.operator for call in program.calls]
        assert "aten._assert_async.default" in names
        assert "aten._linalg_check_errors.default" in names
        assert not any(call.writes for call in program.calls if "_assert" in call.operator)
        for policy in ("single", "nimble"):
            net = Nimble(checked, Options(fuse="none", policy=policy, tune="off")).prepare(good)
            torch.testing.assert_close(net(good), checked(good))
            with pytest.raises(NimbleError, match="got zero"):
                net(torch.full((3, 3), -200.0))
            with pytest.raises(NimbleError, match=r"linalg\.inv"):
                net(torch.zeros(3, 3))
            torch.testing.assert_close(net(good), checked(good))


def test_other_values_share_memory_where_the_inputs_do() -> None:
    base = torch.randn(10)
    a, b, c, again = base[:6], base[4:], torch.randn(3), base[:6]
    others = other_values([a, b, c, c, again])
    assert torch.equal(others[0][4:], others[1][:2])
    assert others[2] is others[3]
    assert others[0].data_ptr() == others[4].data_ptr()
    assert not torch.equal(others[0], a)


def test_other_values_keep_expanded_inputs_expanded() -> None:
    (other,) = other_values([torch.randn(1, 3).expand(4, 3)])
    assert other.stride() == (0, 1)
    assert torch.equal(other[0], other[3])


def test_ascending_integers_stay_where_something_else_changes() -> None:
    offsets = torch.tensor([0, 2, 5])
    assert torch.equal(other_values([torch.tensor([4, 2, 7, 1, 0, 3]), offsets])[1], offsets)
    alone = [other_values([torch.arange(8)], seed)[0] for seed in range(3)]
    assert any(not torch.equal(one, torch.arange(8)) for one in alone)


@pytest.mark.parametrize("branches", [1, 5])
def test_independent_branches_have_no_edge(branches: int) -> None:
    program = recorded(Wide(branches), torch.randn(1, 16)).program
    graph = build_graph(program)
    labels = [call.label for call in program.calls]
    assert labels.count("relu") == branches
    reach = {(u, v) for u, v in graph.edges}
    linears = [index for index, label in enumerate(labels) if label == "addmm"]
    assert not [(u, v) for u in linears for v in linears if (u, v) in reach]


def test_batch_norm_that_averages_over_all_batches_is_told_what_helps() -> None:
    model = nn.BatchNorm1d(4, momentum=None).train()
    with pytest.raises(CaptureError, match="written by the model, and read on the host") as caught:
        Nimble(model).prepare(torch.randn(3, 4), training=True)
    assert caught.value.fix == "give momentum a number: with None torch reads how many batches there were"


class Scaled(nn.Module):
    """A parametrization that reads a value."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * weight.sum().item()


def test_what_batch_norm_calls_is_not_batch_norm() -> None:
    model = nn.BatchNorm1d(4).train()
    nn.utils.parametrize.register_parametrization(model, "weight", Scaled())
    with pytest.raises(CaptureError, match="trained, and read on the host") as caught:
        Nimble(model).prepare(torch.randn(3, 4), training=True)
    assert "momentum" not in caught.value.fix


# ---------------------------------------------------------------- reads of values that every run finds


class Padded(nn.Module):
    """Pads by numbers that it keeps in tensors, and picks by a mask."""

    number: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("number", torch.tensor(1))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.kept = torch.tensor([2, 0])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.kept.tolist()
        padded = nn.functional.pad(x, (left, int(self.number * 2 + right)))
        ends = torch.arange(2, 5, device=x.device)
        return self.layer(x)[:, self.mask], padded * torch.arange(ends[0], ends[-1], device=x.device).sum()


CHANGES = [
    ("number", lambda model: model.number.add_(1)),
    ("mask", lambda model: model.mask.logical_not_()),
    ("a tensor without a name", lambda model: model.kept.add_(1)),
]


def holds_what_it_read(device: str, fuse: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Padded().to(device)
    x = torch.randn(3, 4, device=device)
    net = Nimble(model, Options(fuse=fuse, tune="off", strict=True))  # type: ignore[arg-type]
    for name, change in CHANGES:
        net.prepare(x, training=training)
        y = torch.randn(3, 4, device=device)
        with torch.set_grad_enabled(training):
            for found, expected in zip(net(y), model(y), strict=True):
                torch.testing.assert_close(found, expected)
            change(model)
            for _ in range(2):
                with pytest.raises(InputError, match=f"the model reads {name} on the host") as caught:
                    net(y)
        assert "prepare" in caught.value.fix
        net.close()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fuse", ["none", "library"])
def test_what_is_read_of_the_models_own_tensors_is_held(fuse: str, training: bool) -> None:
    holds_what_it_read("cpu", fuse, training)


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", ["none", "library", "inductor"])
def test_what_is_read_on_a_gpu_is_computed_outside_of_the_capture(fuse: str) -> None:
    holds_what_it_read("cuda", fuse, False)


def test_another_value_that_gives_the_same_number_is_no_change() -> None:
    scale = nn.Linear(2, 1)
    with torch.no_grad():
        scale.weight.fill_(3.0)
    net = Nimble(lambda x: x * int(scale.weight.sum()), Options(fuse="none", tune="off"))
    x = torch.randn(3)
    net.prepare(x)
    with torch.no_grad():
        scale.weight.copy_(torch.tensor([[2.0, 4.0]]))
    assert torch.equal(net(x), x * 6)
    with torch.no_grad():
        scale.weight.fill_(1.0)
    with pytest.raises(InputError, match="reads a tensor without a name on the host"):
        net(x)


class Counting(nn.Module):
    """Counts its runs in a buffer, and reads it."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = self.count.item()
        self.count += 1
        return x * number


def test_a_number_that_the_model_reads_and_writes_is_refused() -> None:
    with pytest.raises(CaptureError, match="buffer count is written by the model, and read on the host"):
        Nimble(Counting(), Options(fuse="none", tune="off")).prepare(torch.randn(3))


@pytest.mark.parametrize("number", [lambda count: int(count) + 1, lambda count: count + 1], ids=["read", "computed"])
def test_a_number_that_the_model_reads_and_replaces_is_refused(number: Any) -> None:
    class Replacing(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = torch.as_tensor(number(self.count))
            return x * self.count.item()

    with pytest.raises(NotStaticError, match="reads count on the host, and replaces count"):
        Nimble(Replacing(), Options(fuse="none", tune="off")).prepare(torch.randn(3))


def test_a_trained_parameter_that_is_read_is_refused() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * self.scale.detach().item()

    with pytest.raises(CaptureError, match="parameter scale is trained, and read on the host"):
        Nimble(Scaling(), Options(fuse="none", tune="off")).prepare(torch.randn(3), training=True)


def test_random_numbers_drawn_into_a_constant_are_no_constant() -> None:
    with pytest.raises(CaptureError, match="gives the host a value"):
        Nimble(lambda x: x * torch.zeros(1).uniform_().item()).prepare(torch.randn(3))
