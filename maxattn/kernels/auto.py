"""Which kernel `auto` tries first. Measured where it says so, a stated rule elsewhere."""

from __future__ import annotations

from maxattn.call import Call
from maxattn.target import Target

# Scores up to this many entries (B N T S of one device) are faster dense than in chunks. Measured on 2 CPU cores.
DENSE_SCORES = 4_000_000


def order(call: Call, target: Target) -> tuple[tuple[str, ...], str]:
    """Return the kernels to try in order, and why: the reason is printed in the plan.

    Args:
        call: the call that one device computes.
        target: the machine.
    """
    scores = call.batch * call.heads * call.q_len * call.kv_len
    size, limit = f"{scores / 1e6:,.3g} million scores", f"{DENSE_SCORES / 1e6:.3g} million"
    if scores >= 1e9:
        size = f"{scores / 1e6:,.0f} million scores"
    measured = "measured on a CPU" if target.platform == "cpu" else "a rule, not measured on this machine"
    if scores <= DENSE_SCORES:
        return ("dot_product", "memory_efficient"), f"dense, since {size} <= {limit} a device ({measured})"
    return ("memory_efficient", "dot_product"), f"blockwise, since {size} > {limit} a device ({measured})"
