"""Write what TPU kernels take by the estimates that ship, as a Markdown table:

python -m docs.building.tpu_estimates
"""

from __future__ import annotations

from collections.abc import Iterator

from maxattn.block_sizes.estimated.choose import EstimatedSizes, estimated_sizes, in_ms
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.devices import DEVICES
from maxattn.kernels.auto.tpu import seconds_taken, tiled_kernels
from maxattn.target import Target
from maxattn.tools.model_shapes import SHAPES

CALLS = "wan-14b-720p", "sdxl-64", "swba-1560x7"
KERNELS: tuple[KernelKind, ...] = ("tpu_flash", "tokamax_flash", "flash")
HEADS = "chip", "call", "pass", *KERNELS, "TFLOP/s of tpu_flash", "`auto` takes"
PRODUCTS = {False: 2, True: 7}
"""Of a query with a key: a forward's, and those of a backward in one pass beside them."""


def table() -> str:
    """Write a row for each chip, call and pass; "online" is of scores that may be large."""
    rows = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for kind in (name for name, device in DEVICES.items() if device.core):
        for name in CALLS:
            rows += _rows(kind, name)
    return "\n".join(rows)


def _rows(kind: str, name: str) -> Iterator[str]:
    target, call = Target.named(kind), SHAPES[name].call()
    (chosen, *_), _ = tiled_kernels(call, target)
    for training in (False, True):
        every = {kernel: estimated_sizes(kernel, call, target, training) for kernel in KERNELS}
        what = "forward and backward" if training else "forward"
        takes = chosen if training else chosen.split("/")[0]
        taken = seconds_taken(takes, call, target, training)
        paired = f", {in_ms(taken)}" if taken and "/" in takes else ""
        rate = _rate(every["tpu_flash"], call, training)
        cells = *map(_time, every.values()), rate, f"{takes}{paired}"
        yield f"| {kind.removeprefix('TPU ')} | {name} | {what} | {' | '.join(cells)} |"


def _time(found: EstimatedSizes | None) -> str:
    if found is None:
        return ""
    online = f"; online {in_ms(found.online)}" if found.online else ""
    return f"{in_ms(found.seconds)}{online}"


def _rate(found: EstimatedSizes | None, call: Call, training: bool) -> str:
    """Write the rate of the products over pairs that the mask allows, slow end first."""
    if found is None:
        return ""
    pairs = call.batch * call.heads * call.mask.allowed_pairs(call.q_len, call.kv_len)
    flops = 2 * PRODUCTS[training] * pairs * call.head_dim
    fast, slow = (f"{flops / seconds / 1e12:.0f}" for seconds in found.seconds)
    return slow if slow == fast else f"{slow} to {fast}"


if __name__ == "__main__":
    print(table())
