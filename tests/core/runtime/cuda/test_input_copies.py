"""Inputs that nodes of the graph copy: the same values from any address, and nothing read that is not the caller's."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_core import Nimble, Options
from nimble_core.runtime.cuda.input_copies import InputCopies, _Source, strides_of
from nimble_core.torch_compat.unchanged import InPython, passes
from nimble_core.utils.errors import DeviceError

WAYS = (InPython, passes())
_agrees = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)(lambda *_: 0)
AGREES = ctypes.cast(_agrees, ctypes.c_void_p).value
ONE_STREAM = Options(fuse="none", policy="single")


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_what_is_alike_has_the_same_bytes(sizes: list[int], seed: int) -> None:
    chance = random.Random(seed)
    dims = list(range(len(sizes)))
    buffer = torch.empty(sizes).permute(*chance.sample(dims, len(dims)))
    values = torch.randn(3 * buffer.numel() + 8, dtype=torch.cfloat)
    values = values.conj().imag if chance.random() < 0.5 else values.real.clone()
    order = chance.sample(dims, len(dims))
    laid_out = values[chance.randrange(4) :: chance.choice([1, 2])][: buffer.numel()]
    other = laid_out.reshape([buffer.shape[dim] for dim in order]).permute(*(order.index(dim) for dim in dims))
    source = (ctypes.c_uint64 * 1)()
    copies = ((0, 0, ctypes.addressof(source)),)
    if all(way.read_from(AGREES, copies, 0, 0, (strides_of(buffer),), [1], [other]) for way in WAYS):
        assert source[0] == other.data_ptr()
        start = other.storage_offset() * other.itemsize
        there = bytes(other.untyped_storage())[start : start + other.nbytes]
        assert there == bytes(buffer.copy_(other).untyped_storage())


class Parameters:
    """Of a node, as the bindings keep them."""

    def __init__(self) -> None:
        self.block = ctypes.create_string_buffer(128)

    def getPtr(self) -> int:
        return ctypes.addressof(self.block)


@pytest.mark.parametrize("failing", ["no", "change", "enable", "interrupt"])
def test_nodes_are_on_only_where_all_are(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in between, ``read`` says True only where each node is on and reads the caller's tensor."""
    on, wrong = {11: True, 12: True}, [False]

    def enable(instance: int, node: int, state: bool) -> int:
        if wrong[0] and node == 12 and failing == "interrupt":
            raise KeyboardInterrupt
        if wrong[0] and node == 12 and failing == "enable":
            return 1
        on[node] = state
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)
    def change(graph: int, node: int, params: int, context: int) -> int:
        return int(wrong[0] and node == 12 and failing == "change")

    at = ctypes.cast(change, ctypes.c_void_p).value
    monkeypatch.setattr("nimble_core.runtime.cuda.input_copies._functions", lambda: (at, enable))
    x, y, held = torch.rand(4), torch.rand(4), [Parameters(), Parameters()]
    copies = InputCopies([torch.empty(4), torch.empty(4)], [(11, held[0]), (12, held[1])], 0)
    assert not copies.read_on([x, y])
    copies.attach(7)
    assert on == {11: False, 12: False}
    assert not copies.read([x, torch.rand(8)[::2]])
    assert on == {11: False, 12: False}
    wrong[0] = True
    if failing in ("enable", "interrupt"):
        with pytest.raises(DeviceError if failing == "enable" else KeyboardInterrupt):
            copies.read([x, y])
    else:
        assert copies.read([x, y]) is (failing == "no")
    assert copies.read_on([x, y]) is (failing == "no")
    wrong[0] = False
    copies.off()
    assert on == {11: False, 12: False}
    assert copies.read([x, y])
    assert on == {11: True, 12: True}
    for held_by, given_tensor in zip(held, (x, y), strict=True):
        assert _Source.from_address(held_by.getPtr()).device == given_tensor.data_ptr()
    assert copies.read_on([y, x])
    assert not copies.read([x, torch.rand(8)[::2]])
    assert on == {11: False, 12: False}


@pytest.mark.gpu
class TestOnAGpu:
    @torch.no_grad()
    def test_any_address_gives_the_same_bits(self) -> None:
        def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 3 + y

        values = torch.randn(1 << 16, device="cuda", dtype=torch.float16)
        net = Nimble(model, ONE_STREAM).prepare(values[:4099], values[:4099])
        assert net.engines[0].executable._copies is not None
        chance = random.Random(0)
        wrong = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(10_000):
            x, y = (values[at : at + 4099] for at in (chance.randrange(60_000), chance.randrange(60_000)))
            wrong += (net(x, y) != model(x, y)).sum()
        assert not wrong

    @torch.no_grad()
    def test_a_replay_reads_the_buffers_and_not_the_last_caller(self) -> None:
        net = Nimble(torch.nn.ReLU(), ONE_STREAM).prepare(torch.zeros(64, device="cuda"))
        run = net.engines[0].executable
        x = torch.rand(64, device="cuda") + 1
        assert torch.equal(net(x), x)
        x.fill_(7)
        run.replay()
        assert not (run.outputs[0] == 7).any()
        run.buffers[0].fill_(5)
        run.replay()
        assert (run.outputs[0] == 5).all()
        assert torch.equal(net(x), x)
        with run.none_ahead():
            assert torch.equal(net(x + 1), x + 1)
            run.replay()
            assert torch.equal(run.outputs[0], x + 1)
        assert torch.equal(net(x + 2), x + 2)

    @torch.no_grad()
    def test_what_no_node_can_copy_is_copied(self) -> None:
        values = torch.randn(16, 8, 8, device="cuda", dtype=torch.cfloat)
        net = Nimble(lambda x: x + 1, ONE_STREAM).prepare(values[0].real.clone())
        wide, negated = values.real.clone(), values.conj().imag
        for x in (wide[1], wide[:8, 2], wide[3].t(), values[4].real, negated[5], negated[6].contiguous(), wide[7]):
            assert torch.equal(net(x), x + 1)

    @torch.no_grad()
    def test_a_result_goes_in_again(self) -> None:
        layer = torch.nn.Linear(32, 32, device="cuda")
        net = Nimble(layer, Options(fuse="none", policy="single", outputs="static")).prepare(
            torch.zeros(4, 32, device="cuda")
        )
        x = expected = torch.rand(4, 32, device="cuda")
        for _ in range(5):
            x, expected = net(x), layer(expected)
            assert torch.equal(x, expected)

    @torch.no_grad()
    def test_an_input_that_is_written_is_the_callers(self) -> None:
        net = Nimble(lambda x: x.add_(1).sum(), ONE_STREAM).prepare(torch.zeros(8, device="cuda"))
        x = torch.arange(8.0, device="cuda")
        assert net(x) == 36
        assert torch.equal(x, torch.arange(1.0, 9.0, device="cuda"))

    @torch.no_grad()
    def test_many_inputs_are_copied_by_one_launch(self) -> None:
        inputs = [torch.rand(4, device="cuda") for _ in range(5)]
        net = Nimble(lambda *given: sum(given), ONE_STREAM).prepare(*inputs)
        assert net.engines[0].executable._copies is None
        assert torch.equal(net(*inputs), sum(inputs))
