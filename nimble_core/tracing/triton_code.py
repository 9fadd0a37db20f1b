"""What the code of a Triton kernel promises: which tensors it reads and writes, and whether it reaches others."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["BOTH", "Role", "kernel_roles", "reaches_elsewhere", "waits_first"]

Role = tuple[bool, bool]
"""Whether a kernel reads a tensor, and whether it writes it."""

BOTH: Role = (True, True)
_ANYWHERE = ("tt.int_to_ptr", "pure = false")
"""What leads to any memory: numbers that are taken for addresses, inline assembly that does more than compute."""
_ONLY_WAITS = re.compile(r'inline_asm "griddepcontrol\.\w+;( //[^;"\\]*)?"')
"""Assembly that waits for other kernels, or lets others be launched."""
_HEAD = re.compile(r"def \w+\(.*\):\n")
_WAIT = "tl.extra.cuda.gdc_wait()"
_NAMED = re.compile(r"\s*\w+(: tl\.constexpr)? = [\w.]+\s*")
"""A line that gives a name to a number or to something that has one: it touches no memory."""


def kernel_roles(names: Sequence[str], mutated: Sequence[str]) -> dict[str, Role]:
    """Return roles of the arguments of a kernel that Inductor wrote, by the way it names them.

    >>> kernel_roles(["in_ptr0", "out_ptr0", "in_out_ptr0", "arg_A", "whatever"], ["in_out_ptr0"])
    {'in_ptr0': (True, False), 'out_ptr0': (False, True), 'in_out_ptr0': (True, True), 'arg_A': (True, False)}
    """
    roles: dict[str, Role] = {}
    for name in names:
        if name in mutated or name.startswith("in_out_ptr"):
            roles[name] = BOTH
        elif name.startswith("out_ptr"):
            roles[name] = (False, True)
        elif name.startswith(("in_ptr", "arg_")):
            roles[name] = (True, False)
    return roles


def reaches_elsewhere(code: str, tensors: int) -> bool:
    r"""Return whether a Triton kernel may reach other memory than that of the tensors it is given.

    Args:
        code: its intermediate code (TTIR); empty if it is not known.
        tensors: how many tensors it is given. Pointers beyond these come out of something else (descriptors, tuples).

    >>> reaches_elsewhere("tt.func public @copy(%x: !tt.ptr<f32>, %out: !tt.ptr<f32>) {", 2)
    False
    >>> waits = 'tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" {constraints = "=r", pure = false}'
    >>> reaches_elsewhere(f"tt.func public @copy(%x: !tt.ptr<f32>) {{\n{waits}", 1)
    False
    >>> reaches_elsewhere("tt.func public @fill(%address: i64) { %out = tt.int_to_ptr %address", 0)
    True
    """
    signature = code.partition("tt.func public")[2].partition("\n")[0]
    pointers = signature.count("!tt.ptr<") + signature.count("tensordesc<")
    lines = (line for line in code.splitlines() if not _ONLY_WAITS.search(line))
    return not signature or pointers > tensors or any(one in line for line in lines for one in _ANYWHERE)


def waits_first(source: str) -> bool:
    r"""Return whether a Triton kernel first waits for the kernels that it may have been launched ahead of.

    >>> waits_first("def kernel(p):\n    xnumel = 8\n    tl.extra.cuda.gdc_wait()\n    x = tl.load(p)")
    True
    >>> waits_first("def kernel(p):\n    x = tl.load(p)\n    tl.extra.cuda.gdc_wait()")
    False
    """
    head = _HEAD.match(source)
    for line in source[head.end() :].splitlines() if head else ():
        if line.strip() == _WAIT:
            return True
        if not _NAMED.fullmatch(line):
            return False
    return False
