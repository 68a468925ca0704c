"""The committed dumps, and a small one made by hand."""

from __future__ import annotations

from pathlib import Path

from maxattn.devices import DEVICES
from maxattn.tools.estimate.kernel import KernelDump
from maxattn.tools.estimate.program import Dumps

FOLDER = Path(__file__).parent / "schedules"
FORWARD, BACKWARD = "splash_mha_fwd_residuals.1", "splash_mha_dkv_no_residuals.1"


def texts(chip: str, name: str) -> tuple[str, str]:
    """Return the bundles and the table of a committed dump."""
    return Dumps.of(FOLDER / chip, "0.0.50.1").texts((name,))


def dump(chip: str, name: str, bundles: str | None = None, slots: str | None = None) -> KernelDump:
    """Read a committed dump, with replacements for its texts."""
    own = texts(chip, name)
    given = own[0] if bundles is None else bundles, own[1] if slots is None else slots
    return KernelDump.read(name, *given, DEVICES[f"TPU {chip}"], "0.0.50.1")


PRODUCT = "%9 = vmatmul.mubr.bf16.gmra.mxu0"


def small(products: int = 2, more: str = "") -> tuple[str, str]:
    """Write the dump of a loop of 13 bundles with an edge of two and a body of two.

    Args:
        products: number of matmuls in the body, all on one unit.
        more: another instruction in the loop's second-last bundle.
    """
    window = "[shape: f32[4,8]] /* output window allocation for operator output 0. The window shape"
    rows = (
        f"0 : {{ %s0 = inlined_call_operand.hbm {window} is f32[1,8], while the full shape is"
        " f32[4,8]. */ }",
        "0x1 : { %s1 = smov 0 }",
        "0x2 LB: > { %s9 = sadd.s32 1, %s2 } /* Start region 10 */",
        "0x3 : > { sbr.rel (%p1) target = $region20 }",
        "0x4 : > {}",
        "0x5 : > {}",
        "0x6 PF: > {} /* Start/End empty region 20 */",
        "0x7 : > { %5 = sbr.rel (%p2) target = $region30 }",
        f"0x8 : > {{ {' ;; '.join([PRODUCT] * products)} }}",
        "0x9 : > {}",
        "0xa PF: > {} /* Start/End empty region 30 */",
        "0xb : > { %p3 = scmp.ge.s32.totalorder %s9, 6 /* loop exit test */ " + more + "}",
        "0xc : > { %6 = sbr.rel (!%p3) target = $region10 }",
        "0xd : {}",
    )
    table = "== CAPACTIY:\nMXU, VALU, VLOAD:FILL, VSTORE:SPILL\n    2 4 3 2\n== UTILIZATION:\n"
    return "\n".join(rows), table + "0 1 0 0\n" * 8 + "2 4 3 1\n" + "0 0 0 0\n" * 5


def three_bodies() -> tuple[str, str]:
    """Write the small dump with matmuls in its edge too, and a third body of three bundles."""
    return _more_bodies([1, 0, 0])


def two_forms() -> tuple[str, str]:
    """Write four bodies: two of two bundles, one of three and one of one."""
    return _more_bodies([1, 0, 0], [1])


def _more_bodies(*more: list[int]) -> tuple[str, str]:
    """Write the small dump with matmuls in its edge, and with further bodies.

    Args:
        more: matmuls in each bundle of a further body.
    """
    bundles, slots = small()
    rows = bundles.replace("0x4 : > {}", f"0x4 : > {{ {PRODUCT} }}").split("\n")
    at = 11
    for region, body in enumerate(more, start=4):
        branch = f"sbr.rel (%p{region + 3}) target = $region{region}0"
        code = (branch, *(" ;; ".join([PRODUCT] * n) for n in body), "")
        added = [f" : > {{ {one} }}" for one in code]
        added[-1] += f" /* Start/End empty region {region}0 */"
        rows[at:at] = added
        at += len(added)
        slots += "0 0 0 0\n" * len(added)
    numbered = (f"{i:#x} {row.split(' ', 1)[1]}" for i, row in enumerate(rows))
    return "\n".join(numbered), slots
