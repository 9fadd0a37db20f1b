"""Each eager call belongs to the kernel that does it, and to those that finish a library's work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.compiler.attribution import attributed, unmapped
from nimble_core.ir.program import Access, Call, Origin, Program, Storage, TensorRef
from tests.support.rewrite_models import lifted
from tests.support.strategies import programs

Kernel = tuple[str, tuple[int, ...], int | None, int]
"""Operator, eager calls that the compiler names, storage read, storage written."""

CONV, MM, RELU, COPY = "aten.convolution.default", "aten.addmm.default", "triton_relu", "aten.clone.default"
BACKWARD = "aten.convolution_backward.default"
ATTENTION = "aten._scaled_dot_product_flash_attention.default"


def program_of(kernels: list[Kernel]) -> Program:
    """Make a program of kernels, each on one storage read and one written."""
    refs = [TensorRef(n, 0, (4,), (1,), "float32", 4) for n in range(12)]
    calls = []
    for index, (operator, named, read, written) in enumerate(kernels):
        accesses = (Access(refs[read], write=False),) if read is not None else ()
        origins = tuple(Origin(f"eager{one}") for one in named) or (Origin(operator),)
        calls.append(
            Call(index, operator, (), (*accesses, Access(refs[written], write=True)), origins=origins, eager=named)
        )
    return Program(tuple(calls), (Storage(16, "intermediate"),) * 12, (refs[0],), ())


def eager_chain(operators: list[str]) -> Program:
    """Make eager calls of which each reads what the one before wrote."""
    program = program_of([(one, (), index, index + 1) for index, one in enumerate(operators)])
    return replace(program, calls=tuple(replace(one, origins=(Origin(f"eager{one.index}"),)) for one in program.calls))


@st.composite
def compiled(draw: st.DrawFn) -> Program:
    """Draw a program of kernels and library calls, each with any eager calls to its name."""
    program = draw(programs())
    calls = []
    for call in program.calls:
        named = tuple(sorted(draw(st.sets(st.integers(0, 5), max_size=3))))
        operator = draw(st.sampled_from(["triton_poi_fused_0", MM]))
        origins = tuple(Origin(f"eager{one}") for one in named) or (Origin(operator),)
        calls.append(replace(call, operator=operator, eager=named, origins=origins))
    return replace(program, calls=tuple(calls))


@given(compiled())
def test_any_program(program: Program) -> None:
    """Nothing is lost or made up, and calls are claimed again only by who goes on with them or has nothing else."""
    eager = program_of([("aten.op.default", (), None, 0)] * 6)
    eager = replace(eager, calls=tuple(replace(one, origins=(Origin(f"eager{one.index}"),)) for one in eager.calls))
    found = attributed(program, eager)
    assert {one for call in found.calls for one in call.eager} == {one for call in program.calls for one in call.eager}
    claimed: set[int] = set()
    library: dict[int, set[int]] = {}
    for call, before in zip(found.calls, program.calls, strict=True):
        assert set(call.eager) <= set(before.eager)
        assert list(call.eager) == sorted(set(call.eager))
        assert replace(call, eager=before.eager, origins=before.origins) == before
        assert call.origins == (tuple(Origin(f"eager{one}") for one in call.eager) or (Origin(call.operator),))
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


@pytest.mark.parametrize(
    ("eager", "kernels", "claims"),
    [
        # A bias left out of a convolution is still the convolution's.
        ([CONV, RELU], [(CONV, (0,), None, 1), (RELU, (0, 1), 1, 2)], [(0,), (0, 1)]),
        # What a kernel reads from another kernel is the other's.
        ([RELU] * 3, [(RELU, (0, 1), None, 1), (RELU, (1, 2), 1, 2)], [(0, 1), (2,)]),
        # A library call is not that of who reads it two kernels later.
        (
            [CONV, RELU, RELU],
            [(CONV, (0,), None, 1), (RELU, (0, 1), 1, 2), (RELU, (0, 1, 2), 2, 3)],
            [(0,), (0, 1), (2,)],
        ),
        # One call in two kernels belongs to both.
        ([RELU], [(RELU, (0,), None, 1), (RELU, (0,), 1, 2)], [(0,), (0,)]),
        # What names nothing stands for the calls between its neighbours.
        (
            [RELU] * 5,
            [(RELU, (0,), 0, 1), (ATTENTION, (), 1, 4), (RELU, (4,), 4, 5), (COPY, (), 0, 6)],
            [(0,), (1, 2, 3), (4,), ()],
        ),
        # A change of layout, named after all that reads it, does not do what is still to come.
        (
            [CONV, RELU, CONV, RELU],
            [
                (RELU, (0, 1, 2), 0, 5),
                (CONV, (0,), 5, 6),
                (RELU, (0, 1), 6, 7),
                (CONV, (1, 2), 7, 8),
                (RELU, (2, 3), 8, 4),
            ],
            [(), (0,), (0, 1), (2,), (2, 3)],
        ),
        # But the gradient of a bias is summed before the rest of its call is done.
        (
            [RELU, BACKWARD],
            [(RELU, (0, 1), 0, 1), (BACKWARD, (1,), 1, 2), (BACKWARD, (1,), 1, 3)],
            [(0, 1), (1,), (1,)],
        ),
        # A product is named after all that led to it, another product among it.
        (
            [MM, RELU, MM],
            [("aten.mm.out", (0,), 0, 1), (RELU, (0, 1), 1, 2), (MM, (0, 1, 2), 2, 3)],
            [(0,), (0, 1), (2,)],
        ),
        # A pattern that keeps one name of two: what is left goes with its reader, in all kernels that do it.
        ([RELU] * 3, [(RELU, (1,), 0, 5), (RELU, (1,), 5, 2), (RELU, (2,), 2, 3)], [(0, 1), (0, 1), (2,)]),
    ],
)
def test_who_does_a_call(eager: list[str], kernels: list[Kernel], claims: list[tuple[int, ...]]) -> None:
    found = attributed(program_of(kernels), eager_chain(eager))
    assert [call.eager for call in found.calls] == claims
    for call in found.calls:
        assert call.origins == (tuple(Origin(f"eager{one}") for one in call.eager) or (Origin(call.operator),))
    assert unmapped(found) == claims.count(())


def test_eager_calls_themselves_are_unmapped() -> None:
    one, _ = lifted(lambda x: x + 1, torch.randn(3))
    assert unmapped(one.recording.program) == 1
