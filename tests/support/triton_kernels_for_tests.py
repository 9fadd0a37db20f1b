"""Triton kernels launched directly, which no dispatch mode sees. Triton needs kernels in a file of their own."""

import triton
import triton.language as tl


@triton.jit
def double(source, target, count, BLOCK: tl.constexpr):
    """``target = 2 * source``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, 2 * tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def add_in_place(target, source, count, BLOCK: tl.constexpr):
    """``target += source``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(target + at, tl.load(target + at, mask=inside) + tl.load(source + at, mask=inside), mask=inside)


@triton.jit
def double_to(source, address, count, BLOCK: tl.constexpr):
    """``2 * source`` to where the number ``address`` says."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = address.to(tl.pointer_type(tl.float32))
    tl.store(target + at, 2 * tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def double_through(source, table, count, BLOCK: tl.constexpr):
    """``2 * source`` to where the number in ``table`` says."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(target + at, 2 * tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def double_of_pair(pair, count, BLOCK: tl.constexpr):
    """``pair[1] = 2 * pair[0]``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pair[1] + at, 2 * tl.load(pair[0] + at, mask=at < count), mask=at < count)


@triton.jit
def add_what_was_there(source, before, target, count, BLOCK: tl.constexpr):
    """``target = source + before``; ``before`` is read while what was launched before this kernel may still run."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    early = tl.load(before + at, mask=inside)
    tl.extra.cuda.gdc_wait()
    tl.store(target + at, tl.load(source + at, mask=inside) + early, mask=inside)


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (64, 128)], key=["count"])
@triton.jit
def triple(source, target, count, BLOCK: tl.constexpr):
    """``target = 3 * source``, in blocks of the size that is fastest."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, 3 * tl.load(source + at, mask=at < count), mask=at < count)
