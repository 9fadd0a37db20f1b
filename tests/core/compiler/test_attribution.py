"""Each eager call belongs to the kernel that does it, and to those that finish a library's work."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.compiler.attribution import attributed, unmapped
from nimble_core.ir.program import Access, Call, Origin, Program, Storage, TensorRef
from tests.support.rewrite_models import lifted
from tests.support.strategies import programs

EAGER_CALLS = 6


def eager_program() -> Program:
    calls = tuple(
        Call(index, f"aten.op{index}.default", (), (), origins=(Origin(f"aten.op{index}.default", f"m{index}"),))
        for index in range(EAGER_CALLS)
    )
    return Program(calls=calls, storages=(), inputs=(), outputs=())


@st.composite
def compiled(draw: st.DrawFn) -> Program:
    """A Program of kernels and library calls, each with any eager calls to its name."""
    program = draw(programs())
    calls = []
    for call in program.calls:
        named = tuple(sorted(draw(st.sets(st.integers(0, EAGER_CALLS - 1), max_size=3))))
        operator = draw(st.sampled_from(["triton_poi_fused_0", "aten.addmm.default"]))
        origins = tuple(Origin(f"aten.op{index}.default", f"m{index}") for index in named) or (Origin(operator),)
        calls.append(replace(call, operator=operator, eager=named, origins=origins))
    return replace(program, calls=tuple(calls))


@given(compiled())
def test_nothing_is_lost_and_nothing_is_made_up(program: Program) -> None:
    eager = eager_program()
    found = attributed(program, eager)
    assert {one for call in found.calls for one in call.eager} == {one for call in program.calls for one in call.eager}
    for call, before in zip(found.calls, program.calls, strict=True):
        assert set(call.eager) <= set(before.eager)
        assert bool(call.eager) == bool(before.eager)
        assert list(call.eager) == sorted(set(call.eager))
        assert replace(call, eager=before.eager, origins=before.origins) == before
        wanted = tuple(origin for index in call.eager for origin in eager.calls[index].origins)
        assert call.origins == (wanted or (Origin(call.operator),))


@given(compiled())
def test_a_call_is_claimed_again_only_by_who_goes_on_with_it_or_has_nothing_else(program: Program) -> None:
    found = attributed(program, eager_program())
    claimed: set[int] = set()
    library: dict[int, set[int]] = {}
    for call, before in zip(found.calls, program.calls, strict=True):
        kernel = "." not in call.operator
        goes_on = set().union(*(library.get(ref.storage, set()) for ref in call.reads)) if kernel else set()
        if set(before.eager) - claimed:
            assert set(call.eager) - claimed == set(before.eager) - claimed  # the first that names it has it
            assert set(call.eager) & claimed <= goes_on
        elif call.eager and set(before.eager) & goes_on:
            assert set(call.eager) <= goes_on
        else:
            assert call.eager == before.eager
        claimed |= set(call.eager)
        for ref in call.writes:
            library[ref.storage] = set() if kernel else set(call.eager)


def program_of(*kernels: tuple[str, tuple[int, ...], int | None, int]) -> Program:
    """Kernels as (operator, eager calls, storage read, storage written)."""
    refs = [TensorRef(n, 0, (1,), (1,), "float32", 4) for n in range(6)]
    calls = []
    for index, (operator, named, read, written) in enumerate(kernels):
        accesses = (Access(refs[read], False),) if read is not None else ()
        calls.append(Call(index, operator, (), (*accesses, Access(refs[written], True)), eager=named))
    return Program(calls=tuple(calls), storages=(Storage(4, "intermediate"),) * 6, inputs=(), outputs=())


def claims(program: Program) -> list[tuple[int, ...]]:
    return [call.eager for call in attributed(program, eager_program()).calls]


def test_a_bias_left_out_of_a_convolution_is_still_its() -> None:
    program = program_of(("aten.convolution.default", (0,), None, 0), ("triton_relu", (0, 1), 0, 1))
    assert claims(program) == [(0,), (0, 1)]


def test_what_a_kernel_reads_from_another_kernel_is_the_others() -> None:
    program = program_of(("triton_a", (0, 1), None, 0), ("triton_b", (1, 2), 0, 1))
    assert claims(program) == [(0, 1), (2,)]


def test_a_library_call_is_not_that_of_who_reads_it_two_kernels_later() -> None:
    program = program_of(
        ("aten.convolution.default", (0,), None, 0), ("triton_a", (0, 1), 0, 1), ("triton_b", (0, 1, 2), 1, 2)
    )
    assert claims(program) == [(0,), (0, 1), (2,)]


def test_one_call_in_two_kernels_belongs_to_both() -> None:
    assert claims(program_of(("triton_a", (0,), None, 0), ("triton_b", (0,), 0, 1))) == [(0,), (0,)]


def test_what_nobody_explains_is_counted() -> None:
    program = program_of(("triton_a", (0,), None, 0), ("aten.clone.default", (), 0, 1), ("triton_b", (), 0, 1))
    assert unmapped(program) == 2
    one, _ = lifted(lambda x: x + 1, torch.randn(3))
    assert unmapped(one.recording.program) == 1


def test_what_names_nothing_stands_for_the_calls_between_its_neighbours() -> None:
    """0 → 1 → 2 → 3 → 4 beside 5: kernels for 0 and 4, one between them that says nothing, and one for 5."""

    def ref(storage: int) -> TensorRef:
        return TensorRef(storage, 0, (4,), (1,), "float32", 4)

    def chain(index: int, read: int, write: int, operator: str, calls: tuple[int, ...] = ()) -> Call:
        accesses = (Access(ref(read), write=False), Access(ref(write), write=True))
        return Call(index, operator, (), accesses, origins=(Origin(operator, f"m{index}"),), eager=calls)

    storages = tuple(Storage(16, "intermediate") for _ in range(7))
    eager_calls = (*(chain(n, n, n + 1, f"aten.op{n}.default") for n in range(5)), chain(5, 0, 6, "aten.op5.default"))
    eager = Program(eager_calls, storages, (ref(0),), (ref(5), ref(6)))
    kernels = (
        chain(0, 0, 1, "triton_poi_0", (0,)),
        chain(1, 1, 4, "aten._scaled_dot_product_flash_attention.default"),
        chain(2, 4, 5, "triton_poi_1", (4,)),
        chain(3, 0, 6, "aten.clone.default"),
    )
    found = attributed(Program(kernels, storages, (ref(0),), (ref(5), ref(6))), eager)
    assert [call.eager for call in found.calls] == [(0,), (1, 2, 3), (4,), ()]
    assert [origin.operator for origin in found.calls[1].origins] == [f"aten.op{n}.default" for n in (1, 2, 3)]
    assert unmapped(found) == 1


def test_a_change_of_layout_does_not_do_what_is_still_to_come() -> None:
    """A kernel that only turns weights around, named after all that reads them, before the first convolution."""

    def ref(storage: int) -> TensorRef:
        return TensorRef(storage, 0, (4,), (1,), "float32", 4)

    def step(index: int, operator: str, read: int, write: int, calls: tuple[int, ...] = ()) -> Call:
        accesses = (Access(ref(read), write=False), Access(ref(write), write=True))
        return Call(index, operator, (), accesses, origins=(Origin(operator),), eager=calls)

    names = ("aten.convolution.default", "aten.relu.default", "aten.convolution.default", "aten.relu.default")
    storages = tuple(Storage(16, "intermediate") for _ in range(9))
    eager = Program(tuple(step(n, name, n, n + 1) for n, name in enumerate(names)), storages, (ref(0),), (ref(4),))
    kernels = (
        step(0, "triton_poi_0", 0, 5, (0, 1, 2)),
        step(1, "aten.convolution.default", 5, 6, (0,)),
        step(2, "triton_poi_1", 6, 7, (0, 1)),
        step(3, "aten.convolution.default", 7, 8, (1, 2)),
        step(4, "triton_poi_2", 8, 4, (2, 3)),
    )
    found = attributed(Program(kernels, storages, (ref(0),), (ref(4),)), eager)
    assert [call.eager for call in found.calls] == [(), (0,), (0, 1), (2,), (2, 3)]
