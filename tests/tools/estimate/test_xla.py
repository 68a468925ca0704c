"""The time of XLA's operations: matmuls by FLOPs, the rest by bytes to and from HBM."""

from __future__ import annotations

import pytest

from maxattn.devices import DEVICES
from maxattn.tools.compile.hlo import HloProgram
from maxattn.tools.estimate.xla import PRODUCTS, Operation, operations

V6E = DEVICES["TPU v6e"]
PEAK, HBM = 918e12, 1.64e12
PROGRAM = """HloModule jit_f

ENTRY %main (x: bf16[64,32], y: bf16[32,16]) -> bf16[64,16] {{
  %x = bf16[64,32]{{1,0}} parameter(0)
  %y = bf16[32,16]{{1,0:T(8,128)(2,1)S(1)}} parameter(1)
  %z = bf16[8,64,32]{{2,1,0}} parameter(2)
  %w = bf16[8,16,32]{{2,1,0}} parameter(3)
  %k = bf16[3,16,32]{{2,1,0}} parameter(5)
  %one = bf16[64,1,32]{{2,1,0}} parameter(4)
  {line}
}}
"""


def read(line: str) -> Operation:
    (found,) = operations(HloProgram.read(PROGRAM.format(line=line)), V6E)
    return found


OUT = "ROOT %p = bf16[64,16]{1,0}"
MATMUL = 2 * 64 * 32 * 16
BATCH = "window={size=8 stride=7 pad=0_0 lhs_dilate=8}"


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        (f"{OUT} dot(%x, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}", MATMUL),
        (f"{OUT} convolution(%x, %y), dim_labels=bf_io->bf", MATMUL),
        # A batch of eight, written as a window that meets one element each.
        (
            f"ROOT %p = bf16[8,64,16]{{2,1,0}} convolution(%z, %w), {BATCH}, "
            "dim_labels=0bf_0oi->0bf",
            8 * MATMUL,
        ),
        # Eight heads, each with the only element of the input.
        (
            "ROOT %p = bf16[64,8,16]{2,1,0} convolution(%one, %w), "
            "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_0oi->b0f",
            8 * MATMUL,
        ),
        # A window of three with padding: 8 + 7 + 7 of 24 meet an element.
        (
            "ROOT %p = bf16[64,8,16]{2,1,0} convolution(%z, %k), window={size=3 pad=1_1}, "
            "dim_labels=0bf_0oi->b0f",
            2 * 64 * 16 * 32 * 22,
        ),
    ],
)
def test_products_count_what_is_contracted(line: str, flops: int) -> None:
    found = read(line)
    assert (found.kind, found.flops) == ("products", flops)
    assert found.seconds >= flops / (PRODUCTS * 1.01 * PEAK)


def test_an_array_in_vmem_moves_no_bytes() -> None:
    found = read("ROOT %c = bf16[32,16]{1,0} copy(%y)")
    assert (found.kind, found.moved) == ("layouts", 2 * 32 * 16)
    assert found.seconds == pytest.approx(found.moved / HBM)


def test_an_asynchronous_copy_counts_once() -> None:
    line = "%s = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]) copy-start(%x)\n  ROOT %d = "
    assert read(line + "bf16[64,32]{1,0:S(1)} copy-done(%s)").moved == 2 * 64 * 32


def test_jaxs_name_stands_beside_the_time() -> None:
    line = 'ROOT %c = bf16[64,32]{1,0} multiply(%x, %x), metadata={op_name="jit(f)/block/mul"}'
    assert (read(line).what, read(line).kind) == ("mul", "others")


def test_a_kernel_of_norm_and_rotary_embedding_waits_for_hbm() -> None:
    call = 'custom-call(%x), custom_call_target="tpu_custom_call"'
    found = read(f"ROOT %norm_rotary_fwd.1 = bf16[64,32]{{1,0}} {call}")
    assert (found.kind, found.moved) == ("others", 2 * 2 * 64 * 32)
