"""The time of XLA's own operations: products by their FLOPs, all others by their bytes.

    seconds = max(FLOPs / (PRODUCTS * peak), bytes / HBM's rate)

XLA writes cycles of its own (`estimated_cycles`) beside most operations. For TPU v6e these price
matmuls at 45% of the peak, and copies at up to ten times HBM's time; they stand beside this time.
An operation inside a fusion moves no bytes, and an array in VMEM moves none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from maxattn.devices import Device
from maxattn.tools.compile.hlo import PRODUCTS as DOTS
from maxattn.tools.compile.hlo import HloProgram, Instruction, bytes_of
from maxattn.tools.estimate.kernel import core_of

PRODUCTS = 0.8
"""The share of the peak that XLA's matmuls reach: with it two published steps of Wan 14B, on v6e
and v7x, are within 10% (docs/results.md)."""
WORDS = {"products": "matmuls", "layouts": "copies and layouts", "others": "norms and other passes"}
"""The kinds of operations, and what a line calls them."""
Kind = Literal["products", "layouts", "others"]
NOT_COUNTED = 2**63 - 1  # libtpu's cycles for an operation without an estimate
_RUNNING = {"while", "call", "conditional"}  # their operations are counted where they stand
_FREE = _RUNNING | {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "custom-call", "iota",
}  # fmt: skip
ROW_KERNELS = "norm_rotary"
_ENDS = ("-done", "-update")
_LAYOUTS = {
    "parameter", "constant", "copy", "transpose", "reshape", "bitcast", "bitcast-convert",
    "convert", "broadcast", "pad", "slice", "concatenate", "dynamic-slice", "copy-start", "tuple",
}  # fmt: skip
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"\b[a-z]+\d*[a-z0-9]*\[[\d,]*\](?:\{[^}]*\})?")
_VMEM = "S(1)"


class Operation(NamedTuple):
    """One of XLA's operations."""

    # name, what: the instruction's name, and jax's name of the operation
    name: str
    what: str
    kind: Kind  # what it does
    times: int  # how often the program runs it
    seconds: float  # of one run
    # flops, moved: FLOPs of its products, and bytes between it and HBM, of one run
    flops: float
    moved: int
    cycles: int | None  # XLA's own estimate of one run; None if it has none


def operations(program: HloProgram, device: Device) -> Iterator[Operation]:
    """Yield the operations on a core, with the row kernels, which wait for HBM as norms do."""
    core, machine = core_of(device), device.machine
    assert machine is not None, device.kind
    every = [i for body in program.computations.values() for i in body]
    inner = {name for i in every if i.opcode not in _RUNNING for name in i.called}
    for name, body in program.computations.items():
        if name in inner:
            continue
        types = {i.name: i.type for i in body}
        for one in body:
            is_row_kernel = one.name.startswith(ROW_KERNELS)
            if (
                (one.opcode in _FREE and not is_row_kernel)
                or one.opcode.endswith(_ENDS)
                or program.collective(one)
            ):
                continue
            moved = _moved(one, types)
            flops = sum(_products(program, one, types))
            seconds = max(flops / (PRODUCTS * core.peak), moved / machine.hbm)
            found = _CYCLES.search(one.rest)
            cycles = int(found.group(1)) if found else NOT_COUNTED
            yield Operation(
                one.name, _what(program, one), _kind(program, one, flops), program.times(name),
                seconds, flops, moved, cycles if cycles < NOT_COUNTED else None,
            )  # fmt: skip


def _kind(program: HloProgram, one: Instruction, flops: float) -> Kind:
    if flops:
        return "products"
    inside = {i.opcode for i in program.inside(one)} or {one.opcode}
    return "layouts" if inside <= _LAYOUTS else "others"


def _what(program: HloProgram, one: Instruction) -> str:
    """Return jax's name of an operation: of a fusion with a product, that of the product."""
    inside = program.inside(one)
    of_products = [i for i in (*inside, one) if i.opcode in DOTS]
    named = of_products or [one, *inside[::-1]]
    names = (i.attribute(r'op_name="([^"]*)"') for i in named)
    return next(filter(None, names), one.opcode).rpartition("/")[2]


# ---- bytes ---------------------------------------------------------------------------------------


def _moved(one: Instruction, types: dict[str, str]) -> int:
    if one.opcode == "copy-start":  # its type has the copy, the source, and a context
        there, source, *_ = _ARRAY.findall(one.type)
        return in_hbm(there) + in_hbm(source)
    return in_hbm(one.type) + sum(in_hbm(types.get(name, "")) for name in one.operands)


def in_hbm(type_: str) -> int:
    """Count the bytes of the arrays of a type that are not in VMEM."""
    return sum(bytes_of(array) for array in _ARRAY.findall(type_) if _VMEM not in array)


# ---- products ------------------------------------------------------------------------------------


def _products(program: HloProgram, one: Instruction, types: dict[str, str]) -> Iterator[float]:
    if one.opcode in DOTS:
        yield _flops(one, types)
    elif one.opcode not in _RUNNING:
        for name in one.called:
            body = program.computations.get(name, [])
            inner = {i.name: i.type for i in body}
            for each in body:
                yield from _products(program, each, inner)


def _flops(one: Instruction, types: dict[str, str]) -> float:
    """Count a product's FLOPs: twice the sizes of the result and of the contracted axes."""
    out, left, right = (dims(t) for t in (one.type, *(types.get(n, "") for n in one.operands[:2])))
    if one.opcode == "dot":
        axes = one.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
        return 2.0 * prod(out) * prod(left[int(n)] for n in axes.split(",") if n)
    lhs, rhs, made = re.split("_|->", one.attribute(r"dim_labels=([\w>_-]+)"))
    # The kernel's axes: i is contracted, o is in the result, digits are a window's.
    contracted = float(right[rhs.index("i")])
    for place, digit in enumerate(sorted(c for c in rhs if c.isdecimal())):
        sizes = left[lhs.index(digit)], right[rhs.index(digit)], out[made.index(digit)]
        contracted *= _met(_window(one, place), *sizes)
    return 2.0 * prod(out) * contracted


def _window(one: Instruction, place: int) -> dict[str, str]:
    """Read a convolution's window along one axis, such as {"size": "40", "pad": "39_39"}."""
    listed = one.attribute(r"window=\{([^}]*)\}").split()
    return {
        key: each.split("x")[place] for key, _, each in (text.partition("=") for text in listed)
    }


def _met(window: dict[str, str], given: int, size: int, made: int) -> float:
    """Return the mean number of elements of the input that a window meets, without padding.

    TPUs write a batch of matmuls as windows that meet one element each.
    """
    stride, wide, apart = (int(window.get(n, 1)) for n in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(window.get("pad", "0_0").partition("_")[0])
    at = stride * np.arange(made)[:, None] + apart * np.arange(size) - before
    return float(((at >= 0) & (at <= wide * (given - 1)) & (at % wide == 0)).sum()) / made


def dims(type_: str) -> tuple[int, ...]:
    """Return the shape of an array type such as "bf16[2,128]{1,0}"."""
    found = re.search(r"\[([\d,]*)\]", type_)
    return tuple(int(n) for n in found.group(1).split(",") if n) if found else ()
